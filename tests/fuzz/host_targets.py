"""Parsers of kernel files, names of cgroups and other files of the host."""

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from nodeagent.model.units import MAX_PLAUSIBLE
from nodeagent.sampling.disk import deleted_files, project_quota, write_rates
from nodeagent.sampling.hostfs import cgroup_memory, cgroups, mounts, parse, processes
from nodeagent.sampling.hostfs.fd_cache import FdCache
from nodeagent.sampling.hostfs.host import Host, RecordedHost, Unreadable
from nodeagent.sampling.node import (
    facts,
    kernel_log,
    kubelet_config,
    memory,
    oom_counters,
    other_oom_handlers,
    page_cache,
    pids,
    psi,
    swap,
    zfs_cache,
)
from nodeagent.sampling.pods import pod_names
from tests.fuzz import scratch
from tests.fuzz.engine import Target
from tests.support.paths import REPOSITORY

NODES: Final = REPOSITORY / "tests" / "data" / "nodes"
PRESSURE: Final = NODES / "cgroupv2-memory-pressure"


class AnyFile(Host):
    """A host on which every file has the same content, and every directory one child."""

    def __init__(self) -> None:
        super().__init__("/")
        self._data = b""
        self._file = tempfile.NamedTemporaryFile(dir=scratch.PARENT)  # noqa: SIM115 - as long as the process
        self._directory = tempfile.TemporaryDirectory(dir=scratch.PARENT)

    def fill(self, data: bytes) -> "AnyFile":
        self._data = data
        Path(self._file.name).write_bytes(data)
        return self

    def real(self, path: str) -> str:
        return self._directory.name

    def open(self, path: str) -> int:
        return os.open(self._file.name, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, path: str, **options: Any) -> bytes:
        return self._data

    def listdir(self, path: str) -> list[str]:
        return ["hugepages-1048576kB", "10-a.conf"]

    def subdirectories(self, path: str) -> list[tuple[str, int]]:
        return [] if path.count("/") > 6 else [("kubepods.slice", 1)]

    def exists(self, path: str) -> bool:
        return True

    def processes(self) -> list[int]:
        return [7]


_host = AnyFile()
_V2: Final = cgroups.Hierarchy("v2", "/sys/fs/cgroup", cgroup_memory.V2, "/sys/fs/cgroup", "/sys/fs/cgroup")
_V1: Final = cgroups.Hierarchy("v1", "/sys/fs/cgroup/memory", cgroup_memory.V1, "/sys/fs/cgroup/pids", None)
_KUBEPODS: Final = cgroups.Kubepods("/kubepods.slice", True)


def _is_count(value: int | None) -> None:
    assert value is None or (0 <= value < MAX_PLAUSIBLE)


def _numbers(data: bytes) -> None:
    _is_count(parse.parse_count(data))
    _is_count(cgroup_memory.parse_limit(data))
    protection = cgroup_memory.parse_protection(data)
    assert protection is None or protection >= 0
    percent = parse.parse_percent(data)
    assert percent is None or 0.0 <= percent <= 100.0
    _is_count(pids.parse_loadavg(data))


def _meminfo(data: bytes) -> None:
    found = memory.parse_meminfo(data, memory.ALL_FIELDS)
    for value in found.values():
        _is_count(value)
    memory.node_memory(found)
    files = FdCache(_host.fill(data), limit=10)
    memory.read_node_memory(_host, files)
    swap.read_swaps(_host, files)
    files.close()


def _memory_stat(data: bytes) -> None:
    usage, _, stat = data.partition(b"\0")
    for files in (cgroup_memory.V1, cgroup_memory.V2):
        numbers = files.numbers(usage, stat)
        assert (numbers.usage is None or numbers.working_set is None or numbers.unreclaimable is None) == bool(
            numbers.reason
        )
        for used in (
            files.working_set(usage, stat),
            files.without_page_cache(usage, stat),
            files.root_working_set(usage, stat),
        ):
            assert (used.value is None) == bool(used.reason)
            assert used.value is None or used.value >= 0


def _psi(data: bytes) -> None:
    for line in psi.parse_psi(data):
        assert line is None or (0.0 <= line.avg10 <= 100.0 and line.total_us >= 0)
    psi.some_avg10(data)


def _mountinfo(data: bytes) -> None:
    table = mounts.parse_mounts(data)
    for path in ("/", "/var/lib/kubelet", "/sys/fs/cgroup"):
        mounts.covering_mount(table, path)
    cgroups.from_mounts(_host.fill(data), table)


def _kernel_log(data: bytes) -> None:
    records = [record for each in data.split(b"\0") if (record := kernel_log.parse_record(each)) is not None]
    parser = kernel_log.OomLogParser()
    for kill in parser.parse(records, lambda path: oom_counters.place_of(path, "/kubepods.slice")):
        assert kill.pid >= 0
    parser.parse(records, lambda path: oom_counters.place_of(path, ""))


