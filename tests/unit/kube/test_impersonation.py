"""The requests that are sent as the own node, what a refusal changes, and that no other node is ever named."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent.config.schema import ClusterIdentity
from nodeagent.kube import impersonation
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.credentials import find_credentials
from nodeagent.kube.impersonation import IMPERSONATED, Impersonation
from nodeagent.kube.rights import Rule
from nodeagent.kube.transport import Transport, connect
from nodeagent.model import OutcomeKind
from tests.fake_kube import ApiServer, Request, pod

PODS = "/api/v1/pods?fieldSelector=spec.nodeName%3Dn1"
CLAIM = "/api/v1/namespaces/shop/persistentvolumeclaims/data"


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer(node="n1", pods=[pod("web", namespace="shop", node="n1")]) as server:
        server.token_nodes[server.token] = "n1"
        yield server


@pytest.fixture
def transport(api: ApiServer, tmp_path: Path) -> Transport:
    return connect(find_credentials(str(api.kubeconfig(tmp_path / "kubeconfig"))))


def users(requests: list[Request]) -> list[str]:
    return [request.headers.get("impersonate-user", "") for request in requests]


@pytest.mark.parametrize(
    ("method", "path", "rule"),
    [
        ("GET", PODS, Rule("list", "", "pods")),
        ("GET", f"{PODS}&watch=1&timeoutSeconds=300", Rule("watch", "", "pods")),
        ("GET", "/api/v1/namespaces/shop/pods?fieldSelector=metadata.name%3Dweb", Rule("list", "", "pods")),
        ("POST", "/api/v1/namespaces/shop/pods/web/eviction", Rule("create", "", "pods/eviction")),
        ("GET", "/api/v1/nodes/n1", Rule("get", "", "nodes")),
        ("GET", "/api/v1/nodes?watch=1&fieldSelector=metadata.name%3Dn1", Rule("watch", "", "nodes")),
        ("GET", CLAIM, Rule("get", "", "persistentvolumeclaims")),
        ("GET", "/api/v1/persistentvolumes/pv-1", Rule("get", "", "persistentvolumes")),
    ],
)
def test_pods_evictions_the_node_claims_and_volumes_are_requested_as_the_node(
    method: str, path: str, rule: Rule
) -> None:
    identity = Impersonation()
    assert identity.user_for(method, path) == ""
    identity.act_as("n1", ClusterIdentity.AUTO)
    assert impersonation.request_of(method, path) == rule
    assert identity.user_for(method, path) == "system:node:n1"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PATCH", "/api/v1/nodes/n1"),
        ("PATCH", "/api/v1/nodes/n1/status"),
        ("GET", "/apis/policy/v1/namespaces/shop/poddisruptionbudgets"),
        ("GET", "/apis/policy/v1/namespaces/shop/poddisruptionbudgets?watch=1"),
        ("GET", "/apis/coordination.k8s.io/v1/namespaces/nodeagent/leases"),
        ("PUT", "/apis/coordination.k8s.io/v1/namespaces/nodeagent/leases/nodeagent-evictions-z-0"),
        ("POST", "/apis/events.k8s.io/v1/namespaces/shop/events"),
        ("PATCH", "/apis/events.k8s.io/v1/namespaces/shop/events/web.1"),
        ("PATCH", "/api/v1/namespaces/shop/pods/web/status"),
        ("DELETE", "/api/v1/namespaces/shop/pods/web"),
        ("POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews"),
        ("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"),
        ("GET", "/version"),
        ("GET", "/api/v1/namespaces/shop"),
        # A core name in another group is another resource.
        ("GET", "/apis/metrics.k8s.io/v1beta1/pods"),
    ],
)
def test_taints_pdbs_leases_and_what_a_policy_limits_more_are_the_service_accounts(method: str, path: str) -> None:
    identity = Impersonation()
    identity.act_as("n1", ClusterIdentity.NODE)
    assert impersonation.request_of(method, path) not in IMPERSONATED
    assert identity.user_for(method, path) == ""


def test_the_header_is_the_only_impersonation_header(api: ApiServer, transport: Transport) -> None:
    transport.impersonation.act_as("n1", ClusterIdentity.AUTO)
    transport.request("GET", PODS)
    transport.request("PATCH", "/api/v1/nodes/n1", body=b"{}", content_type="application/strategic-merge-patch+json")
    listed, patched = api.requests
    assert [name for name in listed.headers if name.startswith("impersonate")] == ["impersonate-user"]
    assert [name for name in patched.headers if name.startswith("impersonate")] == []


def test_a_refused_request_is_repeated_as_the_service_account_and_stays_with_it(
    api: ApiServer, transport: Transport
) -> None:
    transport.impersonation.act_as("n1", ClusterIdentity.AUTO)
    api.forbid("impersonate-on:associated-node:list", "pods")
    transport.request("GET", PODS)
    transport.request("GET", PODS)
    transport.request("GET", "/api/v1/nodes/n1")
    assert users(api.requests) == ["system:node:n1", "", "", "system:node:n1"]
    assert not transport.impersonation.complete
    assert "list pods sent as the ServiceAccount" in transport.impersonation.note
    assert 'verbs: ["impersonate-on:associated-node:list"]' in transport.impersonation.note
    assert transport.impersonation.doubted.is_set()


def test_a_request_that_is_refused_as_both_is_tried_as_the_node_again(api: ApiServer, transport: Transport) -> None:
    """daemonset.yaml grants no direct right: one older API server of several must not end the node's identity."""
    transport.impersonation.act_as("n1", ClusterIdentity.AUTO)
    api.forbid("impersonate-on:associated-node:list", "pods")
    api.rights = lambda verb, *_: verb != "list"
    for _ in range(2):
        with pytest.raises(ApiError, match='cannot list resource "pods"'):
            transport.request("GET", PODS)
    assert users(api.requests) == ["system:node:n1", "", "system:node:n1", ""]
    assert transport.impersonation.note.startswith("list pods refused: missing rule")
    assert transport.impersonation.wants_probe
    api.rights = None  # granted directly now: the next repetition is the last one
    transport.request("GET", PODS)
    transport.request("GET", PODS)
    assert users(api.requests)[4:] == ["system:node:n1", "", ""]
    transport.impersonation.act_as("n1", ClusterIdentity.AUTO)
    api.allow("impersonate-on:associated-node:list", "pods")
    transport.request("GET", PODS)
    assert users(api.requests)[7:] == ["system:node:n1"]
    assert transport.impersonation.complete
    assert transport.impersonation.note == ""


