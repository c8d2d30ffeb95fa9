"""Reclaims page cache of pods through `memory.reclaim` of their cgroups (cgroup v2, Linux 5.19).

Promises:

1. Only the pods of the order, in its order, and at most its amount of each. A pod's usage is read before each step, and
   no step takes it below what the order keeps.
2. No anonymous memory is swapped out. From Linux 6.9 the kernel is told to leave it (`swappiness=0`). Before, a pod
   that can use swap is left out, and one whose swap grows is left alone.
3. It ends when the signal reaches the order's level, at the deadline, and when the agent stops. It leaves a pod that
   stalls: at more than `STALL_US` of `memory.pressure` in `WINDOW_S`.
4. No call waits for it: it runs in a thread of `reclaim_runner`. A step is at most `MAX_STEP`, because the kernel may
   block a write to `memory.reclaim` until pages are written back.
5. It never raises. A pod that is gone is left out. A kernel that refuses the write is one failed result.

Theory of operation. Reclaim of a cgroup first moves pages from its active to its inactive list, which already raises
the kubelet's figure, and drops inactive pages. On Linux 6.1 32 MiB raised it by 30 to 190 MiB. So the level is read
again after each step, and the amounts are only limits. The kernel may reclaim more than a step (`OVERSHOOT`).
"""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from nodeagent.actuators.reclaim_runner import JobResult, ReclaimJob
from nodeagent.model import ReclaimOrder, ReclaimResult, ReclaimTarget, units
from nodeagent.sampling.hostfs import parse
from nodeagent.sampling.node import psi

MIN_STEP: Final = 16 << 20
MAX_STEP: Final = 64 << 20
"""A step begins small and doubles while it takes less than `FAST_S`."""
FAST_S: Final = 0.05
"""A step of 32 MiB took 0.02 to 0.3 s in an emulated machine, and takes a tenth of that on hardware."""
STALL_US: Final = 1000
WINDOW_S: Final = 5.0
"""Senpai's mark (facebookincubator/senpai): memory that is reclaimed until its owner stalls 1 ms in 5 s was not
needed."""
OVERSHOOT: Final = 2
"""How many times a step the kernel may reclaim: each cgroup below the pod's, and each of its lists, is scanned for the
whole step. Steps of 32 MiB dropped up to 61 MiB on Linux 6.1."""
_LEAST: Final = 1 << 20
"""A smaller step is not worth a write."""
_MAX_BYTES: Final = 8192
"""Of a control file; memory.stat has 1.7 KiB."""
_SWAP_FREE: Final = b"\nSwapFree:"


class Paths(NamedTuple):
    """Where the kernel's files are on this machine."""

    cgroups: Path
    """The root of cgroup v2."""
    meminfo: Path


class _PodEnd(NamedTuple):
    """What was reclaimed from one pod."""

    pod: str
    reclaimed: int
    why: str
    """Why no more was reclaimed; empty if the job ended."""


class _RefusedError(Exception):
    """The kernel does not allow it for any pod."""


def build_job(
    order: ReclaimOrder, paths: Paths, *, figure: Callable[[], int | None], stop: Callable[[], bool] = lambda: False
) -> ReclaimJob:
    """The job of an order. `figure` reads its signal by the working set, from any thread. `stop` returns True if the
    job must end early."""
    return lambda until: _Job(order, paths, figure, stop, until).run()


