"""Jumps of the clocks and mounts that hang, before each step of a scenario: pressure, an eviction, another process.

The scenario without a fault is the measure. A jump of the wall clock changes nothing. Time in which the machine was
suspended or the process stopped fills the rate limit, and it is part of no grace period. After a reboot every token
counts as spent.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from nodeagent.sampling.hostfs.host import FileSystem, RecordedHost
from nodeagent.sampling.hostfs.statvfs_timeout import StatvfsWithTimeout
from tests.faults import injected, runs
from tests.faults.lifecycle import HOUR_S, NEXT_S, ONE, place
from tests.faults.scene import CALM, Scene
from tests.support.trees import GI, MI, Node

START, SYNC, PRESS, AGAIN = "start", "sync", "press", "start again"
GRACE_S: Final = 4.0
_SOFT: Final = ONE.replace("evictionSoft: {}", "evictionSoft: {memory.available: 2Gi}").replace(
    "evictionSoftGracePeriod: {}", f"evictionSoftGracePeriod: {{memory.available: {GRACE_S:g}s}}"
)


SYNCS_AFTER: Final = 20
"""A calm node has its pods read every 10 s. Then the grace period follows."""


class Scenario(NamedTuple):
    """What happens without a fault."""

    config: str
    pressed: int
    """Bytes that are available under pressure."""
    steps: tuple[str, ...]


SCENARIOS: Final[dict[str, Scenario]] = {
    "hard": Scenario(ONE, 300 * MI, (START, SYNC, SYNC, PRESS, SYNC, SYNC, AGAIN, SYNC)),
    "soft": Scenario(_SOFT, GI + 500 * MI, (START, SYNC, PRESS, *[SYNC] * 16, AGAIN, SYNC)),
    "soft, restarted": Scenario(_SOFT, GI + 500 * MI, (START, SYNC, PRESS, SYNC, SYNC, AGAIN, *[SYNC] * 8)),
}
_YEAR_S: Final = 365 * 86400.0
WALL: Final = {
    "wall clock an hour forward": HOUR_S,
    "wall clock an hour back": -HOUR_S,
    "wall clock a year forward": _YEAR_S,
    "wall clock a year back": -_YEAR_S,
    "wall clock at 1970": -1_800_000_000.0,
    "wall clock a century forward": 100 * _YEAR_S,
}
SUSPENDS: Final = {"suspended for a minute": 60.0, "suspended for an hour": HOUR_S, "suspended for a day": 24 * HOUR_S}
STOPS: Final = {"stopped for a minute": 60.0, "stopped for an hour": HOUR_S, "stopped for a day": 24 * HOUR_S}
"""Of the process: the machine is awake."""
REBOOTED_S: Final = 5000.0
"""From a reboot to the next start of the agent: the pods have run for an hour."""
REBOOT, HANGING = "reboot", "statvfs hangs"
BACK_AND_FORTH: Final = "wall clock back and forth at each step"
KINDS: Final = (*WALL, BACK_AND_FORTH, *SUSPENDS, *STOPS, REBOOT, HANGING)
WAITS_S: Final = 0.9
"""Longest time for which a sync waits while a mount hangs. The first one waits 0.2 s for each file system."""


def clocks_and_mounts(table: runs.Table, every: int) -> None:
    """Each kind before each step of each scenario."""
    expected = {name: run(scenario, -1, "") for name, scenario in SCENARIOS.items()}
    assert all(each.evicted.count(1) > 1 for each in expected.values()), expected
    cases = (
        (name, kind, at) for name, scenario in SCENARIOS.items() for kind in KINDS for at in range(len(scenario.steps))
    )
    for name, kind, at in runs.sample(cases, every):
        observed = run(SCENARIOS[name], at, kind)
        result, detail = judged(observed, expected[name], SCENARIOS[name], at, kind)
        step = SCENARIOS[name].steps[at]
        table.add(f"{name} threshold, before '{step}'", kind, result, f"step {at}: {detail}")


class Observed(NamedTuple):
    """What happened in a scenario."""

    evicted: tuple[int, ...]
    """How many evictions there were after each step."""
    blocked_s: float
    """The longest time for which a sync waited."""
    result: str
    detail: str
    """Of the judge, at the end."""


def run(scenario: Scenario, at: int, kind: str) -> Observed:
    """The scenario, with a fault of this kind before the step `at`."""
    with place(CALM, scenario.config) as world, injected.wall_clock(lambda: world.wall_offset_s):
        runner = _Runner(world, scenario)
        try:
            result, detail = runs.judge(world, runner.steps(at, kind), pressed=True, allowed=_allowed(kind))
        finally:
            runner.mount.answers.set()
            world.close()
        return Observed(tuple(runner.evicted), world.blocked_s, result, detail)


class _Runner:
    def __init__(self, world: Scene, scenario: Scenario) -> None:
        self._world, self._scenario = world, scenario
        self._node = CALM
        self._lives = False
        self.evicted: list[int] = []
        self.mount = world.statvfs = _Mount(world)

    def steps(self, at: int, kind: str) -> Iterator[Callable[[], None]]:
        world = self._world
        for number, step in enumerate(self._scenario.steps):
            if number == at:
                self._inject(kind)
            if kind == BACK_AND_FORTH and number >= at:
                world.wall_offset_s = _YEAR_S if number % 2 else -_YEAR_S
            if step == PRESS:
                self._change(self._node._replace(memory_available=self._scenario.pressed))
            elif step == SYNC and self._lives:
                yield self._sync
            else:
                yield self._start
            self.evicted.append(len(world.cluster.evicted))
        self.mount.hangs.clear()
        self.mount.answers.set()
        if not world.cluster.evicted:
            world.now += HOUR_S
        yield from [world.sync] * SYNCS_AFTER

    def _change(self, node: Node) -> None:
        self._node = node
        self._world.write(node)

    def _sync(self) -> None:
        with self._world.measured():
            self._world.sync()

    def _start(self) -> None:
        """Another process, after an orderly end of the one before."""
        if self._lives:
            self._world.close()
            self._world.now += NEXT_S
        self._world.launch()
        self._world.start()
        self._lives = True

    def _inject(self, kind: str) -> None:
        world = self._world
        if kind in WALL:
            world.wall_offset_s = WALL[kind]
        elif kind in SUSPENDS:
            world.now += SUSPENDS[kind]
            world.suspended_s += SUSPENDS[kind]
        elif kind in STOPS:
            world.now += STOPS[kind]
        elif kind == HANGING:
            self.mount.hangs.set()
        elif kind == REBOOT:
            if self._lives:
                world.close()
            self._lives = False
            world.wall_offset_s += world.now - REBOOTED_S
            world.now, world.boot_id = REBOOTED_S, "next boot"
            self._change(self._node._replace(uptime=REBOOTED_S))


class _Mount:
    """statvfs of the node, which can hang."""

    def __init__(self, world: Scene) -> None:
        self._host = RecordedHost(str(world.root))
        self._call = StatvfsWithTimeout(self._statvfs)
        self.hangs, self.answers = threading.Event(), threading.Event()

    def __call__(self, path: str) -> FileSystem:
        return self._call(path)

    def _statvfs(self, path: str) -> FileSystem:
        if self.hangs.is_set():
            self.answers.wait()
        return self._host.statvfs(path)


def _allowed(kind: str) -> int:
    """Evictions: one, and one more if the token is due again."""
    return 2 if (SUSPENDS | STOPS).get(kind, 0.0) >= HOUR_S else 1


def judged(observed: Observed, expected: Observed, scenario: Scenario, at: int, kind: str) -> tuple[str, str]:
    if observed.result in runs.BAD:
        return observed.result, observed.detail
    if observed.blocked_s > WAITS_S:
        return "hang", f"a sync waited for {observed.blocked_s:.1f} s"
    if observed.evicted == expected.evicted:
        return "evicted as without it", ""
    what = f"evictions after each step {observed.evicted}, without it {expected.evicted}"
    if kind in WALL or kind in (BACK_AND_FORTH, HANGING):
        return "not recovered", what
    if 1 in observed.evicted and observed.evicted.index(1) < _earliest(scenario, at, kind):
        return "wrong eviction", f"within the grace period: {what}"
    if max(observed.evicted) > 1:
        return "evicted again when the token was due again", what
    sooner = 1 in observed.evicted and observed.evicted.index(1) < expected.evicted.index(1)
    return ("evicted sooner, after the grace period" if sooner else "evicted later"), what


def _earliest(scenario: Scenario, at: int, kind: str) -> int:
    """The first step in which an eviction may come: once the pressure has lasted for the grace period since a sync that
    could see it, without the time of a suspend."""
    grace_s = GRACE_S if scenario.config is _SOFT else 0.0
    seen_at = scenario.steps.index(PRESS) + 1
    lasted_s = 0.0
    for number in range(seen_at + 1, len(scenario.steps)):
        if lasted_s >= grace_s:
            return number - 1
        lasted_s += NEXT_S + 1.0 if scenario.steps[number] == AGAIN else 1.0
        lasted_s += STOPS.get(kind, 0.0) if number == at else 0.0
    return len(scenario.steps) - 1
