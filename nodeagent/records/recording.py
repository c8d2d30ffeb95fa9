"""Reads a recording: the samples and the records of decisions of one node.

Promises:

1. What is readable is read. A damaged, torn or newer part costs that part alone and is listed in `trouble`.
2. A file that is no recording at all gives one clear `RecordingError`.
3. The memory of a reader does not depend on what a file claims, and one pass reads at most `MAX_READ_SAMPLES` and
   `MAX_READ_BYTES`. Nothing is extracted or executed.

Theory of operation. A recording is a recorder's directory, a state directory with a recorder's directory in it, one
`.rec` file, or a snapshot file (a zip with `samples/*.rec` and `decisions.jsonl`). A segment is `samples-N.rec` with
its completed groups and `samples-N-tail.rec` with the group in progress. The tail is read first, because the recorder
moves it into the segment at any time; what is in both counts once.
"""

import contextlib
import io
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, Protocol, TypeVar

from nodeagent.model.recording import RecordedSample, RecordingHeader
from nodeagent.model.snapshot import NodeSnapshot
from nodeagent.records import (
    flight_recorder,
    recorder_paths,
    recording_format,
    recording_lean,
    recording_shape,
    snapshot_file,
)
from nodeagent.records.flight_recorder import RecordsError
from nodeagent.records.recording_format import Damage, Encoder, FileHeader, FormatError, Frame, ReadLimit
from nodeagent.records.recording_shape import MismatchError, Shape
from nodeagent.records.snapshot_file import SnapshotError, SnapshotFile
from nodeagent.runtime import regular_files

MAX_FILES: Final = 4096
MAX_TROUBLE: Final = 100
_LEVEL: Final = 6


class RecordingError(Exception):
    """The recording cannot be read; the message names the file and the reason."""


class _Source(NamedTuple):
    """One file of a recording, which can be opened again."""

    name: str
    open: Callable[[], BinaryIO]


class _Segment(NamedTuple):
    main: _Source | None
    tail: _Source | None


class Span(NamedTuple):
    """The first and the last wall time, epoch seconds."""

    first: float
    last: float


T_co = TypeVar("T_co", covariant=True)


class _Reader(Protocol[T_co]):
    """What reads the groups of one file."""

    def read(self, file: BinaryIO, frame: Frame) -> Iterator[T_co]:
        """The entries of a frame, oldest first. Raises FormatError and MismatchError."""
        ...


