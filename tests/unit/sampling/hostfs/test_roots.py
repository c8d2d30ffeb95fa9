"""Where the kubelet and containerd keep their files, by how they were started."""

from pathlib import Path

import pytest

from nodeagent.config.schema import SamplingConfig
from nodeagent.sampling.hostfs.host import FileSystem, Host, Unreadable
from nodeagent.sampling.node import filesystems


class Tree:
    """A host's root with services, all on one file system."""

    def __init__(self, top: Path) -> None:
        self.top = top

    def service(self, unit: str, pid: int, *words: str, hierarchy: str = "") -> None:
        self.file(f"sys/fs/cgroup{hierarchy}/system.slice/{unit}/cgroup.procs", f"1\n{pid}\n")
        self.file("proc/1/cmdline", "/sbin/init\0")
        self.file(f"proc/{pid}/cmdline", "\0".join(words) + "\0")

    def file(self, path: str, text: str) -> None:
        (self.top / path).parent.mkdir(parents=True, exist_ok=True)
        (self.top / path).write_text(text)

    def directory(self, path: str) -> None:
        (self.top / path.lstrip("/")).mkdir(parents=True)

    def detect(self, kubelet_dir: str = SamplingConfig().kubelet_dir) -> filesystems.Layout:
        return filesystems.detect_layout(Host(str(self.top)), SamplingConfig(kubelet_dir=kubelet_dir), self._statvfs)

    def _statvfs(self, path: str) -> FileSystem:
        if not (self.top / path.lstrip("/")).is_dir():
            raise Unreadable(path, 2, "No such file or directory")
        return FileSystem(1, 2, 3, 4, 1)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.mark.parametrize("hierarchy", ["", "/systemd", "/unified"])
@pytest.mark.parametrize("flag", [("--root-dir=/data/kubelet/",), ("--root-dir", "/data/kubelet")])
def test_a_kubelet_that_was_given_another_directory_is_followed(
    tree: Tree, hierarchy: str, flag: tuple[str, ...]
) -> None:
    tree.directory("/data/kubelet")
    tree.directory("/var/lib/containerd")
    tree.service("kubelet.service", 77, "/usr/bin/kubelet", "--v=2", *flag, hierarchy=hierarchy)
    layout = tree.detect()
    assert (layout.nodefs, layout.kubelet, layout.note) == ("/data/kubelet", "/data/kubelet", "")


def test_a_configured_directory_wins_over_the_kubelets(tree: Tree) -> None:
    tree.directory("/mine")
    tree.service("kubelet.service", 77, "kubelet", "--root-dir=/data/kubelet")
    assert tree.detect(kubelet_dir="/mine").nodefs == "/mine"


@pytest.mark.parametrize(
    "words", [("kubelet",), ("kubelet", "--root-dir"), ("kubelet", "--root-dir=rel"), ("other", "--root-dir=/x")]
)
def test_without_a_usable_flag_it_is_the_usual_one(tree: Tree, words: tuple[str, ...]) -> None:
    tree.directory("/var/lib/kubelet")
    tree.service("kubelet.service", 77, *words)
    assert tree.detect().nodefs == "/var/lib/kubelet"


@pytest.mark.parametrize(
    "words",
    [("containerd", "--root", "/data/c"), ("containerd", "--root=/data/c"), ("containerd", "-c", "/opt/c.toml")],
)
def test_containerds_root_is_what_its_command_line_or_its_own_configuration_says(
    tree: Tree, words: tuple[str, ...]
) -> None:
    tree.directory("/data/c")
    tree.file("opt/c.toml", 'root = "/data/c"\n')
    tree.file("etc/containerd/config.toml", 'root = "/elsewhere"\n')
    tree.service("containerd.service", 88, *words)
    store = tree.detect().store
    assert store is not None
    assert store.images == "/data/c"


@pytest.mark.parametrize("unit", ["k3s.service", "k3s-agent.service", "rke2-server.service", "rke2-agent.service"])
def test_a_containerd_that_a_distribution_starts_in_its_own_service_is_found(tree: Tree, unit: str) -> None:
    root = "/var/lib/rancher/agent/containerd"
    tree.directory(root)
    tree.service(unit, 99, "containerd", "-c", "/etc/c.toml", "--state", "/run/k3s/containerd", "--root", root)
    layout = tree.detect()
    assert layout.store is not None
    assert (layout.store.runtime, layout.store.images) == ("containerd", root)
