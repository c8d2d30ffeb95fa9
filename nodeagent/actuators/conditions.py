"""Publishes pressure conditions on the Node, beside a kubelet that owns three of them as well.

Theory of operation. The policy says what each condition should be; the watch of the own Node says what it is; a worker
writes the difference, always of the newest of both. A live kubelet recomputes MemoryPressure, DiskPressure and
PIDPressure every 10 s and puts its own False over a foreign True (KUBELET-CONTRACT §10); it never touches types it does
not know. So there are two kinds:

* our own types (`NodeAgentMemoryPressure`...), always published, True and False, with a heartbeat;
* the standard types, of which only a True is ever asserted, and only the one that we set is ever cleared.

    verdict True,  node not True       assert (mode `once`: one time for each True of the verdict)
    verdict True,  node True, ours     heartbeat
    verdict True,  node True, foreign  leave: the kubelet agrees
    verdict False, node True, ours     clear
    verdict False, otherwise           leave

Promises:

1. `publish` never blocks, and nothing stale is queued: after an outage the newest verdict is written.
2. When a kubelet puts False over our True while the verdict holds, it is asserted again at once, by one write for all
   types; so is a type of ours that somebody removes. `Restraint` bounds that if it never stays; a new verdict does not
   wait for it.
3. A True with somebody else's reason is never overwritten and never cleared.
4. lastTransitionTime moves only when the status that we publish does: asserting again is not a transition.
5. On `stop` our own types are removed and the True that we set is cleared, or both say that we have stopped. A False of
   ours gets the kubelet's reason and message back where these were seen: a kubelet keeps what it finds beside a status
   that it agrees with, so ours would stay for good.
"""

import random
import threading
import time
from collections.abc import Callable, Collection, Iterable
from typing import Final, NamedTuple

import msgspec

from nodeagent.config.schema import StandardConditions
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.backoff import Restraint, RetryBackoff
from nodeagent.kube.node_watch import NodeCondition, NodeView, NodeWatch
from nodeagent.kube.timestamps import boottime, rfc3339
from nodeagent.kube.transport import STRATEGIC_MERGE, Transport
from nodeagent.model import ConditionStatus, ConditionType, ConditionVerdict
from nodeagent.runtime import workers

OWN_PREFIX: Final = "NodeAgent"
"""Of our own condition types, and of every reason that is ours beyond doubt."""
STOPPED: Final = "NodeAgentStopped"
MESSAGE_S: Final = 60.0
"""A message whose numbers have changed is written at most this often while its status stays."""
CONTESTED: Final = "somebody takes back what is written: it is written again, more and more seldom"
FORBIDDEN_S: Final = 60.0
"""After a 403 the right is not asked for more often than this; somebody has to grant it first."""


class ConditionConflict(NamedTuple):
    """How a standard condition that we hold True fares."""

    type: ConditionType
    resets: int
    """How often somebody put another status over our True while the verdict held."""
    wanted_s: float
    """How long the verdict was True."""
    true_s: float
    """How long of that the Node said True, whoever wrote it."""
    held_by_other: bool
    """The Node says True now and it was not us."""


class OwnedCondition(NamedTuple):
    """A True of a standard type that we set: what has to be remembered across a restart to clear it."""

    type: str
    reason: str
    message: str


