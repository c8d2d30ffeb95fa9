"""Holds the state of the agent: in memory for the next decision, on disk for the next process.

Promises:

1. There is one writer. Only `decide` and `apply` replace the policy state, and `save` writes all of it.
2. A failed save is logged, counted and returned as False: the caller decides what may be done without it.
3. Rate limits hold over any number of processes, killed at any step, whatever happens to the state directory meanwhile.
   The exception is a directory that is removed while no agent runs: that is a first start.

Theory of operation. A saved state is restored with its tokens only while it is younger than `TRUSTED_S` (`recall`). An
eviction that it lacks is made only if no process can restore it any more, because it is older than that or was wiped
(`may_act_unsaved`). So each token on disk is spent once. A process that cannot write at its start begins without tokens
(`save_first`): otherwise its state would be full again at each start. The same holds for a process that ran beside an
agent with another state directory.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Concatenate, Final, NamedTuple, ParamSpec

from nodeagent.actuators.brakes import ActiveBrakes
from nodeagent.actuators.cgroup_brake import Brake
from nodeagent.actuators.conditions import OwnedCondition
from nodeagent.actuators.oom_scores import OomScores, RaisedScore
from nodeagent.config.schema import Config
from nodeagent.loop.node_profiles import SavedLabels
from nodeagent.model import NodeSnapshot, Note, OomTotals, Plan
from nodeagent.policy import engine
from nodeagent.policy import state as policy_states
from nodeagent.policy.candidates import RankingCache
from nodeagent.policy.state import PolicyState
from nodeagent.records import status_file
from nodeagent.records.state_file import LoadedState, StateFile, Trust
from nodeagent.runtime.agent_lock import AgentLock
from nodeagent.telemetry.metrics import Failure, Metrics, SyncStage

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

P = ParamSpec("P")

SAVE_EVERY_S: Final = 10.0
"""How often slow changes are saved (growth, trends, the refill of token buckets). A save takes 0.3 ms on a tmpfs."""
CHANGED_SAVE_S: Final = 0.5
"""How often a changed set of crossed thresholds is saved: a crash then takes at most this from a grace period, and a
signal that crosses its threshold at 50 Hz costs two saves a second."""
TRUSTED_S: Final = 360.0
"""How long after it was written a state is restored with its tokens. Longer than the kubelet's restart back-off (5 min
at most). A hard threshold waits this long if the state directory becomes read-only."""


class OomState(NamedTuple):
    """The counters of OOM kills when they were last read."""

    kills: int
    """/proc/vmstat `oom_kill`."""
    totals: Mapping[str, OomTotals]
    """By path of the cgroup."""


class AgentState(NamedTuple):
    """What survives a restart."""

    policy: PolicyState
    owned: tuple[OwnedCondition, ...] = ()
    """Conditions that the agent has set on the Node."""
    brakes: tuple[Brake, ...] = ()
    """Cgroups with a brake, or with a planned one."""
    saved_at: float = 0.0
    """CLOCK_BOOTTIME."""
    oom: OomState | None = None
    """None: OOM kills are not counted."""
    node_labels: SavedLabels | None = None
    """None: not known."""
    oom_scores: tuple[RaisedScore, ...] = ()
    """Processes whose oom_score_adj is raised, or about to be."""


class Recalled(NamedTuple):
    """The state of a new process."""

    state: AgentState
    restorable_until: float
    """Until when another process could restore the state on disk with its tokens."""
    restored: bool
    """`state` is the one on disk, except perhaps its tokens."""
    message: str
    """For the log: why tokens are missing; empty if none is."""


def recall(loaded: LoadedState, *, instance: str, now: float, beside_since: float = float("-inf")) -> Recalled:
    """The state of a new process, from the one on disk. `beside_since`: since when another agent was known to act,
    until now. The tokens that it spent are in a state that was written since, or in another directory."""
    if loaded.trust is not Trust.RESTORED:
        # The tokens that an earlier process spent are unknown, unless this is a first start.
        spent = loaded.trust is not Trust.FIRST or beside_since > float("-inf")
        state = AgentState(policy_states.initial(instance, now=now, tokens_spent=spent))
        return Recalled(state, now + TRUSTED_S, False, loaded.message)
    state = loaded.value._replace(policy=policy_states.restored(loaded.value.policy, instance=instance))
    age_s = now - state.saved_at
    if 0.0 <= age_s < TRUSTED_S and state.saved_at >= beside_since:
        return Recalled(state, state.saved_at + TRUSTED_S, True, "")
    state = state._replace(policy=policy_states.spent(state.policy, now=now))
    # A process that did not run beside another agent would restore it.
    restorable_until = state.saved_at + TRUSTED_S if 0.0 <= age_s < TRUSTED_S else now
    return Recalled(state, restorable_until, True, f"last saved {age_s:.0f}s ago: every rate limit begins empty")


class StateStore:
    """The state of one agent, and its only writer."""

    def __init__(
        self,
        policy: PolicyState,
        store: StateFile | None,
        *,
        restorable_until: float = float("-inf"),
        lock: AgentLock | None = None,
        brakes: ActiveBrakes,
        oom_scores: OomScores | None = None,
        owned: Callable[[], tuple[OwnedCondition, ...]],
        status_notes: Callable[[], tuple[Note, ...]],
        oom: Callable[[], OomState | None] = lambda: None,
        node_labels: Callable[[], SavedLabels | None] = lambda: None,
        metrics: Metrics,
        log: "FilteringBoundLogger",
    ) -> None:
        """`store` is None for an agent that stores nothing; `restorable_until` is that of `recall`. Nothing is written
        while another agent has the `lock`, and by a dry run if another has written since. `brakes`, `owned`,
        `oom` and `node_labels` are read at each save; `status_notes`, what `check` reports of the running agent, at
        each save that is not urgent."""
        self._policy_state = policy
        self._state_before = policy
        self._store = store
        self._brakes = brakes
        self._oom_scores = oom_scores
        self._owned = owned
        self._status_notes = status_notes
        self._oom = oom
        self._node_labels = node_labels
        self._metrics = metrics
        self._log = log
        self._saved_at = float("-inf")
        self._saved: frozenset[str] | None = frozenset()
        """Thresholds that were crossed at the last save; None if it failed."""
        self._restorable_until = restorable_until
        self._lock = lock
        self._status_at = float("-inf")

    @property
    def policy_state(self) -> PolicyState:
        """The newest."""
        return self._policy_state

    @property
    def state_before(self) -> PolicyState:
        """The policy state from before the last decision, for replay."""
        return self._state_before

    def decide(self, snapshot: NodeSnapshot, *, config: Config, cache: RankingCache) -> Plan:
        """The plan for this snapshot. The new state is stored before it is returned."""
        self._state_before = self._policy_state
        with self._metrics.timed(SyncStage.DECIDE):
            plan, self._policy_state = engine.decide(
                snapshot, self._policy_state, now=snapshot.taken_at, config=config, cache=cache, always_rank=False
            )
        return plan

    def apply(
        self, change: Callable[Concatenate[PolicyState, P], PolicyState], *args: P.args, **more: P.kwargs
    ) -> None:
        """Replace the state by the result of a pure function of `policy`."""
        self._policy_state = change(self._policy_state, *args, **more)

    def save(self, *, now: float, urgent: bool) -> bool:
        """Write the state if that is due or `urgent`. False if it is not on disk."""
        store = self._store
        if store is None:
            return False
        crossed = frozenset(self._policy_state.thresholds.first_observed)
        every_s = SAVE_EVERY_S if crossed == self._saved else CHANGED_SAVE_S
        with_status = not urgent and now - self._status_at >= SAVE_EVERY_S
        if not (urgent or with_status) and now - self._saved_at < every_s:
            return True
        self._saved_at, self._saved = now, crossed
        try:
            with self._metrics.timed(SyncStage.SAVE), self._writing(store) as allowed:
                if not allowed:
                    return False
                state = AgentState(
                    self._policy_state,
                    self._owned(),
                    self._brakes.active,
                    now,
                    self._oom(),
                    self._node_labels(),
                    self._oom_scores.active if self._oom_scores is not None else (),
                )
                store.save(state)
                self._restorable_until = now + TRUSTED_S
                if with_status:
                    self._status_at = now
                    status_file.write_status(store.directory, self._status_notes(), now=now)
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
        with self._lock.writing() as allowed:
            yield allowed and (self._lock.held or store.is_unchanged())

    def save_first(self, *, now: float) -> None:
        """Write the state before the first act. If that fails, every rate limit begins empty."""
        if self._store is not None and not self.save(now=now, urgent=True):
            self.apply(policy_states.spent, now=now)

    def may_act_unsaved(self, *, now: float) -> bool:
        """True if no later process can restore the tokens of the state on disk, which could not be replaced. Wipes that
        state."""
        if self._lock is not None and self._lock.take():
            return False
        if self._store is not None and now < self._restorable_until and self._store.wipe():
            self._restorable_until = now
        return now >= self._restorable_until

    def close(self, *, now: float) -> bool:
        """The last save. Removes the status file. Returns the same as `save`."""
        if self._store is not None:
            with self._writing(self._store) as allowed:
                if allowed:
                    status_file.remove_status(self._store.directory)
        saved = self.save(now=now, urgent=True)
        if self._store is not None:
            self._store.close()
        return saved
