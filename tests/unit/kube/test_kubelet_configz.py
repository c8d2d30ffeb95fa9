"""The kubelet's own answer about its configuration, through the API server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent.kube import kubelet_configz, rights
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.credentials import find_credentials
from nodeagent.kube.transport import Transport, connect
from nodeagent.sampling.node import kubelet_config
from tests.fake_kube import ApiServer


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer() as server:
        server.kubelet_configuration = {"evictionHard": {"memory.available": "333Mi"}}
        yield server


@pytest.fixture
def transport(api: ApiServer, tmp_path: Path) -> Transport:
    return connect(find_credentials(str(api.kubeconfig(tmp_path / "kubeconfig"))))


def test_it_is_one_request_about_the_own_node(api: ApiServer, transport: Transport) -> None:
    reading = kubelet_config.from_configz(kubelet_configz.fetch(transport, "lab-node"))
    assert [(each.method, each.path) for each in api.requests] == [("GET", "/api/v1/nodes/lab-node/proxy/configz")]
    assert reading.known is not None
    assert {each.value.text for each in reading.known} == {"333Mi"}


def test_a_refusal_names_the_missing_right(api: ApiServer, transport: Transport) -> None:
    api.forbid("get", "nodes/proxy")
    with pytest.raises(ApiError, match="nodes/proxy") as caught:
        kubelet_configz.fetch(transport, "lab-node")
    found = rights.denied(caught.value.message)
    assert found is not None
    assert found.right is rights.CONFIGZ
