"""`nodeagent explain --pod NAMESPACE/NAME`: every decision, refusal and OOM kill that touched a pod.

A row is a decision in which the pod was a victim, was refused, or was ranked. Equal rows one after another are one row
with their number: a pod that is ranked at every decision of an hour has one.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from nodeagent.config.schema import API_VERSION
from nodeagent.report import explain_oom, record_fields, wording
from nodeagent.report.cells import BAD, DIM, GOOD, STRONG, WARN, Cell, Column, Section
from nodeagent.report.record_fields import JsonObject
from nodeagent.report.recorded_decisions import RecordedDecision


class PodEntry(NamedTuple):
    """What one decision meant for the pod."""

    id: str
    time: str
    what: str
    """`evicted`, `oom-kill`, `refused`, `candidate`, `not-needed`."""
    reason: str
    """Not escaped."""
    outcome: str
    uid: str
    number: int = 1
    """How many decisions in a row it stands for."""
    until: str = ""
    """Time of the last of them."""


def entries(decisions: Iterable[RecordedDecision], pod: str) -> tuple[PodEntry, ...]:
    """Everything about the pod `namespace/name`, oldest first."""
    found: list[PodEntry] = []
    for recorded in decisions:
        if explain_oom.is_oom(recorded.decision):
            found.extend(_kills(recorded, pod))
            continue
        entry = _entry(recorded, pod)
        if entry is None:
            continue
        before = found[-1] if found else None
        if before is not None and (before.what, before.uid) == (entry.what, entry.uid) and not entry.outcome:
            found[-1] = before._replace(number=before.number + 1, until=entry.time)
        else:
            found.append(entry)
    return tuple(found)


def last_eviction(decisions: Sequence[RecordedDecision], pod: str) -> RecordedDecision | None:
    """The newest decision that has the pod among its victims."""
    for recorded in reversed(decisions):
        victims = record_fields.items(recorded.decision, "victims")
        if any(record_fields.pod_name(victim) == pod for victim in victims):
            return recorded
    return None


def _entry(recorded: RecordedDecision, pod: str) -> PodEntry | None:
    decision = recorded.decision
    time = record_fields.time_text(decision)
    for victim in record_fields.items(decision, "victims"):
        if record_fields.pod_name(victim) == pod:
            uid = str(victim.get("uid"))
            kinds = [str(each.get("kind")) for each in recorded.outcomes if str(each.get("podUid")) == uid]
            ranked = _ranked(decision, pod)
            reason = _keys(ranked) if ranked is not None else str(victim.get("message") or "").strip()
            return PodEntry(recorded.id, time, "evicted", reason, ", ".join(kinds) or "none recorded", uid)
    ranked = _ranked(decision, pod)
    if ranked is None:
        return None
    uid, rank = str(ranked.get("uid")), f"rank {ranked.get('rank')}"
    refusals = record_fields.items(ranked, "refusals")
    if refusals:
        reason = "; ".join(f"{each.get('code')}: {each.get('message')}" for each in refusals)
        return PodEntry(recorded.id, time, "refused", reason, "", uid)
    if record_fields.items(decision, "victims"):
        return PodEntry(recorded.id, time, "not-needed", f"{rank}; {_keys(ranked)}", "", uid)
    why = ", ".join([code for code, _ in record_fields.eviction_refusals(decision)]) or "nothing was due"
    return PodEntry(recorded.id, time, "candidate", f"{rank}, no pod was evicted: {why}", "", uid)


def _kills(recorded: RecordedDecision, pod: str) -> Iterable[PodEntry]:
    for kill in record_fields.items(recorded.decision, "kills"):
        if kill.get("pod") == pod:
            uid = str(record_fields.mapping(kill, "place").get("cgroupUid") or "")
            reason = f"{kill.get('cause')}; processes killed: {kill.get('number')}"
            yield PodEntry(recorded.id, record_fields.time_text(recorded.decision), "oom-kill", reason, "", uid)


def _ranked(decision: JsonObject, pod: str) -> JsonObject | None:
    return next(
        (each for each in record_fields.items(decision, "ranking") if record_fields.pod_name(each) == pod), None
    )


def _keys(ranked: JsonObject) -> str:
    return "; ".join(str(key.get("text")) for key in record_fields.items(ranked, "keys"))


# --- for people and programs -----------------------------------------------------------------------------------------

_WORDS = {
    "evicted": ("victim", BAD),
    "oom-kill": ("OOM kill", BAD),
    "refused": ("not evicted", GOOD),
    "candidate": ("candidate", WARN),
    "not-needed": ("not needed", DIM),
}


def section(found: Sequence[PodEntry], pod: str) -> Section:
    """One row for each entry, newest last."""
    columns = (Column("TIME"), Column("ID"), Column("POD WAS"), Column("OUTCOME"), Column("WHY"))
    rows = []
    for entry in found:
        word, style = _WORDS[entry.what]
        times = f" ({entry.number} decisions until {entry.until})" if entry.number > 1 else ""
        rows.append(
            (
                Cell(entry.time),
                Cell(wording.escape_terminal(entry.id), STRONG),
                Cell(word, style),
                Cell(wording.escape_terminal(entry.outcome)),
                Cell(wording.escape_terminal(entry.reason + times)),
            )
        )
    title = f"POD {wording.escape_terminal(pod)}"
    lines = () if rows else (Cell("no decision and no OOM kill in these records touched it", DIM),)
    return Section(title, columns if rows else (), tuple(rows), lines)


def to_json(found: Sequence[PodEntry], pod: str) -> dict[str, Any]:
    """The entries as one JSON object."""
    return {
        "apiVersion": API_VERSION,
        "kind": "PodHistory",
        "pod": pod,
        "items": [
            {
                "id": entry.id,
                "time": entry.time,
                "what": entry.what,
                "reason": entry.reason,
                "outcome": entry.outcome or None,
                "uid": entry.uid,
                "count": entry.number,
                "until": entry.until or None,
            }
            for entry in found
        ],
    }
