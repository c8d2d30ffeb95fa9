"""What must hold for raised limits when answers are lost, requests overlap and others change the pods."""

from typing import Any

from nodeagent.config.schema import Mode
from nodeagent.model import Observation, Owner, OwnLimit, PodView, QOSClass, RefusalCode, ResizeResult, Signal
from nodeagent.policy import state
from nodeagent.policy.resize_stages import ResizeStage
from tests.support.nodes import GI, MI, NOW, hard
from tests.support.resizes import (
    BOTH,
    LIMIT,
    RESIZE,
    SETTINGS,
    answered,
    calm,
    codes,
    decide,
    node,
    raised,
    results,
    web,
)

UP = 640 * MI
OFF = SETTINGS._replace(own_limit=SETTINGS.own_limit._replace(enabled=False))


def named(view: PodView, name: str) -> PodView:
    """The same pod under another name."""
    of = view.pod._replace(
        uid=f"uid-{name}", cgroup_uid=f"uid-{name}", name=name, owner=Owner("ReplicaSet", name, f"rs-{name}")
    )
    return PodView(of, view.usage)


def test_allocatable_memory_is_not_given_twice_while_a_guaranteed_raise_is_under_way() -> None:
    first = web(qos=QOSClass.GUARANTEED, request=LIMIT)
    room = 2 * LIMIT + 200 * MI  # both requests and one raise of 128Mi
    settings = SETTINGS._replace(own_limit=SETTINGS.own_limit._replace(resize=RESIZE._replace(node_share=1.0)))
    calm_one = web(100, qos=QOSClass.GUARANTEED, request=LIMIT)
    plan, after = decide(node(first, named(calm_one, "b"), allocatable=room), settings=settings)
    assert len(plan.resizes) == 1
    at = NOW + 1
    second = named(web(at=at, qos=QOSClass.GUARANTEED, request=LIMIT), "b")
    plan, _ = decide(
        node(web(at=at, qos=QOSClass.GUARANTEED, request=LIMIT), second, at=at, allocatable=room), after, settings
    )
    assert plan.resizes == ()
    assert RefusalCode.RESIZE_NO_HEADROOM in codes(plan)
    # The same once the spec has it, and the kubelet has not allocated it.
    asked = web(at=at, spec=UP, qos=QOSClass.GUARANTEED, request=UP)
    main = asked.pod.containers[0]._replace(allocated=main_of(first).requests)
    plan, _ = decide(
        node(PodView(asked.pod._replace(containers=(main,)), asked.usage), second, at=at, allocatable=room),
        answered(after, decide(node(first), settings=settings)[0], ResizeResult.ACCEPTED),
        settings,
    )
    assert plan.resizes == ()


def main_of(view: PodView) -> Any:
    return view.pod.containers[0]


def test_a_pod_whose_raise_is_under_way_is_not_evicted_when_others_are_raised_first() -> None:
    one = BOTH._replace(relief=BOTH.relief._replace(max_victims=1))
    plan, after = decide(node(named(web(), "z")), settings=one)
    after = answered(after, plan, ResizeResult.ACCEPTED)
    at = NOW + 1
    plan, _ = decide(node(named(web(at=at), "a"), named(web(at=at, spec=UP), "z"), at=at), after, one)
    assert [order.name for order in plan.resizes] == ["a"]
    assert plan.victims == ()


def test_a_pod_that_can_be_raised_in_the_next_decision_is_not_evicted_in_this_one() -> None:
    one = BOTH._replace(relief=BOTH.relief._replace(max_victims=1))
    plan, after = decide(node(named(web(), "a"), named(web(), "b")), settings=one)
    assert ([order.name for order in plan.resizes], plan.victims) == (["a"], ())
    at = NOW + 1
    plan, _ = decide(node(named(web(at=at), "a"), named(web(at=at), "b"), at=at), after, one)
    assert ([order.name for order in plan.resizes], plan.victims) == (["b"], ())


def test_a_pod_whose_raise_is_under_way_is_not_evicted_when_a_right_goes_missing() -> None:
    plan, after = decide(node(named(web(), "z")), settings=BOTH)
    after = answered(after, plan, ResizeResult.ACCEPTED)
    paused = after._replace(resizes=after.resizes._replace(paused_until=NOW + 600, paused_why="no right"))
    at = NOW + 1
    plan, _ = decide(node(named(web(at=at, spec=UP), "z"), at=at), paused, BOTH)
    assert plan.victims == ()


def test_a_pod_is_not_evicted_for_one_container_while_another_is_raised() -> None:
    plan, after = decide(node(web()), settings=BOTH)
    after = answered(after, plan, ResizeResult.ACCEPTED)
    at = NOW + 1
    view = web(508, at=at, spec=UP)
    assert view.usage is not None
    side = main_of(view)._replace(name="side", container_id="d" * 64, memory_restarts=True)
    own = OwnLimit("d" * 64, LIMIT, 511 * MI, MI, at)
    view = PodView(
        view.pod._replace(containers=(side, main_of(view))),
        view.usage._replace(own_limits=(own, *view.usage.own_limits)),
    )
    plan, _ = decide(node(view, at=at), after, BOTH)
    assert (plan.resizes, plan.victims) == ((), ())