def _names(data: bytes) -> None:
    name = data.decode("utf-8", "surrogateescape")
    uid = cgroups.pod_uid(name)
    assert uid is None or len(uid.replace("-", "")) == 32
    identity = cgroups.container_id(name)
    assert identity is None or len(identity) == cgroups.CONTAINER_ID_LENGTH
    cgroups.qos_of(name)
    pod_names.parse_log_directory(name)
    pod_names.parse_log_link(name)
    oom_counters.place_of(f"/kubepods.slice/{name}", "/kubepods.slice")


def _host_files(data: bytes) -> None:
    """Each reader that needs a host, on one whose files all have this content."""
    host = _host.fill(data)
    files = FdCache(host, limit=10)
    pids.read_pids(files, pids.read_limit(files), now=1.0)
    for hierarchy in (_V1, _V2):
        paths = memory.memory_paths(hierarchy, _KUBEPODS, no_kubepods="")
        memory.read_limits(files, paths)
        memory.read_memory(files, paths)
        oom_counters.OomCgroups(host).read(hierarchy, _KUBEPODS.path)
        page_cache.reclaim_blocked(host, hierarchy, _KUBEPODS)
        cgroups.largest_outside(host, hierarchy, _KUBEPODS, most=5)
        cgroups.processes_outside(host, hierarchy, frozenset())
        cgroups.find_kubepods(host, hierarchy)
    files.close()
    processes.processes_below(host, "/sys/fs/cgroup")
    processes.pod_uid_of_process(host, 7)
    processes.kubelet_process(host)
    other_oom_handlers.find_handlers(host)
    other_oom_handlers.managed_units(host, ("-.slice",))
    counter = oom_counters.OomKillCounter(host)
    _is_count(counter.read())
    counter.close()
    zfs_cache.is_part_of_memory(host)
    _is_count(zfs_cache.evictable(host))
    facts.read_facts(host)
    write_rates.disk_names(host, os.makedev(8, 1))
    history = write_rates.WriteHistory()
    write_rates.sample_cgroups(host, history, [("u", "/kubepods.slice/podu")])
    write_rates.ProcessWrites().sample(host, history, [("u", ["/sys/fs/cgroup/a"])])
    project_quota.all_confined(host, [7])
    target = deleted_files.Target("u", lambda: ([7], True), frozenset(), frozenset({0x801}))
    deleted_files.DeletedScan(host).scan([target], until=time.monotonic() + 1.0)


def _kubelet_files(data: bytes) -> None:
    """The kubelet's configuration on a host on which a kubelet runs, and its answer of /configz."""
    host = _host.fill(data)
    kubelet_config.read_thresholds(host, data.decode("utf-8", "replace").split("\0"))
    kubelet_config.from_configz(data.decode("utf-8", "replace"))


def _recorded_node(data: bytes) -> None:
    """The listing of a recorded node. Raises Unreadable."""
    with tempfile.TemporaryDirectory(dir=scratch.PARENT) as name:
        root = Path(name)
        (root / "proc").mkdir()
        (root / "listing").mkdir()
        (root / "proc" / "uptime").write_bytes(data.partition(b"\n")[2] or b"1.0 1.0")
        for file in ("capture", "statvfs", "var-log-pods"):
            (root / "listing" / f"{file}.json").write_bytes(data.partition(b"\n")[0])
        host = RecordedHost(name)
        host.listdir("/var/log/pods")
        host.statvfs("/")


def _files(*patterns: str) -> tuple[bytes, ...]:
    found: Iterator[Path] = (path for pattern in patterns for path in sorted(PRESSURE.glob(pattern))[:3])
    return tuple([path.read_bytes() for path in found if path.is_file()])


def _kubelets() -> tuple[bytes, ...]:
    data = REPOSITORY / "tests" / "data"
    paths = [*sorted((data / "kubelet").glob("*.yaml")), data / "config" / "kubelet-configz.json"]
    return tuple([path.read_bytes() for path in paths])


_KILL: Final = (
    b"6,1000,5000000,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=a,mems_allowed=0,"
    b"oom_memcg=/kubepods.slice/kubepods-pod0123456789abcdef0123456789abcdef.slice,"
    b"task_memcg=/kubepods.slice/kubepods-pod0123456789abcdef0123456789abcdef.slice,task=stress,pid=77,uid=0\n"
    b"\0003,1001,5000010,-;Memory cgroup out of memory: Killed process 77 (stress) total-vm:4kB, anon-rss:4kB, "
    b"file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:4kB oom_score_adj:0\n"
    b"\0006,1002,5000020,-;Tasks in /kubepods.slice/a are going to be killed due to memory.oom.group set\n"
)
_UID: Final = "0123abcd-0123-4567-89ab-0123456789ab"
_MEMORY_STATS: Final = tuple([b"4096\n\0" + each for each in _files("sys/fs/cgroup/**/memory.stat")])

