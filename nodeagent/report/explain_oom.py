"""`nodeagent explain` for OOM kills: the row of the list, and the report of one record."""

from typing import Final

from nodeagent.model import units
from nodeagent.report import record_fields, wording
from nodeagent.report.cells import BAD, DIM, STRONG, WARN, Cell, Column, Section
from nodeagent.report.record_fields import JsonObject

RECORD: Final = "oom"
"""The kind of these records."""
LAST_SAMPLES: Final = 15
"""Samples in text; JSON has all."""


def is_oom(record: JsonObject) -> bool:
    return record.get("record") == RECORD


def list_row(identity: str, record: JsonObject) -> tuple[Cell, ...]:
    """The row of the list of decisions."""
    kills = record_fields.items(record, "kills")
    number = sum(record_fields.integer(kill.get("number")) or 0 for kill in kills)
    subjects = list(dict.fromkeys(_subject(kill) for kill in kills))
    more = f" and {len(subjects) - 2} more" if len(subjects) > 2 else ""
    loss = record_fields.mapping(record, "race").get("loss")
    causes = ", ".join(dict.fromkeys(str(kill.get("cause")) for kill in kills))
    return (
        Cell(record_fields.time_text(record)),
        Cell(wording.escape_terminal(identity), STRONG),
        Cell("OOM kill"),
        Cell(f"{number} killed: {', '.join(subjects[:2])}{more}", BAD if loss else WARN),
        Cell(wording.escape_terminal(f"too late: {loss}" if loss else causes)),
        Cell(""),
        Cell(""),
    )


def sections(identity: str, record: JsonObject) -> tuple[Section, ...]:
    """All sections of one record, in reading order."""
    parts = (_head(identity, record), _kills(record), _race(record), _samples(record))
    return tuple(section for section in parts if section.rows or section.lines)


def _head(identity: str, record: JsonObject) -> Section:
    number = sum(record_fields.integer(kill.get("number")) or 0 for kill in record_fields.items(record, "kills"))
    text = f"{wording.escape_terminal(identity)}  {record_fields.time_text(record)}  OOM kills: {number}"
    lines = [Cell(text, STRONG)]
    at, killed_at = record_fields.number(record.get("at")), record_fields.number(record.get("killedAt"))
    if record.get("whileDown") is True:
        lines.append(Cell("while the agent was not running", WARN))
    elif at is not None and killed_at is not None:
        lines.append(Cell(f"found {units.format_duration(max(0.0, at - killed_at))} after the first kill", DIM))
    return Section("", lines=tuple(lines))


def _kills(record: JsonObject) -> Section:
    columns = (
        Column("OF"),
        Column("NUMBER", right=True),
        Column("CAUSE"),
        Column("PROCESSES"),
        Column("CGROUP"),
    )
    rows = []
    for kill in record_fields.items(record, "kills"):
        place = record_fields.mapping(kill, "place")
        limit = str(kill.get("limit") or "")
        cause = str(kill.get("cause")) + (f" of {limit}" if limit and limit != place.get("path") else "")
        rows.append(
            (
                Cell(_subject(kill), BAD),
                Cell(units.UNKNOWN_TEXT if (number := kill.get("number")) is None else str(number)),
                Cell(wording.escape_terminal(cause + (", whole cgroup" if kill.get("group") is True else ""))),
                Cell(", ".join(map(_process, record_fields.items(kill, "processes"))) or "not logged"),
                Cell(wording.escape_terminal(str(place.get("path") or units.UNKNOWN_TEXT)), DIM),
            )
        )
    return Section("OOM KILLS", columns, tuple(rows))


def _subject(kill: JsonObject) -> str:
    if pod := kill.get("pod"):
        container = kill.get("container")
        return wording.escape_terminal(f"{pod} ({container})" if container else str(pod))
    return wording.escape_terminal(str(record_fields.mapping(kill, "place").get("path") or "not attributed"))


def _process(process: JsonObject) -> str:
    resident = record_fields.integer(process.get("rss"))
    size = f", {units.format_amount(resident)}" if resident is not None else ""
    return wording.escape_terminal(f"{process.get('name')} (PID {process.get('pid')}{size})")


def _race(record: JsonObject) -> Section:
    race = record_fields.mapping(record, "race")
    if not race:
        return Section("WHY NO EVICTION CAME FIRST")
    lines = [Cell(wording.escape_terminal(str(race.get("loss"))), BAD)]
    deficit = record_fields.integer(race.get("deficit"))
    if deficit is not None:
        relation = "below" if deficit >= 0 else "above"
        before = units.format_duration(record_fields.number(race.get("beforeSeconds")))
        text = (
            f"{units.format_amount(abs(deficit))} {relation} the threshold of {race.get('threshold')}, {before} before"
        )
        lines.append(Cell(wording.escape_terminal(text)))
    for title, key in (("in flight", "inFlight"), ("the victim would have been", "victims"), ("refused", "refusals")):
        values = race.get(key)
        if isinstance(values, list) and values:
            lines.append(Cell(wording.escape_terminal(f"{title}: {', '.join(map(str, values))}")))
    return Section("WHY NO EVICTION CAME FIRST", lines=tuple(lines))


def _samples(record: JsonObject) -> Section:
    """The last samples before the kill, with their time before it."""
    columns = (
        Column("BEFORE", right=True),
        Column("WORKING SET MODEL", right=True),
        Column("MEMAVAILABLE", right=True),
        Column("PSI SOME", right=True),
        Column("FULL", right=True),
    )
    end = record_fields.number(record.get("killedAt"))
    end = record_fields.number(record.get("at")) if end is None else end
    samples = record_fields.items(record, "samples")
    rows = []
    for sample in samples[-LAST_SAMPLES:]:
        at = record_fields.number(sample.get("at"))
        rows.append(
            (
                Cell(units.UNKNOWN_TEXT if at is None or end is None else units.format_duration(max(0.0, end - at))),
                Cell(units.format_amount(record_fields.integer(sample.get("workingSetAvailable")))),
                Cell(units.format_amount(record_fields.integer(sample.get("memAvailable")))),
                _stall(sample.get("someAvg10")),
                _stall(sample.get("fullAvg10")),
            )
        )
    more = len(samples) - len(rows)
    lines = (Cell(f"and {more} earlier ones: -o json has them all", DIM),) if more else ()
    return Section("SAMPLES OF MEMORY.AVAILABLE BEFORE THE KILL", columns if rows else (), tuple(rows), lines)


def _stall(value: object) -> Cell:
    share = record_fields.number(value)
    return Cell("-" if share is None else f"{share:.2f}%")
