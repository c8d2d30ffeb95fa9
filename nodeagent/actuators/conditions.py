"""Publishes pressure conditions on the Node, beside a kubelet that writes three of them as well.

Theory of operation. The policy decides the status of each condition; the watch of the own Node has the present one; a
worker writes the difference, always between the newest of both. A live kubelet computes MemoryPressure, DiskPressure
and PIDPressure every 10 s and overwrites a foreign True with its own False (KUBELET-CONTRACT §10); it never changes
types that it does not manage. So there are two kinds:

* own types (`NodeAgentMemoryPressure`...), always published, True and False, with a heartbeat;
* the standard types: this agent only asserts True, and only clears a True that it has set itself.

    verdict True,  node not True       assert (mode `once`: one time for each True of the verdict)
    verdict True,  node True, own      heartbeat
    verdict True,  node True, foreign  leave: the kubelet agrees
    verdict False, node True, own      clear
    verdict False, otherwise           leave

What an earlier configuration has set goes: own types with `own: false`, the own True with `standard: off`.

Promises:

1. `publish` never blocks, and nothing stale is queued: after an outage the newest verdict is written.
2. If a kubelet overwrites an own True while the verdict holds, it is asserted again at once, with one write for all
   types; the same if another client removes an own type. `Restraint` limits the repetitions; a new verdict does not
   wait for it.
3. A True with a foreign reason is never overwritten and never cleared.
4. lastTransitionTime changes only with the status that this agent publishes: asserting again is not a transition.
5. `stop` removes the own types and clears the own True, or marks both with the reason that the agent has stopped. An
   own False gets back the kubelet's reason and message, if they are known: a kubelet keeps the reason and message of a
   status that it agrees with, so the agent's would stay for ever."""

import random
import threading
import time
from collections.abc import Callable, Collection, Iterable
from typing import Final, NamedTuple

import msgspec

from nodeagent.config.schema import StandardConditions
from nodeagent.kube import timestamps, transport
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.backoff import Restraint, RetryBackoff
from nodeagent.kube.node_watch import NodeCondition, NodeView, NodeWatch
from nodeagent.kube.transport import Transport
from nodeagent.model import ConditionStatus, ConditionType, ConditionVerdict
from nodeagent.runtime import clock, workers

OWN_PREFIX: Final = "NodeAgent"
"""Prefix of the own condition types, and of every reason that is certainly the agent's."""
STOPPED: Final = "NodeAgentStopped"
MESSAGE_S: Final = 60.0
"""A message with new numbers is written at most this often while the status stays."""
CONFLICT_REASON: Final = "another client undoes each write; written again, less and less often"
FORBIDDEN_S: Final = 60.0
"""While it is answered 403 a write is tried so often: an administrator must grant the right first."""
FORBIDDEN_AFTER_S: Final = 8.0
"""But the usual back-off comes first, up to this wait, about ten seconds in all: a restarted API server answers 403
until it has read its roles and its policies."""


class ConditionConflict(NamedTuple):
    """How often and how long another client changed a standard condition that should be True."""

    type: ConditionType
    overwrites: int
    """How often another client overwrote the agent's True while the verdict held."""
    wanted_s: float
    """How long the verdict was True."""
    true_s: float
    """How long of that the Node had True, from any writer."""
    true_by_other: bool
    """The Node has True now, and another client wrote it."""


class OwnedCondition(NamedTuple):
    """A True of a standard type that the agent set; it is saved, so that a restarted agent can clear it."""

    type: str
    reason: str
    message: str


