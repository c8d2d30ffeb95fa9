"""API requests of one real node: its start, an hour of calm, and an eviction with its recovery.

Measured against the HTTP double of the tests. `measure_start` counts what the program sends as a process until it is
calm. In `calm_hour` the workers of an agent run with every period divided by `COMPRESSION` (watches, heartbeats; the
server sends bookmarks), and the counts are scaled to an hour. `episode` is a session under pressure: taint, PDBs,
Events, one eviction, recovery. All run as the own node (`cluster.identity`); the requests are the same without.
Authorization checks are counted from the requests: one for each, and for each that impersonates the node at most two
more (`impersonate-on:...` for the request, `impersonate:associated-node`). The API server keeps the second for 10 s and
for all nodes of the account, so that in a fleet one more is left.
"""

import json
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from nodeagent.actuators.cluster_session import ClusterSession
from nodeagent.actuators.conditions import NodeConditions
from nodeagent.config.schema import ClusterIdentity, ConditionsConfig, Config, FleetConfig, Mode
from nodeagent.kube.credentials import find_credentials
from nodeagent.kube.list_watch import WATCH_S
from nodeagent.kube.node_identity import Identity
from nodeagent.kube.node_watch import NodeWatch
from nodeagent.kube.pod_watch import PodWatch
from nodeagent.kube.transport import connect
from nodeagent.model import (
    Amount,
    ConditionStatus,
    ConditionType,
    ConditionVerdict,
    Method,
    Plan,
    Signal,
    Threshold,
    Tier,
    Victim,
)
from tests.fake_kube import ApiServer, Request, pod
from tests.support.livenode import Run

COMPRESSION = 30.0
MEASURED_S = 60.0
START_S = 15.0
"""A started agent is calm after this time."""

VERBS = {"GET": "get", "POST": "create", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}


def kind_of(request: Request) -> str:
    """`watch pods`, `patch nodes/status` ..."""
    parts = request.path.strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:]
    if not parts:
        return "get version"
    if parts[0] == "namespaces":
        parts = parts[2:]
    verb = VERBS[request.method]
    if verb == "get" and len(parts) == 1:
        verb = "watch" if "watch" in request.query else "list"
    return f"{verb} {'/'.join([parts[0], *parts[2:]])}"


class Traffic(NamedTuple):
    """Requests of one node."""

    kinds: Counter[str]
    impersonated: Counter[str]
    """Those of them that are sent as the node."""

    @property
    def all(self) -> int:
        return sum(self.kinds.values())

    def checks(self, more: int) -> int:
        """Authorization checks, with this many more for each request as the node."""
        return self.all + more * sum(self.impersonated.values())

    def scaled(self, by: float) -> "Traffic":
        return Traffic(*(Counter({kind: round(count * by) for kind, count in each.items()}) for each in self))


def traffic_of(requests: Iterable[Request]) -> Traffic:
    requests = tuple(requests)
    as_node = (request for request in requests if "impersonate-user" in request.headers)
    return Traffic(Counter(map(kind_of, requests)), Counter(map(kind_of, as_node)))


def measure_start() -> Traffic:
    """Requests of an agent from its start until it is calm."""
    with ApiServer(pods=[pod("web", uid="uid-web")]) as api, tempfile.TemporaryDirectory() as directory:
        api.token_nodes[api.token] = api.node_name
        scratch = Path(directory)
        config = scratch / "nodeagent.yaml"
        config.write_text(json.dumps({
            "apiVersion": "nodeagent.io/v1alpha1", "kind": "NodeAgentConfiguration", "mode": "enforce",
            "stateDir": str(scratch / "state"),
        }))  # fmt: skip
        kubeconfig = str(api.kubeconfig(scratch / "kubeconfig"))
        arguments = ("--config", str(config), "--node-name", api.node_name, "--kubeconfig", kubeconfig)
        agent = Run(*arguments, log=scratch / "log")
        try:
            threading.Event().wait(START_S)
            return traffic_of(api.requests)
        finally:
            agent.kill()


def calm_hour() -> Traffic:
    """Requests per hour of a calm node."""
    with ApiServer(bookmark_s=60.0 / COMPRESSION) as api, tempfile.TemporaryDirectory() as directory:
        api.token_nodes[api.token] = api.node_name
        transport = connect(find_credentials(str(api.kubeconfig(Path(directory) / "kubeconfig"))))
        transport.impersonation.act_as(api.node_name, ClusterIdentity.AUTO)
        node = NodeWatch(transport, api.node_name, watch_s=WATCH_S / COMPRESSION)
        conditions = NodeConditions(transport, node, heartbeat_s=ConditionsConfig().heartbeat_s / COMPRESSION)
        pods = PodWatch(transport, api.node_name, watch_s=WATCH_S / COMPRESSION)
        for part in (node, conditions, pods):
            part.start()
        conditions.publish([verdict(ConditionStatus.FALSE)])
        threading.Event().wait(2.0)  # without the requests of the start
        before = len(api.requests)
        threading.Event().wait(MEASURED_S)
        counted = traffic_of(api.requests[before:])
        for stopping in (conditions, pods, node):
            stopping.stop()
    return counted.scaled(3600.0 / (MEASURED_S * COMPRESSION))


def episode() -> Traffic:
    """Requests of one node that evicts one pod and recovers, with eviction slots."""
    hog = pod("hog", uid="uid-hog", owner=("ReplicaSet", "hog"))
    with ApiServer(pods=[hog], linger_s=0.2) as api, tempfile.TemporaryDirectory() as directory:
        api.token_nodes[api.token] = api.node_name
        transport = connect(find_credentials(str(api.kubeconfig(Path(directory) / "kubeconfig"))))
        config = Config(mode=Mode.ENFORCE, fleet=FleetConfig(max_concurrent_evictions=20))
        session = ClusterSession(transport, config, Identity(api.node_name, "benchmark"), wake=lambda: None)
        session.start()
        session.publish([verdict(ConditionStatus.FALSE)])
        until(lambda: session.pods().synced_at is not None)
        session.publish([verdict(ConditionStatus.FALSE)])
        until(lambda: api.condition("NodeAgentMemoryPressure") is not None)
        before = len(api.requests)
        session.prewarm()
        session.publish([verdict(ConditionStatus.TRUE)])
        victim = Victim(
            session.pods().pods[0], "", Threshold(Signal.MEMORY, Amount(1, None, "1"), 30.0), Tier.SOFT, Method.EVICT,
            1.0, "The node was low on resource: memory. ", {}, None,
        )  # fmt: skip
        session.announce(Plan("b-1", 0.0, 0.0, (), (), victims=(victim,), soft_eviction_in_flight=True))
        until(lambda: session.soft_tier_block() is None)
        session.evict("b-1", victim)
        until(session.outcomes)
        until(lambda: not session.pods().pods)
        session.publish([verdict(ConditionStatus.FALSE)])
        until(lambda: not api.node()["spec"].get("taints"))
        session.stop(clear=False)
        return traffic_of(api.requests[before:])


def verdict(status: ConditionStatus) -> ConditionVerdict:
    return ConditionVerdict(ConditionType.MEMORY_PRESSURE, status, "NodeAgentBenchmark", "", 0.0)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("the session makes no progress")
        threading.Event().wait(0.005)
