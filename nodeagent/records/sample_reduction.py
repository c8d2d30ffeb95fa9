"""What is stored of a sample that no decision needs exactly: small changes and what can be computed again are left out.

Theory of operation. A stored sample is the one before with the changes, so what does not change costs nothing. Amounts
that moved by less than `SMALL_BYTES` keep their old value, and a pod whose amounts all moved less is stored as it was,
with its old reading time. Numbers within texts change in every sample and are replaced by `...`; trends follow from the
samples. Signals, thresholds, states and conditions are always those of the sample. The times of readings are rounded to
`TIME_GRID_S`.
"""

import operator
import re
from collections.abc import Iterable
from typing import Any, Final

from nodeagent.model import (
    CgroupUsage,
    ConditionVerdict,
    NodeMemory,
    NodeSnapshot,
    Observation,
    PodUsage,
    PodView,
    SignalVerdict,
    Stall,
)
from nodeagent.model.recording import RecordedSample

SMALL_BYTES: Final = 1 << 20
"""Of the memory of a pod, a cgroup or the node. The least that a decision weighs is some MiB."""
SMALL_SHIFT: Final = 6
"""Of the memory of a pod: a 64th of it is small as well."""
SMALL_COUNT: Final = 8
"""Of processes and threads."""
SMALL_STALL: Final = 0.5
"""Of PSI averages, in percent of wall time."""
TIME_GRID_S: Final = 1 / 64
_NUMBER: Final = re.compile(r"-?\d+(?:[.,:]\d+)*")
_MEMORY_FIELDS: Final = (
    "memory_working_set",
    "memory_usage",
    "memory_unreclaimable",
    "memory_file_cache",
    "memory_swap",
    "memory_limit",
    "memory_protected",
)
_AMOUNTS: Final = operator.itemgetter(*[PodUsage._fields.index(name) for name in _MEMORY_FIELDS])
_COUNTS: Final = operator.itemgetter(*[PodUsage._fields.index(name) for name in ("process_count", "thread_count")])
_REST: Final = operator.itemgetter(
    *[
        PodUsage._fields.index(name)
        for name in ("cgroup", "memory_request_estimate", "started_at", "volumes", "disk", "disk_usage_quality")
    ]
)


class SampleReducer:
    """Reduces one sample after another."""

    def __init__(self) -> None:
        self._stored: RecordedSample | None = None
        self._uids: list[str] = []
        """Of the pods of the last sample, in their order."""
        self._sources: tuple[PodView, ...] = ()
        """The pods of the last sample: the same object has the same usage. `_stored` has them in the same order."""

    def exact(self, sample: RecordedSample) -> RecordedSample:
        """The whole sample. Later ones are compared with it."""
        sources = sample.snapshot.pods
        if any(view.usage is not None and view.usage.own_limits for view in sources):
            pods = tuple([_without_own_limits(view) for view in sources])
            sample = sample._replace(snapshot=sample.snapshot._replace(pods=pods))
        self._keep(sample, sources)
        return sample

    def reduced(self, sample: RecordedSample) -> RecordedSample:
        """The sample without what is not worth its bytes."""
        before = self._stored.snapshot if self._stored is not None else None
        snapshot = _reduced(sample.snapshot, before, self._pods(sample.snapshot.pods))
        verdicts = tuple([_verdict(each, snapshot) for each in sample.signals])
        conditions = tuple([_condition(each) for each in sample.conditions])
        stored = sample._replace(snapshot=snapshot, signals=verdicts, conditions=conditions)
        self._keep(stored, sample.snapshot.pods)
        return stored

    def _keep(self, stored: RecordedSample, sources: tuple[PodView, ...]) -> None:
        self._stored = stored
        self._uids = [view.pod.uid for view in sources]
        self._sources = sources

    def _pods(self, pods: tuple[PodView, ...]) -> tuple[PodView, ...]:
        views = []
        for view, (old, source) in zip(pods, self._before(pods), strict=True):
            if old is None:
                views.append(_without_own_limits(view))
            elif source is view:
                views.append(old)
            else:
                pod = old.pod if old.pod is view.pod or old.pod == view.pod else view.pod
                usage = old.usage if _moved_little(old.usage, view.usage) else _moved(old.usage, view.usage)
                views.append(old if pod is old.pod and usage is old.usage else PodView(pod, usage))
        return tuple(views)

    def _before(self, pods: tuple[PodView, ...]) -> Iterable[tuple[PodView | None, PodView | None]]:
        """For each pod what was stored and what was sampled before; the order is nearly always the same."""
        stored = self._stored.snapshot.pods if self._stored is not None else ()
        before = zip(stored, self._sources, strict=True)
        uids = [view.pod.uid for view in pods]
        if uids == self._uids:
            return before
        known = dict(zip(self._uids, before, strict=True))
        return [known.get(uid, (None, None)) for uid in uids]


