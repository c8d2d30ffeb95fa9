"""`nodeagent check --image-store`: what fills the store of the container runtime.

The runtime's socket is only read from. Without an answer the report says so and tells less apart.
"""

import time
from typing import Final

from nodeagent.cri.grpc_client import GrpcClient, GrpcError
from nodeagent.cri.runtime import RuntimeClient, RuntimeFacts
from nodeagent.model import ImageStoreUsage, NodeSnapshot
from nodeagent.report.progress import ProgressLine
from nodeagent.sampling.disk import image_store
from nodeagent.sampling.hostfs.host import Host, Unreadable
from nodeagent.sampling.node.filesystems import Layout

TIMEOUT_S: Final = 30.0
"""Timeout of the walk: about 15 million files in the kernel's cache, some 100,000 on a cold disk."""
SOCKETS: Final = (
    "/run/containerd/containerd.sock",
    "/run/k3s/containerd/containerd.sock",
    "/run/k0s/containerd.sock",
    "/run/crio/crio.sock",
)
"""Where runtimes listen, on the host."""


def measure(host: Host, layout: Layout, snapshot: NodeSnapshot, *, socket: str) -> ImageStoreUsage:
    """The image store of this host. Never raises: what is unknown has its reason. `socket`: of the configuration."""
    if layout.store is None:
        return ImageStoreUsage("no container runtime", "", (), (layout.reason,))
    facts, reason = _ask_runtime(host, socket)
    pods = {
        container.container_id: view.pod.key
        for view in snapshot.pods
        if view.usage is not None
        for container in view.usage.containers
    }
    line = ProgressLine()
    try:
        found = image_store.measure_image_store(
            host, layout.store, facts, pods=pods, until=time.monotonic() + TIMEOUT_S, on_progress=line.show
        )
    except Unreadable as error:
        return ImageStoreUsage(layout.store.runtime, layout.store.images, (), (str(error),))
    finally:
        line.clear()
    return found._replace(unknown=(*found.unknown, *([reason] if reason else [])))


def _ask_runtime(host: Host, configured: str) -> tuple[RuntimeFacts | None, str]:
    """(the runtime's images and containers, why they are unknown)."""
    socket = configured or next((path for path in SOCKETS if host.exists(path)), "")
    if not socket:
        return None, f"no socket of a container runtime ({', '.join(SOCKETS)}): set sampling.criSocket"
    try:
        with GrpcClient(host.real(host.resolve(socket))) as grpc:
            return RuntimeClient(grpc).read_facts(), ""
    except (GrpcError, Unreadable) as error:
        return None, f"{socket}: {error}"
