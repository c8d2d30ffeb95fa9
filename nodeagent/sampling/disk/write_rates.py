"""Measures how fast each pod writes to disk, between two walks.

With cgroup v2 a pod has written the `wbytes` of its io.stat plus its dirty page cache (file_dirty + file_writeback of
memory.stat). The second value shows a write(2) at once, the first one seconds later. Both include child cgroups. Where
the kernel lists devices separately, only the wanted ones count: a write to a PersistentVolume does not fill the node.

Cgroup v1 charges a buffered write to the process that flushes it: `blkio.throttle.io_service_bytes` of a pod stays 0
while the pod fills the disk. There the counter of each process is read instead: `write_bytes` of /proc/<pid>/io, which
grows when a page on a disk becomes dirty. It misses what a process wrote between the last sample and its end, and it
includes all devices.

`WriteHistory.quiet` is the condition for `TreeWalk(unwritten=True)`: no byte written and none pending. It misses blocks
allocated without a write (fallocate in an existing file), and pages that another cgroup had brought into the page
cache. For that reason a walk reads every file at least every ten minutes. The counters of processes are no such
condition.
"""

import contextlib
import errno
import os
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from nodeagent.model import WriteRate
from nodeagent.sampling.hostfs import parse
from nodeagent.sampling.hostfs.host import Host, Unreadable

_MAX_PIDS: Final = 1000
"""Processes read in one sample, 20 us each: a fork bomb must not delay the loop."""
_WATCH_GAP_S: Final = 10.0
"""After a longer pause the writes are counted from zero: the disk was not near a threshold meanwhile."""
_MAX_POD_PIDS: Final = 200
"""Of these, processes of one pod."""


class WriteCounters(NamedTuple):
    """The write counters of one pod at one moment."""

    flushed: int
    """Bytes sent to disks since the cgroup exists; for processes: bytes made dirty since their first sample."""
    pending: int
    """Bytes of dirty page cache."""
    read_at: float


class _CgroupCounters(NamedTuple):
    by_device: Mapping[bytes, int]
    pending: int
    read_at: float


def _read_cgroup(host: Host, cgroup: str) -> _CgroupCounters:
    """`cgroup` is the directory of a v2 cgroup. Raises Unreadable (no io controller, or the cgroup is gone)."""
    now = host.boottime()
    by_device: dict[bytes, int] = {}
    for line in host.read(f"{cgroup}/io.stat").split(b"\n"):
        device, _, words = line.partition(b" ")
        for word in words.split():
            name, _, number = word.partition(b"=")
            if name == b"wbytes" and (written := parse.parse_count(number)) is not None:
                by_device[device] = by_device.get(device, 0) + written
    pending = 0
    for line in host.read(f"{cgroup}/memory.stat").split(b"\n"):
        name, _, number = line.partition(b" ")
        if name in (b"file_dirty", b"file_writeback"):
            pending += parse.parse_count(number) or 0
    return _CgroupCounters(by_device, pending, now)


class _Track:
    __slots__ = ("first", "last", "previous", "since")

    def __init__(self, first: WriteCounters) -> None:
        self.first = first
        self.previous: WriteCounters | None = None
        self.last = first
        self.since = first.read_at
        """When `last.flushed` was read first."""


class WriteHistory:
    """The write counters of all pods: the first, the previous and the last sample of each."""

    def __init__(self) -> None:
        self._tracks: dict[str, _Track] = {}

    def add(self, uid: str, counters: WriteCounters) -> None:
        track = self._tracks.get(uid)
        if track is None or counters.flushed < track.last.flushed:  # a new cgroup with the same name
            self._tracks[uid] = _Track(counters)
            return
        if counters.flushed != track.last.flushed:
            track.since = counters.read_at
        if counters.read_at - track.last.read_at > _WATCH_GAP_S:
            track.first, track.previous = counters, None
        else:
            track.previous = track.last
        track.last = counters

    def retain(self, uids: frozenset[str]) -> None:
        """Drop all other pods."""
        self._tracks = {uid: track for uid, track in self._tracks.items() if uid in uids}

    def quiet(self, uid: str, since: float) -> bool:
        """True if this pod has written nothing since this CLOCK_BOOTTIME, according to its cgroup."""
        track = self._tracks.get(uid)
        return track is not None and track.since <= since and track.last.pending == 0

    def rate(self, uid: str) -> WriteRate | None:
        """The write rate of this pod; None before its second sample. Never negative, even if dirty pages were dropped
        without a write (a deleted file)."""
        track = self._tracks.get(uid)
        if track is None or track.previous is None:
            return None
        over = track.last.read_at - track.previous.read_at
        grown = track.last.flushed + track.last.pending - track.previous.flushed - track.previous.pending
        written = track.last.flushed + track.last.pending - track.first.flushed - track.first.pending
        return WriteRate(
            bytes_per_s=max(0, grown) / over if over > 0 else 0.0,
            written=max(0, written),
            watched_s=track.last.read_at - track.first.read_at,
            read_at=track.last.read_at,
        )


