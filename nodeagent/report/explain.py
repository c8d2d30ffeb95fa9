"""`nodeagent explain`: why a decision was made, from the flight recorder, for people.

Without an id the last decisions are listed; with one (or its beginning, or `last`) everything behind it is told: what
was seen and how old it was, which threshold acted, what was missing, the pods in order with the keys that put them
there, who was spared and why, who went, what the API server answered, and what it brought back.

Theory of operation. Records are JSON objects that may be older than this program, so every field is asked for, and what
is not there is shown as `?`. Records of one decision share its id and may stand in any order: an outcome may be written
before its decision, and the relief is measured much later.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from nodeagent.config.schema import API_VERSION
from nodeagent.model import SIGNAL_TABLE, Unit
from nodeagent.records import flight_recorder
from nodeagent.report import wording
from nodeagent.report.sections import BAD, DIM, GOOD, STRONG, WARN, Cell, Column, Section

PODS_SHOWN: Final = 40
"""Rows of the ranking in text; JSON has all. Who goes, and the first of who is spared, are far above."""
LAST: Final = "last"
_UNITS: Final = {facts.signal.value: facts.unit for facts in SIGNAL_TABLE.values()}

JsonObject = Mapping[str, Any]


class ExplainError(Exception):
    """There is nothing to explain; the message is for the user."""


class RecordedDecision(NamedTuple):
    """Everything recorded about one decision."""

    id: str
    decision: JsonObject
    """Empty when only what became of it is left: the decision itself was dropped with the older file."""
    outcomes: tuple[JsonObject, ...] = ()
    reliefs: tuple[JsonObject, ...] = ()
    reclaims: tuple[JsonObject, ...] = ()


# --- reading ---------------------------------------------------------------------------------------------------------


def read_decisions(place: Path) -> tuple[RecordedDecision, ...]:
    """Every decision in a state directory or a file of records, oldest first.

    Raises:
        ExplainError: there is no such place, or it cannot be read.
    """
    decisions: dict[str, JsonObject] = {}
    after: dict[str, dict[str, list[JsonObject]]] = {"outcome": {}, "relief": {}, "reclaim": {}}
    order: dict[str, None] = {}
    try:
        for record in flight_recorder.read_records(place):
            kind = record.get("record")
            identity = str(record.get("id" if kind == "decision" else "planId", ""))
            if kind == "decision":
                decisions[identity] = record
            elif kind in after:
                after[kind].setdefault(identity, []).append(record)
            else:
                continue
            order[identity] = None
    except flight_recorder.RecordsError as error:
        raise ExplainError(str(error)) from error
    return tuple(
        RecordedDecision(each, decisions.get(each, {}), *(tuple(records.get(each, ())) for records in after.values()))
        for each in order
    )


def find_decision(every: Sequence[RecordedDecision], wanted: str) -> RecordedDecision:
    """The decision with this id, or the only one whose id begins so; `last` is the newest.

    Raises:
        ExplainError: there is none, or more than one.
    """
    if wanted == LAST and every:
        return every[-1]
    found = [story for story in every if story.id == wanted] or [s for s in every if s.id.startswith(wanted)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ExplainError(f"{wanted}: {len(found)} decisions begin so: {', '.join(story.id for story in found[:5])}")
    raise ExplainError(f"{wanted}: no such decision is recorded; `nodeagent explain` lists those that are")


# --- for programs ----------------------------------------------------------------------------------------------------


def as_list(every: Iterable[RecordedDecision]) -> dict[str, Any]:
    """The list as an object: one item for each decision, without its ranking."""
    items = []
    for story in every:
        dropped = ("ranking", "inputs", "record")
        kept = {key: value for key, value in story.decision.items() if key not in dropped}
        items.append({**kept, "id": story.id, **_aftermath(story)})
    return {"apiVersion": API_VERSION, "kind": "DecisionList", "items": items}


def to_json(story: RecordedDecision) -> dict[str, Any]:
    """One decision as an object: the record as it was written, and what became of it."""
    kept = {key: value for key, value in story.decision.items() if key not in ("inputs", "record")}
    return {"apiVersion": API_VERSION, "kind": "Decision", **kept, "id": story.id, **_aftermath(story)}


def _aftermath(story: RecordedDecision) -> dict[str, Any]:
    return {
        "outcomes": [{key: value for key, value in each.items() if key != "record"} for each in story.outcomes],
        "reliefs": [{key: value for key, value in each.items() if key != "record"} for each in story.reliefs],
        "reclaims": [{key: value for key, value in each.items() if key != "record"} for each in story.reclaims],
    }


# --- for people: the list --------------------------------------------------------------------------------------------


def list_section(every: Sequence[RecordedDecision]) -> Section:
    """One row for each decision, newest last."""
    columns = (
        Column("TIME"),
        Column("ID"),
        Column("FOR"),
        Column("DECISION"),
        Column("OUTCOME"),
        Column("PREDICTED", right=True),
        Column("MEASURED", right=True),
    )
    rows = tuple(_list_row(story) for story in every)
    lines = () if rows else (Cell("no decision is recorded: nothing was due, or nobody was there to record it", DIM),)
    return Section("", columns if rows else (), rows, lines)


def _list_row(story: RecordedDecision) -> tuple[Cell, ...]:
    decision = story.decision
    unit = _unit(decision)
    predicted = [victim.get("predictedRelief") for victim in _items(decision, "victims")]
    measured = [each.get("measured") for each in story.reliefs]
    return (
        Cell(
            _time(decision) if decision else _time(next(iter((*story.outcomes, *story.reliefs, *story.reclaims)), {}))
        ),
        Cell(wording.escape_terminal(story.id), STRONG),
        Cell(_subject(decision)),
        _headline(story),
        Cell(_outcomes_in_short(story)),
        Cell(wording.quantity(_sum(predicted), unit=unit) if predicted else ""),
        Cell(wording.quantity(_sum(measured), unit=unit, signed=True) if measured else ""),
    )


def _subject(decision: JsonObject) -> str:
    threshold = _map(_map(decision, "actingOn"), "threshold")
    if not threshold:
        return wording.escape_terminal(str(decision.get("rankedFor", wording.UNKNOWN)))
    return f"{wording.escape_terminal(str(threshold.get('signal')))} ({_tier(threshold)})"


def _headline(story: RecordedDecision) -> Cell:
    victims = [_pod(victim) for victim in _items(story.decision, "victims")]
    if victims:
        more = f" and {len(victims) - 2} more" if len(victims) > 2 else ""
        return Cell(f"evict {', '.join(victims[:2])}{more}", BAD)
    codes = [wording.escape_terminal(str(refusal.get("code"))) for refusal in _items(story.decision, "refusals")]
    if codes:
        return Cell(f"nobody: {', '.join(codes)}", WARN)
    return Cell("nothing was due" if story.decision else "not kept any more", DIM)


def _outcomes_in_short(story: RecordedDecision) -> str:
    counts: dict[str, int] = {}
    for outcome in story.outcomes:
        kind = wording.escape_terminal(str(outcome.get("kind")))
        counts[kind] = counts.get(kind, 0) + 1
    return ", ".join(kind if count == 1 else f"{count} {kind}" for kind, count in counts.items())


# --- for people: one decision ----------------------------------------------------------------------------------------


def sections(story: RecordedDecision) -> tuple[Section, ...]:
    """Everything about one decision, in reading order."""
    if not story.decision:
        head = Section(
            "", lines=(Cell(f"{wording.escape_terminal(story.id)}: the decision itself is not kept any more", WARN),)
        )
        return tuple(each for each in (head, _victims(story), _reclaims(story)) if each.rows or each.lines)
    every = (
        _head(story),
        _signals(story),
        _refusals(story),
        _reclaims(story),
        _victims(story),
        _relief(story),
        _conditions(story),
        _ranking(story),
        _notes(story),
    )
    return tuple(section for section in every if section.rows or section.lines)


def _head(story: RecordedDecision) -> Section:
    decision = story.decision
    victims = len(_items(decision, "victims"))
    result = f"{victims} pod{'s' * (victims != 1)} to evict" if victims else "nobody to evict"
    lines = [Cell(f"{wording.escape_terminal(story.id)}  {_time(decision)}  {_subject(decision)}: {result}", STRONG)]
    acting, deficit = _map(decision, "actingOn"), _map(decision, "deficit")
    unit = _unit(decision)
    if acting:
        threshold = _map(acting, "threshold")
        value = wording.quantity(_int(acting.get("value")), unit=unit)
        since = _age(decision, acting.get("activeSince"))
        grace = _number(threshold.get("gracePeriodSeconds"))
        patience = f", after a grace period of {wording.duration(grace)}" if grace else ""
        lines.append(Cell(f"acting on {_tier(threshold)} {value}, met for {since}{patience}"))
    if deficit:
        amount = wording.quantity(_int(deficit.get("amount")), unit=unit)
        pending = _int(deficit.get("pendingRelease"))
        coming = f", {wording.quantity(pending, unit=unit)} already on their way" if pending else ""
        lines.append(Cell(f"missing {amount} with minimum reclaim{coming}"))
    taken = _age(decision, decision.get("snapshotTakenAt"))
    lines.append(Cell(f"decided {taken} after the sample; pods ranked by {', '.join(_order(decision)) or '?'}", DIM))
    return Section("", lines=tuple(lines))


def _signals(story: RecordedDecision) -> Section:
    columns = (
        Column("SIGNAL"),
        Column("AVAILABLE", right=True),
        Column("CAPACITY", right=True),
        Column("THRESHOLDS"),
        Column("STATE"),
        Column("AGE", right=True),
        Column("HELD BACK, TREND, REASON"),
    )
    rows = []
    for verdict in _items(story.decision, "signals"):
        seen = _map(verdict, "observation")
        unit = _unit_of(seen.get("signal"))
        thresholds = _items(verdict, "thresholds")
        held = [str(each.get("notDueReason")) for each in thresholds if each.get("notDueReason")]
        state = str(verdict.get("state"))
        rows.append(
            (
                Cell(wording.escape_terminal(str(seen.get("signal")))),
                Cell(wording.quantity(_int(seen.get("available")), unit=unit)),
                Cell(wording.quantity(_int(seen.get("capacity")), unit=unit)),
                Cell(", ".join(_threshold(each, unit) for each in thresholds) or "none"),
                Cell(wording.escape_terminal(state), {"ok": GOOD, "hard": BAD}.get(state, WARN)),
                Cell(_age(story.decision, seen.get("readAt"))),
                Cell(
                    wording.escape_terminal(
                        "; ".join(filter(None, (*held, _heading(verdict), str(seen.get("reason") or ""))))
                    )
                ),
            )
        )
    return Section("SIGNALS", columns, tuple(rows))


def _heading(verdict: JsonObject) -> str:
    trend = _map(verdict, "trend")
    return wording.trend_text(
        *[_number(trend.get(key)) for key in ("toThresholdSeconds", "toExhaustionSeconds", "confidence")]
    )


def _threshold(verdict: JsonObject, unit: Unit) -> str:
    value = wording.quantity(_int(verdict.get("value")), unit=unit)
    met = " met" if verdict.get("met") else ""
    return f"{_tier(_map(verdict, 'threshold'))} {value}{met}"


def _refusals(story: RecordedDecision) -> Section:
    lines = [
        Cell(
            f"{wording.escape_terminal(str(each.get('code')))}: {wording.escape_terminal(str(each.get('message')))}",
            WARN,
        )
        for each in _items(story.decision, "refusals")
    ]
    title = "WHY NOT MORE" if _items(story.decision, "victims") else "WHY NOBODY"
    return Section(title if lines else "", lines=tuple(lines))


def _victims(story: RecordedDecision) -> Section:
    columns = (
        Column("POD"),
        Column("HOW"),
        Column("GRACE", right=True),
        Column("PREDICTED", right=True),
        Column("OUTCOME"),
        Column("AFTER", right=True),
        Column("SAID"),
    )
    unit = _unit(story.decision)
    by_uid = {str(each.get("podUid")): each for each in story.outcomes}
    rows = []
    for victim in _items(story.decision, "victims"):
        outcome = by_uid.pop(str(victim.get("uid")), {})
        rows.append(
            (
                Cell(_pod(victim), BAD),
                Cell(wording.escape_terminal(str(victim.get("method")))),
                Cell(wording.duration(_number(victim.get("gracePeriodSeconds")))),
                Cell(wording.quantity(_int(victim.get("predictedRelief")), unit=unit)),
                _outcome(outcome),
                Cell(_took(story.decision, outcome)),
                Cell(wording.escape_terminal(str(outcome.get("message") or victim.get("message") or "").strip())),
            )
        )
    for uid, outcome in by_uid.items():
        said = Cell(wording.escape_terminal(str(outcome.get("message") or "")))
        rows.append(
            (
                Cell(f"uid/{wording.escape_terminal(uid)}"),
                Cell(""),
                Cell(""),
                Cell(""),
                _outcome(outcome),
                Cell(""),
                said,
            )
        )
    return Section("VICTIMS", columns, tuple(rows))


def _outcome(outcome: JsonObject) -> Cell:
    if not outcome:
        return Cell("none recorded", WARN)
    kind = str(outcome.get("kind"))
    status = outcome.get("httpStatus")
    text = kind + (f" (HTTP {status})" if status is not None else "")
    return Cell(wording.escape_terminal(text), GOOD if kind in ("accepted", "dry-run", "gone") else BAD)


def _reclaims(story: RecordedDecision) -> Section:
    """What was tried before pods, and what it brought back. An action that was ordered and has no report was a
    rehearsal's, or its gain was not measured yet."""
    reported = {str(each.get("name")): each for each in story.reclaims}
    names = dict.fromkeys((*[str(each.get("name")) for each in _items(story.decision, "reclaims")], *reported))
    lines = []
    for name in names:
        each = reported.get(name)
        if each is None:
            lines.append(Cell(f"{wording.escape_terminal(name)}: no gain recorded", DIM))
            continue
        gained = wording.quantity(_int(each.get("gained")), unit=_unit_of(each.get("signal")), signed=True)
        took = wording.duration(_number(each.get("tookSeconds")))
        result = wording.escape_terminal(str(each.get("result")))
        good = result == "done" and (_int(each.get("gained")) or 0) > 0
        lines.append(Cell(f"{wording.escape_terminal(name)} ({result}): {gained} in {took}", GOOD if good else WARN))
    return Section("TRIED BEFORE PODS" if lines else "", lines=tuple(lines))


