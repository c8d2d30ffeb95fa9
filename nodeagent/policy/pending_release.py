"""Pending release: relief that is expected and not yet visible in the signal.

A resource that is being released is not evicted for twice: terminating pods and evictions in flight count against the
deficit, for as long as their grace and some slack allow, and no longer.
"""

from typing import Final, NamedTuple

from nodeagent.config.schema import Config
from nodeagent.model import (
    DISK_SIGNALS,
    MEMORY_SIGNALS,
    SIGNAL_TABLE,
    NodeSnapshot,
    PodUsage,
    PodView,
    Refusal,
    RefusalCode,
    Signal,
    Tier,
)
from nodeagent.policy import in_flight, plausibility, relief
from nodeagent.policy.in_flight import EvictionStage, InFlightEviction, InFlightState

HARD_PATIENCE_S: Final = 5.0
"""Hard tier: a terminating pod with more grace left than this is shortened. Long enough for a pod that is about to end
by itself, short against the 10 s in which the OOM killer won every ramp of 50 MiB/s (performance.md R1)."""
SOFT_PATIENCE_S: Final = 30.0
"""Soft tier: a terminating pod counts while it has at most this grace left (Kubernetes' default), or the configured
maximum if that is longer."""


class PendingRelease(NamedTuple):
    """What is being released."""

    amount: int
    pods: tuple[str, ...]
    """The releasing pods, for texts."""
    long_grace: tuple[PodView, ...]
    """Terminating pods with more grace left than this tier waits for, that were not shortened yet and for which no
    request is in flight."""
    uids: frozenset[str] = frozenset()
    """The pods of `amount` that are still listed. A pod whose release is unknown is not among them: it may be out of
    reach, and other pods are not chosen as if it were gone."""


def pending(
    state: InFlightState, snapshot: NodeSnapshot, signal: Signal, *, tier: Tier, now: float, config: Config
) -> PendingRelease:
    """What terminating pods and evictions in flight release of `signal`'s resource within this tier's patience."""
    if not state.departing and not state.entries:
        return PendingRelease(0, (), ())
    limit = plausibility.usage_limit(snapshot, signal, config=config)
    swap_memory = relief.swap_memory(snapshot, config=config)
    soft_s = max(SOFT_PATIENCE_S, config.eviction_max_pod_grace_period_s)
    patience_s = HARD_PATIENCE_S if tier is Tier.HARD else soft_s
    entries = {entry.pod_uid: entry for entry in state.entries}
    amount = 0
    pods: list[str] = []
    uids: list[str] = []
    long_grace: list[PodView] = []
    for view in snapshot.pods:
        pod = view.pod
        entry = entries.pop(pod.uid, None)
        departing = state.departing.get(pod.uid)
        if entry is None and departing is None:
            continue
        if entry is not None and (departing is None or not entry.buckets or entry.stage is EvictionStage.GONE):
            counts = _counts(entry, snapshot, now=now)
        else:
            assert departing is not None
            left_s = departing.ends_at - now
            counts = -in_flight.SLACK_S <= left_s <= patience_s
            if left_s > patience_s and not departing.shortened:
                long_grace.append(view)
        if counts:
            freed = relief.predicted_relief(view.usage, signal, snapshot.layout, limit=limit, swap_memory=swap_memory)
            if freed is None and entry is not None and same_resource(entry.signal, signal, snapshot):
                freed = _remaining(entry, snapshot)
            if entry is not None and view.usage is not None:
                freed = max(freed or 0, _beyond_relief(entry, view.usage, signal, snapshot, limit=limit))
            if freed:
                amount += freed
                uids.append(pod.uid)
            dry_run = entry is not None and entry.stage is EvictionStage.DRY_RUN
            pods.append(f"{pod.key} (dry run)" if dry_run else pod.key)
    for entry in entries.values():  # no longer listed, or the list of the pods is incomplete
        if same_resource(entry.signal, signal, snapshot) and _counts(entry, snapshot, now=now):
            amount += _remaining(entry, snapshot)
            pods.append(entry.pod)
    return PendingRelease(amount, tuple(pods), tuple(long_grace), frozenset(uids))


