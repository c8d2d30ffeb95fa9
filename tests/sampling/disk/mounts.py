"""Real file systems for a test: loop-mounted ext4, overlay, tmpfs, and a FUSE mount whose server never answers."""

import contextlib
import ctypes
import os
import shutil
import subprocess
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
        yield place
    finally:
        os.close(device)
        subprocess.run(["umount", "-l", place], check=True)
