"""Read the documents of daemonset.yaml and its patches in examples/, and what the chart and the kustomizations make of
them, for the deployment tests."""

import copy
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from tests.support.paths import REPOSITORY

DAEMONSET: Final = REPOSITORY / "daemonset.yaml"
DIRECT: Final = REPOSITORY / "examples" / "kubernetes-1.35.yaml"
"""The rights for API servers without constrained impersonation."""
OOM_SCORES: Final = REPOSITORY / "examples" / "daemonset-oom-scores.yaml"
BRAKE: Final = REPOSITORY / "examples" / "daemonset-brake.yaml"
SELINUX: Final = REPOSITORY / "examples" / "daemonset-selinux.yaml"
NON_ROOT: Final = REPOSITORY / "examples" / "daemonset-non-root.yaml"

Document = dict[str, Any]
Objects = dict[tuple[str, str], Document]
"""By kind and name."""


def read_documents(path: Path) -> list[Document]:
    """Every document of a YAML file, in order, for the caller to change."""
    return parse_documents(path.read_text(encoding="utf-8"))


def parse_documents(text: str) -> list[Document]:
    """The same of a text."""
    return copy.deepcopy(_parsed(text))


@functools.cache
def _parsed(text: str) -> list[Document]:
    """Parsing takes ten times as long as a copy: 0.2 s for daemonset.yaml."""
    return list(yaml.safe_load_all(text))


def documents() -> list[Document]:
    """Every document of daemonset.yaml, in order."""
    return read_documents(DAEMONSET)


def direct_rights() -> list[Document]:
    """Every document of examples/kubernetes-1.35.yaml."""
    return read_documents(DIRECT)


def document_of(kind: str) -> Document:
    """The only document of this kind."""
    (found,) = (document for document in documents() if document["kind"] == kind)
    return found


def pod_spec(daemonset: Document | None = None) -> Document:
    """The pod spec of the DaemonSet; of daemonset.yaml, or of a changed one."""
    spec: Document = (daemonset or document_of("DaemonSet"))["spec"]["template"]["spec"]
    return spec


def container(daemonset: Document | None = None) -> Document:
    """Its only container; of daemonset.yaml, or of a changed one."""
    (only,) = (daemonset or document_of("DaemonSet"))["spec"]["template"]["spec"]["containers"]
    found: Document = only
    return found


def with_brake() -> Document:
    """The DaemonSet as `kubectl patch` leaves it with the patch of examples/."""
    return _patched(BRAKE)


def with_oom_scores() -> Document:
    """The DaemonSet as `kubectl patch` leaves it with the patch for escalation.oomScoreAdj."""
    return _patched(OOM_SCORES)


def with_selinux() -> Document:
    """The DaemonSet with the patch for nodes on which SELinux enforces."""
    return _patched(SELINUX)


def as_non_root() -> Document:
    """The DaemonSet with the patch for a dry run as a user without rights."""
    return _patched(NON_ROOT)


def _patched(file: Path) -> Document:
    patched: Document = _merged(document_of("DaemonSet"), read_documents(file)[0])
    return patched


KUBELET_PATCHES: Final = REPOSITORY / "examples" / "kubelet"
"""Patches that mount the kubelet's files of one distribution."""


def with_kubelet_files(distribution: str) -> Document:
    """The DaemonSet with the patch of this distribution."""
    return _patched(KUBELET_PATCHES / f"{distribution}.yaml")


MERGE_KEYS: Final = {"containers": "name", "env": "name", "volumeMounts": "mountPath", "volumes": "name"}
"""Lists that a strategic merge patch merges, by what; every other one is replaced (the API's x-kubernetes-patch-*)."""


def _merged(old: Any, patch: Any, field: str = "") -> Any:
    if isinstance(old, dict) and isinstance(patch, dict):
        merged = copy.deepcopy(old) | {key: _merged(old.get(key), value, key) for key, value in patch.items()}
        return {key: value for key, value in merged.items() if value is not None}
    if isinstance(old, list) and isinstance(patch, list) and field in MERGE_KEYS:
        by = {each[MERGE_KEYS[field]]: each for each in old}
        for each in patch:
            by[each[MERGE_KEYS[field]]] = _merged(by.get(each[MERGE_KEYS[field]]), each)
        return list(by.values())
    return patch


def by_name(documents: Sequence[Document | None]) -> Objects:
    """The documents by kind and name; None stands for an empty one."""
    found = {(each["kind"], each["metadata"]["name"]): each for each in documents if each}
    assert len(found) == sum(each is not None for each in documents)
    return found


def manifest() -> Objects:
    """The objects of daemonset.yaml."""
    return by_name([*documents()])


def accounts(objects: Objects) -> set[str]:
    """The users that get a right."""
    subjects = [each for made in objects.values() for each in made.get("subjects", ())]
    assert {(each["kind"], each["apiGroup"]) for each in subjects} == {("User", "rbac.authorization.k8s.io")}
    return {each["name"] for each in subjects}


def limited_accounts(objects: Objects) -> set[str]:
    """The users that a policy limits."""
    found = re.findall(r'"(system:serviceaccount:[^"]+:[^"]+)"', yaml.safe_dump(list(objects.values()), width=1000))
    return set(found)


def agent_pod(objects: Objects) -> Document:
    """The pod spec of the DaemonSet."""
    spec: Document = objects["DaemonSet", "nodeagent"]["spec"]["template"]["spec"]
    return spec


def config_of(objects: Objects) -> str:
    """The configuration file."""
    text: str = objects["ConfigMap", "nodeagent"]["data"]["config.yaml"]
    return text