TARGETS: Final = (
    Target("numbers", _numbers, seeds=(b"0\n", b"12345\n", b"max\n", b"0.00", b"99.99", b"0.1 0.2 0.3 1/402 77\n")),
    Target(
        "meminfo",
        _meminfo,
        seeds=(
            *_files("proc/meminfo", "proc/swaps"),
            b"Filename\tType\tSize\tUsed\tPriority\n/dev/zram0 partition 100 5 -2\n",
        ),
        tokens=(b"MemTotal:", b" kB\n", b"HugePages_Total:", b"Hugetlb: 9000 kB\n"),
    ),
    Target(
        "memory-stat",
        _memory_stat,
        seeds=(*_MEMORY_STATS, b"1\n\x00total_inactive_file 1\ntotal_rss 2\ntotal_cache 3\ntotal_swap 4\n"),
        tokens=(b"\ninactive_file ", b"\nanon ", b"\nkernel ", b"\nfile_dirty "),
    ),
    Target("psi", _psi, seeds=_files("proc/pressure/*"), tokens=(b"some ", b"full ", b" avg10=", b" total=")),
    Target(
        "mountinfo",
        _mountinfo,
        seeds=(
            *_files("proc/*/mountinfo"),
            b"1 0 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup rw\n2 1 0:2 / /a\\040b rw - cgroup x rw,memory\n",
        ),
        tokens=(b" - cgroup2 x rw\n", b" - cgroup x rw,memory,pids\n", b"\\040", b"8:1"),
    ),
    Target(
        "kernel-log",
        _kernel_log,
        seeds=(_KILL,),
        tokens=(b"\0", b",pid=", b"oom_memcg=", b"CONSTRAINT_NONE", b"Killed process "),
    ),
    Target(
        "cgroup-names",
        _names,
        seeds=tuple(
            text.encode()
            for text in (
                f"pod{_UID}",
                f"kubepods-burstable-pod{_UID.replace('-', '_')}.slice",
                "kubepods-besteffort.slice",
                f"cri-containerd-{'a' * 64}.scope",
                f"pod{_UID}/{'0' * 64}",
                f"shop_web-1_{_UID}",
                f"web_shop_main-{'f' * 64}.log",
            )
        ),
        tokens=(b"-pod", b".slice", b".scope", b"_", b"conmon"),
    ),
    Target(
        "host-files",
        _host_files,
        (Unreadable,),
        seeds=(
            b"0::/kubepods/burstable/pod%s/%s\n" % (_UID.encode(), b"a" * 64),
            b"7 (a b) S 1 7 7 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 100 0 0\n",
            b"7\n8\n0\n",
            b"kubelet\0--config=/var/lib/kubelet/config.yaml\0--config-dir=/etc/d\0",
            b"/usr/local/bin/k3s agent\0",
            b"8:0 rbytes=1 wbytes=2 rios=1 wios=1\n",
            b"write_bytes: 4096\nrchar: 1\n",
            b"major minor  #blocks  name\n\n   8        0  100 sda\n   8        1  100 sda1\n",
            b"0 0 4294967295\n",
            b"7f0000-7f1000 r-xp 00000000 08:01 77 /a (deleted)\n",
            b"oom 1\noom_kill 2\noom_group_kill 0\n",
            b"[Slice]\nManagedOOMSwap=kill\n",
            b"ID=talos\nVERSION_ID=v1.12.1\n",
            b"earlyoom\0-m\0005,3\0-M\00099999\0",
            *_files("proc/vmstat", "proc/loadavg"),
        ),
        tokens=(b"oom_kill ", b"\0", b" wbytes=", b"kubelet", b"pod"),
    ),
    Target(
        "kubelet-files",
        _kubelet_files,
        seeds=_kubelets(),
        tokens=(b"evictionHard:\n", b"memory.available", b": ", b"\n  ", b"\0--kubelet-arg\0", b"<5%,"),
    ),
    Target(
        "recorded-nodes",
        _recorded_node,
        (Unreadable,),
        seeds=(
            b'{"start": 1.8e9}\n5.0 1.0',
            b'[{"path": "/var/log/pods/a"}]\n5.0 1.0',
            b'{"start": 1, "/": {"f_bavail": 1, "f_frsize": 1, "f_blocks": 1, "f_ffree": 1, "f_files": 1, '
            b'"st_dev": 1}}\n5.0 1.0',
        ),
        tokens=(b"nan", b"NaN", b"1e999", b'"start"'),
    ),
)
