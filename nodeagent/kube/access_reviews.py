"""SelfSubjectAccessReview and SelfSubjectRulesReview: what the credentials may do by the API server's own answer.

Every authenticated identity may create them (ClusterRole system:basic-user), and they change nothing. Limits, as of
Kubernetes 1.36:

* An access review without an object's name asks about all of them. The Node authorizer answers that with no for claims
  and volumes, because it allows exactly those of the node's pods.
* A field selector counts from 1.32 on; earlier servers drop it.
* A rules review is about one namespace: the rules of RoleBindings elsewhere are not in it. It has the rules of RBAC
  alone, and `incomplete` is true if another authorizer (a webhook, the Node authorizer) does not list its own.
"""

import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from nodeagent.kube import user_review
from nodeagent.kube.rights import Right, Scope

if TYPE_CHECKING:
    from nodeagent.kube.transport import Transport

_ACCESS: Final = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_RULES: Final = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
_API_VERSION: Final = "authorization.k8s.io/v1"


class AccessStatus(msgspec.Struct):
    allowed: bool = False
    reason: str = ""


class AccessReview(msgspec.Struct):
    status: AccessStatus = msgspec.field(default_factory=AccessStatus)


class ResourceRule(msgspec.Struct, rename="camel"):
    verbs: list[str] | None = None
    api_groups: list[str] | None = None
    resources: list[str] | None = None
    resource_names: list[str] | None = None


class RulesStatus(msgspec.Struct, rename="camel"):
    resource_rules: list[ResourceRule] | None = None
    incomplete: bool = False
    evaluation_error: str = ""


class RulesReview(msgspec.Struct):
    status: RulesStatus = msgspec.field(default_factory=RulesStatus)


class GrantedRule(NamedTuple):
    """One verb on one resource that a rules review lists."""

    verb: str
    group: str
    resource: str
    names: tuple[str, ...] = ()
    """Only objects with these names; empty: all."""


def may(
    transport: "Transport",
    right: Right,
    *,
    node: str,
    lease_namespace: str = "",
    user: str = "",
    timeout_s: float | None = None,
) -> AccessStatus:
    """Whether this right is allowed. `user`: impersonate this one; empty: the credentials' own. Raises `ApiError`."""
    body = {
        "apiVersion": _API_VERSION,
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes_of(right, node=node, lease_namespace=lease_namespace)},
    }
    return user_review.decode(_post(transport, _ACCESS, body, user=user, timeout_s=timeout_s), AccessReview).status


def rules_in(transport: "Transport", namespace: str, *, timeout_s: float) -> tuple[tuple[GrantedRule, ...], str]:
    """The rules of the credentials in this namespace, and why the list is incomplete (empty if it is complete). Raises
    `ApiError`."""
    body = {"apiVersion": _API_VERSION, "kind": "SelfSubjectRulesReview", "spec": {"namespace": namespace}}
    answer = _post(transport, _RULES, body, user="", timeout_s=timeout_s)
    status = user_review.decode(answer, RulesReview).status
    rules = {
        GrantedRule(verb, group, resource, tuple(sorted(rule.resource_names or ())))
        for rule in status.resource_rules or ()
        for verb in rule.verbs or ()
        for group in rule.api_groups or ()
        for resource in rule.resources or ()
    }
    incomplete = status.evaluation_error or "an authorizer does not list its rules" if status.incomplete else ""
    return tuple(sorted(rules)), incomplete


def attributes_of(right: Right, *, node: str, lease_namespace: str) -> dict[str, Any]:
    """The resourceAttributes of a review."""
    resource, _, subresource = right.resource.partition("/")
    attributes: dict[str, Any] = {"verb": right.verb, "group": right.group, "resource": resource}
    if subresource:
        attributes["subresource"] = subresource
    if right.scope is Scope.OWN_NODE:
        attributes["name"] = node
    elif right.scope is Scope.EVERY_NAME:
        attributes["name"] = "*"
    elif right.scope is Scope.PODS_OF_NODE:
        requirement = {"key": "spec.nodeName", "operator": "In", "values": [node]}
        attributes["fieldSelector"] = {"requirements": [requirement]}
    elif right.scope is Scope.LEASE_NAMESPACE:
        attributes["namespace"] = lease_namespace
    return attributes


def _post(transport: "Transport", path: str, body: dict[str, Any], *, user: str, timeout_s: float | None) -> bytes:
    content = json.dumps(body).encode()
    return transport.request("POST", path, body=content, timeout_s=timeout_s, user=user).body
