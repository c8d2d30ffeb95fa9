"""OOM kills in the kernel log (/dev/kmsg): which process, in which cgroup, by whose limit.

Promises:

1. The log is read only after the counter of kills moved. Without a kill two system calls a second keep the place.
2. Only records of the kernel count. A process that writes to /dev/kmsg cannot give a record the facility of the kernel
   (kernel/printk/printk.c, devkmsg_write).
3. A record is read once. A malformed one is left out. Nothing here blocks or raises.

Theory of operation. The kernel writes `oom-kill:` with both cgroups right before it counts the kill, and `Killed
process` right after (mm/oom_kill.c). So the place to read from must be older than the counter's last reading: of two
descriptors one stands where the log ended at least `MARK_EVERY_S` ago, the other where it ended later. A log line is a
hint that names a process: how many were killed, and in which cgroup, the counters say wherever they exist.
"""

import os
import re
import stat
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from nodeagent.model import LoggedKill, OomPlace
from nodeagent.sampling.hostfs import host as hostfs
from nodeagent.sampling.hostfs.host import Host, Unreadable

KMSG: Final = "/dev/kmsg"
_DEVICE: Final = (1, 11)
MARK_EVERY_S: Final = 1.0
MAX_RECORDS: Final = 65536
"""Records of one reading: more than a log buffer of 4 MiB has."""
MAX_LOGGED: Final = 1024
"""Kills of one reading."""
_RECORD_BYTES: Final = 8192
_OOM_KILL: Final = re.compile(
    # Both cgroup names may contain anything, also a comma: the first one ends at the first, the command at the last.
    # Atomic, because names of cgroups can be made for a regular expression that goes back.
    r"oom-kill:constraint=(?P<constraint>CONSTRAINT_[A-Z_]{1,32}),"
    r"(?>.*?(?:oom_memcg=(?P<limit>/.*?)|global_oom),task_memcg=)(?P<cgroup>/.*?),"
    r"task=(?P<name>.{0,64}),pid=(?P<pid>\d{1,10}),uid=\d{1,10}\Z",
    re.DOTALL,
)
_KILLED: Final = re.compile(
    r"(?:Out of memory|Memory cgroup out of memory)[^:]{0,40}: Killed process (?P<pid>\d{1,10}) \((?P<name>.{0,64}?)\)"
    r"(?P<sizes>,? .*)\Z",
    re.DOTALL,
)
_RESIDENT: Final = re.compile(r"\b(?:anon|file|shmem)-rss:(\d{1,15})kB")
_GROUP: Final = re.compile(r"Tasks in (?P<cgroup>/.{0,4096}) are going to be killed due to memory\.oom\.group set\Z")


class LogRecord(NamedTuple):
    """One record of the kernel."""

    sequence: int
    at: float
    """Seconds on the clock of the kernel log."""
    text: str


class KernelLog:
    """Reads the kernel log. `reason` tells why it cannot, empty if it can."""

    def __init__(self, host: Host) -> None:
        self.reason = ""
        self._older = self._newer = -1
        self._marked_at = float("-inf")
        self._sequence = -1
        """Of the last record that was read."""
        if host.recorded:
            self.reason = "recorded node"
            return
        try:
            self._older, self._newer = _open(host), _open(host)
            os.lseek(self._newer, 0, os.SEEK_END)
        except (OSError, Unreadable) as error:
            self.reason = str(error)
            self.close()

    def mark(self, now: float) -> None:
        """No kill was counted up to `now`: earlier records are not needed."""
        if self._newer < 0 or now - self._marked_at < MARK_EVERY_S:
            return
        self._marked_at = now
        self._older, self._newer = self._newer, self._older
        self._seek(self._newer)

    def read(self, now: float) -> list[LogRecord]:
        """The records since the mark before the last one, without those that were read."""
        if self._older < 0:
            return []
        records: list[LogRecord] = []
        for _ in range(MAX_RECORDS):
            try:
                data = os.read(self._older, _RECORD_BYTES)
            except BrokenPipeError:
                continue  # overwritten before it was read: the next read gets the oldest record
            except OSError:
                break
            if not data:
                break
            record = parse_record(data)
            if record is not None and record.sequence > self._sequence:
                self._sequence = record.sequence
                records.append(record)
        # The older descriptor stands at the end now, and the next reading continues there.
        self._marked_at = now
        return records

    def close(self) -> None:
        for fd in (self._older, self._newer):
            if fd >= 0:
                os.close(fd)
        self._older = self._newer = -1

    def _seek(self, fd: int) -> None:
        try:
            os.lseek(fd, 0, os.SEEK_END)
        except OSError as error:
            self.reason = str(error)