class Recording:
    """The samples and records of one node."""

    def __init__(
        self,
        segments: list[_Segment],
        records: Callable[[], Iterator[dict[str, Any]]],
        limit: Callable[[], ReadLimit] = ReadLimit,
    ) -> None:
        """See `open_recording`. `limit` makes that of one pass."""
        self._limit = limit
        self._segments = segments
        self._records = records
        self._trouble: dict[str, None] = {}
        self._headers: dict[RecordingHeader, None] | None = None
        self._summary: tuple[int, Span | None] | None = None

    @property
    def headers(self) -> tuple[RecordingHeader, ...]:
        """One for each configuration of each process that recorded, oldest first; damaged ones are left out."""
        found: list[RecordingHeader] = []
        for source in self._sources():
            with self._opened(source) as file:
                header = self._header(source, file) if file is not None else None
            if header is not None and header.recording.node and header.recording not in found:
                found.append(header.recording)
        return tuple(found)

    @property
    def trouble(self) -> tuple[str, ...]:
        """What could not be read until now, and why."""
        return tuple(self._trouble)

    @property
    def count(self) -> int:
        """The number of samples, from the frames alone: damaged ones may be among them."""
        return self._summarized()[0]

    @property
    def span(self) -> Span | None:
        """None without samples."""
        return self._summarized()[1]

    def samples(self, *, since_wall: float | None = None, until_wall: float | None = None) -> Iterator[RecordedSample]:
        """Oldest first, one at a time. Both times are inclusive."""
        since = -math.inf if since_wall is None else since_wall
        until = math.inf if until_wall is None else until_wall
        limit = self._limit()
        for segment in self._segments:
            for sample in self._segment_entries(segment, since, until, _GroupReader, limit):
                if since <= sample.wall_time <= until:
                    yield sample

    def snapshots(self) -> Iterator[NodeSnapshot]:
        """The snapshots of all samples, without their notes: several times as fast as `samples`."""
        limit = self._limit()
        for segment in self._segments:
            yield from self._segment_entries(segment, -math.inf, math.inf, _snapshot_reader, limit)

    def parts(
        self, *, since_wall: float | None = None, until_wall: float | None = None
    ) -> Iterator[tuple[RecordingHeader, Iterator[RecordedSample]]]:
        """The samples of this time by the process that recorded them, with its header, oldest first."""
        since = -math.inf if since_wall is None else since_wall
        until = math.inf if until_wall is None else until_wall
        limit = self._limit()
        for segment in self._segments:
            headers = [self._header_of(source) for source in segment if source is not None]
            header = next(
                (each for each in headers if each is not None and each.node), RecordingHeader("", "", "", "", 0)
            )
            samples = self._segment_entries(segment, since, until, _GroupReader, limit)
            yield header, (each for each in samples if since <= each.wall_time <= until)

    def copies(
        self, *, since_wall: float | None = None, until_wall: float | None = None
    ) -> Iterator[tuple[str, Iterator[bytes]]]:
        """The files of this time, by name, without what is damaged: the groups as they are, so that nothing is decoded.
        A group that is partly in this time is whole."""
        since = -math.inf if since_wall is None else since_wall
        until = math.inf if until_wall is None else until_wall
        for number, segment in enumerate(self._segments):
            for source, suffix in zip(
                (segment.tail, segment.main), (recorder_paths.TAIL, ""), strict=True
            ):  # see the theory above
                if source is not None and (first := next(chunks := self._copy(source, since, until), b"")):
                    yield f"samples-{number}{suffix}{recorder_paths.SUFFIX}", itertools.chain([first], chunks)

    def records(self) -> Iterator[dict[str, Any]]:
        """The records of decisions, outcomes, relief, reclaim and OOM kills, as `flight_recorder.read_records`."""
        try:
            yield from self._records()
        except RecordsError as error:
            self._report(str(error))
        except OSError as error:
            self._report(f"{error.filename}: {error.strerror}")

    # --- files -------------------------------------------------------------------------------------------------------

    def _sources(self) -> Iterator[_Source]:
        for segment in self._segments:
            yield from (source for source in segment if source is not None)

    def _report(self, message: str) -> None:
        if len(self._trouble) < MAX_TROUBLE:
            self._trouble[message] = None

    @contextlib.contextmanager
    def _opened(self, source: _Source) -> Iterator[BinaryIO | None]:
        try:
            file = source.open()
        except FileNotFoundError:  # the recorder has dropped it since the directory was listed
            yield None
            return
        except (OSError, ValueError) as error:
            self._report(f"{source.name}: {getattr(error, 'strerror', None) or error}")
            yield None
            return
        with file:
            yield file

    def _header(self, source: _Source, file: BinaryIO) -> FileHeader | None:
        """The header of the file. One that is damaged is replaced by this version's fields: frames with others are
        left out. None if the file has nothing to read."""
        try:
            return recording_format.read_header(file)
        except FormatError as error:
            self._report(f"{source.name}: {error}")
            if "damaged" not in str(error) and "not a recording" not in str(error):
                return None
        except OSError as error:
            self._report(f"{source.name}: {error.strerror}")
            return None
        fields = recording_shape.field_names()
        nameless = RecordingHeader("", "", "", "", 0.0)
        return FileHeader(fields, nameless, recording_format.shape_checksum(fields), 0)

    def _header_of(self, source: _Source) -> RecordingHeader | None:
        with self._opened(source) as file:
            found = self._header(source, file) if file is not None else None
        return found.recording if found is not None else None

    def _copy(self, source: _Source, since: float, until: float) -> Iterator[bytes]:
        """The header and the frames of this time; nothing if there is no such frame."""
        with self._opened(source) as file:
            header = self._header(source, file) if file is not None else None
            if file is None or header is None or not header.size:
                return
            begun = False
            for frame in recording_format.frames(file, start=header.size, verify=True):
                if isinstance(frame, Damage) or (
                    frame.packed and not (frame.last_wall >= since and frame.first_wall <= until)
                ):
                    continue
                if not begun:
                    begun = True
                    file.seek(0)
                    yield file.read(header.size)
                yield recording_format.raw(file, frame)

    def _summarized(self) -> tuple[int, Span | None]:
        if self._summary is None:
            count, first, last = 0, math.inf, -math.inf
            for segment in self._segments:
                groups: set[int] = set()
                for source in segment:
                    for frame in self._frames_of(source):
                        if source is segment.main:
                            groups.add(frame.group)
                        elif frame.group in groups:
                            continue
                        count += frame.samples
                        first, last = min(first, frame.first_wall), max(last, frame.last_wall)
            self._summary = count, Span(first, last) if count else None
        return self._summary

    def _frames_of(self, source: _Source | None) -> Iterator[Frame]:
        if source is None:
            return
        with self._opened(source) as file, contextlib.suppress(OSError):
            if file is None:
                return
            try:
                start = recording_format.read_header(file).size
            except FormatError:
                start = 0
            for each in recording_format.frames(file, start=start, verify=False):
                if isinstance(each, Frame) and math.isfinite(each.first_wall):
                    yield each

    # --- samples -----------------------------------------------------------------------------------------------------

    def _segment_entries(
        self,
        segment: _Segment,
        since: float,
        until: float,
        reader_for: Callable[[Shape], _Reader[T_co]],
        limit: ReadLimit,
    ) -> Iterator[T_co]:
        tail = b""
        if segment.tail is not None:
            with self._opened(segment.tail) as file, contextlib.suppress(OSError):
                tail = file.read(2 * recording_format.MAX_GROUP_BYTES) if file is not None else b""
        groups: set[int] = set()
        if segment.main is not None:
            with self._opened(segment.main) as file:
                if file is not None:
                    yield from self._file_entries(segment.main, file, since, until, reader_for, groups, limit)
        if segment.tail is not None and tail:
            file = io.BytesIO(tail)
            skip = frozenset(groups)
            yield from self._file_entries(segment.tail, file, since, until, reader_for, set(), limit, skip=skip)

    def _file_entries(
        self,
        source: _Source,
        file: BinaryIO,
        since: float,
        until: float,
        reader_for: Callable[[Shape], _Reader[T_co]],
        groups: set[int],
        limit: ReadLimit,
        *,
        skip: frozenset[int] = frozenset(),
    ) -> Iterator[T_co]:
        header = self._header(source, file)
        if header is None:
            return
        reader = reader_for(recording_shape.shape_of(header.fields))
        try:
            for part in recording_format.frames(file, start=header.size, verify=True):
                if isinstance(part, Damage):
                    if part.offset or header.size:
                        self._report(f"{source.name}: {part.size} bytes at {part.offset} are {part.reason}")
                    continue
                if part.shape != header.shape:
                    self._report(f"{source.name}: samples of another version beside a header of this one")
                    continue
                if part.group in skip or (part.first_wall > until and part.packed):
                    continue
                groups.add(part.group)
                if part.last_wall < since and part.packed:
                    continue
                if not limit.take(part):
                    self._trouble[limit.message] = None  # whatever else was reported
                    return
                try:
                    yield from reader.read(file, part)
                except (FormatError, MismatchError, RecursionError) as error:
                    self._report(f"{source.name}: the samples at {part.offset} cannot be read: {error}")
        except OSError as error:
            self._report(f"{source.name}: {error.strerror}")


