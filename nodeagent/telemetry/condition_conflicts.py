"""How the standard conditions fare against a kubelet that writes them as well, in words."""

from collections.abc import Iterable
from typing import Protocol

from nodeagent.model import Note, NoteKind


class Contested(Protocol):
    """What the cluster room says of one condition (`cluster.conditions.Contest`)."""

    @property
    def type(self) -> str: ...
    @property
    def overwrites(self) -> int: ...
    @property
    def wanted_s(self) -> float: ...
    @property
    def true_s(self) -> float: ...
    @property
    def true_by_other(self) -> bool: ...


def notes(contests: Iterable[Contested]) -> tuple[Note, ...]:
    """Of the conditions that somebody else writes as well."""
    return tuple(Note(NoteKind(str(each.type)), words) for each in contests if (words := _words(each)))


def _words(each: Contested) -> str:
    if each.overwrites and each.wanted_s > 0:
        share = min(100.0, 100.0 * each.true_s / each.wanted_s)
        return (
            f"the kubelet owns this condition: it was reset {each.overwrites} times and read True {share:.2f}% of the "
            f"{each.wanted_s:.0f}s in which it was to be"
        )
    return "the kubelet owns this condition and holds it True itself" if each.true_by_other else ""
