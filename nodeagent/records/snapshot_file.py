"""The snapshot file: one zip file with what is known of a node and a time, to attach to a ticket.

    manifest.json      format version, node, version, why and when it was made, the time that it covers
    samples/*.rec      recorded samples (`recording_format`)
    decisions.jsonl    decisions and their outcomes (`flight_recorder`)
    config.yaml        the agent's configuration, without secrets
    kubelet.json       the kubelet's settings for eviction
    facts.json         kernel, machine and versions

Promises:

1. A reader extracts nothing: no name in the file is ever used as a path.
2. Sizes are compared with their limits before anything is unpacked, and nothing unpacks to more than its limit.
3. A file that is truncated, altered, hostile or of a newer version is one `SnapshotError` that names the file.
4. The writer adds nothing that the reader refuses. It needs no seekable file and little memory: members are streams.

Theory of operation. `zipfile` makes an object for each entry of the central directory before one can ask how many there
are, and a file of 128 MiB can have three million. So the end record is read here first, and must be at the very end,
without a comment and without zip64, as `zipfile` writes a small file.
"""

import os
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, NamedTuple, Self

from nodeagent.records import segment_files
from nodeagent.runtime import regular_files

FORMAT_VERSION: Final = 1
MANIFEST: Final = "manifest.json"
DECISIONS: Final = "decisions.jsonl"
CONFIG: Final = "config.yaml"
KUBELET: Final = "kubelet.json"
FACTS: Final = "facts.json"
SAMPLES_PREFIX: Final = "samples/"
SAMPLES: Final = re.compile(r"samples/[A-Za-z0-9_-]{1,64}\.rec")

MAX_FILE_BYTES: Final = 128 * 2**20
"""Samples are compressed already: a recording of a day has at most 40 MiB, and decisions of 16 MiB a tenth of that."""
MAX_UNPACKED_BYTES: Final = 256 * 2**20
_LIMITS: Final[Mapping[str, int]] = {
    MANIFEST: 2**20,
    DECISIONS: 64 * 2**20,
    CONFIG: 2**20,
    KUBELET: 2**20,
    FACTS: 2**20,
}
MAX_MEMBERS: Final = 2 * (segment_files.MAX_SEGMENTS + 1) + len(_LIMITS)
"""Samples are about a dozen files; a process that restarts again and again leaves two in each segment."""
MAX_SAMPLES_BYTES: Final = 64 * 2**20
"""Of one file of samples."""
CHUNK_BYTES: Final = 64 * 2**10
_END: Final = struct.Struct("<4s4H2LH")
_END_MAGIC: Final = b"PK\x05\x06"
_ZIP64_LOCATOR: Final = b"PK\x06\x07"
_ZIP64_LOCATOR_BYTES: Final = 20
_MAX_DIRECTORY_BYTES: Final = MAX_MEMBERS * 256
_ENCRYPTED: Final = 0x1
_UNZIP_ERRORS: Final = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    OverflowError,
    struct.error,
    IndexError,
    KeyError,
)


class SnapshotError(Exception):
    """The file cannot be read or written. The message is one sentence that names it."""


class Manifest(NamedTuple):
    """What the file is."""

    node: str
    version: str
    """Of the program that made it."""
    made_at: float
    """Epoch seconds."""
    reason: str = ""
    """`command`, or what made the agent write it: `eviction`, `refusal`, `race-lost`."""
    id: str = ""
    """The decision or the OOM kills that it is about; empty if it is about a time."""
    since: float | None = None
    """Epoch seconds of the first sample that was wanted; None: from the first one recorded."""
    until: float | None = None
    pseudonyms: bool = False
    """Names are replaced."""
    missing: tuple[str, ...] = ()
    """What could not be included, and why."""


# --- writing ---------------------------------------------------------------------------------------------------------


