"""In which order pods would be evicted for one starved resource.

Promises:

1. The order is total and stable: it depends on the pods alone, never on the order they were listed in. Ties go by
   namespace, name, UID.
2. Smaller goes first, in every key. More usage never moves a pod back.
3. A pod whose usage is not known is never first because of that: at the first key that needs usage it stands behind
   every pod that is equal to it on the keys before and whose usage is known.
4. While nothing at all is known of what pods hold on a disk, the hard tier goes by what they write: the fastest writer
   stands first, and counts as holding what it has written since it is watched (`written_of`).

Theory of operation. A key is a function from a `Subject` (one pod with the numbers of the starved resource) to a float,
in one table. The names in `ranking.order` pick rows of the table; PIDs begin with `projectedUsage` whatever the order,
because by QoS or priority fifty innocent pods would go before one fork bomb; `order: kubelet` picks the kubelet's own
keys for the resource (KUBELET-CONTRACT 5) and does the sane thing where the kubelet's choice is a quirk:

* a pod without stats stands last in usage comparisons, where the kubelet puts it first;
* inodes are compared with inodes, where the kubelet subtracts a request in bytes;
* imagefs of a split layout holds nothing of a pod: priority, then name, where the kubelet goes on to the smallest
  request.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from nodeagent.config.schema import RankingConfig, RankingKey
from nodeagent.model import (
    DISK_BYTE_SIGNALS,
    DISK_INODE_SIGNALS,
    DISK_SIGNALS,
    MEMORY_SIGNALS,
    SIGNAL_TABLE,
    DiskLayout,
    DiskUsage,
    NodeSnapshot,
    Plan,
    Pod,
    PodSource,
    PodUsage,
    PodView,
    QOSClass,
    RankedPod,
    RankKey,
    Signal,
    Unit,
)
from nodeagent.policy.plausibility import ABSURD, figure, plausible

LAST: Final = float(2**63)
"""Stands behind every real value. Not infinity, which JSON cannot carry."""
PROJECTION_S: Final = 10.0
"""How far ahead `projectedUsage` looks: one sync of the kubelet. A bomb of 2,000 forks/s (MEASURED 1) then counts
20,000 more, a server that starts its 200 workers no more than a few hundred."""
GROWTH_STEP_S: Final = 5.0
"""Distance of the two samples that growth is reckoned from: longer than the noise of single forks and allocations,
shorter than a fork bomb needs for a whole PID table (about 16 s at 2,000/s)."""
GROWTH_OLDEST_S: Final = 60.0
"""A sample older than this (a stopped agent) says nothing about growth now."""

DISK_OLDEST_S: Final = 600.0
"""Disk numbers that are older say nothing of now: five times as old as a kubelet's may be, because the walk of a full
disk with millions of files takes minutes."""

DELETION_COST: Final = "controller.kubernetes.io/pod-deletion-cost"
WISH: Final = "wish"
PROJECTED_USAGE: Final = "projectedUsage"
WRITE_RATE: Final = "writeRate"

_IMAGES: Final = frozenset({Signal.IMAGEFS, Signal.IMAGEFS_INODES})
_NODEFS: Final = frozenset({Signal.NODEFS, Signal.NODEFS_INODES})


class GrowthSample(NamedTuple):
    """What pods used at one instant, by cgroup UID."""

    at: float
    memory: Mapping[str, int]
    processes: Mapping[str, int]


class InodeCount(NamedTuple):
    """What a completed walk found in one pod."""

    at: float
    held: DiskUsage
    """Inodes alone."""


class GrowthState(NamedTuple):
    """Two samples of the past, so that there is always one that is at least `GROWTH_STEP_S` old."""

    older: GrowthSample | None = None
    newer: GrowthSample | None = None
    inodes: Mapping[str, tuple[InodeCount, ...]] = {}
    """By cgroup UID the last two walks, the newest last: each pod is walked at a time of its own."""


class RankingInput(NamedTuple):
    """One pod before the keys."""

    view: PodView
    pod: Pod
    usage: int | None
    request: int | None
    wish: float
    growth: float
    """Units per second; 0 when there is no earlier sample."""
    alone: bool
    """No other pod of its owner runs on this node."""
    wall_time: float


# --- what a pod uses -------------------------------------------------------------------------------------------------


def usage_of(usage: PodUsage | None, signal: Signal, layout: DiskLayout, *, most: int = ABSURD) -> int | None:
    """What the pod uses of the signal's resource; None when not measured or not to be believed.

    Memory is the working set (the pod's own, else the sum of its containers'), PIDs are processes, disk is what the pod
    holds on that file system in this layout. A disk number of which only parts were measured is their sum: a lower
    bound.
    """
    if usage is None:
        return None
    if signal in MEMORY_SIGNALS:
        size = usage.memory_working_set
        if size is None:
            size = _sum_of_containers(usage)
        return size if type(size) is int and 0 <= size <= most else None  # `sound`, without the call
    if signal is Signal.PID:
        return plausible(usage.process_count, most=most)
    return disk_of(usage.disk, signal, layout, most=most)


def _sum_of_containers(usage: PodUsage) -> int | None:
    """For a pod whose own cgroup could not be read; None unless all of its containers were."""
    each = [plausible(container.memory_working_set) for container in usage.containers]
    return sum(size for size in each if size is not None) if each and None not in each else None


def disk_is_old(usage: PodUsage, *, at: float, oldest_s: float = DISK_OLDEST_S) -> bool:
    """Whether what was measured of the pod's disk is too old to be believed."""
    return usage.disk_usage_quality is not None and at - usage.disk_usage_quality.read_at > oldest_s


