"""This machine as the cluster's node: real load inside real pods, and the agent as a process beside the kubelet.

A pod's only image may be `pause`, which can do nothing. So the load is a process of ours that is moved into the cgroup
of the pod's container before it takes anything: the kernel then charges the pod for it, and it ends with the pod. Such
pods share the host's process ids (`hostPID`), because a runtime that ends one then ends every process in its
cgroup, and not only those of the container's own PID namespace.

Nothing here can endanger the node: thresholds are put just below what is available now, loads stop at a cap that
leaves far more than a kubelet's own thresholds, only pods of the run's namespace may be evicted, and the load is what
the kernel's OOM killer would take first.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from nodeagent.config import kubelet, resolve
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.transport import STRATEGIC_MERGE
from nodeagent.model import OutcomeKind
from tests.e2e.cluster import WIPE, Cluster, Json, is_this_machine
from tests.support.livenode import Run

CGROUPS: Final = Path("/sys/fs/cgroup")
DEEPEST: Final = 8
"""Levels of cgroups that are searched for a pod's: kind nests its node's tree four deep."""
SAMPLING: Final = "NODEAGENT_E2E_SAMPLING"
"""The configuration's `sampling` in JSON, for a node that keeps things in unusual places: `{"kubeletDir": "/data"}`."""
VOLUME: Final = "load"

LOAD = """
import os, sys, threading
kind, place = sys.argv[1:3]
threading.stack_size(1 << 16)
never = threading.Event()
open("/proc/self/oom_score_adj", "w").write("1000")
block, held = os.urandom(1 << 20), []
print("ready", flush=True)
for line in sys.stdin:
    amount = int(line)
    if kind == "memory":
        held.append(block * amount)
    elif kind == "disk":
        with open(place + "/load", "ab", buffering=0) as file:
            for _ in range(amount):
                file.write(block)
    else:
        for _ in range(amount):
            threading.Thread(target=never.wait, daemon=True).start()
    print("done", flush=True)
"""


def configured_sampling() -> Json:
    found: Json = json.loads(os.environ.get(SAMPLING, "{}"))
    return found


