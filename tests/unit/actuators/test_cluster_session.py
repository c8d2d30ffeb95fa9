"""The session: the taint before soft victims, PDBs near pressure, Events with the plan's id."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.actuators.cluster_session import ClusterSession
from nodeagent.actuators.event_writer import EventReason
from nodeagent.actuators.soft_tier_block import TAINT_WAIT_S
from nodeagent.config.schema import (
    ClusterConfig,
    ClusterIdentity,
    ConditionsConfig,
    Config,
    FleetConfig,
    Mode,
    ProtectionConfig,
)
from nodeagent.kube.credentials import find_credentials
from nodeagent.kube.node_identity import Identity
from nodeagent.kube.transport import connect
from nodeagent.model import (
    Amount,
    ConditionStatus,
    ConditionType,
    ConditionVerdict,
    DisruptionBudget,
    EvictionRequestOrder,
    Method,
    NodeFitLookup,
    NoteKind,
    Outcome,
    OutcomeKind,
    Owner,
    OwnerLookup,
    Plan,
    PodView,
    RankedPod,
    Refusal,
    RefusalCode,
    Signal,
    Threshold,
    Tier,
    Victim,
)
from nodeagent.runtime import clock, workers
from tests.fake_kube import ApiServer, Request, pod
from tests.fake_kube import eviction_requests as double

MEMORY = ConditionType.MEMORY_PRESSURE
TAINT = {"key": "nodeagent.io/memory-pressure", "effect": "NoSchedule"}
ENFORCE = Config(mode=Mode.ENFORCE)


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer(pods=[pod("hog", uid="uid-hog", labels={"app": "hog"})], linger_s=None) as server:
        yield server


@pytest.fixture
def session(api: ApiServer, tmp_path: Path) -> Iterator[Callable[..., ClusterSession]]:
    started: list[ClusterSession] = []

    def start(config: Config = ENFORCE, **more: Any) -> ClusterSession:
        transport = connect(find_credentials(str(api.kubeconfig(tmp_path / "kubeconfig"))))
        made = ClusterSession(transport, config, Identity("lab-node", "test"), wake=lambda: None, **more)
        made.start()
        started.append(made)
        eventually(lambda: made.pods().synced_at is not None)
        return made

    yield start
    for each in started:
        each.stop(clear=False)


def eventually(holds: Callable[[], object], *, within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        threading.Event().wait(0.005)


@contextlib.contextmanager
def kept_waiting(api: ApiServer, ending: str) -> Iterator[None]:
    """Requests whose path ends with this are carried out at the end of the block."""
    over = threading.Event()

    def hold(request: Request, done: bool) -> None:
        if not done and request.path.endswith(ending):
            over.wait(60)

    api.at_request = hold
    try:
        yield
    finally:
        api.at_request = None
        over.set()


def verdict(status: ConditionStatus) -> ConditionVerdict:
    return ConditionVerdict(MEMORY, status, "NodeAgentTest", "for a test", 0.0)


def outcome(agent: ClusterSession) -> Outcome:
    """The next outcome, which is the only one."""
    found: list[Outcome] = []

    def there() -> bool:
        found.extend(agent.outcomes())
        return bool(found)

    eventually(there)
    (only,) = found
    return only


TRUE, FALSE, UNKNOWN = (verdict(status) for status in ConditionStatus)


def taints(api: ApiServer) -> list[Any]:
    return list(api.node()["spec"].get("taints", []))


def victim(session: ClusterSession, *, tier: Tier = Tier.SOFT) -> Victim:
    return Victim(
        pod=session.pods().pods[0],
        cgroup="/kubepods/poduid-hog",
        threshold=Threshold(Signal.MEMORY, Amount(1, None, "1")),
        tier=tier,
        method=Method.EVICT,
        grace_period_s=3.0,
        message="The node was low on resource: memory. ",
        annotations={"starved_resource": "memory"},
        predicted_relief=None,
    )


def waits_for(session: ClusterSession) -> RefusalCode | None:
    waiting = session.soft_tier_block()
    return waiting.code if waiting is not None else None


def answer(session: ClusterSession) -> Outcome:
    """The outcome of the one victim."""
    found: list[Outcome] = []

    def arrived() -> bool:
        found.extend(session.outcomes())
        return bool(found)

    eventually(arrived)
    return found[0]


def plan(*victims: Victim, refused: tuple[Refusal, ...] = ()) -> Plan:
    return Plan("run-7", 0.0, 0.0, (), (), victims=victims, refusals=refused)


def events(api: ApiServer) -> dict[str, Any]:
    return {request.body["reason"]: request.body for request in api.sent("POST", "/events")}


# --- maintenance ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(Mode))
def test_the_soft_tier_pauses_while_the_node_is_cordoned(
    api: ApiServer, session: Callable[..., ClusterSession], mode: Mode
) -> None:
    agent = session(ENFORCE._replace(mode=mode))
    eventually(lambda: agent.node_labels() is not None)
    assert agent.soft_tier_block() is None
    api.patch_node({"spec": {"unschedulable": True}})
    eventually(agent.soft_tier_block)
    block = agent.soft_tier_block()
    assert block is not None
    assert (block.code, block.message) == (
        RefusalCode.NODE_MAINTENANCE,
        "the node is under maintenance: it is cordoned",
    )
    api.write_condition("GracefulNodeShutdownInProgress", "True", "Shutdown")
    eventually(lambda: waits_for(agent) is RefusalCode.NODE_SHUTDOWN)
    api.write_condition("GracefulNodeShutdownInProgress", "False", "Shutdown")
    api.patch_node({"spec": {"unschedulable": None}})
    eventually(lambda: agent.soft_tier_block() is None)


def test_a_session_gives_the_arguments_of_k3s_in_the_annotation_of_its_node(
    api: ApiServer, session: Callable[..., ClusterSession]
) -> None:
    agent = session()
    eventually(lambda: agent.node_labels() is not None)
    assert agent.k3s_arguments() == ()
    api.patch_node({"metadata": {"annotations": {"k3s.io/node-args": '["server","--debug"]'}}})
    eventually(lambda: agent.k3s_arguments() == ("server", "--debug"))


def test_a_node_that_is_not_current_pauses_nothing(api: ApiServer, session: Callable[..., ClusterSession]) -> None:
    api.patch_node({"spec": {"unschedulable": True}})
    ahead = [0.0]
    agent = session(clock=lambda: clock.boottime() + ahead[0])
    eventually(lambda: waits_for(agent) is RefusalCode.NODE_MAINTENANCE)
    ahead[0] = ENFORCE.cluster.pods_max_age_s + 60.0
    assert agent.soft_tier_block() is None


def test_the_pause_for_maintenance_can_be_switched_off(api: ApiServer, session: Callable[..., ClusterSession]) -> None:
    api.patch_node({"spec": {"unschedulable": True}})
    off = ENFORCE._replace(protection=ENFORCE.protection._replace(node_maintenance=False))
    agent = session(off)
    eventually(lambda: agent.node_labels() is not None)
    assert agent.soft_tier_block() is None


def test_a_dry_run_reads_the_node_as_well(api: ApiServer, session: Callable[..., ClusterSession]) -> None:
    """It decides by the same facts: the unused images, and the arguments of k3s."""
    node = api.node()
    node["status"]["images"] = [{"names": ["registry.example/old:1"], "sizeBytes": 1000}]
    api.put_node(node)
    off = ENFORCE._replace(mode=Mode.DRY_RUN, protection=ENFORCE.protection._replace(node_maintenance=False))
    agent = session(off)
    eventually(lambda: agent.pods().unused_images == 1000)


# --- taints ----------------------------------------------------------------------------------------------------------


def test_the_soft_tier_waits_until_the_taint_is_on_the_node(
    api: ApiServer, session: Callable[..., ClusterSession]
) -> None:
    agent = session(clock=lambda: 100.0)
    with kept_waiting(api, "/nodes/lab-node"):
        agent.publish([TRUE])
        assert waits_for(agent) is RefusalCode.WAITS_FOR_TAINT
        assert not agent.tainted(MEMORY)
    eventually(lambda: agent.soft_tier_block() is None)
    assert agent.tainted(MEMORY)
    assert taints(api) == [TAINT]


def test_the_soft_tier_waits_two_seconds_at_most_for_its_taint(
    api: ApiServer, session: Callable[..., ClusterSession]
) -> None:
    api.forbid("patch", "nodes")
    now = [100.0]
    agent = session(ENFORCE._replace(protection=ProtectionConfig(disruption_budgets=False)), clock=lambda: now[0])
    agent.publish([TRUE])
    now[0] += TAINT_WAIT_S - 0.1
    agent.publish([TRUE])
    assert waits_for(agent) is RefusalCode.WAITS_FOR_TAINT
    now[0] += 0.2
    assert waits_for(agent) is None
    assert not agent.tainted(MEMORY)
    eventually(lambda: any(note.kind is NoteKind.TAINTS and "forbidden" in note.message for note in agent.notes()))


def test_a_taint_of_an_earlier_process_is_removed_when_the_verdict_is_false(
    api: ApiServer, session: Callable[..., ClusterSession]
) -> None:
    first = session()
    first.publish([TRUE])
    assert api.wait_for(lambda: taints(api) == [TAINT], 30)
    first.stop(clear=False)
    assert taints(api) == [TAINT]
    second = session()
    second.publish([UNKNOWN])
    eventually(lambda: second.tainted(MEMORY))
    second.publish([FALSE])
    assert api.wait_for(lambda: taints(api) == [], 30)


def test_a_clean_exit_removes_the_taint(api: ApiServer, session: Callable[..., ClusterSession]) -> None:
    agent = session()
    agent.publish([TRUE])
    eventually(lambda: agent.tainted(MEMORY))
    assert agent.stop(clear=True) == ""
    assert taints(api) == []


def test_a_process_that_stops_before_it_has_read_its_node_removes_leftover_taints(
    api: ApiServer, session: Callable[..., ClusterSession]
) -> None:
    with api.store.changed:
        api.patch_node({"spec": {"taints": [TAINT]}})

    def lose_the_lists_of_nodes(request: Request, carried_out: bool) -> None:
        if request.path == "/api/v1/nodes" and not carried_out:
            raise ConnectionAbortedError

    api.at_request = lose_the_lists_of_nodes
    agent = session()
    eventually(lambda: any(note.subject == "node object" for note in agent.notes()))
    assert taints(api) == [TAINT]
    assert agent.stop(clear=True) == ""
    assert taints(api) == []


def test_with_taint_false_none_is_added_and_a_leftover_one_is_removed(
    api: ApiServer, session: Callable[..., ClusterSession]
) -> None:
    with api.store.changed:
        api.patch_node({"spec": {"taints": [TAINT]}})
    agent = session(ENFORCE._replace(conditions=ConditionsConfig(taint=False)))
    agent.publish([TRUE])
    assert waits_for(agent) != "waits-for-taint"
    assert api.wait_for(lambda: taints(api) == [], 30)


def test_with_node_credentials_there_is_no_taint_and_a_note_states_it(
    api: ApiServer, session: Callable[..., ClusterSession]
) -> None:
    api.tokens[api.token] = "system:node:lab-node"
    agent = session()
    agent.publish([TRUE])
    assert waits_for(agent) != "waits-for-taint"
    assert any("cannot change taints" in note.message for note in agent.notes())
    assert api.wait_for(lambda: api.sent("PATCH", "/status"), 30)
    assert not api.sent("PATCH", "/nodes/lab-node")


# --- the identity of the requests ------------------------------------------------------------------------------------


def impersonated(requests: list[Request]) -> set[str]:
    """The requests with the header, as method and resource."""
    named = [request for request in requests if "impersonate-user" in request.headers]
    assert {request.headers["impersonate-user"] for request in named} <= {"system:node:lab-node"}
    return {f"{request.method} {'/'.join(request.path.split('/')[3:])}" for request in named}


def test_pods_evictions_claims_and_the_node_are_the_nodes_requests_and_the_rest_the_accounts(
    api: ApiServer, session: Callable[..., ClusterSession]
) -> None:
    api.token_nodes[api.token] = "lab-node"
    api.add_pod(mounting("data"))
    api.set_volume("data", {"local": {"path": "/mnt/disks/0"}})
    agent = session(Config(mode=Mode.ENFORCE, fleet=FleetConfig(max_concurrent_evictions=1)))
    assert agent.counts().api_identity == "node"
    agent.prewarm()
    agent.publish([TRUE])
    [listed] = [each for each in agent.pods().pods if each.name == "hog"]
    hog = victim(agent)._replace(pod=listed)
    agent.announce(plan(hog)._replace(soft_eviction_in_flight=True))
    eventually(lambda: any(each.node_bound for each in agent.pods().pods))
    eventually(lambda: api.sent("GET", "/leases") and api.sent("GET", "/poddisruptionbudgets") and taints(api))
    agent.evict("p-1", hog)
    assert outcome(agent).kind is OutcomeKind.ACCEPTED
    assert api.wait_for(lambda: len(api.sent("POST", "/events")) >= 2, 30)
    assert impersonated(api.requests) == {
        "GET pods",
        "GET nodes",
        "GET nodes/lab-node",
        "POST namespaces/default/pods/hog/eviction",
        "GET namespaces/default/persistentvolumeclaims/data",
        "GET persistentvolumes/pv-data",
    }
    own = {request.path.split("/")[-1] for request in api.requests if "impersonate-user" not in request.headers}
    assert {"lab-node", "status", "poddisruptionbudgets", "leases", "events"} <= own
    assert not [note for note in agent.notes() if note.kind is NoteKind.IDENTITY]


def test_an_older_server_is_one_note_and_the_session_works_as_the_service_account(
    api: ApiServer, session: Callable[..., ClusterSession]
) -> None:
    api.token_nodes[api.token] = "lab-node"
    api.constrained_impersonation = False
    agent = session()
    assert agent.counts().api_identity == "serviceAccount"
    agent.evict("p-1", victim(agent))
    assert outcome(agent).kind is OutcomeKind.ACCEPTED
    [note] = [note for note in agent.notes() if note.kind is NoteKind.IDENTITY]
    assert "no constrained impersonation (Kubernetes 1.36)" in note.message
    api.requests.clear()
    agent.evict("p-2", victim(agent))
    outcome(agent)
    assert impersonated(api.requests) == set()


def test_an_eviction_goes_on_as_the_service_account_when_the_right_is_taken_away(
    api: ApiServer, session: Callable[..., ClusterSession]
) -> None:
    api.token_nodes[api.token] = "lab-node"
    agent = session()
    api.forbid("impersonate-on:associated-node:create", "pods/eviction")
    agent.evict("p-1", victim(agent))
    assert outcome(agent).kind is OutcomeKind.ACCEPTED
    first, second = api.sent("POST", "/eviction")
    assert ["impersonate-user" in each.headers for each in (first, second)] == [True, False]
    [note] = [note for note in agent.notes() if note.kind is NoteKind.IDENTITY]
    assert 'verbs: ["impersonate-on:associated-node:create"]' in note.message
    assert agent.counts().api_identity == "serviceAccount"


def test_the_identity_node_never_evicts_as_the_service_account(
    api: ApiServer, session: Callable[..., ClusterSession]
) -> None:
    api.token_nodes[api.token] = "lab-node"
    agent = session(Config(mode=Mode.ENFORCE, cluster=ClusterConfig(identity=ClusterIdentity.NODE)))
    api.forbid("impersonate-on:associated-node:create", "pods/eviction")
    agent.evict("p-1", victim(agent))
    refused = outcome(agent)
    assert refused.kind is OutcomeKind.FORBIDDEN
    assert "impersonate-on:associated-node:create" in refused.message
    assert all("impersonate-user" in each.headers for each in api.sent("POST", "/eviction"))


def test_the_identity_node_waits_for_an_api_server_that_allows_it(api: ApiServer, tmp_path: Path) -> None:
    api.token_nodes[api.token] = "lab-node"
    api.constrained_impersonation = False
    transport = connect(find_credentials(str(api.kubeconfig(tmp_path / "kubeconfig"))))
    config = Config(mode=Mode.ENFORCE, cluster=ClusterConfig(identity=ClusterIdentity.NODE))
    agent = ClusterSession(transport, config, Identity("lab-node", "test"), wake=lambda: None)
    agent.start()
    try:
        eventually(lambda: "cluster.identity is node" in agent.pods().reason)
        assert (agent.identity(), agent.counts().api_identity) == (None, "")
        assert not api.sent("GET", "/api/v1/pods") or impersonated(api.sent("GET", "/api/v1/pods"))
        api.constrained_impersonation = True
        eventually(lambda: agent.counts().api_identity == "node")
    finally:
        agent.stop(clear=False)


def test_with_node_credentials_the_identity_is_the_nodes_without_impersonation(
    api: ApiServer, session: Callable[..., ClusterSession]
) -> None:
    api.tokens[api.token] = "system:node:lab-node"
    agent = session()
    assert agent.counts().api_identity == "node"
    assert impersonated(api.requests) == set()


def test_a_session_stops_while_it_waits_to_probe_again(api: ApiServer, session: Callable[..., ClusterSession]) -> None:
    api.token_nodes[api.token] = "lab-node"
    api.constrained_impersonation = False
    agent = session()
    began = time.monotonic()
    agent.stop(clear=False)
    assert time.monotonic() - began < 3.0
    assert not [thread for thread in threading.enumerate() if thread.name == "identity"]


def test_a_dry_run_writes_nothing(api: ApiServer, session: Callable[..., ClusterSession]) -> None:
    agent = session(Config(mode=Mode.DRY_RUN))
    agent.publish([TRUE])
    agent.announce(plan(victim(agent)))
    agent.emit_node_event(EventReason.CONFIGURATION_REJECTED, "x", action="Reloading")
    agent.prewarm()
    assert waits_for(agent) != "waits-for-taint"
    agent.stop(clear=True)
    assert not [r for r in api.requests if r.method != "GET" and not r.path.endswith("selfsubjectreviews")]


# --- PodDisruptionBudgets --------------------------------------------------------------------------------------------


def test_pdbs_are_not_listed_before_pressure_is_near(api: ApiServer, session: Callable[..., ClusterSession]) -> None:
    api.set_pdb("one", {"app": "hog"}, allowed=0)
    agent = session()
    assert agent.pods().pods[0].disruption_budgets == ()
    assert not api.sent("GET", "/poddisruptionbudgets")
    agent.prewarm()
    eventually(lambda: agent.pods().pods[0].disruption_budgets == (DisruptionBudget("one", 0, True),))
    assert agent.pods().pods is agent.pods().pods, "nothing new, nothing computed again"
    api.set_pdb("one", {"app": "hog"}, allowed=3)
    eventually(lambda: agent.pods().pods[0].disruption_budgets == (DisruptionBudget("one", 3, True),))


@pytest.mark.parametrize("mode", Mode)
def test_the_replicas_of_an_owner_are_read_once_a_plan_wants_them(
    api: ApiServer, session: Callable[..., ClusterSession], mode: Mode
) -> None:
    """In a dry run, too: it reads what a real decision would."""
    agent = session(Config(mode=mode, protection=ProtectionConfig(replacement_wait_s=60.0)))
    api.add_pod(pod("web", namespace="shop", owner=("ReplicaSet", "web")))
    eventually(lambda: len(agent.pods().pods) == 2)
    owner = agent.pods().pods[1].owner
    assert owner is not None
    metadata = {"name": owner.name, "namespace": "shop", "uid": owner.uid, "generation": 1}
    status = {"readyReplicas": 1, "observedGeneration": 1}
    api.store.put("replicasets", {"metadata": metadata, "spec": {"replicas": 2}, "status": status}, "MODIFIED")
    plan = Plan("p-1", 1.0, 1.0, (), ())
    agent.announce(plan)
    assert not api.sent("GET", "/replicasets")
    agent.announce(plan._replace(owner_lookups=(OwnerLookup("shop", owner),)))
    eventually(lambda: (found := agent.pods().pods[1].replicas) is not None and (found.desired, found.ready) == (2, 1))


@pytest.mark.parametrize("mode", Mode)
def test_other_nodes_are_read_once_a_plan_wants_to_know_whether_one_takes_a_pod(
    api: ApiServer, session: Callable[..., ClusterSession], mode: Mode
) -> None:
    """In a dry run, too: it reads what a real decision would."""
    agent = session(Config(mode=mode, protection=ProtectionConfig(node_fit=True)))
    api.add_pod(pod("web", namespace="shop", owner=("ReplicaSet", "web")))
    eventually(lambda: len(agent.pods().pods) == 2)
    uid = agent.pods().pods[1].uid
    plan = Plan("p-1", 1.0, 1.0, (), ())
    agent.announce(plan)
    assert agent.pods().pods[1].node_fit is None
    api.forbid("list", "nodes")
    agent.announce(plan._replace(node_fit_lookups=(NodeFitLookup(uid),)))
    eventually(lambda: (fit := agent.pods().pods[1].node_fit) is not None and fit.trouble)
    assert [note.kind for note in agent.notes() if note.kind is NoteKind.NODE_FIT] == [NoteKind.NODE_FIT]
    api.allow("list", "nodes")
    eventually(lambda: (fit := agent.pods().pods[1].node_fit) is not None and fit.read_at is not None)


@pytest.mark.parametrize("mode", Mode)
def test_the_soft_tier_waits_until_the_pdbs_are_listed(
    api: ApiServer, session: Callable[..., ClusterSession], mode: Mode
) -> None:
    api.set_pdb("one", {"app": "hog"}, allowed=0)
    agent = session(Config(mode=mode, conditions=ConditionsConfig(taint=False)))
    assert waits_for(agent) is None, "not wanted yet: no pressure is near"
    with kept_waiting(api, "/poddisruptionbudgets"):
        agent.publish([TRUE])
        assert waits_for(agent) is RefusalCode.WAITS_FOR_PDBS
        assert agent.pods().pods[0].disruption_budgets == ()
    eventually(lambda: waits_for(agent) is None)
    assert agent.pods().pods[0].disruption_budgets == (DisruptionBudget("one", 0, True),)


def test_the_soft_tier_does_not_wait_for_pdbs_that_cannot_be_listed(
    api: ApiServer, session: Callable[..., ClusterSession]
) -> None:
    api.forbid("list", "poddisruptionbudgets")
    agent = session(ENFORCE._replace(conditions=ConditionsConfig(taint=False)))
    agent.prewarm()
    eventually(lambda: any("poddisruptionbudgets" in note.message for note in agent.notes()))
    eventually(lambda: waits_for(agent) is None)


def test_the_pdbs_of_a_later_pod_are_listed_at_once(api: ApiServer, session: Callable[..., ClusterSession]) -> None:
    agent = session(ENFORCE._replace(conditions=ConditionsConfig(taint=False)))
    agent.prewarm()
    eventually(lambda: waits_for(agent) is None)
    api.set_pdb("other", {"app": "new"}, allowed=0, namespace="later")
    api.add_pod(pod("new", namespace="later", labels={"app": "new"}))
    eventually(lambda: len(agent.pods().pods) == 2)
    with kept_waiting(api, "/poddisruptionbudgets"):
        agent.prewarm()
        assert waits_for(agent) is RefusalCode.WAITS_FOR_PDBS
    eventually(
        lambda: (
            [p.disruption_budgets for p in agent.pods().pods if p.name == "new"]
            == [(DisruptionBudget("other", 0, True),)]
        )
    )


def test_pdbs_are_never_listed_when_they_protect_no_pod(api: ApiServer, session: Callable[..., ClusterSession]) -> None:
    agent = session(ENFORCE._replace(protection=ProtectionConfig(disruption_budgets=False)))
    agent.prewarm()
    agent.publish([FALSE])
    assert api.wait_for(lambda: api.sent("PATCH", "/status"), 30)
    assert not api.sent("GET", "/poddisruptionbudgets")


# --- counts ----------------------------------------------------------------------------------------------------------


def test_lists_and_failures_of_the_nodes_watch_are_counted_as_those_of_the_pods(
    api: ApiServer, session: Callable[..., ClusterSession]
) -> None:
    agent = session()

    def relists() -> dict[str, int]:
        return {watch.name: watch.relists for watch in agent.counts().watches}

    eventually(lambda: relists() == {"pods": 1, "node": 1})
    api.forbid("watch", "nodes")
    api.compact()
    api.end_watches()
    eventually(lambda: next(w.failures for w in agent.counts().watches if w.name == "node") > 0)
    api.allow("watch", "nodes")
    eventually(lambda: relists()["node"] > 1)


# --- volumes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_mirror_pod_must_refer_to_the_own_node_object_once_its_uid_is_known(
    dry_run: bool, api: ApiServer, session: Callable[..., ClusterSession]
) -> None:
    for name, uid in (("ours", api.node()["metadata"]["uid"]), ("forged", "another-uid")):
        marks = {"kubernetes.io/config.mirror": name, "kubernetes.io/config.hash": name}
        entry = pod(name, annotations=marks)
        owner = {"apiVersion": "v1", "kind": "Node", "name": "lab-node", "uid": uid, "controller": True}
        entry["metadata"]["ownerReferences"] = [owner]
        api.add_pod(entry)
    made = session(Config() if dry_run else ENFORCE)

    def mirrors() -> set[str]:
        return {each.name or "" for each in made.pods().pods if each.mirror_of}

    # A dry run does not watch the Node: the name of the owner has to do.
    eventually(lambda: mirrors() == ({"ours", "forged"} if dry_run else {"ours"}))
    assert made.pods().pods is made.pods().pods


def mounting(name: str) -> dict[str, Any]:
    return pod(name, spec={"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]})


def test_a_pod_with_a_local_volume_is_bound_to_the_node(api: ApiServer, session: Callable[..., ClusterSession]) -> None:
    api.set_volume("data", {"local": {"path": "/mnt/disk1"}})
    api.add_pod(mounting("db"))
    agent = session()
    eventually(lambda: any(each.node_bound for each in agent.pods().pods if each.name == "db"))
    assert agent.pods().pods is agent.pods().pods


def test_volumes_are_not_looked_up_when_they_protect_no_pod(
    api: ApiServer, session: Callable[..., ClusterSession]
) -> None:
    api.set_volume("data", {"local": {"path": "/mnt/disk1"}})
    api.add_pod(mounting("db"))
    agent = session(ENFORCE._replace(protection=ProtectionConfig(node_bound=False)))
    agent.publish([FALSE])
    assert api.wait_for(lambda: api.sent("PATCH", "/status"), 30)
    assert not api.sent("GET", "/persistentvolumeclaims/data")


# --- events ----------------------------------------------------------------------------------------------------------


def test_an_eviction_has_events_on_pod_and_node_with_the_plans_id(
    api: ApiServer, session: Callable[..., ClusterSession]
) -> None:
    agent = session()
    chosen = victim(agent)
    agent.announce(plan(chosen))
    agent.evict("run-7", chosen)
    assert answer(agent).kind is OutcomeKind.ACCEPTED
    assert api.wait_for(lambda: {"Evicted", "EvictionThresholdMet"} <= set(events(api)), 30)
    evicted, met = events(api)["Evicted"], events(api)["EvictionThresholdMet"]
    assert evicted["regarding"]["uid"] == "uid-hog"
    assert evicted["note"] == "The node was low on resource: memory. "
    assert evicted["metadata"]["annotations"] == {"starved_resource": "memory", "nodeagent.io/plan": "run-7"}
    assert met["note"] == "Attempting to reclaim memory"
    assert met["regarding"] == {"kind": "Node", "apiVersion": "v1", "name": "lab-node", "uid": "lab-node"}
    assert met["metadata"]["annotations"] == {"nodeagent.io/plan": "run-7"}


def test_the_owner_of_an_evicted_pod_has_an_event_that_outlives_the_pod(
    api: ApiServer, session: Callable[..., ClusterSession]
) -> None:
    agent = session()
    chosen = victim(agent)
    owner = Owner("ReplicaSet", "hog", "rs-hog")
    chosen = chosen._replace(pod=chosen.pod._replace(owner=owner))
    ranked = RankedPod(PodView(chosen.pod, None), 1, (), 3 << 30, 1 << 30, None)
    agent.evict("run-7", chosen)
    agent.announce(plan(chosen)._replace(ranking=(ranked,)))
    assert answer(agent).kind is OutcomeKind.ACCEPTED
    assert api.wait_for(lambda: {"Evicted", "PodEvicted"} <= set(events(api)), 30)
    event = events(api)["PodEvicted"]
    assert event["regarding"] == {
        "kind": "ReplicaSet",
        "apiVersion": "apps/v1",
        "name": "hog",
        "uid": "rs-hog",
        "namespace": "default",
    }
    assert event["metadata"]["namespace"] == "default"
    assert "It used 3Gi of memory, 2Gi more than its request of 1Gi." in event["note"]
    assert event["metadata"]["annotations"]["nodeagent.io/plan"] == "run-7"


def test_with_node_credentials_an_eviction_has_events_as_well(
    api: ApiServer, session: Callable[..., ClusterSession]
) -> None:
    api.tokens[api.token] = "system:node:lab-node"
    agent = session()
    chosen = victim(agent)
    agent.announce(plan(chosen))
    agent.evict("run-7", chosen)
    assert answer(agent).kind is OutcomeKind.ACCEPTED
    wanted = {"Evicted", "EvictionThresholdMet"}
    assert api.wait_for(lambda: wanted <= {event["reason"] for event in api.store.objects["events"].values()}, 10)


def test_a_refused_eviction_has_no_event_evicted(api: ApiServer, session: Callable[..., ClusterSession]) -> None:
    api.set_pdb("one", {"app": "hog"}, allowed=0)
    agent = session()
    agent.evict("run-7", victim(agent))
    assert answer(agent).kind is OutcomeKind.BLOCKED_BY_PDB
    agent.stop(clear=False)
    assert "Evicted" not in events(api)


def test_changed_conditions_have_the_kubelets_events(api: ApiServer, session: Callable[..., ClusterSession]) -> None:
    agent = session()
    for each in (UNKNOWN, FALSE, TRUE, TRUE, FALSE):
        agent.publish([each])
    assert api.wait_for(lambda: len(events(api)) == 2, 30), list(events(api))
    event = events(api)["NodeHasInsufficientMemory"]
    assert (event["type"], event["note"]) == ("Normal", "Node lab-node status is now: NodeHasInsufficientMemory")
    assert "NodeHasSufficientMemory" in events(api)


def test_the_event_of_a_kill_is_written_when_the_api_server_is_reachable_again(
    api: ApiServer, session: Callable[..., ClusterSession]
) -> None:
    agent = session()
    chosen = victim(agent, tier=Tier.HARD)._replace(method=Method.KILL)
    api.go_down()
    eventually(lambda: agent.pods().unreachable_since is not None)
    agent.announce_kill("run-8", chosen)
    agent.outcomes()
    agent.emit_node_event(EventReason.CONFIGURATION_REJECTED, "x", action="Reloading")
    eventually(lambda: agent.counts().events_dropped)  # as each Event now
    api.come_back()
    eventually(lambda: agent.pods().unreachable_since is None)
    agent.outcomes()
    assert api.wait_for(lambda: "Killed" in events(api), 30)
    assert events(api)["Killed"]["metadata"]["annotations"]["nodeagent.io/plan"] == "run-8"


# --- eviction slots --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refused", [(Refusal(RefusalCode.WAITS_FOR_LEASE, ""),), ()], ids=["waits", "in flight"])
def test_a_slot_is_acquired_when_the_soft_tier_would_act_or_its_pod_is_not_gone_and_not_before(
    api: ApiServer, session: Callable[..., ClusterSession], refused: tuple[Refusal, ...]
) -> None:
    api.store.objects["nodes"]["", "lab-node"]["metadata"]["labels"]["topology.kubernetes.io/zone"] = "b"
    agent = session(ENFORCE._replace(fleet=FleetConfig(max_concurrent_evictions=2)))
    agent.publish([FALSE])
    waiting = agent.soft_tier_block()
    assert waiting is not None
    assert waiting.code is RefusalCode.WAITS_FOR_LEASE
    agent.announce(plan(victim(agent, tier=Tier.HARD)))
    threading.Event().wait(0.1)
    assert not api.store.objects["leases"], "the hard tier needs no slot"
    agent.announce(plan(refused=refused)._replace(soft_eviction_in_flight=not refused))
    eventually(lambda: agent.soft_tier_block() is None)
    ((namespace, name),) = api.store.objects["leases"]
    assert (namespace, name[:-1]) == ("nodeagent", "nodeagent-evictions-b-")


@pytest.mark.parametrize("content", ["one\ntwo", "t\u00f6ken", "to\u20acken", ""])
def test_an_unusable_token_file_ends_no_thread_and_is_a_note_until_it_is_fixed(
    api: ApiServer, tmp_path: Path, content: str
) -> None:
    path, token = api.kubeconfig(tmp_path / "kubeconfig"), tmp_path / "token"
    token.write_text("agent-token")
    config = json.loads(path.read_text())
    config["users"][0]["user"] = {"tokenFile": str(token)}
    path.write_text(json.dumps(config))
    agent = ClusterSession(
        connect(find_credentials(str(path))), ENFORCE, Identity("lab-node", "test"), wake=lambda: None
    )
    before = {each.name for each in workers.stuck_workers()}
    agent.start()
    eventually(lambda: agent.pods().synced_at is not None)
    api.tokens = {"rotated": api.tokens["agent-token"]}
    token.write_text(content)
    api.end_watches()
    agent.publish([TRUE])
    agent.evict("plan", victim(agent))
    eventually(lambda: [note for note in agent.notes() if note.subject == "credentials"])
    assert outcome(agent).kind is OutcomeKind.UNAUTHORIZED

    token.write_text("rotated")
    agent.evict("plan", victim(agent))
    assert outcome(agent).kind is OutcomeKind.ACCEPTED
    assert not [note for note in agent.notes() if note.subject == "credentials"]
    eventually(lambda: api.condition("NodeAgentMemoryPressure"), within_s=60)
    assert {each.name for each in workers.stuck_workers()} <= before, "no thread has died"
    agent.stop(clear=False)


@pytest.mark.parametrize("mode", [Mode.ENFORCE, Mode.DRY_RUN])
def test_a_request_is_withdrawn_after_the_feature_is_switched_off_but_not_in_a_dry_run(
    api: ApiServer, session: Callable[..., ClusterSession], mode: Mode
) -> None:
    api.eviction_requests = "requester"
    uid = "0a1b2c3d-0000-4000-8000-000000000001"
    spec = {"target": {"pod": {"name": "hog", "uid": uid}}, "requester": "nodeagent.io/nodeagent", "intent": "Eviction"}
    metadata = {"name": f"nodeagent-{uid}", "namespace": "default", "generation": 1}
    api.store.put("evictionrequests", {"metadata": metadata, "spec": spec, "status": {}}, "ADDED")
    agent = session(Config(mode=mode))
    agent.follow_eviction_requests([EvictionRequestOrder("plan-1", uid, "default", withdraw=True)])
    if mode is Mode.ENFORCE:
        assert outcome(agent).kind is OutcomeKind.REQUEST_WITHDRAWN
    stored = double.of_pod(api, uid)
    assert stored is not None
    assert (stored["spec"]["intent"] == "Withdrawn") is (mode is Mode.ENFORCE)
    assert not agent.eviction_requests_served()
