"""Evictions in flight: from the plan to the measured release.

Promises:

1. A pod whose eviction was planned counts as leaving until it is proven that nothing was evicted, or until the time is
   up in which it would have left, whatever happened to the request (a crash before it, a timeout after it).
2. Relief is measured only by samples that were read after the last victim of a decision was gone.
3. Only `_step` assigns a stage, and only from `TRANSITIONS`.

Theory of operation. An `InFlightEviction` is added with the decision, before anything is sent. Three guards give its
events: `policy.outcomes` for the answer to its request, `_pod_event` for its pod in a new snapshot, and `_is_overdue`
for its time. When all evictions of a decision are GONE, the first newer sample gives their `ReliefReport`. Relief of
less than half of the prediction is a failure of each eviction, and enough failures in a row open the circuit breaker of
that signal. A terminating pod that is only shortened is never a failure, because that is no eviction.

Pods that other clients delete have no eviction here but a `TerminatingPod` with the end of their grace on
CLOCK_BOOTTIME. It is computed once, when the pod is first seen terminating, so that later jumps of the wall clock
change nothing.
"""

import enum
from collections.abc import Container, Iterable, Mapping
from typing import Final, NamedTuple

from nodeagent.config.schema import Config, Mode
from nodeagent.model import (
    DISK_SIGNALS,
    MEMORY_SIGNALS,
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
    machines,
    units,
)
from nodeagent.model.machines import Machine
from nodeagent.policy import circuit_breaker
from nodeagent.policy.circuit_breaker import Failures

SLACK_S: Final = 15.0
"""How long after its grace a release is still expected. The slowest measured release of the kubelet took 12.9 s
(performance.md R1). A longer time lets a stuck pod delay help, a shorter one evicts a second pod for one deficit."""
KILLED_S: Final = 5.0
"""How long the release of a killed pod is expected. A process with 400 MiB exits within a tenth of a second."""
NOT_FOUND_RELEASE_S: Final = 1.0
"""How long a pod that the API server does not list is expected to vanish from the node. If it does, its release is
pending; if not, the next decision may evict it again."""
DISK_RELEASE_S: Final = 30.0
"""How long after its cgroup the files of a pod are expected to be removed. The kubelet waits as long before it judges
its own eviction (podCleanupTimeout)."""
REMOVED_SHARE: Final = 0.9
"""From this share of the predicted relief on, the files of a pod count as removed before that."""
SUFFICIENT_SHARE: Final = 0.5
"""Measured relief below this share of the predicted relief is a failure."""


class EvictionStage(enum.StrEnum):
    """Stage of an eviction in flight."""

    PLANNED = "planned"
    UNCERTAIN = "uncertain"
    """The request may have evicted the pod."""
    REQUESTED = "requested"
    """An EvictionRequest exists; nobody has evicted the pod yet."""
    UNLISTED = "unlisted"
    """The API server does not list the pod, and it still runs."""
    ACCEPTED = "accepted"
    KILLED = "killed"
    DRY_RUN = "dry-run"
    """No request was sent. The usage of the pod counts as released until its signal is healthy, so that a dry run names
    the same victims as the real decision. It is never measured."""
    GONE = "gone"
    """The cgroup of the pod is gone; its files may follow."""


class EvictionEvent(enum.StrEnum):
    """What happens to an eviction in flight."""

    ACCEPTED_BY_API = "accepted-by-api"
    NO_ANSWER = "no-answer"
    NOT_EVICTED = "not-evicted"
    NOT_LISTED = "not-listed"
    KILLED = "killed"
    NOT_SENT = "not-sent"
    REQUESTED = "requested"
    REQUEST_ENDED = "request-ended"
    TERMINATING = "terminating"
    CGROUP_GONE = "cgroup-gone"
    TIME_UP = "time-up"
    RELEASED = "released"


_S, _E = EvictionStage, EvictionEvent


def _row(
    stage: EvictionStage, **changes: EvictionStage | None
) -> dict[tuple[EvictionStage, EvictionEvent], EvictionStage | None]:
    return machines.row(stage, EvictionEvent, changes)


