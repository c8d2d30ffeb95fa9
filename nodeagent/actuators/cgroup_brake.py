"""Brakes a cgroup (throttle or freeze), releases it, or kills its processes.

A pod that allocates 1 GiB/s is faster than an API request. A brake on its cgroup stops it and can still be released
(docs/performance.md: with either brake, available memory stays above 289 of 300 MiB, without an OOM kill).

Promises:

1. A brake is recorded before it is applied, by its mark or by the caller. `plan_brake` reads what `release` needs and
   changes nothing; `apply` writes; `release` writes the previous value. All three can be repeated. A cgroup that is
   gone is a success: it has no brake.
2. A mark on the cgroup records the brake: `write_xattr` stores what `release` needs in an extended attribute, which
   vanishes with the cgroup; `release` removes it; `read_xattr` finds it when the saved state is lost. The mark counts
   only while the control file still has the value that the brake wrote: a later value of another program is kept.
3. Throttling never kills: at `memory.high` the kernel reclaims the cgroup's own pages and delays it, without an OOM
   killer. It exists on cgroup v2 only. Freezing stops every process of the subtree.
4. `cgroup.kill` (v2, Linux 5.14) is one write, which no fork can outrun. Without it `kill` freezes, signals and thaws:
   on v1 a frozen process dies only then.
"""

import contextlib
import enum
import errno
import os
import signal
from pathlib import Path
from typing import Final, NamedTuple

_SIGNAL_PASSES: Final = 5
"""Times that a subtree is signalled, until no process is left in it. Freezing takes effect a moment after the
write, so a fork between reading and signalling is possible, as it is without a freezer."""

XATTR: Final = "user.nodeagent.brake"
"""`1 KIND PREVIOUS VALUE`. A name in `user.` needs no capability of root, `trusted.` would need CAP_SYS_ADMIN; cgroupfs
stores such names since Linux 5.7, on both versions. A mark takes 8 us, the freeze 140 us."""
_MARK_VERSION: Final = "1"
_LIMIT_DIGITS: Final = 19
"""Of 2**63 - 1; above it the kernel writes `max`."""
_MAX_VALUE_BYTES: Final = 64
"""Longer than any value of a control file."""
_MAX_SHOWN: Final = 60
"""Characters of an unreadable mark, or of a path, in an error message."""


class BrakeKind(enum.StrEnum):
    THROTTLE = "throttle"
    FREEZE = "freeze"


class Brake(NamedTuple):
    """The record of one brake, planned or applied."""

    cgroup: str
    """Below the hierarchy's root, starting with `/`."""
    kind: BrakeKind
    pod_uid: str
    previous: str
    """The value of the control file before."""
    value: str
    """The value that the brake writes."""
    until: float
    """CLOCK_BOOTTIME at which it is released at the latest."""


class BrakeError(Exception):
    """The host refuses this brake; the message has the reason."""


class NoXattrError(BrakeError):
    """This kernel stores no extended attributes on cgroups."""


