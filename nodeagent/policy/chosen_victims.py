"""What the actuators get: a `Victim` with its text, method and grace, and its eviction in flight."""

import math

from nodeagent.config.schema import Config, OnBlocked
from nodeagent.model import (
    MIN_GRACE_S,
    Amount,
    MemoryFigures,
    MemoryModel,
    Method,
    Observation,
    Plan,
    Pod,
    PodView,
    RankedPod,
    Signal,
    SignalVerdict,
    Threshold,
    ThresholdVerdict,
    Tier,
    Victim,
    units,
)
from nodeagent.policy import (
    backoffs,
    in_flight,
    memory_shortage,
    messages,
    own_limit_eviction,
    own_limits,
    rate_limits,
)
from nodeagent.policy.in_flight import EvictionStage, InFlightEviction
from nodeagent.policy.local_storage_limits import Violation
from nodeagent.policy.own_limits import NearLimit
from nodeagent.policy.rate_limits import RateLimitState


def from_ranked(
    ranked: RankedPod,
    verdict: ThresholdVerdict,
    observation: Observation,
    figures: MemoryFigures | None,
    limit_state: RateLimitState,
    config: Config,
) -> Victim:
    """The victim of a threshold. A PodDisruptionBudget that refused lately is overridden only by the hard tier with
    `onBlocked: delete`. `figures`: of a memory signal, for the text."""
    pod, usage = ranked.view
    tier = Tier.HARD if verdict.threshold.hard else Tier.SOFT
    text = messages.eviction_text(
        ranked.view, verdict=verdict, observation=observation, swap=ranked.swap, figures=figures
    )
    backoff = limit_state.pods.get(pod.uid)
    refused = backoff is not None and backoff.code in backoffs.BLOCKED
    overrides = refused and tier is Tier.HARD and config.escalation.on_blocked is OnBlocked.DELETE
    return Victim(
        pod=pod,
        cgroup=usage.cgroup if usage is not None else "",
        threshold=verdict.threshold,
        tier=tier,
        method=Method.DELETE if overrides else Method.EVICT,
        grace_period_s=grace_s(pod, tier, config=config),
        message=text.message,
        annotations=text.annotations,
        predicted_relief=ranked.relief,
    )


def over_limit(violation: Violation, config: Config) -> Victim:
    """The victim of a limit of its own, as the kubelet evicts it: without event annotations, the limit as threshold."""
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


def near_limit(near: NearLimit) -> Victim:
    """The victim that is about to reach a memory limit of its own. It gets its whole grace period: preStop runs."""
    pod, usage = near.view
    limit = Amount(near.own.limit, None, units.format_spec_quantity(near.own.limit))
    name, used = own_limits.container_name(near.view, near.own), units.format_quantity(near.own.used)
    return Victim(
        pod=pod,
        cgroup=usage.cgroup if usage is not None else "",
        threshold=Threshold(Signal.MEMORY, limit),
        tier=Tier.SOFT,
        method=Method.EVICT,
        grace_period_s=_whole_grace_s(pod),
        message=f"{near.facts}; evicted before the kernel kills it. ",
        annotations={
            "offending_containers": name,
            "offending_containers_usage": used if name else "",
            "starved_resource": "memory",
        },
        predicted_relief=None,
        limit=own_limits.OWN_LIMIT,
    )


def planned_eviction(
    chosen: Victim,
    observation: Observation,
    *,
    plan_id: str,
    sample_at: float,
    now: float,
    config: Config,
    spends_tokens: bool,
) -> InFlightEviction:
    """The eviction in flight of a victim. A pod that is only shortened spends no token and starts no back-off.
    `observation` is the signal by the memory model that shows its release."""
    pod, threshold = chosen.pod, chosen.threshold
    buckets: tuple[str, ...] = ()
    owner, expected_s = rate_limits.owner_of(pod), chosen.grace_period_s
    if chosen.limit == own_limits.OWN_LIMIT:
        # A pod may have any grace; evictions for the node do not wait for more than they would give it.
        owner, expected_s = rate_limits.own_limit_owner_of(pod), min(expected_s, config.eviction_max_pod_grace_period_s)
        buckets = own_limit_eviction.BUCKETS
    elif chosen.method is Method.KILL:
        buckets = (rate_limits.LAST_RESORT,)
    elif spends_tokens:
        buckets = rate_limits.bucket_keys(pod, chosen.limit or threshold.signal)
    return InFlightEviction(
        plan_id=plan_id,
        pod_uid=pod.uid,
        cgroup_uid=pod.cgroup_uid,
        pod=pod.key,
        owner=owner,
        signal=threshold.signal,
        memory_model=memory_shortage.release_model(threshold),
        tier=chosen.tier,
        stage=EvictionStage.PLANNED,
        planned_at=now,
        sample_at=sample_at,
        available=observation.available or 0,
        predicted=chosen.predicted_relief or 0,
        grace_s=expected_s,
        until=now + config.cluster.eviction_timeout_s + expected_s + in_flight.SLACK_S,
        buckets=buckets,
        limit=chosen.limit,
        request_s=config.eviction_request.deadline_s if chosen.method is Method.REQUEST else 0.0,
    )


def with_current_text(chosen: Victim, view: PodView, *, plan: Plan) -> Victim:
    """The victim with its text made from `view`, because the containers' own usage, which the message names, is read
    for victims only. A victim of a limit of its own keeps its text."""
    verdict = plan.acting_on
    if verdict is None or verdict.threshold != chosen.threshold:
        return chosen
    judged = next(each for each in plan.signals if each.signal is chosen.threshold.signal)
    swap = next((ranked.swap for ranked in plan.ranking if ranked.view.pod.uid == view.pod.uid), 0)
    observation, figures = _of_threshold(judged, verdict), judged.figures
    text = messages.eviction_text(view, verdict=verdict, observation=observation, swap=swap, figures=figures)
    return chosen._replace(message=text.message, annotations=text.annotations)


def _of_threshold(judged: SignalVerdict, verdict: ThresholdVerdict) -> Observation:
    """The sample that the threshold was judged by: thresholds of one signal may have different memory models."""
    model = verdict.threshold.memory_model
    if judged.figures is None or model is MemoryModel.LOWER:
        return judged.observation
    by_kernel = model is MemoryModel.MEM_AVAILABLE
    return judged.observation._replace(available=judged.figures.by_kernel if by_kernel else judged.figures.working_set)


def grace_s(pod: Pod, tier: Tier, *, config: Config) -> float:
    """The grace to request, in whole seconds: the configured one (hard) or the maximum (soft), or the pod's own if that
    is shorter."""
    limit_s = config.escalation.hard_grace_period_s if tier is Tier.HARD else config.eviction_max_pod_grace_period_s
    return float(math.ceil(max(MIN_GRACE_S, min(limit_s, _whole_grace_s(pod)))))


def _whole_grace_s(pod: Pod) -> float:
    own_s = pod.termination_grace_s if 0 <= pod.termination_grace_s < units.MAX_PLAUSIBLE else MIN_GRACE_S
    return float(math.ceil(max(MIN_GRACE_S, own_s)))
