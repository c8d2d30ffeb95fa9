"""One snapshot, one decision: what is starved, who would go, who goes now, and why nobody else.

Promises:

1. Pure: the same snapshot, state, instant and configuration give the same plan, in the daemon, in `check`, in replay
   and in the tests. A `Memo` changes the speed, never the result.
2. What is not known is never a reason to evict: no believable sample, no current view of the pods, no usage, no victim.
3. Tokens are taken and evictions written down in the returned state. Persist it, then act: then no crash spends twice.
4. Whatever is not done has a `Refusal`, at the pod or at the plan, with the numbers.

Theory of operation. `decide` reads as ARCHITECTURE's list: judge the thresholds, update the conditions, bring the
ledger up to date, then serve the most urgent threshold that is due. To serve is: reckon the deficit, rank the pods,
take out the protected, stop if it would be futile, choose the least harmful set, take its tokens. If nobody can be
evicted for one resource the next one that is due gets its turn. `recheck` asks again right before a request is sent;
`settle` takes in how the requests ended.

With `ranking.order: kubelet` the first unprotected pod goes, one in each decision, whatever it would free, as in the
kubelet's sync loop (KUBELET-CONTRACT 3); budgets, back-off and pending release still hold.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from nodeagent.config.schema import Config, OnBlocked, OnFutile, RankingKey
from nodeagent.model import (
    SIGNAL_TABLE,
    Deficit,
    Method,
    NodeSnapshot,
    Note,
    Observation,
    Outcome,
    OutcomeKind,
    Plan,
    Pod,
    PodSource,
    PodView,
    RankedPod,
    Refusal,
    ReliefReport,
    Signal,
    SignalVerdict,
    Threshold,
    ThresholdVerdict,
    Tier,
    Unit,
    Victim,
)
from nodeagent.policy import (
    amounts,
    budget,
    conditions,
    ledger,
    messages,
    protection,
    ranking,
    relief,
    requests,
    thresholds,
)
from nodeagent.policy.figures import ABSURD, figure, sound
from nodeagent.policy.ledger import Entry, Stage
from nodeagent.policy.state import PolicyState

SHORTEST_GRACE_S: Final = 1.0
"""The kubelet's own minimum; 0 would remove the object while its containers still run (KUBELET-CONTRACT 14)."""
FUTURE_S: Final = 1.0
"""How far ahead of `now` a time stamp may lie before it is not believed: two reads of a clock in different order."""

BLOCKED: Final = frozenset({"blocked-by-budget", "budget-conflict"})
"""Codes of pods whose PodDisruptionBudget refused: in the hard tier `onBlocked: delete` overrides them."""


class Memo:
    """Answers that depend only on a pod's object and the configuration, kept while both are the same objects.

    Hand the same one to every decision of a process: requests and standing protections are then reckoned once for each
    version of a pod, not in every decision.
    """

    __slots__ = ("_config", "_known")

    def __init__(self) -> None:
        self._config: Config | None = None
        self._known: dict[str, _Standing] = {}

    def standing(self, pods: Sequence[PodView], *, config: Config) -> "list[_Standing]":
        """One for each of `pods`, in their order."""
        if self._config is not config:
            self._config, self._known = config, {}
        known, kept = self._known, {}
        answers = []
        for view in pods:
            pod = view.pod
            answer = known.get(pod.uid)
            if answer is None or answer.pod is not pod:
                answer = _standing_of(view, config)
            kept[pod.uid] = answer
            answers.append(answer)
        self._known = kept
        return answers


class _Standing(NamedTuple):
    """What is known of a pod whatever it uses."""

    pod: Pod
    refusals: tuple[Refusal, ...]
    memory_request: int | None
    disk_request: int | None
    bad_request: bool
    """A request that cannot be: nothing may be concluded from comparing usage with it."""


def _standing_of(view: PodView, config: Config) -> _Standing:
    memory = requests.ranking_request(view, signal=Signal.MEMORY)
    disk = requests.ranking_request(view, signal=Signal.NODEFS)
    sound_memory, sound_disk = sound(memory), sound(disk)
    return _Standing(
        view.pod,
        protection.standing(view.pod, config.protection),
        sound_memory,
        sound_disk,
        sound_memory != memory or sound_disk != disk,
    )


# --- the decision ----------------------------------------------------------------------------------------------------