def _relief(story: RecordedDecision) -> Section:
    lines = []
    for each in story.reliefs:
        unit = _unit_of(each.get("signal"))
        measured, predicted = _int(each.get("measured")), _int(each.get("predicted"))
        took = wording.duration(_number(each.get("tookSeconds")))
        enough = measured is not None and predicted is not None and 2 * measured >= predicted
        text = (
            f"{wording.quantity(measured, unit=unit, signed=True)} measured of "
            f"{wording.quantity(predicted, unit=unit)} "
            f"predicted, {took} after the decision"
        )
        lines.append(Cell(text, GOOD if enough else BAD))
    return Section("RELIEF" if lines else "", lines=tuple(lines))


def _conditions(story: RecordedDecision) -> Section:
    columns = (Column("CONDITION"), Column("STATUS"), Column("FOR", right=True), Column("MESSAGE"))
    rows = []
    for each in _items(story.decision, "conditions"):
        status = str(each.get("status"))
        rows.append(
            (
                Cell(wording.escape_terminal(str(each.get("type")))),
                Cell(wording.escape_terminal(status), BAD if status == "True" else ""),
                Cell(_age(story.decision, each.get("since"))),
                Cell(wording.escape_terminal(str(each.get("message")))),
            )
        )
    return Section("CONDITIONS", columns, tuple(rows))