_ANSWERED: Final = {
    "ACCEPTED_BY_API": _S.ACCEPTED,
    "NO_ANSWER": _S.UNCERTAIN,
    "NOT_EVICTED": None,
    "NOT_LISTED": _S.UNLISTED,
    "KILLED": _S.KILLED,
    "NOT_SENT": _S.DRY_RUN,
    "REQUESTED": _S.REQUESTED,
    "REQUEST_ENDED": None,
}
"""What an answer changes while it is open."""

TRANSITIONS: Final[Mapping[tuple[EvictionStage, EvictionEvent], EvictionStage | None]] = {
    **_row(_S.PLANNED, **_ANSWERED, TERMINATING=_S.ACCEPTED, CGROUP_GONE=_S.GONE, TIME_UP=None),
    **_row(_S.UNCERTAIN, **_ANSWERED, TERMINATING=_S.ACCEPTED, CGROUP_GONE=_S.GONE, TIME_UP=None),
    **_row(_S.REQUESTED, TERMINATING=_S.ACCEPTED, CGROUP_GONE=_S.GONE, REQUEST_ENDED=None, TIME_UP=None),
    **_row(_S.UNLISTED, CGROUP_GONE=_S.GONE, TIME_UP=None),
    **_row(_S.ACCEPTED, CGROUP_GONE=_S.GONE, TIME_UP=None),
    **_row(_S.KILLED, CGROUP_GONE=_S.GONE, TIME_UP=None),
    **_row(_S.DRY_RUN, CGROUP_GONE=None, TIME_UP=None),
    **_row(_S.GONE, RELEASED=None),
}

_BY_TOKENS: Final = "if the eviction spent tokens; a terminating pod that is only shortened has no part in it"
_RETURN: Final = "its tokens return"
_UNREAD: Final = "only if the pod is terminating or no longer listed, or finished after an EvictionRequest"
MACHINE: Final = Machine(
    "Evictions in flight",
    "nodeagent/policy/in_flight.py",
    EvictionStage,
    EvictionEvent,
    TRANSITIONS,
    meanings={
        _E.ACCEPTED_BY_API: "200, 201 or 202: the pod is terminating",
        _E.NO_ANSWER: "timeout or server error: the request may have been carried out",
        _E.NOT_EVICTED: "the answer proves that nothing was evicted",
        _E.NOT_LISTED: "the API server does not list the pod, after a 400, 404, 409 or 422",
        _E.KILLED: "the last resort ended its processes",
        _E.NOT_SENT: "dry run",
        _E.REQUESTED: "201: the EvictionRequest exists",
        _E.REQUEST_ENDED: "the EvictionRequest failed, or is withdrawn because the pressure has ended",
        _E.TERMINATING: "a snapshot shows a deletion timestamp",
        _E.CGROUP_GONE: "a snapshot newer than the decision's has no cgroup of the pod",
        _E.TIME_UP: f"{SLACK_S:.0f} s after its grace, {KILLED_S:.0f} s after a kill, "
        f"{NOT_FOUND_RELEASE_S:.0f} s in `unlisted`; the deadline of an EvictionRequest",
        _E.RELEASED: "all evictions of the decision are gone, and a newer sample shows what they released",
    },
    remarks={
        (_S.PLANNED, _E.NOT_EVICTED): _RETURN,
        (_S.PLANNED, _E.NOT_LISTED): _RETURN,
        **{
            (stage, _E.REQUEST_ENDED): f"{_RETURN}, except if the pressure has ended"
            for stage in (_S.PLANNED, _S.UNCERTAIN, _S.REQUESTED)
        },
        (_S.PLANNED, _E.TERMINATING): _BY_TOKENS,
        (_S.UNCERTAIN, _E.TERMINATING): _BY_TOKENS,
        **{(stage, _E.CGROUP_GONE): _UNREAD for stage in (_S.PLANNED, _S.REQUESTED)},
        (_S.UNCERTAIN, _E.CGROUP_GONE): "as in `requested` after an EvictionRequest; else the list may be late, too",
        (_S.ACCEPTED, _E.TIME_UP): "a failure, which counts for the circuit breaker, unless the pod was only shortened",
        (_S.DRY_RUN, _E.CGROUP_GONE): "only if the pod is no longer listed",
        (_S.DRY_RUN, _E.TIME_UP): "only if its signal is healthy; at once in the mode `enforce`",
        (_S.GONE, _E.RELEASED): "with a relief report, unless the pod exceeded a limit of its own",
    },
)

