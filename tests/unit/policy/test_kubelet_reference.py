"""With `ranking.order: kubelet` the engine decides like a second, plain implementation of the kubelet's contract."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.config.schema import ProtectionConfig, RankingConfig, ReliefConfig, SamplingConfig
from nodeagent.kube.qos import qos_class
from nodeagent.model import (
    DISK_SIGNALS,
    SIGNAL_TABLE,
    Amount,
    CgroupUsage,
    ConditionStatus,
    Container,
    ContainerKind,
    ContainerUsage,
    DiskLayout,
    DiskUsage,
    EmptyDir,
    HostDirectory,
    NodeSnapshot,
    Observation,
    Owner,
    Plan,
    Pod,
    PodSource,
    PodUsage,
    PodView,
    QOSClass,
    Resources,
    Signal,
    Threshold,
    UnattributedDisk,
    Unit,
    VolumeUsage,
)
from nodeagent.policy import engine, requests
from nodeagent.policy.state import initial
from tests.support import kubelet_reference as reference
from tests.support.nodes import KI, MI, NOW, WALL, config, snapshot

OFF = ProtectionConfig(
    daemon_sets=False,
    namespaces=(),
    bare_pods=False,
    node_bound=False,
    minimum_age_s=0.0,
    disruption_budgets=False,
)
TRANSITION_S, MAX_GRACE_S = 20.0, 12.0
LAYOUTS = st.sampled_from([DiskLayout.SINGLE, DiskLayout.DEDICATED_IMAGEFS, DiskLayout.SPLIT])

# --- pods -------------------------------------------------------------------------------------------------------------

# Few values, so that what is compared is often the same: usage and request, sample and threshold.
SIZES = st.one_of(
    st.sampled_from([0, 1, 10 * KI, 100 * MI]),
    st.sampled_from([0, 999, 1000, KI, 128_000_000, 100 * MI, 150 * MI, 150 * MI + 1]),
    st.integers(0, 200 * MI),
)
COUNTS = st.sampled_from([0, 1, 7, 90])


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


def mostly(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(strategy, strategy, strategy, strategy, st.none())


RESOURCES = st.builds(
    Resources, cpu_milli=maybe(st.sampled_from([0, 100, 250])), memory=maybe(SIZES), ephemeral_storage=maybe(SIZES)
)
KINDS = st.sampled_from(list(ContainerKind))


@st.composite
def containers(draw: st.DrawFn) -> tuple[Container, ...]:
    kinds = draw(st.lists(KINDS, min_size=1, max_size=4))
    return tuple(
        Container(
            f"c{number}",
            kind,
            requests=draw(RESOURCES),
            limits=draw(RESOURCES),
            allocated=draw(maybe(RESOURCES)),
        )
        for number, kind in enumerate(kinds)
    )


@st.composite
def pods(draw: st.DrawFn, name: str = "p") -> Pod:
    uid = f"uid-{name}"
    pod_level = draw(maybe(RESOURCES))
    return Pod(
        uid,
        uid,
        draw(st.sampled_from(["a", "b"])),
        name,
        PodSource.API,
        QOSClass.BURSTABLE,
        priority=draw(st.sampled_from([None, 0, 0, -5, 1000, 1_999_999_999, 2_000_000_000])),
        phase=draw(st.sampled_from(["Running", "Running", "Running", "Pending", "Succeeded", "Failed"])),
        created_wall=WALL - 3600,
        termination_grace_s=draw(st.sampled_from([0.0, 5.0, 30.0])),
        containers=draw(containers()),
        pod_requests=pod_level,
        pod_limits=draw(st.just(None) if pod_level is None else RESOURCES),
        overhead=draw(RESOURCES),
        resize_infeasible=draw(st.booleans()),
        owner=Owner("ReplicaSet", name, f"rs-{name}"),
        annotations=draw(st.sampled_from([{}, FORGED])),
        empty_dirs=(
            EmptyDir("scratch", memory_backed=False, size_limit=draw(maybe(SIZES))),
            EmptyDir("shm", memory_backed=True, size_limit=draw(maybe(SIZES))),
        ),
        static=draw(st.sampled_from(["", "", "", "", "file"])),
        mirror_of=draw(st.sampled_from(["", "", "", "", "hash"])),
    )


FORGED = {"kubernetes.io/config.mirror": "hash", "kubernetes.io/config.source": "file"}

DISKS = st.builds(
    DiskUsage,
    rootfs_bytes=mostly(SIZES),
    rootfs_inodes=mostly(COUNTS),
    logs_bytes=mostly(SIZES),
    logs_inodes=maybe(COUNTS),
    volumes_bytes=maybe(SIZES),
    volumes_inodes=maybe(COUNTS),
    other_bytes=maybe(SIZES),
    # A kubelet counts neither deleted files nor, once the next container runs, the layer of the one before it.
    **dict.fromkeys([name for name in DiskUsage._fields if name.startswith(("deleted_", "ended_layer_"))], st.none()),
)


@st.composite
def usages(draw: st.DrawFn, of: Pod) -> PodUsage:
    names = draw(st.permutations([container.name for container in of.containers] + ["unheard-of"]))
    return PodUsage(
        of.cgroup_uid,
        of.qos_class,
        f"/kubepods/pod{of.cgroup_uid}",
        NOW,
        memory_working_set=draw(mostly(SIZES)),
        process_count=draw(mostly(COUNTS)),
        disk=draw(DISKS),
        containers=tuple(
            ContainerUsage(f"id-{name}", name, draw(maybe(SIZES)), None, draw(DISKS))
            for name in names[: draw(st.integers(0, len(names)))]
        ),
        volumes=tuple(
            VolumeUsage(name, draw(maybe(SIZES)), None, memory_backed=name == "shm")
            for name in draw(st.sampled_from([(), ("scratch",), ("scratch", "shm")]))
        ),
    )


# --- thresholds and samples -------------------------------------------------------------------------------------------


def amounts(signal: Signal) -> st.SearchStrategy[Amount]:
    shares = st.sampled_from([10.0, 20.0, 50.0, 0.5, 12.5, 33.3, 70.0]).map(lambda p: Amount(None, p, f"{p:g}%"))
    numbers = st.sampled_from([100, 200, 500]) | st.integers(1, 900)
    if SIGNAL_TABLE[signal].unit is not Unit.BYTES:
        return shares | numbers.map(lambda n: Amount(n, None, str(n)))
    binary, decimal = (MI, "Mi"), (1_000_000, "M")
    return shares | st.builds(
        lambda n, unit: Amount(n * unit[0], None, f"{n}{unit[1]}"), numbers, st.sampled_from([binary, binary, decimal])
    )


AVAILABLE = st.sampled_from([0, 50, 100, 200]) | st.sampled_from([99, 101, 300, 500, 699, 700]) | st.integers(0, 997)
CONFIGURABLE = [signal for signal in Signal if not signal.startswith("containerfs")]


@st.composite
def threshold_maps(draw: st.DrawFn) -> tuple[Threshold, ...]:
    """Per signal one hard and one soft threshold and one minimum reclaim, like the four maps of a kubelet."""
    found = []
    for signal in draw(st.lists(st.sampled_from(CONFIGURABLE), min_size=1, max_size=5, unique=True)):
        reclaim = draw(maybe(amounts(signal)))
        for graces in draw(st.sampled_from([((0.0,),), ((10.0, 25.0),), ((0.0,), (0.0, 10.0, 25.0))])):
            grace_s = draw(st.sampled_from(graces))
            found.append(Threshold(signal, draw(amounts(signal)), grace_period_s=grace_s, min_reclaim=reclaim))
    return tuple({reference.identity(each): each for each in found}.values())


class Step:
    """The samples of one sync."""

    def __init__(self, at: float, observations: dict[Signal, Observation], views: tuple[PodView, ...]) -> None:
        self.at, self.observations, self.views = at, observations, views

    def __repr__(self) -> str:
        observations = {s.value: (o.available, o.capacity, o.read_at) for s, o in self.observations.items()}
        return f"Step({self.at}, {observations}, {self.views})"


@st.composite
def episodes(draw: st.DrawFn, *, steps: int, pressed: bool = False) -> list[Step]:
    """`pressed`: little of any resource is available, and there are pods to evict."""
    here = [draw(pods(name)) for name in "pqrs"[: draw(st.integers(2 if pressed else 0, 4))]]
    found: list[Step] = []
    at = NOW
    for _ in range(steps):
        at += draw(st.sampled_from([1.0, 5.0, 10.0, 20.0]))
        observations: dict[Signal, Observation] = {}
        for signal in Signal:
            unit = MI if SIGNAL_TABLE[signal].unit is Unit.BYTES else 1
            capacity = draw(st.sampled_from([1000, 1000, 997])) * unit
            available = draw(mostly(st.just(50) if pressed else AVAILABLE))
            available = None if available is None else available * unit
            if available is not None and signal is Signal.PID:
                available -= draw(st.sampled_from([0, 0, 100]))  # more threads than pid_max: it was lowered
            # A source without a new reading shows its last sample, except for PIDs, which are counted at once.
            again = found and signal is not Signal.PID and draw(st.integers(0, 5)) == 0
            observations[signal] = (
                found[-1].observations[signal] if again else Observation(signal, available, capacity, at, "test")
            )
        views = tuple(PodView(pod, draw(mostly(usages(pod)))) for pod in here)
        found.append(Step(at, observations, views))
    return found


# --- the comparison ---------------------------------------------------------------------------------------------------


def decided(plan: Plan) -> dict[str, Any]:
    judged = [each for verdict in plan.signals for each in verdict.thresholds]
    acting = None if plan.acting_on is None else reference.identity(plan.acting_on.threshold)
    return {
        "conditions": {each.type for each in plan.conditions if each.status is ConditionStatus.TRUE},
        "met": {reference.identity(each.threshold) for each in judged if each.met},
        "due": {reference.identity(each.threshold) for each in judged if each.due},
        "acting": acting,
        "order": [ranked.view.pod.uid for ranked in plan.ranking] if acting is not None else [],
        "evicted": {v.pod.uid: (v.grace_period_s, v.message, dict(v.annotations)) for v in plan.victims},
    }


def expected(result: reference.Sync) -> dict[str, Any]:
    return {
        "conditions": set(result.conditions),
        "met": set(result.met),
        "due": set(result.due),
        "acting": result.served,
        "order": list(result.order),
        "evicted": {each.uid: tuple(each[1:]) for each in result.evicted},
    }


def compare(
    steps: list[Step], thresholds: tuple[Threshold, ...], layout: DiskLayout, *, enforce: bool, isolation: bool
) -> None:
    settings = config(
        *thresholds,
        ranking=RankingConfig(kubelet=True),
        protection=OFF,
        relief=ReliefConfig(max_victims=1000, failures_before_stop=1000),
        sampling=SamplingConfig(stale_after_s=1e6),
        enforce_node_allocatable=enforce,
        local_storage_limits=isolation,
        eviction_pressure_transition_period_s=TRANSITION_S,
        eviction_max_pod_grace_period_s=MAX_GRACE_S,
    )
    state, reference_state = initial("t", now=NOW), reference.START
    gone: set[str] = set()
    for number, step in enumerate(steps):
        current = node(step, layout, without=gone)
        plan, state = engine.decide(current, state, now=step.at, config=settings)
        result, reference_state = reference.sync(
            reference.all_thresholds(thresholds, layout, enforce=enforce),
            current,
            reference_state,
            now=step.at,
            transition_s=TRANSITION_S,
            max_grace_s=MAX_GRACE_S,
            isolation=isolation,
        )
        if any(refusal.code == "out-of-reach" for refusal in plan.refusals):
            # K12: a pod without stats may hold all that is used of allocatable memory, where nothing but pods can.
            assert not plan.victims
            assert decided(plan) | {"evicted": {}} == expected(result) | {"evicted": {}}, f"at step {number}"
            return
        assert decided(plan) == expected(result), f"at step {number}"
        gone.update(each.uid for each in result.evicted)  # cleaned up by the next sync, as the kubelet waits for it


def node(step: Step, layout: DiskLayout, *, without: set[str]) -> NodeSnapshot:
    views = [view for view in step.views if view.pod.uid not in without]
    rest = UnattributedDisk(
        tuple(DISK_SIGNALS), 1 << 60, 0, 1 << 60, 0, (HostDirectory("/", 1 << 60, 1 << 60, True),), step.at
    )
    return snapshot(*views, at=step.at, layout=layout)._replace(
        observations=step.observations,
        # Host processes hold all the rest, so that a pod without stats may hold nothing (K12).
        cgroups=(CgroupUsage("/system.slice", 1 << 60, 1 << 40),),
        unattributed_disks=(rest,),
    )


@settings(max_examples=35, deadline=None)
@given(st.data())
def test_over_any_sequence_of_samples_thresholds_conditions_order_and_victims_are_the_kubelets(
    data: st.DataObject,
) -> None:
    compare(
        data.draw(episodes(steps=data.draw(st.integers(1, 5)))),
        data.draw(threshold_maps()),
        data.draw(LAYOUTS),
        enforce=data.draw(st.booleans()),
        isolation=data.draw(st.booleans()),
    )


@settings(max_examples=45, deadline=None)
@given(st.data())
def test_victims_order_and_messages_for_every_resource_are_the_kubelets(
    data: st.DataObject,
) -> None:
    hard, soft = (0.0, 5000), (0.001, 7000)
    short = st.builds(
        lambda signal, kind: Threshold(signal, Amount(None, kind[1] / 100, f"{kind[1] / 100:g}%"), kind[0]),
        st.sampled_from(CONFIGURABLE),
        st.sampled_from([hard, hard, soft]),
    )
    [first] = data.draw(episodes(steps=1, pressed=True))
    moments = [first.at + n for n in range(4)]
    compare(
        [Step(at, at_once(first, at), first.views) for at in moments],
        tuple(data.draw(st.lists(short, min_size=1, max_size=2, unique_by=lambda each: each.signal))),
        data.draw(LAYOUTS),
        enforce=data.draw(st.booleans()),
        isolation=data.draw(st.sampled_from([False, False, True])),
    )


def at_once(step: Step, at: float) -> dict[Signal, Observation]:
    return {signal: observation._replace(read_at=at) for signal, observation in step.observations.items()}


@settings(max_examples=100, deadline=None)
@given(pods())
def test_ranking_requests_and_qos_classes_follow_the_contract(pod: Pod) -> None:
    assert qos_class(pod) is reference.qos(pod)
    view = PodView(pod, None)
    assert requests.ranking_request(view, signal=Signal.MEMORY) == reference.request(pod, "memory")
    assert requests.ranking_request(view, signal=Signal.NODEFS) == reference.request(pod, "ephemeral_storage")
