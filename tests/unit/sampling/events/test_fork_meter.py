"""Fork rates of real processes in real pods, and the detection of a storm."""

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping

import pytest

from nodeagent.model import NodeSnapshot, Observation, Pod, PodSource, PodUsage, PodView, QOSClass, Signal
from nodeagent.sampling.events.fork_meter import (
    CALM_DRAIN_S,
    STORM_DRAIN_S,
    SUSTAINED_S,
    ConnectorMeter,
    NoForks,
    open_meter,
)
from nodeagent.sampling.events.process_connector import open_connector
from nodeagent.sampling.hostfs.host import Host, open_host
from nodeagent.sampling.snapshot import PodReading, SnapshotParts, assemble_snapshot
from tests.support.kubelet_cgroups import is_readable
from tests.support.paths import RECORDED_NODES
from tests.support.pod_cgroups import NEEDS, PodCgroups, usable

real = pytest.mark.skipif(not usable(), reason=NEEDS)
STORM_PER_S = 100


FORKS = """
for _ in range({number}):
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
print('done', flush=True)
sys.stdin.read()
"""
STORM = """
import time
for number in range(20_000):
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    if number == {stamped_at}:
        print(time.clock_gettime(time.CLOCK_BOOTTIME), flush=True)
"""
THREADS = """
for _ in range({number}):
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
print('done', flush=True)
sys.stdin.read()
"""


@pytest.fixture
def meter() -> Iterator[ConnectorMeter]:
    # os.fork makes between 400 (a busy machine) and 3,000 processes a second.
    opened = ConnectorMeter(open_connector(), Host("/"), storm_per_s=STORM_PER_S)
    try:
        yield opened
    finally:
        opened.close()


def now() -> float:
    return Host("/").boottime()


def follow(meter: ConnectorMeter, until: Callable[[], bool]) -> int:
    """Wait for the meter's descriptor and drain it, as the loop does. Returns the number of wake-ups."""
    poll = select.epoll()
    source = meter.source()
    assert source is not None
    poll.register(source.fd, source.events)
    woken, deadline = 0, time.monotonic() + 60
    try:
        while not until():
            assert time.monotonic() < deadline
            if poll.poll(CALM_DRAIN_S):
                source.drain()
                woken += 1
    finally:
        poll.close()
    return woken


@real
@pytest.mark.real_cgroup
def test_a_fork_storm_in_a_pod_wakes_the_loop_and_has_the_rate_of_the_pod(
    pods: PodCgroups, meter: ConnectorMeter
) -> None:
    calm, storming = pods.pod(), pods.pod()
    pods.run(calm, FORKS.format(number=0))
    process = pods.run(storming, STORM.format(stamped_at=STORM_PER_S))
    meter.drain(now())
    pods.go(process)
    began = now()
    # Other processes of this machine may be a storm as well.
    follow(meter, lambda: meter.storm(now()) and storming in meter.rates(now()))
    known_at = now()
    assert known_at - began < 2.0
    assert process.stdout is not None
    assert known_at - float(process.stdout.readline()) < 1.0, "after as many forks as make a storm, if not before"
    process.kill()
    assert calm not in meter.rates(now())


