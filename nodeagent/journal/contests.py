"""How the standard conditions fared against a kubelet that writes them as well: told by the running agent to `check`.

A file of a few words beside the saved state, which is far dearer to read: `check` looks at it on every start. It is no
state: nobody decides by it, and a reader who cannot make sense of it has nothing to tell.
"""

import os
from collections.abc import Iterable

from nodeagent.lean import Final, NamedTuple, Protocol
from nodeagent.model import Note

FILE: Final = "contests"
MAX_BYTES: Final = 4096


class Contested(Protocol):
    """What the cluster room says of one condition (`cluster.conditions.Contest`)."""

    @property
    def type(self) -> str: ...
    @property
    def resets(self) -> int: ...
    @property
    def wanted_s(self) -> float: ...
    @property
    def true_s(self) -> float: ...
    @property
    def held_by_other(self) -> bool: ...


class Figures(NamedTuple):
    """One condition that was wanted True since the agent's start."""

    type: str
    resets: int
    """How often somebody put another status over our True while it was wanted."""
    wanted_s: float
    true_s: float
    """How long of that the Node said True, whoever wrote it."""
    held_by_other: bool
    """The Node said True then, and it was not us."""


def write(directory: str, contests: Iterable[Contested], *, now: float) -> None:
    """Replace what is told. `now` is CLOCK_BOOTTIME. Raises OSError."""
    lines = [f"{now:.0f}"]
    lines += [f"{c.type} {c.resets} {c.wanted_s:.3f} {c.true_s:.3f} {int(c.held_by_other)}" for c in contests]
    path = os.path.join(directory, FILE)
    temporary = f"{path}.new"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.write(fd, "\n".join([*lines, ""]).encode("ascii"))
    finally:
        os.close(fd)
    os.rename(temporary, path)


def read(directory: str, *, now: float) -> tuple[tuple[Figures, ...], float]:
    """What the agent told last, and how many seconds ago. Nothing when there is nothing that can be read, or it was
    told before the last reboot."""
    try:
        with open(os.path.join(directory, FILE), "rb") as file:
            at, *lines = file.read(MAX_BYTES).decode("ascii").split("\n")[:-1]
        age_s = now - float(at)
        figures = tuple(_figures(line) for line in lines)
    except (OSError, ValueError):
        return (), 0.0
    return (figures, age_s) if age_s >= -1.0 else ((), 0.0)


def _figures(line: str) -> Figures:
    kind, resets, wanted_s, true_s, held = line.split(" ")
    return Figures(kind, int(resets), float(wanted_s), float(true_s), held == "1")


def notes(figures: Iterable[Figures], *, age_s: float) -> tuple[Note, ...]:
    """In words, for a report: of the conditions that somebody else writes as well."""
    return tuple(
        Note(each.type, f"{words}, as the running agent told {age_s:.0f}s ago")
        for each in figures
        if (words := _words(each))
    )


def _words(each: Figures) -> str:
    if each.resets and each.wanted_s > 0:
        share = min(100.0, 100.0 * each.true_s / each.wanted_s)
        return (
            f"the kubelet owns this condition: it was reset {each.resets} times and read True {share:.2f}% of the "
            f"{each.wanted_s:.0f}s in which it was to be"
        )
    return "the kubelet owns this condition and holds it True itself" if each.held_by_other else ""
