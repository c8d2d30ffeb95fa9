"""A disk that pods do not fill is no pressure, nor is one that unused images fill: both are left to the kubelet."""

from typing import Any

import pytest

from nodeagent.config import above_kubelet, load
from nodeagent.config import kubelet as kubelet_config
from nodeagent.config.schema import Config, RankingConfig
from nodeagent.loop import schedule
from nodeagent.loop.schedule import ScheduleInputs, ScheduleState
from nodeagent.model import (
    Amount,
    ConditionStatus,
    ConditionType,
    DiskLayout,
    DiskPoint,
    DiskTrace,
    DiskUsage,
    DiskUsageQuality,
    KubeletLevel,
    Note,
    NoteKind,
    Plan,
    PodView,
    Signal,
    SignalState,
)
from nodeagent.policy import effective_thresholds, engine, kubelet_first
from nodeagent.policy.state import initial
from tests.support import nodes
from tests.support.nodes import GI, MI, NOW, snapshot

CAPACITY = 100 * GI
SYNC_S = 10.0
IMAGES = (Signal.IMAGEFS, Signal.CONTAINERFS)
NODEFS = (Signal.NODEFS, Signal.CONTAINERFS)


def measured(at: float) -> DiskUsageQuality:
    return DiskUsageQuality(at, complete=True)


def pods(at: float) -> list[PodView]:
    held = {
        "disk": DiskUsage(rootfs_bytes=GI, logs_bytes=0, volumes_bytes=2 * GI),
        "disk_usage_quality": measured(at),
    }
    return [nodes.view(f"p{number}", 200 * MI, usage_more=held) for number in range(4)]


def trace(at: float, left: int, *, pods_grew: int, rest_grew: int) -> DiskTrace:
    """What grew within the last ten minutes, at one rate."""

    def point(ago_s: float) -> DiskPoint:
        share = ago_s / 600.0
        used, held = CAPACITY - left - int((pods_grew + rest_grew) * share), 12 * GI - int(pods_grew * share)
        return DiskPoint(at - ago_s, used, held, 1000, 100)

    signals = (Signal.NODEFS, Signal.IMAGEFS, Signal.CONTAINERFS)
    return DiskTrace(signals, point(600.0), point(30.0), point(0.0), deleted_known=True)


def last_plan(
    settings: Config,
    left: int,
    *,
    layout: DiskLayout = DiskLayout.SINGLE,
    pods_grew: int = 0,
    rest_grew: int = 0,
    traced: bool = True,
    falls_per_s: int = 0,
    unused_images: int | None = None,
    signals: tuple[Signal, ...] = (),
) -> Plan:
    """The plan after twenty minutes in which imagefs (or `signals`) had this much left, or the first that evicts."""
    state = initial("t", now=NOW)
    plan: Plan | None = None
    syncs = 120
    for number in range(syncs):
        at = NOW + number * SYNC_S
        free = left + int(falls_per_s * SYNC_S * (syncs - 1 - number))
        on_it = signals or ((Signal.NODEFS, *IMAGES) if layout is DiskLayout.SINGLE else IMAGES)
        node = snapshot(*pods(at), at=at, available=dict.fromkeys(on_it, free), layout=layout)
        if traced:
            node = node._replace(disk_traces=(trace(at, free, pods_grew=pods_grew, rest_grew=rest_grew),))
        node = node._replace(unused_images=unused_images)
        plan, state = engine.decide(node, state, now=at, config=settings)
        if plan.victims:
            break
    assert plan is not None
    return plan


def settings(**changes: Any) -> Config:
    return load.defaults().config._replace(node_name="node-1", **changes)


def kubelet(percent: float) -> tuple[KubeletLevel, ...]:
    """A known threshold of the kubelet."""
    return (KubeletLevel(Amount(None, percent, f"{percent:g}%"), Amount(None, 2.0, "2%"), margin_of_capacity=True),)


def beside(levels: tuple[KubeletLevel, ...], signal: Signal) -> Config:
    """The built-in thresholds next to a kubelet with these for this signal."""
    config = settings()
    own = [each._replace(above_kubelet=levels) if each.signal is signal else each for each in config.thresholds]
    return config._replace(thresholds=tuple(own))


