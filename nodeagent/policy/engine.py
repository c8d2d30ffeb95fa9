"""One snapshot, one decision: which thresholds are due, which pods are evicted, and why no other pod is.

Promises:

1. Pure: the same snapshot, state, time and configuration give the same plan, in the agent, in `check`, in replay and in
   the tests. A `RankingCache` changes the speed, never the result.
2. Unknown is never a reason to evict: without a plausible sample, a current list of the pods and a usage there is no
   victim.
3. The returned state has the tokens taken and the evictions in flight. Persist it before acting, and no crash spends a
   token twice.
4. What is not done has a `Refusal` with the numbers, at the pod or at the plan.

Theory of operation. `decide` judges the thresholds, updates the conditions, advances evictions in flight and reclaim
runs, then plans the most urgent due threshold (`signal_plan`). If no pod can be evicted for it, the next due threshold
is planned. `recheck` repeats the checks right before a request; `outcomes` applies how requests and actions ended.

With `ranking.order: kubelet` each decision evicts the first unprotected pod, whatever its relief, for the most urgent
threshold and no other, as in the kubelet's sync loop (KUBELET-CONTRACT 3). Rate limits, back-offs and pending release
still apply.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import TypeVar

from nodeagent.config.schema import Config, Mode
from nodeagent.model import (
    SIGNAL_TABLE,
    NodeSnapshot,
    Note,
    NoteKind,
    Plan,
    Refusal,
    RefusalCode,
    ReliefReport,
    Signal,
    SignalState,
    SignalVerdict,
    ThresholdVerdict,
    Tier,
    Victim,
    units,
)
from nodeagent.policy import (
    backoffs,
    chosen_victims,
    conditions,
    effective_thresholds,
    eviction_hook,
    eviction_request,
    in_flight,
    inode_shortage,
    kubelet_first,
    local_storage_eviction,
    memory_shortage,
    node_fit,
    own_limit_eviction,
    own_limit_resize,
    page_cache,
    pod_usage,
    preconditions,
    rate_limits,
    reclaim,
    replacement,
    resizes,
    signal_plan,
    thresholds,
    usage_growth,
)
from nodeagent.policy import (
    state as policy_state,
)
from nodeagent.policy.candidates import RankingCache
from nodeagent.policy.in_flight import InFlightEviction
from nodeagent.policy.own_limit_resize import ResizeSelection
from nodeagent.policy.own_limits import NearLimit
from nodeagent.policy.rate_limits import RateLimitState
from nodeagent.policy.signal_plan import DecisionContext, SignalPlan
from nodeagent.policy.state import PolicyState

_Lookup = TypeVar("_Lookup")


def decide(
    snapshot: NodeSnapshot,
    state: PolicyState,
    *,
    now: float,
    config: Config,
    cache: RankingCache | None = None,
    always_rank: bool = True,
) -> tuple[Plan, PolicyState]:
    """The plan for this snapshot, and the state for the next decision, to be persisted before the plan is executed.

    `now` is CLOCK_BOOTTIME. `always_rank` False leaves `Plan.ranking` empty while no threshold is met.

    Raises:
        ValueError: `now` is not a finite number; the caller's clock is broken and nothing can be decided.
    """
    if not math.isfinite(now):
        raise ValueError(f"the time of a decision must be finite, not {now!r}")
    state = policy_state.after_suspend(state, snapshot.suspended_s, now=now)
    state = policy_state.in_mode(state, dry_run=config.mode is Mode.DRY_RUN)
    # 1: thresholds, conditions, evictions in flight, reclaim runs
    effective = effective_thresholds.effective(config, snapshot.layout)
    judged, threshold_state = thresholds.judge(snapshot, state.thresholds, now=now, config=config, thresholds=effective)
    if not config.ranking.kubelet:
        judged = inode_shortage.without_byte_shortage(judged)
    judged = kubelet_first.leave_to_kubelet(judged, snapshot, now=now, config=config)
    left = kubelet_first.left_to_kubelet(judged)
    threshold_state = thresholds.clear(threshold_state, left)
    published, condition_state = conditions.update(judged, state.conditions, now=now, config=config)
    healthy = [verdict.signal for verdict in judged if verdict.state is SignalState.OK]
    observed = in_flight.advance(state.in_flight, snapshot, now=now, config=config, healthy=healthy)
    runs = reclaim.advance(state.reclaims, snapshot, met=threshold_state.first_observed.keys(), now=now)
    limit_state = _with_confirmed(state.rate_limits, observed.confirmed, now=now, config=config)
    enforced_limits = state.enforced_limits
    if enforced_limits is not None:
        enforced_limits = _with_confirmed(enforced_limits, observed.confirmed, now=now, config=config)
    requests = eviction_request.advance(
        state.eviction_requests,
        observed.state,
        snapshot,
        left={entry.pod_uid for entry in observed.confirmed},
        healthy=healthy,
        now=now,
        config=config,
    )
    for buckets in requests.returned:
        limit_state = rate_limits.return_tokens(limit_state, buckets, now=now, limits=config.rate_limits)
    context = DecisionContext(
        plan_id=f"{state.instance}-{state.sequence + 1}",
        snapshot=snapshot,
        now=now,
        config=config,
        in_flight=requests.in_flight,
        growth=state.growth,
        reclaims=runs.state,
        hooks=eviction_hook.advance(state.hooks, now=now, config=config),
        eviction_requests=requests.state,
        thresholds=threshold_state,
        cache=cache if cache is not None else RankingCache(),
    )
    resized = resizes.advance(state.resizes, snapshot, now=now, config=config)
    resize_plan = ResizeSelection((), resized.state, limit_state)
    # 2: pods over their own storage limits; 3-5: due thresholds; then pods near their own memory limit
    chosen, refusals, limit_state = _plan_storage_limits(context, limit_state)
    refusals = (*refusals, *_not_due(judged))
    recount = chosen.recount
    if not chosen.victims:
        chosen, more, limit_state = _plan_most_urgent(context, judged, limit_state, always_rank=always_rank)
        refusals = (*refusals, *more)
    if not chosen.victims and config.own_limit.enabled:
        near = own_limit_eviction.by_urgency(snapshot, config)
        resize_plan = own_limit_resize.select_resizes(
            near,
            snapshot,
            judged,
            state=resized.state,
            limit_state=limit_state,
            plan_id=context.plan_id,
            now=now,
            config=config,
        )
        chosen, more, limit_state = _plan_memory_limits(context, chosen, near, resize_plan)
        refusals = (*refusals, *resize_plan.refusals, *more)
    chosen_requests, overtaken_notes = eviction_request.after_choice(
        requests.state, zip(chosen.victims, chosen.entries, strict=True), overtaken=chosen.overtaken, now=now
    )
    remaining = eviction_request.without_overtaken(requests.in_flight, chosen.overtaken)
    reclaims = chosen.reclaim_state if chosen.reclaim_state is not None else runs.state
    in_flight_state = in_flight.add(remaining, chosen.entries)
    beside = reclaim.attempt_page_cache(
        reclaims,
        judged,
        snapshot,
        good_samples=threshold_state.good_samples,
        plan_id=context.plan_id,
        now=now,
        config=config,
    )
    plan = Plan(
        id=context.plan_id,
        made_at=now,
        snapshot_taken_at=snapshot.taken_at,
        signals=judged,
        conditions=published,
        acting_on=chosen.verdict,
        deficit=chosen.deficit,
        ranking=chosen.ranking,
        ranked_for=chosen.signal,
        victims=chosen.victims,
        refusals=tuple(dict.fromkeys(refusals)),  # several signals may have the same refusal
        notes=(
            *chosen.notes,
            *memory_shortage.notes(snapshot, effective),
            *kubelet_first.notes(left),
            *[_relief_note(report) for report in observed.reports],
            *requests.notes,
            *overtaken_notes,
            *[Note(NoteKind.RECLAIM, reclaim.describe(report, config.reclaim.actions)) for report in runs.reports],
            *page_cache.note(snapshot.page_cache_blocked, config=config),
        ),
        rank_order=chosen.order,
        relief_reports=observed.reports,
        reclaims=(*chosen.reclaims, *beside.orders),
        reclaim_reports=runs.reports,
        recount=recount,
        hooks=chosen.hooks,
        owner_lookups=chosen.owner_lookups,
        node_fit_lookups=chosen.node_fit_lookups,
        resizes=resize_plan.orders,
        resize_reports=resized.reports,
        outcomes=tuple([eviction_request.outcome_of(each, now=now) for each in observed.confirmed if each.request_s]),
        soft_eviction_in_flight=in_flight.soft_in_flight(in_flight_state),
    )
    after = PolicyState(
        instance=state.instance,
        sequence=state.sequence + 1,
        thresholds=threshold_state,
        conditions=condition_state,
        in_flight=in_flight_state,
        rate_limits=limit_state,
        growth=usage_growth.record_sample(
            state.growth, snapshot, memory_rule=pod_usage.memory_rule(snapshot, config=config)
        ),
        reclaims=beside.state,
        hooks=chosen.hook_state if chosen.hook_state is not None else context.hooks,
        eviction_requests=chosen_requests,
        suspended_s=state.suspended_s,
        resizes=resize_plan.state,
        enforced_limits=enforced_limits,
    )
    return plan, after


def _with_confirmed(
    limits: RateLimitState, confirmed: Iterable[InFlightEviction], *, now: float, config: Config
) -> RateLimitState:
    """The rate limits at `now`, with the back-offs of the owners of pods that are proven to have been evicted."""
    limits = backoffs.pruned(limits, now=now, config=config)
    for entry in confirmed:
        limits = backoffs.back_off_owner(limits, entry.owner, entry.plan_id, now=now, limits=config.rate_limits)
    return limits


def _plan_storage_limits(
    context: DecisionContext, limit_state: RateLimitState
) -> tuple[SignalPlan, tuple[Refusal, ...], RateLimitState]:
    """The plan for pods over their own local-storage limits, before any threshold as in the kubelet; off by default."""
    snapshot, now, config = context.snapshot, context.now, context.config
    plan = SignalPlan(Signal.NODEFS)
    if (
        not config.local_storage_limits
        or preconditions.blocks_all_evictions(snapshot, now=now, config=config)
        or backoffs.remaining(limit_state.api, now=now)
    ):
        return plan, (), limit_state
    lent = eviction_request.lend_tokens(context.in_flight, limit_state, now=now, limits=config.rate_limits)
    selected = local_storage_eviction.select_over_limit(
        snapshot,
        limit_state=lent.limit_state,
        in_flight_state=eviction_request.without_requests(context.in_flight),
        now=now,
        config=config,
    )
    plan = plan._replace(recount=selected.recount)
    if not selected.violations:
        return plan, selected.refusals, limit_state
    ranked_pods = context.rank_pods(Signal.NODEFS, tier=Tier.HARD)
    chosen = tuple([chosen_victims.over_limit(violation, config) for violation in selected.violations])
    plan = plan._replace(
        order=ranked_pods.order,
        ranking=tuple(ranked_pods.pods),
        victims=chosen,
        entries=_planned(context, chosen, Signal.NODEFS),
    )
    return _with_overtaken(context, lent, plan, selected.refusals, selected.limit_state)


def _with_overtaken(
    context: DecisionContext,
    lent: eviction_request.LentTokens,
    plan: SignalPlan,
    refusals: tuple[Refusal, ...],
    limit_state: RateLimitState,
) -> tuple[SignalPlan, tuple[Refusal, ...], RateLimitState]:
    """The plan with the EvictionRequests that its victims overtake."""
    limit_state, overtaken = eviction_request.settle_tokens(
        lent, limit_state, plan.victims, now=context.now, limits=context.config.rate_limits
    )
    return plan._replace(overtaken=overtaken), refusals, limit_state


def _planned(context: DecisionContext, chosen: Sequence[Victim], signal: Signal) -> tuple[InFlightEviction, ...]:
    """The evictions in flight of victims of limits of their own."""
    entries = [
        chosen_victims.planned_eviction(
            victim,
            context.snapshot.observations[signal],
            plan_id=context.plan_id,
            sample_at=context.snapshot.taken_at,
            now=context.now,
            config=context.config,
            spends_tokens=True,
        )
        for victim in chosen
    ]
    return tuple(entries)


def _plan_memory_limits(
    context: DecisionContext, before: SignalPlan, near: Sequence[NearLimit], resize_plan: ResizeSelection
) -> tuple[SignalPlan, tuple[Refusal, ...], RateLimitState]:
    """The plan with the pods near a memory limit of their own as victims; off by default. `before`, of the thresholds,
    has none; its reclaim orders stay. `resize_plan`: the limits that are raised instead."""
    snapshot, now, config = context.snapshot, context.now, context.config
    lent = eviction_request.lend_tokens(context.in_flight, resize_plan.limit_state, now=now, limits=config.rate_limits)
    selected = own_limit_eviction.select_near_limit(
        near,
        snapshot,
        limit_state=lent.limit_state,
        in_flight_state=eviction_request.without_requests(context.in_flight),
        busy=resize_plan.busy,
        now=now,
        config=config,
    )
    if not selected.chosen:
        return before, selected.refusals, resize_plan.limit_state
    chosen = tuple([chosen_victims.near_limit(near) for near in selected.chosen])
    # Not for a threshold, also if one is due.
    entries = _planned(context, chosen, Signal.MEMORY)
    plan = before._replace(verdict=None, deficit=None, victims=chosen, entries=entries)
    return _with_overtaken(context, lent, plan, selected.refusals, selected.limit_state)


def _plan_most_urgent(
    context: DecisionContext, judged: Sequence[SignalVerdict], limit_state: RateLimitState, *, always_rank: bool
) -> tuple[SignalPlan, tuple[Refusal, ...], RateLimitState]:
    """The plan for the first due threshold with victims or reclaim orders, in order of urgency; with the kubelet's
    order for the first due threshold alone. It has the look-ups of every planned threshold."""
    refusals: tuple[Refusal, ...] = ()
    plans: list[SignalPlan] = []
    for verdict in _due(judged, kubelet=context.config.ranking.kubelet):
        plan, limit_state = signal_plan.plan_signal(context, verdict, limit_state)
        # The reclaim state counts what the evictions of every threshold waited for, also of those not reported.
        context = context._replace(reclaims=plan.reclaim_state or context.reclaims)
        plan = plan._replace(reclaim_state=context.reclaims)
        refusals = (*refusals, *plan.refusals)
        plans.append(plan)
        if plan.victims or plan.reclaims or plan.hooks or context.config.ranking.kubelet:
            return _with_lookups(plan, plans), refusals, limit_state
    if plans:
        return _with_lookups(plans[0]._replace(reclaim_state=context.reclaims), plans), refusals, limit_state
    met = [verdict for verdict in judged if any(each.met for each in verdict.thresholds)]
    signal = min((each.signal for each in met), key=lambda each: SIGNAL_TABLE[each].urgency, default=Signal.MEMORY)
    if not met and not always_rank:
        context.cache.prepare(context.snapshot, config=context.config)
        return SignalPlan(signal), (), limit_state
    ranked_pods = context.rank_pods(signal, tier=Tier.SOFT)
    return SignalPlan(signal, ranked_pods.order, tuple(ranked_pods.pods)), (), limit_state


def _with_lookups(plan: SignalPlan, plans: Sequence[SignalPlan]) -> SignalPlan:
    """The plan with the look-ups of all plans."""
    return plan._replace(
        owner_lookups=_in_turn([each.owner_lookups for each in plans])[: replacement.MAX_LOOKUPS],
        node_fit_lookups=_in_turn([each.node_fit_lookups for each in plans])[: node_fit.MAX_LOOKUPS],
    )


def _in_turn(lists: Iterable[Sequence[_Lookup]]) -> tuple[_Lookup, ...]:
    """The first of each list, then the second of each, and so on: the first is that of the pod to evict."""
    rows = itertools.zip_longest(*lists)
    return tuple(dict.fromkeys(each for row in rows for each in row if each is not None))


def _due(judged: Sequence[SignalVerdict], *, kubelet: bool) -> list[ThresholdVerdict]:
    """The highest due threshold of each signal, the most urgent signal first.

    Hard before soft, then memory, disk, inodes, PIDs; with the kubelet's order memory before all else.
    """
    due = []
    for position, verdict in enumerate(judged):
        own = [each for each in verdict.thresholds if each.due and each.value is not None]
        if own:
            highest = max(own, key=lambda each: (each.threshold.hard, each.value or 0))
            urgency = SIGNAL_TABLE[verdict.signal].urgency
            due.append(((kubelet and urgency != 0, not highest.threshold.hard, urgency, position), highest))
    due.sort(key=lambda row: row[0])
    return [highest for _, highest in due]


def _not_due(judged: Sequence[SignalVerdict]) -> list[Refusal]:
    """Why no pod is evicted for met thresholds that would be due otherwise; one of each code and signal."""
    found: dict[tuple[Signal, RefusalCode], Refusal] = {}
    for verdict in judged:
        for each in verdict.thresholds:
            if each.met and each.not_due_code is not None:
                refusal = Refusal(each.not_due_code, each.not_due_reason)
                found.setdefault((verdict.signal, refusal.code), refusal)
    return list(found.values())


def _relief_note(report: ReliefReport) -> Note:
    unit = SIGNAL_TABLE[report.signal].unit
    return Note(
        NoteKind.RELIEF,
        f"{report.plan_id}: {len(report.pod_uids)} evicted for {report.signal.value}, predicted relief "
        f"{units.format_amount(report.predicted, unit)}, measured {units.format_amount(report.measured, unit)} after "
        f"{report.took_s:.1f}s",
    )
