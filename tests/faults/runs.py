"""Runs the faults and judges what happened."""

import itertools
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, TypeVar

from nodeagent.loop import state_store
from nodeagent.loop.state_store import AgentState
from nodeagent.model import RecordedSample
from nodeagent.records import recording
from nodeagent.records.recording import RecordingError
from nodeagent.records.state_file import StateFile, Trust
from tests.faults import injected
from tests.faults.scene import BURST, CALM, HOG, PRESSED, Scene, scene
from tests.support.trees import Node

T = TypeVar("T")

WARM_SYNCS: Final = 3
SYNCS_AFTER: Final = 3
"""After the fault has passed: by then the signal is known again, and a hard threshold has its eviction."""
HANG_S: Final = 5.0
"""CPU of one sync. A usual one takes 5 ms."""
PROGRESS_S: Final = 10.0
BAD: Final = ("wrong eviction", "lost rate limit", "hang", "traceback", "not recovered")


class Table:
    """What was injected, how often, and what happened."""

    def __init__(self, report: Callable[[str], None] = lambda _: None) -> None:
        """`report` gets each finding at once, and a line of progress every `PROGRESS_S`."""
        self._report = report
        self._began = self._reported_at = time.monotonic()
        self._counts: dict[tuple[str, str], Counter[str]] = {}
        self._injected: Counter[tuple[str, str]] = Counter()
        self.findings: list[str] = []

    def add(self, group: str, fault: str, result: str, detail: str = "", *, injected: int = 1) -> None:
        """One case. `injected`: how often the fault was injected in it."""
        self._counts.setdefault((group, fault), Counter())[result] += 1
        self._injected[group, fault] += injected
        if result in BAD:
            self.findings.append(f"{result}: {group}, {fault}: {detail}")
            self._report(self.findings[-1])
        if (now := time.monotonic()) - self._reported_at >= PROGRESS_S:
            self._reported_at = now
            self._report(
                f"{now - self._began:.0f} s: {self.total} faults injected, {len(self.findings)} findings; {group}"
            )

    @property
    def total(self) -> int:
        """How often a fault was injected."""
        return self._injected.total()

    def text(self) -> str:
        lines = ["| place | fault | injected | what happened |", "| --- | --- | ---: | --- |"]
        for (group, fault), results in self._counts.items():
            what = ", ".join(f"{name} {count}" for name, count in results.most_common())
            lines.append(f"| {group} | {fault} | {self._injected[group, fault]} | {what} |")
        sums: Counter[str] = sum(self._counts.values(), Counter())
        others = ", ".join(f"{name} {count}" for name, count in sums.most_common() if name not in BAD)
        lines += [f"| all | | | {others} |"] if others else []
        bad = ", ".join(f"{name} {sums[name]}" for name in BAD)
        lines.append(f"| all | {len(self._counts)} kinds x places | {self.total} | {bad} |")
        return "\n".join(lines)


def sample(items: Iterable[T], every: int) -> Iterator[T]:
    return itertools.islice(items, 0, None, every)


# --- system calls ----------------------------------------------------------------------------------------------------

PHASES: Final[dict[str, tuple[int, Node]]] = {
    "first sync": (0, CALM),
    "calm sync": (WARM_SYNCS, CALM),
    "sync that evicts": (WARM_SYNCS, PRESSED),
}
"""Syncs before the one with the fault, and the node in it."""


def system_calls(table: Table, every: int) -> None:
    """Each system call of a sync fails once with each error."""
    for phase, (before, node) in PHASES.items():
        with _Entered(before, node) as world, injected.counted() as calls:
            world.sync()
        cases = ((call, code) for call in calls for code in injected.ERRNOS)
        for call, code in sample(cases, every):
            with _Entered(before, node) as world:
                result, detail = _with_failing(world, call.number, code, pressed=node is PRESSED)
            table.add(phase, f"{code} of {call.name}", result, f"call {call.number}: {detail}")


class _Entered:
    """A scene after some calm syncs, with the node as it is in the sync with the fault."""

    def __init__(self, before: int, node: Node) -> None:
        self._before, self._node = before, node
        self._scene = scene(CALM)

    def __enter__(self) -> Scene:
        world = self._scene.__enter__()
        for _ in range(self._before):
            world.sync()
        if self._node is not CALM:
            world.write(self._node)
        return world

    def __exit__(self, *error: object) -> None:
        self._scene.__exit__(None, None, None)


def _with_failing(world: Scene, number: int, code: str, *, pressed: bool) -> tuple[str, str]:
    def faulty() -> None:
        with injected.failing(number, code):
            world.sync()

    return judge(world, [faulty, *[world.sync] * SYNCS_AFTER], pressed=pressed)


