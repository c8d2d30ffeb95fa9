"""The pending-release ledger: what is already on its way out, and what evictions really brought back.

Promises:

1. A resource that is being released is not evicted for twice: terminating pods and evictions under way count against
   the deficit, for as long as their grace and a little more allow, and not for ever.
2. Whatever happened to a request (crash before it, time-out after it) its pod counts as leaving until the time is up in
   which it would have left.
3. Relief is measured only by samples read after the last victim of a decision was gone.

Theory of operation. An `Entry` is made when a decision is made, before anything is sent, and walks

    planned -> accepted     the API said so, or the pod is seen terminating or gone
    planned -> doubt        the request timed out: it may or may not have been heard
    planned -> (removed)    the request is proven to have evicted nothing
    planned -> unlisted     the API server says that there is no such pod: if it vanishes from the node within a moment,
                            what it held is on its way; if not, it is asked for again
    planned -> killed       its processes were ended without the API; not a failure when its time is up, because its
                            pod and cgroup may well stay
    planned -> rehearsed    nothing was sent: what the pod holds counts as released until its signal is all right again
                            or the pod is really gone, so that a rehearsal names those who would go and nobody more.
                            Forgotten where evictions are meant, and never measured: what comes back is not its doing
    any     -> gone         the pod's cgroup is absent from a snapshot; its files may follow later
    any     -> (removed)    not gone when its time was up: a failure if it had been accepted

Pods that others are deleting have no entry, only a `Departing` with the end of their grace on our clock, reckoned once
when they are first seen, so that later jumps of the wall clock change nothing. When all entries of a decision are gone
the first newer sample gives its `ReliefReport`; relief of less than half of the prediction is a failure of each of its
evictions, and enough of them in a row trip the breaker for that signal.
"""

import enum
from collections.abc import Container, Iterable, Mapping
from typing import Final, NamedTuple

from nodeagent.config.schema import Config, Mode
from nodeagent.model import (
    DISK_SIGNALS,
    MEMORY_SIGNALS,
    SIGNAL_TABLE,
    MemoryModel,
    NodeSnapshot,
    Observation,
    Pod,
    PodView,
    Refusal,
    RefusalCode,
    ReliefReport,
    Signal,
    Tier,
    units,
)
from nodeagent.policy import relief

SLACK_S: Final = 15.0
"""How long after its grace a release is still believed in. The slowest release of the kubelet that was measured took
12.9 s (MEASURED 1); longer would let a hung pod hold back help, shorter would evict a second pod for the same need."""
KILLED_S: Final = 5.0
"""How long a killed pod's release is believed in. The exit of a process that held 400 MiB takes a tenth of a second."""
HARD_PATIENCE_S: Final = 5.0
"""Hard tier: a terminating pod with more grace left than this is not waited for but shortened. Long enough for a pod
that is about to end by itself, short against the 10 s in which the OOM killer won every ramp of 50 MiB/s (MEASURED 1).
"""
SOFT_PATIENCE_S: Final = 30.0
"""Soft tier: a terminating pod counts while it has at most this grace left (Kubernetes' default), or the configured
maximum if that is longer."""
DISK_RELEASE_S: Final = 30.0
"""A pod's files are removed after its cgroup: how long that is waited for. The kubelet gives it as long before it
judges its own eviction (podCleanupTimeout)."""
REMOVED: Final = 0.9
"""Share of the predicted relief from which on a pod's files count as removed before that."""
BEYOND: Final = 1024
"""How many times what the node has a kubelet's order takes a pod's usage to be possible. A kubelet believes any number,
and files that share blocks or are compressed do add up to more than their disk; a number that has gone wrong is usually
off by far more."""
ENOUGH: Final = 0.5
"""Measured relief below this share of the predicted one is a failure."""


class EvictionStage(enum.StrEnum):
    PLANNED = "planned"
    ACCEPTED = "accepted"
    UNCERTAIN = "uncertain"
    KILLED = "killed"
    UNLISTED = "unlisted"
    DRY_RUN = "dry-run"
    GONE = "gone"


