"""EvictionRequests: made in place of an eviction of the soft tier, bounded in time, and never waited for by the hard
tier."""

from typing import Any

import msgspec
import pytest

from nodeagent.config.schema import EvictionRequestConfig, Mode, RankingConfig, RateLimits, ReliefConfig, TokenBucket
from nodeagent.model import EvictionRequestOrder, Method, Outcome, OutcomeKind, Plan, PodView, RefusalCode, Signal
from nodeagent.policy import engine as policy
from nodeagent.policy import eviction_request, in_flight, outcomes, rate_limits
from nodeagent.policy.eviction_request import RequestEnd
from nodeagent.policy.in_flight import EvictionStage
from nodeagent.policy.state import PolicyState, initial, restored
from tests.support import nodes
from tests.support.nodes import GI, MI, NOW, hard, soft

ON = EvictionRequestConfig(enabled=True, deadline_s=60.0)
FAT = nodes.view("fat", 3 * GI)
CREATED = OutcomeKind.REQUESTED
_BUCKET = TokenBucket(1000, 0.0)
RELIEF_OF_ONE = ReliefConfig(max_victims=1)
LIMITS = RateLimits(node=_BUCKET, namespace=_BUCKET, owner=_BUCKET, signal=_BUCKET)
"""Never refilled, so that every token shows."""


class Node:
    """One node that goes through decisions."""

    def __init__(self, *thresholds: Any, section: EvictionRequestConfig = ON, **more: Any) -> None:
        self.config = nodes.config(
            *(thresholds or (soft(),)), eviction_request=section, rate_limits=LIMITS, mode=Mode.ENFORCE, **more
        )
        self.state: PolicyState = initial("t", now=NOW)
        self._last = 0.0

    def decide(
        self, at: float, *pods: PodView, available: int = 900 * MI, served: bool = True, gone: bool = False
    ) -> Plan:
        """A decision at second `at`, with no gap of samples since the last one."""
        if at - self._last > 10:
            self.decide(at - 10, available=available, served=served)
        self._last = at
        seen = nodes.snapshot(*(() if gone else pods or (FAT,)), at=NOW + at, available={Signal.MEMORY: available})
        seen = seen._replace(eviction_requests=served)
        plan, self.state = policy.decide(seen, self.state, now=NOW + at, config=self.config)
        return plan

    def answer(self, plan: Plan, kind: OutcomeKind, at: float, uid: str = "") -> None:
        outcome = Outcome(plan.id, uid or FAT.pod.uid, kind, "a text", NOW + at)
        self.state = outcomes.apply_outcome(self.state, outcome, now=NOW + at, config=self.config)

    def requested(self, kind: OutcomeKind = CREATED) -> Plan:
        """The first decision past the grace period, at second 1, whose request is answered at second 2."""
        self.decide(0)
        plan = self.decide(1)
        assert methods(plan) == [("fat", Method.REQUEST)]
        self.answer(plan, kind, 2)
        return plan

    @property
    def stages(self) -> list[EvictionStage]:
        return [entry.stage for entry in self.state.in_flight.entries]

    @property
    def orders(self) -> tuple[EvictionRequestOrder, ...]:
        return eviction_request.orders(self.state.eviction_requests)

    def end(self) -> RequestEnd | None:
        return self.state.eviction_requests.requests[FAT.pod.uid].end

    def tokens(self, at: float) -> set[int]:
        keys = rate_limits.bucket_keys(FAT.pod, Signal.MEMORY)
        limits = self.config.rate_limits
        return {rate_limits.level(self.state.rate_limits, key, now=NOW + at, limits=limits).tokens for key in keys}


def terminating(at: float, left_s: float = 30.0) -> PodView:
    wall = nodes.snapshot(at=NOW + at).wall_time
    return FAT._replace(pod=FAT.pod._replace(deletion_wall=wall + left_s, deletion_grace_s=left_s))


def methods(plan: Plan) -> list[tuple[str | None, Method]]:
    return [(victim.pod.name, victim.method) for victim in plan.victims]


def codes(plan: Plan) -> list[RefusalCode]:
    return [refusal.code for refusal in plan.refusals]


def texts(plan: Plan) -> str:
    return "; ".join(f"{note.subject}: {note.message}" for note in plan.notes)


