"""A node whose every text is a name that must not leave the cluster, for the tests of pseudonyms."""

import re
from typing import Any, Final

from nodeagent.config.schema import ProtectionConfig
from nodeagent.model import (
    CgroupUsage,
    Container,
    ContainerUsage,
    DisruptionBudget,
    EmptyDir,
    HostDirectory,
    NodeSnapshot,
    Note,
    NoteKind,
    Owner,
    Plan,
    PodView,
    RecordedSample,
    RecordingHeader,
    Signal,
    SwapDevice,
    UnattributedDisk,
    VolumeUsage,
    ZombieCount,
    ZombieHolder,
)
from nodeagent.policy import engine, ranking
from nodeagent.policy import state as policy_state
from nodeagent.policy.state import PolicyState
from nodeagent.records.flight_recorder import DecisionInputs
from tests.support import nodes

UID: Final = "1f0e2d3c-4b5a-4678-9abc-def012345678"
CONTAINER_ID: Final = "c0ffee" * 10 + "abcd"
NAMES: Final = (
    "checkout-7d9f8b6c5d-x2x4z",
    "checkout-7d9f8b6c5d",
    "payments-prod",
    "cardreader",
    "node-17.emea.contoso.example",
    "contoso",
    "scratchpad",
    "ledger-claim",
    "ledger-pdb",
    "platinum-tier",
    "team-kraken",
    "kraken",
    "cost-center",
    "octopus",
    "/srv/contoso",
    "hadron",
    "quark-ledger",
    "10.11.12.13",
    UID,
    UID.replace("-", "_"),
    CONTAINER_ID,
    "agent/of/memory",
)
"""Every name below, as a whole and the telling part of it."""
_POD, _OWNER, _NAMESPACE = NAMES[0], NAMES[1], NAMES[2]
CONFIGURATION: Final = """\
apiVersion: nodeagent.io/v1alpha1
kind: NodeAgentConfiguration
nodeName: node-17.emea.contoso.example
evictionHard: {memory.available: 1Gi}
protection:
  namespaces: [kube-system, payments-prod]
  annotations: [team.contoso.example/octopus=kraken]
  trustedNamespaces: ["*"]
reclaim:
  actions:
    - {name: quark-ledger, kind: command, command: [/srv/contoso/hadron, "(arguments hidden)"]}
"""


def view() -> PodView:
    """A pod with a name in every field."""
    pod = nodes.pod(_POD, namespace=_NAMESPACE)._replace(
        uid=UID,
        cgroup_uid=UID,
        priority_class="platinum-tier",
        containers=(
            Container(
                "cardreader",
                container_id=CONTAINER_ID,
                running=True,
                image_names=("registry.contoso.example/agent/of/memory:pods",),  # words of nodeagent's own source
            ),
        ),
        owner=Owner("ReplicaSet", _OWNER, "9f0e2d3c-4b5a-4678-9abc-def012345678"),
        labels={"cost-center": "team-kraken", "contoso.example/app": "kraken"},
        annotations={"nodeagent.io/eviction": "last", "team.contoso.example/octopus": "kraken"},
        claims=("ledger-claim",),
        claims_unknown="persistentvolumeclaims payments-prod/ledger-claim: forbidden for user kraken",
        empty_dirs=(EmptyDir("scratchpad", False, None),),
        disruption_budgets=(DisruptionBudget("ledger-pdb", 0),),
        node_bound="its claim ledger-claim is a local volume at /srv/contoso",
    )
    usage = nodes.usage(pod, 4 * nodes.GI)._replace(
        cgroup=f"/kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice",
        containers=(ContainerUsage(CONTAINER_ID, "cardreader", nodes.GI, 1),),
        volumes=(VolumeUsage("scratchpad", 1, 1, False),),
    )
    return PodView(pod, usage)


def snapshot() -> NodeSnapshot:
    """Memory is short on it."""
    return nodes.snapshot(
        view(),
        nodes.view("tiny", nodes.MI, namespace="kube-system"),
        available={Signal.MEMORY: 10 * nodes.MI},
    )._replace(
        node="node-17.emea.contoso.example",
        cgroups=(CgroupUsage("/system.slice/hadron.service", nodes.GI, 1),),
        zombies=ZombieCount(
            2, (ZombieHolder(1, "", "hadron.service", 7, "hadron"), ZombieHolder(1, UID, "", 8, "sh")), True, nodes.NOW
        ),
        notes=(
            Note(NoteKind.POD, f"{_NAMESPACE}/{_POD} cannot be read", f"{_NAMESPACE}/{_POD}"),
            Note(NoteKind.API, "Get https://api.contoso.example:6443: dial tcp 10.11.12.13:6443: connection refused"),
            Note(NoteKind.DISKS, "/srv/contoso: Permission denied; image registry.contoso.example/hadron:v1.2"),
        ),
        unattributed_disks=(
            UnattributedDisk((Signal.NODEFS,), 1, 1, 1, 1, (HostDirectory("/srv/contoso", 1, 1, True),), nodes.NOW),
        ),
        memory=nodes.snapshot().memory._replace(swaps=(SwapDevice("/dev/mapper/hadron-swap", "partition", 1, 0),)),  # type: ignore[union-attr]
    )


def config() -> Any:
    """A configuration that evicts the pod."""
    protection = ProtectionConfig(node_bound=False)
    return nodes.config(nodes.hard(value=nodes.GI), node_name="node-17.emea.contoso.example", protection=protection)


def decision() -> tuple[Plan, DecisionInputs, PolicyState]:
    """The plan on this node, its inputs, and the state after it."""
    before = policy_state.initial("abcd1234", now=nodes.NOW - 10)
    taken = snapshot()
    plan, after = engine.decide(taken, before, now=nodes.NOW, config=config())
    inputs = DecisionInputs(taken, after, nodes.NOW, config().thresholds, 1)
    return ranking.with_key_texts(plan), inputs, after


def header() -> RecordingHeader:
    """Of a process on this node."""
    return RecordingHeader(
        "node-17.emea.contoso.example",
        "0.1.0",
        "abcd1234",
        "0e0e2d3c-4b5a-4678-9abc-def012345678",
        nodes.WALL - 60,
        CONFIGURATION,
        "6.1.0-18-amd64 x86_64",
        (nodes.hard(),),
        {"hostname": "node-17.emea.contoso.example", "python": "3.11.2"},
    )


def sample() -> RecordedSample:
    """The sample of the decision."""
    plan, _, _ = decision()
    return RecordedSample(snapshot(), plan.signals, plan.conditions, plan.id, exact=True)


def leaks(data: bytes) -> list[str]:
    """The names in these bytes, in any case."""
    text = data.lower()
    return [name for name in NAMES if re.search(re.escape(name.lower().encode()), text)]
