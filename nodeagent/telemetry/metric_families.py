"""The table of metrics: name, kind, meaning and labels. `docs/metrics.md` is generated from it.

A metric that is not in the table is not exported.
"""

from collections.abc import Iterable
from typing import Final

from nodeagent.model import SIGNAL_TABLE, Unit
from nodeagent.telemetry import exposition
from nodeagent.telemetry.exposition import Family

_SIGNAL = ("signal",)
_THRESHOLD = ("signal", "tier")
_CONDITION = ("condition",)
_POD = ("namespace", "pod")
UNIT_WORDS: Final = {
    Unit.BYTES: "bytes",
    Unit.INODES: "inodes",
    Unit.PIDS: "pids",
}
_SIGNAL_WORDS: Final = {str(signal): UNIT_WORDS[facts.unit] for signal, facts in SIGNAL_TABLE.items()}


def unit_word(signal: str) -> str:
    """The unit of a signal in the names of metrics; bytes for a signal that is not known."""
    return _SIGNAL_WORDS.get(signal, UNIT_WORDS[Unit.BYTES])


_DISK_UNITS: Final = ("bytes", "inodes")


def _by_unit(
    name: str, kind: str, text: str, labels: tuple[str, ...], units: Iterable[str] = tuple(UNIT_WORDS.values())
) -> tuple[Family, ...]:
    """One family for each unit: bytes and inodes in one metric cannot be added up."""
    return tuple(Family(name.replace("UNIT", word), kind, text.replace("UNIT", word), labels) for word in units)


