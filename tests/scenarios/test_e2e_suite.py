"""The end-to-end suite itself works: it passes against the HTTP double with a stand-in for the kubelet."""

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from nodeagent.config import quantity
from nodeagent.kube.credentials import find_credentials
from nodeagent.kube.transport import connect
from tests.e2e.cluster import Cluster
from tests.e2e.installation import Installation
from tests.e2e.this_node import wipe
from tests.fake_kube import ApiServer, Json, Request, node_object, pod, resize
from tests.support.livenode import Run
from tests.support.paths import REPOSITORY

pytestmark = pytest.mark.timeout(300)

DAEMONSET = "test_the_daemonset_becomes_ready_answers_and_publishes_its_conditions"


def ready_node(image: str) -> Json:
    node: Json = node_object("node-1")
    node["status"]["conditions"].append({"type": "Ready", "status": "True", "reason": "KubeletReady"})
    node["status"]["images"] = [{"names": [image]}] if image else []
    return node


def connected(api: ApiServer, tmp_path: Path) -> Cluster:
    kubeconfig = str(api.kubeconfig(tmp_path / "kubeconfig"))
    return Cluster(connect(find_credentials(kubeconfig)), kubeconfig)


def run_suite(api: ApiServer, tmp_path: Path, suite: str = "test_cluster.py") -> str:
    environment = {**os.environ, "NODEAGENT_E2E_KUBECONFIG": str(api.kubeconfig(tmp_path / "kubeconfig"))}
    # Two kubelet periods are left to a real kubelet; the double's resets are tested in test_conditions.
    command = [sys.executable, "-m", "pytest", f"tests/e2e/{suite}", "-q", "-rs", "-k", "not against_the_kubelet"]
    finished = subprocess.run(
        command,
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        cwd=REPOSITORY,
    )
    assert finished.returncode == 0, finished.stdout[-4000:]
    return finished.stdout


@pytest.mark.parametrize("image", ["registry.k8s.io/pause:3.10", ""])
def test_the_suite_passes_and_leaves_nothing_behind(tmp_path: Path, image: str) -> None:
    with ApiServer(node=ready_node(image)) as api:
        with kubelet(api, image, start):
            output = run_suite(api, tmp_path)
        assert not api.store.objects["namespaces"]
        assert "taints" not in api.node()["spec"]
        assert not [c for c in api.node()["status"]["conditions"] if c["type"].startswith("NodeAgent")]
    if image:
        assert "15 passed" in output
    else:
        assert "no pod starts on node-1" in output


@pytest.mark.parametrize(
    ("server", "kubelet_version", "result"),
    [
        (36, "v1.36.2", "4 passed"),
        (35, "v1.35.0", "4 passed"),
        (36, "v1.33.4-gke.1", "3 passed, 1 skipped"),  # raised, and not lowered
        (33, "v1.33.0+k3s1", "2 passed, 2 skipped"),
        (36, "v1.32.1", "4 skipped"),
    ],
)
def test_the_suite_of_resizes_passes(tmp_path: Path, server: int, kubelet_version: str, result: str) -> None:
    image = "registry.k8s.io/pause:3.10"
    node = ready_node(image)
    node["status"] |= {"allocatable": {"memory": "3060000Ki"}, "nodeInfo": {"kubeletVersion": kubelet_version}}
    carry_out = functools.partial(resize.carry_out, minor=int(kubelet_version.split(".")[1]))

    def start_limited(pod: Json) -> None:
        start(pod)
        pod["status"]["containerStatuses"] = [{"name": "c", "restartCount": 0, "state": {"running": {}}}]
        carry_out(pod)

    with ApiServer(node=node, minor=server) as api:

        def act(entry: Json) -> None:
            wanted = entry["spec"]["containers"][0]["resources"]["requests"]["memory"]
            beyond = quantity.parse_quantity(wanted) > 1 << 40
            change = resize.call_infeasible if beyond else carry_out
            api.modify_pod(entry["metadata"]["namespace"], entry["metadata"]["name"], change)

        api.on_resize = lambda entry: threading.Thread(target=act, args=(entry,), daemon=True).start()
        with kubelet(api, image, start_limited):
            output = run_suite(api, tmp_path, "test_resize.py")
    assert output.splitlines()[-1].startswith(result), output


