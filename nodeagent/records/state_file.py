"""State that survives a restart: one file, versioned and checksummed, replaced atomically.

Promises:

1. A reader sees the old state or the new one, never a mixture: write to a temporary file, fsync, rename, fsync the
   directory.
2. What does not fit is never guessed at. Another boot, another shape of the state (an upgrade), a bad checksum, a lost
   or unreadable file: `load` says which, and the caller starts from a conservative state.
3. The shape of the state is part of the file: a fingerprint of its JSON Schema, so that a changed field cannot be
   misread by position.
4. What was saved can be made unusable where it cannot be replaced: a full file system still lets a file be truncated.

The body is JSON (NamedTuples are arrays in it): small, and readable with a pager when something went wrong.
"""

import contextlib
import enum
import hashlib
import os
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from nodeagent.records.utf8 import writable
from nodeagent.runtime import regular_files

T = TypeVar("T")

FORMAT: Final = "nodeagent-state/1"
MAX_BYTES: Final = 16 * 2**20
"""A state of 5,000 pods is about 1 MiB; anything larger than this is not ours."""


class Trust(enum.StrEnum):
    """What is known about the state that the last process left."""

    RESTORED = "restored"
    FIRST = "first"
    """No file, and nothing else in the directory: no agent has run here since the directory was made. The default one
    is on a tmpfs, so after a reboot this is what is found."""
    LOST = "lost"
    """No file, but the directory has other traces of an agent: somebody deleted it, or it never could be written. Or an
    empty one: it was wiped because it could not be replaced."""
    OTHER_BOOT = "other-boot"
    """Written before the last reboot: its monotonic times mean nothing now."""
    CORRUPT = "corrupt"
    """Unreadable, truncated, altered, or written by a version with another shape of state."""


class LoadedState(NamedTuple):
    """What `load` found."""

    trust: Trust
    value: Any
    """The state; None unless `trust` is RESTORED."""
    message: str
    """For the log: what was wrong, with the file's name. Empty when restored."""


def fingerprint(shape: type) -> str:
    """A short name for the shape of a type, down to its last field: equal only while values can be read back as they
    were written."""
    import msgspec

    schema = msgspec.json.encode(msgspec.json.schema(shape), order="deterministic")
    return hashlib.sha256(schema).hexdigest()[:16]


