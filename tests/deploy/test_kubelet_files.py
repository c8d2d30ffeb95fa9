"""The DaemonSet's mounts show the kubelet's thresholds of each distribution, where needed with a patch of
examples/kubelet."""

import shutil
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from nodeagent.sampling.hostfs.host import open_host
from nodeagent.sampling.node import kubelet_config
from nodeagent.sampling.node.kubelet_config import KubeletReading
from tests.support import manifests
from tests.support.manifests import Document
from tests.support.paths import DATA
from tests.support.trees import Node, write_node

WITHOUT_PATCH: Final = ("aks-8gib", "aks-16gib", "aks-64gib", "kubeadm")
PATCHES: Final = {
    "eks": "eks",
    "gke": "gke",
    "k3s-1.31": "k3s",
    "k3s-1.32": "k3s",
    "openshift": "openshift",
    "rke2": "rke2",
    "talos": "talos",
}
"""By recorded configuration."""
NOT_MOUNTED: Final = {
    "k3s-1.32-arguments": "a data directory of its own",
    "kubeadm-drop-ins": "drop-ins are an option of the administrator",
}


def mounts(daemonset: Document) -> dict[str, str]:
    """Host path and path in the container of each hostPath volume."""
    spec = daemonset["spec"]["template"]["spec"]
    paths = {volume["name"]: volume["hostPath"]["path"] for volume in spec["volumes"] if "hostPath" in volume}
    mounted = {mount["name"]: mount["mountPath"] for mount in manifests.container(daemonset)["volumeMounts"]}
    return {path: mounted[name] for name, path in paths.items()}


def seen_in_the_container(distribution: str, daemonset: Document, scratch: Path) -> KubeletReading:
    """What the agent reads of the recorded kubelet, on a host of which it sees the mounts alone."""
    recorded: dict[str, Any] = yaml.safe_load((DATA / "kubelet" / f"{distribution}.yaml").read_text(encoding="utf-8"))
    host, container = scratch / "host", scratch / "container"
    host.mkdir()
    write_node(host, Node())
    (host / "var/lib/rancher/k3s/agent/etc").mkdir(parents=True)
    lines = [*recorded.get("others", ()), recorded["arguments"]]
    files = {f"/proc/{100 + number}/cmdline": "\0".join(words) + "\0" for number, words in enumerate(lines)}
    files[f"/sys/fs/cgroup/{recorded['cgroup']}/cgroup.procs"] = "".join(f"{100 + n}\n" for n in range(len(lines)))
    for path, content in {**files, **recorded["files"]}.items():
        (host / path.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        (host / path.lstrip("/")).write_text(content)
    for path, inside in mounts(daemonset).items():
        source, target = host / path.lstrip("/"), container / inside.removeprefix("/host/")
        assert inside == f"/host{path}" or path == "/run/nodeagent"
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True)
        elif source.exists():
            shutil.copy(source, target)
    return kubelet_config.read_thresholds(open_host(str(container)), recorded.get("node_args", ()))


def test_each_recorded_configuration_and_each_patch_is_judged_here() -> None:
    recorded = {path.stem for path in (DATA / "kubelet").glob("*.yaml")}
    assert recorded == {*WITHOUT_PATCH, *PATCHES, *NOT_MOUNTED}
    assert {path.stem for path in manifests.KUBELET_PATCHES.iterdir()} == set(PATCHES.values())


@pytest.mark.parametrize("distribution", WITHOUT_PATCH)
def test_the_installation_knows_the_thresholds(distribution: str, tmp_path: Path) -> None:
    reading = seen_in_the_container(distribution, manifests.document_of("DaemonSet"), tmp_path)
    assert reading.known
    assert reading.notes == ()


@pytest.mark.parametrize("distribution", PATCHES)
def test_with_its_patch_it_knows_those_of_each_other_distribution(distribution: str, tmp_path: Path) -> None:
    patched = manifests.with_kubelet_files(PATCHES[distribution])
    reading = seen_in_the_container(distribution, patched, tmp_path)
    assert reading.known
    assert reading.notes == ()


@pytest.mark.parametrize("distribution", [*PATCHES, *NOT_MOUNTED])
def test_without_the_patch_it_says_that_they_are_not_known_and_what_to_do(distribution: str, tmp_path: Path) -> None:
    reading = seen_in_the_container(distribution, manifests.document_of("DaemonSet"), tmp_path)
    assert reading.known is None
    [note] = reading.notes
    assert note.message.startswith("configuration not known, defaults assumed: ")
    assert note.message.endswith("; in a container mount it read-only, as examples/kubelet does")


def test_a_patch_adds_read_only_mounts_below_the_host_root_and_nothing_else() -> None:
    plain = mounts(manifests.document_of("DaemonSet"))
    for path in sorted(manifests.KUBELET_PATCHES.iterdir()):
        patched = manifests.with_kubelet_files(path.stem)
        added = mounts(patched).keys() - plain.keys()
        assert added
        spec = patched["spec"]["template"]["spec"]
        for volume in spec["volumes"]:
            if volume.get("hostPath", {}).get("path") in added:
                assert volume["hostPath"]["type"] in ("Directory", "File"), "never create a path on the node"
        new = [each for each in manifests.container(patched)["volumeMounts"] if each["mountPath"][5:] in added]
        assert len(new) == len(added)
        assert all(each["readOnly"] for each in new)
        text = path.read_text(encoding="utf-8")
        assert f"--patch-file examples/kubelet/{path.name}" in text
