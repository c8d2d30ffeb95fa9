"""The package `kube` against a real API server of NODEAGENT_E2E_KUBECONFIG; NODEAGENT_E2E_NODE may name the node.

Runs with an administrator's kubeconfig, on the node or elsewhere. It makes one namespace and removes it, and puts
conditions and a taint on the node for a moment. Tests that need a running pod are skipped where none can start.
"""

import functools
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nodeagent.actuators import eviction_requests
from nodeagent.actuators.conditions import NodeConditions
from nodeagent.actuators.event_writer import EventReason, EventWriter, KubernetesEvent
from nodeagent.actuators.eviction_requests import EvictionRequests
from nodeagent.actuators.eviction_slots import EvictionSlots
from nodeagent.actuators.evictions import EvictionSender
from nodeagent.actuators.taints import NodeTaints
from nodeagent.config.schema import StandardConditions
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.node_identity import Identity, IdentityError, confirm_identity
from nodeagent.kube.node_watch import NodeWatch
from nodeagent.kube.pod_decoder import decode_pod
from nodeagent.kube.pod_watch import PodWatch, list_pods
from nodeagent.kube.transport import connect
from nodeagent.model import (
    Amount,
    ConditionStatus,
    ConditionType,
    ConditionVerdict,
    Method,
    Outcome,
    OutcomeKind,
    Signal,
    Threshold,
    Tier,
    Victim,
)
from nodeagent.runtime.clock import boottime
from tests.e2e.cluster import SCHEDULER, Cluster, Json, as_account, sleeping_pod, with_token
from tests.e2e.this_node import at_work, wipe
from tests.e2e.watch_log import WatchLog

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def victim(entry: Json, *, method: Method = Method.EVICT) -> Victim:
    return Victim(
        pod=decode_pod(json.dumps(entry).encode()),
        cgroup="",
        threshold=Threshold(Signal.MEMORY, Amount(100 << 20, None, "100Mi")),
        tier=Tier.HARD,
        method=method,
        grace_period_s=1.0,
        message="nodeagent end-to-end test",
        annotations={},
        predicted_relief=None,
    )


def evict(cluster: Cluster, target: Victim, *, dry_run: bool = False) -> Outcome:
    answered = threading.Event()
    evictor = EvictionSender(cluster.transport, wake=answered.set, dry_run=dry_run)
    evictor.submit("e2e", target)
    assert answered.wait(30)
    evictor.stop()
    return evictor.take()[0]


def eventually(holds: Callable[[], object], timeout_s: float = 60.0) -> None:
    pause, end = threading.Event(), time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, "it never came true"
        pause.wait(0.05)


@pytest.fixture(scope="module")
def running(cluster: Cluster) -> Json:
    return cluster.start_pod("budgeted", labels={"app": "budgeted"})


@pytest.fixture
def node(cluster: Cluster) -> Iterator[NodeWatch]:
    """The node's object, to be written to. What an agent that runs there has set must not be taken from it."""
    if reason := at_work(cluster):
        pytest.skip(reason)
    watch = NodeWatch(cluster.transport, cluster.node_name)
    yield watch
    watch.stop()
    wipe(cluster)


def test_the_node_is_recognised_and_a_wrong_name_refused(cluster: Cluster) -> None:
    assert confirm_identity(cluster.transport, Identity(cluster.node_name, "--node-name")).name == cluster.node_name
    with pytest.raises(IdentityError):
        confirm_identity(cluster.transport, Identity("no-such-node", "--node-name"))


def test_the_nodes_pods_are_listed_as_the_api_has_them(cluster: Cluster) -> None:
    selector = f"fieldSelector=spec.nodeName%3D{cluster.node_name}"

    def the_same() -> bool:
        view = list_pods(cluster.transport, cluster.node_name)
        assert not view.notes
        listed = cluster.get(f"/api/v1/pods?{selector}")["items"]
        return {p.uid for p in view.pods} == {item["metadata"]["uid"] for item in listed}

    # On a cluster that others use, too, pods come and go between two lists.
    eventually(the_same)


def test_a_pod_that_names_its_node_is_distinguished_from_one_that_was_scheduled(cluster: Cluster) -> None:
    """What `protection.nodeBound` goes by. Neither pod need run."""
    named = sleeping_pod("named", cluster.node_name)
    scheduled = sleeping_pod("scheduled", cluster.node_name)
    del scheduled["spec"]["nodeName"]
    scheduled["spec"]["schedulerName"] = SCHEDULER
    for each in (named, scheduled):
        cluster.make_pod(each)
    cluster.bind("scheduled")

    def reasons() -> dict[str, str]:
        pods = list_pods(cluster.transport, cluster.node_name).pods
        return {pod.name or "": pod.node_bound for pod in pods if pod.namespace == cluster.namespace}

    eventually(lambda: {"named", "scheduled"} <= reasons().keys())
    reason_of = reasons()
    for name in ("named", "scheduled"):
        cluster.delete(cluster.pod_path(name), grace_s=0)
    assert reason_of["named"] == f"nodeName {cluster.node_name} in its template"
    assert reason_of["scheduled"] == ""


