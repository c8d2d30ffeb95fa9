"""Rate limits hold over any number of processes, whatever happens to the state on disk meanwhile."""

import errno
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.actuators.brakes import ActiveBrakes
from nodeagent.actuators.cgroup_brake import CgroupBrake
from nodeagent.config import load
from nodeagent.config.schema import TokenBucket
from nodeagent.loop.state_store import TRUSTED_S, AgentState, StateStore, recall
from nodeagent.model import Refusal
from nodeagent.policy import rate_limits
from nodeagent.policy import state as policy_state
from nodeagent.records.state_file import LoadedState, StateFile, Trust
from nodeagent.telemetry.log import open_log
from nodeagent.telemetry.metrics import Metrics

NODE = TokenBucket(burst=2, per_hour=30.0)
RATE_LIMITS = load.load(None, overrides=()).config.rate_limits._replace(node=NODE)
REFILL_S = 3600.0 / NODE.per_hour
STEPS = (
    "evict",
    "evict",
    "kill",
    "kill",
    "wait",
    "periodic",
    "full",
    "read-only",
    "unreadable",
    "well",
    "replace",
    "back",
)


class FailingDisk(StateFile):
    """A state file on a disk that fails with `failure`."""

    failure = "well"

    def load(self) -> LoadedState:
        if self.failure == "unreadable":
            return LoadedState(Trust.CORRUPT, None, "cannot be read")
        return super().load()

    def save(self, value: object) -> None:
        if self.failure == "full":
            raise OSError(errno.ENOSPC, "No space left on device")
        self._refuse_writes()
        super().save(value)

    def wipe(self) -> bool:
        try:
            self._refuse_writes()
        except OSError:
            return False
        return super().wipe()

    def _refuse_writes(self) -> None:
        if self.failure in ("read-only", "unreadable"):
            raise OSError(errno.EROFS, "Read-only file system")