@real
@pytest.mark.real_cgroup
def test_every_fork_of_a_storm_counts_for_its_pod(pods: PodCgroups, meter: ConnectorMeter) -> None:
    uid = pods.pod()
    process = pods.run(uid, FORKS.format(number=1000))
    meter.drain(0.0)
    before = meter.events
    pods.go(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "done\n"
    meter.drain(1.0)
    assert meter.rates(1.0)[uid] == 1000
    made = meter.events.forks + meter.events.threads - before.forks - before.threads
    assert made == sum(meter.rates(1.0).values()) >= 1000
    assert meter.events.lost == before.lost


@real
@pytest.mark.real_cgroup
def test_a_sustained_rate_is_a_mean_over_seconds_and_part_of_the_pods_usage(
    pods: PodCgroups, meter: ConnectorMeter
) -> None:
    forking, threading, calm = pods.pod(), pods.pod(), pods.pod()
    meter.drain(0.0)
    for uid, program in ((forking, FORKS), (threading, THREADS)):
        process = pods.run(uid, program.format(number=500))
        pods.go(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
    meter.drain(SUSTAINED_S)
    rates = meter.sustained(SUSTAINED_S)
    assert rates[forking] == pytest.approx(500 / SUSTAINED_S, rel=0.05)
    assert rates[threading] == pytest.approx(500 / SUSTAINED_S, rel=0.05)
    joined = {each.usage.cgroup_uid: each.usage.forks_per_s for each in _joined((forking, calm), rates) if each.usage}
    assert joined == {forking: rates[forking], calm: None}
    assert meter.sustained(3 * SUSTAINED_S) == {}


def _joined(uids: tuple[str, ...], rates: Mapping[str, float]) -> tuple[PodView, ...]:
    usages = [PodUsage(uid, QOSClass.BEST_EFFORT, f"/{uid}", 0.0) for uid in uids]
    pods = [Pod(each.cgroup_uid, each.cgroup_uid, "n", "p", PodSource.API, each.qos_class) for each in usages]
    unread = Observation(Signal.MEMORY, None, None, 0.0, "", "not read")
    node, reading = NodeSnapshot("n", 0.0, 0.0, {}, unread), PodReading(tuple(map(PodView, pods, usages)))
    return assemble_snapshot(SnapshotParts(node, reading, fork_rates=rates)).pods


@real
@pytest.mark.real_cgroup
def test_threads_are_no_processes_but_make_a_storm_too(pods: PodCgroups, meter: ConnectorMeter) -> None:
    uid = pods.pod()
    process = pods.run(uid, THREADS.format(number=3000))
    meter.drain(0.0)
    pods.go(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "done\n"
    meter.drain(1.0)
    assert meter.sustained(1.0)[uid] == pytest.approx(3000 / SUSTAINED_S)
    assert meter.events.threads >= 3000
    assert meter.rates(1.0)[uid] == 3000
    assert meter.storm(1.0)


@real
def test_a_storm_wakes_the_loop_ten_times_per_second_not_once_for_each_fork(
    pods: PodCgroups, meter: ConnectorMeter
) -> None:
    process = pods.run(pods.pod(), FORKS.format(number=1000))
    assert process.stdout is not None
    output = process.stdout.fileno()
    pods.go(process)
    began = time.monotonic()
    woken = follow(meter, lambda: is_readable(output))
    assert 1 <= woken <= (time.monotonic() - began) / STORM_DRAIN_S + 2


@real
def test_a_drain_without_a_wake_up_does_not_leave_the_descriptor_ready(meter: ConnectorMeter) -> None:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    assert is_readable(meter.fileno(), timeout_s=30)
    for _ in range(50):
        drained_at = now()
        meter.drain(drained_at)
        pid = os.fork()
        if not pid:
            os._exit(0)
        os.waitpid(pid, 0)
        ready = is_readable(meter.fileno())
        if now() - drained_at < CALM_DRAIN_S:
            break  # else the machine was busy, and the timer may have fired
    assert not ready
    assert is_readable(meter.fileno(), timeout_s=30)


@real
def test_an_overrun_is_a_storm_and_the_sum_stays_exact() -> None:
    meter = ConnectorMeter(open_connector(receive_buffer=16 << 10), Host("/"))
    try:
        meter.drain(0.0)
        for _ in range(400):
            pid = os.fork()
            if not pid:
                os._exit(0)
            os.waitpid(pid, 0)
        meter.drain(1.0)
        assert meter.storm(1.0)
        assert meter.events.lost > 200
        assert sum(meter.events) >= 400
    finally:
        meter.close()


@real
def test_a_rate_fades_with_its_window(meter: ConnectorMeter) -> None:
    meter.drain(9.5)
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    meter.drain(10.5)
    before = sum(meter.rates(10.5).values())
    assert before >= 1.0
    assert sum(meter.rates(11.0).values()) == pytest.approx(before / 2)
    assert meter.rates(11.5) == {}


# --- hosts without fork events ---------------------------------------------------------------------------------------


def test_a_recorded_node_has_no_fork_rates_and_a_note() -> None:
    meter, notes = open_meter(open_host(str(RECORDED_NODES / "cgroupv2-memory-pressure")))
    assert isinstance(meter, NoForks)
    assert [note.subject for note in notes] == ["forks"]
    meter.drain(0.0)
    assert (meter.rates(1.0), meter.sustained(1.0), meter.storm(1.0)) == ({}, {}, False)
    assert meter.source() is None
    meter.close()


FEW_DESCRIPTORS = """
import gc, os, resource
from nodeagent.sampling.events.fork_meter import open_meter
from nodeagent.sampling.hostfs.host import Host
open_meter(Host('/'))[0].close()  # imports, which open files
open_now = len(os.listdir('/proc/self/fd')) - 1
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
for spare in range(12):
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + spare, hard))
    meter, notes = open_meter(Host('/'))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    print(type(meter).__name__, *[note.message for note in notes], sep='; ')
    meter.close()
    gc.collect()  # the library leaves half an event loop if the kernel refuses the other half
    assert len(os.listdir('/proc/self/fd')) - 1 == open_now
"""


@real
def test_without_a_free_descriptor_there_is_a_note_and_nothing_leaks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FEW_DESCRIPTORS], check=True, timeout=60, capture_output=True, text=True
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "NoForks; no fork rates: no process connector: Too many open files"
    assert lines[-1] == "ConnectorMeter"
    assert len(lines) == 12