OPEN_STAGES: Final = frozenset({_S.PLANNED, _S.UNCERTAIN})
"""The outcome of the request is not known yet."""
_UNCONFIRMED: Final = OPEN_STAGES | {_S.REQUESTED, _S.DRY_RUN}


class InFlightEviction(NamedTuple):
    """One eviction in flight."""

    plan_id: str
    pod_uid: str
    cgroup_uid: str
    pod: str
    """`namespace/name`, for texts."""
    owner: str
    signal: Signal
    memory_model: MemoryModel
    """Of the figure that shows its release."""
    tier: Tier
    stage: EvictionStage
    planned_at: float
    sample_at: float
    """When the snapshot of the decision was taken."""
    available: int
    """The signal in that snapshot, by this memory model."""
    predicted: int
    grace_s: float
    until: float
    """After this its release is no longer expected."""
    buckets: tuple[str, ...]
    """The buckets that its tokens came from; empty if the pod was only shortened."""
    gone_at: float | None = None
    cleaned: bool = False
    """Kubelet's order alone: its files went with it, because the kubelet removes a pod's object only after its
    containers and volumes. Our order waits until the sample shows it."""
    limit: str = ""
    """The limit of its own that the pod exceeded or was about to reach: no relief is predicted, so none is measured."""
    request_s: float = 0.0
    """How long others have to evict the pod, after an EvictionRequest; 0: the agent itself requests the eviction."""

    @property
    def awaits_others(self) -> bool:
        """Whether others are to evict the pod, as far as is known: the hard tier does not wait for that."""
        return self.request_s > 0 and self.stage in _UNCONFIRMED


class TerminatingPod(NamedTuple):
    """A terminating pod, on CLOCK_BOOTTIME."""

    ends_at: float
    deletion_wall: float
    """metadata.deletionTimestamp in the last snapshot."""
    shortened: bool = False
    """The API server has accepted a shorter grace."""


class InFlightState(NamedTuple):
    entries: tuple[InFlightEviction, ...] = ()
    departing: Mapping[str, TerminatingPod] = {}
    """By pod UID."""
    failures: Mapping[str, Failures] = {}
    """By signal."""


class Observed(NamedTuple):
    """What a snapshot changes."""

    state: InFlightState
    reports: tuple[ReliefReport, ...]
    confirmed: tuple[InFlightEviction, ...]
    """Evictions that this snapshot proves to have happened."""


# --- transitions -----------------------------------------------------------------------------------------------------


def _step(entry: InFlightEviction, event: EvictionEvent) -> InFlightEviction | None:
    """The eviction after an event; None if it is removed."""
    stage = TRANSITIONS[entry.stage, event]
    return None if stage is None else entry if stage is entry.stage else entry._replace(stage=stage)


def apply_outcome(state: InFlightState, entry: InFlightEviction, event: EvictionEvent, *, now: float) -> InFlightState:
    """The state after the answer to the request of `entry`, whose stage is open. A terminating pod counts as shortened
    only when the API server has accepted that: until then, a request that failed is repeated."""
    after = _step(entry, event)
    if after is not None:
        expected_s = entry.request_s if after.stage is EvictionStage.REQUESTED else entry.grace_s + SLACK_S
        after = after._replace(until=now + _EXPECTED_S.get(event, expected_s))
    entries = [after if each is entry else each for each in state.entries]
    departing = state.departing
    if event is EvictionEvent.ACCEPTED_BY_API and not entry.buckets and entry.pod_uid in departing:
        departing = {**departing, entry.pod_uid: departing[entry.pod_uid]._replace(shortened=True)}
    return state._replace(entries=tuple([each for each in entries if each is not None]), departing=departing)