def decide(
    snapshot: NodeSnapshot,
    state: PolicyState,
    *,
    now: float,
    config: Config,
    memo: Memo | None = None,
    always_rank: bool = True,
) -> tuple[Plan, PolicyState]:
    """The plan for this snapshot, and the state for the next decision, to be persisted before the plan is acted upon.

    `now` is CLOCK_BOOTTIME. `always_rank` False leaves `Plan.ranking` empty while no threshold is met, for a loop that
    only wants to know whether anything is wrong.

    Raises:
        ValueError: `now` is not a finite number; the caller's clock is broken and nothing can be decided.
    """
    if not math.isfinite(now):
        raise ValueError(f"the time of a decision must be finite, not {now!r}")
    # 1-3: signals, thresholds, since when
    judged, threshold_state = thresholds.judge(
        snapshot, state.thresholds, now=now, config=config, thresholds=thresholds.effective(config, snapshot.layout)
    )
    # 4: conditions and their damping
    published, condition_state = conditions.update(judged, state.conditions, now=now, config=config)
    # what earlier decisions have become
    seen = ledger.observe(state.ledger, snapshot, now=now, config=config)
    budgets = budget.pruned(state.budgets, now=now, budgets=config.budgets)
    for entry in seen.confirmed:
        budgets = budget.spare_owner(budgets, entry.owner, now=now, budgets=config.budgets)
    case = _Case(
        plan_id=f"{state.instance}-{state.sequence + 1}",
        snapshot=snapshot,
        now=now,
        config=config,
        ledger=seen.state,
        growth=state.growth,
        memo=memo if memo is not None else Memo(),
        nobody=_nobody(snapshot, now=now, config=config),
        blocked=frozenset([uid for uid, wait in budgets.pods.items() if wait.code in BLOCKED]),
    )
    # 5-7: deficit, ranking, protections, budgets, relief
    served, refusals, budgets = _serve_most_urgent(case, judged, budgets, always_rank=always_rank)
    plan = Plan(
        id=case.plan_id,
        made_at=now,
        snapshot_taken_at=snapshot.taken_at,
        signals=judged,
        conditions=published,
        acting_on=served.verdict,
        deficit=served.deficit,
        ranking=served.ranking,
        ranked_for=served.signal,
        victims=served.victims,
        refusals=refusals,
        notes=tuple([_relief_note(report) for report in seen.reports]),
        rank_order=served.order,
        relief_reports=seen.reports,
    )
    after = PolicyState(
        instance=state.instance,
        sequence=state.sequence + 1,
        thresholds=threshold_state,
        conditions=condition_state,
        ledger=ledger.add(seen.state, served.entries),
        budgets=budgets,
        growth=ranking.remember(state.growth, snapshot),
    )
    return plan, after


class _Case(NamedTuple):
    """One decision's facts, for the functions below."""

    plan_id: str
    snapshot: NodeSnapshot
    now: float
    config: Config
    ledger: ledger.LedgerState
    growth: ranking.GrowthState
    memo: Memo
    nobody: Refusal | None
    """Why no pod at all may be evicted in this decision."""
    blocked: frozenset[str]
    """UIDs of pods whose PodDisruptionBudget refused lately."""


class _Served(NamedTuple):
    """What serving one signal came to."""

    signal: Signal
    order: tuple[str, ...] = ()
    ranking: tuple[RankedPod, ...] = ()
    verdict: ThresholdVerdict | None = None
    deficit: Deficit | None = None
    victims: tuple[Victim, ...] = ()
    entries: tuple[Entry, ...] = ()
    refusals: tuple[Refusal, ...] = ()


def _serve_most_urgent(
    case: _Case, judged: Sequence[SignalVerdict], budgets: budget.BudgetState, *, always_rank: bool
) -> tuple[_Served, tuple[Refusal, ...], budget.BudgetState]:
    """Serve the due thresholds in order of urgency until one of them has victims."""
    refusals: tuple[Refusal, ...] = ()
    first: _Served | None = None
    for verdict in _due(judged, kubelet=case.config.ranking.kubelet):
        served, budgets = _serve(case, verdict, budgets)
        refusals = (*refusals, *served.refusals)
        if served.victims:
            return served, refusals, budgets
        first = first or served
    if first is not None:
        return first, refusals, budgets
    met = [verdict for verdict in judged if any(each.met for each in verdict.thresholds)]
    signal = min((each.signal for each in met), key=lambda each: SIGNAL_TABLE[each].urgency, default=Signal.MEMORY)
    if met or always_rank:
        order, rows = _rank(case, signal, tier=Tier.SOFT)
        return _Served(signal, order, tuple([row.placed(rank) for rank, row in enumerate(rows, 1)])), (), budgets
    return _Served(signal), (), budgets