class Node:
    """One node over many processes of its agent, which evicts whenever it may."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.now = 1000.0
        self.failure = "well"
        self.evicted_at: list[float] = []
        self.file: FailingDisk | None = None
        self.start()

    def start(self, *, beside_since: float = float("-inf")) -> None:
        if self.file is not None:
            self.file.close()
        self.file = FailingDisk(self.home / "state" / "state", shape=AgentState, boot_id="boot")
        self.file.failure = self.failure
        recalled = recall(self.file.load(), instance="i", now=self.now, beside_since=beside_since)
        self.store = _state_store(recalled.state.policy, self.file, restorable_until=recalled.restorable_until)
        self.store.save_first(now=self.now)

    def evict(self) -> None:
        """As the loop does: take the token, save, evict."""
        taken = rate_limits.take_tokens(
            self.store.policy_state.rate_limits, (rate_limits.NODE,), now=self.now, limits=RATE_LIMITS
        )
        if isinstance(taken, Refusal):
            return
        self.store.apply(_with_rate_limits, taken)
        if self.store.save(now=self.now, urgent=True) or self.store.may_act_unsaved(now=self.now):
            self.evicted_at.append(self.now)
        else:
            given = rate_limits.return_tokens(taken, (rate_limits.NODE,), now=self.now, limits=RATE_LIMITS)
            self.store.apply(_with_rate_limits, given)

    def step(self, name: str) -> None:
        if name == "evict":
            self.evict()
        elif name == "kill":
            self.start()
        elif name == "periodic":
            self.store.save(now=self.now, urgent=False)
        elif name == "replace":
            if self.failure == "well" and not (self.home / "other").exists():
                (self.home / "state").rename(self.home / "other")
                (self.home / "state").mkdir()
                self.store.save(now=self.now, urgent=True)
        elif name == "back":
            if (self.home / "other").exists() and self.failure == "well":
                shutil.rmtree(self.home / "state", ignore_errors=True)
                (self.home / "other").rename(self.home / "state")
        elif name != "wait":
            assert self.file is not None
            self.failure = self.file.failure = name


def _state_store(policy: policy_state.PolicyState, store: StateFile | None, *, restorable_until: float) -> StateStore:
    log, writer = open_log(level="error", style="json")
    writer.close()
    config = load.load(None, overrides=()).config
    brakes = ActiveBrakes(CgroupBrake(unified=None, freezer=None))
    metrics = Metrics(config, boottime=lambda: 0.0, runtime_counters=_unread)
    rest: dict[str, Any] = {"brakes": brakes, "owned": tuple, "status_notes": tuple, "metrics": metrics, "log": log}
    return StateStore(policy, store, restorable_until=restorable_until, **rest)


def _with_rate_limits(state: policy_state.PolicyState, limits: rate_limits.RateLimitState) -> policy_state.PolicyState:
    return state._replace(rate_limits=limits)


def _unread() -> Any:
    raise AssertionError


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(STEPS), st.sampled_from([0.0, 0.1, 1.0, 11.0, 60.0, 130.0, 400.0])), max_size=40)
)
def test_no_period_has_more_evictions_than_its_rate_limit(steps: list[tuple[str, float]]) -> None:
    with tempfile.TemporaryDirectory() as home:
        node = Node(Path(home))
        for name, pause_s in steps:
            node.now += pause_s
            node.step(name)
        assert node.file is not None
        node.file.close()
    for first, begin in enumerate(node.evicted_at):
        for last, end in enumerate(node.evicted_at[first:], start=first):
            assert last - first + 1 <= NODE.burst + (end - begin) / REFILL_S + 1e-6


@pytest.mark.parametrize("failure", ["full", "read-only"])
def test_five_processes_with_a_failing_disk_spend_the_tokens_of_one(failure: str, tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.step(failure)
    for _ in range(5):
        for _ in range(3):
            node.evict()
        node.start()
    node.step("well")
    node.start()
    node.evict()
    assert len(node.evicted_at) <= NODE.burst


def test_a_hard_threshold_waits_for_a_read_only_directory_only_while_its_state_could_be_restored(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path)
    node.step("read-only")
    node.evict()
    assert not node.evicted_at
    node.now += TRUSTED_S
    node.evict()
    assert node.evicted_at


def test_a_hard_threshold_does_not_wait_for_a_full_disk(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.step("full")
    node.evict()
    assert node.evicted_at == [node.now]
    node.start()
    node.evict()
    assert node.evicted_at == [node.now], "the next process begins with empty rate limits"
    node.now += REFILL_S
    node.evict()
    assert len(node.evicted_at) == 2, "and they are refilled"


def test_tokens_spent_while_the_directory_was_read_only_are_not_restored_with_it(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.step("read-only")
    node.now += TRUSTED_S
    node.evict()
    node.evict()
    assert len(node.evicted_at) == 2
    node.step("well")
    node.start()
    node.evict()
    assert len(node.evicted_at) == 2


@pytest.mark.parametrize("away_s", [0.0, 5.0, 300.0])
def test_a_restart_with_a_complete_state_keeps_its_tokens(away_s: float, tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.evict()
    node.now += away_s
    node.start()
    node.evict()
    assert len(node.evicted_at) == 2


@pytest.mark.parametrize(("watched_s", "evicted"), [(20.0, 2), (5.0, 1)], ids=["the same state", "another state"])
def test_a_process_that_ran_beside_another_agent_has_the_tokens_that_it_left(
    watched_s: float, evicted: int, tmp_path: Path
) -> None:
    """The state was last written 10 s ago: by the other agent, if this process ran beside it since then."""
    node = Node(tmp_path)
    node.evict()
    node.now += 10.0
    node.start(beside_since=node.now - watched_s)
    node.evict()
    assert len(node.evicted_at) == evicted


def test_a_process_that_ran_beside_an_agent_with_another_directory_begins_without_tokens(tmp_path: Path) -> None:
    node = Node(tmp_path)
    shutil.rmtree(tmp_path / "state")
    node.start(beside_since=node.now - 1.0)
    node.evict()
    assert not node.evicted_at
