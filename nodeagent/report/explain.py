"""`nodeagent explain`: the reasons of a decision, from the flight recorder.

Without an id the last decisions are listed. With an id, its first characters or `last`, the report of one decision
lists the samples and their ages, the threshold that acted, the deficit, the pods in order with their ranking keys, the
protected pods with the reasons, the victims, the answers of the API server and the measured relief. OOM kills are
listed among the decisions (`explain_oom`).

Theory of operation. Records are JSON objects that may be older than this program, so every field is optional, and a
missing one is printed as `?`. Records of one decision share its id and may have any order: an outcome may be written
before its decision, and the relief is measured much later.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from nodeagent.config.schema import API_VERSION
from nodeagent.model import GOOD_OUTCOMES, MEMORY_SIGNALS, SIGNAL_TABLE, MemoryFigures, Signal, Unit, units
from nodeagent.policy import memory_shortage, own_limits
from nodeagent.report import explain_oom, explain_resizes, record_fields, wording
from nodeagent.report.cells import BAD, DIM, GOOD, STRONG, WARN, Cell, Column, Section
from nodeagent.report.record_fields import JsonObject
from nodeagent.report.recorded_decisions import RecordedDecision

MAX_POD_ROWS: Final = 40
"""Rows of the ranking in text; JSON has all. Victims are among the first."""
_UNITS: Final = {facts.signal.value: facts.unit for facts in SIGNAL_TABLE.values()}


# --- JSON ----------------------------------------------------------------------------------------------------


def as_list(decisions: Iterable[RecordedDecision]) -> dict[str, Any]:
    """The list as a JSON object: one item for each decision, without its ranking."""
    items = []
    for recorded in decisions:
        dropped = ("ranking", "inputs", "record")
        kept = {key: value for key, value in recorded.decision.items() if key not in dropped}
        if explain_oom.is_oom(recorded.decision):
            items.append({"kind": "OOMKills", **kept, "id": recorded.id})
            continue
        items.append({**kept, "id": recorded.id, **_later_records(recorded)})
    return {"apiVersion": API_VERSION, "kind": "DecisionList", "items": items}


def to_json(recorded: RecordedDecision) -> dict[str, Any]:
    """One decision as a JSON object: its record and all later records."""
    kept = {key: value for key, value in recorded.decision.items() if key not in ("inputs", "record")}
    if explain_oom.is_oom(recorded.decision):
        return {"apiVersion": API_VERSION, "kind": "OOMKills", **kept, "id": recorded.id}
    return {"apiVersion": API_VERSION, "kind": "Decision", **kept, "id": recorded.id, **_later_records(recorded)}


def _later_records(recorded: RecordedDecision) -> dict[str, Any]:
    return {
        "outcomes": [{key: value for key, value in each.items() if key != "record"} for each in recorded.outcomes],
        "reliefs": [{key: value for key, value in each.items() if key != "record"} for each in recorded.reliefs],
        "reclaims": [{key: value for key, value in each.items() if key != "record"} for each in recorded.reclaims],
        "hookOutcomes": [{key: value for key, value in each.items() if key != "record"} for each in recorded.hooks],
        "resizeOutcomes": [{key: value for key, value in each.items() if key != "record"} for each in recorded.resizes],
    }


# --- text: the list --------------------------------------------------------------------------------------------


def list_section(decisions: Sequence[RecordedDecision]) -> Section:
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
    rows = tuple(_list_row(recorded) for recorded in decisions)
    lines = () if rows else (Cell("no decision is recorded: nothing was due, or the agent did not run", DIM),)
    return Section("", columns if rows else (), rows, lines)


def _list_row(recorded: RecordedDecision) -> tuple[Cell, ...]:
    decision = recorded.decision
    if explain_oom.is_oom(decision):
        return explain_oom.list_row(recorded.id, decision)
    later = (*recorded.outcomes, *recorded.reliefs, *recorded.reclaims, *recorded.hooks, *recorded.resizes)
    first = next((each for each in (decision, *later) if each), {})
    unit = _unit(decision)
    predicted = [victim.get("predictedRelief") for victim in record_fields.items(decision, "victims")]
    measured = [each.get("measured") for each in recorded.reliefs]
    return (
        Cell(record_fields.time_text(first)),
        Cell(wording.escape_terminal(recorded.id), STRONG),
        Cell(_subject(decision)),
        _headline(recorded),
        Cell(_outcomes_in_short(recorded)),
        Cell(units.format_amount(_sum(predicted), unit) if predicted else ""),
        Cell(units.format_amount(_sum(measured), unit, signed=True) if measured else ""),
    )


def _subject(decision: JsonObject) -> str:
    threshold = record_fields.mapping(record_fields.mapping(decision, "actingOn"), "threshold")
    limits = {str(victim.get("limit") or "") for victim in record_fields.items(decision, "victims")}
    if not limits and record_fields.items(decision, "resizes"):
        limits = {own_limits.OWN_LIMIT}
    if not threshold and limits and "" not in limits:
        return wording.escape_terminal(f"{', '.join(sorted(limits))} of the pod's own")
    if not threshold:
        return wording.escape_terminal(str(decision.get("rankedFor", units.UNKNOWN_TEXT)))
    return f"{wording.escape_terminal(str(threshold.get('signal')))} ({_tier(threshold)})"


def _headline(recorded: RecordedDecision) -> Cell:
    victims = [_pod(victim) for victim in record_fields.items(recorded.decision, "victims")]
    if victims:
        more = f" and {len(victims) - 2} more" if len(victims) > 2 else ""
        return Cell(f"evict {', '.join(victims[:2])}{more}", BAD)
    if (resized := explain_resizes.headline(recorded)) is not None:
        return resized
    for refusals, nothing in (
        (record_fields.eviction_refusals(recorded.decision), "no pod"),
        (record_fields.resize_refusals(recorded.decision), "no limit raised"),
    ):
        if refusals:
            return Cell(f"{nothing}: {wording.escape_terminal(', '.join([code for code, _ in refusals]))}", WARN)
    return Cell("nothing was due" if recorded.decision else "dropped", DIM)


def _outcomes_in_short(recorded: RecordedDecision) -> str:
    counts: dict[str, int] = {}
    for outcome in recorded.outcomes:
        kind = wording.escape_terminal(str(outcome.get("kind")))
        counts[kind] = counts.get(kind, 0) + 1
    return ", ".join(kind if count == 1 else f"{count} {kind}" for kind, count in counts.items())


# --- text: one decision ----------------------------------------------------------------------------------------


def sections(recorded: RecordedDecision) -> tuple[Section, ...]:
    """All sections of one decision, in reading order."""
    if explain_oom.is_oom(recorded.decision):
        return explain_oom.sections(recorded.id, recorded.decision)
    if not recorded.decision:
        head = Section(
            "",
            lines=(
                Cell(
                    f"{wording.escape_terminal(recorded.id)}: the decision itself was dropped with an older file", WARN
                ),
            ),
        )
        later = (head, _victims(recorded), _reclaims(recorded), _hooks(recorded), explain_resizes.section(recorded))
        return tuple(each for each in later if each.rows or each.lines)
    parts = (
        _head(recorded),
        _signals(recorded),
        _refusals(recorded),
        _reclaims(recorded),
        _hooks(recorded),
        explain_resizes.section(recorded),
        _victims(recorded),
        _relief(recorded),
        _conditions(recorded),
        _ranking(recorded),
        _notes(recorded),
    )
    return tuple(section for section in parts if section.rows or section.lines)


def _head(recorded: RecordedDecision) -> Section:
    decision = recorded.decision
    victims = len(record_fields.items(decision, "victims"))
    result = f"{victims} pod{'s' * (victims != 1)} to evict" if victims else "no pod to evict"
    when = record_fields.time_text(decision)
    lines = [Cell(f"{wording.escape_terminal(recorded.id)}  {when}  {_subject(decision)}: {result}", STRONG)]
    acting, deficit = record_fields.mapping(decision, "actingOn"), record_fields.mapping(decision, "deficit")
    unit = _unit(decision)
    if acting:
        threshold = record_fields.mapping(acting, "threshold")
        value = units.format_amount(record_fields.integer(acting.get("value")), unit)
        since = _age(decision, acting.get("activeSince"))
        grace = record_fields.number(threshold.get("gracePeriodSeconds"))
        after_grace = f", after a grace period of {units.format_duration(grace)}" if grace else ""
        lines.append(Cell(f"acting on {_tier(threshold)} {value}, met for {since}{after_grace}"))
    if deficit:
        amount = units.format_amount(record_fields.integer(deficit.get("amount")), unit)
        pending = record_fields.integer(deficit.get("pendingRelease"))
        pending_text = f", pending release {units.format_amount(pending, unit)}" if pending else ""
        lines.append(Cell(f"deficit {amount} with minimum reclaim{pending_text}"))
    taken = _age(decision, decision.get("snapshotTakenAt"))
    lines.append(
        Cell(f"decided {taken} after the sample; pods ranked by {', '.join(rank_order(decision)) or '?'}", DIM)
    )
    return Section("", lines=tuple(lines))


def _signals(recorded: RecordedDecision) -> Section:
    columns = (
        Column("SIGNAL"),
        Column("AVAILABLE", right=True),
        Column("CAPACITY", right=True),
        Column("THRESHOLDS"),
        Column("STATE"),
        Column("AGE", right=True),
        Column("NOT DUE, TREND, REASON"),
    )
    rows = []
    for verdict in record_fields.items(recorded.decision, "signals"):
        observation = record_fields.mapping(verdict, "observation")
        unit = unit_of(observation.get("signal"))
        thresholds = record_fields.items(verdict, "thresholds")
        not_due = [str(each.get("notDueReason")) for each in thresholds if each.get("notDueReason")]
        state = str(verdict.get("state"))
        rows.append(
            (
                Cell(wording.escape_terminal(str(observation.get("signal")))),
                Cell(units.format_amount(record_fields.integer(observation.get("available")), unit)),
                Cell(units.format_amount(record_fields.integer(observation.get("capacity")), unit)),
                Cell(", ".join(_threshold(each, unit) for each in thresholds) or "none"),
                Cell(wording.escape_terminal(state), {"ok": GOOD, "hard": BAD}.get(state, WARN)),
                Cell(_age(recorded.decision, observation.get("readAt"))),
                Cell(
                    wording.escape_terminal(
                        "; ".join(
                            filter(
                                None,
                                (
                                    *not_due,
                                    _figures_text(verdict),
                                    _trend_text(verdict),
                                    str(observation.get("reason") or ""),
                                ),
                            )
                        )
                    )
                ),
            )
        )
    return Section("SIGNALS", columns, tuple(rows))


def _figures_text(verdict: JsonObject) -> str:
    """Both figures of a memory signal: `343Mi by working set, 111Mi by MemAvailable`; empty for other signals."""
    figures = record_fields.mapping(verdict, "figures")
    signal = record_fields.mapping(verdict, "observation").get("signal")
    if not figures or signal not in list(MEMORY_SIGNALS):
        return ""
    both = [record_fields.integer(figures.get(name)) for name in ("workingSet", "byKernel")]
    return memory_shortage.figures_text(Signal(str(signal)), MemoryFigures(*both))


def _trend_text(verdict: JsonObject) -> str:
    trend = record_fields.mapping(verdict, "trend")
    return wording.trend_text(
        *[record_fields.number(trend.get(key)) for key in ("toThresholdSeconds", "toExhaustionSeconds", "confidence")]
    )


def _threshold(verdict: JsonObject, unit: Unit) -> str:
    value = units.format_amount(record_fields.integer(verdict.get("value")), unit)
    met = " met" if verdict.get("met") else ""
    return f"{_tier(record_fields.mapping(verdict, 'threshold'))} {value}{met}"


def _refusals(recorded: RecordedDecision) -> Section:
    lines = [
        Cell(wording.escape_terminal(f"{code}: {message}"), WARN)
        for code, message in record_fields.eviction_refusals(recorded.decision)
    ]
    title = "WHY NOT MORE" if record_fields.items(recorded.decision, "victims") else "WHY NO POD"
    return Section(title if lines else "", lines=tuple(lines))


def _victims(recorded: RecordedDecision) -> Section:
    columns = (
        Column("POD"),
        Column("HOW"),
        Column("GRACE", right=True),
        Column("PREDICTED", right=True),
        Column("OUTCOME"),
        Column("AFTER", right=True),
        Column("MESSAGE"),
    )
    unit = _unit(recorded.decision)
    by_uid = {str(each.get("podUid")): each for each in recorded.outcomes}
    rows = []
    for victim in record_fields.items(recorded.decision, "victims"):
        outcome = by_uid.pop(str(victim.get("uid")), {})
        rows.append(
            (
                Cell(_pod(victim), BAD),
                Cell(wording.escape_terminal(str(victim.get("method")))),
                Cell(units.format_duration(record_fields.number(victim.get("gracePeriodSeconds")))),
                Cell(units.format_amount(record_fields.integer(victim.get("predictedRelief")), unit)),
                _outcome(outcome),
                Cell(took(recorded.decision, outcome)),
                Cell(wording.escape_terminal(str(outcome.get("message") or victim.get("message") or "").strip())),
            )
        )
    for uid, outcome in by_uid.items():
        message = Cell(wording.escape_terminal(str(outcome.get("message") or "")))
        rows.append(
            (
                Cell(f"uid/{wording.escape_terminal(uid)}"),
                Cell(""),
                Cell(""),
                Cell(""),
                _outcome(outcome),
                Cell(""),
                message,
            )
        )
    return Section("VICTIMS", columns, tuple(rows))


def _outcome(outcome: JsonObject) -> Cell:
    if not outcome:
        return Cell("none recorded", WARN)
    kind = str(outcome.get("kind"))
    status = outcome.get("httpStatus")
    text = kind + (f" (HTTP {status})" if status is not None else "")
    return Cell(wording.escape_terminal(text), GOOD if kind in GOOD_OUTCOMES else BAD)


def _reclaims(recorded: RecordedDecision) -> Section:
    """Reclaim actions and their gains. An action without a report was a dry run, or its gain is not measured yet."""
    reported = {str(each.get("name")): each for each in recorded.reclaims}
    names = dict.fromkeys(
        (*[str(each.get("name")) for each in record_fields.items(recorded.decision, "reclaims")], *reported)
    )
    lines = []
    for name in names:
        each = reported.get(name)
        if each is None:
            lines.append(Cell(f"{wording.escape_terminal(name)}: no gain recorded", DIM))
            continue
        gained = units.format_amount(
            record_fields.integer(each.get("gained")), unit_of(each.get("signal")), signed=True
        )
        took = units.format_duration(record_fields.number(each.get("tookSeconds")))
        result = wording.escape_terminal(str(each.get("result")))
        good = result == "done" and (record_fields.integer(each.get("gained")) or 0) > 0
        lines.append(Cell(f"{wording.escape_terminal(name)} ({result}): {gained} in {took}", GOOD if good else WARN))
        if message := str(each.get("message") or "") if name == "pageCache" else "":
            lines.append(Cell(f"  {wording.escape_terminal(message)}", DIM))
    return Section("RECLAIM ACTIONS" if lines else "", lines=tuple(lines))


def _hooks(recorded: RecordedDecision) -> Section:
    """The hooks that this decision ran, and how those ended that its evictions waited for."""
    ended = {str(each.get("podUid")): each for each in recorded.hooks}
    orders = record_fields.items(recorded.decision, "hooks")
    names = dict.fromkeys(ended, "") | {str(each.get("podUid")): record_fields.pod_name(each) for each in orders}
    lines = []
    for uid, name in names.items():
        outcome = ended.get(uid, {})
        result = str(outcome.get("result") or "no result recorded")
        message = str(outcome.get("message") or "")
        text = f"before the eviction of {name or f'uid/{uid}'}: {result}" + (f": {message}" if message else "")
        lines.append(Cell(wording.escape_terminal(text), GOOD if result in ("done", "dry-run") else WARN))
    for victim in record_fields.items(recorded.decision, "victims"):
        hook = str(victim.get("hook") or "")
        text = f"{record_fields.pod_name(victim)}, before this eviction: {hook}"
        lines += [Cell(wording.escape_terminal(text), DIM)] if hook else []
    return Section("HOOKS" if lines else "", lines=tuple(lines))


def _relief(recorded: RecordedDecision) -> Section:
    lines = []
    for each in recorded.reliefs:
        unit = unit_of(each.get("signal"))
        measured, predicted = record_fields.integer(each.get("measured")), record_fields.integer(each.get("predicted"))
        took = units.format_duration(record_fields.number(each.get("tookSeconds")))
        enough = measured is not None and predicted is not None and 2 * measured >= predicted
        text = (
            f"{units.format_amount(measured, unit, signed=True)} measured of "
            f"{units.format_amount(predicted, unit)} "
            f"predicted, {took} after the decision"
        )
        lines.append(Cell(text, GOOD if enough else BAD))
    return Section("RELIEF" if lines else "", lines=tuple(lines))


def _conditions(recorded: RecordedDecision) -> Section:
    columns = (Column("CONDITION"), Column("STATUS"), Column("FOR", right=True), Column("MESSAGE"))
    rows = []
    for each in record_fields.items(recorded.decision, "conditions"):
        status = str(each.get("status"))
        rows.append(
            (
                Cell(wording.escape_terminal(str(each.get("type")))),
                Cell(wording.escape_terminal(status), BAD if status == "True" else ""),
                Cell(_age(recorded.decision, each.get("since"))),
                Cell(wording.escape_terminal(str(each.get("message")))),
            )
        )
    return Section("CONDITIONS", columns, tuple(rows))


def _ranking(recorded: RecordedDecision) -> Section:
    columns = (
        Column("RANK", right=True),
        Column("POD"),
        Column("USAGE", right=True),
        Column("REQUEST", right=True),
        Column("RELIEF", right=True),
        Column("WHY"),
    )
    unit = _unit(recorded.decision)
    victims = {str(victim.get("uid")) for victim in record_fields.items(recorded.decision, "victims")}
    pods = record_fields.items(recorded.decision, "ranking")
    rows = []
    for pod in pods[:MAX_POD_ROWS]:
        is_victim = str(pod.get("uid")) in victims
        rows.append(
            (
                Cell(wording.escape_terminal(str(pod.get("rank")))),
                Cell(_pod(pod), BAD if is_victim else ""),
                Cell(units.format_amount(record_fields.integer(pod.get("usage")), unit)),
                Cell(
                    units.format_amount(record_fields.integer(pod.get("request")), unit)
                    if pod.get("request") is not None
                    else "-"
                ),
                Cell(units.format_amount(record_fields.integer(pod.get("relief")), unit)),
                _why(pod, is_victim=is_victim, no_victims=not victims),
            )
        )
    more = len(pods) - len(rows)
    lines = (Cell(f"and {more} more: -o json has them all", DIM),) if more else ()
    title = wording.escape_terminal(f"PODS IN EVICTION ORDER FOR {recorded.decision.get('rankedFor')}")
    return Section(title, columns, tuple(rows), lines)


def _why(pod: JsonObject, *, is_victim: bool, no_victims: bool) -> Cell:
    keys = "; ".join(str(key.get("text")) for key in record_fields.items(pod, "keys"))
    if is_victim:
        return Cell(wording.escape_terminal(f"evicted: {keys}"), BAD)
    if refused := wording.refusal_text(record_fields.refusals(pod)):
        return Cell(wording.escape_terminal(refused), DIM)
    return Cell(wording.escape_terminal(f"{'candidate' if no_victims else 'not needed'}: {keys}"))


def _notes(recorded: RecordedDecision) -> Section:
    lines = []
    for each in record_fields.items(recorded.decision, "notes"):
        subject = " ".join(filter(None, (str(each.get("kind")), str(each.get("about") or ""))))
        lines.append(Cell(wording.escape_terminal(f"{subject}: {each.get('message')}")))
    return Section("NOTES" if lines else "", lines=tuple(lines))


# --- fields of records -----------------------------------------------------------------------------------------------


def _sum(values: Iterable[object]) -> int | None:
    numbers = [record_fields.integer(value) for value in values]
    return None if None in numbers else sum(number for number in numbers if number is not None)


def _pod(record: JsonObject) -> str:
    return wording.escape_terminal(record_fields.pod_name(record))


def _tier(threshold: JsonObject) -> str:
    return "soft" if record_fields.number(threshold.get("gracePeriodSeconds")) else "hard"


def _age(decision: JsonObject, instant: object) -> str:
    """Time from `instant` to the decision."""
    made_at, at = record_fields.number(decision.get("madeAt")), record_fields.number(instant)
    return units.UNKNOWN_TEXT if made_at is None or at is None else units.format_duration(max(0.0, made_at - at))


def took(decision: JsonObject, outcome: JsonObject) -> str:
    """From the decision to its outcome, in words; empty: unknown."""
    made_at, at = record_fields.number(decision.get("madeAt")), record_fields.number(outcome.get("at"))
    return "" if made_at is None or at is None else units.format_duration(max(0.0, at - made_at))


def _unit(decision: JsonObject) -> Unit:
    acting = record_fields.mapping(record_fields.mapping(decision, "actingOn"), "threshold").get("signal")
    return unit_of(acting or decision.get("rankedFor"))


def unit_of(signal: object) -> Unit:
    """The unit of a recorded signal; bytes for one that this version does not know."""
    return _UNITS.get(str(signal), Unit.BYTES)


def rank_order(decision: JsonObject) -> list[str]:
    """The names of the ranking keys, most significant first. Escaped for a terminal."""
    order = decision.get("rankOrder")
    return [wording.escape_terminal(str(name)) for name in order] if isinstance(order, list) else []
