"""Raised memory limits: what was requested for each container, what the kubelet has made of it, and what is due next.

Promises:

1. Each raise has an entry before its request is sent, and its token is taken then: no crash requests twice for one
   token. A token returns only if the API server is proven to have changed nothing.
2. What came of a request is read from the pod alone: the limit in its spec, the limit and the conditions that the
   kubelet reports. The answer of the API server only says whether to wait for that.
3. A limit that another client has changed is no longer this agent's: its entry is dropped and nothing is restored.
4. A raise that the kubelet does not carry out is withdrawn, so that it is not carried out later. One that it carries
   out before that stays: the container may use it.
5. A request that was given up without an answer may still show in the spec, and is this agent's then.
6. Only time that the agent has watched is calm: not what passed before a start, in a suspend, or while it was off.

Theory of operation. An entry knows the amounts before the first raise (`original`), those that the kubelet has carried
out (`carried`), and those of the spec before and after the last request (`previous`, `requested`). `advance` compares
them with a snapshot, `apply_outcome` with an answer; `own_limit_resize` orders the requests.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from nodeagent.config.schema import Config
from nodeagent.model import (
    Container,
    MemoryAmounts,
    NodeSnapshot,
    PodView,
    ResizeOrder,
    ResizeOutcome,
    ResizeResult,
    units,
)
from nodeagent.policy import own_limits, rate_limits, resize_stages
from nodeagent.policy.rate_limits import RateLimitState
from nodeagent.policy.resize_stages import ResizeEvent, ResizeStage

ACTUATE_S: Final = 15.0
"""How long the kubelet may take. It acts on the change of the spec at once and reports the new limit with its next look
at the runtime, a second or a few later."""
DEFERRED_S: Final = 5.0
"""A kubelet without enough memory now tries again when a pod ends, and every 3 minutes (pkg/kubelet/allocation). Most
pods near their limit cannot wait for that."""
RETRY_S: Final = 600.0
"""After a refusal that will be repeated: a quota, a missing right, an infeasible resize."""
SOON_S: Final = 10.0
"""After a failure that passes."""
CONFLICT_S: Final = 1.0
"""After a conflict: the newer version of the pod arrives within moments."""
DRY_RUN_S: Final = 60.0
"""How long a dry run counts a container as raised."""
MAX_ENTRIES: Final = 256


class PodResize(NamedTuple):
    """One container whose limit was raised, or was to be."""

    plan_id: str
    """Of the last request."""
    pod_uid: str
    namespace: str
    name: str
    container: str
    stage: ResizeStage
    original: MemoryAmounts
    carried: MemoryAmounts
    previous: MemoryAmounts
    requested: MemoryAmounts
    since: float
    """When the last request was planned, or the stage began."""
    until: float
    """When waiting ends."""
    calm_since: float | None = None
    """Since when the container could live with its first limit."""
    why: str = ""
    """Of a failure."""
    unsettled: MemoryAmounts | None = None
    """What a request asked for that was given up without an answer, or before the spec had it."""

    @property
    def highest_limit(self) -> int:
        """The highest limit that the kubelet may set by what was requested."""
        amounts = [self.carried, self.requested]
        if self.stage in resize_stages.OPEN:
            amounts.append(self.previous)
        if self.unsettled is not None:
            amounts.append(self.unsettled)
        return max(each.limit for each in amounts)

    @property
    def key(self) -> str:
        return key_of(self.pod_uid, self.container)


def _step(entry: PodResize, event: ResizeEvent) -> PodResize | None:
    """The entry after an event; None if it has ended."""
    stage = resize_stages.TRANSITIONS[entry.stage, event]
    return None if stage is None else entry._replace(stage=stage)


def _moved(entry: PodResize, event: ResizeEvent) -> PodResize:
    """The entry after an event that does not end it."""
    after = _step(entry, event)
    assert after is not None, (entry.stage, event)
    return after


class ResizeState(NamedTuple):
    """All of them."""

    entries: Mapping[str, PodResize] = {}
    """By UID of the pod and name of the container."""
    not_served: str = ""
    """The API server has no `pods/resize`: nothing more is requested until a reload."""
    paused_until: float = 0.0
    """Nothing is requested before this: a right is missing."""
    paused_why: str = ""


def key_of(pod_uid: str, container: str) -> str:
    return f"{pod_uid}/{container}"


def is_open(state: ResizeState) -> bool:
    """True if decisions follow what the kubelet reports."""
    return any(entry.stage in resize_stages.OPEN for entry in state.entries.values())


def restored(state: ResizeState, *, watched: bool) -> ResizeState:
    """The state after a reload (`watched`) or a start: the API server is asked again, and back-offs and dry runs end.
    The back-off of a request that may still show in the spec does not."""
    ends = (ResizeStage.BACKED_OFF, ResizeStage.DRY_RUN)
    entries = {
        key: entry._replace(until=entry.since) if entry.stage in ends and entry.unsettled is None else entry
        for key, entry in state.entries.items()
    }
    return ResizeState(entries if watched else _not_calm(entries))


def _not_calm(entries: Mapping[str, PodResize]) -> dict[str, PodResize]:
    """After a time in which nothing was watched."""
    return {key: entry._replace(calm_since=None) for key, entry in entries.items()}


def after_suspend(state: ResizeState, slept_s: float) -> ResizeState:
    """The state after a suspend of the machine: the kubelet's time stood still."""
    entries = {
        key: entry._replace(since=entry.since + slept_s, until=entry.until + slept_s)
        if entry.stage in resize_stages.OPEN
        else entry
        for key, entry in state.entries.items()
    }
    return state._replace(entries=_not_calm(entries))


