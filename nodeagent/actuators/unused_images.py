"""Removes unused images through the container runtime's socket, as the kubelet's image garbage collection would.

Promises:

1. Only images that no container runs or mounts, not even an ended one, and that are not pinned (`cri.runtime`). If the
   runtime does not answer for one container, no image is removed.
2. An image must be unused in two reads `STARTING_S` apart: a pod that is starting has pulled its image and has no
   container yet. The containers are read again before each removal.
3. The largest first, one at a time, until the deadline. The runtime may end a removal after that. An image that the
   runtime refuses to remove is left, as by the kubelet: something else may use the runtime's store.
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
    """The removed images, and what is known of the others."""

    images: int
    bytes: int
    """As the runtime counts them; containerd adds up the compressed layers, and shared ones stay."""
    left: int
    """Unused images that were not tried, because the time was over or the runtime did not answer."""
    refused: int = 0
    """Images that the runtime did not remove."""
    refusal: str = ""
    """Why it did not remove the first of them."""
    error: str = ""
    """Why the runtime did not answer any more; empty if it did."""


def remove_unused_images(
    socket: str, *, until: float, stop: Callable[[], bool] = lambda: False, starting_s: float = STARTING_S
) -> RemovedImages:
    """Remove unused images until `until` on time.monotonic(), or until `stop` returns True.

    Raises:
        GrpcError: the runtime does not answer from the beginning.
    """
    with GrpcClient(socket) as grpc:
        runtime = RuntimeClient(grpc, until=until)
        known = frozenset(image.id for image in runtime.read_facts().unused())
        removed = RemovedImages(0, 0, len(known))
        read_again_at = time.monotonic() + starting_s
        while time.monotonic() < read_again_at:
            if _over(until, stop):
                return removed
            time.sleep(_POLL_S)
        tried: set[str] = set()
        while True:
            try:
                unused = [each for each in runtime.read_facts().unused() if each.id in known and each.id not in tried]
            except GrpcError as error:
                return removed if _over(until, stop) else removed._replace(error=str(error))
            removed = removed._replace(left=len(unused))
            if not unused or _over(until, stop):
                return removed
            image: Image = unused[0]
            tried.add(image.id)
            try:
                runtime.remove_image(image, timeout_s=until - time.monotonic())
            except GrpcError as error:
                if error.code == grpc_client.DEADLINE_EXCEEDED:
                    return removed
                if error.code == grpc_client.UNAVAILABLE:
                    return removed._replace(error=str(error))
                refusal = removed.refusal or f"{(image.names or (image.id,))[0]}: {error}"
                removed = removed._replace(refused=removed.refused + 1, refusal=refusal)
            else:
                removed = removed._replace(images=removed.images + 1, bytes=removed.bytes + image.size)
            removed = removed._replace(left=len(unused) - 1)


def _over(until: float, stop: Callable[[], bool]) -> bool:
    return time.monotonic() >= until or stop()
