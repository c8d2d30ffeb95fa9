"""Publishes the notes of the running agent in a file, for `check`, which has no connection to the agent.

The file has a few lines and is cheaper to read than the saved state: `check` reads it on every start. It contains no
state: no decision depends on it, and an unreadable file has no notes.
"""

import contextlib
import os
from collections.abc import Iterable
from typing import Final

from nodeagent.model import Note, NoteKind
from nodeagent.runtime import regular_files

STATUS_FILE: Final = "status"
MAX_STATUS_BYTES: Final = 16384
"""About fifty notes."""

SILENT_AFTER_S: Final = 120.0
"""Notes of a running agent are younger: the longest sampling interval is a minute."""


def write_status(directory: str, notes: Iterable[Note], *, now: float) -> None:
    """Replace the notes. `now` is CLOCK_BOOTTIME. Notes beyond `MAX_STATUS_BYTES` are dropped. Raises OSError."""
    lines = [f"{now:.0f}"]
    lines += [f"{note.kind}\t{_printable(note.about)}\t{_printable(note.message)}" for note in notes]
    text = "".join(f"{line}\n" for line in lines).encode("utf-8", "replace")[:MAX_STATUS_BYTES]
    path = os.path.join(directory, STATUS_FILE)
    temporary = f"{path}.new"
    fd = regular_files.open_to_replace(temporary)
    try:
        os.write(fd, text[: text.rfind(b"\n") + 1])
    finally:
        os.close(fd)
    os.rename(temporary, path)


def remove_status(directory: str) -> None:
    """Remove the file when the agent ends. Never raises."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(directory, STATUS_FILE))


def read_status(directory: str, *, now: float) -> tuple[Note, ...]:
    """The last notes of the agent, each with its age. Empty if the file is missing, unreadable, or from before the last
    reboot."""
    try:
        data = regular_files.read_file(os.path.join(directory, STATUS_FILE), max_bytes=MAX_STATUS_BYTES)
        at, *lines = data.decode("utf-8", "replace").split("\n")[:-1]
        age_s = now - float(at)
    except (OSError, ValueError):
        return ()
    if not age_s >= -1.0:
        return ()
    source = "the running agent" if age_s <= SILENT_AFTER_S else "an agent that was killed or hangs"
    notes = []
    for line in lines:
        kind, _, rest = line.partition("\t")
        about, _, message = rest.partition("\t")
        with contextlib.suppress(ValueError):  # a kind of another version
            notes.append(Note(NoteKind(kind), f"{message} ({source}, {age_s:.0f}s ago)", about))
    return tuple(notes)


def _printable(text: str) -> str:
    """The text as one line without control characters."""
    return "".join([each if each.isprintable() else "?" for each in text])
