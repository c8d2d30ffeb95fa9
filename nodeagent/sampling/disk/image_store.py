"""Measures what fills the image store, by class: images in use and unused, layers of containers, orphans, content.

Promises:

1. Nothing is changed, also no orphaned snapshot is removed: containerd removes it with the next removal of a snapshot.
2. Every file below the store's directory counts in exactly one class, so that the sum is what `du` counts.
3. The walk ends at `until`. What was not walked counts with the size that containerd recorded, or not at all, and its
   class is not `complete`.
4. Without an answer of the runtime, images are not told apart by use, and containers by their mounts alone.

A directory is an orphan if containerd's database has it neither before nor after the walk: a snapshot that is made or
removed meanwhile is none. Only containerd's overlayfs snapshotter is told apart; the directories of others count as
`other`, with their names.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from nodeagent.cri.runtime import RuntimeFacts
from nodeagent.model import ImageStoreUsage, StoreClass, StoreItem, StorePart
from nodeagent.sampling.disk import containerd_store, pod_paths
from nodeagent.sampling.disk.bolt import BoltError
from nodeagent.sampling.disk.containerd_store import Snapshot
from nodeagent.sampling.disk.walk import TreeWalk
from nodeagent.sampling.hostfs.host import Host, Unreadable
from nodeagent.sampling.node.filesystems import ImageStore

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_BLOCK: Final = 512


class _Holder(NamedTuple):
    """Where the bytes of a directory belong."""

    kind: StoreClass
    name: str = ""
    """Empty: it counts in its class alone."""


class _Amount(NamedTuple):
    bytes: int
    inodes: int
    complete: bool = True


def measure_image_store(
    host: Host,
    store: ImageStore,
    facts: RuntimeFacts | None,
    *,
    pods: Mapping[str, str],
    until: float,
    on_progress: Callable[[str], None] = lambda _words: None,
) -> ImageStoreUsage:
    """What fills this store, walked until time.monotonic() `until`. `facts`: the runtime's answer, None without one.
    `pods`: container id -> pod, of the containers that the host shows. Raises Unreadable if the store cannot be listed.
    """
    root = store.images.removesuffix(f"/{containerd_store.SNAPSHOTTER}")
    unknown: list[str] = []
    before = _snapshots(host, root, unknown)
    directories = _snapshot_directories(host, root) if before is not None else []
    sizes: dict[str, _Amount] = {}
    for index, name in enumerate(sorted(directories)):
        on_progress(f"measuring the image store: {index} of {len(directories)} snapshots")
        sizes[name] = _walk(host, f"{root}/{containerd_store.SNAPSHOTTER}/snapshots/{name}", until)
    after = _snapshots(host, root, []) if before is not None else None
    snapshots = {**(before or {}), **(after or {})}
    holders = _Classifier(host, root, facts, pods, snapshots).holders()
    by_id = {each.id: each for each in snapshots.values()}
    totals = _Totals()
    for name, amount in sizes.items():
        snapshot = by_id.get(name)
        if snapshot is None:
            totals.add(_Holder(StoreClass.ORPHANED_SNAPSHOTS, f"snapshots/{name}"), amount)
        else:
            totals.add(holders[snapshot.key], amount if amount.complete else _as_recorded(amount, snapshot))
    _add_rest(host, root, totals, until, snapshots_known=before is not None)
    if facts is None:
        unknown.append("the container runtime did not answer: images are not told apart by use")
    return ImageStoreUsage(store.runtime, root, totals.parts(), tuple(unknown))


def _as_recorded(amount: _Amount, snapshot: Snapshot) -> _Amount:
    """What containerd recorded of a layer that was not walked to its end."""
    return _Amount(max(amount.bytes, snapshot.size), max(amount.inodes, snapshot.inodes), complete=False)


def _snapshots(host: Host, root: str, unknown: list[str]) -> dict[str, Snapshot] | None:
    """The snapshots of the database; None if there is none that can be read."""
    if not host.exists(f"{root}/{containerd_store.SNAPSHOTTER}/metadata.db"):
        unknown.append(f"no {containerd_store.SNAPSHOTTER}: snapshots are not told apart")
        return None
    try:
        return containerd_store.read_snapshots(host, root)
    except (Unreadable, BoltError) as error:
        unknown.append(f"snapshots are not told apart: {error}")
        return None


def _snapshot_directories(host: Host, root: str) -> list[str]:
    try:
        return [name for name, _ in host.subdirectories(f"{root}/{containerd_store.SNAPSHOTTER}/snapshots")]
    except Unreadable:
        return []  # containerd makes it with the first snapshot


class _Classifier:
    """Assigns each snapshot to a class."""

    def __init__(
        self,
        host: Host,
        root: str,
        facts: RuntimeFacts | None,
        pods: Mapping[str, str],
        snapshots: Mapping[str, Snapshot],
    ) -> None:
        self._host = host
        self._root = root
        self._facts = facts
        self._pods = pods
        self._snapshots = snapshots
        self._own = [each for each in snapshots.values() if each.namespace == containerd_store.NAMESPACE]
        self._keys = {each.name: each.key for each in self._own}

    def holders(self) -> dict[str, _Holder]:
        """Key of each snapshot -> where it belongs."""
        found = {
            key: _Holder(StoreClass.OTHER, f"snapshots of namespace {each.namespace}")
            if each.namespace != containerd_store.NAMESPACE
            else _Holder(StoreClass.OTHER, "layers without an image" if each.committed else f"snapshot {each.name}")
            for key, each in self._snapshots.items()
        }
        found |= self._images()
        return found | self._layers()

    def _images(self) -> dict[str, _Holder]:
        if self._facts is None:
            return {each.key: _Holder(StoreClass.IMAGES) for each in self._own if each.committed}
        owners: dict[str, set[str]] = {}
        used: set[str] = set()
        for image in self._facts.images:
            key = self._keys.get(containerd_store.top_layer(self._host, self._root, image.id), "")
            in_use, pinned = self._facts.in_use(image), self._facts.pinned(image)
            label = (image.names or (image.id,))[0] + ("" if in_use or not pinned else " (kept without a container)")
            for layer in containerd_store.chain_below(key, self._snapshots):
                owners.setdefault(layer.key, set()).add(label)
                if in_use or pinned:
                    used.add(layer.key)
        # A container keeps the layers below its own also if its image has lost its name.
        below = {
            layer.key
            for each in self._own
            if not each.committed
            for layer in containerd_store.chain_below(each.parent, self._snapshots)
        }
        found = {}
        for key in owners.keys() | below:
            kind = StoreClass.IMAGES_IN_USE if key in used or key in below else StoreClass.UNUSED_IMAGES
            names = owners.get(key, set())
            found[key] = _Holder(kind, next(iter(names)) if len(names) == 1 else "")
        return found

    def _layers(self) -> dict[str, _Holder]:
        """The writable layers of containers: by the runtime's list, else by whether they are mounted."""
        active = [each for each in self._own if not each.committed]
        listed = {each.id: each for each in self._facts.containers} if self._facts is not None else {}
        try:
            mounted = set(pod_paths.find_layers(self._host, self._host.mounts()))
        except Unreadable:
            mounted = set()
        found = {}
        for snapshot in active:
            container = listed.get(snapshot.name)
            pod = (container.pod if container is not None else "") or self._pods.get(snapshot.name, "")
            if container is not None:
                kind = StoreClass.LIVE_LAYERS if container.live else StoreClass.ENDED_CONTAINERS
            elif snapshot.name in mounted:
                kind = StoreClass.LIVE_LAYERS
            elif self._facts is None and snapshot.name.isalnum():
                kind = StoreClass.ENDED_CONTAINERS
            else:
                continue  # being unpacked, or of another client
            found[snapshot.key] = _Holder(kind, pod or f"container {snapshot.name[:12]}")
        return found


