"""The report as sections of text, in reading order; those of the node itself.

Every cell with text from outside this program (names, paths, messages) has passed `wording.escape_terminal`. `text`
and `terminal` do that with every text once more, because in a recording from a stranger also a number's text or a
resource is what the file says.
"""

from collections.abc import Iterable
from typing import Final

from nodeagent.config import above_kubelet
from nodeagent.model import (
    SIGNAL_TABLE,
    ConditionStatus,
    MemoryModel,
    RefusalCode,
    Signal,
    SignalState,
    SignalVerdict,
    Stall,
    SwapDevice,
    Threshold,
    ThresholdVerdict,
    Unit,
    units,
)
from nodeagent.policy import headroom, memory_shortage
from nodeagent.report import node_report, pod_sections, storage_sections, wording, zombie_text
from nodeagent.report.cells import BAD, DIM, GOOD, STRONG, WARN, Cell, Column, Section
from nodeagent.report.node_report import Report

MAX_CGROUP_ROWS: Final = 5
"""Rows of cgroups outside the pods in text; JSON has all."""
MAX_OOM_ROWS: Final = 10
"""Rows of OOM kills in text; JSON has all."""

_STATE_STYLE: Final = {
    SignalState.OK: GOOD,
    SignalState.SOFT: WARN,
    SignalState.HARD: BAD,
    SignalState.UNKNOWN: WARN,
}


def sections(report: Report) -> tuple[Section, ...]:
    """All sections with content, in reading order."""
    every = (
        _head(report),
        _signals(report),
        _memory(report),
        _pressure(report),
        _conditions(report),
        pod_sections.pods(report),
        storage_sections.memory_volumes(report),
        storage_sections.disks(report),
        *storage_sections.unattributed_disks(report),
        storage_sections.image_store(report),
        _outside(report),
        _oom_kills(report),
        _kubelet(report),
        _notes(report),
    )
    return tuple(section for section in every if section.rows or section.lines)


# --- head ------------------------------------------------------------------------------------------------------------


def summary(report: Report) -> str:
    """The first line, as of a monitoring plugin: the worst state and its numbers."""
    worst = node_report.state(report)
    node = wording.escape_terminal(report.snapshot.node)
    if worst is SignalState.OK:
        left = [str(verdict.signal) for verdict in report.plan.signals if any(map(_is_left, verdict.thresholds))]
        if left:
            return f"OK {node}: no threshold counts as met; below one, and left to the kubelet: {', '.join(left)}"
        missing = any(verdict.state is SignalState.UNKNOWN and verdict.thresholds for verdict in report.plan.signals)
        every = "every signal that this node has" if missing else "every signal"
        return f"OK {node}: {every} is above its thresholds"
    verdicts = {verdict.signal: verdict for verdict in report.plan.signals}
    shared = _same_file_system(report)
    worst_verdicts = [
        verdict for verdict in verdicts.values() if verdict.state is worst and verdict.signal not in shared
    ]
    if worst is not SignalState.UNKNOWN:
        return f"{worst.upper()} {node}: " + "; ".join([_cause(report, verdict) for verdict in worst_verdicts])
    unknown: dict[str, list[str]] = {}
    for verdict in worst_verdicts:
        if node_report.is_blind(verdict, verdicts, report.snapshot):
            unknown.setdefault(verdict.observation.reason, []).append(verdict.signal)
    return f"{worst.upper()} {node}: " + "; ".join(
        f"{' and '.join(signals)} {'is' if len(signals) == 1 else 'are'} unknown ({wording.escape_terminal(reason)})"
        for reason, signals in unknown.items()
    )


def _cause(report: Report, verdict: SignalVerdict) -> str:
    unit = SIGNAL_TABLE[verdict.signal].unit
    leading = headroom.leading_threshold(report.snapshot, verdict)
    if leading is None:
        return str(verdict.signal)
    available = headroom.available_amount(report.snapshot, leading.threshold)
    margin = headroom.threshold_headroom(report.snapshot, leading)
    relation = "is below" if margin is not None and margin < 0 else "is still within the minimum reclaim of"
    both = ""
    if verdict.figures is not None and memory_shortage.uses_both(leading.threshold):
        both = f" ({memory_shortage.figures_text(verdict.signal, verdict.figures)})"
    cache = ": page cache only" if leading.not_due_code is RefusalCode.PAGE_CACHE_ONLY else ""
    return (
        f"{verdict.signal} {units.format_amount(available, unit)}{both} {relation} "
        f"{units.format_amount(leading.value, unit)} ({_tier(leading.threshold)}){cache}"
    )


def _same_file_system(report: Report) -> set[Signal]:
    """Signals that share a file system and a state with an earlier signal."""
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
    mark = f"RECORDING, not the node as it is now: {wording.escape_terminal(report.recording)}"
    marks = (Cell(mark, STRONG),) if report.recording else ()
    return Section("", lines=(*marks, Cell(summary(report), style), Cell(", ".join(facts), DIM)))


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
    return Section("SIGNALS", columns, tuple(rows), _zombies(report))


