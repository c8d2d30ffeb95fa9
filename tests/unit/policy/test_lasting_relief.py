"""A leak that takes what other evictions free is evicted instead of them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from nodeagent.config import load
from nodeagent.config.schema import Config, RankingConfig, RankingKey
from nodeagent.model import (
    DiskPoint,
    DiskTrace,
    DiskUsage,
    DiskUsageQuality,
    Observation,
    Plan,
    PodView,
    QOSClass,
    RankedPod,
    RefusalCode,
    Signal,
    WriteRate,
)
from nodeagent.policy import engine, lasting_relief
from nodeagent.policy.state import initial
from tests.support import nodes
from tests.support.nodes import GI, MI, NOW, snapshot

TOTAL = 8 * GI
SMALL = [nodes.view(f"small{index}", 150 * MI, qos=QOSClass.BEST_EFFORT) for index in range(4)]


class Leak(NamedTuple):
    """A pod that grows, and how it is at the start."""

    mib_per_s: float
    mib: int = 1500
    request_mib: int = 50
    name: str = "leak"
    more: Mapping[str, Any] = MappingProxyType({})

    def view(self, seconds: float) -> PodView:
        used = int((self.mib + self.mib_per_s * seconds) * MI)
        return nodes.view(self.name, used, request=self.request_mib * MI, **self.more)


def evicting_plan(*leaks: Leak, beside: list[PodView] = SMALL, config: Config | None = None) -> Plan:
    """The first plan that evicts, in a sync each second. The rest of the node takes so much that 400Mi are left."""
    config = config or load.defaults().config._replace(node_name="node-1")
    state = initial("t", now=NOW)
    for number in range(600):
        at = NOW + number
        grown = int(sum(leak.mib_per_s for leak in leaks) * number * MI)
        pods = [*beside, *[leak.view(number) for leak in leaks]]
        node = snapshot(*pods, at=at)
        memory = Observation(Signal.MEMORY, 400 * MI - grown, TOTAL, at, "test")
        node = node._replace(observations={**node.observations, Signal.MEMORY: memory}, mem_available=memory)
        plan, state = engine.decide(node, state, now=at, config=config)
        if plan.victims:
            return plan
    raise AssertionError("no eviction")


def victims(plan: Plan) -> list[str]:
    return [victim.pod.name or "" for victim in plan.victims]


@pytest.mark.parametrize("mib_per_s", [25.0, 2.0])
def test_a_leak_above_its_request_is_evicted_before_pods_of_a_lower_class(mib_per_s: float) -> None:
    plan = evicting_plan(Leak(mib_per_s))
    assert victims(plan) == ["leak"]
    spared = [pod for pod in plan.ranking if pod.refusals]
    assert spared[0].view.pod.name == "small0"
    assert spared[0].refusals[0].code is RefusalCode.SHORT_LIVED_RELIEF
    assert spared[0].refusals[0].message == "what it frees would be used up by shop/leak"


def test_a_slow_leak_leaves_the_order_as_it_is() -> None:
    """What the first pod frees lasts for more than five minutes."""
    assert victims(evicting_plan(Leak(0.4))) == ["small0"]


def test_of_several_replicas_that_leak_together_the_first_is_evicted() -> None:
    leaks = [Leak(0.3, mib=400, name=f"leak{index}") for index in range(5)]
    assert victims(evicting_plan(*leaks)) == ["leak0"]


@pytest.mark.parametrize(
    "leak",
    [
        Leak(25.0, request_mib=7000),
        Leak(25.0, more={"priority": 100}),
        Leak(25.0, more={"namespace": "kube-system"}),
    ],
    ids=["within its request", "of higher priority", "protected"],
)
def test_who_grows_and_is_not_to_blame_or_not_worth_less_stays(leak: Leak) -> None:
    assert victims(evicting_plan(leak))[0].startswith("small")


def test_a_large_pod_that_grows_a_little_is_not_evicted_for_a_leak() -> None:
    large = Leak(0.1, mib=3000, name="large")
    assert victims(evicting_plan(Leak(8.0), large)) == ["leak"]


def disk_plan(*, filler_gib: float, mib_per_s: float, idle: Mapping[str, Any] | None = None) -> Plan:
    """The first plan that evicts for a disk of 100Gi below 12%, which pods fill. It is walked every ten seconds."""
    config = load.defaults().config._replace(node_name="node-1")
    state, capacity = initial("t", now=NOW), 100 * GI
    for number in range(60):
        at = NOW + 10.0 * number
        grown = int(mib_per_s * 10 * number * MI)
        held = {"idle": 40 * GI, "filler": int(filler_gib * GI) + grown}
        pods = [
            nodes.view(name, 10 * MI, usage_more=walked(amount, at), **((idle or {}) if name == "idle" else {}))
            for name, amount in held.items()
        ]
        left = 12 * GI + 600 * MI - grown
        node = snapshot(*pods, at=at, available={Signal.NODEFS: left, Signal.CONTAINERFS: left})
        used, per_s = capacity - left, int(mib_per_s * MI)
        first, recent, last = [
            DiskPoint(at - ago, used - per_s * ago, sum(held.values()) - per_s * ago, 9, 9) for ago in (60, 30, 0)
        ]
        trace = DiskTrace((Signal.NODEFS, Signal.CONTAINERFS), first, recent, last, deleted_known=True)
        plan, state = engine.decide(node._replace(disk_traces=(trace,)), state, now=at, config=config)
        if plan.victims:
            return plan
    raise AssertionError("no eviction")


def young_pods_plan(*walks_at: float, writes: bool = False) -> Plan:
    """The first plan that evicts for a disk of which 5Mi a second are taken, crossed 10 s from now. It is walked at
    these seconds. An idle pod wrote 200Mi when it started 40 s ago; the filler, younger, holds 110Mi."""
    config = nodes.config(nodes.hard(Signal.NODEFS, 120 * MI))
    state = initial("t", now=NOW)
    for number in range(100):
        seconds = number / 4
        at, left, walks = NOW + seconds, 170 * MI - 5 * MI * number // 4, [each for each in walks_at if each <= seconds]
        pods = []
        for name, age_s, held, per_s in (("idle", 40.0, 200 * MI, 0), ("filler", 30.0, 110 * MI, 5 * MI)):
            more: dict[str, Any] = {"started_at": NOW - age_s}
            if walks:
                more |= walked(int(held + per_s * walks[-1]), NOW + walks[-1])
            if writes and seconds >= 10.0:
                more["writing"] = WriteRate(per_s, int(per_s * (seconds - 10.0)), seconds - 10.0, at)
            pods.append(nodes.view(name, 10 * MI, qos=QOSClass.BEST_EFFORT, usage_more=more))
        points = [DiskPoint(NOW + each, GI + int(5 * MI * each), int((310 + 5 * each) * MI), 9, 9) for each in walks]
        node = snapshot(*pods, at=at, available={Signal.NODEFS: left, Signal.CONTAINERFS: left})
        if points:
            trace = DiskTrace((Signal.NODEFS, Signal.CONTAINERFS), points[0], points[0], points[-1], deleted_known=True)
            node = node._replace(disk_traces=(trace,))
        plan, state = engine.decide(node, state, now=at, config=config)
        if plan.victims:
            return plan
    raise AssertionError("no eviction")


@pytest.mark.parametrize("walks_at", [(10.25, 11.0), (10.25, 12.75), (9.0, 10.5), (8.0, 10.25), (2.0, 10.25)])
def test_a_pod_that_wrote_much_at_its_start_is_not_evicted_for_one_that_fills_the_disk(
    walks_at: tuple[float, ...],
) -> None:
    assert victims(young_pods_plan(*walks_at)) == ["filler"]


def test_one_walk_and_the_writes_since_the_crossing_show_who_fills_the_disk() -> None:
    assert victims(young_pods_plan(10.25, writes=True)) == ["filler"]


def walked(amount: int, at: float) -> dict[str, Any]:
    disk = DiskUsage(
        rootfs_bytes=0, rootfs_inodes=1, logs_bytes=0, logs_inodes=1, volumes_bytes=amount, volumes_inodes=1
    )
    return {"disk": disk, "disk_usage_quality": DiskUsageQuality(at, complete=True)}


def test_a_pod_that_fills_a_disk_is_evicted_and_not_a_larger_one_that_is_idle() -> None:
    assert victims(disk_plan(filler_gib=5, mib_per_s=10.0)) == ["filler"]


def test_a_filler_of_a_higher_priority_stays() -> None:
    plan = disk_plan(filler_gib=5, mib_per_s=10.0, idle={"priority": -1})
    assert victims(plan) == ["idle"]


@pytest.mark.parametrize(("deficit_mib", "evicted"), [(100, ["leak"]), (101, [])])
def test_a_pod_that_grows_and_is_still_too_small_is_not_evicted_instead(deficit_mib: int, evicted: list[str]) -> None:
    views = [nodes.view("small", 150 * MI, qos=QOSClass.BEST_EFFORT), nodes.view("leak", 100 * MI, request=MI)]
    pool = [RankedPod(view, rank, (), *amounts(view), (), (0.0,)) for rank, view in enumerate(views, 1)]
    rates = {"small": 0.0, "leak": 20.0 * MI}
    instead = lasting_relief.growing_instead(
        pool[:1],
        pool,
        deficit=deficit_mib * MI,
        reserve=None,
        order=(RankingKey.PRIORITY,),
        growth_per_s=lambda pod: rates[pod.view.pod.name or ""],
    )
    assert [pod.view.pod.name for pod in instead] == evicted


def amounts(view: PodView) -> tuple[int, int, int]:
    """Usage, request and relief."""
    assert view.usage is not None
    used = view.usage.memory_working_set or 0
    return used, view.pod.containers[0].requests.memory or 0, used


@pytest.mark.parametrize(("cost", "victim"), [("5", "small0"), ("-5", "leak")])
def test_a_configured_key_that_says_whose_loss_is_worse_stays_above_growth(cost: str, victim: str) -> None:
    annotations = {"controller.kubernetes.io/pod-deletion-cost": cost}
    order = (RankingKey.QOS, RankingKey.POD_DELETION_COST, RankingKey.USAGE_OVER_REQUEST)
    config = load.defaults().config._replace(node_name="node-1", ranking=RankingConfig(order=order))
    plan = evicting_plan(Leak(25.0, more={"annotations": annotations}), config=config)
    assert victims(plan)[0] == victim


def test_the_kubelets_order_is_the_kubelets() -> None:
    """Which begins with what exceeds its request: by priority, and then by the amount."""
    config = load.defaults().config._replace(node_name="node-1", ranking=RankingConfig(kubelet=True))
    plan = evicting_plan(Leak(25.0, mib=100), config=config)
    assert RefusalCode.SHORT_LIVED_RELIEF not in {each.code for pod in plan.ranking for each in pod.refusals}
