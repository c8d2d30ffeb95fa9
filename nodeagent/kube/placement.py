"""Whether a pod's replacement could run on another node, by the pod's own object.

Its volumes decide the rest (`volume_lookup`).
"""

from collections.abc import Sequence
from typing import Final

from nodeagent.kube import objects

HOSTNAME_LABEL: Final = "kubernetes.io/hostname"


def node_bound(pod: objects.PodObject) -> str:
    """Why the pod can only run on this node; empty if its object allows another one.

    A DaemonSet's pods do not count here: every one is bound to its node, and they have their own protection.
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
    name = single_node(affinity.required if affinity else None)
    if name:
        return f"node affinity to {name}"
    return f"nodeName {spec.node_name} in its template" if _created_with_node_name(pod.metadata) else ""


def single_node(selector: objects.NodeSelector | None, *, node_name: str = "") -> str:
    """The only node that a selector selects; empty if it selects several.

    `node_name`: a label with this name as its only value counts as a node's name, because storage drivers have their
    own labels for it (`topology.topolvm.io/node`).
    """
    terms = (selector.node_selector_terms or []) if selector else []
    # The terms are alternatives: one term that allows another node is enough.
    named = [_named_nodes(term, node_name) for term in terms]
    names = {name for each in named for name in each}
    return names.pop() if named and all(len(each) == 1 for each in named) and len(names) == 1 else ""


def _named_nodes(term: objects.NodeSelectorTerm, node_name: str) -> Sequence[str]:
    """The shortest list of node names among the term's expressions, which must all be met."""
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
    """True if the creator of the pod set `nodeName`. The scheduler sets it with a Binding, which leaves no entry in
    managedFields (recorded pods)."""
    return any(
        entry.fields is not None and entry.fields.spec is not None and entry.fields.spec.node_name is not None
        for entry in meta.managed_fields or ()
    )
