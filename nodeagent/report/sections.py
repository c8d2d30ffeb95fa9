"""The report as sections of text, independent of colours, widths and terminals.

`text.py` aligns the sections for a pipe, `terminal.py` draws them in colour. Every cell with text from outside this
program (names, paths, messages) has passed `wording.escape_terminal`; both do that with every text once more, because
in a recording from a stranger also a number's text or a resource is what the file says.
"""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from nodeagent.config import above_kubelet
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
    StoreClass,
    SwapDevice,
    Threshold,
    ThresholdVerdict,
    Unit,
    units,
)
from nodeagent.policy import headroom, memory_shortage
from nodeagent.report import node_report, wording, zombie_text
from nodeagent.report.node_report import Report

MAX_DISK_ROWS: Final = 30
"""Rows of pods' disk usage in text; JSON has all."""
MAX_STORE_ITEMS: Final = 5
"""Holders of a class of the image store in text; JSON has all."""
MAX_CGROUP_ROWS: Final = 5
"""Rows of cgroups outside the pods in text; JSON has all."""

MAX_OOM_ROWS: Final = 10
"""Rows of OOM kills in text; JSON has all."""

PODS_TITLE: Final = "PODS IN EVICTION ORDER FOR"
GOOD: Final = "good"
WARN: Final = "warn"
BAD: Final = "bad"
DIM: Final = "dim"
STRONG: Final = "strong"

_HOST_ONLY: Final = frozenset({RefusalCode.UNKNOWN_POD, RefusalCode.UNNAMED_POD})
"""Refusals (policy/protection.py) that only mean that the API server does not list the pod."""
_UNLISTED: Final = "not listed by the API server"

_STATE_STYLE: Final = {
    SignalState.OK: GOOD,
    SignalState.SOFT: WARN,
    SignalState.HARD: BAD,
    SignalState.UNKNOWN: WARN,
}


class Cell(NamedTuple):
    """One text with its style."""

    text: str
    style: str = ""
    share: float | None = None
    """For a cell that a terminal may draw as a bar: 0 (empty) to 1 (full)."""


class Column(NamedTuple):
    title: str
    right: bool = False
    """Numbers are aligned to the right."""


class Section(NamedTuple):
    """A table, or only lines if it has no columns."""

    title: str
    columns: tuple[Column, ...] = ()
    rows: tuple[tuple[Cell, ...], ...] = ()
    lines: tuple[Cell, ...] = ()
    """Printed below the rows."""


def sections(report: Report) -> tuple[Section, ...]:
    """All sections with content, in reading order."""
    every = (
        _head(report),
        _signals(report),
        _memory(report),
        _pressure(report),
        _conditions(report),
        _pods(report),
        _memory_volumes(report),
        _disks(report),
        *_unattributed_disks(report),
        _image_store(report),
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
        return f"OK {node}: every signal is above its thresholds"
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
            Cell(wording.escape_terminal(further.not_due_reason) if further.met else "", DIM),
        )


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
    remarks = [leading.not_due_reason] if leading and leading.met and leading.not_due_reason else []
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
    title = f"{PODS_TITLE} {signal} ({', '.join(numbers)})"
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
        Cell(units.format_amount(ranked.usage, unit)),
        Cell(_request_text(ranked, unit, signal)),
        Cell(units.format_amount(ranked.relief, unit)),
        Cell(wording.escape_terminal(_why(ranked, reasons)), DIM if protected else ""),
    )


def _unlisted(ranked: RankedPod) -> bool:
    """True if its only refusals are that the API server does not list it."""
    return bool(ranked.refusals) and all(each.code in _HOST_ONLY for each in ranked.refusals)


def _why(ranked: RankedPod, reasons: Sequence[str]) -> str:
    """The reasons of a protected pod, otherwise its ranking keys."""
    if reasons:
        return "protected: " + "; ".join(reasons)
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
    lines += [f"{which} would be evicted: {wording.escape_terminal(each.message)}." for each in report.plan.refusals]
    if from_host:
        which = "These pods" if from_host == len(report.plan.ranking) else f"{from_host} of these pods"
        lines.append(
            f"{which} are known from this host alone and are not evicted: names are from the log directory, QoS from "
            "the cgroup path, requests marked ~ estimated from oom_score_adj; priority and owner are unknown."
        )
    return tuple(Cell(line, DIM) for line in lines)


def _memory_volumes(report: Report) -> Section:
    """Volumes that hold memory of their pod, largest first."""
    columns = (Column("POD"), Column("VOLUME IN MEMORY"), Column("USED", right=True), Column("LIMIT", right=True))
    rows = []
    for pod, volume, limit in node_report.memory_volumes(report)[:MAX_DISK_ROWS]:
        cells = (Cell(wording.escape_terminal(pod), STRONG), Cell(wording.escape_terminal(volume.name)))
        limit_text = units.format_amount(limit) if limit is not None else ""
        rows.append((*cells, Cell(units.format_amount(volume.used_bytes)), Cell(limit_text, DIM)))
    return Section("VOLUMES IN MEMORY", columns, tuple(rows))


