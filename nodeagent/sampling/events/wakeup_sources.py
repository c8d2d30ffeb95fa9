"""Opens all wake-up sources of a host, and moves its memcg thresholds to the next eviction threshold.

Promises:

1. One note reports a facility that the host lacks. The loop then depends on its timer alone, which is sufficient.
2. `sources` changes only in `open`. The loop registers the new ones and unregisters the closed ones.
3. `arm` moves the memcg thresholds of cgroup v1. It has no cost without a move, and it never waits: a thread of its own
   waits 13 to 32 ms for the kernel, for one move after the other.
"""

import errno
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Final

from nodeagent.model import Note, NoteKind, Signal
from nodeagent.runtime import workers
from nodeagent.sampling.events import kernel_events
from nodeagent.sampling.events.kernel_events import CgroupTreeWatch, EventSource, MemcgThreshold
from nodeagent.sampling.hostfs import cgroups
from nodeagent.sampling.hostfs.cgroup_memory import MemoryV1
from nodeagent.sampling.hostfs.cgroups import Hierarchy, Kubepods
from nodeagent.sampling.hostfs.host import Host, Unreadable

_EVENT_FILES = ("memory.events", "cgroup.events")
_PRESSURE: Final = "/proc/pressure/memory"
_BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"
ARMING_TIMEOUT_S: Final = 2.0
"""A longer move is reported as stuck, and `close` does not wait longer. The longest one measured took 0.03 s."""


class WakeupSources:
    """The wake-up sources of one host."""

    def __init__(self, host: Host, *, own: Host | None = None) -> None:
        """`own` is the root that this process itself sees, which is not the host's in a container; None is `/`."""
        self._host = host
        self._own = own or Host()
        self._opened: tuple[Hierarchy, Kubepods | None] | None = None
        self._thresholds: dict[Signal, MemcgThreshold] = {}
        self._armer: _ThresholdArmer | None = None
        self.sources: tuple[EventSource, ...] = ()
        self.notes: tuple[Note, ...] = ()

    def stale(self, hierarchy: Hierarchy, kubepods: Kubepods | None) -> bool:
        """True if the open sources belong to other cgroups than these."""
        return self._opened != (hierarchy, kubepods)

    def open(self, hierarchy: Hierarchy, kubepods: Kubepods | None) -> None:
        """Open the sources for these cgroups; close the earlier ones."""
        self.close()
        self._opened = (hierarchy, kubepods)
        if self._host.recorded:
            self.notes = (Note(NoteKind.WAKE_UPS, "no wake-ups: recorded node"),)
            return
        sources: list[EventSource] = []
        notes: list[Note] = []
        for found in (*self._pressure(hierarchy, kubepods), *self._memcg_thresholds(hierarchy, kubepods),
                      *self._trees(hierarchy, kubepods)):  # fmt: skip
            if isinstance(found, EventSource):
                sources.append(found)
            else:
                notes.append(found)
        self.sources, self.notes = tuple(sources), tuple(notes)

    def arm(self, headroom: Mapping[Signal, int]) -> None:
        """Arm the memcg thresholds. `headroom`: bytes to the next eviction threshold of each memory signal.

        If a cgroup is gone, all sources are `stale`. After any other failure no threshold is armed again, and a note
        has the reason."""
        thresholds = [
            (threshold, headroom[signal]) for signal, threshold in self._thresholds.items() if signal in headroom
        ]
        if not thresholds:
            return
        self._armer = self._armer or _ThresholdArmer()
        try:
            self._armer.arm(thresholds)
        except OSError as error:
            if error.errno == errno.ENODEV:
                self._opened = None
            else:
                self._thresholds = {}
                self.notes += (Note(NoteKind.WAKE_UPS, f"memcg thresholds cannot be armed: {error.strerror}"),)

    def close(self) -> None:
        """Close every source."""
        if self._armer is not None:
            self._armer.close()
            self._armer = None
        for source in self.sources:
            source.close()
        self.sources, self._thresholds, self._opened = (), {}, None

    def _pressure(self, hierarchy: Hierarchy, kubepods: Kubepods | None) -> list[EventSource | Note]:
        found = [kernel_events.psi_trigger(*self._node_pressure())]
        if hierarchy.unified is not None and hierarchy.memory == hierarchy.unified and kubepods is not None:
            pods = f"{hierarchy.unified}{kubepods.path}/memory.pressure"
            found.append(kernel_events.psi_trigger(self._host.real(pods)))
        return found

    def _node_pressure(self) -> tuple[str, ...]:
        """The files with the node's pressure. The DaemonSet mounts the host's procfs read-only; the container's own one
        is writable, and no namespace changes its /proc/pressure: it is the node's if both belong to one boot."""
        host, own = self._host.real(_PRESSURE), self._own.real(_PRESSURE)
        return (host, own) if own != host and self._same_kernel() else (host,)

    def _same_kernel(self) -> bool:
        try:
            return self._host.text(_BOOT_ID) == self._own.text(_BOOT_ID)
        except Unreadable:
            return False

    def _memcg_thresholds(self, hierarchy: Hierarchy, kubepods: Kubepods | None) -> list[EventSource | Note]:
        if hierarchy.memory is None or not isinstance(hierarchy.memory_files, MemoryV1):
            return []
        watched = [(Signal.MEMORY, hierarchy.memory)]
        if kubepods is not None:
            watched.append((Signal.ALLOCATABLE_MEMORY, hierarchy.memory + kubepods.path))
        found: list[EventSource | Note] = []
        for signal, cgroup in watched:
            try:
                threshold = MemcgThreshold(self._host.real(cgroup), name=f"memcg {signal.value}")
            except OSError as error:
                found.append(Note(NoteKind.WAKE_UPS, f"no memcg threshold on {cgroup}: {error.strerror}"))
                continue
            self._thresholds[signal] = threshold
            found.append(threshold.source())
        return found

    def _trees(self, hierarchy: Hierarchy, kubepods: Kubepods | None) -> list[EventSource | Note]:
        if hierarchy.memory is None or kubepods is None:
            return []
        try:
            watch = CgroupTreeWatch()
        except OSError as error:
            return [Note(NoteKind.WAKE_UPS, f"no inotify: {error.strerror}")]
        top = hierarchy.memory + kubepods.path
        try:
            parents = {parent.path for parent in cgroups.pod_parents(self._host, top)}
        except Unreadable as error:
            return [watch.source(), Note(NoteKind.WAKE_UPS, f"created and removed pods are not watched: {error}")]
        unified = hierarchy.memory == hierarchy.unified
        files = {f"{top}/{name}" for name in _EVENT_FILES} if unified else set()
        notes = watch.follow({self._host.real(path) for path in parents}, {self._host.real(path) for path in files})
        return [watch.source(), *notes]