def test_a_pod_is_added_and_deleted_in_the_watch(cluster: Cluster) -> None:
    watch = PodWatch(cluster.transport, cluster.node_name)
    watch.start()
    eventually(lambda: watch.view().synced_at)
    cluster.make_pod(sleeping_pod("seen", cluster.node_name))
    key = f"{cluster.namespace}/seen"
    eventually(lambda: key in {p.key for p in watch.view().pods})
    cluster.delete(cluster.pod_path("seen"), grace_s=0)
    eventually(lambda: key not in {p.key for p in watch.view().pods})
    assert watch.view().reason == ""
    watch.stop()


def test_a_pod_is_marked_as_disrupted_and_deleted_with_the_requested_grace(cluster: Cluster) -> None:
    """What `escalation.onBlocked: delete` does. The pod need not run for it."""
    watch_log = WatchLog(cluster)
    try:
        pod = sleeping_pod("marked", cluster.node_name, terminationGracePeriodSeconds=30)
        target = victim(cluster.make_pod(pod), method=Method.DELETE)
        eventually(lambda: watch_log.pods("marked"))
        assert evict(cluster, target).kind is OutcomeKind.ACCEPTED
        watch_log.wait(lambda: any(e.terminating for e in watch_log.pods("marked")), "the deletion", timeout_s=60)
        going = next(entry for entry in watch_log.pods("marked") if entry.terminating)
        assert going.condition("DisruptionTarget")["reason"] == "TerminationByNodeAgent"
        assert going.condition("DisruptionTarget")["message"] == target.message
        assert going.object["metadata"]["deletionGracePeriodSeconds"] == 1
        watch_log.wait(lambda: watch_log.pods("marked")[-1].what == "DELETED", "the end of the pod", timeout_s=60)
    finally:
        watch_log.close()


def test_a_slot_is_taken_kept_from_others_and_released(cluster: Cluster) -> None:
    """What `fleet.maxConcurrentEvictions` does."""
    one, other = (
        EvictionSlots(
            cluster.transport,
            holder=holder,
            zone=lambda: "e2e",
            slots=1,
            namespace=cluster.namespace,
            duration_s=60.0,
            poll_s=(0.1, 1.0),
        )
        for holder in ("one", "other")
    )

    def wanted(leases: EvictionSlots) -> bool:
        leases.want()
        return leases.held()

    for each in (one, other):
        each.start()
    eventually(lambda: wanted(one))
    eventually(lambda: not wanted(other) and "taken, by one" in other.reason)
    one.stop()
    eventually(lambda: wanted(other))
    other.stop()
    [lease] = cluster.get(f"/apis/coordination.k8s.io/v1/namespaces/{cluster.namespace}/leases")["items"]
    assert lease["spec"].get("holderIdentity", "") == ""
    assert lease["spec"]["leaseTransitions"] == 1


def test_a_dry_run_eviction_is_accepted_and_changes_nothing(cluster: Cluster, running: Json) -> None:
    assert evict(cluster, victim(running), dry_run=True).kind is OutcomeKind.ACCEPTED
    assert "deletionTimestamp" not in cluster.get(cluster.pod_path("budgeted"))["metadata"]


def test_another_pods_uid_is_refused(cluster: Cluster, running: Json) -> None:
    other = {**running, "metadata": {**running["metadata"], "uid": "00000000-0000-0000-0000-000000000000"}}
    assert evict(cluster, victim(other), dry_run=True).kind is OutcomeKind.CONFLICT
    assert evict(cluster, victim(other, method=Method.DELETE)).kind is OutcomeKind.CONFLICT


def test_a_pod_that_is_gone_is_gone(cluster: Cluster, running: Json) -> None:
    missing = {**running, "metadata": {**running["metadata"], "name": "no-such-pod"}}
    assert evict(cluster, victim(missing)).kind is OutcomeKind.NOT_FOUND


def test_a_pdb_refuses_until_it_is_deleted_and_then_the_pod_is_evicted(cluster: Cluster, running: Json) -> None:
    pdbs = f"/apis/policy/v1/namespaces/{cluster.namespace}/poddisruptionbudgets"
    cluster.post(
        pdbs,
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": "keeps-one"},
            "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "budgeted"}}},
        },
    )
    refused = evict(cluster, victim(running))
    assert refused.kind is OutcomeKind.BLOCKED_BY_PDB
    assert "keeps-one" in refused.message
    cluster.delete(f"{pdbs}/keeps-one")
    eventually(lambda: evict(cluster, victim(running)).kind in (OutcomeKind.ACCEPTED, OutcomeKind.NOT_FOUND))
    assert cluster.until(lambda: cluster._gone("budgeted"), timeout_s=60)


