"""Whether the API server lets this ServiceAccount act as its node, and whether it then limits it to that node.

A probe changes nothing: two lists of pods without a result and one SelfSubjectAccessReview, which every identity may
create. Only a probe lets requests be sent as the node (again), so that identities do not alternate.
"""

import threading
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlencode

from nodeagent.config.schema import ClusterIdentity
from nodeagent.kube import access_reviews, impersonation, rights, user_review
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.backoff import RetryBackoff
from nodeagent.kube.user_review import User
from nodeagent.model import OutcomeKind

if TYPE_CHECKING:
    from nodeagent.kube.transport import Transport

NO_NODE: Final = "nodeagent-probe.invalid"
"""The name of no Node: its pods are what the node may not list."""
NO_POD: Final = "nodeagent-probe"
"""The name of no pod, so that the list of the own pods is empty. The server selects by node in its watch cache."""
FIRST_S: Final = 5.0
LAST_S: Final = 600.0
"""Wait before the next probe, first and last, while not every request is sent as the node. 5,000 nodes on an older
server then send 33 small requests a second."""
_REFUSED: Final = frozenset({400, 403, 404, 405, 422})
_DIRECT_ROLE: Final = "examples/kubernetes-1.35.yaml"


class ProbeResult(NamedTuple):
    """What the API server allows."""

    trouble: str = ""
    """Why not all requests can be sent as the node; empty if they can."""
    lists: bool = True
    """Its pods can be listed as the node."""
    unlimited: str = ""
    """Why the node's identity is no limit; empty if it is one."""


def backoff() -> RetryBackoff:
    """The waits between probes."""
    return RetryBackoff(first_s=FIRST_S, last_s=LAST_S)


def choose(transport: "Transport", user: str, node: str, mode: ClusterIdentity, *, evicts: bool) -> str | None:
    """Let the transport's requests impersonate `node`, the node of the token of `user`, if `mode` wants it and the API
    server allows it.

    Returns why it is not possible if `mode` is `node`, otherwise None. Raises `ApiError` if the server does not answer.
    """
    if mode is ClusterIdentity.SERVICE_ACCOUNT:
        return None
    result = ProbeResult()
    trouble = ""
    if node:
        result = probe(transport, node, evicts=evicts)
        trouble = result.trouble
    elif user.startswith(impersonation.ACCOUNT_USER):
        trouble = "the token names no node: it is of no pod, or the API server is older than 1.30"
    elif mode is ClusterIdentity.NODE:
        trouble = f"the credentials are those of {user or 'an unknown user'}"
    if mode is ClusterIdentity.NODE and (trouble or result.unlimited):
        return trouble or result.unlimited
    if trouble:
        has_rights, reason = with_direct_rights(transport, node, trouble)
        # Without rights of its own the ServiceAccount is no help: what is allowed as the node stays so. One of several
        # API servers may be older than the others: the requests that it refuses are tried as the node again.
        if not has_rights and node and result.lists:
            transport.impersonation.act_as(node, mode, note=trouble)
        elif has_rights or not transport.impersonation.acting:
            transport.impersonation.fall_back(reason)
    elif node:
        transport.impersonation.act_as(node, mode, note=result.unlimited)
    return None


def act_unprobed(transport: "Transport", user: User, node: str, mode: ClusterIdentity) -> None:
    """As `choose`, for a report: without a probe, because a refused request is repeated as the ServiceAccount.

    Raises `ApiError` if `mode` is `node` and the token is of no pod on this node.
    """
    if mode is ClusterIdentity.SERVICE_ACCOUNT or user.name.startswith(impersonation.NODE_USER):
        return
    if user.node and user.node == node:
        transport.impersonation.act_as(node, mode)
    elif mode is ClusterIdentity.NODE:
        raise ApiError(OutcomeKind.FORBIDDEN, f"cluster.identity is node, but the token is of no pod on {node}")


def run(transport: "Transport", node: str, *, evicts: bool, stopping: threading.Event, backoff: RetryBackoff) -> None:
    """Probe until `stopping`, while `cluster.identity` is `auto` and not every request is sent as the node: rights are
    granted later, and servers upgraded. A refusal and the end of an outage set `Impersonation.doubted`."""
    identity = transport.impersonation
    while not stopping.is_set():
        if not identity.wants_probe:
            backoff.succeeded()
        woken = identity.doubted.wait(backoff.failed() if identity.wants_probe else None)
        identity.doubted.clear()
        if woken:
            if identity.take_returned():
                backoff.succeeded()
            continue
        try:
            user = user_review.fetch_user(transport)
            # A token that was replaced by one of another node must not act as either.
            if user.node in ("", node):
                choose(transport, user.name, user.node, ClusterIdentity.AUTO, evicts=evicts)
        except ApiError:
            continue


def probe(transport: "Transport", node: str, *, evicts: bool) -> ProbeResult:
    """Whether requests can be sent as this node. Raises `ApiError` if the server does not answer.

    `evicts`: evictions are among them.
    """
    user = f"{impersonation.NODE_USER}{node}"
    refused = _list_refused(transport, f"spec.nodeName={node},metadata.name={NO_POD}", user)
    if refused is not None:
        trouble = impersonation.refusal_of(refused) or f"the node may not list its own pods: {refused}"
        return ProbeResult(trouble, lists=False)
    if evicts and not _may_evict(transport):
        return ProbeResult(f"missing rule: {rights.rule_text(rights.EVICT.impersonated.rule)}")
    if _list_refused(transport, f"spec.nodeName={NO_NODE}", user) is None:
        return ProbeResult(unlimited="the API server lets a node list pods of other nodes: the Node authorizer is off")
    return ProbeResult()


def with_direct_rights(transport: "Transport", node: str, trouble: str) -> tuple[bool, str]:
    """Whether the ServiceAccount has rights of its own; the trouble, and the remedy if it has none. Raises `ApiError`
    if the server does not answer: then nothing is known that a change of the identity could rest on."""
    if _list_refused(transport, f"spec.nodeName={node or NO_NODE},metadata.name={NO_POD}", "") is None:
        return True, f"{trouble}. Its token can list and evict pods of other nodes (docs/security.md)"
    return False, f"{trouble}. It has no direct rights either, so that its requests are refused: apply {_DIRECT_ROLE}"


def _list_refused(transport: "Transport", selector: str, user: str) -> str | None:
    """The message of the 403 to such a list of pods; None if it was answered. A server or proxy that knows no
    impersonation may refuse with another status."""
    query = {"fieldSelector": selector, "resourceVersion": "0"}
    try:
        transport.request("GET", f"/api/v1/pods?{urlencode(query)}", user=user)
    except ApiError as error:
        if error.status in _REFUSED and error.from_api:
            return error.message
        raise
    return None


def _may_evict(transport: "Transport") -> bool:
    try:
        return access_reviews.may(transport, rights.EVICT.impersonated, node="").allowed
    except ApiError:
        # Unknown: the first eviction shows it, and is repeated as the ServiceAccount if it is refused. A busy API
        # server answers the requests of nodes before this one, which is the ServiceAccount's.
        return True