def _due(judged: Sequence[SignalVerdict], *, kubelet: bool) -> list[ThresholdVerdict]:
    """For each signal the due threshold that asks for most, the most urgent signal first.

    Hard before soft, then memory, disk, inodes, PIDs; with the kubelet's order memory before all else.
    """
    due = []
    for position, verdict in enumerate(judged):
        mine = [each for each in verdict.thresholds if each.due and each.value is not None]
        if mine:
            most = max(mine, key=lambda each: (each.threshold.hard, each.value or 0))
            urgency = SIGNAL_TABLE[verdict.signal].urgency
            due.append(((kubelet and urgency != 0, not most.threshold.hard, urgency, position), most))
    due.sort(key=lambda row: row[0])
    return [most for _, most in due]


def _nobody(snapshot: NodeSnapshot, *, now: float, config: Config) -> Refusal | None:
    """Why this snapshot is no ground for evicting anybody, or None."""
    age_s = now - snapshot.taken_at
    if not -FUTURE_S <= age_s <= config.sampling.stale_after_s:
        return Refusal(
            "snapshot-stale", f"the snapshot is {age_s:.1f}s old, at most {config.sampling.stale_after_s:g}s"
        )
    if snapshot.pods_synced_at is None:
        return Refusal("pods-never-synced", "the API has not told which pods run here")
    age_s = now - snapshot.pods_synced_at
    if not -FUTURE_S <= age_s <= config.cluster.pods_max_age_s:
        limit_s = config.cluster.pods_max_age_s
        return Refusal("pods-stale", f"the API's view of the pods is {age_s:.1f}s old, at most {limit_s:g}s")
    return None


# --- serving one threshold -------------------------------------------------------------------------------------------


def _serve(case: _Case, verdict: ThresholdVerdict, budgets: budget.BudgetState) -> tuple[_Served, budget.BudgetState]:
    """Everything for one threshold that is due. The budgets are changed only if there are victims."""
    snapshot, now, config = case.snapshot, case.now, case.config
    threshold = verdict.threshold
    signal, tier = threshold.signal, Tier.HARD if threshold.hard else Tier.SOFT
    unit = SIGNAL_TABLE[signal].unit
    observation = snapshot.observe(signal, threshold.memory_model)
    most = ledger.usage_limit(snapshot, signal)
    missing = _missing(verdict, observation)
    pending = ledger.pending(case.ledger, snapshot, signal, tier=tier, now=now, config=config, most=most)
    deficit = Deficit(signal, max(0, missing - pending.amount), pending.amount)
    order, rows = _rank(case, signal, tier=tier)
    served = _Served(signal, order, (), verdict, deficit)

    stop = _stop(case, budgets, signal)
    if stop is None and deficit.amount <= 0:
        stop = _is_coming(missing, pending, signal)
    if stop is not None:
        placed = tuple([row.placed(rank) for rank, row in enumerate(rows, 1)])
        return served._replace(ranking=placed, refusals=(stop,)), budgets

    minimum = 1 if config.ranking.kubelet else relief.minimum(config.relief, deficit.amount)
    shortened = _to_shorten(case, rows, pending, verdict, deficit.amount, minimum)
    left = deficit.amount - sum(row.relief or 0 for row in shortened)
    too_little = Refusal(
        "below-minimum-relief",
        f"would free less than {figure(minimum, unit)}, the least that matters for a deficit of "
        f"{figure(deficit.amount, unit)}",
    )
    candidates, evictable = _candidates(rows, minimum, too_little, kubelet=config.ranking.kubelet)
    chosen: list[_Row] = []
    refusals: list[Refusal] = []
    if left > 0:
        brake = _brake(case, verdict, left, len(candidates), evictable)
        if brake is not None:
            refusals.append(brake)
        if brake is None or (tier is Tier.HARD and config.relief.on_futile is OnFutile.EVICT and candidates):
            room = config.relief.max_victims - len(shortened)
            chosen, budgets, limits = _choose(case, candidates, left, tier, signal, budgets, room=room)
            refusals += limits
    going = [*shortened, *chosen]
    return (
        served._replace(
            ranking=tuple([row.placed(rank) for rank, row in enumerate(rows, 1)]),
            victims=tuple([_victim(case, row, verdict, observation, tier) for row in going]),
            entries=tuple([_entry(case, row, threshold, observation, tier, spends=row in chosen) for row in going]),
            refusals=tuple(refusals),
        ),
        budgets,
    )


