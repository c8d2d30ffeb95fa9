"""The images and containers of a container runtime, by the CRI's runtime.v1.

The numbers of the fields are those of k8s.io/cri-api/pkg/apis/runtime/v1/api.proto. Reads change nothing; the only call
that does is `remove_image`.
"""

import contextlib
import json
import math
import time
from collections.abc import Iterator
from typing import Final, NamedTuple

from nodeagent.cri import grpc_client, protobuf
from nodeagent.cri.grpc_client import GrpcClient, GrpcError
from nodeagent.cri.protobuf import MalformedError

_RUNTIME: Final = "/runtime.v1.RuntimeService"
_IMAGES: Final = "/runtime.v1.ImageService"
_CREATED, _RUNNING = 0, 1
"""Values of ContainerState: CREATED, RUNNING, EXITED, UNKNOWN."""
_READY: Final = 0
"""Value of PodSandboxState: READY, NOTREADY."""
TIMEOUT_S: Final = 10.0
"""Deadline of one read. Lists took 2 ms; a runtime under pressure takes seconds."""


class Image(NamedTuple):
    """An image of the runtime."""

    id: str
    """The digest of its configuration: `sha256:...`; CRI-O omits the algorithm."""
    names: tuple[str, ...]
    """Tags, or digests of an image without a tag."""
    size: int
    """Bytes as the runtime counts them; containerd adds up the compressed layers."""
    pinned: bool
    """Never removed as unused: the runtime marks the image of sandboxes so."""


class Container(NamedTuple):
    """A container or the sandbox of a pod."""

    id: str
    pod: str
    """`namespace/name`."""
    live: bool
    """It runs, or is about to. False: it has ended."""
    image_ids: frozenset[str] = frozenset()
    """Its image and those of its image volumes by each name that the runtime gives. Empty for a sandbox."""


class RuntimeFacts(NamedTuple):
    """The images and containers of one moment."""

    images: tuple[Image, ...]
    containers: tuple[Container, ...]
    sandbox_image: str
    """The image of sandboxes in the runtime's configuration; empty if it does not tell. containerd before 1.7 does not
    pin it."""

    def in_use(self, image: Image) -> bool:
        """True if a container runs or mounts it, also one that has ended: the kubelet's image garbage collection counts
        alike."""
        digest = image.id.removeprefix("sha256:")
        named = {digest, f"sha256:{digest}", *image.names}
        return any(not named.isdisjoint(container.image_ids) for container in self.containers)

    def pinned(self, image: Image) -> bool:
        """True if it must stay without a container: pinned, or the image of sandboxes."""
        return image.pinned or self.sandbox_image in image.names or any(_is_pause(name) for name in image.names)

    def unused(self) -> list[Image]:
        """The images that may be removed, largest first."""
        found = [image for image in self.images if not self.in_use(image) and not self.pinned(image)]
        return sorted(found, key=lambda image: (-image.size, image.id))