@pytest.mark.parametrize("left", [19, 16, 14, 11])
@pytest.mark.parametrize("layout", [DiskLayout.SINGLE, DiskLayout.DEDICATED_IMAGEFS])
@pytest.mark.parametrize("traced", [True, False])
def test_with_nothing_configured_a_disk_that_stays_full_is_no_pressure(
    left: int, layout: DiskLayout, traced: bool
) -> None:
    plan = last_plan(settings(), left * GI, layout=layout, traced=traced)
    assert plan.victims == ()
    conditions = {each.type: each.status for each in plan.conditions}
    assert conditions[ConditionType.DISK_PRESSURE] is ConditionStatus.FALSE
    verdict = next(each for each in plan.signals if each.signal is Signal.IMAGEFS)
    assert verdict.state is SignalState.OK
    reason = f"{left}Gi of 100Gi are left, and pods are not seen to fill it; left to the kubelet until 10Gi are left"
    assert Note(NoteKind.KUBELET, f"imagefs.available: {reason}") in plan.notes
    assert plan.eviction_refusals == (), "nothing is refused on a healthy disk, and no snapshot file is written for it"


@pytest.mark.parametrize("layout", [DiskLayout.SINGLE, DiskLayout.DEDICATED_IMAGEFS])
def test_a_disk_that_stays_below_the_kubelets_threshold_is_one_under_pressure(layout: DiskLayout) -> None:
    plan = last_plan(settings(), 9 * GI + 900 * MI, layout=layout)
    conditions = {each.type: each.status for each in plan.conditions}
    assert conditions[ConditionType.DISK_PRESSURE] is ConditionStatus.TRUE
    assert layout is DiskLayout.DEDICATED_IMAGEFS or plan.victims


@pytest.mark.parametrize(("percent", "left", "evicts"), [(5.0, 6, False), (5.0, 4, True), (13.0, 14, False)])
def test_a_known_threshold_of_the_kubelet_is_where_a_stable_disk_counts(
    percent: float, left: int, evicts: bool
) -> None:
    """k3s has 5%."""
    config = beside(kubelet(percent), Signal.NODEFS)
    assert bool(last_plan(config, left * GI, layout=DiskLayout.SINGLE, signals=NODEFS).victims) is evicts


def test_beside_a_kubelet_that_never_evicts_for_disks_a_stable_disk_never_counts() -> None:
    """As in kind, on the disk of a laptop."""
    memory_only = kubelet_config.read_settings('evictionHard: {"memory.available": "100Mi"}').thresholds
    config = above_kubelet.keep_above(settings(), memory_only)
    assert not last_plan(config, 2 * GI).victims
    assert last_plan(config, 9 * GI, pods_grew=3 * GI).victims


