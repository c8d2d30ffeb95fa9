"""Select the victims of a decision among the candidates, and take their tokens.

Promises:

1. A limit never passes an eviction on: a pod that a rate limit or a back-off excludes is selected like any other and
   dropped afterwards, and no other pod is evicted in its place.
2. While a larger pod that would have been selected is out of reach, smaller pods are evicted in its place only if they
   alone clear the deficit, not while much is left, and once in `REPLACEMENT_INTERVAL_S`. A pod that grows out of reach
   therefore never causes a series of evictions, and a node whose signal is used up still gets help.
3. A pod that the selection contains anyway is evicted, whatever is out of reach beside it.
4. Nor does a protected pod that uses more than it requests and grows: while it causes the loss, others are evicted only
   if what they free lasts for `LOSS_HORIZON_S`.

Theory of operation. The least harmful set that covers the deficit is selected from the candidates and the pods that
only a limit excludes; pods that would soon use up what it frees come first (`lasting_relief`). If a larger pod is out
of reach for the moment, the selection is repeated with it: a pod of unreliable rank comes first, and one of unknown
usage covers everything. If the selection contains it, its replacements must cover the deficit and what the signal is
expected to lose meanwhile. Pods in reach that cause most of that loss replace no other pod. Tokens are taken victim by
victim; a victim whose bucket is empty is dropped like any pod that a limit excludes.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from nodeagent.config.schema import Config
from nodeagent.model import (
    SIGNAL_TABLE,
    Pod,
    PodSource,
    RankedPod,
    Refusal,
    RefusalCode,
    Tier,
    units,
)
from nodeagent.policy import (
    backoffs,
    lasting_relief,
    out_of_reach,
    pending_release,
    rate_limits,
    relief,
    thresholds,
    trend,
    usage_growth,
)
from nodeagent.policy.candidates import RankedPods
from nodeagent.policy.out_of_reach import OutOfReach, Replacement

LOSS_HORIZON_S: Final = 60.0
"""How long evictions in the place of a larger pod must last, at the present rate of loss: a kubelet restarts and an API
server fails over in that time. A longer time leaves a node without help that other pods could give; a shorter one lets
a slow leak take them one by one."""
REPLACEMENT_INTERVAL_S: Final = 600.0
"""The least time between two replacements of a pod that is out of reach. The rate of loss is measured over seconds, and
a pod that grows in bursts is calm between them: this bounds what it may cost, whatever the rate is."""
LARGER_WAIT_S: Final = 20.0
"""How long after the crossing a larger pod is waited for while half of the threshold is left: most such reasons (an
unreadable usage, a finished pod that still holds its memory) pass in seconds."""
LARGER_WAIT_SHARE: Final = 0.25
"""The wait for a larger pod is at most this share of the time until nothing is left."""
NO_REPLACEMENT: Final = "no other pod is evicted in its place"


class Selection(NamedTuple):
    """The victims."""

    pods: tuple[RankedPod, ...]
    limit_state: rate_limits.RateLimitState
    refusals: tuple[Refusal, ...]
    """Why there are no victims, or not more: limits that were reached, one of each kind, and a pod out of reach."""


class Shortening(NamedTuple):
    """The terminating pods whose grace is to be shortened."""

    pods: tuple[RankedPod, ...] = ()
    waiting: tuple[RankedPod, ...] = ()
    """Those that back off after a refusal: no other pod is evicted in their place."""
    refusals: tuple[Refusal, ...] = ()
    """Why they wait."""

    @property
    def relief(self) -> int:
        """What all of them free."""
        return sum(_relief(pod) for pod in (*self.pods, *self.waiting))

    @property
    def uids(self) -> frozenset[str]:
        return frozenset(pod.view.pod.uid for pod in (*self.pods, *self.waiting))


class SelectionTerms(NamedTuple):
    """What the victims are selected by."""

    deficit: int
    max_pods: int
    first_only: bool
    """In the kubelet's order, whatever a pod would free."""
    bucket_keys: Callable[[Pod], tuple[str, ...]]
    """The buckets from which the eviction of a pod takes a token."""
    expected_loss: int | None
    """What the signal loses within `LOSS_HORIZON_S`; None if unknown."""
    growth_rate: usage_growth.GrowthRate
    """How fast a pod certainly grows: the signal no longer loses what a victim would have taken."""
    measured_growth: usage_growth.GrowthRate
    """The same, and on disks from one walk to the next."""
    reserve: int
    """What the threshold keeps free."""
    used_up: bool
    """The signal has been used up for `REPLACEMENT_INTERVAL_S`. A signal that is used up falls no further, so its rate
    is unknown; where only pods of unknown usage are out of reach, which may be tiny, other pods are evicted then."""
    wait_for_larger: bool
    """It is too early to evict other pods in the place of a larger one."""
    plan_id: str
    now: float
    config: Config


