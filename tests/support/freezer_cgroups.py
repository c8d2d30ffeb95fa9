"""Pods' cgroups for the tests of brakes: real ones of the v1 freezer and of v2, and v2 ones as plain files."""

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from nodeagent.actuators.cgroup_brake import CgroupBrake

FREEZER: Final = Path("/sys/fs/cgroup/freezer")

real_v1 = pytest.mark.skipif(
    os.geteuid() != 0 or not os.access(FREEZER / "cgroup.procs", os.W_OK),
    reason="needs root and a writable cgroup v1 freezer hierarchy",
)

UNIFIED: Final = next(
    (path for path in (FREEZER.parent, FREEZER.parent / "unified") if (path / "cgroup.procs").exists()), None
)

real_v2 = pytest.mark.skipif(
    os.geteuid() != 0 or UNIFIED is None or not os.access(UNIFIED / "cgroup.procs", os.W_OK),
    reason="needs root and a writable cgroup v2 hierarchy",
)


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait until the kernel shows it."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"not reached: {what}"
        os.sched_yield()


@contextmanager
def freezer_pod() -> Iterator[Path]:
    """A cgroup of the v1 freezer with a child, as a pod with a container."""
    directory = FREEZER / f"nodeagent-test-{uuid.uuid4().hex}"
    (directory / "container").mkdir(parents=True)
    yield directory
    CgroupBrake(unified=None, freezer=FREEZER).kill("/" + directory.name)
    for path in (directory / "container", directory):
        until(lambda path=path: removed(path), f"{path} is empty")  # type: ignore[misc]


@contextmanager
def pod_of_linux_5_13(root: Path) -> Iterator[Path]:
    """A cgroup of v2 with a child, and its files below `root` as before Linux 5.14: without `cgroup.kill`."""
    assert UNIFIED is not None
    directory = UNIFIED / f"nodeagent-test-{uuid.uuid4().hex}"
    for path, shown in ((directory, root / "pod"), (directory / "container", root / "pod/container")):
        path.mkdir()
        shown.mkdir()
        for name in ("cgroup.procs", "cgroup.freeze"):
            (shown / name).symlink_to(path / name)
    try:
        yield root / "pod"
    finally:
        (directory / "cgroup.kill").write_text("1")
        for path in (directory / "container", directory):
            until(lambda path=path: removed(path), f"{path} is empty")  # type: ignore[misc]


def removed(directory: Path) -> bool:
    """Remove a cgroup; False while it has processes."""
    try:
        directory.rmdir()
    except OSError:
        return not directory.exists()
    return True


def start_in(pod: Path, program: str) -> subprocess.Popen[bytes]:
    """A Python program in the pod's container. It begins when it is there, so that no child stays outside."""
    begin = "import sys; sys.stdin.readline()\n"
    process = subprocess.Popen([sys.executable, "-c", begin + program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    (pod / "container" / "cgroup.procs").write_text(str(process.pid))
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()
    return process


def cpu_ticks(pid: int) -> int:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def make_unified_pod(root: Path) -> None:
    """The v2 cgroup `/pod` below `root` as plain files: a written text must be as long as the one before."""
    pod = root / "pod"
    pod.mkdir()
    for name, text in {
        "memory.high": "max\n",
        "memory.current": "819\n",
        "cgroup.freeze": "0\n",
        "cgroup.kill": "",
    }.items():
        (pod / name).write_text(text)
    try:
        os.setxattr(pod, "user.any", b"")
    except OSError as error:
        pytest.skip(f"{root} stores no extended attributes: {error.strerror}")
