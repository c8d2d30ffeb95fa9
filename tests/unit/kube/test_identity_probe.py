"""Whose rights the requests use: what the API server allows at the start, and what changes later."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nodeagent.config.schema import ClusterIdentity, Config, Mode
from nodeagent.kube import identity_probe, rights, user_review
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.backoff import RetryBackoff
from nodeagent.kube.credentials import find_credentials
from nodeagent.kube.identity_probe import ProbeResult
from nodeagent.kube.transport import Transport, connect
from nodeagent.kube.user_review import User
from tests.fake_kube import Answer, ApiServer, Request, pod

ACCOUNT = "system:serviceaccount:nodeagent:nodeagent"
USED = rights.used_by(Config(mode=Mode.ENFORCE, node_name="n1"))
AS_NODE = rights.impersonation_rules(USED)
DIRECT = rights.direct_rules(USED)


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer(node="n1", pods=[pod("web", namespace="shop", node="n1")]) as server:
        yield server


@pytest.fixture
def transport(api: ApiServer, tmp_path: Path) -> Transport:
    """As a pod of the DaemonSet on n1."""
    api.grant("nodeagent", AS_NODE, namespace="nodeagent")
    token = api.token_of("nodeagent", "nodeagent", node="n1")
    return connect(find_credentials(str(api.kubeconfig(tmp_path / "kubeconfig", token=token))))


def writes(requests: list[Request]) -> list[str]:
    return [f"{request.method} {request.path}" for request in requests if request.method != "GET"]


def probe(transport: Transport, *, evicts: bool = True) -> ProbeResult:
    return identity_probe.probe(transport, "n1", evicts=evicts)


def choose(transport: Transport, mode: ClusterIdentity) -> str | None:
    user = user_review.fetch_user(transport)
    return identity_probe.choose(transport, user.name, user.node, mode, evicts=True)


def test_the_review_shows_the_node_of_the_pod_that_the_token_is_of(api: ApiServer, transport: Transport) -> None:
    assert user_review.fetch_user(transport) == User(ACCOUNT, "n1")
    api.token_nodes.clear()
    assert user_review.fetch_user(transport) == User(ACCOUNT, "")


def test_a_node_in_the_token_that_no_node_can_have_counts_as_none(api: ApiServer, transport: Transport) -> None:
    for name in ("n1\r\nX: y", "../n2", "", "N1"):
        for token in api.token_nodes:
            api.token_nodes[token] = name
        assert user_review.fetch_user(transport).node == ""


def test_with_the_rules_of_impersonation_nothing_is_missing_and_nothing_is_changed(
    api: ApiServer, transport: Transport
) -> None:
    assert probe(transport) == ProbeResult()
    assert writes(api.requests) == ["POST /apis/authorization.k8s.io/v1/selfsubjectaccessreviews"]


@pytest.mark.parametrize(
    ("verb", "resource"),
    [
        ("impersonate:associated-node", "nodes"),
        ("impersonate-on:associated-node:list", "pods"),
        ("impersonate-on:associated-node:create", "pods/eviction"),
    ],
)
def test_each_missing_rule_is_named(api: ApiServer, transport: Transport, verb: str, resource: str) -> None:
    api.forbid(verb, resource)
    assert f'resources: [{resource}], verbs: ["{verb}"]' in probe(transport).trouble


def test_the_right_to_evict_does_not_matter_to_a_dry_run(api: ApiServer, transport: Transport) -> None:
    api.forbid("impersonate-on:associated-node:create", "pods/eviction")
    assert probe(transport, evicts=False) == ProbeResult()


def test_a_server_that_does_not_limit_its_nodes_is_noticed(api: ApiServer, transport: Transport) -> None:
    api.minor = 31  # without AuthorizeNodeWithSelectors
    api.constrained_impersonation = True
    assert "the Node authorizer is off" in probe(transport).unlimited
    assert choose(transport, ClusterIdentity.AUTO) is None
    assert transport.impersonation.complete
    assert "the Node authorizer is off" in transport.impersonation.note
    assert "the Node authorizer is off" in (choose(transport, ClusterIdentity.NODE) or "")


def test_auto_acts_as_the_node_where_the_server_allows_it(transport: Transport) -> None:
    assert choose(transport, ClusterIdentity.AUTO) is None
    assert transport.impersonation.complete
    assert transport.impersonation.note == ""


def test_auto_falls_back_with_one_note_on_an_older_server(api: ApiServer, transport: Transport) -> None:
    api.constrained_impersonation = False
    api.grant("nodeagent", AS_NODE | DIRECT, namespace="nodeagent")
    choose(transport, ClusterIdentity.AUTO)
    assert not transport.impersonation.complete
    assert transport.impersonation.note == (
        "acting as the ServiceAccount: the API server has no constrained impersonation (Kubernetes 1.36). "
        "Its token can list and evict pods of other nodes (docs/security.md)"
    )


def test_without_the_rule_to_evict_and_without_direct_rights_the_pods_are_still_listed_as_the_node(
    api: ApiServer, transport: Transport
) -> None:
    api.forbid("impersonate-on:associated-node:create", "pods/eviction")
    choose(transport, ClusterIdentity.AUTO)
    assert transport.impersonation.user_for("GET", "/api/v1/pods") == "system:node:n1"
    assert (
        'resources: [pods/eviction], verbs: ["impersonate-on:associated-node:create"]' in transport.impersonation.note
    )


def test_an_older_server_and_the_role_for_a_newer_one_name_the_manifest_to_apply(
    api: ApiServer, transport: Transport
) -> None:
    api.constrained_impersonation = False
    choose(transport, ClusterIdentity.AUTO)
    assert "apply examples/kubernetes-1.35.yaml" in transport.impersonation.note


def test_node_does_not_fall_back_and_names_what_is_missing(api: ApiServer, transport: Transport) -> None:
    api.constrained_impersonation = False
    assert "Kubernetes 1.36" in (choose(transport, ClusterIdentity.NODE) or "")
    api.token_nodes.clear()
    assert "the token names no node" in (choose(transport, ClusterIdentity.NODE) or "")
    assert "the credentials are those of alice" in (
        identity_probe.choose(transport, "alice", "", ClusterIdentity.NODE, evicts=True) or ""
    )
    assert transport.impersonation.user_for("GET", "/api/v1/pods") == ""


def test_a_person_and_an_account_that_shall_act_as_itself_are_not_probed(api: ApiServer, transport: Transport) -> None:
    assert identity_probe.choose(transport, "alice", "", ClusterIdentity.AUTO, evicts=True) is None
    assert identity_probe.choose(transport, ACCOUNT, "n1", ClusterIdentity.SERVICE_ACCOUNT, evicts=True) is None
    assert (api.requests, transport.impersonation.note) == ([], "")


def test_without_an_answer_no_identity_is_chosen(api: ApiServer, transport: Transport) -> None:
    api.go_down()
    with pytest.raises(ApiError):
        probe(transport)
    assert not transport.impersonation.wants_probe


@pytest.mark.parametrize("status", [400, 404, 405])
def test_a_server_that_rejects_the_header_in_its_own_way_gets_the_requests_of_the_account(
    api: ApiServer, transport: Transport, status: int
) -> None:
    api.grant("nodeagent", AS_NODE | DIRECT, namespace="nodeagent")
    api.instead = lambda request: (
        Answer(status, {"kind": "Status", "status": "Failure", "message": "no impersonation here", "code": status})
        if "impersonate-user" in request.headers
        else None
    )
    choose(transport, ClusterIdentity.AUTO)
    assert "no impersonation here. Its token can list and evict" in transport.impersonation.note
    transport.request("GET", "/api/v1/pods?fieldSelector=spec.nodeName%3Dn1")
    assert "no impersonation here" in (choose(transport, ClusterIdentity.NODE) or "")


@pytest.mark.parametrize("status", [429, 500, 504])
def test_a_review_that_is_not_answered_does_not_keep_the_agent_from_acting(
    api: ApiServer, transport: Transport, status: int
) -> None:
    """It is the ServiceAccount's: a busy API server answers the requests of nodes first."""
    api.instead = lambda request: (
        Answer(status, {"kind": "Status", "status": "Failure", "message": "busy", "code": status})
        if request.path.endswith("/selfsubjectaccessreviews")
        else None
    )
    choose(transport, ClusterIdentity.AUTO)
    assert (transport.impersonation.complete, transport.impersonation.note) == (True, "")


