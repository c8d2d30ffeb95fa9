"""Records samples without a pause for the loop: bounded, crash-safe, and in memory while the disk is short.

Promises:

1. `record` never waits for a disk and never compresses: it compares the sample with the one before (0.3 ms with 110
   pods) and hands the change to a thread. If that thread is behind, the samples that wait for it are dropped, and the
   next one has their number (`dropped`). After an error, which only a defect or a shortage of memory can cause, the
   next sample is whole.
2. All files have at most `max_bytes`. Memory has at most `MAX_MEMORY_BYTES` of samples: entries that wait for the
   thread, the group in progress, and completed groups that wait for the disk. While a group is compressed there is one
   more, compressed.
3. A process that is killed loses at most the entry that it was writing. The next process goes on in the same directory
   with a segment of its own.
4. A segment has the samples of one configuration, which is in its header.
5. While the directory's file system is short, full or read-only, or its threshold is met, groups stay in memory, and
   one note reports it. They are written when that has passed.

Theory of operation. The loop decides what is recorded (`due`): a decision that was recorded exactly, one sample a
second near a threshold, and every decision in calm, which is one in 10 s. After `LONG_S` near a threshold it is one in
`LONG_EVERY_S`, because a node may stay there for days. The first entry of a group is a whole sample. The thread appends
each entry to the tail and keeps it for the compression of the group.
"""

import collections
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from nodeagent.config.load import LoadedConfig
from nodeagent.model import (
    DISK_SIGNALS,
    MEMORY_SIGNALS,
    MemoryModel,
    NodeSnapshot,
    Note,
    NoteKind,
    SignalState,
    SignalVerdict,
)
from nodeagent.model.recording import RecordedSample, RecordingHeader
from nodeagent.records import entry_queue, recording_format
from nodeagent.records.entry_queue import Entry, EntryQueue, InForce
from nodeagent.records.recording_format import Encoder
from nodeagent.records.sample_reduction import SampleReducer
from nodeagent.records.segment_files import SegmentFiles
from nodeagent.runtime import workers

NEAR_EVERY_S: Final = 0.95
"""One sample a second near a threshold: a little less, because a sync starts a little earlier or later."""
LONG_S: Final = 900.0
LONG_EVERY_S: Final = 1.95
"""A node that is near a threshold for longer than `LONG_S` records every second sample, so that a day of pressure has
less than the 40 MiB of the default bound."""
NEAR_MEMORY: Final = 2.0
NEAR_OTHER: Final = 1.1
"""Near a threshold: less is available than its value times this. Memory goes from there to the threshold within
seconds. Disks may be nearly full for months."""
MEMORY_BYTES: Final = 2 << 20
"""Completed groups that wait in memory for a disk: an hour of calm with 110 pods."""
MAX_MEMORY_BYTES: Final = entry_queue.MAX_WAITING_BYTES + recording_format.MAX_ENTRY_BYTES + MEMORY_BYTES
"""10 MiB, which only a node with thousands of pods can need: 110 pods have 0.4 MiB."""
RETRY_S: Final = 30.0
"""How often a disk that is short is tried again, and its free space is read."""
GROUP_SHARE: Final = 4
"""A group has at most this part of `max_bytes`, because its entries and the compressed group exist together."""
LEVEL: Final = 6
STOP_S: Final = 2.0
"""Longest wait for the thread at the end of the process."""
WRITE_LIMIT_S: Final = 30.0


class RecorderCounts(NamedTuple):
    """What the recorder has done since the start; read by any thread."""

    samples: int = 0
    dropped: int = 0
    """Samples that were not recorded because the thread was behind, or that could not be encoded or written."""
    failures: int = 0
    """Failed writes."""
    disk_bytes: int = 0
    memory_bytes: int = 0


