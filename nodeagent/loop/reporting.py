"""The boundary around what only reports: a defect there is a note and a counter, and the loop goes on.

Promises:

1. `run` never raises an `Exception`, also none of memory or descriptors that are short: neither the decision nor the
   sync depends on a report.
2. A defect is logged once for each part and type of error, with its trace, and then rarely; a note names it for
   `NOTE_S`.
"""

import contextlib
import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, ParamSpec, TypeVar

from nodeagent.model import Note, NoteKind
from nodeagent.runtime import workers

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

P = ParamSpec("P")
T = TypeVar("T")

NOTE_S: Final = 3600.0
"""How long a defect stays in the notes."""


class Part(enum.StrEnum):
    """What only reports."""

    METRICS = "metrics"
    DECISIONS = "log and records of decisions"
    SAMPLES = "recording of samples"
    STATUS = "status of the service"
    SNAPSHOTS = "snapshots"
    OOM_KILLS = "report of OOM kills"
    PAGE = "live page"


class _Defect(NamedTuple):
    at: float
    message: str


class Reporting:
    """The boundary of one agent. Only the loop's thread calls `run`."""

    def __init__(
        self, log: "FilteringBoundLogger", *, count: Callable[[], object], monotonic: Callable[[], float]
    ) -> None:
        """`count` is called for each defect."""
        self._log = log
        self._count = count
        self._monotonic = monotonic
        self._defects: dict[Part, _Defect] = {}
        """The newest one of each part."""

    def run(self, part: Part, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T | None:
        """What `work` returns; None after a defect."""
        try:
            return work(*args, **kwargs)
        except Exception as error:
            with contextlib.suppress(Exception):  # memory may still be short
                self._report(part, error)
        return None

    def notes(self) -> tuple[Note, ...]:
        """A note for each part that had a defect lately."""
        now = self._monotonic()
        return tuple([_note(part, each) for part, each in self._defects.items() if now - each.at <= NOTE_S])

    def _report(self, part: Part, error: Exception) -> None:
        self._count()
        self._defects[part] = _Defect(self._monotonic(), workers.error_text(error))
        self._log.error("report failed", part=part.value, exc_info=error, once=f"{part} {type(error).__name__}")


def _note(part: Part, defect: _Defect) -> Note:
    text = f"{part} failed, which is a defect of nodeagent; decisions do not depend on it: {defect.message}"
    return Note(NoteKind.REPORTING, text)
