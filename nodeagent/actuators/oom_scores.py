"""Raises `oom_score_adj` of the processes of pods that the OOM killer should prefer, and puts it back.

Promises:

1. A score stays in the kubelet's class of the pod: 2 to 999 for Burstable. BestEffort (1000) and Guaranteed (-997) have
   one value each, so nothing is raised there. A process whose score is outside the class of its pod (the sandbox, a
   critical pod, a process that changed its own) is left alone, and no score falls below what the kubelet wrote.
2. A raise is recorded before it is made: `plan` changes nothing upwards, the caller saves `active`, `apply` writes.
3. A score is put back when its pod is no target any more, when the agent stops, and by the next process after a crash
   (`leftover`). A score that another program has changed since is left alone.
4. No call raises an error or waits. What the kernel refuses is one note with the remedy.

Theory of operation. `oom_badness` (mm/oom_kill.c) of a process is its pages plus `oom_score_adj` thousandths of all
pages. The first target gets 999; each later one at most so much that its largest process stays below those before it.
Children inherit the score of their parent, so a scan of the pod's cgroup finds and puts back also what was forked after
a raise. Without CAP_SYS_RESOURCE the kernel remembers the lowest score that a privileged process wrote
(`oom_score_adj_min`), here the container runtime's, and allows everything above: a raise can always be taken back.
"""

import errno
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from nodeagent.model import Note, NoteKind, QOSClass
from nodeagent.policy.oom_preference import OomTarget
from nodeagent.sampling.hostfs import cgroups, parse, processes
from nodeagent.sampling.hostfs.host import Host, Unreadable

LOWEST: Final = 2
HIGHEST: Final = 999
"""The kubelet's range for Burstable pods (qos.GetContainerOOMScoreAdjust)."""
MAX_PROCESSES: Final = 128
"""A pod with more processes is not raised: one of so many is small. Reading one takes 0.1 ms on a busy machine."""
MAX_PUT_BACK: Final = 4096
"""Processes of one pod that are read to put it back, if it has forked since."""
MAX_CGROUPS: Final = 256
REFRESH_S: Final = 1.0
"""How often the pods are scanned for new processes, and how soon other pods are raised. A fork inherits the score; a
container that restarts does not."""
VALUES_S: Final = 10.0
"""How often the scores are computed again for the same pods. It reads all their processes, not the new ones alone."""
RETRY_S: Final = 30.0
"""As `REFRESH_S`, after the kernel has refused a write."""
_PASSES: Final = 3
"""Scans of a pod that is put back: a process may fork between the scan and the write."""
_STAT_BYTES: Final = 1024
"""Longer than /proc/PID/stat."""
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


class RaisedScore(NamedTuple):
    """One process whose score is raised, or is about to be."""

    pod_uid: str
    cgroup: str
    """Of the pod."""
    container: str
    """Name of the container's cgroup below it."""
    pid: int
    started: int
    """Field 22 of /proc/PID/stat. With the PID it names one process."""
    previous: int
    value: int
    """The raised score; the same for all processes of the pod."""


class _Process(NamedTuple):
    container: str
    pid: int
    started: int
    score: int
    rss: int
    """Bytes."""


class _Stat(NamedTuple):
    started: int
    rss: int
    """Bytes."""


