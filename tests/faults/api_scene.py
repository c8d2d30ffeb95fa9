"""The same agent and node with the real session, which talks HTTP to the double of an API server.

The agent's clock is the scene's: a sync moves it, and the threads of the session only read it. Their back-offs and
time-outs are real, so a step of a run waits some milliseconds for them, and `recover` at most
`RECOVER_S`.
"""

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from nodeagent.actuators.cluster_session import ClusterSession
from nodeagent.config.schema import Config
from nodeagent.kube.backoff import RetryBackoff
from nodeagent.kube.credentials import find_credentials
from nodeagent.kube.node_identity import Identity
from nodeagent.kube.transport import connect
from nodeagent.runtime import workers
from tests.fake_kube import ApiServer, Json, Request, node_object, pod
from tests.faults.scene import CALM, CONFIG, PODS, PRIORITIES, Scene
from tests.fuzz import scratch
from tests.support.trees import GI, MI, TreePod

NODE: Final = "lab-node"
SOFT_PRESSED: Final = CALM._replace(memory_available=GI + 500 * MI)
"""Below the soft threshold, above the hard one."""
REQUEST_TIMEOUT_S: Final = 0.4
"""Of the agent. A request to the double takes a few milliseconds."""
PAUSE_S: Final = 0.04
"""Real time between two syncs, for the threads."""
RECOVER_S: Final = 30.0
"""Longest real time until everything is well again. The longest wait of the agent after few failures is 4 s."""
RECOVER_AFTER_WAIT_S: Final = 45.0
"""The same after a long Retry-After, for which the agent waits 30 s."""
SHORT_STEPS: Final = 10
"""Steps from one long step to the next."""
LASTING: Final = 6
"""Syncs in a row in which all must be well: a thread may be about to notice what happened."""
BLOCKED_S: Final = 0.3
"""Longest time in which a sync neither runs nor waits for a processor, nor any other thread here. A sync waits for no
answer; the shortest time-out is 0.4 s."""
STORM: Final = 60
"""Requests of one kind during a fault, which lasts less than a second as a rule: more come from no back-off."""

_CONFIG: Final = (
    CONFIG.replace("evictionSoft: {}", "evictionSoft: {memory.available: 2Gi}").replace(
        "evictionSoftGracePeriod: {}", "evictionSoftGracePeriod: {memory.available: 3s}"
    )
    + f"""\
cluster: {{requestTimeout: {REQUEST_TIMEOUT_S:g}s, evictionTimeout: {REQUEST_TIMEOUT_S:g}s}}
protection: {{replacementWait: 10m, nodeFit: true}}
fleet: {{maxConcurrentEvictions: 1}}
"""
)


