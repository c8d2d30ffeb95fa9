"""Pressure stall information (PSI): the share of time in which tasks waited for memory or io.

A kernel without PSI (CONFIG_PSI, psi=1) or a host with v1 alone yields fewer stalls; a note reports that the node's own
are missing. Format: Documentation/accounting/psi.rst.
"""

from typing import Final, NamedTuple

from nodeagent.model import Note, NoteKind, Stall, StallScope
from nodeagent.sampling.hostfs import parse
from nodeagent.sampling.hostfs.cgroups import Hierarchy, Kubepods
from nodeagent.sampling.hostfs.fd_cache import FdCache
from nodeagent.sampling.hostfs.host import Host, Unreadable

_RESOURCES: Final = ("memory", "io")
_SYSTEM_SLICE: Final = "/system.slice"


class PsiLine(NamedTuple):
    """One line of a pressure file, without its 300 s average, which is not used."""

    avg10: float
    avg60: float
    total_us: int


def parse_psi(data: bytes) -> tuple[PsiLine | None, PsiLine | None]:
    """(some, full); None for a missing or malformed line."""
    some = full = None
    for line in data.split(b"\n"):
        if line.startswith(b"some "):
            some = _line(line)
        elif line.startswith(b"full "):
            full = _line(line)
    return some, full


def _line(line: bytes) -> PsiLine | None:
    """`some avg10=0.00 avg60=0.00 avg300=0.00 total=0`; the order is the kernel's (kernel/sched/psi.c)."""
    words = line.split()
    if len(words) < 5 or not (words[1].startswith(b"avg10=") and words[2].startswith(b"avg60=")):
        return None
    if not words[4].startswith(b"total="):
        return None
    avg10, avg60, total = (
        parse.parse_percent(words[1][6:]),
        parse.parse_percent(words[2][6:]),
        parse.parse_count(words[4][6:]),
    )
    return None if avg10 is None or avg60 is None or total is None else PsiLine(avg10, avg60, total)


def some_avg10(data: bytes) -> float | None:
    """The first number of a pressure file; None if it is malformed."""
    some = parse_psi(data)[0]
    return None if some is None else some.avg10


StallFiles = tuple[tuple[StallScope, str, str], ...]
"""(scope, resource, path) of each pressure file."""


def stall_files(host: Host, hierarchy: Hierarchy, kubepods: Kubepods | None) -> StallFiles:
    """The pressure files of the node, and the existing ones of the pods and of the system's services."""
    rows = [(StallScope.NODE, resource, f"/proc/pressure/{resource}") for resource in _RESOURCES]
    if hierarchy.unified is not None:
        scopes = [(StallScope.SYSTEM, _SYSTEM_SLICE)]
        if kubepods is not None:
            scopes.append((StallScope.KUBEPODS, kubepods.path))
        rows += [
            (scope, resource, f"{hierarchy.unified}{path}/{resource}.pressure")
            for scope, path in scopes
            for resource in _RESOURCES
            if host.exists(f"{hierarchy.unified}{path}/{resource}.pressure")
        ]
    return tuple(rows)


def read_psi(files: FdCache, rows: StallFiles, *, now: float) -> tuple[tuple[Stall, ...], tuple[Note, ...]]:
    """The stalls that are readable, and notes why the node's own are not."""
    stalls: list[Stall] = []
    notes: list[Note] = []
    for scope, resource, path in rows:
        try:
            some, full = parse_psi(files.read(path))
        except Unreadable as error:
            if scope is StallScope.NODE:
                notes.append(Note(NoteKind.PSI, f"no {resource} pressure: {error}"))
            continue
        if some is None:
            notes.append(Note(NoteKind.PSI, f"no {resource} pressure: {path} is malformed"))
            continue
        full10, full60, full_us = full if full is not None else (None, None, None)
        stalls.append(
            Stall(scope, resource, some.avg10, some.avg60, some.total_us, full10, full60, full_us, read_at=now)
        )
    return tuple(stalls), tuple(notes)