def expected_loss(history: trend.History, *, available: int | None, value: int | None) -> int | None:
    """What a signal loses within `LOSS_HORIZON_S` at its present rate. None: unknown, or the signal is used up.

    It is the larger loss of two estimates, because right after a release the trend contains the step up alone.
    """
    fitted, latest = trend.estimate(history), trend.between_neighbours(history)
    if fitted is None or latest is None or available is None or value is None or thresholds.used_up(available, value):
        return None
    return int(max(0.0, -fitted.rate_per_s, -latest) * LOSS_HORIZON_S)


def should_wait_for_larger(
    loss: int | None, met_at: float | None, *, available: int | None, value: int | None, now: float
) -> bool:
    """True if a larger pod out of reach is still waited for: briefly, and only while half of the threshold is left."""
    if loss is None or met_at is None or available is None or value is None or available * 2 < value:
        return False
    left_s = available * LOSS_HORIZON_S / loss if loss else float("inf")
    return now - met_at < min(LARGER_WAIT_S, left_s * LARGER_WAIT_SHARE)


def selection_terms(
    deficit: int,
    *,
    signal: str,
    tier: Tier,
    kill: bool,
    shortened: int,
    limit_state: rate_limits.RateLimitState,
    loss: int | None,
    growth_rate: usage_growth.GrowthRate,
    measured_growth: usage_growth.GrowthRate,
    reserve: int,
    used_up: bool,
    wait_for_larger: bool,
    plan_id: str,
    now: float,
    config: Config,
) -> SelectionTerms:
    """At most `relief.maxVictims` pods in the hard tier, one in the soft tier and in the kubelet's order; kills also at
    most as many as there are tokens."""
    kubelet = config.ranking.kubelet and not kill
    max_pods = config.relief.max_victims - shortened
    if kill:
        tokens = rate_limits.level(limit_state, rate_limits.LAST_RESORT, now=now, limits=config.rate_limits).tokens
        max_pods = min(max_pods, tokens)
    elif kubelet or tier is Tier.SOFT:
        max_pods = min(max_pods, 1)

    def bucket_keys(pod: Pod) -> tuple[str, ...]:
        return (rate_limits.LAST_RESORT,) if kill else rate_limits.bucket_keys(pod, signal)

    return SelectionTerms(
        deficit=deficit,
        max_pods=max_pods,
        first_only=kubelet,
        bucket_keys=bucket_keys,
        expected_loss=loss,
        growth_rate=growth_rate,
        measured_growth=measured_growth,
        reserve=reserve,
        used_up=used_up,
        wait_for_larger=wait_for_larger,
        plan_id=plan_id,
        now=now,
        config=config,
    )


def select_victims(
    ranked_pods: RankedPods,
    candidates: Sequence[RankedPod],
    out_of_reach: Sequence[OutOfReach],
    terms: SelectionTerms,
    *,
    limit_state: rate_limits.RateLimitState,
) -> Selection:
    """The victims among the candidates. A candidate whose bucket is empty gets that refusal in `ranked_pods`."""
    if terms.max_pods <= 0:
        return Selection((), limit_state, ())
    limited = [each for each in out_of_reach if each.replacement is Replacement.NEVER]
    pool = _in_order(candidates, limited)
    first = _select(pool, terms.deficit, terms)
    selected = _without_short_lived(first, pool, ranked_pods, terms)
    protected = _protected_cause(selected, ranked_pods, terms)
    if protected:
        growth = sum(_growth_within_horizon(pod, terms) for pod, _ in protected)
        if sum(_relief(pod) for pod in selected) < terms.deficit + growth:
            return Selection((), limit_state, (_protected_cause_refusal(*protected[0], ranked_pods, selected, terms),))
    largest = max((_relief(pod) for pod in selected), default=0)
    replaceable = [each for each in out_of_reach if each.replacement is Replacement.IF_SUFFICIENT]
    larger = [each for each in replaceable if each.amount > largest]
    if selected and larger:
        with_larger = _select(_in_order(pool, larger, deficit=terms.deficit), terms.deficit, terms)
        uids = {pod.view.pod.uid for pod in with_larger}
        replaced = [each for each in larger if each.pod.view.pod.uid in uids]
        if replaced:
            return _without_larger(replaced, ranked_pods, pool, with_larger, limited, terms, limit_state=limit_state)
    _refuse_spared(ranked_pods, first, selected)
    return _take_tokens(ranked_pods, selected, limited, terms, limit_state=limit_state)


