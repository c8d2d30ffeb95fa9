"""One snapshot, one decision: what is starved, who would go, who goes now, and why nobody else.

Promises:

1. Pure: the same snapshot, state, instant and configuration give the same plan, in the daemon, in `check`, in replay
   and in the tests. A `Memo` changes the speed, never the result.
2. What is not known is never a reason to evict: no believable sample, no current view of the pods, no usage, no victim.
3. Tokens are taken and evictions written down in the returned state. Persist it, then act: then no crash spends twice.
4. Whatever is not done has a `Refusal`, at the pod or at the plan, with the numbers.

Theory of operation. `decide` reads as ARCHITECTURE's list: judge the thresholds, update the conditions, bring the
ledger up to date, then serve the most urgent threshold that is due. To serve is: reckon the deficit, line the pods up,
take out the protected, stop if it would be futile, choose the least harmful set, take its tokens. If nobody can be
evicted for one resource the next one that is due gets its turn. `recheck` asks again right before a request is sent;
`settle` takes in how the requests ended, `settle_reclaim` how the actions did that are tried before.

With `ranking.order: kubelet` the first unprotected pod goes, one in each decision, whatever it would free, for the most
urgent threshold and no other, as in the kubelet's sync loop (KUBELET-CONTRACT 3); budgets, back-off and pending release
still hold.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from nodeagent.config.resolve import resolve
from nodeagent.config.schema import Config, OnBlocked, OnFutile
from nodeagent.model import (
    MIN_GRACE_S,
    SIGNAL_TABLE,
    Amount,
    Deficit,
    Method,
    NodeSnapshot,
    Note,
    NoteKind,
    Observation,
    Plan,
    Pod,
    PodView,
    RankedPod,
    ReclaimOrder,
    Refusal,
    RefusalCode,
    ReliefReport,
    Signal,
    SignalState,
    SignalVerdict,
    Threshold,
    ThresholdVerdict,
    Tier,
    Trend,
    Victim,
    units,
)
from nodeagent.policy import (
    backoffs,
    conditions,
    fresh_usage,
    in_flight,
    last_resort,
    local_storage_eviction,
    local_storage_limits,
    messages,
    out_of_reach,
    pending_release,
    preconditions,
    rate_limits,
    reclaim,
    relief,
    selection,
    thresholds,
    usage_growth,
)
from nodeagent.policy.candidates import MinimumRelief, RankedPods, RankingCache, rank_pods
from nodeagent.policy.in_flight import EvictionStage, InFlightEviction
from nodeagent.policy.state import PolicyState, after_suspend

# --- the decision ----------------------------------------------------------------------------------------------------


def decide(
    snapshot: NodeSnapshot,
    state: PolicyState,
    *,
    now: float,
    config: Config,
    cache: RankingCache | None = None,
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
    state = after_suspend(state, snapshot.suspended_s, now=now)
    # 1-3: signals, thresholds, since when
    judged, threshold_state = thresholds.judge(
        snapshot, state.thresholds, now=now, config=config, thresholds=thresholds.effective(config, snapshot.layout)
    )
    # 4: conditions and their damping
    published, condition_state = conditions.update(judged, state.conditions, now=now, config=config)
    # what earlier decisions have become
    healthy = [verdict.signal for verdict in judged if verdict.state is SignalState.OK]
    seen = in_flight.advance(state.in_flight, snapshot, now=now, config=config, healthy=healthy)
    tried = reclaim.advance(state.reclaims, snapshot, met=threshold_state.first_observed.keys(), now=now)
    budgets = backoffs.pruned(state.rate_limits, now=now, limits=config.rate_limits)
    for entry in seen.confirmed:
        budgets = backoffs.back_off_owner(budgets, entry.owner, now=now, limits=config.rate_limits)
    case = _Context(
        plan_id=f"{state.instance}-{state.sequence + 1}",
        snapshot=snapshot,
        now=now,
        config=config,
        in_flight=seen.state,
        growth=state.growth,
        reclaims=tried.state,
        trends={verdict.signal: verdict.trend for verdict in judged},
        levels=threshold_state,
        cache=cache if cache is not None else RankingCache(),
    )
    served, refusals, budgets = _serve_limits(case, budgets)
    count_anew = served.count_anew
    if not served.victims:
        # 5-7: deficit, ranking, protections, budgets, relief
        served, more, budgets = _serve_most_urgent(case, judged, budgets, always_rank=always_rank)
        refusals = (*refusals, *more)
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
        refusals=tuple(dict.fromkeys(refusals)),  # several signals may have the same to say
        notes=(
            *served.notes,
            *[_relief_note(report) for report in seen.reports],
            *[Note(NoteKind.RECLAIM, reclaim.describe(report, config.reclaim.actions)) for report in tried.reports],
        ),
        rank_order=served.order,
        relief_reports=seen.reports,
        reclaims=served.reclaims,
        reclaim_reports=tried.reports,
        recount=count_anew,
    )
    after = PolicyState(
        instance=state.instance,
        sequence=state.sequence + 1,
        thresholds=threshold_state,
        conditions=condition_state,
        in_flight=in_flight.add(seen.state, served.entries),
        rate_limits=budgets,
        growth=usage_growth.record_sample(state.growth, snapshot),
        reclaims=served.reclaim_state if served.reclaim_state is not None else tried.state,
        suspended_s=state.suspended_s,
    )
    return plan, after


class _Context(NamedTuple):
    """One decision's facts, for the functions below."""

    plan_id: str
    snapshot: NodeSnapshot
    now: float
    config: Config
    in_flight: in_flight.InFlightState
    growth: usage_growth.GrowthState
    reclaims: reclaim.ReclaimState
    trends: Mapping[Signal, Trend | None]
    levels: thresholds.ThresholdState
    """As the snapshot left it."""
    cache: RankingCache

    def line_up(self, signal: Signal, *, tier: Tier, minimum: MinimumRelief | None = None) -> RankedPods:
        return rank_pods(
            self.snapshot,
            signal,
            tier=tier,
            config=self.config,
            growth=self.growth,
            cache=self.cache,
            minimum=minimum,
        )


