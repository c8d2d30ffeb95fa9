"""Brakes, growth caps and evictions of one node, without an API server."""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.actuators.brakes import ActiveBrakes
from nodeagent.actuators.cgroup_brake import CgroupBrake
from nodeagent.actuators.reclaim_runner import ReclaimRunner
from nodeagent.actuators.session import NoCluster
from nodeagent.config import load
from nodeagent.config.config_file import ConfigFile
from nodeagent.config.schema import BeforeEvictionHook, BrakeMode, HooksConfig, Mode, ReclaimAction, ReclaimKind
from nodeagent.kube.pod_watch import PodsView
from nodeagent.loop.components import Components
from nodeagent.loop.executor import GROWTH_CAP_S, RECHECK_VALID_S, Executor
from nodeagent.loop.own_limit_watch import OwnLimitWatch
from nodeagent.loop.state_store import AgentState, StateStore
from nodeagent.model import (
    Amount,
    HookOrder,
    HookResult,
    MemoryModel,
    Method,
    Outcome,
    OutcomeKind,
    Owner,
    Plan,
    Pod,
    PodSource,
    PodView,
    QOSClass,
    RankedPod,
    ReclaimOrder,
    ReclaimResult,
    ReclaimTarget,
    Refusal,
    RefusalCode,
    Signal,
    SignalState,
    SignalVerdict,
    Threshold,
    ThresholdVerdict,
    Tier,
    Victim,
)
from nodeagent.policy import eviction_hook, in_flight, reclaim
from nodeagent.policy import state as policy_state
from nodeagent.policy.victim_preview import PredictedVictim
from nodeagent.records.state_file import StateFile
from nodeagent.sampling.disk.monitor import DiskMonitor
from nodeagent.sampling.hostfs.host import Host
from nodeagent.sampling.sampler import Sampler
from nodeagent.telemetry.decision_log import DecisionLog
from nodeagent.telemetry.log import open_log
from nodeagent.telemetry.metrics import Metrics
from tests.support.runtime import bare_runtime
from tests.support.trees import Node, TreePod, write_node

POD = TreePod("default/web")


@dataclasses.dataclass
class Scene:
    """A written node with cgroup v2, and an executor on it."""

    store: StateStore
    components: Components
    brakes: ActiveBrakes
    high: Path
    """memory.high of the pod."""
    cgroup: str
    executor: Executor = dataclasses.field(init=False)
    give_state_file: Callable[[StateFile | None], None] = dataclasses.field(init=False)

    def configure(self, **escalation: Any) -> None:
        """Change keys of `escalation`."""
        loaded, config = self.components.loaded, self.components.config
        config = config._replace(escalation=config.escalation._replace(**escalation))
        self.components = self.components._replace(loaded=loaded._replace(config=config))

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
    brakes = ActiveBrakes(CgroupBrake(unified=tmp_path / "sys/fs/cgroup", freezer=None))
    runtime = bare_runtime(host, file=ConfigFile(None, overrides=()), brakes=brakes, log=log)
    runtime = runtime._replace(reclaim_runner=ReclaimRunner(boottime=host.boottime, local_path=host.real))
    metrics = Metrics(config, boottime=host.boottime)
    policy = policy_state.initial("i", now=0.0)

    def make_store(file: StateFile | None) -> StateStore:
        return StateStore(
            policy,
            file,
            brakes=brakes,
            oom_scores=runtime.oom_scores,
            owned=tuple,
            status_notes=tuple,
            metrics=metrics,
            log=log,
        )

    with Sampler(host, config.sampling, node_name="n") as sampler:
        components = Components(loaded, sampler, NoCluster("none here"), DiskMonitor(host, config.sampling))
        cgroup = "/" + str(pod.relative_to(tmp_path / "sys/fs/cgroup"))
        made = Scene(make_store(None), components, brakes, pod / "memory.high", cgroup)

        def give_state_file(file: StateFile | None) -> None:
            made.store = make_store(file)
            made.executor = Executor(
                runtime,
                components=lambda: made.components,
                store=made.store,
                decision_log=DecisionLog(log, None),
                metrics=metrics,
                own_limits=OwnLimitWatch(),
            )

        made.give_state_file = give_state_file
        give_state_file(None)
        yield made
    writer.close()


@pytest.mark.parametrize("scene", [Mode.ENFORCE], indirect=True)
def test_the_brake_of_a_victim_that_the_recheck_refuses_is_released(scene: Scene) -> None:
    plan = scene.plan()
    assert not scene.executor.brake(plan), "there is no state to save"
    assert scene.high.read_text().strip().isdigit(), "the brake is set"
    snapshot = scene.components.sampler.sample(None, None)
    scene.executor.evict(plan, snapshot, saved=False)  # no pod is listed: the recheck refuses it
    assert scene.high.read_text().startswith("max")  # a kernel's file has no rest of what was written before
    assert scene.brakes.active == ()


