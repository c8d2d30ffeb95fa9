"""Hand-made reports: one node with values that are easy to recognise in whatever is printed of them."""

from nodeagent.config.kubelet import KubeletThresholds
from nodeagent.model import (
    Amount,
    CgroupUsage,
    ConditionStatus,
    ConditionType,
    ConditionVerdict,
    HugePages,
    MemoryModel,
    NodeMemory,
    NodeSnapshot,
    Note,
    Observation,
    Plan,
    Pod,
    PodSource,
    PodUsage,
    PodView,
    QOSClass,
    RankedPod,
    RankKey,
    Refusal,
    Signal,
    SignalState,
    SignalVerdict,
    Stall,
    StallScope,
    Threshold,
    ThresholdVerdict,
)
from nodeagent.report.node_report import Report

MIB = 1024 * 1024
GIB = 1024 * MIB
TAKEN_AT = 1000.0
WALL = 1_795_219_948.25
"""2026-11-21T00:12:28.250Z"""


def observation(
    signal: Signal,
    available: int | None,
    capacity: int | None,
    *,
    reason: str = "",
    device: int | None = None,
    source: str = "a file",
) -> Observation:
    return Observation(signal, available, capacity, TAKEN_AT - 0.5, source, reason, device)


def quantity(amount: int, text: str) -> Amount:
    return Amount(amount, None, text)


def percentage(share: float) -> Amount:
    return Amount(None, share, f"{share:g}%")


def judged(
    seen: Observation,
    state: SignalState = SignalState.OK,
    *thresholds: tuple[Threshold, int | None],
    met: bool = False,
    not_due_reason: str = "",
) -> SignalVerdict:
    verdicts = tuple(
        ThresholdVerdict(
            threshold, value, met, TAKEN_AT - 5 if met else None, met and not not_due_reason, not_due_reason
        )
        for threshold, value in thresholds
    )
    return SignalVerdict(seen, state, verdicts)


def pod_view(name: str, *, working_set: int, source: PodSource = PodSource.HOST, estimate: int | None = 0) -> PodView:
    uid = f"uid-{name}"
    pod = Pod(uid=uid, cgroup_uid=uid, namespace="default", name=name, source=source, qos_class=QOSClass.BEST_EFFORT)
    usage = PodUsage(
        cgroup_uid=uid,
        qos_class=QOSClass.BEST_EFFORT,
        cgroup=f"/kubepods/besteffort/pod{uid}",
        read_at=TAKEN_AT - 0.25,
        memory_working_set=working_set,
        memory_request_estimate=estimate,
        process_count=3,
        thread_count=5,
    )
    return PodView(pod, usage)


def ranked(view: PodView, rank: int, *, refusals: tuple[Refusal, ...] = ()) -> RankedPod:
    usage = view.usage.memory_working_set if view.usage else None
    keys = (RankKey("qos", 0.0, "BestEffort"), RankKey("usage", -1.0, "uses 212Mi over its request"))
    return RankedPod(
        view, rank, keys, usage, view.usage.memory_request_estimate if view.usage else None, usage, refusals
    )


def observations() -> dict[Signal, Observation]:
    """A calm node: 4 GiB of memory, 20 GiB of one disk for everything, no pods' cgroup."""
    disk = {"device": 7, "source": "statvfs /var/lib/kubelet"}
    rows = [
        observation(Signal.MEMORY, 2 * GIB, 4 * GIB, source="/proc/meminfo - memory.stat"),
        observation(Signal.ALLOCATABLE_MEMORY, None, None, reason="no kubepods cgroup"),
        *(
            Observation(signal, 10 * GIB, 20 * GIB, TAKEN_AT - 0.5, disk["source"], "", 7)  # type: ignore[arg-type]
            for signal in (Signal.NODEFS, Signal.IMAGEFS, Signal.CONTAINERFS)
        ),
        *(
            Observation(signal, 900_000, 1_000_000, TAKEN_AT - 0.5, disk["source"], "", 7)  # type: ignore[arg-type]
            for signal in (Signal.NODEFS_INODES, Signal.IMAGEFS_INODES, Signal.CONTAINERFS_INODES)
        ),
        observation(Signal.PID, 32_000, 32_768, source="/proc/loadavg"),
    ]
    return {row.signal: row for row in rows}


