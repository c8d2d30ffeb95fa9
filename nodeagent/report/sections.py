"""The report as sections of text: what stands where, before anything is known of colours, widths or terminals.

`text.py` aligns the sections for a pipe, `terminal.py` draws them in colour. Every cell that holds words from outside
this program (names, paths, messages) has been through `words.harmless`.
"""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from nodeagent.model import (
    SIGNAL_TABLE,
    ConditionStatus,
    DiskUsage,
    MemoryModel,
    PodSource,
    RankedPod,
    RefusalCode,
    Signal,
    SignalState,
    SignalVerdict,
    Stall,
    Threshold,
    ThresholdVerdict,
    Unit,
)
from nodeagent.policy import headroom
from nodeagent.report import node_report, wording
from nodeagent.report.node_report import Report

DISKS_SHOWN: Final = 30
"""Rows of the pods' disks in text; JSON has all."""
CGROUPS_SHOWN: Final = 5
"""Cgroups outside the pods that are worth a line; JSON has all."""

GOOD: Final = "good"
WARN: Final = "warn"
BAD: Final = "bad"
DIM: Final = "dim"
STRONG: Final = "strong"

_HOST_ONLY: Final = frozenset({RefusalCode.UNKNOWN_POD, RefusalCode.UNNAMED_POD})
"""Refusals (policy/protection.py) that say no more than that the API has not told about the pod."""
_UNLISTED: Final = "not seen through the API"

_STATE_STYLE: Final = {
    SignalState.OK: GOOD,
    SignalState.SOFT: WARN,
    SignalState.HARD: BAD,
    SignalState.UNKNOWN: WARN,
}


class Cell(NamedTuple):
    """One piece of text and how much it matters."""

    text: str
    style: str = ""
    share: float | None = None
    """Set for a cell that a terminal may draw as a bar: 0 (empty) to 1 (full)."""


class Column(NamedTuple):
    title: str
    right: bool = False
    """Numbers are aligned to the right."""


class Section(NamedTuple):
    """A table, or only lines when it has no columns."""

    title: str
    columns: tuple[Column, ...] = ()
    rows: tuple[tuple[Cell, ...], ...] = ()
    lines: tuple[Cell, ...] = ()
    """Printed below the rows."""


def sections(report: Report) -> tuple[Section, ...]:
    """Everything the report says, in reading order. Sections without content are left out."""
    every = (
        _head(report),
        _signals(report),
        _memory(report),
        _pressure(report),
        _conditions(report),
        _pods(report),
        _disks(report),
        *_rests(report),
        _outside(report),
        _kubelet(report),
        _notes(report),
    )
    return tuple(section for section in every if section.rows or section.lines)


# --- head ------------------------------------------------------------------------------------------------------------


def summary(report: Report) -> str:
    """The first line: the worst state, and the numbers behind it, as monitoring plugins do."""
    worst = node_report.state(report)
    node = wording.escape_terminal(report.snapshot.node)
    if worst is SignalState.OK:
        return f"OK {node}: every signal is above its thresholds"
    verdicts = {verdict.signal: verdict for verdict in report.plan.signals}
    shared = _repeated(report)
    bad = [verdict for verdict in verdicts.values() if verdict.state is worst and verdict.signal not in shared]
    if worst is not SignalState.UNKNOWN:
        return f"{worst.upper()} {node}: " + "; ".join([_cause(report, verdict) for verdict in bad])
    blind: dict[str, list[str]] = {}
    for verdict in bad:
        if node_report.blind(verdict, verdicts, report.snapshot):
            blind.setdefault(verdict.observation.reason, []).append(verdict.signal)
    return f"{worst.upper()} {node}: " + "; ".join(
        f"{' and '.join(signals)} {'is' if len(signals) == 1 else 'are'} unknown ({wording.escape_terminal(reason)})"
        for reason, signals in blind.items()
    )