class CgroupBrake:
    """The brake mechanism of one host.

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
        """True on v1: the freezer delivers a signal, also SIGKILL, only after thawing."""
        return self._unified is None

    @property
    def throttles(self) -> bool:
        """True if this host can throttle: it has cgroup v2."""
        return self._unified is not None

    def freezes_to_kill(self, cgroup: str) -> bool:
        """True if `kill` freezes the cgroup meanwhile."""
        if self._unified is None:
            return self._freezer is not None
        return not (self._unified / cgroup.lstrip("/") / "cgroup.kill").exists()

    def plan_brake(
        self, cgroup: str, kind: BrakeKind, *, pod_uid: str, until: float, limit: int | None = None
    ) -> Brake:
        """The record of a brake, which changes nothing yet. `limit`: throttle at this many bytes, if that is more than
        the cgroup uses now. (A write of less would wait for the reclaim.) Raises BrakeError."""
        previous = _read(self._control(cgroup, kind))
        if kind is BrakeKind.THROTTLE:
            value = _read(f"{self._directory(cgroup, kind)}/memory.current")
            if limit is not None and value.isdigit():
                value = str(max(int(value), limit))
            if previous.isdigit() and value.isdigit():
                value = str(min(int(previous), int(value)))  # never raise a limit that the cgroup exceeds already
        else:
            previous, value = self._thawed_and_frozen  # a freeze of another program ends with this brake
        return Brake(cgroup, kind, pod_uid, previous, value, until)

    def write_xattr(self, brake: Brake) -> bool:
        """Mark the cgroup, before `apply`. False if the kernel stores no marks or the cgroup is gone. Raises
        BrakeError."""
        directory = self._directory(brake.cgroup, brake.kind)
        try:
            os.setxattr(directory, XATTR, f"{_MARK_VERSION} {brake.kind} {brake.previous} {brake.value}".encode())
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.ENOENT):
                raise BrakeError(f"{directory}: {error.strerror}") from error
            return False
        return True

    def read_xattr(self, cgroup: str, *, pod_uid: str, until: float) -> Brake | None:
        """The brake that the cgroup's mark records; None if the mark is missing or the cgroup is gone.

        Raises:
            NoXattrError: the kernel stores none.
            BrakeError: no agent writes such a mark.
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
            if kind == BrakeKind.FREEZE and (previous, value) == self._thawed_and_frozen:
                return Brake(cgroup, BrakeKind.FREEZE, pod_uid, previous, value, until)
            if kind == BrakeKind.THROTTLE and self._unified is not None and _is_limit(previous) and _is_limit(value):
                try:
                    current = _read(f"{directory}/memory.high")
                except BrakeError:
                    return None  # the cgroup is gone
                return Brake(
                    cgroup, BrakeKind.THROTTLE, pod_uid, previous if current == value else current, value, until
                )
        raise BrakeError(f"{directory}: unreadable mark {XATTR}: {text[:_MAX_SHOWN]!r}")

    def frozen(self, cgroup: str, *, pod_uid: str, until: float) -> Brake | None:
        """The brake of a cgroup that is frozen by its own file, not by a parent's; None if it is not frozen or gone."""
        try:
            # v1's freezer.state includes the parents; v2's cgroup.freeze is what was written for this cgroup.
            own_file = "cgroup.freeze" if self._unified is not None else "freezer.self_freezing"
            if _read(f"{self._directory(cgroup, BrakeKind.FREEZE)}/{own_file}") != "1":
                return None
            return self.plan_brake(cgroup, BrakeKind.FREEZE, pod_uid=pod_uid, until=until)
        except BrakeError:
            return None

    def apply(self, brake: Brake) -> bool:
        """Write the brake. False if the cgroup is gone. Raises BrakeError if the kernel refuses."""
        return _write(self._control(brake.cgroup, brake.kind), brake.value)

    def release(self, brake: Brake) -> bool:
        """Write the previous value and remove the mark. False if the cgroup is gone. Raises BrakeError if the kernel
        refuses."""
        exists = _write(self._control(brake.cgroup, brake.kind), brake.previous)
        with contextlib.suppress(OSError):  # none, or it stays and the next start finds it
            os.removexattr(self._directory(brake.cgroup, brake.kind), XATTR)
        return exists

    def kill(self, cgroup: str) -> None:
        """Kill every process in the cgroup and below it. A cgroup that is gone is a success.

        Raises:
            BrakeError: the host has no means, or a process could not be signalled.
        """
        below = cgroup.lstrip("/")
        if self._unified is not None and _write(f"{self._unified}/{below}/cgroup.kill", "1"):
            return
        if self._unified is not None or self._freezer is not None:
            control = Path(self._control(cgroup, BrakeKind.FREEZE))
            if control.exists():
                self._freeze_and_signal(control)
                return
        if self._unified is not None:
            return  # the cgroup is gone
        if not self._procs_roots:
            raise BrakeError("no hierarchy of this host lists a pod's processes")
        for root in self._procs_roots:
            directory = root / below
            if directory.is_dir():
                for _ in range(_SIGNAL_PASSES):
                    if not _signal_all(directory):
                        return
                return

    def _freeze_and_signal(self, control: Path) -> None:
        thawed, frozen = self._thawed_and_frozen
        try:
            for _ in range(_SIGNAL_PASSES):
                _write(str(control), frozen)
                if not _signal_all(control.parent):
                    return
                if self.frozen_cannot_die:
                    _write(str(control), thawed)
        finally:
            _write(str(control), thawed)

    @property
    def _thawed_and_frozen(self) -> tuple[str, str]:
        """The values of the control file of a running and of a frozen cgroup."""
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
        """The control file of this kind of brake."""
        name = "memory.high" if kind is BrakeKind.THROTTLE else "cgroup.freeze" if self._unified else "freezer.state"
        return f"{self._directory(cgroup, kind)}/{name}"


# Plain descriptors, because the pod grows meanwhile: a read through pathlib takes 78 us, one of these 8 to 12.


def _read(path: str) -> str:
    """The value of a control file. Raises BrakeError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(fd, _MAX_VALUE_BYTES).decode("ascii", "replace").strip()
        finally:
            os.close(fd)
    except OSError as error:
        raise BrakeError(f"{path}: {error.strerror}") from error


def _write(path: str, value: str) -> bool:
    """False if the cgroup is gone. Raises BrakeError if the kernel refuses."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, value.encode())
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENODEV):
            return False  # the cgroup is gone (ENODEV: removed while the file was open)
        raise BrakeError(f"{path}: {error.strerror}") from error
    return True


def _is_limit(text: str) -> bool:
    """True if memory.high can have this value."""
    return text == "max" or (text.isascii() and text.isdigit() and len(text) <= _LIMIT_DIGITS)


def _signal_all(directory: Path) -> int:
    """SIGKILL every process in a cgroup directory and below. Returns their number. Raises BrakeError if a process could
    not be signalled, after all others were.

    Level by level instead of `os.walk`, which recurses: a container may nest cgroups without a limit.
    """
    signalled, trouble = 0, ""
    todo = [str(directory)]
    for directory_path in todo:
        try:
            pids = Path(f"{directory_path}/cgroup.procs").read_text("ascii").split()
            with os.scandir(directory_path) as entries:
                todo += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP):
                trouble = trouble or f"{directory_path[:_MAX_SHOWN]}...: {error.strerror}"
            continue  # a child cgroup that was removed meanwhile has no processes
        for pid in map(int, pids):
            if pid == 0:  # v2 lists a process of another PID namespace without its id
                trouble = trouble or f"{directory_path[:_MAX_SHOWN]}...: its processes are outside our PID namespace"
            if pid <= 1:
                continue
            signalled += 1
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            except PermissionError as error:
                raise BrakeError(f"process {pid} of {directory_path}: {error.strerror} (CAP_KILL?)") from error
    if trouble:
        raise BrakeError(trouble)
    return signalled