def _without_short_lived(
    selected: list[RankedPod], pool: Sequence[RankedPod], ranked_pods: RankedPods, terms: SelectionTerms
) -> list[RankedPod]:
    """The selected pods, or those that would use up what these free."""
    if terms.first_only:
        return selected
    growing = lasting_relief.growing_instead(
        selected,
        pool,
        deficit=terms.deficit,
        reserve=terms.reserve,
        signal=ranked_pods.signal,
        order=ranked_pods.order,
        growth_per_s=lambda pod: terms.measured_growth(pod.view.usage, pod.usage),
    )
    return _select(growing, terms.deficit, terms) if growing else selected


def _protected_cause(
    selected: Sequence[RankedPod], ranked_pods: RankedPods, terms: SelectionTerms
) -> list[tuple[RankedPod, Refusal]]:
    """The protected pods whose growth is at least half of the loss of the signal, the fastest first, each with its
    protection; none if the selected pods grow at least half as fast. A pod within its request is entitled to what it
    takes."""
    if terms.first_only or not terms.expected_loss:
        return []
    growing = [
        (pod, protection)
        for pod in ranked_pods.pods
        if (protection := out_of_reach.lasting_protection(pod)) is not None
        and lasting_relief.over_request(pod)
        and _growth_within_horizon(pod, terms)
    ]
    growth = sum(_growth_within_horizon(pod, terms) for pod, _ in growing)
    if growth * 2 < terms.expected_loss or sum(_growth_within_horizon(pod, terms) for pod in selected) * 2 >= growth:
        return []
    return sorted(growing, key=lambda each: -_growth_within_horizon(each[0], terms))


def _protected_cause_refusal(
    fastest: RankedPod,
    protection: Refusal,
    ranked_pods: RankedPods,
    selected: Sequence[RankedPod],
    terms: SelectionTerms,
) -> Refusal:
    unit = SIGNAL_TABLE[ranked_pods.signal].unit
    per_s = units.format_amount(int(_growth_within_horizon(fastest, terms) / LOSS_HORIZON_S), unit)
    freed = units.format_amount(sum(_relief(pod) for pod in selected), unit)
    return Refusal(
        RefusalCode.OUT_OF_REACH,
        f"{ranked_pods.signal.value}: {fastest.view.pod.key} grows by {per_s} a second and is out of reach "
        f"({protection.code}: {protection.message}); the {freed} that others would free last for less than "
        f"{LOSS_HORIZON_S:.0f}s: {NO_REPLACEMENT}",
    )


def _refuse_spared(ranked_pods: RankedPods, first: Sequence[RankedPod], instead: Sequence[RankedPod]) -> None:
    """Give those of the `first` selection a refusal that are spared because the others are evicted `instead`."""
    uids = {pod.view.pod.uid for pod in instead}
    names = ", ".join(pod.view.pod.key for pod in instead)
    for pod in first:
        if pod.view.pod.uid not in uids and not pod.refusals:
            refusal = Refusal(RefusalCode.SHORT_LIVED_RELIEF, f"what it frees would be used up by {names}")
            ranked_pods.set_refusals(pod, (refusal,))


def _take_tokens(
    ranked_pods: RankedPods,
    selected: Sequence[RankedPod],
    limited: Sequence[OutOfReach],
    terms: SelectionTerms,
    *,
    limit_state: rate_limits.RateLimitState,
) -> Selection:
    """The selected pods that no limit excludes, with their tokens taken."""
    limit_refusals = {each.pod.view.pod.uid: each.refusal for each in limited}
    refusals: dict[RefusalCode, Refusal] = {}
    victims: list[RankedPod] = []
    for pod in selected:
        refusal = limit_refusals.get(pod.view.pod.uid)
        if refusal is None:
            taken = rate_limits.take_tokens(
                limit_state, terms.bucket_keys(pod.view.pod), now=terms.now, limits=terms.config.rate_limits
            )
            if not isinstance(taken, Refusal):
                limit_state = taken
                victims.append(pod)
                continue
            if taken.code in rate_limits.FOR_ALL:
                refusals.setdefault(taken.code, taken)
                break
            refusal = taken
            ranked_pods.set_refusals(pod, (refusal,))
        refusals.setdefault(refusal.code, _not_replaced(pod, refusal))
    return Selection(tuple(victims), limit_state, tuple(refusals.values()))


