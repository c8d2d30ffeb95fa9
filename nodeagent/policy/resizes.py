"""Raised memory limits: what was requested for each container, what the kubelet has made of it, and what is due next.

Promises:

1. Each raise has an entry before its request is sent, and its token is taken then: no crash requests twice for one
   token. A token returns only if the API server is proven to have changed nothing.
2. What came of a request is read from the pod alone: the limit in its spec, the limit and the conditions that the
   kubelet reports. The answer of the API server only says whether to wait for that.
3. A limit that another client has changed is no longer this agent's: its entry is dropped and nothing is restored.
4. A raise that the kubelet does not carry out is withdrawn, so that it is not carried out later.

Theory of operation. An entry knows the amounts before the first raise (`original`), those that the kubelet has carried
out (`carried`), and those of the spec before and after the last request (`previous`, `requested`). `advance` compares
them with a snapshot, `apply_outcome` with an answer; `own_limit_resize` orders the requests.
"""

import enum
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
from nodeagent.policy import rate_limits
from nodeagent.policy.rate_limits import RateLimitState

ACTUATE_S: Final = 15.0
"""How long the kubelet may take. It acts on the change of the spec at once and reports the new limit with its next look
at the runtime, a second or a few later."""
DEFERRED_S: Final = 5.0
"""A kubelet that has no room now tries again when a pod ends, and every 3 minutes (pkg/kubelet/allocation). Most pods
near their limit cannot wait for that."""
RETRY_S: Final = 600.0
"""After a refusal that will be repeated: a quota, a missing right, an infeasible resize."""
SOON_S: Final = 10.0
"""After a failure that passes."""
CONFLICT_S: Final = 1.0
"""After a conflict: the newer version of the pod arrives within moments."""
DRY_RUN_S: Final = 60.0
"""How long a dry run counts a container as raised."""
MAX_ENTRIES: Final = 256


class ResizeStage(enum.StrEnum):
    """Where the resize of a container stands."""

    PLANNED = "planned"
    """The raise is being requested."""
    REQUESTED = "requested"
    """The spec has the raised limit; the kubelet decides."""
    RAISED = "raised"
    """The kubelet has carried it out."""
    TO_WITHDRAW = "to-withdraw"
    """The kubelet has not carried it out: the spec must get the carried-out limit again."""
    WITHDRAWING = "withdrawing"
    RESTORING = "restoring"
    """The first limit is being requested again."""
    BACKED_OFF = "backed-off"
    """The last raise failed."""
    KEPT = "kept"
    """The API server refuses to lower the limit (before Kubernetes 1.34)."""
    DRY_RUN = "dry-run"


OPEN: Final = frozenset(
    {
        ResizeStage.PLANNED,
        ResizeStage.REQUESTED,
        ResizeStage.TO_WITHDRAW,
        ResizeStage.WITHDRAWING,
        ResizeStage.RESTORING,
    }
)
"""Something is awaited or due now."""


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

    @property
    def key(self) -> str:
        return key_of(self.pod_uid, self.container)


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
    return any(entry.stage in OPEN for entry in state.entries.values())


def restored(state: ResizeState) -> ResizeState:
    """The state after a reload or a start: the API server is asked again, and back-offs end."""
    entries = {
        key: entry._replace(until=entry.since) if entry.stage is ResizeStage.BACKED_OFF else entry
        for key, entry in state.entries.items()
    }
    return ResizeState(entries)


def after_suspend(state: ResizeState, slept_s: float) -> ResizeState:
    """The state after a suspend of the machine: the kubelet's time stood still."""
    entries = {
        key: entry._replace(since=entry.since + slept_s, until=entry.until + slept_s) if entry.stage in OPEN else entry
        for key, entry in state.entries.items()
    }
    return state._replace(entries=entries)


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
    return entry._replace(
        plan_id=plan_id,
        stage=ResizeStage.WITHDRAWING if withdraws else ResizeStage.RESTORING,
        previous=entry.requested,
        requested=entry.carried if withdraws else entry.original,
        since=now,
        until=now + timeout_s + ACTUATE_S,
    )


# --- what the pods show ----------------------------------------------------------------------------------------------


class Advanced(NamedTuple):
    state: ResizeState
    reports: tuple[ResizeOutcome, ...]


