"""The table of metrics: name, kind, meaning and labels of each. It is the only list of names: `docs/metrics.md` is made
from it, and what is not in it is not written out."""

from collections.abc import Iterable
from typing import Final

from nodeagent.model import Unit
from nodeagent.telemetry.exposition import COUNTER, GAUGE, HISTOGRAM, Family

_SIGNAL = ("signal",)
_THRESHOLD = ("signal", "tier")
_CONDITION = ("condition",)
UNIT_WORDS: Final = {
    Unit.BYTES: "bytes",
    Unit.INODES: "inodes",
    Unit.PIDS: "pids",
}


_DISK_UNITS: Final = ("bytes", "inodes")


def _by_unit(
    name: str, kind: str, text: str, labels: tuple[str, ...], units: Iterable[str] = tuple(UNIT_WORDS.values())
) -> tuple[Family, ...]:
    """One family for each unit, because bytes and inodes in one metric could not be added up."""
    return tuple(Family(name.replace("UNIT", word), kind, text.replace("UNIT", word), labels) for word in units)


FAMILIES: Final[tuple[Family, ...]] = (
    Family("nodeagent_build_info", GAUGE, "Always 1; the version is in the labels.", ("version", "python")),
    Family("nodeagent_enforcing", GAUGE, "1: mode enforce. 0: dry-run, nothing is sent."),
    # signals
    *_by_unit("nodeagent_signal_available_UNIT", GAUGE, "What the signal has left, in UNIT.", _SIGNAL),
    *_by_unit("nodeagent_signal_capacity_UNIT", GAUGE, "What a percentage is a percentage of, in UNIT.", _SIGNAL),
    Family("nodeagent_memory_mem_available_bytes", GAUGE, "memory.available by the kernel's MemAvailable."),
    Family(
        "nodeagent_signal_state",
        GAUGE,
        "1 for the state that the signal is in (ok, soft, hard, unknown), 0 for the others.",
        ("signal", "state"),
    ),
    *_by_unit(
        "nodeagent_threshold_UNIT", GAUGE, "The threshold's value for the present capacity, in UNIT.", _THRESHOLD
    ),
    *_by_unit(
        "nodeagent_threshold_headroom_UNIT",
        GAUGE,
        "What may still be used before the threshold is met, in UNIT; negative below it.",
        _THRESHOLD,
    ),
    Family(
        "nodeagent_threshold_met",
        GAUGE,
        "1: the level is below the threshold, or has not regained its minimum reclaim.",
        _THRESHOLD,
    ),
    Family("nodeagent_threshold_met_seconds", GAUGE, "How long the threshold has been met; 0 while not.", _THRESHOLD),
    Family("nodeagent_threshold_due", GAUGE, "1: met for its grace period, it may act now.", _THRESHOLD),
    *_by_unit(
        "nodeagent_signal_change_UNIT_per_second",
        GAUGE,
        "Trend of what is available, in UNIT per second; negative while it is being used up.",
        _SIGNAL,
    ),
    Family(
        "nodeagent_signal_time_to_threshold_seconds",
        GAUGE,
        "By the trend, until the nearest threshold that is not met; +Inf: not approaching it.",
        _SIGNAL,
    ),
    Family(
        "nodeagent_signal_time_to_exhaustion_seconds",
        GAUGE,
        "By the trend, until nothing is available; +Inf: not approaching it.",
        _SIGNAL,
    ),
    Family("nodeagent_signal_trend_confidence_ratio", GAUGE, "0: no idea, 1: every sample on one line.", _SIGNAL),
    Family(
        "nodeagent_pressure_stalled_seconds",
        COUNTER,
        "Pressure stall information (PSI): time that some or all tasks of the scope have waited.",
        ("scope", "resource", "kind"),
    ),
    Family("nodeagent_pods", GAUGE, "Pods of this node in the last sample.", ("qos_class",)),
    # ages
    Family("nodeagent_sample_age_seconds", GAUGE, "Since the last whole sample."),
    Family("nodeagent_pods_view_age_seconds", GAUGE, "Since the API's view of the pods was known to be current."),
    # conditions
    Family(
        "nodeagent_condition_wanted",
        GAUGE,
        "1 for the status (True, False, Unknown) that the policy gives the condition, 0 for the others.",
        ("condition", "status"),
    ),
    Family("nodeagent_condition_asserted", GAUGE, "1: the Node says True because we wrote it.", _CONDITION),
    Family("nodeagent_condition_true_by_other", GAUGE, "1: the Node says True and it was not us.", _CONDITION),
    Family("nodeagent_condition_overwrites", COUNTER, "Times that somebody overwrote our True.", _CONDITION),
    Family("nodeagent_condition_wanted_seconds", COUNTER, "How long the policy has wanted True.", _CONDITION),
    Family("nodeagent_condition_true_seconds", COUNTER, "How long of that the Node said True.", _CONDITION),
    Family("nodeagent_taint_present", GAUGE, "1: our NoSchedule taint of this condition is on the Node.", _CONDITION),
    Family("nodeagent_condition_writes", COUNTER, "Patches of the Node's status."),
    # decisions
    Family(
        "nodeagent_decisions",
        COUNTER,
        "Decisions: calm (nothing due), evict (with victims), refuse (something is due, nobody goes).",
        ("result",),
    ),
    Family(
        "nodeagent_refusals",
        COUNTER,
        "Decisions that evicted nobody, or not more, for this reason (see docs/reasons.md).",
        ("code",),
    ),
    Family(
        "nodeagent_pods_refused",
        GAUGE,
        "Pods that would not be evicted now, by their first reason; no series while no threshold is met.",
        ("code",),
    ),
    Family(
        "nodeagent_evictions",
        COUNTER,
        "Victims by what became of the request; outcome dry-run: nothing was sent.",
        ("signal", "qos_class", "tier", "outcome"),
    ),
    *_by_unit(
        "nodeagent_relief_predicted_UNIT",
        COUNTER,
        "What measured evictions were expected to free, in UNIT.",
        _SIGNAL,
    ),
    *_by_unit(
        "nodeagent_relief_measured_UNIT",
        COUNTER,
        "What they brought back, in UNIT; a decision after which there was less counts as 0.",
        _SIGNAL,
    ),
    Family(
        "nodeagent_relief_shortfalls",
        COUNTER,
        "Decisions that brought back less than half of what was expected.",
        _SIGNAL,
    ),
    Family(
        "nodeagent_relief_duration_seconds",
        HISTOGRAM,
        "From a decision to the first sample after its last victim was gone.",
    ),
    Family(
        "nodeagent_reclaims",
        COUNTER,
        "Actions of `reclaim.actions` whose gain was measured, by how they ended.",
        ("action", "result"),
    ),
    *_by_unit(
        "nodeagent_reclaim_gained_UNIT",
        COUNTER,
        "What the actions brought back, in UNIT; one after which there was less counts as 0.",
        ("action",),
    ),
    Family("nodeagent_disk_walk_running", GAUGE, "1: what the pods hold on disk is being counted."),
    Family("nodeagent_disk_walk_paths", GAUGE, "Layers, volumes and log directories of this walk, or of the last."),
    Family("nodeagent_disk_walk_paths_done", GAUGE, "How many of these places have been counted."),
    Family("nodeagent_disk_walk_entries", GAUGE, "Files and directories that this walk, or the last, has looked at."),
    Family("nodeagent_disk_walk_duration_seconds", GAUGE, "How long the last walk over all pods took."),
    Family("nodeagent_disk_walk_age_seconds", GAUGE, "Since the last walk ended."),
    Family("nodeagent_disk_pods_incomplete", GAUGE, "Pods of which only a part of what they hold on disk is known."),
    *_by_unit(
        "nodeagent_disk_unattributed_UNIT",
        GAUGE,
        "What of the file system behind the signal was in no pod, in UNIT, when that was last looked at.",
        _SIGNAL,
        _DISK_UNITS,
    ),
    Family("nodeagent_brakes_active", GAUGE, "Pods that are throttled or frozen now."),
    Family("nodeagent_eviction_requests_in_flight", GAUGE, "Evictions without an answer yet."),
    Family(
        "nodeagent_workers_stuck",
        GAUGE,
        "Threads beside the loop that have died or take longer for a step than they may. No series while all work.",
        ("worker",),
    ),
    Family("nodeagent_worker_failures", COUNTER, "Times that a thread beside the loop ended by an error.", ("worker",)),
    # the loop
    Family("nodeagent_stage_duration_seconds", HISTOGRAM, "How long the stages of a turn take.", ("stage",)),
    Family("nodeagent_syncs", COUNTER, "Turns of the loop."),
    Family("nodeagent_wakeups", COUNTER, "What woke the loop: its timer, or a hint.", ("reason",)),
    Family("nodeagent_sync_age_seconds", GAUGE, "Since the loop last turned."),
    Family("nodeagent_failures", COUNTER, "What went wrong in the agent itself.", ("what",)),
    Family("nodeagent_config_reloads", COUNTER, "Configurations read again: applied or invalid.", ("result",)),
    Family("nodeagent_config_last_reload_successful", GAUGE, "0: the file on disk is not what is in force."),
    # others
    Family("nodeagent_api_watch_failures", COUNTER, "Failed lists and broken watches.", ("watch",)),
    Family("nodeagent_api_relists", COUNTER, "Full lists.", ("watch",)),
    Family("nodeagent_events_dropped", COUNTER, "Events that could not be written."),
    Family("nodeagent_log_lines_dropped", COUNTER, "Log lines that the reader did not take."),
    # own cost, by the names that every Prometheus client has for it
    Family("process_cpu_seconds", COUNTER, "User and system CPU time of the agent."),
    Family("process_resident_memory_bytes", GAUGE, "Resident memory of the agent."),
    Family("process_open_fds", GAUGE, "Open file descriptors of the agent."),
    Family("process_max_fds", GAUGE, "Most file descriptors it may open."),
    Family("process_start_time_seconds", GAUGE, "When the agent was started, since the epoch."),
)
