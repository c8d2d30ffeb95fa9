"""The end-to-end suite itself works: it passes against the HTTP double with a stand-in for the kubelet."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.apiserver import ApiServer, Json, node_object


def run_suite(api: ApiServer, tmp_path: Path) -> str:
    environment = {**os.environ, "NODEAGENT_E2E_KUBECONFIG": str(api.kubeconfig(tmp_path / "kubeconfig"))}
    # Two kubelet periods are left to a real kubelet; the double's resets are tested in test_conditions.
    command = [sys.executable, "-m", "pytest", "tests/e2e/test_cluster.py", "-q", "-k", "not against_the_kubelet"]
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
    node: Json = node_object("node-1")
    node["status"]["conditions"].append({"type": "Ready", "status": "True", "reason": "KubeletReady"})
    node["status"]["images"] = [{"names": [image]}] if image else []
    over = threading.Event()
    with ApiServer(node=node) as api:

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


def waiting(api: ApiServer, image: str) -> list[tuple[str, str]]:
    return [
        key
        for key, pod in list(api.store["pods"].items())
        if pod["status"]["phase"] == "Pending" and pod["spec"]["containers"][0]["image"] == image
    ]


def start(pod: Json) -> None:
    pod["status"].update(phase="Running", conditions=[{"type": "Ready", "status": "True"}])
