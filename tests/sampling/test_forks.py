"""Real processes fork in real pods, and the meter says who, how fast and whether it is a storm."""

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.sampling.connector import open_connector
from nodeagent.sampling.forks import (
    CALM_S,
    HOST,
    LOOK_UPS,
    STORM_S,
    UNKNOWN,
    ConnectorMeter,
    NoForks,
    Origins,
    open_meter,
    origin,
)
from nodeagent.sampling.host import Host, open_host
from tests.sampling.podcgroups import NEEDS, PodCgroups, usable

real = pytest.mark.skipif(not usable(), reason=NEEDS)
NODES = Path(__file__).parents[1] / "data" / "nodes"

FORKS = """
for _ in range({number}):
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
print('done', flush=True)
sys.stdin.read()
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
def pods() -> Iterator[PodCgroups]:
    made = PodCgroups()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def meter() -> Iterator[ConnectorMeter]:
    # os.fork makes between 400 (a busy machine) and 3,000 processes a second.
    opened = ConnectorMeter(open_connector(), Host("/"), storm_per_s=100)
    try:
        yield opened
    finally:
        opened.close()


def now() -> float:
    return Host("/").boottime()


def follow(meter: ConnectorMeter, until: Callable[[], bool]) -> int:
    """Wait for the meter's descriptor as the loop does, draining. The number of wake-ups."""
    poll = select.epoll()
    source = meter.source()
    assert source is not None
    poll.register(source.fd, source.events)
    woken, deadline = 0, time.monotonic() + 20
    try:
        while not until():
            assert time.monotonic() < deadline
            if poll.poll(CALM_S):
                source.drain()
                woken += 1
    finally:
        poll.close()
    return woken


@real
@pytest.mark.real_cgroup
def test_a_fork_storm_in_a_pod_wakes_the_loop_and_names_the_pod(pods: PodCgroups, meter: ConnectorMeter) -> None:
    calm, storming = pods.pod(), pods.pod()
    pods.run(calm, FORKS.format(number=0))
    process = pods.run(storming, FORKS.format(number=1000))
    meter.drain(now())
    pods.go(process)
    began = now()
    follow(meter, lambda: meter.storm(now()))
    assert now() - began < 2.0
    rates = meter.rates(now())
    assert max(rates, key=lambda origin: rates[origin]) == storming
    assert calm not in rates
    assert storming not in meter.thread_rates(now())


