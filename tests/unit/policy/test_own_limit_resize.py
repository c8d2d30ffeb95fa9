"""A memory limit is raised in place within what the node has; what came of it is read from the pod; it is undone."""

from typing import Any

import pytest

from nodeagent.config.own_limit import OwnLimitConfig
from nodeagent.config.schema import Mode, TokenBucket
from nodeagent.model import (
    MemoryAmounts,
    NodeSnapshot,
    OwnLimit,
    PodView,
    QOSClass,
    RefusalCode,
    ResizeResult,
    Resources,
    Signal,
)
from nodeagent.policy import resizes, state
from nodeagent.policy.resize_stages import ResizeStage
from nodeagent.policy.state import PolicyState
from nodeagent.records.state_file import StateFile
from tests.support.nodes import GI, MI, NOW, PLENTY, config, hard
from tests.support.resizes import (
    BOTH,
    ID,
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
    stage,
    web,
)


def test_it_is_off_by_default() -> None:
    plan, _ = decide(node(web()), settings=config(own_limit=OwnLimitConfig(enabled=True, namespaces=("shop",))))
    assert plan.resizes == ()
    assert [victim.pod.name for victim in plan.victims] == ["web"]


def test_a_burstable_pod_gets_a_higher_limit_and_is_not_evicted() -> None:
    plan, after = decide(node(web()), settings=BOTH)
    [order] = plan.resizes
    assert (order.before, order.to) == (MemoryAmounts(LIMIT), MemoryAmounts(640 * MI))
    assert (order.container, order.resource_version, order.lowers) == ("main", "7", False)
    assert "memory limit 512Mi" in order.message
    assert "raised to 640Mi" in order.message
    assert plan.victims == ()
    assert stage(after) is ResizeStage.PLANNED
    assert set(after.rate_limits.levels) == {"resize"}, "taken before the request is sent"


def test_of_a_guaranteed_pod_the_request_rises_too() -> None:
    plan, _ = decide(node(web(qos=QOSClass.GUARANTEED, request=LIMIT)))
    assert plan.resizes[0].to == MemoryAmounts(640 * MI, 640 * MI)
    assert plan.resizes[0].before == MemoryAmounts(LIMIT, LIMIT)


def test_opt_ins_are_apart_and_never_wins() -> None:
    assert decide(node(web(namespace="other")))[0].resizes == ()
    assert decide(node(web(annotations={"nodeagent.io/own-limit": "never"})))[0].resizes == ()
    trusted = SETTINGS._replace(protection=SETTINGS.protection._replace(trusted_namespaces=("other",)))
    marked = web(namespace="other", annotations={"nodeagent.io/own-limit": "resize"})
    assert len(decide(node(marked), settings=trusted)[0].resizes) == 1
    assert decide(node(marked))[0].resizes == (), "its author is not trusted"


def test_a_pod_that_is_protected_from_eviction_may_be_resized() -> None:
    plan, _ = decide(node(web(owner=None)), settings=BOTH)
    assert len(plan.resizes) == 1


@pytest.mark.parametrize(
    ("view", "text"),
    [
        (web(container={"memory_restarts": True}), "resizePolicy"),
        (web(actual=None), "reports no resources"),
        (web(pod_limits=Resources(memory=LIMIT)), "resources of its own"),
        (web(static="file"), "static pod"),
        (web(resize_pending="Deferred"), "another resize of the pod is pending"),
    ],
)
def test_what_cannot_be_resized_is_evicted_where_it_opted_in(view: PodView, text: str) -> None:
    plan, _ = decide(node(view), settings=BOTH)
    assert plan.resizes == ()
    [refusal] = [each for each in plan.refusals if each.code is RefusalCode.RESIZE_IMPOSSIBLE]
    assert text in refusal.message
    assert bool(plan.victims) == (not view.pod.static)
    assert decide(node(view))[0].victims == (), "it did not opt in to evictions"


