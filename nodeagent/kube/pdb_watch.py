"""PodDisruptionBudgets of the namespaces that matter now, and which of our pods each of them holds.

A budget is looked at only when a decision may need it: every node of a fleet watching every budget would be a load that
nobody asked for. `want` names the namespaces of the candidates; each is listed and watched until nobody has wanted it
for `KEEP_S`.

The API server has the last word (429): this view only spares requests that would be refused.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from nodeagent.kube import objects
from nodeagent.kube.list_watch import ListWatch
from nodeagent.kube.timestamps import boottime
from nodeagent.kube.transport import Transport
from nodeagent.model import DisruptionBudget, Note, NoteKind, Pod

KEEP_S: Final = 600.0
"""How long a namespace's budgets are watched after they were last wanted: longer than an episode of soft pressure."""
MOST_NAMESPACES: Final = 32
"""Watches at once. Beyond it budgets are unknown here and the API server alone decides."""
ANSWER_S: Final = 15.0
"""Longest wait for a first answer, after the spread: a request that is repeated once with the usual deadline of 5 s."""

_decoder = objects.Decoder(objects.BudgetObject)


class PdbWatch:
    """The budgets of the wanted namespaces."""

    def __init__(
        self,
        transport: Transport,
        *,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = boottime,
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
        self._filled: tuple[tuple[Pod, ...], int, tuple[Pod, ...]] = ((), -1, ())
        """The last answer of `fill`, for which pods and after how many changes."""

    def want(self, namespaces: Iterable[str]) -> None:
        """These namespaces' budgets matter now. Returns at once; the first list follows."""
        now = self._clock()
        with self._lock:
            for namespace in namespaces:
                if namespace not in self._watched and len(self._watched) < MOST_NAMESPACES:
                    self._watched[namespace] = _Namespace(
                        self._transport, namespace, self._news, self._clock, self._spread_s
                    )
                if namespace in self._watched:
                    self._watched[namespace].wanted_at = now
                    self._watched[namespace].watch.start()
            stale = [name for name, entry in self._watched.items() if now - entry.wanted_at > KEEP_S]
            ended = [self._watched.pop(name) for name in stale]
            self._changes += bool(ended)
        for entry in ended:
            entry.watch.stop(wait_s=0.0)

    def with_pdbs(self, pods: tuple[Pod, ...]) -> tuple[Pod, ...]:
        """The pods with their budgets as far as they are known. The same pods get the same answer, object by object,
        until a budget changes, so that asking in every turn costs nothing."""
        changes = self._changes  # before the budgets are read: what changes meanwhile is read again
        known, at, answer = self._filled
        if known is pods and at == changes:
            return answer
        answer = self._fill(pods)
        self._filled = pods, changes, answer
        return answer

    def _news(self) -> None:
        with self._lock:
            self._changes += 1
        self._wake()

    def _fill(self, pods: tuple[Pod, ...]) -> tuple[Pod, ...]:
        with self._lock:
            watched = dict(self._watched)
        if not watched:
            return pods
        filled = []
        for pod in pods:
            entry = watched.get(pod.namespace or "")
            held = entry.budgets_of(pod) if entry else ()
            filled.append(pod._replace(disruption_budgets=held) if held else pod)
        return tuple(filled)

    def unlisted_namespace(self) -> str:
        """A wanted namespace whose budgets nobody has told of yet; empty when there is none. One that cannot be listed
        is not waited for: the API server then decides alone."""
        latest = self._clock() - self._spread_s - ANSWER_S
        with self._lock:
            waiting = (name for name, entry in self._watched.items() if entry.begun_at > latest and not entry.told)
            return next(waiting, "")

    def notes(self) -> tuple[Note, ...]:
        """Namespaces whose budgets are not known, and why."""
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
    """The budgets of one namespace by UID."""

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
        self._budgets: dict[str, objects.BudgetObject] = {}
        self.watch = ListWatch(
            transport,
            f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets",
            self,
            name=f"budgets {namespace}",
            clock=clock,
            spread_s=spread_s,
        )

    @property
    def told(self) -> bool:
        """The budgets were listed, or it is known that they cannot be."""
        return self.watch.synced_at is not None or self.watch.failures > 0

    def budgets_of(self, pod: Pod) -> tuple[DisruptionBudget, ...]:
        # One assignment replaces the dictionary, so that this thread always sees a whole one.
        return tuple(
            DisruptionBudget(budget.metadata.name, _allowed(budget))
            for budget in self._budgets.values()
            if selects(budget.spec.selector, pod)
        )

    def replace(self, items: Iterable[msgspec.Raw]) -> None:
        budgets = (_decode(item) for item in items)
        self._budgets = {budget.metadata.uid: budget for budget in budgets if budget}

    def apply(self, kind: str, item: msgspec.Raw) -> None:
        budget = _decode(item)
        if budget is None:
            return
        rest = {uid: known for uid, known in self._budgets.items() if uid != budget.metadata.uid}
        self._budgets = rest if kind == "DELETED" else {**rest, budget.metadata.uid: budget}

    def changed(self) -> None:
        self._wake()


def selects(selector: objects.LabelSelector | None, pod: Pod) -> bool:
    """Whether a policy/v1 selector takes in a pod's labels: a missing one takes none, an empty one all."""
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
    # An operator of the future: rather hold a pod too many than evict one that somebody protects.
    return True


def _allowed(budget: objects.BudgetObject) -> int:
    """0 while the controller has not seen the latest version: the API server refuses then, too."""
    if budget.status.observed_generation < budget.metadata.generation:
        return 0
    return max(0, budget.status.disruptions_allowed)


def _decode(item: msgspec.Raw) -> objects.BudgetObject | None:
    """None for one that cannot be read: the API server, which can, still enforces it."""
    try:
        return _decoder.decode(item)
    except objects.UnreadableError:
        return None
