"""A recorder is bounded, survives a kill and a full disk, and goes on where a killed process stopped."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nodeagent.model import Note, Observation, PodView, Signal, SignalState
from nodeagent.model.recording import RecordedSample, RecordingHeader
from nodeagent.records import recording_format
from nodeagent.records.entry_queue import MAX_WAITING_BYTES, InForce
from nodeagent.records.recording import open_recording
from nodeagent.records.sample_recorder import LONG_S, MEMORY_BYTES, SampleRecorder
from tests.support import nodes, recorded_samples
from tests.support.paths import REPOSITORY
from tests.support.recorded_samples import HEADER


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def recorder(
    directory: Path, *, max_bytes: int = 8 << 20, clock: Callable[[], float] = time.monotonic
) -> SampleRecorder:
    found = SampleRecorder(directory, max_bytes=max_bytes, header=lambda _: HEADER, monotonic=clock)
    found.start()
    return found


def recorded(directory: Path) -> list[RecordedSample]:
    found = open_recording(directory)
    samples = list(found.samples())
    assert found.trouble == ()
    return samples


def settle(found: SampleRecorder, samples: int) -> None:
    """Wait until the thread has taken all samples."""
    until = time.monotonic() + 10
    while not found.idle and time.monotonic() < until:
        time.sleep(0.005)
    time.sleep(0.05)
    assert found.counts().samples == samples


def exact(count: int, *, start: int = 0, pods: int = 3) -> list[RecordedSample]:
    return [recorded_samples.sample(start + index, pods=pods)._replace(exact=True) for index in range(count)]


def test_samples_are_read_back_while_the_recorder_runs_and_after_it_stopped(tmp_path: Path) -> None:
    found, samples = recorder(tmp_path / "samples"), exact(40)
    for sample in samples:
        found.record(sample)
    settle(found, 40)
    assert recorded(tmp_path / "samples") == samples
    found.stop(within_s=60)
    assert recorded(tmp_path / "samples") == samples
    assert found.counts().failures == 0
    assert found.notes() == ()


def test_the_recording_stays_within_its_bound_and_keeps_the_newest(tmp_path: Path) -> None:
    most = 1 << 20
    found = recorder(tmp_path, max_bytes=most)
    samples = exact(600, pods=60)
    for index, sample in enumerate(samples):
        moved = sample.snapshot.pods
        views = tuple([view._replace(usage=nodes.usage(view.pod, os.urandom(1)[0] * nodes.MI)) for view in moved])
        samples[index] = sample._replace(snapshot=sample.snapshot._replace(pods=views))
        found.record(samples[index])
        if index % 20 == 0:
            settle(found, index + 1)
            assert size_of(tmp_path) <= most
    found.stop(within_s=60)
    assert size_of(tmp_path) <= most
    kept = recorded(tmp_path)
    assert kept == samples[-len(kept) :]
    assert len(kept) > 100


def test_a_header_that_is_larger_than_a_segment_leaves_a_recording(tmp_path: Path) -> None:
    header = HEADER._replace(configuration=os.urandom(50_000).hex())
    found = SampleRecorder(tmp_path, max_bytes=1 << 20, header=lambda _: header)
    found.start()
    samples = exact(40)
    for sample in samples:
        found.record(sample)
    settle(found, 40)
    found.stop(within_s=60)
    assert recorded(tmp_path) == samples
    assert len(list(tmp_path.iterdir())) <= 4


def size_of(directory: Path) -> int:
    return sum(each.stat().st_size for each in directory.iterdir())


def test_a_restart_begins_a_segment_of_its_own_and_keeps_the_old_ones(tmp_path: Path) -> None:
    samples = exact(30)
    for part in (samples[:10], samples[10:20], samples[20:]):
        found = recorder(tmp_path)
        for sample in part:
            found.record(sample)
        found.stop(within_s=60)
    assert recorded(tmp_path) == samples
    assert len(open_recording(tmp_path).headers) == 1  # the same header three times


_WRITES = """
import sys, time
from pathlib import Path
from nodeagent.records.sample_recorder import SampleRecorder
from tests.support import recorded_samples
recorder = SampleRecorder(Path(sys.argv[1]), max_bytes=8 << 20, header=lambda _: recorded_samples.HEADER)
recorder.start()
index = int(sys.argv[2])
while True:
    recorder.record(recorded_samples.sample(index)._replace(exact=True))
    index += 1
    print(index, flush=True)
    while len(recorder._queue) > 4:
        time.sleep(0.0005)
