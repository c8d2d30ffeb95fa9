"""The double's constrained impersonation answers what a real 1.36.2 server was measured to answer to a pod-bound token
of n1: lists, evictions, status, taints, PDBs, Events. The texts of refusals are those of the server's source."""

import http.client
import json
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import urlsplit

import pytest

from nodeagent.config.schema import Config, Mode
from nodeagent.kube import rights
from tests.fake_kube import ApiServer, Json, node_object, pod

ACCOUNT: Final = "system:serviceaccount:kube-system:agent"
N1, N2 = "system:node:n1", "system:node:n2"
GRANTED: Final = rights.impersonation_rules(rights.used_by(Config(mode=Mode.ENFORCE, node_name="n1")))
MORE: Final = {
    # What the agent does not send as its node, so that it is the node's rights that decide.
    ("impersonate-on:associated-node:patch", "", "nodes"),
    ("impersonate-on:associated-node:patch", "", "nodes/status"),
    ("impersonate-on:associated-node:create", "events.k8s.io", "events"),
    ("impersonate-on:associated-node:list", "policy", "poddisruptionbudgets"),
    ("impersonate-on:associated-node:list", "", "secrets"),
    ("impersonate-on:associated-node:create", "", "events"),
    ("impersonate-on:associated-node:delete", "", "pods"),
}
PODS, OWN, OTHER = "/api/v1/pods", "/api/v1/namespaces/default/pods/own", "/api/v1/namespaces/default/pods/other"
EVICTION: Final = {"apiVersion": "policy/v1", "kind": "Eviction"}
STATUS: Final = {"status": {"conditions": [{"type": "PIDPressure", "status": "True"}]}}
EVENT: Final = {
    "metadata": {"name": "e"},
    "eventTime": "2026-11-20T23:17:01.000000Z",
    "reportingInstance": "n1",
    "action": "Evicting",
    "reason": "Evicted",
}
MATRIX: Final[list[tuple[str, str, str, Json | None, int, str]]] = [
    ("list own", "GET", f"{PODS}?fieldSelector=spec.nodeName%3Dn1", None, 200, ""),
    ("list all", "GET", PODS, None, 403, "can only list/watch pods with spec.nodeName field selector"),
    ("list n2", "GET", f"{PODS}?fieldSelector=spec.nodeName%3Dn2", None, 403, "with spec.nodeName field selector"),
    ("evict own", "POST", f"{OWN}/eviction", {**EVICTION, "metadata": {"name": "own"}}, 201, ""),
    (
        "evict n2's",
        "POST",
        f"{OTHER}/eviction",
        {**EVICTION, "metadata": {"name": "other"}},
        403,
        'pods "other" is forbidden: node n1 can only evict pods with spec.nodeName set to itself',
    ),
    ("delete n2's", "DELETE", OTHER, None, 403, 'node "n1" can only delete pods with spec.nodeName set to itself'),
    ("get n1", "GET", "/api/v1/nodes/n1", None, 200, ""),
    ("get n2", "GET", "/api/v1/nodes/n2", None, 403, "node 'n1' cannot read 'n2', only its own Node object"),
    ("list nodes", "GET", "/api/v1/nodes", None, 403, "node 'n1' cannot read all nodes, only its own Node object"),
    ("list n1 alone", "GET", "/api/v1/nodes?fieldSelector=metadata.name%3Dn1", None, 200, ""),
    ("status of n1", "PATCH", "/api/v1/nodes/n1/status", STATUS, 200, ""),
    ("status of n2", "PATCH", "/api/v1/nodes/n2/status", STATUS, 403, 'is not allowed to modify node "n2"'),
    (
        "taints",
        "PATCH",
        "/api/v1/nodes/n1",
        {"spec": {"taints": [{"key": "a/b"}]}},
        403,
        "not allowed to modify taints",
    ),
    ("PDBs", "GET", "/apis/policy/v1/namespaces/default/poddisruptionbudgets", None, 403, f'User "{N1}" cannot list'),
    ("secrets", "GET", "/api/v1/namespaces/default/secrets", None, 403, "No Object name found"),
    (
        "Events of events.k8s.io",
        "POST",
        "/apis/events.k8s.io/v1/namespaces/default/events",
        {**EVENT, "reportingController": "nodeagent.io/nodeagent"},
        201,
        "",
    ),
    (
        "Events of v1",
        "POST",
        "/api/v1/namespaces/default/events",
        {**EVENT, "reportingComponent": "nodeagent.io/nodeagent"},
        201,
        "",
    ),
]


@pytest.fixture
def api() -> Iterator[ApiServer]:
    pods = [pod("own", node="n1"), pod("other", node="n2")]
    with ApiServer(node=node_object("n1"), pods=pods, linger_s=None) as server:
        server.add_node(node_object("n2"))
        server.grant("agent", GRANTED | MORE)
        yield server