class ThisNode:
    """The node that the tests run on."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.sampling: Json = {"interval": "200ms", **configured_sampling()}
        self.kubelet_dir = Path(str(self.sampling.get("kubeletDir", "/var/lib/kubelet")))

    def start_pod(self, name: str, *, labels: dict[str, str] | None = None) -> Json:
        """An idle pod that can be loaded."""
        spec = {"hostPID": True, "volumes": [{"name": VOLUME, "emptyDir": {}}], "terminationGracePeriodSeconds": 5}
        # A kubelet makes no directory for a volume that no container mounts.
        mounts = {"volumeMounts": [{"name": VOLUME, "mountPath": f"/{VOLUME}"}]}
        return self.cluster.start_pod(name, labels=labels, spec=spec, container=mounts)

    def remove_pod(self, name: str) -> None:
        self.cluster.delete(self.cluster.pod_path(name), grace_s=1)
        assert self.cluster.until(lambda: self.cluster._gone(name), timeout_s=90), f"pod {name} does not go away"

    def figures(self, directory: Path) -> dict[str, Json]:
        """Each signal in the agent's own report of now."""
        config = directory / "check.yaml"
        header = {"apiVersion": "nodeagent.io/v1alpha1", "kind": "NodeAgentConfiguration"}
        config.write_text(json.dumps({**header, "sampling": self.sampling}))  # JSON is YAML
        command = [sys.executable, "-m", "nodeagent", "check", "--no-api", "-o", "json", "--config", str(config)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
        assert done.stdout, done.stderr
        return {each["name"]: each for each in json.loads(done.stdout)["signals"]}

    def kubelets(self, signal: str, capacity: int) -> int:
        """The kubelet's highest threshold of this signal; of a kubelet with its defaults if it reports none."""
        path = f"/api/v1/nodes/{self.cluster.node_name}/proxy/configz"
        try:
            text = self.cluster.transport.request("GET", path).body.decode()
        except ApiError:
            text = ""
        theirs = [each.value for each in kubelet.read_settings(text).thresholds if each.signal.value == signal]
        return max((resolve.resolve_amount(value, capacity=capacity) or 0 for value in theirs), default=0)

    def volume(self, pod: Json) -> Path:
        """The pod's emptyDir."""
        return self.kubelet_dir / "pods" / str(pod["metadata"]["uid"]) / "volumes" / "kubernetes.io~empty-dir" / VOLUME


def most_processes(pod: Json) -> int:
    """How many processes the pod may have: the lowest pids.max from its container's cgroups upwards."""
    lowest = 1 << 22
    for place in container_cgroups(pod):
        for each in (place, *place.parents):
            with contextlib.suppress(OSError, ValueError):  # v1: another controller's; `max`: none
                lowest = min(lowest, int((each / "pids.max").read_text()))
    return lowest


def container_cgroups(pod: Json) -> list[Path]:
    """The cgroup of the pod's container in every hierarchy of this machine; empty when the pod is not here."""
    uid = pod["metadata"]["uid"]
    [container] = pod["status"]["containerStatuses"]
    identity = container["containerID"].partition("://")[2]
    names = re.compile("|".join(re.escape(form) for form in (uid, uid.replace("-", "_"))))
    found = []
    for top, directories, _ in os.walk(CGROUPS):
        if len(Path(top).relative_to(CGROUPS).parts) >= DEEPEST:
            directories.clear()
        for name in [each for each in directories if names.search(each)]:
            directories.remove(name)
            found += [each for each in (Path(top) / name).iterdir() if identity in each.name and each.is_dir()]
    return [_with_processes(each) for each in found]


def _with_processes(place: Path) -> Path:
    """Where a container's own processes are: with crun one level below what the runtime made."""
    inner = [each for each in place.iterdir() if each.is_dir()]
    return inner[0] if inner and not (place / "cgroup.procs").read_text().strip() else place


class Load:
    """A process of a pod that takes the requested amount."""

    def __init__(self, kind: str, pod: Json, place: Path) -> None:
        """`kind` is `memory` (MiB), `disk` (MiB, in the directory `place`) or `pids` (threads: the kernel counts them
        as it does processes, and they take a tenth of the memory)."""
        self.taken = 0
        self._process = subprocess.Popen(
            [sys.executable, "-c", LOAD, kind, str(place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"
        for cgroup in container_cgroups(pod):
            (cgroup / "cgroup.procs").write_text(str(self._process.pid))

    def take(self, amount: int) -> bool:
        """False when the process has been ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{amount}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return False
        self.taken += amount
        return self._process.stdout.readline() == "done\n"

    def ended(self, timeout_s: float) -> bool:
        """Whether it was ended within this time."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """End it and all it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


class Threshold(NamedTuple):
    """One threshold of the agent's configuration."""

    signal: str
    value: str
    soft_grace: str = ""
    """Empty: a hard one."""


def configuration(node: ThisNode, directory: Path, threshold: Threshold) -> Path:
    """One threshold, and no pod to evict outside the run's namespace."""
    name = {threshold.signal: threshold.value}
    settings: Json = {
        "apiVersion": "nodeagent.io/v1alpha1",
        "kind": "NodeAgentConfiguration",
        "mode": "enforce",
        "evictionHard": {} if threshold.soft_grace else name,
        "evictionSoft": name if threshold.soft_grace else {},
        "evictionSoftGracePeriod": {threshold.signal: threshold.soft_grace} if threshold.soft_grace else {},
        "enforceNodeAllocatable": ["none"],
        "evictionPressureTransitionPeriod": "3s",
        "sampling": node.sampling,
        "protection": {
            "namespaces": node.cluster.other_namespaces(),
            "barePods": False,
            "minimumAge": "0s",
        },
        "reclaim": {"waitForKubelet": "0s"},
        "stateDir": str(directory / "state"),
        "logging": {"format": "json"},
    }
    path = directory / "nodeagent.yaml"
    path.write_text(json.dumps(settings))
    return path


@contextlib.contextmanager
def agent(node: ThisNode, directory: Path, threshold: Threshold) -> Iterator[Run]:
    """`nodeagent run` on this node. Whatever happens, nothing of it is left on the Node."""
    config = configuration(node, directory, threshold)
    run = Run(
        *("--config", str(config), "--kubeconfig", node.cluster.kubeconfig, "--node-name", node.cluster.node_name),
        log=directory / "log",
    )
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.process.wait(30)
            run.process.kill()
            run.process.wait()
        wipe(node.cluster)


def marks(node: Json) -> list[str]:
    """What an agent holds on the Node now: conditions of its own, standard ones that it made True, taints."""
    conditions = [c["type"] for c in node["status"]["conditions"] if c["type"].startswith("NodeAgent") or _held(c)]
    return conditions + [t["key"] for t in node["spec"].get("taints", ()) if t["key"].startswith("nodeagent.io/")]


def at_work(cluster: Cluster) -> str:
    """Which agent must not be disturbed; empty when there is none. A lost one's marks look the same: a run with
    NODEAGENT_E2E_WIPE=1 begins by taking them off."""
    there = marks(cluster.node())
    return f"an agent is at work on {cluster.node_name} already, or was ({WIPE}=1): {', '.join(there)}" if there else ""


def _held(condition: Json) -> bool:
    # A kubelet leaves the reason of a False that it agrees with as it is.
    return bool(condition["status"] == "True" and condition.get("reason", "").startswith("NodeAgent"))


def wipe(cluster: Cluster) -> None:
    """Take off the Node what an agent that could not do it itself has left there."""
    node = cluster.node()
    if not marks(node):
        return
    path = f"/api/v1/nodes/{cluster.node_name}"
    changes: list[Json] = []
    for condition in node["status"]["conditions"]:
        if condition["type"].startswith("NodeAgent"):
            changes.append({"type": condition["type"], "$patch": "delete"})
        elif _held(condition):
            changes.append({"type": condition["type"], "status": "False", "reason": "EndToEndTest", "message": ""})
    if changes:
        body = json.dumps({"status": {"conditions": changes}}).encode()
        cluster.transport.request("PATCH", f"{path}/status", body=body, content_type=STRATEGIC_MERGE)
    # Written by the version that was read: the control plane may be about to take a taint of its own away.
    cluster.until(lambda: _without_our_taints(cluster), timeout_s=30)


def _without_our_taints(cluster: Cluster) -> bool:
    """Whether they are gone; False if another client wrote the Node at the same time."""
    node = cluster.node()
    taints = node["spec"].get("taints", ())
    kept = [taint for taint in taints if not taint["key"].startswith("nodeagent.io/")]
    if len(kept) == len(taints):
        return True
    body = json.dumps({"metadata": {"resourceVersion": node["metadata"]["resourceVersion"]}, "spec": {"taints": kept}})
    path = f"/api/v1/nodes/{cluster.node_name}"
    try:
        cluster.transport.request("PATCH", path, body=body.encode(), content_type=STRATEGIC_MERGE)
    except ApiError as error:
        if error.kind is not OutcomeKind.CONFLICT:
            raise
        return False
    return True


def why_not(cluster: Cluster) -> str:
    """Why this machine cannot be put under pressure; empty when nothing speaks against it so far."""
    node = cluster.node()
    if not is_this_machine(node):
        return f"the tests do not run on a node of the cluster ({cluster.node_name} is another machine)"
    if os.geteuid() != 0:
        return "moving processes into pods needs root"
    if reason := at_work(cluster):
        return reason
    for kind in ("MemoryPressure", "DiskPressure", "PIDPressure"):
        if any(c["type"] == kind and c["status"] != "False" for c in node["status"]["conditions"]):
            return f"{cluster.node_name} is under {kind} already"
    return ""