def _zombies(report: Report) -> tuple[Cell, ...]:
    found = zombie_text.zombies_text(report.snapshot)
    return (Cell(wording.escape_terminal(found), WARN),) if found else ()


def _signal_rows(report: Report, verdict: SignalVerdict, same_as: Signal | None) -> Iterable[tuple[Cell, ...]]:
    """One row for the signal with its leading threshold, and one for each other threshold."""
    leading = headroom.leading_threshold(report.snapshot, verdict)
    thresholds = sorted(verdict.thresholds, key=lambda each: (each is not leading, each.threshold.hard))
    observation, unit = verdict.observation, SIGNAL_TABLE[verdict.signal].unit
    available, capacity = observation.available, observation.capacity
    share = None if available is None or not capacity else max(0.0, available / capacity)
    first = thresholds[0] if thresholds else None
    yield (
        Cell(str(verdict.signal), STRONG),
        Cell(units.format_amount(observation.available, unit), share=None if same_as else share),
        Cell(units.format_amount(observation.capacity, unit)),
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
            Cell(wording.escape_terminal(further.not_due_reason), DIM),
        )


def _is_left(verdict: ThresholdVerdict) -> bool:
    """Whether the signal is below the threshold, which counts as not met."""
    return verdict.not_due_code is not None and not verdict.met


def _threshold_cells(report: Report, verdict: ThresholdVerdict | None, unit: Unit) -> tuple[Cell, Cell]:
    if verdict is None:
        return Cell("none", DIM), Cell("")
    margin = headroom.threshold_headroom(report.snapshot, verdict)
    style = BAD if margin is not None and margin < 0 else ""
    return Cell(_threshold_text(report, verdict.threshold, unit)), Cell(
        units.format_amount(margin, unit, signed=True), style
    )


def _tier(threshold: Threshold) -> str:
    return "hard" if threshold.hard else f"soft for {above_kubelet.describe_grace(threshold)}"


def _threshold_text(report: Report, threshold: Threshold, unit: Unit) -> str:
    """`hard 300Mi`, `soft for 30s 15% = 2.7Gi, memavailable`."""
    observation = report.snapshot.observations.get(threshold.signal)
    capacity = observation.capacity if observation is not None else None
    amount = above_kubelet.describe_value(threshold, capacity=capacity, unit=unit)
    if threshold.memory_model is MemoryModel.MEM_AVAILABLE:
        amount += f", {threshold.memory_model}"
    return f"{_tier(threshold)} {amount}"


def _remark(verdict: SignalVerdict, leading: ThresholdVerdict | None, same_as: Signal | None) -> str:
    observation = verdict.observation
    if observation.available is None:
        return wording.escape_terminal(observation.reason or "could not be read")
    remarks = [leading.not_due_reason] if leading else []
    if (trend := verdict.trend) is not None:
        remarks.append(wording.trend_text(trend.to_threshold_s, trend.to_exhaustion_s, trend.confidence))
    remarks.append(f"same file system as {same_as.split('.')[0]}" if same_as else observation.source)
    return wording.escape_terminal("; ".join(filter(None, remarks)))


def _memory(report: Report) -> Section:
    columns = (Column("MEMORY MODEL"), Column("AVAILABLE", right=True), Column(""))
    snapshot = report.snapshot
    rows = [
        (
            Cell(name),
            Cell(units.format_amount(observation.available)),
            Cell(wording.escape_terminal(observation.reason or observation.source), DIM),
        )
        for name, observation in (
            ("workingset (as the kubelet)", snapshot.observe(Signal.MEMORY)),
            ("memavailable (the kernel's)", snapshot.observe(Signal.MEMORY, MemoryModel.MEM_AVAILABLE)),
            ("allocatable, workingset", snapshot.observe(Signal.ALLOCATABLE_MEMORY)),
            (
                "allocatable, memavailable",
                snapshot.observe(Signal.ALLOCATABLE_MEMORY, MemoryModel.MEM_AVAILABLE),
            ),
        )
    ]
    memory = report.snapshot.memory
    lines = _page_cache(report)
    if memory is None:
        return Section("MEMORY", columns, tuple(rows), lines)
    swap = f"of {units.format_amount(memory.swap_total)}" if memory.swap_total else "no swap"
    rows.append((Cell("swap free"), Cell(units.format_amount(memory.swap_free)), Cell(swap, DIM)))
    rows += [(Cell("swap used"), Cell(units.format_amount(each.used)), _swap_device(each)) for each in memory.swaps]
    for pool in memory.hugepages:
        if pool.total:
            remark = f"of {pool.total} pages of {units.format_amount(pool.page_size)} free; invisible to both models"
            rows.append((Cell("HugeTLB"), Cell(str(pool.free)), Cell(remark, DIM)))
    return Section("MEMORY", columns, tuple(rows), lines)


