"""The recorded nodes, read by us, against the numbers of their kubelet (`kubelet/stats-summary.json`).

Tolerances. The kubelet's node and pods samples are forced fresh at most 10 s before the recording, its pod samples are
up to 15 s older (KUBELET-CONTRACT, signals). What cannot change in that time (capacities, limits, process counts of
idle programs, memory of programs that had finished growing) must agree exactly; the rest within what the node's own
services move in 15 s, measured as 10 MiB at most and taken as 16 MiB, 0.5% of the node.
"""

import calendar
import json
import time
from pathlib import Path
from typing import Any

import pytest

from nodeagent.config.schema import SamplingConfig
from nodeagent.model import DiskLayout, NodeSnapshot, Observation, PodSource, PodView, QOSClass, Signal, StallScope
from nodeagent.sampling.hostfs.host import open_host
from nodeagent.sampling.sampler import Sampler
from tests.support.paths import RECORDED_NODES

NODES = sorted((RECORDED_NODES).glob("cgroupv2-*"))
MI = 1 << 20
DRIFT = 16 * MI
# Pods of programs that were writing files while the recording was made: their page cache moved by up to 18 MiB.
WRITERS = {"disk-layer": 32 * MI}

Summary = dict[str, Any]


def _summary(node: Path) -> Summary:
    summary: Summary = json.loads((node / "kubelet/stats-summary.json").read_text())
    return summary


def _sample(node: Path) -> NodeSnapshot:
    with Sampler(open_host(str(node)), SamplingConfig(), node_name="lab-node") as sampler:
        return sampler.sample()


