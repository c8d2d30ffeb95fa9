"""Real file systems for a test: loop-mounted ext4, overlay, tmpfs, and a FUSE mount whose server never answers."""

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
def mounted(place: Path, *arguments: str | Path) -> Iterator[Path]:
    """`mount ARGUMENTS PLACE`, undone at the end."""
    place.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", *arguments, place], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"mount does not work here: {done.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@contextlib.contextmanager
def ext4(scratch: Path, *, size_mb: int = 16, inodes: int = 256, options: str = "loop") -> Iterator[Path]:
    """A small ext4 with few inodes."""
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("no mkfs.ext4")
    image = scratch / "image.ext4"
    with image.open("wb") as file:
        file.truncate(size_mb << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-N", str(inodes), image], check=True, capture_output=True)
    with mounted(scratch / "ext4", "-o", options, image) as place:
        yield place


@contextlib.contextmanager
def silent_fuse(place: Path) -> Iterator[Path]:
    """A FUSE mount whose server never answers: whoever asks it anything waits. The end of the `with` lets them go."""
    with _fuse(place):
        yield place


@contextlib.contextmanager
def dying_fuse(place: Path) -> Iterator[int]:
    """A FUSE mount with one open file that has no name any more: its descriptor. The server is dead by then; the end of
    the `with` lets those go who wait for it."""
    held = -1
    try:
        with _fuse(place) as device:
            server = threading.Thread(target=_serve_until_unlink, args=(device,), daemon=True)
            server.start()
            held = os.open(place / "file", os.O_CREAT | os.O_EXCL | os.O_RDWR)
            os.unlink(place / "file")
            server.join(10)
            yield held
    finally:  # after the end of the connection: closing the file asks the server as well
        if held >= 0:
            with contextlib.suppress(OSError):
                os.close(held)


@contextlib.contextmanager
def _fuse(place: Path) -> Iterator[int]:
    """A mounted FUSE file system: the descriptor of its server's end, which is closed at the end."""
    place.mkdir(parents=True, exist_ok=True)
    try:
        device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        pytest.skip(f"no FUSE here: {error}")
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"silent", os.fsencode(place), b"fuse", 0, options):
        os.close(device)
        pytest.skip(f"FUSE cannot be mounted here: {os.strerror(ctypes.get_errno())}")
    try:
        yield device
    finally:
        os.close(device)
        subprocess.run(["umount", "-l", place], check=True)


_LOOKUP, _FORGET, _GETATTR, _UNLINK, _INIT, _CREATE = 1, 2, 3, 10, 26, 35


def _serve_until_unlink(device: int) -> None:
    """As little of the FUSE protocol (include/uapi/linux/fuse.h, 7.19) as it takes to make one file and unlink it."""
    root = struct.pack("=6Q10I", 1, *[0] * 8, 0o40755, 2, *[0] * 5)
    file = struct.pack("=6Q10I", 2, *[0] * 8, 0o100644, 1, *[0] * 5)
    entry = struct.pack("=4QII", 2, 1, 3600, 0, 0, 0) + file
    answers = {
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
        body = answers.get(kind)
        error = 0 if body is not None else -(errno.ENOENT if kind == _LOOKUP else errno.ENOSYS)
        os.write(device, struct.pack("=IiQ", 16 + len(body or b""), error, unique) + (body or b""))
