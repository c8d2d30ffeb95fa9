"""Series of what other packages and the kernel count; read at each scrape by the server's thread."""

import collections
import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from nodeagent.actuators.conditions import ConditionConflict
from nodeagent.kube.cluster_readers import WatchCounts
from nodeagent.records.sample_recorder import RecorderCounts
from nodeagent.telemetry.exposition import Sample


class WalkCounters(NamedTuple):
    """Progress of the walk worker."""

    running: bool
    paths: int
    paths_done: int
    entries: int
    took_s: float
    finished_at: float | None
    """CLOCK_BOOTTIME; None before the first walk has ended."""


class RuntimeCounters(NamedTuple):
    """Counters of other packages; read at each scrape by the server's thread."""

    pods_synced_at: float | None = None
    """CLOCK_BOOTTIME; None: the pods were never listed."""
    condition_conflicts: Sequence[ConditionConflict] = ()
    asserted: frozenset[str] = frozenset()
    """Types of the standard conditions whose True was written by this agent."""
    tainted: frozenset[str] = frozenset()
    """Types of the conditions whose taint is on the Node."""
    watches: Sequence[WatchCounts] = ()
    condition_writes: int = 0
    events_dropped: int = 0
    log_lines_dropped: int = 0
    brakes_active: int = 0
    oom_scores_raised: int = 0
    api_evictions_in_flight: int = 0
    api_identity: str = ""
    """Whose rights the requests for pods use: `node` or `serviceAccount`; empty: no answer of the API server yet."""
    workers_stuck: Sequence[str] = ()
    """The kind of each stuck thread (`runtime.workers`)."""
    worker_failures: Mapping[str, int] = {}
    """How often workers ended with an error and restarted, by kind."""
    workers_failed: Sequence[str] = ()
    """Workers that have failed for so long that only a new process may help, with the reason."""
    walk: WalkCounters | None = None
    """None: no disk was near a threshold yet."""
    recorder: RecorderCounts | None = None
    """None: samples are not recorded."""
    profiles: Mapping[str, bool] = {}
    """The profiles of the configuration, and whether each applies to this node."""


def samples(counters: RuntimeCounters, *, now: float) -> Iterator[Sample]:
    """Those of all counters. `now`: CLOCK_BOOTTIME."""
    yield from _cluster(counters, now)
    if counters.walk is not None:
        yield from _walk(counters.walk, now)
    for name, applies in counters.profiles.items():
        yield Sample("nodeagent_profile_active", (name,), int(applies))
    yield Sample("nodeagent_log_lines_dropped", (), counters.log_lines_dropped)
    yield Sample("nodeagent_brakes_active", (), counters.brakes_active)
    yield Sample("nodeagent_oom_scores_raised", (), counters.oom_scores_raised)
    if counters.recorder is not None:
        yield from _recorder(counters.recorder)


def _cluster(counters: RuntimeCounters, now: float) -> Iterator[Sample]:
    if counters.pods_synced_at is not None:
        yield Sample("nodeagent_pods_view_age_seconds", (), max(0.0, now - counters.pods_synced_at))
    for conflict in counters.condition_conflicts:
        labels = (str(conflict.type),)
        yield Sample("nodeagent_condition_asserted", labels, int(str(conflict.type) in counters.asserted))
        yield Sample("nodeagent_taint_present", labels, int(str(conflict.type) in counters.tainted))
        yield Sample("nodeagent_condition_true_by_other", labels, int(conflict.true_by_other))
        yield Sample("nodeagent_condition_overwrites", labels, conflict.overwrites)
        yield Sample("nodeagent_condition_wanted_seconds", labels, conflict.wanted_s)
        yield Sample("nodeagent_condition_true_seconds", labels, conflict.true_s)
    yield Sample("nodeagent_condition_writes", (), counters.condition_writes)
    yield Sample("nodeagent_api_evictions_in_flight", (), counters.api_evictions_in_flight)
    if counters.api_identity:
        yield Sample("nodeagent_api_identity", (counters.api_identity,), 1)
    for worker, number in collections.Counter(counters.workers_stuck).items():
        yield Sample("nodeagent_workers_stuck", (worker,), number)
    for worker, number in counters.worker_failures.items():
        yield Sample("nodeagent_worker_failures", (worker,), number)
    for watch in counters.watches:
        yield Sample("nodeagent_api_watch_failures", (watch.name,), watch.failures)
        yield Sample("nodeagent_api_relists", (watch.name,), watch.relists)
    yield Sample("nodeagent_events_dropped", (), counters.events_dropped)


def _recorder(recorder: RecorderCounts) -> Iterator[Sample]:
    yield Sample("nodeagent_recorder_samples", (), recorder.samples)
    yield Sample("nodeagent_recorder_samples_dropped", (), recorder.dropped)
    yield Sample("nodeagent_recorder_failures", (), recorder.failures)
    yield Sample("nodeagent_recorder_bytes", ("disk",), recorder.disk_bytes)
    yield Sample("nodeagent_recorder_bytes", ("memory",), recorder.memory_bytes)


def _walk(walk: WalkCounters, now: float) -> Iterator[Sample]:
    yield Sample("nodeagent_disk_walk_running", (), int(walk.running))
    yield Sample("nodeagent_disk_walk_paths", (), walk.paths)
    yield Sample("nodeagent_disk_walk_paths_done", (), walk.paths_done)
    yield Sample("nodeagent_disk_walk_entries", (), walk.entries)
    if walk.finished_at is not None:
        yield Sample("nodeagent_disk_walk_duration_seconds", (), walk.took_s)
        yield Sample("nodeagent_disk_walk_age_seconds", (), max(0.0, now - walk.finished_at))


def own_cost(started_wall: float) -> Iterator[Sample]:
    """What this process costs, as the kernel counts it. `started_wall`: epoch seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    yield Sample("process_cpu_seconds", (), used.ru_utime + used.ru_stime)
    yield Sample("process_max_fds", (), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield Sample("process_start_time_seconds", (), started_wall)
    try:
        with open("/proc/self/statm", "rb") as file:
            yield Sample("process_resident_memory_bytes", (), int(file.read().split()[1]) * resource.getpagesize())
        yield Sample("process_open_fds", (), len(os.listdir("/proc/self/fd")) - 1)  # minus this listing
    except OSError:  # out of descriptors, or no /proc: unknown, so no series
        return
