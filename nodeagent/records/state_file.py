"""Saves state across a restart: one file with version and checksum, replaced atomically.

Promises:

1. A reader gets the old state or the new one, never a mixture: write to a temporary file, fsync, rename, fsync the
   directory.
2. A state that does not match is never used. For another boot, another shape of the state (an upgrade), a wrong
   checksum, or a lost or unreadable file, `load` returns the cause, and the caller starts from a conservative state.
3. The file contains the shape of the state, a fingerprint of its JSON Schema, so that no field is misread by position.
4. A saved state that cannot be replaced can be made unusable: a full file system still allows truncation.

The body is JSON, with NamedTuples as arrays: small, and readable with a pager.
"""

import contextlib
import enum
import hashlib
import os
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from nodeagent.records import utf8
from nodeagent.runtime import regular_files

T = TypeVar("T")

FORMAT: Final = "nodeagent-state/2"
MAX_STATE_BYTES: Final = 16 * 2**20
"""A state of 5,000 pods has about 1 MiB; a larger file is not a state file."""


class Trust(enum.StrEnum):
    """Whether the state of the last process can be used."""

    RESTORED = "restored"
    FIRST = "first"
    """No file in an empty directory: no agent has run here since the directory was created. The default directory is on
    a tmpfs, so this is the case after a reboot."""
    LOST = "lost"
    """No file, but other files of an agent: it was deleted, or could never be written. Or an empty file: it was wiped
    because it could not be replaced."""
    OTHER_BOOT = "other-boot"
    """Written before the last reboot: its monotonic times have no meaning."""
    CORRUPT = "corrupt"
    """Unreadable, truncated, altered, or of a version with another shape of the state."""


class LoadedState(NamedTuple):
    """The result of `load`."""

    trust: Trust
    value: Any
    """The state; None unless `trust` is RESTORED."""
    message: str
    """For the log: the file and what is wrong with it. Empty if restored."""


def fingerprint(shape: type) -> str:
    """A short name for the shape of a type with all its fields. Equal fingerprints mean that a stored value can be read
    back."""
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
        """The directory of the last save."""
        self._last_version: tuple[int, int] | None = None
        """Of the file that was loaded or saved last."""

    @property
    def directory(self) -> str:
        """The directory of the file, for other files of this agent."""
        return str(self._path.parent)

    def load(self) -> LoadedState:
        """Read the state. Never raises: the result contains the cause of a failure."""
        self._last_version = self._version()
        try:
            data = regular_files.read_file(self._path, max_bytes=MAX_STATE_BYTES + 1)
        except FileNotFoundError:
            return self._missing()
        except OSError as error:
            return LoadedState(Trust.CORRUPT, None, f"{self._path}: cannot be read: {error.strerror}")
        if not data:
            return LoadedState(Trust.LOST, None, f"{self._path}: wiped by an agent that could not replace it")
        if len(data) > MAX_STATE_BYTES:
            return LoadedState(
                Trust.CORRUPT, None, f"{self._path}: larger than {MAX_STATE_BYTES} bytes, not a state file"
            )
        header, newline, body = data.partition(b"\n")
        fields = header.decode("ascii", "replace").split(" ")
        if not newline or len(fields) != 4 or fields[0] != FORMAT:
            return LoadedState(Trust.CORRUPT, None, f"{self._path}: not a state file of this version ({FORMAT})")
        _, boot_id, fingerprint, checksum = fields
        if hashlib.sha256(body).hexdigest() != checksum:
            return LoadedState(Trust.CORRUPT, None, f"{self._path}: wrong checksum: the file was truncated or altered")
        if boot_id != self._boot_id:
            return LoadedState(Trust.OTHER_BOOT, None, f"{self._path}: written before the last reboot")
        if fingerprint != self._fingerprint:
            return LoadedState(
                Trust.CORRUPT, None, f"{self._path}: written by a version with another shape of the state"
            )
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
            return LoadedState(Trust.LOST, None, f"{self._path}: missing, but an earlier run left {traces[0]}")
        return LoadedState(Trust.FIRST, None, f"{self._path}: no agent has run here before")

    def save(self, value: object) -> None:
        """Replace the state.

        A missing directory is created. If the directory was replaced, the state in the old one is wiped first, because
        the old one may return (the end of a mount).

        Raises:
            OSError: the directory cannot be written (full, read-only). The old state, if any, is still there.
        """
        try:
            body = self._encoder.encode(value)
        except UnicodeEncodeError:
            body = self._encoder.encode(utf8.writable(value))
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
            with contextlib.suppress(OSError):  # the first error counts; the next save overwrites the file
                temporary.unlink()
            raise
        with contextlib.suppress(OSError):  # the new state exists; only a crash of the machine can undo it
            os.fsync(self._directory_fd)
        self._last_version = self._version()

    def is_unchanged(self) -> bool:
        """True if no other process has saved since the last load or save."""
        return self._version() == self._last_version

    def _version(self) -> tuple[int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def wipe(self) -> bool:
        """Truncate the file, so that no later process restores the state. False if that fails as well."""
        try:
            self._open_directory()
            os.close(self._open_truncated(self._directory_fd, os.O_CREAT))
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close the kept descriptor of the directory; the next use opens it again."""
        if self._directory_fd >= 0:
            os.close(self._directory_fd)
            self._directory_fd = -1

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
                pass  # the directory was removed with its files
            except OSError:
                os.close(fd)
                raise
            os.close(self._directory_fd)
        self._directory_fd = fd

    def _open_truncated(self, directory_fd: int, flags: int = 0) -> int:
        flags |= os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(self._path.name, flags, 0o600, dir_fd=directory_fd)


def _is_open_at(fd: int, path: Path) -> bool:
    """True if `path` still names the open file."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except OSError:
        return False


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