def test_with_the_identity_node_a_refused_request_fails_and_is_named_until_one_succeeds(
    api: ApiServer, transport: Transport
) -> None:
    transport.impersonation.act_as("n1", ClusterIdentity.NODE)
    api.forbid("impersonate:associated-node", "nodes")
    for _ in range(2):
        with pytest.raises(ApiError, match="impersonate:associated-node") as refused:
            transport.request("GET", PODS)
        assert refused.value.kind is OutcomeKind.FORBIDDEN
    assert users(api.requests) == ["system:node:n1"] * 2
    assert transport.impersonation.note.startswith("list pods refused: missing rule")
    api.allow("impersonate:associated-node", "nodes")
    transport.request("GET", PODS)
    assert transport.impersonation.note == ""


def test_a_right_that_the_node_lacks_is_not_taken_for_a_refused_impersonation(
    api: ApiServer, transport: Transport
) -> None:
    transport.impersonation.act_as("n1", ClusterIdentity.AUTO)
    with pytest.raises(ApiError, match="no relationship found"):
        transport.request("GET", CLAIM)
    assert users(api.requests) == ["system:node:n1"]
    assert transport.impersonation.complete


def test_a_server_without_constrained_impersonation_is_told_apart_from_a_missing_rule(
    api: ApiServer, transport: Transport
) -> None:
    transport.impersonation.act_as("n1", ClusterIdentity.AUTO)
    api.constrained_impersonation = False
    transport.request("GET", PODS)
    assert "no constrained impersonation (Kubernetes 1.36)" in transport.impersonation.note


