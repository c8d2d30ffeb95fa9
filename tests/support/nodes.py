"""Nodes for policy tests in one line: a pod, its usage, a snapshot, a configuration that acts on the first sample.

The defaults are healthy and evictable: half of every resource is available, each pod has a ReplicaSet of its own and is
an hour old.
"""

from typing import Any

from nodeagent.config.schema import Config, ProtectionConfig, RateLimits, StartupConfig, TokenBucket
from nodeagent.model import (
    Amount,
    CgroupUsage,
    Container,
    DiskLayout,
    NodeMemory,
    NodeSnapshot,
    Observation,
    Owner,
    Pod,
    PodSource,
    PodUsage,
    PodView,
    QOSClass,
    Resources,
    Signal,
    Threshold,
)

KI, MI, GI = 1 << 10, 1 << 20, 1 << 30
NOW = 100_000.0
WALL = 1_800_000_000.0

CAPACITY = {
    Signal.MEMORY: 16 * GI,
    Signal.ALLOCATABLE_MEMORY: 15 * GI,
    Signal.NODEFS: 100 * GI,
    Signal.NODEFS_INODES: 1_000_000,
    Signal.IMAGEFS: 100 * GI,
    Signal.IMAGEFS_INODES: 1_000_000,
    Signal.CONTAINERFS: 100 * GI,
    Signal.CONTAINERFS_INODES: 1_000_000,
    Signal.PID: 32_768,
}

PLENTY = RateLimits(
    node=TokenBucket(1000, 100_000.0),
    namespace=TokenBucket(1000, 100_000.0),
    owner=TokenBucket(1000, 100_000.0),
    signal=TokenBucket(1000, 100_000.0),
)


def quantity(amount: int) -> Amount:
    return Amount(amount, None, str(amount))


def hard(signal: Signal = Signal.MEMORY, value: int = GI, **more: Any) -> Threshold:
    return Threshold(signal, quantity(value), **more)


def soft(signal: Signal = Signal.MEMORY, value: int = GI, grace_s: float = 0.001, **more: Any) -> Threshold:
    return Threshold(signal, quantity(value), grace_period_s=grace_s, **more)


def config(*thresholds: Threshold, **more: Any) -> Config:
    """A configuration whose thresholds act on the first sample and whose rate limits are never reached."""
    settings: dict[str, Any] = {
        "thresholds": thresholds,
        "startup": StartupConfig(fresh_samples=1),
        "rate_limits": PLENTY,
        "protection": ProtectionConfig(),
        "enforce_node_allocatable": False,
        "node_name": "node-1",
    }
    return Config(**(settings | more))


def pod(
    name: str,
    *,
    namespace: str = "shop",
    qos: QOSClass = QOSClass.BURSTABLE,
    request: int | None = None,
    age_s: float = 3600.0,
    **more: Any,
) -> Pod:
    """A running pod of a ReplicaSet of its own, which the API server lists."""
    uid = f"uid-{namespace}-{name}"
    settings: dict[str, Any] = {
        "source": PodSource.API,
        "qos_class": qos,
        "priority": 0,
        "phase": "Running",
        "created_wall": WALL - age_s,
        "started_wall": WALL - age_s,
        "containers": (Container("main", requests=Resources(memory=request), running=True),),
        "owner": Owner("ReplicaSet", name, f"rs-{namespace}-{name}"),
        "ready": True,
    }
    return Pod(uid, uid, namespace, name, **(settings | more))


def usage(of: Pod, memory: int | None = 0, *, at: float = NOW, **more: Any) -> PodUsage:
    """All memory is anonymous unless `memory_unreclaimable` is given."""
    settings: dict[str, Any] = {
        "memory_working_set": memory,
        "memory_usage": memory,
        "memory_unreclaimable": memory,
        "process_count": 1,
        "thread_count": 1,
    }
    return PodUsage(of.cgroup_uid, of.qos_class, f"/kubepods/pod{of.cgroup_uid}", at, **(settings | more))


def view(name: str, memory: int | None = 0, *, usage_more: dict[str, Any] | None = None, **more: Any) -> PodView:
    """A pod with its usage."""
    of = pod(name, **more)
    return PodView(of, usage(of, memory, **(usage_more or {})))


def not_started(of: Pod) -> Pod:
    """The pod with no running container."""
    return of._replace(containers=tuple([each._replace(running=False) for each in of.containers]))


def attributed(node: NodeSnapshot, *, unattributed: int = 0) -> NodeSnapshot:
    """The node with all memory that its pods do not hold in a system service, except `unattributed` bytes."""
    memory = node.observations[Signal.MEMORY]
    assert memory.capacity is not None
    assert memory.available is not None
    used_by_pods = sum(view.usage.memory_working_set or 0 for view in node.pods if view.usage is not None)
    rest = memory.capacity - memory.available - used_by_pods - unattributed
    return node._replace(cgroups=(CgroupUsage("/system.slice/database.service", rest, 5),))


def snapshot(
    *pods: PodView,
    at: float = NOW,
    available: dict[Signal, int | None] | None = None,
    layout: DiskLayout = DiskLayout.SINGLE,
    **more: Any,
) -> NodeSnapshot:
    """A node with half of every resource available, except as in `available`."""
    read = {signal: capacity // 2 for signal, capacity in CAPACITY.items()} | (available or {})
    observations = {signal: Observation(signal, read[signal], CAPACITY[signal], at, "test") for signal in Signal}
    total = CAPACITY[Signal.MEMORY]
    settings: dict[str, Any] = {
        "memory": NodeMemory(total, GI, read[Signal.MEMORY], 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
        "pods_synced_at": at,
        "wall_time": WALL + at - NOW,
    }
    moved = tuple([v if v.usage is None else v._replace(usage=v.usage._replace(read_at=at)) for v in pods])
    return NodeSnapshot(
        node="node-1",
        taken_at=at,
        observations=observations,
        mem_available=observations[Signal.MEMORY],
        layout=layout,
        pods=moved,
        **(settings | more),
    )