"""


def test_a_killed_process_loses_no_more_than_what_it_was_writing(tmp_path: Path) -> None:
    begin = 0
    for kill_after_s in (0.05, 0.11, 0.19):
        process = subprocess.Popen(
            [sys.executable, "-c", _WRITES, str(tmp_path), str(begin)],
            stdout=subprocess.PIPE,
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            text=True,
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(kill_after_s)
        process.kill()
        end = int(process.communicate()[0].split()[-1])
        found = open_recording(tmp_path)
        numbers = [round(sample.at - nodes.NOW) for sample in found.samples()]
        assert numbers == sorted(set(numbers))
        assert numbers[-1] >= end - 8, "what the thread had not taken yet"
        assert all("incomplete" in each for each in found.trouble)
        begin = end + 100


# --- what is recorded ------------------------------------------------------------------------------------------------


def test_near_a_threshold_one_sample_a_second_is_due_and_after_a_while_every_second_one(tmp_path: Path) -> None:
    found = SampleRecorder(tmp_path, max_bytes=1 << 20, header=lambda _: HEADER)
    sample = recorded_samples.sample(available=int(1.5 * nodes.GI))
    found.record(sample)
    now = sample.at
    assert not found.due(sample.signals, now=now + 0.5)
    assert found.due(sample.signals, now=now + 1.0)
    found.record(moved(sample, LONG_S + 1))
    assert not found.due(sample.signals, now=now + LONG_S + 2.0)
    assert found.due(sample.signals, now=now + LONG_S + 3.0)


def moved(sample: RecordedSample, by: float) -> RecordedSample:
    return sample._replace(snapshot=sample.snapshot._replace(taken_at=sample.at + by))


@pytest.mark.parametrize(("available", "samples"), [(int(1.5 * nodes.GI), 5), (4 * nodes.GI, 1)])
def test_between_decisions_signals_near_a_threshold_are_recorded_once_a_second(
    tmp_path: Path, available: int, samples: int
) -> None:
    found = recorder(tmp_path)
    sample = recorded_samples.sample(available=available)
    found.record(sample)
    for step in range(1, 40):
        at = sample.at + step / 10
        node = nodes.snapshot(at=at, available={Signal.MEMORY: available - step * nodes.MI})
        found.record_between(node)
    found.stop(within_s=60)
    read = recorded(tmp_path)
    assert len(read) == min(samples, 4 if samples > 1 else 1) or len(read) == samples
    assert all(each.snapshot.pods == read[0].snapshot.pods for each in read)
    lowest = read[-1].snapshot.observations[Signal.MEMORY].available
    assert lowest is not None
    assert (lowest < available) == (samples > 1)


def test_a_recorder_without_its_thread_keeps_the_newest_and_the_gap_is_in_the_recording(tmp_path: Path) -> None:
    found = SampleRecorder(tmp_path, max_bytes=8 << 20, header=lambda _: HEADER)
    samples = exact(100)
    for sample in samples:
        found.record(sample)
    assert found.counts().dropped == 64
    found.start()
    settle(found, 36)
    found.record(exact(1, start=200)[0])
    found.stop(within_s=60)
    after_the_gap = samples[64]._replace(dropped=64)
    assert recorded(tmp_path) == [after_the_gap, *samples[65:], exact(1, start=200)[0]]


def test_what_waits_for_a_thread_that_hangs_is_bounded_in_bytes(tmp_path: Path) -> None:
    found = SampleRecorder(tmp_path, max_bytes=40 << 20, header=lambda _: HEADER)
    for sample in exact(8, pods=2000):
        found.record(sample._replace(snapshot=sample.snapshot._replace(pods=sample.snapshot.pods[::-1])))
        found._before = None  # each is whole, as after an error
        assert found.counts().memory_bytes <= MAX_WAITING_BYTES
    assert 0 < found.counts().dropped < 8


@pytest.mark.parametrize("disk", [True, False], ids=["disk", "no-disk"])
def test_groups_are_bounded_in_bytes_whatever_changes(tmp_path: Path, disk: bool) -> None:
    """Every pod changes in every sample to what can hardly be compressed."""
    (tmp_path / "file").touch()
    directory = tmp_path / ("samples" if disk else "file")
    found = SampleRecorder(directory, max_bytes=64 << 20, header=lambda _: HEADER)
    chance = random.Random(1)
    samples = exact(14, pods=400)
    for sample in samples:
        pods = tuple([_renamed(view, chance) for view in sample.snapshot.pods])
        found.record(sample._replace(snapshot=sample.snapshot._replace(pods=pods)))
        entry = found._queue.take()
        assert entry is not None
        found._writer.add(entry)
        assert sum(len(each.data) for each in found._writer._entries) <= recording_format.MAX_ENTRY_BYTES
        assert found.counts().memory_bytes <= MEMORY_BYTES
    assert found._writer._group > 1
    found._writer.close()
    if disk:
        assert len(recorded(directory)) == len(samples)
    assert bool(found.counts().dropped) is not disk


def _renamed(view: PodView, chance: random.Random) -> PodView:
    assert view.usage is not None
    return view._replace(usage=view.usage._replace(cgroup=chance.randbytes(400).hex()))


def test_a_defect_in_the_thread_costs_a_group_and_is_counted_and_noted(tmp_path: Path) -> None:
    headers: list[RecordingHeader] = []

    def header(_: InForce) -> RecordingHeader:
        return headers[0]

    found = SampleRecorder(tmp_path, max_bytes=8 << 20, header=header)
    found.start()
    samples = exact(9)
    for sample in samples[:3]:
        found.record(sample)
    settle(found, 0)
    assert "samples were lost by a defect of nodeagent: IndexError" in found.notes()[0].message
    headers.append(HEADER)
    for sample in samples[3:]:
        found.record(sample)
    found.stop(within_s=60)
    counts = found.counts()
    assert (counts.samples, counts.dropped) == (6, 3)
    assert recorded(tmp_path) == samples[3:]


# --- a disk that is short --------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "small"
    directory.mkdir()
    if os.geteuid() or subprocess.call(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(directory)]):
        pytest.skip("cannot mount a tmpfs")
    try:
        yield directory
    finally:
        subprocess.check_call(["umount", "-l", str(directory)])


def test_a_full_disk_keeps_samples_in_memory_until_it_has_space_again(small_disk: Path) -> None:
    clock = Clock()
    found = recorder(small_disk / "samples", clock=clock)
    samples = exact(60)
    for sample in samples[:20]:
        found.record(sample)
    settle(found, 20)
    ballast = small_disk / "ballast"
    fill(ballast)
    clock.now += 31
    for sample in samples[20:40]:
        found.record(sample)
    settle(found, 40)
    assert [note.message for note in found.notes()] == [
        "samples stay in memory: the recorder's file system is short of space"
    ]
    ballast.unlink()
    clock.now += 31
    for sample in samples[40:]:
        found.record(sample)
    settle(found, 60)
    assert found.notes() == ()
    assert recorded(small_disk / "samples") == samples
    found.stop(within_s=60)
    assert recorded(small_disk / "samples") == samples


def fill(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(fd, bytes(4096))
    except OSError:
        os.close(fd)


def test_a_disk_that_fills_during_a_write_loses_nothing(small_disk: Path) -> None:
    clock = Clock()
    found = recorder(small_disk / "samples", clock=clock)
    samples = exact(60)
    for sample in samples[:20]:
        found.record(sample)
    settle(found, 20)
    ballast = small_disk / "ballast"
    fill(ballast)
    for sample in samples[20:40]:  # the free space is not read again yet
        found.record(sample)
    settle(found, 40)
    assert found.counts().failures == 1
    assert "No space left on device" in found.notes()[0].message
    ballast.unlink()
    clock.now += 31
    for sample in samples[40:]:
        found.record(sample)
    found.stop(within_s=60)
    assert recorded(small_disk / "samples") == samples


def test_a_threshold_that_is_met_on_the_recorders_disk_keeps_samples_in_memory(tmp_path: Path) -> None:
    found = recorder(tmp_path / "samples")
    sample = recorded_samples.sample()
    device = tmp_path.stat().st_dev
    disk = Observation(Signal.NODEFS, 1, 100, sample.at, "", device=device)
    short = sample._replace(signals=(sample.signals[0]._replace(observation=disk, state=SignalState.HARD),))
    found.record(short)
    settle(found, 1)
    assert found.notes() == (
        Note(found.notes()[0].kind, "samples stay in memory: the recorder's file system is below a threshold"),
    )
    assert not (tmp_path / "samples").exists()
    found.stop(within_s=60)


def test_a_directory_that_cannot_be_written_is_one_note(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    found = recorder(blocked / "samples")
    for sample in exact(5):
        found.record(sample)
    settle(found, 5)
    assert "Not a directory" in found.notes()[0].message
    found.stop(within_s=60)


def test_what_waits_in_memory_is_bounded(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    found = recorder(blocked / "samples")
    for index in range(1500):
        views = [nodes.view(f"pod-{number}", int.from_bytes(os.urandom(5))) for number in range(60)]
        sample = recorded_samples.sample(index)
        found.record(sample._replace(exact=True, snapshot=sample.snapshot._replace(pods=tuple(views))))
        if index % 32 == 0:
            settle(found, index + 1)
    assert 0 < found.counts().memory_bytes <= 3 << 20
    found.stop(within_s=60)


# --- links and strangers ---------------------------------------------------------------------------------------------


def test_a_directory_that_is_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir()
    (tmp_path / "samples").symlink_to(target)
    found = recorder(tmp_path / "samples")
    found.record(recorded_samples.sample())
    settle(found, 1)
    assert "a symbolic link, not a directory" in found.notes()[0].message
    found.stop(within_s=60)
    assert list(target.iterdir()) == []


def test_a_link_at_the_name_of_a_segment_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    directory = tmp_path / "samples"
    directory.mkdir()
    (directory / "samples-1.rec").symlink_to(victim)
    (directory / "samples-1-tail.rec").symlink_to(victim)
    found = recorder(directory)
    found.record(recorded_samples.sample())
    found.stop(within_s=60)
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("name", ["samples-999999999999.rec", "samples-999999999.rec", "samples-100000000-tail.rec"])
def test_a_file_with_a_huge_number_does_not_end_the_recording(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"not a recording")
    for index in range(3):
        found = recorder(tmp_path)
        found.record(exact(1, start=index)[0])
        settle(found, 1)
        assert found.notes() == ()
        found.stop(within_s=60)
    read = [round(sample.at - nodes.NOW) for sample in open_recording(tmp_path).samples()]
    assert read == [0, 1, 2]


def test_a_directory_in_place_of_a_segment_is_ignored_and_noted(tmp_path: Path) -> None:
    for name in ("samples-1.rec", "samples-2-tail.rec"):
        (tmp_path / name).mkdir()
    samples = exact(3)
    found = recorder(tmp_path)
    for sample in samples:
        found.record(sample)
    settle(found, 3)
    assert "is no file of the recorder and is ignored" in found.notes()[0].message
    found.stop(within_s=60)
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "samples-1.rec",
        "samples-2-tail.rec",
        "samples-3-tail.rec",
        "samples-3.rec",
    ]
    assert list(open_recording(tmp_path).samples()) == samples


def test_the_second_process_in_a_directory_keeps_its_samples_in_memory_until_the_first_has_ended(
    tmp_path: Path,
) -> None:
    clock, samples = Clock(), exact(8)
    first, second = recorder(tmp_path), recorder(tmp_path, clock=clock)
    first.record(samples[0])
    settle(first, 1)
    for sample in samples[1:7]:
        second.record(sample)
    settle(second, 6)
    [note] = second.notes()
    assert note.message == f"samples stay in memory: {tmp_path}: another process records in this directory"
    assert len(list(tmp_path.glob("samples-*.rec"))) == 2
    first.stop(within_s=60)
    clock.now += 31
    second.record(samples[7])
    second.stop(within_s=60)
    assert second.notes() == ()
    assert recorded(tmp_path) == samples


def test_other_files_in_the_directory_are_never_removed(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x" * (2 << 20))
    (tmp_path / "samples-x.rec").write_text("y")
    found = recorder(tmp_path, max_bytes=1 << 20)
    for sample in exact(10):
        found.record(sample)
    found.stop(within_s=60)
    assert (tmp_path / "notes.txt").exists()
    assert (tmp_path / "samples-x.rec").exists()


def test_a_removed_directory_is_made_again(tmp_path: Path) -> None:
    clock = Clock()
    directory = tmp_path / "samples"
    found = recorder(directory, clock=clock)
    samples = exact(20)
    for sample in samples[:10]:
        found.record(sample)
    settle(found, 10)
    for each in directory.iterdir():
        each.unlink()
    directory.rmdir()
    clock.now += 31
    for sample in samples[10:]:
        found.record(sample)
    found.stop(within_s=60)
    assert recorded(directory) == samples


def test_names_that_are_not_utf_8_are_recorded(tmp_path: Path) -> None:
    found = recorder(tmp_path)
    sample = recorded_samples.sample()
    header: RecordingHeader = HEADER
    assert header.node
    views = (nodes.view("bad-\udcff"), *sample.snapshot.pods)
    found.record(sample._replace(snapshot=sample.snapshot._replace(pods=views)))
    found.stop(within_s=60)
    assert recorded(tmp_path)[0].snapshot.pods[0].pod.name == "bad-\\udcff"
