"""The format of a recording: one header line, then frames.

Promises:

1. The header names the fields of every value, so that a file of another version is readable (`recording_shape`).
2. A damaged byte costs at most the group of samples that it is in. Every frame has a checksum and a mark by which the
   next one is found.
3. What a file claims about its size is limited before memory is used for it.

Theory of operation. The header is the line `NODEAGENT-RECORDING VERSION CRC JSON`. A frame has either one group of
samples, compressed with zlib, or one sample of the group in progress as it is. An entry is the MessagePack of a change
(`change_between`): the first of a group replaces everything, and each further one has what differs from the sample
before. A change is

* a map: the changed fields by position, items by position, or values by key, each with its own change;
* a list of one: the new value;
* a list of two, `[sources, changes]`: a sequence whose items came or went. `sources` has the old position of each item,
  -1 for a new one;
* anything else: itself the new value.
"""

import io
import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, Final, NamedTuple

from nodeagent.model.recording import RecordedSample, RecordingHeader
from nodeagent.records import recording_shape, utf8
from nodeagent.records.recording_shape import FieldNames, MismatchError

VERSION: Final = 1
MAGIC: Final = b"NODEAGENT-RECORDING "
MAX_HEADER_BYTES: Final = 1 << 20
"""Of the header line: names of fields and the configuration, some KiB."""
MAX_GROUP_BYTES: Final = 16 << 20
"""Of a group, unpacked. A whole sample of 5,000 pods has 3 MiB, and a group ends soon after `GROUP_BYTES`."""
GROUP_BYTES: Final = 256 << 10
"""A group ends when its changes have this size. Larger groups are smaller on disk; all of a group is read for one
sample in it, and a damaged byte costs all of it."""
WHOLE_SHARE: Final = 2
"""A group also lasts until its changes have this many times the size of its first, whole sample."""
GROUP_SAMPLES: Final = 1800
MAX_ENTRY_BYTES: Final = 4 << 20
"""Of one sample. As values of Python it needs up to 75 times as much."""
MAX_DAMAGES: Final = 256
"""After so many damaged parts the rest of a file is not read: searching further would take minutes."""

MAX_READ_SAMPLES: Final = 4_000_000
"""Of one pass over a recording: 46 days at 1 Hz. A file of a few MiB could else have a thousand million samples."""
MAX_READ_BYTES: Final = 4 << 30
"""Unpacked, of one pass: a day at 1 Hz has some 100 MiB with 110 pods. Compression makes a thousandth of zeros."""

_MARK: Final = b"\xc1NRF"
"""Begins a frame. MessagePack never uses 0xC1."""
_CRC: Final = struct.Struct("<4sI")
_FRAME: Final = struct.Struct("<?IIIIIIdd")
_FRAME_BYTES: Final = _CRC.size + _FRAME.size
_SIZE: Final = struct.Struct("<I")
_CHUNK: Final = 64 << 10
_PLAIN: Final = frozenset({int, float, str, bool, type(None)})


class FormatError(ValueError):
    """The bytes are no recording, or not one that this version reads; the message has the reason."""


class FileHeader(NamedTuple):
    """The header line of a file."""

    fields: FieldNames
    recording: RecordingHeader
    shape: int
    """The checksum of `fields`, which every frame repeats."""
    size: int
    """Bytes of the line."""


class Frame(NamedTuple):
    """A frame without its payload."""

    packed: bool
    """A compressed group; False: one entry."""
    size: int
    """Bytes of the payload."""
    unpacked: int
    shape: int
    group: int
    """Counts the groups of one segment."""
    position: int
    """Of the first entry in its group."""
    samples: int
    first_wall: float
    last_wall: float
    offset: int
    """Of the payload in the file."""


class Damage(NamedTuple):
    """Bytes of a file that are no frame."""

    offset: int
    size: int
    reason: str