def test_the_pod_limit_of_several_containers_is_that_of_the_fullest() -> None:
    view = web()
    assert view.usage is not None
    other = view.pod.containers[0]._replace(name="side", container_id="d" * 64)
    of_pod = OwnLimit("", 2 * LIMIT, 1010 * MI, 14 * MI, NOW)
    of_side = OwnLimit("d" * 64, LIMIT, 500 * MI, 12 * MI, NOW)
    view = PodView(
        view.pod._replace(containers=(other, view.pod.containers[0])),
        view.usage._replace(own_limits=(of_pod, of_side, view.usage.own_limits[0])),
    )
    assert decide(node(view))[0].resizes[0].container == "main"


@pytest.mark.parametrize(
    "on",
    [
        node(web(), allocatable=None),
        node(web(), allocatable=8 * GI, available={Signal.MEMORY: None}),
        node(web(), available={Signal.MEMORY: 1100 * MI}),  # 76Mi above the threshold
        node(web(request=GI), allocatable=GI + 100 * MI),  # 100Mi beyond the requests
        node(web(), available={Signal.MEMORY: 10 * MI}),
    ],
)
def test_without_room_or_without_knowing_it_nothing_is_raised(on: NodeSnapshot) -> None:
    settings = BOTH._replace(thresholds=(hard(value=GI),), own_limit=BOTH.own_limit)
    roomy = settings._replace(own_limit=settings.own_limit._replace(resize=RESIZE._replace(node_share=1.0)))
    plan, _ = decide(on, settings=roomy)
    assert plan.resizes == ()
    if not any(each.due for verdict in plan.signals for each in verdict.thresholds):
        assert RefusalCode.RESIZE_NO_HEADROOM in codes(plan)
        assert [victim.limit for victim in plan.victims] == ["memory.max"]


def test_what_an_earlier_raise_may_still_take_is_gone() -> None:
    other = web()
    second = PodView(other.pod._replace(uid="u2", cgroup_uid="u2", name="b"), other.usage)
    tight = {Signal.MEMORY: 200 * MI}  # one raise of 128Mi
    plan, _ = decide(node(web(), second, available=tight))
    assert len(plan.resizes) == 1
    assert RefusalCode.RESIZE_NO_HEADROOM in codes(plan)
    _, after = decide(node(web(), available=tight))
    plan, _ = decide(node(web(), second, at=NOW + 1, available=tight)._replace(taken_at=NOW), after)
    assert plan.resizes == ()