def memory(*, hugepages: tuple[HugePages, ...] = ()) -> NodeMemory:
    return NodeMemory(
        total=4 * GIB,
        free=GIB,
        mem_available=3 * GIB,
        buffers=MIB,
        cached=GIB,
        anon=GIB,
        shmem=2 * MIB,
        dirty=MIB,
        slab_reclaimable=30 * MIB,
        slab_unreclaimable=40 * MIB,
        kernel_stack=MIB,
        page_tables=MIB,
        swap_total=0,
        swap_free=0,
        hugepages=hugepages,
    )


def snapshot(**changes: object) -> NodeSnapshot:
    base = NodeSnapshot(
        node="node-1",
        taken_at=TAKEN_AT,
        wall_time=WALL,
        observations=observations(),
        mem_available=observation(Signal.MEMORY, 3 * GIB, 4 * GIB, source="MemAvailable"),
        memory=memory(),
        stalls=(Stall(StallScope.NODE, "memory", 1.5, 0.5, 12345, 0.25, 0.0, 99, TAKEN_AT),),
        cgroups=(CgroupUsage("/system.slice/docker.service", 300 * MIB, 12),),
    )
    return base._replace(**changes)  # type: ignore[arg-type]


HARD_MEMORY = Threshold(Signal.MEMORY, quantity(200 * MIB, "200Mi"))
SOFT_MEMORY = Threshold(Signal.MEMORY, quantity(300 * MIB, "300Mi"), grace_period_s=30.0)
HARD_NODEFS = Threshold(Signal.NODEFS, percentage(12))
HARD_ALLOCATABLE = Threshold(Signal.ALLOCATABLE_MEMORY, quantity(200 * MIB, "200Mi"))
MEMAVAILABLE = Threshold(Signal.MEMORY, quantity(MIB, "1Mi"), memory_model=MemoryModel.MEM_AVAILABLE)


def calm_signals(seen: dict[Signal, Observation]) -> tuple[SignalVerdict, ...]:
    ok, unknown = SignalState.OK, SignalState.UNKNOWN
    verdicts = {
        Signal.MEMORY: judged(seen[Signal.MEMORY], ok, (HARD_MEMORY, 200 * MIB), (SOFT_MEMORY, 300 * MIB)),
        Signal.ALLOCATABLE_MEMORY: judged(seen[Signal.ALLOCATABLE_MEMORY], unknown, (HARD_ALLOCATABLE, 200 * MIB)),
        Signal.NODEFS: judged(seen[Signal.NODEFS], ok, (HARD_NODEFS, 2_576_980_377)),
    }
    return tuple(verdicts.get(signal) or judged(seen[signal]) for signal in Signal)


def plan(signals: tuple[SignalVerdict, ...], **changes: object) -> Plan:
    base = Plan(
        id="p1",
        made_at=TAKEN_AT + 1,
        snapshot_taken_at=TAKEN_AT,
        signals=signals,
        conditions=tuple(
            ConditionVerdict(type_, ConditionStatus.FALSE, "Enough", f"no {type_}", TAKEN_AT) for type_ in ConditionType
        ),
    )
    return base._replace(**changes)  # type: ignore[arg-type]


def report(
    *,
    pods: tuple[RankedPod, ...] = (),
    signals: tuple[SignalVerdict, ...] | None = None,
    kubelet: KubeletThresholds | None = None,
    notes: tuple[Note, ...] = (),
    **changes: object,
) -> Report:
    seen = snapshot(pods=tuple(each.view for each in pods), **changes)
    verdicts = calm_signals(dict(seen.observations)) if signals is None else signals
    return Report(
        snapshot=seen,
        plan=plan(verdicts, ranking=pods),
        mode="dry-run",
        config_source="built-in defaults",
        pods_source="this host alone: no credentials",
        kubelet=kubelet,
        notes=notes,
    )
