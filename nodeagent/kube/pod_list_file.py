"""Reads pods from a file: a PodList in JSON as `kubectl get pods -o json` prints it, for reports without an API
server."""

from typing import Final, NamedTuple

import msgspec

from nodeagent.kube import objects, pod_decoder
from nodeagent.model import Note, NoteKind, Pod
from nodeagent.runtime import regular_files

MAX_POD_LIST_BYTES: Final = 256 << 20
"""A pod is about 20 KiB: some 10,000 pods, a whole cluster's list. More is a wrong file."""


class _List(objects.ObjectList):
    kind: str = "List"


class PodListError(Exception):
    """The file cannot be read or is no PodList."""


class PodList(NamedTuple):
    """The pods of one node."""

    pods: tuple[Pod, ...]
    node_name: str
    """spec.nodeName of them all; empty if there are no pods."""
    notes: tuple[Note, ...]
    """Unreadable pods."""


def read_pod_list(path: str, *, node_name: str = "") -> PodList:
    """The pods in this file that run on `node_name`; if that is empty, all of them, which must be of one node.

    Raises PodListError.
    """
    try:
        data = regular_files.read_file(path, max_bytes=MAX_POD_LIST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise PodListError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > MAX_POD_LIST_BYTES:
        raise PodListError(f"is larger than {MAX_POD_LIST_BYTES >> 20} MiB")
    try:
        listed = msgspec.json.decode(data, type=_List)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PodListError(f"is no PodList in JSON (kubectl get pods -o json): {error}") from error
    if listed.kind not in ("List", "PodList"):
        raise PodListError(f"is no PodList in JSON (kubectl get pods -o json) but a {listed.kind}")
    return _of_one_node(listed.items or [], node_name)


def _of_one_node(items: list[msgspec.Raw], node_name: str) -> PodList:
    pods: list[Pod] = []
    notes: list[Note] = []
    nodes: set[str] = set()
    for number, item in enumerate(items):
        try:
            pod_node = msgspec.json.decode(item, type=objects.PodObject).spec.node_name
            if pod_node and (not node_name or pod_node == node_name):
                pods.append(pod_decoder.decode_pod(item))
                nodes.add(pod_node)
        except (msgspec.DecodeError, ValueError, ArithmeticError, RecursionError) as error:
            notes.append(Note(NoteKind.PODS, f"item {number} of the file cannot be read: {error}"))
    if len(nodes) > 1:
        names = ", ".join(sorted(nodes)[:3])
        raise PodListError(f"has pods of {len(nodes)} nodes ({names}...): choose one with --node-name")
    return PodList(tuple(pods), nodes.pop() if nodes else "", tuple(notes))
