"""The operator pack in `monitoring/`: generated files are current, and each alert fires on its fault and only there."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from nodeagent.model import OutcomeKind, RefusalCode
from nodeagent.telemetry.metric_families import FAMILIES
from tests.support import dashboards, monitoring
from tests.support.alert_rules import ALERTS, Alert
from tests.support.paths import REPOSITORY

PACK = REPOSITORY / "monitoring"
NODE = 'node="n1", instance="n1:9655", job="nodeagent"'
_REFUSALS = f"nodeagent_refusals_total{{{NODE}, code="
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: prometheus)")

HEALTHY = (
    (f'nodeagent_build_info{{{NODE}, version="0.1.0"}}', "1x700"),
    (f"up{{{NODE}}}", "1x700"),
    (f"nodeagent_sync_age_seconds{{{NODE}}}", "5x700"),
    (f"nodeagent_sample_age_seconds{{{NODE}}}", "5x700"),
    (f"nodeagent_pods_view_age_seconds{{{NODE}}}", "1x700"),
    (f'nodeagent_signal_state{{{NODE}, signal="memory.available", state="unknown"}}', "0x700"),
    (f'nodeagent_threshold_met{{{NODE}, signal="memory.available", tier="hard"}}', "0x700"),
    (f"nodeagent_config_last_reload_successful{{{NODE}}}", "1x700"),
    (f"nodeagent_enforcing{{{NODE}}}", "1x700"),
    (f'nodeagent_signal_time_to_exhaustion_seconds{{{NODE}, signal="memory.available"}}', "5000x700"),
    (f'nodeagent_signal_trend_confidence_ratio{{{NODE}, signal="memory.available"}}', "0.9x700"),
    (f'nodeagent_evictions_total{{{NODE}, outcome="accepted"}}', "0x60 1x640"),
    (f'nodeagent_condition_true_seconds_total{{{NODE}, condition="MemoryPressure"}}', "0+60x700"),
    (f'nodeagent_condition_wanted_seconds_total{{{NODE}, condition="MemoryPressure"}}', "0+60x700"),
    (f"process_resident_memory_bytes{{{NODE}}}", "45000000x700"),
    (f"process_cpu_seconds_total{{{NODE}}}", "0+0.3x700"),
    (f"process_start_time_seconds{{{NODE}}}", "0x700"),
    (_REFUSALS + '"rate-limit-resize"}', "0+30x700"),
)
"""A node that works, one sample a minute; memory limits of its pods are not raised."""
FAULTS: dict[str, tuple[tuple[str, str], ...]] = {
    "NodeAgentMissing": ((HEALTHY[0][0], "_x700"),),
    "NodeAgentDown": ((f"up{{{NODE}}}", "1x10 0x690"),),
    "NodeAgentNotSyncing": ((f"nodeagent_sync_age_seconds{{{NODE}}}", "31+60x700"),),
    "NodeAgentBlind": ((f"nodeagent_pods_view_age_seconds{{{NODE}}}", "121+60x700"),),
    "NodeAgentSignalUnknown": ((HEALTHY[5][0], "1x700"),),
    "NodeAgentWorkerStuck": ((f'nodeagent_workers_stuck{{{NODE}, worker="walk"}}', "1x700"),),
    "NodeAgentStateNotSaved": ((f'nodeagent_failures_total{{{NODE}, what="state-save"}}', "_x57 1x640"),),
    "NodeAgentConfigRejected": ((f"nodeagent_config_last_reload_successful{{{NODE}}}", "0x700"),),
    "NodeAgentLostRace": ((f'nodeagent_lost_races_total{{{NODE}, loss="not-met"}}', "_x55 1x640"),),
    "NodeAgentExhaustionPredicted": ((HEALTHY[9][0], "5000x50 100x640"),),
    "NodeAgentPressureWithoutVictim": ((_REFUSALS + '"futile"}', "0x50 0+30x640"),),
    "NodeAgentRateLimited": ((_REFUSALS + '"rate-limit-node"}', "0x40 0+30x640"),),
    "NodeAgentBlockedByDisruptionBudgets": (
        (f'nodeagent_evictions_total{{{NODE}, outcome="blocked-by-pdb"}}', "_x50 4x650"),
    ),
    "NodeAgentMissingRight": ((f'nodeagent_evictions_total{{{NODE}, outcome="forbidden"}}', "_x55 1x645"),),
    "NodeAgentReliefShortfall": (
        (f'nodeagent_relief_shortfalls_total{{{NODE}, signal="memory.available"}}', "_x50 1x640"),
    ),
    "NodeAgentConditionContested": (
        (f'nodeagent_condition_true_seconds_total{{{NODE}, condition="MemoryPressure"}}', "0+24x700"),
    ),
    "NodeAgentManyEvictions": ((f'nodeagent_evictions_total{{{NODE}, outcome="accepted"}}', "0x50 0+2x640"),),
    "NodeAgentCostsTooMuch": ((f"process_resident_memory_bytes{{{NODE}}}", "120000000x700"),),
}
"""What is different where the alert fires, at minute 60."""
SLOW = {"NodeAgentDryRun": ((f"nodeagent_enforcing{{{NODE}}}", "0x10200"),)}
"""The same after a week."""


def case(series: tuple[tuple[str, str], ...], *names: str, slow: bool = False) -> dict[str, Any]:
    """One test of promtool: none of these alerts fires on a healthy node with these series in place of its own."""
    values = dict(series) if slow else {**dict(HEALTHY), **dict(series)}
    at = "169h" if slow else "60m"
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": text} for name, text in values.items()],
        "alert_rule_test": [{"eval_time": at, "alertname": name, "exp_alerts": []} for name in names],
    }


FIRST_EVENTS = (
    (f'nodeagent_build_info{{{NODE}, version="0.1.0"}}', "1x60"),
    (f'nodeagent_evictions_total{{{NODE}, signal="memory.available", tier="hard", outcome="accepted"}}', "0x30 1x30"),
    (f'nodeagent_evictions_total{{{NODE}, signal="memory.available", tier="hard", outcome="forbidden"}}', "_x31 1x30"),
    (f'nodeagent_lost_races_total{{{NODE}, loss="not-met"}}', "0x30 1x30"),
    (f'nodeagent_refusals_total{{{NODE}, code="futile"}}', "_x31 1x30"),
)
"""One of each, at minute 31. Those whose labels the agent knows before begin at 0 (`telemetry.initial_series`)."""


def run_promtool(tmp_path: Path, *cases: dict[str, Any], every: str = "1m") -> subprocess.CompletedProcess[str]:
    """`every`: how often the rules are evaluated, up to the end of the longest case."""
    file = tmp_path / "test.yaml"
    content = {"rule_files": [str(PACK / "alerts.yaml")], "evaluation_interval": every, "tests": list(cases)}
    file.write_text(yaml.safe_dump(content))
    command = ["promtool", "test", "rules", str(file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@needs_promtool
def test_no_alert_fires_on_a_healthy_node(tmp_path: Path) -> None:
    done = run_promtool(tmp_path, case((), *[alert.name for alert in ALERTS]))
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_each_alert_fires_on_its_fault_with_every_label_of_its_texts(alert: Alert, tmp_path: Path) -> None:
    """promtool prints what it got where nothing was expected."""
    slow = alert.name in SLOW
    done = run_promtool(
        tmp_path, case((SLOW if slow else FAULTS)[alert.name], alert.name, slow=slow), every="10m" if slow else "1m"
    )
    assert done.returncode != 0, "it did not fire"
    got = done.stdout + done.stderr
    assert f'alertname="{alert.name}"' in got, got
    assert alert.runbook_url in got
    assert "<no value>" not in got
    assert "error expanding" not in got.lower()


NEVER_LISTED = {f"nodeagent_pods_view_age_seconds{{{NODE}}}": "_x700"}
NO_LIMIT_OF_PODS = {
    f'nodeagent_signal_state{{{NODE}, signal="{signal}", state="unknown"}}': "1x700"
    for signal in ("allocatableMemory.available", "containerfs.available")
} | {
    f'nodeagent_threshold_met{{{NODE}, signal="{signal}", tier="hard"}}': "0x700"
    for signal in ("allocatableMemory.available", "containerfs.available")
}
MEMORY_UNKNOWN = {f'nodeagent_signal_state{{{NODE}, signal="memory.available", state="unknown"}}': "1x700"}


@needs_promtool
def test_an_agent_that_never_listed_its_pods_is_blind_since_its_start(tmp_path: Path) -> None:
    done = run_promtool(tmp_path, case(tuple(NEVER_LISTED.items()), "NodeAgentBlind"))
    assert done.returncode != 0
    assert "No current sample or pod list for 1h 0m 0s" in done.stdout + done.stderr


@needs_promtool
def test_a_signal_that_another_one_covers_is_not_reported_as_unknown(tmp_path: Path) -> None:
    """The same rule as the state of `nodeagent check`."""
    quiet = run_promtool(tmp_path, case(tuple(NO_LIMIT_OF_PODS.items()), "NodeAgentSignalUnknown"))
    assert quiet.returncode == 0, quiet.stdout + quiet.stderr
    done = run_promtool(tmp_path, case((*NO_LIMIT_OF_PODS.items(), *MEMORY_UNKNOWN.items()), "NodeAgentSignalUnknown"))
    assert 'signal="allocatableMemory.available"' in done.stdout + done.stderr
    assert 'signal="memory.available"' in done.stdout + done.stderr
    assert 'signal="containerfs.available"' not in done.stdout + done.stderr


@needs_promtool
def test_each_panel_of_events_shows_the_first_one_and_before_it_none(tmp_path: Path) -> None:
    queries = {where: expr for where, expr in expressions().items() if "increase(" in expr and "/" in where}
    assert {where.split("/")[1] for where in queries} == {
        "Evictions by outcome",
        "Evicted in the range",
        "Races lost in the range",
        "Evictions by signal and tier",
        "Outcomes of evictions",
        "Refusals by code",
    }
    steps = []
    for expr in queries.values():
        for variable, value in (("$__rate_interval", "5m"), ("$__range", "20m"), ("$node", "n1")):
            expr = expr.replace(variable, value)  # noqa: PLW2901 - as Grafana does
        for minute, shown in (("30m", 0), ("31m", 1), ("33m", 1), ("55m", 0)):
            samples = [{"labels": "{}", "value": shown}]
            steps.append({"expr": f"max(({expr}) > bool 0)", "eval_time": minute, "exp_samples": samples})
    series = [{"series": name, "values": text} for name, text in FIRST_EVENTS]
    done = run_promtool(tmp_path, {"interval": "1m", "input_series": series, "promql_expr_test": steps})
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_a_gap_in_the_scrapes_is_not_shown_as_events(tmp_path: Path) -> None:
    """Where an event before the gap had no series at 0, its count is there again after the gap."""
    series = {
        f'nodeagent_build_info{{{NODE}, version="0.1.0"}}': "1x20 _x20 1x20",
        f'nodeagent_evictions_total{{{NODE}, outcome="forbidden"}}': "7x20 _x20 7x20",
    }
    [expr] = [expr for where, expr in expressions().items() if "Outcomes of evictions" in where]
    step = {
        "expr": f"max({expr.replace('$__rate_interval', '5m')})",
        "eval_time": "42m",
        "exp_samples": [{"labels": "{}", "value": 0}],
    }
    case_ = {
        "interval": "1m",
        "input_series": [{"series": name, "values": text} for name, text in series.items()],
        "promql_expr_test": [step],
    }
    done = run_promtool(tmp_path, case_)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_its_fault_and_its_runbook() -> None:
    names = [alert.name for alert in ALERTS]
    assert len(set(names)) == len(names)
    assert set(names) == set(FAULTS) | set(SLOW)
    page = (REPOSITORY / "docs" / "runbooks.md").read_text("utf-8")
    headings = re.findall(r"^## (\w+)$", page, re.MULTILINE)
    assert headings == names, "docs/runbooks.md has one section for each alert, in this order"
    for alert in ALERTS:
        assert alert.severity in ("critical", "warning", "info")
        section = page.split(f"## {alert.name}\n")[1].split("\n## ")[0]
        for part in ("**Means**", "**Check**", "**Do**"):
            assert part in section, f"{alert.name}: {part}"


@pytest.mark.parametrize("name", monitoring.files())
def test_generated_files_are_current(name: str) -> None:
    """`python -m tests.support.monitoring` writes them."""
    assert (PACK / name).read_text("utf-8") == monitoring.files()[name]


def expressions() -> dict[str, str]:
    found = {alert.name: alert.expr for alert in ALERTS}
    for dashboard in (dashboards.NODE, dashboards.FLEET):
        for panel in dashboard.panels:
            found |= {f"{dashboard.uid}/{panel.title}/{query.legend}": query.expr for query in panel.queries}
    return found


@pytest.mark.parametrize("where", expressions())
def test_each_metric_and_word_of_a_query_exists(where: str) -> None:
    expr = expressions()[where]
    endings = {"counter": "_total", "histogram": "_bucket", "gauge": ""}
    names = {family.name.removesuffix("_total") + endings[family.kind] for family in FAMILIES}
    assert set(re.findall(r"\b(?:nodeagent|process)_\w+", expr)) <= names
    for label, kind in (("code", RefusalCode), ("outcome", OutcomeKind)):
        values = {each.value for each in kind}
        for pattern in re.findall(label + r'=~?"([^"]+)"', expr):
            assert any(re.fullmatch(pattern, value) for value in values), pattern
            assert all(
                part in values or any(re.fullmatch(part, value) for value in values) for part in pattern.split("|")
            ), pattern


def test_panels_do_not_overlap_and_dashboards_ask_for_their_data_source() -> None:
    for dashboard in (dashboards.NODE, dashboards.FLEET):
        content = json.loads(json.dumps(dashboards.to_json(dashboard)))
        cells: set[tuple[int, int]] = set()
        for panel in content["panels"]:
            place = panel["gridPos"]
            own = {
                (column, row)
                for column in range(place["x"], place["x"] + place["w"])
                for row in range(place["y"], place["y"] + place["h"])
            }
            assert not own & cells, panel["title"]
            assert place["x"] + place["w"] <= dashboards.WIDTH
            cells |= own
            assert panel["datasource"]["uid"] == "${datasource}"


def test_the_pod_monitor_selects_the_agents_of_the_manifest() -> None:
    monitor = yaml.safe_load((PACK / "podmonitor.yaml").read_text("utf-8"))
    objects = list(yaml.safe_load_all((REPOSITORY / "daemonset.yaml").read_text("utf-8")))
    [daemonset] = [each for each in objects if each and each["kind"] == "DaemonSet"]
    template = daemonset["spec"]["template"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert monitor["metadata"]["namespace"] == daemonset["metadata"]["namespace"]
    ports = [port["name"] for each in template["spec"]["containers"] for port in each.get("ports", [])]
    assert monitor["spec"]["podMetricsEndpoints"][0]["port"] in ports
    assert monitor["spec"]["podMetricsEndpoints"][0]["relabelings"][0]["targetLabel"] == "node"


@pytest.mark.parametrize("name", ["dashboard-node", "dashboard-fleet"])
def test_each_dashboard_has_a_small_picture_with_a_palette(name: str) -> None:
    """`python -m tests.browser.dashboard_screenshots`. The byte after the size and the depth is the kind of colours."""
    picture = (REPOSITORY / "docs" / "images" / f"{name}.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert picture[24:26] == bytes([8, 3])
    assert len(picture) < 200_000
