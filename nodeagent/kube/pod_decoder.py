"""Decodes a pod of the API server into the model's `Pod`, and keeps only what a decision reads.

Every text and every list has a limit, because a tenant can fill a pod with 1.5 MiB of anything.
"""

import functools
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Final

import msgspec

from nodeagent.config import quantity
from nodeagent.kube import objects, placement, qos
from nodeagent.model import (
    NO_RESOURCES,
    Container,
    ContainerKind,
    EmptyDir,
    Owner,
    Pod,
    PodSource,
    QOSClass,
    Resources,
)

MIRROR: Final = "kubernetes.io/config.mirror"
"""On a mirror pod: the UID in the static pod's cgroup and log directory. On another pod: whatever its author wrote."""
HASH: Final = "kubernetes.io/config.hash"
"""The UID of a static pod: the hash of its manifest, or the manifest's metadata.uid."""
CONFIG_SOURCE: Final = "kubernetes.io/config.source"
"""Set by a kubelet in its own list. The API server stores what a pod's author wrote."""
KEPT_ANNOTATIONS: Final = ("controller.kubernetes.io/pod-deletion-cost",)
KEPT_PREFIX: Final = "nodeagent.io/"
DEFAULT_GRACE_S: Final = 30.0
"""The API server's default of terminationGracePeriodSeconds."""
MAX_TEXT: Final = 16 << 10
"""Characters of labels that are kept of a pod, and of annotations; etcd would store 1.5 MiB of them. The rest does not
count: the API server alone applies a PodDisruptionBudget that selects by it, and an annotation of that size is
ignored."""
MAX_IMAGE_NAME: Final = 1024
"""Characters of an image's name with its digest; a longer one is of no image."""
MAX_PARTS: Final = 256
"""Containers of a kind, and volumes, that are kept of a pod: with 10,000 (1.2 MB in etcd) each pod would cost 8 MiB.
The rest counts as without requests, which makes a pod no smaller."""

MAX_MESSAGE: Final = 256
"""Characters of the message of a condition that are kept."""
NO_CONDITION: Final = objects.Condition()

_pod_decoder = objects.Decoder(objects.PodObject)


def decode_pod(item: msgspec.Raw | bytes, *, annotations: frozenset[str] = frozenset(KEPT_ANNOTATIONS)) -> Pod:
    """A pod from its JSON. `annotations`: the keys that are kept beside those of `KEPT_PREFIX`. Raises ValueError
    (`objects.UnreadableError`) for a field of another type or out of its range."""
    raw = _pod_decoder.decode(item)
    meta, spec, status = raw.metadata, raw.spec, raw.status
    if not meta.uid:
        raise ValueError("it has no UID")
    kept = (
        (key, value)
        for key, value in (meta.annotations or {}).items()
        if key in annotations or key.startswith(KEPT_PREFIX)
    )
    owner = _controller(meta)
    pod_level = spec.resources
    pending, in_progress = _condition(status, "PodResizePending"), _condition(status, "PodResizeInProgress")
    pod = Pod(
        uid=meta.uid,
        cgroup_uid=meta.uid,
        namespace=meta.namespace or None,
        name=meta.name or None,
        source=PodSource.API,
        qos_class=QOSClass(status.qos_class or QOSClass.BEST_EFFORT),
        priority=spec.priority,
        priority_class=spec.priority_class_name,
        phase=status.phase,
        resource_version=meta.resource_version,
        created_wall=_epoch(meta.creation_timestamp),
        started_wall=_epoch(status.start_time),
        deletion_wall=_epoch(meta.deletion_timestamp),
        deletion_grace_s=_seconds(meta.deletion_grace_period_seconds),
        termination_grace_s=DEFAULT_GRACE_S
        if (grace := spec.termination_grace_period_seconds) is None
        else float(grace),
        containers=_containers(spec, status),
        pod_requests=None if pod_level is None else _pod_requests(pod_level, status),
        pod_limits=None if pod_level is None else _resources(pod_level.limits),
        overhead=_resources(spec.overhead),
        resize_infeasible=_resize_infeasible(status),
        resize_pending=pending.reason if pending is not None else "",
        resize_failed=in_progress is not None and in_progress.reason == "Error",
        resize_message=(pending or in_progress or NO_CONDITION).message[:MAX_MESSAGE],
        ephemeral=bool(spec.ephemeral_containers),
        host_pid=spec.host_pid,
        owner=None if owner is None else Owner(owner.kind, owner.name, owner.uid, owner.api_version),
        labels=_bounded((meta.labels or {}).items()),
        annotations=_bounded(kept),
        ready=any(c.type == "Ready" and c.status == "True" for c in status.conditions or ()),
        node_bound=placement.node_bound(raw),
        claims=tuple(
            v.persistent_volume_claim.claim_name
            for v in (spec.volumes or ())[:MAX_PARTS]
            if v.persistent_volume_claim is not None
        ),
        empty_dirs=tuple(
            EmptyDir(v.name, v.empty_dir.medium == "Memory", _whole(v.empty_dir.size_limit))
            for v in (spec.volumes or ())[:MAX_PARTS]
            if v.empty_dir is not None
        ),
        writes_elsewhere=any(volume.keeps_files_elsewhere for volume in spec.volumes or ()),
        static=_static(meta),
        mirror_of=_mirror_of(meta, spec.node_name),
    )
    # Every API server since 1.9 sets the QoS class.
    return pod if status.qos_class else pod._replace(qos_class=qos.qos_class(pod))


def _controller(meta: objects.Meta) -> objects.OwnerReference | None:
    return next((o for o in meta.owner_references or () if o.controller), None)


