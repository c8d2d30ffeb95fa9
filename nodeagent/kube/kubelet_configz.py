"""The kubelet's own answer about its configuration (/configz), through the API server.

The request needs the right `nodes/proxy`, which also allows to run commands in every pod of the node, so the agent's
role does not have it by default. The finer right `nodes/configz` (KEP-2862) counts only for a request to the kubelet's
own port, whose certificate a cluster usually cannot verify.
"""

from typing import Final

from nodeagent.kube.transport import Transport

MAX_CONFIGZ_BYTES: Final = 256 << 10
"""A recorded answer has 5 KiB."""


def fetch(transport: Transport, node_name: str) -> str:
    """The kubelet's configuration as JSON. Raises `ApiError`."""
    path = f"/api/v1/nodes/{node_name}/proxy/configz"
    return transport.request("GET", path, max_bytes=MAX_CONFIGZ_BYTES).body.decode("utf-8", "replace")
