"""Write rates from io.stat and memory.stat of a v2 kernel."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.sampling.disk import write_rates
from nodeagent.sampling.disk.write_rates import WriteCounters, WriteHistory
from nodeagent.sampling.hostfs.host import Host


def cgroup(top: Path, name: str, *, flushed: int, dirty: int, writeback: int = 0) -> tuple[str, str]:
    path = top / name
    path.mkdir(exist_ok=True)
    # As recorded: one line for each device, and one without numbers yet.
    (path / "io.stat").write_text(
        f"254:16 rbytes=40960 wbytes={flushed} rios=2 wios=2798 dbytes=0 dios=0\n"
        "254:0 rbytes=380928 wbytes=1 rios=7 wios=0 dbytes=0 dios=0\n7:0 \n"
    )
    (path / "memory.stat").write_text(f"anon 1000\nfile 5000\nfile_dirty {dirty}\nfile_writeback {writeback}\nslab 7\n")
    return name, f"/{name}"


def test_flushed_and_pending_bytes_of_all_devices_are_written(tmp_path: Path) -> None:
    host, history = Host(str(tmp_path)), WriteHistory()
    write_rates.sample_cgroups(host, history, [cgroup(tmp_path, "a", flushed=0, dirty=0)])
    write_rates.sample_cgroups(host, history, [cgroup(tmp_path, "a", flushed=1000, dirty=20, writeback=3)])
    rate = history.rate("a")
    assert rate is not None
    assert rate.written == 1023
    assert not history.quiet("a", rate.read_at), "23 bytes are pending"


def test_a_cgroup_without_io_numbers_has_no_rate_but_a_reason(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    history = WriteHistory()
    assert "io.stat" in write_rates.sample_cgroups(Host(str(tmp_path)), history, [("a", "/a")])
    assert not history.quiet("a", 0.0)
    assert history.rate("a") is None


def test_an_ended_pod_is_no_failure_but_an_unreadable_one_is(tmp_path: Path) -> None:
    host, history = Host(str(tmp_path)), WriteHistory()
    pods = [("gone", "/gone"), cgroup(tmp_path, "a", flushed=0, dirty=0)]
    assert write_rates.sample_cgroups(host, history, pods) == ""
    assert not history.quiet("gone", 0.0)
    (tmp_path / "b").mkdir()
    assert "/b/io.stat" in write_rates.sample_cgroups(host, history, [*pods, ("b", "/b")])


def test_the_pod_that_fills_the_page_cache_has_the_highest_rate_before_a_byte_is_flushed(tmp_path: Path) -> None:
    host, history = Host(str(tmp_path)), WriteHistory()
    for step in (0, 1):
        pods = [
            cgroup(tmp_path, "filler", flushed=0, dirty=step * 50_000_000),
            cgroup(tmp_path, "steady", flushed=step * 4096, dirty=0),
            cgroup(tmp_path, "idle", flushed=9_000_000, dirty=0),
        ]
        assert write_rates.sample_cgroups(host, history, pods) == ""
    filler, steady, idle = (history.rate(uid) for uid in ("filler", "steady", "idle"))
    assert filler is not None
    assert steady is not None
    assert idle is not None
    assert filler.bytes_per_s > steady.bytes_per_s > idle.bytes_per_s == 0
    assert filler.bytes_per_s * filler.watched_s == pytest.approx(50_000_000)


PARTITIONS = """\
major minor  #blocks  name

   8        0  268435456 sda
   8        1  268435456 sda1
   8       11  268435456 sda11
  65      160  268435456 sdaa
  65      161  268435456 sdaa1
 259        0  268435456 nvme0n1
 259        1  268435456 nvme0n1p1
 259        2  268435456 nvme0n11
 254        0  268435456 vda
 253        0  268435456 dm-0
"""


@pytest.mark.parametrize(
    ("device", "names"),
    [
        ((8, 1), {b"8:1", b"8:0"}),
        ((8, 11), {b"8:11", b"8:0"}),
        ((65, 161), {b"65:161", b"65:160"}),
        ((259, 1), {b"259:1", b"259:0"}),
        ((259, 2), {b"259:2"}),
        ((254, 0), {b"254:0"}),
        ((253, 0), {b"253:0"}),
        ((9, 9), {b"9:9"}),
        ((0, 40), set()),
    ],
)
def test_a_partition_has_the_name_of_its_disk_as_well(
    tmp_path: Path, device: tuple[int, int], names: set[bytes]
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/partitions").write_text(PARTITIONS)
    assert write_rates.disk_names(Host(str(tmp_path)), os.makedev(*device)) == names


def test_every_block_device_of_this_machine_has_the_disk_of_sysfs() -> None:
    listed = [line.split() for line in Path("/proc/partitions").read_text().splitlines()[2:]]
    assert listed
    for major, minor, _, _ in listed:
        path = Path(f"/sys/dev/block/{major}:{minor}")
        disk = path.resolve().parent if (path / "partition").exists() else path
        names = {f"{major}:{minor}".encode(), (disk / "dev").read_bytes().strip()}
        assert write_rates.disk_names(Host("/"), os.makedev(int(major), int(minor))) == names


def test_a_pod_is_quiet_only_since_its_last_write_and_without_pending_bytes() -> None:
    history = WriteHistory()
    history.add("a", WriteCounters(100, 0, 10.0))
    assert not history.quiet("a", 9.0), "there is no sample before 10"
    assert history.quiet("a", 10.0)
    history.add("a", WriteCounters(100, 4096, 20.0))
    assert not history.quiet("a", 15.0), "bytes are pending"
    history.add("a", WriteCounters(4196, 0, 30.0))
    assert not history.quiet("a", 25.0), "it was written"
    assert history.quiet("a", 30.0)
    history.retain(frozenset())
    assert not history.quiet("a", 30.0)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=20), st.integers(0, 20))
def test_a_pod_that_wrote_after_a_moment_is_never_quiet_since_then(steps: list[tuple[int, int]], since: int) -> None:
    """`steps`: (bytes flushed, bytes pending) in each second, from second 0 on."""
    history = WriteHistory()
    total, last_write = 0, 0
    for second, (flushed, pending) in enumerate(steps):
        total += flushed
        last_write = second if flushed else last_write
        history.add("a", WriteCounters(total, pending, float(second)))
    if history.quiet("a", float(since)):
        assert last_write <= since
        assert steps[-1][1] == 0


def test_after_a_pause_the_writes_are_counted_from_zero_and_quiet_pods_stay_quiet() -> None:
    history = WriteHistory()
    for at, flushed in ((100.0, 5000), (101.0, 6000), (700.0, 9000), (702.0, 9400)):
        history.add("u1", WriteCounters(flushed, 0, at))
        history.add("u2", WriteCounters(1, 0, at))
    rate = history.rate("u1")
    assert rate is not None
    assert (rate.written, rate.watched_s, rate.bytes_per_s) == (400, 2.0, 200.0)
    assert history.quiet("u2", 100.0)