def _disks(report: Report) -> Section:
    """Measured disk usage of each pod, largest first."""
    columns = (
        Column("POD"),
        Column("LAYERS", right=True),
        Column("LOGS", right=True),
        Column("VOLUMES", right=True),
        Column("INODES", right=True),
        Column("DELETED, OPEN", right=True),
        Column("UNKNOWN"),
    )
    measured = [
        (view, view.usage)
        for view in report.snapshot.pods
        if view.usage is not None and view.usage.disk_usage_quality is not None
    ]
    measured.sort(key=lambda each: (-_disk_bytes(each[1].disk), each[0].pod.key))
    rows = []
    for view, usage in measured[:MAX_DISK_ROWS]:
        disk, quality = usage.disk, usage.disk_usage_quality
        assert quality is not None
        inodes = [part for part in (disk.rootfs_inodes, disk.logs_inodes, disk.volumes_inodes) if part is not None]
        rows.append(
            (
                Cell(wording.escape_terminal(view.pod.key), STRONG),
                *(Cell(units.format_amount(part)) for part in (disk.rootfs_bytes, disk.logs_bytes, disk.volumes_bytes)),
                Cell(units.format_amount(sum(inodes) if inodes else None, Unit.INODES)),
                Cell(units.format_amount(quality.deleted_bytes) if quality.deleted_bytes else ""),
                Cell(wording.escape_terminal("; ".join(quality.unknown)), DIM),
            )
        )
    more = len(measured) - len(rows)
    lines = (Cell(f"{more} more pods.", DIM),) if more > 0 else ()
    return Section("ON DISK", columns, tuple(rows), lines)


def _disk_bytes(disk: DiskUsage) -> int:
    return sum(part or 0 for part in (disk.rootfs_bytes, disk.logs_bytes, disk.volumes_bytes))


def _unattributed_disks(report: Report) -> Iterable[Section]:
    """Usage of each file system that is in no pod."""
    columns = (Column("HOST DIRECTORY"), Column("BYTES", right=True), Column("INODES", right=True), Column(""))
    for disk in report.snapshot.unattributed_disks:
        rows = tuple(
            (
                Cell(wording.escape_terminal(each.path)),
                Cell(units.format_amount(each.bytes)),
                Cell(units.format_amount(each.inodes, Unit.INODES)),
                Cell("" if each.complete else "at least", DIM),
            )
            for each in disk.largest
        )
        names = ", ".join(dict.fromkeys(signal.partition(".")[0] for signal in disk.signals))
        bytes_ = f"{units.format_amount(disk.unattributed_bytes)} of {units.format_amount(disk.used_bytes)} used"
        title = f"IN NO POD ON {names} ({bytes_}, {disk.unattributed_inodes} inodes)"
        lines = () if rows else (Cell("No host directory was measured before the timeout.", DIM),)
        yield Section(title, columns, rows, lines)


def _image_store(report: Report) -> Section:
    """What fills the image store, by class, with the largest holders of each."""
    store = report.image_store
    if store is None:
        return Section("IMAGE STORE")
    columns = (Column("CLASS"), Column("BYTES", right=True), Column("INODES", right=True), Column("LARGEST"))
    rows = []
    for part in store.parts:
        items = [f"{each.name} {units.format_amount(each.bytes)}" for each in part.items[:MAX_STORE_ITEMS]]
        items += [f"{len(part.items) - len(items)} more"] if len(part.items) > len(items) else []
        items += [] if part.complete else ["not measured in time: as the runtime recorded it, or at least this"]
        style = WARN if part.kind is StoreClass.ORPHANED_SNAPSHOTS else STRONG
        rows.append(
            (
                Cell(str(part.kind), style),
                Cell(units.format_amount(part.bytes)),
                Cell(units.format_amount(part.inodes, Unit.INODES)),
                Cell(wording.escape_terminal(", ".join(items)), DIM),
            )
        )
    lines = [Cell(wording.escape_terminal(reason), WARN) for reason in store.unknown]
    if any(part.kind is StoreClass.ORPHANED_SNAPSHOTS for part in store.parts):
        lines.append(
            Cell("Orphans are not removed by nodeagent: containerd's next removal of a snapshot does it.", DIM)
        )
    path, total = wording.escape_terminal(store.path), units.format_amount(store.bytes)
    return Section(f"IMAGE STORE of {store.runtime} ({path}, {total})", columns, tuple(rows), tuple(lines))


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