def _cause(report: Report, verdict: SignalVerdict) -> str:
    unit = SIGNAL_TABLE[verdict.signal].unit
    leading = headroom.leading_threshold(report.snapshot, verdict)
    if leading is None:
        return str(verdict.signal)
    seen = headroom.available_amount(report.snapshot, leading.threshold)
    room = headroom.threshold_headroom(report.snapshot, leading)
    relation = "is below" if room is not None and room < 0 else "has not yet regained its minimum reclaim above"
    return (
        f"{verdict.signal} {wording.quantity(seen, unit=unit)} {relation} "
        f"{wording.quantity(leading.value, unit=unit)} ({_tier(leading.threshold)})"
    )


def _repeated(report: Report) -> set[Signal]:
    """Signals on a file system that an earlier one of the same state stands for already."""
    states = {verdict.signal: verdict.state for verdict in report.plan.signals}
    shared = node_report.shared_file_systems(report.snapshot)
    return {signal for signal, first in shared.items() if states.get(first) is states.get(signal)}


def _head(report: Report) -> Section:
    facts = (
        wording.rfc3339(report.snapshot.wall_time),
        f"mode {report.mode}",
        f"configuration: {wording.escape_terminal(report.config_source)}",
        f"pods: {wording.escape_terminal(report.pods_source)}",
    )
    style = _STATE_STYLE[node_report.state(report)]
    return Section("", lines=(Cell(summary(report), style), Cell(", ".join(facts), DIM)))


# --- the node --------------------------------------------------------------------------------------------------------


def _signals(report: Report) -> Section:
    columns = (
        Column("SIGNAL"),
        Column("AVAILABLE", right=True),
        Column("CAPACITY", right=True),
        Column("THRESHOLD"),
        Column("HEADROOM", right=True),
        Column("STATE"),
        Column("SOURCE, REASON"),
    )
    shared = node_report.shared_file_systems(report.snapshot)
    rows: list[tuple[Cell, ...]] = []
    for verdict in report.plan.signals:
        rows.extend(_signal_rows(report, verdict, shared.get(verdict.signal)))
    return Section("SIGNALS", columns, tuple(rows))


def _signal_rows(report: Report, verdict: SignalVerdict, same_as: Signal | None) -> Iterable[tuple[Cell, ...]]:
    """One row for the signal with its leading threshold, one more for each further threshold."""
    leading = headroom.leading_threshold(report.snapshot, verdict)
    thresholds = sorted(verdict.thresholds, key=lambda each: (each is not leading, each.threshold.hard))
    seen, unit = verdict.observation, SIGNAL_TABLE[verdict.signal].unit
    share = None if seen.available is None or not seen.capacity else max(0.0, seen.available / seen.capacity)
    first = thresholds[0] if thresholds else None
    yield (
        Cell(str(verdict.signal), STRONG),
        Cell(wording.quantity(seen.available, unit=unit), share=None if same_as else share),
        Cell(wording.quantity(seen.capacity, unit=unit)),
        *_threshold_cells(report, first, unit),
        Cell(str(verdict.state), _STATE_STYLE[verdict.state]),
        Cell(_remark(verdict, first, same_as), DIM),
    )
    for further in thresholds[1:]:
        yield (
            Cell(""),
            Cell(""),
            Cell(""),
            *_threshold_cells(report, further, unit),
            Cell("met" if further.met else "", WARN),
            Cell(wording.escape_terminal(further.not_due_reason) if further.met else "", DIM),
        )


def _threshold_cells(report: Report, verdict: ThresholdVerdict | None, unit: Unit) -> tuple[Cell, Cell]:
    if verdict is None:
        return Cell("none", DIM), Cell("")
    room = headroom.threshold_headroom(report.snapshot, verdict)
    style = BAD if room is not None and room < 0 else ""
    return Cell(_threshold_text(verdict.threshold, verdict.value, unit)), Cell(
        wording.quantity(room, unit=unit, signed=True), style
    )


def _tier(threshold: Threshold) -> str:
    return "hard" if threshold.hard else f"soft for {wording.duration(threshold.grace_period_s)}"


