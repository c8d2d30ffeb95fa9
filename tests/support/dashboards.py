"""The dashboards of `monitoring/`, a row for each panel. `tests.support.monitoring` writes the files."""

from typing import Any, Final, NamedTuple

from tests.support.alert_rules import EVICTED

SCHEMA_VERSION: Final = 39
"""Grafana 10.4 and later."""
WIDTH: Final = 24


class Query(NamedTuple):
    expr: str
    legend: str = ""


class Panel(NamedTuple):
    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 12
    height: int = 8
    description: str = ""


class Dashboard(NamedTuple):
    uid: str
    title: str
    description: str
    per_node: bool
    """It has the variable `node`."""
    panels: tuple[Panel, ...]


def or_zero(expr: str) -> str:
    """A counter that nothing has happened for yet has no series: show 0 instead of an empty panel."""
    return f"({expr}) or vector(0)"


def increased(counter: str, window: str = "$__rate_interval") -> str:
    """How much the counter grew within the window, also if it began in it: `increase` does not see the step from no
    series to 1. Only where the agent was scraped before: after a gap the whole count would be taken for new."""
    begun = f"({counter} unless {counter} offset {window})"
    return f"({begun} and on (node, instance) nodeagent_build_info offset {window}) or increase({counter}[{window}])"


_N: Final = '{node="$node"}'

NODE: Final = Dashboard(
    "nodeagent-node",
    "nodeagent / Node",
    "What nodeagent measures, decides and does on one node.",
    True,
    (
        Panel(
            "State",
            (Query(f"max by (signal, state) (nodeagent_signal_state{_N} == 1)", "{{signal}}: {{state}}"),),
            kind="stat",
            width=16,
            height=4,
            description="The state of each signal: ok, soft, hard or unknown.",
        ),
        Panel(
            "Enforcing, last sync",
            (
                Query(f"nodeagent_enforcing{_N}", "enforcing (0: dry run)"),
                Query(f"nodeagent_sync_age_seconds{_N}", "seconds since the last sync"),
            ),
            kind="stat",
            width=8,
            height=4,
        ),
        Panel(
            "Available and thresholds, bytes",
            (
                Query(f"nodeagent_signal_available_bytes{_N}", "{{signal}}"),
                Query(f"nodeagent_threshold_bytes{_N}", "{{signal}} {{tier}}"),
            ),
            unit="bytes",
            description="A signal below a threshold meets it; soft thresholds act after their grace period.",
        ),
        Panel(
            "Both figures of memory",
            (Query(f"nodeagent_memory_figure_bytes{_N}", "{{signal}} by {{model}}"),),
            unit="bytes",
            description="The kubelet's working-set figure and the kernel's MemAvailable; only the first low: cache.",
        ),
        Panel(
            "Headroom above the thresholds, bytes",
            (Query(f"nodeagent_threshold_headroom_bytes{_N}", "{{signal}} {{tier}}"),),
            unit="bytes",
        ),
        Panel(
            "Headroom above the thresholds, inodes and PIDs",
            (
                Query(f"nodeagent_threshold_headroom_inodes{_N}", "{{signal}} {{tier}}"),
                Query(f"nodeagent_threshold_headroom_pids{_N}", "{{signal}} {{tier}}"),
            ),
        ),
        Panel(
            "Time met",
            (Query(f"nodeagent_threshold_met_seconds{_N}", "{{signal}} {{tier}}"),),
            unit="s",
            description="How long each threshold has been met.",
        ),
        Panel(
            "Stalled by pressure (PSI), share of time",
            (
                Query(
                    'rate(nodeagent_pressure_stalled_seconds_total{node="$node"}[$__rate_interval])',
                    "{{resource}} {{kind}} {{scope}}",
                ),
            ),
            unit="percentunit",
        ),
        Panel(
            "Evictions by outcome",
            (
                Query(
                    or_zero(f"sum by (outcome, signal) ({increased(f'nodeagent_evictions_total{_N}')})"),
                    "{{outcome}} {{signal}}",
                ),
            ),
        ),
        Panel(
            "Refusals by code",
            (
                Query(
                    or_zero(f"sum by (code) ({increased(f'nodeagent_refusals_total{_N}')})"),
                    "{{code}}",
                ),
            ),
            description="Why no pod, or fewer pods, was evicted: docs/reasons.md.",
        ),
        Panel(
            "Relief of memory: predicted and measured",
            (
                Query(or_zero(f"sum(nodeagent_relief_predicted_bytes_total{_N})"), "predicted"),
                Query(or_zero(f"sum(nodeagent_relief_measured_bytes_total{_N})"), "measured"),
            ),
            unit="bytes",
        ),
        Panel(
            "Conditions",
            (
                Query('nodeagent_condition_wanted{node="$node", status="True"}', "{{condition}} wanted"),
                Query(f"nodeagent_condition_asserted{_N}", "{{condition}} on the Node"),
                Query(f"nodeagent_taint_present{_N}", "{{condition}} taint"),
            ),
        ),
        Panel(
            "Pods that cannot be evicted now, by reason",
            (Query(or_zero(f"nodeagent_pods_refused{_N}"), "{{code}}"),),
        ),
        Panel(
            "Pods with the most on disk",
            (Query(f"nodeagent_pod_disk_bytes{_N}", "{{namespace}}/{{pod}}"),),
            unit="bytes",
            description="Needs metrics.perPod.top. Pods are measured only while a disk is near a threshold.",
        ),
        Panel(
            "Pods furthest above their memory request",
            (Query(f"nodeagent_pod_memory_above_request_bytes{_N}", "{{namespace}}/{{pod}}"),),
            unit="bytes",
            description="Needs metrics.perPod.top. Negative: below the request.",
        ),
        Panel(
            "OOM kills and lost races",
            (
                Query(or_zero(f"sum by (cause) (nodeagent_oom_kills_total{_N})"), "kills: {{cause}}"),
                Query(or_zero(f"sum by (loss) (nodeagent_lost_races_total{_N})"), "lost: {{loss}}"),
            ),
        ),
        Panel(
            "Stages of a sync, 99th percentile",
            (
                Query(
                    "histogram_quantile(0.99, sum by (stage, le) (rate(nodeagent_stage_duration_seconds_bucket"
                    '{node="$node"}[$__rate_interval])))',
                    "{{stage}}",
                ),
            ),
            unit="s",
        ),
        Panel(
            "Cost of the agent",
            (
                Query('rate(process_cpu_seconds_total{node="$node"}[$__rate_interval])', "share of a core"),
                Query(f"process_resident_memory_bytes{_N} / 1048576", "MiB resident"),
            ),
        ),
    ),
)