def _missing(verdict: ThresholdVerdict, observation: Observation) -> int:
    """value + minimum reclaim - available, pending release not yet taken off; 0 when it cannot be told."""
    if verdict.value is None or type(observation.available) is not int:
        return 0
    reclaim = verdict.threshold.min_reclaim
    extra = amounts.resolve(reclaim, observation.capacity) if reclaim is not None else 0
    return max(0, verdict.value + (extra or 0) - observation.available)


def _stop(case: _Case, budgets: budget.BudgetState, signal: Signal) -> Refusal | None:
    """What forbids every eviction for this signal now."""
    return (
        case.nobody
        or ledger.breaker(case.ledger, signal, now=case.now, config=case.config)
        or budget.waiting(budgets.api, now=case.now)
        or budget.empty(budgets, budget.NODE, now=case.now, budgets=case.config.budgets)
        or budget.empty(budgets, f"{budget.SIGNAL}/{signal.value}", now=case.now, budgets=case.config.budgets)
    )


def _is_coming(missing: int, pending: ledger.Pending, signal: Signal) -> Refusal:
    unit = SIGNAL_TABLE[signal].unit
    if not pending.amount:
        return Refusal("no-deficit", f"{signal.value}: nothing is missing")
    return Refusal(
        "pending-release",
        f"{signal.value}: {figure(missing, unit)} are missing and {figure(pending.amount, unit)} are being released by "
        f"{', '.join(pending.pods)}",
    )


def _brake(case: _Case, verdict: ThresholdVerdict, deficit: int, candidates: int, evictable: int) -> Refusal | None:
    """The futility brake. With the kubelet's order only the lack of any candidate stops."""
    signal = verdict.threshold.signal
    if not candidates:
        where = relief.elsewhere(signal, case.snapshot)
        return Refusal(
            "no-candidates",
            f"{signal.value}: {figure(deficit, SIGNAL_TABLE[signal].unit)} are missing and no pod may be evicted for it"
            + (f"; held by {', '.join(where)}" if where else ""),
        )
    if case.config.ranking.kubelet or evictable >= deficit:
        return None
    return relief.futile(signal, deficit=deficit, evictable=evictable, candidates=candidates, snapshot=case.snapshot)


# --- ranking and protections -----------------------------------------------------------------------------------------


class _Row:
    """A pod at its place while the decision is being made; `placed` is what the plan keeps."""

    __slots__ = ("refusals", "relief", "request", "usage", "values", "view")

    def __init__(
        self,
        view: PodView,
        values: tuple[float, ...],
        usage: int | None,
        request: int | None,
        relief: int | None,
        refusals: tuple[Refusal, ...],
    ) -> None:
        self.view = view
        self.values = values
        self.usage = usage
        self.request = request
        self.relief = relief
        self.refusals = refusals

    def placed(self, rank: int) -> RankedPod:
        return RankedPod(self.view, rank, (), self.usage, self.request, self.relief, self.refusals, self.values)


