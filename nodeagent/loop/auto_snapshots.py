"""Writes snapshot files by itself: after an eviction, a lost race and a refusal that lasted.

Promises:

1. Nothing here is in the way of a decision: the loop only compares values and starts a thread; the thread copies what
   is stored already and decodes no sample.
2. Number and bytes are bounded (`recorder.snapshots`), and there is at most one file in `EVERY_S`: events that come
   sooner share the next file.
3. Nothing is written to a file system that is short of space or below a threshold.
4. A failure is a note and a log line, and the next event tries again.

Theory of operation. An event is due some seconds later, so that the file also has what came of it. A refusal has lasted
when every decision since `LASTED_S` refused to evict, for whatever reasons. It is written once, until a decision
refuses no eviction; and again for each reason that comes to last so long by itself, since one that stays for days, such
as `page-cache-only`, must hide no other.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from nodeagent.config.load import LoadedConfig
from nodeagent.model import Note, NoteKind, OomReport, Plan, RefusalCode
from nodeagent.records import recorder_paths, sample_recorder
from nodeagent.records.recorder_paths import SnapshotPlace
from nodeagent.runtime import workers
from nodeagent.sampling.hostfs.host import Host

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

EVERY_S: Final = 60.0
LASTED_S: Final = 60.0
"""A refusal for less is normal: rate limits, a pod that terminates, a slot of the zone."""
EVICTION_DELAY_S: Final = 60.0
"""The slowest release took 13 s; a second eviction may follow."""
RACE_DELAY_S: Final = 2.0
"""The node may not live longer."""
MAX_BYTES_IN_MEMORY: Final = 4 << 20
"""Of the default directory, which is usually a tmpfs and counts against the memory limit of the agent."""
WRITE_LIMIT_S: Final = 60.0
"""A copy of 40 MiB to a slow disk takes seconds."""

EVICTION, REFUSAL, RACE_LOST = "eviction", "refusal", "race-lost"


def open_snapshots(
    host: Host, loaded: LoadedConfig, *, node: str, log: "FilteringBoundLogger"
) -> "AutoSnapshots | None":
    """The snapshots of the configuration; None if it wants none."""
    config = loaded.config
    limits = config.recorder.snapshots
    if not limits.max:
        return None
    state_dir, on_disk = Path(config.state_dir), config.recorder.dir
    max_bytes = limits.max_bytes.quantity or 0
    place = SnapshotPlace(
        samples=Path(on_disk) if on_disk else state_dir / recorder_paths.SAMPLES,
        records=state_dir,
        directory=recorder_paths.snapshots_directory(config),
        most=limits.max,
        max_bytes=max_bytes if on_disk else min(max_bytes, MAX_BYTES_IN_MEMORY),
    )
    return AutoSnapshots(place, node=node, host=host, log=log)


class _Due(NamedTuple):
    reason: str
    id: str
    wall: float
    """Of the event."""
    at: float
    """CLOCK_BOOTTIME from which the file is written."""


class _Result(NamedTuple):
    path: Path | None
    size: int
    trouble: str
    due: _Due


class AutoSnapshots:
    """The snapshots of one agent."""

    def __init__(
        self,
        place: SnapshotPlace,
        *,
        node: str,
        host: Host,
        log: "FilteringBoundLogger",
        start: Callable[[Callable[[], object]], bool] = lambda work: (
            workers.start_thread(work, name="snapshot") is not None
        ),
    ) -> None:
        """`start` runs a function in a thread of its own; False if there is no PID for one."""
        self._place = place
        self._node = node
        self._host = host
        self._log = log
        self._start = start
        self._due: _Due | None = None
        self._refused_since: dict[RefusalCode | None, float] = {}
        """By reason; None is any."""
        self._written: frozenset[RefusalCode | None] = frozenset()
        self._started_at = float("-inf")
        self._running = False
        self._result: _Result | None = None
        self._note: tuple[Note, ...] = ()
        self._short_devices: frozenset[int] = frozenset()

    @property
    def notes(self) -> tuple[Note, ...]:
        """The newest file, or why there is none."""
        return self._note

    def observe_plan(self, plan: Plan, *, now: float, wall: float) -> None:
        """After each decision; `now` is CLOCK_BOOTTIME."""
        self._short_devices = sample_recorder.short_devices(plan.signals)
        if plan.victims:
            self._request(_Due(EVICTION, plan.id, wall, now + EVICTION_DELAY_S))
        codes = () if plan.victims else [refusal.code for refusal in plan.eviction_refusals]
        reasons = (None, *codes) if codes else ()
        self._refused_since = {reason: self._refused_since.get(reason, now) for reason in reasons}
        lasted = frozenset(reason for reason, since in self._refused_since.items() if now - since >= LASTED_S)
        if lasted - self._written:
            self._request(_Due(REFUSAL, plan.id, wall, now))
        self._written = lasted

    def observe_oom(self, report: OomReport, *, now: float, wall: float) -> None:
        """After each report of OOM kills."""
        if report.race is not None:
            self._request(_Due(RACE_LOST, report.id, wall, now + RACE_DELAY_S))

    def step(self, *, now: float, loaded: LoadedConfig) -> None:
        """In each sync: report a finished file, start one that is due. `loaded` is for a recording without a header."""
        result = self._result
        if result is not None:
            self._result, self._running = None, False
            self._report(result)
        due = self._due
        if due is None or self._running or now < due.at or now - self._started_at < EVERY_S:
            return
        self._running, self._started_at, self._due = True, now, None
        if not self._start(lambda: self._write(due, loaded)):
            self._running, self._due = False, due  # in a minute again

    def _request(self, due: _Due) -> None:
        """A lost race comes first, and does not wait for what an eviction waits for."""
        before = self._due
        if before is None or (due.reason == RACE_LOST and before.reason != RACE_LOST):
            self._due = due

    def _report(self, result: _Result) -> None:
        facts = {"reason": result.due.reason, "id": result.due.id}
        if result.path is None:
            self._log.warning("snapshot not written", trouble=result.trouble, once=result.trouble, **facts)
            self._note = (Note(NoteKind.SNAPSHOTS, f"not written: {result.trouble}"),)
        else:
            self._log.info("snapshot written", file=str(result.path), bytes=result.size, **facts)
            self._note = (Note(NoteKind.SNAPSHOTS, f"{result.due.reason} {result.due.id}: {result.path}"),)

    # --- in the thread -----------------------------------------------------------------------------------------------

    def _write(self, due: _Due, loaded: LoadedConfig) -> None:
        directory = self._place.directory
        try:
            with workers.step(f"writing {directory}", limit_s=WRITE_LIMIT_S):
                from nodeagent.loop import snapshot_job

                job = snapshot_job.SnapshotJob(
                    self._place, self._node, self._host, loaded, due.reason, due.id, due.wall
                )
                written = snapshot_job.write(job, short_devices=self._short_devices)
            self._result = _Result(written.path, written.size, written.trouble, due)
        except BaseException:
            self._result = _Result(None, 0, f"{directory}: a defect of nodeagent", due)
            raise
