"""Whether a pod's successor could run anywhere but on this node, as far as its own object tells.

The volumes that it mounts tell the rest (`volumes.py`).
"""

from collections.abc import Sequence
from typing import Final

from nodeagent.kube import objects

HOSTNAME_LABEL: Final = "kubernetes.io/hostname"


def node_bound(pod: objects.PodObject) -> str:
    """Why only this very node would do; empty when the pod itself leaves a choice.

    A DaemonSet's pods are bound by their controller on every node alike; that they are a DaemonSet's is a protection of
    its own.
    """
    spec = pod.spec
    if any(
        owner.controller and owner.kind == "DaemonSet" and owner.api_version.startswith("apps/")
        for owner in pod.metadata.owner_references or ()
    ):
        return ""
    if HOSTNAME_LABEL in (spec.node_selector or {}):
        return f"nodeSelector {HOSTNAME_LABEL}={(spec.node_selector or {})[HOSTNAME_LABEL]}"
    affinity = spec.affinity.node_affinity if spec.affinity else None
    name = the_one_node(affinity.required if affinity else None)
    if name:
        return f"node affinity to {name}"
    return f"nodeName {spec.node_name} in its template" if _created_with_node_name(pod.metadata) else ""


def the_one_node(selector: objects.NodeSelector | None, *, node_name: str = "") -> str:
    """The only node that a selector takes; empty when it leaves a choice.

    `node_name`: any label whose one wanted value is this name counts as naming the node, because storage drivers have
    labels of their own for it (`topology.topolvm.io/node`).
    """
    terms = (selector.node_selector_terms or []) if selector else []
    # The terms are alternatives: one that leaves a choice is enough to go elsewhere.
    named = [_named_nodes(term, node_name) for term in terms]
    names = {name for each in named for name in each}
    return names.pop() if named and all(len(each) == 1 for each in named) and len(names) == 1 else ""


def _named_nodes(term: objects.NodeSelectorTerm, node_name: str) -> Sequence[str]:
    """The shortest list of node names among the term's expressions, which all must hold."""
    named = [
        r.values or []
        for r in (
            *(r for r in term.match_fields or () if r.key == "metadata.name"),
            *(r for r in term.match_expressions or () if r.key == HOSTNAME_LABEL or r.values == [node_name]),
        )
        if r.operator == "In"
    ]
    return min(named, key=len, default=[])


def _created_with_node_name(meta: objects.Meta) -> bool:
    """The scheduler's choice goes in by a Binding, which leaves no trace in managedFields (seen in recorded pods); a
    `nodeName` that was there from the start belongs to whoever created the pod."""
    return any(
        entry.fields is not None and entry.fields.spec is not None and entry.fields.spec.node_name is not None
        for entry in meta.managed_fields or ()
    )
