"""Other nodes and their pods are read in a thread, rarely, and no more of them than is needed."""

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.config.schema import ClusterIdentity
from nodeagent.kube import node_fit
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.backoff import RetryBackoff
from nodeagent.kube.credentials import find_credentials
from nodeagent.kube.node_fit import NodeFitReader, read_fits
from nodeagent.kube.transport import Transport, connect
from nodeagent.model import NodeFit, NodeFitLookup
from tests.fake_kube import ApiServer
from tests.fake_kube.objects import node_object, pod
from tests.support import nodes

NOW = 1000.0
OWN = "lab-node"
WEB = (nodes.pod("web")._replace(uid="web"),)


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer(node=OWN) as server:
        server.add_pod_untold(pod("web", uid="web", requests={"memory": "3Gi"}))
        yield server


@pytest.fixture
def transport(api: ApiServer, tmp_path: Path) -> Transport:
    return connect(find_credentials(str(api.kubeconfig(tmp_path / "kubeconfig"))), request_timeout_s=60.0)


@pytest.fixture
def now() -> list[float]:
    return [NOW]


@pytest.fixture
def reader(transport: Transport, now: list[float]) -> Iterator[NodeFitReader]:
    made = NodeFitReader(transport, OWN, clock=lambda: now[0], backoff=RetryBackoff(first_s=0.01, last_s=0.02))
    yield made
    made.stop()


def add_node(
    api: ApiServer, name: str, *, memory: str = "8Gi", taken: str = "", labels: Any = None, **spec: Any
) -> None:
    entry = node_object(name)
    entry["metadata"]["labels"].update(labels or {})
    entry["spec"] = spec
    entry["status"]["conditions"].append({"type": "Ready", "status": "True"})
    entry["status"]["allocatable"] = {"cpu": "4", "memory": memory, "pods": "110"}
    api.add_node(entry)
    if taken:
        api.add_pod_untold(pod(f"on-{name}", node=name, requests={"memory": taken}))


def read(transport: Transport, *uids: str, last_nodes: Any = (), seed: int = 0) -> dict[str, NodeFit]:
    return read_fits(
        transport, OWN, uids or ("web",), last_nodes=last_nodes, rng=random.Random(seed), clock=lambda: NOW
    )


def listed(api: ApiServer) -> list[str]:
    """The nodes whose pods were listed, without the own one."""
    selectors = [request.query.get("fieldSelector", "") for request in api.sent("GET", "/pods")]
    return [each.split(",")[0].removeprefix("spec.nodeName=") for each in selectors if OWN not in each]


def eventually(holds: Callable[[], object]) -> None:
    for _ in range(6000):
        if holds():
            return
        threading.Event().wait(0.01)
    pytest.fail("it never came true")


def wake(reader: NodeFitReader) -> None:
    """The clock of the test has moved."""
    with reader._condition:
        reader._condition.notify_all()


# --- one reading -----------------------------------------------------------------------------------------------------


def test_a_node_with_room_is_found(api: ApiServer, transport: Transport) -> None:
    add_node(api, "full", taken="6Gi")
    add_node(api, "free", taken="5Gi")
    assert read(transport) == {"web": NodeFit(NOW, "free")}


def test_why_no_node_takes_a_pod_is_counted(api: ApiServer, transport: Transport) -> None:
    add_node(api, "full-1", taken="6Gi")
    add_node(api, "full-2", taken="8Gi")
    add_node(api, "small", memory="2Gi")
    add_node(api, "cordoned", unschedulable=True)
    add_node(api, "gpu", taints=[{"key": "gpu", "effect": "NoSchedule"}])
    reason = "none of 5 other nodes takes it (3 too little memory, 1 unschedulable, 1 taints)"
    assert read(transport) == {"web": NodeFit(NOW, reason=reason)}
    assert sorted(listed(api)) == ["full-1", "full-2"], "the others are out by their own objects"


def test_the_own_node_does_not_count(transport: Transport) -> None:
    assert read(transport) == {"web": NodeFit(NOW, reason="there is no other node")}


def test_finished_pods_are_not_even_listed(api: ApiServer, transport: Transport) -> None:
    add_node(api, "n")
    api.add_pod_untold(pod("done", node="n", requests={"memory": "8Gi"}, phase="Succeeded"))
    assert read(transport)["web"].node == "n"