@pytest.mark.parametrize("scene", [Mode.DRY_RUN], indirect=True)
def test_a_dry_run_brakes_no_victim(scene: Scene) -> None:
    plan = scene.plan()
    scene.executor.brake(plan)
    assert scene.high.read_text() == "max\n"
    scene.executor.evict(plan, scene.components.sampler.sample(None, None), saved=False)
    assert scene.high.read_text() == "max\n"


@pytest.mark.parametrize("scene", [Mode.ENFORCE], indirect=True)
def test_the_growth_cap_of_a_predicted_victim_is_short_and_never_outlasts_a_brake(scene: Scene) -> None:
    victim = PredictedVictim(POD.cgroup_uid, scene.cgroup, 1 << 40)
    assert scene.executor.can_cap_growth()
    scene.executor.cap_growth([victim], now=50.0)
    assert scene.high.read_text().strip() == str(1 << 40)
    assert [brake.until for brake in scene.brakes.active] == [50.0 + GROWTH_CAP_S]
    scene.configure(brake_deadline_s=0.25)
    scene.executor.cap_growth([victim], now=51.0)
    assert [brake.until for brake in scene.brakes.active] == [51.25]
    scene.executor.cap_growth([], now=51.1)
    assert scene.high.read_text().startswith("max")
    assert scene.brakes.active == ()


@pytest.mark.parametrize("scene", [Mode.DRY_RUN, Mode.ENFORCE], indirect=True)
def test_no_growth_cap_in_a_dry_run_or_without_a_configured_brake(scene: Scene) -> None:
    assert scene.executor.can_cap_growth() is (scene.components.config.mode is Mode.ENFORCE)
    scene.configure(brake=BrakeMode.NONE)
    assert not scene.executor.can_cap_growth()


MIB = 1 << 20


@pytest.mark.parametrize("scene", [Mode.DRY_RUN, Mode.ENFORCE], indirect=True)
@pytest.mark.parametrize("tier", Tier)
def test_page_cache_is_reclaimed_of_the_ordered_pods_and_in_a_dry_run_of_none(scene: Scene, tier: Tier) -> None:
    """Without a state directory, in both tiers: it evicts no pod."""
    acts = scene.components.config.mode is Mode.ENFORCE
    written = scene.high.with_name("memory.reclaim")
    written.touch()
    now = scene.components.sampler.sample_node(limits=True).taken_at
    target = ReclaimTarget("default/web", scene.cgroup, amount=4 * MIB, keep=0)
    order = ReclaimOrder("pageCache", Signal.MEMORY, tier, MIB, MIB, until=now + 30, level=1 << 50, targets=(target,))
    run = reclaim.ReclaimRun("plan-1", Signal.MEMORY, now, order.until, order.available)
    scene.store.apply(lambda state: state._replace(reclaims=reclaim.ReclaimState({order.name: run})))
    plan = scene.plan()._replace(made_at=now, victims=(), reclaims=(order,))
    scene.executor.start_reclaim(plan, scene.components.sampler.sample(None, None))
    give_up = time.monotonic() + 20
    while (ended := scene.store.policy_state.reclaims.runs[order.name]).ended_at is None:
        assert time.monotonic() < give_up
        time.sleep(0.01)
        scene.executor.apply_outcomes()
    assert ended.result is (ReclaimResult.STOPPED if acts else ReclaimResult.DRY_RUN)
    assert written.read_text() == (f"{4 * MIB} swappiness=0" if acts else "")
    assert ("reclaimed 4Mi of page cache: default/web 4Mi" in ended.message) is acts


@pytest.mark.parametrize("scene", [Mode.ENFORCE], indirect=True)
def test_the_logs_of_a_pod_that_the_api_server_lists_as_running_are_kept(scene: Scene, tmp_path: Path) -> None:
    """Its cgroup may be missing, because the cgroups could not be listed since it began."""
    config = scene.components.config
    action = ReclaimAction("logs", kind=ReclaimKind.CONTAINER_LOGS)
    config = config._replace(reclaim=config.reclaim._replace(actions=(action,)))
    scene.components = scene.components._replace(loaded=scene.components.loaded._replace(config=config))
    new = Pod("new", "new", "default", "new", PodSource.API, QOSClass.BURSTABLE)
    logs = {uid: tmp_path / f"var/log/pods/default_{uid}_{uid}/main" for uid in (POD.cgroup_uid, new.uid, "ended")}
    for directory in logs.values():
        directory.mkdir(parents=True)
        for name in ("0.log", "0.log.20261126-060000"):
            (directory / name).write_text("x")
    snapshot = scene.components.sampler.sample(None, None)
    snapshot = snapshot._replace(pods=(*snapshot.pods, PodView(new, None)))
    now = snapshot.taken_at
    order = ReclaimOrder("logs", Signal.NODEFS, Tier.HARD, MIB, MIB, until=now + 30)
    run = reclaim.ReclaimRun("plan-1", Signal.NODEFS, now, order.until, order.available)
    scene.store.apply(lambda state: state._replace(reclaims=reclaim.ReclaimState({order.name: run})))
    scene.executor.start_reclaim(scene.plan()._replace(made_at=now, victims=(), reclaims=(order,)), snapshot)
    give_up = time.monotonic() + 20
    while scene.store.policy_state.reclaims.runs[order.name].ended_at is None:
        assert time.monotonic() < give_up
        time.sleep(0.01)
        scene.executor.apply_outcomes()
    left = {uid for uid, directory in logs.items() if len(list(directory.iterdir())) == 2}
    assert left == {POD.cgroup_uid, "new"}