@pytest.mark.parametrize(("section", "served"), [(EvictionRequestConfig(), True), (ON, False)])
def test_unless_it_is_configured_and_served_the_soft_tier_evicts(section: EvictionRequestConfig, served: bool) -> None:
    node = Node(section=section)
    node.decide(0, served=served)
    assert methods(node.decide(1, served=served)) == [("fat", Method.EVICT)]
    assert not node.orders


def test_the_request_takes_the_tokens_once_and_the_pod_counts_as_in_flight_until_the_deadline() -> None:
    node = Node()
    plan = node.requested()
    uid = FAT.pod.uid
    assert node.orders == (EvictionRequestOrder(plan.id, uid, "shop", withdraw=False),)
    for at in (3, 30, 61):
        waiting = node.decide(at)
        assert (methods(waiting), codes(waiting)) == ([], [RefusalCode.PENDING_RELEASE])
    assert node.stages == [EvictionStage.REQUESTED]
    assert node.tokens(61) == {999}


def test_after_the_deadline_the_eviction_api_is_used_with_the_same_token_and_the_request_is_withdrawn() -> None:
    node = Node()
    first = node.requested()
    assert methods(node.decide(61.9)) == []
    plan = node.decide(62.1)
    assert methods(plan) == [("fat", Method.EVICT)]
    assert texts(plan).endswith(
        f"eviction requests: EvictionRequest for shop/fat by {first.id}: the pod was not evicted in time; it is "
        "withdrawn, and the Eviction API is used"
    )
    assert node.tokens(62.1) == {999}
    assert [*node.orders] == [EvictionRequestOrder(first.id, FAT.pod.uid, "shop", withdraw=True)]
    node.answer(plan, OutcomeKind.BLOCKED_BY_PDB, 63)
    node.answer(first, OutcomeKind.REQUEST_WITHDRAWN, 63)
    assert not [*node.orders]
    again = next(methods(plan) for at in range(64, 700, 10) if methods(plan := node.decide(at)))
    assert again == [("fat", Method.EVICT)], "no second request for the same pod"


def test_a_failed_request_leads_to_the_eviction_api_at_once() -> None:
    node = Node()
    first = node.requested()
    node.answer(first, OutcomeKind.REQUEST_FAILED, 5)
    assert node.stages == []
    assert methods(node.decide(6)) == [("fat", Method.EVICT)]
    assert node.tokens(6) == {999}
    assert [order.withdraw for order in node.orders] == [True]


def test_a_refused_request_leads_to_the_eviction_api_at_once_and_nothing_is_withdrawn() -> None:
    node = Node()
    node.requested(OutcomeKind.NOT_REQUESTED)
    assert (node.stages, node.end(), node.orders) == ([], RequestEnd.REFUSED, ())
    assert node.tokens(2) == {1000}
    assert methods(node.decide(3)) == [("fat", Method.EVICT)]


@pytest.mark.parametrize("kind", [OutcomeKind.NOT_REQUESTED, OutcomeKind.REQUEST_UNCERTAIN])
def test_a_failing_request_never_backs_off_the_api_server(kind: OutcomeKind) -> None:
    node = Node()
    node.requested(kind)
    assert node.state.rate_limits.api is None
    assert not node.state.rate_limits.pods


def test_a_request_without_an_answer_may_exist_and_is_withdrawn() -> None:
    node = Node()
    first = node.requested(OutcomeKind.REQUEST_UNCERTAIN)
    assert node.stages == [EvictionStage.UNCERTAIN]
    waiting = node.decide(10)
    assert methods(waiting) == []
    later = 2 + FAT.pod.termination_grace_s + in_flight.SLACK_S
    assert methods(node.decide(later - 0.1)) == []
    plan = node.decide(later + 0.1)
    assert (methods(plan), node.end()) == ([("fat", Method.EVICT)], RequestEnd.TIMED_OUT)
    assert [order.plan_id for order in node.orders if order.withdraw] == [first.id]


def test_a_request_without_an_answer_that_is_found_later_has_its_whole_deadline() -> None:
    node = Node()
    first = node.requested(OutcomeKind.REQUEST_UNCERTAIN)
    node.answer(first, OutcomeKind.REQUESTED, 7)
    [entry] = node.state.in_flight.entries
    assert (entry.stage, entry.until) == (EvictionStage.REQUESTED, NOW + 67)