class _Job:
    """One run. Used by one thread."""

    def __init__(
        self,
        order: ReclaimOrder,
        paths: Paths,
        figure: Callable[[], int | None],
        stop: Callable[[], bool],
        until: float,
    ) -> None:
        self._order = order
        self._paths = paths
        self._figure = figure
        self._stop = stop
        self._until = until
        self._argument = " swappiness=0"
        """Empty after a kernel has refused it."""
        self._ended: ReclaimResult | None = None
        self._available: int | None = order.available

    def run(self) -> JobResult:
        pods: list[_PodEnd] = []
        try:
            for target in self._order.targets:
                pods.append(self._reclaim(target))
                if self._ended is not None:
                    break
        except _RefusedError as refused:
            return self._result(ReclaimResult.FAILED, pods, str(refused))
        return self._result(self._ended or ReclaimResult.STOPPED, pods, "")

    def _result(self, result: ReclaimResult, pods: list[_PodEnd], trouble: str) -> JobResult:
        total = sum(each.reclaimed for each in pods)
        parts = [
            f"{each.pod} {units.format_amount(each.reclaimed)}" + (f" ({each.why})" if each.why else "")
            for each in pods
            if each.reclaimed or each.why
        ]
        text = f"reclaimed {units.format_amount(total)} of page cache"
        if parts:
            text += f": {', '.join(parts)}"
        if self._available is not None and self._order.level is not None:
            now, level = units.format_amount(self._available), units.format_amount(self._order.level)
            text += f"; {self._order.signal.value} by the working set is {now}, the reclaim ends at {level}"
        return JobResult(result, trouble or text, total)

    def _reclaim(self, target: ReclaimTarget) -> _PodEnd:
        """Reclaim from one pod until it has no more, or the job ends."""
        directory = self._paths.cgroups / target.cgroup.lstrip("/")
        if ".." in directory.parts:
            return _PodEnd(target.pod, 0, "not a cgroup of a pod")
        began, stalled, swap = time.monotonic(), _stall_us(directory), _number(directory / "memory.swap.current")
        reclaimed, step = 0, MIN_STEP
        while not self._has_ended():
            used = _number(directory / "memory.current")
            if used is None:
                return _PodEnd(target.pod, reclaimed, "gone")
            left = min(target.amount - reclaimed, (used - target.keep) // OVERSHOOT)
            if left < _LEAST:
                return _PodEnd(target.pod, reclaimed, "")
            if not self._argument and _can_swap(directory, self._paths.meminfo):
                return _PodEnd(target.pod, reclaimed, "could be swapped out")
            amount = min(step, left)
            step_began = time.monotonic()
            freed, more = self._write(directory, amount)
            reclaimed += freed
            if not more:
                return _PodEnd(target.pod, reclaimed, "no more to reclaim")
            now = time.monotonic()
            if (_number(directory / "memory.swap.current") or 0) > (swap or 0):
                return _PodEnd(target.pod, reclaimed, "its swap grew")
            since = _stall_us(directory) - stalled
            if since > STALL_US * max(1.0, (now - began) / WINDOW_S):
                self._read_level()
                return _PodEnd(target.pod, reclaimed, f"it stalled {since / 1000:.1f}ms")
            step = min(MAX_STEP, step * 2) if now - step_began < FAST_S else max(MIN_STEP, step // 2)
        return _PodEnd(target.pod, reclaimed, "")

    def _has_ended(self) -> bool:
        """True if no more is to be reclaimed from any pod."""
        if self._ended is not None:
            return True
        if self._read_level():
            self._ended = ReclaimResult.DONE
        elif self._available is None or self._stop():
            self._ended = ReclaimResult.STOPPED
        elif time.monotonic() >= self._until:
            self._ended = ReclaimResult.TIMED_OUT
        return self._ended is not None

    def _read_level(self) -> bool:
        """Read the signal; True if it has reached the level."""
        self._available = self._figure()
        level = self._order.level
        return self._available is not None and level is not None and self._available >= level

    def _write(self, directory: Path, amount: int) -> tuple[int, bool]:
        """(bytes reclaimed, whether there may be more). Raises _RefusedError."""
        path = directory / "memory.reclaim"
        before = _file_pages(directory)
        try:
            _write_text(path, f"{amount}{self._argument}")
        except OSError as error:
            if error.errno == errno.EINVAL and self._argument:
                self._argument = ""
                return 0, True
            if error.errno in (errno.EAGAIN, errno.EINTR):  # it reclaimed less than that
                return max(0, before - _file_pages(directory)), False
            if error.errno in (errno.ENOENT, errno.ENODEV) and not directory.exists():
                return 0, False
            raise _RefusedError(f"{path}: {error.strerror}") from error
        return max(amount, before - _file_pages(directory)), True


# --- the kernel's files ----------------------------------------------------------------------------------------------


def _can_swap(directory: Path, meminfo: Path) -> bool:
    """True unless it is known that no page of the pod can go to swap. A kubelet forbids swap for each container
    (memory.swap.max 0) unless the node's swapBehavior allows it."""
    data = _read(meminfo)
    start = data.find(_SWAP_FREE)
    if start >= 0 and data[start + len(_SWAP_FREE) :].split(None, 1)[:1] == [b"0"]:
        return False
    if _read(directory / "memory.swap.max").strip() == b"0":
        return False
    try:
        containers = [each for each in directory.iterdir() if each.is_dir()]
    except OSError:
        return True
    return not containers or any(_read(each / "memory.swap.max").strip() != b"0" for each in containers)


def _file_pages(directory: Path) -> int:
    keys = parse.line_starts("active_file", "inactive_file")
    return sum(number or 0 for number in parse.parse_keyed(_read(directory / "memory.stat"), keys))


def _stall_us(directory: Path) -> int:
    """The total of `some`; 0 without PSI."""
    some, _ = psi.parse_psi(_read(directory / "memory.pressure"))
    return some.total_us if some is not None else 0


def _number(path: Path) -> int | None:
    return parse.parse_count(_read(path))


def _read(path: Path) -> bytes:
    """Empty if it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(fd, _MAX_BYTES)
        finally:
            os.close(fd)
    except OSError:
        return b""


def _write_text(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