@pytest.fixture(params=NODES, ids=lambda node: node.name)
def node(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def _by_uid(snapshot: NodeSnapshot) -> dict[str, PodView]:
    return {view.pod.uid: view for view in snapshot.pods}


def _known(observation: Observation) -> tuple[int, int]:
    assert observation.available is not None, observation.reason
    assert observation.capacity is not None
    return observation.available, observation.capacity


def test_the_three_recordings_exist() -> None:
    assert len(NODES) == 3


def test_memory_available_equals_the_kubelets(node: Path) -> None:
    theirs = _summary(node)["node"]["memory"]
    available, capacity = _known(_sample(node).observations[Signal.MEMORY])
    assert capacity == theirs["availableBytes"] + theirs["workingSetBytes"]
    assert available == pytest.approx(theirs["availableBytes"], abs=DRIFT)


def test_allocatable_memory_is_the_rest_of_the_pods_cgroup(node: Path) -> None:
    containers = _summary(node)["node"]["systemContainers"]
    theirs = next(container["memory"] for container in containers if container["name"] == "pods")
    available, capacity = _known(_sample(node).observations[Signal.ALLOCATABLE_MEMORY])
    assert capacity == theirs["availableBytes"] + theirs["workingSetBytes"]
    assert available == pytest.approx(theirs["availableBytes"], abs=DRIFT)


def test_pids_are_counted_as_threads_against_the_smaller_limit(node: Path) -> None:
    theirs = _summary(node)["node"]["rlimit"]
    available, capacity = _known(_sample(node).observations[Signal.PID])
    assert capacity == theirs["maxpid"]
    assert capacity - available == pytest.approx(theirs["curproc"], abs=5)


def test_nodefs_equals_the_kubelets(node: Path) -> None:
    theirs, observations = _summary(node)["node"]["fs"], _sample(node).observations
    available, capacity = _known(observations[Signal.NODEFS])
    assert capacity == theirs["capacityBytes"]
    assert available == pytest.approx(theirs["availableBytes"], abs=DRIFT)
    inodes_free, inodes = _known(observations[Signal.NODEFS_INODES])
    assert inodes == theirs["inodes"]
    assert inodes_free == pytest.approx(theirs["inodesFree"], abs=50)


@pytest.mark.parametrize(
    ("signal", "inodes", "which"),
    [
        (Signal.IMAGEFS, Signal.IMAGEFS_INODES, "imageFs"),
        (Signal.CONTAINERFS, Signal.CONTAINERFS_INODES, "containerFs"),
    ],
)
def test_imagefs_and_containerfs_equal_the_container_runtimes(
    node: Path, signal: Signal, inodes: Signal, which: str
) -> None:
    theirs, observations = _summary(node)["node"]["runtime"][which], _sample(node).observations
    available, capacity = _known(observations[signal])
    assert capacity == theirs["capacityBytes"]
    if "imagefs-pressure" in node.name:
        # Being filled at tens of MiB a second while the kubelet's sample was 8 s old: only less can be left.
        assert 0 < available <= theirs["availableBytes"]
    else:
        assert available == theirs["availableBytes"]
    assert _known(observations[inodes]) == (theirs["inodesFree"], theirs["inodes"])


def test_a_separate_image_disk_is_a_dedicated_imagefs(node: Path) -> None:
    snapshot = _sample(node)
    assert snapshot.layout is DiskLayout.DEDICATED_IMAGEFS
    observations = snapshot.observations
    assert observations[Signal.NODEFS].device != observations[Signal.IMAGEFS].device
    assert observations[Signal.IMAGEFS].device == observations[Signal.CONTAINERFS].device


def test_every_pod_the_kubelet_counts_is_found_and_named(node: Path) -> None:
    theirs = {pod["podRef"]["uid"]: pod["podRef"] for pod in _summary(node)["pods"]}
    ours = _by_uid(_sample(node))
    assert ours.keys() == theirs.keys()
    for uid, view in ours.items():
        assert (view.pod.namespace, view.pod.name) == (theirs[uid]["namespace"], theirs[uid]["name"])
        assert view.pod.source is PodSource.HOST


def test_a_pods_working_set_equals_the_kubelets(node: Path) -> None:
    ours = _by_uid(_sample(node))
    for pod in _summary(node)["pods"]:
        usage = ours[pod["podRef"]["uid"]].usage
        assert usage is not None
        drift = WRITERS.get(pod["podRef"]["name"], 128 << 10)
        assert usage.memory_working_set == pytest.approx(pod["memory"]["workingSetBytes"], abs=drift)
        if pod["podRef"]["name"] not in WRITERS:
            assert usage.memory_usage == pod["memory"]["usageBytes"]


def test_a_pods_processes_are_counted_without_its_sandbox(node: Path) -> None:
    ours = _by_uid(_sample(node))
    counted = 0
    for pod in _summary(node)["pods"]:
        if "process_stats" in pod:
            usage = ours[pod["podRef"]["uid"]].usage
            assert usage is not None
            assert usage.process_count == pod["process_stats"]["process_count"]
            counted += 1
    assert counted >= 4


def test_containers_are_named_and_the_sandbox_is_left_out(node: Path) -> None:
    ours = _by_uid(_sample(node))
    for pod in _summary(node)["pods"]:
        usage = ours[pod["podRef"]["uid"]].usage
        assert usage is not None
        assert [c.name for c in usage.containers] == [c["name"] for c in pod["containers"]]


def test_the_stalls_of_the_node_equal_the_kubelets(node: Path) -> None:
    theirs = _summary(node)["node"]["memory"]["psi"]
    stall = next(s for s in _sample(node).stalls if s.scope is StallScope.NODE and s.resource == "memory")
    # Totals only grow, and by no more than the time between the two readings (15 s).
    assert 0 <= stall.some_total_us - theirs["some"]["total"] <= 15_000_000
    assert stall.full_total_us is not None
    assert 0 <= stall.full_total_us - theirs["full"]["total"] <= 15_000_000


def test_requests_qos_class_and_start_are_known_without_the_api_server(node: Path) -> None:
    ours, summary = _by_uid(_sample(node)), json.loads((node / "api/pods.json").read_text())
    total = _sample(node).observations[Signal.MEMORY].capacity
    assert total is not None
    compared = 0
    for pod in summary["items"]:
        view = ours.get(pod["metadata"]["uid"])
        if view is None:
            continue
        usage = view.usage
        assert usage is not None
        assert usage.memory_request_estimate is not None
        assert usage.qos_class == pod["status"]["qosClass"]
        requests = [c["resources"].get("requests", {}).get("memory", "0Mi") for c in pod["spec"]["containers"]]
        requested = sum(int(request.removesuffix("Mi")) * MI for request in requests)
        if usage.qos_class is QOSClass.BURSTABLE:
            # The kubelet rounds down to a thousandth of the node for each container.
            assert 0 <= requested - usage.memory_request_estimate <= total // 1000 * len(requests)
        else:
            assert usage.memory_request_estimate == requested
        started = calendar.timegm(time.strptime(pod["status"]["startTime"], "%Y-%m-%dT%H:%M:%SZ"))
        assert view.pod.started_wall == pytest.approx(started, abs=10)
        compared += 1
    assert compared == len(ours)


def test_a_note_reports_that_the_node_is_recorded_and_when(node: Path) -> None:
    snapshot = _sample(node)
    assert any("is a recording of 2026-11-2" in note.message for note in snapshot.notes)
    assert snapshot.wall_time == json.loads((node / "listing/capture.json").read_text())["start"]
    assert snapshot.taken_at == float((node / "proc/uptime").read_text().split()[0])


def test_the_services_of_the_node_are_listed_beside_its_pods(node: Path) -> None:
    snapshot = _sample(node)
    containers = _summary(node)["node"]["systemContainers"]
    theirs = next(container["memory"] for container in containers if container["name"] == "kubelet")
    ours = {usage.path: usage for usage in snapshot.cgroups}
    assert ours["/system.slice/kubelet.service"].memory_working_set == pytest.approx(
        theirs["workingSetBytes"], abs=4 * MI
    )
    assert not any("kubepods" in path for path in ours)