def _not_replaced(pod: RankedPod, refusal: Refusal) -> Refusal:
    return Refusal(refusal.code, f"{pod.view.pod.key}: {refusal.message}; {NO_REPLACEMENT}")


def _without_larger(
    replaced: Sequence[OutOfReach],
    ranked_pods: RankedPods,
    pool: Sequence[RankedPod],
    with_larger: Sequence[RankedPod],
    limited: Sequence[OutOfReach],
    terms: SelectionTerms,
    *,
    limit_state: rate_limits.RateLimitState,
) -> Selection:
    """The victims while the larger pods `replaced` are out of reach: replacements if they are allowed, else the pods of
    `with_larger` that are in reach."""
    replacement = _replacements(replaced, ranked_pods, pool, limited, terms, limit_state=limit_state)
    if isinstance(replacement, Selection):
        return replacement
    largest = max(replaced, key=lambda each: each.amount)
    uids = {each.pod.view.pod.uid for each in replaced}
    anyway = [pod for pod in with_larger if pod.view.pod.uid not in uids]
    taken = _take_tokens(ranked_pods, anyway, limited, terms, limit_state=limit_state)
    refusal = _out_of_reach_refusal(largest, ranked_pods, f"; {replacement}: {NO_REPLACEMENT}")
    return taken._replace(refusals=(refusal, *taken.refusals))


def _replacements(
    replaced: Sequence[OutOfReach],
    ranked_pods: RankedPods,
    pool: Sequence[RankedPod],
    limited: Sequence[OutOfReach],
    terms: SelectionTerms,
    *,
    limit_state: rate_limits.RateLimitState,
) -> Selection | str:
    """The pods that are evicted in the place of the larger ones, or why there are none."""
    facts = SIGNAL_TABLE[ranked_pods.signal]
    if any(each.soon_listed for each in replaced):
        return "the API server is about to list it"
    if terms.expected_loss is None and (not terms.used_up or any(each.amount_known for each in replaced)):
        return "the rate at which the rest is used up is unknown"
    loss = terms.expected_loss or 0
    selected = _select(
        pool, terms.deficit + loss, terms, worth=lambda pod: _relief(pod) + _growth_within_horizon(pod, terms)
    )
    victims = _take_tokens(ranked_pods, selected, limited, terms, limit_state=limit_state)
    freed = sum(_relief(pod) for pod in victims.pods)
    growth = sum(_growth_within_horizon(pod, terms) for pod in victims.pods)
    cause_the_loss = growth > 0 and growth >= max(terms.deficit, loss - growth)
    if cause_the_loss:
        needed = terms.deficit + max(0, loss - sum(_growth_within_horizon(pod, terms) for pod in pool))
    else:
        needed = terms.deficit + max(0, loss - growth)
    if freed < needed:
        return (
            f"other candidates would free {units.format_amount(freed, facts.unit)} of the "
            f"{units.format_amount(needed, facts.unit)} missing now and within {LOSS_HORIZON_S:.0f}s"
        )
    if cause_the_loss:
        growing = [pod for pod in selected if _growth_within_horizon(pod, terms) > 0]
        if sum(_relief(pod) for pod in growing) >= terms.deficit:
            return _take_tokens(ranked_pods, growing, limited, terms, limit_state=limit_state)
        return victims
    earlier_s = backoffs.replaced_ago_s(limit_state, facts.resource, now=terms.now, for_s=REPLACEMENT_INTERVAL_S)
    if earlier_s is not None:
        return f"pods were evicted in such a place {earlier_s:.0f}s ago"
    if terms.wait_for_larger:
        return "it may come into reach while much is left"
    noted = backoffs.record_replacement(
        victims.limit_state, facts.resource, terms.plan_id, len(victims.pods), now=terms.now
    )
    return victims._replace(limit_state=noted)


