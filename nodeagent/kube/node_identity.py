"""Which Node this machine is. If that is uncertain, the agent must not act: it would evict by another node's name.

Order: the configured name (`--node-name`, the configuration), $NODE_NAME (the DaemonSet's downward API), the kubelet's
`--hostname-override`, the hostname; and if no Node has that hostname, the one Node whose addresses are this host's. A
node's credentials (`system:node:x`) must belong to the same Node, and so must the pod of a ServiceAccount's token.

The identity of the requests is chosen here as well (`cluster.identity`): only with the node's name in the token can the
ServiceAccount act as that node (`impersonation`).
"""

import re
import socket
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from nodeagent.config.schema import ClusterIdentity
from nodeagent.kube import impersonation
from nodeagent.model import OutcomeKind

if TYPE_CHECKING:
    from nodeagent.kube.transport import Transport

T = TypeVar("T")

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
        return self.user.startswith(impersonation.NODE_USER)


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
    mode: ClusterIdentity = ClusterIdentity.AUTO,
    evicts: bool = True,
) -> Identity:
    """The guess, confirmed by the API server, or the Node that has this host's addresses. Also chooses the identity of
    the transport's requests.

    `addresses` returns this host's addresses (default: from the kernel, with pyroute2). `evicts`: evictions are sent.
    Raises `IdentityError` if the Node is uncertain or if `mode` is `node` and the API server does not allow that,
    `ApiError` if it does not answer.
    """
    from nodeagent.kube import identity_probe, user_review

    reviewed = user_review.fetch_user(transport)
    user = reviewed.name
    own_addresses = addresses or host_addresses
    if user.startswith(impersonation.NODE_USER):
        owner = user.removeprefix(impersonation.NODE_USER)
        return _by_credentials(transport, guess, owner, own_addresses, "the credentials belong to")._replace(user=user)
    if reviewed.node and reviewed.node != guess.name and guess.source != "hostname":
        raise _mismatch(guess, reviewed.node, "the token is of a pod on")
    if (trouble := identity_probe.choose(transport, user, reviewed.node, mode, evicts=evicts)) is not None:
        raise IdentityError(f"cluster.identity is node, but that is not possible: {trouble}")
    if reviewed.node:
        found = _by_credentials(transport, guess, reviewed.node, own_addresses, "the token is of a pod on")
        if not _exists(transport, found.name):
            raise IdentityError(f"{found.source} is {found.name}, but there is no such Node; correct the name")
        return found._replace(user=user)
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


def _by_credentials(
    transport: "Transport", guess: Identity, owner: str, own_addresses: Callable[[], Iterable[str]], belong: str
) -> Identity:
    """The node of the credentials, `owner`. A copy of them on another machine must not act on that node."""
    from nodeagent.kube import user_review
    from nodeagent.kube.objects import NodeObject

    if owner == guess.name:
        return guess
    if guess.source == "hostname":
        # In some clouds a node's name differs from its hostname; its addresses are still this host's.
        node = user_review.decode(transport.request("GET", f"/api/v1/nodes/{owner}").body, NodeObject)
        if shared := {a.address for a in node.status.addresses or () if a.type == "InternalIP"} & set(own_addresses()):
            return Identity(owner, f"addresses {', '.join(sorted(shared))}")
    raise _mismatch(guess, owner, belong)


def _mismatch(guess: Identity, owner: str, belong: str) -> IdentityError:
    return IdentityError(
        f"{guess.source} is {guess.name}, but {belong} {owner}; use this node's own credentials or correct the name"
    )


def _exists(transport: "Transport", name: str) -> bool:
    from nodeagent.kube.api_errors import ApiError

    try:
        transport.request("GET", f"/api/v1/nodes/{name}")
    except ApiError as error:
        if error.kind is OutcomeKind.NOT_FOUND and error.from_api:
            return False
        raise
    return True


def _by_address(transport: "Transport", hostname: str, own_addresses: set[str]) -> Identity:
    from nodeagent.kube import user_review
    from nodeagent.kube.list_stream import Listing
    from nodeagent.kube.objects import NodeObject

    matches: dict[str, set[str]] = {}
    for item in Listing(transport, "/api/v1/nodes", {"resourceVersion": "0"}):
        node = user_review.decode(item, NodeObject)
        internal = {a.address for a in node.status.addresses or () if a.type == "InternalIP"}
        if internal & own_addresses:
            matches[node.metadata.name] = internal & own_addresses
    if len(matches) == 1:
        ((name, shared),) = matches.items()
        return Identity(name, f"addresses {', '.join(sorted(shared))}")
    if not matches:
        raise IdentityError(f"no Node is called {hostname} and none has an address of this host; set --node-name")
    raise IdentityError(f"several Nodes have an address of this host ({', '.join(sorted(matches))}); set --node-name")
