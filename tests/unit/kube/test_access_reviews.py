"""Access reviews ask about the objects of each scope, and a rules review states what it cannot list."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.kube import access_reviews, rights
from nodeagent.kube.access_reviews import GrantedRule
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.credentials import find_credentials
from nodeagent.kube.rights import Right, Scope
from nodeagent.kube.transport import Transport, connect
from nodeagent.model import OutcomeKind
from tests.fake_kube import Answer, ApiServer, node_object


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer(node=node_object("n1")) as server:
        yield server


@pytest.fixture
def transport(api: ApiServer, tmp_path: Path) -> Iterator[Transport]:
    token = api.token_of("kube-system", "agent", node="n1")
    made = connect(find_credentials(str(api.kubeconfig(tmp_path / "kubeconfig", token=token))))
    yield made
    made.close()


def with_scope(scope: Scope) -> Right:
    return next(right for right in (*rights.RIGHTS, rights.IMPERSONATION) if right.scope is scope)


@pytest.mark.parametrize(
    ("scope", "named"),
    [
        (Scope.ALL, {"subresource": "eviction"}),
        (
            Scope.PODS_OF_NODE,
            {"fieldSelector": {"requirements": [{"key": "spec.nodeName", "operator": "In", "values": ["n1"]}]}},
        ),
        (Scope.OWN_NODE, {"name": "n1"}),
        (Scope.LEASE_NAMESPACE, {"namespace": "leases"}),
        (Scope.MOUNTED, {}),
        (Scope.EVERY_NAME, {"name": "*"}),
    ],
)
def test_a_review_is_about_the_objects_of_the_scope(scope: Scope, named: dict[str, Any]) -> None:
    right = with_scope(scope)
    asked = access_reviews.attributes_of(right, node="n1", lease_namespace="leases")
    resource = right.resource.partition("/")[0]
    assert asked == {"verb": right.verb, "group": right.group, "resource": resource, **named}


def test_a_review_has_the_answer_and_what_grants_it(api: ApiServer, transport: Transport) -> None:
    assert not access_reviews.may(transport, rights.EVICT, node="n1").allowed
    api.grant("agent", {rights.EVICT.rule})
    found = access_reviews.may(transport, rights.EVICT, node="n1")
    assert (found.allowed, found.reason.startswith("RBAC: allowed by ClusterRoleBinding")) == (True, True)


def test_a_rules_review_has_one_entry_for_each_verb_and_resource(api: ApiServer, transport: Transport) -> None:
    api.grant("agent", {("get", "", "secrets")})
    [rule] = api.store.objects["clusterroles"]["", "kube-system-agent"]["rules"]
    rule.update(verbs=["get", "list"], resourceNames=["b", "a"])
    rules, incomplete = access_reviews.rules_in(transport, "default", timeout_s=5.0)
    named = ("a", "b")
    assert {rule for rule in rules if rule.resource == "secrets"} == {
        GrantedRule("get", "", "secrets", named),
        GrantedRule("list", "", "secrets", named),
    }
    assert incomplete == ""


def test_an_incomplete_list_states_why(api: ApiServer, transport: Transport, tmp_path: Path) -> None:
    api.tokens["kubelet"] = "system:node:n1"
    kubelet = connect(find_credentials(str(api.kubeconfig(tmp_path / "kubelet", token="kubelet"))))
    assert access_reviews.rules_in(kubelet, "default", timeout_s=5.0)[1] == (
        "node authorizer does not support user rule resolution"
    )
    kubelet.close()


def test_an_answer_that_cannot_be_read_is_an_error_and_no_right(api: ApiServer, transport: Transport) -> None:
    api.instead = lambda request: Answer(201, {"kind": "SelfSubjectAccessReview", "status": {"allowed": "yes"}})
    with pytest.raises(ApiError, match="cannot be read") as caught:
        access_reviews.may(transport, rights.EVICT, node="n1")
    assert caught.value.kind is OutcomeKind.SERVER_ERROR
