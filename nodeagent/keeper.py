"""What the agent remembers: in hand for the next decision, on disk for the next process.

Promises:

1. There is one memory. Whoever changes the policy's state changes it here, and `save` writes the whole of it.
2. What could not be written is told, counted and answered with False: the caller says what may be done nevertheless.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from nodeagent.cluster.conditions import OwnedCondition
from nodeagent.host.brake import Hold
from nodeagent.host.holds import Holds
from nodeagent.journal import told
from nodeagent.journal.state import StateFile
from nodeagent.model import Note
from nodeagent.policy.state import PolicyState
from nodeagent.report.metrics import Failure, Metrics, Stage

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

SAVE_EVERY_S: Final = 10.0
"""How often what moves slowly is saved (growth, trends, the refill of budgets). A save takes 0.3 ms on a tmpfs."""
NEWS_EVERY_S: Final = 0.5
"""How often a threshold that was crossed is: a crash then takes no more than this from its grace period, and a signal
that flutters around its threshold at 50 Hz costs two saves a second."""


class AgentState(NamedTuple):
    """All that survives a restart."""

    policy: PolicyState
    owned: tuple[OwnedCondition, ...] = ()
    """Conditions that we have set on the Node."""
    holds: tuple[Hold, ...] = ()
    """Cgroups that are held, or were about to be."""


class Keeper:
    """The memory of one agent."""

    def __init__(
        self,
        policy: PolicyState,
        store: StateFile | None,
        *,
        holds: Holds,
        owned: Callable[[], tuple[OwnedCondition, ...]],
        says: Callable[[], tuple[Note, ...]],
        metrics: Metrics,
        log: "FilteringBoundLogger",
    ) -> None:
        """`store` is None where there is no directory to write to. `holds` and `owned` are asked at each save, `says`,
        what `check` is to tell of the running agent, at each that nobody waits for."""
        self.policy = policy
        self._store = store
        self._holds = holds
        self._owned = owned
        self._says = says
        self._metrics = metrics
        self._log = log
        self._saved_at = float("-inf")
        self._saved: frozenset[str] = frozenset()
        """Thresholds that were crossed at the last save."""
        self._told_at = float("-inf")

    def save(self, *, now: float, at_once: bool) -> bool:
        """Write all of it, when that is due or `at_once`. False when it could not be."""
        if self._store is None:
            return False
        crossed = frozenset(self.policy.thresholds.first_observed)
        every_s = SAVE_EVERY_S if crossed == self._saved else NEWS_EVERY_S
        tells = not at_once and now - self._told_at >= SAVE_EVERY_S
        if not (at_once or tells) and now - self._saved_at < every_s:
            return True
        self._saved_at, self._saved = now, crossed
        try:
            with self._metrics.timed(Stage.SAVE):
                self._store.save(AgentState(self.policy, self._owned(), self._holds.held))
                if tells:
                    self._told_at = now
                    told.write(self._store.directory, self._says(), now=now)
        except OSError as error:
            self._metrics.observe_failure(Failure.STATE_SAVE)
            self._log.error("state not saved", reason=error.strerror, file=error.filename, once="state")
            return False
        return True

    def close(self, *, now: float) -> bool:
        """Save at the end; from now on no running agent has anything to say. The same answer."""
        if self._store is not None:
            told.forget(self._store.directory)
        return self.save(now=now, at_once=True)