class _SignalPlan(NamedTuple):
    """What serving one signal came to."""

    signal: Signal
    order: tuple[str, ...] = ()
    ranking: tuple[RankedPod, ...] = ()
    verdict: ThresholdVerdict | None = None
    deficit: Deficit | None = None
    victims: tuple[Victim, ...] = ()
    entries: tuple[InFlightEviction, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    notes: tuple[Note, ...] = ()
    reclaims: tuple[ReclaimOrder, ...] = ()
    reclaim_state: reclaim.ReclaimState | None = None
    """None: as it was."""
    count_anew: tuple[str, ...] = ()


def _serve_limits(
    case: _Context, budgets: rate_limits.RateLimitState
) -> tuple[_SignalPlan, tuple[Refusal, ...], rate_limits.RateLimitState]:
    """Pods over their own local-storage limits, before any threshold as in the kubelet; off by default."""
    snapshot, now, config = case.snapshot, case.now, case.config
    served = _SignalPlan(Signal.NODEFS)
    if (
        not config.local_storage_limits
        or preconditions.blocks_all_evictions(snapshot, now=now, config=config)
        or backoffs.remaining(budgets.api, now=now)
    ):
        return served, (), budgets
    over = local_storage_eviction.select_over_limit(
        snapshot, budgets=budgets, book=case.in_flight, now=now, config=config
    )
    served = served._replace(count_anew=over.count_anew)
    if not over.violations:
        return served, over.refusals, budgets
    lineup = case.line_up(Signal.NODEFS, tier=Tier.HARD)
    victims = tuple([_over_limit(violation, config) for violation in over.violations])
    seen = snapshot.observations[Signal.NODEFS]
    entries = tuple([_entry(case, victim, seen, spends=True) for victim in victims])
    served = served._replace(order=lineup.order, ranking=tuple(lineup.pods), victims=victims, entries=entries)
    return served, over.refusals, over.budgets


def _serve_most_urgent(
    case: _Context, judged: Sequence[SignalVerdict], budgets: rate_limits.RateLimitState, *, always_rank: bool
) -> tuple[_SignalPlan, tuple[Refusal, ...], rate_limits.RateLimitState]:
    """Serve the due thresholds in order of urgency until one of them has victims; with the kubelet's order the first
    alone."""
    refusals: tuple[Refusal, ...] = ()
    first: _SignalPlan | None = None
    for verdict in _due(judged, kubelet=case.config.ranking.kubelet):
        served, budgets = _plan_signal(case, verdict, budgets)
        # Of each threshold, also of one that is not the one reported, it counts what its evictions waited for.
        case = case._replace(reclaims=served.reclaim_state or case.reclaims)
        served = served._replace(reclaim_state=case.reclaims)
        refusals = (*refusals, *served.refusals)
        if served.victims or served.reclaims or case.config.ranking.kubelet:
            return served, refusals, budgets
        first = first or served
    if first is not None:
        return first._replace(reclaim_state=case.reclaims), refusals, budgets
    met = [verdict for verdict in judged if any(each.met for each in verdict.thresholds)]
    signal = min((each.signal for each in met), key=lambda each: SIGNAL_TABLE[each].urgency, default=Signal.MEMORY)
    if not met and not always_rank:
        case.cache.prepare(case.snapshot, config=case.config)
        return _SignalPlan(signal), (), budgets
    lineup = case.line_up(signal, tier=Tier.SOFT)
    return _SignalPlan(signal, lineup.order, tuple(lineup.pods)), (), budgets


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


# --- serving one threshold -------------------------------------------------------------------------------------------


def _plan_signal(
    case: _Context, verdict: ThresholdVerdict, budgets: rate_limits.RateLimitState
) -> tuple[_SignalPlan, rate_limits.RateLimitState]:
    """Everything for one threshold that is due. The budgets are changed only if there are victims."""
    snapshot, now, config = case.snapshot, case.now, case.config
    threshold = verdict.threshold
    signal, tier = threshold.signal, Tier.HARD if threshold.hard else Tier.SOFT
    observation = snapshot.observe(signal, threshold.memory_model)
    missing = _missing(verdict, observation)
    pending = pending_release.pending(case.in_flight, snapshot, signal, tier=tier, now=now, config=config)
    deficit = Deficit(signal, max(0, missing - pending.amount), pending.amount)
    minimum = _minimum(deficit, config)
    lineup = case.line_up(signal, tier=tier, minimum=minimum if deficit.amount and not config.ranking.kubelet else None)
    notes: tuple[Note, ...] = ()
    if lineup.by_writes:
        notes = (_BY_WRITES if any(ranked.usage is not None for ranked in lineup.pods) else _UNMEASURED,)
    served = _SignalPlan(signal, lineup.order, (), verdict, deficit, notes=notes)

    kill, spent = last_resort.kill_due(snapshot, tier, budgets, now=now, config=config)
    if deficit.amount:
        tried = reclaim.attempt(
            case.reclaims,
            verdict,
            observation,
            deficit,
            layout=snapshot.layout,
            trend=case.trends.get(signal),
            plan_id=case.plan_id,
            now=now,
            config=config,
        )
        served = served._replace(reclaims=tried.orders, reclaim_state=tried.state)
        if tried.waits is not None:
            return served._replace(ranking=tuple(lineup.pods), refusals=(tried.waits,)), budgets
    stop = None if deficit.amount else _is_coming(missing, pending, signal)
    stop = _stop(case, budgets, signal, kill=kill) or stop or _wait_for_release(case, signal, tier)
    stop = stop or fresh_usage.wait_for_recount(snapshot, verdict, case.trends.get(signal), now=now, config=config)
    if stop is not None:
        return served._replace(ranking=tuple(lineup.pods), refusals=(stop, *spent)), budgets

    trend = case.trends.get(signal)
    out_of_reach.end_claims_wait(lineup, verdict, trend, minimum=minimum, now=now, config=config)
    shortened: tuple[RankedPod, ...] = ()
    if not kill:
        shortened = selection.select_to_shorten(
            lineup, pending, deficit.amount, minimum=minimum.relief, tier=tier, config=config
        )
    left = deficit.amount - sum(pod.relief or 0 for pod in shortened)
    chosen: tuple[RankedPod, ...] = ()
    refusals: tuple[Refusal, ...] = spent
    before = budgets
    if left > 0:
        coming = pending.uids | {pod.view.pod.uid for pod in shortened}
        facts = out_of_reach.ReachContext(snapshot, tier, kill, minimum, coming, case.in_flight, budgets, now, config)
        candidates, beyond = out_of_reach.split_candidates(lineup, facts)
        held = [each.pod for each in beyond if each.replacement is out_of_reach.Replacement.NEVER]
        brake = _futility(case, signal, left, [*candidates, *held])
        if brake is not None:
            refusals = (*refusals, brake, *selection.larger_out_of_reach(lineup, candidates, beyond))
        if brake is None or (tier is Tier.HARD and config.relief.on_futile is OnFutile.EVICT):
            available, value = observation.available, verdict.value
            history = thresholds.history_of(case.levels, threshold)
            loss = selection.expected_loss(history, available=available, value=value)
            used_up_at = case.levels.used_up_since.get(thresholds.identity(threshold), now)
            terms = selection.selection_terms(
                left,
                signal=signal,
                tier=tier,
                kill=kill,
                shortened=len(shortened),
                limit_state=budgets,
                loss=loss,
                growth_rate=usage_growth.certain_growth_rate(case.growth, signal, at=snapshot.taken_at),
                used_up=trend is not None and now - used_up_at >= selection.REPLACEMENT_INTERVAL_S,
                wait_for_larger=selection.should_wait_for_larger(
                    loss, verdict.active_since, available=available, value=value, now=now
                ),
                plan_id=case.plan_id,
                now=now,
                config=config,
            )
            chosen, budgets, limits = selection.select_victims(lineup, candidates, beyond, terms, limit_state=budgets)
            refusals = (*refusals, *limits)
    if chosen and (waiting := preconditions.soft_tier_blocked(snapshot, tier)) is not None:
        chosen, budgets, refusals = (), before, (*refusals, waiting)
    blocked = frozenset([uid for uid, wait in budgets.pods.items() if wait.code in backoffs.BLOCKED])
    victims = [_victim(pod, verdict, observation, tier, config, blocked) for pod in (*shortened, *chosen)]
    entries = [_entry(case, victim, observation, spends=False) for victim in victims[: len(shortened)]]
    entries += [_entry(case, victim, observation, spends=True) for victim in victims[len(shortened) :]]
    if kill:
        victims = [victim._replace(method=Method.KILL) for victim in victims]
        entries = [entry._replace(buckets=(rate_limits.LAST_RESORT,)) for entry in entries]
    return (
        served._replace(ranking=tuple(lineup.pods), victims=tuple(victims), entries=tuple(entries), refusals=refusals),
        budgets,
    )


_BY_WRITES: Final = Note(
    NoteKind.DISKS,
    "what the pods hold is not measured yet: they are ranked by how fast they write, and count as holding what they "
    "have written lately",
)
_UNMEASURED: Final = Note(NoteKind.DISKS, "neither what the pods hold nor how fast they write is known")


def _missing(verdict: ThresholdVerdict, observation: Observation) -> int:
    """value + minimum reclaim - available, pending release not yet taken off; 0 when it cannot be told."""
    if verdict.value is None or type(observation.available) is not int:
        return 0
    reclaim = verdict.threshold.min_reclaim
    extra = resolve(reclaim, capacity=observation.capacity) if reclaim is not None else 0
    return max(0, verdict.value + (extra or 0) - observation.available)


def _minimum(deficit: Deficit, config: Config) -> MinimumRelief:
    least = relief.minimum_relief(config.relief, deficit.amount)
    unit = SIGNAL_TABLE[deficit.signal].unit
    message = (
        f"would free less than {units.format_amount(least, unit)}, the least that matters for a deficit of "
        f"{units.format_amount(deficit.amount, unit)}"
    )
    return MinimumRelief(least, Refusal(RefusalCode.BELOW_MINIMUM_RELIEF, message))


def _stop(case: _Context, budgets: rate_limits.RateLimitState, signal: Signal, *, kill: bool) -> Refusal | None:
    """What forbids every eviction for this signal now. The last resort needs neither the API nor a current view of the
    pods."""
    if kill:
        old = preconditions.snapshot_too_old(case.snapshot, now=case.now, config=case.config)
        return old or in_flight.circuit_breaker(case.in_flight, signal, now=case.now, config=case.config)
    return (
        preconditions.blocks_all_evictions(case.snapshot, now=case.now, config=case.config)
        or in_flight.circuit_breaker(case.in_flight, signal, now=case.now, config=case.config)
        or backoffs.remaining(budgets.api, now=case.now)
    )


def _wait_for_release(case: _Context, signal: Signal, tier: Tier) -> Refusal | None:
    """The soft tier takes one pod and looks again when it is gone; so does the kubelet, whatever the tier."""
    kubelet = case.config.ranking.kubelet
    if tier is Tier.HARD and not kubelet:
        return None
    return pending_release.wait_for_release(
        case.in_flight, case.snapshot, now=case.now, signal=None if kubelet else signal
    )


def _is_coming(missing: int, pending: pending_release.PendingRelease, signal: Signal) -> Refusal:
    unit = SIGNAL_TABLE[signal].unit
    if not pending.amount:
        return Refusal(RefusalCode.NO_DEFICIT, f"{signal.value}: nothing is missing")
    return Refusal(
        RefusalCode.PENDING_RELEASE,
        f"{signal.value}: the deficit of {units.format_amount(missing, unit)} is covered by the pending release of "
        f"{units.format_amount(pending.amount, unit)} by {', '.join(pending.pods)}",
    )


def _futility(case: _Context, signal: Signal, deficit: int, candidates: Sequence[RankedPod]) -> Refusal | None:
    """The futility brake. With the kubelet's order only the lack of any candidate stops."""
    evictable = sum(pod.relief or 0 for pod in candidates)
    if candidates and (case.config.ranking.kubelet or evictable >= deficit):
        return None
    return relief.futility_refusal(
        signal, deficit=deficit, evictable=evictable, candidates=len(candidates), snapshot=case.snapshot
    )


# --- what is handed to the actuators ---------------------------------------------------------------------------------


def _victim(
    ranked: RankedPod,
    verdict: ThresholdVerdict,
    observation: Observation,
    tier: Tier,
    config: Config,
    blocked: frozenset[str],
) -> Victim:
    """`blocked`: UIDs of pods whose disruption budget refused lately, which only the hard tier may override."""
    pod, usage = ranked.view
    text = messages.eviction_text(ranked.view, verdict=verdict, observation=observation)
    insists = tier is Tier.HARD and config.escalation.on_blocked is OnBlocked.DELETE and pod.uid in blocked
    return Victim(
        pod=pod,
        cgroup=usage.cgroup if usage is not None else "",
        threshold=verdict.threshold,
        tier=tier,
        method=Method.DELETE if insists else Method.EVICT,
        grace_period_s=grace_s(pod, tier, config=config),
        message=text.message,
        annotations=text.annotations,
        predicted_relief=ranked.relief,
    )


def with_current_text(victim: Victim, view: PodView, *, plan: Plan) -> Victim:
    """The victim with its text written anew from `view`: the containers' own usage, which the message names, is read
    for victims only. A victim for another reason than the plan's threshold keeps its text."""
    verdict = plan.acting_on
    if verdict is None or verdict.threshold != victim.threshold:
        return victim
    observation = next(each.observation for each in plan.signals if each.signal is victim.threshold.signal)
    text = messages.eviction_text(view, verdict=verdict, observation=observation)
    return victim._replace(message=text.message, annotations=text.annotations)


def _over_limit(violation: local_storage_limits.Violation, config: Config) -> Victim:
    """As the kubelet, without event annotations; its threshold is the limit itself."""
    pod, usage = violation.view
    limit = Amount(violation.allowed, None, units.format_spec_quantity(violation.allowed))
    return Victim(
        pod=pod,
        cgroup=usage.cgroup if usage is not None else "",
        threshold=Threshold(Signal.NODEFS, limit),
        tier=Tier.HARD,
        method=Method.EVICT,
        grace_period_s=grace_s(pod, Tier.HARD, config=config),
        message=violation.message,
        annotations={},
        predicted_relief=None,
        limit=violation.limit.value,
    )


def grace_s(pod: Pod, tier: Tier, *, config: Config) -> float:
    """The grace to ask for, in whole seconds: hard the configured one, soft the maximum; the pod's own if shorter."""
    most_s = config.escalation.hard_grace_period_s if tier is Tier.HARD else config.eviction_max_pod_grace_period_s
    own_s = pod.termination_grace_s if 0 <= pod.termination_grace_s < units.MAX_PLAUSIBLE else MIN_GRACE_S
    return float(math.ceil(max(MIN_GRACE_S, min(most_s, own_s))))


def _entry(case: _Context, victim: Victim, observation: Observation, *, spends: bool) -> InFlightEviction:
    """The ledger's line. A pod that is only shortened spends no token and counts for no one's back-off."""
    pod, threshold = victim.pod, victim.threshold
    return InFlightEviction(
        plan_id=case.plan_id,
        pod_uid=pod.uid,
        cgroup_uid=pod.cgroup_uid,
        pod=pod.key,
        owner=rate_limits.owner_of(pod),
        signal=threshold.signal,
        memory_model=threshold.memory_model,
        tier=victim.tier,
        stage=EvictionStage.PLANNED,
        planned_at=case.now,
        sample_at=case.snapshot.taken_at,
        available=observation.available or 0,
        predicted=victim.predicted_relief or 0,
        grace_s=victim.grace_period_s,
        until=case.now + case.config.cluster.request_timeout_s + victim.grace_period_s + in_flight.SLACK_S,
        buckets=rate_limits.bucket_keys(pod, victim.limit or threshold.signal) if spends else (),
        limit=victim.limit,
    )


def _relief_note(report: ReliefReport) -> Note:
    unit = SIGNAL_TABLE[report.signal].unit
    return Note(
        NoteKind.RELIEF,
        f"{report.plan_id}: {len(report.pod_uids)} evicted for {report.signal.value}, predicted relief "
        f"{units.format_amount(report.predicted, unit)}, measured {units.format_amount(report.measured, unit)} after "
        f"{report.took_s:.1f}s",
    )