class _ThresholdArmer:
    """Arms thresholds in a thread of its own, or in the caller's thread while no PID is free for one."""

    def __init__(self) -> None:
        self._orders: SimpleQueue[list[tuple[MemcgThreshold, int]] | None] = SimpleQueue()
        self._busy = False
        self._failure: OSError | None = None
        self._thread = workers.make_thread(self._work, name="memcg thresholds")
        workers.start(self._thread)

    def arm(self, thresholds: list[tuple[MemcgThreshold, int]]) -> None:
        """Arm each threshold for this growth in bytes, unless an earlier call still runs: the next sync repeats it.
        Raises the OSError of an earlier call."""
        if self._busy:
            return
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        orders = [
            (threshold, at) for threshold, growth in thresholds if (at := threshold.next_level(growth)) is not None
        ]
        if not orders:
            return
        self._busy = True
        if self._thread.ident is None:
            self._arm(orders)
        else:
            self._orders.put(orders)

    def close(self) -> None:
        """End the thread."""
        self._orders.put(None)
        workers.join(self._thread, ARMING_TIMEOUT_S)

    def _work(self) -> None:
        while (orders := self._orders.get()) is not None:
            self._arm(orders)

    def _arm(self, orders: list[tuple[MemcgThreshold, int]]) -> None:
        try:
            with workers.step("arming a memcg threshold", limit_s=ARMING_TIMEOUT_S):
                for threshold, at in orders:
                    threshold.arm(at)
        except OSError as error:
            self._failure = error
        finally:
            self._busy = False