def written_of(usage: PodUsage | None, *, at: float, oldest_s: float, most: int = ABSURD) -> int | None:
    """What the pod has written since it is watched: the best guess of what it fills while no walk has ended. None when
    it has written nothing, or was not looked at for `oldest_s`."""
    writing = usage.writing if usage is not None else None
    if writing is None or not writing.written > 0 or at - writing.read_at > oldest_s:
        return None
    return plausible(min(writing.written, most))


def disk_of(disk: DiskUsage, signal: Signal, layout: DiskLayout, *, most: int = ABSURD) -> int | None:
    """KUBELET-CONTRACT 5, the table of measured disk per layout, and the deleted files that are held open, which go
    with the pod as well. An unknown layout measures nothing."""
    if layout is DiskLayout.UNKNOWN:
        return None
    if layout is DiskLayout.SPLIT and signal in _IMAGES:
        return 0
    layers: tuple[int | None, ...]
    others: tuple[int | None, ...]
    if signal in DISK_INODE_SIGNALS:
        layers = disk.rootfs_inodes, disk.deleted_layer_inodes
        others = disk.logs_inodes, disk.volumes_inodes, disk.deleted_volume_inodes
    else:
        layers = disk.rootfs_bytes, disk.deleted_layer_bytes
        others = disk.logs_bytes, disk.volumes_bytes, disk.deleted_volume_bytes
    parts: tuple[int | None, ...] = layers + others
    if layout is DiskLayout.DEDICATED_IMAGEFS:
        parts = others if signal in _NODEFS else layers
    known = [part for part in (plausible(part, most=most) for part in parts) if part is not None]
    return plausible(sum(known), most=most) if known else None


# --- the keys --------------------------------------------------------------------------------------------------------


_QOS_VALUE: Final = {QOSClass.BEST_EFFORT: 0.0, QOSClass.BURSTABLE: 1.0, QOSClass.GUARANTEED: 2.0}


def _qos(subject: RankingInput) -> float:
    return _QOS_VALUE[subject.pod.qos_class]


def _exceeds_request(subject: RankingInput) -> float:
    if subject.usage is None:
        return 2.0
    return 0.0 if subject.usage > (subject.request or 0) else 1.0


def _priority(subject: RankingInput) -> float:
    priority = subject.pod.priority
    return float(priority) if type(priority) is int else 0.0


def _usage_over_request(subject: RankingInput) -> float:
    return LAST if subject.usage is None else float((subject.request or 0) - subject.usage)


def _usage(subject: RankingInput) -> float:
    return LAST if subject.usage is None else float(-subject.usage)


def _growth(subject: RankingInput) -> float:
    return LAST if subject.usage is None else 0.0 - subject.growth


def _projected_usage(subject: RankingInput) -> float:
    if subject.usage is None:
        return LAST
    return -(subject.usage + max(0.0, subject.growth) * PROJECTION_S)


def _write_rate(subject: RankingInput) -> float:
    writing = subject.view.usage.writing if subject.view.usage is not None else None
    return LAST if writing is None else 0.0 - writing.bytes_per_s


def _pod_deletion_cost(subject: RankingInput) -> float:
    text = subject.pod.annotations.get(DELETION_COST, "0")
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 10:
        return 0.0  # the ReplicaSet controller, too, takes a cost it cannot read for none
    return float(text)


