"""The store of a container runtime by what fills it."""

import enum
from typing import NamedTuple


class StoreClass(enum.StrEnum):
    """What a part of the image store is."""

    IMAGES_IN_USE = "images in use"
    """Unpacked layers of images that a container uses, or that are pinned."""
    UNUSED_IMAGES = "unused images"
    """Unpacked layers of images that no container uses, and that no image in use shares."""
    IMAGES = "images"
    """Unpacked layers of images, if the runtime does not tell which containers use them."""
    LIVE_LAYERS = "live layers"
    """Writable layers of containers that run."""
    ENDED_CONTAINERS = "ended containers"
    """Writable layers of containers that have ended and are not removed yet."""
    ORPHANED_SNAPSHOTS = "orphaned snapshots"
    """Directories that the runtime's database does not contain."""
    CONTENT_STORE = "content store"
    """Images as they were pulled: compressed layers and manifests."""
    OTHER = "other"


class StoreItem(NamedTuple):
    """One holder within a class: an image, a pod, a directory."""

    name: str
    bytes: int
    inodes: int


class StorePart(NamedTuple):
    """The sum of one class."""

    kind: StoreClass
    bytes: int
    inodes: int
    items: tuple[StoreItem, ...]
    """Largest first. Layers that several images share count in the class and in none of its images."""
    complete: bool = True
    """False: some of it was not measured in time. The numbers are those that the runtime recorded, or lower bounds."""


class ImageStoreUsage(NamedTuple):
    """What fills the image store."""

    runtime: str
    path: str
    parts: tuple[StorePart, ...]
    """In the order of `StoreClass`; a class without content is missing."""
    unknown: tuple[str, ...] = ()
    """What could not be told apart or read, and why."""

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def inodes(self) -> int:
        return sum(part.inodes for part in self.parts)
