"""Which of the candidates are evicted now, with their tokens taken.

Promises:

1. A limit never passes the sentence on: a pod that it holds is selected like any other, dropped after that, and no
   other pod is evicted in its place.
2. While a larger pod is out of reach that would have been selected, smaller ones are evicted in its place only if they
   alone cure the deficit, not while much is left, and that once in `AGAIN_S`: a pod that grows out of reach never takes
   others with it in series, and a node that stands still is helped.
3. A pod that the selection would take anyway is evicted whatever is out of reach beside it.

Theory of operation. The least harmful set that covers the deficit is selected from the candidates and the pods that
only a limit holds. If a larger pod is out of reach for the moment, the selection is made once more with it: a pod whose
rank is not known stands first, and one whose usage is not known covers everything. If it is selected, the others that
take its place must cover the deficit and what the signal loses meanwhile to what is out of reach. Pods in reach whose
growth is most of that fall, and covers the deficit, take no other pod's place. Tokens are taken one victim after the
other; a victim whose bucket is empty is dropped like any pod that a limit holds.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from nodeagent.config.schema import Config
from nodeagent.model import SIGNAL_TABLE, Pod, PodSource, RankedPod, Refusal, RefusalCode, Tier, units
from nodeagent.policy import in_flight, rate_limits, relief, thresholds, usage_growth
from nodeagent.policy import trend as trends
from nodeagent.policy.candidates import RankedPods
from nodeagent.policy.out_of_reach import OutOfReach, Replacement

HORIZON_S: Final = 60.0
"""For how long evictions in the place of a larger pod must last, at the rate at which the signal falls now: a kubelet
restarts and an API server fails over in that time. Longer leaves a node without help that others could give, shorter
lets a slow leak take them one by one."""
AGAIN_S: Final = 600.0
"""How soon others are evicted again in the place of a pod that is out of reach. The rate is measured over seconds, and
a pod that grows in bursts looks calm between them: this bounds what it may cost, whatever the rate says."""
PATIENCE_S: Final = 20.0
"""How long after its threshold was met a signal waits for the pod that is out of reach while half of the threshold is
left: most such reasons (a usage that cannot be read, a finished pod that still holds its memory) pass in seconds."""
PATIENCE_SHARE: Final = 0.25
"""Of the time until nothing is left: no longer than that is waited."""
IN_ITS_PLACE: Final = "no other pod is evicted in its place"


class Selection(NamedTuple):
    """The victims."""

    pods: tuple[RankedPod, ...]
    budgets: rate_limits.RateLimitState
    refusals: tuple[Refusal, ...]
    """Why nobody, or not more: limits that were hit, one of each kind, and the pod that is out of reach."""


class Terms(NamedTuple):
    """What the victims are chosen by."""

    deficit: int
    max_pods: int
    """Most victims."""
    first_only: bool
    """In the kubelet's order, whatever a pod would free."""
    keys: Callable[[Pod], tuple[str, ...]]
    """The buckets that evicting a pod takes a token from."""
    falls: int | None
    """What the signal loses within `HORIZON_S`; None when that is not known."""
    grows: usage_growth.GrowthRate
    """How fast a pod grows for certain: what the signal loses to a victim it loses no longer."""
    stands_still: bool
    """The signal has been used up for `AGAIN_S`: whatever grew has had its time. What is used up falls no further, so
    its rate says nothing about who would take what others give: where only a pod of unknown usage is out of reach,
    which may be tiny, others are evicted then."""
    patient: bool
    """It is too early to evict others in the place of a larger pod."""
    plan_id: str
    now: float
    config: Config


def falls_by(history: trends.History, *, available: int | None, value: int | None) -> int | None:
    """What a signal loses within `HORIZON_S` at its present rate. None: it is not known, or the signal is used up.

    The larger fall of two estimates: right after a release the trend shows the step up alone.
    """
    trend, between = trends.estimate(history), trends.between_neighbours(history)
    if trend is None or between is None or available is None or value is None or thresholds.used_up(available, value):
        return None
    return int(max(0.0, -trend.rate_per_s, -between) * HORIZON_S)


def waits_for_larger(
    falls: int | None, met_at: float | None, *, available: int | None, value: int | None, now: float
) -> bool:
    """Whether the larger pod that is out of reach is waited for: briefly, and while half of the threshold is left."""
    if falls is None or met_at is None or available is None or value is None or available * 2 < value:
        return False
    left_s = available * HORIZON_S / falls if falls else float("inf")
    return now - met_at < min(PATIENCE_S, left_s * PATIENCE_SHARE)


