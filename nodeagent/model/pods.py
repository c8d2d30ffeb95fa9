"""A pod as its API object describes it (`Pod`), and what it uses as the kernel counts it (`PodUsage`)."""

import enum
from collections.abc import Mapping
from typing import Final, NamedTuple


class QOSClass(enum.StrEnum):
    """Kubernetes QoS class."""

    BEST_EFFORT = "BestEffort"
    BURSTABLE = "Burstable"
    GUARANTEED = "Guaranteed"


class DiskUsage(NamedTuple):
    """Disk usage of one pod or container. None: not measured."""

    rootfs_bytes: int | None = None
    rootfs_inodes: int | None = None
    logs_bytes: int | None = None
    logs_inodes: int | None = None
    volumes_bytes: int | None = None
    """Local volumes: disk-backed emptyDir, configMap, gitRepo. 0 for a container."""
    volumes_inodes: int | None = None
    other_bytes: int | None = None
    """etc-hosts and files directly in the pod's log directory: the kubelet counts them against the pod's limit, but not
    in ranking. None for a container."""
    other_inodes: int | None = None
    deleted_layer_bytes: int | None = None
    """Deleted files of the layers that are held open, in no number above. None: not measured, or for a container."""
    deleted_layer_inodes: int | None = None
    deleted_volume_bytes: int | None = None
    """Deleted files that are held open in its volumes and everywhere else on a disk of the node."""
    deleted_volume_inodes: int | None = None
    ended_layer_bytes: int | None = None
    """Layers of ended containers that were not removed yet, in no number above: they count in ranking, but not against
    the pod's limit, as in the kubelet. None: no such layer is known, or for a container."""
    ended_layer_inodes: int | None = None
    logs_on_nodefs: bool = True
    """False: the logs are on another file system than the kubelet's directory, so no eviction frees them on nodefs."""


class DiskUsageQuality(NamedTuple):
    """How complete and how old a pod's disk usage is."""

    read_at: float
    """Read time of the oldest of its numbers."""
    complete: bool
    """Every path was found and walked to its end. False: the sums are lower bounds."""
    unknown: tuple[str, ...] = ()
    """Paths that are not counted, or only in part, and why."""
    deleted_bytes: int | None = None
    """Deleted files that the pod holds open. They count in `DiskUsage.deleted_...`, except where a project quota
    includes them already. None: not measured."""
    deleted_pid: int | None = None
    """The process that holds the largest of them."""
    periodic: bool = False
    """Measured by the periodic walk, not for a decision (`Plan.recount`)."""


class WriteRate(NamedTuple):
    """A pod's writes to disks, between two walks."""

    bytes_per_s: float
    """Between the last two samples; never negative."""
    written: int
    """Bytes since its writes are counted."""
    watched_s: float
    read_at: float


class ContainerUsage(NamedTuple):
    """Usage of one container. The kernel identifies containers by id, the API by name."""

    container_id: str
    name: str | None
    """None until the API or the log directory maps the id to a name."""
    memory_working_set: int | None
    process_count: int | None
    disk: DiskUsage = DiskUsage()


class VolumeUsage(NamedTuple):
    """One local volume of a pod."""

    name: str
    used_bytes: int | None
    used_inodes: int | None
    memory_backed: bool


class OwnLimit(NamedTuple):
    """A memory limit of a pod's own and what counts against it, read for the pods of `ownLimit` alone."""

    container_id: str
    """Empty: the limit of the whole pod."""
    limit: int
    used: int
    """Bytes that reclaim cannot free: anonymous, shared and locked memory and kernel memory; no page cache."""
    headroom: int
    """What may still be used before the kernel kills: limit - used, and what may be swapped out."""
    read_at: float
    history: tuple[tuple[float, int], ...] = ()
    """(read at, headroom) of the last readings, the newest last."""
    peak: int = 0
    """The largest limit - headroom before this history: what the pod has used before is no news."""
    watched_since: float | None = None
    """When this limit of this container was read for the first time; None: unknown."""
    reclaims: int | None = None
    """How often the kernel has reclaimed for this limit since the pod is watched (memory.events `high` and `max`;
    memory.failcnt). None: unknown."""
    reclaimed_lately: bool = False
    """`reclaims` rose within the history."""
    stall_some_avg10: float | None = None


class MemoryVolume(NamedTuple):
    """A memory-backed emptyDir of a pod."""

    pod_uid: str
    """As in the kubelet's directory of the pod: metadata.uid."""
    name: str
    used_bytes: int | None
    """Counts as memory of the pod. None: not visible."""