class OomScores:
    """All raised scores of one agent."""

    def __init__(self, host: Host, leftover: Iterable[RaisedScore] = ()) -> None:
        """`leftover`: the scores of an earlier process, which `put_back_leftover` puts back."""
        self._host = host
        self._raised = {each.pid: each for each in leftover}
        """By PID."""
        self._left = bool(self._raised)
        self._unwritten: list[RaisedScore] = []
        self._values: dict[str, int] = {}
        """The score of each pod that can be raised, for the targets in `_order`."""
        self._order: tuple[OomTarget, ...] = ()
        self._planned_at = self._valued_at = float("-inf")
        self._root: str | None = None
        self._trouble = ""
        """Why something is not raised or not put back."""
        self._notes: list[Note] = []

    @property
    def active(self) -> tuple[RaisedScore, ...]:
        """Every score that is raised or planned, for the saved state."""
        return tuple(self._raised.values())

    @property
    def pods(self) -> int:
        """Number of pods with a raised score."""
        return len({each.pod_uid for each in tuple(self._raised.values()) if each.previous < each.value})

    @property
    def notes(self) -> tuple[Note, ...]:
        """Why something is not raised or not put back, as long as that is so."""
        return (Note(NoteKind.OOM_SCORES, self._trouble),) if self._trouble else ()

    def take_notes(self) -> tuple[Note, ...]:
        """What was raised since the last call, and `notes`."""
        raised, self._notes = tuple(self._notes), []
        return (*raised, *self.notes)

    def put_back_leftover(self) -> None:
        """Put back what an earlier process raised, until that succeeded."""
        if self._left:
            self._left = not self.close()

    def close(self) -> bool:
        """Put back everything. False if something could not be."""
        self._unwritten, self._order = [], ()
        return self._put_back_others({})

    def plan(self, targets: Sequence[OomTarget], *, node_bytes: int | None, now: float, acts: bool) -> bool:
        """Put back the pods that are no targets any more, and plan the raises of the others. True if there is something
        for `apply`, so that `active` must be saved. `node_bytes`: the memory of the node. Without `acts` (a dry run)
        nothing but notes follows."""
        if not targets or not node_bytes:
            if self.close():
                self._trouble = ""
            return False
        if not acts:
            self._put_back_others({})
        if now - self._planned_at < (RETRY_S if self._trouble else REFRESH_S):
            return False
        self._planned_at = now
        listed = {target.pod_uid: self._list(target.cgroup) for target in targets}
        if tuple(targets) != self._order or now - self._valued_at >= VALUES_S:
            self._order, self._valued_at = tuple(targets), now
            found = {uid: self._read_all(pids) for uid, pids in listed.items()}
            self._values = _values(targets, found, node_bytes=node_bytes, previous=self._previous)
            self._put_back_others(self._values)
        planned = [each for target in targets for each in self._plan_pod(target, listed[target.pod_uid])]
        if not acts:
            self._describe("would raise", planned)
            return False
        self._unwritten = [each for each in planned if each.previous < each.value]
        if self._unwritten:
            self._raised.update({each.pid: each for each in planned})
        return bool(self._unwritten)

    def apply(self, *, saved: bool) -> None:
        """Write the planned raises, if the plan is `saved`."""
        unwritten, self._unwritten = self._unwritten, []
        self._trouble = "" if saved else "not raised: the state is not saved, and no restart could put the scores back"
        written = [each for each in unwritten if saved and self._write(each.pid, each.started, each.value)]
        for each in frozenset(unwritten).difference(written):
            self._raised.pop(each.pid, None)
        self._describe("raised", written)

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _plan_pod(self, target: OomTarget, listed: Sequence[tuple[str, int]]) -> list[RaisedScore]:
        """The new records of a pod, also of the processes that have the score already: they keep it."""
        value = self._values.get(target.pod_uid)
        mine = [each for each in self.active if each.pod_uid == target.pod_uid]
        if value is None or any(each.value != value for each in mine):
            return []  # in the second case the score before could not be put back
        inherited, alive = _inherited(mine), {pid for _, pid in listed}
        for each in mine if listed else ():
            if each.pid not in alive:
                del self._raised[each.pid]
        return [
            RaisedScore(
                target.pod_uid,
                target.cgroup,
                each.container,
                each.pid,
                each.started,
                inherited.get(each.container, each.score) if each.score == value else each.score,
                value,
            )
            for each in self._read_all([(name, pid) for name, pid in listed if pid not in self._raised])
            if LOWEST <= each.score <= value
        ]

    def _record(self, process: _Process) -> RaisedScore | None:
        known = self._raised.get(process.pid)
        return known if known is not None and known.started == process.started else None

    def _previous(self, process: _Process) -> int:
        """The score of the process without a raise."""
        known = self._record(process)
        return known.previous if known is not None and known.value == process.score else process.score

    def _score_before(self, process: _Process, inherited: Mapping[str, int]) -> int | None:
        """The score of a raised process without the raise; None if nothing of its container was raised."""
        known = self._record(process)
        return known.previous if known is not None else inherited.get(process.container)

    def _put_back_others(self, keep: Mapping[str, int]) -> bool:
        """Put back the pods that are not raised to these scores. False if something could not be put back."""
        others = {each.pod_uid: each for each in self.active if keep.get(each.pod_uid) != each.value}
        refused = [each for each in others.values() if not self._put_back(each)]
        return not refused

    def _put_back(self, one: RaisedScore) -> bool:
        """Put back the pod of this record. False if the kernel refused it: it stays recorded and is tried again."""
        records = [each for each in self.active if each.pod_uid == one.pod_uid]
        inherited = _inherited(records)
        recorded = [(each.container, each.pid) for each in records]
        """Of a pod whose processes cannot be listed."""
        for _ in range(_PASSES):
            writes = [
                (each, previous)
                for each in self._read_all(self._list(one.cgroup, most=MAX_PUT_BACK) or recorded)
                if each.score == one.value
                and (previous := self._score_before(each, inherited)) is not None
                and previous < one.value
            ]
            refused = [each for each, previous in writes if not self._write(each.pid, each.started, previous)]
            if refused:
                return False
            if not writes:
                break
        for each in records:
            self._raised.pop(each.pid, None)
        return True

    def _describe(self, what: str, raised: Sequence[RaisedScore]) -> None:
        for target in self._order:
            mine = [each for each in raised if each.pod_uid == target.pod_uid and each.previous < each.value]
            if mine:
                text = f"{what} oom_score_adj from {min(each.previous for each in mine)} to {mine[0].value}"
                self._notes.append(Note(NoteKind.OOM_SCORES, text, target.pod))

    # --- /proc and cgroups -------------------------------------------------------------------------------------------

    def _list(self, cgroup: str, *, most: int = MAX_PROCESSES) -> list[tuple[str, int]]:
        """(container, PID) of the processes of a pod; none if its cgroup is gone, or if they are more than `most`."""
        if self._root is None:
            self._root = cgroups.detect_hierarchy(self._host).memory
        if self._root is None or ".." in cgroup.split("/"):
            return []
        directory = f"{self._root}/{cgroup.lstrip('/')}"
        try:
            containers = sorted([name for name, _ in self._host.subdirectories(directory)])
        except Unreadable:
            return []
        listed: list[tuple[str, int]] = []
        for name in containers:
            below = processes.processes_below(self._host, f"{directory}/{name}", max_cgroups=MAX_CGROUPS)
            listed += [(name, pid) for pid in below.pids]
        return listed if len(listed) <= most else []

    def _read_all(self, listed: Iterable[tuple[str, int]]) -> list[_Process]:
        """Those that have not ended."""
        return [process for name, pid in listed if (process := self._read(name, pid)) is not None]

    def _read(self, container: str, pid: int) -> _Process | None:
        """None if it has ended."""
        try:
            score = int(self._host.read(f"/proc/{pid}/oom_score_adj"))
        except (Unreadable, ValueError):
            return None
        stat = _stat(self._host.real(f"/proc/{pid}/stat"))
        return None if stat is None else _Process(container, pid, stat.started, score, stat.rss)

    def _write(self, pid: int, started: int, score: int) -> bool:
        """False if the kernel refuses it; a process that has ended is a success."""
        path = self._host.real(f"/proc/{pid}")
        try:
            if _has_started_at(path, started):
                _write_score(path, score)
        except OSError as error:
            if error.errno == errno.EROFS and self._write_by_own_proc(pid, started, score):
                return True
            if error.errno in (errno.ENOENT, errno.ESRCH):
                return True
            self._trouble = f"oom_score_adj cannot be written: {error.strerror} ({_remedy(error.errno)})"
            return False
        return True

    def _write_by_own_proc(self, pid: int, started: int, score: int) -> bool:
        """The host's /proc may be mounted read-only beside the own one, which with `hostPID` has the same processes."""
        own = f"/proc/{pid}"
        try:
            if not _has_started_at(own, started):
                return False
            _write_score(own, score)
        except OSError:
            return False
        return True


