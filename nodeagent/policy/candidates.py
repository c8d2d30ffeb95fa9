"""Rank all pods for one resource, each with every reason why it is not evicted.

Theory of operation. What depends on a pod's object alone (its request, its object refusals) comes from the
`RankingCache`. Everything else depends on the snapshot and is computed in every decision: usage, relief, the momentary
refusals and the sort key of each pod.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from nodeagent.config.schema import Config, RankingKey
from nodeagent.model import (
    DISK_BYTE_SIGNALS,
    DISK_SIGNALS,
    MEMORY_SIGNALS,
    SIGNAL_TABLE,
    DiskLayout,
    NodeSnapshot,
    Pod,
    PodSource,
    PodView,
    RankedPod,
    Refusal,
    Signal,
    Tier,
    Unit,
)
from nodeagent.policy import plausibility, pod_usage, protection, ranking, relief, requests, usage_growth
from nodeagent.policy.pod_usage import MemoryRule

# --- what depends on the pod's object alone --------------------------------------------------------------------------


class PodFacts(NamedTuple):
    """What one version of a pod's object and the configuration determine."""

    pod: Pod
    refusals: tuple[Refusal, ...]
    request: int | None
    implausible_request: bool
    """Usage cannot be compared with such a request, so the pod's usage counts as unknown."""


class RankingCache:
    """The `PodFacts` of each version of a pod, per resource, as long as the configuration is the same object.

    It changes the speed, never the result: a decision over 500 pods takes 3.5 ms with it and 6 without
    (`benchmarks.decision`). Give the same cache to every decision of a process.
    """

    __slots__ = ("_config", "_facts")

    def __init__(self) -> None:
        self._config: Config | None = None
        self._facts: dict[str, dict[str, PodFacts]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._facts.values()))

    def prepare(self, snapshot: NodeSnapshot, *, config: Config) -> None:
        """Fill the cache for memory while no threshold is met, so that the first decision that evicts finds it full."""
        self.facts(snapshot.pods, Signal.MEMORY, config=config)

    def facts(self, pods: Sequence[PodView], signal: Signal, *, config: Config) -> list[PodFacts]:
        """The facts of `pods`, in their order. Facts of other pods are dropped."""
        if self._config is not config:
            self._config, self._facts = config, {}
        resource = SIGNAL_TABLE[signal].resource  # requests differ by resource alone
        known = self._facts.get(resource, {})
        facts = [_cached_facts(known.get(view.pod.uid), view, signal, config) for view in pods]
        self._facts[resource] = {each.pod.uid: each for each in facts}
        return facts


def _cached_facts(known: PodFacts | None, view: PodView, signal: Signal, config: Config) -> PodFacts:
    # The request of a pod without an API object is estimated from its usage, so it may change at any time.
    if known is None or known.pod is not view.pod or view.pod.source is PodSource.HOST:
        return _pod_facts(view, signal, config)
    return known


def _pod_facts(view: PodView, signal: Signal, config: Config) -> PodFacts:
    request = requests.ranking_request(view, signal=signal)
    usable = plausibility.plausible(request)
    implausible = usable != request or _has_implausible_request(view.pod)
    return PodFacts(view.pod, protection.object_refusals(view.pod, config.protection), usable, implausible)


def _has_implausible_request(pod: Pod) -> bool:
    """True if a container's request cannot be real, which makes every sum over it meaningless.

    Only what is allocated counts: a resize may ask for more than exists, and the kubelet refuses it.
    """
    allocated = [
        requests.container_request(container, signal=signal)
        for container in pod.containers
        for signal in (Signal.MEMORY, Signal.NODEFS)
    ]
    return any(request is not None and plausibility.plausible(request) is None for request in allocated)


# --- the ranked pods -------------------------------------------------------------------------------------------------


class RankedPods:
    """The order for one signal. Later steps of the same decision replace the refusals of single pods.

    Not a dataclass: `check` would pay 10 ms to import `dataclasses`.
    """

    __slots__ = ("by_writes", "order", "pods", "signal")

    def __init__(
        self, signal: Signal, order: tuple[str, ...], pods: list[RankedPod], *, by_writes: bool = False
    ) -> None:
        self.signal = signal
        self.order = order
        """Names of the keys."""
        self.pods = pods
        """In eviction order; rank 1 is at index 0."""
        self.by_writes = by_writes
        """No disk usage is measured yet: the fastest writer is first, and usage is what a pod wrote recently."""

    def set_refusals(self, ranked: RankedPod, refusals: tuple[Refusal, ...]) -> RankedPod:
        """Replace the refusals of one pod, and return the pod with them."""
        self.pods[ranked.rank - 1] = refused = ranked._replace(refusals=refusals)
        return refused