def test_an_unanswered_question_for_direct_rights_does_not_end_the_nodes_identity(
    api: ApiServer, transport: Transport
) -> None:
    """A restarted API server refuses everything until it has read its roles."""
    choose(transport, ClusterIdentity.AUTO)
    for verb, resource in (("impersonate-on:associated-node:list", "pods"), ("list", "pods")):
        api.forbid(verb, resource)
    api.instead = lambda request: (
        Answer(503, {"kind": "Status", "status": "Failure", "message": "starting", "code": 503})
        if request.path.startswith("/api/v1/pods") and "impersonate-user" not in request.headers
        else None
    )
    with pytest.raises(ApiError):
        choose(transport, ClusterIdentity.AUTO)
    assert transport.impersonation.user_for("GET", "/api/v1/pods") == "system:node:n1"


def test_a_report_acts_as_the_node_of_the_token_alone(api: ApiServer, transport: Transport) -> None:
    def user_for(token_node: str, mode: ClusterIdentity = ClusterIdentity.AUTO) -> str:
        fresh = connect(transport._connection.credentials)
        identity_probe.act_unprobed(fresh, User(ACCOUNT, token_node), "n1", mode)
        return fresh.impersonation.user_for("GET", "/api/v1/pods")

    assert user_for("n1") == "system:node:n1"
    assert (user_for("n2"), user_for(""), user_for("n1", ClusterIdentity.SERVICE_ACCOUNT)) == ("", "", "")
    with pytest.raises(ApiError, match="of no pod on n1"):
        user_for("n2", ClusterIdentity.NODE)
    assert api.requests == []