def sample_cgroups(
    host: Host, history: WriteHistory, pods: Iterable[tuple[str, str]], *, devices: frozenset[bytes] = frozenset()
) -> str:
    """Add a sample of each pod, given as (uid, directory of its v2 cgroup). Returns why a pod has none, or "".

    Only `devices` (`8:0`) count. If no pod has written to any of them, all devices count, because the kernel does not
    always charge a write to the device that the file system is mounted from.
    """
    reason = ""
    found: dict[str, _CgroupCounters] = {}
    for uid, cgroup in pods:
        try:
            found[uid] = _read_cgroup(host, cgroup)
        except Unreadable as error:
            if not reason and host.exists(cgroup):  # else the pod has ended
                reason = str(error)
    known = devices & {device for counters in found.values() for device in counters.by_device}
    for uid, counters in found.items():
        flushed = sum(size for device, size in counters.by_device.items() if not known or device in known)
        history.add(uid, WriteCounters(flushed, counters.pending, counters.read_at))
    history.retain(frozenset(found))
    return reason


# --- without cgroup v2 -----------------------------------------------------------------------------------------------


class ProcessWrites:
    """Adds up the counters of a pod's processes."""

    def __init__(self) -> None:
        self._last: dict[str, dict[int, int]] = {}
        self._total: dict[str, int] = {}

    def sample(self, host: Host, history: WriteHistory, pods: Iterable[tuple[str, Iterable[str]]]) -> str:
        """Add a sample of each pod, given as (uid, directories of its cgroups). Returns why a pod has none, or ""."""
        reason = ""
        pids_left = _MAX_PIDS
        sampled = set()
        for uid, cgroups in pods:
            pids = _list_pids(host, cgroups)[: min(pids_left, _MAX_POD_PIDS)]
            pids_left -= len(pids)
            now = host.boottime()
            before = self._last.get(uid)
            found: dict[int, int] = {}
            grown = 0
            for pid in pids:
                try:
                    found[pid] = size = read_write_bytes(host, pid)
                except Unreadable as error:
                    reason = reason or ("" if _ended(error) else str(error))
                    continue
                known = (before or {}).get(pid, 0)
                grown += size - known if size >= known else size
            # The first sample counts nothing: the time of its writes is unknown.
            self._total[uid] = self._total.get(uid, 0) + (grown if before is not None else 0)
            self._last[uid] = found
            sampled.add(uid)
            history.add(uid, WriteCounters(self._total[uid], 0, now))
        self._last = {uid: last for uid, last in self._last.items() if uid in sampled}
        self._total = {uid: total for uid, total in self._total.items() if uid in sampled}
        history.retain(frozenset(sampled))
        return reason


def _list_pids(host: Host, cgroups: Iterable[str]) -> list[int]:
    pids = []
    for cgroup in cgroups:
        try:
            pids += parse.parse_pids(host.read(f"{cgroup}/cgroup.procs"))
        except Unreadable:
            continue  # the container is gone
    return pids


def read_write_bytes(host: Host, pid: int) -> int:
    """`write_bytes` of /proc/<pid>/io. Raises Unreadable."""
    for line in host.read(f"/proc/{pid}/io").split(b"\n"):
        name, _, number = line.partition(b":")
        if name == b"write_bytes" and (written := parse.parse_count(number)) is not None:
            return written
    raise Unreadable(f"/proc/{pid}/io", 0, "has no write_bytes")


def _ended(error: Unreadable) -> bool:
    return error.errno in (errno.ENOENT, errno.ESRCH)


# --- devices ---------------------------------------------------------------------------------------------------------


def disk_names(host: Host, device: int) -> frozenset[bytes]:
    """The names in io.stat of a file system's block device (st_dev) and of the disk that contains its partition. Empty
    for a file system without a block device (btrfs, overlay).

    The source is /proc/partitions, because a container does not have the host's /sys/dev.
    """
    if os.major(device) == 0:
        return frozenset()
    number = f"{os.major(device)}:{os.minor(device)}".encode()
    numbers: dict[bytes, bytes] = {}
    with contextlib.suppress(Unreadable):  # then only the partition itself counts
        for line in host.read("/proc/partitions").split(b"\n"):
            words = line.split()
            if len(words) == 4 and words[0].isdigit():
                numbers[words[3]] = b"%s:%s" % (words[0], words[1])
    names = [name for name, other in numbers.items() if other == number]
    disks = {numbers[disk] for name in names if (disk := _disk_of(name)) in numbers}
    return frozenset({number, *disks})


def _disk_of(partition: bytes) -> bytes:
    """`sda` of `sda1`, `nvme0n1` of `nvme0n1p1`: the kernel inserts a `p` if the disk's name ends in a digit. Empty if
    the name is not that of a partition."""
    disk = partition.rstrip(b"0123456789")
    if disk == partition:
        return b""
    if disk.endswith(b"p") and disk[-2:-1].isdigit():
        return disk[:-1]
    return b"" if disk[-1:].isdigit() else disk