class RuntimeClient:
    """A client of one socket. Each method raises GrpcError."""

    def __init__(self, grpc: GrpcClient, *, until: float = math.inf) -> None:
        """No read ends after `until` on time.monotonic()."""
        self._grpc = grpc
        self._until = until
        self._mounted: dict[str, frozenset[str]] = {}
        """By ID of the container; the mounts of a container do not change."""

    def read_facts(self) -> RuntimeFacts:
        """Images are read before containers: one that is pulled and used in between is missing, never unused. One call
        for each container that was not read before: lists have no mounts."""
        images = self._images()
        return RuntimeFacts(images, self._containers(), self._sandbox_image())

    def remove_image(self, image: Image, *, timeout_s: float) -> None:
        """Remove the image with all its names. Raises GrpcError."""
        request = protobuf.encode(1, protobuf.encode(1, image.id))
        self._grpc.call(f"{_IMAGES}/RemoveImage", request, timeout_s=timeout_s)

    def _read(self, method: str, request: bytes = b"") -> bytes:
        left_s = max(0.0, self._until - time.monotonic())
        return self._grpc.call(method, request, timeout_s=min(TIMEOUT_S, left_s))

    def _images(self) -> tuple[Image, ...]:
        answer = self._read(f"{_IMAGES}/ListImages")
        with _well_formed():
            return tuple(
                Image(
                    protobuf.text(each, 1),
                    tuple(protobuf.texts(each, 2) + protobuf.texts(each, 3)),
                    protobuf.number_of(each, 4),
                    bool(protobuf.number_of(each, 8)),
                )
                for each in protobuf.messages(answer, 1)
            )

    def _containers(self) -> tuple[Container, ...]:
        sandboxes = self._read(f"{_RUNTIME}/ListPodSandbox")
        containers = self._read(f"{_RUNTIME}/ListContainers")
        with _well_formed():
            pods = {protobuf.text(each, 1): _pod_name(each) for each in protobuf.messages(sandboxes, 1)}
            found = [
                Container(protobuf.text(each, 1), _pod_name(each), protobuf.number_of(each, 3) == _READY)
                for each in protobuf.messages(sandboxes, 1)
            ]
            listed = [(protobuf.text(each, 1), each) for each in protobuf.messages(containers, 1)]
            self._mounted = {id_: self._mounted_images(id_) for id_, _ in listed}
            for id_, each in listed:
                names = [protobuf.text(spec, 1) for spec in protobuf.messages(each, 4)]
                names += [protobuf.text(each, 5), protobuf.text(each, 10)]
                live = protobuf.number_of(each, 6) in (_CREATED, _RUNNING)
                pod = pods.get(protobuf.text(each, 2), "")
                found.append(Container(id_, pod, live, frozenset(filter(None, names)) | self._mounted[id_]))
        return tuple(found)

    def _mounted_images(self, container_id: str) -> frozenset[str]:
        """The images of the volumes of a container (KEP-4639), by each name that the runtime gives."""
        if container_id in self._mounted:
            return self._mounted[container_id]
        try:
            answer = self._read(f"{_RUNTIME}/ContainerStatus", protobuf.encode(1, container_id))
        except GrpcError as error:
            if error.code == grpc_client.NOT_FOUND:
                return frozenset()  # it was removed since the list
            raise
        names = [
            protobuf.text(image, number)
            for status in protobuf.messages(answer, 1)
            for mount in protobuf.messages(status, 14)
            for image in protobuf.messages(mount, 9)
            for number in (1, 20)
        ]
        return frozenset(filter(None, names))

    def _sandbox_image(self) -> str:
        """From the configuration that a verbose status contains; empty if the runtime has none there."""
        answer = self._read(f"{_RUNTIME}/Status", protobuf.encode(1, 1))
        with _well_formed():
            text = protobuf.text_map(answer, 2).get("config", "")
        try:
            config = json.loads(text)
        except ValueError:
            return ""  # CRI-O writes TOML there, and pins the image itself
        image = config.get("sandboxImage") if isinstance(config, dict) else None
        return image if isinstance(image, str) else ""


@contextlib.contextmanager
def _well_formed() -> Iterator[None]:
    try:
        yield
    except MalformedError as error:
        raise GrpcError(grpc_client.INTERNAL, f"the runtime's answer is malformed: {error}") from error


def _pod_name(sandbox: bytes) -> str:
    [metadata, *_] = protobuf.messages(sandbox, 2) or [b""]
    return f"{protobuf.text(metadata, 3)}/{protobuf.text(metadata, 1)}"


def _is_pause(name: str) -> bool:
    """`registry.k8s.io/pause:3.9`, `docker.io/rancher/mirrored-pause@sha256:...`."""
    repository = name.partition("@")[0].rpartition("/")[2].partition(":")[0]
    return repository == "pause" or repository.endswith("-pause")