def _ranking(story: RecordedDecision) -> Section:
    columns = (
        Column("RANK", right=True),
        Column("POD"),
        Column("USAGE", right=True),
        Column("REQUEST", right=True),
        Column("RELIEF", right=True),
        Column("WHY"),
    )
    unit = _unit(story.decision)
    going = {str(victim.get("uid")) for victim in _items(story.decision, "victims")}
    pods = _items(story.decision, "ranking")
    rows = []
    for pod in pods[:PODS_SHOWN]:
        goes = str(pod.get("uid")) in going
        rows.append(
            (
                Cell(wording.escape_terminal(str(pod.get("rank")))),
                Cell(_pod(pod), BAD if goes else ""),
                Cell(wording.quantity(_int(pod.get("usage")), unit=unit)),
                Cell(wording.quantity(_int(pod.get("request")), unit=unit) if pod.get("request") is not None else "-"),
                Cell(wording.quantity(_int(pod.get("relief")), unit=unit)),
                _why(pod, goes=goes, idle=not going),
            )
        )
    more = len(pods) - len(rows)
    lines = (Cell(f"and {more} more: -o json has them all", DIM),) if more else ()
    title = wording.escape_terminal(f"PODS IN EVICTION ORDER FOR {story.decision.get('rankedFor')}")
    return Section(title, columns, tuple(rows), lines)


