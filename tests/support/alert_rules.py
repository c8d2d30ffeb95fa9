"""The alerts of `monitoring/`, a row each.

`tests.support.monitoring` writes the files, and docs/runbooks.md has a section for each alert.
"""

from typing import Final, NamedTuple

from nodeagent.model import OutcomeKind

EVICTED: Final = f'outcome=~"{"|".join([kind for kind in OutcomeKind if kind.evicted])}"'
"""The label of evictions that were carried out."""
RUNBOOKS: Final = "https://nodeagent.io/runbooks/"


class Alert(NamedTuple):
    name: str
    severity: str
    """critical: somebody must act now. warning: within a day. info: a fact."""
    hold: str
    """How long the expression must be true (`for`)."""
    expr: str
    summary: str
    description: str

    @property
    def runbook_url(self) -> str:
        return f"{RUNBOOKS}#{self.name.lower()}"


def increased(counter: str, window: str) -> str:
    """True once the counter grew within the window, also if its first sample is already above zero: `increase` does not
    see the step from no series to 1."""
    return f"increase({counter}[{window}]) > 0 or ({counter} > 0 unless {counter} offset {window})"


def evictions_with(outcomes: str, window: str) -> str:
    """How many evictions ended so within the window, by series. Most outcomes have none before the first."""
    counter = f'nodeagent_evictions_total{{outcome=~"{outcomes}"}}'
    return f"(({counter} unless {counter} offset {window}) or increase({counter}[{window}]))"


_RATE_LIMITS: Final = "|".join(
    f"rate-limit-{each}" for each in ("node", "namespace", "owner", "signal", "last-resort", "hook")
)
"""Of evictions for a threshold; those for a pod's own limit and raises of limits wait without one."""

