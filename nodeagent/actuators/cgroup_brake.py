"""Holds a cgroup in place, lets it go, or ends it.

A pod that allocates 1 GiB/s outruns an API request. Held by its cgroup it cannot, and can still be let go (MEASURED.md
section 6: available memory never below 289 of 300 MiB, and no OOM kill, with either brake).

Promises:

1. A hold is written down before it is applied, by its `mark` or by the caller: `plan_hold` reads what `release` needs
   and changes nothing; `apply` changes; `release` puts back exactly what was there. All three can be repeated, and a
   cgroup that is gone is a success: nothing is held.
2. What is held says so itself: `mark` writes what `release` needs on the cgroup, as an extended attribute that vanishes
   with it, `release` takes it away, and `marked` finds it when nothing else is left. It says something only while the
   control file still says what holding wrote: what somebody else has set since is not overwritten.
3. Throttling never kills: `memory.high` makes a cgroup reclaim its own pages and wait, it has no OOM killer. It exists
   on cgroup v2 only. Freezing stops every process of the subtree.
4. On v1 a frozen process does not die until it is thawed, so `kill` freezes, signals and thaws; on v2 `cgroup.kill` is
   one write which no fork can outrun.
"""

import contextlib
import enum
import errno
import os
import signal
from pathlib import Path
from typing import Final, NamedTuple

_PROCS_ROUNDS: Final = 5
"""Times that a v1 subtree is signalled, until nobody is left in it. Freezing takes effect a moment after it was
written, so that a fork may slip through between reading and signalling, as it may where the freezer is missing."""

XATTR: Final = "user.nodeagent.brake"
"""`1 KIND PREVIOUS VALUE`. A name in `user.` needs no capability of root, `trusted.` would need CAP_SYS_ADMIN; cgroupfs
keeps such names since Linux 5.7, on both versions. To write one takes 8 us, beside 140 us for the freeze."""
_MARK_VERSION: Final = "1"
_LIMIT_DIGITS: Final = 19
"""Of 2**63 - 1, beyond which the kernel says `max`."""
_WORD: Final = 64
"""Bytes: longer than anything that a control file says."""
_SHOWN: Final = 60
"""Characters of a mark that is not understood, in what is said about it."""


class BrakeKind(enum.StrEnum):
    THROTTLE = "throttle"
    FREEZE = "freeze"


class Brake(NamedTuple):
    """One cgroup that is, or is about to be, held."""

    cgroup: str
    """Below the hierarchy's root, starting with `/`."""
    kind: BrakeKind
    pod_uid: str
    previous: str
    """What the control file said before."""
    value: str
    """What holding writes."""
    until: float
    """CLOCK_BOOTTIME: released then at the latest."""


class BrakeError(Exception):
    """This host cannot brake that way; the message says why."""


class NoXattrError(BrakeError):
    """This kernel keeps no marks on cgroups."""


