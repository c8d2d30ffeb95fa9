"""What the end-to-end suite chooses on nodes and clusters of any kind."""

import re

import pytest
import yaml

from nodeagent.config import load
from tests.e2e import cluster, daemonset
from tests.fake_kube import Json
from tests.support.paths import REPOSITORY


def node(name: str = "n1", *, kubelet: str = "v1.36.2", runtime: str = "containerd://2.1.0", **spec: object) -> Json:
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/os": "linux"}},
        "spec": spec,
        "status": {
            "conditions": [{"type": "Ready", "status": "True"}],
            "nodeInfo": {"kubeletVersion": kubelet, "containerRuntimeVersion": runtime},
        },
    }


NODES = {
    "kubeadm": node(),
    "k3s": node(kubelet="v1.33.1+k3s1", runtime="containerd://2.0.5-k3s1"),
    "rke2": node(kubelet="v1.33.1+rke2r1", runtime="containerd://2.0.5-k3s1"),
    "talos": node(),
    "openshift": node(kubelet="v1.33.4", runtime="cri-o://1.33.4-2.rhaos4.20"),
    "eks": node(kubelet="v1.33.5-eks-113cf36", runtime="containerd://1.7.27"),
    "gke": node(kubelet="v1.33.5-gke.1080000", runtime="containerd://2.0.6"),
    "aks": node(runtime="containerd://1.7.28-1"),
}


def test_the_images_of_every_distribution_of_the_chart_are_found() -> None:
    helpers = (REPOSITORY / "charts" / "nodeagent" / "templates" / "_helpers.tpl").read_text("utf-8")
    charts = dict(re.findall(r'"(\w+)" \(dict "kubelet" "[^"]+" "images" "([^"]+)"', helpers))
    assert {name: daemonset.image_dir(each, {}) for name, each in NODES.items()} == charts


@pytest.mark.parametrize(
    ("of", "sampling", "images"),
    [
        (node(kubelet="v1.33.1+k3s1", runtime="docker://28.1.1"), {}, "/var/lib/docker"),
        (NODES["openshift"], {"imageDir": "/data/images"}, "/data/images"),
        ({"status": {}}, {}, "/var/lib/containerd"),
    ],
)
def test_the_images_are_where_the_sampling_or_the_runtime_has_them(of: Json, sampling: Json, images: str) -> None:
    assert daemonset.image_dir(of, sampling) == images


