"""`nodeagent tune`: candidates for thresholds and grace periods from recordings. Nothing is changed."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from nodeagent.analysis import fleet_tuning, tuning_report
from nodeagent.analysis.tuning import SignalTuning, Tuner, Tuning
from nodeagent.commands import html_file, printing, recorded_input
from nodeagent.commands.recorded_input import InputError, PrometheusOptions, RecordedInput
from nodeagent.config import above_kubelet
from nodeagent.config.schema import API_VERSION, Config
from nodeagent.model import EVICTED_OUTCOMES, SIGNAL_TABLE, OomCause, Signal
from nodeagent.report import charts, history, html_page, progress_bar, record_fields, wording
from nodeagent.report.cells import WARN, Cell, Section
from nodeagent.report.charts import Line
from nodeagent.report.html_page import Html


class TuneError(Exception):
    """There is nothing to tune with. The message is for the user."""


class TuneReport(NamedTuple):
    """The result."""

    source: str
    config: Config
    found: Tuning
    nodes: tuple[str, ...]
    remarks: tuple[str, ...]


_SIGNALS: Final = {signal.value: signal for signal in Signal}


def run(
    *,
    places: Sequence[str],
    prometheus: PrometheusOptions | None,
    config: Config,
    within_s: float,
    output: str,
    color: str,
    html: str | None,
) -> None:
    """Read, tune and print. Raises TuneError, OutputError."""
    try:
        report = make_report(
            [recorded_input.open_prometheus(prometheus)]
            if prometheus is not None
            else [recorded_input.open_file(Path(place)) for place in places],
            config,
            within_s=within_s,
        )
    except InputError as error:
        raise TuneError(str(error)) from error
    if html is not None:
        blocks = [*[_chart(each) for each in report.found.signals], *html_page.sections(sections(report))]
        html_file.write(html, "nodeagent tune", blocks)
    printing.show(sections(report), lambda: to_json(report), output=output, color=color)


def make_report(inputs: Sequence[RecordedInput], config: Config, *, within_s: float) -> TuneReport:
    """Feed every input, the oldest first. Raises InputError and TuneError."""
    ordered = sorted(inputs, key=lambda each: each.first_wall)
    kubelet = next((each.kubelet for each in reversed(ordered) if each.kubelet), ())
    config_above = above_kubelet.keep_above(config, kubelet)
    tuners: dict[str, Tuner] = {}
    remarks: list[str] = []
    without_node: list[RecordedInput] = []
    for each in ordered:
        with progress_bar.ProgressBar(f"reading {each.name}", total=each.total) as bar:
            snapshots = each.snapshots(bar.show)
            first = next(snapshots, None)
            if first is None:
                without_node.append(each)
                continue
            # One recording is of one node.
            tuner = tuners.setdefault(first.node, Tuner(config_above, within_s=within_s))
            for snapshot in itertools.chain([first], snapshots):
                tuner.feed(snapshot)
        add_records(tuner, each.records())
        remarks += each.remarks()
    for each in without_node:
        if len(tuners) == 1:
            [tuner] = tuners.values()
            add_records(tuner, each.records())
        elif tuners:
            remarks.append(f"{each.name}: left out, because without a sample its node is unknown.")
        remarks += each.remarks()
    remarks += [
        f"{tuner.left_out} samples of {node} are not newer than the ones before them and were left out."
        for node, tuner in tuners.items()
        if tuner.left_out
    ]
    source = ", ".join([each.name for each in ordered])
    found = fleet_tuning.combined([each.result() for each in tuners.values()])
    if not found.signals:
        raise TuneError("; ".join([f"{source}: contains no sample with a signal", *remarks]))
    return TuneReport(source, config, found, tuple(tuners), tuple(remarks))


def add_records(tuner: Tuner, records: Iterable[Mapping[str, Any]]) -> None:
    """OOM kills for which the node had no memory left, and evictions that were carried out."""
    records = list(records)
    for record in records:
        wall = record_fields.number(record.get("wallTime"))
        if record.get("record") == "oom" and wall is not None:
            kills = record_fields.items(record, "kills")
            if any(each.get("cause") == OomCause.NODE.value for each in kills):
                tuner.add_kill(wall)
    for mark in history.evictions(records):
        signal = _SIGNALS.get(mark.signal)
        if signal is not None and mark.outcome in EVICTED_OUTCOMES:
            tuner.add_act(signal, mark.at, uid=mark.uid)


def sections(report: TuneReport) -> tuple[Section, ...]:
    """The report as text."""
    parts = tuning_report.sections(report.found, report.config, source=report.source, nodes=report.nodes)
    if not report.remarks:
        return parts
    lines = tuple([Cell(wording.escape_terminal(each), WARN) for each in report.remarks])
    return (*parts, Section("WHAT THE RECORDINGS CANNOT TELL", lines=lines))


def to_json(report: TuneReport) -> dict[str, Any]:
    """The report as one JSON object."""
    return {
        "apiVersion": API_VERSION,
        "kind": "TuneReport",
        **tuning_report.to_json(report.found, report.config, source=report.source, nodes=report.nodes),
        "cannotTell": list(report.remarks),
    }


def _chart(found: SignalTuning) -> Html:
    """False alarms and misses over the values, hard and with a grace period."""
    lines = []
    for grace_s in tuning_report.CURVE_GRACES_S:
        row = tuning_report.curve(found, grace_s)
        name = "hard" if not grace_s else f"grace {grace_s:g}s"
        lines.append(Line(f"false alarms, {name}", [(float(each.level), float(each.false_alarms)) for each in row]))
        if found.exhaustions:
            lines.append(Line(f"missed, {name}", [(float(each.level), float(each.missed or 0)) for each in row]))
    return charts.curve_chart(
        f"{found.signal.value}: false alarms and misses by value",
        lines,
        x_name="value of the threshold",
        x_unit=SIGNAL_TABLE[found.signal].unit,
        note=found.reason,
    )