def test_a_resize_that_the_kubelet_calls_infeasible_is_not_tried(tmp_path: Path) -> None:
    image = "registry.k8s.io/pause:3.10"

    def start_limited(pod: Json) -> None:
        start(pod)
        pod["status"]["containerStatuses"] = [{"name": "c", "restartCount": 0, "state": {"running": {}}}]
        resize.carry_out(pod)

    with ApiServer(node=ready_node(image)) as api:

        def act(entry: Json) -> None:
            api.modify_pod(entry["metadata"]["namespace"], entry["metadata"]["name"], resize.call_infeasible)

        api.on_resize = lambda entry: threading.Thread(target=act, args=(entry,), daemon=True).start()
        with kubelet(api, image, start_limited):
            output = run_suite(
                api, tmp_path, "test_resize.py::test_a_memory_limit_is_raised_and_restored_without_a_restart"
            )
    assert "containers with swap is not supported" in output


def test_a_cluster_that_allows_no_such_pods_is_not_a_failure(tmp_path: Path) -> None:
    """Admission's 403 differs from that of a missing right."""
    with ApiServer(node=ready_node("registry.k8s.io/pause:3.10")) as api:
        api.admit = lambda asked, *_: ["violates the policy"] if asked["resource"]["resource"] == "pods" else []
        output = run_suite(api, tmp_path)
        assert "the cluster allows no such pod" in output
        assert not api.store.objects["namespaces"]


def test_what_a_lost_run_has_left_is_removed_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among it a Node object that never had a kubelet, and so no conditions."""
    labels = {"nodeagent.io/e2e-run": "nodeagent-e2e-lost"}
    with ApiServer(node=ready_node("")) as api:
        lost: dict[str, Json] = {"nodes": {"spec": {}, "status": {}}, "clusterroles": {"rules": []}, "namespaces": {}}
        for kind, content in lost.items():
            api.store.put(kind, {"metadata": {"name": f"a-lost-{kind}", "labels": labels}, **content}, "ADDED")
        api.store.put("clusterroles", {"metadata": {"name": "admin"}, "rules": []}, "ADDED")
        monkeypatch.setenv("NODEAGENT_E2E_WIPE", "1")
        run_suite(api, tmp_path)
        assert list(api.store.objects["clusterroles"]) == [("", "admin")]
        assert list(api.store.objects["nodes"]) == [("", "node-1")]
        assert not api.store.objects["namespaces"]


def test_what_an_agent_has_set_that_is_already_there_is_not_touched_unless_requested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = ready_node("")
    theirs = {"type": "NodeAgentPIDPressure", "status": "False", "reason": "NodeAgentNoPressure"}
    node["status"]["conditions"].append(theirs)
    with ApiServer(node=node) as api:
        output = run_suite(api, tmp_path)
        assert "an agent is at work on node-1 already, or was (NODEAGENT_E2E_WIPE=1): NodeAgentPIDPressure" in output
        assert not [request for request in api.sent("PATCH") if "/nodes/" in request.path]
        assert api.condition("NodeAgentPIDPressure") == theirs

        monkeypatch.setenv("NODEAGENT_E2E_WIPE", "1")
        assert "an agent is at work" not in run_suite(api, tmp_path)
        assert api.condition("NodeAgentPIDPressure") is None


def test_what_a_lost_agent_left_is_taken_off_while_the_control_plane_writes_too(tmp_path: Path) -> None:
    node = ready_node("")
    ours, theirs = (
        {"key": f"{owner}/pid-pressure", "effect": "NoSchedule"} for owner in ("nodeagent.io", "example.com")
    )
    node["status"]["conditions"].append({"type": "NodeAgentPIDPressure", "status": "True", "reason": "NodeAgentX"})
    node["spec"]["taints"] = [ours]
    refused: list[Request] = []
    with ApiServer(node=node) as api:

        def meanwhile(request: Request, done: bool) -> None:
            if request.method == "PATCH" and request.path.endswith("/node-1") and not done and not refused:
                refused.append(request)
                api.patch_node({"spec": {"taints": [ours, theirs]}})

        api.at_request = meanwhile
        wipe(connected(api, tmp_path))
        assert refused
        assert api.condition("NodeAgentPIDPressure") is None
        assert api.node()["spec"]["taints"] == [theirs]


def test_a_pod_that_cannot_start_is_given_up_at_once_with_its_reason(tmp_path: Path) -> None:
    image = "registry.k8s.io/pause:3.10"
    why = {"reason": "ErrImageNeverPull", "message": "Container image is not present"}

    def refuse(pod: Json) -> None:
        pod["status"]["containerStatuses"] = [{"name": "c", "state": {"waiting": why}}]

    with ApiServer(node=ready_node(image)) as api, kubelet(api, image, refuse):
        output = run_suite(api, tmp_path)
    assert f"{image}: ErrImageNeverPull: Container image is not present" in output


def report(tmp_path: Path, *options: str, api: ApiServer | None = None) -> tuple[int, list[str]]:
    """The exit code and the lines of the one report."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NODEAGENT_E2E_")}
    if api is not None:
        environment["NODEAGENT_E2E_KUBECONFIG"] = str(api.kubeconfig(tmp_path / "kubeconfig"))
    file = tmp_path / "report"
    finished = subprocess.run(
        [sys.executable, "-m", "tests.e2e", "--report", str(file), *options],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        cwd=REPOSITORY,
    )
    text = file.read_text()
    assert finished.stdout.endswith(text), finished.stdout[-2000:]
    return finished.returncode, text.splitlines()


