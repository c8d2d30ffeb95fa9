"""Recorded decisions: each with the records of what came of it.

Records of one decision share its id and may have any order: an outcome may be written before its decision, and the
relief is measured much later. A decision that was dropped with an older file has later records only. Decisions stay
packed until they are read.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from nodeagent.records import flight_recorder
from nodeagent.records.packed_record import PackedRecord
from nodeagent.report import explain_oom
from nodeagent.report.record_fields import JsonObject

LAST_DECISION: Final = "last"


class ExplainError(Exception):
    """No decision can be explained. The message is for the user."""


class RecordedDecision(NamedTuple):
    """Everything recorded about one decision; the later records in the order of
    `flight_recorder.RECORDS_OF_A_DECISION`."""

    id: str
    decision: JsonObject
    """Empty if the decision was dropped with an older file and only later records are left."""
    outcomes: tuple[JsonObject, ...] = ()
    reliefs: tuple[JsonObject, ...] = ()
    reclaims: tuple[JsonObject, ...] = ()
    hooks: tuple[JsonObject, ...] = ()
    resizes: tuple[JsonObject, ...] = ()


def read_decisions(path: Path) -> tuple[RecordedDecision, ...]:
    """Every decision in a state directory or a file of records, oldest first.

    Raises:
        ExplainError: the path does not exist or cannot be read.
    """
    try:
        return group(flight_recorder.read_records(path))
    except flight_recorder.RecordsError as error:
        raise ExplainError(str(error)) from error


def group(records: Iterable[JsonObject]) -> tuple[RecordedDecision, ...]:
    """The decisions in these records, in the order in which their ids first appear."""
    decisions: dict[str, JsonObject] = {}
    later: dict[str, dict[str, list[JsonObject]]] = {kind: {} for kind in flight_recorder.RECORDS_OF_A_DECISION}
    order: dict[str, None] = {}
    for record in records:
        kind = str(record.get("record"))
        own = kind in ("decision", explain_oom.RECORD)
        identity = str(record.get("id" if own else "planId", ""))
        if own:
            decisions[identity] = PackedRecord(record)
        elif kind in later:
            later[kind].setdefault(identity, []).append(record)
        else:
            continue
        order[identity] = None
    return tuple(
        RecordedDecision(each, decisions.get(each, {}), *(tuple(records.get(each, ())) for records in later.values()))
        for each in order
    )


def find_decision(decisions: Sequence[RecordedDecision], wanted: str) -> RecordedDecision:
    """The decision with this id, or the only one whose id starts with it; `last` is the newest.

    Raises:
        ExplainError: there is none, or more than one.
    """
    if wanted == LAST_DECISION and decisions:
        return decisions[-1]
    found = [each for each in decisions if each.id == wanted]
    found = found or [each for each in decisions if each.id.startswith(wanted)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ExplainError(
            f"{wanted}: {len(found)} decisions start with it: {', '.join(each.id for each in found[:5])}"
        )
    raise ExplainError(f"{wanted}: no such decision; `nodeagent explain` lists the recorded ones")
