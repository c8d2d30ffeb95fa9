"""Who is writing now: bytes written by each pod, from its cgroup, between two walks.

What a pod has written is `wbytes` of io.stat plus the page cache it still holds dirty (file_dirty + file_writeback of
memory.stat): write(2) shows in the second at once, seconds before the first. Both are recursive and exist on cgroup v2
only; v1 charges buffered writes to whoever flushes them, so there is nothing to read, and this says so.

`Writes.quiet` is the word that `Walk(unwritten=True)` asks for: as many bytes written as before, and none pending. It
does not see blocks that are allocated without being written (fallocate in a file that exists), or written pages that
another cgroup had brought into the page cache; that is why every tree is asked in full every ten minutes anyway.
"""

from collections.abc import Iterable
from typing import NamedTuple

from nodeagent.sampling.host import Host, Unreadable


class Written(NamedTuple):
    """What one cgroup has written, at one moment."""

    flushed: int
    """Bytes sent to disks since the cgroup was made."""
    pending: int
    """Bytes of dirty page cache that are still to be."""
    read_at: float


class Rate(NamedTuple):
    """How fast a pod writes."""

    uid: str
    bytes_per_s: float
    over_s: float
    """The time between the two samples that this is from."""


def read_written(host: Host, cgroup: str) -> Written:
    """`cgroup` is the directory of a v2 cgroup on the host. Raises Unreadable (v1, no io controller, gone)."""
    now = host.boottime()
    flushed = sum(_wbytes(host.read(f"{cgroup}/io.stat").split()))
    pending = 0
    for line in host.read(f"{cgroup}/memory.stat").split(b"\n"):
        name, _, number = line.partition(b" ")
        if name in (b"file_dirty", b"file_writeback") and number.isdigit():
            pending += int(number)
    return Written(flushed, pending, now)


def _wbytes(words: Iterable[bytes]) -> Iterable[int]:
    for word in words:
        name, _, number = word.partition(b"=")
        if name == b"wbytes" and number.isdigit():
            yield int(number)


class _Track:
    __slots__ = ("last", "previous", "since")

    def __init__(self, first: Written) -> None:
        self.previous: Written | None = None
        self.last = first
        self.since = first.read_at
        """When `last.flushed` was first seen."""


class Writes:
    """The writes of all pods, from one sample to the next. Holds two samples of each pod."""

    def __init__(self) -> None:
        self._tracks: dict[str, _Track] = {}

    def note(self, uid: str, written: Written) -> None:
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

    def rates(self) -> list[Rate]:
        """The pods that write, fastest first. Cache that was thrown away unwritten (a deleted file) never makes a rate
        negative."""
        rates = []
        for uid, track in self._tracks.items():
            if track.previous is None:
                continue
            over = track.last.read_at - track.previous.read_at
            grown = track.last.flushed + track.last.pending - track.previous.flushed - track.previous.pending
            if over > 0 and grown > 0:
                rates.append(Rate(uid, grown / over, over))
        return sorted(rates, key=lambda rate: (-rate.bytes_per_s, rate.uid))


def sample(host: Host, writes: Writes, pods: Iterable[tuple[str, str]]) -> str:
    """Notes a sample of each pod, given as (uid, directory of its v2 cgroup). Returns why some have none, or ""."""
    reason = ""
    seen = set()
    for uid, cgroup in pods:
        seen.add(uid)
        try:
            writes.note(uid, read_written(host, cgroup))
        except Unreadable as error:
            reason = reason or str(error)
    writes.keep(frozenset(seen))
    return reason