def terms_of(
    deficit: int,
    *,
    signal: str,
    tier: Tier,
    kill: bool,
    shortened: int,
    budgets: rate_limits.RateLimitState,
    falls: int | None,
    grows: usage_growth.GrowthRate,
    stands_still: bool,
    patient: bool,
    plan_id: str,
    now: float,
    config: Config,
) -> Terms:
    """At most `relief.maxVictims` in the hard tier, one in the soft tier and in the kubelet's order; of kills as many
    as there are tokens."""
    room = config.relief.max_victims - shortened
    if kill:
        tokens = rate_limits.level(budgets, rate_limits.LAST_RESORT, now=now, limits=config.rate_limits).tokens
        keys = (rate_limits.LAST_RESORT,)
        return Terms(
            deficit, min(room, tokens), False, lambda _: keys, falls, grows, stands_still, patient, plan_id, now, config
        )
    kubelet = config.ranking.kubelet
    if kubelet or tier is Tier.SOFT:
        room = min(room, 1)
    return Terms(
        deficit,
        room,
        kubelet,
        lambda pod: rate_limits.bucket_keys(pod, signal),
        falls,
        grows,
        stands_still,
        patient,
        plan_id,
        now,
        config,
    )


def select_victims(
    lineup: RankedPods,
    candidates: Sequence[RankedPod],
    beyond: Sequence[OutOfReach],
    terms: Terms,
    *,
    budgets: rate_limits.RateLimitState,
) -> Selection:
    """The victims among the candidates. A candidate whose bucket is empty gets that refusal in the lineup."""
    if terms.max_pods <= 0:
        return Selection((), budgets, ())
    waiting = [each for each in beyond if each.replacement is Replacement.NEVER]
    pool = _in_order(candidates, waiting)
    selected = _select(pool, terms.deficit, terms)
    largest = max((_amount(pod) for pod in selected), default=0)
    larger = [each for each in beyond if each.replacement is Replacement.IF_SUFFICIENT and each.amount > largest]
    if selected and larger:
        everybody = _select(_in_order(pool, larger, deficit=terms.deficit), terms.deficit, terms)
        uids = {pod.view.pod.uid for pod in everybody}
        replaced = [each for each in larger if each.pod.view.pod.uid in uids]
        if replaced:
            return _in_the_place_of(replaced, lineup, pool, everybody, waiting, terms, budgets=budgets)
    return _take(lineup, selected, waiting, terms, budgets=budgets)


def _take(
    lineup: RankedPods,
    selected: Sequence[RankedPod],
    waiting: Sequence[OutOfReach],
    terms: Terms,
    *,
    budgets: rate_limits.RateLimitState,
) -> Selection:
    """Those of the selected that no limit holds, with their tokens taken."""
    held = {each.pod.view.pod.uid: each.refusal for each in waiting}
    refusals: dict[str, Refusal] = {}
    chosen: list[RankedPod] = []
    for pod in selected:
        refusal = held.get(pod.view.pod.uid)
        if refusal is None:
            taken = rate_limits.take_tokens(
                budgets, terms.keys(pod.view.pod), now=terms.now, limits=terms.config.rate_limits
            )
            if not isinstance(taken, Refusal):
                budgets = taken
                chosen.append(pod)
                continue
            if taken.code in rate_limits.FOR_ALL:
                refusals.setdefault(taken.code, taken)
                break
            refusal = taken
            lineup.set_refusals(pod, (refusal,))
        nobody = Refusal(refusal.code, f"{pod.view.pod.key}: {refusal.message}; {IN_ITS_PLACE}")
        refusals.setdefault(refusal.code, nobody)
    return Selection(tuple(chosen), budgets, tuple(refusals.values()))


def _in_the_place_of(
    replaced: Sequence[OutOfReach],
    lineup: RankedPods,
    pool: Sequence[RankedPod],
    everybody: Sequence[RankedPod],
    waiting: Sequence[OutOfReach],
    terms: Terms,
    *,
    budgets: rate_limits.RateLimitState,
) -> Selection:
    """The victims while larger pods are out of reach that would be among `everybody`: others if they alone cure, else
    those of `everybody` that are in reach."""
    facts = SIGNAL_TABLE[lineup.signal]
    earlier_s = rate_limits.in_place_since(budgets, facts.resource, now=terms.now, for_s=AGAIN_S)
    if any(each.soon_listed for each in replaced):
        why = "the API server is about to list it"
    elif terms.falls is None and (not terms.stands_still or any(each.amount_known for each in replaced)):
        why = "how fast the rest is used up is not known"
    else:
        falls = terms.falls or 0
        selected = _select(pool, terms.deficit + falls, terms, worth=lambda pod: _amount(pod) + _grows_by(pod, terms))
        others = _take(lineup, selected, waiting, terms, budgets=budgets)
        grown = sum(_grows_by(pod, terms) for pod in others.pods)
        growers = grown > 0 and grown >= max(terms.deficit, falls - grown)
        theirs = sum(_grows_by(pod, terms) for pod in pool) if growers else grown
        needed = terms.deficit + max(0, falls - theirs)
        freed = sum(_amount(pod) for pod in others.pods)
        if freed >= needed and growers:
            growing = [pod for pod in selected if _grows_by(pod, terms) > 0]
            alone = sum(_amount(pod) for pod in growing) >= terms.deficit
            return _take(lineup, growing, waiting, terms, budgets=budgets) if alone else others
        if freed >= needed and earlier_s is None and not terms.patient:
            noted = rate_limits.note_in_place(
                others.budgets, facts.resource, terms.plan_id, len(others.pods), now=terms.now
            )
            return others._replace(budgets=noted)
        if freed < needed:
            why = (
                f"others that may be evicted would free {units.format_amount(freed, facts.unit)} of the "
                f"{units.format_amount(needed, facts.unit)} that are missing now and within {HORIZON_S:.0f}s"
            )
        elif earlier_s is not None:
            why = f"others were evicted in such a place {earlier_s:.0f}s ago"
        else:
            why = "it may come into reach while much is left"
    out = max(replaced, key=lambda each: each.amount)
    uids = {each.pod.view.pod.uid for each in replaced}
    anyway = [pod for pod in everybody if pod.view.pod.uid not in uids]
    taken = _take(lineup, anyway, waiting, terms, budgets=budgets)
    refusal = _out_of_reach(out, lineup, f"; {why}: {IN_ITS_PLACE}")
    return taken._replace(refusals=(refusal, *taken.refusals))