class MinimumRelief(NamedTuple):
    """The least relief that counts, and the refusal of a pod with less."""

    relief: int
    refusal: Refusal


class _RankingContext(NamedTuple):
    """What all pods of one decision are ranked by."""

    snapshot: NodeSnapshot
    signal: Signal
    tier: Tier
    config: Config
    order: tuple[str, ...]
    rules: protection.RuleContext
    usage_limit: int
    """More usage than this is not plausible for one pod."""
    used: int
    """What is in use of the resource: no eviction frees more. `MAX_PLAUSIBLE` if unknown."""
    memory_rule: MemoryRule
    """The most swap of a pod that counts in its memory usage."""
    swap_memory: relief.SwapMemory
    growth_rate: usage_growth.GrowthRate | None
    """None if no key of the order needs it."""
    replicas: Mapping[str, int] | None
    """Running pods by owner UID; None if no key of the order needs it."""
    unseen_pids: int
    """PIDs of children that live for milliseconds: they are in the node's count and in no pod's."""
    spares_within_request: bool
    """No pod is evicted that uses no more than it requests."""
    minimum: MinimumRelief | None


def rank_pods(
    snapshot: NodeSnapshot,
    signal: Signal,
    *,
    tier: Tier,
    config: Config,
    growth: usage_growth.GrowthState,
    cache: RankingCache,
    minimum: MinimumRelief | None = None,
) -> RankedPods:
    """All pods of the snapshot in eviction order, with usage, relief and refusals. Without `minimum` any relief counts.

    While no pod's disk usage is measured, the hard tier ranks by write rate, and a pod counts as holding what it wrote.
    """
    context = _ranking_context(snapshot, signal, tier=tier, config=config, growth=growth, minimum=minimum)
    facts = cache.facts(snapshot.pods, signal, config=config)
    inputs = [_ranking_input(context, view, known) for view, known in zip(snapshot.pods, facts, strict=True)]
    by_writes = _ranks_by_writes(context, inputs)
    order = context.order
    if by_writes:
        order = (ranking.WRITE_RATE, *order)
        inputs = [each._replace(usage=_written_bytes(context, each.view)) for each in inputs]
    keys = ranking.sort_keys(inputs, order)
    pods = [
        _ranked_pod(context, rank, inputs[index], facts[index], keys[index].values, by_writes=by_writes)
        for rank, index in enumerate(sorted(range(len(keys)), key=keys.__getitem__), 1)
    ]
    return RankedPods(signal, order, pods, by_writes=by_writes)


def _ranking_context(
    snapshot: NodeSnapshot,
    signal: Signal,
    *,
    tier: Tier,
    config: Config,
    growth: usage_growth.GrowthState,
    minimum: MinimumRelief | None,
) -> _RankingContext:
    kubelet, layout = config.ranking.kubelet, snapshot.layout
    preferences = bool(config.protection.trusted_namespaces) and tier is Tier.SOFT and not kubelet
    order = ranking.order_for(config.ranking, signal, layout, preferences=preferences)
    needs_growth = RankingKey.GROWTH in order or ranking.PROJECTED_USAGE in order
    resource = SIGNAL_TABLE[signal].resource
    return _RankingContext(
        snapshot=snapshot,
        signal=signal,
        tier=tier,
        config=config,
        order=order,
        rules=protection.RuleContext(config.protection, tier, resource, snapshot.taken_at, snapshot.wall_time),
        usage_limit=plausibility.usage_limit(snapshot, signal, config=config),
        used=plausibility.used(snapshot, signal),
        memory_rule=(
            pod_usage.memory_rule(snapshot, config=config) if signal in MEMORY_SIGNALS else pod_usage.WORKING_SET
        ),
        swap_memory=relief.swap_memory(snapshot, config=config),
        growth_rate=usage_growth.growth_rate(growth, signal, layout, at=snapshot.taken_at) if needs_growth else None,
        replicas=ranking.count_replicas(snapshot.pods) if RankingKey.DUPLICATE_ON_NODE in order else None,
        unseen_pids=relief.unseen_pids(snapshot) if signal is Signal.PID and not kubelet else 0,
        spares_within_request=signal is Signal.ALLOCATABLE_MEMORY and not kubelet,
        minimum=minimum,
    )


