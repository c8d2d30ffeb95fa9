"""Pods with data in a local volume are bound to the node; an unknown claim has its reason, and look-ups are few."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.config.schema import ProtectionConfig
from nodeagent.kube import volume_lookup
from nodeagent.kube.backoff import RetryBackoff
from nodeagent.kube.credentials import find_credentials
from nodeagent.kube.pod_decoder import decode_pod
from nodeagent.kube.transport import Transport, connect
from nodeagent.kube.volume_lookup import CLAIM_RETRY_S, VolumeLookup, look_up_all
from nodeagent.model import Pod
from nodeagent.policy import protection
from tests.fake_kube import ApiServer, pod

HOST_PATH: dict[str, Any] = {"hostPath": {"path": "/data"}}
NETWORK: dict[str, Any] = {"csi": {"driver": "ebs.csi.aws.com", "volumeHandle": "vol-1"}}


def affine(*values: str, key: str = "kubernetes.io/hostname") -> dict[str, Any]:
    term = {"matchExpressions": [{"key": key, "operator": "In", "values": list(values)}]}
    return {**NETWORK, "nodeAffinity": {"required": {"nodeSelectorTerms": [term]}}}


LOCAL: dict[str, Any] = {**affine("lab-node"), "local": {"path": "/mnt/disk1"}}


def a_pod(name: str, *claims: str) -> dict[str, Any]:
    mounts = [{"name": f"v-{claim}", "persistentVolumeClaim": {"claimName": claim}} for claim in claims]
    return pod(name, spec={"volumes": [*mounts, {"name": "tmp", "emptyDir": {}}]})


def read(entry: dict[str, Any]) -> Pod:
    return decode_pod(json.dumps(entry).encode())


def eventually(holds: Callable[[], object]) -> None:
    for _ in range(3000):
        if holds():
            return
        threading.Event().wait(0.01)
    pytest.fail("it never came true")


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer(node="lab-node") as server:
        yield server


@pytest.fixture
def transport(api: ApiServer, tmp_path: Path) -> Transport:
    return connect(find_credentials(str(api.kubeconfig(tmp_path / "kubeconfig"))))


@pytest.fixture
def now() -> list[float]:
    return [100.0]


@pytest.fixture
def lookup(transport: Transport, now: list[float]) -> Iterator[VolumeLookup]:
    made = VolumeLookup(transport, "lab-node", clock=lambda: now[0], backoff=RetryBackoff(first_s=0.01, last_s=0.02))
    yield made
    made.stop()


def known(lookup: VolumeLookup, *pods: Pod) -> tuple[Pod, ...]:
    eventually(
        lambda: not any(pod.claims_unknown.endswith(volume_lookup.NOT_LOOKED_UP) for pod in lookup.with_claims(pods))
    )
    return lookup.with_claims(pods)


def refused(pod: Pod, **rules: Any) -> str:
    return "; ".join(
        each.message for each in protection.object_refusals(pod, ProtectionConfig(bare_pods=False, **rules))
    )


@pytest.mark.parametrize(
    ("spec", "binds"),
    [
        (LOCAL, True),
        (HOST_PATH, True),
        (affine("lab-node"), True),
        (affine("lab-node", key="topology.topolvm.io/node"), True),
        (affine("lab-node", "lab-node-2"), False),
        (affine("eu-1a", key="topology.kubernetes.io/zone"), False),
        (NETWORK, False),
    ],
    ids=["local", "hostPath", "hostname", "driver's own label", "two nodes", "zone", "network"],
)
def test_a_volume_that_only_this_node_can_mount_binds_the_pod(
    api: ApiServer, lookup: VolumeLookup, spec: dict[str, Any], binds: bool
) -> None:
    api.set_volume("data", spec)
    (placed,) = known(lookup, read(a_pod("db", "data")))
    assert bool(placed.node_bound) is binds
    assert placed.claims_unknown == ""
    if binds:
        reason = "can only run on this node: its claim data is on the local PersistentVolume pv-data"
        assert refused(placed) == reason
        assert refused(placed, node_bound=False) == ""


def test_one_local_volume_among_several_is_enough(api: ApiServer, lookup: VolumeLookup) -> None:
    api.set_volume("a", NETWORK)
    api.set_volume("b", LOCAL)
    (placed,) = known(lookup, read(a_pod("db", "missing", "a", "b")))
    assert "pv-b" in placed.node_bound
    assert placed.claims_unknown == ""


def test_pods_without_claims_cause_no_request_and_no_thread(api: ApiServer, lookup: VolumeLookup) -> None:
    before = threading.enumerate()
    pods = (read(a_pod("web")), read(pod("plain")))
    assert lookup.with_claims(pods) == pods
    assert lookup.with_claims(pods) is lookup.with_claims(pods)
    assert not api.requests
    assert "volumes" not in {thread.name for thread in threading.enumerate() if thread not in before}


def test_the_claims_of_a_bound_pod_are_not_looked_up(api: ApiServer, lookup: VolumeLookup) -> None:
    entry = a_pod("db", "data")
    entry["spec"]["nodeSelector"] = {"kubernetes.io/hostname": "lab-node"}
    (placed,) = lookup.with_claims((read(entry),))
    assert placed.node_bound.startswith("nodeSelector")
    assert not api.requests


def test_a_claim_is_looked_up_once_and_its_pods_stay_the_same_objects(api: ApiServer, lookup: VolumeLookup) -> None:
    api.set_volume("data", LOCAL)
    one, two = read(a_pod("one", "data")), read(a_pod("two", "data"))
    known_pods = known(lookup, one, two)
    assert all(each.node_bound for each in known_pods)
    pods = (two, one)
    assert all(each.node_bound for each in lookup.with_claims(pods))
    assert lookup.with_claims(pods) is lookup.with_claims(pods)
    assert [r.path for r in api.requests] == [
        "/api/v1/namespaces/default/persistentvolumeclaims/data",
        "/api/v1/persistentvolumes/pv-data",
    ]


def test_while_a_claim_is_unknown_the_pod_may_be_bound_and_is_protected(api: ApiServer, lookup: VolumeLookup) -> None:
    api.forbid("get", "persistentvolumeclaims")
    (placed,) = known(lookup, read(a_pod("db", "data")))
    assert placed.node_bound == ""
    assert "may be bound to this node: its claim data may be a local PersistentVolume" in refused(placed)
    assert "forbidden" in refused(placed)
    assert "forbidden" in lookup.reason
    api.set_volume("data", NETWORK)
    api.allow("get", "persistentvolumeclaims")
    pods = (read(a_pod("db", "data")),)
    eventually(lambda: refused(lookup.with_claims(pods)[0]) == "")
    assert lookup.reason == ""


@pytest.mark.parametrize("bound", [True, False], ids=["no claim", "not bound yet"])
def test_an_unbound_claim_is_looked_up_again_a_minute_later(
    api: ApiServer, lookup: VolumeLookup, now: list[float], bound: bool
) -> None:
    if not bound:
        api.set_volume("data", LOCAL, bound=False)
    other = read(a_pod("other", "other"))
    api.set_volume("other", NETWORK)
    (placed, _) = known(lookup, read(a_pod("db", "data")), other)
    assert ("not found" if bound else "not bound to a volume yet") in placed.claims_unknown
    requests = len(api.requests)
    api.set_volume("data", LOCAL)
    now[0] += CLAIM_RETRY_S / 2
    pods = (read(a_pod("db", "data")), other)
    assert lookup.with_claims(pods)[0].claims_unknown
    assert len(api.requests) == requests
    now[0] += CLAIM_RETRY_S
    eventually(lambda: lookup.with_claims((read(a_pod("db", "data")), other))[0].node_bound)


def test_an_unreadable_claim_is_unknown(api: ApiServer, lookup: VolumeLookup) -> None:
    api.set_volume("data", {"local": "a string"})
    (placed,) = known(lookup, read(a_pod("db", "data")))
    assert "cannot be read" in placed.claims_unknown


def test_claims_beyond_the_limit_are_not_looked_up(api: ApiServer, transport: Transport) -> None:
    many = tuple(read(a_pod(f"p{n}", f"c{n}")) for n in range(volume_lookup.MAX_CLAIMS + 1))
    lookup = VolumeLookup(transport, "lab-node", spread_s=3600.0)
    known_pods = lookup.with_claims(many)
    lookup.stop()
    assert "not looked up yet" in known_pods[-2].claims_unknown
    assert "more than 1024 claims" in known_pods[-1].claims_unknown
    assert not api.requests


@pytest.mark.parametrize("trouble", ["spread", "forbidden", "not found"])
def test_near_pressure_claims_are_looked_up_within_a_moment(
    api: ApiServer, transport: Transport, now: list[float], trouble: str
) -> None:
    """Whatever the wait is for: the spread of a fleet, a missing right, or a missing claim."""
    lookup = VolumeLookup(
        transport,
        "lab-node",
        clock=lambda: now[0],
        backoff=RetryBackoff(first_s=3600.0, last_s=3600.0),
        spread_s=3600.0 if trouble == "spread" else 0.0,
    )
    db = read(a_pod("db", "data"))
    if trouble == "forbidden":
        api.forbid("get", "persistentvolumeclaims")
    lookup.with_claims((db,))
    if trouble != "spread":
        eventually(lambda: trouble in lookup.with_claims((db,))[0].claims_unknown)
    now[0] += volume_lookup.HURRY_S
    (unknown,) = lookup.with_claims((db,))
    assert unknown.claims_asked_at == 100.0, "since when it is requests, whatever was answered"
    api.allow("get", "persistentvolumeclaims")
    api.set_volume("data", NETWORK)
    lookup.hurry()
    eventually(lambda: not lookup.with_claims((db,))[0].claims_unknown)
    assert lookup.with_claims((db,))[0].claims_asked_at is None
    lookup.stop()


def test_near_pressure_a_refusing_server_gets_few_requests(
    api: ApiServer, transport: Transport, now: list[float]
) -> None:
    api.forbid("get", "persistentvolumeclaims")
    lookup = VolumeLookup(
        transport, "lab-node", clock=lambda: now[0], backoff=RetryBackoff(first_s=3600.0, last_s=3600.0)
    )
    began = time.monotonic()
    lookup.with_claims(tuple(read(a_pod(f"db-{n}", f"data-{n}")) for n in range(20)))
    while time.monotonic() - began < 3.0:
        lookup.hurry()
        threading.Event().wait(0.05)
    lookup.stop()
    # 0.25, 0.5, 1, 2 s, of which at least half is waited.
    assert 2 <= len(api.requests) <= 6


def test_stored_claims_are_dropped_with_their_pods(api: ApiServer, lookup: VolumeLookup) -> None:
    api.set_volume("data", LOCAL)
    assert known(lookup, read(a_pod("db", "data")))[0].node_bound
    assert lookup.with_claims(()) == ()
    assert "not looked up yet" in lookup.with_claims((read(a_pod("db", "data")),))[0].claims_unknown


def test_a_kubelets_credentials_allow_every_look_up(api: ApiServer, tmp_path: Path) -> None:
    """The Node authorizer: single claims and volumes of the node's own pods, no lists."""
    api.tokens["node-token"] = "system:node:lab-node"
    kubelet = connect(find_credentials(str(api.kubeconfig(tmp_path / "node", token="node-token"))))
    api.set_volume("data", LOCAL)
    mine = read(api.add_pod(a_pod("db", "data")))
    elsewhere = read({**a_pod("far", "data"), "metadata": {"name": "far", "namespace": "other", "uid": "u"}})
    known_pods, trouble = look_up_all(kubelet, (mine, elsewhere), node_name="lab-node", known={}, for_s=10.0)
    assert known_pods[0].node_bound
    assert "forbidden" in known_pods[1].claims_unknown
    assert "forbidden" in trouble


