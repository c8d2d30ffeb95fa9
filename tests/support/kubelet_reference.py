"""A second, plain implementation of the kubelet's eviction manager, for comparison with `nodeagent.policy`.

It follows the kubelet's contract alone (KUBELET-CONTRACT 3, 5 to 7, 11, 12) and imports nothing of `nodeagent.policy`.
It is slow, without defences, and has one function for each table of the contract. A line with a quirk that
docs/kubelet-differences.md lists as a difference has its number (Q7, Q8, Q9, Q11, Q13, Q14, Q4 for the order of
resources).
"""

import ctypes
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from nodeagent.model import (
    Amount,
    ConditionType,
    Container,
    ContainerKind,
    ContainerUsage,
    DiskLayout,
    NodeSnapshot,
    Pod,
    PodUsage,
    PodView,
    QOSClass,
    Resources,
    Signal,
    Threshold,
)

Identity = tuple[object, ...]

# --- KUBELET-CONTRACT 1: the signals ---------------------------------------------------------------------------------

MEMORY = (Signal.MEMORY, Signal.ALLOCATABLE_MEMORY)
BYTES = (Signal.NODEFS, Signal.IMAGEFS, Signal.CONTAINERFS)
INODES = (Signal.NODEFS_INODES, Signal.IMAGEFS_INODES, Signal.CONTAINERFS_INODES)


def resource(signal: Signal) -> str:
    if signal in MEMORY:
        return "memory"
    if signal is Signal.PID:
        return "pids"
    return "ephemeral-storage" if signal in BYTES else "inodes"


def condition(signal: Signal) -> ConditionType:
    if signal in MEMORY:
        return ConditionType.MEMORY_PRESSURE
    return ConditionType.PID_PRESSURE if signal is Signal.PID else ConditionType.DISK_PRESSURE


# --- 2: thresholds ---------------------------------------------------------------------------------------------------


def float32(value: float) -> float:
    return ctypes.c_float(value).value


def units(amount: Amount, capacity: int) -> int:
    if amount.quantity is not None:
        return amount.quantity
    assert amount.percentage is not None
    return int(float(capacity) * float32(float32(amount.percentage) / 100))


def identity(threshold: Threshold) -> Identity:
    """Signal, grace and value; not the reclaim."""
    value = threshold.value
    return threshold.signal, threshold.grace_period_s, value.quantity, value.percentage


def all_thresholds(configured: Iterable[Threshold], layout: DiskLayout, *, enforce: bool) -> list[Threshold]:
    """With what follows from the configured ones (from the first sync on: Q3)."""
    found = [each for each in configured if each.signal not in (Signal.CONTAINERFS, Signal.CONTAINERFS_INODES)]
    copies = []
    for each in found:
        if enforce and each.signal is Signal.MEMORY and each.grace_period_s == 0:
            copies.append(each._replace(signal=Signal.ALLOCATABLE_MEMORY))
        if layout is DiskLayout.DEDICATED_IMAGEFS:
            sources = {Signal.IMAGEFS: Signal.CONTAINERFS, Signal.IMAGEFS_INODES: Signal.CONTAINERFS_INODES}
        else:
            sources = {Signal.NODEFS: Signal.CONTAINERFS, Signal.NODEFS_INODES: Signal.CONTAINERFS_INODES}
        if each.signal in sources:
            copies.append(each._replace(signal=sources[each.signal]))
    return found + copies


# --- 12: requests and limits -----------------------------------------------------------------------------------------


def aggregate(amounts: Iterable[tuple[ContainerKind, int | None]]) -> int | None:
    """max(regular + sidecars, peak of the init containers); None if no container has an amount."""
    listed = [(kind, amount) for kind, amount in amounts if amount is not None]
    if not listed:
        return None
    running = sum(amount for kind, amount in listed if kind is not ContainerKind.INIT)
    peak = before = 0
    for kind, amount in listed:
        if kind is ContainerKind.SIDECAR:
            before += amount
            peak = max(peak, before)
        elif kind is ContainerKind.INIT:
            peak = max(peak, amount + before)
    return max(running, peak)


def allocated(container: Container, name: str) -> int | None:
    """The allocated amount; the spec where nothing is reported, and for ephemeral storage, which cannot be resized."""
    given: int | None = getattr(container.allocated, name) if container.allocated is not None else None
    own: int | None = getattr(container.requests, name)
    if name == "ephemeral_storage":
        return own if given is None else given
    return own if container.allocated is None else given