def test_without_a_cluster_the_report_lists_every_claim_that_needs_one(tmp_path: Path) -> None:
    code, lines = report(tmp_path)
    claims = [line for line in lines if line.startswith("  ")]
    assert code == 0
    assert all(line.startswith("  not tried  ") and "NODEAGENT_E2E_KUBECONFIG" in line for line in claims)
    assert "a hard threshold does not wait and leaves a second" in "".join(claims)
    files = {path.name for path in (REPOSITORY / "tests" / "e2e").glob("test_*.py")}
    assert {line.partition(":")[0] for line in lines if line.startswith("test_")} == files
    assert lines[-1] == f"{len(claims)} claims: 0 passed, 0 failed, {len(claims)} not tried"


def test_the_report_lists_what_passed_and_why_the_rest_did_not(tmp_path: Path) -> None:
    with ApiServer(node=ready_node("")) as api:
        # Whoever may write no Events: the administrator of this cluster.
        api.forbid("create", "events")
        code, lines = report(tmp_path, "-k", "recognised or event_is_written or pods_uid_is_refused", api=api)
    assert code == 1
    passed, unknown, failed = [line for line in lines if line.startswith("  ")]
    assert passed == "  passed     the node is recognised and a wrong name refused"
    assert unknown.startswith("  not tried  another pods uid is refused: no pod starts on node-1")
    assert failed.startswith("  failed     an event is written: call: ")
    assert "events.events.k8s.io is forbidden" in failed
    assert lines[-1] == "3 claims: 1 passed, 1 failed, 1 not tried"