def _static(meta: objects.Meta) -> str:
    """The source of a static pod in a kubelet's own list (`/pods`); empty for a pod that an API server stores.

    Any author can write the annotations, but only a kubelet lists a pod without a resourceVersion whose UID is its
    hash.
    """
    annotations = meta.annotations or {}
    source = annotations.get(CONFIG_SOURCE, "")
    by_kubelet = not meta.resource_version and annotations.get(HASH) == meta.uid
    return source if by_kubelet and source != "api" else ""


def _mirror_of(meta: objects.Meta, node_name: str) -> str:
    """The UID of the static pod that this object claims to mirror, if a kubelet writes it so: the Node as controller
    (required by the admission plugin NodeRestriction), both hashes equal. Else empty.

    The garbage collector removes a pod whose owner does not exist, so a forged reference needs the Node's UID. The host
    confirms the rest (`sampling.pods.pod_names.confirm_mirrors`).
    """
    annotations = meta.annotations or {}
    owner, claimed = _controller(meta), annotations.get(MIRROR, "")
    if owner is None or (owner.api_version, owner.kind, owner.name) != ("v1", "Node", node_name):
        return ""
    return claimed if claimed == annotations.get(HASH) else ""


def with_mirrors_of(pods: tuple[Pod, ...], node_uid: str) -> tuple[Pod, ...]:
    """The pods, with a mirror pod of another Node object (such as an earlier one of the same name) as an ordinary pod.
    The same tuple if there is none."""
    foreign = [bool(pod.mirror_of) and (pod.owner is None or pod.owner.uid != node_uid) for pod in pods]
    if not any(foreign):
        return pods
    return tuple([pod._replace(mirror_of="") if other else pod for pod, other in zip(pods, foreign, strict=True)])


def _bounded(texts: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The first of them that fit into `MAX_TEXT`."""
    kept: dict[str, str] = {}
    left = MAX_TEXT
    for key, value in texts:
        left -= len(key) + len(value)
        if left < 0:
            break
        kept[key] = value
    return kept


def _containers(spec: objects.PodSpec, status: objects.PodStatus) -> tuple[Container, ...]:
    states = {s.name: s for s in (*(status.init_container_statuses or ()), *(status.container_statuses or ()))}
    containers = [_container(c, ContainerKind.REGULAR, states.get(c.name)) for c in (spec.containers or ())[:MAX_PARTS]]
    for c in (spec.init_containers or ())[:MAX_PARTS]:
        kind = ContainerKind.SIDECAR if c.restart_policy == "Always" else ContainerKind.INIT
        containers.append(_container(c, kind, states.get(c.name)))
    return tuple(containers)


def _container(spec: objects.ContainerSpec, kind: ContainerKind, status: objects.ContainerStatus | None) -> Container:
    declared = spec.resources or objects.ResourceRequirements()
    restarts = any(
        p.resource_name == "memory" and p.restart_policy == "RestartContainer" for p in spec.resize_policy or ()
    )
    container = Container(
        spec.name,
        kind,
        requests=_resources(declared.requests),
        limits=_resources(declared.limits),
        memory_restarts=restarts,
    )
    if status is None:
        return container
    actual = status.resources
    return container._replace(
        allocated=_allocated(status),
        # A container without resources has `resources: {}`: reported, and empty.
        actual_limits=None if actual is None else _resources(actual.limits),
        container_id=status.container_id.partition("://")[2],
        restart_count=status.restart_count,
        running=status.state is not None and status.state.running is not None,
        image_names=tuple([name for name in (status.image, status.image_id) if 0 < len(name) <= MAX_IMAGE_NAME]),
    )


def _allocated(status: objects.ContainerStatus | objects.PodStatus) -> Resources | None:
    """What the kubelet has allocated; None if it reports nothing. `allocatedResources` depends on a feature gate
    (InPlacePodVerticalScalingAllocatedStatus); what the container runs with is the same, except during a resize."""
    if status.allocated_resources is not None:
        return _resources(status.allocated_resources)
    return None if status.resources is None else _resources(status.resources.requests)


def _pod_requests(declared: objects.ResourceRequirements, status: objects.PodStatus) -> Resources:
    allocated = _allocated(status)
    return _resources(declared.requests) if allocated is None else allocated


def _resources(amounts: Mapping[str, str | int] | None) -> Resources:
    if not amounts:
        return NO_RESOURCES
    return Resources(
        cpu_milli=_milli(amounts.get("cpu")),
        memory=_whole(amounts.get("memory")),
        ephemeral_storage=_whole(amounts.get("ephemeral-storage")),
        others=any(name not in ("cpu", "memory", "ephemeral-storage") for name in amounts),
    )


# The pods of a cluster share a few quantities.
@functools.lru_cache(maxsize=1024)
def _whole(amount: str | int | None) -> int | None:
    return None if amount is None else quantity.parse_quantity(str(amount))


@functools.lru_cache(maxsize=1024)
def _milli(amount: str | int | None) -> int | None:
    return None if amount is None else quantity.parse_milli(str(amount))


def _resize_infeasible(status: objects.PodStatus) -> bool:
    """The condition since 1.33, the field before."""
    return status.resize == "Infeasible" or any(
        c.type == "PodResizePending" and c.reason == "Infeasible" for c in status.conditions or ()
    )


def _condition(status: objects.PodStatus, kind: str) -> objects.Condition | None:
    return next((c for c in status.conditions or () if c.type == kind and c.status == "True"), None)


def _epoch(moment: datetime | None) -> float | None:
    if moment is None:
        return None
    if moment.tzinfo is None:
        raise ValueError("a timestamp has no time zone")
    return moment.timestamp()


def _seconds(count: int | None) -> float | None:
    return None if count is None else float(count)
