"""The sections of the report about what is stored: volumes in memory, pods on disk, the rest of each disk, images."""

from collections.abc import Iterable
from typing import Final

from nodeagent.model import DiskUsage, StoreClass, Unit, units
from nodeagent.report import node_report, wording
from nodeagent.report.cells import DIM, STRONG, WARN, Cell, Column, Section
from nodeagent.report.node_report import Report

MAX_DISK_ROWS: Final = 30
"""Rows of pods' disk usage in text; JSON has all."""
MAX_STORE_ITEMS: Final = 5
"""Holders of a class of the image store in text; JSON has all."""


def memory_volumes(report: Report) -> Section:
    """Volumes that hold memory of their pod, largest first."""
    columns = (Column("POD"), Column("VOLUME IN MEMORY"), Column("USED", right=True), Column("LIMIT", right=True))
    rows = []
    for pod, volume, limit in node_report.memory_volumes(report)[:MAX_DISK_ROWS]:
        cells = (Cell(wording.escape_terminal(pod), STRONG), Cell(wording.escape_terminal(volume.name)))
        limit_text = units.format_amount(limit) if limit is not None else ""
        rows.append((*cells, Cell(units.format_amount(volume.used_bytes)), Cell(limit_text, DIM)))
    return Section("VOLUMES IN MEMORY", columns, tuple(rows))


def disks(report: Report) -> Section:
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


def unattributed_disks(report: Report) -> Iterable[Section]:
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


def image_store(report: Report) -> Section:
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