@real
@pytest.mark.real_cgroup
def test_every_fork_of_a_storm_is_charged_to_its_pod(pods: PodCgroups, meter: ConnectorMeter) -> None:
    uid = pods.pod()
    process = pods.run(uid, FORKS.format(number=1000))
    meter.drain(0.0)
    pods.go(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "done\n"
    meter.drain(1.0)
    assert meter.rates(1.0)[uid] == 1000
    assert meter.total(1.0).lost == 0
    assert meter.total(1.0).forks >= 1000


@real
@pytest.mark.real_cgroup
def test_threads_are_counted_apart_and_make_a_storm_too(pods: PodCgroups, meter: ConnectorMeter) -> None:
    uid = pods.pod()
    process = pods.run(uid, THREADS.format(number=3000))
    meter.drain(0.0)
    pods.go(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "done\n"
    meter.drain(1.0)
    assert meter.thread_rates(1.0)[uid] == 3000
    assert uid not in meter.rates(1.0)
    assert meter.storm(1.0)


@real
def test_a_storm_wakes_the_loop_ten_times_a_second_not_once_for_each_fork(
    pods: PodCgroups, meter: ConnectorMeter
) -> None:
    process = pods.run(pods.pod(), FORKS.format(number=1000))
    assert process.stdout is not None
    output = process.stdout.fileno()
    pods.go(process)
    began = time.monotonic()
    woken = follow(meter, lambda: bool(select.select([output], [], [], 0)[0]))
    assert 1 <= woken <= (time.monotonic() - began) / STORM_S + 2


@real
def test_a_drain_that_nobody_was_woken_for_does_not_leave_the_descriptor_ready(meter: ConnectorMeter) -> None:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    assert select.select([meter.fileno()], [], [], 5)[0]
    meter.drain(now())
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    assert not select.select([meter.fileno()], [], [], 0)[0]
    assert select.select([meter.fileno()], [], [], 10 * CALM_S)[0]


@real
def test_an_overrun_is_a_storm_and_the_total_stays_right() -> None:
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
        assert meter.total(1.0).lost > 200
        assert meter.total(1.0).all >= 400
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
    before = meter.total(10.5).forks
    assert before >= 1.0
    assert meter.total(11.0).forks == pytest.approx(before / 2)
    assert meter.total(11.5).forks == 0.0


# --- who -------------------------------------------------------------------------------------------------------------


@real
@pytest.mark.real_cgroup
def test_a_real_process_has_the_pod_whose_cgroup_it_is_in(pods: PodCgroups) -> None:
    uid = pods.pod()
    process = pods.run(uid, "sys.stdin.read()")
    host = Host("/")
    assert origin(host, process.pid) == uid
    assert origin(host, os.getpid()) == HOST
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, not yet reaped: the kernel shows it in the root
    assert origin(host, process.pid) is None
    process.communicate()
    assert origin(host, process.pid) is None


def tree(root: Path, places: dict[int, str]) -> Host:
    """A /proc of processes in cgroups."""
    for pid, place in places.items():
        directory = root / f"proc/{pid}"
        directory.mkdir(parents=True)
        (directory / "cgroup").write_text(f"0::{place}\n")
        (directory / "stat").write_text(f"{pid} (x) y) S 1 1 1 0 -1 4194560 0\n")
    return Host(str(root))


POD, OTHER = "2fc932ce-fdcc-454b-97bd-aadfdeb4c340", "0b073eb9-1111-2222-3333-444455556666"
SYSTEMD = (
    "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod2fc932ce_fdcc_454b_97bd_aadfdeb4c340.slice"
    "/cri-containerd-" + "ab" * 32 + ".scope/init.scope"
)


def test_pods_of_both_drivers_the_host_and_the_root_are_told_apart(tmp_path: Path) -> None:
    host = tree(
        tmp_path,
        {1: SYSTEMD, 2: f"/kubepods/besteffort/pod{OTHER}/{'cd' * 32}", 3: "/system.slice/podman.service", 4: "/"},
    )
    assert [origin(host, pid) for pid in (1, 2, 3, 4, 5)] == [POD, OTHER, HOST, HOST, None]


def test_a_parent_that_is_gone_is_charged_by_its_child_and_then_to_nobody(tmp_path: Path) -> None:
    origins = Origins(tree(tmp_path, {11: SYSTEMD}))
    forks, threads = origins.of([1, 2], [11, 12], [3], now=0.0)
    assert forks == {POD: 1, UNKNOWN: 1}
    assert threads == {UNKNOWN: 1}


class Counting(Host):
    """A host that counts what is read."""

    reads = 0

    def read(self, path: str) -> bytes:
        self.reads += 1
        return super().read(path)


def test_a_bomb_of_a_thousand_parents_costs_a_few_looks_and_is_charged_where_the_latest_are(tmp_path: Path) -> None:
    parents = [pid for pid in range(1000, 2000) for _ in range(2)]
    places = dict.fromkeys(range(1500, 2000), SYSTEMD)  # the first half is gone, with its children
    tree(tmp_path, {**places, 7: "/system.slice/sshd.service"})
    host = Counting(str(tmp_path))
    forks, _ = Origins(host).of([7, 7, 7, *parents], list(range(10_000, 12_003)), [], now=0.0)
    assert host.reads <= 2 * LOOK_UPS
    assert sum(forks.values()) == 2003
    assert forks[HOST] == 3
    assert forks[POD] >= 1900


def test_a_known_process_is_not_looked_up_again_until_its_pid_may_be_anothers(tmp_path: Path) -> None:
    tree(tmp_path, {1: SYSTEMD})
    host = Counting(str(tmp_path))
    origins = Origins(host)
    for at in (0.0, 0.3, 0.6, 0.9):
        assert origins.of([1], [100], [], now=at)[0] == {POD: 1}
    assert host.reads == 1
    origins.of([1], [100], [], now=1.1)
    assert host.reads == 2


@given(
    parents=st.lists(st.integers(1, 60), max_size=200),
    owners=st.lists(st.integers(1, 60), max_size=200),
    alive=st.dictionaries(st.integers(1, 60), st.sampled_from([SYSTEMD, f"/pod{OTHER}", "/system.slice"])),
)
def test_every_event_is_charged_once_and_the_looks_are_bounded(
    tmp_path_factory: pytest.TempPathFactory, parents: list[int], owners: list[int], alive: dict[int, str]
) -> None:
    root = tmp_path_factory.mktemp("proc")
    tree(root, alive)
    host = Counting(str(root))
    forks, threads = Origins(host).of(parents, [pid + 1000 for pid in parents], owners, now=0.0)
    assert (sum(forks.values()), sum(threads.values())) == (len(parents), len(owners))
    assert all(number >= 0 for number in (*forks.values(), *threads.values()))
    assert {*forks, *threads} <= {POD, OTHER, HOST, UNKNOWN}
    assert host.reads <= 4 * LOOK_UPS


# --- hosts that do not tell ------------------------------------------------------------------------------------------


def test_a_recording_has_a_meter_that_knows_nothing_and_says_so() -> None:
    meter, notes = open_meter(open_host(str(NODES / "cgroupv2-memory-pressure")))
    assert isinstance(meter, NoForks)
    assert [note.subject for note in notes] == ["forks"]
    meter.drain(0.0)
    assert (meter.rates(1.0), meter.thread_rates(1.0), meter.total(1.0).all, meter.storm(1.0)) == ({}, {}, 0.0, False)
    assert meter.source() is None
    meter.close()


FEW_DESCRIPTORS = """
import gc, os, resource
from nodeagent.sampling.forks import open_meter
from nodeagent.sampling.host import Host
open_meter(Host('/'))[0].close()  # imports, which open files
held = len(os.listdir('/proc/self/fd')) - 1
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
for spare in range(12):
    resource.setrlimit(resource.RLIMIT_NOFILE, (held + spare, hard))
    meter, notes = open_meter(Host('/'))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    print(type(meter).__name__, *[note.message for note in notes], sep='; ')
    meter.close()
    gc.collect()  # the library leaves half an event loop where the kernel refuses it the other half
    assert len(os.listdir('/proc/self/fd')) - 1 == held
"""


@real
def test_without_a_descriptor_to_spare_there_is_a_note_and_nothing_leaks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FEW_DESCRIPTORS], check=True, timeout=60, capture_output=True, text=True
    )
    said = done.stdout.splitlines()
    assert said[0] == "NoForks; fork rates are not known: no process connector: Too many open files"
    assert said[-1] == "ConnectorMeter"
    assert len(said) == 12