def _age(subject: RankingInput) -> float:
    started = subject.pod.started_wall if subject.pod.started_wall is not None else subject.pod.created_wall
    age_s = subject.wall_time - started if started is not None else LAST
    return age_s if 0.0 <= age_s < LAST else LAST  # a start in the future, or no number at all: not known


def _duplicate_on_node(subject: RankingInput) -> float:
    return 1.0 if subject.alone else 0.0


def _restart_count(subject: RankingInput) -> float:
    return 0.0 - sum(container.restart_count for container in subject.pod.containers)


def _wish(subject: RankingInput) -> float:
    return subject.wish


KEYS: Final[Mapping[str, Callable[[RankingInput], float]]] = {
    RankingKey.QOS: _qos,
    RankingKey.EXCEEDS_REQUEST: _exceeds_request,
    RankingKey.PRIORITY: _priority,
    RankingKey.USAGE_OVER_REQUEST: _usage_over_request,
    RankingKey.USAGE: _usage,
    RankingKey.GROWTH: _growth,
    RankingKey.POD_DELETION_COST: _pod_deletion_cost,
    RankingKey.AGE: _age,
    RankingKey.DUPLICATE_ON_NODE: _duplicate_on_node,
    RankingKey.RESTART_COUNT: _restart_count,
    WISH: _wish,
    PROJECTED_USAGE: _projected_usage,
    WRITE_RATE: _write_rate,
}
"""Smaller is evicted first: BestEffort, over its request, low priority, most over its request, most usage, fastest
growth, cheapest deletion, youngest, a replica with a sibling here, most restarts (least work lost)."""
TIMELESS: Final = frozenset(
    {
        RankingKey.QOS,
        RankingKey.EXCEEDS_REQUEST,
        RankingKey.PRIORITY,
        RankingKey.USAGE_OVER_REQUEST,
        RankingKey.USAGE,
        RankingKey.POD_DELETION_COST,
        RankingKey.RESTART_COUNT,
    }
)
"""Those that look at the pod, its usage and its request alone: neither at the time nor at other pods."""


def order_for(ranking: RankingConfig, signal: Signal, layout: DiskLayout, *, wishes: bool) -> tuple[str, ...]:
    """Names of the keys for one resource, most significant first."""
    if ranking.kubelet:
        if signal is Signal.PID:
            return (RankingKey.PRIORITY, RankingKey.USAGE)
        if layout is DiskLayout.SPLIT and signal in _IMAGES:
            return (RankingKey.PRIORITY,)
        return (RankingKey.EXCEEDS_REQUEST, RankingKey.PRIORITY, RankingKey.USAGE_OVER_REQUEST)
    order: tuple[str, ...] = tuple(ranking.order)
    if signal is Signal.PID:
        order = (PROJECTED_USAGE, *order)
    return (WISH, *order) if wishes else order


# --- the order -------------------------------------------------------------------------------------------------------


Values = tuple[float, ...]
"""Of each key in an order, in that order. Smaller goes first."""
SortKey = tuple[object, ...]
"""Where a pod stands: its values, then namespace, name and UID."""


def standings(subjects: Sequence[RankingInput], order: Sequence[str]) -> tuple[list[Values], list[SortKey]]:
    """What the keys in `order` are for each of the subjects, and where it stands by them."""
    # Column by column and zipped: half the time of building a tuple of values for each subject.
    columns = [list(map(KEYS[name], subjects)) for name in order]
    pods = [subject.pod for subject in subjects]
    names = [pod.namespace or "" for pod in pods], [pod.name or "" for pod in pods], [pod.uid for pod in pods]
    return list(zip(*columns, strict=True)), list(zip(*columns, *names, strict=True))


def siblings(pods: Iterable[PodView]) -> Mapping[str, int]:
    """How many running pods of each owner are on this node."""
    counts: dict[str, int] = {}
    for view in pods:
        pod = view.pod
        if pod.owner is not None and view.usage is not None and pod.deletion_wall is None and not pod.finished:
            counts[pod.owner.uid] = counts.get(pod.owner.uid, 0) + 1
    return counts


# --- growth ----------------------------------------------------------------------------------------------------------


