"""What the agent remembers: in hand for the next decision, on disk for the next process.

Promises:

1. There is one memory. Whoever changes the policy's state changes it here, and `save` writes the whole of it.
2. What could not be written is told, counted and answered with False: the caller says what may be done nevertheless.
3. Rate limits hold over any number of processes, killed at any step, whatever becomes of the state directory meanwhile
   (but for one that is removed while no agent runs: that is a first start).

Theory of operation. A saved state is restored with its tokens only while it is younger than `TRUSTED_S` (`recall`). An
eviction that it lacks is made only when no process can restore it any more, because it is older than that or was wiped
(`may_act_unsaved`). So each token on disk is spent once. A process that cannot write at its start begins without tokens
(`prove`): its state would come back full at each start. So does one that has watched beside an agent with another state
directory.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from nodeagent.actuators.brakes import ActiveBrakes
from nodeagent.actuators.cgroup_brake import Brake
from nodeagent.actuators.conditions import OwnedCondition
from nodeagent.model import Note
from nodeagent.policy import state as policy_state
from nodeagent.policy.state import PolicyState
from nodeagent.records import status_file
from nodeagent.records.state_file import LoadedState, StateFile, Trust
from nodeagent.runtime.agent_lock import AgentLock
from nodeagent.telemetry.metrics import Failure, Metrics, SyncStage

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

SAVE_EVERY_S: Final = 10.0
"""How often what moves slowly is saved (growth, trends, the refill of budgets). A save takes 0.3 ms on a tmpfs."""
CHANGED_SAVE_S: Final = 0.5
"""How often a threshold that was crossed is: a crash then takes no more than this from its grace period, and a signal
that flutters around its threshold at 50 Hz costs two saves a second."""


TRUSTED_S: Final = 360.0
"""How long after it was written a state is restored with its tokens. Longer than a kubelet lets a container that died
wait for its restart (5 min at most); as long a hard threshold waits where the state directory became read-only."""


class AgentState(NamedTuple):
    """All that survives a restart."""

    policy: PolicyState
    owned: tuple[OwnedCondition, ...] = ()
    """Conditions that we have set on the Node."""
    brakes: tuple[Brake, ...] = ()
    """Cgroups that are held, or were about to be."""
    saved_at: float = 0.0
    """CLOCK_BOOTTIME."""


class Recalled(NamedTuple):
    """What a process begins with."""

    state: AgentState
    restorable_until: float
    """Until when another process might still restore what was on disk, with its tokens."""
    restored: bool
    """`state` is what was on disk, its tokens excepted."""
    message: str
    """For the log: what was wrong."""


def recall(loaded: LoadedState, *, instance: str, now: float, beside_since: float = float("-inf")) -> Recalled:
    """What to begin with, after what was found on disk. `beside_since`: until now another agent has acted, and it was
    seen then. What that one has spent is in a state that was written since, or in another directory."""
    if loaded.trust is not Trust.RESTORED:
        # What an earlier process had spent is not known, unless there was none.
        spent = loaded.trust is not Trust.FIRST or beside_since > float("-inf")
        state = AgentState(policy_state.initial(instance, now=now, budgets_spent=spent))
        return Recalled(state, now + TRUSTED_S, False, loaded.message)
    state = loaded.value._replace(policy=policy_state.restored(loaded.value.policy, instance=instance))
    age_s = now - state.saved_at
    if 0.0 <= age_s < TRUSTED_S and state.saved_at >= beside_since:
        return Recalled(state, state.saved_at + TRUSTED_S, True, "")
    state = state._replace(policy=policy_state.spent(state.policy, now=now))
    # A process that was not beside another agent would restore it.
    restorable_until = state.saved_at + TRUSTED_S if 0.0 <= age_s < TRUSTED_S else now
    return Recalled(state, restorable_until, True, f"last saved {age_s:.0f}s ago: every rate limit begins empty")


class StateStore:
    """The memory of one agent."""

    def __init__(
        self,
        policy: PolicyState,
        store: StateFile | None,
        *,
        restorable_until: float = float("-inf"),
        lock: AgentLock | None = None,
        holds: ActiveBrakes,
        owned: Callable[[], tuple[OwnedCondition, ...]],
        says: Callable[[], tuple[Note, ...]],
        metrics: Metrics,
        log: "FilteringBoundLogger",
    ) -> None:
        """`store` is None for an agent that keeps nothing; `restorable_until` is that of `recall`. Nothing is written
        while another agent has the `lock`, and by a dry run if another has written since. `holds` and `owned` are asked
        at each save, `says`, what `check` is to tell of the running agent, at each that nobody waits for."""
        self.policy = policy
        self._store = store
        self._holds = holds
        self._owned = owned
        self._says = says
        self._metrics = metrics
        self._log = log
        self._saved_at = float("-inf")
        self._saved: frozenset[str] | None = frozenset()
        """Thresholds that were crossed at the last save; None when it failed."""
        self._restorable_until = restorable_until
        self._lock = lock
        self._told_at = float("-inf")

    def save(self, *, now: float, at_once: bool) -> bool:
        """Write all of it, when that is due or `at_once`. False when it could not be."""
        store = self._store
        if store is None:
            return False
        crossed = frozenset(self.policy.thresholds.first_observed)
        every_s = SAVE_EVERY_S if crossed == self._saved else CHANGED_SAVE_S
        tells = not at_once and now - self._told_at >= SAVE_EVERY_S
        if not (at_once or tells) and now - self._saved_at < every_s:
            return True
        self._saved_at, self._saved = now, crossed
        try:
            with self._metrics.timed(SyncStage.SAVE), self._writing(store) as ours:
                if not ours:
                    return False
                store.save(AgentState(self.policy, self._owned(), self._holds.active, now))
                self._restorable_until = now + TRUSTED_S
                if tells:
                    self._told_at = now
                    status_file.write_status(store.directory, self._says(), now=now)
        except OSError as error:
            self._saved = None
            self._metrics.observe_failure(Failure.STATE_SAVE)
            self._log.error("state not saved", reason=error.strerror, file=error.filename, once="state")
            return False
        return True

    @contextlib.contextmanager
    def _writing(self, store: StateFile) -> Iterator[bool]:
        if self._lock is None:
            yield True
            return
        with self._lock.writing() as ours:
            yield ours and (self._lock.held or store.is_unchanged())

    def prove(self, *, now: float) -> None:
        """Write the state before anything is done. Where that fails, every rate limit begins empty."""
        if self._store is not None and not self.save(now=now, at_once=True):
            self.policy = policy_state.spent(self.policy, now=now)

    def may_act_unsaved(self, *, now: float) -> bool:
        """Whether no later process can restore the tokens of the state on disk, which could not be replaced. It is
        wiped for that."""
        if self._lock is not None and self._lock.take():
            return False
        if self._store is not None and now < self._restorable_until and self._store.wipe():
            self._restorable_until = now
        return now >= self._restorable_until

    def close(self, *, now: float) -> bool:
        """Save at the end; from now on no running agent has anything to say. The same answer."""
        if self._store is not None:
            with self._writing(self._store) as ours:
                if ours:
                    status_file.remove_status(self._store.directory)
        return self.save(now=now, at_once=True)
