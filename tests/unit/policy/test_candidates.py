"""A ranking cache changes the speed of a decision, never the order, the usage or the refusals of a pod."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.config.schema import Config, ProtectionConfig, RankingConfig, RankingKey
from nodeagent.model import (
    Container,
    NodeSnapshot,
    PodSource,
    PodView,
    QOSClass,
    Refusal,
    RefusalCode,
    Resources,
    Signal,
    Tier,
)
from nodeagent.policy import usage_growth
from nodeagent.policy.candidates import MinimumRelief, RankedPods, RankingCache, rank_pods
from tests.support.nodes import GI, MI, NOW, WALL, config, snapshot, usage, view

ORDERS = (
    RankingConfig(),
    RankingConfig(kubelet=True),
    RankingConfig(order=(RankingKey.PRIORITY, RankingKey.USAGE, RankingKey.RESTART_COUNT)),
    RankingConfig(order=(RankingKey.DUPLICATE_ON_NODE, RankingKey.AGE, RankingKey.GROWTH)),
)
PODS = 12
MINIMUM = MinimumRelief(100 * MI, Refusal(RefusalCode.BELOW_MINIMUM_RELIEF, "too little"))


def node(views: list[PodView], *, at: float, **more: Any) -> NodeSnapshot:
    """A snapshot with these very views, which `snapshot` would copy."""
    return snapshot(at=at, **more)._replace(pods=tuple(views))


def ranked(
    current: NodeSnapshot, settings: Config, cache: RankingCache, *, signal: Signal = Signal.MEMORY, **more: Any
) -> RankedPods:
    return rank_pods(
        current,
        signal,
        **({"tier": Tier.HARD, "growth": usage_growth.GrowthState()} | more),
        config=settings,
        cache=cache,
    )


def changed(before: PodView, what: str, number: int, at: float) -> PodView:
    """The pod after a change."""
    pod, used = before
    match what:
        case "read":
            return PodView(pod, usage(pod, number * 16 * MI, at=at))
        case "vanished":
            return PodView(pod, None)
        case "stale":
            return PodView(pod, usage(pod, number * 16 * MI, at=at - number))
        case "from the future":
            return PodView(pod, usage(pod, number * 16 * MI, at=at + 0.5 * number))
        case "absurd":
            return PodView(pod, usage(pod, -number if number % 2 else None, at=at))
        case "terminating":
            return PodView(pod._replace(deletion_wall=None if pod.deletion_wall else WALL + number), used)
        case "edited":
            return PodView(pod._replace(priority=number * 1000 if number else 2_000_000_000), used)
        case "only the host's":
            return PodView(pod._replace(source=PodSource.HOST), used)
    raise AssertionError(what)


CHANGES = ("read", "vanished", "stale", "from the future", "absurd", "terminating", "edited", "only the host's")


def mostly(usual: Any, *rare: Any, times: int = 9) -> st.SearchStrategy[Any]:
    return st.sampled_from([usual] * times + list(rare))


HAPPENED = st.tuples(
    mostly("read", *["terminating"] * 4, *CHANGES, times=20), st.integers(0, PODS - 1), st.integers(0, 40)
)
STEP = st.fixed_dictionaries(
    {
        "happened": st.lists(HAPPENED, max_size=4),
        "gone": mostly(None, 4, 5, 6),
        "turned": mostly(False, True),
        "passed_s": mostly(1.0, 0.02, 7.0, 31.0, -1.5, times=4),
        "signal": mostly(Signal.MEMORY, Signal.ALLOCATABLE_MEMORY, Signal.PID, Signal.NODEFS),
        "tier": mostly(Tier.HARD, Tier.SOFT, times=2),
        "minimum": st.sampled_from((None, MINIMUM)),
        "own": mostly("", "uid-shop-p3"),
        "total": mostly(16 * GI, 200 * MI),
        "prepares": mostly(False, True, times=3),
    }
)


@settings(max_examples=150, deadline=None)
@given(mostly(ORDERS[0], *ORDERS, times=4), mostly(False, True, times=2), st.lists(STEP, min_size=3, max_size=12))
def test_a_cache_never_changes_the_order(order: RankingConfig, protected: bool, steps: list[dict[str, Any]]) -> None:
    rules = (
        ProtectionConfig(minimum_age_s=60.0)
        if protected
        else ProtectionConfig(minimum_age_s=0.0, disruption_budgets=False)
    )
    settings, cache, at = config(ranking=order, protection=rules), RankingCache(), NOW
    classes = list(QOSClass)
    views = [
        view(f"p{number}", number * 64 * MI, qos=classes[number % 3], age_s=10.0 * number) for number in range(PODS)
    ]
    for step in steps:
        at += step["passed_s"]
        for what, index, number in step["happened"]:
            views[index] = changed(views[index], what, number, at)
        there = [each for index, each in enumerate(views) if index != step["gone"]]
        current = node(there[::-1] if step["turned"] else there, at=at, own_pod_uid=step["own"])
        assert current.memory is not None
        current = current._replace(memory=current.memory._replace(total=step["total"]))
        if step["prepares"]:
            cache.prepare(current, config=settings)
        options = {name: step[name] for name in ("signal", "tier", "minimum")}
        cached, computed = (
            ranked(current, settings, cache, **options),
            ranked(current, settings, RankingCache(), **options),
        )
        assert (cached.order, cached.pods, cached.by_writes) == (computed.order, computed.pods, computed.by_writes)


def test_the_facts_of_a_pod_are_computed_once_for_each_version_of_its_object() -> None:
    settings, cache = config(), RankingCache()
    views = [view(f"p{number}", number * GI) for number in range(8)]
    before = cache.facts(views, Signal.MEMORY, config=settings)
    views[0] = changed(views[0], "read", 1000, NOW + 2)
    views[1] = changed(views[1], "edited", 7, NOW + 2)
    after = cache.facts(views, Signal.MEMORY, config=settings)
    assert [index for index in range(8) if after[index] is not before[index]] == [1]


def test_a_reading_that_becomes_stale_counts_as_unknown() -> None:
    settings, cache = config(), RankingCache()
    views = [view(f"p{number}", number * GI) for number in range(8)]
    ranked(node(views, at=NOW), settings, cache)
    views[7] = PodView(views[7].pod, usage(views[7].pod, 7 * GI, at=NOW - 25.0))
    assert ranked(node(views, at=NOW), settings, cache).pods[0].usage == 7 * GI
    last = ranked(node(views, at=NOW + 10.0), settings, cache).pods[-1]
    assert (last.view, last.usage) == (views[7], None)


def test_a_pod_that_replaces_another_is_ranked_by_its_own_usage() -> None:
    settings, cache = config(), RankingCache()
    views = [view(f"p{number}", number * GI) for number in range(8)]
    ranked(node(views, at=NOW), settings, cache)
    views[3] = view("new", 10 * GI)
    names = [each.view.pod.name for each in ranked(node(views, at=NOW), settings, cache).pods]
    assert names == ["new", "p7", "p6", "p5", "p4", "p2", "p1", "p0"]


def test_a_resize_to_an_absurd_request_makes_no_usage_unknown() -> None:
    """7Ei is a valid request, and infeasible."""
    for allocated in (Resources(memory=50 * MI), Resources(10)):
        container = Container("c", requests=Resources(memory=7 << 60), allocated=allocated, running=True)
        hog = view("hog", 2 * GI, containers=(container,))
        [found] = ranked(node([hog], at=NOW), config(), RankingCache()).pods
        assert (found.usage, found.refusals) == (2 * GI, ())
    unallocated = view("hog", 2 * GI, containers=(Container("c", requests=Resources(memory=7 << 60), running=True),))
    [found] = ranked(node([unallocated], at=NOW), config(), RankingCache()).pods
    assert found.refusals[0].code is RefusalCode.USAGE_UNKNOWN


def test_another_configuration_empties_the_cache() -> None:
    cache, views = RankingCache(), [view("young", GI, priority=1), view("old", 2 * GI)]
    assert [each.view.pod.name for each in ranked(node(views, at=NOW), config(), cache).pods] == ["old", "young"]
    kept = config(protection=ProtectionConfig(namespaces=("shop",)))
    assert all(each.refusals for each in ranked(node(views, at=NOW), kept, cache).pods)
