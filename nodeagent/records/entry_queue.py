"""What the loop hands to the recorder's thread: entries, bounded in number and bytes, and the newest are kept."""

import threading
from collections import deque
from typing import Final, NamedTuple

from nodeagent.config.load import LoadedConfig

MAX_WAITING: Final = 64
"""Entries that the thread has not taken yet: about a minute near a threshold."""
MAX_WAITING_BYTES: Final = 4 << 20
"""Of these entries; as much as the largest entry, `recording_format.MAX_ENTRY_BYTES`."""


class InForce(NamedTuple):
    """A configuration and since when it is in force."""

    loaded: LoadedConfig | None
    """None: that of the start."""
    since_wall: float
    """Of its first sample, epoch seconds."""


class Entry(NamedTuple):
    """One sample, as a change of the one before or whole."""

    data: bytes
    wall: float
    first: bool
    """It begins a group."""
    exact: bool
    in_force: InForce
    """The same for all entries of a group."""


class EntryQueue:
    """One thread puts entries in, another takes them. The lock is only held for an assignment."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque()
        self._bytes = 0
        self._closed = False
        self._changed = threading.Condition()

    @property
    def bytes(self) -> int:
        """Of what waits."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: Entry) -> None:
        """Add an entry, for which `make_room` was called."""
        with self._changed:
            self._entries.append(entry)
            self._bytes += len(entry.data)
            self._changed.notify()

    def make_room(self, size: int) -> int:
        """Drop all that waits if an entry of `size` bytes would exceed a bound. Returns the number of dropped entries.
        All, because an entry is of no use without those before it; the next one has to be whole."""
        with self._changed:
            if len(self._entries) < MAX_WAITING and self._bytes + size <= MAX_WAITING_BYTES:
                return 0
            dropped = len(self._entries)
            self._entries.clear()
            self._bytes = 0
            return dropped

    def take(self) -> Entry | None:
        """The oldest entry, once there is one; None if the queue is closed and empty."""
        with self._changed:
            while not self._entries and not self._closed:
                self._changed.wait()
            if not self._entries:
                return None
            entry = self._entries.popleft()
            self._bytes -= len(entry.data)
            return entry

    def close(self) -> None:
        """No further entry comes."""
        with self._changed:
            self._closed = True
            self._changed.notify()
