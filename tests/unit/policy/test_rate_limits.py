"""Token buckets, back-off, and that no sequence of samples, crashes and restarts exceeds a rate limit."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from nodeagent.config.schema import Config, ProtectionConfig, RateLimits, TokenBucket
from nodeagent.model import Owner, Refusal, RefusalCode, Signal
from nodeagent.policy import backoffs, rate_limits
from nodeagent.policy.rate_limits import RateLimitState
from tests.support.nodes import pod

SMALL = RateLimits(
    node=TokenBucket(3, 60.0),
    namespace=TokenBucket(2, 30.0),
    owner=TokenBucket(1, 12.0),
    signal=TokenBucket(2, 60.0),
    last_resort=TokenBucket(1, 12.0),
    hook=TokenBucket(1, 12.0),
    own_limit=TokenBucket(1, 12.0),
    resize=TokenBucket(1, 12.0),
)
KEYS = rate_limits.bucket_keys(pod("web"), Signal.MEMORY)


def taken(state: RateLimitState, *, now: float) -> RateLimitState:
    after = rate_limits.take_tokens(state, KEYS, now=now, limits=SMALL)
    assert isinstance(after, RateLimitState), after
    return after


def test_an_eviction_takes_from_node_namespace_owner_and_signal() -> None:
    assert KEYS == ("node", "namespace/shop", "owner/rs-shop-web", "signal/memory.available")


def test_a_bucket_that_is_empty_refuses_with_numbers_and_takes_from_no_other() -> None:
    state = taken(RateLimitState(), now=0.0)
    refusal = rate_limits.take_tokens(state, KEYS, now=60.0, limits=SMALL)
    assert refusal == Refusal(
        RefusalCode.RATE_LIMIT_OWNER,
        "rate limit of owner rs-shop-web reached: burst 1, 12 per hour, next in 240s",
    )
    assert rate_limits.level(state, "node", now=0.0, limits=SMALL).tokens == 2


def test_a_token_grows_back_after_exactly_its_interval() -> None:
    state = taken(RateLimitState(), now=0.0)
    assert rate_limits.limit_reached(state, "owner/rs-shop-web", now=299.999, limits=SMALL) is not None
    assert rate_limits.limit_reached(state, "owner/rs-shop-web", now=300.0, limits=SMALL) is None


def test_refilling_in_a_million_small_steps_gives_what_one_big_step_gives() -> None:
    bucket = TokenBucket(1000, 3600.0)
    small = rate_limits.BucketLevel(0, 0.0)
    for step in range(1, 100_001):
        small = rate_limits.refilled(small, bucket, now=step * 0.001)
    assert small.tokens == pytest.approx(
        rate_limits.refilled(rate_limits.BucketLevel(0, 0.0), bucket, now=100.0).tokens, abs=1
    )
    assert small.tokens >= 99


def test_a_token_that_is_given_back_restores_the_bucket_and_never_overfills_it() -> None:
    state = taken(RateLimitState(), now=0.0)
    assert (
        rate_limits.level(rate_limits.return_tokens(state, KEYS, now=1.0, limits=SMALL), "node", now=1.0, limits=SMALL)[
            0
        ]
        == 3
    )
    assert (
        rate_limits.level(rate_limits.return_tokens(state, KEYS, now=1e6, limits=SMALL), "node", now=1e6, limits=SMALL)[
            0
        ]
        == 3
    )


def test_a_clock_that_ran_backwards_counts_as_spent_and_grows_again_from_there() -> None:
    state = backoffs.pruned(taken(RateLimitState(), now=1e6), now=100.0, config=Config(rate_limits=SMALL))
    assert rate_limits.level(state, "node", now=100.0, limits=SMALL).tokens == 0
    assert rate_limits.level(state, "node", now=160.0, limits=SMALL).tokens == 1


def test_after_a_lost_state_every_bucket_starts_empty_also_those_never_seen() -> None:
    state = RateLimitState(spent_at=1000.0)
    assert rate_limits.limit_reached(state, "namespace/new", now=1000.0, limits=SMALL) is not None
    assert rate_limits.limit_reached(state, "namespace/new", now=1120.0, limits=SMALL) is None
    holds = backoffs.active_limits(state, now=1000.0, limits=SMALL)
    refusal = backoffs.limit_on(holds, pod("web"))
    assert refusal is not None
    assert refusal.code == "rate-limit-owner"


def test_a_lost_state_is_forgotten_when_every_bucket_would_be_full_again() -> None:
    assert backoffs.pruned(RateLimitState(spent_at=0.0), now=299.0, config=Config(rate_limits=SMALL)).spent_at == 0.0
    assert backoffs.pruned(RateLimitState(spent_at=0.0), now=300.0, config=Config(rate_limits=SMALL)).spent_at is None


def test_a_bucket_without_refill_stays_empty() -> None:
    never = SMALL._replace(node=TokenBucket(3, 0.0))
    state = RateLimitState()
    for _ in range(3):
        after = rate_limits.take_tokens(state, ("node",), now=0.0, limits=never)
        assert isinstance(after, RateLimitState)
        state = after
    assert rate_limits.limit_reached(state, "node", now=1e9, limits=never) is not None


def test_a_smaller_rate_limit_after_a_reload_applies_at_once() -> None:
    state = taken(RateLimitState(), now=0.0)
    smaller = SMALL._replace(node=TokenBucket(1, 60.0))
    assert rate_limits.level(state, "node", now=0.0, limits=smaller).tokens == 1


def test_an_owner_backs_off_for_one_two_four_minutes_up_to_the_maximum() -> None:
    limits = SMALL._replace(owner_backoff_s=60.0, owner_backoff_max_s=300.0)
    state, now, waits = RateLimitState(), 0.0, []
    for n in range(5):
        state = backoffs.back_off_owner(state, "rs", f"a-{n}", now=now, limits=limits)
        waits.append(state.owners["rs"].until - now)
        now = state.owners["rs"].until
        assert backoffs.remaining(state.owners["rs"], now=now) is None
    for wait_s, shortest_s in zip(waits, [60.0, 120.0, 240.0, 300.0, 300.0], strict=True):
        assert shortest_s <= wait_s <= (1 + backoffs.JITTER) * shortest_s


def test_an_owner_with_pods_on_many_nodes_does_not_continue_on_all_of_them_at_once() -> None:
    plans = [f"node-{n}-1" for n in range(50)]
    states = [backoffs.back_off_owner(RateLimitState(), "rs", plan, now=0.0, limits=SMALL) for plan in plans]
    ends = sorted(state.owners["rs"].until for state in states)
    assert ends[-1] - ends[0] > 0.8 * backoffs.JITTER * SMALL.owner_backoff_s
    assert max(ends.count(end) for end in ends) <= 3


def test_an_owner_that_had_peace_for_long_begins_at_one_minute_again() -> None:
    first = backoffs.back_off_owner(RateLimitState(), "rs", "a-1", now=0.0, limits=SMALL)
    later = backoffs.back_off_owner(first, "rs", "a-1", now=3601.0, limits=SMALL)
    assert later.owners["rs"].until == 3601.0 + first.owners["rs"].until


def test_a_back_off_reports_its_remaining_time() -> None:
    state = backoffs.back_off_owner(RateLimitState(), "rs", "a-1", now=0.0, limits=SMALL)
    wait_s = state.owners["rs"].until
    assert backoffs.remaining(state.owners["rs"], now=20.0) == Refusal(
        RefusalCode.OWNER_BACKOFF, f"owner back-off: 1 eviction, next in {wait_s:.0f}s ({wait_s - 20.0:.0f}s left)"
    )


def test_the_servers_retry_after_is_obeyed_and_bounded() -> None:
    def wait(seconds: float) -> float:
        state = backoffs.back_off_pod(
            RateLimitState(), "u", now=0.0, code=RefusalCode.TIMED_OUT, why="w", retry_after_s=seconds
        )
        return state.pods["u"].until

    assert wait(17.0) == 17.0
    assert wait(1e9) == backoffs.POD_BACKOFF_MAX_S
    assert 10.0 <= wait(-3.0) <= 12.5
    assert 10.0 <= wait(float("nan")) <= 12.5


def test_back_off_for_the_api_doubles_to_a_limit_and_ends_with_an_answer() -> None:
    state, now, waits = RateLimitState(), 0.0, []
    for _ in range(8):
        state = backoffs.back_off_api(state, "plan", now=now, code=RefusalCode.UNREACHABLE, why="w", retry_after_s=None)
        assert state.api is not None
        waits.append(state.api.until - now)
        now = state.api.until
    assert waits[:5] == sorted(waits[:5])
    assert 1.0 <= waits[0] <= 1.25
    assert waits[-1] <= backoffs.API_BACKOFF_MAX_S * 1.25
    assert backoffs.api_answered(state).api is None


def test_requests_that_fail_side_by_side_count_once() -> None:
    state = backoffs.back_off_api(
        RateLimitState(), "p", now=0.0, code=RefusalCode.TIMED_OUT, why="w", retry_after_s=None
    )
    assert backoffs.back_off_api(state, "p", now=0.1, code=RefusalCode.TIMED_OUT, why="w", retry_after_s=None) == state


def test_waits_differ_between_subjects_so_that_a_fleet_does_not_return_at_once() -> None:
    waits = {
        backoffs.back_off_api(
            RateLimitState(), f"node-{n}", now=0.0, code=RefusalCode.TIMED_OUT, why="w", retry_after_s=None
        ).api
        for n in range(20)
    }
    assert len({wait.until for wait in waits if wait is not None}) > 10


@settings(deadline=None)
@given(st.floats(allow_nan=True, allow_infinity=True), st.floats(0, 1e6))
def test_no_clock_makes_tokens_out_of_nothing(since: float, now: float) -> None:
    level = rate_limits.refilled(rate_limits.BucketLevel(1, since), SMALL.node, now=now)
    assert level.tokens <= SMALL.node.burst
    if not now >= since:
        assert level.tokens == 0


def test_a_namespace_has_the_bucket_of_its_own() -> None:
    limits = SMALL._replace(namespaces={"shop": TokenBucket(3, 30.0), "batch": TokenBucket(1, 30.0)})
    for namespace, burst in (("shop", 3), ("batch", 1), ("other", 2)):
        state, key = RateLimitState(), f"namespace/{namespace}"
        for _ in range(burst):
            taken = rate_limits.take_tokens(state, (key,), now=100.0, limits=limits)
            assert isinstance(taken, RateLimitState)
            state = taken
        refusal = rate_limits.take_tokens(state, (key,), now=100.0, limits=limits)
        assert isinstance(refusal, Refusal)
        assert f"burst {burst}" in refusal.message


def test_after_a_lost_state_a_namespace_waits_for_the_bucket_of_its_own() -> None:
    limits = SMALL._replace(namespaces={"slow": TokenBucket(2, 1.0), "fast": TokenBucket(2, 3600.0)})
    lost = rate_limits.spent(RateLimitState(), now=100.0)
    known = {
        name: backoffs.limit_on(backoffs.active_limits(lost, now=later, limits=limits), pod("a", namespace=name))
        for later in (100.0 + 3600.0 / SMALL.owner.per_hour,)
        for name in ("slow", "fast", "other")
    }
    assert known["slow"] is not None
    assert known["slow"].code == "rate-limit-namespace"
    assert (known["fast"], known["other"]) == (None, None)
    pruned = backoffs.pruned(lost, now=100.0 + 3600.0, config=Config(rate_limits=limits))
    assert pruned.spent_at is not None, "the bucket of `slow` is not full yet"


def test_failures_of_the_api_server_that_are_long_over_do_not_count() -> None:
    failed = RateLimitState()
    for number in range(12):
        failed = backoffs.back_off_api(
            failed, "p", now=number * 60.0, code=RefusalCode.TIMED_OUT, why="x", retry_after_s=None
        )
    assert failed.api is not None
    assert failed.api.until - failed.api.last >= backoffs.API_BACKOFF_MAX_S
    assert backoffs.pruned(failed, now=failed.api.last + 60.0, config=Config()).api == failed.api
    for now in (failed.api.last + 60.1, failed.api.last - 1.0):
        again = backoffs.back_off_api(
            backoffs.pruned(failed, now=now, config=Config()),
            "p",
            now=now,
            code=RefusalCode.TIMED_OUT,
            why="x",
            retry_after_s=None,
        )
        assert again.api is not None
        assert again.api.until - now <= backoffs.API_BACKOFF_S * (1 + backoffs.JITTER)


@pytest.mark.parametrize(("wait_s", "kept_s"), [(0.0, 310.0), (3600.0, 3600.0)])
def test_a_short_back_off_of_an_owner_forgets_no_eviction_that_others_ask_for(wait_s: float, kept_s: float) -> None:
    limits = SMALL._replace(owner_backoff_s=1.0, owner_backoff_max_s=1.0)
    config = Config(rate_limits=limits, protection=ProtectionConfig(replacement_wait_s=wait_s))
    evicted = backoffs.back_off_owner(RateLimitState(), "rs", "p", now=100.0, limits=limits)
    assert backoffs.pruned(evicted, now=100.0 + kept_s, config=config).owners == evicted.owners
    assert backoffs.pruned(evicted, now=100.1 + kept_s, config=config).owners == {}


class NeverExceeded(RuleBasedStateMachine):
    """A process that samples, evicts, is answered, crashes and restarts, against the arithmetic of token buckets.

    The state is persisted before each eviction; what happened after the last write is lost in a crash.
    """

    @initialize(spent=st.booleans())
    def start(self, spent: bool) -> None:
        self.now = 1000.0
        self.started = self.now
        self.state = RateLimitState(spent_at=self.now if spent else None)
        self.disk = msgspec.json.encode(self.state)
        self.evicted: dict[str, list[float]] = {}
        self.spent = spent

    @rule(seconds=st.sampled_from([0.0, 0.02, 1.0, 59.9, 60.0, 119.0, 300.0, 4000.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        namespace=st.sampled_from(["a", "b"]),
        owner=st.sampled_from(["x", "y", "z"]),
        signal=st.sampled_from([Signal.MEMORY, Signal.PID]),
        answer=st.sampled_from(["accepted", "blocked", "crash before", "crash after"]),
    )
    def evict(self, namespace: str, owner: str, signal: Signal, answer: str) -> None:
        self.state = backoffs.pruned(self.state, now=self.now, config=Config(rate_limits=SMALL))
        victim = pod("p", namespace=namespace, owner=Owner("ReplicaSet", owner, owner))
        holds = backoffs.active_limits(self.state, now=self.now, limits=SMALL)
        keys = rate_limits.bucket_keys(victim, signal)
        after = rate_limits.take_tokens(self.state, keys, now=self.now, limits=SMALL)
        if isinstance(after, Refusal):
            return
        held = backoffs.limit_on(holds, victim)
        assert held is None, "what `holds` refuses, `take` must not allow"
        self.disk = msgspec.json.encode(after)
        self.state = after
        if answer == "crash before":
            self.crash()
            return
        if answer == "blocked":
            self.state = rate_limits.return_tokens(self.state, keys, now=self.now, limits=SMALL)
            return
        for key in keys:
            self.evicted.setdefault(key, []).append(self.now)
        if answer == "crash after":
            self.crash()

    @rule()
    def crash(self) -> None:
        self.state = msgspec.json.decode(self.disk, type=RateLimitState)

    @invariant()
    def no_window_has_more_than_burst_and_refill(self) -> None:
        for key, times in self.evicted.items():
            bucket = rate_limits.bucket_of(key, SMALL)
            interval_s = 3600.0 / bucket.per_hour
            for first in range(len(times)):
                for last in range(first, len(times)):
                    allowed = bucket.burst + int((times[last] - times[first]) / interval_s + 1e-9)
                    assert last - first + 1 <= allowed, (key, times[first : last + 1])
            if self.spent:
                assert len(times) <= int((times[-1] - self.started) / interval_s + 1e-9)


NeverExceeded.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestNeverExceeded = NeverExceeded.TestCase