FAMILIES: Final[tuple[Family, ...]] = (
    Family("nodeagent_build_info", exposition.GAUGE, "Always 1; the version is in the labels.", ("version", "python")),
    Family("nodeagent_enforcing", exposition.GAUGE, "1: mode enforce. 0: dry-run, nothing is sent."),
    # signals
    *_by_unit("nodeagent_signal_available_UNIT", exposition.GAUGE, "Available amount of the signal, in UNIT.", _SIGNAL),
    *_by_unit(
        "nodeagent_signal_capacity_UNIT",
        exposition.GAUGE,
        "Capacity of the signal, in UNIT; percentages refer to it.",
        _SIGNAL,
    ),
    Family(
        "nodeagent_memory_figure_bytes",
        exposition.GAUGE,
        "Both figures of a memory signal: available by the working set and by MemAvailable.",
        ("signal", "model"),
    ),
    Family("nodeagent_swap_total_bytes", exposition.GAUGE, "SwapTotal of the node; 0 without swap."),
    Family("nodeagent_swap_free_bytes", exposition.GAUGE, "SwapFree of the node."),
    Family("nodeagent_zram_memory_bytes", exposition.GAUGE, "Memory that zram takes for what is swapped to it."),
    Family(
        "nodeagent_zombies",
        exposition.GAUGE,
        "Processes that have ended and that their parents have not waited for; each holds a PID. Counted each minute, "
        "every 10 s while PIDs are nearly short.",
    ),
    Family(
        "nodeagent_zombies_of_host",
        exposition.GAUGE,
        "Zombies, as far as their parents are known, of processes outside of pods: no eviction ends them.",
    ),
    Family(
        "nodeagent_signal_state",
        exposition.GAUGE,
        "1 for the state of the signal (ok, soft, hard, unknown), 0 for the other states.",
        ("signal", "state"),
    ),
    *_by_unit(
        "nodeagent_threshold_UNIT",
        exposition.GAUGE,
        "Value of the threshold at the current capacity, in UNIT.",
        _THRESHOLD,
    ),
    *_by_unit(
        "nodeagent_threshold_headroom_UNIT",
        exposition.GAUGE,
        "Available amount above the threshold, in UNIT; negative below it.",
        _THRESHOLD,
    ),
    Family(
        "nodeagent_threshold_met",
        exposition.GAUGE,
        "1: the signal is below the threshold, or below threshold plus minimum reclaim after it was met.",
        _THRESHOLD,
    ),
    Family(
        "nodeagent_threshold_met_seconds",
        exposition.GAUGE,
        "How long the threshold has been met; 0 if it is not met.",
        _THRESHOLD,
    ),
    Family(
        "nodeagent_threshold_due", exposition.GAUGE, "1: met for its grace period; evictions are allowed.", _THRESHOLD
    ),
    *_by_unit(
        "nodeagent_signal_change_UNIT_per_second",
        exposition.GAUGE,
        "Trend of the available amount, in UNIT per second; negative while it falls.",
        _SIGNAL,
    ),
    Family(
        "nodeagent_signal_time_to_threshold_seconds",
        exposition.GAUGE,
        "Predicted time until the nearest threshold that is not met; +Inf: not approaching it.",
        _SIGNAL,
    ),
    Family(
        "nodeagent_signal_time_to_exhaustion_seconds",
        exposition.GAUGE,
        "Predicted time until nothing is available; +Inf: not approaching it.",
        _SIGNAL,
    ),
    Family(
        "nodeagent_signal_trend_confidence_ratio",
        exposition.GAUGE,
        "Confidence of the trend; 1: all samples on one line.",
        _SIGNAL,
    ),
    Family(
        "nodeagent_pressure_stalled_seconds",
        exposition.COUNTER,
        "Pressure stall information (PSI): time that some or all tasks of the scope waited.",
        ("scope", "resource", "kind"),
    ),
    Family("nodeagent_pods", exposition.GAUGE, "Pods of this node in the last sample.", ("qos_class",)),
    # ages
    Family("nodeagent_sample_age_seconds", exposition.GAUGE, "Age of the last full sample."),
    Family(
        "nodeagent_pods_view_age_seconds",
        exposition.GAUGE,
        "Age of the pod cache: time since it was last known to be current. No series: never listed.",
    ),
    # conditions
    Family(
        "nodeagent_condition_wanted",
        exposition.GAUGE,
        "1 for the status (True, False, Unknown) that the policy gives the condition, 0 for the other statuses.",
        ("condition", "status"),
    ),
    Family(
        "nodeagent_condition_asserted",
        exposition.GAUGE,
        "1: the condition is True on the Node, written by this agent.",
        _CONDITION,
    ),
    Family(
        "nodeagent_condition_true_by_other",
        exposition.GAUGE,
        "1: the condition is True on the Node, written by another client.",
        _CONDITION,
    ),
    Family(
        "nodeagent_condition_overwrites",
        exposition.COUNTER,
        "How often another client overwrote the True of this agent.",
        _CONDITION,
    ),
    Family("nodeagent_condition_wanted_seconds", exposition.COUNTER, "How long the policy wanted True.", _CONDITION),
    Family(
        "nodeagent_condition_true_seconds",
        exposition.COUNTER,
        "How long of that the condition was True on the Node.",
        _CONDITION,
    ),
    Family(
        "nodeagent_taint_present",
        exposition.GAUGE,
        "1: the NoSchedule taint of this condition is on the Node.",
        _CONDITION,
    ),
    Family("nodeagent_condition_writes", exposition.COUNTER, "Patches of the Node's status."),
    # decisions
    Family(
        "nodeagent_decisions",
        exposition.COUNTER,
        "Decisions: calm (nothing due), evict (with victims), refuse (due, but without victims).",
        ("result",),
    ),
    Family(
        "nodeagent_refusals",
        exposition.COUNTER,
        "Decisions that evicted no pod or fewer pods, or raised no memory limit, for this reason (docs/reasons.md).",
        ("code",),
    ),
    Family(
        "nodeagent_pods_refused",
        exposition.GAUGE,
        "Pods that cannot be evicted now, by their first reason; no series while no threshold is met.",
        ("code",),
    ),
    Family(
        "nodeagent_evictions",
        exposition.COUNTER,
        "Victims by outcome of the request; dry-run: nothing was sent. The signal of a victim of a limit of its own is "
        "the name of the limit, such as memory.max.",
        ("signal", "qos_class", "tier", "outcome"),
    ),
    *_by_unit(
        "nodeagent_relief_predicted_UNIT",
        exposition.COUNTER,
        "Predicted relief of measured evictions, in UNIT.",
        _SIGNAL,
    ),
    *_by_unit(
        "nodeagent_relief_measured_UNIT",
        exposition.COUNTER,
        "Measured relief of evictions, in UNIT; negative relief counts as 0.",
        _SIGNAL,
    ),
    Family(
        "nodeagent_relief_shortfalls",
        exposition.COUNTER,
        "Decisions whose measured relief was less than half of the predicted.",
        _SIGNAL,
    ),
    Family(
        "nodeagent_relief_duration_seconds",
        exposition.HISTOGRAM,
        "Time from a decision to the first sample after its last victim was gone.",
    ),
    Family(
        "nodeagent_reclaims",
        exposition.COUNTER,
        "Actions of `reclaim.actions`, and `pageCache`, with a measured gain, by result.",
        ("action", "result"),
    ),
    *_by_unit(
        "nodeagent_reclaim_gained_UNIT",
        exposition.COUNTER,
        "Measured gain of the actions, in UNIT; a negative gain counts as 0.",
        ("action",),
    ),
    Family(
        "nodeagent_page_cache_reclaimed_bytes",
        exposition.COUNTER,
        "Page cache of pods that was reclaimed before evictions.",
    ),
    Family(
        "nodeagent_hooks",
        exposition.COUNTER,
        "Hooks before evictions (`hooks.beforeEviction`), by result: done, failed, timed-out, dry-run.",
        ("result",),
    ),
    Family(
        "nodeagent_resizes",
        exposition.COUNTER,
        "Resizes of containers in place (`ownLimit.resize`), by what came of them: the answer of the API server, then "
        "what the kubelet reports.",
        ("result",),
    ),
    Family("nodeagent_disk_walk_running", exposition.GAUGE, "1: a walk measures the disk usage of pods."),
    Family(
        "nodeagent_disk_walk_paths",
        exposition.GAUGE,
        "Paths (layers, volumes, log directories) of the current or last walk.",
    ),
    Family("nodeagent_disk_walk_paths_done", exposition.GAUGE, "How many of these paths are measured."),
    Family(
        "nodeagent_disk_walk_entries", exposition.GAUGE, "Files and directories that the current or last walk has read."
    ),
    Family("nodeagent_disk_walk_duration_seconds", exposition.GAUGE, "Duration of the last walk over all pods."),
    Family("nodeagent_disk_walk_age_seconds", exposition.GAUGE, "Time since the last walk ended."),
    Family("nodeagent_disk_pods_incomplete", exposition.GAUGE, "Pods with incomplete disk usage."),
    *_by_unit(
        "nodeagent_disk_unattributed_UNIT",
        exposition.GAUGE,
        "Usage of the file system behind the signal that is in no pod, in UNIT, at the last walk.",
        _SIGNAL,
        _DISK_UNITS,
    ),
    # single pods
    *_by_unit(
        "nodeagent_pod_disk_UNIT",
        exposition.GAUGE,
        "Disk usage of the pods with the most (`metrics.perPod`), in UNIT, on all file systems: layers, logs, volumes"
        " and deleted open files. Measured while a disk is near a threshold; a pod that is not measured has no series.",
        _POD,
        _DISK_UNITS,
    ),
    Family(
        "nodeagent_pod_memory_above_request_bytes",
        exposition.GAUGE,
        "Memory above the request, of the pods with the most (`metrics.perPod`); negative below the request.",
        _POD,
    ),
    Family(
        "nodeagent_oom_kills",
        exposition.COUNTER,
        "Processes that the kernel's OOM killer ended, by cause and by what they belonged to.",
        ("cause", "victim"),
    ),
    Family(
        "nodeagent_lost_races",
        exposition.COUNTER,
        "Shortages of the node that ended in OOM kills instead of an eviction, by the reason.",
        ("loss",),
    ),
    Family("nodeagent_brakes_active", exposition.GAUGE, "Pods with an active brake (throttled or frozen)."),
    Family(
        "nodeagent_oom_scores_raised",
        exposition.GAUGE,
        "Pods whose oom_score_adj is raised (`escalation.oomScoreAdj`).",
    ),
    Family(
        "nodeagent_api_evictions_in_flight",
        exposition.GAUGE,
        "Evictions and deletions of pods that the API server has not answered yet; not EvictionRequests.",
    ),
    Family(
        "nodeagent_workers_stuck",
        exposition.GAUGE,
        "Worker threads that ended or exceed the time limit of their step. No series while all work.",
        ("worker",),
    ),
    Family(
        "nodeagent_worker_failures", exposition.COUNTER, "How often a worker thread ended with an error.", ("worker",)
    ),
    # the loop
    Family("nodeagent_stage_duration_seconds", exposition.HISTOGRAM, "Duration of the stages of a sync.", ("stage",)),
    Family("nodeagent_syncs", exposition.COUNTER, "Syncs of the loop."),
    Family(
        "nodeagent_wakeups",
        exposition.COUNTER,
        "Wake-ups of the loop by source: its timer or a kernel event.",
        ("reason",),
    ),
    Family("nodeagent_sync_age_seconds", exposition.GAUGE, "Time since the last sync."),
    Family("nodeagent_failures", exposition.COUNTER, "Failures of the agent itself.", ("what",)),
    Family(
        "nodeagent_config_reloads", exposition.COUNTER, "Reloads of the configuration: applied or invalid.", ("result",)
    ),
    Family(
        "nodeagent_profile_active",
        exposition.GAUGE,
        "1: the profile of the configuration applies to this node.",
        ("profile",),
    ),
    Family(
        "nodeagent_config_last_reload_successful",
        exposition.GAUGE,
        "0: the file on disk is invalid, an older configuration is in force.",
    ),
    # others
    Family("nodeagent_api_watch_failures", exposition.COUNTER, "Failed lists and broken watches.", ("watch",)),
    Family(
        "nodeagent_api_identity",
        exposition.GAUGE,
        "1: requests for pods, evictions, claims and the Node use the rights of the node, or of the serviceAccount.",
        ("identity",),
    ),
    Family("nodeagent_api_relists", exposition.COUNTER, "Full lists after a watch ended.", ("watch",)),
    Family("nodeagent_events_dropped", exposition.COUNTER, "Kubernetes Events that were dropped."),
    Family(
        "nodeagent_log_lines_dropped",
        exposition.COUNTER,
        "Log lines that were dropped because the reader was too slow.",
    ),
    Family("nodeagent_recorder_samples", exposition.COUNTER, "Samples of the node that were recorded."),
    Family(
        "nodeagent_recorder_samples_dropped",
        exposition.COUNTER,
        "Samples that were not recorded because the recorder was behind.",
    ),
    Family("nodeagent_recorder_failures", exposition.COUNTER, "Failed writes of the recorder."),
    Family(
        "nodeagent_recorder_bytes",
        exposition.GAUGE,
        "Size of the recording in its directory (disk), and of what waits for a disk that is short (memory).",
        ("place",),
    ),
    # own cost, with the names that all Prometheus clients use
    Family("process_cpu_seconds", exposition.COUNTER, "User and system CPU time of the agent."),
    Family("process_resident_memory_bytes", exposition.GAUGE, "Resident memory of the agent."),
    Family("process_open_fds", exposition.GAUGE, "Open file descriptors of the agent."),
    Family("process_max_fds", exposition.GAUGE, "Limit of open file descriptors."),
    Family("process_start_time_seconds", exposition.GAUGE, "Start of the agent, seconds since the epoch."),
)