def of_the_pod(resources: Resources | None, name: str) -> int | None:
    """Pod-level values are for CPU and memory (and huge pages)."""
    found: int | None = getattr(resources, name) if resources is not None and name != "ephemeral_storage" else None
    return found


def request(pod: Pod, name: str) -> int:
    """The ranking request. Pod-level values hide the containers' for what they name only (Q14)."""
    own = of_the_pod(pod.pod_requests, name)
    total = own if own is not None else aggregate((c.kind, allocated(c, name)) for c in pod.containers)
    overhead: int | None = getattr(pod.overhead, name)
    return total + (overhead or 0) if total else 0


def storage_limit(pod: Pod) -> int | None:
    """The pod's ephemeral-storage limit; none while a container that keeps running has none (Q11)."""
    if any(c.limits.ephemeral_storage is None for c in pod.containers if c.kind is not ContainerKind.INIT):
        return None
    limit = aggregate((c.kind, c.limits.ephemeral_storage) for c in pod.containers)
    return limit + (pod.overhead.ephemeral_storage or 0) if limit else limit


# --- 11: QoS ---------------------------------------------------------------------------------------------------------


def qos(pod: Pod) -> QOSClass:
    """From the resources alone. Empty resources of the pod do not count (Q13)."""
    pairs: list[tuple[Resources, Resources]] = [(c.requests, c.limits) for c in pod.containers]
    own = (pod.pod_requests or Resources(), pod.pod_limits or Resources())
    if own != (Resources(), Resources()):
        pairs = [own]
    requested: dict[str, int] = {}
    capped: dict[str, int] = {}
    complete = True
    for requests, limits in pairs:
        for name in ("cpu_milli", "memory"):
            if (value := getattr(requests, name)) is not None and value > 0:
                requested[name] = requested.get(name, 0) + value
            if (value := getattr(limits, name)) is not None and value > 0:
                capped[name] = capped.get(name, 0) + value
            else:
                complete = False
    if not requested and not capped:
        return QOSClass.BEST_EFFORT
    return QOSClass.GUARANTEED if complete and requested == capped else QOSClass.BURSTABLE


# --- 5: what is measured, and the order -------------------------------------------------------------------------------


def known_sum(parts: Iterable[int | None]) -> int | None:
    found = [part for part in parts if part is not None]
    return sum(found) if found else None


def measured(usage: PodUsage | None, signal: Signal, layout: DiskLayout) -> int | None:
    """None: no stats."""
    if usage is None:
        return None
    if signal in MEMORY:
        if usage.memory_working_set is not None:
            return usage.memory_working_set
        each = [container.memory_working_set for container in usage.containers]
        return None if None in each else known_sum(each)
    if signal is Signal.PID:
        return usage.process_count
    disk = usage.disk
    if signal in INODES:
        rootfs, rest = disk.rootfs_inodes, (disk.logs_inodes, disk.volumes_inodes)
    else:
        rootfs, rest = disk.rootfs_bytes, (disk.logs_bytes, disk.volumes_bytes)
    nodefs = signal in (Signal.NODEFS, Signal.NODEFS_INODES)
    imagefs = signal in (Signal.IMAGEFS, Signal.IMAGEFS_INODES)
    if layout is DiskLayout.DEDICATED_IMAGEFS:
        return known_sum(rest) if nodefs else rootfs
    if layout is DiskLayout.SPLIT and imagefs:
        return 0
    return known_sum((rootfs, *rest))


def order(views: Iterable[PodView], signal: Signal, layout: DiskLayout) -> list[Pod]:
    """First = evicted first. A pod without stats is last in every comparison of usage (Q8); full ties go by name."""
    split_imagefs = layout is DiskLayout.SPLIT and signal in (Signal.IMAGEFS, Signal.IMAGEFS_INODES)

    def key(view: PodView) -> tuple[object, ...]:
        pod, used = view.pod, measured(view.usage, signal, layout)
        priority, name = pod.priority or 0, (pod.namespace, pod.name, pod.uid)
        if split_imagefs:  # Q9
            return (priority, *name)
        if signal is Signal.PID:
            return (priority, used is None, -(used or 0), *name)
        asks = 0
        if signal in MEMORY:
            asks = request(pod, "memory")
        elif signal in BYTES:
            asks = request(pod, "ephemeral_storage")
        # Inodes are compared with no request: Q7.
        exceeds = 2 if used is None else 0 if used > asks else 1
        return (exceeds, priority, 0 if used is None else asks - used, *name)

    return [view.pod for view in sorted(views, key=key)]