def _rank(case: _Case, signal: Signal, *, tier: Tier) -> tuple[tuple[str, ...], list[_Row]]:
    """All pods in eviction order for `signal`, each with every reason why it would not go."""
    snapshot, config = case.snapshot, case.config
    rules, layout, stale_s = config.protection, snapshot.layout, config.sampling.stale_after_s
    wishes = bool(rules.trusted_namespaces) and tier is Tier.SOFT and not config.ranking.kubelet
    order = ranking.order_for(config.ranking, signal, layout, wishes=wishes)
    most = ledger.usage_limit(snapshot, signal)
    growing = ranking.growth_of(case.growth, signal, at=snapshot.taken_at)
    owners = ranking.siblings(snapshot.pods) if RankingKey.DUPLICATE_ON_NODE in order else {}
    unit, is_memory = SIGNAL_TABLE[signal].unit, signal in ranking.MEMORY_SIGNALS
    scene = protection.Scene(rules, tier, SIGNAL_TABLE[signal].resource, snapshot.taken_at, snapshot.wall_time)
    standing = case.memo.standing(snapshot.pods, config=config)

    subjects = []
    for view, known in zip(snapshot.pods, standing, strict=True):
        pod, usage = view
        used = None
        if usage is not None and not known.bad_request and -FUTURE_S <= snapshot.taken_at - usage.read_at <= stale_s:
            used = ranking.usage_of(usage, signal, layout, most=most)
        request = None
        if unit is Unit.BYTES:
            request = known.memory_request if is_memory else known.disk_request
            if pod.source is PodSource.HOST:
                request = sound(requests.ranking_request(view, signal=signal))
        subjects.append(
            ranking.Subject(
                view,
                pod,
                used,
                request,
                protection.wish(pod, rules, tier=tier) if wishes else 0.0,
                growing(usage, used),
                pod.owner is None or owners.get(pod.owner.uid, 0) < 2,
                snapshot.wall_time,
            )
        )
    reasons = {known.pod.uid: known.refusals for known in standing}
    rows = []
    for values, subject in ranking.ranked(subjects, order):
        view, pod, used, request = subject[:4]
        refusals = reasons[pod.uid] + protection.momentary(pod, view.usage, used, scene)
        if snapshot.own_pod_uid and pod.uid == snapshot.own_pod_uid:
            refusals = (protection.OWN_POD, *refusals)
        freed = relief.of(view.usage, signal, layout, most=most) if used is not None else None
        rows.append(_Row(view, values, used, request, freed, refusals))
    return order, rows


def _candidates(rows: Sequence[_Row], minimum: int, too_little: Refusal, *, kubelet: bool) -> tuple[list[_Row], int]:
    """Rows that may be evicted and would matter, and what all of them would free together."""
    candidates = []
    evictable = 0
    for row in rows:
        if row.refusals:
            continue
        freed = row.relief or 0
        if freed < minimum and not kubelet:
            row.refusals = (too_little,)
        else:
            candidates.append(row)
            evictable += freed
    return candidates, evictable


# --- choosing --------------------------------------------------------------------------------------------------------


def _choose(
    case: _Case,
    candidates: Sequence[_Row],
    deficit: int,
    tier: Tier,
    signal: Signal,
    budgets: budget.BudgetState,
    *,
    room: int,
) -> tuple[list[_Row], budget.BudgetState, list[Refusal]]:
    """The victims among the candidates, with their tokens taken.

    A candidate that a budget or a back-off holds gets that refusal, and the rest of the set is chosen without it.
    """
    refusals: dict[str, Refusal] = {}
    allowed = _allowed(case, candidates, budgets, tier, refusals)
    first_only = tier is Tier.SOFT or case.config.ranking.kubelet
    chosen: list[_Row] = []
    left = deficit
    while allowed and left > 0 and len(chosen) < (1 if first_only else room):
        row = allowed[0] if case.config.ranking.kubelet else _next(allowed, left, room - len(chosen))
        keys = budget.keys_of(row.view.pod, signal)
        taken = budget.take(budgets, keys, now=case.now, budgets=case.config.budgets)
        if isinstance(taken, Refusal):  # the node's or the signal's: the others were asked for in `_allowed`
            refusals.setdefault(taken.code, taken)
            break
        budgets = taken
        chosen.append(row)
        left -= row.relief or 0
        allowed.remove(row)
        if not first_only:
            allowed = _allowed(case, allowed, budgets, tier, refusals)
    for row in chosen[:-1]:  # a later pick may have made an earlier one superfluous
        if (row.relief or 0) + left <= 0:
            left += row.relief or 0
            chosen.remove(row)
            budgets = budget.give_back(
                budgets, budget.keys_of(row.view.pod, signal), now=case.now, budgets=case.config.budgets
            )
    return chosen, budgets, list(refusals.values())


def _next(allowed: Sequence[_Row], deficit: int, room: int) -> _Row:
    """The first of the least harmful set. The rest of that set is the least harmful one for what is left."""
    picked = relief.least_harmful([row.relief or 0 for row in allowed], deficit, most=room)
    return allowed[picked[0]]


def _allowed(
    case: _Case, rows: Sequence[_Row], budgets: budget.BudgetState, tier: Tier, refusals: dict[str, Refusal]
) -> list[_Row]:
    """Those of `rows` that no back-off and no empty bucket holds; the others get their refusal."""
    held = _Held(case, budgets, tier)
    allowed = []
    for row in rows:
        refusal = held.back(row.view.pod)
        if refusal is None:
            allowed.append(row)
        else:
            row.refusals = (refusal,)
            refusals.setdefault(refusal.code, refusal)
    return allowed


