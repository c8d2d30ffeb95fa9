"""Wake-ups by a real kernel: memcg thresholds, PSI triggers, cgroup directories."""

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from nodeagent.model import Note
from nodeagent.sampling.events import kernel_events

MEMORY = Path("/sys/fs/cgroup/memory")
MIB = 1 << 20

real_v1 = pytest.mark.skipif(
    os.geteuid() != 0 or not os.access(MEMORY / "cgroup.procs", os.W_OK),
    reason="needs root and a writable cgroup v1 memory hierarchy",
)

EATER = """
import sys
blocks = []
for line in sys.stdin:
    blocks.append(bytearray(b"x") * (int(line) << 20))
    print("ate", flush=True)
"""


class Eater:
    """A process in a cgroup that allocates memory on request."""

    def __init__(self, cgroup: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", EATER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        (cgroup / "cgroup.procs").write_text(str(self.process.pid))

    def eat(self, mib: int) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{mib}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "ate\n"

    def __enter__(self) -> "Eater":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def _ready(source: kernel_events.EventSource, timeout_s: float) -> bool:
    with select.epoll() as epoll:
        epoll.register(source.fd, source.events)
        ready = bool(epoll.poll(timeout_s))
    source.drain()
    return ready


@pytest.mark.real_cgroup
@real_v1
def test_crossing_an_armed_level_wakes_the_loop_and_growth_below_it_does_not(cgroup: Path) -> None:
    level = kernel_events.MemcgThreshold(str(cgroup))
    source = level.source()
    with Eater(cgroup) as eater:
        eater.eat(10)
        level.arm(100 * MIB)
        eater.eat(10)
        assert not _ready(source, 0.2)
        eater.eat(120)
        assert _ready(source, 60)
        assert not _ready(source, 0), "one crossing is one wake-up"
    source.close()


@pytest.mark.real_cgroup
@real_v1
def test_a_moved_level_wakes_the_loop_at_its_new_value_alone(cgroup: Path) -> None:
    level = kernel_events.MemcgThreshold(str(cgroup))
    source = level.source()
    with Eater(cgroup) as eater:
        level.arm(60 * MIB)
        level.arm(200 * MIB)
        eater.eat(100)
        assert not _ready(source, 0.2)
        eater.eat(150)
        assert _ready(source, 60)
    source.close()


@pytest.mark.real_cgroup
@real_v1
def test_a_level_below_the_usage_wakes_the_loop_at_once(cgroup: Path) -> None:
    level = kernel_events.MemcgThreshold(str(cgroup))
    source = level.source()
    with Eater(cgroup) as eater:
        eater.eat(50)
        level.arm(40 * MIB)
        assert _ready(source, 60)
        assert not _ready(source, 0)
    source.close()


def _arm_within(threshold: kernel_events.MemcgThreshold, growth: int) -> int | None:
    """The level that is armed now, if it moved."""
    at = threshold.next_level(growth)
    if at is not None:
        threshold.arm(at)
    return at


@pytest.mark.real_cgroup
@real_v1
def test_on_the_way_to_a_threshold_the_level_moves_a_few_times_and_wakes_the_loop_before_it_and_at_it(
    cgroup: Path,
) -> None:
    level = kernel_events.MemcgThreshold(str(cgroup))
    source = level.source()
    threshold, unchecked = 300 * MIB, (os.cpu_count() or 1) * MIB
    moves: list[int] = []
    woken: list[int] = []
    with Eater(cgroup) as eater:
        while (used := int((cgroup / "memory.usage_in_bytes").read_text())) < threshold:
            moved = _arm_within(level, threshold - used)
            if moved is not None:
                moves.append(moved)
            eater.eat(5)
            # Each CPU checks a level every half MiB, so a step that ends just above it may be unchecked.
            above = int((cgroup / "memory.usage_in_bytes").read_text()) - moves[-1]
            if 0 <= above < unchecked:
                eater.eat(unchecked // MIB)
            if _ready(source, 0):
                woken.append(int((cgroup / "memory.usage_in_bytes").read_text()))
        eater.eat(5)  # the last step may also have ended just above its level
        if _ready(source, 0):
            woken.append(int((cgroup / "memory.usage_in_bytes").read_text()))
    source.close()
    # Each move takes the kernel some time, so the nearly sixty samples must not cause as many moves.
    assert 1 <= len(moves) <= 5
    assert threshold * 3 // 4 <= woken[0] < threshold - 5 * MIB
    assert threshold <= woken[-1] < threshold + 12 * MIB


@pytest.mark.real_cgroup
@real_v1
def test_near_a_threshold_the_wake_up_is_at_the_crossing_and_not_before(cgroup: Path) -> None:
    level = kernel_events.MemcgThreshold(str(cgroup))
    source = level.source()
    usage = cgroup / "memory.usage_in_bytes"
    with Eater(cgroup) as eater:
        eater.eat(5)
        crossing = int(usage.read_text()) + 50 * MIB
        assert _arm_within(level, 50 * MIB)
        while not _ready(source, 0):
            assert int(usage.read_text()) < crossing + 4 * MIB
            eater.eat(1)
        assert int(usage.read_text()) > crossing
    source.close()


@pytest.mark.real_cgroup
@real_v1
def test_an_early_level_stays_and_a_late_one_moves(cgroup: Path) -> None:
    level = kernel_events.MemcgThreshold(str(cgroup))
    assert _arm_within(level, 100 * MIB)
    assert not _arm_within(level, 110 * MIB)
    assert not _arm_within(level, 300 * MIB)
    assert _arm_within(level, 50 * MIB), "the armed level is above the threshold: the wake-up would be late"
    with Eater(cgroup) as eater:
        eater.eat(190)
        assert _arm_within(level, 20 * MIB), "usage has passed the armed level"
    level.close()


def test_without_event_control_opening_fails_and_leaks_nothing(tmp_path: Path) -> None:
    (tmp_path / "memory.usage_in_bytes").write_text("0")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        kernel_events.MemcgThreshold(str(tmp_path))
    assert len(os.listdir("/proc/self/fd")) <= before


THRASHER = """
import mmap, os, random, sys
size = 45 << 20
with open(sys.argv[1], "w+b") as file:
    for _ in range(45):
        file.write(os.urandom(1 << 20))
    os.fsync(file.fileno())
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    sys.stdin.readline()
    pages = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
    pages.madvise(mmap.MADV_RANDOM)
    while True:
        pages[random.randrange(size)]
"""
ANY_STALL = b"some 2000 2000000\0"
"""2 ms in 2 s: a limited file reader stalls for about 5% of its time here, and the test must not depend on the disk."""


@pytest.mark.real_cgroup
@real_v1
@pytest.mark.skipif(not os.access("/proc/pressure/memory", os.W_OK), reason="this kernel has no writable PSI")
def test_a_stall_of_real_tasks_fires_a_pressure_trigger(cgroup: Path, tmp_path: Path) -> None:
    source = kernel_events.psi_trigger("/proc/pressure/memory", triggers=(ANY_STALL,))
    assert isinstance(source, kernel_events.EventSource), source
    (cgroup / "memory.limit_in_bytes").write_text(str(30 * MIB))
    thrasher = [sys.executable, "-c", THRASHER, str(tmp_path / "thrash")]
    with select.epoll() as epoll, subprocess.Popen(thrasher, stdin=subprocess.PIPE) as process:
        epoll.register(source.fd, source.events)
        (cgroup / "cgroup.procs").write_text(str(process.pid))
        epoll.poll(2.5)  # the first event after creation may be spurious
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.flush()
        fired = epoll.poll(60)
        process.kill()
    source.close()
    assert fired
    assert fired[0][1] & select.EPOLLPRI


def test_this_kernel_accepts_one_of_the_built_in_triggers() -> None:
    source = kernel_events.psi_trigger("/proc/pressure/memory")
    if isinstance(source, Note):
        assert not os.access("/proc/pressure/memory", os.W_OK), source
    else:
        source.close()


def test_a_host_without_psi_is_a_note(tmp_path: Path) -> None:
    note = kernel_events.psi_trigger(str(tmp_path / "pressure"))
    assert isinstance(note, Note)
    assert "No such file" in note.message


def test_a_trigger_is_set_on_the_first_file_that_the_kernel_lets_be_opened(tmp_path: Path) -> None:
    accepts = tmp_path / "accepts"
    accepts.touch()
    source = kernel_events.psi_trigger(str(tmp_path / "missing"), str(accepts))
    assert isinstance(source, kernel_events.EventSource)
    source.close()
    assert accepts.read_bytes() == kernel_events.PRIVILEGED_TRIGGER


def test_one_note_has_the_reason_of_each_file(tmp_path: Path) -> None:
    note = kernel_events.psi_trigger(str(tmp_path / "missing"), str(tmp_path))
    assert isinstance(note, Note)
    assert (
        note.message == f"no PSI trigger on {tmp_path}/missing: No such file or directory; {tmp_path}: Is a directory"
    )


@pytest.mark.real_cgroup
@real_v1
def test_created_and_removed_pods_wake_the_loop(cgroup: Path) -> None:
    watch = kernel_events.CgroupTreeWatch()
    source = watch.source()
    assert watch.follow({str(cgroup)}, set()) == ()
    assert not _ready(source, 0)
    (cgroup / "pod1").mkdir()
    assert _ready(source, 60)
    (cgroup / "pod1").rmdir()
    assert _ready(source, 60)
    assert watch.follow(set(), set()) == ()
    _ready(source, 0)
    (cgroup / "pod1").mkdir()
    assert not _ready(source, 0.1), "an unwatched directory does not wake the loop"
    (cgroup / "pod1").rmdir()
    source.close()


def test_a_changed_file_wakes_the_loop_and_a_file_that_is_back_is_watched_again(tmp_path: Path) -> None:
    events = tmp_path / "memory.events"
    events.write_text("high 0\n")
    watch = kernel_events.CgroupTreeWatch()
    source = watch.source()
    watch.follow(set(), {str(events)})
    events.write_text("high 1\n")
    assert _ready(source, 60)
    events.unlink()
    _ready(source, 1)
    events.write_text("high 2\n")
    _ready(source, 0)
    watch.follow(set(), {str(events)})
    events.write_text("high 3\n")
    assert _ready(source, 60)
    source.close()


def test_a_cgroup_that_is_gone_causes_no_note(tmp_path: Path) -> None:
    watch = kernel_events.CgroupTreeWatch()
    assert watch.follow({str(tmp_path / "gone")}, {str(tmp_path / "gone" / "memory.events")}) == ()
    watch.source().close()