def _ranking_input(context: _RankingContext, view: PodView, facts: PodFacts) -> ranking.RankingInput:
    pod, used = view.pod, _plausible_usage(context, view, facts)
    preference = 0.0
    if ranking.EVICTION_PREFERENCE in context.order:
        preference = protection.eviction_preference(pod, context.config.protection, tier=context.tier)
    return ranking.RankingInput(
        view=view,
        pod=pod,
        usage=used,
        request=facts.request if SIGNAL_TABLE[context.signal].unit is Unit.BYTES else None,
        eviction_preference=preference,
        growth=context.growth_rate(view.usage, used) if context.growth_rate is not None else 0.0,
        only_replica=context.replicas is None or pod.owner is None or context.replicas.get(pod.owner.uid, 0) < 2,
        wall_time=context.snapshot.wall_time,
    )


def _plausible_usage(context: _RankingContext, view: PodView, facts: PodFacts) -> int | None:
    """The pod's usage of the resource; None if it is unknown, stale, implausible or beside an implausible request."""
    usage, at = view.usage, context.snapshot.taken_at
    if usage is None or facts.implausible_request:
        return None
    if not at - context.config.sampling.stale_after_s <= usage.read_at <= at + plausibility.MAX_CLOCK_SKEW_S:
        return None
    if context.signal in DISK_SIGNALS and pod_usage.disk_usage_expired(usage, at=at):
        return None
    return pod_usage.signal_usage(
        usage,
        context.signal,
        context.snapshot.layout,
        limit=context.usage_limit,
        memory=context.memory_rule,
        kubelet=context.config.ranking.kubelet,
    )


def _ranks_by_writes(context: _RankingContext, inputs: Sequence[ranking.RankingInput]) -> bool:
    return (
        context.tier is Tier.HARD
        and context.signal in DISK_BYTE_SIGNALS
        and context.snapshot.layout is not DiskLayout.UNKNOWN  # else it is unknown which file system a pod writes to
        and all(each.usage is None for each in inputs)
    )


def _written_bytes(context: _RankingContext, view: PodView) -> int | None:
    max_age_s, at = context.config.sampling.stale_after_s, context.snapshot.taken_at
    return pod_usage.written_bytes(view.usage, at=at, max_age_s=max_age_s, limit=context.used)


def _ranked_pod(
    context: _RankingContext,
    rank: int,
    ranked: ranking.RankingInput,
    facts: PodFacts,
    values: tuple[float, ...],
    *,
    by_writes: bool,
) -> RankedPod:
    view, used = ranked.view, ranked.usage
    freed = used if by_writes else _predicted_relief(context, ranked)
    refusals = facts.refusals + protection.momentary_refusals(view.pod, view.usage, used, context.rules)
    if context.spares_within_request and used is not None and ranked.request is not None and used <= ranked.request:
        refusals = (*refusals, protection.WITHIN_REQUEST)
    if context.snapshot.own_pod_uid and view.pod.uid == context.snapshot.own_pod_uid:
        refusals = (protection.OWN_POD, *refusals)
    if context.minimum is not None and not refusals and (freed or 0) < context.minimum.relief:
        refusals = (context.minimum.refusal,)
    swap = 0
    if context.memory_rule.swap_limit and used is not None and view.usage is not None:
        swap = pod_usage.swap_usage(view.usage, limit=context.memory_rule.swap_limit)
    return RankedPod(view, rank, (), used, ranked.request, freed, refusals, values, swap)


def _predicted_relief(context: _RankingContext, ranked: ranking.RankingInput) -> int | None:
    """What the eviction frees, for PIDs with the children that no sample contains; None if the usage is unknown."""
    if ranked.usage is None:
        return None
    usage, layout = ranked.view.usage, context.snapshot.layout
    freed = relief.predicted_relief(
        usage, context.signal, layout, limit=context.usage_limit, swap_memory=context.swap_memory
    )
    if context.signal in DISK_BYTE_SIGNALS and freed is not None:
        freed = min(freed, context.used)
    if context.unseen_pids and freed is not None:
        freed += min(context.unseen_pids, usage_growth.expected_forks(usage))
    return freed
