"""The end-to-end suite under pressure works: it passes against the HTTP double with a small kubelet beside it, which
gives each pod a real cgroup, a real process and a directory on a real file system.

What the suite cannot meet here is a pressure of the whole machine's memory, which its neighbours move.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.fake_kube import ApiServer, Json, node_object
from tests.support.livenode import MIB, Kubepods, container_id, needs_cgroup_v1
from tests.support.mounts import ext4
from tests.support.paths import REPOSITORY

pytestmark = [pytest.mark.real_cgroup, needs_cgroup_v1, pytest.mark.timeout(300)]

IMAGE = "registry.k8s.io/pause:3.10"
WHOLE_MACHINE = "test_pressure_costs_the_pod_that_made_it_and_is_over_when_it_is_gone[memory.available]"
TAINTS = {
    "MemoryPressure": "node.kubernetes.io/memory-pressure",
    "DiskPressure": "node.kubernetes.io/disk-pressure",
    "PIDPressure": "node.kubernetes.io/pid-pressure",
}
SUITE = REPOSITORY / "tests" / "e2e" / "test_pressure.py"


class Kubelet:
    """Starts the pods that are bound to the node, and ends those that are being deleted. It knows no pressure, and puts
    False over any other status. The taints of the control plane follow the standard conditions."""

    def __init__(self, api: ApiServer, kubepods: Kubepods, directory: Path) -> None:
        self._api = api
        self._kubepods = kubepods
        self._directory = directory
        self._started: set[str] = set()
        self._over = threading.Event()
        self._resets = api.kubelet(2.0)
        self._thread = threading.Thread(target=self._run, name="kubelet")
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._resets.set()
        self._api.wait_for(lambda: True)
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            self._api.wait_for(lambda: self._over.is_set() or self._starting() or self._ending(), 0.02)
            self._taint()
            for key, pod in self._starting():
                self._start(key, pod["metadata"]["uid"], pod["spec"]["containers"][0].get("volumeMounts", ()))
            for key, pod in self._ending():
                self._end(key, pod["metadata"]["uid"])

    def _taint(self) -> None:
        """What the node lifecycle controller does within 10 ms."""
        with self._api.store.changed:
            node = self._api.node()
            there = node["spec"].get("taints", [])
            wanted = [{"key": key, "effect": "NoSchedule"} for kind, key in TAINTS.items() if _is_true(node, kind)]
            others = [taint for taint in there if taint["key"] not in TAINTS.values()]
            if [taint for taint in there if taint not in others] != wanted:
                self._api.patch_node({"spec": {"taints": others + wanted}})

    def _starting(self) -> list[tuple[tuple[str, str], Json]]:
        return [
            (key, pod)
            for key, pod in self._pods()
            if pod["status"]["phase"] == "Pending" and "nodeName" in pod["spec"] and not _deleted(pod)
        ]

    def _ending(self) -> list[tuple[tuple[str, str], Json]]:
        return [(key, pod) for key, pod in self._pods() if _deleted(pod)]

    def _pods(self) -> list[tuple[tuple[str, str], Json]]:
        return list(self._api.store.objects["pods"].items())

    def _start(self, key: tuple[str, str], uid: str, mounts: list[Json]) -> None:
        for mount in mounts:
            (self._volumes(uid) / "kubernetes.io~empty-dir" / mount["name"]).mkdir(parents=True)
        self._kubepods.adopt(uid, subprocess.Popen(["sleep", "86400"], text=True), qos="besteffort")
        self._started.add(uid)

        def running(pod: Json) -> None:
            container = {"name": "c", "state": {"running": {}}, "containerID": f"containerd://{container_id(uid)}"}
            ready = [{"type": "Ready", "status": "True"}]
            pod["status"].update(phase="Running", conditions=ready, containerStatuses=[container])

        self._api.modify_pod(*key, running)

    def _end(self, key: tuple[str, str], uid: str) -> None:
        if uid in self._started:
            self._started.discard(uid)
            self._kubepods.kill_all(uid)
            shutil.rmtree(self._directory / "pods" / uid)
        self._api.delete_pod(*key)

    def _volumes(self, uid: str) -> Path:
        return self._directory / "pods" / uid / "volumes"


def _is_true(node: Json, kind: str) -> bool:
    return any(c["type"] == kind and c["status"] == "True" for c in node["status"]["conditions"])


def _deleted(pod: Json) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def places(kubepods: Kubepods, disk: Path) -> Json:
    for name in ("pods", "images", "logs"):
        (disk / name).mkdir()
    return {
        "cgroupRoot": f"/{kubepods.root}",
        "kubeletDir": str(disk),
        "imageDir": str(disk / "images"),
        "podLogsDir": str(disk / "logs"),
    }


def this_node() -> Json:
    node = node_object(os.uname().nodename.lower())
    node["status"]["conditions"].append({"type": "Ready", "status": "True", "reason": "KubeletReady"})
    node["status"]["images"] = [{"names": [IMAGE]}]
    return node


def run_suite(api: ApiServer, directory: Path, *arguments: str) -> str:
    """The suite's last output, having passed on a node with this much to give."""
    kubepods = Kubepods(limit=1024 * MIB)
    with ext4(directory, size_mb=1024, inodes=10_000) as disk:
        kubelet = Kubelet(api, kubepods, disk)
        try:
            environment = {
                **os.environ,
                "NODEAGENT_E2E_KUBECONFIG": str(api.kubeconfig(directory / "kubeconfig")),
                "NODEAGENT_E2E_SAMPLING": json.dumps(places(kubepods, disk)),
            }
            command = [sys.executable, "-m", "pytest", str(SUITE), "-q", "-rs", *arguments]
            finished = subprocess.run(
                command, check=False, env=environment, capture_output=True, text=True, timeout=280, cwd=SUITE.parents[2]
            )
        finally:
            kubelet.close()
            kubepods.close()
    assert finished.returncode == 0, finished.stdout[-6000:]
    return finished.stdout


def test_a_node_whose_kubelet_would_act_first_is_left_alone(tmp_path: Path) -> None:
    soft = {"memory.available": "800Mi", "nodefs.available": "600Mi"}
    with ApiServer(node=this_node(), linger_s=None) as api:
        api.kubelet_configuration = {
            "evictionHard": {"allocatableMemory.available": "700Mi"},
            "evictionSoft": soft,
            "evictionSoftGracePeriod": dict.fromkeys(soft, "1m"),
        }
        output = run_suite(api, tmp_path, "-k", "allocatableMemory or nodefs")
        assert re.search(r"^2 skipped, \d deselected", output, re.MULTILINE), output
        for signal in ("allocatableMemory.available", "nodefs.available"):
            assert re.search(rf"{re.escape(signal)} is \d+; \d+ would not be left for the node and its kubelet", output)
        assert not api.store.objects["namespaces"]
        assert not api.store.objects["pods"]


def test_the_suite_passes_under_real_pressure_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with ApiServer(node=this_node(), linger_s=None) as api:
        output = run_suite(api, tmp_path, "--deselect", f"tests/e2e/test_pressure.py::{WHOLE_MACHINE}")
        assert re.search(r"5 passed, 1 deselected", output), output[-2000:]
        assert not api.store.objects["namespaces"]
        assert not api.store.objects["pods"]
        assert "taints" not in api.node()["spec"]
        assert not [c for c in api.node()["status"]["conditions"] if c["type"].startswith("NodeAgent")]
