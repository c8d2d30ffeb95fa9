"""nodefs, imagefs and containerfs: where they are, and what is free on them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.config.schema import SamplingConfig
from nodeagent.model import DiskLayout, NodeSnapshot, Observation, Signal
from nodeagent.sampling.hostfs.host import FileSystem, Host, Unreadable, open_host
from nodeagent.sampling.node import filesystems
from nodeagent.sampling.sampler import Sampler
from tests.support.trees import GI, Node, TreeDisk, write_node


def _sample(root: str | Path, config: SamplingConfig | None = None) -> NodeSnapshot:
    with Sampler(open_host(str(root)), config or SamplingConfig(), node_name="n") as sampler:
        return sampler.sample()


def _read(root: str | Path, signal: Signal) -> Observation:
    return _sample(root).observations[signal]


def test_one_device_is_one_file_system(tmp_path: Path) -> None:
    snapshot = _sample(write_node(tmp_path, Node()))
    assert snapshot.layout is DiskLayout.SINGLE
    assert snapshot.observations[Signal.NODEFS].device == snapshot.observations[Signal.IMAGEFS].device


def test_a_split_image_store_of_cri_o_is_a_split_layout(tmp_path: Path) -> None:
    images = TreeDisk(available=1 * GI, device=(259, 3))
    root = write_node(tmp_path, Node(runtime="cri-o", imagefs=images))
    dropins = tmp_path / "etc/crio/crio.conf.d"
    dropins.mkdir(parents=True)
    (dropins / "10-store.conf").write_text(
        '[crio]\nroot = "/var/lib/kubelet"\nimagestore = "/var/lib/containers/storage"\n'
    )
    snapshot = _sample(root)
    assert snapshot.layout is DiskLayout.SPLIT
    assert snapshot.observations[Signal.IMAGEFS].available == 1 * GI
    assert snapshot.observations[Signal.CONTAINERFS].available == 50 * GI


def test_cri_o_without_a_separate_image_store_has_one_imagefs(tmp_path: Path) -> None:
    snapshot = _sample(write_node(tmp_path, Node(runtime="cri-o", imagefs=TreeDisk(device=(259, 3)))))
    assert snapshot.layout is DiskLayout.DEDICATED_IMAGEFS
    assert "/var/lib/containers/storage" in snapshot.observations[Signal.IMAGEFS].source


def test_the_configured_root_of_the_container_runtime_is_used(tmp_path: Path) -> None:
    root = write_node(tmp_path, Node())
    (tmp_path / "data/images").mkdir(parents=True)
    (tmp_path / "etc/containerd").mkdir(parents=True)
    (tmp_path / "etc/containerd/config.toml").write_text(
        "version = 3\nroot = '/data/images' # here\n[plugins.x]\nroot = \"/elsewhere\"\n"
    )
    assert "/data/images" in _read(root, Signal.IMAGEFS).source


def test_a_configured_image_directory_overrides_all(tmp_path: Path) -> None:
    root = write_node(tmp_path, Node(runtime=""))
    (tmp_path / "images").mkdir()
    assert _sample(root, SamplingConfig(image_dir="/images")).observations[Signal.IMAGEFS].available == 50 * GI


def test_without_a_container_runtime_imagefs_is_unknown_with_a_reason(tmp_path: Path) -> None:
    snapshot = _sample(write_node(tmp_path, Node(runtime="")))
    assert snapshot.layout is DiskLayout.UNKNOWN
    for signal in (Signal.IMAGEFS, Signal.CONTAINERFS_INODES):
        assert snapshot.observations[signal].available is None
        assert "no container runtime" in snapshot.observations[signal].reason
    assert snapshot.observations[Signal.NODEFS].available == 50 * GI


def test_of_two_container_runtimes_the_one_with_a_socket_is_used(tmp_path: Path) -> None:
    root = write_node(tmp_path, Node(runtime="cri-o"))
    (tmp_path / "var/lib/containerd").mkdir()
    (tmp_path / "run/crio").mkdir(parents=True)
    (tmp_path / "run/crio/crio.sock").touch()
    snapshot = _sample(root)
    assert "/var/lib/containers/storage" in snapshot.observations[Signal.IMAGEFS].source
    assert any("several container runtimes" in note.message for note in snapshot.notes)


def test_without_a_kubelet_nodefs_is_the_nearest_parent_with_a_remark(tmp_path: Path) -> None:
    root = write_node(tmp_path, Node())
    (tmp_path / "var/lib/kubelet").rmdir()
    snapshot = _sample(root)
    assert snapshot.observations[Signal.NODEFS].source == "statvfs /var/lib"
    assert any("the file system of its parent" in note.message for note in snapshot.notes)


def test_a_file_system_without_fixed_inodes_has_no_inode_signal(tmp_path: Path) -> None:
    observation = _read(write_node(tmp_path, Node(nodefs=TreeDisk(inodes=0, inodes_free=0))), Signal.NODEFS_INODES)
    assert observation.available is None
    assert "no fixed inodes" in observation.reason


def test_a_file_system_that_does_not_answer_is_unknown(tmp_path: Path) -> None:
    host = open_host(write_node(tmp_path, Node(imagefs=TreeDisk(device=(8, 1)))))

    def late(path: str) -> FileSystem:
        if "containerd" in path:
            raise Unreadable(path, 110, "no answer within 1 s")
        return host.statvfs(path)

    with Sampler(host, SamplingConfig(), node_name="n", statvfs=late) as sampler:
        snapshot = sampler.sample()
    assert snapshot.layout is DiskLayout.UNKNOWN
    assert snapshot.observations[Signal.NODEFS].available == 50 * GI
    assert "no answer" in snapshot.observations[Signal.IMAGEFS].reason


@given(st.text(), st.sampled_from(["", "crio"]))
def test_any_text_gives_a_toml_string_or_none(text: str, section: str) -> None:
    value = filesystems.toml_string(text, section, "root")
    assert value is None or value in text


# --- directories by the command lines of kubelet and containerd


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
def test_the_root_directory_of_the_running_kubelet_is_used(tree: Tree, hierarchy: str, flag: tuple[str, ...]) -> None:
    tree.directory("/data/kubelet")
    tree.directory("/var/lib/containerd")
    tree.service("kubelet.service", 77, "/usr/bin/kubelet", "--v=2", *flag, hierarchy=hierarchy)
    layout = tree.detect()
    assert (layout.nodefs, layout.kubelet, layout.note) == ("/data/kubelet", "/data/kubelet", "")


def test_a_configured_directory_overrides_the_kubelets(tree: Tree) -> None:
    tree.directory("/mine")
    tree.service("kubelet.service", 77, "kubelet", "--root-dir=/data/kubelet")
    assert tree.detect(kubelet_dir="/mine").nodefs == "/mine"


@pytest.mark.parametrize(
    "words", [("kubelet",), ("kubelet", "--root-dir"), ("kubelet", "--root-dir=rel"), ("other", "--root-dir=/x")]
)
def test_without_a_usable_flag_the_default_directory_is_used(tree: Tree, words: tuple[str, ...]) -> None:
    tree.directory("/var/lib/kubelet")
    tree.service("kubelet.service", 77, *words)
    assert tree.detect().nodefs == "/var/lib/kubelet"


@pytest.mark.parametrize(
    "words",
    [("containerd", "--root", "/data/c"), ("containerd", "--root=/data/c"), ("containerd", "-c", "/opt/c.toml")],
)
def test_containerds_root_comes_from_its_command_line_or_its_configuration(tree: Tree, words: tuple[str, ...]) -> None:
    tree.directory("/data/c")
    tree.file("opt/c.toml", 'root = "/data/c"\n')
    tree.file("etc/containerd/config.toml", 'root = "/elsewhere"\n')
    tree.service("containerd.service", 88, *words)
    store = tree.detect().store
    assert store is not None
    assert store.images == "/data/c"


@pytest.mark.parametrize("unit", ["k3s.service", "k3s-agent.service", "rke2-server.service", "rke2-agent.service"])
def test_a_containerd_in_the_service_of_a_distribution_is_found(tree: Tree, unit: str) -> None:
    root = "/var/lib/rancher/agent/containerd"
    tree.directory(root)
    tree.service(unit, 99, "containerd", "-c", "/etc/c.toml", "--state", "/run/k3s/containerd", "--root", root)
    layout = tree.detect()
    assert layout.store is not None
    assert (layout.store.runtime, layout.store.images) == ("containerd", root)