def _inherited(records: Sequence[RaisedScore]) -> dict[str, int]:
    """What a child of a raised process would have without the raise, by container."""
    return {each.container: each.previous for each in reversed(records)}


def _values(
    targets: Sequence[OomTarget],
    scans: Mapping[str, Sequence[_Process]],
    *,
    node_bytes: int,
    previous: Callable[[_Process], int],
) -> dict[str, int]:
    """The score of each pod that can be raised, so that the kernel prefers them in this order."""
    values: dict[str, int] = {}
    ceiling: int | None = None
    """The kernel's badness of the pods so far, in thousandths of the node's memory."""
    for target in targets:
        found = [(each, previous(each)) for each in scans[target.pod_uid]]
        found = [(each, score) for each, score in found if score >= LOWEST]
        if not found:
            continue
        value = LOWEST
        if target.qos_class is QOSClass.BURSTABLE:
            largest = max(each.rss for each, _ in found) * 1000 // node_bytes
            value = HIGHEST if ceiling is None else min(HIGHEST, ceiling - 1 - largest)
            if any(score < value for _, score in found):
                values[target.pod_uid] = value
        badness = max(each.rss * 1000 // node_bytes + max(score, value) for each, score in found)
        ceiling = badness if ceiling is None else min(ceiling, badness)
    return values


def _write_score(process: str, score: int) -> None:
    fd = os.open(f"{process}/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, b"%d" % score)
    finally:
        os.close(fd)


def _stat(path: str) -> _Stat | None:
    """None if the process has ended."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fields = os.read(fd, _STAT_BYTES).rpartition(b")")[2].split()
        finally:
            os.close(fd)
    except OSError:
        return None
    # Fields 22 (starttime) and 24 (rss) of proc(5); the command before them may contain any character.
    started = parse.parse_count(fields[19]) if len(fields) > 21 else None
    return None if started is None else _Stat(started, (parse.parse_count(fields[21]) or 0) * _PAGE)


def _has_started_at(process: str, started: int) -> bool:
    """False if the process has ended, or is another one."""
    stat = _stat(f"{process}/stat")
    return stat is not None and stat.started == started


def _remedy(number: int | None) -> str:
    if number == errno.EROFS:
        return "mount the host's /proc writable, or run with hostPID"
    return "CAP_DAC_OVERRIDE is missing: docs/escalation.md#the-order-of-the-oom-killer"
