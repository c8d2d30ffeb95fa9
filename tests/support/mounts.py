"""Real file systems for tests: loop-mounted ext4, xfs and btrfs, overlay, tmpfs, and a FUSE mount whose server never
replies."""

import contextlib
import ctypes
import errno
import os
import shutil
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


@contextlib.contextmanager
def mounted(path: Path, *arguments: str | Path) -> Iterator[Path]:
    """`mount ARGUMENTS PATH`, unmounted at the end."""
    path.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", *arguments, path], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"mount does not work here: {done.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


@contextlib.contextmanager
def _made(scratch: Path, kind: str, size_mb: int, *arguments: str, options: str = "loop") -> Iterator[Path]:
    """A file system of this kind in a file, mounted."""
    if shutil.which(f"mkfs.{kind}") is None:
        pytest.skip(f"no mkfs.{kind}")
    image = scratch / f"image.{kind}"
    with image.open("wb") as file:
        file.truncate(size_mb << 20)
    subprocess.run([f"mkfs.{kind}", "-q", *arguments, image], check=True, capture_output=True)
    with mounted(scratch / kind, "-o", options, image) as path:
        yield path


@contextlib.contextmanager
def ext4(scratch: Path, *, size_mb: int = 16, inodes: int = 256, options: str = "loop") -> Iterator[Path]:
    """A small ext4 with few inodes."""
    with _made(scratch, "ext4", size_mb, "-F", "-N", str(inodes), options=options) as path:
        yield path


@contextlib.contextmanager
def xfs(scratch: Path) -> Iterator[Path]:
    """An xfs of the smallest size that its tools make."""
    with _made(scratch, "xfs", 300) as path:
        yield path


@contextlib.contextmanager
def btrfs(scratch: Path, *subvolumes: str) -> Iterator[Path]:
    """A small btrfs with these subvolumes."""
    with _made(scratch, "btrfs", 128) as path:
        for name in subvolumes:
            subprocess.run(["btrfs", "-q", "subvolume", "create", path / name], check=True, capture_output=True)
        yield path


@contextlib.contextmanager
def silent_fuse(path: Path) -> Iterator[Path]:
    """A FUSE mount whose server never replies, so that every request blocks until the end of the `with`."""
    with _fuse(path):
        yield path


@contextlib.contextmanager
def dying_fuse(path: Path) -> Iterator[int]:
    """The descriptor of an open, deleted file on a FUSE mount with a dead server. Requests block until the end of the
    `with`."""
    fd = -1
    try:
        with _fuse(path) as device:
            server = threading.Thread(target=_serve_until_unlink, args=(device,), daemon=True)
            server.start()
            fd = os.open(path / "file", os.O_CREAT | os.O_EXCL | os.O_RDWR)
            os.unlink(path / "file")
            server.join(10)
            yield fd
    finally:  # after the end of the connection, because closing the file sends a request as well
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


@contextlib.contextmanager
def _fuse(path: Path) -> Iterator[int]:
    """The server's descriptor of a mounted FUSE file system, closed at the end."""
    path.mkdir(parents=True, exist_ok=True)
    try:
        device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        pytest.skip(f"no FUSE here: {error}")
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"silent", os.fsencode(path), b"fuse", 0, options):
        os.close(device)
        pytest.skip(f"FUSE cannot be mounted here: {os.strerror(ctypes.get_errno())}")
    try:
        yield device
    finally:
        os.close(device)
        subprocess.run(["umount", "-l", path], check=True)


_LOOKUP, _FORGET, _GETATTR, _UNLINK, _INIT, _CREATE = 1, 2, 3, 10, 26, 35


def _serve_until_unlink(device: int) -> None:
    """The part of the FUSE protocol (include/uapi/linux/fuse.h, 7.19) that creates one file and unlinks it."""
    root = struct.pack("=6Q10I", 1, *[0] * 8, 0o40755, 2, *[0] * 5)
    file = struct.pack("=6Q10I", 2, *[0] * 8, 0o100644, 1, *[0] * 5)
    entry = struct.pack("=4QII", 2, 1, 3600, 0, 0, 0) + file
    replies = {
        _LOOKUP: None,
        _GETATTR: struct.pack("=QII", 0, 0, 0) + root,
        _UNLINK: b"",
        _INIT: struct.pack("=IIIIHHI", 7, 19, 0, 0, 0, 0, 4096),
        _CREATE: entry + struct.pack("=QII", 1, 0, 0),
    }
    kind = 0
    while kind != _UNLINK:
        request = os.read(device, 1 << 17)
        _, kind, unique = struct.unpack_from("=IIQ", request)
        if kind == _FORGET:
            continue
        body = replies.get(kind)
        error = 0 if body is not None else -(errno.ENOENT if kind == _LOOKUP else errno.ENOSYS)
        os.write(device, struct.pack("=IiQ", 16 + len(body or b""), error, unique) + (body or b""))
