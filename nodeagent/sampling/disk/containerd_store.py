"""containerd's overlayfs snapshots and the layers of its images, from containerd's own files.

The snapshotter's database maps the directories to snapshots (containerd, snapshots/storage/bolt.go): no socket is
needed for it, and containerd's API does not show the directories of committed snapshots at all. The layers of an image
are in its configuration, a blob of the content store: the snapshot of a layer is named by its chain ID (OCI image spec,
config.md).
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from nodeagent.sampling.disk import bolt
from nodeagent.sampling.disk.bolt import BoltError, Bucket
from nodeagent.sampling.hostfs.host import Host, Unreadable

SNAPSHOTTER: Final = "io.containerd.snapshotter.v1.overlayfs"
CONTENT: Final = "io.containerd.content.v1.content"
NAMESPACE: Final = "k8s.io"
"""containerd's namespace of the CRI."""
_COMMITTED: Final = b"\x03"
"""Kind of a snapshot: 1 view, 2 active, 3 committed."""
_MAX_CONFIG: Final = 4 << 20
"""Bytes of an image's configuration; containerd itself reads at most 8 MiB."""
_MAX_LAYERS: Final = 1024


class Snapshot(NamedTuple):
    """A snapshot in containerd's database."""

    id: str
    """The name of its directory below `snapshots`."""
    key: str
    """`namespace/number/name`, unique."""
    parent: str
    """Key of the snapshot below it; empty if there is none."""
    committed: bool
    """A layer of an image. False: writable, or being unpacked."""
    size: int
    """Bytes as containerd recorded them when it was committed; else 0."""
    inodes: int

    @property
    def namespace(self) -> str:
        return self.key.split("/", 1)[0]

    @property
    def name(self) -> str:
        """The chain ID of a layer, the id of a container, or what another client chose."""
        return self.key.split("/", 2)[2]


def read_snapshots(host: Host, root: str) -> dict[str, Snapshot]:
    """Key -> snapshot. Raises Unreadable and BoltError."""
    found = bolt.read_database(host, f"{root}/{SNAPSHOTTER}/metadata.db").bucket("v1", "snapshots")
    if found is None:
        return {}  # containerd has never unpacked an image
    return {each.key: each for each in map(_snapshot, _buckets(found)) if each is not None}


def chain_below(key: str, snapshots: Mapping[str, Snapshot]) -> Iterator[Snapshot]:
    """The snapshot and those below it."""
    for _ in range(_MAX_LAYERS):
        snapshot = snapshots.get(key)
        if snapshot is None:
            return
        yield snapshot
        key = snapshot.parent


def top_layer(host: Host, root: str, image_id: str) -> str:
    """The chain ID of an image's last layer; empty if its configuration is not in the store."""
    algorithm, _, digest = image_id.rpartition(":")
    algorithm = algorithm or "sha256"
    if not (algorithm.isalnum() and digest.isalnum()):
        return ""
    try:
        text = host.read(f"{root}/{CONTENT}/blobs/{algorithm}/{digest}")
        layers = json.loads(text)["rootfs"]["diff_ids"] if len(text) <= _MAX_CONFIG else []
        return _chain_id([str(layer) for layer in layers])
    except (Unreadable, ValueError, KeyError, TypeError, RecursionError):
        return ""


def _chain_id(layers: list[str]) -> str:
    chain = ""
    for layer in layers[:_MAX_LAYERS]:
        chain = layer if not chain else f"sha256:{hashlib.sha256(f'{chain} {layer}'.encode()).hexdigest()}"
    return chain


def _buckets(parent: Bucket) -> Iterator[tuple[str, dict[bytes, "bytes | Bucket"]]]:
    for key, value in parent.items():
        if isinstance(value, Bucket):
            yield key.decode("utf-8", "replace"), dict(value.items())


def _snapshot(named: tuple[str, dict[bytes, "bytes | Bucket"]]) -> Snapshot | None:
    """The snapshot of a bucket; None if the key is not one of containerd's metadata store."""
    key, values = named
    if key.count("/") < 2:
        return None
    fields = {name: value for name, value in values.items() if isinstance(value, bytes)}
    return Snapshot(
        str(_uvarint(fields.get(b"id", b""))),
        key,
        fields.get(b"parent", b"").decode("utf-8", "replace"),
        fields.get(b"kind") == _COMMITTED,
        _varint(fields.get(b"size", b"")),
        _varint(fields.get(b"inodes", b"")),
    )


def _uvarint(data: bytes) -> int:
    """An unsigned number of Go's encoding/binary."""
    value = 0
    for index, byte in enumerate(data[:10]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value
    raise BoltError("a number without an end")


def _varint(data: bytes) -> int:
    """A signed number (zig-zag); 0 without data, and for one below 0."""
    value = _uvarint(data) if data else 0
    return 0 if value & 1 else value >> 1
