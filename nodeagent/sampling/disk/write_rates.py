"""Who is writing now: bytes written by each pod, between two walks.

On cgroup v2 what a pod has written is `wbytes` of io.stat plus the page cache it still holds dirty (file_dirty +
file_writeback of memory.stat): write(2) shows in the second at once, seconds before the first. Both are recursive.
Devices other than the wanted ones are left out where the kernel tells them apart, so that a pod that writes to a
PersistentVolume fills nothing of the node's.

Cgroup v1 charges buffered writes to whoever flushes them: `blkio.throttle.io_service_bytes` of a pod stays at 0 while
it fills the disk. There the kernel's own account of each process is read: `write_bytes` of /proc/<pid>/io, which counts
when a page becomes dirty, on file systems that have a disk behind them. What a process wrote after the last look and
before it ended is missed, and devices are not told apart.

`Writes.quiet` is the word that `Walk(unwritten=True)` asks for: as many bytes written as before, and none pending. It
does not see blocks that are allocated without being written (fallocate in a file that exists), or written pages that
another cgroup had brought into the page cache; that is why every tree is asked in full every ten minutes anyway. The
account of processes is no such word.
"""

import contextlib
import errno
import os
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from nodeagent.model import WriteRate
from nodeagent.sampling.hostfs.host import Host, Unreadable

# Processes looked at in one round, 20 us each: a fork bomb must not hold up the loop.
_PIDS: Final = 1000
_OF_ONE: Final = 200


class WriteCounters(NamedTuple):
    """What one cgroup has written, at one moment."""

    flushed: int
    """Bytes sent to disks since the cgroup was made; of processes: bytes made dirty since they were first seen."""
    pending: int
    """Bytes of dirty page cache that are still to be."""
    read_at: float


class PodWriteRate(NamedTuple):
    """How fast a pod writes."""

    uid: str
    bytes_per_s: float
    over_s: float
    """The time between the two samples that this is from."""


class _Raw(NamedTuple):
    by_device: Mapping[bytes, int]
    pending: int
    read_at: float


def read_written(host: Host, cgroup: str) -> WriteCounters:
    """`cgroup` is the directory of a v2 cgroup on the host. Raises Unreadable (v1, no io controller, gone)."""
    raw = _read(host, cgroup)
    return WriteCounters(sum(raw.by_device.values()), raw.pending, raw.read_at)


def _read(host: Host, cgroup: str) -> _Raw:
    now = host.boottime()
    by_device: dict[bytes, int] = {}
    for line in host.read(f"{cgroup}/io.stat").split(b"\n"):
        device, _, words = line.partition(b" ")
        for word in words.split():
            name, _, number = word.partition(b"=")
            if name == b"wbytes" and number.isdigit():
                by_device[device] = by_device.get(device, 0) + int(number)
    pending = 0
    for line in host.read(f"{cgroup}/memory.stat").split(b"\n"):
        name, _, number = line.partition(b" ")
        if name in (b"file_dirty", b"file_writeback") and number.isdigit():
            pending += int(number)
    return _Raw(by_device, pending, now)


class _Track:
    __slots__ = ("first", "last", "previous", "since")

    def __init__(self, first: WriteCounters) -> None:
        self.first = first
        self.previous: WriteCounters | None = None
        self.last = first
        self.since = first.read_at
        """When `last.flushed` was first seen."""


class WriteHistory:
    """The writes of all pods, from one sample to the next. Holds three samples of each pod."""

    def __init__(self) -> None:
        self._tracks: dict[str, _Track] = {}

    def note(self, uid: str, written: WriteCounters) -> None:
        """One more sample of this pod."""
        track = self._tracks.get(uid)
        if track is None or written.flushed < track.last.flushed:  # a new cgroup of this name
            self._tracks[uid] = _Track(written)
            return
        if written.flushed != track.last.flushed:
            track.since = written.read_at
        track.previous, track.last = track.last, written

    def keep(self, uids: frozenset[str]) -> None:
        """Forgets all other pods."""
        self._tracks = {uid: track for uid, track in self._tracks.items() if uid in uids}

    def quiet(self, uid: str, since: float) -> bool:
        """Whether this pod has written nothing since this CLOCK_BOOTTIME, as far as its cgroup tells."""
        track = self._tracks.get(uid)
        return track is not None and track.since <= since and track.last.pending == 0

    def rates(self) -> list[PodWriteRate]:
        """The pods that write, fastest first."""
        rates = []
        for uid, track in self._tracks.items():
            writing = self.writing(uid)
            if writing is not None and track.previous is not None and writing.bytes_per_s > 0:
                rates.append(PodWriteRate(uid, writing.bytes_per_s, track.last.read_at - track.previous.read_at))
        return sorted(rates, key=lambda rate: (-rate.bytes_per_s, rate.uid))

    def writing(self, uid: str) -> WriteRate | None:
        """What this pod writes; None before its second sample. Cache that was thrown away unwritten (a deleted file)
        never makes a number negative."""
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