class ReadLimit:
    """What one pass may still read, over all files of a recording."""

    def __init__(self, samples: int = MAX_READ_SAMPLES, size: int = MAX_READ_BYTES) -> None:
        self._samples = samples
        self._bytes = size
        self.message = f"more than {samples:,} samples or {size / 2**30:g} GiB unpacked: the rest is not read"

    @property
    def reached(self) -> bool:
        return self._samples < 0 or self._bytes < 0

    def take(self, frame: Frame) -> bool:
        """Whether this frame is still within the limit."""
        self._samples -= frame.samples
        self._bytes -= frame.unpacked
        return not self.reached


# --- changes ---------------------------------------------------------------------------------------------------------


def change_between(old: Any, new: Any) -> Any:
    """The change that makes `new` from `old`, two unequal values."""
    kind = type(new)
    if kind in _PLAIN:
        return new
    if type(old) is not kind:
        return [new]
    if issubclass(kind, tuple):
        return _record_change(old, new) if hasattr(kind, "_fields") else _sequence_change(old, new)
    if issubclass(kind, Mapping):
        if old.keys() != new.keys():
            return [new]
        return {key: change_between(old[key], value) for key, value in new.items() if value != old[key]}
    return new


def _record_change(old: tuple[Any, ...], new: tuple[Any, ...]) -> dict[int, Any]:
    changes: dict[int, Any] = {}
    index = -1
    for now in new:
        index += 1
        before = old[index]
        if before is not now and before != now:
            changes[index] = now if type(now) in _PLAIN else change_between(before, now)
    return changes


def _sequence_change(old: tuple[Any, ...], new: tuple[Any, ...]) -> Any:
    if len(old) == len(new):
        changes = {}
        for index, (before, now) in enumerate(zip(old, new, strict=True)):
            if before is not now and before != now:
                if _identity(before) != _identity(now):
                    break
                changes[index] = change_between(before, now)
        else:
            return changes
    positions = {_identity(item): position for position, item in enumerate(old)}
    if len(positions) != len(old):
        return [new]
    sources = [positions.get(_identity(item), -1) for item in new]
    if _repeats(sources):
        return [new]
    changes = {}
    for index, (source, item) in enumerate(zip(sources, new, strict=True)):
        if source < 0:
            changes[index] = [item]
        elif item != old[source]:
            changes[index] = change_between(old[source], item)
    return [sources, changes]


def _repeats(sources: list[int]) -> bool:
    """Whether an old item has several places. A reader refuses that: a few bytes could else make millions of items."""
    moved = [each for each in sources if each >= 0]
    return len(set(moved)) != len(moved)


def _identity(item: Any) -> Any:
    """The first field of the first field, and so on: the UID of a pod, the path of a cgroup, the name of a signal."""
    while hasattr(item, "_fields"):
        item = item[0]
    return item


def with_change(raw: Any, change: Any) -> Any:
    """What `change` makes from a stored value. Raises MismatchError."""
    kind = type(change)
    if kind is dict:
        changed = raw.copy() if type(raw) in (list, dict) else None
        try:
            for key, each in change.items():
                if type(raw) is list and not 0 <= key < len(raw):
                    raise MismatchError("a change of a field that does not exist")
                changed[key] = with_change(raw[key], each)  # type: ignore[index]
        except (TypeError, KeyError, IndexError) as error:
            raise MismatchError("a change of a field that does not exist") from error
        return changed
    if kind is not list:
        return change
    if len(change) == 1:
        return change[0]
    return _rearranged(raw, change)


def _rearranged(raw: Any, change: list[Any]) -> list[Any]:
    if type(raw) is not list or len(change) != 2 or type(change[0]) is not list or type(change[1]) is not dict:
        raise MismatchError("no change of this version")
    sources, changes = change
    check_sources(sources, len(raw), len(changes))
    items = [None if each < 0 else raw[each] for each in sources]
    return with_change(items, changes)  # type: ignore[no-any-return]


def check_sources(sources: list[Any], old: int, changed: int) -> None:
    """Raises MismatchError unless each place has an old item of its own, one of `old`, or a new one, at most
    `changed`."""
    if len(sources) > old + changed or not all(type(each) is int and each < old for each in sources):
        raise MismatchError("a change of an item that does not exist")
    if _repeats(sources):
        raise MismatchError("an item in two places")


# --- writing ---------------------------------------------------------------------------------------------------------