class SampleRecorder:
    """Records the samples of one process."""

    def __init__(
        self,
        directory: Path,
        *,
        max_bytes: int,
        header: Callable[[InForce], RecordingHeader],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`header` is called when a segment begins, in the recorder's thread."""
        self._encoder = Encoder()
        self._reducer = SampleReducer()
        self._before: RecordedSample | None = None
        self._whole = self._changes = self._entries = 0
        """Of the group in progress, as the loop has encoded it."""
        self._loaded: LoadedConfig | None = None
        self._in_force: InForce | None = None
        """None: the next sample is the first one of its configuration."""
        self._recorded_at = float("-inf")
        self._last: RecordedSample | None = None
        """As it was recorded, before small changes were left out."""
        self._near_since: float | None = None
        self._dropped = 0
        self._missing = 0
        """Samples that were dropped since the last entry."""
        self._queue = EntryQueue()
        self._writer = _Writer(SegmentFiles(directory, max_bytes=max_bytes), self._encoder, header, monotonic)
        self._group_limit = min(max_bytes // GROUP_SHARE, recording_format.MAX_ENTRY_BYTES)
        self._thread = workers.make_thread(self._run, name="recorder")

    def start(self) -> None:
        """Start the thread."""
        workers.start(self._thread)

    def configure(self, loaded: LoadedConfig) -> None:
        """The configuration in force from the next sample on."""
        if loaded is not self._loaded:
            if self._loaded is None or loaded.config != self._loaded.config:
                self._in_force = None
            self._loaded = loaded

    def record_between(self, node: NodeSnapshot) -> None:
        """Record the signals of a node sample without a decision, with the last pods, if they are near a threshold."""
        last, now = self._last, node.taken_at
        if last is None or now - last.at < NEAR_EVERY_S:
            return
        verdicts = tuple([_with_observation(each, node) for each in last.signals])
        if not any(_near(each) for each in verdicts) or not self.due(verdicts, now=now):
            return
        snapshot = last.snapshot._replace(
            taken_at=now,
            wall_time=node.wall_time,
            observations=node.observations,
            mem_available=node.mem_available,
            allocatable_by_kernel=node.allocatable_by_kernel,
        )
        self.record(last._replace(snapshot=snapshot, signals=verdicts, plan_id="", exact=False))

    def due(self, signals: tuple[SignalVerdict, ...], *, now: float) -> bool:
        """Whether a sample that no decision needs exactly is to be recorded."""
        if not any(_near(each) for each in signals):
            self._near_since = None
            return now - self._recorded_at >= NEAR_EVERY_S
        if self._near_since is None:
            self._near_since = now
        long = now - self._near_since > LONG_S
        return now - self._recorded_at >= (LONG_EVERY_S if long else NEAR_EVERY_S)

    def record(self, sample: RecordedSample) -> None:
        """Record the sample: whole if it is `exact`, otherwise without small changes."""
        self._recorded_at, self._last = sample.at, sample
        self._writer.observe_disks(sample.signals)
        if self._in_force is None:
            self._in_force, self._before = InForce(self._loaded, sample.wall_time), None
        if self._writer.needs_first:
            self._before = None  # a change has nothing to refer to
        try:
            self._put(sample, self._in_force)
        except Exception as error:
            self._dropped += 1
            self._missing += 1
            self._before = None
            if not isinstance(error, OverflowError):
                raise

    def _put(self, sample: RecordedSample, in_force: InForce) -> None:
        first = self._before is None or recording_format.group_is_full(
            whole=self._whole, changes=self._changes, samples=self._entries, limit=self._group_limit
        )
        stored = self._reducer.exact(sample) if sample.exact else self._reducer.reduced(sample)
        stored = stored._replace(dropped=self._missing)
        data = self._encoder.entry(stored, None if first else self._before)
        if not first and self._whole + self._changes + len(data) > self._group_limit:
            first, data = True, self._encoder.entry(stored, None)
        if dropped := self._queue.make_room(len(data)):
            self._dropped += dropped
            self._missing += dropped
            stored = stored._replace(dropped=self._missing)
            first, data = True, self._encoder.entry(stored, None)  # a change has nothing to refer to
        self._queue.put(Entry(data, stored.wall_time, first, sample.exact, in_force))
        self._missing = 0
        if first:
            self._whole, self._changes, self._entries = len(data), 0, 0
        else:
            self._changes += len(data)
        self._before = stored
        self._entries += 1

    def notes(self) -> tuple[Note, ...]:
        """Why samples are not stored on disk; empty if they are."""
        writer = self._writer
        return tuple(
            [Note(NoteKind.RECORDER, each) for each in (writer.trouble, writer.defect, writer.ignored) if each]
        )

    def counts(self) -> RecorderCounts:
        """May be called by any thread."""
        writer = self._writer
        dropped, waiting = self._dropped + writer.dropped, writer.memory_bytes + self._queue.bytes
        return RecorderCounts(writer.taken, dropped, writer.failures, writer.files.total, waiting)

    @property
    def idle(self) -> bool:
        """True if the thread has taken every sample."""
        return not self._queue

    def stop(self, *, within_s: float = STOP_S) -> None:
        """Write what waits, if that takes no longer."""
        self._queue.close()
        workers.join(self._thread, within_s)

    def _run(self) -> None:
        while (entry := self._queue.take()) is not None:
            with workers.step("write", limit_s=WRITE_LIMIT_S):
                self._writer.add(entry)
        self._writer.close()


class _Writer:
    """The thread's side: the files, and the groups that wait in memory for them."""

    def __init__(
        self,
        files: SegmentFiles,
        encoder: Encoder,
        header: Callable[[InForce], RecordingHeader],
        monotonic: Callable[[], float],
    ) -> None:
        self.files = files
        self.failures = 0
        self.trouble = ""
        """Why samples are not stored on disk; empty if they are."""
        self.defect = ""
        """The last error that no disk explains."""
        self.needs_first = False
        """The group in progress is lost: the next entry has to begin one."""
        self.taken = self.dropped = 0
        self.memory_bytes = 0
        self._encoder = encoder
        self._header = header
        self._monotonic = monotonic
        self._entries: list[Entry] = []
        self._written = 0
        """Entries of the group in progress that are in the tail."""
        self._group = 0
        self._waiting: collections.deque[tuple[bytes, InForce, int]] = collections.deque()
        """Completed groups that are not on disk."""
        self._segment: InForce | None = None
        """Of the segment that was opened last."""
        self._check_at = float("-inf")
        self._short_devices: frozenset[int] = frozenset()

    def observe_disks(self, signals: tuple[SignalVerdict, ...]) -> None:
        """The devices whose disk signal is below a threshold. Called by the loop."""
        self._short_devices = short_devices(signals)

    @property
    def ignored(self) -> str:
        """A name in the directory that is not one of the recorder's files; empty without one."""
        name = self.files.ignored
        return f"{name} is no file of the recorder and is ignored" if name else ""

    def add(self, entry: Entry) -> None:
        """Never raises an `Exception`: a defect costs the group in progress, and the next one is written."""
        if self.needs_first and not entry.first:
            self.dropped += 1
            return
        try:
            self._add(entry)
        except Exception as error:
            self.failures += 1
            self.dropped += 1
            self._entries, self._written, self.needs_first = [], 0, True
            self.files.close()  # its tail may lack an entry
            self.defect = f"samples were lost by a defect of nodeagent: {workers.error_text(error)}"
        else:
            self.taken += 1
            self.needs_first = False

    def _add(self, entry: Entry) -> None:
        if entry.first and self._entries:
            self._complete_group()
        if entry.first:
            self._entries, self._written = [], 0
            self._group += 1
        self._entries.append(entry)
        self._write()
        while self.memory_bytes > MEMORY_BYTES:  # what no disk has taken
            frame, _, samples = self._waiting.popleft()
            self.memory_bytes -= len(frame)
            self.dropped += samples

    def close(self) -> None:
        """Complete the group in progress."""
        if self._entries:
            self._complete_group()
            self._entries, self._written = [], 0
            self._write()
        self.files.close()

    def _complete_group(self) -> None:
        entries = self._entries
        walls = [each.wall for each in entries]
        frame = self._encoder.packed(
            [each.data for each in entries],
            group=self._group,
            first_wall=min(walls),
            last_wall=max(walls),
            level=LEVEL,
        )
        self._waiting.append((frame, entries[0].in_force, len(entries)))
        self.memory_bytes += len(frame)

    def _write(self) -> None:
        now = self._monotonic()
        if now >= self._check_at:
            self._check_at = now + RETRY_S
            self.trouble = self._cause_of_shortage()
            if self.files.is_open and self.files.lost():
                self.files.close()
                self._written = 0
        if self.trouble:
            return
        try:
            while self._waiting:
                frame, in_force, _ = self._waiting[0]
                self._open_segment(in_force)
                self.files.complete_group(frame)
                self.memory_bytes -= len(frame)
                self._waiting.popleft()
            while self._written < len(self._entries):
                self._open_segment(self._entries[0].in_force)
                entry = self._entries[self._written]
                frame = self._encoder.single(entry.data, group=self._group, position=self._written, wall=entry.wall)
                self.files.append_entry(frame)
                self._written += 1
        except OSError as error:
            self.failures += 1
            self.trouble = f"samples stay in memory: {error.filename or 'recorder'}: {error.strerror}"

    def _open_segment(self, in_force: InForce) -> None:
        """Begin a segment, unless the one that is open has room and the same configuration."""
        if self.files.is_open and not self.files.segment_is_full and in_force is self._segment:
            return
        self.files.open_segment(self._encoder.header(self._header(in_force)))
        self._segment, self._written = in_force, 0

    def _cause_of_shortage(self) -> str:
        try:
            if self._short_devices and self.files.device() in self._short_devices:
                return "samples stay in memory: the recorder's file system is below a threshold"
            if self.files.is_short():
                return "samples stay in memory: the recorder's file system is short of space"
        except OSError as error:
            return f"samples stay in memory: {error.filename or 'recorder'}: {error.strerror}"
        return ""


def short_devices(signals: tuple[SignalVerdict, ...]) -> frozenset[int]:
    """The devices whose disk signal is below a threshold: nothing is written there."""
    return frozenset(
        [
            each.observation.device
            for each in signals
            if each.state in (SignalState.SOFT, SignalState.HARD)
            and each.signal in DISK_SIGNALS
            and each.observation.device is not None
        ]
    )


def _with_observation(verdict: SignalVerdict, node: NodeSnapshot) -> SignalVerdict:
    model = verdict.thresholds[0].threshold.memory_model if verdict.thresholds else MemoryModel.WORKING_SET
    return verdict._replace(observation=node.observe(verdict.signal, model), figures=None)


def _near(verdict: SignalVerdict) -> bool:
    available = verdict.observation.available
    factor = NEAR_MEMORY if verdict.signal in MEMORY_SIGNALS else NEAR_OTHER
    return available is not None and any(
        each.value is not None and available < each.value * factor for each in verdict.thresholds
    )
