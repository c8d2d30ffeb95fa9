"""Two agents on one node: at most one acts at any time, and together they make one eviction in an hour.

The first one is a process of its own. The second one starts beside it and asks for the lock before each sync, as
`nodeagent run` does; once it has the lock it starts again.
"""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from typing import Final

from tests.faults import runs
from tests.faults.lifecycle import HOUR_S, place
from tests.faults.processes import LAUNCH, STOP, SYNC, AgentProcess
from tests.faults.scene import CALM, PRESSED, Scene

DIRECTORIES: Final = {"one state directory": "state", "two state directories": "other"}
BEFORE: Final = {
    "calm": (LAUNCH, SYNC),
    "before the eviction": (LAUNCH, SYNC, "press"),
    "after the eviction": (LAUNCH, SYNC, "press", SYNC),
}
"""What the first agent has done when the second one starts."""


def _kill(_: Scene, first: AgentProcess) -> None:
    first.kill()


def _stop(_: Scene, first: AgentProcess) -> None:
    first.do(STOP)
    first.kill()


def _hang(_: Scene, first: AgentProcess) -> None:
    os.kill(first.pid, signal.SIGSTOP)


def _continue(_: Scene, first: AgentProcess) -> None:
    os.kill(first.pid, signal.SIGCONT)


def _lose_state(world: Scene, _: AgentProcess) -> None:
    (world.state / "state").unlink(missing_ok=True)


def _replace_directory(world: Scene, _: AgentProcess) -> None:
    shutil.rmtree(world.state)
    world.state.mkdir()


def _replace_kubepods(world: Scene, _: AgentProcess) -> None:
    shutil.rmtree(world.groups)
    world.write(CALM)
    for pod in world.groups.glob("**/*pod*"):
        (pod / "cgroup.freeze").write_text("0")


EVENTS: Final[dict[str, tuple[Callable[[Scene, AgentProcess], None], ...]]] = {
    "nothing else": (),
    "the first is killed": (_kill,),
    "the first stops": (_stop,),
    "the first hangs and continues": (_hang, _continue),
    "the first hangs and is killed": (_hang, _kill),
    "the state is deleted": (_lose_state,),
    "the state is deleted, the first is killed": (_lose_state, _kill),
    "the state directory is replaced": (_replace_directory,),
    "the state directory is replaced, the first is killed": (_replace_directory, _kill),
    "the first is killed, the state is deleted": (_kill, _lose_state),
    "the cgroup of the pods is replaced": (_replace_kubepods,),
}
"""What happens while both run. After each part the second agent syncs twice, and the first one if it can."""
_ENDED: Final = (_kill, _stop)


def two_agents(table: runs.Table, every: int) -> None:
    """Each event in each phase, with the same state directory and with another one."""
    cases = ((where, before, event) for where in DIRECTORIES for before in BEFORE for event in EVENTS)
    for where, before, event in runs.sample(cases, every):
        result, detail = _run(DIRECTORIES[where], BEFORE[before], EVENTS[event])
        table.add(f"two agents, {where}", f"{event}, {before}", result, detail)


def _run(
    directory: str, before: tuple[str, ...], events: tuple[Callable[[Scene, AgentProcess], None], ...]
) -> tuple[str, str]:
    with place() as world:
        world.locks = True
        second = world.second(directory)
        first = AgentProcess(world)
        try:
            for step in before:
                if step == "press":
                    world.write(PRESSED)
                else:
                    first.do(step)
            pair = _Pair(world, first, second)
            try:
                result, detail = runs.judge(second, pair.steps(events), pressed=True, allowed=1)
            finally:
                second.close()
        finally:
            first.kill()
        if result not in runs.BAD and pair.wrong:
            return "lost rate limit", pair.wrong
        if result not in runs.BAD and world.frozen:
            return "not recovered", f"left frozen: {world.frozen}"
        return ("evicted once" if result not in runs.BAD else result), detail


class _Pair:
    def __init__(self, world: Scene, first: AgentProcess, second: Scene) -> None:
        self._world, self._first, self._second = world, first, second
        self._answers = True
        self._first_beside = ""
        self._began = 0.0
        self.wrong = ""

    def steps(self, events: tuple[Callable[[Scene, AgentProcess], None], ...]) -> Iterator[Callable[[], None]]:
        world, ended = self._world, False
        yield self._launch_second
        if not self._second.beside:
            self.wrong = "the second agent acts beside the first one"
        for event in (None, *events):
            if event is not None:
                event(world, self._first)
            ended = ended or event in _ENDED
            self._answers = not ended and event is not _hang
            for _ in range(2):
                world.write(PRESSED)
                if self._answers:
                    yield self._sync_first
                yield self._sync_second
            if not ended and not self._second.beside and not self._first_beside:
                self.wrong = f"both agents act after {getattr(event, '__name__', '')}"
        if not ended:
            self._first.kill()
            self._answers = False
        for hours in (0, 1):
            if hours and not world.cluster.evicted:
                world.now += HOUR_S
            for _ in range(runs.SYNCS_AFTER):
                yield self._sync_second
        if self._second.beside:
            self.wrong = "the second agent has not taken over"

    def _launch_second(self) -> None:
        self._second.now = self._began = self._world.now
        self._second.launch()

    def _sync_first(self) -> None:
        done = self._first.do(SYNC)
        if done is None or done.failure:
            raise RuntimeError(done.failure if done is not None else "the first agent has died")
        self._first_beside = done.beside

    def _sync_second(self) -> None:
        second = self._second
        second.now = max(second.now, self._world.now)
        if second.sync_in_role():
            beside = bool(second.beside)
            second.close()
            second.beside_since = self._began if beside else float("-inf")
            second.launch()
            second.sync_in_role()
        self._world.now = second.now