class _Held:
    """Which pods back-offs and empty buckets hold back. Buckets are asked once for each key."""

    __slots__ = ("_buckets", "_case", "_deletes", "_state", "_under_way")

    def __init__(self, case: _Case, state: budget.BudgetState, tier: Tier) -> None:
        self._case = case
        self._state = state
        self._deletes = tier is Tier.HARD and case.config.escalation.on_blocked is OnBlocked.DELETE
        self._under_way = {entry.pod_uid: entry for entry in case.ledger.entries}
        self._buckets: dict[str, Refusal | None] = {}

    def back(self, pod: Pod) -> Refusal | None:
        """Why `pod` is held back, or None."""
        if pod.uid in self._under_way:
            return ledger.under_way(self._under_way[pod.uid])
        state, owner = self._state, budget.owner_of(pod)
        wait = state.pods.get(pod.uid)
        if wait is not None and not (self._deletes and wait.code in BLOCKED):
            refusal = budget.waiting(wait, now=self._case.now)
            if refusal is not None:
                return refusal
        return (
            budget.waiting(state.owners.get(owner), now=self._case.now)
            or self._empty(f"{budget.NAMESPACE}/{pod.namespace}")
            or self._empty(f"{budget.OWNER}/{owner}")
        )

    def _empty(self, key: str) -> Refusal | None:
        if key not in self._buckets:
            self._buckets[key] = budget.empty(self._state, key, now=self._case.now, budgets=self._case.config.budgets)
        return self._buckets[key]


def _to_shorten(
    case: _Case,
    rows: Sequence[_Row],
    pending: ledger.Pending,
    verdict: ThresholdVerdict,
    deficit: int,
    minimum: int,
) -> list[_Row]:
    """Hard tier: terminating pods whose long grace holds what is missing, in eviction order. It costs no token: they
    are going anyway, and no pod more is lost."""
    if not verdict.threshold.hard or not case.config.escalation.shorten_terminating:
        return []
    slow = {view.pod.uid for view in pending.slow}
    chosen: list[_Row] = []
    for row in rows:
        if deficit <= 0 or len(chosen) >= case.config.relief.max_victims:
            break
        only_terminating = [refusal.code for refusal in row.refusals] == ["terminating"]
        if row.view.pod.uid in slow and only_terminating and (row.relief or 0) >= minimum:
            row.refusals = ()
            chosen.append(row)
            deficit -= row.relief or 0
    return chosen


def _victim(case: _Case, row: _Row, verdict: ThresholdVerdict, observation: Observation, tier: Tier) -> Victim:
    pod, usage = row.view
    text = messages.eviction(row.view, verdict=verdict, observation=observation)
    return Victim(
        pod=pod,
        cgroup=usage.cgroup if usage is not None else "",
        threshold=verdict.threshold,
        tier=tier,
        method=_method(case, pod, tier),
        grace_period_s=grace_s(pod, tier, config=case.config),
        message=text.message,
        annotations=text.annotations,
        predicted_relief=row.relief,
    )


def _method(case: _Case, pod: Pod, tier: Tier) -> Method:
    """DELETE only where a budget refused before, in the hard tier, and where the administrator wants it."""
    insists = tier is Tier.HARD and case.config.escalation.on_blocked is OnBlocked.DELETE
    return Method.DELETE if insists and pod.uid in case.blocked else Method.EVICT


def grace_s(pod: Pod, tier: Tier, *, config: Config) -> float:
    """The grace to ask for, in whole seconds: hard the configured one, soft the pod's own up to the maximum."""
    own_s = pod.termination_grace_s
    if not 0 <= own_s < ABSURD:
        own_s = SHORTEST_GRACE_S
    if tier is Tier.HARD:
        wanted_s = min(config.escalation.hard_grace_period_s, max(own_s, SHORTEST_GRACE_S))
    else:
        wanted_s = min(config.eviction_max_pod_grace_period_s, own_s)
    return float(math.ceil(max(SHORTEST_GRACE_S, wanted_s)))


