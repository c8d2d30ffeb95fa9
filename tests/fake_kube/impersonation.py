"""Impersonation by the header Impersonate-User: constrained (KEP-5284, on from 1.36 on) and legacy.

Followed from k8s.io/apiserver, pkg/endpoints/filters/impersonation: the modes that a node's name can meet, in their
order; of several refusals the first is answered (constrained_impersonation.go, mode.go). Without the feature only the
legacy mode exists (impersonation.go). The answers to the allowed requests are those measured on 1.36.2; the texts of
refusals have no recording and are those of the source.
"""

import re
from typing import TYPE_CHECKING

from tests.fake_kube import authorizer
from tests.fake_kube.authorizer import ACCOUNT_USER, NODE_USER, Attributes
from tests.fake_kube.messages import RefusedError, Request

if TYPE_CHECKING:
    from tests.fake_kube.server import ApiServer

AUTHENTICATION = "authentication.k8s.io"
NODE_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


def wanted_user(request: Request) -> str:
    """The user that the request impersonates; empty if none."""
    others = [name for name in request.headers if name.startswith("impersonate-") and name != "impersonate-user"]
    user = request.headers.get("impersonate-user", "")
    if others and not user:
        raise RefusedError(400, "BadRequest", f"requested {others} without impersonating a user name")
    return user


def impersonate(api: "ApiServer", request: Request, requestor: str, asked: Attributes) -> str:
    """The user that the request acts as. Raises RefusedError."""
    user = wanted_user(request)
    if not user:
        return requestor
    refusals = []
    for mode, resource, name in _modes(api, request, requestor, user):
        try:
            if mode:
                on = asked._replace(verb=f"impersonate-on:{mode}:{asked.verb}")
                authorizer.authorize(api, requestor, on)
                verb, group = f"impersonate:{mode}", AUTHENTICATION
            else:
                verb, group = "impersonate", ""
            authorizer.authorize(api, requestor, Attributes(verb, group, resource, name=name))
            return user
        except RefusedError as refusal:
            refusals.append(refusal)
    raise refusals[0]


def _modes(api: "ApiServer", request: Request, requestor: str, user: str) -> list[tuple[str, str, str]]:
    """(mode, resource, name) of each check that applies; the mode is empty for the legacy one."""
    modes = []
    only_user = not [name for name in request.headers if name.startswith("impersonate-") and name != "impersonate-user"]
    node = user.removeprefix(NODE_USER) if user.startswith(NODE_USER) else ""
    if api.constrained_impersonation and only_user and NODE_NAME.fullmatch(node):
        token = request.headers.get("authorization", "").partition(" ")[2]
        if requestor.startswith(ACCOUNT_USER) and api.token_nodes.get(token) == node:
            # The answer is kept for every node, so the check is for all of them.
            modes.append(("associated-node", "nodes", "*"))
        modes.append(("arbitrary-node", "nodes", node))
    modes.append(("", "users", user))
    return modes
