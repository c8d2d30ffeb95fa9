"""A leak that takes what other evictions free is evicted instead of them."""

from collections.abc import Iterator, Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from nodeagent.config import load
from nodeagent.config.schema import Config, RankingConfig, RankingKey
from nodeagent.model import (
    CgroupUsage,
    DiskPoint,
    DiskTrace,
    DiskUsage,
    DiskUsageQuality,
    Observation,
    Plan,
    PodSource,
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
    for plan in plans(*leaks, beside=beside, config=config):
        if plan.victims:
            return plan
    raise AssertionError("no eviction")


def plans(
    *leaks: Leak, beside: list[PodView], config: Config | None = None, outside_mib_per_s: float = 0.0
) -> Iterator[Plan]:
    """One a second, until nothing is left."""
    config = config or load.defaults().config._replace(node_name="node-1")
    state = initial("t", now=NOW)
    for number in range(600):
        at = NOW + number
        grown = int((outside_mib_per_s + sum(leak.mib_per_s for leak in leaks)) * number * MI)
        if grown >= 400 * MI:
            return
        pods = [*beside, *[leak.view(number) for leak in leaks]]
        node = snapshot(*pods, at=at)
        memory = Observation(Signal.MEMORY, 400 * MI - grown, TOTAL, at, "test")
        node = node._replace(observations={**node.observations, Signal.MEMORY: memory}, mem_available=memory)
        plan, state = engine.decide(node, state, now=at, config=config)
        yield plan


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


@pytest.mark.parametrize(("mib_per_s", "evicted"), [(1.3, "leak"), (0.8, "database")])
def test_a_leak_is_evicted_and_not_a_large_idle_pod_whose_memory_it_would_not_soon_use_up(
    mib_per_s: float, evicted: str
) -> None:
    """Within five minutes the faster one uses up the 300Mi that the hard threshold reserves."""
    database = nodes.view("database", 4 * GI, qos=QOSClass.BEST_EFFORT)
    assert victims(evicting_plan(Leak(mib_per_s, mib=300), beside=[database])) == [evicted]


def test_of_several_replicas_that_leak_together_the_first_is_evicted() -> None:
    leaks = [Leak(0.3, mib=400, name=f"leak{index}") for index in range(5)]
    assert victims(evicting_plan(*leaks)) == ["leak0"]


@pytest.mark.parametrize(
    "leak",
    [
        Leak(25.0, request_mib=7000),
        Leak(25.0, more={"priority": 100}),
        Leak(25.0, request_mib=7000, more={"namespace": "kube-system"}),
        Leak(1.0, more={"namespace": "kube-system"}),
    ],
    ids=["within its request", "of higher priority", "protected and within its request", "protected and slow"],
)
def test_who_grows_and_is_not_to_blame_or_not_worth_less_stays(leak: Leak) -> None:
    assert victims(evicting_plan(leak))[0].startswith("small")


def test_no_pod_is_evicted_for_a_protected_leak_that_would_take_what_it_frees_within_a_minute() -> None:
    found = list(plans(Leak(25.0, more={"namespace": "kube-system"}), beside=SMALL))
    assert not any(plan.victims for plan in found)
    refusal = found[-1].refusals[0]
    assert refusal.code is RefusalCode.OUT_OF_REACH
    assert refusal.message.startswith("memory.available: kube-system/leak grows by 25Mi a second and is out of reach (")
    assert refusal.message.endswith(" last for less than 60s: no other pod is evicted in its place")


def test_the_refusal_names_the_protection_that_lasts_and_not_one_that_passes() -> None:
    leak = Leak(25.0, more={"namespace": "kube-system", "source": PodSource.HOST})
    last = list(plans(leak, beside=SMALL))[-1]
    codes = next([each.code for each in pod.refusals] for pod in last.ranking if pod.view.pod.name == "leak")
    assert codes == [RefusalCode.UNKNOWN_POD, RefusalCode.NAMESPACE]
    assert " is out of reach (namespace: " in last.refusals[0].message


def test_beside_a_protected_leak_a_pod_is_evicted_that_frees_enough_for_a_minute() -> None:
    large = nodes.view("large", 3 * GI, request=2 * GI)
    plan = evicting_plan(Leak(25.0, more={"namespace": "kube-system"}), beside=[large])
    assert victims(plan) == ["large"]


def test_a_protected_leak_that_is_not_most_of_the_loss_is_no_reason_to_evict_nobody() -> None:
    leak = Leak(5.0, more={"namespace": "kube-system"})
    evicting = [plan for plan in plans(leak, beside=SMALL, outside_mib_per_s=15.0) if plan.victims]
    assert victims(evicting[0])[0].startswith("small")


def test_beside_a_protected_leak_another_leak_is_evicted() -> None:
    leaks = [Leak(25.0, more={"namespace": "kube-system"}), Leak(20.0, mib=300, name="other")]
    assert victims(evicting_plan(*leaks)) == ["other"]


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


class Writer(NamedTuple):
    """A pod that writes `mib`, evenly from one second to another."""

    name: str
    started_s: float
    from_s: float
    to_s: float
    mib: float

    def held(self, second: float) -> int:
        share = (second - self.from_s) / (self.to_s - self.from_s)
        return int(self.mib * MI * min(1.0, max(0.0, share)))


def race_plan(
    pods: list[Writer],
    *,
    crossed_s: float,
    walks_at: Sequence[float],
    watched_from_s: float = 1e9,
    mib: int = 120,
) -> Plan:
    """The first plan that evicts for a disk of which less than `mib` is left after the crossing. It is walked at these
    seconds, and the writes of the pods are watched from one second on."""
    config = nodes.config(nodes.hard(Signal.NODEFS, mib * MI))
    state, held_then = initial("t", now=NOW), sum(pod.held(crossed_s) for pod in pods)
    for number in range(240):
        second = number / 4
        at, walks = NOW + second, [each for each in walks_at if each <= second]
        left = mib * MI + held_then - sum(pod.held(second) for pod in pods)
        views = []
        for pod in pods:
            more: dict[str, Any] = {"started_at": NOW + pod.started_s}
            if walks:
                more |= walked(pod.held(walks[-1]), NOW + walks[-1])
            if second > watched_from_s:
                wrote = pod.held(second) - pod.held(watched_from_s)
                per_s = (pod.held(second) - pod.held(second - 0.25)) * 4.0
                more["writing"] = WriteRate(per_s, wrote, second - watched_from_s, at)
            views.append(nodes.view(pod.name, 10 * MI, qos=QOSClass.BEST_EFFORT, usage_more=more))
        node = snapshot(*views, at=at, available={Signal.NODEFS: left, Signal.CONTAINERFS: left})
        held = [sum(pod.held(each) for pod in pods) for each in walks]
        points = [DiskPoint(NOW + each, GI + sum_, sum_, 9, 9) for each, sum_ in zip(walks, held, strict=True)]
        if points:
            signals = (Signal.NODEFS, Signal.CONTAINERFS)
            node = node._replace(
                disk_traces=(DiskTrace(signals, points[0], points[0], points[-1], deleted_known=True),)
            )
        plan, state = engine.decide(node, state, now=at, config=config)
        if plan.victims:
            return plan
    raise AssertionError("no eviction")


IDLE = Writer("idle", -40.0, -40.0, -35.0, 200)
FILLER = Writer("filler", -30.0, -22.0, 60.0, 410)
"""5 MiB a second; 160 MiB at second 10."""


@pytest.mark.parametrize("walks_at", [(10.25, 11.0), (10.25, 12.75), (9.0, 10.5), (8.0, 10.25), (2.0, 10.25)])
def test_a_pod_that_wrote_much_at_its_start_is_not_evicted_for_one_that_fills_the_disk(
    walks_at: tuple[float, ...],
) -> None:
    assert victims(race_plan([IDLE, FILLER], crossed_s=10.0, walks_at=walks_at)) == ["filler"]


def test_one_walk_and_the_writes_since_the_crossing_show_who_fills_the_disk() -> None:
    plan = race_plan([IDLE, FILLER], crossed_s=10.0, walks_at=[10.25], watched_from_s=10.0)
    assert victims(plan) == ["filler"]


def test_what_a_pod_wrote_at_its_start_while_it_was_watched_does_not_count() -> None:
    """The times of a container that wrote for two seconds, beside one that filled the disk."""
    idle, filler = Writer("idle", -1.0, 0.5, 3.0, 200), Writer("filler", 3.0, 5.0, 70.0, 18 * 65)
    plan = race_plan([idle, filler], crossed_s=11.0, walks_at=[1.0, 8.75, 11.5, 12.0], watched_from_s=1.0)
    assert victims(plan) == ["filler"]


@pytest.mark.parametrize("seed", range(40))
def test_on_any_disk_the_pod_that_fills_it_is_evicted_and_no_idle_one(seed: int) -> None:
    """As the agent samples them: writes once the crossing is less than a minute away, walks every 10 s, and below the
    threshold every second. Idle pods wrote at any time before."""
    random = Random(seed)
    crossed_s = random.uniform(1.0, 20.0)
    pods = [Writer("filler", -random.choice([70.0, 300.0, 5000.0]), 0.0, 60.0, 60 * random.choice([5, 20, 100, 300]))]
    for number in range(random.randint(1, 5)):
        began_s = -random.choice([15.0, 40.0, 90.0, 300.0, 590.0, 5000.0])
        ended_s = began_s + random.uniform(0.5, 0.9) * min(60.0, -began_s)
        pods.append(Writer(f"idle{number}", began_s, began_s, ended_s, random.choice([10, 200, 1000, 20_000])))
    walks_at = [*[each for each in (0.5, 10.5, 20.5) if each < crossed_s], *[crossed_s + each for each in range(1, 30)]]
    plan = race_plan(pods, crossed_s=crossed_s, walks_at=walks_at, watched_from_s=0.25, mib=10_000)
    assert victims(plan) == ["filler"]


@pytest.mark.parametrize("seed", range(40))
def test_on_any_disk_no_pod_is_evicted_that_wrote_while_it_was_watched_and_stopped(seed: int) -> None:
    """It stopped two seconds before the crossing or earlier."""
    random = Random(seed)
    crossed_s = random.uniform(8.0, 25.0)
    began_s = random.uniform(1.0, crossed_s - 4.0)
    rate = random.choice([5, 20, 100, 300])
    pods = [Writer("filler", began_s - random.choice([1.0, 3.0, 60.0]), began_s, began_s + 120.0, 120 * rate)]
    for number in range(random.randint(1, 4)):
        began_s = random.uniform(-10.0, crossed_s - 4.0)
        ended_s = began_s + random.uniform(0.3, min(6.0, crossed_s - 2.0 - began_s))
        pods.append(Writer(f"idle{number}", began_s - 1.0, began_s, ended_s, random.choice([50, 200, 1000, 5000])))
    first_s, distance_s = random.uniform(0.3, 3.0), random.choice([5.0, 10.0])
    calm = [first_s + distance_s * number for number in range(6)]
    walks_at = [*[each for each in calm if each < crossed_s], *[crossed_s + 0.3 + each for each in range(30)]]
    plan = race_plan(pods, crossed_s=crossed_s, walks_at=walks_at, watched_from_s=0.25, mib=10_000)
    assert victims(plan) == ["filler"]


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
        reserve=100 * GI,
        signal=Signal.MEMORY,
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


class Forks(NamedTuple):
    """The threads of a pod."""

    threads: int
    per_s: float = 0.0
    """So many more in each second."""
    forks_per_s: float = 0.0
    """Children that end at once."""
    swings: int = 0
    """It has so many more in every other ten seconds."""

    def view(self, name: str, seconds: int) -> PodView:
        threads = self.threads + int(self.per_s * seconds) + (self.swings if seconds // 10 % 2 else 0)
        more = {"thread_count": threads, "process_count": 9, "forks_per_s": self.per_s + self.forks_per_s}
        return nodes.view(name, 10 * MI, usage_more=more)


def pid_victims(*, unseen_per_s: int = 0, **pods: Forks) -> list[str]:
    """The first pods that are evicted for PIDs, in a sync each second, on a node with the built-in thresholds of 5% and
    10% of 32768. `unseen_per_s`: so many more are in use that no sample assigns to a pod."""
    config = load.defaults().config._replace(node_name="node-1")
    state, capacity, others = initial("t", now=NOW), 32768, 200
    start = sum(pod.threads for pod in pods.values())
    for number in range(600):
        views = [pod.view(name, number) for name, pod in pods.items()]
        grown = sum(view.usage.thread_count or 0 for view in views if view.usage is not None) - start
        left = 3500 - grown - unseen_per_s * number
        node = snapshot(*views, at=NOW + number, available={Signal.PID: left})
        observation = Observation(Signal.PID, left, capacity, NOW + number, "test")
        host = CgroupUsage("/system.slice/build.service", GI, capacity - 3500 - start - others)
        node = node._replace(observations={**node.observations, Signal.PID: observation}, cgroups=(host,))
        plan, state = engine.decide(node, state, now=NOW + number, config=config)
        if plan.victims:
            return victims(plan)
    return []


@pytest.mark.parametrize("per_s", [20.0, 2.0])
def test_a_pod_that_leaks_threads_is_evicted_and_not_a_larger_one_that_is_idle(per_s: float) -> None:
    assert pid_victims(leak=Forks(900, per_s), server=Forks(3000)) == ["leak"]


def test_threads_that_leak_more_slowly_than_in_an_hour_leave_the_order_as_it_is() -> None:
    assert pid_victims(leak=Forks(900, 0.5), server=Forks(3000)) == ["server"]


def test_a_pod_that_forks_often_is_not_evicted_for_one_that_leaks_threads() -> None:
    assert pid_victims(leak=Forks(900, 2.0), build=Forks(60, forks_per_s=500.0)) == ["leak"]


def test_no_pod_whose_threads_vary_is_evicted_for_a_bomb_of_children_that_end_at_once() -> None:
    bomb, server = Forks(30, forks_per_s=2000.0), Forks(3000, swings=150)
    assert pid_victims(bomb=bomb, server=server, unseen_per_s=200) == ["bomb"]


def test_the_kubelets_order_is_the_kubelets() -> None:
    """Which begins with what exceeds its request: by priority, and then by the amount."""
    config = load.defaults().config._replace(node_name="node-1", ranking=RankingConfig(kubelet=True))
    plan = evicting_plan(Leak(25.0, mib=100), config=config)
    assert RefusalCode.SHORT_LIVED_RELIEF not in {each.code for pod in plan.ranking for each in pod.refusals}
