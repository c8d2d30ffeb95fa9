"""The candidates of `nodeagent tune` as text, with a curve for each signal, and as JSON."""

from collections.abc import Sequence
from typing import Any, Final

from nodeagent.analysis import tuning
from nodeagent.analysis.tuning import Candidate, SignalTuning, Tuning
from nodeagent.config.schema import Config
from nodeagent.model import SIGNAL_TABLE, units
from nodeagent.report import sparkline, wording
from nodeagent.report.cells import BAD, DIM, GOOD, STRONG, WARN, Cell, Column, Section

BAR_WIDTH: Final = 20
"""Letters of the bar of false alarms."""
CURVE_GRACES_S: Final = (0.0, 60.0)
"""The grace periods that the curves show: one for each tier."""


def sections(found: Tuning, config: Config, *, source: str, nodes: Sequence[str]) -> tuple[Section, ...]:
    """A summary, for each signal its candidates and a curve, and the stanza to paste."""
    start = "" if found.first_wall is None else f" from {wording.rfc3339(found.first_wall)}"
    end = "" if found.last_wall is None else f" to {wording.rfc3339(found.last_wall)}"
    of = f", {len(nodes)} nodes" if len(nodes) > 1 else ""
    head = f"{wording.escape_terminal(source)}{of}{start}{end}, {units.format_duration(found.recorded_s)} recorded"
    parts = [Section("", lines=(Cell(head, STRONG),))]
    quiet = [each for each in found.signals if not _has_news(each)]
    for each in found.signals:
        if each not in quiet:
            parts += [_table(each), _curve(each)]
    if quiet:
        parts.append(Section("NO ALARM OF ANY CANDIDATE", lines=tuple([Cell(_facts(each)) for each in quiet])))
    if found.unknown:
        names = ", ".join(signal.value for signal in found.unknown)
        parts.append(Section("NOT RECORDED", lines=(Cell(names, WARN),)))
    text = tuning.stanza(found, config)
    lines = [Cell(line) for line in text.splitlines()]
    note = "Nothing was changed. The stanza replaces the thresholds of the configuration; `config validate` checks it."
    parts.append(Section("STANZA TO PASTE", lines=(*lines, Cell(note, DIM))))
    return tuple(parts)


def _table(found: SignalTuning) -> Section:
    columns = (
        Column("VALUE"),
        Column("AMOUNT", right=True),
        Column("GRACE", right=True),
        Column("ALARMS", right=True),
        Column("FALSE", right=True),
        Column("ANSWERED", right=True),
        Column("OPEN", right=True),
        Column("CAUGHT", right=True),
        Column("MISSED", right=True),
        Column("LEAD", right=True),
        Column(""),
    )
    shown = [each for each in found.candidates if _worth_a_row(each, found)]
    shown.sort(key=lambda each: (each.level, each.grace_s))
    rows = tuple([_row(each, found) for each in shown])
    lines = [Cell(_facts(found))]
    if len(shown) < len(found.candidates):
        left = len(found.candidates) - len(shown)
        lines.append(Cell(f"{left} further candidates are not listed: -o json has all", DIM))
    lines.append(Cell(f"proposed: {found.reason}", DIM))
    return Section(f"CANDIDATES FOR {found.signal.value}", columns, rows, tuple(lines))


def _has_news(found: SignalTuning) -> bool:
    """Whether something happened to the signal: an alarm of a candidate, an exhaustion or an act."""
    return bool(found.exhaustions or found.acts) or any(each.alarms for each in found.candidates)


def _facts(found: SignalTuning) -> str:
    unit = SIGNAL_TABLE[found.signal].unit
    level = units.format_amount(found.exhaustion_level, unit)
    return (
        f"{found.signal.value}: lowest {units.format_amount(found.lowest, unit)} of "
        f"{units.format_amount(found.capacity, unit)}, exhausted (at or below {level}): "
        f"{len(found.exhaustions)}, evictions by the recorded agent: {len(found.acts)}"
    )


def _worth_a_row(candidate: Candidate, found: SignalTuning) -> bool:
    """Configured, proposed, or of a grace period of the curves with an alarm; with an exhaustion also without one,
    because silence is then a miss."""
    if candidate.configured or candidate in (found.hard, found.soft):
        return True
    return candidate.grace_s in CURVE_GRACES_S and bool(found.exhaustions or candidate.alarms)