def judge(
    world: Scene,
    steps: Iterable[Callable[[], None]],
    *,
    pressed: bool,
    must_recover: bool = True,
    allowed: int = BURST,
) -> tuple[str, str]:
    """What happened, and the detail of what may not. `allowed`: so many evictions."""
    began = time.process_time()
    unknown = ""
    in_first: list[str] = []
    for number, step in enumerate(steps):
        try:
            step()
        except Exception:
            return "traceback", traceback.format_exc(limit=-6)
        if number == 0:
            unknown, in_first = world.unknown, list(world.evicted)
    if time.process_time() - began > HANG_S:
        return "hang", f"{time.process_time() - began:.1f} s"
    if defects := world.defects():
        return "traceback", f"{defects}\n{(world.place / 'log').read_text()[-3000:]}"
    evicted = world.evicted
    if any(name != HOG for name in evicted) or (evicted and not pressed):
        return "wrong eviction", str(evicted)
    if len(evicted) > allowed:
        return "lost rate limit", str(evicted)
    if must_recover and world.unknown:
        return "not recovered", world.unknown
    if pressed:
        if not evicted:
            return ("not recovered" if must_recover else "no eviction"), "no eviction"
        return ("evicted at once" if in_first else "evicted in a later sync"), ""
    return ("unknown with a reason" if unknown else "no effect on the decision"), ""


# --- kernel files ----------------------------------------------------------------------------------------------------


def kernel_files(table: Table, every: int) -> None:
    """Each field of each file that the agent reads, on a calm node: nothing may look like pressure."""
    with scene(CALM) as world:
        for _ in range(WARM_SYNCS):
            world.sync()
        paths = sorted(
            path.relative_to(world.root)
            for top in ("proc", "sys")
            for path in (world.root / top).rglob("*")
            if path.is_file() and not path.is_symlink()
        )
        contents = {path: (world.root / path).read_bytes() for path in paths}
    cases = ((path, fault, data) for path in paths for fault, data in injected.variants(contents[path]))
    for path, fault, data in sample(cases, every):
        with scene(CALM) as world:
            for _ in range(WARM_SYNCS):
                world.sync()
            (world.root / path).write_bytes(data)
            result, detail = judge(world, [world.sync] * 12, pressed=False, must_recover=False)
        table.add(path.name, fault, result, f"{path}: {data[:200]!r} {detail}")


# --- stored files ----------------------------------------------------------------------------------------------------


def state_bytes(table: Table, every: int) -> None:
    """The state after an eviction, damaged: it is never used, and its tokens count as spent."""
    with scene(CALM) as world:
        for _ in range(WARM_SYNCS):
            world.sync()
        world.write(PRESSED)
        world.sync()
        assert world.cluster.evicted == [HOG]
        path = world.state / "state"
        data, now = path.read_bytes(), world.now
        store = StateFile(path, shape=AgentState, boot_id="boot")
        assert store.load().trust is Trust.RESTORED
        for fault, damaged in sample(injected.flips(data), every):
            path.write_bytes(damaged)
            table.add("state file", fault, *_recall(store, now))
        path.unlink()
        table.add("state file", "removed", *_recall(store, now))


def _recall(store: StateFile, now: float) -> tuple[str, str]:
    try:
        loaded = store.load()
        recalled = state_store.recall(loaded, instance="next", now=now + 1.0)
    except Exception:
        return "traceback", traceback.format_exc(limit=-6)
    if loaded.trust in (Trust.RESTORED, Trust.FIRST) or recalled.state.policy.rate_limits.spent_at is None:
        return "lost rate limit", f"{loaded.trust}: {recalled.state.policy.rate_limits}"
    return "refused, every token counts as spent", ""


def recording_bytes(table: Table, every: int) -> None:
    """The recording of samples, damaged: what is read is what was written."""
    with scene(CALM) as world:
        for _ in range(4):
            world.sync()
        world.agent.stop()
        path = max((world.state / "samples").glob("*.rec"), key=lambda each: each.stat().st_size)
        data = path.read_bytes()
        good = list(recording.open_recording(path).samples())
        for fault, damaged in sample(injected.flips(data), every):
            path.write_bytes(damaged)
            table.add("recording", fault, *_read(path, good))
        path.write_bytes(data)


def _read(path: Path, good: list[RecordedSample]) -> tuple[str, str]:
    began = time.process_time()
    try:
        opened = recording.open_recording(path)
        found = list(opened.samples())
        _ = list(opened.snapshots()), opened.headers, opened.span
    except RecordingError:
        return "refused", ""
    except Exception:
        return "traceback", traceback.format_exc(limit=-6)
    if time.process_time() - began > HANG_S:
        return "hang", ""
    wrong = [sample for sample in found if sample not in good]
    if wrong:
        return "wrong sample", str(wrong[0])[:500]
    if len(found) == len(good):
        return "read whole", ""
    return "damaged part left out, and reported" if opened.trouble else "shorter without a word", ""