class InFlightEviction(NamedTuple):
    """One eviction under way."""

    plan_id: str
    pod_uid: str
    cgroup_uid: str
    pod: str
    """`namespace/name`, for texts."""
    owner: str
    signal: Signal
    memory_model: MemoryModel
    tier: Tier
    stage: EvictionStage
    planned_at: float
    sample_at: float
    """When the snapshot of the decision was taken."""
    available: int
    """What that snapshot had of the signal."""
    predicted: int
    grace_s: float
    until: float
    """After this its release no longer counts."""
    buckets: tuple[str, ...]
    """Where its tokens came from; empty when the pod was only shortened."""
    gone_at: float | None = None
    cleaned: bool = False
    """Its files went with it: the kubelet removes a pod's object only after its containers and volumes. Told in the
    kubelet's order alone; ours waits until the sample shows it."""
    limit: str = ""
    """Set when the pod goes for a limit of its own: nothing was predicted, so nothing is measured."""


class TerminatingPod(NamedTuple):
    """A terminating pod, on our clock."""

    ends_at: float
    deletion_wall: float
    """metadata.deletionTimestamp when it was last looked at."""
    shortened: bool = False


class Failures(NamedTuple):
    """Evictions in a row that brought back less than half of what they should."""

    times: int
    last: float


class InFlightState(NamedTuple):
    entries: tuple[InFlightEviction, ...] = ()
    departing: Mapping[str, TerminatingPod] = {}
    """By pod UID."""
    failures: Mapping[str, Failures] = {}
    """By signal."""


class Observed(NamedTuple):
    """What a snapshot said about the ledger."""

    state: InFlightState
    reports: tuple[ReliefReport, ...]
    confirmed: tuple[InFlightEviction, ...]
    """Entries of which it became certain only now that their pod goes."""


# --- what a snapshot changes -----------------------------------------------------------------------------------------


def advance(
    state: InFlightState, snapshot: NodeSnapshot, *, now: float, config: Config, fine: Container[Signal] = ()
) -> Observed:
    """Bring the ledger up to date with what is seen. `fine`: signals above all their thresholds."""
    departing = _departing(state.departing, snapshot, now=now)
    if not state.entries:
        if departing is not state.departing:
            state = state._replace(departing=departing)
        return Observed(state, (), ())
    present = {view.pod.uid: view for view in snapshot.pods}
    entries: list[InFlightEviction] = []
    confirmed: list[InFlightEviction] = []
    expired: list[InFlightEviction] = []
    for entry in state.entries:
        if entry.stage is EvictionStage.DRY_RUN:
            wanted = entry.limit or now <= entry.until or entry.signal not in fine
            if config.mode is Mode.DRY_RUN and entry.pod_uid in present and entry.planned_at <= now and wanted:
                entries.append(entry)
            continue
        moved = _moved(entry, present.get(entry.pod_uid), snapshot, kubelet=config.ranking.kubelet)
        certain = moved.stage in (EvictionStage.ACCEPTED, EvictionStage.GONE) and entry.stage in (
            EvictionStage.PLANNED,
            EvictionStage.UNCERTAIN,
        )
        if certain and entry.buckets:
            confirmed.append(moved)
        if moved.stage is not EvictionStage.GONE and not moved.planned_at <= now <= moved.until:
            expired.append(moved)
        else:
            entries.append(moved)
    failures = state.failures
    for entry in expired:
        if entry.stage is EvictionStage.ACCEPTED and not entry.limit:
            failures = _failed(failures, entry.signal, 1, now=now, config=config)
    kept, reports = _measured(
        [each for each in entries if not (each.limit and each.stage is EvictionStage.GONE)], snapshot
    )
    for report in reports:
        if report.measured < ENOUGH * report.predicted:
            failures = _failed(failures, report.signal, len(report.pod_uids), now=now, config=config)
        else:
            failures = {signal: each for signal, each in failures.items() if signal != report.signal.value}
    return Observed(InFlightState(tuple(kept), departing, failures), reports, tuple(confirmed))


def after_suspend(state: InFlightState, slept_s: float, *, now: float) -> InFlightState:
    """The ledger after so long a sleep of the machine: whoever ends the pods has slept as well. No entry is given more
    than its whole time from now on, for its outcome may have come in since."""
    entries = [
        entry._replace(
            until=max(entry.until, min(entry.until + slept_s, now + entry.grace_s + SLACK_S)),
            gone_at=min(entry.gone_at + slept_s, now) if entry.gone_at is not None else None,
        )
        for entry in state.entries
    ]
    departing = {uid: each._replace(ends_at=each.ends_at + slept_s) for uid, each in state.departing.items()}
    return state._replace(entries=tuple(entries), departing=departing)