def _threshold_text(threshold: Threshold, value: int | None, unit: Unit) -> str:
    """`hard 300Mi`, `soft for 30s 15% = 2.7Gi, memavailable`."""
    amount = threshold.value.text
    if threshold.value.percentage is not None and value is not None:
        amount += f" = {wording.quantity(value, unit=unit)}"
    if threshold.memory_model is not MemoryModel.WORKING_SET:
        amount += f", {threshold.memory_model}"
    return f"{_tier(threshold)} {amount}"


def _remark(verdict: SignalVerdict, leading: ThresholdVerdict | None, same_as: Signal | None) -> str:
    seen = verdict.observation
    if seen.available is None:
        return wording.escape_terminal(seen.reason or "could not be read")
    remarks = [leading.not_due_reason] if leading and leading.met and leading.not_due_reason else []
    if (trend := verdict.trend) is not None:
        remarks.append(wording.trend_text(trend.to_threshold_s, trend.to_exhaustion_s, trend.confidence))
    remarks.append(f"same file system as {same_as.split('.')[0]}" if same_as else seen.source)
    return wording.escape_terminal("; ".join(filter(None, remarks)))


def _memory(report: Report) -> Section:
    columns = (Column("MEMORY MODEL"), Column("AVAILABLE", right=True), Column(""))
    working_set = report.snapshot.observe(Signal.MEMORY)
    by_kernel = report.snapshot.observe(Signal.MEMORY, MemoryModel.MEM_AVAILABLE)
    rows = [
        (
            Cell(name),
            Cell(wording.quantity(seen.available)),
            Cell(wording.escape_terminal(seen.reason or seen.source), DIM),
        )
        for name, seen in (("workingset (as the kubelet)", working_set), ("memavailable (the kernel's)", by_kernel))
    ]
    memory = report.snapshot.memory
    if memory is None:
        return Section("MEMORY", columns, tuple(rows))
    swap = f"of {wording.quantity(memory.swap_total)}" if memory.swap_total else "no swap"
    rows.append((Cell("swap free"), Cell(wording.quantity(memory.swap_free)), Cell(swap, DIM)))
    for pool in memory.hugepages:
        if pool.total:
            told = f"of {pool.total} pages of {wording.quantity(pool.page_size)} free; invisible to both models"
            rows.append((Cell("HugeTLB"), Cell(str(pool.free)), Cell(told, DIM)))
    return Section("MEMORY", columns, tuple(rows))


def _pressure(report: Report) -> Section:
    columns = (
        Column("STALL (PSI)"),
        Column("RESOURCE"),
        Column("SOME 10s", right=True),
        Column("60s", right=True),
        Column("FULL 10s", right=True),
        Column("60s", right=True),
    )
    return Section("PRESSURE", columns, tuple(_stall_row(stall) for stall in report.snapshot.stalls))


def _stall_row(stall: Stall) -> tuple[Cell, ...]:
    shares = (stall.some_avg10, stall.some_avg60, stall.full_avg10, stall.full_avg60)
    return (
        Cell(str(stall.scope)),
        Cell(stall.resource),
        *(Cell("-" if share is None else f"{share:.2f}%", WARN if share else "") for share in shares),
    )


def _conditions(report: Report) -> Section:
    columns = (Column("CONDITION"), Column("STATUS"), Column("REASON"), Column("MESSAGE"))
    styles = {ConditionStatus.TRUE: BAD, ConditionStatus.FALSE: GOOD, ConditionStatus.UNKNOWN: WARN}
    rows = tuple(
        (
            Cell(str(condition.type), STRONG),
            Cell(str(condition.status), styles[condition.status]),
            Cell(condition.reason),
            Cell(wording.escape_terminal(condition.message), DIM),
        )
        for condition in report.plan.conditions
    )
    return Section("CONDITIONS THAT WOULD BE PUBLISHED", columns, rows)


# --- pods ------------------------------------------------------------------------------------------------------------


def _pods(report: Report) -> Section:
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
    candidates, protected = node_report.counts(ranking)
    unlisted = sum(_unlisted(ranked) for ranked in ranking)
    numbers = [f"{candidates} candidates", f"{protected - unlisted} protected"]
    if unlisted:
        numbers.append(f"{unlisted} not evicted: {_UNLISTED}")
    title = f"PODS IN EVICTION ORDER FOR {signal} ({', '.join(numbers)})"
    rows = tuple(_pod_row(ranked, unit, signal) for ranked in ranking)
    return Section(title, columns, rows, _pod_legend(report))