ALERTS: Final = (
    Alert(
        "NodeAgentMissing",
        "critical",
        "10m",
        "absent(nodeagent_build_info)",
        "No nodeagent is scraped",
        "No target exports nodeagent metrics for 10 minutes: nothing acts before the kubelet on any node.",
    ),
    Alert(
        "NodeAgentDown",
        "warning",
        "5m",
        'up{job=~".*nodeagent.*"} == 0',
        "nodeagent on {{ $labels.node }} cannot be scraped",
        "The metrics of nodeagent on node {{ $labels.node }} ({{ $labels.instance }}) are not readable for 5 minutes.",
    ),
    Alert(
        "NodeAgentNotSyncing",
        "critical",
        "1m",
        "nodeagent_sync_age_seconds > 30",
        "nodeagent on {{ $labels.node }} does not sync",
        "The last sync was {{ $value | humanizeDuration }} ago; it takes place at least every 10 s.",
    ),
    Alert(
        "NodeAgentBlind",
        "warning",
        "5m",
        "nodeagent_sample_age_seconds > 30 or nodeagent_pods_view_age_seconds > 120"
        # An agent that never listed its pods has no age of them: the time since its start.
        " or time() - process_start_time_seconds and on (node, instance) nodeagent_build_info"
        " unless on (node, instance) nodeagent_pods_view_age_seconds",
        "nodeagent on {{ $labels.node }} has no current samples or pods",
        "No current sample or pod list for {{ $value | humanizeDuration }}. Without current pods no pod is evicted.",
    ),
    Alert(
        "NodeAgentSignalUnknown",
        "warning",
        "10m",
        # As `node_report.is_blind`: containerfs has copies of other thresholds, and the pods' cgroup may have no limit.
        'nodeagent_signal_state{state="unknown",signal!~"containerfs.+"} == 1'
        " and on (node, instance, signal) nodeagent_threshold_met"
        ' unless (nodeagent_signal_state{signal="allocatableMemory.available"} and on (node, instance)'
        ' nodeagent_signal_state{state="unknown",signal="memory.available"} == 0)',
        "{{ $labels.signal }} on {{ $labels.node }} cannot be read",
        "A signal with a threshold is unknown for 10 minutes. Unknown is never pressure, so it protects nothing.",
    ),
    Alert(
        "NodeAgentWorkerStuck",
        "warning",
        "5m",
        "nodeagent_workers_stuck > 0",
        "Worker {{ $labels.worker }} of nodeagent on {{ $labels.node }} is stuck",
        "A worker thread ended or exceeds the time limit of its step for 5 minutes.",
    ),
    Alert(
        "NodeAgentStateNotSaved",
        "critical",
        "0m",
        increased('nodeagent_failures_total{what="state-save"}', "5m"),
        "nodeagent on {{ $labels.node }} cannot save its state",
        "Without a saved state only hard evictions through the API go on, because rate limits must survive a crash.",
    ),
    Alert(
        "NodeAgentConfigRejected",
        "warning",
        "1m",
        "nodeagent_config_last_reload_successful == 0",
        "nodeagent on {{ $labels.node }} rejected its new configuration",
        "The configuration on disk is invalid and an older one is in force.",
    ),
    Alert(
        "NodeAgentDryRun",
        "info",
        "7d",
        "nodeagent_enforcing == 0",
        "nodeagent on {{ $labels.node }} only decides, for a week",
        "Mode dry-run changes nothing. That is right for a trial and wrong if this node should be protected.",
    ),
    Alert(
        "NodeAgentLostRace",
        "critical",
        "0m",
        increased("nodeagent_lost_races_total", "10m"),
        "The OOM killer was first on {{ $labels.node }} ({{ $labels.loss }})",
        "A shortage of memory of the whole node ended in OOM kills instead of an eviction: {{ $labels.loss }}.",
    ),
    Alert(
        "NodeAgentExhaustionPredicted",
        "warning",
        "30s",
        "nodeagent_signal_time_to_exhaustion_seconds < 120"
        " and on (node, instance, signal) nodeagent_signal_trend_confidence_ratio > 0.6",
        "{{ $labels.signal }} on {{ $labels.node }} will be used up within two minutes",
        "The trend predicts exhaustion in {{ $value | humanizeDuration }}.",
    ),
    Alert(
        "NodeAgentPressureWithoutVictim",
        "critical",
        "1m",
        "sum by (node, instance, code) (rate(nodeagent_refusals_total"
        '{code=~"futile|no-candidates|circuit-breaker"}[5m])) > 0',
        "Pressure on {{ $labels.node }} that no eviction can cure ({{ $labels.code }})",
        "A threshold is due, and evicting pods is impossible or does not help: {{ $labels.code }}.",
    ),
    Alert(
        "NodeAgentRateLimited",
        "warning",
        "5m",
        f'sum by (node, instance, code) (rate(nodeagent_refusals_total{{code=~"{_RATE_LIMITS}"}}[5m])) > 0',
        "Evictions on {{ $labels.node }} wait for a rate limit ({{ $labels.code }})",
        "A threshold is due for minutes, and the rate limit {{ $labels.code }} allows no further eviction.",
    ),
    Alert(
        "NodeAgentBlockedByDisruptionBudgets",
        "warning",
        "0m",
        f"sum by (node, instance) {evictions_with('blocked-by-pdb|pdb-conflict', '15m')} > 3",
        "PodDisruptionBudgets refuse evictions on {{ $labels.node }}",
        "More than three evictions within 15 minutes were refused because a PodDisruptionBudget allows none.",
    ),
    Alert(
        "NodeAgentMissingRight",
        "critical",
        "0m",
        f"sum by (node, instance, outcome) {evictions_with('forbidden|unauthorized', '15m')} > 0",
        "nodeagent on {{ $labels.node }} may not evict ({{ $labels.outcome }})",
        "The API server refused an eviction for a missing right.",
    ),
    Alert(
        "NodeAgentReliefShortfall",
        "warning",
        "0m",
        increased("nodeagent_relief_shortfalls_total", "1h"),
        "Evictions on {{ $labels.node }} freed less than half of what was predicted",
        "For {{ $labels.signal }} the measured relief was less than half of the predicted.",
    ),
    Alert(
        "NodeAgentConditionContested",
        "warning",
        "0m",
        "increase(nodeagent_condition_true_seconds_total[15m])"
        " / (increase(nodeagent_condition_wanted_seconds_total[15m]) > 60) < 0.9",
        "Another client overwrites {{ $labels.condition }} of {{ $labels.node }}",
        "The condition was True for only {{ $value | humanizePercentage }} of the time in which nodeagent measured"
        " pressure.",
    ),
    Alert(
        "NodeAgentManyEvictions",
        "warning",
        "0m",
        f"sum(increase(nodeagent_evictions_total{{{EVICTED}}}[10m])) > 10",
        "More than ten evictions in the cluster within ten minutes",
        "{{ $value | humanize }} pods were evicted within ten minutes: one cause on several nodes is likely.",
    ),
    Alert(
        "NodeAgentCostsTooMuch",
        "warning",
        "15m",
        'process_resident_memory_bytes{job=~".*nodeagent.*"} > 100 * 1024 * 1024'
        ' or rate(process_cpu_seconds_total{job=~".*nodeagent.*"}[10m]) > 0.2',
        "nodeagent on {{ $labels.node }} costs more than it should",
        "It uses more than 100 MiB of memory or 20% of a core for 15 minutes.",
    ),
)