def test_the_limit_rises_to_its_ceiling_and_not_beyond() -> None:
    before, at, limits = raised(), NOW + 20.0, [640]
    for _ in range(6):
        full = limits[-1] * MI
        view = web(limits[-1] - 2, at=at, spec=full, actual=full)
        plan, before = decide(node(view, at=at), before)
        if not plan.resizes:
            break
        before = answered(before, plan, ResizeResult.ACCEPTED, at=at)
        limits.append(plan.resizes[0].to.limit // MI)
        full = limits[-1] * MI
        _, before = decide(node(web(300, at=at + 1, spec=full, actual=full), at=at + 1), before)
        at += 20
    assert limits == [640, 800, 1000], "half a step is left of twice 512Mi"
    assert codes(plan) == [RefusalCode.RESIZE_CEILING]
    small = SETTINGS._replace(own_limit=SETTINGS.own_limit._replace(resize=RESIZE._replace(node_share=0.05)))
    assert codes(decide(node(web()), settings=small)[0]) == [RefusalCode.RESIZE_CEILING], "5% of 8Gi is less"


def test_its_tokens_are_its_own() -> None:
    few = SETTINGS._replace(rate_limits=PLENTY._replace(resize=TokenBucket(1, 6.0)))
    first = web()
    second = PodView(first.pod._replace(uid="u2", cgroup_uid="u2", name="b"), first.usage)
    plan, after = decide(node(first, second), settings=few)
    assert len(plan.resizes) == 1
    assert codes(plan) == [RefusalCode.RATE_LIMIT_RESIZE]
    assert after.rate_limits.levels["resize"].tokens == 0


def test_while_the_kubelet_carries_it_out_the_pod_is_neither_evicted_nor_raised_again() -> None:
    plan, after = decide(node(web()), settings=BOTH)
    after = answered(after, plan, ResizeResult.ACCEPTED)
    at = NOW + 1
    plan, after = decide(node(web(508, at=at, spec=640 * MI), at=at), after, BOTH)
    assert (plan.resizes, plan.victims, codes(plan)) == ((), (), [RefusalCode.WAITS_FOR_RESIZE])
    at = NOW + 2
    stale = web(510, at=at, spec=640 * MI, actual=640 * MI)
    assert stale.usage is not None
    old = OwnLimit(ID, LIMIT, 510 * MI, 2 * MI, at)  # the cgroup's limit was not read again
    plan, after = decide(node(PodView(stale.pod, stale.usage._replace(own_limits=(old,))), at=at), after, BOTH)
    assert results(plan) == [ResizeResult.RESIZED]
    assert (plan.resizes, plan.victims, codes(plan)) == ((), (), [RefusalCode.WAITS_FOR_RESIZE])


@pytest.mark.parametrize(
    ("seen", "after_s", "result"),
    [
        ({"resize_pending": "Infeasible", "resize_message": "swap"}, 1.0, ResizeResult.INFEASIBLE),
        ({"resize_pending": "Deferred", "resize_message": "no room"}, 6.0, ResizeResult.DEFERRED),
        ({"resize_failed": True, "resize_message": "runtime"}, 1.0, ResizeResult.FAILED),
        ({}, 16.0, ResizeResult.NO_RESULT),
    ],
)
def test_a_raise_that_is_not_carried_out_is_withdrawn_and_the_pod_evicted(
    seen: dict[str, Any], after_s: float, result: ResizeResult
) -> None:
    plan, after = decide(node(web()), settings=BOTH)
    after = answered(after, plan, ResizeResult.ACCEPTED)
    at = NOW + after_s
    plan, after = decide(node(web(at=at, spec=640 * MI, **seen), at=at), after, BOTH)
    assert results(plan) == [result]
    [order] = plan.resizes
    assert (order.lowers, order.before.limit, order.to.limit) == (True, 640 * MI, LIMIT)
    assert [victim.limit for victim in plan.victims] == ["memory.max"]
    assert RefusalCode.RESIZE_FAILED in codes(plan)
    after = answered(after, plan, ResizeResult.ACCEPTED, at=at)
    plan, after = decide(node(web(300, at=at + 1), at=at + 1), after, BOTH)
    assert stage(after) is ResizeStage.BACKED_OFF
    plan, _ = decide(node(web(at=at + 30), at=at + 30), after)
    assert (plan.resizes, codes(plan)) == ((), [RefusalCode.RESIZE_FAILED]), "its back-off"
    plan, _ = decide(node(web(at=at + 700), at=at + 700), after)
    assert len(plan.resizes) == 1


def test_a_deferred_raise_is_given_some_seconds() -> None:
    plan, after = decide(node(web()))
    after = answered(after, plan, ResizeResult.ACCEPTED)
    at = NOW + 2
    plan, _ = decide(node(web(at=at, spec=640 * MI, resize_pending="Deferred"), at=at), after)
    assert (results(plan), codes(plan)) == ([], [RefusalCode.WAITS_FOR_RESIZE])


@pytest.mark.parametrize(
    ("result", "status", "again_s"),
    [
        (ResizeResult.REFUSED, 409, 2.0),
        (ResizeResult.REFUSED, 403, 700.0),
        (ResizeResult.REFUSED, 422, 700.0),
        (ResizeResult.NOT_SENT, 429, 20.0),
        (ResizeResult.NOT_FOUND, 404, 20.0),
        (ResizeResult.FORBIDDEN, 403, 700.0),
    ],
)
def test_a_refused_raise_returns_its_token_and_is_tried_again_later(
    result: ResizeResult, status: int, again_s: float
) -> None:
    plan, after = decide(node(web()))
    after = answered(after, plan, result, status=status)
    assert after.rate_limits.levels["resize"].tokens == 10
    plan, _ = decide(node(web(at=NOW + 0.5), at=NOW + 0.5), after, BOTH)
    assert (plan.resizes, len(plan.victims)) == ((), 1)
    at = NOW + again_s
    assert len(decide(node(web(at=at), at=at), after)[0].resizes) == 1


def test_without_the_subresource_nothing_is_asked_until_a_reload() -> None:
    plan, after = decide(node(web()))
    after = answered(after, plan, ResizeResult.NOT_SERVED, status=404)
    at = NOW + 100_000
    plan, after = decide(node(web(at=at), at=at), after)
    assert (plan.resizes, codes(plan)) == ((), [RefusalCode.RESIZE_FAILED])
    again = state.restored(after, instance="test")
    assert len(decide(node(web(at=at), at=at), again)[0].resizes) == 1


def test_an_uncertain_answer_is_settled_by_the_pod() -> None:
    plan, after = decide(node(web()))
    after = answered(after, plan, ResizeResult.UNCERTAIN)
    assert (stage(after), after.rate_limits.levels["resize"].tokens) == (ResizeStage.PLANNED, 9)
    at = NOW + 3
    carried, _ = decide(node(web(300, at=at, spec=640 * MI, actual=640 * MI), at=at), after)
    assert results(carried) == [ResizeResult.RESIZED]
    at = NOW + 60
    lost, later = decide(node(web(300, at=at), at=at), after)
    assert results(lost) == [ResizeResult.NO_RESULT]
    assert stage(later) is ResizeStage.BACKED_OFF
    assert later.rate_limits.levels["resize"].tokens == 9, "it may have been carried out"


def test_after_a_calm_while_the_first_limit_is_restored() -> None:
    plan, after = calm(raised(), 300, 1200)
    [order] = plan.resizes
    assert (order.lowers, order.before.limit, order.to.limit) == (True, 640 * MI, LIMIT)
    assert plan.made_at - NOW >= 600
    after = answered(after, plan, ResizeResult.ACCEPTED, at=plan.made_at)
    at = plan.made_at + 2
    plan, after = decide(node(web(300, at=at), at=at), after)
    assert results(plan) == [ResizeResult.RESTORED]
    assert after.resizes.entries == {}


@pytest.mark.parametrize("used_mib", [400, 600])
def test_a_container_that_could_not_live_with_its_first_limit_keeps_the_raised_one(used_mib: int) -> None:
    plan, after = calm(raised(), used_mib, 3000)
    assert (plan.resizes, stage(after)) == ((), ResizeStage.RAISED)


def test_page_cache_above_the_first_limit_is_not_calm() -> None:
    before, plan = raised(), None
    for minute in range(30):
        at = NOW + 30 + 60.0 * minute
        view = web(300, at=at, spec=640 * MI, actual=640 * MI)
        assert view.usage is not None
        full = view._replace(usage=view.usage._replace(memory_usage=600 * MI))
        plan, before = decide(node(full, at=at), before)
        assert plan.resizes == ()


def test_a_server_that_does_not_lower_limits_leaves_it_raised() -> None:
    plan, after = calm(raised(), 300, 1200)
    after = answered(after, plan, ResizeResult.REFUSED, at=plan.made_at, status=422)
    assert stage(after) is ResizeStage.KEPT
    at = plan.made_at + 100_000
    plan, after = decide(node(web(300, at=at, spec=640 * MI, actual=640 * MI), at=at), after)
    assert (plan.resizes, stage(after)) == ((), ResizeStage.KEPT)


@pytest.mark.parametrize(("status", "again_s"), [(409, 2.0), (403, 700.0)])
def test_a_refused_withdrawal_and_a_refused_restoration_are_tried_again(status: int, again_s: float) -> None:
    plan, after = calm(raised(), 300, 1200)
    after = answered(after, plan, ResizeResult.REFUSED, at=plan.made_at, status=status)
    at = plan.made_at + 0.5
    full: dict[str, Any] = {"spec": 640 * MI, "actual": 640 * MI}
    plan, after = decide(node(web(300, at=at, **full), at=at), after)
    assert plan.resizes == ()
    plan, _ = decide(node(web(300, at=at + again_s, **full), at=at + again_s), after)
    assert [order.to.limit for order in plan.resizes] == [LIMIT]
    plan, after = decide(node(web()))
    after = answered(after, plan, ResizeResult.ACCEPTED)
    at = NOW + 1
    refused: dict[str, Any] = {"spec": 640 * MI, "resize_pending": "Infeasible"}
    plan, after = decide(node(web(at=at, **refused), at=at), after)
    after = answered(after, plan, ResizeResult.REFUSED, at=at, status=status)
    plan, after = decide(node(web(at=at + 0.5, **refused), at=at + 0.5), after)
    assert plan.resizes == ()
    plan, after = decide(node(web(at=at + again_s, **refused), at=at + again_s), after)
    assert [order.to.limit for order in plan.resizes] == [LIMIT]


def test_a_limit_that_somebody_else_has_changed_is_left_as_it_is() -> None:
    at = NOW + 30
    plan, after = decide(node(web(300, at=at, spec=GI, actual=GI), at=at), raised())
    assert results(plan) == [ResizeResult.SUPERSEDED]
    assert after.resizes.entries == {}


def test_a_pod_that_is_gone_is_forgotten_and_one_in_an_unknown_list_is_not() -> None:
    at = NOW + 30
    assert decide(node(at=at, pods_synced_at=None), raised())[1].resizes.entries
    assert decide(node(at=at), raised())[1].resizes.entries == {}


def test_the_state_survives_a_restart(tmp_path: Any) -> None:
    file = StateFile(tmp_path / "state", shape=PolicyState, boot_id="b")
    before = raised()
    file.save(before)
    loaded = StateFile(tmp_path / "state", shape=PolicyState, boot_id="b").load().value
    assert loaded == before
    plan, _ = calm(state.restored(loaded, instance="next"), 300, 1200)
    assert [order.lowers for order in plan.resizes] == [True]


def test_a_crash_before_the_answer_requests_nothing_twice() -> None:
    _, after = decide(node(web()))
    again = state.restored(after, instance="next")
    at = NOW + 1
    plan, again = decide(node(web(at=at), at=at), again)
    assert (plan.resizes, codes(plan)) == ((), [RefusalCode.WAITS_FOR_RESIZE])


def test_a_dry_run_counts_the_container_as_raised_for_a_while() -> None:
    dry = BOTH._replace(mode=Mode.DRY_RUN)
    plan, after = decide(node(web()), settings=dry)
    after = answered(after, plan, ResizeResult.DRY_RUN)
    at = NOW + 10
    plan, after = decide(node(web(at=at), at=at), after, dry)
    assert (plan.resizes, plan.victims, codes(plan)) == ((), (), [RefusalCode.WAITS_FOR_RESIZE])
    at = NOW + 70
    assert len(decide(node(web(at=at), at=at), after, dry)[0].resizes) == 1


def test_a_suspend_stops_the_time_of_what_is_awaited() -> None:
    _, after = decide(node(web()))
    slept = resizes.after_suspend(after.resizes, 3600.0)
    [before], [later] = after.resizes.entries.values(), slept.entries.values()
    assert (later.until - before.until, later.since - before.since) == (3600.0, 3600.0)
