"""Pods and Nodes as msgspec structs, with only the fields that decide where a pod can be scheduled.

Apart from `objects`: the watch of the own pods decodes none of these fields.
"""

from datetime import datetime

from msgspec import Struct, field

from nodeagent.kube.objects import (
    Condition,
    Int,
    LabelSelector,
    NodeAffinity,
    NodeSpec,
    ResourceRequirements,
)

Amounts = dict[str, str | Int]
"""Quantities by the resource's name."""


class Labelled(Struct, rename="camel"):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    labels: dict[str, str] | None = None
    deletion_timestamp: datetime | None = None


class Toleration(Struct):
    key: str = ""
    operator: str = ""
    value: str = ""
    effect: str = ""


class PodAffinityTerm(Struct, rename="camel"):
    label_selector: LabelSelector | None = None
    namespaces: list[str] | None = None
    namespace_selector: LabelSelector | None = None
    topology_key: str = ""


class PodAntiAffinity(Struct):
    required: list[PodAffinityTerm] | None = field(default=None, name="requiredDuringSchedulingIgnoredDuringExecution")


class Affinity(Struct, rename="camel"):
    node_affinity: NodeAffinity | None = None
    pod_anti_affinity: PodAntiAffinity | None = None


class Container(Struct, rename="camel"):
    name: str = ""
    resources: ResourceRequirements | None = None
    restart_policy: str = ""


class Spec(Struct, rename="camel"):
    containers: list[Container] | None = None
    init_containers: list[Container] | None = None
    resources: ResourceRequirements | None = None
    overhead: Amounts | None = None
    node_selector: dict[str, str] | None = None
    affinity: Affinity | None = None
    tolerations: list[Toleration] | None = None


class ContainerStatus(Struct, rename="camel"):
    name: str = ""
    allocated_resources: Amounts | None = None


class Status(Struct, rename="camel"):
    phase: str = ""
    container_statuses: list[ContainerStatus] | None = None
    init_container_statuses: list[ContainerStatus] | None = None


class ScheduledPod(Struct):
    metadata: Labelled
    spec: Spec
    status: Status = field(default_factory=Status)


class OfferStatus(Struct):
    allocatable: Amounts | None = None
    conditions: list[Condition] | None = None


class OfferingNode(Struct):
    metadata: Labelled
    spec: NodeSpec = field(default_factory=NodeSpec)
    status: OfferStatus = field(default_factory=OfferStatus)