def test_a_pod_that_is_not_listed_has_a_trouble_and_no_result(api: ApiServer, transport: Transport) -> None:
    add_node(api, "n")
    found = read(transport, "web", "gone")
    assert found["web"].node == "n"
    assert (found["gone"].read_at, found["gone"].node) == (None, "")
    assert "does not list this pod" in found["gone"].trouble


def test_a_pod_with_endless_constraints_fits_nowhere_and_costs_nothing(api: ApiServer, transport: Transport) -> None:
    add_node(api, "n")
    tolerations = [{"key": f"k{number}", "operator": "Exists"} for number in range(node_fit.MAX_CONSTRAINTS)]
    api.add_pod_untold(pod("odd", uid="odd", spec={"tolerations": tolerations}))
    assert read(transport, "odd")["odd"] == NodeFit(NOW, reason="it has more than 500 constraints on its node")
    assert api.sent("GET", "/nodes") == []


def test_a_node_with_an_unreadable_pod_takes_none(api: ApiServer, transport: Transport) -> None:
    add_node(api, "n")
    api.add_pod_untold(pod("odd", node="n", requests={"memory": "much"}))
    assert read(transport)["web"].reason == "none of 1 other nodes takes it (1 unreadable)"


def test_the_nodes_of_the_last_reading_are_asked_first_and_alone(api: ApiServer, transport: Transport) -> None:
    for number in range(20):
        add_node(api, f"n-{number}")
    assert read(transport, last_nodes=["n-7"]) == {"web": NodeFit(NOW, "n-7")}
    nodes_listed = [request.query.get("fieldSelector") for request in api.sent("GET", "/nodes")]
    assert nodes_listed == ["metadata.name=n-7"]
    assert listed(api) == ["n-7"]


def test_a_node_of_the_last_reading_that_is_full_or_gone_leads_to_all_nodes(
    api: ApiServer, transport: Transport
) -> None:
    add_node(api, "full", taken="8Gi")
    add_node(api, "free")
    assert read(transport, last_nodes=["gone", "full"]) == {"web": NodeFit(NOW, "free")}
    assert listed(api).count("full") == 1, "its pods are listed once in a reading"


def test_the_pods_of_few_nodes_are_listed_and_the_rest_is_said_to_be_unread(
    api: ApiServer, transport: Transport
) -> None:
    for number in range(60):
        add_node(api, f"n-{number}", taken="8Gi")
    uids = ["web", *[f"w{number}" for number in range(5)]]
    for uid in uids[1:]:
        api.add_pod_untold(pod(uid, uid=uid, requests={"memory": "3Gi"}))
    found = read(transport, *uids)
    assert len(listed(api)) == node_fit.MAX_NODES, "the same nodes serve all pods"
    reason = "none of 60 other nodes takes it (24 too little memory, 36 not read)"
    assert found == {uid: NodeFit(NOW, reason=reason) for uid in uids}


def test_a_pod_of_whose_nodes_none_was_read_is_unknown(api: ApiServer, transport: Transport) -> None:
    """The pods before it have used up the nodes of one reading; the next reading is for it."""
    uids = [f"w{number}" for number in range(4)]
    for uid in uids:
        selector = {"kubernetes.io/os": uid}
        api.add_pod_untold(pod(uid, uid=uid, requests={"memory": "3Gi"}, spec={"nodeSelector": selector}))
        for number in range(node_fit.MAX_NODES):
            add_node(api, f"{uid}-{number}", labels=selector, taken="8Gi")
    found = read(transport, *uids)
    assert [each.read_at for each in found.values()] == [NOW, NOW, None, None]
    assert all("were read" in found[uid].trouble for uid in uids[2:])
    assert (
        found[uids[0]].reason == "none of 96 other nodes takes it (72 node selector or affinity, 24 too little memory)"
    )


def test_the_sample_is_random_so_that_each_node_is_found_some_day(api: ApiServer, transport: Transport) -> None:
    for number in range(60):
        add_node(api, f"n-{number}", taken="" if number == 59 else "8Gi")
    assert {read(transport, seed=seed)["web"].node for seed in range(12)} == {"", "n-59"}


def test_the_pods_of_nodes_are_asked_for_from_the_cache_and_not_as_the_own_node(
    api: ApiServer, transport: Transport
) -> None:
    add_node(api, "n")
    transport.impersonation.act_as(OWN, ClusterIdentity.NODE)
    assert read(transport)["web"].node == "n"
    assert {request.query["resourceVersion"] for request in api.sent("GET")} == {"0"}
    assert not [each for each in api.requests if "impersonate-user" in {name.lower() for name in each.headers}]