class StateFile:
    """The state file of one agent, for values of one type."""

    def __init__(self, path: Path, *, shape: type, boot_id: str) -> None:
        import msgspec

        self._path = path
        self._shape = shape
        self._boot_id = boot_id
        self._fingerprint = fingerprint(shape)
        self._encoder = msgspec.json.Encoder(order="deterministic")
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(shape)
        self._errors = (msgspec.MsgspecError, UnicodeDecodeError, ValueError)
        self._directory_fd = -1
        """Of the directory that was saved into last."""
        self._left: tuple[int, int] | None = None
        """What names the file that was loaded or saved last."""

    @property
    def directory(self) -> str:
        """Where the file is; other files of this agent may be put beside it."""
        return str(self._path.parent)

    def load(self) -> LoadedState:
        """Read the state. Never raises: whatever is wrong is in the answer."""
        self._left = self._version()
        try:
            data = regular_files.read_file(self._path, max_bytes=MAX_BYTES + 1)
        except FileNotFoundError:
            return self._missing()
        except OSError as error:
            return LoadedState(Trust.CORRUPT, None, f"{self._path}: cannot be read: {error.strerror}")
        if not data:
            return LoadedState(Trust.LOST, None, f"{self._path}: wiped by an agent that could not replace it")
        if len(data) > MAX_BYTES:
            return LoadedState(
                Trust.CORRUPT, None, f"{self._path}: larger than {MAX_BYTES} bytes, not a state file of ours"
            )
        header, newline, body = data.partition(b"\n")
        fields = header.decode("ascii", "replace").split(" ")
        if not newline or len(fields) != 4 or fields[0] != FORMAT:
            return LoadedState(Trust.CORRUPT, None, f"{self._path}: not a state file of this version ({FORMAT})")
        _, boot_id, fingerprint, checksum = fields
        if hashlib.sha256(body).hexdigest() != checksum:
            return LoadedState(
                Trust.CORRUPT, None, f"{self._path}: the checksum does not match, the file was cut or altered"
            )
        if boot_id != self._boot_id:
            return LoadedState(Trust.OTHER_BOOT, None, f"{self._path}: written before the last reboot")
        if fingerprint != self._fingerprint:
            return LoadedState(Trust.CORRUPT, None, f"{self._path}: written by a version with another shape of state")
        try:
            return LoadedState(Trust.RESTORED, self._decoder.decode(body), "")
        except self._errors as error:
            return LoadedState(Trust.CORRUPT, None, f"{self._path}: {error}")

    def _missing(self) -> LoadedState:
        try:
            traces = sorted(entry.name for entry in self._path.parent.iterdir())
        except FileNotFoundError:
            traces = []
        except OSError as error:
            return LoadedState(Trust.LOST, None, f"{self._path.parent}: cannot be read: {error.strerror}")
        if traces:
            return LoadedState(
                Trust.LOST, None, f"{self._path}: the state of an earlier run is gone, {traces[0]} is not"
            )
        return LoadedState(Trust.FIRST, None, f"{self._path}: no agent has run here before")

    def save(self, value: object) -> None:
        """Replace the state.

        A directory that is gone is made again. Where another one stands in its place, the state in the former is wiped
        first, because it may come back (a mount that ends).

        Raises:
            OSError: the directory cannot be written (full, read-only). The old state, if any, is still there.
        """
        try:
            body = self._encoder.encode(value)
        except UnicodeEncodeError:
            body = self._encoder.encode(writable(value))
        checksum = hashlib.sha256(body).hexdigest()
        header = f"{FORMAT} {self._boot_id} {self._fingerprint} {checksum}\n".encode("ascii")
        temporary = self._path.with_name(self._path.name + ".new")
        self._open_directory()
        try:
            fd = regular_files.open_to_replace(temporary)
            try:
                _write_all(fd, header + body)
                os.fsync(fd)
            finally:
                os.close(fd)
            temporary.rename(self._path)
        except OSError:
            with contextlib.suppress(OSError):  # the first error is the one to tell; litter is overwritten next time
                temporary.unlink()
            raise
        with contextlib.suppress(OSError):  # the new state is there; only a crash of the machine can undo that
            os.fsync(self._directory_fd)
        self._left = self._version()

    def is_as_left(self) -> bool:
        """Whether nobody else has saved since we loaded or saved."""
        return self._version() == self._left

    def _version(self) -> tuple[int, int] | None:
        try:
            seen = self._path.stat()
        except OSError:
            return None
        return seen.st_ino, seen.st_mtime_ns

    def wipe(self) -> bool:
        """Truncate what is saved, so that no later process restores it. False when that is not possible either."""
        try:
            self._open_directory()
            os.close(self._open_truncated(self._directory_fd, os.O_CREAT))
        except OSError:
            return False
        return True

    def _open_directory(self) -> None:
        directory = self._path.parent
        if self._directory_fd >= 0 and _is_open_at(self._directory_fd, directory):
            return
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if self._directory_fd >= 0:
            try:
                os.close(self._open_truncated(self._directory_fd))
            except FileNotFoundError:
                pass  # it was removed with what was in it
            except OSError:
                os.close(fd)
                raise
            os.close(self._directory_fd)
        self._directory_fd = fd

    def _open_truncated(self, directory_fd: int, flags: int = 0) -> int:
        flags |= os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(self._path.name, flags, 0o600, dir_fd=directory_fd)


def _is_open_at(fd: int, path: Path) -> bool:
    """Whether `path` still names what `fd` has open."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except OSError:
        return False


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