def _why(pod: JsonObject, *, goes: bool, idle: bool) -> Cell:
    """`idle`: nobody goes, so a pod that could is no more than a candidate."""
    keys = "; ".join(str(key.get("text")) for key in _items(pod, "keys"))
    refusals = "; ".join(str(refusal.get("message")) for refusal in _items(pod, "refusals"))
    if goes:
        return Cell(wording.escape_terminal(f"goes: {keys}"), BAD)
    if refusals:
        return Cell(wording.escape_terminal(f"spared: {refusals}"), DIM)
    return Cell(wording.escape_terminal(f"{'candidate' if idle else 'not needed'}: {keys}"))


def _notes(story: RecordedDecision) -> Section:
    lines = [
        Cell(
            f"{wording.escape_terminal(str(each.get('subject')))}: {wording.escape_terminal(str(each.get('message')))}"
        )
        for each in _items(story.decision, "notes")
    ]
    return Section("NOTES" if lines else "", lines=tuple(lines))


# --- fields of records -----------------------------------------------------------------------------------------------


def _items(record: JsonObject, key: str) -> Sequence[JsonObject]:
    value = record.get(key)
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def _map(record: JsonObject, key: str) -> JsonObject:
    value = record.get(key)
    return value if isinstance(value, Mapping) else {}