def _entry(
    case: _Case, row: _Row, threshold: Threshold, observation: Observation, tier: Tier, *, spends: bool
) -> Entry:
    pod, usage = row.view
    grace = grace_s(pod, tier, config=case.config)
    return Entry(
        plan_id=case.plan_id,
        pod_uid=pod.uid,
        cgroup_uid=usage.cgroup_uid if usage is not None else pod.cgroup_uid,
        pod=pod.key,
        owner=budget.owner_of(pod),
        signal=threshold.signal,
        memory_model=threshold.memory_model,
        tier=tier,
        stage=Stage.PLANNED,
        planned_at=case.now,
        sample_at=case.snapshot.taken_at,
        available=observation.available or 0,
        predicted=row.relief or 0,
        grace_s=grace,
        until=case.now + case.config.cluster.request_timeout_s + grace + ledger.SLACK_S,
        buckets=budget.keys_of(pod, threshold.signal) if spends else (),
    )


def _relief_note(report: ReliefReport) -> Note:
    unit = SIGNAL_TABLE[report.signal].unit
    return Note(
        "relief",
        f"{report.plan_id}: {len(report.pod_uids)} evicted for {report.signal.value}, predicted "
        f"{figure(report.predicted, unit)}, measured {figure(report.measured, unit)} after {report.took_s:.1f}s",
    )


# --- right before acting ---------------------------------------------------------------------------------------------


def recheck(
    victim: Victim, snapshot: NodeSnapshot, state: PolicyState, *, now: float, config: Config
) -> Refusal | None:
    """Why a planned victim must not be evicted after all, by a sample newer than the one that it was chosen by.

    None: the threshold is still met (minimum reclaim included), and the same pod still runs and is still no protected
    one.
    """
    entry = next((each for each in reversed(state.ledger.entries) if each.pod_uid == victim.pod.uid), None)
    if entry is None or entry.stage is not Stage.PLANNED:
        return Refusal("not-planned", f"{victim.pod.key} is not in the ledger as planned")
    if not snapshot.taken_at > entry.sample_at:
        return Refusal("snapshot-old", "the sample is not newer than the one of the decision")
    return (
        _nobody(snapshot, now=now, config=config)
        or _recovered(victim, snapshot, now=now, config=config)
        or _changed(victim, entry, snapshot, config=config)
    )


def _recovered(victim: Victim, snapshot: NodeSnapshot, *, now: float, config: Config) -> Refusal | None:
    threshold = victim.threshold
    observation = snapshot.observe(threshold.signal, threshold.memory_model)
    unusable = thresholds.unusable(observation, now=now, stale_after_s=config.sampling.stale_after_s)
    value = amounts.resolve(threshold.value, observation.capacity)
    if unusable or value is None or observation.available is None:
        return Refusal("unknown", f"{threshold.signal.value} is not known any more: {unusable or observation.reason}")
    reclaim = amounts.resolve(threshold.min_reclaim, observation.capacity) if threshold.min_reclaim else 0
    level = value + (reclaim or 0)
    if observation.available < level:
        return None
    unit = SIGNAL_TABLE[threshold.signal].unit
    return Refusal(
        "recovered",
        f"{threshold.signal.value} is {figure(observation.available, unit)} again, at least {figure(level, unit)}",
    )


def _changed(victim: Victim, entry: Entry, snapshot: NodeSnapshot, *, config: Config) -> Refusal | None:
    pod = victim.pod
    view = next((each for each in snapshot.pods if each.pod.uid == pod.uid), None)
    if view is None:
        return Refusal("gone", f"{pod.key} with UID {pod.uid} is not on this node any more")
    if view.usage is None:
        return Refusal("not-running", f"{pod.key} has no cgroup any more")
    if view.pod.terminating and entry.buckets:
        return Refusal("terminating", f"{pod.key} is terminating already")
    if snapshot.own_pod_uid and pod.uid == snapshot.own_pod_uid:
        return protection.OWN_POD
    return next(iter(protection.standing(view.pod, config.protection)), None)


# --- how it went -----------------------------------------------------------------------------------------------------


_NOTHING_EVICTED: Final = frozenset(
    {
        OutcomeKind.BLOCKED_BY_BUDGET,
        OutcomeKind.THROTTLED,
        OutcomeKind.BUDGET_CONFLICT,
        OutcomeKind.GONE,
        OutcomeKind.REPLACED,
        OutcomeKind.INVALID,
        OutcomeKind.FORBIDDEN,
        OutcomeKind.UNAUTHORIZED,
        OutcomeKind.UNREACHABLE,
        OutcomeKind.RECHECK_REFUSED,
    }
)
"""Outcomes that prove that this request evicted nothing: tokens come back. A time-out and a server error prove nothing:
the request may have been carried out. A dry run keeps its tokens, so that a rehearsal shows the pace of the real thing.
"""