class NodeConditions:
    """The worker. `publish` gives it each new set of verdicts."""

    def __init__(
        self,
        transport: Transport,
        node: NodeWatch,
        *,
        standard: StandardConditions = StandardConditions.REASSERT,
        own: bool = True,
        heartbeat_s: float = 300.0,
        owned: Iterable[OwnedCondition] = (),
        clock: Callable[[], float] = clock.boottime,
        wall: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        """`owned`: set by an earlier process, from the saved state. To be made before `node.start()`."""
        self._transport = transport
        self._node = node
        self._standard = standard
        self._own = own
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self._wall = wall
        self._rng = rng or random.Random()  # noqa: S311 - spreads load, guards nothing
        self._changed = threading.Condition()
        self._stopping = False
        self._verdicts: dict[ConditionType, ConditionVerdict] = {}
        self._written: dict[str, OwnedCondition] = {entry.type: entry for entry in owned}
        self._asserted: set[str] = set()
        """Standard types that were asserted since their verdict became True."""
        self._foreign: dict[str, NodeCondition] = {}
        """The last foreign False of each standard type."""
        self._written_at: dict[str, float] = {}
        self._next_heartbeat = 0.0
        self._last_written: dict[str, tuple[str, str]] = {}
        """By type: status and reason that were written since they are wanted. To write them again is a repetition."""
        self._wait_s = 0.0
        """Until a due repetition may be written."""
        self._timers = {kind: _ConflictTimer() for kind in ConditionType}
        self._restraint = Restraint(rng=self._rng)
        self._backoff = RetryBackoff()
        self._not_before = 0.0
        self._failure = ""
        """Why the last write failed; empty if it succeeded."""
        self.writes = 0
        """Patches since the start, for the metrics."""
        node.listen(self._wake)
        self._thread = workers.make_thread(self._run, name="conditions")

    def start(self) -> None:
        """Start to write; returns at once."""
        workers.start(self._thread)

    def publish(self, verdicts: Iterable[ConditionVerdict]) -> None:
        """Publish the present verdicts. Never waits for the API server."""
        changed = False
        with self._changed:
            for verdict in verdicts:
                before = self._verdicts.get(verdict.type)
                changed = changed or before != verdict
                if before is None or (before.status, before.reason) != (verdict.status, verdict.reason):
                    for kind in (verdict.type.value, OWN_PREFIX + verdict.type.value):
                        self._last_written.pop(kind, None)
                self._verdicts[verdict.type] = verdict
                if verdict.status is not ConditionStatus.TRUE:
                    self._asserted.discard(verdict.type.value)
            if changed:
                self._measure()
                self._changed.notify()

    def stop(self, *, clear: bool = True, mark: bool = False, timeout_s: float = 3.0) -> None:
        """Stop the worker. `clear`: remove the own types and clear the own True; `mark`: leave them, with the reason
        that the agent has stopped. Raises `ApiError` if the server refuses that."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        workers.join(self._thread, timeout_s)
        if clear and (patch := self._clear_patch()):
            self._send(patch, timeout_s=timeout_s)
            self._written.clear()
        elif mark and (patch := self._mark_patch()):
            self._send(patch, timeout_s=timeout_s)

    @property
    def reason(self) -> str:
        """The trouble with writing; empty if there is none."""
        return self._failure or (CONFLICT_REASON if self._restraint.exhausted else "")

    def conflicts(self) -> tuple[ConditionConflict, ...]:
        """The conflicts about the standard conditions, for the notes and the metrics."""
        with self._changed:
            self._measure()
            view = self._node.view()
            return tuple(
                ConditionConflict(
                    kind,
                    timer.overwrites,
                    timer.wanted_s,
                    timer.true_s,
                    _is_true(view, kind.value) and not self._is_own(kind.value, _condition(view, kind.value)),
                )
                for kind, timer in self._timers.items()
            )

    @property
    def owned(self) -> tuple[OwnedCondition, ...]:
        """The standard conditions that the agent has set True; for the saved state."""
        with self._changed:
            return tuple(self._written.values())

    # --- the worker -------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        with self._changed:
            self._measure()
            self._remember_foreign()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._stopping:
                    now = self._clock()
                    patch = self._due(now) if now >= self._not_before else []
                    if patch:
                        self._claim(patch)
                        break
                    self._changed.wait(self._idle_s(now))
                if self._stopping:
                    return
            try:
                self._send(patch, timeout_s=None)
            except ApiError as error:
                with self._changed:
                    self._failure = error.message
                    self._retract(patch)
                    self._not_before = self._clock() + wait_after(error, self._backoff)
            except Exception:
                with self._changed:
                    self._retract(patch)
                raise
            else:
                with self._changed:
                    self._done(patch)

    def _idle_s(self, now: float) -> float | None:
        """Seconds until a write can be due without an event; None: never."""
        if self._not_before > now:
            return self._not_before - now
        if self._wait_s:
            return self._wait_s
        return max(0.05, self._next_heartbeat - now) if self._verdicts else None

    def _due(self, now: float) -> list["_Write"]:
        """The conditions to write now, in one patch."""
        view = self._node.view()
        if view is None:
            return []
        beat = now >= self._next_heartbeat
        writes = []
        for verdict in self._verdicts.values():
            if self._own:
                writes.append(self._own_write(view, verdict, beat=beat, now=now))
            elif (own := OWN_PREFIX + verdict.type.value) in view.conditions:
                writes.append(_removal(own))
            if self._standard is not StandardConditions.OFF:
                writes.append(self._standard_write(view, verdict, beat=beat, now=now))
            else:
                message = "nodeagent has stopped publishing this type"
                writes.append(self._restoration(view, verdict.type.value, ("True",), message))
        due = [write for write in writes if write is not None]
        self._wait_s = 0.0
        if not beat:
            repetitions = [
                write
                for write in due
                if write.again or self._last_written.get(write.type) == (write.status, write.reason)
            ]
            self._wait_s = self._restraint.wait_s(now) if repetitions else 0.0
            if self._wait_s:
                due = [write for write in due if write not in repetitions]
        if beat and not due:
            self._schedule_heartbeat(now)
        return due

    def _schedule_heartbeat(self, now: float) -> None:
        # Spread over a tenth of the interval, so that a fleet that started together drifts apart.
        self._next_heartbeat = now + self._heartbeat_s * self._rng.uniform(0.9, 1.0)

    def _own_write(self, view: NodeView, verdict: ConditionVerdict, *, beat: bool, now: float) -> "_Write | None":
        kind = OWN_PREFIX + verdict.type.value
        current = _condition(view, kind)
        same = current is not None and current.status == verdict.status.value and current.reason == verdict.reason
        if same and not beat and not self._message_due(kind, current, verdict, now):
            return None
        return self._write(kind, verdict, current)

    def _standard_write(self, view: NodeView, verdict: ConditionVerdict, *, beat: bool, now: float) -> "_Write | None":
        kind = verdict.type.value
        current = _condition(view, kind)
        own = self._is_own(kind, current)
        if verdict.status is not ConditionStatus.TRUE:
            if current is None or current.status != "True" or not own:
                return None
            return self._write(kind, verdict, current)._replace(status="False")
        if current is not None and current.status == "True":
            if not own or not (beat or self._message_due(kind, current, verdict, now)):
                return None
            return self._write(kind, verdict, current)
        if kind not in self._asserted:
            return self._write(kind, verdict, None)
        if self._standard is StandardConditions.ONCE:
            return None
        return self._write(kind, verdict, None)._replace(again=True)

    def _message_due(self, kind: str, current: NodeCondition | None, verdict: ConditionVerdict, now: float) -> bool:
        stale = now - self._written_at.get(kind, 0.0) >= MESSAGE_S
        return stale and current is not None and current.message != verdict.message

    def _write(self, kind: str, verdict: ConditionVerdict, current: NodeCondition | None) -> "_Write":
        since_wall = self._wall() - max(0.0, self._clock() - verdict.since)
        if current is not None and current.status == verdict.status.value and current.transition_wall is not None:
            since_wall = current.transition_wall
        return _Write(kind, verdict.status.value, verdict.reason, verdict.message, since_wall)

    def _is_own(self, kind: str, current: NodeCondition | None) -> bool:
        """True if the Node has what this agent wrote. A kubelet that agrees keeps a foreign reason and message."""
        if current is None:
            return False
        written = self._written.get(kind)
        return current.reason.startswith(OWN_PREFIX) or (
            written is not None and (current.reason, current.message) == (written.reason, written.message)
        )

    def _send(self, patch: list["_Write"], *, timeout_s: float | None) -> None:
        body = msgspec.json.encode(
            {"status": {"conditions": [write.patch(heartbeat_wall=self._wall()) for write in patch]}}
        )
        self.writes += 1
        answer = self._transport.request(
            "PATCH",
            f"/api/v1/nodes/{self._node.node_name}/status",
            body=body,
            content_type=transport.STRATEGIC_MERGE,
            timeout_s=timeout_s,
        )
        self._node.update(answer.body)

    def _claim(self, patch: list["_Write"]) -> None:
        """A condition counts as own before the request that sets it True: if the answer is lost, it can still be
        cleared."""
        for write in patch:
            self._last_written[write.type] = (write.status, write.reason)
            if write.status == "True" and not write.type.startswith(OWN_PREFIX):
                self._asserted.add(write.type)
                self._written[write.type] = OwnedCondition(write.type, write.reason, write.message)

    def _retract(self, patch: list["_Write"]) -> None:
        """The write failed, or may have: the back-off decides when it is repeated."""
        for write in patch:
            self._asserted.discard(write.type)
            self._last_written.pop(write.type, None)

    def _done(self, patch: list["_Write"]) -> None:
        self._failure = ""
        self._backoff.succeeded()
        now = self._clock()
        if now >= self._next_heartbeat:
            self._schedule_heartbeat(now)
        for write in patch:
            if write.status:
                self._written_at[write.type] = now
            if write.status != "True":
                self._written.pop(write.type, None)
        self._measure()

    def _clear_patch(self) -> list["_Write"]:
        """The conditions that a clean exit writes."""
        view = self._node.view()
        owns = [OWN_PREFIX + kind.value for kind in ConditionType]
        writes = [_removal(own) for own in owns if own in self._written_at or _condition(view, own) is not None]
        return writes + self._restore_patch(view, ("True", "False"))

    def _mark_patch(self) -> list["_Write"]:
        """The conditions that a clean exit leaves: every own one, with the reason that it is not updated any more."""
        view = self._node.view()
        writes = []
        for kind in [name for each in ConditionType for name in (OWN_PREFIX + each.value, each.value)]:
            current = _condition(view, kind)
            if (
                current is not None
                and self._is_own(kind, current)
                and (kind.startswith(OWN_PREFIX) or current.status == "True")
            ):
                since_wall = current.transition_wall if current.transition_wall is not None else self._wall()
                message = f"nodeagent has stopped; before: {current.message}"
                writes.append(_Write(kind, current.status, STOPPED, message, since_wall))
        return writes + self._restore_patch(view, ("False",))

    def _restore_patch(self, view: NodeView | None, statuses: Collection[str]) -> list["_Write"]:
        """False for the own conditions of standard types with such a status, with the kubelet's last reason and
        message."""
        writes = [self._restoration(view, kind.value, statuses, "nodeagent has stopped") for kind in ConditionType]
        return [write for write in writes if write is not None]

    def _restoration(
        self, view: NodeView | None, kind: str, statuses: Collection[str], message: str
    ) -> "_Write | None":
        """The same for one type; None if it is not own, or needs no write. `message`: if the kubelet's is not known."""
        current = _condition(view, kind)
        if current is None or current.status not in statuses or not self._is_own(kind, current):
            return None
        before = self._foreign.get(kind)
        reason, message = (before.reason, before.message) if before else (STOPPED, message)
        if (current.status, current.reason, current.message) == ("False", reason, message):
            return None
        since_wall = current.transition_wall if current.status == "False" else None
        return _Write(kind, "False", reason, message, self._wall() if since_wall is None else since_wall)

    def _remember_foreign(self) -> None:
        view = self._node.view()
        for kind in [each.value for each in ConditionType]:
            current = _condition(view, kind)
            if current is not None and current.status == "False" and not self._is_own(kind, current):
                self._foreign[kind] = current

    def _measure(self) -> None:
        view, now = self._node.view(), self._clock()
        for kind, timer in self._timers.items():
            verdict = self._verdicts.get(kind)
            wanted = verdict is not None and verdict.status is ConditionStatus.TRUE
            timer.update(now, wanted=wanted, asserted=kind.value in self._asserted, true=_is_true(view, kind.value))


class _Write(NamedTuple):
    """One condition in a patch. An empty status removes it."""

    type: str
    status: str
    reason: str
    message: str
    since_wall: float
    again: bool = False
    """Asserted again after an overwrite."""

    def patch(self, *, heartbeat_wall: float) -> dict[str, str]:
        if not self.status:
            return {"type": self.type, "$patch": "delete"}
        return {
            "type": self.type,
            "status": self.status,
            "reason": self.reason,
            "message": self.message,
            "lastHeartbeatTime": timestamps.rfc3339(heartbeat_wall),
            "lastTransitionTime": timestamps.rfc3339(self.since_wall),
        }


def _removal(kind: str) -> _Write:
    return _Write(kind, "", "", "", 0.0)


class _ConflictTimer:
    """Adds up how long a condition should have been True, and how long of that it was."""

    def __init__(self) -> None:
        self.wanted_s = 0.0
        self.true_s = 0.0
        self.overwrites = 0
        self._at: float | None = None
        self._wanted = False
        self._true = False

    def update(self, now: float, *, wanted: bool, asserted: bool, true: bool) -> None:
        if self._at is not None and self._wanted:
            self.wanted_s += now - self._at
            self.true_s += now - self._at if self._true else 0.0
            if wanted and asserted and self._true and not true:
                self.overwrites += 1
        self._at, self._wanted, self._true = now, wanted, true


def wait_after(error: ApiError, backoff: RetryBackoff) -> float:
    """Seconds until a write to the Node that has failed is tried again."""
    wait_s = backoff.failed(error.retry_after_s)
    return FORBIDDEN_S if error.status == 403 and wait_s >= FORBIDDEN_AFTER_S else wait_s


def _condition(view: NodeView | None, kind: str) -> NodeCondition | None:
    return view.conditions.get(kind) if view is not None else None


def _is_true(view: NodeView | None, kind: str) -> bool:
    current = _condition(view, kind)
    return current is not None and current.status == "True"
