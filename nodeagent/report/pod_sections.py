"""The section of the report about the pods: in eviction order, with what protects each."""

from collections.abc import Sequence
from typing import Final

from nodeagent.model import SIGNAL_TABLE, PodSource, RankedPod, RefusalCode, RefusalKind, Signal, Unit, units
from nodeagent.report import wording
from nodeagent.report.cells import DIM, STRONG, Cell, Column, Section
from nodeagent.report.node_report import Report

PODS_TITLE: Final = "PODS IN EVICTION ORDER FOR"
_HOST_ONLY: Final = frozenset({RefusalCode.UNKNOWN_POD, RefusalCode.UNNAMED_POD})
"""Refusals (policy/protection.py) that only mean that the API server does not list the pod."""
_UNLISTED: Final = "not listed by the API server"


def pods(report: Report) -> Section:
    """All pods in eviction order, each with its ranking keys or with why it is not evicted."""
    ranking, signal = report.plan.ranking, report.plan.ranked_for
    if not ranking:
        return Section("PODS", lines=(Cell("No pods on this machine."),))
    columns = (
        Column("RANK", right=True),
        Column("POD"),
        Column("QOS"),
        Column("PRIORITY", right=True),
        Column("USAGE", right=True),
        Column("REQUEST", right=True),
        Column("RELIEF", right=True),
        Column("WHY"),
    )
    unit = SIGNAL_TABLE[signal].unit
    title = f"{PODS_TITLE} {signal} ({_counts(ranking)})"
    rows = tuple(_pod_row(ranked, unit, signal) for ranked in ranking)
    return Section(title, columns, rows, _pod_legend(report))


def _counts(ranking: Sequence[RankedPod]) -> str:
    candidates = sum(not ranked.refusals for ranked in ranking)
    unlisted = sum(_unlisted(ranked) for ranked in ranking)
    limited = sum(
        bool(ranked.refusals) and all(each.code.kind is RefusalKind.LIMIT for each in ranked.refusals)
        for ranked in ranking
    )
    protected = len(ranking) - candidates - unlisted - limited
    numbers = [f"{candidates} candidate{'s' * (candidates != 1)}", f"{protected} protected"]
    if limited:
        numbers.append(f"{limited} not evicted now")
    if unlisted:
        numbers.append(f"{unlisted} not evicted: {_UNLISTED}")
    return ", ".join(numbers)


def _pod_row(ranked: RankedPod, unit: Unit, signal: Signal) -> tuple[Cell, ...]:
    pod = ranked.view.pod
    why = wording.refusal_text([(each.code, each.message) for each in ranked.refusals if each.code not in _HOST_ONLY])
    refused = bool(why)
    return (
        Cell(str(ranked.rank), DIM if refused else STRONG),
        Cell(wording.escape_terminal(pod.key), DIM if refused else STRONG),
        Cell(str(pod.qos_class)),
        Cell("-" if pod.priority is None else str(pod.priority)),
        Cell(units.format_amount(ranked.usage, unit)),
        Cell(_request_text(ranked, unit, signal)),
        Cell(units.format_amount(ranked.relief, unit)),
        Cell(wording.escape_terminal(why or _keys(ranked)), DIM if refused else ""),
    )


def _unlisted(ranked: RankedPod) -> bool:
    """True if its only refusals are that the API server does not list it."""
    return bool(ranked.refusals) and all(each.code in _HOST_ONLY for each in ranked.refusals)


def _keys(ranked: RankedPod) -> str:
    """Its ranking keys, after a word on one that the API server does not list."""
    keys = "; ".join([key.text for key in ranked.keys])
    return f"not evicted: {_UNLISTED}; {keys}" if _unlisted(ranked) else keys


def _request_text(ranked: RankedPod, unit: Unit, signal: Signal) -> str:
    """`-` if the resource has no request, `?` if it is unknown, `~` before an estimate."""
    if unit is not Unit.BYTES:
        return "-"
    text = units.format_amount(ranked.request, unit)
    return f"~{text}" if ranked.request and _estimated(ranked, signal) else text


def _estimated(ranked: RankedPod, signal: Signal) -> bool:
    return signal in (Signal.MEMORY, Signal.ALLOCATABLE_MEMORY) and ranked.view.pod.source is PodSource.HOST


def _pod_legend(report: Report) -> tuple[Cell, ...]:
    from_host = sum(ranked.view.pod.source is PodSource.HOST for ranked in report.plan.ranking)
    lines = [
        f"Would be evicted now: {wording.escape_terminal(victim.pod.key)} "
        f"({victim.tier}, grace {victim.grace_period_s:.0f}s)."
        for victim in report.plan.victims
    ]
    which = "No other pod" if report.plan.victims else "No pod"
    for each in report.plan.refusals:
        message = wording.escape_terminal(each.message)
        resize = each.code.kind is RefusalKind.RESIZE
        lines.append(f"{message[:1].upper()}{message[1:]}." if resize else f"{which} would be evicted: {message}.")
    if from_host:
        which = "These pods" if from_host == len(report.plan.ranking) else f"{from_host} of these pods"
        lines.append(
            f"{which} are known from this host alone and are not evicted: names are from the log directory, QoS from "
            "the cgroup path, requests marked ~ estimated from oom_score_adj; priority and owner are unknown."
        )
    return tuple(Cell(line, DIM) for line in lines)
