import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.model import (
    Container,
    ContainerUsage,
    Pod,
    PodSource,
    PodUsage,
    PodView,
    QOSClass,
    Resources,
    Signal,
    Stall,
    StallRequirement,
    StallScope,
)
from nodeagent.policy.stall import StallCheck, at_own_limit, check_stall
from tests.support.threshold_samples import GI, Judge, hard, percent, sample, snapshot

NODE, KUBEPODS, SYSTEM = StallScope.NODE, StallScope.KUBEPODS, StallScope.SYSTEM


def psi(scope: StallScope = NODE, resource: str = "memory", *, some: float, full: float | None = None) -> Stall:
    return Stall(scope, resource, some, some / 2, 0, full, None if full is None else full / 2, 0, read_at=100.0)


def requires(
    at_least: float, *, kind: str = "some", window: str = "avg10", scope: StallScope = NODE
) -> StallRequirement:
    return StallRequirement(scope, "memory", kind, window, at_least)


def pod(*, used: int | None, limit: int | None, stall: float | None, name: str = "p") -> PodView:
    made = Pod(name, name, "ns", name, PodSource.API, QOSClass.BURSTABLE)
    usage = PodUsage(
        name, QOSClass.BURSTABLE, "/p", 100.0, memory_usage=used, memory_limit=limit, memory_stall_some_avg10=stall
    )
    return PodView(made, usage)


def ask(
    requirement: StallRequirement, *stalls: Stall, pods: tuple[PodView, ...] = (), now: float = 100.0
) -> StallCheck:
    return check_stall(requirement, snapshot(now, stalls=stalls, pods=pods), now=now, stale_after_s=30.0)


@pytest.mark.parametrize(
    ("kind", "window", "value"),
    [("some", "avg10", 40.0), ("some", "avg60", 20.0), ("full", "avg10", 10.0), ("full", "avg60", 5.0)],
)
def test_the_key_holds_from_the_required_share_on(kind: str, window: str, value: float) -> None:
    seen = psi(some=40.0, full=10.0)
    assert ask(requires(value, kind=kind, window=window), seen).holds
    assert not ask(requires(value + 0.01, kind=kind, window=window), seen).holds


def test_each_scope_and_resource_has_its_own_stall() -> None:
    seen = (psi(NODE, some=50.0), psi(SYSTEM, some=1.0), psi(KUBEPODS, "io", some=60.0))
    assert ask(requires(10.0), *seen).holds
    assert ask(requires(10.0, scope=SYSTEM), *seen).reason == "memory some avg10 of system is 1%, needs 10%"
    assert "unknown" in ask(requires(10.0, scope=KUBEPODS), *seen).reason
    assert ask(StallRequirement(KUBEPODS, "io", "some", "avg10", 10.0), *seen).holds


def test_cpu_pressure_is_never_used() -> None:
    asked = ask(StallRequirement(NODE, "cpu", "some", "avg10", 1.0), psi(NODE, "cpu", some=99.0))
    assert asked == StallCheck(False, "cpu some avg10 of node: CPU pressure is never used")


@pytest.mark.parametrize("value", [math.nan, -1.0, 100.1, math.inf])
def test_an_impossible_stall_does_not_fulfil_the_requirement(value: float) -> None:
    assert not ask(requires(0.0), psi(some=value)).holds


def test_a_stall_that_was_not_measured_does_not_fulfil_the_requirement() -> None:
    assert not ask(requires(0.0, kind="full"), psi(some=99.0, full=None)).holds
    assert not ask(requires(0.0)).holds


@pytest.mark.parametrize(("now", "holds"), [(130.0, True), (130.1, False), (99.5, True), (98.0, False)])
def test_a_stall_is_believed_for_as_long_as_a_sample(now: float, holds: bool) -> None:
    assert ask(requires(10.0), psi(some=50.0), now=now).holds is holds


# --- pods at their own limit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("used", "at_limit"), [(979, False), (980, True), (1000, True)])
def test_a_pod_counts_as_limited_from_two_percent_below_its_limit(used: int, at_limit: bool) -> None:
    assert at_own_limit(pod(used=used, limit=1000, stall=1.0)) is at_limit


def test_a_pod_without_a_limit_or_a_usage_is_not_at_one() -> None:
    assert not at_own_limit(pod(used=1000, limit=None, stall=1.0))
    assert not at_own_limit(pod(used=None, limit=1000, stall=1.0))
    assert not at_own_limit(pod(used=1000, limit=0, stall=1.0))
    assert not at_own_limit(PodView(pod(used=1, limit=1, stall=1.0).pod, None))