FLEET: Final = Dashboard(
    "nodeagent-fleet",
    "nodeagent / Fleet",
    "Evictions, headroom, contested conditions, lost races and latency of all nodes.",
    False,
    (
        Panel("Agents", (Query("count(nodeagent_build_info)", "agents"),), kind="stat", width=4, height=4),
        Panel("Enforcing", (Query("sum(nodeagent_enforcing)", "enforcing"),), kind="stat", width=4, height=4),
        Panel(
            "Nodes under pressure",
            (Query('count(max by (node) (nodeagent_signal_state{state=~"soft|hard"}) == 1) or vector(0)', "nodes"),),
            kind="stat",
            width=4,
            height=4,
        ),
        Panel(
            "Evicted in the range",
            (
                Query(
                    or_zero(f"sum(increase(nodeagent_evictions_total{{{EVICTED}}}[$__range]))"),
                    "pods",
                ),
            ),
            kind="stat",
            width=4,
            height=4,
        ),
        Panel(
            "Races lost in the range",
            (Query(or_zero("sum(increase(nodeagent_lost_races_total[$__range]))"), "OOM kills first"),),
            kind="stat",
            width=4,
            height=4,
        ),
        Panel(
            "Versions",
            (Query("count by (version) (nodeagent_build_info)", "{{version}}"),),
            kind="stat",
            width=4,
            height=4,
        ),
        Panel(
            "Evictions by signal and tier",
            (
                Query(
                    or_zero(
                        f"sum by (signal, tier) (increase(nodeagent_evictions_total{{{EVICTED}}}[$__rate_interval]))"
                    ),
                    "{{signal}} {{tier}}",
                ),
            ),
        ),
        Panel(
            "Outcomes of evictions",
            (
                Query(
                    or_zero(f"sum by (outcome) ({increased('nodeagent_evictions_total')})"),
                    "{{outcome}}",
                ),
            ),
        ),
        Panel(
            "Headroom of memory by node",
            (
                Query(
                    'min by (node) (nodeagent_threshold_headroom_bytes{signal=~".*[mM]emory.available", tier="hard"})',
                    "{{node}}",
                ),
            ),
            unit="bytes",
            kind="heatmap",
            description="Available amount above the hard threshold; negative: below it.",
        ),
        Panel(
            "Nodes with the least headroom, share of the capacity",
            (
                Query(
                    "bottomk(10, min by (node, signal) (nodeagent_threshold_headroom_bytes"
                    " / on (node, instance, signal) group_left nodeagent_signal_capacity_bytes))",
                    "{{node}} {{signal}}",
                ),
            ),
            unit="percentunit",
        ),
        Panel(
            "Refusals by code",
            (
                Query(
                    or_zero(f"sum by (code) ({increased('nodeagent_refusals_total')})"),
                    "{{code}}",
                ),
            ),
        ),
        Panel(
            "Contested conditions: share of the wanted time in which they were True",
            (
                Query(
                    "min by (node, condition) (nodeagent_condition_true_seconds_total"
                    " / (nodeagent_condition_wanted_seconds_total > 0)) or vector(1)",
                    "{{node}} {{condition}}",
                ),
            ),
            unit="percentunit",
        ),
        Panel(
            "Races lost, by reason",
            (Query(or_zero("sum by (loss) (nodeagent_lost_races_total)"), "{{loss}}"),),
        ),
        Panel(
            "From decision to the API server's answer",
            (
                Query(
                    "histogram_quantile(0.5, sum by (le) (rate(nodeagent_stage_duration_seconds_bucket"
                    '{stage="decision-to-outcome"}[$__rate_interval]))) > 0 or vector(0)',
                    "median",
                ),
                Query(
                    "histogram_quantile(0.99, sum by (le) (rate(nodeagent_stage_duration_seconds_bucket"
                    '{stage="decision-to-outcome"}[$__rate_interval]))) > 0 or vector(0)',
                    "99th percentile",
                ),
            ),
            unit="s",
        ),
        Panel(
            "Late starts of a sync, 99th percentile by node",
            (
                Query(
                    "topk(10, histogram_quantile(0.99, sum by (node, le) (rate(nodeagent_stage_duration_seconds_bucket"
                    '{stage="start-delay"}[$__rate_interval]))))',
                    "{{node}}",
                ),
            ),
            unit="s",
        ),
        Panel(
            "Memory of the agents",
            (
                Query('max(process_resident_memory_bytes{job=~".*nodeagent.*"})', "largest"),
                Query('avg(process_resident_memory_bytes{job=~".*nodeagent.*"})', "mean"),
            ),
            unit="bytes",
        ),
    ),
)


def to_json(dashboard: Dashboard) -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    panels, x, y, row_height = [], 0, 0, 0
    for number, panel in enumerate(dashboard.panels, start=1):
        if x + panel.width > WIDTH:
            x, y, row_height = 0, y + row_height, 0
        panels.append(_panel(panel, number, x, y))
        x, row_height = x + panel.width, max(row_height, panel.height)
    variables: list[dict[str, Any]] = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
    ]
    if dashboard.per_node:
        variables.append(
            {
                "name": "node",
                "type": "query",
                "label": "Node",
                "datasource": _SOURCE,
                "query": "label_values(nodeagent_build_info, node)",
                "refresh": 2,
            }
        )
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["nodeagent"],
        "schemaVersion": SCHEMA_VERSION,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "10s",
        "templating": {"list": variables},
        "panels": panels,
    }


_SOURCE: Final[Any] = {"type": "prometheus", "uid": "${datasource}"}


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": _SOURCE, "expr": query.expr, "legendFormat": query.legend}
            for place, query in enumerate(panel.queries)
        ],
    }
