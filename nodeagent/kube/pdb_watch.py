"""PodDisruptionBudgets of the namespaces that matter now, and which of them select which pod.

A PodDisruptionBudget is read only when a decision may need it: if every node of a fleet watched all of them, the load
would be large and useless. `want` takes the namespaces of the candidates; each is listed and watched until it was not
wanted for `NAMESPACE_KEEP_S`.

The API server decides (429): this view only avoids requests that it would refuse.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from nodeagent.kube import objects
from nodeagent.kube.joined_pods import JoinedPods
from nodeagent.kube.list_watch import ListWatch
from nodeagent.kube.transport import Transport
from nodeagent.model import DisruptionBudget, Note, NoteKind, Pod
from nodeagent.runtime import clock

NAMESPACE_KEEP_S: Final = 600.0
"""A namespace is watched for so long after it was last wanted: longer than an episode of soft pressure."""
MAX_NAMESPACES: Final = 32
"""Watches at once. The PodDisruptionBudgets of further namespaces are unknown, and the API server alone decides."""
FIRST_LIST_S: Final = 15.0
"""Longest wait for the first list, after the spread: a request that is repeated once with the usual deadline of 5 s."""

_decoder = objects.Decoder(objects.PdbObject)


class PdbWatch:
    """The PodDisruptionBudgets of the wanted namespaces."""

    def __init__(
        self,
        transport: Transport,
        *,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = clock.boottime,
        spread_s: float = 0.0,
    ) -> None:
        """`spread_s`: each first list waits for a random part of this."""
        self._transport = transport
        self._wake = wake
        self._clock = clock
        self._spread_s = spread_s
        self._lock = threading.Lock()
        self._watched: dict[str, _Namespace] = {}
        self._changes = 0
        self._joined = JoinedPods()

    def want(self, namespaces: Iterable[str]) -> None:
        """List and watch these namespaces. Returns at once; the first list follows."""
        now = self._clock()
        with self._lock:
            for namespace in namespaces:
                if namespace not in self._watched and len(self._watched) < MAX_NAMESPACES:
                    self._watched[namespace] = _Namespace(
                        self._transport, namespace, self._count_change, self._clock, self._spread_s
                    )
                if namespace in self._watched:
                    self._watched[namespace].wanted_at = now
                    self._watched[namespace].watch.start()
            stale = [name for name, entry in self._watched.items() if now - entry.wanted_at > NAMESPACE_KEEP_S]
            ended = [self._watched.pop(name) for name in stale]
            self._changes += bool(ended)
        for entry in ended:
            entry.watch.stop(wait_s=0.0)

    def with_pdbs(self, pods: tuple[Pod, ...]) -> tuple[Pod, ...]:
        """The pods with the known PodDisruptionBudgets that select them. The same pods give the same tuple until one
        changes."""
        return self._joined.joined(pods, self._changes, self._select)

    def _count_change(self) -> None:
        with self._lock:
            self._changes += 1
        self._wake()

    def _select(self, pods: tuple[Pod, ...]) -> tuple[Pod, ...]:
        with self._lock:
            watched = dict(self._watched)
        if not watched:
            return pods
        result = []
        for pod in pods:
            entry = watched.get(pod.namespace or "")
            pdbs = entry.pdbs_of(pod) if entry else ()
            result.append(pod._replace(disruption_budgets=pdbs) if pdbs else pod)
        return tuple(result)

    def unlisted_namespace(self) -> str:
        """A wanted namespace that is not listed yet; empty if there is none. A namespace that cannot be listed does not
        count: the API server alone decides there."""
        latest = self._clock() - self._spread_s - FIRST_LIST_S
        with self._lock:
            waiting = (name for name, entry in self._watched.items() if entry.begun_at > latest and not entry.answered)
            return next(waiting, "")

    def notes(self) -> tuple[Note, ...]:
        """The namespaces that are not listed, and why."""
        with self._lock:
            return tuple(
                Note(NoteKind.PDBS, entry.watch.reason, about=name)
                for name, entry in self._watched.items()
                if entry.watch.reason
            )

    def stop(self) -> None:
        """End every watch."""
        with self._lock:
            ended = list(self._watched.values())
            self._watched.clear()
        for entry in ended:
            entry.watch.stop()


class _Namespace:
    """The PodDisruptionBudgets of one namespace, by UID."""

    def __init__(
        self,
        transport: Transport,
        namespace: str,
        wake: Callable[[], None],
        clock: Callable[[], float],
        spread_s: float,
    ) -> None:
        self.wanted_at = 0.0
        self.begun_at = clock()
        self._wake = wake
        self._pdbs: dict[str, objects.PdbObject] = {}
        self.watch = ListWatch(
            transport,
            f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets",
            self,
            name=f"pdbs {namespace}",
            clock=clock,
            spread_s=spread_s,
        )

    @property
    def answered(self) -> bool:
        """True if the namespace was listed, or a list failed."""
        return self.watch.synced_at is not None or self.watch.failures > 0

    def pdbs_of(self, pod: Pod) -> tuple[DisruptionBudget, ...]:
        # One assignment replaces the dictionary, so that the reader always has a complete one.
        return tuple(
            DisruptionBudget(pdb.metadata.name, _allowed(pdb), _unready_allowed(pdb))
            for pdb in self._pdbs.values()
            if selects(pdb.spec.selector, pod)
        )

    def replace(self, items: Iterable[msgspec.Raw]) -> None:
        pdbs = (_decode(item) for item in items)
        self._pdbs = {pdb.metadata.uid: pdb for pdb in pdbs if pdb}

    def apply(self, kind: str, item: msgspec.Raw) -> None:
        pdb = _decode(item)
        if pdb is None:
            return
        rest = {uid: known for uid, known in self._pdbs.items() if uid != pdb.metadata.uid}
        self._pdbs = rest if kind == "DELETED" else {**rest, pdb.metadata.uid: pdb}

    def changed(self) -> None:
        self._wake()


def selects(selector: objects.LabelSelector | None, pod: Pod) -> bool:
    """True if a policy/v1 selector selects a pod's labels: a missing one selects none, an empty one all."""
    if selector is None:
        return False
    if any(pod.labels.get(key) != value for key, value in (selector.match_labels or {}).items()):
        return False
    return all(_meets(requirement, pod) for requirement in selector.match_expressions or ())


def _meets(requirement: objects.Requirement, pod: Pod) -> bool:
    value = pod.labels.get(requirement.key)
    values = requirement.values or []
    match requirement.operator:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    # An operator of the future: select too many pods rather than evict a protected one.
    return True


def _allowed(pdb: objects.PdbObject) -> int:
    """0 while the controller has not processed the latest version: the API server refuses then, too."""
    if pdb.status.observed_generation < pdb.metadata.generation:
        return 0
    return max(0, pdb.status.disruptions_allowed)


def _unready_allowed(pdb: objects.PdbObject) -> bool:
    """`unhealthyPodEvictionPolicy`: AlwaysAllow, or as many healthy pods as the budget asks for."""
    always = pdb.spec.unhealthy_pod_eviction_policy == "AlwaysAllow"
    return always or pdb.status.current_healthy >= pdb.status.desired_healthy > 0


def _decode(item: msgspec.Raw) -> objects.PdbObject | None:
    """None for an unreadable object: the API server still enforces it."""
    try:
        return _decoder.decode(item)
    except objects.UnreadableError:
        return None