class Encoder:
    """Makes the parts of a file."""

    def __init__(self) -> None:
        import msgspec

        self._encode = msgspec.msgpack.Encoder().encode
        self._json = msgspec.json.Encoder().encode
        self._fields = recording_shape.field_names()
        self.shape = shape_checksum(self._fields)

    def header(self, header: RecordingHeader) -> bytes:
        """The first line of a file."""
        text = self._json(utf8.writable({"fields": self._fields, "header": header}))
        return b"%s%d %08x %s\n" % (MAGIC, VERSION, header_checksum(b"%d" % VERSION, text), text)

    def entry(self, sample: RecordedSample, before: RecordedSample | None) -> bytes:
        """The sample as a change of the one before, or whole. Raises OverflowError for a number over 64 bits, and for
        an entry that no reader takes."""
        change = [sample] if before is None else change_between(before, sample) if sample != before else {}
        try:
            data = self._encode(change)
        except UnicodeEncodeError:
            data = self._encode(utf8.writable(change))
        if len(data) > MAX_ENTRY_BYTES:
            raise OverflowError(f"a sample of more than {MAX_ENTRY_BYTES >> 20} MiB")
        return data

    def single(self, entry: bytes, *, group: int, position: int, wall: float) -> bytes:
        """The frame of one entry of the group in progress."""
        return _frame(_sized(entry), len(entry) + 4, False, self.shape, group, position, 1, wall, wall)

    def packed(self, entries: list[bytes], *, group: int, first_wall: float, last_wall: float, level: int) -> bytes:
        """The frame of a whole group."""
        packer, size, parts = zlib.compressobj(level), 0, []
        for entry in entries:  # one by one: a group of 4 MiB is not copied before
            parts.append(packer.compress(_sized(entry)))
            size += len(entry) + _SIZE.size
        payload = b"".join((*parts, packer.flush()))
        return _frame(payload, size, True, self.shape, group, 0, len(entries), first_wall, last_wall)