@pytest.mark.parametrize(
    ("left", "grew", "tiers"),
    [
        (14 * GI, GI, ()),
        (14 * GI, 5 * GI, ("soft",)),
        (11 * GI, GI, ("soft",)),
        (11 * GI, GI // 2, ()),
        (10 * GI + 200 * MI, 1100 * MI, ("hard", "soft")),
        (10 * GI + 200 * MI, 500 * MI, ("soft",)),
    ],
)
def test_slow_growth_counts_shortly_before_the_kubelet_would_evict_for_it(
    left: int, grew: int, tiers: tuple[str, ...]
) -> None:
    """The soft tier ten minutes before, the hard one two."""
    plan = last_plan(settings(), left, pods_grew=grew, signals=NODEFS)
    met = {each.threshold.hard for verdict in plan.signals for each in verdict.thresholds if each.met}
    assert tuple(sorted("hard" if hard else "soft" for hard in met)) == tiers


@pytest.mark.parametrize(("percent", "evicts"), [(6, False), (5, False), (4, True)])
def test_inodes_that_stay_scarce_count_below_the_kubelets_threshold(percent: int, evicts: bool) -> None:
    inodes = nodes.CAPACITY[Signal.NODEFS_INODES]
    config, state = settings(), initial("t", now=NOW)
    files = DiskUsage(0, 0, 0, 0, 0, volumes_inodes=inodes // 50)
    evicted = False
    for number in range(30):
        at = NOW + number * SYNC_S
        seen = [
            nodes.view(f"p{each}", 200 * MI, usage_more={"disk": files, "disk_usage_quality": measured(at)})
            for each in range(4)
        ]
        node = snapshot(*seen, at=at, available={Signal.NODEFS_INODES: inodes * percent // 100})
        plan, state = engine.decide(node, state, now=at, config=config)
        evicted = evicted or bool(plan.victims)
    assert evicted is evicts


@pytest.mark.parametrize(
    ("grew", "evicts"),
    [
        ({"pods_grew": 3 * GI}, True),
        ({"pods_grew": 2 * GI}, False),
        ({"rest_grew": 3 * GI}, False),
        ({"pods_grew": 3 * GI, "rest_grew": 4 * GI}, False),
        ({"pods_grew": GI, "traced": False, "falls_per_s": 100 * MI}, True),
        ({"pods_grew": GI, "traced": False, "falls_per_s": MI}, False),
    ],
    ids=["full within an hour", "later", "images grew", "images grew more", "full within minutes", "within hours"],
)
def test_pods_that_fill_the_disk_are_evicted_as_early_as_ever(grew: dict[str, Any], evicts: bool) -> None:
    plan = last_plan(settings(), 16 * GI, **grew)
    assert bool(plan.victims) is evicts


def test_pods_may_fill_what_unused_images_would_free() -> None:
    plan = last_plan(settings(), 16 * GI, pods_grew=3 * GI, unused_images=5 * GI)
    assert plan.victims == ()
    reason = (
        "imagefs.available: 16Gi of 100Gi are left; pods fill it, and below 15Gi the kubelet removes images that "
        "nobody uses, 5Gi now"
    )
    assert Note(NoteKind.KUBELET, reason) in plan.notes


@pytest.mark.parametrize(("unused", "hard", "soft"), [(GI, True, True), (3 * GI, False, True), (5 * GI, False, False)])
def test_a_threshold_counts_that_unused_images_would_leave_met(unused: int, hard: bool, soft: bool) -> None:
    """A kubelet removes them at 15%: the hard threshold has 17% and the soft one 20%."""
    plan = last_plan(settings(), 16 * GI, layout=DiskLayout.DEDICATED_IMAGEFS, pods_grew=3 * GI, unused_images=unused)
    met = {each.threshold.hard: each.met for verdict in plan.signals for each in verdict.thresholds if each.met}
    assert (met.get(True, False), met.get(False, False)) == (hard, soft)


def test_what_the_kubelet_can_remove_does_not_wait_below_its_level() -> None:
    left = 13 * GI + 500 * MI
    plan = last_plan(settings(), left, layout=DiskLayout.DEDICATED_IMAGEFS, pods_grew=3 * GI, unused_images=50 * GI)
    assert plan.victims


def test_a_kubelet_that_evicts_for_imagefs_has_had_its_chance_to_remove_images() -> None:
    """The agent's threshold follows it, and so does the kubelet's chance."""
    config = beside(kubelet(25.0), Signal.IMAGEFS)
    assert not last_plan(config, 24 * GI + 500 * MI, layout=DiskLayout.DEDICATED_IMAGEFS).victims
    assert last_plan(config, 23 * GI + 500 * MI, layout=DiskLayout.DEDICATED_IMAGEFS).victims


@pytest.mark.parametrize(("unused", "met"), [(None, True), (0, True), (GI, False)])
def test_nodefs_waits_for_images_that_are_on_its_disk(unused: int | None, met: bool) -> None:
    """A kubelet of EKS removes them within five minutes and not, as others, at once."""
    for layout, expected in ((DiskLayout.SINGLE, met), (DiskLayout.DEDICATED_IMAGEFS, True)):
        plan = last_plan(
            settings(),
            14 * GI + 500 * MI,
            layout=layout,
            pods_grew=3 * GI,
            unused_images=unused,
            signals=(Signal.NODEFS,),
        )
        verdict = next(each for each in plan.signals if each.signal is Signal.NODEFS)
        assert any(each.met for each in verdict.thresholds) is expected


def test_the_grace_period_begins_when_pods_fill_the_disk() -> None:
    """And not weeks before, when images did."""
    config, state = settings(), initial("t", now=NOW)
    evicted_at: float | None = None
    for number in range(60):
        at = NOW + number * SYNC_S
        grew = 3 * GI if number >= 30 else 0
        node = snapshot(*pods(at), at=at, available={Signal.IMAGEFS: 18 * GI}, layout=DiskLayout.DEDICATED_IMAGEFS)
        node = node._replace(disk_traces=(trace(at, 18 * GI, pods_grew=grew, rest_grew=0),))
        plan, state = engine.decide(node, state, now=at, config=config)
        if plan.victims:
            evicted_at = at
            break
        if not grew:
            assert not state.thresholds.first_observed
    grace_s = next(each.grace_period_s for each in config.thresholds if each.signal is Signal.IMAGEFS and not each.hard)
    assert evicted_at is not None
    assert grace_s <= evicted_at - (NOW + 30 * SYNC_S) <= grace_s + 2 * SYNC_S


def test_a_disk_that_is_left_to_the_kubelet_is_calm_until_its_threshold_counts() -> None:
    """It may stay so for weeks: decisions are as rare as on a node far from every threshold."""
    config = settings()
    plan = last_plan(config, 16 * GI + 500 * MI, layout=DiskLayout.DEDICATED_IMAGEFS)
    instead = kubelet_first.next_thresholds(plan.signals, DiskLayout.DEDICATED_IMAGEFS)
    thresholds = effective_thresholds.effective(config, DiskLayout.DEDICATED_IMAGEFS)
    state = ScheduleState()

    def full_samples(left: int, seconds: range) -> list[int]:
        nonlocal state
        taken = []
        for second in seconds:
            available: dict[Signal, int | None] = {Signal.IMAGEFS: left, Signal.CONTAINERFS: left}
            node = snapshot(at=float(second), available=available, layout=DiskLayout.DEDICATED_IMAGEFS)
            inputs = ScheduleInputs(node, tuple([instead.get(each, each) for each in thresholds]), 1.0)
            due, state = schedule.plan_next(inputs, state)
            taken += [second] if due.full_sample else []
        return taken

    assert full_samples(16 * GI + 500 * MI, range(1, 40)) == [1, 2, 3, 4, 5, 15, 25, 35]
    assert full_samples(9 * GI + 900 * MI, range(40, 43)) == [40, 41, 42]


@pytest.mark.parametrize(
    "changes",
    [
        {"ranking": RankingConfig(kubelet=True)},
        {"reclaim": load.defaults().config.reclaim._replace(wait_for_kubelet_s=0.0)},
    ],
    ids=["the kubelet's order", "no wait for the kubelet"],
)
def test_who_wants_the_thresholds_as_they_are_has_them(changes: dict[str, Any]) -> None:
    assert last_plan(settings(**changes), 18 * GI).victims


def test_a_threshold_of_the_users_own_is_judged_as_it_is_written() -> None:
    own = load.loads(
        "apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\nevictionHard: {imagefs.available: 19%}\n"
    ).config
    assert last_plan(own._replace(node_name="node-1"), 18 * GI).victims


@pytest.mark.parametrize(
    "action", ["name: images, kind: images", "name: vacuum, command: [/bin/true], signals: [imagefs.available]"]
)
def test_an_agent_that_has_something_to_remove_does_so(action: str) -> None:
    own = load.loads(
        "apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\n"
        f"reclaim: {{actions: [{{{action}, timeout: 60s}}]}}\n"
    ).config
    plan = last_plan(own._replace(node_name="node-1"), 18 * GI, layout=DiskLayout.DEDICATED_IMAGEFS)
    verdict = next(each for each in plan.signals if each.signal is Signal.IMAGEFS)
    assert [each.met for each in verdict.thresholds if not each.threshold.hard] == [True]