def test_when_the_pressure_ends_first_the_request_is_withdrawn_and_its_token_stays_spent() -> None:
    node = Node()
    first = node.requested()
    plan = node.decide(10, available=3 * GI)
    assert (methods(plan), node.stages, node.end()) == ([], [], RequestEnd.RECOVERED)
    assert "the pressure ended before the pod was evicted; it is withdrawn" in texts(plan)
    assert node.tokens(10) == {999}
    assert [order.withdraw for order in node.orders] == [True]
    node.answer(first, OutcomeKind.REQUEST_WITHDRAWN, 11)
    node.decide(12, available=3 * GI)
    assert not node.state.eviction_requests.requests
    node.decide(13)
    assert methods(node.decide(14)) == [("fat", Method.REQUEST)], "the next pressure may ask again"


def test_while_it_is_not_withdrawn_no_second_request_is_made() -> None:
    node = Node()
    node.requested()
    node.decide(10, available=3 * GI)
    node.decide(11)
    assert methods(node.decide(12)) == [("fat", Method.EVICT)]


def test_an_unknown_signal_does_not_end_the_request() -> None:
    node = Node()
    node.requested()
    seen = nodes.snapshot(FAT, at=NOW + 10, available={Signal.MEMORY: None})
    _, node.state = policy.decide(seen, node.state, now=NOW + 10, config=node.config)
    assert node.stages == [EvictionStage.REQUESTED]


def test_a_pod_that_others_evict_takes_the_usual_way_to_its_release() -> None:
    node = Node()
    node.requested()
    node.decide(20, terminating(20), available=800 * MI)
    [entry] = node.state.in_flight.entries
    assert (entry.stage, entry.until, entry.available) == (
        EvictionStage.ACCEPTED,
        NOW + 50 + in_flight.SLACK_S,
        800 * MI,
    )
    assert not node.state.eviction_requests.requests, "the API server removes the request with its pod"
    assert node.state.rate_limits.owners, "the owner of an evicted pod is backed off"
    node.decide(30, gone=True, available=3 * GI)
    plan = node.decide(31, gone=True, available=4 * GI)
    [report] = plan.relief_reports
    assert report.measured == 4 * GI - 800 * MI


def test_a_responder_may_give_a_longer_grace_than_the_agent_would() -> None:
    node = Node()
    node.requested()
    node.decide(20, terminating(20, left_s=600.0))
    [entry] = node.state.in_flight.entries
    assert entry.until == NOW + 620 + in_flight.SLACK_S
    node.decide(200, terminating(20, left_s=600.0))
    assert not node.state.in_flight.failures


def test_a_pod_that_is_gone_at_the_next_sample_was_evicted() -> None:
    node = Node()
    first = node.requested()
    [outcome] = node.decide(9, gone=True, available=4 * GI).outcomes
    assert (outcome.plan_id, outcome.kind) == (first.id, OutcomeKind.EVICTED_BY_OTHERS)
    assert (node.stages, dict(node.state.eviction_requests.requests)) == ([EvictionStage.GONE], {})
    [report] = node.decide(10, gone=True, available=4 * GI).relief_reports
    assert report.measured == 4 * GI - 900 * MI


@pytest.mark.parametrize("kind", [CREATED, OutcomeKind.REQUEST_UNCERTAIN])
def test_that_others_have_evicted_the_pod_is_one_outcome_which_changes_no_more(kind: OutcomeKind) -> None:
    node = Node()
    first = node.requested(kind)
    plan = node.decide(20, terminating(20))
    [outcome] = plan.outcomes
    assert (outcome.plan_id, outcome.pod_uid, outcome.kind, outcome.message) == (
        first.id,
        FAT.pod.uid,
        OutcomeKind.EVICTED_BY_OTHERS,
        "19s after the decision",
    )
    before = node.state
    node.state = outcomes.apply_outcome(before, outcome, now=NOW + 20, config=node.config)
    assert node.state == before
    for at in (21, 22):
        assert not node.decide(at, terminating(20)).outcomes
    assert not node.decide(23, gone=True).outcomes


def test_an_eviction_of_this_agent_gives_no_outcome_of_others() -> None:
    node = Node()
    node.decide(0, served=False)
    plan = node.decide(1, served=False)
    assert methods(plan) == [("fat", Method.EVICT)]
    assert not node.decide(5, terminating(5), served=False).outcomes


