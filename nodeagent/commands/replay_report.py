"""`nodeagent replay`: both parts of its report, and where they are printed.

1. Recorded decisions are repeated one by one (`replay`), with the recorded snapshot and state.
2. Recorded samples are simulated (`analysis.comparison`): one or two configurations from a fresh state.

An input may have only one of the two. Nothing is changed and nothing is sent.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nodeagent.analysis import comparison
from nodeagent.analysis.comparison import Comparison
from nodeagent.commands import printing, recorded_input, replay, replay_charts
from nodeagent.commands.recorded_input import InputError, PrometheusOptions, RecordedInput
from nodeagent.commands.replay import Replayed, ReplayError
from nodeagent.config import above_kubelet
from nodeagent.config.schema import API_VERSION, Config
from nodeagent.model import NodeSnapshot
from nodeagent.report import progress_bar, wording
from nodeagent.report.cells import STRONG, Cell, Section


class ReplayReport(NamedTuple):
    """The result."""

    configs: tuple[str, ...]
    """The names of the configurations, in the order of the command line."""
    decisions: tuple[tuple[Replayed, ...], ...]
    """Of each configuration."""
    simulation: Comparison | None
    """None: the input has no samples."""


def run(
    *,
    place: str | None,
    prometheus: PrometheusOptions | None,
    configs: Sequence[tuple[str, Config]],
    output: str,
    color: str,
    html: str | None,
) -> None:
    """Read, replay and print. Raises ReplayError, OutputError."""
    try:
        if prometheus is not None:
            source: RecordedInput = recorded_input.open_prometheus(prometheus)
        else:
            source = recorded_input.open_file(Path(place or ""))
        collector = replay_charts.SignalCharts(source, configs) if html is not None else None
        report = make_report(source, configs, collector=collector)
    except InputError as error:
        raise ReplayError(str(error)) from error
    if html is not None and collector is not None:
        collector.write(html, "nodeagent replay", sections(report), report.simulation)
    printing.show(sections(report), lambda: to_json(report), output=output, color=color)


def make_report(
    source: RecordedInput,
    configs: Sequence[tuple[str, Config]],
    *,
    collector: "replay_charts.SignalCharts | None" = None,
) -> ReplayReport:
    """Both parts. Raises InputError, and ReplayError if the input has neither a decision nor a sample."""
    configs = _named_apart(configs)
    records = source.records()
    decisions = tuple([replay.repeat_decisions(records, config) for _, config in configs])
    raised = [(name, above_kubelet.keep_above(config, source.kubelet)) for name, config in configs]
    simulation = None
    if source.total != 0:
        with progress_bar.ProgressBar("simulating", total=source.total) as bar:
            if collector is not None:
                samples: Iterator[NodeSnapshot] = collector.watch(source.samples(bar.show))
            else:
                samples = source.snapshots(bar.show)
            simulation = comparison.compare(
                samples,
                raised,
                source=source.name,
                recorded=comparison.recorded_evictions(records),
                remarks=source.remarks,
            )
    if not any(decisions) and (simulation is None or not simulation.simulations[0].samples):
        raise ReplayError("; ".join([f"{source.name}: contains no decision and no sample", *source.remarks()]))
    return ReplayReport(tuple([name for name, _ in configs]), decisions, simulation)


def _named_apart(configs: Sequence[tuple[str, Config]]) -> list[tuple[str, Config]]:
    """The configurations with different names, also for one file given twice."""
    if len({name for name, _ in configs}) == len(configs):
        return list(configs)
    return [(f"{name} ({letter})", config) for (name, config), letter in zip(configs, "AB", strict=False)]


def sections(report: ReplayReport) -> tuple[Section, ...]:
    """The simulation, then the repeated decisions of each configuration."""
    parts: list[Section] = []
    if report.simulation is not None:
        parts += comparison.sections(report.simulation)
    for name, rows in zip(report.configs, report.decisions, strict=True):
        if rows:
            title = wording.escape_terminal(f"RECORDED DECISIONS REPEATED WITH {name}")
            if report.simulation is not None:
                parts.append(Section("", lines=(Cell(title, STRONG),)))
            parts += replay.sections(rows, config_source=name)
    return tuple(parts)


def to_json(report: ReplayReport) -> dict[str, Any]:
    """The report as one JSON object. `decisions` are those of the first configuration."""
    first = replay.to_json(report.decisions[0], config_source=report.configs[0])
    others = [
        {"configuration": name, "decisions": replay.to_json(rows, config_source=name)["decisions"]}
        for name, rows in zip(report.configs[1:], report.decisions[1:], strict=True)
    ]
    return {
        **first,
        "apiVersion": API_VERSION,
        "compared": others,
        "simulation": None if report.simulation is None else comparison.to_json(report.simulation),
    }
