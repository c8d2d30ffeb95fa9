"""The pod cgroups below kubepods.

A directory below kubepods with a pod's name is a pod cgroup. Its parent (`cgroups.PodParent`) gives the QoS class and
whether the pod is in the system partition, its children are the containers. Directories of any other name are ignored.
"""

import os
from collections.abc import Sequence
from typing import Final, NamedTuple

from nodeagent.model import QOSClass
from nodeagent.sampling.hostfs import cgroups
from nodeagent.sampling.hostfs.cgroups import Hierarchy, Kubepods, PodParent
from nodeagent.sampling.hostfs.host import Host, Unreadable

_UNKNOWN: Final = -1
_QOS: Final = {None: QOSClass.GUARANTEED, "burstable": QOSClass.BURSTABLE, "besteffort": QOSClass.BEST_EFFORT}


class PodCgroup(NamedTuple):
    """A pod's directory in the cgroup tree."""

    uid: str
    qos: QOSClass
    path: str
    """Below the hierarchy's root."""
    inode: int
    """Distinguishes a cgroup from an earlier one at the same path: cgroupfs never uses a number twice."""
    system: bool = False
    """In the kubelet's system partition (KEP-5894)."""


class CgroupListing(NamedTuple):
    """The pod cgroups, and the evidence that they are unchanged."""

    pods: Sequence[PodCgroup]
    child_counts: Sequence[tuple[str, int]] | None
    """Number of children of each directory that was listed. None: not cgroupfs. Only there does the number of links
    count children and do open descriptors fail after their cgroup is removed."""


def list_pods(host: Host, hierarchy: Hierarchy, kubepods: Kubepods) -> CgroupListing:
    """The pod cgroups, sorted by path. A QoS directory that is gone has no pods. Raises Unreadable if kubepods is gone,
    or if a directory that exists cannot be listed."""
    root = hierarchy.memory or ""
    pods: list[PodCgroup] = []
    counts: list[tuple[str, int]] = []
    complete = True
    parents = [PodParent(kubepods.path)]
    for parent in parents:
        directory = root + parent.path
        # Counted before the listing: a pod that comes in between changes the next count.
        counts.append((directory, _count_children(host, directory)))
        try:
            entries = host.subdirectories(directory)
        except Unreadable as error:
            if parent.path == kubepods.path or not error.gone:
                raise
            complete = False
            continue  # removed after its parent was listed
        complete = complete and len(entries) == counts[-1][1]
        for name, inode in entries:
            if (child := parent.child(name)) is not None:
                parents.append(child)
            elif (uid := cgroups.pod_uid(name)) is not None:
                pods.append(PodCgroup(uid, _QOS[parent.qos], f"{parent.path}/{name}", inode, parent.system))
            else:
                complete = False
    pods.sort(key=lambda pod: pod.path)
    return CgroupListing(pods, counts if complete else None)


def has_same_counts(host: Host, listing: CgroupListing) -> bool:
    """True if each directory of the listing has as many children as before. If none of its cgroups was removed either,
    no pod was added."""
    counts = listing.child_counts
    return counts is not None and all(_count_children(host, directory) == count for directory, count in counts)


def _count_children(host: Host, directory: str) -> int:
    """Number of child directories of a directory of cgroupfs, by its links; `_UNKNOWN` for another file system, or if
    the directory is gone. Of the file systems whose directories have size 0, only kernfs counts children in links."""
    try:
        stat = os.stat(host.real(directory))
    except OSError:
        return _UNKNOWN
    return stat.st_nlink - 2 if stat.st_size == 0 and stat.st_nlink >= 2 else _UNKNOWN