def remember(state: GrowthState, snapshot: NodeSnapshot) -> GrowthState:
    """Keep this snapshot's usage if the newest kept one is old enough."""
    newer, seen_at = state.newer, snapshot.taken_at
    if newer is not None and 0 <= seen_at - newer.at < GROWTH_STEP_S:
        return state
    memory: dict[str, int] = {}
    processes: dict[str, int] = {}
    inodes: dict[str, tuple[InodeCount, ...]] = {}
    for _, usage in snapshot.pods:
        if usage is None:
            continue
        uid, size, count = usage.cgroup_uid, usage.memory_working_set, usage.process_count
        if type(size) is int and size >= 0:
            memory[uid] = size
        if type(count) is int and count >= 0:
            processes[uid] = count
        if usage.disk_usage_quality is not None and (walks := _walks(state.inodes.get(uid, ()), usage)):
            inodes[uid] = walks
    if newer is not None and not newer.at < seen_at:  # another boot's clock
        newer = None
    return GrowthState(newer, GrowthSample(seen_at, memory, processes), inodes)


def _walks(kept: tuple[InodeCount, ...], usage: PodUsage) -> tuple[InodeCount, ...]:
    """The kept walks with the one in `usage`, if that is a new one and went to its end: against a lower bound the next
    count would look like growth."""
    sight, disk = usage.disk_usage_quality, usage.disk
    if sight is None or not sight.complete or (kept and 0 <= sight.read_at - kept[-1].at < GROWTH_STEP_S):
        return kept
    before = kept[-1:] if kept and kept[-1].at < sight.read_at else ()
    inodes = DiskUsage(
        rootfs_inodes=disk.rootfs_inodes,
        logs_inodes=disk.logs_inodes,
        volumes_inodes=disk.volumes_inodes,
        deleted_layer_inodes=disk.deleted_layer_inodes,
        deleted_volume_inodes=disk.deleted_volume_inodes,
    )
    return (*before, InodeCount(sight.read_at, inodes))


Growth = Callable[[PodUsage | None, int | None], float]
"""From a pod's usage, and what of it counts for the signal, to units per second."""


def growth_of(state: GrowthState, signal: Signal, layout: DiskLayout, *, at: float) -> Growth:
    """How fast pods grow since the kept sample.

    A pod that the kept sample does not have has grown from nothing since then. Bytes on disk, whose walks are far
    apart, grow by what the pod writes; inodes from one walk to the next. For PIDs what a pod forks counts as well,
    however short it lives: of a bomb with children of milliseconds no sample sees more than a few.
    """
    if signal in DISK_BYTE_SIGNALS:
        return lambda usage, now: usage.writing.bytes_per_s if usage is not None and usage.writing else 0.0  # noqa: ARG005
    if signal in DISK_INODE_SIGNALS:
        return lambda usage, now: (
            0.0 if usage is None else _inode_growth(state.inodes.get(usage.cgroup_uid, ()), usage, now, signal, layout)
        )
    samples = [sample for sample in (state.newer, state.older) if sample is not None]
    base = next((sample for sample in samples if GROWTH_STEP_S / 2 <= at - sample.at <= GROWTH_OLDEST_S), None)
    if base is None:
        return _forking if signal is Signal.PID else lambda usage, now: 0.0  # noqa: ARG005
    known = base.processes if signal is Signal.PID else base.memory
    since_s = at - base.at

    def grown(usage: PodUsage | None, now: int | None) -> float:
        return 0.0 if usage is None or now is None else (now - known.get(usage.cgroup_uid, 0)) / since_s

    return grown if signal is not Signal.PID else lambda usage, now: max(grown(usage, now), _forking(usage, now))


def steady_growth(state: GrowthState, signal: Signal, *, at: float) -> Growth:
    """How fast pods grow for certain: the least growth since any of the kept samples, all of which have the pod. 0 for
    disks: what a pod writes need not stay."""
    samples = [sample for sample in (state.newer, state.older) if sample is not None]
    bases = [sample for sample in samples if GROWTH_STEP_S / 2 <= at - sample.at <= GROWTH_OLDEST_S]
    if not bases or signal in DISK_SIGNALS:
        return lambda usage, now: 0.0  # noqa: ARG005

    def grown(usage: PodUsage | None, now: int | None) -> float:
        if usage is None or now is None:
            return 0.0
        uid = usage.cgroup_uid
        known = [
            ((sample.processes if signal is Signal.PID else sample.memory).get(uid, now), sample) for sample in bases
        ]
        return max(0.0, min((now - before) / (at - sample.at) for before, sample in known))

    return grown


def _forking(usage: PodUsage | None, _now: int | None) -> float:
    forks = usage.forks_per_s if usage is not None else None
    return forks if forks is not None and 0.0 <= forks <= ABSURD else 0.0


