"""The plan for one due threshold: deficit, ranking, reclaim, blocks, victims.

Theory of operation. `plan_signal` stops at the first reason not to evict: a reclaim action that comes first, a deficit
that is covered by pending release, a block of all evictions, an eviction whose release is awaited, disk usage older
than the crossing, PIDs that zombies of the host hold. Then terminating pods are shortened (hard tier), and the least
harmful victims are chosen within rate limits and back-offs, unless all candidates together cannot cover the deficit. A
hook before an eviction of the soft tier comes last, so that it runs for a pod that would be evicted at once; then an
EvictionRequest takes the place of the eviction, if one is wanted.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from nodeagent.config import resolve
from nodeagent.config.schema import Config, OnFutile
from nodeagent.model import (
    MEMORY_SIGNALS,
    SIGNAL_TABLE,
    Deficit,
    HookOrder,
    Method,
    NodeFitLookup,
    NodeSnapshot,
    Note,
    NoteKind,
    Observation,
    OwnerLookup,
    RankedPod,
    ReclaimOrder,
    Refusal,
    RefusalCode,
    Signal,
    ThresholdVerdict,
    Tier,
    Trend,
    Victim,
    units,
)
from nodeagent.policy import (
    backoffs,
    candidates,
    chosen_victims,
    circuit_breaker,
    effective_thresholds,
    eviction_hook,
    eviction_request,
    fresh_usage,
    growth_outside_pods,
    host_zombies,
    last_resort,
    memory_shortage,
    node_fit,
    out_of_reach,
    pending_release,
    preconditions,
    reclaim,
    relief,
    replacement,
    selection,
    thresholds,
    trend,
    usage_growth,
)
from nodeagent.policy.candidates import MinimumRelief, RankedPods, RankingCache
from nodeagent.policy.in_flight import InFlightEviction, InFlightState
from nodeagent.policy.pending_release import PendingRelease
from nodeagent.policy.rate_limits import RateLimitState

_BY_WRITES: Final = Note(
    NoteKind.DISKS,
    "disk usage of the pods is not measured yet: ranked by write rate, and what they wrote lately counts as usage",
)
_UNMEASURED: Final = Note(NoteKind.DISKS, "neither disk usage nor write rates of the pods are known")


class DecisionContext(NamedTuple):
    """The inputs of one decision, for all its thresholds."""

    plan_id: str
    snapshot: NodeSnapshot
    now: float
    config: Config
    in_flight: InFlightState
    growth: usage_growth.GrowthState
    reclaims: reclaim.ReclaimState
    hooks: eviction_hook.HookState
    eviction_requests: eviction_request.RequestState
    thresholds: thresholds.ThresholdState
    """After the judgement of this snapshot."""
    cache: RankingCache

    def rank_pods(self, signal: Signal, *, tier: Tier, minimum: MinimumRelief | None = None) -> RankedPods:
        return candidates.rank_pods(
            self.snapshot,
            signal,
            tier=tier,
            config=self.config,
            growth=self.growth,
            cache=self.cache,
            minimum=minimum,
        )


class SignalPlan(NamedTuple):
    """The part of a plan that one signal gives."""

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
    """None: unchanged."""
    recount: tuple[str, ...] = ()
    hooks: tuple[HookOrder, ...] = ()
    hook_state: eviction_hook.HookState | None = None
    """None: unchanged."""
    owner_lookups: tuple[OwnerLookup, ...] = ()
    node_fit_lookups: tuple[NodeFitLookup, ...] = ()
    overtaken: frozenset[str] = frozenset()
    """UIDs of pods whose EvictionRequests end, because the victims take their tokens."""


class _Chosen(NamedTuple):
    """The victims with their evictions in flight, and what else the choice changes."""

    victims: list[tuple[Victim, InFlightEviction]]
    refusals: tuple[Refusal, ...]
    limit_state: RateLimitState
    hook: eviction_hook.HookStep | None = None
    owner_lookups: tuple[OwnerLookup, ...] = ()
    node_fit_lookups: tuple[NodeFitLookup, ...] = ()
    notes: tuple[Note, ...] = ()


class _Target(NamedTuple):
    """The threshold of a signal plan, and what is computed for it."""

    verdict: ThresholdVerdict
    observation: Observation
    released: Observation
    """The signal by the memory model that shows losses and releases; for other signals the same."""
    signal: Signal
    tier: Tier
    deficit: int
    minimum: MinimumRelief
    pending: PendingRelease
    trend: Trend | None
    kill: bool
    """Victims are killed: the last resort is due."""


def plan_signal(
    context: DecisionContext, verdict: ThresholdVerdict, limit_state: RateLimitState
) -> tuple[SignalPlan, RateLimitState]:
    """The plan for a threshold that is due. The rate limits change only if there are victims."""
    if not verdict.threshold.hard:
        return _plan(context, verdict, limit_state)
    now, limits = context.now, context.config.rate_limits
    lent = eviction_request.lend_tokens(context.in_flight, limit_state, now=now, limits=limits)
    context = context._replace(in_flight=eviction_request.without_requests(context.in_flight))
    plan, after = _plan(context, verdict, lent.limit_state)
    if not plan.victims:
        return plan, limit_state
    after, overtaken = eviction_request.settle_tokens(lent, after, plan.victims, now=now, limits=limits)
    return plan._replace(overtaken=overtaken), after


def _plan(
    context: DecisionContext, verdict: ThresholdVerdict, limit_state: RateLimitState
) -> tuple[SignalPlan, RateLimitState]:
    snapshot, now, config = context.snapshot, context.now, context.config
    threshold = verdict.threshold
    signal, tier = threshold.signal, Tier.HARD if threshold.hard else Tier.SOFT
    observation = snapshot.observe(signal, threshold.memory_model)
    shortage = _shortage(verdict, snapshot)
    pending = pending_release.pending(context.in_flight, snapshot, signal, tier=tier, now=now, config=config)
    deficit = Deficit(signal, max(0, shortage - pending.amount), pending.amount)
    minimum = _minimum_relief(deficit, config)
    has_minimum = deficit.amount > 0 and not config.ranking.kubelet
    ranked_pods = context.rank_pods(signal, tier=tier, minimum=minimum if has_minimum else None)
    history = thresholds.history_of(context.thresholds, threshold)
    outside = growth_outside_pods.notes(context.growth, snapshot, verdict, history, config=config)
    plan = SignalPlan(signal, ranked_pods.order, (), verdict, deficit, notes=(*_disk_notes(ranked_pods), *outside))
    kill, limits_reached = last_resort.kill_due(snapshot, tier, limit_state, now=now, config=config)
    target = _Target(
        verdict,
        observation,
        snapshot.observe(signal, memory_shortage.release_model(threshold)),
        signal,
        tier,
        deficit.amount,
        minimum,
        pending,
        trend.estimate(history),
        kill,
    )
    if deficit.amount:
        attempt = reclaim.attempt(
            context.reclaims,
            verdict,
            observation,
            deficit,
            snapshot=snapshot,
            trend=target.trend,
            plan_id=context.plan_id,
            now=now,
            config=config,
        )
        plan = plan._replace(reclaims=attempt.orders, reclaim_state=attempt.state)
        if attempt.waits is not None:
            return plan._replace(ranking=tuple(ranked_pods.pods), refusals=(attempt.waits,)), limit_state
    block = (
        _block(context, target, limit_state, shortage=shortage)
        or _host_zombies(context, target, ranked_pods)
        or fresh_usage.wait_for_first_walk(ranked_pods, verdict, target.trend, now=now)
    )
    if block is not None:
        return plan._replace(ranking=tuple(ranked_pods.pods), refusals=(block, *limits_reached)), limit_state
    chosen = _choose(context, target, ranked_pods, limit_state)
    plan = plan._replace(
        owner_lookups=chosen.owner_lookups,
        node_fit_lookups=chosen.node_fit_lookups,
        notes=(*plan.notes, *chosen.notes),
    )
    if chosen.hook is not None and chosen.hook.order is not None:
        plan = plan._replace(hooks=(chosen.hook.order,), hook_state=chosen.hook.state)
    return (
        plan._replace(
            ranking=tuple(ranked_pods.pods),
            victims=tuple([victim for victim, _ in chosen.victims]),
            entries=tuple([entry for _, entry in chosen.victims]),
            refusals=(*limits_reached, *chosen.refusals),
        ),
        chosen.limit_state,
    )


def _disk_notes(ranked_pods: RankedPods) -> tuple[Note, ...]:
    if not ranked_pods.by_writes:
        return ()
    return (_BY_WRITES if any(ranked.usage is not None for ranked in ranked_pods.pods) else _UNMEASURED,)


def _shortage(verdict: ThresholdVerdict, snapshot: NodeSnapshot) -> int:
    """value + minimum reclaim - available, before pending release; 0 if one of them is unknown.

    With both figures of memory it is what ends the shortage by the nearer of two ways: the lower figure reaches that
    level, or the kernel's is so far above it that what is still short is page cache alone. More would evict pods for
    page cache.
    """
    threshold = verdict.threshold
    if verdict.value is None:
        return 0
    capacity = snapshot.observe(threshold.signal, threshold.memory_model).capacity
    level = verdict.value + resolve.resolve_reclaim(threshold, capacity=capacity)
    available = memory_shortage.available(snapshot, threshold, level=level)
    return max(0, level - available) if type(available) is int else 0


def _minimum_relief(deficit: Deficit, config: Config) -> MinimumRelief:
    amount = relief.minimum_relief(config.relief, deficit.amount)
    unit = SIGNAL_TABLE[deficit.signal].unit
    message = (
        f"relief below {units.format_amount(amount, unit)}, the minimum for a deficit of "
        f"{units.format_amount(deficit.amount, unit)}"
    )
    return MinimumRelief(amount, Refusal(RefusalCode.BELOW_MINIMUM_RELIEF, message))


# --- blocks ----------------------------------------------------------------------------------------------------------


def _block(context: DecisionContext, target: _Target, limit_state: RateLimitState, *, shortage: int) -> Refusal | None:
    """Why no pod is evicted for the threshold now, or None."""
    covered = None if target.deficit else _covered(shortage, target.pending, target.signal)
    return (
        _signal_block(context, limit_state, target.signal, kill=target.kill)
        or covered
        or _wait_for_release(context, target.signal, target.tier)
        or fresh_usage.wait_for_recount(
            context.snapshot, target.verdict, target.trend, now=context.now, config=context.config
        )
    )


def _host_zombies(context: DecisionContext, target: _Target, ranked_pods: RankedPods) -> Refusal | None:
    if context.config.ranking.kubelet:
        return None
    return host_zombies.refusal(context.snapshot, ranked_pods.pods, target.signal, target.deficit)


def _signal_block(
    context: DecisionContext, limit_state: RateLimitState, signal: Signal, *, kill: bool
) -> Refusal | None:
    """What forbids every eviction for this signal now. The last resort needs neither the API server nor a current list
    of the pods."""
    now, config = context.now, context.config
    breaker = circuit_breaker.refusal(context.in_flight.failures, signal, now=now, config=config)
    if kill:
        return preconditions.snapshot_too_old(context.snapshot, now=now, config=config) or breaker
    return (
        preconditions.blocks_all_evictions(context.snapshot, now=now, config=config)
        or breaker
        or backoffs.remaining(limit_state.api, now=now)
    )


def _covered(shortage: int, pending: PendingRelease, signal: Signal) -> Refusal:
    unit = SIGNAL_TABLE[signal].unit
    if not pending.amount:
        return Refusal(RefusalCode.NO_DEFICIT, f"{signal.value}: the deficit is zero")
    return Refusal(
        RefusalCode.PENDING_RELEASE,
        f"{signal.value}: the deficit of {units.format_amount(shortage, unit)} is covered by the pending release of "
        f"{units.format_amount(pending.amount, unit)} by {', '.join(pending.pods)}",
    )


def _wait_for_release(context: DecisionContext, signal: Signal, tier: Tier) -> Refusal | None:
    """The soft tier evicts one pod and decides again when it is gone; so does the kubelet, in every tier."""
    kubelet = context.config.ranking.kubelet
    if tier is Tier.HARD and not kubelet:
        return None
    return pending_release.wait_for_release(
        context.in_flight, context.snapshot, now=context.now, signal=None if kubelet else signal
    )


# --- victims ---------------------------------------------------------------------------------------------------------


def _choose(context: DecisionContext, target: _Target, ranked_pods: RankedPods, limit_state: RateLimitState) -> _Chosen:
    snapshot, now, config = context.snapshot, context.now, context.config
    out_of_reach.end_claims_wait(
        ranked_pods, target.verdict, target.trend, minimum=target.minimum, now=now, config=config
    )
    shortened = selection.Shortening()
    if not target.kill:
        shortened = selection.select_to_shorten(
            ranked_pods,
            target.pending,
            target.deficit,
            minimum=target.minimum.relief,
            tier=target.tier,
            limit_state=limit_state,
            now=now,
            config=config,
        )
    incomplete = replacement.refusals(snapshot, target.tier, limit_state=limit_state, now=now, config=config)
    unfit = node_fit.refusals(snapshot, target.tier, limit_state=limit_state, now=now, config=config)
    excluded = {**unfit, **incomplete}
    selected, refusals, after = _select(context, target, ranked_pods, shortened, limit_state, excluded)
    fit_lookups: tuple[NodeFitLookup, ...] = ()
    if target.tier is Tier.SOFT and (selected or unfit):
        fit_lookups = node_fit.lookups(
            selected, ranked_pods.pods, unfit, limit_state=limit_state, now=now, config=config
        )
    # Before the soft tier's own waits: while this is unknown, which has no end, the node takes no eviction slot.
    if selected and target.tier is Tier.SOFT:
        unknown = node_fit.check(selected[0].view.pod, limit_state=limit_state, now=now, config=config)
        if unknown is not None:
            selected, refusals, after = (), (*refusals, unknown), limit_state
    if selected and (block := preconditions.soft_tier_blocked(snapshot, target.tier)) is not None:
        selected, refusals, after = (), (*refusals, block), limit_state
    wanted = [view.pod for view in snapshot.pods if view.pod.uid in incomplete] if incomplete else []
    notes: tuple[Note, ...] = ()
    hook = None
    if selected and target.tier is Tier.SOFT:
        pod = selected[0].view.pod
        wanted.insert(0, pod)
        owner = replacement.check(pod, snapshot, limit_state=limit_state, now=now, config=config)
        notes = () if owner.note is None else (owner.note,)
        if owner.waits is not None:
            selected, refusals, after = (), (*refusals, owner.waits), limit_state
    if selected and target.tier is Tier.SOFT and config.hooks.before_eviction.enabled:
        hook = eviction_hook.prepare(
            context.hooks,
            selected,
            Deficit(target.signal, target.deficit, target.pending.amount),
            target.observation,
            limit_state=limit_state,
            after=after,
            plan_id=context.plan_id,
            now=now,
            config=config,
        )
        after = hook.limit_state
        if hook.waits is not None:
            selected, refusals = (), (*refusals, hook.waits)
    figures = snapshot.memory_figures(target.signal) if target.signal in MEMORY_SIGNALS else None
    chosen = []
    for position, ranked in enumerate((*shortened.pods, *selected)):
        victim = chosen_victims.from_ranked(ranked, target.verdict, target.observation, figures, after, config)
        if target.kill:
            victim = victim._replace(method=Method.KILL)
        elif target.tier is Tier.SOFT:
            victim = victim._replace(
                method=eviction_request.method_for(victim.pod, context.eviction_requests, snapshot, config)
            )
        if hook is not None:
            victim = victim._replace(hook=hook.text)
        entry = chosen_victims.planned_eviction(
            victim,
            target.released,
            plan_id=context.plan_id,
            sample_at=snapshot.taken_at,
            now=now,
            config=config,
            spends_tokens=position >= len(shortened.pods),
        )
        chosen.append((victim, entry))
    owners = replacement.lookups(wanted, config=config)
    return _Chosen(chosen, refusals, after, hook, owners, fit_lookups, notes)


def _select(
    context: DecisionContext,
    target: _Target,
    ranked_pods: RankedPods,
    shortened: selection.Shortening,
    limit_state: RateLimitState,
    excluded: Mapping[str, Refusal],
) -> tuple[tuple[RankedPod, ...], tuple[Refusal, ...], RateLimitState]:
    """The pods to evict for what the shortened ones leave of the deficit. `excluded`: the pods whose owners lack
    replicas, or that no other node takes."""
    left = target.deficit - shortened.relief
    if left <= 0:
        return (), shortened.refusals, limit_state
    snapshot, now, config = context.snapshot, context.now, context.config
    releasing = target.pending.uids | shortened.uids
    reach = out_of_reach.ReachContext(
        snapshot,
        target.tier,
        target.kill,
        target.minimum,
        releasing,
        context.in_flight,
        limit_state,
        {**eviction_hook.failures(context.hooks, target.tier, config=config), **excluded},
        now,
        config,
    )
    evictable, beyond = out_of_reach.split_candidates(ranked_pods, reach)
    evictable = eviction_hook.prefer_prepared(evictable, context.hooks, left, target.tier, config)
    limited = [each.pod for each in beyond if each.replacement is out_of_reach.Replacement.NEVER]
    refusals = shortened.refusals
    futile = _futile(context, target.signal, left, [*evictable, *limited])
    if futile is not None:
        refusals = (*refusals, futile, *selection.larger_out_of_reach(ranked_pods, evictable, beyond))
        if target.tier is not Tier.HARD or config.relief.on_futile is not OnFutile.EVICT:
            return (), refusals, limit_state
    terms = _selection_terms(context, target, left, limit_state, shortened=len(shortened.pods))
    pods, after, limits = selection.select_victims(ranked_pods, evictable, beyond, terms, limit_state=limit_state)
    return pods, (*refusals, *limits), after


def _selection_terms(
    context: DecisionContext, target: _Target, left: int, limit_state: RateLimitState, *, shortened: int
) -> selection.SelectionTerms:
    now, verdict, available = context.now, target.verdict, target.released.available
    history = thresholds.history_of(context.thresholds, verdict.threshold)
    loss = selection.expected_loss(history, available=available, value=verdict.value)
    used_up_at = context.thresholds.used_up_since.get(effective_thresholds.identity(verdict.threshold), now)
    growth, snapshot = context.growth, context.snapshot
    return selection.selection_terms(
        left,
        signal=target.signal,
        tier=target.tier,
        kill=target.kill,
        shortened=shortened,
        limit_state=limit_state,
        loss=loss,
        growth_rate=usage_growth.certain_growth_rate(growth, target.signal, at=snapshot.taken_at),
        measured_growth=usage_growth.measured_growth_rate(
            growth, target.signal, snapshot, loss_per_s=None if loss is None else loss / selection.LOSS_HORIZON_S
        ),
        reserve=verdict.value or 0,
        used_up=target.trend is not None and now - used_up_at >= selection.REPLACEMENT_INTERVAL_S,
        wait_for_larger=selection.should_wait_for_larger(
            loss, verdict.active_since, available=available, value=verdict.value, now=now
        ),
        plan_id=context.plan_id,
        now=now,
        config=context.config,
    )


def _futile(context: DecisionContext, signal: Signal, deficit: int, pods: Sequence[RankedPod]) -> Refusal | None:
    """Why evicting all these pods would not cover the deficit, or None. With the kubelet's order only the lack of any
    candidate stops."""
    evictable = sum(pod.relief or 0 for pod in pods)
    if pods and (context.config.ranking.kubelet or evictable >= deficit):
        return None
    return relief.futility_refusal(
        signal, deficit=deficit, evictable=evictable, candidates=len(pods), snapshot=context.snapshot
    )
