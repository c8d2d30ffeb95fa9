"""Which requests the ServiceAccount sends as its own node, so that a stolen token reaches no pod of another node.

Promises:

1. The table `rights.RIGHTS` alone decides which requests carry the header (`IMPERSONATED`); every other request is the
   ServiceAccount's own.
2. The header names the node of the token and no other: `act_as` is called with the node that the API server has read
   from the token.
3. With `cluster.identity: auto` a request whose impersonation the API server refuses is repeated as the ServiceAccount,
   and so is every later one of its kind until a probe succeeds: identities do not alternate from request to request.
   If the ServiceAccount has no such right either, as with daemonset.yaml alone, the next one is tried as the node
   again.
   A refusal to impersonate precedes the request (a filter before the authorization), so nothing was carried out.
4. With `node` nothing is repeated; `note` has the rule that is missing until such a request succeeds.

Theory of operation (Kubernetes 1.36, KEP-5284, k8s.io/apiserver pkg/endpoints/filters/impersonation). The request has
`Impersonate-User: system:node:NAME` and no other impersonation header: with a group, a UID or an extra the mode
`associated-node` does not apply. The token must be a ServiceAccount's with NAME in its extra
`authentication.kubernetes.io/node-name`, which every token that is bound to a pod has. The server then checks two
rights of the ServiceAccount, and keeps the result for 10 s:

* `impersonate-on:associated-node:VERB` on the resource of the request, with its namespace and name;
* `impersonate:associated-node` on `nodes` of authentication.k8s.io. The checked name is `*`, so that a rule needs no
  resourceNames; one with a node's name grants nothing.

It continues as user system:node:NAME with the groups system:nodes and system:authenticated, without UID and extra; the
Node authorizer and NodeRestriction limit that user to the node. If a check fails, the server tries its other modes, at
last the old verb `impersonate` on `users`, and answers 403 with the first failed check. A server without constrained
impersonation (before 1.36, or without the feature gate) checks only the old verb.
"""

import threading
from typing import Final

from nodeagent.config.schema import ClusterIdentity
from nodeagent.kube import rights
from nodeagent.kube.rights import RequestIdentity, Rule

NODE_USER: Final = "system:node:"
ACCOUNT_USER: Final = "system:serviceaccount:"
HEADER: Final = "Impersonate-User"
NO_FEATURE: Final = "the API server has no constrained impersonation (Kubernetes 1.36)"

IMPERSONATED: Final = frozenset(
    right.rule
    for right in rights.RIGHTS
    if right.identity is RequestIdentity.NODE and right.need is not rights.Need.CHECK
)
"""The requests that carry the header."""
_VERBS: Final = {"POST": "create", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}