class CgroupBrake:
    """Brakes on one host.

    Args:
        unified: where cgroup v2 with the memory controller is mounted, or None.
        freezer: where the v1 freezer controller is mounted, or None.
        procs_roots: v1 hierarchies that list a pod's processes, tried in order by `kill` without a freezer.
    """

    def __init__(self, *, unified: Path | None, freezer: Path | None, procs_roots: tuple[Path, ...] = ()) -> None:
        self._unified = unified
        self._freezer = freezer
        self._procs_roots = procs_roots

    @property
    def frozen_cannot_die(self) -> bool:
        """The v1 freezer: a signal, SIGKILL too, is delivered only after thawing."""
        return self._unified is None

    @property
    def freezes_to_kill(self) -> bool:
        """`kill` freezes the cgroup for as long as it takes."""
        return self._unified is None and self._freezer is not None

    @property
    def throttles(self) -> bool:
        """This host can throttle: it has cgroup v2."""
        return self._unified is not None

    def plan_brake(
        self, cgroup: str, kind: BrakeKind, *, pod_uid: str, until: float, limit: int | None = None
    ) -> Brake:
        """What holding this cgroup would change. Raises HoldError; changes nothing. `limit`: throttle it at so many
        bytes, if that is more than what it uses now. (Less would make whoever writes it wait for the reclaim.)"""
        previous = _read(self._control(cgroup, kind))
        if kind is BrakeKind.THROTTLE:
            value = _read(f"{self._directory(cgroup, kind)}/memory.current")
            if limit is not None and value.isdigit():
                value = str(max(int(value), limit))
            if previous.isdigit() and value.isdigit():
                value = str(min(int(previous), int(value)))  # one that is over its limit already is not given more
        else:
            previous, value = self._freezing  # a freeze that somebody else made is not ours to keep
        return Brake(cgroup, kind, pod_uid, previous, value, until)

    def write_xattr(self, hold: Brake) -> bool:
        """Say on the cgroup itself that it is held, before `apply`. False where the kernel keeps no marks, or the
        cgroup is gone. Raises HoldError."""
        directory = self._directory(hold.cgroup, hold.kind)
        try:
            os.setxattr(directory, XATTR, f"{_MARK_VERSION} {hold.kind} {hold.previous} {hold.value}".encode())
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.ENOENT):
                raise BrakeError(f"{directory}: {error.strerror}") from error
            return False
        return True

    def read_xattr(self, cgroup: str, *, pod_uid: str, until: float) -> Brake | None:
        """The hold that this cgroup's mark tells of; None where there is no mark, or no cgroup any more.

        Raises:
            NoMarksError: the kernel keeps none.
            HoldError: the mark says what no agent writes.
        """
        if self._unified is None and self._freezer is None:
            return None
        directory = self._directory(cgroup, BrakeKind.FREEZE)
        try:
            text = os.getxattr(directory, XATTR).decode("ascii", "replace")
        except OSError as error:
            if error.errno in (errno.ENODATA, errno.ENOENT):
                return None
            if error.errno == errno.ENOTSUP:
                raise NoXattrError(f"{directory}: {error.strerror}") from error
            raise BrakeError(f"{directory}: {error.strerror}") from error
        version, kind, previous, value = text.split(" ") if text.count(" ") == 3 else ("", "", "", "")
        if version == _MARK_VERSION:
            if kind == BrakeKind.FREEZE and (previous, value) == self._freezing:
                return Brake(cgroup, BrakeKind.FREEZE, pod_uid, previous, value, until)
            if kind == BrakeKind.THROTTLE and self._unified is not None and _is_limit(previous) and _is_limit(value):
                try:
                    now = _read(f"{directory}/memory.high")
                except BrakeError:
                    return None  # it went meanwhile
                return Brake(cgroup, BrakeKind.THROTTLE, pod_uid, previous if now == value else now, value, until)
        raise BrakeError(f"{directory}: its mark {XATTR} says {text[:_SHOWN]!r}, which this agent does not write")

    def frozen(self, cgroup: str, *, pod_uid: str, until: float) -> Brake | None:
        """The hold that has this cgroup frozen by its own file, not by a parent's; None when it is not, or is gone."""
        try:
            # v1's freezer.state is that of the parents as well; v2's cgroup.freeze is the wish for this one.
            itself = "cgroup.freeze" if self._unified is not None else "freezer.self_freezing"
            if _read(f"{self._directory(cgroup, BrakeKind.FREEZE)}/{itself}") != "1":
                return None
            return self.plan_brake(cgroup, BrakeKind.FREEZE, pod_uid=pod_uid, until=until)
        except BrakeError:
            return None

    def apply(self, hold: Brake) -> bool:
        """Hold the cgroup. False when it is gone. Raises HoldError when the kernel refuses."""
        return _write(self._control(hold.cgroup, hold.kind), hold.value)

    def release(self, hold: Brake) -> bool:
        """Let the cgroup go and take its mark away. False when it is gone. Raises HoldError when the kernel refuses."""
        there = _write(self._control(hold.cgroup, hold.kind), hold.previous)
        with contextlib.suppress(OSError):  # there was none; or it stays, for a next start to find
            os.removexattr(self._directory(hold.cgroup, hold.kind), XATTR)
        return there

    def kill(self, cgroup: str) -> None:
        """End every process in the cgroup and below it. A cgroup that is gone is a success.

        Raises:
            HoldError: there is no way to do it here.
        """
        if self._unified is not None:
            _write(f"{self._unified}/{cgroup.lstrip('/')}/cgroup.kill", "1")
            return
        frozen = self._freezer / cgroup.lstrip("/") / "freezer.state" if self._freezer is not None else None
        if frozen is not None and frozen.exists():
            for _ in range(_PROCS_ROUNDS):
                _write(str(frozen), "FROZEN")
                try:
                    number = _signal_all(frozen.parent)
                finally:
                    _write(str(frozen), "THAWED")
                if not number:
                    return
            return
        if not self._procs_roots:
            raise BrakeError("no hierarchy of this host lists a pod's processes")
        for root in self._procs_roots:
            directory = root / cgroup.lstrip("/")
            if directory.is_dir():
                for _ in range(_PROCS_ROUNDS):
                    if not _signal_all(directory):
                        return
                return

    @property
    def _freezing(self) -> tuple[str, str]:
        """What the control file says of a cgroup that runs, and of one that is held."""
        return ("THAWED", "FROZEN") if self._unified is None else ("0", "1")

    def _directory(self, cgroup: str, kind: BrakeKind) -> str:
        below = cgroup.lstrip("/")
        if not below or ".." in below.split("/"):
            raise BrakeError(f"{cgroup!r} is not a pod's cgroup")
        if self._unified is not None:
            return f"{self._unified}/{below}"
        if kind is BrakeKind.THROTTLE:
            raise BrakeError("cgroup v1 has no memory.high: use `brake: freeze`")
        if self._freezer is None:
            raise BrakeError("this host has no freezer controller")
        return f"{self._freezer}/{below}"

    def _control(self, cgroup: str, kind: BrakeKind) -> str:
        """The file that holds and lets go."""
        name = "memory.high" if kind is BrakeKind.THROTTLE else "cgroup.freeze" if self._unified else "freezer.state"
        return f"{self._directory(cgroup, kind)}/{name}"