def test_a_raise_that_shows_after_it_was_given_up_is_still_this_agents() -> None:
    plan, after = decide(node(web()))
    after = answered(after, plan, ResizeResult.ACCEPTED)
    at = NOW + 60
    _, after = decide(node(web(300, at=at), at=at), after)  # the watch lags behind
    at = NOW + 65
    plan, after = decide(node(web(300, at=at, spec=UP, actual=UP), at=at), after)
    assert ResizeResult.SUPERSEDED not in results(plan)
    [entry] = after.resizes.entries.values()
    assert (entry.stage, entry.original.limit, entry.requested.limit) == (ResizeStage.RAISED, LIMIT, UP)


def test_what_was_given_up_still_counts_as_used_while_it_may_come() -> None:
    tight = {Signal.MEMORY: 200 * MI}
    plan, after = decide(node(web(), available=tight))
    after = answered(after, plan, ResizeResult.UNCERTAIN)
    at = NOW + 60
    _, after = decide(node(web(300, at=at), at=at, available=tight), after)
    at = NOW + 61
    plan, _ = decide(node(web(300, at=at), named(web(at=at), "b"), at=at, available=tight), after)
    assert plan.resizes == ()


def test_a_withdrawal_that_shows_late_keeps_the_first_limit() -> None:
    at = NOW + 20
    plan, after = decide(node(web(635, at=at, spec=UP, actual=UP), at=at), raised())
    assert [order.to.limit for order in plan.resizes] == [800 * MI]
    after = answered(after, plan, ResizeResult.ACCEPTED, at=at)
    at += 1
    refused: dict[str, Any] = {"spec": 800 * MI, "actual": UP, "resize_pending": "Infeasible"}
    plan, after = decide(node(web(635, at=at, **refused), at=at), after)
    after = answered(after, plan, ResizeResult.UNCERTAIN, at=at)
    at += 60
    plan, after = decide(node(web(300, at=at, **refused), at=at), after)
    at += 5
    plan, after = decide(node(web(300, at=at, spec=UP, actual=UP), at=at), after)
    assert ResizeResult.SUPERSEDED not in results(plan)
    [entry] = after.resizes.entries.values()
    assert entry.original.limit == LIMIT


def test_a_dry_run_in_between_does_not_lose_a_real_raise() -> None:
    dry = SETTINGS._replace(mode=Mode.DRY_RUN)
    at = NOW + 20
    full: dict[str, Any] = {"spec": UP, "actual": UP}
    plan, after = decide(node(web(635, at=at, **full), at=at), state.restored(raised(), instance="test"), dry)
    after = answered(after, plan, ResizeResult.DRY_RUN, at=at)
    at += 100
    plan, after = decide(node(web(300, at=at, **full), at=at), state.restored(after, instance="test"))
    [entry] = after.resizes.entries.values()
    assert (entry.stage, entry.original.limit, entry.requested.limit) == (ResizeStage.RAISED, LIMIT, UP)


def test_a_limit_changed_by_others_during_a_dry_run_is_theirs() -> None:
    dry = SETTINGS._replace(mode=Mode.DRY_RUN)
    at = NOW + 20
    plan, after = decide(node(web(635, at=at, spec=UP, actual=UP), at=at), raised(), dry)
    after = answered(after, plan, ResizeResult.DRY_RUN, at=at)
    at += 1
    _, after = decide(node(web(300, at=at, spec=GI, actual=GI), at=at), after)
    assert after.resizes.entries == {}


def test_a_container_that_a_resize_would_restart_by_now_is_not_lowered() -> None:
    plan, after = calm(raised(), 300, 3000, container={"memory_restarts": True})
    assert plan.resizes == ()
    plan, after = decide(node(web()), settings=BOTH)
    after = answered(after, plan, ResizeResult.ACCEPTED)
    at = NOW + 1
    view = web(at=at, spec=UP, resize_pending="Infeasible", container={"memory_restarts": True})
    plan, after = decide(node(view, at=at), after, BOTH)
    assert plan.resizes == ()
    assert len(plan.victims) == 1


def test_a_raise_that_is_carried_out_before_its_withdrawal_stays() -> None:
    plan, after = decide(node(web()))
    after = answered(after, plan, ResizeResult.ACCEPTED)
    at = NOW + 16
    plan, after = decide(node(web(at=at, spec=UP), at=at), after)
    assert (results(plan), [order.lowers for order in plan.resizes]) == ([ResizeResult.NO_RESULT], [True])
    after = answered(after, plan, ResizeResult.REFUSED, at=at, status=409)
    at += 2
    plan, after = decide(node(web(620, at=at, spec=UP, actual=UP), at=at), after)
    assert (plan.resizes, results(plan)) == ((), [ResizeResult.RESIZED])


def test_an_old_reading_is_not_calm() -> None:
    before = raised()
    for minute in range(30):
        at = NOW + 30 + 60.0 * minute
        view = web(300, at=at, spec=UP, actual=UP)
        assert view.usage is not None
        old = view.usage.own_limits[0]._replace(read_at=NOW)
        plan, before = decide(node(PodView(view.pod, view.usage._replace(own_limits=(old,))), at=at), before)
        assert plan.resizes == ()


