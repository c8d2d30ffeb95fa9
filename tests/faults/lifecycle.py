"""kill -9 at each system call of start, sync and stop, and a full disk at each call that needs space.

After each fault another agent starts in what the first one has left. The limit is one eviction for each hour, so that a
single token that is spent twice is seen: however many processes there are, one eviction is made, of the right pod.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from tests.faults import injected, runs
from tests.faults.processes import LAUNCH, STOP, SYNC, AgentProcess, Inject
from tests.faults.scene import BEGAN, CALM, CONFIG, PRESSED, Scene
from tests.fuzz import scratch
from tests.support.trees import Node

ONE: Final = CONFIG.replace("burst: 2", "burst: 1")
"""One eviction an hour."""
HOUR_S: Final = 3600.0
NEXT_S: Final = 20.0
"""From the end of one process to the start of the next one."""
PRESS, CRASH = "press", "crash"
"""Steps of a history: the node comes under pressure; the agent is killed between two syncs, and the next one starts."""


class Phase(NamedTuple):
    """The step with the fault, and what happened before it."""

    before: tuple[str, ...]
    step: str


PHASES: Final[dict[str, Phase]] = {
    "first start": Phase((), LAUNCH),
    "first start, under pressure": Phase((PRESS,), LAUNCH),
    "calm sync": Phase((LAUNCH, SYNC, SYNC), SYNC),
    "sync that evicts": Phase((LAUNCH, SYNC, SYNC, PRESS), SYNC),
    "sync after the eviction": Phase((LAUNCH, SYNC, PRESS, SYNC), SYNC),
    "calm stop": Phase((LAUNCH, SYNC), STOP),
    "stop after the eviction": Phase((LAUNCH, SYNC, PRESS, SYNC), STOP),
    "start after a stop": Phase((LAUNCH, SYNC, PRESS, SYNC, STOP, CRASH), LAUNCH),
    "start after a kill -9": Phase((LAUNCH, SYNC, PRESS, SYNC, CRASH), LAUNCH),
}


class _Process:
    """The process of a case; `CRASH` replaces it."""

    def __init__(self, world: Scene) -> None:
        self._world = world
        self.now = AgentProcess(world)

    def run(self, phase: Phase) -> None:
        for step in phase.before:
            if step == PRESS:
                self._world.write(PRESSED)
            elif step == CRASH:
                self.now.kill()
                self._world.now += NEXT_S
                self.now = AgentProcess(self._world)
            else:
                done = self.now.do(step)
                assert done is not None, f"{phase}: the process has died"
                assert not done.failure, done.failure


@contextmanager
def in_phase(phase: Phase) -> Iterator[tuple[Scene, _Process]]:
    with place() as world:
        process = _Process(world)
        try:
            process.run(phase)
            yield world, process
        finally:
            process.now.kill()


@contextmanager
def place(node: Node = CALM, config: str = ONE) -> Iterator[Scene]:
    """A scene without an agent."""
    with tempfile.TemporaryDirectory(dir=scratch.PARENT) as name:
        yield Scene(Path(name), node, config=config, launch=False)


# --- kill -9 ---------------------------------------------------------------------------------------------------------


def kills(table: runs.Table, every: int) -> None:
    """SIGKILL at each system call of each phase, also in the middle of a write; then the next agent."""
    for name, inject, call in runs.sample(_kills(), every):
        with in_phase(PHASES[name]) as (world, process):
            what = f"killed at {call}" if inject.how == "kill" else "killed in the middle of a write"
            died, failure = _died(process.now, PHASES[name].step, inject)
            result, detail = failure or next_agent(world)
        table.add(f"kill -9, {name}", what, result, f"call {inject.number}: {detail}", injected=int(died))


def _kills() -> Iterator[tuple[str, Inject, str]]:
    for name, phase in PHASES.items():
        with in_phase(phase) as (_, process):
            done = process.now.do(phase.step)
        assert done is not None
        for number, call in enumerate(done.calls):
            yield name, Inject(number, "kill"), call
            if call == "write":
                yield name, Inject(number, "kill amid"), call


def _died(process: AgentProcess, step: str, inject: Inject) -> tuple[bool, tuple[str, str] | None]:
    """Whether the process was killed in the step, and what may not happen before."""
    try:
        done = process.do(step, inject)
    except TimeoutError as error:
        return False, ("hang", str(error))
    if done is not None and done.failure:
        return False, ("traceback", done.failure)
    return done is None, None


def next_agent(world: Scene) -> tuple[str, str]:
    """Another agent in the same place, under pressure: what happened over both lives."""
    before = len(world.cluster.evicted)
    world.now += NEXT_S
    world.write(PRESSED)
    world.launch()

    def hour_later() -> None:
        # The first one had the token, and may have died with it.
        if not world.cluster.evicted:
            world.now += HOUR_S

    steps: list[Callable[[], None]] = [world.start, *[world.sync] * runs.SYNCS_AFTER]
    try:
        result, detail = runs.judge(world, [*steps, hour_later, *steps[1:]], pressed=True, allowed=1)
    finally:
        world.close()
    if result not in runs.BAD and world.frozen:
        return "not recovered", f"left frozen: {world.frozen}"
    if result not in runs.BAD:
        late = world.now > BEGAN + HOUR_S
        result = f"evicted {'before the fault' if before else 'when the token was due again' if late else 'after it'}"
    return result, detail


# --- a full disk -----------------------------------------------------------------------------------------------------

ENDS: Final = ("stop, then space", "kill -9, then space", "kill -9, still full")


def full_disks(table: runs.Table, every: int) -> None:
    """No space for the state and the recordings, from each call that needs some on, or for that call alone."""
    for name, inject, call, end in runs.sample(_full_disks(), every):
        with in_phase(PHASES[name]) as (world, process):
            result, detail = _without_space(world, process.now, PHASES[name].step, inject, end)
        kind = "ENOSPC once" if inject.how == "full once" else "ENOSPC from then on"
        table.add(f"full disk, {name}", f"{kind}, at {call}; {end}", result, f"call {inject.number}: {detail}")


def _full_disks() -> Iterator[tuple[str, Inject, str, str]]:
    for name, phase in PHASES.items():
        with in_phase(phase) as (_, process):
            done = process.now.do(phase.step)
        assert done is not None
        for number, call in enumerate(done.writes):
            for how in ("full", "full once"):
                for end in ENDS if how == "full" else ENDS[1:2]:
                    yield name, Inject(number, how), call, end


def _without_space(world: Scene, process: AgentProcess, step: str, inject: Inject, end: str) -> tuple[str, str]:
    steps = [step] if step == STOP else [step, SYNC, SYNC, *[STOP] * end.startswith("stop")]
    for number, each in enumerate(steps):
        try:
            done = process.do(each, inject if number == 0 else None)
        except TimeoutError as error:
            return "hang", str(error)
        if done is None or done.failure:
            return "traceback", done.failure if done is not None else "the process has died"
    process.kill()
    if end.endswith("still full"):
        with injected.full(world.state):
            world.now += NEXT_S
            world.write(PRESSED)
            world.launch()
            result, detail = runs.judge(world, [world.start, world.sync], pressed=True, must_recover=False, allowed=1)
            world.close()
        if result in runs.BAD:
            return result, detail
    return next_agent(world)