class Impersonation:
    """The identity of the requests of one transport. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mode = ClusterIdentity.SERVICE_ACCOUNT
        self._user = ""
        self._note = ""
        self._fallback = ""
        self._refused: dict[Rule, str] = {}
        """Why a request was refused as the node."""
        self._refused_directly: set[Rule] = set()
        """Those of them that were refused as the ServiceAccount, too."""
        self._works_directly: set[Rule] = set()
        """Requests that could be the node's and have last succeeded as the ServiceAccount."""
        self._returned = False
        self.doubted = threading.Event()
        """Set when a request was refused for the first time. While not every request is the node's, also after an
        outage of the API server, and when the ServiceAccount loses a right."""

    def act_as(self, node: str, mode: ClusterIdentity, *, note: str = "") -> None:
        """Impersonate this node from now on: the node of the token. `note`: what is wrong with that."""
        with self._lock:
            self._mode, self._user, self._fallback, self._note = mode, f"{NODE_USER}{node}", "", note
            self._refused, self._refused_directly = {}, set()

    def fall_back(self, reason: str) -> None:
        """Act as the ServiceAccount until `act_as`."""
        with self._lock:
            self._user, self._fallback, self._note = "", reason, ""
            self._refused, self._refused_directly = {}, set()

    @property
    def complete(self) -> bool:
        """True if every request of `IMPERSONATED` is sent as the node."""
        return bool(self._user) and not (self._refused and self._mode is ClusterIdentity.AUTO)

    @property
    def acting(self) -> bool:
        """True if requests are tried as the node."""
        return bool(self._user)

    @property
    def wants_probe(self) -> bool:
        """True if requests that could be the node's are not."""
        return bool(self._fallback or self._refused)

    def take_returned(self) -> bool:
        """True if the API server has returned from an outage since the last call, or the ServiceAccount has lost a
        right: a probe soon may find something else than the last one."""
        returned, self._returned = self._returned, False
        return returned

    @property
    def note(self) -> str:
        """What is missing for the node's identity; empty if nothing is, or if it is not wanted."""
        if self._fallback:
            return f"acting as the ServiceAccount: {self._fallback}"
        with self._lock:
            refused = dict(self._refused)
        if not refused:
            return self._note
        what = ", ".join(sorted(f"{request.verb} {request.resource}" for request in refused))
        both = self._mode is ClusterIdentity.NODE or refused.keys() <= self._refused_directly
        how = "refused" if both else "sent as the ServiceAccount"
        return f"{what} {how}: {next(iter(refused.values()))}"

    def user_for(self, method: str, path: str) -> str:
        """The user to impersonate for this request; empty: none."""
        user = self._user
        if not user:
            return ""
        request = request_of(method, path)
        if request not in IMPERSONATED:
            return ""
        direct = self._mode is ClusterIdentity.AUTO and request in self._refused
        return "" if direct and request not in self._refused_directly else user

    def refuse(self, method: str, path: str, message: str) -> bool:
        """The API server answered 403 with this message to an impersonated request: True if the request must be
        repeated as the ServiceAccount."""
        refusal = refusal_of(message)
        if not refusal:
            return False
        request = request_of(method, path)
        with self._lock:
            if request not in self._refused:
                self._refused[request] = refusal
                self.doubted.set()
        return self._mode is ClusterIdentity.AUTO

    def refuse_directly(self, method: str, path: str, message: str) -> None:
        """A request of the ServiceAccount was answered 403 with this message. If it could be the node's, it is tried as
        the node next."""
        if not self.wants_probe or rights.denied(message) is None:  # a policy's refusal is about this object
            return
        request = request_of(method, path)
        if request not in IMPERSONATED:
            return
        with self._lock:
            self._refused_directly.add(request)
            if request in self._works_directly:
                # After an upgrade of the server the direct rights are removed.
                self._works_directly.discard(request)
                self._returned = True
                self.doubted.set()

    def succeeded(self, method: str, path: str, *, directly: bool = False) -> None:
        """An impersonated request was answered; or, `directly`, one of the ServiceAccount."""
        if not self.wants_probe:
            return
        request = request_of(method, path)
        if request not in IMPERSONATED:
            return
        with self._lock:
            self._refused_directly.discard(request)
            if directly:
                self._works_directly.add(request)
            else:
                self._refused.pop(request, None)

    def server_returned(self) -> None:
        """The API server answers again after an outage: it may be another version."""
        if self.wants_probe:
            self._returned = True
            self.doubted.set()


def refusal_of(message: str) -> str:
    """Why the API server does not let the ServiceAccount impersonate its node, from the message of a 403; empty if it
    does, and the node lacks the right."""
    denied = rights.denied(message)
    if denied is None or not denied.rule.verb.startswith("impersonate"):
        return ""
    if denied.rule.verb == "impersonate":
        return NO_FEATURE
    if ":arbitrary-node" in denied.rule.verb:
        return "the token is of no pod on this node"
    return rights.missing_rule(message)


def request_of(method: str, path: str) -> Rule:
    """The rule of RBAC that this request takes."""
    where, _, query = path.partition("?")
    parts = where.strip("/").split("/")
    group, rest = ("", parts[2:]) if parts[0] == "api" else (parts[1] if len(parts) > 1 else "", parts[3:])
    if rest[:1] == ["namespaces"] and len(rest) > 2:
        rest = rest[2:]
    resource, name, subresource = [*rest, "", "", ""][:3]
    verb = _VERBS.get(method, "")
    if not verb:
        verb = "get" if name else "watch" if "watch=1" in query.split("&") else "list"
    return Rule(verb, group, f"{resource}/{subresource}" if subresource else resource)
