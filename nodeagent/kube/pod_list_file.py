"""Pods from a file: a PodList in JSON as `kubectl get pods -o json` prints it, for reports made offline."""

from typing import Final, NamedTuple

import msgspec

from nodeagent.kube import objects, pod_decoder
from nodeagent.model import Note, NoteKind, Pod
from nodeagent.runtime import regular_files

MAX_BYTES: Final = 256 << 20
"""A pod is about 20 KiB: some 10,000 pods, a whole cluster's list. More is a wrong file."""


class _List(objects.ObjectList):
    kind: str = "List"


class PodListError(Exception):
    """The file cannot be read or is no PodList."""


class PodList(NamedTuple):
    """The pods of one node."""

    pods: tuple[Pod, ...]
    node_name: str
    """spec.nodeName of them all; empty when there are none or they differ."""
    notes: tuple[Note, ...]
    """Pods that could not be read."""


def read(path: str, *, node_name: str = "") -> PodList:
    """The pods in this file that run on `node_name`; empty: all of them, which must then be one node's.

    Raises PodListError.
    """
    try:
        data = regular_files.read_file(path, max_bytes=MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise PodListError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > MAX_BYTES:
        raise PodListError(f"is larger than {MAX_BYTES >> 20} MiB")
    try:
        listed = msgspec.json.decode(data, type=_List)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PodListError(f"is no PodList in JSON (kubectl get pods -o json): {error}") from error
    if listed.kind not in ("List", "PodList"):
        raise PodListError(f"is no PodList in JSON (kubectl get pods -o json) but a {listed.kind}")
    return _of_one_node(listed.items or [], node_name)


def _of_one_node(items: list[msgspec.Raw], node_name: str) -> PodList:
    found: list[Pod] = []
    notes: list[Note] = []
    nodes: set[str] = set()
    for number, item in enumerate(items):
        try:
            where = msgspec.json.decode(item, type=objects.PodObject).spec.node_name
            if where and (not node_name or where == node_name):
                found.append(pod_decoder.decode_pod(item))
                nodes.add(where)
        except (msgspec.DecodeError, ValueError, ArithmeticError, RecursionError) as error:
            notes.append(Note(NoteKind.PODS, f"item {number} of the file cannot be read: {error}"))
    if len(nodes) > 1:
        names = ", ".join(sorted(nodes)[:3])
        raise PodListError(f"holds pods of {len(nodes)} nodes ({names}...): say which with --node-name")
    return PodList(tuple(found), nodes.pop() if nodes else "", tuple(notes))