def test_a_container_at_its_own_limit_makes_its_pod_a_limited_one() -> None:
    view = pod(used=5000, limit=None, stall=1.0)
    limited = Container("app", limits=Resources(memory=1000), container_id="abc")
    full = ContainerUsage("abc", None, 990, None)
    assert view.usage is not None
    whole = PodView(view.pod._replace(containers=(limited, Container("free"))), view.usage._replace(containers=(full,)))
    assert at_own_limit(whole)
    roomy = whole._replace(usage=view.usage._replace(containers=(full._replace(memory_working_set=900),)))
    assert not at_own_limit(roomy)


def test_the_stall_of_limited_pods_is_discounted_and_that_of_others_is_not() -> None:
    limited = pod(used=1000, limit=1000, stall=30.0, name="limited")
    free = pod(used=10, limit=1000, stall=30.0, name="free")
    assert ask(requires(25.0), psi(some=50.0), pods=(free, free)).holds
    discounted = ask(requires(25.0), psi(some=50.0), pods=(limited, free))
    assert discounted == StallCheck(False, "memory some avg10 of node is 50%, 20% without the pods at their own limit")
    assert ask(requires(20.0), psi(some=50.0), pods=(limited, free)).holds


def test_a_limited_pod_with_an_unknown_stall_may_explain_the_whole_stall() -> None:
    for unknown in (None, math.nan, 101.0):
        asked = ask(requires(1.0), psi(some=50.0), pods=(pod(used=1000, limit=1000, stall=unknown),))
        assert not asked.holds
        assert "ns/p is at its own limit and its stall is unknown" in asked.reason


def test_the_stall_of_system_services_has_nothing_to_do_with_pods() -> None:
    limited = pod(used=1000, limit=1000, stall=99.0)
    assert ask(requires(25.0, scope=SYSTEM), psi(SYSTEM, some=50.0), pods=(limited,)).holds


@given(
    st.floats(0, 100),
    st.lists(st.tuples(st.integers(0, 1000), st.floats(0, 100)), max_size=5),
    st.floats(0, 100),
)
def test_pods_never_fulfil_a_requirement_that_the_node_does_not(
    some: float, pods: list[tuple[int, float]], at_least: float
) -> None:
    views = tuple(pod(used=used, limit=1000, stall=stall) for used, stall in pods)
    with_pods = ask(requires(at_least), psi(some=some), pods=views).holds
    without = ask(requires(at_least), psi(some=some)).holds
    assert not with_pods or without


# --- what happened to others ------------------------------------------------------------------------------------------

TWO_KEYS = hard(Signal.MEMORY, percent(10))._replace(require_stall=requires(10.0, kind="full"))
"""A hard threshold of 10% that also requires a full stall of 10%."""


def due(available_share: float, *stalls: Stall, pods: tuple[PodView, ...] = ()) -> tuple[bool, bool]:
    seen = sample(Signal.MEMORY, int(64 * GI * available_share), capacity=64 * GI, read_at=100.0)
    shot = snapshot(100.0, seen, stalls=stalls, pods=pods)
    verdict = Judge(TWO_KEYS).see(100.0, shot)[Signal.MEMORY].thresholds[0]
    return verdict.met, verdict.due


def test_a_limited_pod_that_raises_the_nodes_stall_with_85_percent_free_causes_no_eviction() -> None:
    """siderolabs/talos#13746: page cache reclaim inside one capped pod took `full avg10` of the node above 75%, and
    the node's out-of-memory handler killed pods although 85% of the memory was free."""
    ceph = pod(used=4 * GI, limit=4 * GI, stall=80.0, name="osd-0")
    assert due(0.85, psi(some=82.0, full=78.0), pods=(ceph,)) == (False, False)


def test_the_same_pod_does_not_fulfil_the_requirement_when_memory_is_low_as_well() -> None:
    ceph = pod(used=4 * GI, limit=4 * GI, stall=80.0, name="osd-0")
    assert due(0.05, psi(some=82.0, full=78.0), pods=(ceph,)) == (True, False)
    assert due(0.05, psi(some=82.0, full=78.0)) == (True, True)


def test_a_stall_above_every_limit_with_half_of_the_memory_free_causes_no_eviction() -> None:
    """siderolabs/talos#12526: nodes at 40% to 60% of their memory had their API servers killed for stall alone.
    systemd/systemd#23606: builds killed at 51% stall with 6 of 32 GB in use."""
    assert due(0.5, psi(some=100.0, full=100.0)) == (False, False)
    assert due(0.81, psi(some=60.0, full=51.07)) == (False, False)
