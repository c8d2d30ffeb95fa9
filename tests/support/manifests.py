"""Read the documents of daemonset.yaml and its patches in examples/, for the deployment tests."""

import copy
from typing import Any, Final

import yaml

from tests.support.paths import REPOSITORY

DAEMONSET: Final = REPOSITORY / "daemonset.yaml"
DIRECT: Final = REPOSITORY / "examples" / "kubernetes-1.35.yaml"
"""The rights for API servers without constrained impersonation."""
BRAKE: Final = REPOSITORY / "examples" / "daemonset-brake.yaml"

Document = dict[str, Any]


def documents() -> list[Document]:
    """Every document of daemonset.yaml, in order."""
    return list(yaml.safe_load_all(DAEMONSET.read_text(encoding="utf-8")))


def direct_rights() -> list[Document]:
    """Every document of examples/kubernetes-1.35.yaml."""
    return list(yaml.safe_load_all(DIRECT.read_text(encoding="utf-8")))


def document_of(kind: str) -> Document:
    """The only document of this kind."""
    (found,) = (document for document in documents() if document["kind"] == kind)
    return found


def pod_spec() -> Document:
    """The pod spec of the DaemonSet."""
    spec: Document = document_of("DaemonSet")["spec"]["template"]["spec"]
    return spec


def container(daemonset: Document | None = None) -> Document:
    """Its only container; of daemonset.yaml, or of a changed one."""
    (only,) = (daemonset or document_of("DaemonSet"))["spec"]["template"]["spec"]["containers"]
    found: Document = only
    return found


def with_brake() -> Document:
    """The DaemonSet as `kubectl patch` leaves it with the patch of examples/."""
    patched: Document = _merged(document_of("DaemonSet"), yaml.safe_load(BRAKE.read_text(encoding="utf-8")))
    return patched


KUBELET_PATCHES: Final = REPOSITORY / "examples" / "kubelet"
"""Patches that mount the kubelet's files of one distribution."""


def with_kubelet_files(distribution: str) -> Document:
    """The DaemonSet with the patch of this distribution."""
    patch = yaml.safe_load((KUBELET_PATCHES / f"{distribution}.yaml").read_text(encoding="utf-8"))
    patched: Document = _merged(document_of("DaemonSet"), patch)
    return patched


MERGE_KEYS: Final = {"containers": "name", "volumeMounts": "mountPath", "volumes": "name"}
"""Lists that a strategic merge patch merges, by what; every other one is replaced (the API's x-kubernetes-patch-*)."""


def _merged(old: Any, patch: Any, field: str = "") -> Any:
    if isinstance(old, dict) and isinstance(patch, dict):
        return copy.deepcopy(old) | {key: _merged(old.get(key), value, key) for key, value in patch.items()}
    if isinstance(old, list) and isinstance(patch, list) and field in MERGE_KEYS:
        by = {each[MERGE_KEYS[field]]: each for each in old}
        for each in patch:
            by[each[MERGE_KEYS[field]]] = _merged(by.get(each[MERGE_KEYS[field]]), each)
        return list(by.values())
    return patch