def _pod_row(ranked: RankedPod, unit: Unit, signal: Signal) -> tuple[Cell, ...]:
    pod = ranked.view.pod
    reasons = [each.message for each in ranked.refusals if each.code not in _HOST_ONLY]
    protected = bool(reasons)
    return (
        Cell(str(ranked.rank), DIM if protected else STRONG),
        Cell(wording.escape_terminal(pod.key), DIM if protected else STRONG),
        Cell(str(pod.qos_class)),
        Cell("-" if pod.priority is None else str(pod.priority)),
        Cell(wording.quantity(ranked.usage, unit=unit)),
        Cell(_request_text(ranked, unit, signal)),
        Cell(wording.quantity(ranked.relief, unit=unit)),
        Cell(wording.escape_terminal(_why(ranked, reasons)), DIM if protected else ""),
    )


def _unlisted(ranked: RankedPod) -> bool:
    """It is not evicted because nobody but this host knows it, and for no other reason."""
    return bool(ranked.refusals) and all(each.code in _HOST_ONLY for each in ranked.refusals)


def _why(ranked: RankedPod, reasons: Sequence[str]) -> str:
    """The reasons of a protected pod, else the keys that put it there."""
    if reasons:
        return "protected: " + "; ".join(reasons)
    keys = "; ".join([key.text for key in ranked.keys])
    return f"not evicted: {_UNLISTED}; {keys}" if _unlisted(ranked) else keys


def _request_text(ranked: RankedPod, unit: Unit, signal: Signal) -> str:
    """`-` where the resource has no request, `?` where it is not known, `~` before an estimate."""
    if unit is not Unit.BYTES:
        return "-"
    text = wording.quantity(ranked.request, unit=unit)
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
    nobody = "Nobody more" if report.plan.victims else "Nobody"
    lines += [f"{nobody} would be evicted: {wording.escape_terminal(each.message)}." for each in report.plan.refusals]
    if from_host:
        which = "These pods" if from_host == len(report.plan.ranking) else f"{from_host} of these pods"
        lines.append(
            f"{which} are known from this host alone, and none of those is evicted: names are from the log directory, "
            "QoS from the cgroup path, requests marked ~ estimated from oom_score_adj; priority and owner are unknown."
        )
    return tuple(Cell(line, DIM) for line in lines)


def _disks(report: Report) -> Section:
    """What each pod holds on disk, largest first; only where that was measured."""
    columns = (
        Column("POD"),
        Column("LAYERS", right=True),
        Column("LOGS", right=True),
        Column("VOLUMES", right=True),
        Column("INODES", right=True),
        Column("DELETED, OPEN", right=True),
        Column("NOT KNOWN"),
    )
    measured = [
        (view, view.usage)
        for view in report.snapshot.pods
        if view.usage is not None and view.usage.disk_usage_quality is not None
    ]
    measured.sort(key=lambda each: (-_held(each[1].disk), each[0].pod.key))
    rows = []
    for view, usage in measured[:DISKS_SHOWN]:
        disk, sight = usage.disk, usage.disk_usage_quality
        assert sight is not None
        inodes = [part for part in (disk.rootfs_inodes, disk.logs_inodes, disk.volumes_inodes) if part is not None]
        rows.append(
            (
                Cell(wording.escape_terminal(view.pod.key), STRONG),
                *(Cell(wording.quantity(part)) for part in (disk.rootfs_bytes, disk.logs_bytes, disk.volumes_bytes)),
                Cell(wording.quantity(sum(inodes) if inodes else None, unit=Unit.INODES)),
                Cell(wording.quantity(sight.deleted_bytes) if sight.deleted_bytes else ""),
                Cell(wording.escape_terminal("; ".join(sight.unknown)), DIM),
            )
        )
    more = len(measured) - len(rows)
    lines = (Cell(f"{more} more pods.", DIM),) if more > 0 else ()
    return Section("ON DISK", columns, tuple(rows), lines)