def test_a_token_of_another_node_is_refused_for_this_one(api: ApiServer, transport: Transport) -> None:
    api.token_nodes[api.token] = "n2"
    transport.impersonation.act_as("n1", ClusterIdentity.NODE)
    with pytest.raises(ApiError, match="arbitrary-node"):
        transport.request("GET", PODS)
    assert "the token is of no pod on this node" in transport.impersonation.note


def test_after_an_outage_only_a_missing_identity_wants_a_probe(api: ApiServer, transport: Transport) -> None:
    identity = transport.impersonation

    def outage() -> None:
        identity.doubted.clear()
        api.go_down()
        with pytest.raises(ApiError):
            transport.request("GET", PODS)
        api.come_back()
        transport.request("GET", PODS)

    identity.act_as("n1", ClusterIdentity.AUTO)
    outage()
    assert not identity.doubted.is_set()
    identity.fall_back("older")
    outage()
    assert identity.doubted.is_set()
    assert (identity.take_returned(), identity.take_returned()) == (True, False)


def test_direct_rights_that_are_removed_after_an_upgrade_cause_a_probe_soon(
    api: ApiServer, transport: Transport
) -> None:
    """`kubectl delete -f examples/kubernetes-1.35.yaml`, while the next probe may be ten minutes away."""
    identity = transport.impersonation
    identity.fall_back("older")
    transport.request("GET", PODS)
    assert not identity.doubted.is_set()
    api.forbid("list", "pods")
    for first in (True, False):  # without any right it is not probed after each refusal
        with pytest.raises(ApiError):
            transport.request("GET", PODS)
        assert (identity.doubted.is_set(), identity.take_returned()) == (first, first)
        identity.doubted.clear()
    api.allow("list", "pods")
    transport.request("GET", PODS)
    for verb, resource, method, path in (
        ("patch", "nodes", "PATCH", "/api/v1/nodes/n1"),  # never the node's
        ("get", "persistentvolumeclaims", "GET", CLAIM),  # was never allowed
    ):
        api.forbid(verb, resource)
        with pytest.raises(ApiError):
            transport.request(method, path, body=b"{}" if method == "PATCH" else None)
        assert not identity.doubted.is_set()


def test_a_request_whose_direct_right_is_removed_is_tried_as_the_node_again(
    api: ApiServer, transport: Transport
) -> None:
    transport.impersonation.act_as("n1", ClusterIdentity.AUTO)
    api.forbid("impersonate-on:associated-node:list", "pods")
    transport.request("GET", PODS)
    transport.request("GET", PODS)
    assert users(api.requests) == ["system:node:n1", "", ""]
    api.allow("impersonate-on:associated-node:list", "pods")
    # The double's `forbid` is for every identity: the right of the account alone.
    api.rights = lambda verb, _group, resource, _namespace: (verb, resource) != ("list", "pods")
    with pytest.raises(ApiError):
        transport.request("GET", PODS)
    transport.request("GET", PODS)
    assert users(api.requests)[3:] == ["", "system:node:n1"]
    assert transport.impersonation.complete


def test_a_refusal_by_a_proxy_changes_nothing(api: ApiServer, transport: Transport) -> None:
    from tests.fake_kube import Answer

    transport.impersonation.act_as("n1", ClusterIdentity.AUTO)
    text = b'User "x" cannot impersonate resource "users" in API group ""'
    api.instead = lambda _: Answer(403, text, "text/html")
    with pytest.raises(ApiError):
        transport.request("GET", PODS)
    assert transport.impersonation.complete
    assert len(api.requests) == 1