def protected(pod: Pod) -> bool:
    return bool(pod.static or pod.mirror_of) or (pod.priority or 0) >= 2_000_000_000


# --- 6: local-storage limits -----------------------------------------------------------------------------------------


def over_limit(view: PodView, layout: DiskLayout) -> str | None:
    """The message for the first limit that the pod exceeds."""
    pod, usage = view
    if usage is None:
        return None
    for volume in pod.empty_dirs:
        for measure in usage.volumes:
            limit = volume.size_limit
            if measure.name == volume.name and limit and (measure.used_bytes or 0) > limit:
                return f'Usage of EmptyDir volume "{volume.name}" exceeds the limit "{written(limit)}". '
    disk = usage.disk
    total = known_sum((disk.rootfs_bytes, disk.logs_bytes, disk.volumes_bytes, disk.other_bytes))
    cap = storage_limit(pod)
    if cap is not None and total is not None and total > cap:
        return f"Pod ephemeral local storage usage exceeds the total limit of containers {written(cap)}. "
    for container in pod.containers:
        own = container.limits.ephemeral_storage
        if container.kind is not ContainerKind.REGULAR or not own:
            continue
        for used in usage.containers:
            if used.name != container.name:
                continue
            parts = [used.disk.logs_bytes]
            if layout is not DiskLayout.DEDICATED_IMAGEFS:
                parts.append(used.disk.rootfs_bytes)
            if (known_sum(parts) or 0) > own:
                return f'Container {container.name} exceeded its local ephemeral storage limit "{written(own)}". '
    return None


# --- 7: texts --------------------------------------------------------------------------------------------------------


def canonical(amount: int, *, binary: bool) -> str:
    base, names = 1000, ["", "k", "M", "G", "T"]
    if binary and amount >= 1024:
        base, names = 1024, ["", "Ki", "Mi", "Gi", "Ti"]
    for power in range(len(names) - 1, -1, -1):
        if amount and amount % base**power == 0:
            return f"{amount // base**power}{names[power]}"
    return "0"


def written(amount: int) -> str:
    """Of a spec only the bytes are left: the shorter of both forms (B4)."""
    binary, decimal = canonical(amount, binary=True), canonical(amount, binary=False)

    def digits(text: str) -> int:
        return int("".join(each for each in text if each.isdigit()))

    return binary if digits(binary) < digits(decimal) and binary[-1] == "i" else decimal


def message(threshold: Threshold, snapshot: NodeSnapshot, view: PodView) -> tuple[str, dict[str, str]]:
    """The eviction's message and its event's annotations."""
    pod, usage = view
    observation, name = snapshot.observations[threshold.signal], resource(threshold.signal)
    assert observation.available is not None
    assert observation.capacity is not None
    is_bytes = name in ("memory", "ephemeral-storage")
    value = units(threshold.value, observation.capacity)
    quoted = canonical(value, binary=threshold.value.quantity is None or threshold.value.text.endswith("i"))
    text = f"The node was low on resource: {name}. "
    text += f"Threshold quantity: {quoted}, available: {canonical(observation.available, binary=is_bytes)}. "
    if usage is None:
        return text, {}
    marks = {"starved_resource": name}
    own = pod.pod_requests.memory if pod.pod_requests is not None else None
    if name == "memory" and own is not None and usage.memory_working_set is not None:
        used = canonical(usage.memory_working_set, binary=True)
        text += f"Pod {pod.name} was using {used}, request is {written(own)}, has larger consumption of memory. "
        marks |= {"offending_pod": str(pod.name), "offending_pod_usage": used}
    named = []
    for each in usage.containers:
        container = next((c for c in pod.containers if c.name == each.name), None)
        amount = container_usage(each, name)
        if container is None or amount is None or not is_bytes:
            continue
        asks = allocated(container, "memory" if name == "memory" else "ephemeral_storage") or 0
        if amount > asks:
            used = canonical(amount, binary=True)
            named.append((container.name, used))
            text += f"Container {container.name} was using {used}, request is {written(asks)}, "
            text += f"has larger consumption of {name}. "
    marks["offending_containers"] = ",".join(name for name, _ in named)
    marks["offending_containers_usage"] = ",".join(used for _, used in named)
    return text, marks


def container_usage(usage: ContainerUsage, name: str) -> int | None:
    if name == "memory":
        return usage.memory_working_set
    rootfs, logs = usage.disk.rootfs_bytes, usage.disk.logs_bytes
    return None if rootfs is None or logs is None else rootfs + logs


