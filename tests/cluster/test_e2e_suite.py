"""The end-to-end suite itself works: it passes against the HTTP double with a stand-in for the kubelet."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.apiserver import ApiServer, Json, node_object


def ready_node(image: str) -> Json:
    node: Json = node_object("node-1")
    node["status"]["conditions"].append({"type": "Ready", "status": "True", "reason": "KubeletReady"})
    node["status"]["images"] = [{"names": [image]}] if image else []
    return node


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
        timeout=110,
        cwd=Path(__file__).parents[2],
    )
    assert finished.returncode == 0, finished.stdout[-4000:]
    return finished.stdout


@pytest.mark.parametrize("image", ["registry.k8s.io/pause:3.10", ""])
def test_the_suite_passes_and_leaves_nothing_behind(tmp_path: Path, image: str) -> None:
    over = threading.Event()
    with ApiServer(node=ready_node(image)) as api:

        def kubelet() -> None:
            """Starts what it has the image of."""
            while not over.is_set():
                api.wait_for(lambda: over.is_set() or waiting(api, image), 0.2)
                for namespace, name in waiting(api, image):
                    api.modify_pod(namespace, name, start)

        threading.Thread(target=kubelet, daemon=True).start()
        output = run_suite(api, tmp_path)
        over.set()
        assert not api.store["namespaces"]
        assert "taints" not in api.node()["spec"]
        assert not [c for c in api.node()["status"]["conditions"] if c["type"].startswith("NodeAgent")]
    if image:
        assert "11 passed" in output
    else:
        assert "no pod starts on node-1" in output


def test_the_rights_of_an_installation_are_tried_and_taken_away_again(tmp_path: Path) -> None:
    """The double asks the policies that the suite has made there, with an evaluator of their language."""
    evaluator = pytest.importorskip("tests.deploy.test_admission")
    with ApiServer(node=ready_node(""), linger_s=None) as api:
        other = node_object("node-2", address="10.0.2.16")
        api.add_node(other)

        def refused(asked: Json, old: Json, new: Json | None) -> list[str]:
            kinds = ("validatingadmissionpolicies", "validatingadmissionpolicybindings")
            made = [entry for kind in kinds for entry in api.store[kind].values()]
            found: list[str] = evaluator.refused(asked, old=old, new=new, made=made) if made else []
            return found

        api.admit = refused
        output = run_suite(api, tmp_path, "test_installation.py")
        assert "17 passed, 1 skipped" in output, output
        assert "NODEAGENT_E2E_IMAGE names no image" in output
        left = ("namespaces", "clusterroles", "clusterrolebindings", "validatingadmissionpolicies")
        assert not [kind for kind in left if api.store[kind]]
        assert "taints" not in api.node()["spec"]


def waiting(api: ApiServer, image: str) -> list[tuple[str, str]]:
    return [
        key
        for key, pod in list(api.store["pods"].items())
        if pod["status"]["phase"] == "Pending" and pod["spec"]["containers"][0]["image"] == image
    ]


def start(pod: Json) -> None:
    pod["status"].update(phase="Running", conditions=[{"type": "Ready", "status": "True"}])
