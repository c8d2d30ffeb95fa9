"""A note says that memory grows outside of pods, and never for what a pod takes."""

import pytest

from nodeagent.config import load
from nodeagent.config.schema import Config
from nodeagent.model import CgroupUsage, MemoryModel, NodeMemory, NodeSnapshot, Observation, Plan, PodView, Signal
from nodeagent.policy import engine
from nodeagent.policy.state import initial
from tests.support import nodes
from tests.support.nodes import GI, MI, NOW, snapshot

TOTAL = 8 * GI
IDLE = nodes.view("idle", 3 * GI)


def node(*pods: PodView, service_mib: float, at: float, available_mib: float | None = None) -> NodeSnapshot:
    service = int(service_mib * MI)
    in_pods = sum(pod.usage.memory_unreclaimable or 0 for pod in pods if pod.usage is not None)
    available = int(available_mib * MI) if available_mib is not None else TOTAL - service - in_pods
    memory = Observation(Signal.MEMORY, available, TOTAL, at, "test")
    found = snapshot(*pods, at=at)
    return found._replace(
        observations={**found.observations, Signal.MEMORY: memory},
        mem_available=memory,
        memory=NodeMemory(TOTAL, available, available, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
        cgroups=(CgroupUsage("/system.slice/backup.service", service, 9),),
    )


def decide(snapshots: list[NodeSnapshot], *, config: Config | None = None) -> list[Plan]:
    config = config or load.defaults().config._replace(node_name="node-1")
    state = initial("t", now=snapshots[0].taken_at)
    plans = []
    for each in snapshots:
        plan, state = engine.decide(each, state, now=each.taken_at, config=config)
        plans.append(plan)
    return plans


def outside_notes(plans: list[Plan]) -> list[str]:
    return [note.message for plan in plans for note in plan.notes if note.message.startswith("memory outside of pods")]


def evicts(plans: list[Plan]) -> bool:
    return any(plan.victims for plan in plans)


def of_service(*, mib_per_s: float) -> list[NodeSnapshot]:
    """The service grows, until 150Mi of the node are left and pods are evicted."""
    most = (TOTAL - 3 * GI) // MI - 150
    return [node(IDLE, service_mib=most - mib_per_s * (30 - second), at=NOW + second) for second in range(31)]


def test_a_service_of_the_host_that_grows_is_named() -> None:
    plans = decide(of_service(mib_per_s=20.0))
    assert evicts(plans)
    assert outside_notes(plans)[0] == (
        "memory outside of pods grows by about 16Mi a second: whatever is evicted, it uses up the threshold's 200Mi in "
        "10s; the largest holder is /system.slice/backup.service"
    )


def test_growth_of_less_than_a_byte_a_second_above_a_threshold_of_bytes_is_said_too() -> None:
    snapshots = [
        node(service_mib=1.0, available_mib=(40 - second) / MI, at=NOW + 4.0 * second)._replace(
            cgroups=(CgroupUsage("/system.slice/backup.service", second, 9),)
        )
        for second in range(30)
    ]
    plans = decide(snapshots, config=nodes.config(nodes.hard(Signal.MEMORY, 30, memory_model=MemoryModel.LOWER)))
    assert outside_notes(plans)[0].startswith("memory outside of pods grows by about 1B a second")


def test_the_kernel_is_named_where_it_holds_more_than_any_service() -> None:
    snapshots = of_service(mib_per_s=20.0)
    slab = [
        each._replace(memory=each.memory._replace(slab_unreclaimable=6 * GI) if each.memory else None)
        for each in snapshots
    ]
    assert outside_notes(decide(slab))[0].endswith("; the largest holder is slab")
    unknown = [each._replace(cgroups=(), memory=None) for each in snapshots]
    assert outside_notes(decide(unknown))[0].endswith(" in 10s")


@pytest.mark.parametrize(("mib_per_s", "said"), [(0.6, False), (0.7, True)])
def test_growth_that_uses_up_the_reserve_in_more_than_five_minutes_is_not_said(mib_per_s: float, said: bool) -> None:
    assert bool(outside_notes(decide(of_service(mib_per_s=mib_per_s)))) is said


def test_nothing_is_said_where_no_threshold_is_met() -> None:
    assert outside_notes(decide(of_service(mib_per_s=20.0)[:5])) == []


@pytest.mark.parametrize("mib_per_s", [5.0, 50.0])
def test_growth_of_a_pod_is_none_of_the_host(mib_per_s: float) -> None:
    snapshots = []
    for second in range(31):
        leak = nodes.view("leak", int((2000 + mib_per_s * (second - 30)) * MI))
        snapshots.append(node(IDLE, leak, service_mib=TOTAL // MI - 3072 - 2000 - 150, at=NOW + second))
    plans = decide(snapshots)
    assert evicts(plans)
    assert outside_notes(plans) == []


@pytest.mark.parametrize(("outside_mib_per_s", "said"), [(1.0, False), (45.0, False), (55.0, True)])
def test_beside_a_pod_that_grows_it_is_said_if_it_is_most_of_the_loss(outside_mib_per_s: float, said: bool) -> None:
    snapshots = []
    for second in range(31):
        leak = nodes.view("leak", (2000 + 50 * (second - 30)) * MI)
        service = TOTAL // MI - 3072 - 2000 - 150 + outside_mib_per_s * (second - 30)
        snapshots.append(node(IDLE, leak, service_mib=service, at=NOW + second))
    plans = decide(snapshots)
    assert evicts(plans)
    assert bool(outside_notes(plans)) is said


def test_a_pod_that_starts_and_one_that_ends_are_none_of_the_host() -> None:
    snapshots = []
    for second in range(31):
        pods = [IDLE]
        if second < 14:
            pods.append(nodes.view("ends", 600 * MI))
        if second >= 24:
            pods.append(nodes.view("starts", 600 * MI))
        snapshots.append(node(*pods, service_mib=TOTAL // MI - 3072 - 600 - 150, at=NOW + second))
    plans = decide(snapshots)
    assert evicts(plans)
    assert outside_notes(plans) == []


def test_page_cache_that_a_pod_loses_is_no_growth_of_the_host() -> None:
    """Its working set shrinks while what is available stays the same."""
    snapshots = []
    for second in range(31):
        cache = nodes.view("cache", (2000 - 60 * second) * MI, usage_more={"memory_unreclaimable": 100 * MI})
        most = TOTAL // MI - 3072 - 100 - 150
        snapshots.append(node(IDLE, cache, service_mib=most, at=NOW + second))
    plans = decide(snapshots)
    assert evicts(plans)
    assert outside_notes(plans) == []


def test_a_step_is_no_growth() -> None:
    snapshots = of_service(mib_per_s=0.0)
    before = [
        node(IDLE, service_mib=TOTAL // MI - 3072 - 900, at=NOW + second) if second < 12 else snapshots[second]
        for second in range(31)
    ]
    plans = decide(before)
    assert evicts(plans)
    assert outside_notes(plans) == []


def test_memory_that_swings_outside_of_pods_is_no_growth() -> None:
    """It has not grown since the last time that it was as high."""
    most = TOTAL // MI - 3072 - 150
    snapshots = [node(IDLE, service_mib=most - 20 * (11 - second % 12), at=NOW + second) for second in range(60)]
    plans = decide(snapshots)
    assert evicts(plans)
    assert outside_notes(plans[24:]) == []


def test_beside_a_running_pod_of_unknown_usage_nothing_is_said() -> None:
    unread = nodes.view("unread", 0, usage_more={"memory_working_set": None, "memory_unreclaimable": None})
    snapshots = [each._replace(pods=(*each.pods, unread)) for each in of_service(mib_per_s=20.0)]
    plans = decide(snapshots)
    assert evicts(plans)
    assert outside_notes(plans) == []


def test_where_the_kubelets_figure_alone_decides_nothing_is_said() -> None:
    """Page cache counts there, and that of a pod is outside of pods for the kernel."""
    config = nodes.config(nodes.hard(Signal.MEMORY, 500 * MI, memory_model=MemoryModel.WORKING_SET))
    plans = decide(of_service(mib_per_s=20.0), config=config)
    assert evicts(plans)
    assert outside_notes(plans) == []
