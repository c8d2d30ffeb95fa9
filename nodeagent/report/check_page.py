"""The page of `check --html` and of the live endpoint: one report, with the history of its samples if there is one."""

from collections.abc import Iterable
from typing import Final

from nodeagent.model import SIGNAL_TABLE, Signal, SignalState, Unit, units
from nodeagent.policy import headroom
from nodeagent.report import (
    bar_charts,
    history_page,
    html_page,
    node_report,
    pod_sections,
    ranking_table,
    sections,
    wording,
)
from nodeagent.report.bar_charts import Level, Limit, Share
from nodeagent.report.cells import BAD, GOOD, WARN
from nodeagent.report.history_values import EvictionMark, History, OomKillMark
from nodeagent.report.html_page import Html
from nodeagent.report.node_report import Report

STYLES: Final = {
    SignalState.OK: GOOD,
    SignalState.SOFT: WARN,
    SignalState.HARD: BAD,
    SignalState.UNKNOWN: WARN,
}
_LARGEST: Final = 8
"""Pods with a colour of their own."""
_MEMORY: Final = (Signal.MEMORY, Signal.ALLOCATABLE_MEMORY)


def title(report: Report) -> str:
    """The heading of the page."""
    return f"nodeagent on {report.snapshot.node}, {wording.rfc3339(report.snapshot.wall_time)}"


def blocks(
    report: Report,
    *,
    history: History | None = None,
    evictions: Iterable[EvictionMark] = (),
    oom_kills: Iterable[OomKillMark] = (),
) -> tuple[Html, ...]:
    """The verdict, the levels, the history if there are at least two samples, the order of the pods, and every section
    of the text report."""
    found = [
        html_page.verdict(sections.summary(report), STYLES[node_report.state(report)]),
        html_page.facts(
            (
                ("Time (UTC)", wording.rfc3339(report.snapshot.wall_time)),
                ("Mode", report.mode),
                ("Configuration", report.config_source),
                ("Pods", report.pods_source),
            )
        ),
        levels(report),
    ]
    if history is not None and history.samples > 1:
        found.extend(history_page.blocks(history, evictions=evictions, oom_kills=oom_kills))
    if shares := memory_shares(report):
        found.append(shares)
    ranking = ranking_table.section_of_plan(report.plan)
    below = []
    for content in sections.sections(report):
        if content.title.startswith(pod_sections.PODS_TITLE) and ranking.rows:
            found.append(html_page.section(ranking._replace(title=content.title, lines=content.lines)))
        elif content.title:
            below.append(html_page.section(content))
    return (*found, *below)


def levels(report: Report) -> Html:
    """What is available of each signal that has a threshold or a state, against its thresholds."""
    shared = node_report.shared_file_systems(report.snapshot)
    rows = []
    for verdict in report.plan.signals:
        if verdict.signal in shared or not verdict.thresholds:
            continue
        leading = headroom.leading_threshold(report.snapshot, verdict)
        seen = verdict.observation
        if leading is not None:
            seen = report.snapshot.observe(verdict.signal, leading.threshold.memory_model)
        rows.append(
            Level(
                name=str(verdict.signal),
                available=seen.available,
                capacity=seen.capacity,
                unit=SIGNAL_TABLE[verdict.signal].unit,
                limits=[
                    Limit(each.value, each.threshold.hard) for each in verdict.thresholds if each.value is not None
                ],
                style=STYLES[verdict.state],
                remark=seen.reason if seen.available is None else str(verdict.state),
            )
        )
    return bar_charts.level_chart("Available, against the thresholds", rows) if rows else Html("")


def memory_shares(report: Report) -> Html | None:
    """Who holds the memory of the node. None: its capacity is unknown."""
    memory = report.snapshot.observe(Signal.MEMORY)
    if memory.available is None or not memory.capacity:
        return None
    held = sorted(
        (
            (view.usage.memory_working_set, view.pod.key)
            for view in report.snapshot.pods
            if view.usage is not None and view.usage.memory_working_set
        ),
        key=lambda each: (-each[0], each[1]),
    )
    shares = [Share(name, amount) for amount, name in held[:_LARGEST]]
    used = memory.capacity - memory.available
    rest = sum(amount for amount, _ in held[_LARGEST:])
    outside = max(0, used - sum(amount for amount, _ in held))
    grey = [f"{len(held) - _LARGEST} other pods"] if rest else []
    shares += [Share(" and ".join([*grey, "outside the pods"]), rest + outside)] if rest + outside else []
    note = f"working set, of {units.format_amount(memory.capacity)}; what is left is available"
    return bar_charts.share_chart("Memory of the node now", shares, memory.capacity, Unit.BYTES, note=note)