class DaemonSets:
    """What makes a pod of a DaemonSet, as far as our own needs it: the program with the ConfigMap's configuration and
    the token of a pod on the node, and the answer of its readiness probe. The image is not used."""

    def __init__(self, api: ApiServer, directory: Path) -> None:
        self._api = api
        self._directory = directory
        self._running: Run | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="daemonsets")
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._over.wait(0.1):
            sets = list(self._api.store.objects["daemonsets"].items())
            if sets and self._running is None:
                ((namespace, name), made) = sets[0]
                self._start(namespace, name, made["spec"]["template"])
            if not sets and self._running is not None:
                self._end()
        if self._running is not None:
            self._end()

    def _start(self, namespace: str, name: str, template: Json) -> None:
        self._key = (namespace, f"{name}-x")
        spec = {**template["spec"], "nodeName": "node-1"}
        pod = {"metadata": {**template["metadata"], "name": f"{name}-x", "namespace": namespace}, "spec": spec}
        uid = self._api.add_pod({**pod, "status": {"phase": "Running", "qosClass": "Guaranteed"}})["metadata"]["uid"]
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        config = yaml.safe_load(self._api.store.objects["configmaps"][namespace, name]["data"]["config.yaml"])
        config |= {"metrics": {"address": address}, "stateDir": str(self._directory / "state")}
        path = self._directory / "config.yaml"
        path.write_text(json.dumps(config))
        token = self._api.token_of(namespace, spec["serviceAccountName"], node="node-1")
        kubeconfig = self._api.kubeconfig(self._directory / "agents-kubeconfig", token=token)
        self._running = Run(
            *("--config", str(path), "--kubeconfig", str(kubeconfig)),
            log=self._directory / "agent.log",
            environ={**os.environ, "NODE_NAME": "node-1", "POD_UID": uid},
        )
        self._api.pod_ports[f"{name}-x:{spec['containers'][0]['ports'][0]['containerPort']}"] = f"http://{address}"
        while not self._answers(f"http://{address}/readyz") and not self._over.wait(0.1):
            continue
        self._api.modify_pod(*self._key, start)

    def _answers(self, url: str) -> bool:
        try:
            with urllib.request.urlopen(url, timeout=5) as page:
                return bool(page.status == 200)
        except OSError:
            return False

    def _end(self) -> None:
        assert self._running is not None
        self._running.stop()
        self._api.delete_pod(*self._key)
        self._running = None


def denied_by_stored_policies(api: ApiServer) -> Callable[[Json, Json | None, Json | None], list[str]]:
    """The double's policies, by an evaluator of their language."""
    evaluator = pytest.importorskip("tests.deploy.test_admission")

    def denied(asked: Json, old: Json | None, new: Json | None) -> list[str]:
        kinds = ("validatingadmissionpolicies", "validatingadmissionpolicybindings")
        made = [entry for kind in kinds for entry in api.store.objects[kind].values()]
        found: list[str] = evaluator.denied(asked, old, new, made)
        return found

    return denied


def nothing_is_left(api: ApiServer) -> bool:
    kinds = ("namespaces", "clusterroles", "clusterrolebindings", "validatingadmissionpolicies", "daemonsets")
    return (
        not [kind for kind in kinds if api.store.objects[kind]]
        and "taints" not in api.node()["spec"]
        and not [c for c in api.node()["status"]["conditions"] if c["type"].startswith("NodeAgent")]
    )