def test_in_the_order_of_the_kubelet_a_pod_that_has_finished_returns_no_token() -> None:
    """Its release counts in the sample that shows it gone, while the API server still lists it."""
    node = Node(ranking=RankingConfig(kubelet=True))
    node.requested()
    tokens = node.tokens(2)
    plan = node.decide(3, FAT._replace(usage=None, pod=FAT.pod._replace(phase="Failed")), available=4 * GI)
    assert [each.kind for each in plan.outcomes] == [OutcomeKind.EVICTED_BY_OTHERS]
    assert (node.stages, node.orders, node.tokens(3)) == ([], (), tokens)


@pytest.mark.parametrize("kind", [None, CREATED, OutcomeKind.REQUEST_UNCERTAIN])
def test_the_hard_tier_evicts_the_same_pod_at_once(kind: OutcomeKind | None) -> None:
    """Whether the request was answered or not."""
    node = Node(soft(), hard(value=512 * MI))
    node.decide(0)
    first = node.decide(1)
    if kind is not None:
        node.answer(first, kind, 2)
    plan = node.decide(3, available=100 * MI)
    assert methods(plan) == [("fat", Method.EVICT)]
    assert node.stages == [EvictionStage.PLANNED], "one eviction of one pod"
    assert node.end() is RequestEnd.OVERTAKEN
    assert [order.plan_id for order in node.orders if order.withdraw] == [first.id]
    node.answer(first, CREATED, 4)  # a late answer changes nothing
    assert node.stages == [EvictionStage.PLANNED]


def test_the_hard_tier_does_not_count_on_the_pod_of_a_request() -> None:
    fat, fatter = FAT, nodes.view("other", 2 * GI, priority=-10)
    node = Node(soft(), hard(value=512 * MI))
    node.requested()
    plan = node.decide(3, fat, fatter, available=100 * MI)
    assert methods(plan)[0] == ("other", Method.EVICT), "its own order, as if nothing were in flight"


def test_a_restart_goes_on_with_the_open_request() -> None:
    """kill -9 after the state was saved: before the request, and while it is open."""
    for answered in (False, True):
        node = Node()
        node.decide(0)
        first = node.decide(1)
        if answered:
            node.answer(first, CREATED, 2)
        decoded = msgspec.json.decode(msgspec.json.encode(node.state), type=PolicyState)
        assert decoded == node.state
        node.state = restored(decoded, instance="u")
        waiting = node.decide(5)
        assert methods(waiting) == []
        assert node.orders == (EvictionRequestOrder(first.id, FAT.pod.uid, "shop", withdraw=False),)
        plan = next(plan for at in range(6, 90) if methods(plan := node.decide(at)))
        assert methods(plan) == [("fat", Method.EVICT)]
        assert node.tokens(90) == {999}


def test_a_withdrawal_is_ordered_until_it_is_confirmed_also_after_a_restart() -> None:
    node = Node()
    first = node.requested()
    node.decide(10, available=3 * GI)
    node.state = restored(node.state, instance="u")
    for at in (11, 500, 3700):
        node.decide(at, available=3 * GI)
        assert [order.withdraw for order in node.orders] == [True]
        assert eviction_request.is_pending(node.state.eviction_requests)
    node.answer(first, OutcomeKind.REQUEST_WITHDRAWN, 3701)
    assert not eviction_request.is_pending(node.state.eviction_requests)


@pytest.mark.parametrize("kind", [CREATED, OutcomeKind.REQUEST_UNCERTAIN])
def test_a_pod_whose_cgroup_could_not_be_read_once_keeps_its_request(kind: OutcomeKind) -> None:
    node = Node()
    first = node.requested(kind)
    node.decide(3, FAT._replace(usage=None))
    assert methods(node.decide(4)) == []
    assert node.tokens(4) == {999}
    for at in (5, 15):
        node.decide(at, available=3 * GI)
    assert [(order.plan_id, order.withdraw) for order in node.orders] == [(first.id, True)]


def test_the_request_of_a_pod_that_has_finished_ends_with_its_cgroup() -> None:
    """As by the kubelet's own eviction, which leaves the object."""
    node = Node()
    node.requested()
    node.decide(3, FAT._replace(usage=None, pod=FAT.pod._replace(phase="Failed")))
    assert node.stages == [EvictionStage.GONE]
    assert node.orders == ()


def test_the_request_of_a_pod_that_is_gone_is_not_withdrawn() -> None:
    node = Node()
    node.requested()
    node.decide(10, available=3 * GI)
    node.decide(11, gone=True, available=3 * GI)
    assert node.orders == ()