def sample(
    host: Host, writes: WriteHistory, pods: Iterable[tuple[str, str]], *, devices: frozenset[bytes] = frozenset()
) -> str:
    """Notes a sample of each pod, given as (uid, directory of its v2 cgroup). Returns why some have none, or "".

    `devices` (`8:0`) are those that count; where no pod has written to any of them all do, because what is written to a
    file system is not always accounted to the device that it is mounted from.
    """
    reason = ""
    raws: dict[str, _Raw] = {}
    for uid, cgroup in pods:
        try:
            raws[uid] = _read(host, cgroup)
        except Unreadable as error:
            if not reason and host.exists(cgroup):  # a pod that has gone is no news
                reason = str(error)
    known = devices & {device for raw in raws.values() for device in raw.by_device}
    for uid, raw in raws.items():
        flushed = sum(size for device, size in raw.by_device.items() if not known or device in known)
        writes.note(uid, WriteCounters(flushed, raw.pending, raw.read_at))
    writes.keep(frozenset(raws))
    return reason


# --- without cgroup v2 -----------------------------------------------------------------------------------------------


class ProcessWrites:
    """Turns the accounts of processes into one of each pod."""

    def __init__(self) -> None:
        self._last: dict[str, dict[int, int]] = {}
        self._total: dict[str, int] = {}

    def sample(self, host: Host, writes: WriteHistory, pods: Iterable[tuple[str, Iterable[str]]]) -> str:
        """Notes a sample of each pod, given as (uid, directories of its cgroups). Returns why some have none, or ""."""
        reason = ""
        left = _PIDS
        seen = set()
        for uid, cgroups in pods:
            pids = _pids(host, cgroups)[: min(left, _OF_ONE)]
            left -= len(pids)
            now = host.boottime()
            before = self._last.get(uid)
            found: dict[int, int] = {}
            grown = 0
            for pid in pids:
                try:
                    found[pid] = size = _write_bytes(host, pid)
                except Unreadable as error:
                    reason = reason or ("" if _ended(error) else str(error))
                    continue
                known = (before or {}).get(pid, 0)
                grown += size - known if size >= known else size
            # Before the first look nobody knows over which time the processes wrote what they wrote.
            self._total[uid] = self._total.get(uid, 0) + (grown if before is not None else 0)
            self._last[uid] = found
            seen.add(uid)
            writes.note(uid, WriteCounters(self._total[uid], 0, now))
        self._last = {uid: last for uid, last in self._last.items() if uid in seen}
        self._total = {uid: total for uid, total in self._total.items() if uid in seen}
        writes.keep(frozenset(seen))
        return reason


def _pids(host: Host, cgroups: Iterable[str]) -> list[int]:
    pids = []
    for cgroup in cgroups:
        try:
            pids += [int(word) for word in host.read(f"{cgroup}/cgroup.procs").split() if word.isdigit()]
        except Unreadable:
            continue  # the container is gone
    return pids


def _write_bytes(host: Host, pid: int) -> int:
    for line in host.read(f"/proc/{pid}/io").split(b"\n"):
        name, _, number = line.partition(b":")
        if name == b"write_bytes" and number.strip().isdigit():
            return int(number)
    raise Unreadable(f"/proc/{pid}/io", 0, "has no write_bytes")


def _ended(error: Unreadable) -> bool:
    return error.errno in (errno.ENOENT, errno.ESRCH)


# --- devices ---------------------------------------------------------------------------------------------------------


def disk_names(host: Host, device: int) -> frozenset[bytes]:
    """The names in io.stat of what a file system with this st_dev is written to: itself, and the disk that it is a
    partition of. Empty where it is on no block device (btrfs, overlay).

    By /proc/partitions, because a container does not see the host's /sys/dev.
    """
    if os.major(device) == 0:
        return frozenset()
    number = f"{os.major(device)}:{os.minor(device)}".encode()
    numbers: dict[bytes, bytes] = {}
    with contextlib.suppress(Unreadable):  # then only the partition's own line counts, if there is one
        for line in host.read("/proc/partitions").split(b"\n"):
            words = line.split()
            if len(words) == 4 and words[0].isdigit():
                numbers[words[3]] = b"%s:%s" % (words[0], words[1])
    names = [name for name, other in numbers.items() if other == number]
    disks = {numbers[disk] for name in names if (disk := _disk_of(name)) in numbers}
    return frozenset({number, *disks})


def _disk_of(partition: bytes) -> bytes:
    """`sda` of `sda1`, `nvme0n1` of `nvme0n1p1`: the kernel puts a `p` between when the disk's name ends in a digit.
    Empty when it is no partition's name."""
    disk = partition.rstrip(b"0123456789")
    if disk == partition:
        return b""
    if disk.endswith(b"p") and disk[-2:-1].isdigit():
        return disk[:-1]
    return b"" if disk[-1:].isdigit() else disk