def forked(usage: PodUsage | None) -> int:
    """Children that the pod brings forth in `PROJECTION_S`, however short they live."""
    return int(min(_forking(usage, None) * PROJECTION_S, ABSURD))


def _inode_growth(
    kept: Sequence[InodeCount], usage: PodUsage, now: int | None, signal: Signal, layout: DiskLayout
) -> float:
    """From the walk before the one in `usage`, or from nothing when the pod has started since; 0 when neither is known
    or it is too long ago."""
    sight = usage.disk_usage_quality
    if now is None or sight is None or not sight.complete:
        return 0.0
    bases = [(walk.at, disk_of(walk.held, signal, layout)) for walk in reversed(kept)]
    if usage.started_at is not None:
        bases.append((usage.started_at, 0))
    for since, count in bases:
        if count is not None and GROWTH_STEP_S <= sight.read_at - since <= DISK_OLDEST_S:
            return (now - count) / (sight.read_at - since)
    return 0.0


# --- texts -----------------------------------------------------------------------------------------------------------


def with_key_texts(plan: Plan) -> Plan:
    """The same plan with `RankedPod.keys` filled: every key by name, with its value and a text for people."""
    unit = SIGNAL_TABLE[plan.ranked_for].unit
    return plan._replace(
        ranking=tuple([pod._replace(keys=rank_keys(pod, plan.rank_order, unit=unit)) for pod in plan.ranking])
    )


def rank_keys(pod: RankedPod, order: Sequence[str], *, unit: Unit) -> tuple[RankKey, ...]:
    """The keys that put `pod` where it stands, with texts."""
    return tuple(
        [RankKey(name, value, _text(name, value, pod, unit)) for name, value in zip(order, pod.values, strict=True)]
    )


def _text(name: str, value: float, pod: RankedPod, unit: Unit) -> str:
    if value == LAST:
        return {RankingKey.AGE: "age not known", WRITE_RATE: "writes not known"}.get(name, "usage not known")
    return _TEXTS[name](value, pod, unit)


def _writes_text(value: float, _pod: RankedPod, _unit: Unit) -> str:
    return f"writes {figure(int(-value))} a second; what it holds is not measured yet"


def _exceeds_text(value: float, pod: RankedPod, unit: Unit) -> str:
    if value == 2.0:
        return "usage not known"
    if pod.request is None:
        return "uses some" if value == 0.0 else "uses none"
    return f"{'over' if value == 0.0 else 'within'} its request of {figure(pod.request, unit)}"


def _priority_text(value: float, pod: RankedPod, _unit: Unit) -> str:
    # Ranked as 0, which is not to be read as its priority.
    known = pod.view.pod.priority is not None or pod.view.pod.source is PodSource.API
    return f"priority {value:.0f}" if known else "priority not known"


def _over_text(value: float, pod: RankedPod, unit: Unit) -> str:
    amount = figure(int(abs(value)), unit)
    if pod.request is None:
        return f"uses {amount}"
    return f"uses {amount} {'over' if value <= 0 else 'less than'} its request"


_TEXTS: Final[Mapping[str, Callable[[float, RankedPod, Unit], str]]] = {
    RankingKey.QOS: lambda _value, pod, _unit: pod.view.pod.qos_class.value,
    RankingKey.EXCEEDS_REQUEST: _exceeds_text,
    RankingKey.PRIORITY: _priority_text,
    RankingKey.USAGE_OVER_REQUEST: _over_text,
    RankingKey.USAGE: lambda value, _pod, unit: f"uses {figure(int(-value), unit)}",
    RankingKey.GROWTH: lambda value, _pod, unit: f"grows by {figure(int(-value), unit)} a second",
    RankingKey.POD_DELETION_COST: lambda value, _pod, _unit: f"deletion cost {value:.0f}",
    RankingKey.AGE: lambda value, _pod, _unit: f"started {value:.0f}s ago",
    RankingKey.DUPLICATE_ON_NODE: lambda value, _pod, _unit: (
        "has a sibling here" if value == 0.0 else "no sibling here"
    ),
    RankingKey.RESTART_COUNT: lambda value, _pod, _unit: f"{abs(value):.0f} restarts",
    WISH: lambda value, _pod, _unit: ("asks to go first", "no wish", "asks to go last")[int(value) + 1],
    WRITE_RATE: _writes_text,
    PROJECTED_USAGE: lambda value, _pod, unit: (
        f"{figure(int(-value), unit)} in {PROJECTION_S:.0f}s as it grows or forks"
    ),
}
