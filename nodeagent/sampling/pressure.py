"""Pressure stall information (PSI): how much of the time tasks waited for memory or io.

A kernel without PSI (CONFIG_PSI, psi=1) or a v1-only host simply yields fewer stalls; what is missing is told once, in
`read`'s notes. Format: Documentation/accounting/psi.rst.
"""

from typing import Final, NamedTuple

from nodeagent.model import Note, Stall, StallScope
from nodeagent.sampling.cgroup import Hierarchy, Kubepods
from nodeagent.sampling.host import Unreadable
from nodeagent.sampling.kept import KeptFiles
from nodeagent.sampling.numbers import count, percent

_RESOURCES: Final = ("memory", "io")
_SYSTEM_SLICE: Final = "/system.slice"


class PsiLine(NamedTuple):
    """One line of a pressure file, without its 300 s average, which nothing here needs."""

    avg10: float
    avg60: float
    total_us: int


def parse(data: bytes) -> tuple[PsiLine | None, PsiLine | None]:
    """(some, full); None for a line that is missing or malformed."""
    found: dict[bytes, PsiLine] = {}
    for line in data.split(b"\n"):
        words = line.split()
        if len(words) < 2:
            continue
        pairs = dict(word.split(b"=", 1) for word in words[1:] if b"=" in word)
        avg10, avg60 = percent(pairs.get(b"avg10", b"")), percent(pairs.get(b"avg60", b""))
        total = count(pairs.get(b"total", b""))
        if avg10 is not None and avg60 is not None and total is not None:
            found[words[0]] = PsiLine(avg10, avg60, total)
    return found.get(b"some"), found.get(b"full")


def some_avg10(data: bytes) -> float | None:
    """Only the first number of a pressure file: what the table of pods shows."""
    some = parse(data)[0]
    return None if some is None else some.avg10


StallFiles = tuple[tuple[StallScope, str, str], ...]
"""(scope, resource, path) of each pressure file."""


def files(hierarchy: Hierarchy, kubepods: Kubepods | None) -> StallFiles:
    """Every pressure file of the node, the pods, and the system's services."""
    rows = [(StallScope.NODE, resource, f"/proc/pressure/{resource}") for resource in _RESOURCES]
    if hierarchy.unified is not None:
        scopes = [(StallScope.SYSTEM, _SYSTEM_SLICE)]
        if kubepods is not None:
            scopes.append((StallScope.KUBEPODS, kubepods.path))
        rows += [
            (scope, resource, f"{hierarchy.unified}{path}/{resource}.pressure")
            for scope, path in scopes
            for resource in _RESOURCES
        ]
    return tuple(rows)


def read(kept: KeptFiles, rows: StallFiles, *, now: float) -> tuple[tuple[Stall, ...], tuple[Note, ...]]:
    """The stalls that can be read, and why the node's own cannot."""
    stalls: list[Stall] = []
    notes: list[Note] = []
    for scope, resource, path in rows:
        try:
            some, full = parse(kept.read(path))
        except Unreadable as error:
            if scope is StallScope.NODE:
                notes.append(Note("psi", f"no {resource} pressure: {error}"))
            continue
        if some is None:
            notes.append(Note("psi", f"no {resource} pressure: {path} is malformed"))
            continue
        full10, full60, full_us = full if full is not None else (None, None, None)
        stalls.append(
            Stall(scope, resource, some.avg10, some.avg60, some.total_us, full10, full60, full_us, read_at=now)
        )
    return tuple(stalls), tuple(notes)