def test_switching_it_off_withdraws_and_evicts() -> None:
    node = Node()
    node.requested()
    node.config = node.config._replace(eviction_request=EvictionRequestConfig())
    assert methods(node.decide(3)) == [("fat", Method.EVICT)]
    assert [order.withdraw for order in node.orders] == [True]


@pytest.mark.parametrize("kind", [OutcomeKind.DRY_RUN, OutcomeKind.RECHECK_REFUSED])
def test_nothing_is_followed_where_nothing_was_sent(kind: OutcomeKind) -> None:
    node = Node()
    plan = node.requested(kind)
    assert plan.victims[0].method is Method.REQUEST
    assert (node.orders, dict(node.state.eviction_requests.requests)) == ((), {})


def test_an_outcome_of_another_decision_changes_nothing() -> None:
    node = Node()
    plan = node.requested()
    before = node.state
    for kind in (OutcomeKind.REQUEST_FAILED, OutcomeKind.REQUEST_WITHDRAWN, OutcomeKind.NOT_REQUESTED):
        node.answer(plan._replace(id="t-99"), kind, 5)
    assert node.state == before


# --- tokens ----------------------------------------------------------------------------------------------------------

ONE = TokenBucket(1, 0.0)


def with_one_token(*thresholds: Any) -> Node:
    """A node whose only token is that of the request."""
    node = Node(*thresholds)
    node.config = node.config._replace(rate_limits=RateLimits(node=ONE, namespace=ONE, owner=ONE, signal=ONE))
    return node


def test_a_request_that_fails_after_its_answer_was_lost_spends_no_second_token() -> None:
    """The eviction that follows takes it again, as after the deadline."""
    node = with_one_token()
    first = node.requested(OutcomeKind.REQUEST_UNCERTAIN)
    node.answer(first, OutcomeKind.REQUEST_FAILED, 7)
    assert methods(node.decide(8)) == [("fat", Method.EVICT)]
    assert node.tokens(8) == {0}


@pytest.mark.parametrize("kind", [None, CREATED, OutcomeKind.REQUEST_UNCERTAIN])
def test_the_hard_tier_evicts_the_same_pod_with_the_token_of_the_request(kind: OutcomeKind | None) -> None:
    node = with_one_token(soft(), hard(value=512 * MI))
    node.decide(0)
    first = node.decide(1)
    if kind is not None:
        node.answer(first, kind, 2)
    assert methods(node.decide(3, available=100 * MI)) == [("fat", Method.EVICT)]
    assert (node.tokens(3), node.end()) == ({0}, RequestEnd.OVERTAKEN)
    node.answer(first, OutcomeKind.REQUEST_WITHDRAWN, 4)
    node.decide(5, available=100 * MI)
    assert node.tokens(5) == {0}


def test_the_hard_tier_takes_the_only_token_from_the_request_for_another_pod() -> None:
    other = nodes.view("other", 2 * GI, priority=-10)
    node = with_one_token(soft(), hard(value=512 * MI))
    first = node.requested()
    plan = node.decide(3, FAT, other, available=100 * MI)
    assert methods(plan) == [("other", Method.EVICT)]
    assert (node.end(), node.stages) == (RequestEnd.OVERTAKEN, [EvictionStage.PLANNED])
    assert [order.plan_id for order in node.orders if order.withdraw] == [first.id]
    assert "another eviction" in texts(plan)


def test_the_request_of_another_pod_stays_open_while_there_are_tokens() -> None:
    other = nodes.view("other", 2 * GI, priority=-10)
    node = Node(soft(), hard(value=512 * MI), relief=RELIEF_OF_ONE)
    node.requested()
    plan = node.decide(3, FAT, other, available=100 * MI)
    assert methods(plan) == [("other", Method.EVICT)]
    assert (node.end(), node.tokens(3)) == (None, {998, 999}), "of the node, the namespace and the signal; of the owner"


def test_a_hard_tier_that_finds_no_victim_changes_no_token_and_no_request() -> None:
    node = with_one_token(soft(), hard(value=512 * MI))
    node.requested()
    guarded = FAT._replace(pod=FAT.pod._replace(priority=2_000_001_000))
    plan = node.decide(3, guarded, available=100 * MI)
    assert methods(plan) == []
    assert (node.tokens(3), node.end()) == ({0}, None)