class PodUsage(NamedTuple):
    """Usage of one pod, as the kernel counts it, keyed by the UID in its cgroup's name."""

    cgroup_uid: str
    """metadata.uid, except for static pods, whose cgroup carries the config hash (API: annotation config.mirror)."""
    qos_class: QOSClass
    """From the cgroup's place in the tree."""
    cgroup: str
    """Path of the pod cgroup below the hierarchy's root, starting with `/`."""
    read_at: float
    memory_working_set: int | None = None
    """max(0, usage - inactive_file) of the pod cgroup."""
    memory_usage: int | None = None
    """memory.current (v2) or memory.usage_in_bytes (v1): page cache included."""
    memory_unreclaimable: int | None = None
    """What killing the pod frees and reclaim alone would not: anon + shmem + unreclaimable kernel memory + dirty or
    locked (mlock) file pages."""
    memory_file_cache: int | None = None
    """File pages that reclaim can drop without loss: active_file + inactive_file - dirty and writeback pages. None: not
    read, or cgroup v1."""
    memory_swap: int | None = None
    """memory.swap.current (v2) or swap of memory.stat (v1): bytes of the pod in swap, zram included."""
    memory_swap_cached: int = 0
    """The part of `memory_swap` that is in memory as well, and counts in both (v2)."""
    memory_protected: int | None = None
    """The larger of memory.min and memory.low of the pod cgroup (v2): reclaim does not take what is below it. None: not
    read, or cgroup v1."""
    memory_limit: int | None = None
    """The pod cgroup's own limit; None: no limit, or not readable."""
    memory_stall_some_avg10: float | None = None
    memory_request_estimate: int | None = None
    """Bytes, computed from oom_score_adj (Burstable, to 0.1% of the node) or the cgroup limit (Guaranteed); 0 for
    BestEffort. None: unknown, or the API server lists the request of the pod."""
    process_count: int | None = None
    """Sum of cgroup.procs over the pod's cgroups: processes, not threads."""
    thread_count: int | None = None
    """pids.current of the pod cgroup."""
    started_at: float | None = None
    """When the pod's sandbox started, on CLOCK_BOOTTIME; None if its process is not visible."""
    forks_per_s: float | None = None
    """New processes and threads per second over the last few seconds, also short-lived ones. None: none, or unknown."""
    disk: DiskUsage = DiskUsage()
    containers: tuple[ContainerUsage, ...] = ()
    volumes: tuple[VolumeUsage, ...] = ()
    disk_usage_quality: DiskUsageQuality | None = None
    """None: nothing of its disk was measured."""
    writing: WriteRate | None = None
    """None: its writes are not counted, or were read only once."""
    own_limits: tuple[OwnLimit, ...] = ()
    """Empty: it has none, it did not opt in, or they are unknown."""
    system_partition: bool = False
    """Its cgroup is below `kubepods/system`: the kubelet's configuration counts it among the system pods (KEP-5894)."""


class ContainerKind(enum.StrEnum):
    """The list of the pod's spec that has the container."""

    REGULAR = "regular"
    INIT = "init"
    SIDECAR = "sidecar"
    """An init container with restartPolicy Always."""


class Resources(NamedTuple):
    """Amounts of the resources that evictions depend on. None: not set. CPU in millicores, the others in bytes."""

    cpu_milli: int | None = None
    memory: int | None = None
    ephemeral_storage: int | None = None
    others: bool = False
    """Some further resource (hugepages, extended) is set."""


NO_RESOURCES: Final = Resources()


class Container(NamedTuple):
    """A container of a pod's spec and status."""

    name: str
    kind: ContainerKind = ContainerKind.REGULAR
    requests: Resources = NO_RESOURCES
    limits: Resources = NO_RESOURCES
    allocated: Resources | None = None
    """status.containerStatuses[].allocatedResources, else resources.requests there; None when not reported."""
    actual_limits: Resources | None = None
    """status.containerStatuses[].resources.limits; None when not reported."""
    container_id: str = ""
    """Without the runtime's prefix (`containerd://`); empty before the container was created."""
    restart_count: int = 0
    running: bool = False
    memory_restarts: bool = False
    """Its resizePolicy restarts it for a change of its memory."""
    image_names: tuple[str, ...] = ()
    """status.containerStatuses[].image and imageID: names that the Node's status.images has too."""


class Owner(NamedTuple):
    """The controller that owns a pod."""

    kind: str
    name: str
    uid: str
    api_version: str = "apps/v1"


LOOKED_UP_OWNERS: Final = frozenset({("apps/v1", "ReplicaSet"), ("apps/v1", "StatefulSet")})
"""API version and kind of the owners whose replicas are read (`protection.replacementWait`)."""


class OwnerLookup(NamedTuple):
    """An owner whose replicas are to be read."""

    namespace: str
    owner: Owner


class OwnerReplicas(NamedTuple):
    """What is known of the replicas of a pod's owner. Times are CLOCK_BOOTTIME."""

    asked_at: float
    """When it was first wanted."""
    read_at: float | None = None
    """When the last successful request was sent; None before it. `desired` and `ready` have no meaning then."""
    desired: int = 0
    ready: int = 0
    incomplete_since: float | None = None
    """Since when less than desired are ready, as far as was read; None if all are."""
    trouble: str = ""
    """Why the last request failed; empty if it did not."""


class NodeFitLookup(NamedTuple):
    """A pod of this node of which it is to be read whether another node takes it."""

    pod_uid: str
    not_before: float = 0.0
    """CLOCK_BOOTTIME: an earlier reading does not count."""


