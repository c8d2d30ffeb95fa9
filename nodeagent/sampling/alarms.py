"""All wake-ups that one host can give, kept in step with where its pods are and how far its levels are.

Promises:

1. What the host lacks is a note, once; the loop then depends on its timer alone, which is enough to be right.
2. `sources` changes only in `open`; the loop registers what is new and unregisters what is gone.
3. `arm` moves the v1 levels to where the next threshold is; it costs nothing where nothing moved.
"""

from collections.abc import Mapping

from nodeagent.model import Note, Signal
from nodeagent.sampling.cgroup import Hierarchy, Kubepods, MemoryV1, qos_of
from nodeagent.sampling.host import Host, Unreadable
from nodeagent.sampling.wake import MemoryLevel, Source, TreeWatch, pressure_trigger

_EVENT_FILES = ("memory.events", "cgroup.events")


class Alarms:
    """The wake-up sources of one host."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._opened: tuple[Hierarchy, Kubepods | None] | None = None
        self._levels: dict[Signal, MemoryLevel] = {}
        self.sources: tuple[Source, ...] = ()
        self.notes: tuple[Note, ...] = ()

    def stale(self, hierarchy: Hierarchy, kubepods: Kubepods | None) -> bool:
        """Whether the sources are for something else than these."""
        return self._opened != (hierarchy, kubepods)

    def open(self, hierarchy: Hierarchy, kubepods: Kubepods | None) -> None:
        """Have the sources for these; those of before are closed."""
        self.close()
        self._opened = (hierarchy, kubepods)
        if self._host.recorded:
            self.notes = (Note("wake-ups", "a recording wakes nobody"),)
            return
        sources: list[Source] = []
        notes: list[Note] = []
        for found in (*self._pressure(hierarchy, kubepods), *self._memory_levels(hierarchy, kubepods),
                      *self._trees(hierarchy, kubepods)):  # fmt: skip
            if isinstance(found, Source):
                sources.append(found)
            else:
                notes.append(found)
        self.sources, self.notes = tuple(sources), tuple(notes)

    def arm(self, headroom: Mapping[Signal, int]) -> None:
        """Wake when usage has grown by this many bytes: the distance to the next threshold of each memory signal."""
        for signal, level in self._levels.items():
            if signal in headroom:
                level.arm_within(headroom[signal])

    def close(self) -> None:
        """Close every source."""
        for source in self.sources:
            source.close()
        self.sources, self._levels, self._opened = (), {}, None

    def _pressure(self, hierarchy: Hierarchy, kubepods: Kubepods | None) -> list[Source | Note]:
        paths = ["/proc/pressure/memory"]
        if hierarchy.unified is not None and hierarchy.memory == hierarchy.unified and kubepods is not None:
            paths.append(f"{hierarchy.unified}{kubepods.path}/memory.pressure")
        return [pressure_trigger(self._host.real(path)) for path in paths]

    def _memory_levels(self, hierarchy: Hierarchy, kubepods: Kubepods | None) -> list[Source | Note]:
        if hierarchy.memory is None or not isinstance(hierarchy.memory_files, MemoryV1):
            return []
        places = [(Signal.MEMORY, hierarchy.memory)]
        if kubepods is not None:
            places.append((Signal.ALLOCATABLE_MEMORY, hierarchy.memory + kubepods.path))
        found: list[Source | Note] = []
        for signal, place in places:
            try:
                level = MemoryLevel(self._host.real(place), name=f"memcg {signal.value}")
            except OSError as error:
                found.append(Note("wake-ups", f"no memory level on {place}: {error.strerror}"))
                continue
            self._levels[signal] = level
            found.append(level.source())
        return found

    def _trees(self, hierarchy: Hierarchy, kubepods: Kubepods | None) -> list[Source | Note]:
        if hierarchy.memory is None or kubepods is None:
            return []
        try:
            watch = TreeWatch()
        except OSError as error:
            return [Note("wake-ups", f"no inotify: {error.strerror}")]
        top = hierarchy.memory + kubepods.path
        try:
            parents = {top, *(f"{top}/{name}" for name, _ in self._host.subdirectories(top) if qos_of(name))}
        except Unreadable as error:
            return [watch.source(), Note("wake-ups", f"pods coming and going are not watched: {error}")]
        unified = hierarchy.memory == hierarchy.unified
        files = {f"{top}/{name}" for name in _EVENT_FILES} if unified else set()
        notes = watch.follow({self._host.real(place) for place in parents}, {self._host.real(place) for place in files})
        return [watch.source(), *notes]