_EXPECTED_S: Final = {EvictionEvent.KILLED: KILLED_S, EvictionEvent.NOT_LISTED: NOT_FOUND_RELEASE_S}
"""How long a release is expected after an outcome, where that is not the grace and its slack."""


def advance(
    state: InFlightState, snapshot: NodeSnapshot, *, now: float, config: Config, healthy: Container[Signal] = ()
) -> Observed:
    """The state after a snapshot. `healthy`: signals above all their thresholds."""
    departing = _departing(state.departing, snapshot, now=now)
    if not state.entries:
        if departing is not state.departing:
            state = state._replace(departing=departing)
        return Observed(state, (), ())
    listed = {view.pod.uid: view for view in snapshot.pods}
    entries: list[InFlightEviction] = []
    confirmed: list[InFlightEviction] = []
    failures = state.failures
    for entry in state.entries:
        view = listed.get(entry.pod_uid)
        after = _observed(entry, view, snapshot, config=config)
        if after is not None and after.stage is not entry.stage and entry.stage is EvictionStage.REQUESTED:
            after = _evicted_by_others(after, snapshot, departing.get(entry.pod_uid), now=now)
        if after is not None and _has_happened(entry, after):
            confirmed.append(after)
        if after is not None and _is_overdue(after, now=now, config=config, healthy=healthy):
            if after.stage is EvictionStage.ACCEPTED and after.buckets and not after.limit:
                failures = circuit_breaker.with_failures(failures, after.signal, 1, now=now, config=config)
            after = _step(after, EvictionEvent.TIME_UP)
        if after is not None and after.limit and after.stage is EvictionStage.GONE:
            after = _step(after, EvictionEvent.RELEASED)
        if after is not None:
            entries.append(after)
    shortened = {(entry.plan_id, entry.pod_uid) for entry in entries if not entry.buckets}
    entries, reports = _measure(entries, snapshot)
    for report in reports:
        times = sum((report.plan_id, uid) not in shortened for uid in report.pod_uids)
        if report.measured >= SUFFICIENT_SHARE * report.predicted:
            failures = {signal: each for signal, each in failures.items() if signal != report.signal.value}
        elif times:
            failures = circuit_breaker.with_failures(failures, report.signal, times, now=now, config=config)
    return Observed(InFlightState(tuple(entries), departing, failures), reports, tuple(confirmed))


def _observed(
    entry: InFlightEviction, view: PodView | None, snapshot: NodeSnapshot, *, config: Config
) -> InFlightEviction | None:
    """The eviction after the view of its pod. The kubelet decides again with the very sample that it takes when its
    victim is cleaned up, files included; our order waits for a newer one."""
    event = _pod_event(entry, view, snapshot)
    cleaned = config.ranking.kubelet and view is None
    if entry.stage is EvictionStage.GONE:
        is_newer = snapshot.taken_at > entry.sample_at
        return entry._replace(cleaned=True) if cleaned and is_newer and not entry.cleaned else entry
    if event is None:
        return entry
    after = _step(entry, event)
    if after is None or after.stage is not EvictionStage.GONE:
        return after
    is_measurable = cleaned or (config.ranking.kubelet and entry.signal not in DISK_SIGNALS)
    return after._replace(gone_at=entry.sample_at if is_measurable else snapshot.taken_at, cleaned=cleaned)


def _evicted_by_others(
    entry: InFlightEviction, snapshot: NodeSnapshot, departing: TerminatingPod | None, *, now: float
) -> InFlightEviction:
    """Its release is expected, and measured, from now on: the request may be minutes old."""
    available = observation_for(entry, snapshot).available
    ends_at = max(now + entry.grace_s, departing.ends_at if departing is not None else now)
    if entry.stage is EvictionStage.ACCEPTED and available is not None:
        entry = entry._replace(available=available)
    return entry._replace(until=ends_at + SLACK_S)


