"""A file system that does not answer is unknown after the deadline, with one outstanding call."""

import errno
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent.config.schema import SamplingConfig
from nodeagent.model import Signal
from nodeagent.runtime import workers
from nodeagent.sampling.hostfs.host import FileSystem, Host, Unreadable
from nodeagent.sampling.hostfs.statvfs_timeout import STATVFS_STUCK_S, StatvfsWithTimeout
from nodeagent.sampling.sampler import Sampler
from tests.support.mounts import silent_fuse

ANSWER = FileSystem(1, 2, 3, 4, 5)


class Mount:
    """A file system that answers when it is let."""

    def __init__(self) -> None:
        self.calls = 0
        self.open = threading.Event()
        self.answered = threading.Semaphore(0)

    def statvfs(self, path: str) -> FileSystem:
        self.calls += 1
        self.open.wait()
        self.answered.release()
        return ANSWER._replace(available=self.calls)


@pytest.fixture
def mount() -> Iterator[Mount]:
    made = Mount()
    yield made
    made.open.set()


def test_a_result_in_time_is_returned() -> None:
    patient = StatvfsWithTimeout(Host("/").statvfs, deadline_s=20)
    assert patient("/").capacity == Host("/").statvfs("/").capacity
    assert patient.hanging == ()
    patient.close()


def test_an_error_is_raised() -> None:
    patient = StatvfsWithTimeout(Host("/").statvfs, deadline_s=20)
    for _ in range(2):
        with pytest.raises(Unreadable) as caught:
            patient("/nowhere/at/all")
        assert caught.value.errno == errno.ENOENT
    patient.close()


def test_a_missing_answer_is_an_error_and_makes_no_second_call(mount: Mount) -> None:
    patient = StatvfsWithTimeout(mount.statvfs, deadline_s=0.01)
    for _ in range(3):
        with pytest.raises(Unreadable, match="has not answered") as caught:
            patient("/dead")
        assert caught.value.errno == errno.ETIMEDOUT
    assert mount.calls == 1
    assert patient.hanging == ("/dead",)


def test_a_dead_mount_does_not_block_another_mount(mount: Mount) -> None:
    def statvfs(path: str) -> FileSystem:
        return mount.statvfs(path) if path == "/dead" else ANSWER

    patient = StatvfsWithTimeout(statvfs, deadline_s=0.01)
    with pytest.raises(Unreadable):
        patient("/dead")
    assert StatvfsWithTimeout(statvfs, deadline_s=20)("/alive") == ANSWER


def test_a_late_result_is_not_returned_as_a_new_one(mount: Mount) -> None:
    patient = StatvfsWithTimeout(mount.statvfs, deadline_s=0.01)
    with pytest.raises(Unreadable):
        patient("/slow")
    mount.open.set()
    assert mount.answered.acquire(timeout=20)
    answer = None
    while answer is None:
        try:
            answer = patient("/slow")
        except Unreadable:
            continue  # the late answer is not in yet
    assert answer.available == mount.calls >= 2


@pytest.fixture
def dead_fuse(tmp_path: Path) -> Iterator[Path]:
    with silent_fuse(tmp_path / "dead") as point:
        yield point


def test_a_sample_of_a_node_with_a_dead_mount_lacks_only_its_signals(dead_fuse: Path) -> None:
    host = Host("/")
    patient = StatvfsWithTimeout(host.statvfs, deadline_s=1.0)
    config = SamplingConfig(kubelet_dir="/", image_dir=str(dead_fuse))
    with Sampler(host, config, node_name="n", statvfs=patient) as sampler:
        for _ in range(3):
            observations = sampler.sample().observations
            assert observations[Signal.IMAGEFS].available is None
            assert "has not answered" in observations[Signal.IMAGEFS].reason
            assert observations[Signal.NODEFS].available is not None
            assert observations[Signal.PID].available is not None
    assert patient.hanging == (str(dead_fuse),)
    stuck = workers.stuck_workers(time.monotonic() + STATVFS_STUCK_S)
    assert [each.message for each in stuck if each.name == f"statvfs {dead_fuse}"] == [
        "stuck in statvfs for more than 5s"
    ]
    assert sum(thread.name == f"statvfs {dead_fuse}" for thread in threading.enumerate()) == 1
