"""A node with so many MiB left is reported and acted on alike, whatever holds the rest of its memory."""

import json
from pathlib import Path
from typing import Any

import pytest

from nodeagent.commands import check
from nodeagent.report.json_document import to_json
from tests.fake_kube import pod
from tests.support.trees import GI, MI, Node, TreePod, write_node

PODS = (TreePod("shop/hog", working_set=4 * GI), TreePod("shop/web", working_set=GI, request=GI))
CONFIGURED = """
apiVersion: nodeagent.io/v1alpha1
kind: NodeAgentConfiguration
evictionHard: {memory.available: 200Mi}
startup: {freshSamples: 1}
"""
BUILT_IN = CONFIGURED.replace("evictionHard: {memory.available: 200Mi}\n", "")
EVERY_CGROUP = pytest.mark.parametrize("cgroup", ["v2", "v1"])


def report(root: Path, node: Node, *, config: str = BUILT_IN) -> dict[str, Any]:
    """What `nodeagent check` reports of this node, whose pods the API server has listed."""
    write_node(root / "node", node)
    (root / "config.yaml").write_text(config)
    listed = [
        pod(
            each.key.partition("/")[2],
            namespace="shop",
            uid=each.cgroup_uid,
            owner=("ReplicaSet", each.key.partition("/")[2]),
            requests={"memory": str(each.request)} if each.request else {},
        )
        for each in node.pods
    ]
    (root / "pods.json").write_text(
        json.dumps({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": listed})
    )
    options = check.options_from(
        host_root=str(root / "node"), pods_file=str(root / "pods.json"), config_file=str(root / "config.yaml")
    )
    checker = check.NodeChecker(options)
    try:
        return to_json(checker.make_report())
    finally:
        checker.close()


def victims(document: dict[str, Any]) -> list[str]:
    return [each["name"] for each in document["victims"]]


def met(document: dict[str, Any]) -> set[str]:
    """The tiers of `memory.available` that are met."""
    (memory,) = [each for each in document["signals"] if each["name"] == "memory.available"]
    return {each["tier"] for each in memory["thresholds"] if each["met"]}


def condition(document: dict[str, Any]) -> str:
    (found,) = [each["status"] for each in document["conditions"] if each["type"] == "MemoryPressure"]
    return str(found)


@EVERY_CGROUP
@pytest.mark.parametrize(
    ("left_mib", "tiers", "evicted"),
    [(1100, set(), []), (301, set(), []), (299, {"soft"}, []), (201, {"soft"}, []), (199, {"soft", "hard"}, ["hog"])],
)
def test_a_gigabyte_of_slab_hides_nothing_of_what_is_left(
    tmp_path: Path, cgroup: str, left_mib: int, tiers: set[str], evicted: list[str]
) -> None:
    """8 GiB. Slab is in no working set, so the kubelet's figure is a gigabyte better."""
    node = Node(cgroup=cgroup, memory_available=left_mib * MI + GI, mem_available=left_mib * MI, pods=PODS)
    document = report(tmp_path, node)
    assert (met(document), victims(document)) == (tiers, evicted)
    assert condition(document) == ("True" if tiers else "False")


@EVERY_CGROUP
@pytest.mark.parametrize(
    ("left_mib", "tiers", "evicted"), [(1537, set(), []), (1025, {"soft"}, []), (1023, {"soft", "hard"}, ["hog"])]
)
def test_a_large_node_acts_at_the_upper_bounds(
    tmp_path: Path, cgroup: str, left_mib: int, tiers: set[str], evicted: list[str]
) -> None:
    """256 GiB: 2% would be 5 GiB."""
    pods = tuple(each._replace(working_set=40 * each.working_set) for each in PODS)
    node = Node(
        cgroup=cgroup,
        memory_total=256 * GI,
        memory_available=left_mib * MI + 2 * GI,
        mem_available=left_mib * MI,
        allocatable_limit=250 * GI,
        pods=pods,
    )
    document = report(tmp_path, node)
    assert (met(document), victims(document)) == (tiers, evicted)


@pytest.mark.parametrize("total", [8 * GI, 256 * GI])
@pytest.mark.parametrize(("left_mib", "evicted"), [(1000, []), (201, []), (199, ["hog"])])
def test_a_configured_amount_is_that_amount_on_every_node(
    tmp_path: Path, total: int, left_mib: int, evicted: list[str]
) -> None:
    node = Node(memory_total=total, memory_available=left_mib * MI, allocatable_limit=total, pods=PODS)
    assert victims(report(tmp_path, node, config=CONFIGURED)) == evicted


@EVERY_CGROUP
@pytest.mark.parametrize("left_by_kubelet_mib", [0, 50, 250])
def test_a_node_full_of_page_cache_loses_no_pod_and_says_so(
    tmp_path: Path, cgroup: str, left_by_kubelet_mib: int
) -> None:
    reader = TreePod("shop/reader", working_set=6 * GI, active_file=5 * GI)
    node = Node(
        cgroup=cgroup, memory_available=left_by_kubelet_mib * MI, mem_available=5 * GI, pods=(*PODS[1:], reader)
    )
    document = report(tmp_path, node)
    assert victims(document) == []
    assert condition(document) == "True", "a kubelet with such a threshold is about to evict"
    (memory,) = [each for each in document["signals"] if each["name"] == "memory.available"]
    reasons = [each["notDueReason"] for each in memory["thresholds"] if each["met"]]
    assert reasons
    assert all("no more than page cache is short" in each for each in reasons)
    assert memory["figures"]["memAvailableBytes"] == 5 * GI


@EVERY_CGROUP
@pytest.mark.parametrize("swap_free", [0, 4 * GI])
@pytest.mark.parametrize(("left_mib", "evicted"), [(4096, []), (201, []), (199, ["hog"])])
def test_full_swap_is_no_pressure_and_free_swap_averts_none(
    tmp_path: Path, cgroup: str, swap_free: int, left_mib: int, evicted: list[str]
) -> None:
    node = Node(cgroup=cgroup, memory_available=left_mib * MI, swap_total=4 * GI, swap_free=swap_free, pods=PODS)
    assert victims(report(tmp_path, node)) == evicted


@EVERY_CGROUP
def test_with_all_swap_used_the_pod_that_was_swapped_out_is_not_evicted_alone(tmp_path: Path, cgroup: str) -> None:
    """Its end would free no memory: a pod that frees some is the victim, although it uses less in all."""
    swapped = TreePod("shop/swapped", working_set=20 * MI, swap=4 * GI)
    node = Node(cgroup=cgroup, memory_available=100 * MI, swap_total=4 * GI, swap_free=0, pods=(PODS[0], swapped))
    document = report(tmp_path, node)
    assert victims(document) != ["swapped"]
    assert "hog" in victims(document)