def installed(on: Json, sampling: Json) -> tuple[Json, Json, dict[str, tuple[str, str]]]:
    """The configuration, the pod, and for each volume of the host where it is and where it is mounted."""
    documents = {each["kind"]: each for each in yaml.safe_load_all((REPOSITORY / "daemonset.yaml").read_text("utf-8"))}
    made = {
        kind: daemonset.on_one_node(documents[kind], on, sampling, "nodeagent:e2e", ["default", "kube-system"])
        for kind in ("ConfigMap", "DaemonSet")
    }
    pod = made["DaemonSet"]["spec"]["template"]["spec"]
    mounts = {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
    places = {v["name"]: (v["hostPath"]["path"], mounts[v["name"]]) for v in pod["volumes"] if "hostPath" in v}
    return yaml.safe_load(made["ConfigMap"]["data"]["config.yaml"]), pod, places


def test_the_daemonset_has_the_directories_of_its_node() -> None:
    config, pod, places = installed(NODES["k3s"], {"kubeletDir": "/data/kubelet"})
    images = "/var/lib/rancher/k3s/agent/containerd"
    assert places["images"] == (images, f"/host{images}")
    assert places["kubelet"] == ("/data/kubelet", "/host/data/kubelet")
    assert places["pod-logs"] == ("/var/log/pods", "/host/var/log/pods")
    assert config["sampling"] == {"kubeletDir": "/data/kubelet", "imageDir": images}
    assert pod["containers"][0]["image"] == "nodeagent:e2e"

    config, _, places = installed(NODES["openshift"], {})
    assert places["images"] == ("/var/lib/containers", "/host/var/lib/containers")
    assert "imageDir" not in config["sampling"], "the agent finds it"


def test_the_daemonset_of_the_suite_evicts_no_pod_of_the_cluster() -> None:
    """Neither by pressure nor, on a full node, by its priority."""
    config, pod, _ = installed(NODES["kubeadm"], {})
    assert "priorityClassName" not in pod
    settings = load.loads(yaml.safe_dump(config)).config
    assert {str(each.value.text) for each in settings.thresholds} == {"1Mi", "1"}
    assert settings.protection.namespaces == ("default", "kube-system")


SCC = 'Error creating: pods "nodeagent-" is forbidden: unable to validate against any security context constraint: []'
QUOTA = "Error creating: insufficient quota to match these scopes: [{PriorityClass In [system-node-critical]}]"
MOUNT = (
    'MountVolume.SetUp failed for volume "images" : hostPath type check failed: /var/lib/containerd is not a directory'
)


@pytest.mark.parametrize(
    ("reason", "message", "known"),
    [
        ("FailedCreate", SCC, True),
        ("FailedCreate", QUOTA, True),
        ("FailedCreate", 'admission webhook "validate.kyverno.svc-fail" denied the request: no hostPath', True),
        ("FailedMount", MOUNT, True),
        ("FailedMount", 'MountVolume.SetUp failed for volume "config" : configmap "nodeagent" not found', False),
        ("FailedCreate", "Error creating: Internal error occurred", False),
        ("Unhealthy", "Readiness probe failed: HTTP probe failed with statuscode: 503", False),
    ],
)
def test_an_event_that_is_about_the_cluster_is_no_failure_of_the_agent(reason: str, message: str, known: bool) -> None:
    why = daemonset.why_not_started({}, [{"reason": reason, "message": message}])
    assert why == (f"{reason}: {message}" if known else "")


@pytest.mark.parametrize(
    ("status", "known"),
    [
        ({"conditions": [{"type": "PodScheduled", "message": "0/1 nodes are available: 1 Insufficient cpu."}]}, True),
        ({"conditions": [{"type": "PodScheduled", "message": "1 node(s) didn't match Pod's node affinity"}]}, False),
        ({"containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff", "message": "denied"}}}]}, True),
        ({"containerStatuses": [{"state": {"waiting": {"reason": "CrashLoopBackOff", "message": "exit 1"}}}]}, False),
        ({}, False),
    ],
)
def test_a_full_node_and_a_missing_image_are_no_failure_of_the_agent(status: Json, known: bool) -> None:
    assert bool(daemonset.why_not_started({"status": status}, [])) is known


def test_a_linux_node_that_any_pod_may_be_scheduled_to_is_preferred() -> None:
    tainted = node("tainted", taints=[{"key": "dedicated", "effect": "NoSchedule"}])
    preferred = node("preferred", taints=[{"key": "spot", "effect": "PreferNoSchedule"}])
    cordoned = node("cordoned", unschedulable=True)
    windows, virtual = node("windows"), node("virtual")
    windows["metadata"]["labels"] = {"kubernetes.io/os": "windows"}
    virtual["metadata"]["labels"]["type"] = "virtual-kubelet"
    lost: Json = {"metadata": {"name": "lost"}, "spec": {}, "status": {}}
    found = cluster.usable_nodes([windows, lost, tainted, virtual, cordoned, preferred])
    assert [each["metadata"]["name"] for each in found] == ["preferred", "tainted", "cordoned"]


@pytest.mark.parametrize(("version", "minor"), [("v1.36.2", 36), ("v1.33.5-gke.1080000", 33), ("v1.34.1+k3s1", 34)])
def test_the_minor_version_of_any_distribution_is_read(version: str, minor: int) -> None:
    assert cluster.minor_of(version) == minor