class ApiScene(Scene):
    """One agent and its API server, which outlives it."""

    def __init__(self, place: Path, api: ApiServer) -> None:
        self.api = api
        self.recover_s = RECOVER_S
        self.carried_out: list[str] = []
        self._stuck_before = set(workers.stuck_workers())
        self._failures_before = workers.failure_counts()
        api.on_eviction = self._on_eviction
        super().__init__(place, CALM, connect=self._connect, config=_CONFIG)
        self.session.start()

    def _connect(self, config: Config) -> ClusterSession:
        kubeconfig = self.api.kubeconfig(self.place / "kubeconfig")
        transport = connect(
            find_credentials(str(kubeconfig)), request_timeout_s=config.cluster.request_timeout_s, light=True
        )
        self.session = ClusterSession(
            transport,
            config,
            Identity(NODE, "test"),
            wake=lambda: None,
            probe_backoff=RetryBackoff(first_s=0.2, last_s=2.0),
            clock=lambda: self.now,
        )
        return self.session

    def _on_eviction(self, entry: Json, _: Json) -> None:
        self.carried_out.append(f"{entry['metadata']['namespace']}/{entry['metadata']['name']}")

    @property
    def evicted(self) -> list[str]:
        """The evictions that the server carried out, and the pods of all requests that it refused or never answered
        and that are not the right one."""
        wanted = [_pod_of(each) for each in self.api.sent("POST", "/eviction")]
        wanted += [_pod_of(each) for each in self.api.sent("DELETE") if "/pods/" in each.path]
        return [*self.carried_out, *(name for name in wanted if name != PODS[0].key)]

    @property
    def unknown(self) -> str:
        """Why a decision would not be made on the pods and the memory of now; empty if it would."""
        pods = self.session.pods()
        if pods.reason or pods.synced_at is None or {each.key for each in pods.pods} != {each.key for each in PODS}:
            return f"pods: {pods.reason or pods.synced_at}, {len(pods.pods)} listed"
        return super().unknown

    def defects(self) -> str:
        """What a part of the agent raised, and which of its threads failed or hangs."""
        stuck = set(workers.stuck_workers()) - self._stuck_before
        found = [super().defects(), *(f"thread {each.name} {each.message}" for each in stuck)]
        if (failures := workers.failure_counts()) != self._failures_before:
            found.append(f"failed workers {failures}, before {self._failures_before}")
        if "Traceback" in (self.place / "log").read_text():
            found.append("a traceback in the log")
        return "; ".join(each for each in found if each)

    def advance(self, seconds: float, *, pause_s: float = PAUSE_S) -> None:
        """One sync so much later, then a pause for the threads, and for requests on their way."""
        self.now += seconds
        with self.measured():
            self.agent.sync()
        pause(pause_s)
        deadline = time.monotonic() + 3 * REQUEST_TIMEOUT_S
        while self.session.counts().in_flight and time.monotonic() < deadline:
            pause(0.005)

    def until(self, holds: Callable[[], object], *, within_s: float, step_s: float) -> bool:
        """Sync until it holds; False if it never did. `step_s`: by how much the clock moves."""
        deadline = time.monotonic() + within_s
        while not holds():
            if time.monotonic() > deadline:
                return False
            self.advance(step_s)
        return True

    def recover(self, *, pressed: bool) -> None:
        """Sync until the agent knows everything again and, under pressure, has evicted; then some syncs more."""
        began = time.monotonic()

        def well() -> bool:
            return not self.unknown and (bool(self.carried_out) or not pressed)

        calm, number = 0, 0
        while calm < LASTING and (calm or time.monotonic() - began < self.recover_s):
            # A refusal blocks its pod, its owner or all requests for minutes of the agent's clock. Two requests without
            # an answer have spent all tokens, and the next one is due after an hour. What the soft tier knows of owners
            # is old after a long step, and its grace period begins again: some short ones follow.
            age_s = time.monotonic() - began
            young = calm or age_s < 1.0
            step_s = 1.0 if young or number % SHORT_STEPS else 10.0 if age_s < 5.0 else 300.0
            self.advance(step_s, pause_s=PAUSE_S if young else 2 * PAUSE_S)
            calm = calm + 1 if well() else 0
            number += 1


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def _pod_of(request: Request) -> str:
    parts = request.path.split("/")
    at = parts.index("namespaces")
    return f"{parts[at + 1]}/{parts[at + 3]}"


def api_pod(entry: TreePod) -> Json:
    """The Pod object of a pod of the tree."""
    namespace, _, name = entry.key.partition("/")
    return pod(
        name,
        namespace=namespace,
        node=NODE,
        uid=entry.cgroup_uid,
        owner=("ReplicaSet", f"rs-{name}"),
        priority=PRIORITIES[entry.key],
        requests={"cpu": "100m", "memory": str(entry.request)},
        created="2026-01-01T00:00:00Z",
        spec={"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]} if name == "hog" else {},
    )


def _server() -> ApiServer:
    api = ApiServer(node=NODE, pods=map(api_pod, PODS), linger_s=None, bookmark_s=0.05)
    api.token_nodes[api.token] = NODE
    api.store.objects["nodes"]["", NODE]["metadata"]["labels"]["topology.kubernetes.io/zone"] = "a"
    other = node_object("other-node")
    other["status"]["allocatable"] = {"cpu": "8", "memory": "64Gi", "pods": "110"}
    other["status"]["conditions"].append({"type": "Ready", "status": "True", "reason": "", "message": ""})
    api.add_node(other)
    api.set_volume("data", {"nfs": {"server": "nfs", "path": "/"}}, namespace="shop")
    for entry in PODS:
        namespace, _, name = entry.key.partition("/")
        owner = {
            "metadata": {"name": f"rs-{name}", "namespace": namespace, "uid": f"uid-rs-{name}"},
            "spec": {"replicas": 1},
            "status": {"replicas": 1, "readyReplicas": 1},
        }
        api.store.put("replicasets", owner, "ADDED")
    return api


@contextmanager
def api_scene(before: Callable[[ApiServer], None] = lambda _: None) -> Iterator[ApiScene]:
    """`before` is called with the server before the agent starts."""
    with tempfile.TemporaryDirectory(dir=scratch.PARENT) as name, _server() as api:
        before(api)
        made = ApiScene(Path(name), api)
        try:
            yield made
        finally:
            api.on_answer = api.on_watch = api.instead = None
            made.close()