# --- later -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def running(transport: Transport) -> Iterator[Transport]:
    """With probes in a thread, of which each waits for 10 ms."""
    stopping = threading.Event()
    backoff = RetryBackoff(first_s=0.01, last_s=0.01)
    thread = threading.Thread(
        target=lambda: identity_probe.run(transport, "n1", evicts=True, stopping=stopping, backoff=backoff)
    )
    thread.start()
    yield transport
    stopping.set()
    transport.impersonation.doubted.set()
    thread.join(10)
    assert not thread.is_alive()


def until(holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + 10
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


def test_an_upgraded_server_gives_the_node_back(api: ApiServer, running: Transport) -> None:
    api.constrained_impersonation = False
    choose(running, ClusterIdentity.AUTO)
    running.impersonation.doubted.set()
    time.sleep(0.1)
    assert not running.impersonation.complete
    api.constrained_impersonation = True
    assert until(lambda: running.impersonation.complete)
    assert running.impersonation.note == ""


def test_a_rule_that_is_taken_away_and_granted_again_needs_no_restart(api: ApiServer, running: Transport) -> None:
    api.grant("nodeagent", AS_NODE | DIRECT, namespace="nodeagent")
    choose(running, ClusterIdentity.AUTO)
    api.forbid("impersonate:associated-node", "nodes")
    running.request("GET", "/api/v1/pods?fieldSelector=spec.nodeName%3Dn1")
    assert until(lambda: running.impersonation.note.startswith("acting as the ServiceAccount: missing rule"))
    api.allow("impersonate:associated-node", "nodes")
    assert until(lambda: running.impersonation.complete)


def test_a_probe_that_is_refused_does_not_end_the_nodes_identity_if_there_is_no_other(
    api: ApiServer, running: Transport
) -> None:
    choose(running, ClusterIdentity.AUTO)
    api.constrained_impersonation = False
    with pytest.raises(ApiError):
        running.request("GET", "/api/v1/pods?fieldSelector=spec.nodeName%3Dn1")
    before = len(api.requests)
    assert until(lambda: len(api.requests) > before + 6), "it is probed"
    assert running.impersonation.acting
    api.constrained_impersonation = True
    running.request("GET", "/api/v1/pods?fieldSelector=spec.nodeName%3Dn1")
    assert until(lambda: running.impersonation.complete)


def test_while_every_request_is_the_nodes_nothing_is_probed(api: ApiServer, running: Transport) -> None:
    choose(running, ClusterIdentity.AUTO)
    before = len(api.requests)
    time.sleep(0.2)
    assert len(api.requests) == before


def test_a_token_that_was_replaced_by_one_of_another_node_acts_as_neither(api: ApiServer, running: Transport) -> None:
    api.constrained_impersonation = False
    choose(running, ClusterIdentity.AUTO)
    for token in api.token_nodes:
        api.token_nodes[token] = "n2"
    api.constrained_impersonation = True
    running.impersonation.doubted.set()
    time.sleep(0.2)
    assert running.impersonation.user_for("GET", "/api/v1/pods") == ""
