"""The user that the API server assigns to the credentials (SelfSubjectReview), and the node of its token."""

import re
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from nodeagent.kube import impersonation, objects
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.objects import UnreadableError
from nodeagent.model import OutcomeKind

if TYPE_CHECKING:
    from nodeagent.kube.transport import Transport

T = TypeVar("T")

_NODE_EXTRA: Final = "authentication.kubernetes.io/node-name"
"""The node of the pod that the token is bound to (Kubernetes 1.30)."""
_REFUSED: Final = (OutcomeKind.FORBIDDEN, OutcomeKind.NOT_FOUND, OutcomeKind.INVALID, OutcomeKind.DENIED)
_NODE_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


class User(NamedTuple):
    """The user of the credentials, as the API server sees it."""

    name: str = ""
    """Empty if it is unknown."""
    node: str = ""
    """The node of the pod that the ServiceAccount's token is bound to; empty if the token names none."""


def fetch_user(transport: "Transport") -> User:
    """The user that the API server assigns to the credentials. Raises `ApiError`."""
    body = b'{"apiVersion":"authentication.k8s.io/v1","kind":"SelfSubjectReview"}'
    try:
        path = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
        info = decode(transport.request("POST", path, body=body).body, objects.SelfSubjectReview).status.user_info
    except ApiError as error:
        if error.from_api and error.kind in _REFUSED:
            # Servers before 1.28 do not have it. NodeRestriction limits node credentials all the same.
            return User()
        raise
    nodes = (info.extra or {}).get(_NODE_EXTRA) or []
    # More than one value is none for the API server, too.
    node = nodes[0] if info.username.startswith(impersonation.ACCOUNT_USER) and len(nodes) == 1 else ""
    return User(info.username, node if _NODE_NAME.fullmatch(node) else "")


def decode(body: bytes, shape: type[T]) -> T:
    """Raises `ApiError`, as an unanswered request does, so that the caller tries again."""
    try:
        return objects.Decoder(shape).decode(body)
    except UnreadableError as error:
        raise ApiError(OutcomeKind.SERVER_ERROR, f"the API server's answer cannot be read: {error}") from error