@pytest.mark.parametrize("resource", ["nodes", "pods"])
def test_a_missing_right_is_an_error_and_no_room(api: ApiServer, transport: Transport, resource: str) -> None:
    add_node(api, "n")
    api.forbid("list", resource)
    with pytest.raises(ApiError):
        read(transport)


# --- the thread ------------------------------------------------------------------------------------------------------


def known(reader: NodeFitReader) -> NodeFit | None:
    return reader.with_node_fit(WEB)[0].node_fit


def test_nothing_is_requested_before_a_pod_is_wanted(api: ApiServer, reader: NodeFitReader) -> None:
    assert reader.with_node_fit(WEB) is WEB
    assert not api.requests


def test_a_wanted_pod_is_read_and_the_same_pods_give_the_same_tuple(api: ApiServer, reader: NodeFitReader) -> None:
    add_node(api, "n")
    reader.want([NodeFitLookup("web")])
    eventually(lambda: known(reader))
    assert known(reader) == NodeFit(NOW, "n")
    assert reader.with_node_fit(WEB) is reader.with_node_fit(WEB)


def test_it_is_read_again_when_it_is_old_or_does_not_count_any_more(
    api: ApiServer, reader: NodeFitReader, now: list[float]
) -> None:
    add_node(api, "n")

    def read_at(at: float, not_before: float = 0.0) -> bool:
        reader.want([NodeFitLookup("web", not_before)])
        return (found := known(reader)) is not None and found.read_at == at

    eventually(lambda: read_at(NOW))
    now[0] += node_fit.REFRESH_S
    eventually(lambda: read_at(NOW + node_fit.REFRESH_S))
    now[0] += node_fit.MIN_INTERVAL_S + 1
    requests = len(api.requests)
    reader.want([NodeFitLookup("web")])
    assert read_at(NOW + node_fit.REFRESH_S)
    assert len(api.requests) == requests
    after_eviction = now[0] + 5.0
    reader.want([NodeFitLookup("web", after_eviction)])
    now[0] += 6.0
    eventually(lambda: read_at(now[0], after_eviction))


def test_a_failure_keeps_what_was_read_and_says_why(api: ApiServer, reader: NodeFitReader, now: list[float]) -> None:
    add_node(api, "n")
    reader.want([NodeFitLookup("web")])
    eventually(lambda: known(reader))
    api.forbid("list", "nodes")
    now[0] += node_fit.REFRESH_S
    reader.want([NodeFitLookup("web")])
    eventually(lambda: reader.reason)
    found = known(reader)
    assert found is not None
    assert (found.read_at, found.node) == (NOW, "n")
    assert "nodes" in found.trouble
    assert "examples/node-fit.yaml" in found.trouble
    api.allow("list", "nodes")
    now[0] += 60.0
    reader.want([NodeFitLookup("web")])
    eventually(lambda: known(reader) == NodeFit(now[0], "n"))
    assert reader.reason == ""


def test_a_failure_of_the_first_reading_is_no_result(api: ApiServer, reader: NodeFitReader) -> None:
    api.forbid("list", "pods")
    reader.want([NodeFitLookup("web")])
    eventually(lambda: known(reader))
    found = known(reader)
    assert found is not None
    assert (found.read_at, found.node) == (None, "")
    assert "pods" in found.trouble


def test_what_is_not_wanted_any_more_is_not_read_and_is_dropped_when_it_is_old(
    api: ApiServer, reader: NodeFitReader, now: list[float]
) -> None:
    api.add_pod_untold(pod("other", uid="other"))
    reader.want([NodeFitLookup("web")])
    eventually(lambda: known(reader))
    now[0] += node_fit.KEEP_FIT_S + 1
    reader.want([NodeFitLookup("other")])
    eventually(lambda: known(reader) is None)


def test_the_number_of_pods_of_a_reading_is_bounded(api: ApiServer, reader: NodeFitReader) -> None:
    add_node(api, "n")
    uids = [f"p{number}" for number in range(3 * node_fit.MAX_PODS)]
    for uid in uids:
        api.add_pod_untold(pod(uid, uid=uid))
    reader.want([NodeFitLookup(uid) for uid in uids])
    pods = tuple([nodes.pod(uid)._replace(uid=uid) for uid in uids])
    eventually(lambda: any(each.node_fit for each in reader.with_node_fit(pods)))
    read_uids = [each.uid for each in reader.with_node_fit(pods) if each.node_fit]
    assert read_uids == uids[: node_fit.MAX_PODS], "the first ones, in the order of the decision"