def planned(order: ResizeOrder, before: PodResize | None, *, plan_id: str, now: float, timeout_s: float) -> PodResize:
    """The entry of a raise that is ordered now."""
    return PodResize(
        plan_id,
        order.pod_uid,
        order.namespace,
        order.name,
        order.container,
        ResizeStage.PLANNED,
        original=before.original if before is not None else order.before,
        carried=order.before,
        previous=order.before,
        requested=order.to,
        since=now,
        until=now + timeout_s + ACTUATE_S,
    )


def lowered(entry: PodResize, *, plan_id: str, now: float, timeout_s: float) -> PodResize:
    """The entry of a withdrawal or a restoration that is ordered now."""
    withdraws = entry.stage is ResizeStage.TO_WITHDRAW
    return _moved(entry, ResizeEvent.LOWERING)._replace(
        plan_id=plan_id,
        previous=entry.requested,
        requested=entry.carried if withdraws else entry.original,
        since=now,
        until=now + timeout_s + ACTUATE_S,
        unsettled=None,
    )


def kept(entry: PodResize, why: str, *, now: float) -> PodResize:
    """The entry of a limit that cannot be lowered."""
    return _moved(entry, ResizeEvent.CANNOT_LOWER)._replace(since=now, until=now, why=why)


# --- what the pods show ----------------------------------------------------------------------------------------------


class Advanced(NamedTuple):
    state: ResizeState
    reports: tuple[ResizeOutcome, ...]


def advance(state: ResizeState, snapshot: NodeSnapshot, *, now: float, config: Config) -> Advanced:
    """The state by this snapshot, and what came of requests since the last one. Nothing is known without a list of the
    pods, and nothing is watched while `ownLimit.resize` is off."""
    if not (config.own_limit.enabled and config.own_limit.resize.enabled):
        return Advanced(state._replace(entries=_not_calm(state.entries)), ())
    if not state.entries or snapshot.pods_synced_at is None:
        return Advanced(state, ())
    views = {view.pod.uid: view for view in snapshot.pods}
    entries: dict[str, PodResize] = {}
    reports = []
    for key, entry in state.entries.items():
        view = views.get(entry.pod_uid)
        container = find_container(view, entry.container) if view is not None else None
        if view is None or container is None or view.pod.terminating or view.pod.finished:
            continue
        after, result, message = _advanced(entry, view, container, now=now, config=config)
        if after is not None:
            entries[key] = after
        if result is not None:
            reports.append(_report(entry, result, message, now))
    return Advanced(state._replace(entries=entries), tuple(reports))


def find_container(view: PodView, name: str) -> Container | None:
    """The container of this name."""
    return next((each for each in view.pod.containers if each.name == name), None)


