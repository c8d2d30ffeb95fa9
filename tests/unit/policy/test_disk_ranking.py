"""Disk pressure evicts by disk usage, by its age, and by write rate while nothing is measured."""

from typing import Any

import pytest

from nodeagent.config.schema import RankingConfig, RankingKey
from nodeagent.model import (
    DiskLayout,
    DiskUsage,
    DiskUsageQuality,
    HostDirectory,
    PodView,
    QOSClass,
    Signal,
    Tier,
    UnattributedDisk,
    WriteRate,
)
from nodeagent.policy import candidates, engine, ranking, usage_growth
from nodeagent.policy.state import initial
from tests.support import nodes
from tests.support.nodes import GI, KI, MI, NOW, config, hard, snapshot, soft, view


def filler(
    name: str, size: int | None = None, *, rate: float | None = None, age_s: float = 1.0, **more: Any
) -> PodView:
    """A pod with this disk usage in its volumes, which wrote at `rate` for ten seconds."""
    usage: dict[str, Any] = {}
    if size is not None:
        usage["disk"] = DiskUsage(volumes_bytes=size, volumes_inodes=size // 4096)
        usage["disk_usage_quality"] = DiskUsageQuality(NOW - age_s, complete=True)
    if rate is not None:
        usage["writing"] = WriteRate(rate, int(rate * 10), 10.0, NOW)
    return nodes.view(name, usage_more=usage, **more)


def decided(
    *pods: PodView, threshold: Any = None, signal: Signal = Signal.NODEFS, crossed_s: float = 10.0, **more: Any
) -> Any:
    """The plan for a threshold that was crossed `crossed_s` ago; the deficit is 100 MiB, or 100 inodes."""
    value, left = (1000, 900) if signal is Signal.NODEFS_INODES else (GI, GI - 100 * MI)
    settings = config(threshold or hard(signal, value), **more)
    below: dict[Signal, int | None] = {signal: left}
    began = NOW - crossed_s
    _, state = engine.decide(snapshot(at=began, available=below), initial("t", now=began), now=began, config=settings)
    plan, _ = engine.decide(snapshot(*pods, available=below), state, now=NOW, config=settings)
    return ranking.with_key_texts(plan)


def test_while_nothing_is_measured_the_hard_tier_evicts_the_fastest_writer_with_a_note() -> None:
    plan = decided(
        filler("steady", rate=30.0 * MI, qos=QOSClass.BEST_EFFORT),
        filler("filler", rate=150.0 * MI, qos=QOSClass.GUARANTEED),
        filler("unseen"),
    )
    assert [victim.pod.name for victim in plan.victims] == ["filler"]
    assert [pod.view.pod.name for pod in plan.ranking] == ["filler", "steady", "unseen"]
    assert plan.ranking[0].keys[0].text == "writes 150Mi a second; disk usage not measured yet"
    assert plan.victims[0].predicted_relief == 1500 * MI
    assert any("not measured yet" in note.message for note in plan.notes)
    assert [refusal.code for refusal in plan.ranking[2].refusals] == ["usage-unknown"]


def test_without_usage_and_writes_the_note_does_not_claim_a_ranking_by_writes() -> None:
    plan = decided(filler("unseen"), filler("other"))
    assert not plan.victims
    assert [note.message for note in plan.notes if note.subject == "disks"] == [
        "neither disk usage nor write rates of the pods are known"
    ]


@pytest.mark.parametrize(("layout", "victims"), [(DiskLayout.SINGLE, ["filler"]), (DiskLayout.UNKNOWN, [])])
def test_on_an_unknown_layout_no_pod_is_evicted_for_its_writes(layout: DiskLayout, victims: list[str]) -> None:
    below: dict[Signal, int | None] = {Signal.NODEFS: GI - 100 * MI}
    began, settings = NOW - 10.0, config(hard(Signal.NODEFS, GI))
    _, state = engine.decide(snapshot(at=began, available=below), initial("t", now=began), now=began, config=settings)
    node = snapshot(filler("filler", rate=150.0 * MI), available=below, layout=layout)
    plan, _ = engine.decide(node, state, now=NOW, config=settings)
    assert [victim.pod.name for victim in plan.victims] == victims


@pytest.mark.parametrize(("crossed_s", "evicts"), [(0.1, False), (2.9, False), (3.0, True)])
def test_the_first_walk_is_waited_for_as_a_later_one_is(crossed_s: float, evicts: bool) -> None:
    plan = decided(filler("filler", rate=150.0 * MI), crossed_s=crossed_s)
    assert bool(plan.victims) is evicts
    waits = ["nodefs.available: disk usage of the pods is not measured yet; first walk awaited"]
    assert [refusal.message for refusal in plan.refusals if refusal.code == "waits-for-recount"] == waits * (not evicts)


@pytest.mark.parametrize(
    ("rate", "elsewhere", "victims"),
    [(300.0 * MI, True, []), (100.0 * MI, True, ["filler"]), (300.0 * MI, False, ["database"])],
)
def test_no_pod_is_evicted_for_writes_that_may_go_to_a_volume(rate: float, elsewhere: bool, victims: list[str]) -> None:
    plan = decided(filler("filler", rate=150.0 * MI), filler("database", rate=rate, writes_elsewhere=elsewhere))
    assert [victim.pod.name for victim in plan.victims] == victims
    if not victims:
        assert [refusal.message for refusal in plan.refusals if refusal.code == "waits-for-recount"] == [
            "nodefs.available: disk usage of the pods is not measured yet; shop/database writes fastest and has "
            "volumes that are not its local storage"
        ]


def test_a_pod_that_wrote_nothing_lately_is_not_the_fastest_writer() -> None:
    stale = filler("stale", rate=900.0 * MI, writes_elsewhere=True)
    assert stale.usage is not None
    assert stale.usage.writing is not None
    old = stale.usage.writing._replace(read_at=NOW - 100.0)
    plan = decided(stale._replace(usage=stale.usage._replace(writing=old)), filler("filler", rate=150.0 * MI))
    assert [victim.pod.name for victim in plan.victims] == ["filler"]


def test_the_soft_tier_waits_for_the_walk() -> None:
    plan = decided(filler("filler", rate=150.0 * MI), threshold=soft(Signal.NODEFS, GI))
    assert not plan.victims
    assert [refusal.code for refusal in plan.ranking[0].refusals] == ["usage-unknown"]


def test_a_pod_whose_files_share_blocks_is_evicted_and_not_another_in_its_place() -> None:
    """A reflink copy takes no space and counts again: the usage may exceed the disk."""
    capacity = snapshot().observations[Signal.NODEFS].capacity
    assert capacity is not None
    plan = decided(filler("copies", capacity + GI), filler("other", 20 * GI))
    assert [victim.pod.name for victim in plan.victims] == ["copies"]
    assert plan.victims[0].predicted_relief == capacity - (GI - 100 * MI), "no more than what is in use"


def test_as_soon_as_one_pod_is_measured_writes_do_not_count() -> None:
    plan = decided(filler("filler", rate=150.0 * MI), filler("holder", 60 * GI))
    assert [victim.pod.name for victim in plan.victims] == ["holder"]
    assert ranking.WRITE_RATE not in plan.rank_order


def test_a_pod_that_wrote_too_little_is_not_evicted() -> None:
    plan = decided(filler("logger", rate=1000.0))
    assert not plan.victims
    assert [refusal.code for refusal in plan.ranking[0].refusals] == ["below-minimum-relief"]


def test_writes_do_not_count_for_inodes() -> None:
    plan = decided(filler("filler", rate=150.0 * MI), signal=Signal.NODEFS_INODES)
    assert not plan.victims


def test_stale_write_counters_do_not_count() -> None:
    view = filler("filler", rate=150.0 * MI)
    assert view.usage is not None
    assert view.usage.writing is not None
    old = view._replace(usage=view.usage._replace(writing=view.usage.writing._replace(read_at=NOW - 100.0)))
    assert not decided(old).victims


@pytest.mark.parametrize(("age_s", "evicts"), [(500.0, True), (700.0, False)])
def test_a_disk_measurement_counts_for_ten_minutes(age_s: float, evicts: bool) -> None:
    plan = decided(filler("holder", 2 * GI, age_s=age_s))
    assert bool(plan.victims) is evicts
    if not evicts:
        assert [refusal.code for refusal in plan.ranking[0].refusals] == ["usage-unknown"]


@pytest.mark.parametrize("signal", [Signal.NODEFS, Signal.NODEFS_INODES])
@pytest.mark.parametrize(
    ("crossed_s", "ages_s", "evicts"),
    [
        (0.5, (0.6, 0.6), False),
        (0.5, (0.4, 0.6), False),
        (0.5, (0.4, None), False),
        (0.5, (0.4, 0.4), True),
        (2.9, (9.0, 9.0), False),
        (3.0, (9.0, 9.0), True),
        (2.9, (None, None), False),
        (3.0, (None, None), True),
    ],
    ids=[
        "counted before",
        "one counted before",
        "one not counted",
        "all counted since",
        "still being counted",
        "counted for too long",
        "nothing counted yet",
        "nothing counted for too long",
    ],
)
def test_a_measurement_from_before_the_crossing_decides_only_if_no_new_one_arrives(
    signal: Signal, crossed_s: float, ages_s: tuple[float | None, ...], evicts: bool
) -> None:
    pods = [
        filler(f"p{number}", 2 * GI, age_s=age_s) if age_s is not None else filler(f"p{number}", rate=150.0 * MI)
        for number, age_s in enumerate(ages_s)
    ]
    plan = decided(*pods, signal=signal, crossed_s=crossed_s)
    by_writes = evicts and signal is Signal.NODEFS
    assert bool(plan.victims) is (by_writes if None in ages_s else evicts)
    if signal is Signal.NODEFS or ages_s != (None, None):
        assert any(refusal.code == "waits-for-recount" for refusal in plan.refusals) is not evicts


def test_the_wait_for_a_measurement_is_shorter_if_the_disk_is_full_soon() -> None:
    settings = config(hard(Signal.NODEFS, GI))
    pods = [filler("holder", 2 * GI, age_s=20.0)]
    state, victims = initial("t", now=NOW - 8.0), {}
    for step in range(40):
        at = NOW - 8.0 + step * 0.25
        available = int(2 * GI - step * 0.25 * GI / 4)  # of 1 GiB a quarter is gone each second
        plan, state = engine.decide(
            snapshot(*pods, at=at, available={Signal.NODEFS: available}), state, now=at, config=settings
        )
        victims[at - NOW] = [victim.pod.name for victim in plan.victims]
        if plan.victims:
            break
    waited_s = max(victims) - min(at for at in victims if 2 * GI - (at + 8.0) * GI / 4 < GI)
    assert 0.5 <= waited_s <= 1.25, "a quarter of the four seconds that are left"


def test_the_kubelets_order_does_not_wait_for_a_measurement() -> None:
    pods = (filler("holder", 2 * GI, age_s=9.0),)
    assert decided(*pods, crossed_s=0.5, ranking=RankingConfig(kubelet=True)).victims


def test_growth_of_disk_bytes_is_the_write_rate() -> None:
    plan = decided(
        filler("large", 4 * GI, rate=0.0),
        filler("growing", 2 * GI, rate=50.0 * MI),
        ranking=RankingConfig(order=(RankingKey.GROWTH,)),
    )
    assert [pod.view.pod.name for pod in plan.ranking] == ["growing", "large"]
    assert plan.ranking[0].keys[0].text == "grows by 50Mi a second"


def inode_holder(
    name: str, inodes: int, *, walked_at: float, complete: bool = True, started_at: float = 0.0
) -> PodView:
    holder = view(name)
    assert holder.usage is not None
    used = holder.usage._replace(
        disk=DiskUsage(rootfs_inodes=7, logs_inodes=3, volumes_inodes=inodes - 10),
        disk_usage_quality=DiskUsageQuality(walked_at, complete=complete),
        started_at=started_at,
    )
    return holder._replace(usage=used)


def by_growth(
    growth: usage_growth.GrowthState, *pods: PodView, at: float, signal: Signal = Signal.NODEFS_INODES
) -> list[str]:
    ranked = candidates.rank_pods(
        snapshot(*pods, at=at),
        Signal.NODEFS_INODES,
        tier=Tier.SOFT,
        config=config(ranking=RankingConfig(order=(RankingKey.GROWTH,))),
        growth=growth,
        cache=candidates.RankingCache(),
    )
    return [f"{pod.view.pod.name} {0 - pod.values[0]:g}" for pod in ranked.pods]


def test_growth_of_inodes_is_measured_from_one_walk_to_the_next() -> None:
    growth = usage_growth.record_sample(
        usage_growth.GrowthState(),
        snapshot(
            inode_holder("large", 5000, walked_at=NOW - 61.0),
            inode_holder("growing", 100, walked_at=NOW - 51.0),
            inode_holder("cut-short", 100, walked_at=NOW - 51.0, complete=False),
        ),
    )
    now = (
        inode_holder("large", 5001, walked_at=NOW - 1.0),
        inode_holder("growing", 1100, walked_at=NOW - 1.0),
        inode_holder("cut-short", 9000, walked_at=NOW - 1.0),
    )
    later = usage_growth.record_sample(growth, snapshot(*now, at=NOW + 10.0))
    for state in (growth, later, usage_growth.record_sample(later, snapshot(*now, at=NOW + 20.0))):
        assert by_growth(state, *now, at=NOW + 21.0) == ["growing 20", "large 0.0166667", "cut-short 0"]
    # What a layer of its own file system holds has not grown.
    dedicated = snapshot(*now, at=NOW + 21.0, layout=DiskLayout.DEDICATED_IMAGEFS)
    rate = usage_growth.growth_rate(later, Signal.IMAGEFS_INODES, dedicated.layout, at=NOW + 21.0)
    assert [rate(each.usage, 7) for each in now] == [0.0, 0.0, 0.0]


def test_a_pod_that_started_since_the_last_walk_has_grown_from_zero_inodes() -> None:
    young = inode_holder("young", 1000, walked_at=NOW, started_at=NOW - 10.0)
    old = inode_holder("old", 9000, walked_at=NOW, started_at=NOW - 7200.0)
    assert by_growth(usage_growth.GrowthState(), old, young, at=NOW) == ["young 100", "old 0"]


def test_the_order_by_writes_is_total_whatever_the_order_of_the_pods() -> None:
    pods = [filler(name, rate=10.0 * MI) for name in "cab"]
    node = snapshot(*pods)
    ranked = candidates.rank_pods(
        node,
        Signal.NODEFS,
        tier=Tier.HARD,
        config=config(),
        growth=usage_growth.GrowthState(),
        cache=candidates.RankingCache(),
    )
    assert [pod.view.pod.name for pod in ranked.pods] == ["a", "b", "c"]


def test_a_futile_decision_lists_the_host_directories_that_hold_the_disk() -> None:
    largest = (
        HostDirectory("/var/log/journal", 40 * GI, 10, complete=True),
        HostDirectory("/var/lib/docker", 20 * GI, 9000, complete=False),
    )
    rest = UnattributedDisk((Signal.NODEFS, Signal.NODEFS_INODES), 99 * GI, GI, 20_000, 100, largest, NOW)
    holder = filler("small", 10 * MI)
    assert holder.usage is not None
    open_files = DiskUsageQuality(NOW, complete=True, deleted_bytes=3 * GI)
    holder = holder._replace(usage=holder.usage._replace(disk_usage_quality=open_files))
    for signal, expected in (
        (
            Signal.NODEFS,
            "/var/log/journal 40Gi, /var/lib/docker at least 20Gi, deleted files held open by shop/small 3Gi",
        ),
        (Signal.NODEFS_INODES, "/var/lib/docker at least 9000, /var/log/journal 10"),
    ):
        node = snapshot(holder, available={signal: 100 * KI}, unattributed_disks=(rest,))
        plan, _ = engine.decide(node, initial("t", now=NOW), now=NOW, config=config(hard(signal, GI)))
        assert not plan.victims
        refusal = plan.refusals[0]
        assert expected in refusal.message