def _row(candidate: Candidate, found: SignalTuning) -> tuple[Cell, ...]:
    marks = [
        *(["configured"] if candidate.configured else []),
        *(["proposed hard"] if candidate is found.hard else []),
        *(["proposed soft"] if candidate is found.soft else []),
    ]
    missed = units.UNKNOWN_TEXT if candidate.missed is None else str(candidate.missed)
    return (
        Cell(wording.escape_terminal(candidate.value.text)),
        Cell(units.format_amount(candidate.level, SIGNAL_TABLE[found.signal].unit)),
        Cell("hard" if not candidate.grace_s else units.format_duration(candidate.grace_s)),
        Cell(str(candidate.alarms)),
        Cell(str(candidate.false_alarms), WARN if candidate.false_alarms else ""),
        Cell(str(candidate.answered)),
        Cell(str(candidate.open)),
        Cell(str(candidate.caught)),
        Cell(missed, BAD if candidate.missed else ""),
        Cell(units.format_duration(candidate.shortest_lead_s)),
        Cell(", ".join(marks), GOOD if candidate in (found.hard, found.soft) else DIM),
    )


def _curve(found: SignalTuning) -> Section:
    """False alarms as bars over the values, misses and lead time beside them, for one grace of each tier."""
    lines: list[Cell] = []
    for grace_s in CURVE_GRACES_S:
        row = curve(found, grace_s)
        most = max([each.false_alarms for each in row], default=0)
        if not row or not (most or any(each.missed for each in row) or found.exhaustions):
            continue
        tier = "hard" if not grace_s else f"grace {units.format_duration(grace_s)}"
        lines.append(Cell(f"{tier}: false alarms, misses and lead time by value", STRONG))
        for each in row:
            bar = sparkline.bar(each.false_alarms / most if most else 0.0, BAR_WIDTH)
            missed = "" if each.missed is None else f"  {each.missed} missed"
            lead = "" if each.shortest_lead_s is None else f"  lead {units.format_duration(each.shortest_lead_s)}"
            amount = units.format_amount(each.level, SIGNAL_TABLE[found.signal].unit)
            lines.append(Cell(f"{amount:>8} {bar} {each.false_alarms} false{missed}{lead}"))
    return Section(f"CURVE FOR {found.signal.value}" if lines else "", lines=tuple(lines))


def curve(found: SignalTuning, grace_s: float) -> Sequence[Candidate]:
    """The candidates with this grace period, lowest value first, one for each amount."""
    by_level = {each.level: each for each in found.candidates if each.grace_s == grace_s}
    return [by_level[level] for level in sorted(by_level)]


def to_json(found: Tuning, config: Config, *, source: str, nodes: Sequence[str]) -> dict[str, Any]:
    """All candidates."""
    return {
        "source": source,
        "nodes": list(nodes),
        "from": None if found.first_wall is None else wording.rfc3339(found.first_wall),
        "to": None if found.last_wall is None else wording.rfc3339(found.last_wall),
        "recordedSeconds": found.recorded_s,
        "signals": [_signal_json(each) for each in found.signals],
        "notRecorded": [signal.value for signal in found.unknown],
        "stanza": tuning.stanza(found, config),
    }


def _signal_json(found: SignalTuning) -> dict[str, Any]:
    return {
        "signal": found.signal.value,
        "samples": found.samples,
        "lowest": found.lowest,
        "capacity": found.capacity,
        "exhaustionLevel": found.exhaustion_level,
        "exhaustions": [{"time": wording.rfc3339(each.at), "what": each.what} for each in found.exhaustions],
        "acts": [{"time": wording.rfc3339(each.at), "what": each.what} for each in found.acts],
        "candidates": [_candidate_json(each, found) for each in found.candidates],
        "reason": found.reason,
    }


def _candidate_json(candidate: Candidate, found: SignalTuning) -> dict[str, Any]:
    return {
        "value": candidate.value.text,
        "amount": candidate.level,
        "gracePeriodSeconds": candidate.grace_s,
        "alarms": candidate.alarms,
        "falseAlarms": candidate.false_alarms,
        "answered": candidate.answered,
        "open": candidate.open,
        "caught": candidate.caught,
        "missed": candidate.missed,
        "leadSeconds": list(candidate.lead_s),
        "metSeconds": candidate.met_s,
        "configured": candidate.configured,
        "proposed": "hard" if candidate is found.hard else "soft" if candidate is found.soft else None,
    }