def _advanced(
    entry: PodResize, view: PodView, container: Container, *, now: float, config: Config
) -> tuple[PodResize | None, ResizeResult | None, str]:
    """The entry, or None if it has ended; what came of the last request, if that is known now; and a text about it."""
    spec = container.limits.memory
    actual = container.actual_limits.memory if container.actual_limits is not None else None
    if entry.stage is ResizeStage.DRY_RUN:
        if spec == entry.previous.limit and now < entry.until:
            return entry, None, ""
        entry = _moved(entry, ResizeEvent.TIME_UP)._replace(requested=entry.previous)
    entry = _shown(entry, spec, now)
    stage, requested = entry.stage, entry.requested.limit
    if spec != requested and not (stage in resize_stages.OPEN and spec == entry.previous.limit):
        ended = _step(entry, ResizeEvent.SUPERSEDED)
        return ended, ResizeResult.SUPERSEDED, f"its memory limit is {_amount(spec)} now, set by another client"
    if stage is ResizeStage.BACKED_OFF:
        if now < entry.until:
            return entry, None, ""
        after = _step(entry, ResizeEvent.TIME_UP if entry.carried != entry.original else ResizeEvent.NOTHING_RAISED)
        return after and after._replace(since=now, calm_since=None, why="", unsettled=None), None, ""
    if stage in (ResizeStage.RAISED, ResizeStage.KEPT):
        carried = entry.requested if actual == requested else entry.carried
        calm_since = (entry.calm_since or now) if _is_calm(entry, view, container, now, config) else None
        return entry._replace(carried=carried, calm_since=calm_since), None, ""
    if stage is ResizeStage.TO_WITHDRAW and actual != requested:
        return entry, None, ""
    if spec != requested:
        return (entry, None, "") if now < entry.until else _lost(entry, now)
    if stage is ResizeStage.WITHDRAWING:
        return _moved(entry, ResizeEvent.WITHDRAWN)._replace(since=now, until=now + RETRY_S), None, ""
    if actual == requested:
        after = _step(entry, ResizeEvent.CARRIED_OUT)
        if after is None:
            return None, ResizeResult.RESTORED, f"its memory limit is {_amount(requested)} again"
        text = f"its memory limit is {_amount(requested)}, was {_amount(entry.carried.limit)}"
        raised = after._replace(carried=entry.requested, since=now, calm_since=None, why="")
        return raised, ResizeResult.RESIZED, text
    result, why = _failure(entry, view, now)
    if result is None:
        return entry, None, ""
    after = _step(entry, ResizeEvent.NOT_CARRIED_OUT)
    return after and after._replace(since=now, until=now, why=f"{result}: {why}"), result, why


def _shown(entry: PodResize, spec: int | None, now: float) -> PodResize:
    """The entry with its request that was given up as the last one, if the spec has it now."""
    late = entry.unsettled
    if late is None or spec != late.limit or spec == entry.requested.limit:
        return entry
    event = ResizeEvent.LATE_RESTORATION if late.limit != entry.carried.limit else ResizeEvent.LATE_WITHDRAWAL
    if late.limit > entry.requested.limit:
        event = ResizeEvent.LATE_RAISE
    return _moved(entry, event)._replace(
        previous=entry.requested, requested=late, since=now, until=now + ACTUATE_S, unsettled=None, why=""
    )


def _failure(entry: PodResize, view: PodView, now: float) -> tuple[ResizeResult | None, str]:
    """Why the kubelet has not carried out what is in the spec; None while it may still do so."""
    pod = view.pod
    if pod.resize_pending == "Infeasible":
        return ResizeResult.INFEASIBLE, pod.resize_message or "the kubelet calls it infeasible"
    if pod.resize_pending and now - entry.since >= DEFERRED_S:
        return ResizeResult.DEFERRED, pod.resize_message or f"the kubelet calls it {pod.resize_pending}"
    if pod.resize_failed:
        return ResizeResult.FAILED, pod.resize_message or "PodResizeInProgress has the reason Error"
    if now >= entry.until:
        return ResizeResult.NO_RESULT, "the kubelet has not reported the new limit"
    return None, ""