class Answering(NoCluster):
    """A cluster that returns the outcomes that it is given."""

    def __init__(self, *outcomes: Outcome) -> None:
        super().__init__("")
        self._outcomes = outcomes

    def outcomes(self) -> tuple[Outcome, ...]:
        return self._outcomes


@pytest.mark.parametrize("scene", [Mode.ENFORCE], indirect=True)
@pytest.mark.parametrize("kind", [OutcomeKind.REQUESTED, OutcomeKind.REQUEST_FAILED, OutcomeKind.REQUEST_WITHDRAWN])
def test_an_overtaken_request_does_not_release_the_brake_of_the_hard_eviction(scene: Scene, kind: OutcomeKind) -> None:
    plan = scene.plan()._replace(made_at=1e9)  # its brake has not reached its deadline
    scene.executor.brake(plan)
    braked = scene.high.read_text()
    assert braked != "max\n"
    late = Outcome("plan-0", plan.victims[0].pod.uid, kind, "of the soft tier's request", 1.0)
    scene.components = scene.components._replace(session=Answering(late))
    scene.executor.apply_outcomes()
    assert scene.high.read_text() == braked


class OnePod(NoCluster):
    """A cluster that lists one pod, may block the soft tier, and records submitted victims."""

    def __init__(self, pod: Pod, host: Host) -> None:
        super().__init__("")
        self._pod, self._host = pod, host
        self.block: Refusal | None = None
        self.unreachable_since: float | None = None
        self.evicted: list[str] = []

    def pods(self) -> PodsView:
        return PodsView((self._pod,), self._host.boottime(), "", unreachable_since=self.unreachable_since)

    def soft_tier_block(self) -> Refusal | None:
        return self.block

    def evict(self, plan_id: str, victim: Victim) -> None:
        self.evicted.append(f"{plan_id} {victim.pod.key}")


LOST_SLOT = Refusal(RefusalCode.WAITS_FOR_LEASE, "the soft tier waits for a slot that was lost since the decision")


@pytest.mark.parametrize("scene", [Mode.ENFORCE, Mode.DRY_RUN], indirect=True)
@pytest.mark.parametrize(
    ("tier", "block", "stopped_s", "evicted"),
    [
        (Tier.SOFT, LOST_SLOT, 0.0, []),
        (Tier.SOFT, None, 0.0, ["plan-1 default/web"]),
        (
            Tier.HARD,
            LOST_SLOT,
            0.0,
            ["plan-1 default/web"],
        ),
        (Tier.HARD, None, RECHECK_VALID_S, []),
    ],
    ids=["soft and blocked", "soft", "hard", "hard, and the process was stopped after its recheck"],
)
def test_a_victim_is_submitted_only_if_a_recent_recheck_allows_it(
    scene: Scene, tier: Tier, block: Refusal | None, stopped_s: float, evicted: list[str]
) -> None:
    plan = scene.plan()
    threshold = Threshold(Signal.MEMORY, Amount(1 << 60, None, "1Ei"), 0.0 if tier is Tier.HARD else 30.0)
    pod = plan.victims[0].pod._replace(owner=Owner("ReplicaSet", "web", "rs"))
    victim = plan.victims[0]._replace(pod=pod, tier=tier, threshold=threshold)
    plan = plan._replace(victims=(victim,))
    host = Host(str(scene.high.parents[5]))
    session = OnePod(victim.pod, host)
    scene.components = scene.components._replace(session=session)
    view = session.pods()
    snapshot = scene.components.sampler.sample(view.pods, view.synced_at)
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
    scene.store.apply(lambda state: state._replace(in_flight=in_flight.InFlightState((entry,))))
    session.block, session.unreachable_since = block, 12.5
    recheck = scene.executor.recheck(plan, snapshot)
    assert (recheck.soft_tier_blocked_by, recheck.api_unreachable_since) == (block, 12.5), (
        "read again, not carried over"
    )
    acts = scene.components.config.mode is Mode.ENFORCE
    scene.executor.evict(plan, recheck._replace(taken_at=recheck.taken_at - stopped_s), saved=acts)
    assert session.evicted == (evicted if acts else [])
    stages = [entry.stage for entry in scene.store.policy_state.in_flight.entries]
    allowed = in_flight.EvictionStage.PLANNED if acts else in_flight.EvictionStage.DRY_RUN
    assert stages == ([allowed] if evicted else [])


