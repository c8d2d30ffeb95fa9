"""Notes about standard conditions that the kubelet also writes."""

from collections.abc import Iterable

from nodeagent.actuators.conditions import ConditionConflict
from nodeagent.model import Note, NoteKind


def conflict_notes(conflicts: Iterable[ConditionConflict]) -> tuple[Note, ...]:
    """One note for each condition that another client also writes."""
    return tuple(Note(NoteKind(str(each.type)), message) for each in conflicts if (message := _message(each)))


def _message(conflict: ConditionConflict) -> str:
    if conflict.overwrites and conflict.wanted_s > 0:
        share = min(100.0, 100.0 * conflict.true_s / conflict.wanted_s)
        return (
            f"the kubelet owns this condition: {conflict.overwrites} overwrites; it was True for {share:.2f}% of the "
            f"{conflict.wanted_s:.0f}s it should have been"
        )
    return "the kubelet owns this condition and has set it True" if conflict.true_by_other else ""