def _lost(entry: PodResize, now: float) -> tuple[PodResize | None, ResizeResult | None, str]:
    """The spec never got what was requested: no answer came, and the process may have died before it sent anything."""
    why = "no answer came, and the pod has not changed"
    after = _refused(entry, why, now, RETRY_S)
    return after._replace(unsettled=entry.requested), ResizeResult.NO_RESULT, why


def _is_calm(entry: PodResize, view: PodView, container: Container, now: float, config: Config) -> bool:
    """Whether the container could live with its first limit. Unknown is not calm. The kubelet does not lower a limit
    below what is used, page cache included (KEP-1287, memory limit decreases); of a pod without a limit no more is
    known of a container than of the whole pod."""
    usage = view.usage
    own = (
        next((each for each in usage.own_limits if each.container_id == container.container_id), None)
        if usage
        else None
    )
    if usage is None or own is None or usage.memory_usage is None or not own_limits.usable(own, now, config):
        return False
    if own.used > config.own_limit.trend_above * entry.original.limit:
        return False
    more = entry.requested.limit - entry.original.limit
    return usage.memory_usage <= (entry.original.limit if usage.memory_limit is None else usage.memory_limit - more)


def _report(entry: PodResize, result: ResizeResult, message: str, now: float) -> ResizeOutcome:
    return ResizeOutcome(
        entry.plan_id, entry.pod_uid, entry.namespace, entry.name, entry.container, result, message, now
    )


def _amount(amount: int | None) -> str:
    return "unlimited" if amount is None else units.format_spec_quantity(amount)


# --- what the API server answers -------------------------------------------------------------------------------------


def apply_outcome(
    state: ResizeState, limit_state: RateLimitState, outcome: ResizeOutcome, *, config: Config
) -> tuple[ResizeState, RateLimitState]:
    """The state after an answer. One that belongs to no open request changes nothing."""
    key, now, result = key_of(outcome.pod_uid, outcome.container), outcome.at, outcome.result
    entry = state.entries.get(key)
    if result is ResizeResult.NOT_SERVED:
        state = state._replace(not_served=outcome.message)
    elif result is ResizeResult.FORBIDDEN:
        state = state._replace(paused_until=now + RETRY_S, paused_why=outcome.message)
    if entry is None or entry.plan_id != outcome.plan_id or entry.stage not in resize_stages.OPEN:
        return state, limit_state
    if result is ResizeResult.UNCERTAIN:
        return state, limit_state
    if result is ResizeResult.ACCEPTED:
        after = _moved(entry, ResizeEvent.ACCEPTED)._replace(until=now + ACTUATE_S)
    elif result is ResizeResult.DRY_RUN and entry.stage is ResizeStage.PLANNED:
        after = _moved(entry, ResizeEvent.NOT_SENT)._replace(until=now + DRY_RUN_S)
    else:
        if entry.stage is ResizeStage.PLANNED:
            taken = (rate_limits.RESIZE,)
            limit_state = rate_limits.return_tokens(limit_state, taken, now=now, limits=config.rate_limits)
        after = _refused(entry, outcome.message, now, _retry_s(outcome), never=outcome.http_status == 422)
    return state._replace(entries={**state.entries, key: after}), limit_state


def _refused(entry: PodResize, why: str, now: float, retry_s: float, *, never: bool = False) -> PodResize:
    """The entry of a request that has changed nothing; what lowers the limit is tried again. `never`: it cannot be
    lowered at all."""
    lowers = entry.stage in (ResizeStage.RESTORING, ResizeStage.WITHDRAWING)
    after = _moved(entry, ResizeEvent.CANNOT_LOWER if never and lowers else ResizeEvent.REFUSED)
    calm_since = entry.calm_since if entry.stage is ResizeStage.RESTORING else None
    return after._replace(requested=entry.previous, since=now, until=now + retry_s, calm_since=calm_since, why=why)


def _retry_s(outcome: ResizeOutcome) -> float:
    if outcome.result is ResizeResult.REFUSED:
        return CONFLICT_S if outcome.http_status == 409 else RETRY_S
    if outcome.result in (ResizeResult.NOT_SENT, ResizeResult.NOT_FOUND):
        return max(SOON_S, outcome.retry_after_s or 0.0)
    return RETRY_S