def test_our_own_condition_is_published_and_removed(cluster: Cluster, node: NodeWatch) -> None:
    conditions = NodeConditions(cluster.transport, node, standard=StandardConditions.OFF)
    node.start()
    conditions.start()
    kind = ConditionType.PID_PRESSURE
    own = "NodeAgentPIDPressure"

    def published(status: ConditionStatus) -> bool:
        return (cluster.condition(own) or {}).get("status") == status.value

    for status in (ConditionStatus.TRUE, ConditionStatus.FALSE):
        conditions.publish([ConditionVerdict(kind, status, "NodeAgentTest", "end-to-end test", boottime())])
        eventually(functools.partial(published, status))
    conditions.stop()
    assert cluster.condition(own) is None


def test_the_standard_condition_is_kept_against_the_kubelet_and_restored(cluster: Cluster, node: NodeWatch) -> None:
    before = cluster.condition("PIDPressure")
    if before is None or before["status"] != "False":
        pytest.skip("the kubelet reports pressure of its own")
    conditions = NodeConditions(cluster.transport, node, own=False)
    node.start()
    conditions.start()
    eventually(node.view)  # the time until then is no client's reset
    kind = ConditionType.PID_PRESSURE
    conditions.publish([ConditionVerdict(kind, ConditionStatus.TRUE, "NodeAgentTest", "end-to-end test", boottime())])
    eventually(lambda: (cluster.condition("PIDPressure") or {}).get("status") == "True")
    # Two kubelet periods of 10 s.
    threading.Event().wait(22)
    contest = next(c for c in conditions.conflicts() if c.type is kind)
    conditions.stop()
    assert contest.true_s / contest.wanted_s > 0.95, contest
    assert conditions.writes <= 2 * contest.overwrites + 2
    assert (cluster.condition("PIDPressure") or {})["status"] == "False"


def test_the_taint_is_added_and_removed_beside_other_taints(cluster: Cluster, node: NodeWatch) -> None:
    def others() -> list[Json]:
        taints = cluster.node()["spec"].get("taints", [])
        return [t for t in taints if not t["key"].startswith(("nodeagent.io/", "node.kubernetes.io/"))]

    before = others()
    node_taints = NodeTaints(cluster.transport, node)
    node.start()
    node_taints.start()
    node_taints.want([ConditionType.PID_PRESSURE])
    eventually(lambda: node_taints.present() == {ConditionType.PID_PRESSURE})
    assert "nodeagent.io/pid-pressure" in {t["key"] for t in cluster.node()["spec"]["taints"]}
    node_taints.stop()
    assert "nodeagent.io/pid-pressure" not in {t["key"] for t in cluster.node()["spec"].get("taints", [])}
    assert others() == before


def test_an_event_is_written(cluster: Cluster) -> None:
    writer = EventWriter(cluster.transport, cluster.node_name)
    writer.start()
    writer.emit(KubernetesEvent("Pod", cluster.namespace, "e2e", "uid", EventReason.EVICTED, "end-to-end test"))
    writer.stop(timeout_s=30)
    assert not writer.reason, writer.reason
    events = cluster.get(f"/apis/events.k8s.io/v1/namespaces/{cluster.namespace}/events")["items"]
    assert any(e.get("note") == "end-to-end test" for e in events)


def serves_eviction_requests(cluster: Cluster) -> bool:
    try:
        listed = cluster.get(eviction_requests.ROOT)["resources"]
    except ApiError as error:
        if error.status != 404:
            raise
        return False
    return any(each["name"] == eviction_requests.RESOURCE for each in listed)


def test_whether_eviction_requests_are_served_is_known(cluster: Cluster) -> None:
    requests = EvictionRequests(cluster.transport)
    requests.start()
    eventually(lambda: requests.served or requests.reason)
    requests.stop()
    assert requests.served is serves_eviction_requests(cluster), requests.reason
    assert requests.served or requests.reason.startswith("the API server serves no evictionrequests")


def test_missing_rights_are_named(cluster: Cluster, tmp_path: Path) -> None:
    account = f"/api/v1/namespaces/{cluster.namespace}/serviceaccounts/default/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 600}}
    token = cluster.post(account, request)["status"]["token"]
    transport = as_account(cluster, token, tmp_path)
    with pytest.raises(ApiError) as refused:
        list_pods(transport, cluster.node_name)
    assert refused.value.kind is OutcomeKind.FORBIDDEN
    assert 'cannot list resource "pods"' in refused.value.message
    transport = connect(with_token(cluster, "wrong", tmp_path))
    with pytest.raises(ApiError) as unknown:
        list_pods(transport, cluster.node_name)
    assert unknown.value.kind is OutcomeKind.UNAUTHORIZED