def _pod_event(entry: InFlightEviction, view: PodView | None, snapshot: NodeSnapshot) -> EvictionEvent | None:
    """Guard: what the snapshot shows of the pod; None if nothing has changed."""
    if entry.stage is EvictionStage.DRY_RUN:
        return EvictionEvent.CGROUP_GONE if view is None else None
    if snapshot.taken_at <= entry.sample_at:
        return None
    if view is None:
        return EvictionEvent.CGROUP_GONE
    if view.usage is None:
        unproven = entry.stage is EvictionStage.PLANNED or (entry.awaits_others and not view.pod.finished)
        return None if unproven and view.pod.deletion_wall is None else EvictionEvent.CGROUP_GONE
    return EvictionEvent.TERMINATING if view.pod.deletion_wall is not None and entry.buckets else None


def _is_overdue(entry: InFlightEviction, *, now: float, config: Config, healthy: Container[Signal]) -> bool:
    """Guard: whether its time is up. A plan in the future is another boot's."""
    if entry.stage is EvictionStage.DRY_RUN:
        # A pod over a storage limit is one until it is gone. One near its memory limit is killed by the kernel.
        over_limit = entry.limit and entry.signal not in MEMORY_SIGNALS
        wanted = over_limit or now <= entry.until or (not entry.limit and entry.signal not in healthy)
        return config.mode is not Mode.DRY_RUN or not wanted or not entry.planned_at <= now
    return entry.stage is not EvictionStage.GONE and not entry.planned_at <= now <= entry.until


def _has_happened(before: InFlightEviction, after: InFlightEviction) -> bool:
    """Whether a snapshot proves an eviction whose request has no outcome yet."""
    proven = after.stage in (EvictionStage.ACCEPTED, EvictionStage.GONE)
    return proven and before.stage in _UNCONFIRMED and bool(before.buckets)


def after_suspend(state: InFlightState, slept_s: float, *, now: float) -> InFlightState:
    """The state after the machine was suspended: the kubelet and the container runtime were suspended as well. No
    eviction gets more than its whole time from now on, because its outcome may have come in since."""
    entries = [
        entry._replace(
            until=max(entry.until, min(entry.until + slept_s, now + entry.grace_s + SLACK_S)),
            gone_at=min(entry.gone_at + slept_s, now) if entry.gone_at is not None else None,
        )
        for entry in state.entries
    ]
    departing = {uid: each._replace(ends_at=each.ends_at + slept_s) for uid, each in state.departing.items()}
    return state._replace(entries=tuple(entries), departing=departing)


def add(state: InFlightState, entries: Iterable[InFlightEviction]) -> InFlightState:
    """The state with planned evictions. One replaces the eviction of the same pod that others were to carry out."""
    added = tuple(entries)
    if not added:
        return state
    uids = {entry.pod_uid for entry in added}
    kept = [entry for entry in state.entries if not (entry.awaits_others and entry.pod_uid in uids)]
    return state._replace(entries=(*kept, *added))


def entry_for(state: InFlightState, *, plan_id: str, pod_uid: str) -> InFlightEviction | None:
    """The eviction that an outcome belongs to."""
    return next((each for each in state.entries if each.pod_uid == pod_uid and each.plan_id == plan_id), None)


def is_answered_by(entry: InFlightEviction, event: EvictionEvent) -> bool:
    """Whether this outcome is one that `entry` waits for."""
    return entry.stage in OPEN_STAGES or (entry.stage is EvictionStage.REQUESTED and event is _E.REQUEST_ENDED)


def already_in_flight(entry: InFlightEviction) -> Refusal:
    """Why the pod of `entry` is not chosen again."""
    return Refusal(RefusalCode.EVICTION_IN_FLIGHT, f"eviction in flight by {entry.plan_id} ({entry.stage})")


# --- terminating pods ------------------------------------------------------------------------------------------------


