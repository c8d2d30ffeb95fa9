"""Which request would have kept a pod: the decision is made again with other requests of this one pod.

1. The answer is the policy's own: `engine.decide` with the recorded snapshot, state and time. Nothing is estimated.
2. First the recorded decision is repeated unchanged. If it does not evict the pod again, the configuration is not the
   one that was in force, and there is no answer.
3. Only the request of this pod changes, and its QoS class where that follows: a BestEffort pod with a request is
   Burstable. Its usage, and everything else of the node, stays as it was.

Theory of operation. More request never moves a pod forward in the order, so the smallest one that keeps it is found by
bisection, to 1 MiB, between what it has and the capacity of the node: 15 decisions for 16 GiB. A pod with such a
request may not have been scheduled to this node at all; `sum_of_requests` lets a report state that.
"""

import enum
from typing import Final, NamedTuple

from nodeagent.config import above_kubelet
from nodeagent.config.schema import Config, Mode
from nodeagent.model import (
    SIGNAL_TABLE,
    Plan,
    Pod,
    PodView,
    QOSClass,
    RefusalCode,
    Resources,
    Signal,
    Unit,
    Victim,
)
from nodeagent.policy import engine, requests
from nodeagent.records.flight_recorder import DecisionInputs

STEP: Final = 1 << 20
"""Answers are multiples of this."""


class Verdict(enum.StrEnum):
    """What the search found."""

    KEPT = "kept"
    """`request` would have kept the pod."""
    NONE = "none"
    """No request up to the capacity of the node would have."""
    NO_REQUEST = "no-request"
    """The resource has no request: inodes, processes, a limit of the pod's own."""
    NOT_REPEATED = "not-repeated"
    """The configuration does not evict the pod again."""


class KeptRequest(NamedTuple):
    """The smallest request that would have kept a pod."""

    verdict: Verdict
    signal: Signal
    request: int | None = None
    """In bytes."""
    now: int | None = None
    """The request that the pod had."""
    victims: tuple[Pod, ...] = ()
    """The pods that would have been evicted with it; none: no pod would have been."""
    refusals: tuple[RefusalCode, ...] = ()
    """Why no pod would have been evicted with it."""
    limit: int | None = None
    """The pod's own memory limit if it is below `request`, which Kubernetes does not accept."""
    sum_of_requests: int | None = None
    """Of all pods on the node with it; None: one is unknown."""
    capacity: int | None = None


def find(inputs: DecisionInputs, victim_uid: str, config: Config) -> KeptRequest:
    """The smallest request with which `victim_uid` is no victim of this decision.

    Raises ValueError and others if the inputs are inconsistent, as those of an altered file can be.
    """
    config = above_kubelet.keep_above(config, inputs.kubelet)._replace(mode=Mode.DRY_RUN)
    plan = _decide(inputs, config)
    victim = next((each for each in plan.victims if each.pod.uid == victim_uid), None)
    signal = Signal.MEMORY if victim is None else victim.threshold.signal
    if victim is None:
        return KeptRequest(Verdict.NOT_REPEATED, signal)
    if SIGNAL_TABLE[signal].unit is not Unit.BYTES or victim.limit:
        return KeptRequest(Verdict.NO_REQUEST, signal)
    return _search(inputs, victim, signal, config)


def _search(inputs: DecisionInputs, victim: Victim, signal: Signal, config: Config) -> KeptRequest:
    view = next(each for each in inputs.snapshot.pods if each.pod.uid == victim.pod.uid)
    now = requests.ranking_request(view, signal=signal)
    capacity = inputs.snapshot.observations[signal].capacity
    if capacity is None:
        return KeptRequest(Verdict.NONE, signal, now=now)

    def plan_with(request: int) -> Plan:
        return _decide(_with_request(inputs, victim.pod.uid, signal, request), config)

    def evicts(request: int) -> bool:
        return any(each.pod.uid == victim.pod.uid for each in plan_with(request).victims)

    low, high = (now or 0) // STEP, max(capacity // STEP, (now or 0) // STEP + 1)
    if evicts(high * STEP):
        return KeptRequest(Verdict.NONE, signal, now=now, capacity=capacity)
    while high - low > 1:
        middle = (low + high) // 2
        if evicts(middle * STEP):
            low = middle
        else:
            high = middle
    plan = plan_with(high * STEP)
    limit = _limit(view.pod) if signal in (Signal.MEMORY, Signal.ALLOCATABLE_MEMORY) else None
    return KeptRequest(
        Verdict.KEPT,
        signal,
        request=high * STEP,
        now=now,
        victims=tuple(each.pod for each in plan.victims),
        refusals=tuple(dict.fromkeys(refusal.code for refusal in plan.eviction_refusals)),
        limit=limit if limit is not None and limit < high * STEP else None,
        sum_of_requests=_sum_of_requests(_with_request(inputs, victim.pod.uid, signal, high * STEP), signal),
        capacity=capacity,
    )


def _decide(inputs: DecisionInputs, config: Config) -> Plan:
    return engine.decide(inputs.snapshot, inputs.state, now=inputs.now, config=config)[0]


def _with_request(inputs: DecisionInputs, uid: str, signal: Signal, request: int) -> DecisionInputs:
    pods = tuple(view if view.pod.uid != uid else _requesting(view, signal, request) for view in inputs.snapshot.pods)
    return inputs._replace(snapshot=inputs.snapshot._replace(pods=pods))


def _requesting(view: PodView, signal: Signal, request: int) -> PodView:
    """The pod with this request, overhead included."""
    pod, memory = view.pod, signal in (Signal.MEMORY, Signal.ALLOCATABLE_MEMORY)
    qos = QOSClass.BURSTABLE if pod.qos_class is QOSClass.BEST_EFFORT and request else pod.qos_class
    if memory:
        own = (pod.pod_requests or Resources())._replace(memory=max(0, request - (pod.overhead.memory or 0)))
        pod = pod._replace(pod_requests=own)
    else:
        storage = max(0, request - (pod.overhead.ephemeral_storage or 0))
        containers = tuple(
            each._replace(
                requests=each.requests._replace(ephemeral_storage=0 if number else storage),
                allocated=None if each.allocated is None else each.allocated._replace(ephemeral_storage=None),
            )
            for number, each in enumerate(pod.containers)
        )
        pod = pod._replace(containers=containers)
    usage = None if view.usage is None else view.usage._replace(qos_class=qos)
    return PodView(pod._replace(qos_class=qos), usage)


def _limit(pod: Pod) -> int | None:
    """The memory limit of the pod; None: one of its containers has none."""
    if pod.pod_limits is not None and pod.pod_limits.memory is not None:
        return pod.pod_limits.memory
    limits = [each.limits.memory for each in pod.containers]
    known = [limit for limit in limits if limit is not None]
    return sum(known) if known and len(known) == len(limits) else None


def _sum_of_requests(inputs: DecisionInputs, signal: Signal) -> int | None:
    each = [requests.ranking_request(view, signal=signal) for view in inputs.snapshot.pods]
    known = [request for request in each if request is not None]
    return sum(known) if len(known) == len(each) else None
