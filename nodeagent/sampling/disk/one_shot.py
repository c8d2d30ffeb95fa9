"""Measures the disks once, for a report: what the pods hold and what is in no pod, within a timeout.

The loop never waits and uses `monitor` instead.
"""

import time
from collections.abc import Callable

from nodeagent.config.schema import SamplingConfig
from nodeagent.model import DISK_SIGNALS, NodeSnapshot, Note, NoteKind, Signal, UnattributedDisk
from nodeagent.sampling.disk import monitor, unattributed
from nodeagent.sampling.disk.attribution import PodDiskMeter
from nodeagent.sampling.disk.measurement import DiskMeasurement
from nodeagent.sampling.disk.pod_disk import PodDisk
from nodeagent.sampling.disk.unattributed import PodDirectories
from nodeagent.sampling.hostfs.cgroups import Hierarchy
from nodeagent.sampling.hostfs.host import Host, Unreadable
from nodeagent.sampling.node.filesystems import Layout


class OneShotMeasurement:
    """Measures the disks of one host. Its cache makes the next measurement faster."""

    def __init__(self, host: Host, config: SamplingConfig, *, hierarchy: Hierarchy, layout: Layout) -> None:
        self._host = host
        self._layout = layout
        store = layout.store.containers if layout.store is not None else ""
        kubelet = layout.kubelet or config.kubelet_dir
        self._directories = PodDirectories(kubelet, config.pod_logs_dir, store)
        self._meter = PodDiskMeter(
            host, kubelet_dir=kubelet, pod_logs_dir=config.pod_logs_dir, cgroups=hierarchy.pids or ""
        )

    def close(self) -> None:
        """Close the descriptors of unfinished walks."""
        self._meter.close()

    def measure(
        self,
        snapshot: NodeSnapshot,
        *,
        timeout_s: float,
        unattributed_timeout_s: float = 0.0,
        on_progress: Callable[[str], None] = lambda _words: None,
    ) -> DiskMeasurement:
        """The disk usage of the pods of a snapshot, measured for at most `timeout_s`. With `unattributed_timeout_s`
        also what each file system holds outside of pods, for at most that long each. `on_progress` is called often with
        the progress."""

        def report_progress() -> bool:
            done = self._meter.progress
            on_progress(f"measuring pods on disk: {done.done} of {done.paths} paths, {done.entries} files")
            return False

        usages = [view.usage for view in snapshot.pods if view.usage is not None]
        found = self._meter.measure(usages, until=time.monotonic() + timeout_s, stop=report_progress) if usages else {}
        found = {uid: disk._replace(periodic=False) for uid, disk in found.items()}
        partial = sum(not each.complete for each in found.values())
        notes = (Note(NoteKind.DISKS, f"disk usage of {partial} pods is partial"),) if partial else ()
        outside = (
            self._measure_unattributed(snapshot, found, unattributed_timeout_s, on_progress)
            if unattributed_timeout_s > 0
            else ()
        )
        return DiskMeasurement(found, unattributed=outside, notes=notes)

    def _measure_unattributed(
        self,
        snapshot: NodeSnapshot,
        found: dict[str, PodDisk],
        unattributed_timeout_s: float,
        on_progress: Callable[[str], None],
    ) -> tuple[UnattributedDisk, ...]:
        outside = []
        wanted = [signal for signal in Signal if signal in DISK_SIGNALS]
        for each in monitor.file_systems(snapshot, wanted, self._layout):
            on_progress(
                f"measuring files in no pod on the file system of {each.path}, at most {unattributed_timeout_s:.0f}s"
            )
            try:
                outside.append(
                    unattributed.measure_unattributed(
                        self._host,
                        each.path,
                        attributed=list(found.values()),
                        directories=self._directories,
                        until=time.monotonic() + unattributed_timeout_s,
                        signals=each.signals,
                    )
                )
            except Unreadable:
                continue  # its signal has the reason
        return tuple(outside)