@pytest.mark.parametrize("scene", [Mode.DRY_RUN, Mode.ENFORCE], indirect=True)
@pytest.mark.parametrize("saved", [True, False], ids=["saved", "not saved"])
def test_a_hook_runs_only_if_the_agent_acts_and_its_run_is_saved(scene: Scene, saved: bool, tmp_path: Path) -> None:
    acts, ran = scene.components.config.mode is Mode.ENFORCE, tmp_path / "ran"
    if saved:
        file = StateFile(tmp_path / "state", shape=AgentState, boot_id="b")
        scene.give_state_file(file)
    hook = BeforeEvictionHook(command=("/bin/sh", "-c", f'cat > {ran}; echo "$NODEAGENT_POD_NAME"'))
    loaded = scene.components.loaded
    config = loaded.config._replace(hooks=HooksConfig(hook))
    scene.components = scene.components._replace(loaded=loaded._replace(config=config))
    now = scene.components.sampler.sample_node(limits=True).taken_at
    order = HookOrder("u-1", "shop", "web", "/kubepods/podu-1", Signal.MEMORY, MIB, MIB, now + 30)
    run = eviction_hook.HookRun("plan-1", "shop/web", now, order.until)
    scene.store.apply(lambda state: state._replace(hooks=eviction_hook.HookState({"u-1": run})))
    plan = scene.plan()._replace(made_at=now, victims=(), hooks=(order,))
    scene.executor.start_hooks(plan, scene.components.sampler.sample(None, None))
    give_up = time.monotonic() + 30
    if acts and not saved:
        assert scene.store.policy_state.hooks.runs == {}, "a later decision orders it again"
        assert not ran.exists()
        return
    while (ended := scene.store.policy_state.hooks.runs["u-1"]).ended_at is None:
        assert time.monotonic() < give_up
        time.sleep(0.01)
        scene.executor.apply_outcomes()
    if acts:
        assert (ended.result, ended.message) == (HookResult.DONE, "web")
        assert json.loads(ran.read_text())["pod"]["uid"] == "u-1"
        return
    assert (ended.result, ended.message) == (HookResult.DRY_RUN, "dry run")
    assert not ran.exists()


@pytest.mark.parametrize("scene", [Mode.DRY_RUN, Mode.ENFORCE], indirect=True)
def test_scores_of_the_next_victim_are_saved_and_raised_and_in_a_dry_run_only_reported(
    scene: Scene, tmp_path: Path
) -> None:
    acts = scene.components.config.mode is Mode.ENFORCE
    scene.configure(oom_score_adj=True)
    file = StateFile(tmp_path / "state" / "file", shape=AgentState, boot_id="boot")
    scene.give_state_file(file)
    snapshot = scene.components.sampler.sample(None, None)
    [view] = snapshot.pods
    pod = view.pod._replace(source=PodSource.API, phase="Running", owner=Owner("ReplicaSet", "web", "rs"))
    ranked = RankedPod(view._replace(pod=pod), 1, (), 1 << 30, 0, 1 << 30)
    threshold = Threshold(Signal.MEMORY, Amount(1 << 60, None, "1Ei"), 30.0)
    observation = snapshot.observations[Signal.MEMORY]
    met = ThresholdVerdict(threshold, observation.available, met=True, active_since=1.0, due=False)
    verdict = SignalVerdict(observation, SignalState.OK, (met,))
    plan = Plan("plan-1", 1.0, 1.0, (verdict,), (), ranking=(ranked,))
    pids = [pid for procs in scene.high.parent.glob("*/cgroup.procs") for pid in procs.read_text().split()]
    scores = [tmp_path / "proc" / pid / "oom_score_adj" for pid in pids]
    for score in scores:
        if score.read_text().strip() != "-998":  # the sandbox
            score.write_text("500\n")
    before = [int(score.read_text()) for score in scores]
    assert sorted(before) == [-998, 500]
    scene.executor.prefer_for_oom(plan, snapshot)
    raised = [score if score < 2 else 999 for score in before]
    assert [int(score.read_text()) for score in scores] == (raised if acts else before)
    if acts:
        assert {each.value for each in file.load().value.oom_scores} == {999}
    scene.configure(oom_score_adj=False)
    scene.executor.prefer_for_oom(plan, snapshot)
    assert [int(score.read_text()) for score in scores] == before
