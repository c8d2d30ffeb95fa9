"""What an API server keeps in `metadata.managedFields`: which client has set which field (KEP-555).

The part that creates, patches and updates leave behind, in the form of recorded objects; applying is not served.
A changed field belongs to the client that changed it and to no other; a removed field belongs to none. What the
scheduler's Binding and an eviction write leaves no trace: they do not come this way.
"""

import json
import time
from typing import Any, Final

Json = dict[str, Any]
Path = tuple[str, ...]

KEYS: Final = {
    "addresses": "type",
    "conditions": "type",
    "containers": "name",
    "env": "name",
    "initContainers": "name",
    "ownerReferences": "uid",
    "podIPs": "ip",
    "volumeMounts": "mountPath",
    "volumes": "name",
}
"""Lists whose items are fields of their own, by what distinguishes them. Other lists are one field."""
WHOLE: Final = frozenset(
    {"involvedObject", "nodeSelector", "regarding", "requiredDuringSchedulingIgnoredDuringExecution", "selector"}
)
"""Objects that are one field (`x-kubernetes-map-type: atomic`)."""
ALWAYS_THERE: Final = frozenset({"metadata", "spec", "status", "containers", "source"})
"""Parts that are not optional: no client has made them."""
SERVERS: Final = frozenset(
    {
        "creationTimestamp",
        "deletionGracePeriodSeconds",
        "deletionTimestamp",
        "generation",
        "managedFields",
        "name",
        "namespace",
        "resourceVersion",
        "uid",
    }
)
"""Metadata that the server writes, or that names the object."""


def changed(
    old: Json, new: Json, *, manager: str, api_version: str, subresource: str = "", parts: tuple[str, ...] = ()
) -> list[Json]:
    """The managedFields of `new`. Of `parts` alone what was changed is counted, of all when there are none."""
    before, after = _fields(old, parts), _fields(new, parts)
    taken = {path for path, value in after.items() if path not in before or before[path] != value}
    gone = before.keys() - after.keys()
    kept: list[Json] = old.get("metadata", {}).get("managedFields", [])
    if not taken and not gone:
        return kept
    mine = {"manager": manager, "operation": "Update", "apiVersion": api_version, "subresource": subresource}
    owned: dict[str, tuple[Json, set[Path]]] = {}
    for entry in kept:
        owner = {"subresource": "", **{key: value for key, value in entry.items() if key in ("time", *mine)}}
        owned[_identity(owner)] = (owner, _paths(entry["fieldsV1"]) - gone - taken)
    if taken:
        _, already = owned.get(_identity(mine), ({}, set()))
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        owned[_identity(mine)] = ({**mine, "time": stamp}, already | taken)
    entries = sorted((owner["time"], owner["manager"], key) for key, (owner, paths) in owned.items() if paths)
    return [_entry(*owned[key]) for _, _, key in entries]


def _identity(owner: Json) -> str:
    return "\0".join(owner[key] for key in ("manager", "operation", "apiVersion", "subresource"))


def _entry(owner: Json, paths: set[Path]) -> Json:
    entry = {key: owner[key] for key in ("manager", "operation", "apiVersion", "time")}
    entry |= {"fieldsType": "FieldsV1", "fieldsV1": _tree(paths)}
    return entry | ({"subresource": owner["subresource"]} if owner["subresource"] else {})


# --- fields ----------------------------------------------------------------------------------------------------------


def _fields(entry: Json, parts: tuple[str, ...]) -> dict[Path, Any]:
    """Every field of an object with its value; a part that holds others has none but its existence."""
    found: dict[Path, Any] = {}
    for name, value in entry.items():
        if name in ("kind", "apiVersion") or (parts and name not in parts):
            continue
        shown = {key: each for key, each in value.items() if key not in SERVERS} if name == "metadata" else value
        _collect(name, shown, (f"f:{name}",), found)
    return found


def _collect(name: str, value: Any, path: Path, found: dict[Path, Any]) -> None:
    key = KEYS.get(name)
    if isinstance(value, list) and key is not None and value:
        items = {f"k:{json.dumps({key: item[key]}, separators=(',', ':'))}": item for item in value}
    elif isinstance(value, dict) and value and name not in WHOLE:
        items = {f"f:{each}": item for each, item in value.items()}
    else:
        if name not in ALWAYS_THERE or len(path) > 2 or value not in ({}, []):
            found[path] = value
        return
    if name not in ALWAYS_THERE:
        found[(*path, ".")] = None
    for step, item in items.items():
        if name == "ownerReferences":
            found[(*path, step)] = item
        elif step.startswith("k:"):
            _collect("", item, (*path, step), found)
        else:
            _collect(step[2:], item, (*path, step), found)


def _tree(paths: set[Path]) -> Json:
    tree: Json = {}
    for path in sorted(paths):
        place = tree
        for step in path:
            place = place.setdefault(step, {})
    return tree


def _paths(tree: Json, above: Path = ()) -> set[Path]:
    """The other way round."""
    if not tree:
        return {above} if above else set()
    return {path for step, below in tree.items() for path in _paths(below, (*above, step))}