def _snapshot_reader(shape: Shape) -> "_Reader[NodeSnapshot]":
    """The fast reader for a file with the fields of this version, else the one that maps fields by their names."""
    if shape.is_current:
        return recording_lean.LeanReader()
    return _SnapshotReader(shape)


class _GroupReader:
    """Applies the changes of a group one after another."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._position = (-1, -1)
        """The group and the index of the sample below."""
        self._raw: Any = None
        self._sample: RecordedSample | None = None

    def read(self, file: BinaryIO, frame: Frame) -> Iterator[RecordedSample]:
        """Raises FormatError and MismatchError."""
        index = frame.position
        for change in recording_format.entries(file, frame):
            if index == 0:
                self._raw, self._sample = None, None
                if type(change) is not list or len(change) != 1:
                    raise FormatError("the first one is not whole")
            elif self._position != (frame.group, index - 1):
                raise FormatError("the one before is missing")
            self._position = (-1, -1)
            raw = recording_format.with_change(self._raw, change)
            self._sample = sample = self._shape.sample(raw, self._raw, self._sample)
            self._raw, self._position = raw, (frame.group, index)
            index += 1
            yield sample


class _SnapshotReader:
    """The snapshots of whole samples."""

    def __init__(self, shape: Shape) -> None:
        self._reader = _GroupReader(shape)

    def read(self, file: BinaryIO, frame: Frame) -> Iterator[NodeSnapshot]:
        """As `_GroupReader.read`."""
        for sample in self._reader.read(file, frame):
            yield sample.snapshot._replace(notes=())


# --- opening ---------------------------------------------------------------------------------------------------------


def open_recording(path: Path, *, records: Path | None = None) -> Recording:
    """The recording in a recorder's directory, a state directory, one `.rec` file or a snapshot file. The records of a
    directory of samples are those of `records`, or beside it. Raises RecordingError."""
    try:
        if path.is_dir():
            return _open_directory(path, records)
        with os.fdopen(regular_files.open_to_read(path), "rb") as file:
            start = file.read(len(recording_format.MAGIC))
            if start.startswith(b"PK"):
                return _open_snapshot(path)
            if start != recording_format.MAGIC:
                frames = recording_format.frames(file, start=0, verify=True)
                if not any(isinstance(part, Frame) for part in frames):
                    raise RecordingError(f"{path}: not a recording of nodeagent" if start else f"{path}: empty")
            else:
                _refuse_other_formats(path, file)
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise RecordingError(f"{path}: {error}") from error
    tail = path.with_name(path.stem + recorder_paths.TAIL + recorder_paths.SUFFIX)
    segment = _Segment(_file(path), _file(tail) if tail.is_file() else None)
    return Recording([segment], lambda: iter(()))


def _refuse_other_formats(path: Path, file: BinaryIO) -> None:
    try:
        recording_format.read_header(file)
    except FormatError as error:
        if "written in format" in str(error):
            raise RecordingError(f"{path}: {error}") from error


def _open_directory(path: Path, given: Path | None) -> Recording:
    found = _segments([(each.name, _file(each)) for each in path.iterdir()])
    if not found and (path / recorder_paths.SAMPLES).is_dir():
        found = _segments([(each.name, _file(each)) for each in (path / recorder_paths.SAMPLES).iterdir()])
    here = (path / flight_recorder.DECISIONS_FILE).exists()
    records = given or (path if here else path.parent)
    if not found and given is None and not here:
        raise RecordingError(f"{path}: no recording in this directory")

    def read() -> Iterator[dict[str, Any]]:
        if (records / flight_recorder.DECISIONS_FILE).exists():
            yield from flight_recorder.read_records(records)

    return Recording(found, read)


def _open_snapshot(path: Path) -> Recording:
    """The members are checked once, and unpacked when they are read."""
    try:
        with SnapshotFile(path) as found:
            names = found.samples
    except SnapshotError as error:
        raise RecordingError(str(error)) from error
    prefix = snapshot_file.SAMPLES_PREFIX
    samples = [(name.removeprefix(prefix), _Source(f"{path}: {name}", _unpacker(path, name))) for name in names]

    return Recording(_segments(samples), lambda: flight_recorder.read_records(path))


def _unpacker(path: Path, member: str) -> Callable[[], BinaryIO]:
    def unpack() -> BinaryIO:
        try:
            with SnapshotFile(path) as found:
                return io.BytesIO(found.read(member))
        except SnapshotError as error:
            raise ValueError(str(error)) from error

    return unpack


def _segments(files: Iterable[tuple[str, _Source]]) -> list[_Segment]:
    found: dict[int, dict[bool, _Source]] = {}
    for name, source in files:
        if match := recorder_paths.SEGMENT.match(name):
            found.setdefault(int(match[1]), {})[match[2] is not None] = source
    if len(found) > MAX_FILES:
        found = {number: found[number] for number in sorted(found)[-MAX_FILES:]}
    return [_Segment(found[number].get(False), found[number].get(True)) for number in sorted(found)]


def _file(path: Path) -> _Source:
    return _Source(str(path), lambda: os.fdopen(regular_files.open_to_read(path), "rb"))


# --- writing ---------------------------------------------------------------------------------------------------------


def encode(header: RecordingHeader, samples: Iterable[RecordedSample]) -> Iterator[bytes]:
    """The parts of a `.rec` file with these samples."""
    encoder = Encoder()
    yield encoder.header(header)
    number, whole, changes, entries, walls = 0, 0, 0, list[bytes](), list[float]()
    before: RecordedSample | None = None
    for sample in samples:
        if recording_format.group_is_full(whole=whole, changes=changes, samples=len(entries)):
            yield encoder.packed(entries, group=number, first_wall=min(walls), last_wall=max(walls), level=_LEVEL)
            number, whole, changes, entries, walls, before = number + 1, 0, 0, [], [], None
        entry = encoder.entry(sample, before)
        whole, changes = (len(entry), 0) if before is None else (whole, changes + len(entry))
        entries.append(entry)
        walls.append(sample.wall_time)
        before = sample
    if entries:
        yield encoder.packed(entries, group=number, first_wall=min(walls), last_wall=max(walls), level=_LEVEL)
