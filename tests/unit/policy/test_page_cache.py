"""Page cache before pods: which pods, how much, and when."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.config.schema import Config, RankingConfig, ReclaimConfig, StartupConfig
from nodeagent.model import (
    MemoryModel,
    NodeSnapshot,
    Observation,
    Plan,
    PodSource,
    PodView,
    ReclaimOutcome,
    ReclaimResult,
    Signal,
    Threshold,
)
from nodeagent.policy import engine, outcomes, page_cache
from nodeagent.policy.state import PolicyState, initial
from tests.support import nodes
from tests.support.nodes import GI, MI, NOW, config, hard, soft

VALUE = 1000 * MI
LEVEL = 1250 * MI
"""`VALUE` and the margin of a quarter."""


def pod(name: str, *, cache: int | None, usage: int | None, protected: int | None = 0, **more: Any) -> PodView:
    """A pod with this much file cache in this usage."""
    of = nodes.pod(name, **more)
    used: dict[str, Any] = {"memory_usage": usage, "memory_file_cache": cache, "memory_protected": protected}
    return PodView(of, nodes.usage(of, 100 * MI, **used))


READER = pod("reader", cache=800 * MI, usage=900 * MI)


def sample(
    *pods: PodView, figure: int | None, kernel: int | None, at: float = NOW, signal: Signal = Signal.MEMORY, **more: Any
) -> NodeSnapshot:
    """A node with so much memory by the working set, and so much with page cache counted as available."""
    made = nodes.snapshot(*pods, at=at, available={signal: figure}, **more)
    by_kernel = Observation(signal, kernel, nodes.CAPACITY[signal], at, "test")
    if signal is Signal.MEMORY:
        return made._replace(mem_available=by_kernel)
    return made._replace(allocatable_by_kernel=by_kernel)


class Node:
    """One node that goes through decisions."""

    def __init__(self, *thresholds: Threshold, **more: Any) -> None:
        self.config: Config = config(*thresholds, **more)
        self.state: PolicyState = initial("t", now=NOW)

    def decide(self, at: float, *pods: PodView, figure: int | None, kernel: int | None, **more: Any) -> Plan:
        seen = sample(*pods, figure=figure, kernel=kernel, at=NOW + at, **more)
        plan, self.state = engine.decide(seen, self.state, now=NOW + at, config=self.config)
        return plan

    def ended(self, plan: Plan, at: float, result: ReclaimResult = ReclaimResult.DONE, message: str = "") -> None:
        [order] = plan.reclaims
        outcome = ReclaimOutcome(plan.id, order.name, result, message, NOW + at)
        self.state = outcomes.apply_reclaim(self.state, outcome)


def codes(plan: Plan) -> list[str]:
    return [refusal.code for refusal in plan.refusals]


# --- which pods, how much --------------------------------------------------------------------------------------------


def test_the_pods_with_most_page_cache_come_first_with_what_they_have_beyond_their_request() -> None:
    snapshot = sample(
        pod("small", cache=100 * MI, usage=200 * MI),
        pod("beyond-its-request", cache=800 * MI, usage=900 * MI, request=600 * MI),
        pod("no-request", cache=500 * MI, usage=900 * MI),
        figure=900 * MI,
        kernel=8 * GI,
    )
    found = page_cache.targets(snapshot, config=config())
    assert [(each.pod, each.amount // MI, each.keep // MI) for each in found] == [
        ("shop/no-request", 500, 0),
        ("shop/beyond-its-request", 300, 600),
        ("shop/small", 100, 0),
    ]
    assert found[0].cgroup == "/kubepods/poduid-shop-no-request"
    assert page_cache.reclaimable(snapshot, config=config()) == page_cache.Reclaimable(900 * MI, 3)


def test_what_memory_low_protects_is_kept_if_it_is_more_than_the_request() -> None:
    guarded = pod("guarded", cache=800 * MI, usage=900 * MI, request=100 * MI, protected=700 * MI)
    [target] = page_cache.targets(sample(guarded, figure=900 * MI, kernel=8 * GI), config=config())
    assert (target.amount, target.keep) == (200 * MI, 700 * MI)


@pytest.mark.parametrize("unknown", ["cache", "usage", "protected"])
def test_a_pod_with_an_unknown_amount_is_left_out(unknown: str) -> None:
    amounts: dict[str, Any] = {"cache": 800 * MI, "usage": 900 * MI, "protected": 0, unknown: None}
    snapshot = sample(pod("reader", **amounts), figure=900 * MI, kernel=8 * GI)
    assert page_cache.targets(snapshot, config=config()) == ()


CRITICAL: list[dict[str, Any]] = [
    {"static": "file"},
    {"mirror_of": "uid"},
    {"priority": 2_000_000_000},
    {"priority_class": "system-node-critical", "priority": None},
    {"source": PodSource.HOST},
]


@pytest.mark.parametrize("kind", CRITICAL, ids=["static", "mirror", "priority", "node-critical", "not listed"])
def test_a_pod_that_the_node_depends_on_keeps_its_page_cache(kind: dict[str, Any]) -> None:
    snapshot = sample(pod("etcd", cache=800 * MI, usage=900 * MI, **kind), figure=900 * MI, kernel=8 * GI)
    assert page_cache.targets(snapshot, config=config()) == ()


def test_the_own_pod_keeps_its_page_cache() -> None:
    snapshot = sample(READER, figure=900 * MI, kernel=8 * GI, own_pod_uid=READER.pod.uid)
    assert page_cache.targets(snapshot, config=config()) == ()


@pytest.mark.parametrize("kind", [{"namespace": "kube-system"}, {"owner": None}, {"node_bound": "nodeName"}])
def test_protection_from_eviction_alone_is_none_from_reclaim(kind: dict[str, Any]) -> None:
    snapshot = sample(pod("bare", cache=800 * MI, usage=900 * MI, **kind), figure=900 * MI, kernel=8 * GI)
    assert len(page_cache.targets(snapshot, config=config())) == 1


amounts = st.one_of(st.none(), st.integers(-GI, 64 * GI))


@given(cache=amounts, usage=amounts, protected=amounts, request=st.one_of(st.none(), st.integers(0, 64 * GI)))
def test_no_amount_takes_a_pod_below_its_request_or_protection(
    cache: int | None, usage: int | None, protected: int | None, request: int | None
) -> None:
    view = pod("any", cache=cache, usage=usage, protected=protected, request=request)
    for target in page_cache.targets(sample(view, figure=900 * MI, kernel=8 * GI), config=config()):
        assert cache is not None
        assert usage is not None
        assert protected is not None
        assert page_cache.STEP <= target.amount <= cache
        assert usage - target.amount >= target.keep >= max(request or 0, protected)


# --- when: by page cache alone ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [hard(value=VALUE), soft(value=VALUE, grace_s=60.0)], ids=["hard", "soft"])
def test_a_threshold_that_page_cache_alone_meets_starts_reclaim_at_once(threshold: Threshold) -> None:
    plan = Node(threshold).decide(0, READER, figure=900 * MI, kernel=8 * GI)
    [order] = plan.reclaims
    assert (order.name, order.signal, order.available, order.level) == ("pageCache", Signal.MEMORY, 900 * MI, LEVEL)
    assert order.deficit == LEVEL - 900 * MI
    assert [target.pod for target in order.targets] == ["shop/reader"]
    assert order.until == NOW + 10
    assert "waits-for-reclaim" not in codes(plan)


@pytest.mark.parametrize("tier", [hard, soft])
def test_with_both_figures_page_cache_is_reclaimed_and_no_pod_is_evicted(tier: Any) -> None:
    fat = PodView(nodes.pod("fat"), nodes.usage(nodes.pod("fat"), 3 * GI))
    node = Node(tier(value=VALUE, memory_model=MemoryModel.LOWER))
    plans = [node.decide(at, fat, READER, figure=900 * MI, kernel=8 * GI) for at in (0, 1)]
    assert [order.name for order in plans[0].reclaims] == ["pageCache"]
    assert [plan.victims for plan in plans] == [(), ()]
    assert codes(plans[1]) == ["page-cache-only"]


def test_allocatable_memory_counts_like_memory() -> None:
    node = Node(hard(value=VALUE), enforce_node_allocatable=True)
    plan = node.decide(0, READER, figure=900 * MI, kernel=8 * GI, signal=Signal.ALLOCATABLE_MEMORY)
    [order] = plan.reclaims
    assert order.signal is Signal.ALLOCATABLE_MEMORY


def test_several_thresholds_are_one_order_up_to_the_highest_level() -> None:
    node = Node(hard(value=500 * MI), soft(value=VALUE, grace_s=60.0))
    [order] = node.decide(0, READER, figure=400 * MI, kernel=8 * GI).reclaims
    assert order.level == LEVEL


def test_the_level_includes_minimum_reclaim() -> None:
    threshold = hard(value=VALUE, min_reclaim=nodes.quantity(500 * MI))
    [order] = Node(threshold).decide(0, READER, figure=900 * MI, kernel=8 * GI).reclaims
    assert order.level == LEVEL + 500 * MI


@pytest.mark.parametrize(
    ("figure", "kernel"),
    [(900 * MI, 1255 * MI), (900 * MI, 900 * MI), (900 * MI, None), (None, 8 * GI), (1001 * MI, 8 * GI)],
    ids=["really short", "no page cache", "MemAvailable unknown", "working set unknown", "not met"],
)
def test_nothing_starts_if_the_shortage_is_real_or_unknown(figure: int | None, kernel: int | None) -> None:
    assert not Node(hard(value=VALUE)).decide(0, READER, figure=figure, kernel=kernel).reclaims


@given(
    model=st.sampled_from(MemoryModel),
    tier=st.sampled_from([hard, soft]),
    figure=st.one_of(st.none(), st.integers(0, 4 * GI)),
    kernel=st.one_of(st.none(), st.integers(0, 4 * GI)),
    value=st.integers(1, 2 * GI),
)
def test_reclaim_never_starts_for_a_shortage_of_mem_available(
    model: MemoryModel, tier: Any, figure: int | None, kernel: int | None, value: int
) -> None:
    node = Node(tier(value=value, memory_model=model))
    plans = [node.decide(at, READER, figure=figure, kernel=kernel) for at in (0, 1)]
    if any(plan.reclaims for plan in plans):
        assert model is not MemoryModel.MEM_AVAILABLE
        assert figure is not None
        assert figure < value
        assert kernel is None or figure < kernel


def test_hard_evictions_do_not_wait_for_page_cache() -> None:
    fat = pod("fat", cache=0, usage=3 * GI)
    fat = PodView(fat.pod, nodes.usage(fat.pod, 3 * GI))
    plan = Node(hard(value=VALUE)).decide(0, fat, READER, figure=300 * MI, kernel=400 * MI)
    assert (codes(plan), [victim.pod.name for victim in plan.victims]) == ([], ["fat"])


# --- when: before soft evictions -------------------------------------------------------------------------------------

FAT = PodView(nodes.pod("fat"), nodes.usage(nodes.pod("fat"), 3 * GI))


def test_a_soft_eviction_waits_for_page_cache_once_and_is_not_needed_if_that_helps() -> None:
    node = Node(soft(value=VALUE))
    node.decide(0, FAT, READER, figure=900 * MI, kernel=1200 * MI)
    first = node.decide(1, FAT, READER, figure=900 * MI, kernel=1200 * MI)
    assert (first.victims, codes(first)) == ((), ["waits-for-reclaim"])
    [order] = first.reclaims
    assert (order.name, order.level) == ("pageCache", LEVEL)
    node.ended(first, 1.5, message="reclaimed 400Mi of page cache: shop/reader 400Mi")
    after = node.decide(2, FAT, READER, figure=1300 * MI, kernel=1200 * MI)
    assert (after.victims, after.reclaims, codes(after)) == ((), (), [])
    [report] = after.reclaim_reports
    assert (report.name, report.gained, report.message) == (
        "pageCache",
        400 * MI,
        "reclaimed 400Mi of page cache: shop/reader 400Mi",
    )


def test_a_soft_eviction_follows_if_page_cache_did_not_help() -> None:
    node = Node(soft(value=VALUE))
    node.decide(0, FAT, READER, figure=900 * MI, kernel=1200 * MI)
    first = node.decide(1, FAT, READER, figure=900 * MI, kernel=1200 * MI)
    node.ended(first, 1.5, ReclaimResult.STOPPED)
    after = node.decide(3, FAT, READER, figure=910 * MI, kernel=1200 * MI)
    assert [victim.pod.name for victim in after.victims] == ["fat"]


@pytest.mark.parametrize(
    ("model", "figure", "kernel"),
    [
        (MemoryModel.MEM_AVAILABLE, 900 * MI, 950 * MI),
        (MemoryModel.WORKING_SET, 900 * MI, 800 * MI),
    ],
    ids=["by MemAvailable", "MemAvailable is lower still"],
)
def test_a_soft_eviction_waits_for_nothing_that_cannot_help(model: MemoryModel, figure: int, kernel: int) -> None:
    node = Node(soft(value=VALUE, memory_model=model))
    node.decide(0, FAT, READER, figure=figure, kernel=kernel)
    plan = node.decide(1, FAT, READER, figure=figure, kernel=kernel)
    assert (plan.reclaims, [victim.pod.name for victim in plan.victims]) == ((), ["fat"])


# --- how often -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "pause_s"),
    [
        (ReclaimResult.DONE, 0.25),
        (ReclaimResult.STOPPED, 5.0),
        (ReclaimResult.TIMED_OUT, 30.0),
        (ReclaimResult.DRY_RUN, 60.0),
        (ReclaimResult.FAILED, 600.0),
    ],
)
def test_the_pause_between_two_runs_depends_on_the_result(result: ReclaimResult, pause_s: float) -> None:
    node = Node(soft(value=VALUE, grace_s=3600.0))
    first = node.decide(0, READER, figure=900 * MI, kernel=8 * GI)
    node.ended(first, 0.1, result)
    assert not node.decide(pause_s - 0.1, READER, figure=900 * MI, kernel=8 * GI).reclaims
    assert node.decide(pause_s + 0.1, READER, figure=900 * MI, kernel=8 * GI).reclaims


@pytest.mark.parametrize(
    ("result", "figure", "pause_s"),
    [
        (ReclaimResult.STOPPED, 900, 5.0),
        (ReclaimResult.STOPPED, 600, 1.0),
        (ReclaimResult.TIMED_OUT, 600, 11.0),
        (ReclaimResult.FAILED, 600, 600.0),
    ],
)
def test_below_a_hard_threshold_the_pause_is_short(result: ReclaimResult, figure: int, pause_s: float) -> None:
    node = Node(hard(value=VALUE - 300 * MI), soft(value=VALUE, grace_s=3600.0))
    first = node.decide(0, READER, figure=900 * MI, kernel=8 * GI)
    node.ended(first, 0.1, result)
    assert not node.decide(pause_s - 0.1, READER, figure=figure * MI, kernel=8 * GI).reclaims
    assert node.decide(pause_s + 0.1, READER, figure=figure * MI, kernel=8 * GI).reclaims


def test_no_second_run_starts_before_the_first_is_measured() -> None:
    node = Node(hard(value=VALUE))
    node.decide(0, READER, figure=900 * MI, kernel=8 * GI)
    assert not node.decide(5, READER, figure=900 * MI, kernel=8 * GI).reclaims


# --- when not --------------------------------------------------------------------------------------------------------


def test_nothing_is_reclaimed_if_it_is_off_or_in_the_kubelets_order() -> None:
    off: list[dict[str, Any]] = [
        {"reclaim": ReclaimConfig(page_cache=False)},
        {"ranking": RankingConfig(kubelet=True)},
    ]
    for settings in off:
        plan = Node(hard(value=VALUE), **settings).decide(
            0, READER, figure=900 * MI, kernel=8 * GI, page_cache_blocked="read-only"
        )
        assert (plan.reclaims, [note for note in plan.notes if "page cache" in note.message]) == ((), [])


def test_a_host_that_cannot_reclaim_is_a_note_and_no_order() -> None:
    plan = Node(hard(value=VALUE)).decide(
        0, READER, figure=900 * MI, kernel=8 * GI, page_cache_blocked="this kernel has no memory.reclaim"
    )
    assert plan.reclaims == ()
    assert "page cache of pods is not reclaimed: this kernel has no memory.reclaim" in [
        note.message for note in plan.notes
    ]


def test_an_agent_that_has_just_started_observes_only() -> None:
    node = Node(hard(value=VALUE), startup=StartupConfig(fresh_samples=2))
    assert not node.decide(0, READER, figure=900 * MI, kernel=8 * GI).reclaims
    assert node.decide(1, READER, figure=900 * MI, kernel=8 * GI).reclaims


def test_an_old_sample_starts_nothing() -> None:
    node = Node(hard(value=VALUE))
    seen = sample(READER, figure=900 * MI, kernel=8 * GI)
    plan, _ = engine.decide(seen, node.state, now=NOW + 31, config=node.config)
    assert plan.reclaims == ()
