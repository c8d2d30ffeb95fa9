"""All wake-ups that one host can give, kept in step with where its pods are and how far its levels are.

Promises:

1. What the host lacks is a note, once; the loop then depends on its timer alone, which is enough to be right.
2. `sources` changes only in `open`; the loop registers what is new and unregisters what is gone.
3. `arm` has the v1 levels moved to where the next threshold is. It costs nothing where nothing moved, and it never
   waits: the kernel takes 13 to 32 ms for a move, which a thread of its own waits for, one move after the other.
"""

import errno
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Final

from nodeagent.model import Note, NoteKind, Signal
from nodeagent.runtime import workers
from nodeagent.sampling.events.kernel_events import CgroupTreeWatch, EventSource, MemcgThreshold, psi_trigger
from nodeagent.sampling.hostfs.cgroups import Hierarchy, Kubepods, MemoryV1, qos_of
from nodeagent.sampling.hostfs.host import Host, Unreadable

_EVENT_FILES = ("memory.events", "cgroup.events")
ARMING_S: Final = 2.0
"""A move that takes longer is told of; `close` waits no longer for one. The longest seen took 0.03 s."""


class WakeupSources:
    """The wake-up sources of one host."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._opened: tuple[Hierarchy, Kubepods | None] | None = None
        self._levels: dict[Signal, MemcgThreshold] = {}
        self._armer: _Armer | None = None
        self.sources: tuple[EventSource, ...] = ()
        self.notes: tuple[Note, ...] = ()

    def stale(self, hierarchy: Hierarchy, kubepods: Kubepods | None) -> bool:
        """Whether the sources are for something else than these."""
        return self._opened != (hierarchy, kubepods)

    def open(self, hierarchy: Hierarchy, kubepods: Kubepods | None) -> None:
        """Have the sources for these; those of before are closed."""
        self.close()
        self._opened = (hierarchy, kubepods)
        if self._host.recorded:
            self.notes = (Note(NoteKind.WAKE_UPS, "a recording wakes nobody"),)
            return
        sources: list[EventSource] = []
        notes: list[Note] = []
        for found in (*self._pressure(hierarchy, kubepods), *self._memory_levels(hierarchy, kubepods),
                      *self._trees(hierarchy, kubepods)):  # fmt: skip
            if isinstance(found, EventSource):
                sources.append(found)
            else:
                notes.append(found)
        self.sources, self.notes = tuple(sources), tuple(notes)

    def arm(self, headroom: Mapping[Signal, int]) -> None:
        """Wake when usage has grown by this many bytes: the distance to the next threshold of each memory signal.

        Where a cgroup has gone, all sources are `stale` from now on; levels that cannot be armed for another reason are
        given up with a note."""
        levels = [(level, headroom[signal]) for signal, level in self._levels.items() if signal in headroom]
        if not levels:
            return
        self._armer = self._armer or _Armer()
        try:
            self._armer.arm(levels)
        except OSError as error:
            if error.errno == errno.ENODEV:
                self._opened = None
            else:
                self._levels = {}
                self.notes += (Note(NoteKind.WAKE_UPS, f"no memory level can be armed: {error.strerror}"),)

    def close(self) -> None:
        """Close every source."""
        if self._armer is not None:
            self._armer.close()
            self._armer = None
        for source in self.sources:
            source.close()
        self.sources, self._levels, self._opened = (), {}, None

    def _pressure(self, hierarchy: Hierarchy, kubepods: Kubepods | None) -> list[EventSource | Note]:
        paths = ["/proc/pressure/memory"]
        if hierarchy.unified is not None and hierarchy.memory == hierarchy.unified and kubepods is not None:
            paths.append(f"{hierarchy.unified}{kubepods.path}/memory.pressure")
        return [psi_trigger(self._host.real(path)) for path in paths]

    def _memory_levels(self, hierarchy: Hierarchy, kubepods: Kubepods | None) -> list[EventSource | Note]:
        if hierarchy.memory is None or not isinstance(hierarchy.memory_files, MemoryV1):
            return []
        places = [(Signal.MEMORY, hierarchy.memory)]
        if kubepods is not None:
            places.append((Signal.ALLOCATABLE_MEMORY, hierarchy.memory + kubepods.path))
        found: list[EventSource | Note] = []
        for signal, place in places:
            try:
                level = MemcgThreshold(self._host.real(place), name=f"memcg {signal.value}")
            except OSError as error:
                found.append(Note(NoteKind.WAKE_UPS, f"no memory level on {place}: {error.strerror}"))
                continue
            self._levels[signal] = level
            found.append(level.source())
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
            parents = {top, *(f"{top}/{name}" for name, _ in self._host.subdirectories(top) if qos_of(name))}
        except Unreadable as error:
            return [watch.source(), Note(NoteKind.WAKE_UPS, f"pods coming and going are not watched: {error}")]
        unified = hierarchy.memory == hierarchy.unified
        files = {f"{top}/{name}" for name in _EVENT_FILES} if unified else set()
        notes = watch.follow({self._host.real(place) for place in parents}, {self._host.real(place) for place in files})
        return [watch.source(), *notes]


class _Armer:
    """Moves levels in a thread of its own, or in its caller's while there is no PID for a thread."""

    def __init__(self) -> None:
        self._orders: SimpleQueue[list[tuple[MemcgThreshold, int]] | None] = SimpleQueue()
        self._busy = False
        self._trouble: OSError | None = None
        self._thread = workers.make_thread(self._work, name="memory levels")
        workers.start(self._thread)

    def arm(self, levels: list[tuple[MemcgThreshold, int]]) -> None:
        """Wake when each of these has grown by so many bytes. While a move is under way nothing is ordered: the next
        look sees what is left to do."""
        if self._busy:
            return
        trouble, self._trouble = self._trouble, None
        if trouble is not None:
            raise trouble
        orders = [(level, at) for level, growth in levels if (at := level.wanted(growth)) is not None]
        if not orders:
            return
        self._busy = True
        if self._thread.ident is None:
            self._do(orders)
        else:
            self._orders.put(orders)

    def close(self) -> None:
        """End the thread."""
        self._orders.put(None)
        workers.join(self._thread, ARMING_S)

    def _work(self) -> None:
        while (orders := self._orders.get()) is not None:
            self._do(orders)

    def _do(self, orders: list[tuple[MemcgThreshold, int]]) -> None:
        try:
            with workers.step("arming a memory level", limit_s=ARMING_S):
                for level, at in orders:
                    level.arm(at)
        except OSError as error:
            self._trouble = error
        finally:
            self._busy = False