def nobody_larger(
    lineup: RankedPods, candidates: Sequence[RankedPod], beyond: Sequence[OutOfReach]
) -> tuple[Refusal, ...]:
    """Where the candidates do not suffice: the pod that would, if a larger one is out of reach."""
    largest = max(beyond, key=lambda each: each.amount, default=None)
    if largest is None or largest.amount <= max((_amount(pod) for pod in candidates), default=0):
        return ()
    return (_out_of_reach(largest, lineup),)


def _out_of_reach(out: OutOfReach, lineup: RankedPods, why: str = "") -> Refusal:
    holds = "holds" if out.amount_known else "may hold up to"
    amount = units.format_amount(out.amount, SIGNAL_TABLE[lineup.signal].unit)
    message = f"{lineup.signal.value}: {out.pod.view.pod.key} {holds} {amount} and is out of reach"
    return Refusal(RefusalCode.OUT_OF_REACH, f"{message} ({out.refusal.code}: {out.refusal.message}){why}")


def _nobody_instead(pod: RankedPod, refusal: Refusal) -> Refusal:
    return Refusal(refusal.code, f"{pod.view.pod.key}: {refusal.message}; {IN_ITS_PLACE}")


def _amount(pod: RankedPod) -> int:
    return pod.relief or 0


def _in_order(
    pods: Sequence[RankedPod], beyond: Sequence[OutOfReach], *, deficit: int | None = None
) -> list[RankedPod]:
    """All of them in eviction order. A pod whose rank rests on what is not known stands first, and one whose usage is
    not known counts as holding all of the `deficit`."""
    first: list[RankedPod] = []
    rest: list[RankedPod] = list(pods)
    for each in beyond:
        pod = each.pod if each.amount_known else each.pod._replace(relief=deficit)
        sure = each.amount_known and pod.view.pod.source is PodSource.API
        (rest if sure or each.replacement is Replacement.NEVER else first).append(pod)
    if beyond:
        rest.sort(key=lambda pod: pod.rank)
    return [*first, *rest]


def _grows_by(pod: RankedPod, terms: Terms) -> int:
    """What the pod takes of the signal within `HORIZON_S`, if it goes on."""
    usage = pod.view.usage
    return int(terms.grows(usage, pod.usage) * HORIZON_S) if usage is not None else 0


def _select(
    pods: Sequence[RankedPod], deficit: int, terms: Terms, *, worth: Callable[[RankedPod], int] = _amount
) -> list[RankedPod]:
    """What would be evicted of these, were there no limits. `worth` is what a pod adds to cover the deficit."""
    if terms.first_only:
        return list(pods[: terms.max_pods])
    picked = relief.least_harmful([worth(pod) for pod in pods], deficit, max_pods=terms.max_pods)
    return [pods[index] for index in picked]


def select_to_shorten(
    lineup: RankedPods, pending: in_flight.PendingRelease, deficit: int, *, minimum: int, tier: Tier, config: Config
) -> tuple[RankedPod, ...]:
    """Hard tier: terminating pods whose long grace holds what is missing, in eviction order. It costs no token: they
    are going anyway, and no pod more is lost."""
    if tier is not Tier.HARD or not config.escalation.shorten_terminating or not pending.long_grace:
        return ()
    slow = {view.pod.uid for view in pending.long_grace}
    chosen: list[RankedPod] = []
    for pod in list(lineup.pods):
        if deficit <= 0 or len(chosen) >= config.relief.max_victims:
            break
        only_terminating = [refusal.code for refusal in pod.refusals] == ["terminating"]
        if pod.view.pod.uid in slow and only_terminating and (pod.relief or 0) >= minimum:
            chosen.append(lineup.set_refusals(pod, ()))
            deficit -= pod.relief or 0
    return tuple(chosen)