def test_the_page_cache_of_a_pod_without_a_limit_of_its_own_is_not_calm() -> None:
    before = raised()
    for minute in range(30):
        at = NOW + 30 + 60.0 * minute
        view = web(300, at=at, spec=UP, actual=UP)
        assert view.usage is not None
        usage = view.usage._replace(memory_usage=600 * MI, memory_limit=None)
        plan, before = decide(node(PodView(view.pod, usage), at=at), before)
        assert plan.resizes == ()


def test_time_that_nobody_has_watched_is_not_calm() -> None:
    full: dict[str, Any] = {"spec": UP, "actual": UP}
    at = NOW + 30
    _, before = decide(node(web(300, at=at, **full), at=at), raised())
    at += 10_000
    plan, _ = decide(node(web(300, at=at, **full), at=at), state.restored(before, instance="next"))
    assert plan.resizes == (), "the agent did not run"
    slept, _ = decide(node(web(300, at=at, **full), at=at, suspended_s=9_990.0), before._replace(suspended_s=0.0))
    assert slept.resizes == (), "the machine slept"
    _, off = decide(node(web(300, at=at, **full), at=at), before, OFF)
    plan, _ = decide(node(web(300, at=at, **full), at=at), off)
    assert plan.resizes == (), "the raises were off"


def test_a_reload_forgets_no_calm() -> None:
    full: dict[str, Any] = {"spec": UP, "actual": UP}
    at = NOW + 30
    _, before = decide(node(web(300, at=at, **full), at=at), raised())
    at += 10_000
    plan, _ = decide(node(web(300, at=at, **full), at=at), state.restored(before, instance=before.instance))
    [order] = plan.resizes
    assert order.lowers


def test_without_a_version_of_the_pod_nothing_is_requested() -> None:
    """The API server would overwrite what others have changed."""
    view = web()
    assert decide(node(PodView(view.pod._replace(resource_version=""), view.usage)))[0].resizes == ()
    plan, after = decide(node(view))
    after = answered(after, plan, ResizeResult.ACCEPTED)
    at = NOW + 1
    view = web(at=at, spec=UP, resize_pending="Infeasible")
    plan, _ = decide(node(PodView(view.pod._replace(resource_version=""), view.usage), at=at), after)
    assert plan.resizes == ()


def test_pods_of_kube_system_are_not_resized() -> None:
    for namespaces in (("*",), ("kube-system",)):
        settings = SETTINGS._replace(
            own_limit=SETTINGS.own_limit._replace(resize=RESIZE._replace(namespaces=namespaces))
        )
        plan, _ = decide(node(web(namespace="kube-system")), settings=settings)
        assert plan.resizes == ()


def test_a_raise_that_is_being_withdrawn_still_counts_as_used() -> None:
    tight = {Signal.MEMORY: 200 * MI}
    plan, after = decide(node(web(), available=tight))
    after = answered(after, plan, ResizeResult.ACCEPTED)
    at = NOW + 1
    pending = web(400, at=at, spec=UP, resize_pending="Infeasible")
    plan, after = decide(node(pending, at=at, available=tight), after)
    assert [order.lowers for order in plan.resizes] == [True]
    at = NOW + 2
    pending = web(400, at=at, spec=UP, resize_pending="Infeasible")
    plan, _ = decide(node(pending, named(web(at=at), "b"), at=at, available=tight), after)
    assert plan.resizes == ()


def test_a_signal_with_an_old_sample_has_no_memory_for_raises() -> None:
    settings = BOTH._replace(thresholds=(hard(), hard(Signal.ALLOCATABLE_MEMORY, 100 * MI)))
    on = node(web())
    old = on.observations[Signal.ALLOCATABLE_MEMORY]
    stale = Observation(old.signal, old.available, old.capacity, NOW - 1000, "test")
    plan, _ = decide(on._replace(observations={**on.observations, Signal.ALLOCATABLE_MEMORY: stale}), settings=settings)
    assert plan.resizes == ()


def test_another_pod_of_the_same_name_is_not_touched() -> None:
    at = NOW + 30
    view = web(300, at=at, spec=UP, actual=UP)
    again = PodView(view.pod._replace(uid="u2", cgroup_uid="u2"), view.usage)
    plan, after = decide(node(again, at=at), raised())
    assert (plan.resizes, after.resizes.entries) == ((), {})


def test_a_clock_that_goes_back_resizes_nothing() -> None:
    plan, after = calm(raised(), 300, 300)
    at = NOW - 5000
    plan, _ = decide(node(web(300, at=at, spec=UP, actual=UP), at=at), after)
    assert plan.resizes == ()


def test_pressure_of_the_node_comes_first() -> None:
    settings = BOTH._replace(thresholds=(hard(value=GI),))
    plan, _ = decide(
        node(web(300, spec=UP, actual=UP), named(web(), "b"), available={Signal.MEMORY: 900 * MI}), settings=settings
    )
    assert plan.resizes == ()
    assert [victim.limit for victim in plan.victims] == [""]