class _Totals:
    """The sums of the classes and their items."""

    def __init__(self) -> None:
        self._classes: dict[StoreClass, _Amount] = {}
        self._items: dict[_Holder, _Amount] = {}

    def add(self, holder: _Holder, amount: _Amount) -> None:
        self._classes[holder.kind] = _sum(self._classes.get(holder.kind), amount)
        if holder.name:
            self._items[holder] = _sum(self._items.get(holder), amount)

    def parts(self) -> tuple[StorePart, ...]:
        return tuple(
            StorePart(kind, total.bytes, total.inodes, self._items_of(kind), total.complete)
            for kind in StoreClass
            if (total := self._classes.get(kind)) is not None
        )

    def _items_of(self, kind: StoreClass) -> tuple[StoreItem, ...]:
        found = [
            StoreItem(holder.name, amount.bytes, amount.inodes)
            for holder, amount in self._items.items()
            if holder.kind is kind
        ]
        return tuple(sorted(found, key=lambda item: (-item.bytes, item.name)))


def _sum(one: _Amount | None, other: _Amount) -> _Amount:
    if one is None:
        return other
    return _Amount(one.bytes + other.bytes, one.inodes + other.inodes, one.complete and other.complete)


def _add_rest(host: Host, root: str, totals: _Totals, until: float, *, snapshots_known: bool) -> None:
    """The files of the store that are in no snapshot."""
    snapshotter = f"{root}/{containerd_store.SNAPSHOTTER}"
    snapshots = f"{snapshotter}/snapshots"
    opened = [root, *([snapshotter] if snapshots_known else [])]
    totals.add(_Holder(StoreClass.OTHER), _plain(host, [*opened, snapshots] if snapshots_known else opened))
    for directory in opened:
        for name, _ in sorted(host.subdirectories(directory)):
            path = f"{directory}/{name}"
            if path == snapshots or path in opened:
                continue
            if name == containerd_store.CONTENT:
                totals.add(_Holder(StoreClass.CONTENT_STORE), _walk(host, path, until))
            else:
                totals.add(_Holder(StoreClass.OTHER, os.path.relpath(path, root)), _walk(host, path, until))


def _plain(host: Host, directories: Iterable[str]) -> _Amount:
    """These directories and the files directly in them, without what is in their subdirectories."""
    size = inodes = 0
    for directory in directories:
        try:
            fd = host.open(directory)
        except Unreadable:
            continue
        try:
            size, inodes = size + os.fstat(fd).st_blocks, inodes + 1
            with os.scandir(fd) as entries:
                for entry in entries:
                    if not entry.is_dir(follow_symlinks=False):
                        size, inodes = size + entry.stat(follow_symlinks=False).st_blocks, inodes + 1
        except OSError:
            continue  # removed meanwhile
        finally:
            os.close(fd)
    return _Amount(size * _BLOCK, inodes)


def _walk(host: Host, path: str, until: float) -> _Amount:
    """The usage of a directory; nothing if it is gone."""
    if time.monotonic() >= until:
        return _Amount(0, 0, complete=False)
    try:
        fd = os.open(host.real(host.resolve(path)), _DIRECTORY)
    except FileNotFoundError:
        return _Amount(0, 0)
    except (OSError, Unreadable):
        return _Amount(0, 0, complete=False)
    with TreeWalk(fd) as walk:
        walk.step(until=until)
        usage = walk.usage
    return _Amount(usage.bytes or 0, usage.inodes, usage.complete and not usage.unknown)