def _departing(
    known: Mapping[str, TerminatingPod], snapshot: NodeSnapshot, *, now: float
) -> Mapping[str, TerminatingPod]:
    """End of grace, on our clock, of every terminating pod that still has a cgroup."""
    found: dict[str, TerminatingPod] = {}
    for pod, usage in snapshot.pods:
        if pod.deletion_wall is None or usage is None:
            continue
        earlier = known.get(pod.uid)
        if earlier is None:
            found[pod.uid] = TerminatingPod(now + _grace_left(pod, snapshot), deletion_wall=pod.deletion_wall)
        else:
            # The API server's stamp moves when somebody shortens the grace; ours is not looked at again: it may jump.
            moved_s = min(0.0, pod.deletion_wall - earlier.deletion_wall)
            found[pod.uid] = earlier._replace(ends_at=earlier.ends_at + moved_s, deletion_wall=pod.deletion_wall)
    return found if found or known else known


def _grace_left(pod: Pod, snapshot: NodeSnapshot) -> float:
    if pod.deletion_wall is None:
        return 0.0
    left_s = max(0.0, pod.deletion_wall - snapshot.wall_time)
    if pod.deletion_grace_s is not None and pod.deletion_grace_s >= 0:
        left_s = min(left_s, pod.deletion_grace_s)
    return left_s if left_s < units.MAX_PLAUSIBLE else 0.0  # NaN and nonsense: no grace


def _moved(entry: InFlightEviction, view: PodView | None, snapshot: NodeSnapshot, *, kubelet: bool) -> InFlightEviction:
    """The entry after a look at its pod. A kubelet decides anew with the very sample that it takes when its victim is
    cleaned up, files included; our own order waits for one that is newer than that."""
    if snapshot.taken_at <= entry.sample_at:
        return entry
    if entry.stage is EvictionStage.GONE:
        return entry._replace(cleaned=True) if kubelet and view is None and not entry.cleaned else entry
    if view is None or view.usage is None:
        if entry.stage is EvictionStage.PLANNED and view is not None and view.pod.deletion_wall is None:
            return entry  # its cgroup could not be read this once; nothing says that it goes
        cleaned = kubelet and view is None
        at_once = cleaned or (kubelet and entry.signal not in DISK_SIGNALS)
        gone_at = entry.sample_at if at_once else snapshot.taken_at
        return entry._replace(stage=EvictionStage.GONE, gone_at=gone_at, cleaned=cleaned)
    if (
        entry.stage in (EvictionStage.PLANNED, EvictionStage.UNCERTAIN)
        and view.pod.deletion_wall is not None
        and entry.buckets
    ):
        return entry._replace(stage=EvictionStage.ACCEPTED)
    return entry


def _measured(
    entries: list[InFlightEviction], snapshot: NodeSnapshot
) -> tuple[list[InFlightEviction], tuple[ReliefReport, ...]]:
    """Split off the decisions whose victims are all gone and whose signal has a newer sample."""
    waiting = {(entry.plan_id, entry.signal) for entry in entries if entry.stage is not EvictionStage.GONE}
    kept: list[InFlightEviction] = []
    groups: dict[tuple[str, Signal], list[InFlightEviction]] = {}
    for entry in entries:
        key = (entry.plan_id, entry.signal)
        if key in waiting or _look(entry, snapshot).available is None or not _released(entry, snapshot):
            waiting.add(key)
    for entry in entries:
        key = (entry.plan_id, entry.signal)
        if key in waiting:
            kept.append(entry)
        else:
            groups.setdefault(key, []).append(entry)
    reports = []
    for (plan_id, signal), group in groups.items():
        after = _look(group[0], snapshot)
        assert after.available is not None
        reports.append(
            ReliefReport(
                plan_id=plan_id,
                signal=signal,
                pod_uids=tuple([entry.pod_uid for entry in group]),
                predicted=sum(entry.predicted for entry in group),
                measured=after.available - group[0].available,
                took_s=after.read_at - group[0].planned_at,
            )
        )
    return kept, tuple(reports)


def _released(entry: InFlightEviction, snapshot: NodeSnapshot) -> bool:
    """Whether what a gone pod held is in the sample: memory and PIDs at once, files when they were removed."""
    seen = _look(entry, snapshot)
    if entry.gone_at is None or not seen.read_at > entry.gone_at:
        return False
    if entry.cleaned or entry.signal not in DISK_SIGNALS or seen.read_at - entry.gone_at >= DISK_RELEASE_S:
        return True
    return (seen.available or 0) - entry.available >= REMOVED * entry.predicted