_NO_API: Final = frozenset(
    {
        OutcomeKind.THROTTLED,
        OutcomeKind.FORBIDDEN,
        OutcomeKind.UNAUTHORIZED,
        OutcomeKind.SERVER_ERROR,
        OutcomeKind.TIMED_OUT,
        OutcomeKind.UNREACHABLE,
    }
)
"""Outcomes that the next pod would meet as well: nothing is sent for a while."""

_POD_WAITS: Final = {
    OutcomeKind.BLOCKED_BY_BUDGET: None,
    OutcomeKind.BUDGET_CONFLICT: budget.POD_BACKOFF_MAX_S,
    OutcomeKind.GONE: budget.POD_BACKOFF_S,
    OutcomeKind.REPLACED: budget.POD_BACKOFF_S,
    OutcomeKind.INVALID: budget.POD_BACKOFF_MAX_S,
}
"""Outcomes that are this pod's alone, and how long it is left alone when the server does not say. None: 10, 20, 40...
s. Two budgets on one pod and an invalid request do not heal by themselves; a watch catches up within seconds."""


def settle(state: PolicyState, outcomes: Outcome | Iterable[Outcome], *, now: float, config: Config) -> PolicyState:
    """Take in how requests ended. An outcome that was taken in before, or that belongs to no entry, changes nothing."""
    each_of: Iterable[Outcome] = (outcomes,) if isinstance(outcomes, Outcome) else outcomes
    for outcome in each_of:
        state = _settle_one(state, outcome, now=now, config=config)
    return state


def _settle_one(state: PolicyState, outcome: Outcome, *, now: float, config: Config) -> PolicyState:
    entry = ledger.find(state.ledger, plan_id=outcome.plan_id, pod_uid=outcome.pod_uid)
    if entry is None or entry.stage not in (Stage.PLANNED, Stage.DOUBT):
        return state
    kind, budgets = outcome.kind, state.budgets
    if kind in _NOTHING_EVICTED and entry.stage is Stage.PLANNED:
        budgets = budget.give_back(budgets, entry.buckets, now=now, budgets=config.budgets)
    if kind in _NO_API:
        wait_s = outcome.retry_after_s
        if wait_s is None and kind in (OutcomeKind.FORBIDDEN, OutcomeKind.UNAUTHORIZED):
            wait_s = budget.API_BACKOFF_MAX_S  # rights and tokens are not mended within seconds
        budgets = budget.spare_api(
            budgets, entry.plan_id, now=now, code=kind.value, why=_why(entry, outcome), retry_after_s=wait_s
        )
    elif kind not in (OutcomeKind.DRY_RUN, OutcomeKind.RECHECK_REFUSED):
        budgets = budget.api_answered(budgets)
    if kind in _POD_WAITS:
        wait_s = outcome.retry_after_s if outcome.retry_after_s is not None else _POD_WAITS[kind]
        budgets = budget.spare_pod(
            budgets, entry.pod_uid, now=now, code=kind.value, why=_why(entry, outcome), retry_after_s=wait_s
        )
    if kind in (OutcomeKind.ACCEPTED, OutcomeKind.DRY_RUN) and entry.buckets:
        budgets = budget.spare_owner(budgets, entry.owner, now=now, budgets=config.budgets)
    return state._replace(ledger=ledger.replace(state.ledger, entry, by=_after(entry, kind, now=now)), budgets=budgets)


def _after(entry: Entry, kind: OutcomeKind, *, now: float) -> Entry | None:
    """What becomes of the entry; None when nothing is under way for it."""
    until = now + entry.grace_s + ledger.SLACK_S
    if kind is OutcomeKind.ACCEPTED:
        return entry._replace(stage=Stage.ACCEPTED, until=until)
    if kind in (OutcomeKind.TIMED_OUT, OutcomeKind.SERVER_ERROR):
        return entry._replace(stage=Stage.DOUBT, until=until)
    return None


def _why(entry: Entry, outcome: Outcome) -> str:
    status = f" (HTTP {outcome.http_status})" if outcome.http_status is not None else ""
    return f"evicting {entry.pod}: {outcome.kind.value}{status}: {outcome.message}"