def _page_cache(report: Report) -> tuple[Cell, ...]:
    found = report.page_cache
    if not found.pods and not found.blocked:
        return ()
    pods = f"{found.pods} pod{'s' if found.pods != 1 else ''}"
    amount = f"{units.format_amount(found.amount)} in {pods}" if found.pods else "none"
    blocked = f"; not reclaimed: {wording.escape_terminal(found.blocked)}" if found.blocked else ""
    return (Cell(f"page cache that reclaim may drop: {amount}{blocked}", DIM),)


def _swap_device(device: SwapDevice) -> Cell:
    """`of 2Gi, file /swapfile`, `of 1Gi, zram /dev/zram0: takes 300Mi of the memory`."""
    text = f"of {units.format_amount(device.size)}, {device.kind} {device.path}"
    if device.kind == "zram":
        taken = "an unknown amount" if device.memory is None else units.format_amount(device.memory)
        text += f": takes {taken} of the memory"
    return Cell(wording.escape_terminal(text), DIM)


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


# --- cgroups ---------------------------------------------------------------------------------------------------------


def _outside(report: Report) -> Section:
    columns = (Column("CGROUP"), Column("WORKING SET", right=True), Column("PROCESSES", right=True))
    heaviest = sorted(report.snapshot.cgroups, key=lambda each: -(each.memory_working_set or 0))[:MAX_CGROUP_ROWS]
    rows = tuple(
        (
            Cell(wording.escape_terminal(cgroup.path)),
            Cell(units.format_amount(cgroup.memory_working_set)),
            Cell(units.format_amount(cgroup.process_count, Unit.PIDS)),
        )
        for cgroup in heaviest
    )
    return Section("OUTSIDE PODS", columns, rows)


def _oom_kills(report: Report) -> Section:
    columns = (Column("POD, CGROUP"), Column("CONTAINER"), Column("PROCESSES", right=True), Column("CAUSE"))
    kills = sorted(report.oom_kills, key=lambda kill: -kill.number)
    rows = tuple(
        (
            Cell(wording.escape_terminal(kill.pod or (kill.place.path if kill.place else units.UNKNOWN_TEXT)), WARN),
            Cell(wording.escape_terminal(kill.container)),
            Cell(str(kill.number)),
            Cell(str(kill.cause) + (", whole cgroup" if kill.group else "")),
        )
        for kill in kills[:MAX_OOM_ROWS]
    )
    more = len(kills) - len(rows)
    lines = (Cell(f"and {more} more: -o json has them all", DIM),) if more else ()
    return Section("OOM KILLS SINCE THE START OF EACH POD OR SERVICE", columns if rows else (), rows, lines)


# --- kubelet and notes -----------------------------------------------------------------------------------------------


def _kubelet(report: Report) -> Section:
    if report.kubelet is None:
        return Section("KUBELET")
    columns = (Column("SIGNAL"), Column("KUBELET'S"), Column("OURS"), Column("FIRST TO ACT"))
    styles = {node_report.OURS_FIRST: GOOD, node_report.NEVER_MET: GOOD, node_report.KUBELET_FIRST: BAD}
    unread = report.kubelet.unread
    rows = []
    for each in node_report.compare_with_kubelet(report):
        unit = SIGNAL_TABLE[each.threshold.signal].unit
        ours = [_threshold_text(report, own.threshold, unit) for own in (each.soft, each.answer) if own is not None]
        rows.append(
            (
                Cell(str(each.threshold.signal), STRONG),
                Cell(_threshold_text(report, each.threshold, unit)),
                Cell("; ".join(ours) or "none"),
                Cell(_first_to_act(each), styles.get(each.verdict, WARN)),
            )
        )
    lines = () if rows else (Cell("The kubelet's own eviction is disabled."),)
    if unread:
        message = (
            f"Not known, defaults assumed: whether and when the kubelet evicts ({wording.escape_terminal(unread)})."
        )
        lines = (Cell(message, WARN),)
    path = wording.escape_terminal(report.kubelet.path)
    title = f"KUBELET ({path}, not known, defaults assumed)" if unread else f"KUBELET ({path})"
    return Section(title, columns, tuple(rows), lines)


def _first_to_act(each: node_report.Comparison) -> str:
    soft = each.soft or each.answer
    if each.verdict != node_report.SOFT_FIRST or soft is None:
        return each.verdict
    grace = units.format_duration(soft.threshold.grace_period_s)
    return f"{each.verdict}, if it falls for more than {grace}; else {each.without_soft}"


def _notes(report: Report) -> Section:
    lines = tuple(
        Cell(f"{wording.escape_terminal(note.subject)}: {wording.escape_terminal(note.message)}")
        for note in report.notes
    )
    return Section("NOTES", lines=lines)