def _open(host: Host) -> int:
    """The kernel log of this machine: there is only one, whatever the root. A container has none unless it is given."""
    paths = [host.real(KMSG), KMSG] if host.real(KMSG) != KMSG else [KMSG]
    trouble = Unreadable(KMSG, 0, "does not exist")
    for path in paths:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            trouble = hostfs.unreadable(KMSG, error)
            continue
        status = os.fstat(fd)
        if stat.S_ISCHR(status.st_mode) and (os.major(status.st_rdev), os.minor(status.st_rdev)) == _DEVICE:
            return fd
        os.close(fd)
        trouble = Unreadable(KMSG, 0, "is not the kernel log")
    raise trouble


def parse_record(data: bytes) -> LogRecord | None:
    """`level,sequence,microseconds,flags;text\\n key=value...`; None for a malformed record and for one that a process
    wrote."""
    head, semicolon, body = data.partition(b";")
    fields = head.split(b",")
    if not semicolon or len(fields) < 4 or not all(each.isdigit() and len(each) < 20 for each in fields[:3]):
        return None
    if int(fields[0]) >> 3:  # the facility: 0 is the kernel's
        return None
    text = body.partition(b"\n")[0].decode("utf-8", "replace")
    return LogRecord(int(fields[1]), int(fields[2]) / 1e6, text)


class OomLogParser:
    """Turns records into kills. A kill may be in several records, and they may be in several readings."""

    def __init__(self) -> None:
        self._limit: OomPlace | None = None
        self._numa = False
        self._group: OomPlace | None = None
        """The cgroup whose processes are being killed, by the records so far."""

    def parse(self, records: Sequence[LogRecord], place: Callable[[str], OomPlace]) -> list[LoggedKill]:
        """The kills in these records. `place`: what the cgroup at a path is."""
        kills: dict[tuple[int, int], LoggedKill] = {}
        last: dict[int, tuple[int, int]] = {}
        for record in records:
            if len(kills) >= MAX_LOGGED:
                break
            if found := _OOM_KILL.match(record.text):
                self._choose(found, record, place, kills, last)
            elif found := _GROUP.match(record.text):
                self._group = place(found["cgroup"])
            elif found := _KILLED.match(record.text):
                self._killed(found, record, kills, last)
        return list(kills.values())

    def _choose(
        self,
        found: re.Match[str],
        record: LogRecord,
        place: Callable[[str], OomPlace],
        kills: dict[tuple[int, int], LoggedKill],
        last: dict[int, tuple[int, int]],
    ) -> None:
        self._group = None
        limit, cgroup = found["limit"], found["cgroup"]
        within = limit is None or limit == "/" or cgroup == limit or cgroup.startswith(f"{limit}/")
        if (limit is not None) != (found["constraint"] == "CONSTRAINT_MEMCG") or not within:
            return  # not a line as the kernel writes it
        self._limit = place(limit) if limit is not None else None
        self._numa = limit is None and found["constraint"] != "CONSTRAINT_NONE"
        pid = int(found["pid"])
        last[pid] = (pid, record.sequence)
        kills[pid, record.sequence] = LoggedKill(
            record.sequence, record.at, pid, found["name"], None, place(cgroup), self._limit, self._numa
        )

    def _killed(
        self,
        found: re.Match[str],
        record: LogRecord,
        kills: dict[tuple[int, int], LoggedKill],
        last: dict[int, tuple[int, int]],
    ) -> None:
        pid = int(found["pid"])
        sizes = [int(size) * 1024 for size in _RESIDENT.findall(found["sizes"])]
        resident = sum(sizes) if sizes else None
        key = last.get(pid)
        if key is not None:  # named by `oom-kill:`, or killed twice: the first process of a group
            kills[key] = kills[key]._replace(rss=resident if resident is not None else kills[key].rss)
            return
        in_group = self._group is not None
        last[pid] = (pid, record.sequence)
        kills[pid, record.sequence] = LoggedKill(
            record.sequence,
            record.at,
            pid,
            found["name"],
            resident,
            self._group,
            self._limit if in_group else None,
            self._numa if in_group else False,
        )
