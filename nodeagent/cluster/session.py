"""The cluster as the loop sees it: the pods, a place to hand victims and conditions to, and what came of them.

Promises:

1. No call waits for the API server. Finding out which node this is, listing, watching and writing are threads' work.
2. Until the node's identity is confirmed nothing is sent but questions, and the view of the pods is empty and says why.
3. `NoCluster` takes the place where there are no credentials, so that the loop has no `if`.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from nodeagent.cluster import identity
from nodeagent.cluster.backoff import Backoff
from nodeagent.cluster.conditions import Contest, NodeConditions, OwnedCondition
from nodeagent.cluster.evict import Evictor
from nodeagent.cluster.identity import Identity, IdentityError
from nodeagent.cluster.node import NodeWatch
from nodeagent.cluster.pods import PodsView, PodWatch
from nodeagent.cluster.transport import ApiError, Transport
from nodeagent.config.schema import Config, Mode
from nodeagent.model import ConditionVerdict, Note, Outcome, Victim


class Session(Protocol):
    """What the loop needs of a cluster."""

    def start(self) -> None: ...
    def pods(self) -> PodsView: ...
    def evict(self, plan_id: str, victim: Victim) -> None: ...
    def outcomes(self) -> tuple[Outcome, ...]: ...
    def publish(self, verdicts: Iterable[ConditionVerdict]) -> None: ...
    def warm(self) -> None: ...
    def identity(self) -> Identity | None: ...
    def owned(self) -> tuple[OwnedCondition, ...]: ...
    def contests(self) -> tuple[Contest, ...]: ...
    def notes(self) -> tuple[Note, ...]: ...
    def stop(self, *, clear: bool) -> str: ...


class NoCluster:
    """No credentials: the node is watched and decided for, nobody is told."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def start(self) -> None:
        """Nothing to start."""

    def pods(self) -> PodsView:
        return PodsView((), None, self._reason)

    def evict(self, plan_id: str, victim: Victim) -> None:
        raise RuntimeError(f"plan {plan_id} wants {victim.pod.key} evicted, but there is no cluster")

    def outcomes(self) -> tuple[Outcome, ...]:
        return ()

    def publish(self, verdicts: Iterable[ConditionVerdict]) -> None:
        """Nobody to tell."""

    def warm(self) -> None:
        """No connection to open."""

    def identity(self) -> Identity | None:
        return None

    def owned(self) -> tuple[OwnedCondition, ...]:
        return ()

    def contests(self) -> tuple[Contest, ...]:
        return ()

    def notes(self) -> tuple[Note, ...]:
        return (Note("api", self._reason),)

    def stop(self, *, clear: bool) -> str:  # noqa: ARG002 - nothing was set
        """Nothing to stop, nothing left behind."""
        return ""


class ClusterSession:
    """One API server, one node."""

    def __init__(
        self,
        transport: Transport,
        config: Config,
        guess: Identity,
        *,
        wake: Callable[[], None],
        owned: Sequence[OwnedCondition] = (),
        backoff: Backoff | None = None,
    ) -> None:
        """`guess` is the name that this host goes by; `owned` is what an earlier process had set on the Node."""
        self._transport = transport
        self._config = config
        self._guess = guess
        self._wake = wake
        self._owned = tuple(owned)
        self._backoff = backoff or Backoff()
        self._stopping = threading.Event()
        self._trouble = "the API server has not answered yet"
        self._confirmed: Identity | None = None
        self._pods: PodWatch | None = None
        self._node: NodeWatch | None = None
        self._conditions: NodeConditions | None = None
        self._evictor: Evictor | None = None
        self._thread = threading.Thread(target=self._begin, name="identity", daemon=True)

    def start(self) -> None:
        """Begin to find out which node this is, then watch it; returns at once."""
        self._thread.start()

    def pods(self) -> PodsView:
        return self._pods.view() if self._pods else PodsView((), None, self._trouble)

    def evict(self, plan_id: str, victim: Victim) -> None:
        """Hand over a victim; its outcome follows."""
        if self._evictor is None:
            raise RuntimeError("a plan with victims was made before the node's identity was confirmed")
        self._evictor.submit(plan_id, victim)

    def outcomes(self) -> tuple[Outcome, ...]:
        return self._evictor.take() if self._evictor else ()

    def publish(self, verdicts: Iterable[ConditionVerdict]) -> None:
        """These are the verdicts now. In dry-run nothing is written."""
        if self._conditions and self._config.mode is Mode.ENFORCE:
            self._conditions.publish(verdicts)

    def warm(self) -> None:
        """Pressure is near: have connections open."""
        if self._evictor and self._config.mode is Mode.ENFORCE:
            self._evictor.warm()

    def identity(self) -> Identity | None:
        """Who we are, once the API server confirmed it."""
        return self._confirmed

    def owned(self) -> tuple[OwnedCondition, ...]:
        """What is set on the Node by us and would have to be cleared, for the saved state."""
        return self._conditions.owned if self._conditions else self._owned

    def contests(self) -> tuple[Contest, ...]:
        return self._conditions.contests() if self._conditions else ()

    def notes(self) -> tuple[Note, ...]:
        """What is wrong with the connection now."""
        view = self.pods()
        parts = [("api", view.reason)]
        if self._node:
            parts.append(("node object", self._node.reason))
        if self._conditions:
            parts.append(("node conditions", self._conditions.reason))
        return tuple(Note(subject, reason) for subject, reason in parts if reason) + view.notes

    def stop(self, *, clear: bool) -> str:
        """End all threads. `clear` takes back what we have set on the Node. Returns what had to be left there."""
        self._stopping.set()
        self._thread.join(1.0)
        left = ""
        if self._conditions:
            try:
                self._conditions.stop(clear=clear)
            except ApiError as error:
                left = f"conditions were not cleared: {error.message}"
        for part in (self._evictor, self._pods, self._node):
            if part:
                part.stop()
        self._transport.close()
        return left

    # --- the identity thread ----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Ask until the answer is sure; a node may be younger than its agent, and an API server may be away."""
        while not self._stopping.is_set():
            try:
                confirmed = identity.resolve(self._transport, self._guess)
            except (IdentityError, ApiError) as error:
                self._trouble = str(error)
                self._wake()
                retry = error.retry_after_s if isinstance(error, ApiError) else None
                self._stopping.wait(self._backoff.failed(retry))
                continue
            self._open(confirmed)
            return

    def _open(self, confirmed: Identity) -> None:
        config, transport = self._config, self._transport
        enforce = config.mode is Mode.ENFORCE
        if enforce:
            node = NodeWatch(transport, confirmed.name)
            conditions = NodeConditions(
                transport,
                node,
                standard=config.conditions.standard,
                own=config.conditions.own,
                heartbeat_s=config.conditions.heartbeat_s,
                owned=self._owned,
            )
            node.start()
            conditions.start()
            self._node, self._conditions = node, conditions
            self._evictor = Evictor(transport, wake=self._wake, timeout_s=config.cluster.request_timeout_s)
        pods = PodWatch(transport, confirmed.name, wake=self._wake, keep_annotations=config.protection.annotations)
        pods.start()
        self._confirmed = confirmed
        self._pods = pods
        self._wake()
