"""One or two configurations over the same samples, side by side, as text sections and as JSON.

Promises:

1. The recording is read once, whatever the number of configurations.
2. A pod is *spared* by a configuration if another one of the comparison evicts it.
3. The report ends with what the recording cannot tell: the assumptions of every simulation, and what this recording
   lacks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from nodeagent.analysis import simulation
from nodeagent.analysis.simulation import Closest, SimulatedEviction, Simulation, Simulator
from nodeagent.config.schema import Config
from nodeagent.model import EVICTED_OUTCOMES, SIGNAL_TABLE, ConditionType, NodeSnapshot, Signal, units
from nodeagent.report import wording
from nodeagent.report.cells import BAD, DIM, GOOD, STRONG, WARN, Cell, Column, Section

MAX_EVICTION_ROWS: Final = 50
"""Evictions of each configuration in text; JSON has all."""
LOW_SHARE: Final = 0.3
"""Signals that never fell below this share of their capacity have no row in text; JSON has all."""
MEASURED_DISTANCES: Final = 2000
"""Samples whose distance is measured, from the first on."""


class RecordedEviction(NamedTuple):
    """A pod that the recorded agent evicted."""

    wall_time: float
    pod: str
    uid: str
    plan_id: str


class Comparison(NamedTuple):
    """The simulations of one recording, in the order of the command line."""

    source: str
    simulations: tuple[Simulation, ...]
    recorded: tuple[RecordedEviction, ...]
    interval_s: float | None
    """Median distance of the samples."""
    remarks: tuple[str, ...]
    """What this recording cannot tell or lacks."""


def compare(
    samples: Iterable[NodeSnapshot],
    configs: Sequence[tuple[str, Config]],
    *,
    source: str,
    recorded: tuple[RecordedEviction, ...] = (),
    remarks: Callable[[], Iterable[str]] = tuple,
) -> Comparison:
    """Run every configuration over the samples. `remarks` is called after the last one."""
    simulators = [Simulator(config, name=name) for name, config in configs]
    feeds = [simulator.feed for simulator in simulators]
    distances: list[float] = []
    last_at = 0.0
    for count, snapshot in enumerate(samples):
        for feed in feeds:
            feed(snapshot)
        if 0 < count < MEASURED_DISTANCES:
            distances.append(snapshot.taken_at - last_at)
        last_at = snapshot.taken_at
    results = tuple([simulator.result() for simulator in simulators])
    interval_s = sorted(distances)[len(distances) // 2] if distances else None
    return Comparison(
        source,
        results,
        recorded,
        interval_s,
        (*remarks(), *_remarks([config for _, config in configs], results, recorded, interval_s)),
    )


def recorded_evictions(records: Iterable[Mapping[str, Any]]) -> tuple[RecordedEviction, ...]:
    """The evictions that the recorded agent carried out: victims of a decision with an outcome that says so."""
    planned: dict[tuple[str, str], RecordedEviction] = {}
    done: list[RecordedEviction] = []
    for record in records:
        wall = record.get("wallTime")
        if not isinstance(wall, int | float):
            continue
        if record.get("record") == "decision":
            victims = record.get("victims")
            for victim in victims if isinstance(victims, list) else ():
                if isinstance(victim, Mapping):
                    plan_id, uid = str(record.get("id")), str(victim.get("uid"))
                    pod = f"{victim.get('namespace')}/{victim.get('name')}"
                    planned[plan_id, uid] = RecordedEviction(float(wall), pod, uid, plan_id)
        elif record.get("record") == "outcome" and str(record.get("kind")) in EVICTED_OUTCOMES:
            found = planned.pop((str(record.get("planId")), str(record.get("podUid"))), None)
            if found is not None:
                done.append(found)
    return tuple(done)


def _remarks(
    configs: Sequence[Config],
    results: Sequence[Simulation],
    recorded: Sequence[RecordedEviction],
    interval_s: float | None,
) -> list[str]:
    """What this recording lacks."""
    found = []
    graces = sorted({each.grace_period_s for config in configs for each in config.thresholds if not each.hard})
    if interval_s is not None and graces and interval_s > graces[0] / 2:
        found.append(
            f"Samples are {units.format_duration(interval_s)} apart, and the shortest grace period is "
            f"{units.format_duration(graces[0])}: a threshold may have been met and left between two samples."
        )
    stale = min([config.sampling.stale_after_s for config in configs], default=0.0)
    if interval_s is not None and interval_s > stale:
        found.append(
            f"Samples are {units.format_duration(interval_s)} apart, more than sampling.staleAfter "
            f"({units.format_duration(stale)}): every grace period starts again at each sample, so no soft threshold "
            "is ever due."
        )
    first = results[0] if results else None
    if first is not None and first.gap_s > 0.0:
        found.append(f"{units.format_duration(first.gap_s)} of the time are not recorded.")
    if first is not None and first.left_out:
        found.append(f"{first.left_out} samples are not newer than the one before them and were left out.")
    if first is not None and first.boots > 1:
        found.append(f"The machine was restarted {first.boots - 1} times; each start has a state of its own.")
    evicted = [{each.uid for each in result.evictions} for result in results]
    only = [each for each in recorded if any(each.uid not in uids for uids in evicted)]
    if only:
        found.append(
            f"From {wording.rfc3339(only[0].wall_time)} on the recording has the effect of evictions that not every "
            f"configuration here makes ({', '.join(dict.fromkeys(each.pod for each in only[:3]))}): later differences "
            "are uncertain."
        )
    found += [f"{result.name}: no decision on the {text}" for result in results for text in result.trouble[:3]]
    return found


# --- for programs ----------------------------------------------------------------------------------------------------


def to_json(comparison: Comparison) -> dict[str, Any]:
    """The comparison as a part of the report."""
    return {
        "source": comparison.source,
        "sampleIntervalSeconds": comparison.interval_s,
        "recordedEvictions": [
            {"time": wording.rfc3339(each.wall_time), "pod": each.pod, "uid": each.uid, "id": each.plan_id}
            for each in comparison.recorded
        ],
        "configurations": [_to_json(each, comparison) for each in comparison.simulations],
        "cannotTell": [*simulation.LIMITS, *comparison.remarks],
    }


def _to_json(result: Simulation, comparison: Comparison) -> dict[str, Any]:
    return {
        "configuration": result.name,
        "samples": result.samples,
        "decidedSamples": result.decided,
        "from": _time(result.first_wall),
        "to": _time(result.last_wall),
        "recordedSeconds": result.recorded_s,
        "gapSeconds": result.gap_s,
        "evictions": [
            {
                "time": wording.rfc3339(each.wall_time),
                "id": each.plan_id,
                "pod": each.pod,
                "uid": each.uid,
                "signal": each.signal.value,
                "tier": each.tier.value,
                "method": each.method.value,
                "gracePeriodSeconds": each.grace_s,
                "available": each.available,
                "threshold": each.threshold,
                "predictedRelief": each.predicted_relief,
                "limit": each.limit or None,
            }
            for each in result.evictions
        ],
        "spared": [{"pod": pod, "uid": uid} for uid, pod in _spared(result, comparison).items()],
        "conditions": {
            each.value: {"trueSeconds": totals.true_s, "raises": totals.raises}
            for each, totals in result.conditions.items()
        },
        "hardSeconds": result.hard_s,
        "softSeconds": result.soft_s,
        "closest": {
            signal.value: {
                "available": each.available,
                "capacity": each.capacity,
                "time": wording.rfc3339(each.wall_time),
            }
            for signal, each in result.closest.items()
        },
        "refusals": {code.value: count for code, count in result.refusals.items()},
        "reclaimOrders": result.reclaims,
        "boots": result.boots,
        "trouble": list(result.trouble),
    }


def _time(wall: float | None) -> str | None:
    return None if wall is None else wording.rfc3339(wall)


def _spared(result: Simulation, comparison: Comparison) -> dict[str, str]:
    """UID -> name of the pods that another configuration evicts and this one does not."""
    own = {each.uid for each in result.evictions}
    others = [each for other in comparison.simulations if other is not result for each in other.evictions]
    return {each.uid: each.pod for each in others if each.uid not in own}


# --- for people ------------------------------------------------------------------------------------------------------


def sections(comparison: Comparison) -> tuple[Section, ...]:
    """The totals side by side, the evictions of each configuration, and what the recording cannot tell."""
    return (
        _summary(comparison),
        _totals(comparison),
        *[_evictions(result, comparison) for result in comparison.simulations],
        _recorded(comparison),
        Section(
            "WHAT THE RECORDING CANNOT TELL",
            lines=tuple(
                [Cell(wording.escape_terminal(text), WARN) for text in comparison.remarks]
                + [Cell(text, DIM) for text in simulation.LIMITS]
            ),
        ),
    )


def _summary(comparison: Comparison) -> Section:
    first = comparison.simulations[0]
    start = "" if first.first_wall is None else f" from {wording.rfc3339(first.first_wall)}"
    end = "" if first.last_wall is None else f" to {wording.rfc3339(first.last_wall)}"
    text = (
        f"{first.samples} samples of {wording.escape_terminal(comparison.source)}{start}{end}, "
        f"{units.format_duration(first.recorded_s)} recorded"
    )
    return Section("", lines=(Cell(text, STRONG),))


def _totals(comparison: Comparison) -> Section:
    results = comparison.simulations
    rows: list[tuple[Cell, ...]] = [
        _row("evictions", [(str(len(each.evictions)), BAD if each.evictions else GOOD) for each in results]),
        _row("pods evicted", [(str(len({one.uid for one in each.evictions})), "") for each in results]),
    ]
    if len(results) > 1:
        rows.append(_row("pods spared", [(str(len(_spared(each, comparison))), "") for each in results]))
    rows += [
        _row(
            "a hard threshold met",
            [(units.format_duration(each.hard_s), BAD if each.hard_s else "") for each in results],
        ),
        _row("only a soft threshold met", [(units.format_duration(each.soft_s), "") for each in results]),
    ]
    for condition in ConditionType:
        if any(each.conditions[condition].raises for each in results):
            rows.append(_row(f"{condition.value} True", [(_condition(each, condition), "") for each in results]))
    for signal in Signal:
        if any(_is_low(each, signal) for each in results):
            rows.append(
                _row(f"lowest {signal.value}", [(_closest(each.closest.get(signal), signal), "") for each in results])
            )
    if any(each.reclaims for each in results):
        rows.append(_row("reclaim orders", [(str(each.reclaims), "") for each in results]))
    for code in dict.fromkeys([code for each in results for code in each.refusals]):
        rows.append(_row(f"decisions with {code.value}", [(str(each.refusals.get(code, 0)), DIM) for each in results]))
    columns = (Column(""), *[Column(wording.escape_terminal(each.name), right=True) for each in results])
    return Section("SIMULATION", columns, tuple(rows))


def _row(title: str, values: Sequence[tuple[str, str]]) -> tuple[Cell, ...]:
    return (Cell(title), *[Cell(text, style) for text, style in values])


def _condition(result: Simulation, condition: ConditionType) -> str:
    totals = result.conditions[condition]
    return f"{units.format_duration(totals.true_s)}, raised {totals.raises}x"


def _is_low(result: Simulation, signal: Signal) -> bool:
    """Whether the lowest value of a signal is worth a row. JSON has all."""
    closest = result.closest.get(signal)
    return closest is not None and closest.available < LOW_SHARE * closest.capacity


def _closest(closest: Closest | None, signal: Signal) -> str:
    if closest is None:
        return units.UNKNOWN_TEXT
    share = f" ({100 * closest.available / closest.capacity:.1f}%)" if closest.capacity else ""
    return units.format_amount(closest.available, SIGNAL_TABLE[signal].unit) + share


def _evictions(result: Simulation, comparison: Comparison) -> Section:
    columns = (
        Column("TIME"),
        Column("POD"),
        Column("FOR"),
        Column("AVAILABLE", right=True),
        Column("THRESHOLD", right=True),
        Column("RELIEF", right=True),
        Column("GRACE", right=True),
    )
    title = wording.escape_terminal(f"EVICTIONS WITH {result.name}")
    if not result.evictions:
        return Section(title, lines=(Cell("none", GOOD),))
    shared = [{each.uid for each in other.evictions} for other in comparison.simulations if other is not result]
    rows = [
        _eviction_row(each, only=bool(shared) and not any(each.uid in uids for uids in shared))
        for each in result.evictions
    ]
    more = len(rows) - MAX_EVICTION_ROWS
    lines = (Cell(f"and {more} more: -o json has them all", DIM),) if more > 0 else ()
    return Section(title, columns, tuple(rows[:MAX_EVICTION_ROWS]), lines)


def _eviction_row(eviction: SimulatedEviction, *, only: bool) -> tuple[Cell, ...]:
    unit = SIGNAL_TABLE[eviction.signal].unit
    for_text = eviction.limit or f"{eviction.signal.value} ({eviction.tier.value})"
    return (
        Cell(wording.rfc3339(eviction.wall_time)),
        Cell(wording.escape_terminal(eviction.pod), BAD if only else ""),
        Cell(for_text),
        Cell(units.format_amount(eviction.available, unit)),
        Cell(units.format_amount(eviction.threshold, unit)),
        Cell(units.format_amount(eviction.predicted_relief, unit)),
        Cell(units.format_duration(eviction.grace_s)),
    )


def _recorded(comparison: Comparison) -> Section:
    if not comparison.recorded:
        return Section("")
    columns = (
        Column("TIME"),
        Column("POD"),
        Column("ID"),
        *[Column(wording.escape_terminal(f"WITH {each.name}")) for each in comparison.simulations],
    )
    evicted = [{each.uid for each in result.evictions} for result in comparison.simulations]
    rows = [
        (
            Cell(wording.rfc3339(each.wall_time)),
            Cell(wording.escape_terminal(each.pod)),
            Cell(wording.escape_terminal(each.plan_id)),
            *[Cell("evicted", BAD) if each.uid in uids else Cell("spared", GOOD) for uids in evicted],
        )
        for each in comparison.recorded[:MAX_EVICTION_ROWS]
    ]
    return Section("EVICTED BY THE RECORDED AGENT", columns, tuple(rows))