def call(
    api: ApiServer,
    method: str,
    path: str,
    body: Json | None = None,
    *,
    user: str = N1,
    token_node: str = "n1",
    group: str = "",
) -> tuple[int, Json]:
    """The answer to a pod's token that impersonates `user`."""
    headers = {
        "Content-Type": "application/strategic-merge-patch+json" if method == "PATCH" else "application/json",
        "Authorization": f"Bearer {api.token_of('kube-system', 'agent', node=token_node)}",
    }
    headers |= {"Impersonate-User": user} if user else {}
    headers |= {"Impersonate-Group": group} if group else {}
    connection = http.client.HTTPConnection(urlsplit(api.url).netloc, timeout=10)
    try:
        connection.request(method, path, body=None if body is None else json.dumps(body), headers=headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def message_of(answer: tuple[int, Json]) -> str:
    assert answer[0] == 403
    return str(answer[1]["message"])


def may(api: ApiServer, verb: str, resource: str, *, user: str = N1, **attributes: Any) -> Json:
    """The status of a SelfSubjectAccessReview."""
    asked = {"verb": verb, "resource": resource, **attributes}
    body = {"spec": {"resourceAttributes": asked}}
    status, answer = call(api, "POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body, user=user)
    assert (status, answer["kind"]) == (201, "SelfSubjectAccessReview")
    result: Json = answer["status"]
    return result


# --- with the feature ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "text"), [m[1:] for m in MATRIX], ids=[m[0] for m in MATRIX]
)
def test_as_its_own_node_a_token_may_do_what_was_measured(
    api: ApiServer, method: str, path: str, body: Json | None, status: int, text: str
) -> None:
    code, answer = call(api, method, path, body)
    assert code == status
    assert text in answer.get("message", "")


@pytest.mark.parametrize(("method", "path", "body"), [m[1:4] for m in MATRIX], ids=[m[0] for m in MATRIX])
def test_as_another_node_a_token_may_do_nothing(api: ApiServer, method: str, path: str, body: Json | None) -> None:
    refusal = message_of(call(api, method, path, body, user=N2))
    assert f'User "{ACCOUNT}" cannot impersonate-on:arbitrary-node:' in refusal


def test_as_itself_the_account_has_no_right_on_pods(api: ApiServer) -> None:
    for method, path, body in (
        ("GET", PODS, None),
        ("POST", f"{OWN}/eviction", {**EVICTION, "metadata": {"name": "own"}}),
    ):
        assert f'User "{ACCOUNT}" cannot' in message_of(call(api, method, path, body, user=""))


def test_a_token_without_a_node_impersonates_none(api: ApiServer) -> None:
    own_pods = f"{PODS}?fieldSelector=spec.nodeName%3Dn1"
    refusal = message_of(call(api, "GET", own_pods, token_node=""))
    assert "cannot impersonate-on:arbitrary-node:list" in refusal


def test_each_verb_needs_its_own_right_and_a_lost_one_is_named(api: ApiServer) -> None:
    api.grant("agent", GRANTED - {("impersonate-on:associated-node:create", "", "pods/eviction")})
    assert call(api, "GET", f"{PODS}?fieldSelector=spec.nodeName%3Dn1")[0] == 200
    assert message_of(call(api, "POST", f"{OWN}/eviction", {**EVICTION, "metadata": {"name": "own"}})) == (
        f'pods "own" is forbidden: User "{ACCOUNT}" cannot impersonate-on:associated-node:create resource '
        '"pods/eviction" in API group "" in the namespace "default"'
    )


def test_the_right_to_impersonate_is_checked_for_all_nodes(api: ApiServer) -> None:
    """A rule with resourceNames does not cover it (mode.go: the name in the check is `*`)."""
    api.grant("agent", GRANTED - {rights.IMPERSONATION.rule})
    expected = (
        f'nodes.authentication.k8s.io "*" is forbidden: User "{ACCOUNT}" cannot impersonate:associated-node '
        'resource "nodes" in API group "authentication.k8s.io" at the cluster scope'
    )
    assert message_of(call(api, "GET", "/api/v1/nodes/n1")) == expected
    api.grant("agent", GRANTED)
    for rule in api.store.objects["clusterroles"]["", "kube-system-agent"]["rules"]:
        if rule["verbs"] == ["impersonate:associated-node"]:
            rule["resourceNames"] = ["n1"]
    assert message_of(call(api, "GET", "/api/v1/nodes/n1")) == expected


def test_with_a_group_only_legacy_impersonation_applies(api: ApiServer) -> None:
    refusal = message_of(call(api, "GET", "/api/v1/nodes/n1", group="system:masters"))
    assert refusal == (
        f'users "{N1}" is forbidden: User "{ACCOUNT}" cannot impersonate resource "users" in API group "" '
        "at the cluster scope"
    )


def test_rights_are_taken_away_at_run_time(api: ApiServer) -> None:
    assert call(api, "GET", "/api/v1/nodes/n1")[0] == 200
    api.forbid("impersonate-on:associated-node:get", "nodes")
    assert "impersonate-on:associated-node:get" in message_of(call(api, "GET", "/api/v1/nodes/n1"))
    api.allow("impersonate-on:associated-node:get", "nodes")
    assert call(api, "GET", "/api/v1/nodes/n1")[0] == 200


def test_the_agents_default_account_may_impersonate_its_node_and_no_other(api: ApiServer) -> None:
    api.token_nodes[api.token] = "n1"
    api.tokens["agents"] = api.tokens[api.token]
    api.token_nodes["agents"] = "n1"
    for user, status in ((N1, 200), (N2, 403), ("admin", 403)):
        headers = {"Authorization": "Bearer agents", "Impersonate-User": user}
        connection = http.client.HTTPConnection(urlsplit(api.url).netloc, timeout=10)
        connection.request("GET", "/api/v1/nodes/n1", headers=headers)
        assert connection.getresponse().status == status
        connection.close()


# --- without it ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["version", "feature gate"])
def test_a_server_without_the_feature_asks_for_the_legacy_right(api: ApiServer, how: str) -> None:
    if how == "version":
        old = ApiServer(node=node_object("n1"), minor=35)
        old.grant("agent", GRANTED)
    else:
        old = api
        old.constrained_impersonation = False
    with old:
        assert message_of(call(old, "GET", "/api/v1/nodes/n1")) == (
            f'users "{N1}" is forbidden: User "{ACCOUNT}" cannot impersonate resource "users" in API group "" '
            "at the cluster scope"
        )
        old.grant("agent", {("impersonate", "", "users")})
        assert call(old, "GET", "/api/v1/nodes/n1")[0] == 200


def test_the_version_is_the_servers(api: ApiServer) -> None:
    assert call(api, "GET", "/version", user="")[1]["minor"] == "36"
    with ApiServer(minor=35) as old:
        assert call(old, "GET", "/version", user="")[1]["minor"] == "35"
        assert not old.constrained_impersonation


# --- reviews ---------------------------------------------------------------------------------------------------------


def test_a_review_of_the_own_rights_follows_the_identity_of_the_request(api: ApiServer) -> None:
    selector = {"requirements": [{"key": "spec.nodeName", "operator": "In", "values": ["n1"]}]}
    assert may(api, "list", "pods", fieldSelector=selector) == {"allowed": True}
    assert may(api, "list", "pods") == {
        "allowed": False,
        "reason": "can only list/watch pods with spec.nodeName field selector",
    }
    assert may(api, "list", "pods", fieldSelector=selector, user="") == {"allowed": False}
    on = may(api, "impersonate-on:associated-node:list", "pods", user="")
    assert on["allowed"]
    assert on["reason"] == (
        'RBAC: allowed by ClusterRoleBinding "kube-system-agent" of ClusterRole "kube-system-agent" to ServiceAccount '
        '"agent/kube-system"'
    )
    name = {"group": "authentication.k8s.io", "name": "*"}
    assert may(api, "impersonate:associated-node", "nodes", user="", **name)["allowed"]


def test_before_selectors_counted_a_node_read_every_pod_and_node(api: ApiServer) -> None:
    """AuthorizeNodeWithSelectors is on by default from 1.32 on."""
    api.tokens["kubelet"] = N1
    for minor, status in ((31, 200), (32, 403)):
        api.minor = minor
        for path in (PODS, "/api/v1/nodes"):
            connection = http.client.HTTPConnection(urlsplit(api.url).netloc, timeout=10)
            connection.request("GET", path, headers={"Authorization": "Bearer kubelet"})
            assert connection.getresponse().status == status
            connection.close()


def test_a_review_of_the_rules_lists_those_of_rbac(api: ApiServer) -> None:
    path = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
    status, answer = call(api, "POST", path, {"spec": {"namespace": "default"}}, user="")
    assert status == 201
    assert answer["status"]["incomplete"] is False
    rules = {
        (verb, group, resource)
        for rule in answer["status"]["resourceRules"]
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert {rule for rule in rules if rule[1] != "authorization.k8s.io" and rule[2] != "selfsubjectreviews"} == {
        rule for rule in GRANTED | MORE if rule[1] != "authorization.k8s.io"
    }
    assert call(api, "POST", path, {"spec": {}}, user="") == (
        400,
        {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": "no namespace on request",
            "reason": "BadRequest",
            "code": 400,
        },
    )


def test_a_review_of_a_nodes_rules_is_incomplete(api: ApiServer) -> None:
    api.tokens["kubelet"] = N1
    connection = http.client.HTTPConnection(urlsplit(api.url).netloc, timeout=10)
    body = json.dumps({"spec": {"namespace": "default"}})
    headers = {"Authorization": "Bearer kubelet", "Content-Type": "application/json"}
    connection.request("POST", "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", body=body, headers=headers)
    answer = json.loads(connection.getresponse().read())
    connection.close()
    assert answer["status"]["incomplete"] is True
    assert answer["status"]["evaluationError"] == "node authorizer does not support user rule resolution"
