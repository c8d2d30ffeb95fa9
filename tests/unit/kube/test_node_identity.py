"""The agent confirms its Node, or refuses to run."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nodeagent.config.schema import ClusterIdentity
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.credentials import find_credentials
from nodeagent.kube.node_identity import Identity, IdentityError, confirm_identity, host_addresses, local_name
from nodeagent.kube.transport import Transport, connect
from tests.fake_kube import Answer, ApiServer, node_object


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer(node=node_object("node-1", address="10.0.0.1")) as server:
        server.add_node(node_object("node-2", address="10.0.0.2"))
        yield server


@pytest.fixture
def transport(api: ApiServer, tmp_path: Path) -> Transport:
    return connect(find_credentials(str(api.kubeconfig(tmp_path / "kubeconfig"))))


def here(*addresses: str) -> Callable[[], tuple[str, ...]]:
    return lambda: addresses


def test_the_order_is_flag_then_environment_then_kubelet_then_hostname() -> None:
    everything = {"given": "a", "env": "b", "hostname_override": "c", "hostname": "D"}
    for name, source in (("a", "--node-name"), ("b", "$NODE_NAME"), ("c", "--hostname-override"), ("d", "hostname")):
        found = local_name(**everything)
        assert (found.name, source in found.source) == (name, True)
        everything[next(iter(everything))] = ""
        del everything[next(key for key, value in everything.items() if not value)]


@pytest.mark.parametrize("name", ["../x", "a b", "UPPER", "-a", "a/b?c"])
def test_a_name_that_no_node_can_have_is_refused(name: str) -> None:
    with pytest.raises(IdentityError, match="set --node-name"):
        local_name(given=name)


def test_a_configured_name_is_confirmed(transport: Transport) -> None:
    found = confirm_identity(transport, Identity("node-1", "--node-name"), addresses=here())
    assert (found.name, found.user) == ("node-1", "system:serviceaccount:kube-system:nodeagent")
    assert not found.node_credentials


def test_a_configured_name_without_a_node_is_not_replaced_by_a_guess(transport: Transport) -> None:
    with pytest.raises(IdentityError, match="no such Node"):
        confirm_identity(transport, Identity("node-9", "--node-name"), addresses=here("10.0.0.1"))


@pytest.mark.parametrize("path", ["selfsubjectreviews", "/api/v1/nodes/node-1"])
def test_a_404_that_is_not_the_api_servers_is_no_answer(api: ApiServer, transport: Transport, path: str) -> None:
    """A proxy in front of the API server knows neither the user nor the Node."""
    api.instead = lambda request: (
        Answer(404, b"404 page not found\n", "text/plain; charset=utf-8") if request.path.endswith(path) else None
    )
    with pytest.raises(ApiError, match="404"):
        confirm_identity(transport, Identity("node-1", "--node-name"), addresses=here())


def test_a_host_without_a_node_of_its_name_is_found_by_address(transport: Transport) -> None:
    found = confirm_identity(transport, Identity("my-host", "hostname"), addresses=here("192.168.1.1", "10.0.0.2"))
    assert found.name == "node-2"
    assert "10.0.0.2" in found.source


def test_no_matching_address_or_two_is_an_error(transport: Transport) -> None:
    for addresses, word in ((here("10.9.9.9"), "none has"), (here("10.0.0.1", "10.0.0.2"), "several")):
        with pytest.raises(IdentityError, match=word):
            confirm_identity(transport, Identity("my-host", "hostname"), addresses=addresses)


def test_node_credentials_must_belong_to_the_configured_node(api: ApiServer, transport: Transport) -> None:
    api.tokens[api.token] = "system:node:node-2"
    with pytest.raises(IdentityError, match="belong to node-2"):
        confirm_identity(transport, Identity("node-1", "--node-name"), addresses=here("10.0.0.1"))
    found = confirm_identity(transport, Identity("node-2", "--node-name"), addresses=here())
    assert found.node_credentials


def test_node_credentials_decide_the_node_only_if_its_address_is_this_hosts(
    api: ApiServer, transport: Transport
) -> None:
    api.tokens[api.token] = "system:node:node-2"
    assert confirm_identity(transport, Identity("my-host", "hostname"), addresses=here("10.0.0.2")).name == "node-2"
    with pytest.raises(IdentityError, match="belong to node-2"):
        confirm_identity(transport, Identity("my-host", "hostname"), addresses=here("10.0.0.1"))


def test_this_hosts_addresses_come_from_the_kernel() -> None:
    pytest.importorskip("pyroute2")
    addresses = host_addresses()
    assert "127.0.0.1" not in addresses
    assert "::1" not in addresses


# --- the node of a ServiceAccount's token ----------------------------------------------------------------------------


def test_a_token_of_a_pod_on_another_node_is_refused_before_anything_is_sent_as_that_node(
    api: ApiServer, transport: Transport
) -> None:
    api.token_nodes[api.token] = "node-2"
    for mode in ClusterIdentity:
        with pytest.raises(IdentityError, match="the token is of a pod on node-2"):
            confirm_identity(transport, Identity("node-1", "$NODE_NAME"), addresses=here("10.0.0.1"), mode=mode)
    assert not [request for request in api.requests if "impersonate-user" in request.headers]


def test_the_token_decides_the_node_of_a_host_only_if_its_address_is_this_hosts(
    api: ApiServer, transport: Transport
) -> None:
    api.token_nodes[api.token] = "node-2"
    assert confirm_identity(transport, Identity("my-host", "hostname"), addresses=here("10.0.0.2")).name == "node-2"
    with pytest.raises(IdentityError, match="the token is of a pod on node-2"):
        confirm_identity(transport, Identity("my-host", "hostname"), addresses=here("10.0.0.1"))


def test_the_node_of_the_token_is_impersonated_once_it_is_confirmed(api: ApiServer, transport: Transport) -> None:
    api.token_nodes[api.token] = "node-1"
    confirm_identity(transport, Identity("node-1", "$NODE_NAME"), addresses=here())
    assert transport.impersonation.complete
    [confirmed] = api.sent("GET", "/nodes/node-1")
    assert confirmed.headers["impersonate-user"] == "system:node:node-1"


def test_a_token_of_a_node_that_does_not_exist_is_refused(api: ApiServer, transport: Transport) -> None:
    api.token_nodes[api.token] = "node-9"
    with pytest.raises(IdentityError, match="no such Node"):
        confirm_identity(transport, Identity("node-9", "$NODE_NAME"), addresses=here())


def test_the_identity_node_is_required_where_it_is_configured(api: ApiServer, transport: Transport) -> None:
    for token_node, why in (("node-1", "Kubernetes 1.36"), ("", "the token names no node")):
        api.token_nodes[api.token] = token_node
        api.constrained_impersonation = False
        with pytest.raises(IdentityError, match=f"cluster.identity is node.*{why}"):
            confirm_identity(transport, Identity("node-1", "--node-name"), addresses=here(), mode=ClusterIdentity.NODE)


def test_nodes_credentials_are_the_node_without_impersonation(api: ApiServer, transport: Transport) -> None:
    api.tokens[api.token] = "system:node:node-1"
    for mode in ClusterIdentity:
        confirm_identity(transport, Identity("node-1", "--node-name"), addresses=here(), mode=mode)
    assert not [request for request in api.requests if "impersonate-user" in request.headers]
    assert transport.impersonation.note == ""
