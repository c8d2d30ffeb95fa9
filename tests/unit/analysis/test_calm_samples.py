"""Passing over calm samples gives what decisions on each of them give."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.analysis.simulation import Simulator
from nodeagent.config.schema import Config, DampingConfig, RankingConfig, RateLimits, SamplingConfig, StartupConfig
from nodeagent.model import (
    DiskLayout,
    DiskUsage,
    DiskUsageQuality,
    MemoryModel,
    NodeSnapshot,
    PodView,
    Signal,
    Threshold,
)
from tests.support.nodes import GI, MI, NOW, WALL, config, hard, snapshot, soft, view

_LEVELS: tuple[int | None, ...] = (8 * GI, 8 * GI, 8 * GI, 7 * GI, 6 * GI, 2 * GI, 900 * MI, 100 * MI, None)

step = st.fixed_dictionaries(
    {
        "after_s": st.sampled_from((0.1, 0.25, 1.0, 1.0, 1.0, 1.0, 5.0, 10.0, 29.0, 31.0, 200.0, 4000.0)),
        "memory": st.sampled_from(_LEVELS),
        "by_kernel": st.sampled_from(_LEVELS),
        "pids": st.sampled_from((20_000, 20_000, 20_000, 15_000, 500, None)),
        "nodefs": st.sampled_from((50 * GI, 50 * GI, 50 * GI, 3 * GI, None)),
        "nodefs_age_s": st.sampled_from((0.0, 0.0, 3.0, 9.0, 40.0)),
        "kernel_capacity": st.sampled_from((None, None, None, 15 * GI)),
        "repeat": st.sampled_from((1, 1, 2, 8, 30)),
        "terminating": st.sampled_from((False, False, False, False, True)),
        "walked": st.sampled_from((False, False, True)),
        "suspended": st.sampled_from((0.0, 0.0, 0.0, 0.0, 7.0)),
        "layout": st.sampled_from((DiskLayout.SINGLE,) * 5 + (DiskLayout.UNKNOWN,)),
        "size": st.integers(1, 40),
    }
)
thresholds = st.lists(
    st.sampled_from(
        (
            hard(),
            hard(memory_model=MemoryModel.LOWER, min_reclaim=soft().value._replace(quantity=GI)),
            hard(memory_model=MemoryModel.MEM_AVAILABLE),
            soft(value=3 * GI, grace_s=3.0, memory_model=MemoryModel.LOWER),
            soft(value=3 * GI, grace_s=90.0, exhaustion_within_s=60.0),
            hard(Signal.PID, 1000),
            soft(Signal.NODEFS, 10 * GI, grace_s=5.0),
            hard(Signal.NODEFS, 4 * GI),
        )
    ),
    min_size=0,
    max_size=5,
    unique=True,
)


def samples_of(steps: list[dict[str, Any]]) -> list[NodeSnapshot]:
    at, suspended_s, made = NOW, 0.0, []
    for each in steps:
        suspended_s += each["suspended"]
        for _ in range(each["repeat"]):
            at += each["after_s"]
            made.append(_snapshot(each, at, suspended_s))
    return made


def _snapshot(each: dict[str, Any], at: float, suspended_s: float) -> NodeSnapshot:
    node = snapshot(
        *_pods(each, at),
        at=at,
        available={Signal.MEMORY: each["memory"], Signal.PID: each["pids"], Signal.NODEFS: each["nodefs"]},
        layout=each["layout"],
        suspended_s=suspended_s,
    )
    nodefs = node.observations[Signal.NODEFS]._replace(read_at=at - each["nodefs_age_s"])
    capacity = each["kernel_capacity"] or node.mem_available.capacity
    return node._replace(
        observations={**node.observations, Signal.NODEFS: nodefs},
        mem_available=node.mem_available._replace(available=each["by_kernel"], capacity=capacity),
    )


def _pods(each: dict[str, Any], at: float) -> tuple[PodView, ...]:
    more: dict[str, Any] = (
        {"deletion_wall": WALL + at - NOW + 20, "deletion_grace_s": 30.0} if each["terminating"] else {}
    )
    walked: dict[str, Any] = {}
    if each["walked"]:
        quality = DiskUsageQuality(at - 1.0, complete=True, periodic=True)
        walked = {"disk": DiskUsage(rootfs_inodes=each["size"] * 100), "disk_usage_quality": quality}
    return (
        view("hog", each["size"] * 100 * MI, usage_more={"process_count": each["size"], **walked}),
        view("web", 300 * MI, **more),
        view("system", GI, namespace="kube-system"),
    )


def compare(with_config: Config, samples: list[NodeSnapshot]) -> int:
    """Both ways give the same decisions, totals and state. Returns how many samples were passed over."""
    fast, slow = Simulator(with_config), Simulator(with_config, pass_over=False)
    for sample in samples:
        plan, every = fast.feed(sample), slow.feed(sample)
        if plan is not None:
            assert plan == every
            assert fast.state == slow.state
        else:
            assert every is None or not (every.victims or every.reclaims or every.acting_on)
    quick, full = fast.result(), slow.result()
    assert quick._replace(decided=0) == full._replace(decided=0)
    left, kept = fast._calm.leave() if fast._is_calm else fast.state, slow.state
    assert left is not None
    assert kept is not None
    for part in ("sequence", "thresholds", "in_flight", "growth", "reclaims", "suspended_s"):
        assert getattr(left, part) == getattr(kept, part), part
    return full.decided - quick.decided


@settings(deadline=None, max_examples=150)
@given(
    st.lists(step, min_size=1, max_size=14),
    thresholds,
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
)
def test_passing_over_calm_samples_changes_no_decision_no_total_and_no_state(
    steps: list[dict[str, Any]], chosen: list[Threshold], fresh: int, kubelet: bool, allocatable: bool
) -> None:
    with_config = config(
        *chosen,
        startup=StartupConfig(fresh_samples=fresh),
        ranking=RankingConfig(kubelet=kubelet),
        enforce_node_allocatable=allocatable,
        rate_limits=RateLimits(),
        eviction_pressure_transition_period_s=10.0,
        damping=DampingConfig(max_hold_s=20.0, half_life_s=10.0),
    )
    compare(with_config, samples_of(steps))


CALM: dict[str, Any] = {
    "after_s": 1.0,
    "memory": 8 * GI,
    "by_kernel": 8 * GI,
    "pids": 20_000,
    "nodefs": 50 * GI,
    "nodefs_age_s": 0.0,
    "kernel_capacity": None,
    "repeat": 100,
    "terminating": False,
    "walked": False,
    "suspended": 0.0,
    "layout": DiskLayout.SINGLE,
    "size": 5,
}


def test_almost_every_sample_of_a_calm_node_is_passed_over() -> None:
    passed = compare(config(hard(memory_model=MemoryModel.LOWER)), samples_of([CALM]))
    assert passed >= 97


def test_a_signal_that_is_never_known_does_not_keep_samples_from_being_passed_over() -> None:
    passed = compare(config(hard(), hard(Signal.PID, 1000)), samples_of([CALM | {"pids": None}]))
    assert passed >= 60


@pytest.mark.parametrize(
    "change", [{"memory": 500 * MI}, {"terminating": True}, {"suspended": 5.0}, {"layout": DiskLayout.UNKNOWN}]
)
def test_a_sample_that_changes_something_is_decided_on(change: dict[str, Any]) -> None:
    simulator = Simulator(config(hard(), sampling=SamplingConfig()))
    for sample in samples_of([CALM]):
        simulator.feed(sample)
    before = simulator.result().decided
    for sample in samples_of([CALM, CALM | change | {"repeat": 1}])[100:]:
        simulator.feed(sample)
    assert simulator.result().decided > before
