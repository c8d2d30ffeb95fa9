"""The charts of `replay --html`: each signal with the thresholds of the configurations, and the memory of the pods."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from nodeagent.analysis.comparison import Comparison
from nodeagent.commands import html_file
from nodeagent.commands.recorded_input import RecordedInput
from nodeagent.config import above_kubelet, resolve
from nodeagent.config.schema import Config
from nodeagent.model import SIGNAL_TABLE, NodeSnapshot, RecordedSample, units
from nodeagent.report import charts, history, html_page
from nodeagent.report.cells import Section
from nodeagent.report.charts import Line, Mark
from nodeagent.report.html_page import Html

if TYPE_CHECKING:
    from nodeagent.report.history_values import Series


class SignalCharts:
    """Collects the signals while samples pass, for the charts of a page."""

    def __init__(self, source: RecordedInput, configs: Sequence[tuple[str, Config]]) -> None:
        self._configs = [(name, above_kubelet.keep_above(config, source.kubelet)) for name, config in configs]
        self._signals = history.SignalCollector()
        self._pods = history.PodUsageCollector()

    def watch(self, samples: Iterator[RecordedSample]) -> Iterator[NodeSnapshot]:
        """The snapshots of these samples."""
        for sample in samples:
            self._signals.add(sample)
            self._pods.add(sample)
            yield sample.snapshot

    def write(self, path: str, title: str, parts: Sequence[Section], simulation: Comparison | None) -> None:
        """Write the page. Raises OutputError."""
        blocks = [*self._signal_charts(simulation), *self._pod_chart(simulation), *html_page.sections(parts)]
        html_file.write(path, title, blocks)

    def _signal_charts(self, simulation: Comparison | None) -> list[Html]:
        return [self._signal_chart(series, simulation) for series in self._signals.result() if series.points]

    def _signal_chart(self, series: "Series", simulation: Comparison | None) -> Html:
        assert series.signal is not None
        lines = [Line(series.name, series.points)]
        span = (series.points[0][0], series.points[-1][0])
        for name, config in self._configs:
            for each in config.thresholds:
                value = resolve.resolve_threshold(each, capacity=series.capacity)
                if each.signal is series.signal and value is not None:
                    grace = "hard" if each.hard else f"soft, {units.format_duration(each.grace_period_s)}"
                    text = f"{name}: {each.value.text} ({grace})"
                    lines.append(Line(text, [(at, float(value)) for at in span], "hard" if each.hard else "soft"))
        unit = SIGNAL_TABLE[series.signal].unit
        marks = [
            Mark(each.wall_time, f"{result.name}: {each.pod} evicted")
            for result in (simulation.simulations if simulation is not None else ())
            for each in result.evictions
            if each.signal is series.signal
        ]
        return charts.time_chart(series.name, lines, unit=unit, marks=marks)

    def _pod_chart(self, simulation: Comparison | None) -> list[Html]:
        series = [each for each in self._pods.result() if each.points]
        if not series:
            return []
        marks = [
            Mark(each.wall_time, f"{each.pod} evicted by the recorded agent")
            for each in (simulation.recorded if simulation is not None else ())
        ]
        lines = [Line(each.name, each.points) for each in series]
        return [charts.time_chart("Memory by pod, as recorded", lines, stacked=True, marks=marks)]
