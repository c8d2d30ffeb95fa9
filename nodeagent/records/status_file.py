"""What the running agent has to say of itself: told to `check`, which cannot ask it.

A file of a few lines beside the saved state, which is far dearer to read: `check` looks at it on every start. It is no
state: nobody decides by it, and a reader who cannot make sense of it has nothing to tell.
"""

import contextlib
import os
from collections.abc import Iterable
from typing import Final

from nodeagent.model import Note, NoteKind
from nodeagent.runtime import regular_files

FILE: Final = "status"
MAX_BYTES: Final = 16384
"""Some fifty notes."""

SILENT_S: Final = 120.0
"""Who has told nothing for so long will not: the longest sampling interval is a minute."""


def write(directory: str, notes: Iterable[Note], *, now: float) -> None:
    """Replace what is told. `now` is CLOCK_BOOTTIME. What is too much is left out. Raises OSError."""
    lines = [f"{now:.0f}"]
    lines += [f"{note.kind}\t{_word(note.about)}\t{_word(note.message)}" for note in notes]
    text = "".join(f"{line}\n" for line in lines).encode("utf-8", "replace")[:MAX_BYTES]
    path = os.path.join(directory, FILE)
    temporary = f"{path}.new"
    fd = regular_files.open_to_replace(temporary)
    try:
        os.write(fd, text[: text.rfind(b"\n") + 1])
    finally:
        os.close(fd)
    os.rename(temporary, path)


def forget(directory: str) -> None:
    """An agent that ends has nothing to say any more. Never raises."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(directory, FILE))


def read_status(directory: str, *, now: float) -> tuple[Note, ...]:
    """What the agent told last, each with how long ago. Nothing when there is nothing that can be read, or it was told
    before the last reboot."""
    try:
        data = regular_files.read_file(os.path.join(directory, FILE), max_bytes=MAX_BYTES)
        at, *lines = data.decode("utf-8", "replace").split("\n")[:-1]
        age_s = now - float(at)
    except (OSError, ValueError):
        return ()
    if not age_s >= -1.0:
        return ()
    who = "the running agent" if age_s <= SILENT_S else "an agent that was killed or hangs"
    notes = []
    for line in lines:
        kind, _, rest = line.partition("\t")
        about, _, message = rest.partition("\t")
        with contextlib.suppress(ValueError):  # a kind of another version
            notes.append(Note(NoteKind(kind), f"{message} ({who}, {age_s:.0f}s ago)", about))
    return tuple(notes)


def _word(text: str) -> str:
    """One line, without what a terminal would obey."""
    return "".join([each if each.isprintable() else "?" for each in text])
