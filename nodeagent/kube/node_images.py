"""The images on the node that no pod uses, which a kubelet removes when the disk runs short."""

from collections.abc import Iterable
from typing import NamedTuple

from nodeagent.model import Pod


class NodeImage(NamedTuple):
    """An image of the Node's status.images."""

    names: tuple[str, ...]
    size: int
    """Bytes. containerd reports the compressed size, so the image may take more of the disk."""


class UnusedImages:
    """The last sum. The same images and pods cost nothing again."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: tuple[tuple[NodeImage, ...], tuple[Pod, ...], int] = ((), (), 0)
        """Images, pods and result; one assignment, because not only the loop asks."""

    def sum(self, images: tuple[NodeImage, ...], pods: tuple[Pod, ...]) -> int:
        """Bytes of the images that no container of these pods names. A kubelet lists the 50 largest images; those of
        containers whose pod is gone and of image volumes count as unused."""
        last_images, last_pods, result = self._last
        if images is not last_images or pods is not last_pods:
            result = _unused_bytes(images, pods)
            self._last = images, pods, result
        return result


def _unused_bytes(images: Iterable[NodeImage], pods: Iterable[Pod]) -> int:
    used = {name for pod in pods for container in pod.containers for name in container.image_names}
    return sum([image.size for image in images if used.isdisjoint(image.names)])
