"""Reports of recorded nodes, held to what the kubelet on them computed at the same moment (`stats-summary.json`)."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from nodeagent.commands import check, exit_codes
from nodeagent.report import node_report
from nodeagent.report.json_document import to_json
from tests.support import schemas
from tests.support.paths import RECORDED_NODES

MIB = 1 << 20
NODES = sorted((RECORDED_NODES).iterdir())
FILL_RATE = 150 * MIB
"""Bytes per second that the writer of the imagefs recording could reach: the kubelet's sample is seconds older."""


def document(node: Path, *, pods: bool = True, **options: Any) -> dict[str, Any]:
    pods_file = str(node / "api" / "pods.json") if pods else None
    check_options = check.options_from(host_root=str(node), pods_file=pods_file, **options)
    checker = check.NodeChecker(check_options)
    try:
        made: dict[str, Any] = json.loads(json.dumps(to_json(checker.make_report()), allow_nan=False))
        return made
    finally:
        checker.close()


def by_name(made: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {signal["name"]: signal for signal in made["signals"]}


def summary(node: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((node / "kubelet" / "stats-summary.json").read_text(encoding="utf-8"))
    return loaded


def age_s(made: dict[str, Any], sample: dict[str, Any]) -> float:
    then = datetime.fromisoformat(sample["time"])
    return (datetime.fromisoformat(made["time"]) - then).total_seconds()


pytestmark = pytest.mark.parametrize("node", NODES, ids=[node.name for node in NODES])


@pytest.mark.parametrize("pods", [False, True], ids=["host alone", "with the API's pods"])
def test_the_report_of_every_recorded_node_matches_the_schema(node: Path, pods: bool) -> None:
    made = document(node, pods=pods)
    assert list(schemas.strict().iter_errors(made)) == []
    assert made["node"] == "lab-node"
    assert made["diskLayout"] == "dedicated-imagefs"


def test_signals_agree_with_the_kubelets_within_the_age_of_its_samples(node: Path) -> None:
    made, oracle = document(node), summary(node)["node"]
    signals = by_name(made)
    memory, image_fs = oracle["memory"], oracle["runtime"]["imageFs"]
    assert age_s(made, memory) <= 15
    by_working_set = made["memory"]["workingSetModel"]["availableBytes"]
    by_kernel = made["memory"]["memAvailableModel"]["availableBytes"]
    assert by_working_set == pytest.approx(memory["availableBytes"], abs=32 * MIB)
    assert signals["memory.available"]["available"] == min(by_working_set, by_kernel)
    assert signals["memory.available"]["figures"] == {
        "workingSetBytes": by_working_set,
        "memAvailableBytes": by_kernel,
        "lower": "memavailable",
    }
    assert {each["memoryModel"] for each in signals["memory.available"]["thresholds"]} == {"lower"}
    assert signals["pid.available"]["figures"] is None
    assert signals["memory.available"]["capacity"] == memory["availableBytes"] + memory["workingSetBytes"]
    assert signals["nodefs.available"]["available"] == pytest.approx(oracle["fs"]["availableBytes"], abs=MIB)
    assert signals["nodefs.available"]["capacity"] == oracle["fs"]["capacityBytes"]
    assert signals["nodefs.inodesFree"]["available"] == pytest.approx(oracle["fs"]["inodesFree"], abs=32)
    assert signals["nodefs.inodesFree"]["capacity"] == oracle["fs"]["inodes"]
    filled = image_fs["availableBytes"] - signals["imagefs.available"]["available"]
    assert -MIB <= filled <= FILL_RATE * max(1.0, age_s(made, image_fs))
    assert signals["imagefs.available"]["capacity"] == image_fs["capacityBytes"]
    assert signals["imagefs.inodesFree"]["available"] == pytest.approx(image_fs["inodesFree"], abs=32)
    limits = oracle["rlimit"]
    assert signals["pid.available"]["capacity"] == limits["maxpid"]
    assert signals["pid.available"]["available"] == pytest.approx(limits["maxpid"] - limits["curproc"], abs=16)


def test_every_pod_of_the_kubelet_is_there_with_its_working_set(node: Path) -> None:
    made = document(node)
    pods = {(pod["namespace"], pod["name"]): pod for pod in made["pods"]}
    oracle = summary(node)["pods"]
    assert len(oracle) >= 4
    for theirs in oracle:
        ours = pods[theirs["podRef"]["namespace"], theirs["podRef"]["name"]]
        assert ours["uid"] == theirs["podRef"]["uid"]
        before, now = theirs["memory"]["workingSetBytes"], ours["memoryWorkingSetBytes"]
        if ours["name"] == "disk-layer":  # it is writing, and its page cache with it
            assert before <= now <= before + FILL_RATE * age_s(made, theirs["memory"])
        else:
            assert now == pytest.approx(before, abs=2 * MIB, rel=0.02)
        if "process_stats" in theirs:
            assert ours["processCount"] >= theirs["process_stats"]["process_count"]


def test_estimated_requests_come_within_a_thousandth_of_the_node_of_the_real_ones(node: Path) -> None:
    real = {pod["uid"]: pod for pod in document(node)["pods"]}
    estimated = {pod["uid"]: pod for pod in document(node, pods=False)["pods"]}
    assert set(real) == set(estimated)
    for uid, pod in estimated.items():
        assert pod["sources"]["memoryRequestBytes"] == "estimate"
        assert real[uid]["sources"]["memoryRequestBytes"] == "api"
        # oom_score_adj has 1,000 steps over the node's 2.85 GiB, and each container is rounded.
        assert pod["memoryRequestBytes"] == pytest.approx(real[uid]["memoryRequestBytes"], abs=2 * 3 * MIB)
        assert (pod["name"], pod["namespace"]) == (real[uid]["name"], real[uid]["namespace"])


def test_the_state_is_the_recordings(node: Path) -> None:
    state = {
        "cgroupv2-calm-8pods": "ok",
        "cgroupv2-memory-pressure": "hard",  # MemAvailable is 111 MiB; the kubelet's figure is still 343
        "cgroupv2-imagefs-pressure": "hard",
    }[node.name]
    assert document(node)["state"] == state


def test_a_kubelet_with_disabled_eviction_is_reported_as_such(node: Path) -> None:
    kubelet = document(node)["kubelet"]
    assert kubelet["configuration"] == "/kubelet/configz.json"
    assert [each for each in kubelet["thresholds"] if each["verdict"] != "never met"] == []


def test_pods_can_be_ranked_for_another_signal(node: Path) -> None:
    made = document(node, signal="pid.available")
    assert made["rankedFor"] == "pid.available"
    assert made["pods"]
    assert all(pod["usage"] == pod["threadCount"] for pod in made["pods"])
    assert made["pods"][0]["keys"][0]["name"] == "projectedUsage"


def test_the_exit_code_of_a_report_is_that_of_its_state(node: Path) -> None:
    checker = check.NodeChecker(check.options_from(host_root=str(node)))
    try:
        report = checker.make_report()
    finally:
        checker.close()
    assert (
        exit_codes.exit_code_of(node_report.state(report))
        == {"ok": 0, "soft": 1, "hard": 2, "unknown": 3}[to_json(report)["state"]]
    )
