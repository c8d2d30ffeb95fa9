"""One look at the disks, for whoever waits for it: what the pods hold, and what is in no pod, within a time.

The daemon never waits and uses `watch.py`; this is for a report.
"""

import time

from nodeagent.config.schema import Sampling
from nodeagent.model import DiskRest, NodeSnapshot, Note, Signal
from nodeagent.sampling.cgroup import Hierarchy
from nodeagent.sampling.disk.attribution import Meter, PodDisk, apply
from nodeagent.sampling.disk.rest import PodDirectories, unattributed
from nodeagent.sampling.disk.watch import DISKS, file_systems
from nodeagent.sampling.filesystems import Layout
from nodeagent.sampling.host import Host, Unreadable


class DiskLook:
    """Looks at the disks of one host; what it learns makes the next look faster."""

    def __init__(self, host: Host, config: Sampling, *, hierarchy: Hierarchy, layout: Layout) -> None:
        self._host = host
        self._layout = layout
        store = layout.store.containers if layout.store is not None else ""
        kubelet = layout.kubelet or config.kubelet_dir
        self._directories = PodDirectories(kubelet, config.pod_logs_dir, store)
        self._meter = Meter(host, kubelet_dir=kubelet, pod_logs_dir=config.pod_logs_dir, cgroups=hierarchy.pids or "")

    def close(self) -> None:
        """Give up what unfinished walks hold open."""
        self._meter.close()

    def measured(self, snapshot: NodeSnapshot, *, for_s: float, rest_s: float = 0.0) -> NodeSnapshot:
        """The snapshot with what its pods hold on disk, as far as it can be counted in `for_s` seconds; with `rest_s`
        also what of each file system is in no pod, for which that much is spent on each."""
        usages = [view.usage for view in snapshot.pods if view.usage is not None]
        found = self._meter.measure(usages, until=time.monotonic() + for_s) if usages else {}
        found = {uid: disk._replace(routine=False) for uid, disk in found.items()}  # somebody has asked
        pods = tuple(
            [
                view._replace(usage=apply(view.usage, found.get(view.usage.cgroup_uid))) if view.usage else view
                for view in snapshot.pods
            ]
        )
        partial = sum(not each.complete for each in found.values())
        notes = (Note("disks", f"of {partial} pods only a part of what they hold is known"),) if partial else ()
        rests = self._rests(snapshot, found, rest_s) if rest_s > 0 else ()
        return snapshot._replace(pods=pods, disk_rests=rests, notes=snapshot.notes + notes)

    def _rests(self, snapshot: NodeSnapshot, found: dict[str, PodDisk], rest_s: float) -> tuple[DiskRest, ...]:
        rests = []
        wanted = [signal for signal in Signal if signal in DISKS]
        for each in file_systems(snapshot, wanted, self._layout):
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