class SnapshotWriter:
    """Writes one snapshot file to an open file, which need not be seekable."""

    def __init__(self, file: IO[bytes], *, name: str, max_bytes: int = MAX_FILE_BYTES) -> None:
        """`name` is for messages. Raises SnapshotError like every method, and OSError if the file cannot be written."""
        self._name = name
        self._max_bytes = min(max_bytes, MAX_FILE_BYTES)
        self._unpacked = 0
        self._zip = zipfile.ZipFile(file, "w", allowZip64=False)

    def add(self, member: str, chunks: Iterable[bytes]) -> None:
        """Add a member. Samples are stored as they are, because they are compressed already."""
        limit = _limit_of(member)
        if limit is None:
            raise SnapshotError(f"{self._name}: a snapshot has no member {member!r}")
        if len(self._zip.filelist) >= MAX_MEMBERS:
            raise SnapshotError(f"{self._name}: more than {MAX_MEMBERS} members; take a shorter time")
        info = zipfile.ZipInfo(member)  # with the fixed date of 1980: the manifest has the time
        info.compress_type = zipfile.ZIP_STORED if member.endswith(".rec") else zipfile.ZIP_DEFLATED
        info.external_attr = 0o600 << 16
        size = 0
        with self._zip.open(info, "w") as target:
            for chunk in chunks:
                size += len(chunk)
                self._unpacked += len(chunk)
                if size > limit or self._unpacked > MAX_UNPACKED_BYTES:
                    raise SnapshotError(f"{self._name}: {member} is larger than {limit >> 20} MiB; take a shorter time")
                target.write(chunk)
                self._check_size()
        self._check_size()

    def finish(self, manifest: Manifest) -> None:
        """Add the manifest and the end of the file."""
        import msgspec

        fields = {"format": FORMAT_VERSION, **manifest._asdict()}
        self.add(MANIFEST, [msgspec.json.format(msgspec.json.encode(fields), indent=2)])
        self._zip.close()

    def abandon(self) -> None:
        """Write no more, also not at the end of the program, as `zipfile` does for a file that was not closed."""
        self._zip.fp = None

    def _check_size(self) -> None:
        # A file that cannot seek is wrapped by `zipfile` in one that counts.
        written = self._zip.fp.tell() if self._zip.fp is not None else 0
        if written > self._max_bytes:
            limit = f"{self._max_bytes / 2**20:.4g} MiB"
            raise SnapshotError(f"{self._name}: larger than {limit}; take a shorter time with --since or --around")


# --- reading ---------------------------------------------------------------------------------------------------------


