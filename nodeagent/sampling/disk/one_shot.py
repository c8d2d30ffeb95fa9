"""One look at the disks, for whoever waits for it: what the pods hold, and what is in no pod, within a time.

The daemon never waits and uses `watch.py`; this is for a report.
"""

import time
from collections.abc import Callable

from nodeagent.config.schema import SamplingConfig
from nodeagent.model import DISK_SIGNALS, NodeSnapshot, Note, NoteKind, Signal, UnattributedDisk
from nodeagent.sampling.disk.attribution import PodDisk, PodDiskMeter, with_disk_usage
from nodeagent.sampling.disk.monitor import file_systems
from nodeagent.sampling.disk.unattributed import PodDirectories, unattributed
from nodeagent.sampling.hostfs.cgroups import Hierarchy
from nodeagent.sampling.hostfs.host import Host, Unreadable
from nodeagent.sampling.node.filesystems import Layout


class OneShotMeasurement:
    """Looks at the disks of one host; what it learns makes the next look faster."""

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
        """Give up what unfinished walks hold open."""
        self._meter.close()

    def measured(
        self,
        snapshot: NodeSnapshot,
        *,
        for_s: float,
        rest_s: float = 0.0,
        tell: Callable[[str], None] = lambda _words: None,
    ) -> NodeSnapshot:
        """The snapshot with what its pods hold on disk, as far as it can be counted in `for_s` seconds; with `rest_s`
        also what of each file system is in no pod, for which that much is spent on each. `tell` hears often how far
        that is."""

        def under_way() -> bool:
            so_far = self._meter.progress
            tell(f"counting pods on disk: {so_far.done} of {so_far.places} places, {so_far.entries} files")
            return False

        usages = [view.usage for view in snapshot.pods if view.usage is not None]
        found = self._meter.measure(usages, until=time.monotonic() + for_s, stop=under_way) if usages else {}
        found = {uid: disk._replace(routine=False) for uid, disk in found.items()}  # somebody has asked
        pods = tuple(
            [
                view._replace(usage=with_disk_usage(view.usage, found.get(view.usage.cgroup_uid)))
                if view.usage
                else view
                for view in snapshot.pods
            ]
        )
        partial = sum(not each.complete for each in found.values())
        notes = (Note(NoteKind.DISKS, f"of {partial} pods only a part of what they hold is known"),) if partial else ()
        rests = self._rests(snapshot, found, rest_s, tell) if rest_s > 0 else ()
        return snapshot._replace(pods=pods, unattributed_disks=rests, notes=snapshot.notes + notes)

    def _rests(
        self, snapshot: NodeSnapshot, found: dict[str, PodDisk], rest_s: float, tell: Callable[[str], None]
    ) -> tuple[UnattributedDisk, ...]:
        rests = []
        wanted = [signal for signal in Signal if signal in DISK_SIGNALS]
        for each in file_systems(snapshot, wanted, self._layout):
            tell(f"looking for what is in no pod on the file system of {each.path}, {rest_s:.0f}s at most")
            try:
                rests.append(
                    unattributed(
                        self._host,
                        each.path,
                        attributed=list(found.values()),
                        directories=self._directories,
                        until=time.monotonic() + rest_s,
                        signals=each.signals,
                    )
                )
            except Unreadable:
                continue  # its signal says why by itself
        return tuple(rests)