def test_an_installation_is_tried_and_taken_away_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The double grants by the bindings that the suite has made there, and has constrained impersonation."""
    with ApiServer(node=ready_node(""), pods=[pod("system", namespace="kube-system", node="node-1")]) as api:
        api.linger_s = None
        api.add_node(node_object("node-2", address="10.0.2.16"))
        api.admit = denied_by_stored_policies(api)
        monkeypatch.setenv("NODEAGENT_E2E_IMAGE", "nodeagent:0.1.0")
        daemonsets = DaemonSets(api, tmp_path)
        try:
            output = run_suite(api, tmp_path, "test_installation.py")
        finally:
            daemonsets.close()
        assert "78 passed" in output, output
        assert nothing_is_left(api)
        assert len(api.store.objects["nodes"]) == 2


def test_an_installation_without_constrained_impersonation_has_the_direct_rights(tmp_path: Path) -> None:
    """As Kubernetes 1.35 answers. With one node the suite makes a second Node object and removes it."""
    with ApiServer(node=ready_node(""), minor=35, linger_s=None) as api:
        api.admit = denied_by_stored_policies(api)
        output = run_suite(api, tmp_path, "test_installation.py")
        assert "this API server (1.35) has no constrained impersonation" in output
        assert "53 passed" in output, output
        assert nothing_is_left(api)
        assert list(api.store.objects["nodes"]) == [("", "node-1")]
        assert [r.path for r in api.sent("POST", "/nodes")] == ["/api/v1/nodes"]


@pytest.mark.parametrize("minor", [36, 35])
def test_the_daemonset_has_the_rights_that_it_needs_when_it_is_tried_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minor: int
) -> None:
    with ApiServer(node=ready_node(""), minor=minor) as api:
        api.linger_s = None
        monkeypatch.setenv("NODEAGENT_E2E_IMAGE", "nodeagent:0.1.0")
        daemonsets = DaemonSets(api, tmp_path)
        try:
            output = run_suite(api, tmp_path, f"test_installation.py::{DAEMONSET}")
        finally:
            daemonsets.close()
        assert "1 passed" in output, output
        assert nothing_is_left(api)


def test_a_daemonset_whose_pods_the_cluster_refuses_is_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = 'pods "nodeagent-" is forbidden: unable to validate against any security context constraint'
    with ApiServer(node=ready_node("")) as api:
        monkeypatch.setenv("NODEAGENT_E2E_IMAGE", "nodeagent:0.1.0")

        def refuse(request: Request, done: bool) -> None:
            if done and request.method == "POST" and request.path.endswith("/daemonsets"):
                metadata = {"name": "refused", "namespace": request.path.split("/")[5]}
                event = {"metadata": metadata, "reason": "FailedCreate", "message": f"Error creating: {message}"}
                api.store.put("events", event, "ADDED")

        api.at_request = refuse
        output = run_suite(api, tmp_path, f"test_installation.py::{DAEMONSET}")
        assert message in output
        assert nothing_is_left(api)


def test_what_cannot_be_deleted_does_not_keep_the_rest(tmp_path: Path) -> None:
    with ApiServer(node=ready_node("")) as api:
        cluster = connected(api, tmp_path)
        made = Installation(cluster)
        for document in made.documents:
            if document["kind"] not in ("ConfigMap", "DaemonSet"):
                made.make(document)
        api.forbid("delete", "validatingadmissionpolicies")
        with pytest.raises(RuntimeError, match=r"not deleted: .*validatingadmissionpolicies"):
            made.remove()
        kinds = ("clusterroles", "clusterrolebindings", "validatingadmissionpolicybindings")
        assert not [kind for kind in kinds if api.store.objects[kind]]
        api.allow("delete", "validatingadmissionpolicies")
        made.made.clear()  # as if the answers to their creation had been lost
        made.remove()
        assert not api.store.objects["validatingadmissionpolicies"]


@contextlib.contextmanager
def kubelet(api: ApiServer, image: str, change: Callable[[Json], None]) -> Iterator[None]:
    """Does this to each pod of an image that it has."""
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            api.wait_for(lambda: over.is_set() or waiting(api, image), 0.2)
            for namespace, name in waiting(api, image):
                api.modify_pod(namespace, name, change)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def waiting(api: ApiServer, image: str) -> list[tuple[str, str]]:
    return [
        key
        for key, pod in list(api.store.objects["pods"].items())
        if pod["status"]["phase"] == "Pending"
        and "nodeName" in pod["spec"]
        and "containerStatuses" not in pod["status"]
        and pod["spec"]["containers"][0]["image"] == image
    ]


def start(pod: Json) -> None:
    pod["status"].update(phase="Running", conditions=[{"type": "Ready", "status": "True"}])