class SnapshotFile:
    """An open snapshot file."""

    def __init__(self, path: Path) -> None:
        """Open and check the file. Raises SnapshotError."""
        self._path = path
        try:
            fd = regular_files.open_to_read(path)
        except (OSError, ValueError) as error:
            raise SnapshotError(f"{path}: {_reason(error)}") from error
        self._file = os.fdopen(fd, "rb")
        try:
            self._check_end()
            self._zip = self._open_zip()
            self._members = self._checked_members()
            self.manifest = self._read_manifest()
            self._check_names()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def samples(self) -> tuple[str, ...]:
        """The names of the members with samples, in the order in which they were written."""
        return tuple([name for name in self._members if SAMPLES.fullmatch(name)])

    def read(self, member: str) -> bytes:
        """The content of a member; empty if the file lacks it. Raises SnapshotError."""
        info = self._members.get(member)
        if info is None:
            return b""
        return b"".join(self._unpack(info, _limit_of(member) or 0))

    def read_json(self, member: str) -> dict[str, Any]:
        """The object in a member; empty if the file lacks it. Raises SnapshotError."""
        import msgspec

        data = self.read(member)
        if not data:
            return {}
        try:
            value = msgspec.json.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise SnapshotError(f"{self._path}: {member} is no JSON") from error
        if not isinstance(value, dict):
            raise SnapshotError(f"{self._path}: {member} is no JSON object")
        return value

    def read_text(self, member: str) -> str:
        """The text of a member; empty if the file lacks it. Raises SnapshotError."""
        try:
            return self.read(member).decode("utf-8")
        except UnicodeDecodeError as error:
            raise SnapshotError(f"{self._path}: {member} is no text in UTF-8") from error

    # --- checks

    def _check_end(self) -> None:
        """Promise 2 for the central directory."""
        size = os.fstat(self._file.fileno()).st_size
        if size > MAX_FILE_BYTES:
            raise SnapshotError(f"{self._path}: larger than {MAX_FILE_BYTES >> 20} MiB, not a snapshot file")
        tail_bytes = min(size, _END.size + _ZIP64_LOCATOR_BYTES)
        try:
            self._file.seek(size - tail_bytes)
            tail = self._file.read(tail_bytes)
        except OSError as error:
            raise SnapshotError(f"{self._path}: {_reason(error)}") from error
        if len(tail) < _END.size or tail[-_END.size :][:4] != _END_MAGIC:
            raise SnapshotError(f"{self._path}: not a snapshot file, or truncated")
        _, disk, first_disk, here, entries, directory_bytes, _, comment = _END.unpack(tail[-_END.size :])
        if comment or disk or first_disk or here != entries or tail.startswith(_ZIP64_LOCATOR):
            raise SnapshotError(f"{self._path}: not a zip file as nodeagent writes it")
        if entries > MAX_MEMBERS or directory_bytes > _MAX_DIRECTORY_BYTES:
            raise SnapshotError(f"{self._path}: more than {MAX_MEMBERS} members, not a snapshot file")

    def _open_zip(self) -> zipfile.ZipFile:
        try:
            return zipfile.ZipFile(self._file)
        except OSError as error:
            raise SnapshotError(f"{self._path}: {_reason(error)}") from error
        except _UNZIP_ERRORS as error:
            raise SnapshotError(f"{self._path}: damaged zip file: {error}") from error

    def _checked_members(self) -> dict[str, zipfile.ZipInfo]:
        members: dict[str, zipfile.ZipInfo] = {}
        total = 0
        for info in self._zip.infolist():
            name = info.filename
            if name in members:
                raise SnapshotError(f"{self._path}: contains {name!r} twice")
            mode = info.external_attr >> 16
            if mode and not stat.S_ISREG(mode) and stat.S_IFMT(mode):
                raise SnapshotError(f"{self._path}: {name!r} is no regular file")
            if info.flag_bits & _ENCRYPTED:
                raise SnapshotError(f"{self._path}: {name!r} is encrypted")
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise SnapshotError(f"{self._path}: {name!r} is compressed in a way that nodeagent does not use")
            limit = _limit_of(name)
            if limit is not None and info.file_size > limit:
                raise SnapshotError(f"{self._path}: {name!r} unpacks to more than {limit >> 20} MiB")
            total += info.file_size
            members[name] = info
        if total > MAX_UNPACKED_BYTES:
            raise SnapshotError(f"{self._path}: unpacks to more than {MAX_UNPACKED_BYTES >> 20} MiB")
        return members

    def _read_manifest(self) -> Manifest:
        import msgspec

        if MANIFEST not in self._members:
            raise SnapshotError(f"{self._path}: not a snapshot file: it has no {MANIFEST}")
        fields = self.read_json(MANIFEST)
        version = fields.pop("format", None)
        if type(version) is not int or version < 1:
            raise SnapshotError(f"{self._path}: {MANIFEST} has no format version")
        if version > FORMAT_VERSION:
            raise SnapshotError(
                f"{self._path}: format {version} is newer than {FORMAT_VERSION}, which this nodeagent reads; "
                f"use version {str(fields.get('version'))[:64]!r} or later"
            )
        try:
            known = {key: value for key, value in fields.items() if key in Manifest._fields}
            return Manifest(**{**_MANIFEST_DEFAULTS, **{key: _field(key, value) for key, value in known.items()}})
        except (msgspec.ValidationError, TypeError) as error:
            raise SnapshotError(f"{self._path}: {MANIFEST}: {error}") from error

    def _check_names(self) -> None:
        """After the version: a newer one may have further members."""
        for name in self._members:
            if _limit_of(name) is None:
                raise SnapshotError(f"{self._path}: a snapshot has no member {name!r}")

    def _unpack(self, info: zipfile.ZipInfo, limit: int) -> Iterator[bytes]:
        """The content in chunks, at most `limit` bytes. `zipfile` compares name and checksum."""
        size = 0
        try:
            with self._zip.open(info) as source:
                while chunk := source.read(CHUNK_BYTES):
                    size += len(chunk)
                    if size > limit:
                        raise SnapshotError(f"{self._path}: {info.filename!r} unpacks to more than {limit >> 20} MiB")
                    yield chunk
        except OSError as error:
            raise SnapshotError(f"{self._path}: {_reason(error)}") from error
        except _UNZIP_ERRORS as error:
            raise SnapshotError(f"{self._path}: {info.filename!r} is damaged: {error}") from error
        if size != info.file_size:
            raise SnapshotError(f"{self._path}: {info.filename!r} is truncated")


_MANIFEST_DEFAULTS: Final[Mapping[str, Any]] = {"node": "", "version": "", "made_at": 0.0}


def _field(name: str, value: Any) -> Any:
    """One field of the manifest in its type. Raises msgspec.ValidationError."""
    import msgspec

    return msgspec.convert(value, Manifest.__annotations__[name])


def is_snapshot(path: Path) -> bool:
    """True if the file begins as a zip file does. False also if it cannot be read."""
    try:
        return regular_files.read_file(path, max_bytes=4) == b"PK\x03\x04"
    except (OSError, ValueError):
        return False


def _limit_of(member: str) -> int | None:
    """How many bytes this member may have; None: a snapshot has no such member."""
    return MAX_SAMPLES_BYTES if SAMPLES.fullmatch(member) else _LIMITS.get(member)


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
