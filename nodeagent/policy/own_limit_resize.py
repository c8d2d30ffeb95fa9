"""Which memory limits are raised in place (`ownLimit.resize`), by how much, and which are restored or withdrawn now.

Promises:

1. A limit rises by `step` at most to its ceiling, and only if the node has what the raise adds, twice over: free memory
   above every memory threshold, and allocatable memory beyond the requests of all pods. Earlier raises count in both as
   if they were used up. What is unknown is not there.
2. The QoS class stays: of a Guaranteed pod the request rises with the limit, of a Burstable one only the limit.
3. A container whose resizePolicy restarts it is never resized, and no pod of kube-system.
4. No limit is lowered below what is used of it and a margin (`ResizeConfig.undo_after_s`).
5. A pod whose raise is under way is not evicted for its limit; every other outcome has a `Refusal`, and leaves the pod
   to `own_limit_eviction`. This holds also while nothing may be requested, and for a pod whose turn comes next.

A raise is no eviction: PodDisruptionBudgets and the other protections do not apply. It follows the pods near a limit
(`own_limits`), restarts nothing, and may be too late for a pod that jumps over the rest of its limit.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from nodeagent.config.schema import Config
from nodeagent.model import (
    MEMORY_SIGNALS,
    Container,
    ContainerKind,
    MemoryAmounts,
    NodeSnapshot,
    Pod,
    PodView,
    QOSClass,
    Refusal,
    RefusalCode,
    ResizeOrder,
    Signal,
    SignalVerdict,
    units,
)
from nodeagent.policy import own_limits, preconditions, rate_limits, requests, resizes, streams
from nodeagent.policy.own_limits import NearLimit
from nodeagent.policy.rate_limits import RateLimitState
from nodeagent.policy.resize_stages import ResizeStage
from nodeagent.policy.resizes import PodResize, ResizeState

MIB: Final = 1 << 20
KUBE_SYSTEM: Final = "kube-system"
SETTLE_S: Final = 6.0
"""After a raise the cgroup's limit is read again within 5 s (`sampling.pods.own_limits.LIMIT_AGE_S`); until then the
pod looks near the old one."""


class ResizeSelection(NamedTuple):
    """The resizes to request now."""

    orders: tuple[ResizeOrder, ...]
    state: ResizeState
    limit_state: RateLimitState
    refusals: tuple[Refusal, ...] = ()
    """Why limits of pods that opted in are not raised."""
    busy: frozenset[str] = frozenset()
    """UIDs of pods that must not be evicted for their limit now: it is being raised."""


def select_resizes(
    near: Sequence[NearLimit],
    snapshot: NodeSnapshot,
    judged: Sequence[SignalVerdict],
    *,
    state: ResizeState,
    limit_state: RateLimitState,
    plan_id: str,
    now: float,
    config: Config,
) -> ResizeSelection:
    """The raises for the pods `near` a limit, with their tokens taken, and the limits to lower again; at most
    `relief.maxVictims` of each in one decision."""
    nothing = ResizeSelection((), state, limit_state)
    if not config.own_limit.resize.enabled or _blocked(snapshot, now=now, config=config):
        return nothing
    near = [each for each in near if own_limits.resize_opted_in(each.view.pod, config)]
    waiting = _waiting(state, now=now)
    if (pause := _pause(state, now=now)) is not None:
        paused = tuple([_about(each, waiting.get(each.view.pod.uid, pause)) for each in near])
        return nothing._replace(refusals=paused, busy=frozenset(waiting))
    uids = frozenset([each.view.pod.uid for each in near])
    orders, state = _lower(snapshot, state, near=uids, plan_id=plan_id, now=now, config=config)
    spare = headroom(snapshot, judged, state, now=now, config=config)
    refusals: list[Refusal] = []
    busy = list(waiting)
    most = len(orders) + config.relief.max_victims
    for each in near:
        raised = waiting.get(each.view.pod.uid) or _raise(each, snapshot, state, spare, now=now, config=config)
        if isinstance(raised, ResizeOrder) and len(orders) >= most:
            raised = Refusal(RefusalCode.WAITS_FOR_RESIZE, "is raised after those of other pods")
        elif isinstance(raised, ResizeOrder):
            taken = rate_limits.take_tokens(limit_state, (rate_limits.RESIZE,), now=now, limits=config.rate_limits)
            if isinstance(taken, Refusal):
                raised = taken
            else:
                limit_state = taken
                orders.append(raised)
                key = resizes.key_of(raised.pod_uid, raised.container)
                timeout_s = config.cluster.request_timeout_s
                entry = resizes.planned(raised, state.entries.get(key), plan_id=plan_id, now=now, timeout_s=timeout_s)
                state = state._replace(entries={**state.entries, key: entry})
                if isinstance(spare, int):
                    spare -= raised.to.limit - raised.before.limit
        if isinstance(raised, ResizeOrder) or raised.code is RefusalCode.WAITS_FOR_RESIZE:
            busy.append(each.view.pod.uid)
        if isinstance(raised, Refusal):
            refusals.append(_about(each, raised))
    return ResizeSelection(tuple(orders), state, limit_state, tuple(refusals), frozenset(busy))


def _blocked(snapshot: NodeSnapshot, *, now: float, config: Config) -> bool:
    """The evictions for the same limits report why."""
    blocked = preconditions.blocks_all_evictions(snapshot, now=now, config=config)
    return (blocked or preconditions.own_limit_blocked(snapshot)) is not None


def _waiting(state: ResizeState, *, now: float) -> dict[str, Refusal]:
    """The pods with a resize under way, by UID, and which."""
    standing = ((entry.pod_uid, _standing(entry, now=now)) for entry in state.entries.values())
    return {uid: one for uid, one in standing if one is not None and one.code is RefusalCode.WAITS_FOR_RESIZE}


def _pause(state: ResizeState, *, now: float) -> Refusal | None:
    if state.not_served:
        why = f"the API server does not serve pods/resize, and is not asked again until a reload: {state.not_served}"
        return Refusal(RefusalCode.RESIZE_FAILED, why)
    if now < state.paused_until:
        why = f"{state.paused_why}; next in {state.paused_until - now:.0f}s"
        return Refusal(RefusalCode.RESIZE_FAILED, why)
    return None


def _about(near: NearLimit, refusal: Refusal) -> Refusal:
    key = near.view.pod.key
    waits = refusal.code is RefusalCode.WAITS_FOR_RESIZE
    subject = f"the memory limit of {key}" if waits else f"the memory limit of {key} is not raised:"
    return Refusal(refusal.code, f"{subject} {refusal.message}")


# --- lower -----------------------------------------------------------------------------------------------------------


def _lower(
    snapshot: NodeSnapshot, state: ResizeState, *, near: frozenset[str], plan_id: str, now: float, config: Config
) -> tuple[list[ResizeOrder], ResizeState]:
    """The limits to lower now: raises that the kubelet did not carry out, and those that are no longer needed."""
    views = {view.pod.uid: view for view in snapshot.pods}
    orders: list[ResizeOrder] = []
    entries = dict(state.entries)
    for key, entry in state.entries.items():
        view = views.get(entry.pod_uid)
        container = resizes.find_container(view, entry.container) if view is not None else None
        due = entry.stage is ResizeStage.TO_WITHDRAW or (
            _restore_due(entry, now=now, config=config) and entry.pod_uid not in near
        )
        if (
            not due
            or now < entry.until
            or view is None
            or container is None
            or not view.pod.resource_version
            or len(orders) >= config.relief.max_victims
        ):
            continue
        if container.memory_restarts:  # its resizePolicy was changed after the raise
            why = f"the resizePolicy of container {container.name} would restart it"
            entries[key] = resizes.kept(entry, why, now=now)
            continue
        after = resizes.lowered(entry, plan_id=plan_id, now=now, timeout_s=config.cluster.request_timeout_s)
        to = units.format_spec_quantity(after.requested.limit)
        reason = f"withdrawn: {entry.why}" if entry.why else "no longer needed"
        message = f"The raise of the memory limit of container {entry.container} is {reason}; it gets {to} again."
        orders.append(_order(view.pod, container, entry.requested, after.requested, message, lowers=True))
        entries[key] = after
    return orders, state._replace(entries=entries)


def _restore_due(entry: PodResize, *, now: float, config: Config) -> bool:
    calm_since = entry.calm_since if entry.stage is ResizeStage.RAISED else None
    return calm_since is not None and now - calm_since >= config.own_limit.resize.undo_after_s


def _order(
    pod: Pod, container: Container, before: MemoryAmounts, to: MemoryAmounts, message: str, *, lowers: bool = False
) -> ResizeOrder:
    return ResizeOrder(
        pod_uid=pod.uid,
        namespace=pod.namespace or "",
        name=pod.name or "",
        resource_version=pod.resource_version,
        container=container.name,
        sidecar=container.kind is ContainerKind.SIDECAR,
        before=before,
        to=to,
        lowers=lowers,
        message=message,
    )


# --- raise -----------------------------------------------------------------------------------------------------------


def _raise(
    near: NearLimit, snapshot: NodeSnapshot, state: ResizeState, spare: int | Refusal, *, now: float, config: Config
) -> ResizeOrder | Refusal:
    """The raise of one container, or why there is none."""
    pod, rules = near.view.pod, config.own_limit.resize
    container = _nearest_container(near)
    if container is None:
        return Refusal(RefusalCode.RESIZE_IMPOSSIBLE, "no container of it has a known limit")
    entry = state.entries.get(resizes.key_of(pod.uid, container.name))
    if (waits := _standing(entry, now=now)) is not None:
        return waits
    if reason := _impossible(pod, container, snapshot):
        return Refusal(RefusalCode.RESIZE_IMPOSSIBLE, reason)
    if isinstance(spare, Refusal):
        return spare
    if len(state.entries) >= resizes.MAX_ENTRIES and entry is None:
        return Refusal(RefusalCode.RESIZE_IMPOSSIBLE, f"{resizes.MAX_ENTRIES} containers are raised already")
    spec, actual = container.limits.memory, container.actual_limits
    allocatable = snapshot.allocatable_memory
    assert spec is not None
    assert actual is not None
    assert allocatable is not None
    # The kubelet may not have lowered a limit yet that the spec has lowered.
    base = max(spec, actual.memory or 0)
    first = entry.original.limit if entry is not None else spec
    ceiling = min(int(rules.ceiling * first), int(rules.node_share * allocatable)) // MIB * MIB
    wanted = min(-(-int(base * (1 + rules.step)) // MIB) * MIB, ceiling)
    if wanted < base * (1 + rules.step / 2):
        texts = [units.format_spec_quantity(each) for each in (base, ceiling, first)]
        return Refusal(
            RefusalCode.RESIZE_CEILING,
            f"it is {texts[0]}, the ceiling {texts[1]}, the limit before any raise {texts[2]}",
        )
    if wanted - base > spare:
        more, left = units.format_amount(wanted - base), units.format_amount(max(0, spare))
        return Refusal(RefusalCode.RESIZE_NO_HEADROOM, f"it would need {more}, the node has {left} left for raises")
    guaranteed = pod.qos_class is QOSClass.GUARANTEED
    before = MemoryAmounts(spec, container.requests.memory if guaranteed else None)
    to = units.format_spec_quantity(wanted)
    message = f"{near.facts}; the limit of container {container.name} is raised to {to}."
    return _order(pod, container, before, MemoryAmounts(wanted, wanted if guaranteed else None), message)


def _nearest_container(near: NearLimit) -> Container | None:
    """The container whose limit it is; for the limit of the whole pod the one that uses most of its own."""
    usage = near.view.usage
    identity = near.own.container_id
    if not identity and usage is not None:
        owned = [each for each in usage.own_limits if each.container_id and each.limit > 0]
        identity = max(owned, key=lambda each: each.used / each.limit).container_id if owned else ""
    containers = (each for each in near.view.pod.containers if identity and each.container_id == identity)
    return next(containers, None)


def _standing(entry: PodResize | None, *, now: float) -> Refusal | None:
    """Why an earlier resize of the container speaks against one now."""
    if entry is None:
        return None
    limit = units.format_spec_quantity(entry.requested.limit)
    settles = entry.stage is ResizeStage.RAISED and 0.0 <= now - entry.since < SETTLE_S and not entry.why
    if settles or entry.stage in (ResizeStage.PLANNED, ResizeStage.REQUESTED, ResizeStage.DRY_RUN):
        word = "was raised" if settles else "is being raised"
        return Refusal(RefusalCode.WAITS_FOR_RESIZE, f"{word} to {limit}")
    if entry.stage is ResizeStage.RESTORING:
        return Refusal(RefusalCode.WAITS_FOR_RESIZE, f"is being set to {limit} again")
    if entry.stage in (ResizeStage.TO_WITHDRAW, ResizeStage.WITHDRAWING):
        return Refusal(RefusalCode.RESIZE_FAILED, f"the last raise is withdrawn: {entry.why}")
    if entry.stage in (ResizeStage.BACKED_OFF, ResizeStage.KEPT) and entry.why and now < entry.until:
        return Refusal(RefusalCode.RESIZE_FAILED, f"{entry.why}; next in {entry.until - now:.0f}s")
    return None


def _impossible(pod: Pod, container: Container, snapshot: NodeSnapshot) -> str:
    """Why the API server or the kubelet would refuse it (ValidatePodResize; pkg/kubelet/allocation), or empty."""
    reasons = (
        (bool(pod.static or pod.mirror_of), "a static pod cannot be resized"),
        (not pod.resource_version, "the version of the pod is unknown, so that changes of others could be lost"),
        (pod.namespace == KUBE_SYSTEM, f"it is a pod of {KUBE_SYSTEM}"),
        (pod.uid == snapshot.own_pod_uid, "it is the agent's own pod"),
        (pod.finished or pod.terminating, "the pod is ending"),
        (pod.pod_limits is not None, "the pod has resources of its own besides those of its containers"),
        (container.kind is ContainerKind.INIT, f"{container.name} is an init container"),
        (container.memory_restarts, f"the resizePolicy of container {container.name} would restart it"),
        (container.limits.memory is None, f"the spec of container {container.name} has no limit"),
        (container.actual_limits is None, "the kubelet reports no resources of its containers, as before 1.33"),
        (bool(pod.resize_pending), f"another resize of the pod is pending ({pod.resize_pending})"),
        (pod.resize_failed, f"another resize of the pod has failed: {pod.resize_message}"),
    )
    return next((reason for holds, reason in reasons if holds), "")


# --- what the node has -----------------------------------------------------------------------------------------------


def headroom(
    snapshot: NodeSnapshot, judged: Sequence[SignalVerdict], state: ResizeState, *, now: float, config: Config
) -> int | Refusal:
    """What raises may add, in bytes, or why nothing: the lower of free memory above every memory threshold and
    allocatable memory beyond all requests, each less what earlier raises may still take."""
    free = _free(snapshot, judged, now=now, config=config)
    if isinstance(free, Refusal):
        return free
    allocatable, requested = snapshot.allocatable_memory, _requested(snapshot.pods)
    if allocatable is None:
        return Refusal(RefusalCode.RESIZE_NO_HEADROOM, "the allocatable memory of the node is unknown")
    if isinstance(requested, str):
        return Refusal(RefusalCode.RESIZE_NO_HEADROOM, f"the memory request of {requested} is unknown")
    views = {view.pod.uid: view for view in snapshot.pods}
    unused = beyond_requests = 0
    for entry in state.entries.values():
        most, view = entry.highest_limit, views.get(entry.pod_uid)
        taken = _used(view).get(entry.container, 0) if view is not None else 0
        unused += max(0, most - max(entry.original.limit, taken))
        if entry.original.request is None:
            beyond_requests += most - entry.original.limit
        else:  # of a Guaranteed pod; `requested` has what the kubelet has allocated by now
            container = resizes.find_container(view, entry.container) if view is not None else None
            request = requests.container_request(container, signal=Signal.MEMORY) if container is not None else None
            beyond_requests += max(0, most - (request or 0))
    return min(free - unused, allocatable - requested - beyond_requests)


def _free(snapshot: NodeSnapshot, judged: Sequence[SignalVerdict], *, now: float, config: Config) -> int | Refusal:
    observation = snapshot.observations[Signal.MEMORY]
    unknown = streams.unusable(observation, now=now, stale_after_s=config.sampling.stale_after_s)
    if unknown or observation.available is None:
        return Refusal(RefusalCode.RESIZE_NO_HEADROOM, f"{Signal.MEMORY.value} is unknown: {unknown}")
    free = observation.available
    for verdict in judged:
        if verdict.signal not in MEMORY_SIGNALS:
            continue
        available = verdict.observation.available
        for each in verdict.thresholds:
            if each.met:
                return Refusal(RefusalCode.RESIZE_NO_HEADROOM, f"a threshold of {verdict.signal.value} is met")
            if each.value is None or available is None:
                return Refusal(RefusalCode.RESIZE_NO_HEADROOM, f"{verdict.signal.value} is unknown")
            free = min(free, available - each.value)
    return free


def _requested(views: Sequence[PodView]) -> int | str:
    """The memory requests of all pods, or the pod whose request is unknown."""
    total = 0
    for view in views:
        if view.pod.finished:
            continue
        request = requests.ranking_request(view, signal=Signal.MEMORY)
        if request is None:
            return view.pod.key
        total += request
    return total


def _used(view: PodView) -> dict[str, int]:
    """What its containers use of their limits, by name."""
    owned = {each.container_id: each.used for each in view.usage.own_limits} if view.usage is not None else {}
    return {each.name: owned.get(each.container_id, 0) for each in view.pod.containers}