# --- 3: one sync -----------------------------------------------------------------------------------------------------


class State(NamedTuple):
    first_observed: Mapping[Identity, float]
    met_before: frozenset[Identity]
    condition_seen: Mapping[ConditionType, float]
    last_sample: Mapping[Signal, float]


START = State({}, frozenset(), {}, {})


class Eviction(NamedTuple):
    uid: str
    grace_s: float
    message: str
    annotations: dict[str, str]


class Sync(NamedTuple):
    conditions: frozenset[ConditionType]
    met: frozenset[Identity]
    due: frozenset[Identity]
    served: Identity | None
    """The one of them that is acted on."""
    order: tuple[str, ...]
    """UIDs in eviction order for it."""
    evicted: tuple[Eviction, ...]


def sync(
    thresholds: Iterable[Threshold],
    snapshot: NodeSnapshot,
    state: State,
    *,
    now: float,
    transition_s: float,
    max_grace_s: float,
    isolation: bool,
) -> tuple[Sync, State]:
    """Steps 1 to 15, without the node-level reclaim of step 14, which is no external agent's."""
    observations = {
        s: o for s, o in snapshot.observations.items() if o.available is not None and o.capacity is not None
    }

    def met(threshold: Threshold, *, with_reclaim: bool) -> bool:
        if threshold.signal not in observations:
            return False
        observation = observations[threshold.signal]
        assert observation.capacity is not None
        assert observation.available is not None
        limit = units(threshold.value, observation.capacity)
        if with_reclaim and threshold.min_reclaim is not None:
            limit += units(threshold.min_reclaim, observation.capacity)
        return limit > observation.available

    thresholds = list(thresholds)
    active = [each for each in thresholds if met(each, with_reclaim=False)]  # 5
    for each in thresholds:  # 6
        if identity(each) in state.met_before and each not in active and met(each, with_reclaim=True):
            active.append(each)
    first = {identity(each): state.first_observed.get(identity(each), now) for each in active}  # 7
    condition_seen = {**state.condition_seen, **{condition(each.signal): now for each in active}}  # 8
    conditions = frozenset(kind for kind, at in condition_seen.items() if now - at < transition_s)  # 9
    past = [each for each in active if now - first[identity(each)] >= each.grace_period_s]  # 10
    fresh = {s for s, o in observations.items() if s not in state.last_sample or o.read_at > state.last_sample[s]}
    due = [each for each in past if each.signal in fresh]  # 11
    after = State(
        first,
        frozenset(identity(each) for each in past),
        condition_seen,
        {signal: observation.read_at for signal, observation in observations.items()},
    )

    # Q4: always in the same order. Of one signal's thresholds the hard one, then the higher one, is quoted (B3).
    kinds = ["memory", "ephemeral-storage", "inodes", "pids"]
    due.sort(
        key=lambda each: (
            resource(each.signal) != "memory",
            each.grace_period_s != 0,
            kinds.index(resource(each.signal)),
            list(Signal).index(each.signal),
            -units(each.value, observations[each.signal].capacity or 0),
        )
    )
    candidates = [view for view in snapshot.pods if view.pod.phase not in ("Succeeded", "Failed")]
    evicted: list[Eviction] = []
    if isolation:  # 12
        for view in candidates:
            text = over_limit(view, snapshot.layout)
            if text is not None and not protected(view.pod):
                evicted.append(Eviction(view.pod.uid, 1.0, text, {}))
    ranked: list[Pod] = []
    served = None
    if due and not evicted:  # 13 to 15
        acting = due[0]
        served = identity(acting)
        ranked = order(snapshot.pods, acting.signal, snapshot.layout)
        usage_of = {view.pod.uid: view.usage for view in candidates}
        for pod in ranked:
            usage = usage_of.get(pod.uid)
            if protected(pod) or measured(usage, acting.signal, snapshot.layout) is None:  # the latter is Q8
                continue
            grace_s = 1.0 if acting.grace_period_s == 0 else max(1.0, min(max_grace_s, pod.termination_grace_s))
            evicted.append(Eviction(pod.uid, grace_s, *message(acting, snapshot, PodView(pod, usage))))
            break
    result = Sync(
        conditions,
        frozenset(identity(each) for each in active),
        frozenset(identity(each) for each in due),
        served,
        tuple(pod.uid for pod in ranked),
        tuple(evicted),
    )
    return result, after