def group_is_full(*, whole: int, changes: int, samples: int, limit: int = MAX_GROUP_BYTES // 2) -> bool:
    """True if the next entry begins a new group: `whole` bytes of the first, `changes` of all others, both together at
    most `limit` if a single sample is not larger."""
    most = min(max(GROUP_BYTES, WHOLE_SHARE * whole), limit - whole)
    return changes > most or samples >= GROUP_SAMPLES


def _sized(entry: bytes) -> bytes:
    return _SIZE.pack(len(entry)) + entry


def _frame(payload: bytes, unpacked: int, packed: bool, *rest: Any) -> bytes:
    head = _FRAME.pack(packed, len(payload), unpacked, *rest)
    return _CRC.pack(_MARK, zlib.crc32(payload, zlib.crc32(head))) + head + payload


def header_checksum(version: bytes, text: bytes) -> int:
    """The checksum in a header line."""
    return zlib.crc32(text, zlib.crc32(version))


def shape_checksum(fields: FieldNames) -> int:
    """The same for the same fields of the same types in the same order."""
    return zlib.crc32("\n".join(f"{name} {' '.join(each)}" for name, each in sorted(fields.items())).encode())


# --- reading ---------------------------------------------------------------------------------------------------------


def read_header(file: BinaryIO) -> FileHeader:
    """The header line at the start of the file. Raises FormatError and OSError."""
    import msgspec

    file.seek(0)
    line = file.readline(MAX_HEADER_BYTES)
    if not line.startswith(MAGIC):
        raise FormatError("not a recording of nodeagent" if line else "an empty file")
    version, _, rest = line[len(MAGIC) :].partition(b" ")
    checksum, _, text = rest.removesuffix(b"\n").partition(b" ")
    if version.isdigit() and version != b"%d" % VERSION and len(version) < 4:
        raise FormatError(f"written in format {version.decode()}, this version reads format {VERSION}")
    if checksum != b"%08x" % header_checksum(version, text) or not line.endswith(b"\n"):
        raise FormatError("its header is damaged")
    try:
        found = msgspec.json.decode(text)
        fields = {str(name): tuple(map(str, each)) for name, each in found["fields"].items()}
        return FileHeader(
            fields, recording_shape.shape_of(fields).header(found["header"]), shape_checksum(fields), len(line)
        )
    except (msgspec.MsgspecError, UnicodeDecodeError, MismatchError, RecursionError) as error:
        raise FormatError(f"its header cannot be read: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise FormatError("its header cannot be read: a part is missing") from error


def frames(file: BinaryIO, *, start: int, verify: bool) -> Iterator[Frame | Damage]:
    """The frames from `start` on, and what lies between them. `verify` reads the payloads to check them. Raises
    OSError."""
    size = file.seek(0, io.SEEK_END)
    position, damages = start, 0
    while position < size:
        frame, reason = _frame_at(file, position, size, verify=verify)
        if frame is not None:
            yield frame
            position = frame.offset + frame.size
            continue
        following, damages = position, damages + 1
        while damages <= MAX_DAMAGES:
            following = _find_mark(file, following + 1, size)
            if following >= size or _frame_at(file, following, size, verify=True)[0] is not None:
                break
            damages += 1
        else:
            yield Damage(position, size - position, "too many damaged parts, the rest is not read")
            return
        yield Damage(position, following - position, reason)
        position = following


def raw(file: BinaryIO, frame: Frame) -> bytes:
    """The frame as it is stored. Raises OSError."""
    file.seek(frame.offset - _FRAME_BYTES)
    return file.read(_FRAME_BYTES + frame.size)


def _frame_at(file: BinaryIO, position: int, size: int, *, verify: bool) -> tuple[Frame | None, str]:
    file.seek(position)
    head = file.read(_FRAME_BYTES)
    if len(head) < _FRAME_BYTES:
        return None, "incomplete"
    mark, checksum = _CRC.unpack_from(head)
    frame = Frame._make((*_FRAME.unpack_from(head, _CRC.size), position + _FRAME_BYTES))
    if mark != _MARK or max(frame.size, frame.unpacked) > MAX_GROUP_BYTES or frame.samples > GROUP_SAMPLES:
        return None, "damaged"
    if frame.offset + frame.size > size:
        return None, "incomplete"
    if verify and zlib.crc32(file.read(frame.size), zlib.crc32(head[_CRC.size :])) != checksum:
        return None, "damaged"
    return frame, ""


def _find_mark(file: BinaryIO, start: int, size: int) -> int:
    """The position of the next mark, or `size`."""
    file.seek(start)
    position, rest = start, b""
    while chunk := file.read(_CHUNK):
        data = rest + chunk
        found = data.find(_MARK)
        if found >= 0:
            return position - len(rest) + found
        position += len(chunk)
        rest = data[-len(_MARK) + 1 :]
    return size


def entries(file: BinaryIO, frame: Frame) -> Iterator[Any]:
    """The changes of a frame, oldest first. Raises FormatError and OSError."""
    import msgspec

    decode = msgspec.msgpack.Decoder().decode
    for data in raw_entries(file, frame):
        try:
            yield decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise FormatError(f"has an entry that cannot be read: {error}") from error


def raw_entries(file: BinaryIO, frame: Frame) -> Iterator[memoryview]:
    """The entries of a frame as MessagePack, oldest first. Raises FormatError and OSError."""
    file.seek(frame.offset)
    data = file.read(frame.size)
    if frame.packed:
        unzipper = zlib.decompressobj()
        try:
            data = unzipper.decompress(data, frame.unpacked + 1)
        except zlib.error as error:
            raise FormatError(f"cannot be unpacked: {error}") from error
    if len(data) != frame.unpacked:
        raise FormatError("does not have the size that it should have")
    position, whole = 0, memoryview(data)
    for _ in range(frame.samples):
        if position + 4 > len(data):
            raise FormatError("has fewer entries than it should have")
        (length,) = _SIZE.unpack_from(data, position)
        if length > MAX_ENTRY_BYTES:
            raise FormatError(f"has an entry of more than {MAX_ENTRY_BYTES >> 20} MiB")
        position += 4 + length
        if position > len(data):
            raise FormatError("has fewer entries than it should have")
        yield whole[position - length : position]