def _to_come(entry: InFlightEviction, snapshot: NodeSnapshot) -> int:
    """What of the predicted relief is not in the sample yet."""
    if entry.signal not in DISK_SIGNALS:
        return entry.predicted
    came = (_look(entry, snapshot).available or 0) - entry.available
    return min(entry.predicted, max(0, entry.predicted - came))


def same_resource(one: Signal, other: Signal, snapshot: NodeSnapshot) -> bool:
    """Whether two signals are the same, or stand for the same file system."""
    if one is other:
        return True
    if one not in DISK_SIGNALS or SIGNAL_TABLE[one].unit is not SIGNAL_TABLE[other].unit:
        return False
    device = snapshot.observations[one].device
    return device is not None and other in DISK_SIGNALS and device == snapshot.observations[other].device


def _look(entry: InFlightEviction, snapshot: NodeSnapshot) -> Observation:
    """The observation that the entry's decision looked at."""
    return snapshot.observe(entry.signal, entry.memory_model)


# --- the breaker -----------------------------------------------------------------------------------------------------


def _failed(
    failures: Mapping[str, Failures], signal: Signal, times: int, *, now: float, config: Config
) -> Mapping[str, Failures]:
    earlier = failures.get(signal.value)
    if earlier is not None and not 0 <= now - earlier.last <= config.relief.failure_memory_s:
        earlier = None
    return {**failures, signal.value: Failures((earlier.times if earlier else 0) + times, now)}


def circuit_breaker(state: InFlightState, signal: Signal, *, now: float, config: Config) -> Refusal | None:
    """Why no more pods are evicted for `signal` after evictions that did not help, or None."""
    failures = state.failures.get(signal.value)
    if failures is None or failures.times < config.relief.failures_before_stop:
        return None
    since_s = now - failures.last
    if not 0 <= since_s <= config.relief.failure_memory_s:
        return None
    return Refusal(
        RefusalCode.CIRCUIT_BREAKER,
        f"{signal.value}: {failures.times} evictions in a row brought back less than half of what was predicted; "
        f"stopped for {config.relief.failure_memory_s - since_s:.0f}s more",
    )


# --- pending release -------------------------------------------------------------------------------------------------


class PendingRelease(NamedTuple):
    """What is on its way out."""

    amount: int
    pods: tuple[str, ...]
    """Who brings it, for texts."""
    long_grace: tuple[PodView, ...]
    """Terminating pods with more grace left than this tier waits for, that were not shortened yet."""
    uids: frozenset[str] = frozenset()
    """The pods of `amount` that are still listed. One whose release is not known is not among them: it may be out of
    reach, and others are not chosen as if it were gone."""


def pending(
    state: InFlightState, snapshot: NodeSnapshot, signal: Signal, *, tier: Tier, now: float, config: Config
) -> PendingRelease:
    """What terminating pods and evictions under way will release of `signal`'s resource within this tier's patience."""
    if not state.departing and not state.entries:
        return PendingRelease(0, (), ())
    most = usage_limit(snapshot, signal, config=config)
    soft_s = max(SOFT_PATIENCE_S, config.eviction_max_pod_grace_period_s)
    patience_s = HARD_PATIENCE_S if tier is Tier.HARD else soft_s
    entries = {entry.pod_uid: entry for entry in state.entries}
    amount = 0
    pods: list[str] = []
    uids: list[str] = []
    slow: list[PodView] = []
    for view in snapshot.pods:
        pod = view.pod
        entry = entries.pop(pod.uid, None)
        departing = state.departing.get(pod.uid)
        if entry is None and departing is None:
            continue
        if entry is not None and (departing is None or not entry.buckets or entry.stage is EvictionStage.GONE):
            counts = _entry_counts(entry, snapshot, now=now)
        else:
            assert departing is not None
            left_s = departing.ends_at - now
            counts = -SLACK_S <= left_s <= patience_s
            if left_s > patience_s and not departing.shortened:
                slow.append(view)
        if counts:
            freed = relief.predicted_relief(view.usage, signal, snapshot.layout, limit=most)
            if freed is None and entry is not None and same_resource(entry.signal, signal, snapshot):
                freed = _to_come(entry, snapshot)
            if entry is not None and _outlasts(entry, signal, snapshot):
                freed = max(freed or 0, _to_come(entry, snapshot))
            if freed:
                amount += freed
                uids.append(pod.uid)
            pods.append(
                f"{pod.key} (dry run)" if entry is not None and entry.stage is EvictionStage.DRY_RUN else pod.key
            )
    for entry in entries.values():  # gone from the API, or from a view of the pods that is not complete
        if same_resource(entry.signal, signal, snapshot) and _entry_counts(entry, snapshot, now=now):
            amount += _to_come(entry, snapshot)
            pods.append(entry.pod)
    return PendingRelease(amount, tuple(pods), tuple(slow), frozenset(uids))


