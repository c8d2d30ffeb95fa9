"""Page cache that memory.min keeps from being reclaimed: MemAvailable counts it as available, and it is not.

Theory of operation. MemAvailable is free memory, the file lists and reclaimable slab, less the watermarks
(mm/show_mem.c, si_mem_available); it knows no protection. Reclaim passes over a cgroup whose usage is at most its
effective memory.min, and the OOM killer acts rather than that it takes from it (Documentation/admin-guide/
cgroup-v2.rst). On Linux 6.1 a pod with 900 MiB of page cache below its memory.min left a node of 2 GiB with an OOM kill
at a MemAvailable of 853 MiB; without memory.min it was 7 MiB. memory.low is another matter: when nothing else can be
reclaimed, the kernel takes what it protects, and MemAvailable is right.

A memory.min is effective as far as those of its ancestors are (mm/memcontrol.c, effective_protection): where siblings
claim more than the parent has, each gets its share. That matters: a kubelet whose feature gate MemoryQoS is switched
off leaves the memory.min of the pods in place and resets the one of kubepods (KEP-2570). What is not readable protects
nothing, since a wrong number here would evict pods.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from nodeagent.sampling.hostfs import cgroup_memory, cgroups, parse
from nodeagent.sampling.hostfs.cgroups import Hierarchy, Kubepods
from nodeagent.sampling.hostfs.host import Host, Unreadable

_MINIMUM: Final = "memory.min"


class ProtectedPod(NamedTuple):
    """What of a pod decides how much of its page cache is protected, in bytes."""

    path: str
    """Of its cgroup, below the hierarchy's root."""
    usage: int
    file_cache: int
    """Clean pages of the file lists."""
    minimum: int
    """Its memory.min."""


def protected_cache(host: Host, hierarchy: Hierarchy, kubepods: Kubepods, pods: Sequence[ProtectedPod]) -> int:
    """Page cache of these pods that memory.min protects. No file is read if no pod has one. Never raises."""
    claims = {pod.path: min(pod.minimum, pod.usage) for pod in pods if pod.minimum}
    if not claims or hierarchy.memory is None:
        return 0
    effective = _effective(host, hierarchy.memory, kubepods.path, claims)
    return sum([_protected(pod, effective.get(pod.path, 0)) for pod in pods if pod.minimum])


def _protected(pod: ProtectedPod, minimum: int) -> int:
    """The pod's other memory uses up its protection first: reclaim takes from the page cache until the usage is at the
    minimum."""
    return min(pod.file_cache, max(0, minimum - (pod.usage - pod.file_cache)))


def _effective(host: Host, top: str, kubepods: str, claims: dict[str, int]) -> dict[str, int]:
    """The effective memory.min of each of these pods, by its path."""
    try:
        parents = cgroups.pod_parents(host, top + kubepods)
    except Unreadable:
        return {}
    directories = [parent.path.removeprefix(top) for parent in parents]
    claims = claims | {path: _claim(host, top + path) for path in directories[1:]}
    effective = {kubepods: _of_kubepods(host, top, kubepods)}
    for parent in directories:  # each before those in it
        children = [path for path in claims if path.rpartition("/")[0] == parent]
        budget, claimed = effective[parent], sum([claims[path] for path in children])
        for path in children:
            effective[path] = claims[path] if claimed <= budget else claims[path] * budget // claimed
    return effective


def _of_kubepods(host: Host, top: str, kubepods: str) -> int:
    """Its memory.min, at most its usage and at most that of every cgroup above it. The root of a hierarchy has none."""
    minimum, path = _claim(host, top + kubepods), kubepods.rpartition("/")[0]
    while path:
        minimum, path = min(minimum, _claim(host, top + path)), path.rpartition("/")[0]
    own_root = host.exists(f"{top}/{_MINIMUM}")  # a node in a container sees a cgroup as its root
    return min(minimum, _claim(host, top)) if own_root else minimum


def _claim(host: Host, directory: str) -> int:
    """memory.min, at most the usage; 0 if either is unknown."""
    try:
        minimum = cgroup_memory.parse_protection(host.read(f"{directory}/{_MINIMUM}"))
        return min(minimum, parse.parse_count(host.read(f"{directory}/memory.current")) or 0) if minimum else 0
    except Unreadable:
        return 0