class NodeConditions:
    """The worker. Hand it every new set of verdicts with `publish`."""

    def __init__(
        self,
        transport: Transport,
        node: NodeWatch,
        *,
        standard: StandardConditions = StandardConditions.REASSERT,
        own: bool = True,
        heartbeat_s: float = 300.0,
        owned: Iterable[OwnedCondition] = (),
        clock: Callable[[], float] = boottime,
        wall: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        """`owned`: what an earlier process of ours had set, from its saved state. Make this before `node.start()`."""
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
        """The last False of each standard type that was not ours."""
        self._written_at: dict[str, float] = {}
        self._next_heartbeat = 0.0
        self._said: dict[str, tuple[str, str]] = {}
        """By type the status and reason that were written since they are wanted: what is due now is a repetition."""
        self._wait_s = 0.0
        """Until repetitions that are due may be written."""
        self._shares = {kind: _Share() for kind in ConditionType}
        self._restraint = Restraint(rng=self._rng)
        self._backoff = RetryBackoff()
        self._not_before = 0.0
        self._failure = ""
        """Why the last write failed; empty when it did not."""
        self.writes = 0
        """Patches sent since the start, for the metrics."""
        node.listen(self._wake)
        self._thread = workers.make_thread(self._run, name="conditions")

    def start(self) -> None:
        """Begin to write; returns at once."""
        workers.start(self._thread)

    def publish(self, verdicts: Iterable[ConditionVerdict]) -> None:
        """These are the verdicts now. Never blocks on the API."""
        news = False
        with self._changed:
            for verdict in verdicts:
                before = self._verdicts.get(verdict.type)
                news = news or before != verdict
                if before is None or (before.status, before.reason) != (verdict.status, verdict.reason):
                    for kind in (verdict.type.value, OWN_PREFIX + verdict.type.value):
                        self._said.pop(kind, None)
                self._verdicts[verdict.type] = verdict
                if verdict.status is not ConditionStatus.TRUE:
                    self._asserted.discard(verdict.type.value)
            if news:
                self._measure()
                self._changed.notify()

    def stop(self, *, clear: bool = True, mark: bool = False, timeout_s: float = 3.0) -> None:
        """Stop the worker. `clear`: remove our own types and clear the True that we set; `mark`: leave them, with the
        reason. Raises `ApiError` when the server refuses that."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        workers.join(self._thread, timeout_s)
        if clear and (patch := self._farewell()):
            self._send(patch, timeout_s=timeout_s)
            self._written.clear()
        elif mark and (patch := self._last_words()):
            self._send(patch, timeout_s=timeout_s)

    @property
    def reason(self) -> str:
        """What is wrong with writing; empty when nothing is."""
        return self._failure or (CONTESTED if self._restraint.contested else "")

    def conflicts(self) -> tuple[ConditionConflict, ...]:
        """How the standard conditions fare, for the report and the metrics."""
        with self._changed:
            self._measure()
            view = self._node.view()
            return tuple(
                ConditionConflict(
                    kind,
                    share.resets,
                    share.wanted_s,
                    share.true_s,
                    _is_true(view, kind.value) and not self._ours(kind.value, _condition(view, kind.value)),
                )
                for kind, share in self._shares.items()
            )

    @property
    def owned(self) -> tuple[OwnedCondition, ...]:
        """What we have set and would clear; for the saved state."""
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
                    self._unsaid(patch)
                    wait_s = self._backoff.failed(error.retry_after_s)
                    self._not_before = self._clock() + (FORBIDDEN_S if error.status == 403 else wait_s)
            except Exception:
                with self._changed:
                    self._unsaid(patch)
                raise
            else:
                with self._changed:
                    self._done(patch)

    def _idle_s(self, now: float) -> float | None:
        """How long nothing can become due by itself; None: until something is heard."""
        if self._not_before > now:
            return self._not_before - now
        if self._wait_s:
            return self._wait_s
        return max(0.05, self._next_heartbeat - now) if self._verdicts else None

    def _due(self, now: float) -> list["_Write"]:
        """What has to be written now, in one patch."""
        view = self._node.view()
        if view is None:
            return []
        beat = now >= self._next_heartbeat
        writes = []
        for verdict in self._verdicts.values():
            if self._own:
                writes.append(self._own_write(view, verdict, beat=beat, now=now))
            if self._standard is not StandardConditions.OFF:
                writes.append(self._standard_write(view, verdict, beat=beat, now=now))
        due = [write for write in writes if write is not None]
        self._wait_s = 0.0
        if not beat:
            again = [
                write for write in due if write.again or self._said.get(write.type) == (write.status, write.reason)
            ]
            self._wait_s = self._restraint.ask(now) if again else 0.0
            if self._wait_s:
                due = [write for write in due if write not in again]
        if beat and not due:
            self._schedule_heartbeat(now)
        return due

    def _schedule_heartbeat(self, now: float) -> None:
        # Spread over a tenth of the interval, so that a fleet started together drifts apart.
        self._next_heartbeat = now + self._heartbeat_s * self._rng.uniform(0.9, 1.0)

    def _own_write(self, view: NodeView, verdict: ConditionVerdict, *, beat: bool, now: float) -> "_Write | None":
        kind = OWN_PREFIX + verdict.type.value
        seen = _condition(view, kind)
        same = seen is not None and seen.status == verdict.status.value and seen.reason == verdict.reason
        if same and not beat and not self._message_due(kind, seen, verdict, now):
            return None
        return self._write(kind, verdict, seen)

    def _standard_write(self, view: NodeView, verdict: ConditionVerdict, *, beat: bool, now: float) -> "_Write | None":
        kind = verdict.type.value
        seen = _condition(view, kind)
        ours = self._ours(kind, seen)
        if verdict.status is not ConditionStatus.TRUE:
            if seen is None or seen.status != "True" or not ours:
                return None
            return self._write(kind, verdict, seen)._replace(status="False")
        if seen is not None and seen.status == "True":
            if not ours or not (beat or self._message_due(kind, seen, verdict, now)):
                return None
            return self._write(kind, verdict, seen)
        if kind not in self._asserted:
            return self._write(kind, verdict, None)
        if self._standard is StandardConditions.ONCE:
            return None
        return self._write(kind, verdict, None)._replace(again=True)

    def _message_due(self, kind: str, seen: NodeCondition | None, verdict: ConditionVerdict, now: float) -> bool:
        stale = now - self._written_at.get(kind, 0.0) >= MESSAGE_S
        return stale and seen is not None and seen.message != verdict.message

    def _write(self, kind: str, verdict: ConditionVerdict, seen: NodeCondition | None) -> "_Write":
        since_wall = self._wall() - max(0.0, self._clock() - verdict.since)
        if seen is not None and seen.status == verdict.status.value and seen.transition_wall is not None:
            since_wall = seen.transition_wall
        return _Write(kind, verdict.status.value, verdict.reason, verdict.message, since_wall)

    def _ours(self, kind: str, seen: NodeCondition | None) -> bool:
        """Whether what the Node says is what we wrote. A kubelet that agrees keeps a foreign reason and message."""
        if seen is None:
            return False
        written = self._written.get(kind)
        return seen.reason.startswith(OWN_PREFIX) or (
            written is not None and (seen.reason, seen.message) == (written.reason, written.message)
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
            content_type=STRATEGIC_MERGE,
            timeout_s=timeout_s,
        )
        self._node.learn(answer.body)

    def _claim(self, patch: list["_Write"]) -> None:
        """What is about to be set True is ours from now on: should the answer get lost, it can still be cleared."""
        for write in patch:
            self._said[write.type] = (write.status, write.reason)
            if write.status == "True" and not write.type.startswith(OWN_PREFIX):
                self._asserted.add(write.type)
                self._written[write.type] = OwnedCondition(write.type, write.reason, write.message)

    def _unsaid(self, patch: list["_Write"]) -> None:
        """It failed, or may have: the back-off says when it is tried again."""
        for write in patch:
            self._asserted.discard(write.type)
            self._said.pop(write.type, None)

    def _done(self, patch: list["_Write"]) -> None:
        self._failure = ""
        self._backoff.succeeded()
        now = self._clock()
        if now >= self._next_heartbeat:
            self._schedule_heartbeat(now)
        for write in patch:
            self._written_at[write.type] = now
            if write.status != "True":
                self._written.pop(write.type, None)
        self._measure()

    def _farewell(self) -> list["_Write"]:
        """What a clean exit has to write."""
        view = self._node.view()
        now = self._wall()
        writes = []
        for kind in ConditionType:
            own = OWN_PREFIX + kind.value
            if own in self._written_at or _condition(view, own) is not None:
                writes.append(_Write(own, "", "", "", now))
        return writes + self._given_back(view, ("True", "False"))

    def _last_words(self) -> list["_Write"]:
        """What a clean exit leaves: everything of ours as it is, and that nobody keeps it up to date."""
        view = self._node.view()
        writes = []
        for kind in [name for each in ConditionType for name in (OWN_PREFIX + each.value, each.value)]:
            seen = _condition(view, kind)
            if seen is not None and self._ours(kind, seen) and (kind.startswith(OWN_PREFIX) or seen.status == "True"):
                since_wall = seen.transition_wall if seen.transition_wall is not None else self._wall()
                message = f"nodeagent has stopped; before: {seen.message}"
                writes.append(_Write(kind, seen.status, STOPPED, message, since_wall))
        return writes + self._given_back(view, ("False",))

    def _given_back(self, view: NodeView | None, statuses: Collection[str]) -> list["_Write"]:
        """The standard types that have such a status and our reason as False, with what was said before us."""
        writes = []
        for kind in [each.value for each in ConditionType]:
            seen = _condition(view, kind)
            if seen is None or seen.status not in statuses or not self._ours(kind, seen):
                continue
            before = self._foreign.get(kind)
            reason, message = (before.reason, before.message) if before else (STOPPED, "nodeagent has stopped")
            if (seen.status, seen.reason, seen.message) == ("False", reason, message):
                continue
            since_wall = seen.transition_wall if seen.status == "False" else None
            writes.append(_Write(kind, "False", reason, message, self._wall() if since_wall is None else since_wall))
        return writes

    def _remember_foreign(self) -> None:
        view = self._node.view()
        for kind in [each.value for each in ConditionType]:
            seen = _condition(view, kind)
            if seen is not None and seen.status == "False" and not self._ours(kind, seen):
                self._foreign[kind] = seen

    def _measure(self) -> None:
        view, now = self._node.view(), self._clock()
        for kind, share in self._shares.items():
            verdict = self._verdicts.get(kind)
            wanted = verdict is not None and verdict.status is ConditionStatus.TRUE
            share.see(now, wanted=wanted, asserted=kind.value in self._asserted, true=_is_true(view, kind.value))


class _Write(NamedTuple):
    """One condition in a patch. An empty status removes it."""

    type: str
    status: str
    reason: str
    message: str
    since_wall: float
    again: bool = False
    """Asserted again after somebody's reset."""

    def patch(self, *, heartbeat_wall: float) -> dict[str, str]:
        if not self.status:
            return {"type": self.type, "$patch": "delete"}
        return {
            "type": self.type,
            "status": self.status,
            "reason": self.reason,
            "message": self.message,
            "lastHeartbeatTime": rfc3339(heartbeat_wall),
            "lastTransitionTime": rfc3339(self.since_wall),
        }


class _Share:
    """Adds up how long a condition was wanted True and how long of that it was."""

    def __init__(self) -> None:
        self.wanted_s = 0.0
        self.true_s = 0.0
        self.resets = 0
        self._at: float | None = None
        self._wanted = False
        self._true = False

    def see(self, now: float, *, wanted: bool, asserted: bool, true: bool) -> None:
        if self._at is not None and self._wanted:
            self.wanted_s += now - self._at
            self.true_s += now - self._at if self._true else 0.0
            if wanted and asserted and self._true and not true:
                self.resets += 1
        self._at, self._wanted, self._true = now, wanted, true


def _condition(view: NodeView | None, kind: str) -> NodeCondition | None:
    return view.conditions.get(kind) if view is not None else None


def _is_true(view: NodeView | None, kind: str) -> bool:
    seen = _condition(view, kind)
    return seen is not None and seen.status == "True"