def _int(value: object) -> int | None:
    return value if type(value) is int else None


def _number(value: object) -> float | None:
    try:
        return float(value) if type(value) in (int, float) else None  # type: ignore[arg-type]
    except OverflowError:  # an integer of 400 digits
        return None


def _sum(values: Iterable[object]) -> int | None:
    numbers = [_int(value) for value in values]
    return None if None in numbers else sum(number for number in numbers if number is not None)


def _pod(record: JsonObject) -> str:
    namespace, name = record.get("namespace"), record.get("name")
    return wording.escape_terminal(f"{namespace}/{name}" if namespace and name else f"uid/{record.get('uid')}")


def _tier(threshold: JsonObject) -> str:
    return "soft" if _number(threshold.get("gracePeriodSeconds")) else "hard"


def _time(record: JsonObject) -> str:
    wall = _number(record.get("wallTime"))
    return wording.UNKNOWN if wall is None else wording.rfc3339(wall)


def _age(decision: JsonObject, instant: object) -> str:
    """From `instant` to the decision."""
    made_at, at = _number(decision.get("madeAt")), _number(instant)
    return wording.UNKNOWN if made_at is None or at is None else wording.duration(max(0.0, made_at - at))


def _took(decision: JsonObject, outcome: JsonObject) -> str:
    made_at, at = _number(decision.get("madeAt")), _number(outcome.get("at"))
    return "" if made_at is None or at is None else wording.duration(max(0.0, at - made_at))


def _unit(decision: JsonObject) -> Unit:
    acting = _map(_map(decision, "actingOn"), "threshold").get("signal")
    return _unit_of(acting or decision.get("rankedFor"))


def _unit_of(signal: object) -> Unit:
    return _UNITS.get(str(signal), Unit.BYTES)


def _order(decision: JsonObject) -> list[str]:
    order = decision.get("rankOrder")
    return [wording.escape_terminal(str(name)) for name in order] if isinstance(order, list) else []