def wait_for_release(
    state: InFlightState, snapshot: NodeSnapshot, *, now: float, signal: Signal | None
) -> Refusal | None:
    """Why the next eviction (for `signal`, or for any if that is None) waits for the release of an earlier one: only a
    sample newer than that shows whether another eviction is needed. None: no eviction in flight has time left."""
    for entry in state.entries:
        if entry.limit and entry.signal in MEMORY_SIGNALS:
            continue  # not evicted for the node: what it releases counts, but nothing waits for it
        concerned = signal is None or _is_waited_for(entry.signal, signal, snapshot)
        if entry.stage is EvictionStage.DRY_RUN and now > entry.until:
            continue  # a real eviction would be gone by now
        if concerned and _counts(entry, snapshot, now=now):
            until = entry.gone_at + in_flight.DISK_RELEASE_S if entry.gone_at is not None else entry.until
            return Refusal(
                RefusalCode.WAITS_FOR_RELEASE,
                f"{entry.pod} is being evicted for {entry.signal.value} by {entry.plan_id} ({entry.stage.value}); "
                f"waiting up to {max(0.0, until - now):.0f}s for its release",
            )
    return None


def _is_waited_for(evicted_for: Signal, signal: Signal, snapshot: NodeSnapshot) -> bool:
    """Both signals of memory contain the pods, so what is released for one is waited for by the other."""
    both_memory = evicted_for in MEMORY_SIGNALS and signal in MEMORY_SIGNALS
    return both_memory or same_resource(evicted_for, signal, snapshot)


def same_resource(one: Signal, other: Signal, snapshot: NodeSnapshot) -> bool:
    """Whether two signals are the same, or measure the same file system."""
    if one is other:
        return True
    if one not in DISK_SIGNALS or SIGNAL_TABLE[one].unit is not SIGNAL_TABLE[other].unit:
        return False
    device = snapshot.observations[one].device
    return device is not None and other in DISK_SIGNALS and device == snapshot.observations[other].device


def _counts(entry: InFlightEviction, snapshot: NodeSnapshot, *, now: float) -> bool:
    """Whether the release of an eviction is still expected."""
    if entry.stage is EvictionStage.GONE:
        return not entry.cleaned and not in_flight.is_released(entry, snapshot)
    if entry.stage is EvictionStage.DRY_RUN:
        return True
    return entry.planned_at <= now <= entry.until


def _remaining(entry: InFlightEviction, snapshot: NodeSnapshot) -> int:
    """The part of the predicted relief that the sample does not show yet."""
    if entry.signal not in DISK_SIGNALS:
        return entry.predicted
    released = (in_flight.observation_for(entry, snapshot).available or 0) - entry.available
    return min(entry.predicted, max(0, entry.predicted - released))


def _beyond_relief(
    entry: InFlightEviction, usage: PodUsage, signal: Signal, snapshot: NodeSnapshot, *, limit: int
) -> int:
    """What is released although the pod's relief no longer shows it.

    Of PIDs the children that no sample sees. Of a disk the files of containers whose cgroups are gone, because they
    cannot be measured any more. Of memory what the kernel has unmapped and not yet freed: while a process ends, its
    pages are in neither anon nor MemAvailable, for a second and more behind a low CPU limit.
    """
    if entry.signal in MEMORY_SIGNALS and signal in MEMORY_SIGNALS:
        return min(entry.predicted, _charged(usage, limit=limit))
    if same_resource(entry.signal, signal, snapshot) and (signal in DISK_SIGNALS or signal is Signal.PID):
        return _remaining(entry, snapshot)
    return 0


def _charged(usage: PodUsage, *, limit: int) -> int:
    """The memory that the pod is charged for, less page cache as far as that is known."""
    used, cache = (plausibility.plausible(each, limit=limit) for each in (usage.memory_usage, usage.memory_file_cache))
    if used is None or cache is None:
        return plausibility.plausible(usage.memory_working_set, limit=limit) or 0
    return max(0, used - cache)
