"""Which of the candidates go now, with their tokens taken.

Theory of operation. Candidates are the pods of a lineup without a refusal. Back-offs and empty buckets take more of
them out; of the rest the least harmful set that covers the deficit is taken one by one, because each one that goes may
empty the bucket of its namespace or owner, and the set is then completed from whoever is left.
"""

from collections.abc import Sequence

from nodeagent.config.schema import Config, OnBlocked
from nodeagent.lean import NamedTuple
from nodeagent.model import RankedPod, Refusal, Tier
from nodeagent.policy import budget, ledger, relief
from nodeagent.policy.lineup import Lineup


class Choice(NamedTuple):
    """Who goes."""

    pods: tuple[RankedPod, ...]
    budgets: budget.BudgetState
    refusals: tuple[Refusal, ...]
    """Limits that were hit, one of each kind."""


def choose(
    lineup: Lineup,
    candidates: Sequence[RankedPod],
    deficit: int,
    *,
    tier: Tier,
    room: int,
    budgets: budget.BudgetState,
    book: ledger.LedgerState,
    now: float,
    config: Config,
) -> Choice:
    """The victims among the candidates: at most `room` in the hard tier, one in the soft tier and in kubelet mode.

    A candidate that a limit holds back gets that refusal in the lineup.
    """
    refusals: dict[str, Refusal] = {}
    allowed = _allowed(lineup, candidates, budgets, book, refusals, tier=tier, now=now, config=config)
    kubelet = config.ranking.kubelet
    room = min(room, 1) if kubelet or tier is Tier.SOFT else room
    chosen: list[RankedPod] = []
    left = deficit
    while allowed and left > 0 and room > 0:
        pod = allowed[0] if kubelet else _next(allowed, left, room)
        keys = budget.keys_of(pod.view.pod, lineup.signal)
        taken = budget.take(budgets, keys, now=now, budgets=config.budgets)
        if isinstance(taken, Refusal):  # the node's or the signal's: the others were asked for in `_allowed`
            refusals.setdefault(taken.code, taken)
            break
        budgets = taken
        chosen.append(pod)
        left -= pod.relief or 0
        room -= 1
        allowed.remove(pod)
        if room > 0 and left > 0:
            allowed = _allowed(lineup, allowed, budgets, book, refusals, tier=tier, now=now, config=config)
    for pod in chosen[:-1]:  # a later pick, forced by a limit, may have made an earlier one superfluous
        if (pod.relief or 0) + left <= 0:
            left += pod.relief or 0
            chosen.remove(pod)
            keys = budget.keys_of(pod.view.pod, lineup.signal)
            budgets = budget.give_back(budgets, keys, now=now, budgets=config.budgets)
    return Choice(tuple(chosen), budgets, tuple(refusals.values()))


def _next(allowed: Sequence[RankedPod], deficit: int, room: int) -> RankedPod:
    """The first of the least harmful set. The rest of that set is the least harmful one for what is left."""
    picked = relief.least_harmful([pod.relief or 0 for pod in allowed], deficit, most=room)
    return allowed[picked[0]]


def _allowed(
    lineup: Lineup,
    candidates: Sequence[RankedPod],
    budgets: budget.BudgetState,
    book: ledger.LedgerState,
    refusals: dict[str, Refusal],
    *,
    tier: Tier,
    now: float,
    config: Config,
) -> list[RankedPod]:
    """Those candidates that no back-off and no empty bucket holds."""
    insists = tier is Tier.HARD and config.escalation.on_blocked is OnBlocked.DELETE
    ignored = budget.BLOCKED if insists else frozenset()
    holds = budget.holds(budgets, now=now, budgets=config.budgets, ignored=ignored)
    under_way = {entry.pod_uid: ledger.under_way(entry) for entry in book.entries}
    if not under_way and not budget.holds_any(holds):
        return list(candidates)
    allowed = []
    for pod in candidates:
        refusal = under_way.get(pod.view.pod.uid) or budget.held_by(holds, pod.view.pod)
        if refusal is None:
            allowed.append(pod)
        else:
            lineup.pods[pod.rank - 1] = pod._replace(refusals=(refusal,))
            refusals.setdefault(refusal.code, refusal)
    return allowed


def to_shorten(
    lineup: Lineup, pending: ledger.Pending, deficit: int, *, minimum: int, tier: Tier, config: Config
) -> tuple[RankedPod, ...]:
    """Hard tier: terminating pods whose long grace holds what is missing, in eviction order. It costs no token: they
    are going anyway, and no pod more is lost."""
    if tier is not Tier.HARD or not config.escalation.shorten_terminating or not pending.slow:
        return ()
    slow = {view.pod.uid for view in pending.slow}
    chosen: list[RankedPod] = []
    for pod in lineup.pods:
        if deficit <= 0 or len(chosen) >= config.relief.max_victims:
            break
        only_terminating = [refusal.code for refusal in pod.refusals] == ["terminating"]
        if pod.view.pod.uid in slow and only_terminating and (pod.relief or 0) >= minimum:
            chosen.append(pod._replace(refusals=()))
            lineup.pods[pod.rank - 1] = chosen[-1]
            deficit -= pod.relief or 0
    return tuple(chosen)
