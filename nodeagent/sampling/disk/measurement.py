"""What is known of the disks at one moment, as one part of a snapshot."""

from collections.abc import Mapping
from typing import NamedTuple

from nodeagent.model import DiskTrace, Note, PodUsage, UnattributedDisk, WriteRate
from nodeagent.sampling.disk import pod_disk
from nodeagent.sampling.disk.pod_disk import PodDisk


class DiskMeasurement(NamedTuple):
    """The disks of one host. Keys are UIDs of pod cgroups."""

    pods: Mapping[str, PodDisk] = {}
    """The pods that were measured."""
    write_rates: Mapping[str, WriteRate] = {}
    """The pods whose writes were sampled twice."""
    unattributed: tuple[UnattributedDisk, ...] = ()
    traces: tuple[DiskTrace, ...] = ()
    notes: tuple[Note, ...] = ()

    def add_to(self, usage: PodUsage) -> PodUsage:
        """The usage of a pod with its disk usage and write rate, as far as they are known."""
        measured = pod_disk.with_disk_usage(usage, self.pods.get(usage.cgroup_uid))
        return measured._replace(writing=self.write_rates.get(usage.cgroup_uid))