def _departing(
    known: Mapping[str, TerminatingPod], snapshot: NodeSnapshot, *, now: float
) -> Mapping[str, TerminatingPod]:
    """The end of grace, on CLOCK_BOOTTIME, of every terminating pod that still has a cgroup."""
    found: dict[str, TerminatingPod] = {}
    for pod, usage in snapshot.pods:
        if pod.deletion_wall is None or usage is None:
            continue
        earlier = known.get(pod.uid)
        if earlier is None:
            found[pod.uid] = TerminatingPod(now + _remaining_grace_s(pod, snapshot), deletion_wall=pod.deletion_wall)
        else:
            # The API server moves the stamp when a client shortens the grace. Our wall clock may jump: not read again.
            moved_s = min(0.0, pod.deletion_wall - earlier.deletion_wall)
            found[pod.uid] = earlier._replace(ends_at=earlier.ends_at + moved_s, deletion_wall=pod.deletion_wall)
    return found if found or known else known


def _remaining_grace_s(pod: Pod, snapshot: NodeSnapshot) -> float:
    if pod.deletion_wall is None:
        return 0.0
    left_s = max(0.0, pod.deletion_wall - snapshot.wall_time)
    if pod.deletion_grace_s is not None and pod.deletion_grace_s >= 0:
        left_s = min(left_s, pod.deletion_grace_s)
    return left_s if left_s < units.MAX_PLAUSIBLE else 0.0  # NaN and implausible numbers: no grace


# --- measured relief -------------------------------------------------------------------------------------------------


def _measure(
    entries: list[InFlightEviction], snapshot: NodeSnapshot
) -> tuple[list[InFlightEviction], tuple[ReliefReport, ...]]:
    """The evictions that go on, and a report for each decision whose victims are all gone and whose signal has a newer
    sample."""
    waiting = {
        (entry.plan_id, entry.signal)
        for entry in entries
        if entry.stage is not EvictionStage.GONE
        or observation_for(entry, snapshot).available is None
        or not is_released(entry, snapshot)
    }
    kept: list[InFlightEviction] = []
    groups: dict[tuple[str, Signal], list[InFlightEviction]] = {}
    for entry in entries:
        key = (entry.plan_id, entry.signal)
        after = entry if key in waiting else _step(entry, EvictionEvent.RELEASED)
        if after is None:
            groups.setdefault(key, []).append(entry)
        else:
            kept.append(after)
    reports = []
    for (plan_id, signal), group in groups.items():
        observation = observation_for(group[0], snapshot)
        assert observation.available is not None
        reports.append(
            ReliefReport(
                plan_id=plan_id,
                signal=signal,
                pod_uids=tuple([entry.pod_uid for entry in group]),
                predicted=sum(entry.predicted for entry in group),
                measured=observation.available - group[0].available,
                took_s=observation.read_at - group[0].planned_at,
            )
        )
    return kept, tuple(reports)


def is_released(entry: InFlightEviction, snapshot: NodeSnapshot) -> bool:
    """Whether the sample shows the release of a gone pod: memory and PIDs at once, files when they are removed."""
    observation = observation_for(entry, snapshot)
    if entry.gone_at is None or not observation.read_at > entry.gone_at:
        return False
    if entry.cleaned or entry.signal not in DISK_SIGNALS or observation.read_at - entry.gone_at >= DISK_RELEASE_S:
        return True
    return (observation.available or 0) - entry.available >= REMOVED_SHARE * entry.predicted


def observation_for(entry: InFlightEviction, snapshot: NodeSnapshot) -> Observation:
    """The observation of the eviction's signal, by the memory model that shows its release."""
    return snapshot.observe(entry.signal, entry.memory_model)


def soft_in_flight(state: InFlightState) -> bool:
    """Whether the soft tier evicts a pod for the node, or has evicted one that is not gone yet."""
    over = (EvictionStage.DRY_RUN, EvictionStage.GONE)
    return any(each.tier is Tier.SOFT and not each.limit and each.stage not in over for each in state.entries)


def awaits_release(state: InFlightState) -> bool:
    """Whether a pod was really evicted whose release is to be measured as soon as it is gone."""
    return any(entry.stage not in (EvictionStage.DRY_RUN, EvictionStage.REQUESTED) for entry in state.entries)