# Plain descriptors, as a ramp goes on meanwhile: a read through pathlib takes 78 us, one of these 8 to 12.


def _read(path: str) -> str:
    """The one word that a control file says. Raises HoldError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(fd, _WORD).decode("ascii", "replace").strip()
        finally:
            os.close(fd)
    except OSError as error:
        raise BrakeError(f"{path}: {error.strerror}") from error


def _write(path: str, value: str) -> bool:
    """False when the cgroup is gone. Raises HoldError when the kernel refuses."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, value.encode())
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENODEV):
            return False  # the cgroup is gone (ENODEV: it went while the file was open)
        raise BrakeError(f"{path}: {error.strerror}") from error
    return True


def _is_limit(text: str) -> bool:
    """Whether memory.high can say this."""
    return text == "max" or (text.isascii() and text.isdigit() and len(text) <= _LIMIT_DIGITS)


def _signal_all(directory: Path) -> int:
    """SIGKILL every process in a cgroup directory and below. Returns how many were there. Raises HoldError when some
    could not be reached, after all others were.

    Level by level and not by `os.walk`, which recurses: a container may nest cgroups as deep as it likes.
    """
    number, trouble = 0, ""
    todo = [str(directory)]
    for place in todo:
        try:
            pids = Path(f"{place}/cgroup.procs").read_text("ascii").split()
            with os.scandir(place) as entries:
                todo += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP):
                trouble = trouble or f"{place[:_SHOWN]}...: {error.strerror}"
            continue  # a child cgroup that went while we walked has no processes
        for pid in map(int, pids):
            if pid <= 1:
                continue  # 0: a process of another PID namespace that we cannot name; 1: never
            number += 1
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            except PermissionError as error:
                raise BrakeError(f"process {pid} of {place}: {error.strerror} (CAP_KILL?)") from error
    if trouble:
        raise BrakeError(trouble)
    return number
