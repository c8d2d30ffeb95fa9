"""A victim that the second look spares is let go, and a rehearsal touches nobody: the acts without a cluster."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from nodeagent.actuators.brakes import ActiveBrakes
from nodeagent.actuators.cgroup_brake import CgroupBrake
from nodeagent.actuators.session import NoCluster
from nodeagent.config import load
from nodeagent.config.config_file import ConfigFile
from nodeagent.config.schema import BrakeMode, Mode
from nodeagent.kube.pod_watch import PodsView
from nodeagent.loop.components import Components
from nodeagent.loop.executor import GROWTH_CAP_S, SIGHT_S, Executor
from nodeagent.loop.state_store import StateStore
from nodeagent.model import (
    Amount,
    MemoryModel,
    Method,
    Owner,
    Plan,
    Pod,
    PodSource,
    QOSClass,
    Refusal,
    RefusalCode,
    Signal,
    Threshold,
    Tier,
    Victim,
)
from nodeagent.policy import in_flight
from nodeagent.policy import state as policy_state
from nodeagent.policy.victim_preview import PredictedVictim
from nodeagent.sampling.disk.monitor import DiskMonitor
from nodeagent.sampling.events.wakeup_sources import WakeupSources
from nodeagent.sampling.hostfs.host import Host
from nodeagent.sampling.sampler import Sampler
from nodeagent.telemetry.decision_log import DecisionLog
from nodeagent.telemetry.log import open_log
from nodeagent.telemetry.metrics import Metrics
from tests.support.runtime import bare_means
from tests.support.trees import Node, TreePod, write_node

POD = TreePod("default/web")


class Scene(NamedTuple):
    """A written node with cgroup v2, and the hands of an agent on it."""

    actor: Executor
    keeper: StateStore
    parts: Components
    holds: ActiveBrakes
    high: Path
    """memory.high of the pod."""
    cgroup: str

    def plan(self) -> Plan:
        pod = Pod(POD.cgroup_uid, POD.cgroup_uid, "default", "web", PodSource.API, QOSClass.BURSTABLE)
        threshold = Threshold(Signal.MEMORY, Amount(1 << 30, None, "1Gi"))
        victim = Victim(pod, self.cgroup, threshold, Tier.HARD, Method.EVICT, 1.0, "", {}, 1)
        return Plan("plan-1", 1.0, 1.0, (), (), victims=(victim,))


@pytest.fixture
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    write_node(tmp_path, Node(pods=(POD,)))
    host = Host(str(tmp_path))
    [pod] = (tmp_path / "sys/fs/cgroup").rglob(f"*{POD.cgroup_uid.replace('-', '_')}.slice")
    (pod / "memory.high").write_text("max\n")
    loaded = load.load(None, overrides=())
    escalation = loaded.config.escalation._replace(brake=BrakeMode.THROTTLE)
    loaded = loaded._replace(config=loaded.config._replace(mode=request.param, escalation=escalation))
    config = loaded.config
    log, writer = open_log(level="error", style="json", fd=os.open(os.devnull, os.O_WRONLY))
    holds = ActiveBrakes(CgroupBrake(unified=tmp_path / "sys/fs/cgroup", freezer=None))
    means = bare_means(host, file=ConfigFile(None, overrides=()), alarms=WakeupSources(host), holds=holds, log=log)
    metrics = Metrics(config, boottime=host.boottime)
    policy = policy_state.initial("i", now=0.0)
    keeper = StateStore(policy, None, holds=holds, owned=tuple, says=tuple, metrics=metrics, log=log)
    actor = Executor(means, keeper=keeper, teller=DecisionLog(log, None), metrics=metrics)
    with Sampler(host, config.sampling, node_name="n") as sampler:
        parts = Components(loaded, sampler, NoCluster("none here"), DiskMonitor(host, config.sampling))
        cgroup = "/" + str(pod.relative_to(tmp_path / "sys/fs/cgroup"))
        yield Scene(actor, keeper, parts, holds, pod / "memory.high", cgroup)
    writer.close()


@pytest.mark.parametrize("scene", [Mode.ENFORCE], indirect=True)
def test_a_victim_that_the_second_look_spares_is_let_go(scene: Scene) -> None:
    plan = scene.plan()
    assert not scene.actor.brake(plan, scene.parts), "there is no state to save"
    assert scene.high.read_text().strip().isdigit(), "it is held"
    snapshot = scene.parts.sampler.sample(None, None)
    scene.actor.evict(plan, snapshot, scene.parts, saved=False)  # nobody knows the pods: no ground for an eviction
    assert scene.high.read_text().startswith("max")  # a kernel's file has no rest of what was written before
    assert scene.holds.active == ()


@pytest.mark.parametrize("scene", [Mode.DRY_RUN], indirect=True)
def test_a_rehearsal_holds_nobody_and_hands_nobody_over(scene: Scene) -> None:
    plan = scene.plan()
    scene.actor.brake(plan, scene.parts)
    assert scene.high.read_text() == "max\n"
    scene.actor.evict(plan, scene.parts.sampler.sample(None, None), scene.parts, saved=True)  # NoCluster would raise
    assert scene.high.read_text() == "max\n"


@pytest.mark.parametrize("scene", [Mode.ENFORCE], indirect=True)
def test_who_would_have_to_go_is_guarded_for_a_moment_and_no_longer_than_a_hold(scene: Scene) -> None:
    config, victim = scene.parts.config, PredictedVictim(POD.cgroup_uid, scene.cgroup, 1 << 40)
    assert scene.actor.can_cap_growth(config)
    scene.actor.cap_growth([victim], config, now=50.0)
    assert scene.high.read_text().strip() == str(1 << 40)
    assert [hold.until for hold in scene.holds.active] == [50.0 + GROWTH_CAP_S]
    brief = config._replace(escalation=config.escalation._replace(brake_deadline_s=0.25))
    scene.actor.cap_growth([victim], brief, now=51.0)
    assert [hold.until for hold in scene.holds.active] == [51.25]
    scene.actor.cap_growth([], config, now=51.1)
    assert scene.high.read_text().startswith("max")
    assert scene.holds.active == ()


@pytest.mark.parametrize("scene", [Mode.DRY_RUN, Mode.ENFORCE], indirect=True)
def test_nobody_is_guarded_in_a_rehearsal_or_without_a_brake(scene: Scene) -> None:
    config = scene.parts.config
    without = config._replace(escalation=config.escalation._replace(brake=BrakeMode.NONE))
    assert scene.actor.can_cap_growth(config) is (config.mode is Mode.ENFORCE)
    assert not scene.actor.can_cap_growth(without)


class OnePod(NoCluster):
    """A cluster that lists one pod, may have the soft tier wait, and takes what is handed over."""

    def __init__(self, pod: Pod, host: Host) -> None:
        super().__init__("")
        self._pod, self._host = pod, host
        self.wait: Refusal | None = None
        self.unreachable_since: float | None = None
        self.evicted: list[str] = []

    def pods(self) -> PodsView:
        return PodsView((self._pod,), self._host.boottime(), "", unreachable_since=self.unreachable_since)

    def soft_tier_block(self) -> Refusal | None:
        return self.wait

    def evict(self, plan_id: str, victim: Victim) -> None:
        self.evicted.append(f"{plan_id} {victim.pod.key}")


LOST_SLOT = Refusal(RefusalCode.WAITS_FOR_LEASE, "the soft tier waits for a slot that was lost since the decision")


@pytest.mark.parametrize("scene", [Mode.ENFORCE], indirect=True)
@pytest.mark.parametrize(
    ("tier", "wait", "stood_s", "evicted"),
    [
        (Tier.SOFT, LOST_SLOT, 0.0, []),
        (Tier.SOFT, None, 0.0, ["plan-1 default/web"]),
        (
            Tier.HARD,
            LOST_SLOT,
            0.0,
            ["plan-1 default/web"],
        ),
        (Tier.HARD, None, SIGHT_S, []),
    ],
    ids=["soft, and has to wait", "soft", "hard", "hard, and the process was stopped after its second look"],
)
def test_a_victim_is_handed_over_only_while_its_second_look_says_so(
    scene: Scene, tier: Tier, wait: Refusal | None, stood_s: float, evicted: list[str]
) -> None:
    plan = scene.plan()
    threshold = Threshold(Signal.MEMORY, Amount(1 << 60, None, "1Ei"), 0.0 if tier is Tier.HARD else 30.0)
    pod = plan.victims[0].pod._replace(owner=Owner("ReplicaSet", "web", "rs"))
    victim = plan.victims[0]._replace(pod=pod, tier=tier, threshold=threshold)
    plan = plan._replace(victims=(victim,))
    host = Host(str(scene.high.parents[5]))
    session = OnePod(victim.pod, host)
    parts = scene.parts._replace(session=session)
    view = session.pods()
    snapshot = parts.sampler.sample(view.pods, view.synced_at)
    at = snapshot.taken_at - 1
    entry = in_flight.InFlightEviction(
        plan_id=plan.id,
        pod_uid=pod.uid,
        cgroup_uid=pod.cgroup_uid,
        pod=pod.key,
        owner="rs",
        signal=Signal.MEMORY,
        memory_model=MemoryModel.WORKING_SET,
        tier=tier,
        stage=in_flight.EvictionStage.PLANNED,
        planned_at=at,
        sample_at=at,
        available=1,
        predicted=1,
        grace_s=1.0,
        until=at + 60,
        buckets=("node",),
    )
    scene.keeper.policy = scene.keeper.policy._replace(in_flight=in_flight.InFlightState((entry,)))
    session.wait, session.unreachable_since = wait, 12.5
    fresh = scene.actor.recheck(plan, snapshot, parts)
    assert (fresh.soft_tier_blocked_by, fresh.api_unreachable_since) == (wait, 12.5), "read anew, not carried over"
    scene.actor.evict(plan, fresh._replace(taken_at=fresh.taken_at - stood_s), parts, saved=True)
    assert session.evicted == evicted