def _moved_little(old: PodUsage | None, new: PodUsage | None) -> bool:
    if old is None or new is None:
        return old is new
    amounts, counts = _AMOUNTS(new), _COUNTS(new)
    if amounts != (before := _AMOUNTS(old)) and not all(map(_little, before, amounts)):
        return False
    pairs = zip(_COUNTS(old), counts, strict=True)
    if counts != _COUNTS(old) and not all(_close(*each, SMALL_COUNT) for each in pairs):
        return False
    if _REST(old) != _REST(new):
        return False
    return len(old.containers) == len(new.containers)


def _little(old: int | None, new: int | None) -> bool:
    if old is None or new is None:
        return old is new
    moved = abs(new - old)
    return moved < SMALL_BYTES or moved < old >> SMALL_SHIFT


def _close(old: Any, new: Any, small: float) -> bool:
    if old is None or new is None:
        return old is new
    return bool(old == new or abs(old - new) < small)


def _on_grid(at: float) -> float:
    return round(at / TIME_GRID_S) * TIME_GRID_S if abs(at) < 1e12 else at


def _moved(old: PodUsage | None, new: PodUsage | None) -> PodUsage | None:
    if new is None:
        return None
    same = old is not None and [each.container_id for each in old.containers] == [
        each.container_id for each in new.containers
    ]
    containers = old.containers if same and old is not None else new.containers
    return new._replace(read_at=_on_grid(new.read_at), containers=containers, own_limits=())


def _without_own_limits(view: PodView) -> PodView:
    """They change in every sample, and no decision on a recording evicts for them."""
    if view.usage is None or not view.usage.own_limits:
        return view
    return view._replace(usage=view.usage._replace(own_limits=()))


def _reduced(new: NodeSnapshot, old: NodeSnapshot | None, pods: tuple[PodView, ...]) -> NodeSnapshot:
    observations = {signal: _observation(each) for signal, each in new.observations.items()}
    return new._replace(
        taken_at=_on_grid(new.taken_at),
        wall_time=_on_grid(new.wall_time),
        observations=observations,
        mem_available=_observation(new.mem_available),
        allocatable_by_kernel=None if new.allocatable_by_kernel is None else _observation(new.allocatable_by_kernel),
        memory=_memory(new.memory, None if old is None else old.memory),
        stalls=_stalls(new.stalls, () if old is None else old.stalls),
        pods=pods,
        cgroups=_cgroups(new.cgroups, () if old is None else old.cgroups),
        pods_synced_at=None if new.pods_synced_at is None else _synced(new, old),
    )


def _observation(observation: Observation) -> Observation:
    signal, available, capacity, read_at, source, reason, device = observation
    return Observation(signal, available, capacity, _on_grid(read_at), source, reason, device)


def _synced(new: NodeSnapshot, old: NodeSnapshot | None) -> float | None:
    """When the pods were synced; the old time as long as it is not older than ten seconds."""
    at, before = new.pods_synced_at, None if old is None else old.pods_synced_at
    return at if at is None or before is None or not 0.0 <= at - before < 10.0 else before


def _memory(new: NodeMemory | None, old: NodeMemory | None) -> NodeMemory | None:
    if new is None or old is None:
        return new
    pairs = zip(old, new, strict=True)
    return NodeMemory._make([was if type(was) is int and _close(was, now, SMALL_BYTES) else now for was, now in pairs])


def _stalls(new: tuple[Stall, ...], old: tuple[Stall, ...]) -> tuple[Stall, ...]:
    before = {(each.scope, each.resource): each for each in old}
    stored = []
    for each in new:
        was = before.get((each.scope, each.resource))
        close = was is not None and all(_close(was[place], each[place], SMALL_STALL) for place in (2, 3, 5, 6))
        stored.append(was if was is not None and close else each._replace(read_at=_on_grid(each.read_at)))
    return tuple(stored)


def _cgroups(new: tuple[CgroupUsage, ...], old: tuple[CgroupUsage, ...]) -> tuple[CgroupUsage, ...]:
    before = {each.path: each for each in old}
    stored = []
    for each in new:
        was = before.get(each.path)
        close = (
            was is not None
            and _close(was.memory_working_set, each.memory_working_set, SMALL_BYTES)
            and _close(was.process_count, each.process_count, SMALL_COUNT)
        )
        stored.append(was if was is not None and close else each)
    return tuple(stored)


def _verdict(verdict: SignalVerdict, snapshot: NodeSnapshot) -> SignalVerdict:
    observation = verdict.observation
    rounded = _observation(observation)
    same = snapshot.observations.get(observation.signal)
    return verdict._replace(
        observation=same if same == rounded else rounded,
        trend=None,
        thresholds=tuple(
            [
                each._replace(
                    not_due_reason=_without_numbers(each.not_due_reason),
                    active_since=None if each.active_since is None else _on_grid(each.active_since),
                )
                if each.met
                else each
                for each in verdict.thresholds
            ]
        ),
    )


def _condition(condition: ConditionVerdict) -> ConditionVerdict:
    return condition._replace(message=_without_numbers(condition.message))


def _without_numbers(text: str) -> str:
    return _NUMBER.sub("...", text) if text else text
