"""Removes unused images through the container runtime's socket, as the kubelet's image garbage collection would.

Promises:

1. Only images that no container uses, not even an ended one, and that are not pinned (`cri.runtime`).
2. An image must be unused in two reads `STARTING_S` apart: a pod that is starting has pulled its image and has no
   container yet. The containers are read again before each removal.
3. The largest first, one at a time, until the deadline. The runtime may end a removal after that.
"""

import time
from collections.abc import Callable
from typing import Final, NamedTuple

from nodeagent.cri import grpc_client
from nodeagent.cri.grpc_client import GrpcClient, GrpcError
from nodeagent.cri.runtime import Image, RuntimeClient

STARTING_S: Final = 5.0
"""The kubelet creates a container right after its image was pulled."""
_POLL_S: Final = 0.1


class RemovedImages(NamedTuple):
    """The removed images."""

    images: int
    bytes: int
    """As the runtime counts them; containerd adds up the compressed layers, and shared ones stay."""
    left: int
    """Unused images that remain, because the time was over."""


def remove_unused_images(
    socket: str, *, until: float, stop: Callable[[], bool] = lambda: False, starting_s: float = STARTING_S
) -> RemovedImages:
    """Remove unused images until `until` on time.monotonic(), or until `stop` returns True.

    Raises:
        GrpcError: the runtime does not answer, or refuses a removal.
    """
    images = size = 0
    with GrpcClient(socket) as grpc:
        runtime = RuntimeClient(grpc)
        known = frozenset(image.id for image in runtime.read_facts().unused())
        read_again_at = time.monotonic() + starting_s
        while time.monotonic() < read_again_at:
            if _over(until, stop):
                return RemovedImages(0, 0, len(known))
            time.sleep(_POLL_S)
        tried: set[str] = set()
        while True:
            unused = [each for each in runtime.read_facts().unused() if each.id in known and each.id not in tried]
            if not unused or _over(until, stop):
                return RemovedImages(images, size, len(unused))
            image: Image = unused[0]
            tried.add(image.id)
            try:
                runtime.remove_image(image, timeout_s=until - time.monotonic())
            except GrpcError as error:
                if error.code != grpc_client.DEADLINE_EXCEEDED:
                    raise
                return RemovedImages(images, size, len(unused))
            images, size = images + 1, size + image.size


def _over(until: float, stop: Callable[[], bool]) -> bool:
    return time.monotonic() >= until or stop()