def larger_out_of_reach(
    ranked_pods: RankedPods, candidates: Sequence[RankedPod], out_of_reach: Sequence[OutOfReach]
) -> tuple[Refusal, ...]:
    """For a decision whose candidates do not suffice: the refusal of a larger pod that is out of reach, if any."""
    largest = max(out_of_reach, key=lambda each: each.amount, default=None)
    if largest is None or largest.amount <= max((_relief(pod) for pod in candidates), default=0):
        return ()
    return (_out_of_reach_refusal(largest, ranked_pods),)


def _out_of_reach_refusal(out: OutOfReach, ranked_pods: RankedPods, consequence: str = "") -> Refusal:
    verb = "holds" if out.amount_known else "may hold up to"
    amount = units.format_amount(out.amount, SIGNAL_TABLE[ranked_pods.signal].unit)
    message = f"{ranked_pods.signal.value}: {out.pod.view.pod.key} {verb} {amount} and is out of reach"
    return Refusal(RefusalCode.OUT_OF_REACH, f"{message} ({out.refusal.code}: {out.refusal.message}){consequence}")


def _relief(pod: RankedPod) -> int:
    return pod.relief or 0


def _in_order(
    pods: Sequence[RankedPod], out_of_reach: Sequence[OutOfReach], *, deficit: int | None = None
) -> list[RankedPod]:
    """All of them in eviction order. A pod of unreliable rank comes first; one of unknown usage counts as holding all
    of the `deficit`."""
    first: list[RankedPod] = []
    rest: list[RankedPod] = list(pods)
    for each in out_of_reach:
        pod = each.pod if each.amount_known else each.pod._replace(relief=deficit)
        reliable = each.amount_known and pod.view.pod.source is PodSource.API
        (rest if reliable or each.replacement is Replacement.NEVER else first).append(pod)
    if out_of_reach:
        rest.sort(key=lambda pod: pod.rank)
    return [*first, *rest]


def _growth_within_horizon(pod: RankedPod, terms: SelectionTerms) -> int:
    """What the pod takes of the signal within `LOSS_HORIZON_S` at its present rate."""
    usage = pod.view.usage
    return int(terms.growth_rate(usage, pod.usage) * LOSS_HORIZON_S) if usage is not None else 0


def _select(
    pods: Sequence[RankedPod], deficit: int, terms: SelectionTerms, *, worth: Callable[[RankedPod], int] = _relief
) -> list[RankedPod]:
    """The victims without any limit. `worth` is what a pod adds to cover the deficit."""
    if terms.first_only:
        return list(pods[: terms.max_pods])
    indices = relief.least_harmful_set([worth(pod) for pod in pods], deficit, max_pods=terms.max_pods)
    return [pods[index] for index in indices]


def select_to_shorten(
    ranked_pods: RankedPods,
    pending: pending_release.PendingRelease,
    deficit: int,
    *,
    minimum: int,
    tier: Tier,
    limit_state: rate_limits.RateLimitState,
    now: float,
    config: Config,
) -> Shortening:
    """Hard tier: terminating pods with a long grace that hold the deficit, in eviction order. It costs no token,
    because they terminate anyway."""
    if tier is not Tier.HARD or not config.escalation.shorten_terminating or not pending.long_grace:
        return Shortening()
    long_grace = {view.pod.uid for view in pending.long_grace}
    selected: list[RankedPod] = []
    waiting: list[RankedPod] = []
    refusals: list[Refusal] = []
    for pod in list(ranked_pods.pods):
        if deficit <= 0 or len(selected) >= config.relief.max_victims:
            break
        only_terminating = [refusal.code for refusal in pod.refusals] == [RefusalCode.TERMINATING]
        if pod.view.pod.uid not in long_grace or not only_terminating or _relief(pod) < minimum:
            continue
        backoff = limit_state.pods.get(pod.view.pod.uid)
        refusal = backoffs.remaining(backoff, now=now)
        if backoff is None or refusal is None:
            selected.append(ranked_pods.set_refusals(pod, ()))
        elif out_of_reach.is_stuck(backoff):
            continue
        else:
            waiting.append(ranked_pods.set_refusals(pod, (refusal,)))
            refusals.append(_not_replaced(pod, refusal))
        deficit -= _relief(pod)
    return Shortening(tuple(selected), tuple(waiting), tuple(refusals))
