"""Which Node this machine is. If that is uncertain, the agent must not act: it would evict by another node's name.

Order: the configured name (`--node-name`, the configuration), $NODE_NAME (the DaemonSet's downward API), the kubelet's
`--hostname-override`, the hostname; and if no Node has that hostname, the one Node whose addresses are this host's. A
node's credentials (`system:node:x`) must belong to the same Node.
"""

import re
import socket
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from nodeagent.model import OutcomeKind

if TYPE_CHECKING:
    from nodeagent.kube.transport import Transport

T = TypeVar("T")

_NODE_USER: Final = "system:node:"
_NODE_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
NO_TAINT_RIGHTS: Final = "node credentials cannot change taints; publishing conditions only"


class IdentityError(Exception):
    """It is uncertain which Node this machine is. The message ends with the remedy."""


class Identity(NamedTuple):
    """The Node's name and its source."""

    name: str
    source: str
    """For people: `--node-name`, `$NODE_NAME`, `hostname`, `addresses 10.0.2.15`."""
    user: str = ""
    """The user name that the API server assigns to the credentials; empty if it is unknown."""

    @property
    def node_credentials(self) -> bool:
        """True for a node's credentials: NodeRestriction forbids them taints and other nodes."""
        return self.user.startswith(_NODE_USER)


def local_name(*, given: str = "", env: str = "", hostname_override: str = "", hostname: str | None = None) -> Identity:
    """The name before the API server confirms it (`confirm_identity`). A hostname is a guess.

    Raises `IdentityError` if the name cannot be a node's.
    """
    host = socket.gethostname() if hostname is None else hostname
    for name, source in (
        (given, "--node-name"),
        (env, "$NODE_NAME"),
        (hostname_override, "the kubelet's --hostname-override"),
        (host.strip().lower(), "hostname"),
    ):
        if not name:
            continue
        if not _NODE_NAME.fullmatch(name):
            raise IdentityError(f"{name!r} ({source}) cannot be a node's name; set --node-name")
        return Identity(name, source)
    raise IdentityError("this host has no name; set --node-name")


def confirm_identity(
    transport: "Transport",
    guess: Identity,
    *,
    addresses: Callable[[], Iterable[str]] | None = None,
) -> Identity:
    """The guess, confirmed by the API server, or the Node that has this host's addresses.

    `addresses` returns this host's addresses (default: from the kernel, with pyroute2). Raises `IdentityError` if the
    Node is uncertain, `ApiError` if the API server does not answer.
    """
    user = fetch_user_name(transport)
    own_addresses = addresses or host_addresses
    if user.startswith(_NODE_USER):
        return _by_credentials(transport, guess, user, own_addresses)
    if _exists(transport, guess.name):
        return guess._replace(user=user)
    if guess.source != "hostname":
        raise IdentityError(f"{guess.source} is {guess.name}, but there is no such Node; correct the name")
    return _by_address(transport, guess.name, set(own_addresses()))._replace(user=user)


def host_addresses() -> tuple[str, ...]:
    """This host's addresses that other machines can reach."""
    from pyroute2 import IPRoute

    addresses = []
    with IPRoute() as netlink:
        for message in netlink.get_addr():
            address = message.get("IFA_LOCAL") or message.get("IFA_ADDRESS")
            # Scope 0 is global; loopback (254) and link-local (253) addresses are the same on every host.
            if address and message["scope"] == 0:
                addresses.append(str(address))
    return tuple(addresses)


def fetch_user_name(transport: "Transport") -> str:
    """The user name that the API server assigns to the credentials; empty if it returns none. Raises `ApiError`."""
    from nodeagent.kube.api_errors import ApiError
    from nodeagent.kube.objects import SelfSubjectReview

    body = b'{"apiVersion":"authentication.k8s.io/v1","kind":"SelfSubjectReview"}'
    try:
        path = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
        return _decode(transport.request("POST", path, body=body).body, SelfSubjectReview).status.user_info.username
    except ApiError as error:
        if error.kind in (OutcomeKind.FORBIDDEN, OutcomeKind.NOT_FOUND, OutcomeKind.INVALID):
            # Servers before 1.28 do not have it. NodeRestriction limits node credentials all the same.
            return ""
        raise


def _decode(body: bytes, shape: type[T]) -> T:
    """Raises `ApiError`, as an unanswered request does, so that the caller tries again."""
    from nodeagent.kube.api_errors import ApiError
    from nodeagent.kube.objects import Decoder, UnreadableError

    try:
        return Decoder(shape).decode(body)
    except UnreadableError as error:
        raise ApiError(OutcomeKind.SERVER_ERROR, f"the API server's answer cannot be read: {error}") from error


def _by_credentials(
    transport: "Transport", guess: Identity, user: str, own_addresses: Callable[[], Iterable[str]]
) -> Identity:
    """The node of the credentials. A copy of them on another machine must not act on that node."""
    from nodeagent.kube.objects import NodeObject

    owner = user.removeprefix(_NODE_USER)
    if owner == guess.name:
        return guess._replace(user=user)
    if guess.source == "hostname":
        # In some clouds a node's name differs from its hostname; its addresses are still this host's.
        node = _decode(transport.request("GET", f"/api/v1/nodes/{owner}").body, NodeObject)
        if shared := {a.address for a in node.status.addresses or () if a.type == "InternalIP"} & set(own_addresses()):
            return Identity(owner, f"addresses {', '.join(sorted(shared))}", user)
    raise IdentityError(
        f"{guess.source} is {guess.name}, but the credentials belong to {owner}; "
        "use this node's own credentials or correct the name"
    )


def _exists(transport: "Transport", name: str) -> bool:
    from nodeagent.kube.api_errors import ApiError

    try:
        transport.request("GET", f"/api/v1/nodes/{name}")
    except ApiError as error:
        if error.kind is OutcomeKind.NOT_FOUND:
            return False
        raise
    return True


def _by_address(transport: "Transport", hostname: str, own_addresses: set[str]) -> Identity:
    from nodeagent.kube.list_stream import Listing
    from nodeagent.kube.objects import NodeObject

    matches: dict[str, set[str]] = {}
    for item in Listing(transport, "/api/v1/nodes", {"resourceVersion": "0"}):
        node = _decode(item, NodeObject)
        internal = {a.address for a in node.status.addresses or () if a.type == "InternalIP"}
        if internal & own_addresses:
            matches[node.metadata.name] = internal & own_addresses
    if len(matches) == 1:
        ((name, shared),) = matches.items()
        return Identity(name, f"addresses {', '.join(sorted(shared))}")
    if not matches:
        raise IdentityError(f"no Node is called {hostname} and none has an address of this host; set --node-name")
    raise IdentityError(f"several Nodes have an address of this host ({', '.join(sorted(matches))}); set --node-name")