def _outlasts(entry: InFlightEviction, signal: Signal, snapshot: NodeSnapshot) -> bool:
    """Whether more is to come than its pod's usage still says: of PIDs the children that are never all seen, of a disk
    the files of containers whose cgroups have gone already, for they cannot be measured any more."""
    if entry.signal in DISK_SIGNALS:
        return same_resource(entry.signal, signal, snapshot)
    return entry.signal is signal is Signal.PID


def _entry_counts(entry: InFlightEviction, snapshot: NodeSnapshot, *, now: float) -> bool:
    if entry.stage is EvictionStage.GONE:
        return not entry.cleaned and not _released(entry, snapshot)
    if entry.stage is EvictionStage.DRY_RUN:
        return True
    return entry.planned_at <= now <= entry.until


def awaits_release(state: InFlightState) -> bool:
    """Whether something was really evicted that may go any moment, and what it brings back is to be measured then."""
    return any(entry.stage is not EvictionStage.DRY_RUN for entry in state.entries)


def wait_for_release(
    state: InFlightState, snapshot: NodeSnapshot, *, now: float, signal: Signal | None
) -> Refusal | None:
    """Why the next eviction waits for the end of an earlier one (for `signal`, or for anything when that is None):
    only a sample newer than its release tells whether another one is needed. None when nothing is under way, or when
    what is has had its time."""
    for entry in state.entries:
        ours = signal is None or same_resource(entry.signal, signal, snapshot)
        if entry.stage is EvictionStage.DRY_RUN and now > entry.until:
            continue  # by now it would be gone
        if ours and _entry_counts(entry, snapshot, now=now):
            until = entry.gone_at + DISK_RELEASE_S if entry.gone_at is not None else entry.until
            return Refusal(
                RefusalCode.WAITS_FOR_RELEASE,
                f"{entry.pod} is being evicted for {entry.signal.value} by {entry.plan_id} ({entry.stage.value}); "
                f"waiting up to {max(0.0, until - now):.0f}s for what that brings",
            )
    return None


def already_in_flight(entry: InFlightEviction) -> Refusal:
    """Why a pod with an entry is not chosen again."""
    return Refusal(RefusalCode.EVICTION_IN_FLIGHT, f"being evicted already by {entry.plan_id} ({entry.stage})")


# --- what a decision and its outcomes change -------------------------------------------------------------------------


def add(state: InFlightState, entries: Iterable[InFlightEviction]) -> InFlightState:
    """Write down planned evictions. A pod that is only shortened is remembered so that it is not shortened twice."""
    added = tuple(entries)
    if not added:
        return state
    departing = dict(state.departing)
    for entry in added:
        if entry.pod_uid in departing:
            departing[entry.pod_uid] = departing[entry.pod_uid]._replace(shortened=True)
    return state._replace(entries=(*state.entries, *added), departing=departing)


def entry_for(state: InFlightState, *, plan_id: str, pod_uid: str) -> InFlightEviction | None:
    """The entry that an outcome belongs to."""
    return next((each for each in state.entries if each.pod_uid == pod_uid and each.plan_id == plan_id), None)


def replace(state: InFlightState, entry: InFlightEviction, *, by: InFlightEviction | None) -> InFlightState:
    """The ledger with `entry` replaced, or removed."""
    entries = [by if each is entry else each for each in state.entries]
    return state._replace(entries=tuple([each for each in entries if each is not None]))


def usage_limit(snapshot: NodeSnapshot, signal: Signal, *, config: Config) -> int:
    """More than this of the resource is not believed of one pod: the node's memory, the file system, the PID limit; in
    the kubelet's order `BEYOND` times that."""
    if signal in MEMORY_SIGNALS:
        capacity = snapshot.memory.total if snapshot.memory is not None else None
        capacity = capacity or snapshot.observations[Signal.MEMORY].capacity
    else:
        capacity = snapshot.observations[signal].capacity
    if type(capacity) is not int or capacity <= 0:
        return units.MAX_PLAUSIBLE
    return min(units.MAX_PLAUSIBLE, capacity * BEYOND) if config.ranking.kubelet else capacity