def advance(state: ResizeState, snapshot: NodeSnapshot, *, now: float, config: Config) -> Advanced:
    """The state by this snapshot, and what came of requests since the last one. Nothing changes without a list of the
    pods, and while `ownLimit.resize` is off."""
    off = not (config.own_limit.enabled and config.own_limit.resize.enabled)
    if not state.entries or off or snapshot.pods_synced_at is None:
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
    stage, requested = entry.stage, entry.requested.limit
    if stage is ResizeStage.DRY_RUN:
        return (entry if now < entry.until else None), None, ""
    if spec != requested and not (stage in OPEN and spec == entry.previous.limit):
        return None, ResizeResult.SUPERSEDED, f"its memory limit is {_amount(spec)} now, set by another client"
    if stage is ResizeStage.BACKED_OFF:
        if now < entry.until:
            return entry, None, ""
        back = entry._replace(stage=ResizeStage.RAISED, since=now, calm_since=None, why="")
        return (back if entry.carried != entry.original else None), None, ""
    if stage in (ResizeStage.RAISED, ResizeStage.KEPT):
        carried = entry.requested if actual == requested else entry.carried
        calm_since = (entry.calm_since or now) if _is_calm(entry, view, container, config) else None
        return entry._replace(carried=carried, calm_since=calm_since), None, ""
    if stage is ResizeStage.TO_WITHDRAW:
        return entry, None, ""
    if spec != requested:
        return (entry, None, "") if now < entry.until else _lost(entry, now)
    if stage is ResizeStage.WITHDRAWING:
        return entry._replace(stage=ResizeStage.BACKED_OFF, since=now, until=now + RETRY_S), None, ""
    if actual == requested:
        if stage is ResizeStage.RESTORING:
            return None, ResizeResult.RESTORED, f"its memory limit is {_amount(requested)} again"
        raised = entry._replace(stage=ResizeStage.RAISED, carried=entry.requested, since=now, calm_since=None)
        return (
            raised,
            ResizeResult.RESIZED,
            f"its memory limit is {_amount(requested)}, was {_amount(entry.carried.limit)}",
        )
    result, why = _failure(entry, view, now)
    if result is None:
        return entry, None, ""
    if stage is ResizeStage.RESTORING:
        # The spec has the first limit; the kubelet goes on to lower it by itself.
        return None, result, why
    return entry._replace(stage=ResizeStage.TO_WITHDRAW, since=now, until=now, why=f"{result}: {why}"), result, why


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
    return (
        _refused(entry, "no answer came, and the pod has not changed", now, RETRY_S),
        ResizeResult.NO_RESULT,
        ("no answer came, and the pod has not changed"),
    )


def _is_calm(entry: PodResize, view: PodView, container: Container, config: Config) -> bool:
    """Whether the container could live with its first limit. Unknown is not calm. The kubelet does not lower a limit
    below what is used, page cache included (KEP-1287, memory limit decreases)."""
    usage = view.usage
    own = (
        next((each for each in usage.own_limits if each.container_id == container.container_id), None)
        if usage
        else None
    )
    if usage is None or own is None or usage.memory_usage is None:
        return False
    if own.used > config.own_limit.trend_above * entry.original.limit:
        return False
    more = entry.requested.limit - entry.original.limit
    return usage.memory_limit is None or usage.memory_usage <= usage.memory_limit - more


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
    if entry is None or entry.plan_id != outcome.plan_id or entry.stage not in OPEN:
        return state, limit_state
    if result is ResizeResult.UNCERTAIN:
        return state, limit_state
    if result is ResizeResult.ACCEPTED:
        stage = ResizeStage.REQUESTED if entry.stage is ResizeStage.PLANNED else entry.stage
        after = entry._replace(stage=stage, until=now + ACTUATE_S)
    elif result is ResizeResult.DRY_RUN and entry.stage is ResizeStage.PLANNED:
        after = entry._replace(stage=ResizeStage.DRY_RUN, until=now + DRY_RUN_S)
    else:
        if entry.stage is ResizeStage.PLANNED:
            taken = (rate_limits.RESIZE,)
            limit_state = rate_limits.return_tokens(limit_state, taken, now=now, limits=config.rate_limits)
        after = _refused(entry, outcome.message, now, _retry_s(outcome), never=outcome.http_status == 422)
    return state._replace(entries={**state.entries, key: after}), limit_state


def _refused(entry: PodResize, why: str, now: float, retry_s: float, *, never: bool = False) -> PodResize:
    """The entry of a request that has changed nothing; what lowers the limit is tried again. `never`: it cannot be
    lowered at all."""
    stage, calm_since = ResizeStage.BACKED_OFF, None
    if entry.stage is ResizeStage.RESTORING:
        stage, calm_since = ResizeStage.KEPT if never else ResizeStage.RAISED, entry.calm_since
    elif entry.stage is ResizeStage.WITHDRAWING:
        stage = ResizeStage.KEPT if never else ResizeStage.TO_WITHDRAW
    return entry._replace(
        stage=stage, requested=entry.previous, since=now, until=now + retry_s, calm_since=calm_since, why=why
    )


def _retry_s(outcome: ResizeOutcome) -> float:
    if outcome.result is ResizeResult.REFUSED:
        return CONFLICT_S if outcome.http_status == 409 else RETRY_S
    if outcome.result in (ResizeResult.NOT_SENT, ResizeResult.NOT_FOUND):
        return max(SOON_S, outcome.retry_after_s or 0.0)
    return RETRY_S
