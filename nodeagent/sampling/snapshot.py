"""Builds the snapshot of one decision, once, from the parts that were read for it.

Theory of operation. Each reader returns a value and changes nothing else: the node's signals, the pods, the fork rates,
the disks, the API server's view. `assemble_snapshot` is the only place where they meet, for a decision, for its recheck
and for `check`. A later node reading or a prearmed pod reading replaces a part before the assembly, never a field
after it.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from nodeagent.model import (
    CgroupUsage,
    NodeMemory,
    NodeSnapshot,
    Note,
    OwnLimit,
    PodUsage,
    PodView,
    Refusal,
    Stall,
    ZombieCount,
)

if TYPE_CHECKING:
    # `check` imports the measurement of disks only if it measures them.
    from nodeagent.sampling.disk.measurement import DiskMeasurement


class PodReading(NamedTuple):
    """The pods, and what is read together with them."""

    pods: tuple[PodView, ...] = ()
    memory: NodeMemory | None = None
    stalls: tuple[Stall, ...] = ()
    cgroups: tuple[CgroupUsage, ...] = ()
    """The largest cgroups outside of pods."""
    notes: tuple[Note, ...] = ()
    protected_cache: int | None = None
    """Page cache of the pods that memory.min protects; None: not read."""


class SnapshotParts(NamedTuple):
    """What one snapshot is made of."""

    node: NodeSnapshot
    """The node's signals alone (`Sampler.sample_node`). Its time is the time of the snapshot."""
    pods: PodReading = PodReading()
    pods_synced_at: float | None = None
    """When the API server's list of the pods was current; None: the pods come from the host alone."""
    fork_rates: Mapping[str, float] = {}
    """By UID of the pod's cgroup."""
    own_limits: Mapping[str, tuple[OwnLimit, ...]] = {}
    """The same; only pods of `ownLimit`."""
    disks: "DiskMeasurement | None" = None
    """None: not measured."""
    api_unreachable_since: float | None = None
    soft_tier_blocked_by: Refusal | None = None
    eviction_requests: bool = False
    own_pod_uid: str = ""
    zombies: ZombieCount | None = None
    allocatable_memory: int | None = None
    unused_images: int | None = None


def assemble_snapshot(parts: SnapshotParts) -> NodeSnapshot:
    """The snapshot of these parts. Its pods are the objects of the pod reading unless another part adds to them."""
    disks = parts.disks
    return parts.node.with_protected_cache(parts.pods.protected_cache)._replace(
        memory=parts.pods.memory,
        stalls=parts.pods.stalls,
        pods=_complete(parts) if disks is not None or parts.fork_rates or parts.own_limits else parts.pods.pods,
        pods_synced_at=parts.pods_synced_at,
        cgroups=parts.pods.cgroups,
        notes=parts.node.notes + parts.pods.notes + (disks.notes if disks is not None else ()),
        own_pod_uid=parts.own_pod_uid,
        api_unreachable_since=parts.api_unreachable_since,
        soft_tier_blocked_by=parts.soft_tier_blocked_by,
        eviction_requests=parts.eviction_requests,
        unattributed_disks=disks.unattributed if disks is not None else (),
        disk_traces=disks.traces if disks is not None else (),
        zombies=parts.zombies,
        allocatable_memory=parts.allocatable_memory,
        unused_images=parts.unused_images,
    )


def _complete(parts: SnapshotParts) -> tuple[PodView, ...]:
    views = parts.pods.pods
    if parts.disks is None and not parts.fork_rates:
        limited = parts.own_limits
        return tuple([view if view.pod.cgroup_uid not in limited else _with_usage(view, parts) for view in views])
    return tuple([_with_usage(view, parts) for view in views])


def _with_usage(view: PodView, parts: SnapshotParts) -> PodView:
    return view if view.usage is None else view._replace(usage=_usage(view.usage, parts))


def _usage(usage: PodUsage, parts: SnapshotParts) -> PodUsage:
    if parts.disks is not None:
        usage = parts.disks.add_to(usage)
    rate = parts.fork_rates.get(usage.cgroup_uid)
    limits = parts.own_limits.get(usage.cgroup_uid)
    if limits is not None:
        usage = usage._replace(own_limits=limits)
    return usage if rate is None else usage._replace(forks_per_s=rate)