def test_a_report_looks_up_claims_within_its_time_and_states_the_rest(api: ApiServer, transport: Transport) -> None:
    api.set_volume("data", LOCAL)
    pods = (read(a_pod("db", "data")),)
    places: dict[volume_lookup.Claim, volume_lookup.ClaimLocation] = {}
    known_pods, trouble = look_up_all(transport, pods, node_name="lab-node", known=places, for_s=0.0)
    assert trouble == "not all claims could be looked up in time"
    assert known_pods[0].claims_unknown
    known_pods, trouble = look_up_all(transport, pods, node_name="lab-node", known=places, for_s=10.0)
    assert (bool(known_pods[0].node_bound), trouble) == (True, "")
    requests = len(api.requests)
    look_up_all(transport, pods, node_name="lab-node", known=places, for_s=10.0)
    assert len(api.requests) == requests


def test_a_node_that_is_not_related_to_a_new_claim_yet_looks_again_and_has_no_trouble(
    api: ApiServer, lookup: VolumeLookup, now: list[float]
) -> None:
    """The Node authorizer learns of a pod's claims a moment after the pod is bound."""
    api.tokens[api.token] = "system:node:lab-node"
    api.set_volume("data", LOCAL)
    pods = (read(a_pod("db", "data")),)
    eventually(lambda: "no relationship found" in lookup.with_claims(pods)[0].claims_unknown)
    assert lookup.reason == ""
    api.add_pod(a_pod("db", "data"))
    eventually(lambda: lookup.with_claims(pods)[0].node_bound)


def test_a_node_that_stays_unrelated_to_a_claim_is_a_trouble(
    api: ApiServer, lookup: VolumeLookup, now: list[float]
) -> None:
    api.tokens[api.token] = "system:node:lab-node"
    api.set_volume("data", LOCAL)
    pods = (read(a_pod("db", "data")),)
    eventually(lambda: "no relationship found" in lookup.with_claims(pods)[0].claims_unknown)
    now[0] += volume_lookup.UNRELATED_S
    eventually(lambda: "no relationship found" in lookup.reason)