def _held(disk: DiskUsage) -> int:
    return sum(part or 0 for part in (disk.rootfs_bytes, disk.logs_bytes, disk.volumes_bytes))


def _rests(report: Report) -> Iterable[Section]:
    """What of each file system is in no pod."""
    columns = (Column("HOST DIRECTORY"), Column("BYTES", right=True), Column("INODES", right=True), Column(""))
    for rest in report.snapshot.unattributed_disks:
        rows = tuple(
            (
                Cell(wording.escape_terminal(each.path)),
                Cell(wording.quantity(each.bytes)),
                Cell(wording.quantity(each.inodes, unit=Unit.INODES)),
                Cell("" if each.complete else "at least", DIM),
            )
            for each in rest.largest
        )
        names = ", ".join(dict.fromkeys(signal.partition(".")[0] for signal in rest.signals))
        bytes_ = f"{wording.quantity(rest.unattributed_bytes)} of {wording.quantity(rest.used_bytes)} used"
        title = f"IN NO POD ON {names} ({bytes_}, {rest.unattributed_inodes} inodes)"
        lines = () if rows else (Cell("No host directory of it was found in time.", DIM),)
        yield Section(title, columns, rows, lines)


def _outside(report: Report) -> Section:
    columns = (Column("CGROUP"), Column("WORKING SET", right=True), Column("PROCESSES", right=True))
    heaviest = sorted(report.snapshot.cgroups, key=lambda each: -(each.memory_working_set or 0))[:CGROUPS_SHOWN]
    rows = tuple(
        (
            Cell(wording.escape_terminal(cgroup.path)),
            Cell(wording.quantity(cgroup.memory_working_set)),
            Cell(wording.quantity(cgroup.process_count, unit=Unit.PIDS)),
        )
        for cgroup in heaviest
    )
    return Section("OUTSIDE PODS", columns, rows)


# --- kubelet and notes -----------------------------------------------------------------------------------------------


def _kubelet(report: Report) -> Section:
    if report.kubelet is None:
        return Section("KUBELET")
    columns = (Column("SIGNAL"), Column("KUBELET'S"), Column("OURS"), Column("WHO ACTS FIRST"))
    styles = {node_report.OURS_FIRST: GOOD, node_report.NEVER_MET: GOOD, node_report.KUBELET_FIRST: BAD}
    unread = report.kubelet.unread
    rows = []
    for each in node_report.compare_with_kubelet(report):
        unit = SIGNAL_TABLE[each.threshold.signal].unit
        ours = [_threshold_text(own.threshold, own.value, unit) for own in (each.soft, each.answer) if own is not None]
        rows.append(
            (
                Cell(str(each.threshold.signal), STRONG),
                Cell(_threshold_text(each.threshold, each.value, unit)),
                Cell("; ".join(ours) or "none"),
                Cell(_who_first(each), styles.get(each.verdict, WARN)),
            )
        )
    lines = () if rows else (Cell("The kubelet's own eviction is off."),)
    if unread:
        told = f"Not known, defaults assumed: whether the kubelet evicts, and when ({wording.escape_terminal(unread)})."
        lines = (Cell(told, WARN),)
    path = wording.escape_terminal(report.kubelet.path)
    title = f"KUBELET ({path}, not known, defaults assumed)" if unread else f"KUBELET ({path})"
    return Section(title, columns, tuple(rows), lines)


def _who_first(each: node_report.Comparison) -> str:
    soft = each.soft or each.answer
    if each.verdict != node_report.SOFT_FIRST or soft is None:
        return each.verdict
    patience = wording.duration(soft.threshold.grace_period_s)
    return f"{each.verdict}, if it falls for more than {patience}; else {each.without_soft}"


def _notes(report: Report) -> Section:
    lines = tuple(
        Cell(f"{wording.escape_terminal(note.subject)}: {wording.escape_terminal(note.message)}")
        for note in report.notes
    )
    return Section("NOTES", lines=lines)