class NodeFit(NamedTuple):
    """Whether another node takes a pod, as far as was read (`protection.nodeFit`)."""

    read_at: float | None = None
    """CLOCK_BOOTTIME at which the last successful reading began; None before it. `node` has no meaning then."""
    node: str = ""
    """A node that takes it; empty if none was found."""
    reason: str = ""
    """Why none was found."""
    trouble: str = ""
    """Why the last reading failed; empty if it did not."""


class EmptyDir(NamedTuple):
    """An emptyDir volume of a pod's spec."""

    name: str
    memory_backed: bool
    size_limit: int | None


class DisruptionBudget(NamedTuple):
    """A PodDisruptionBudget that selects a pod."""

    name: str
    disruptions_allowed: int
    unready_allowed: bool = False
    """The API server evicts a pod that is not ready whatever the number allowed is (KUBELET-CONTRACT 14)."""


class PodSource(enum.StrEnum):
    """Where a pod was found."""

    API = "api"
    HOST = "host"
    """Only the node itself: cgroup tree, /var/log/pods, oom_score_adj. Names may be missing and requests are
    estimates."""


class Pod(NamedTuple):
    """A pod of this node as its object describes it; its usage is `PodUsage`."""

    uid: str
    """metadata.uid; the cgroup's UID if only the host has the pod."""
    cgroup_uid: str
    """The UID in cgroup and log directory names. It differs from `uid` only for a mirror pod that the host confirms."""
    namespace: str | None
    name: str | None
    source: PodSource
    qos_class: QOSClass
    priority: int | None = None
    """spec.priority; None when not set or not known. Missing counts as 0 in ranking."""
    priority_class: str = ""
    phase: str = ""
    resource_version: str = ""
    created_wall: float | None = None
    """metadata.creationTimestamp, epoch seconds."""
    started_wall: float | None = None
    """status.startTime, epoch seconds."""
    deletion_wall: float | None = None
    """metadata.deletionTimestamp, epoch seconds: when its grace ends. Set means the pod is terminating."""
    deletion_grace_s: float | None = None
    """metadata.deletionGracePeriodSeconds."""
    termination_grace_s: float = 30.0
    """spec.terminationGracePeriodSeconds."""
    containers: tuple[Container, ...] = ()
    pod_requests: Resources | None = None
    """What is allocated of spec.resources.requests; None when spec.resources is not set, empty when it is set without
    requests."""
    pod_limits: Resources | None = None
    overhead: Resources = NO_RESOURCES
    resize_infeasible: bool = False
    resize_pending: str = ""
    """Reason of the condition PodResizePending, `Deferred` or `Infeasible`; empty without it."""
    resize_failed: bool = False
    """The condition PodResizeInProgress has the reason Error."""
    resize_message: str = ""
    """Of these conditions."""
    ephemeral: bool = False
    """The spec has ephemeral containers. `containers` omits them, because they have no requests."""
    host_pid: bool = False
    """spec.hostPID: its processes see those of the whole node."""
    owner: Owner | None = None
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    """Only those that decisions read: pod-deletion-cost, nodeagent.io/*, those of `protection.annotations`."""
    ready: bool = False
    node_bound: str = ""
    """Why the pod could only be scheduled to this node again (nodeName set at creation, hostname selector or affinity,
    local PersistentVolume); empty if it can be scheduled elsewhere, as far as is known."""
    claims: tuple[str, ...] = ()
    """The PersistentVolumeClaims that it mounts, without those that end with it."""
    claims_unknown: str = ""
    """Why it is unknown whether one of them binds the pod to this node; empty if it is known or not needed."""
    claims_asked_at: float | None = None
    """CLOCK_BOOTTIME at which the unknown claim was first requested; None if it was not."""
    empty_dirs: tuple[EmptyDir, ...] = ()
    writes_elsewhere: bool = False
    """It has a volume that is no local storage of the pod (a claim, hostPath, NFS, CSI): what it writes need not be
    freed with it."""
    disruption_budgets: tuple[DisruptionBudget, ...] = ()
    replicas: OwnerReplicas | None = None
    """Of its owner; None if nobody wanted to know."""
    node_fit: NodeFit | None = None
    """Whether another node takes it; None if nobody wanted to know."""
    static: str = ""
    """The kubelet's source of the pod if that is not the API server: `file` or `http` in the kubelet's own
    list, `cgroup` when the cgroup carries a config hash. Empty for every pod of the API server."""
    mirror_of: str = ""
    """UID of the static pod that this mirror pod represents. Decoded only with the owner reference and the hashes that
    a kubelet writes, and cleared where the host or the Node object contradicts them."""

    @property
    def key(self) -> str:
        """`namespace/name`, or the UID where the name is not known."""
        return f"{self.namespace}/{self.name}" if self.namespace and self.name else f"uid/{self.uid}"

    @property
    def terminating(self) -> bool:
        return self.deletion_wall is not None

    @property
    def finished(self) -> bool:
        return self.phase in ("Succeeded", "Failed")


class PodView(NamedTuple):
    """A pod and its usage."""

    pod: Pod
    usage: PodUsage | None
    """None: no cgroup found (not started yet, already gone, or not readable)."""
