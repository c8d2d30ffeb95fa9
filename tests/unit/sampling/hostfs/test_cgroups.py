"""The hierarchies, the place of the pods in them, and the numbers in a cgroup's files."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.sampling.hostfs import cgroups
from nodeagent.sampling.hostfs.host import Host, open_host
from tests.support.trees import Node, TreePod, write_node

UID = "2fc932ce-fdcc-454b-97bd-aadfdeb4c340"
HEX64 = "0123456789abcdef" * 4

# --- hierarchies


@pytest.mark.parametrize("version", ["v1", "v2", "hybrid"])
def test_each_kind_of_hierarchy_is_detected(tmp_path: Path, version: str) -> None:
    hierarchy = cgroups.detect_hierarchy(open_host(write_node(tmp_path, Node(cgroup=version))))
    assert hierarchy.version == version
    assert hierarchy.memory == ("/sys/fs/cgroup" if version == "v2" else "/sys/fs/cgroup/memory")
    assert hierarchy.pids == ("/sys/fs/cgroup" if version == "v2" else "/sys/fs/cgroup/pids")
    assert hierarchy.unified == {"v2": "/sys/fs/cgroup", "v1": None, "hybrid": "/sys/fs/cgroup/unified"}[version]


def test_each_controller_may_be_mounted_anywhere(tmp_path: Path) -> None:
    host = Host(write_node(tmp_path, Node()))
    (tmp_path / "sys/fs/cgroup/cgroup.controllers").unlink()
    (tmp_path / "proc/1/mountinfo").write_text(
        "30 1 0:40 / /cg/mem\\040ory rw - cgroup cgroup rw,memory\n31 1 0:41 / /pids rw - cgroup none rw,cpu,pids\n"
    )
    hierarchy = cgroups.detect_hierarchy(host)
    assert (hierarchy.version, hierarchy.memory, hierarchy.pids) == ("v1", "/cg/mem ory", "/pids")


def test_a_v2_tree_mounted_elsewhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "proc/1").mkdir(parents=True)
    (tmp_path / "cg2").mkdir()
    (tmp_path / "cg2/cgroup.controllers").write_text("cpu memory pids\n")
    (tmp_path / "proc/1/mountinfo").write_text("30 1 0:40 / /cg2 rw - cgroup2 none rw\n")
    hierarchy = cgroups.detect_hierarchy(Host(str(tmp_path)))
    assert (hierarchy.version, hierarchy.memory, hierarchy.pids, hierarchy.unified) == ("v2", "/cg2", "/cg2", "/cg2")


def test_a_root_without_cgroups_has_none_with_a_reason(tmp_path: Path) -> None:
    hierarchy = cgroups.detect_hierarchy(Host(str(tmp_path)))
    assert (hierarchy.version, hierarchy.memory) == ("none", None)
    assert hierarchy.reason
    assert cgroups.find_kubepods(Host(str(tmp_path)), hierarchy) == (None, hierarchy.reason)


# --- kubepods


def _kubepods(root: str, cgroup_root: str = "") -> tuple[cgroups.Kubepods | None, str]:
    host = open_host(root)
    return cgroups.find_kubepods(host, cgroups.detect_hierarchy(host), cgroup_root=cgroup_root)


@pytest.mark.parametrize("version", ["v1", "v2", "hybrid"])
@pytest.mark.parametrize(
    ("systemd", "root", "path"),
    [
        (True, "", "/kubepods.slice"),
        (False, "", "/kubepods"),
        (True, "/kubelet", "/kubelet.slice/kubelet-kubepods.slice"),
        (False, "/kubelet", "/kubelet/kubepods"),
        (True, "/a-b/c", "/a_b.slice/a_b-c.slice/a_b-c-kubepods.slice"),
        (False, "/docker/0123/kubelet", "/docker/0123/kubelet/kubepods"),
    ],
)
def test_kubepods_is_found_without_configuration(
    tmp_path: Path, version: str, systemd: bool, root: str, path: str
) -> None:
    found, reason = _kubepods(write_node(tmp_path, Node(cgroup=version, systemd=systemd, cgroup_root=root)))
    assert found is not None, reason
    assert (found.path, found.systemd) == (path, systemd)


@pytest.mark.parametrize("systemd", [True, False])
@pytest.mark.parametrize("root", ["/kubelet", "kubelet/", "/a-b/c"])
def test_a_configured_cgroup_root_is_found_in_either_drivers_spelling(tmp_path: Path, systemd: bool, root: str) -> None:
    write_node(tmp_path, Node(systemd=systemd, pods=(TreePod("x/other"),)))
    found, reason = _kubepods(write_node(tmp_path, Node(systemd=systemd, cgroup_root=root)), root)
    assert found is not None, reason
    assert found.path.count("/") > 1


def test_a_configured_cgroup_root_that_does_not_exist_is_reported(tmp_path: Path) -> None:
    found, reason = _kubepods(write_node(tmp_path, Node()), "/elsewhere")
    assert found is None
    assert "/elsewhere" in reason


def test_of_two_kubepods_the_one_with_pods_is_used_and_the_choice_is_reported(tmp_path: Path) -> None:
    write_node(tmp_path, Node(systemd=False))
    host = open_host(write_node(tmp_path, Node(systemd=True, pods=(TreePod("a/b"), TreePod("a/c")))))
    hierarchy = cgroups.detect_hierarchy(host)
    found, _ = cgroups.find_kubepods(host, hierarchy)
    assert found is not None
    assert found.path == "/kubepods.slice"
    assert "2 pods" in found.why
    assert "/kubepods (0 pods)" in found.why
    assert any("several kubepods" in note.message for note in cgroups.hierarchy_notes(hierarchy, found))


def test_a_machine_without_kubepods_is_reported(tmp_path: Path) -> None:
    found, reason = _kubepods(write_node(tmp_path, Node(kubepods=False)))
    assert found is None
    assert "no kubelet" in reason


# --- names


@pytest.mark.parametrize(
    ("name", "uid"),
    [
        (f"pod{UID}", UID),
        (f"kubepods-burstable-pod{UID.replace('-', '_')}.slice", UID),
        (f"kubepods-pod{UID.replace('-', '_')}.slice", UID),
        (f"kubelet-kubepods-besteffort-pod{UID.replace('-', '_')}.slice", UID),
        ("kubepods-burstable-pod40752f5e63399d9c92ea85f4b6e74059.slice", "40752f5e63399d9c92ea85f4b6e74059"),
        ("pod40752f5e63399d9c92ea85f4b6e74059", "40752f5e63399d9c92ea85f4b6e74059"),
        ("kubepods-burstable.slice", None),
        ("kubelet-kubepods.slice", None),
        ("pods", None),
        ("podman-1234.scope", None),
        ("pod", None),
        ("", None),
    ],
)
def test_a_pods_uid_is_in_its_cgroups_name(name: str, uid: str | None) -> None:
    assert cgroups.pod_uid(name) == uid


@pytest.mark.parametrize(
    ("name", "identity"),
    [
        (f"cri-containerd-{HEX64}.scope", HEX64),
        (f"crio-{HEX64}.scope", HEX64),
        (f"docker-{HEX64}.scope", HEX64),
        (HEX64, HEX64),
        (f"crio-conmon-{HEX64}.scope", None),
        ("init.scope", None),
        ("0x" + HEX64[2:], None),
        ("_".join([HEX64[:32], HEX64[:31]]), None),
        (HEX64.upper(), None),
        ("٣" * 64, None),
    ],
)
def test_a_containers_id_is_in_its_cgroups_name(name: str, identity: str | None) -> None:
    assert cgroups.container_id(name) == identity


@given(st.text())
def test_any_name_is_parsed_without_an_exception(name: str) -> None:
    for result in (cgroups.pod_uid(name), cgroups.qos_of(name), cgroups.container_id(name)):
        assert result is None or result


def test_the_descendants_of_a_cgroup_are_bounded_and_marked_as_complete_or_not(tmp_path: Path) -> None:
    for index in range(30):
        (tmp_path / f"top/wide/{index}").mkdir(parents=True)
    (tmp_path / "top/next").mkdir()
    host = Host(str(tmp_path))
    whole = cgroups.cgroups_below(host, "/top", most=33)
    assert (len(whole.directories), whole.complete) == (33, True)
    assert set(whole.directories[:3]) == {"/top", "/top/wide", "/top/next"}, "level by level"
    part = cgroups.cgroups_below(host, "/top", most=32)
    assert (len(part.directories), part.complete) == (32, False)
    assert cgroups.cgroups_below(host, "/gone", most=32) == (["/gone"], True)


def test_names_too_long_for_a_path_are_left_out_and_reported(tmp_path: Path) -> None:
    deep = "import os\nfor _ in range(30): os.mkdir('d' * 200); os.chdir('d' * 200)"
    (tmp_path / "top").mkdir()
    subprocess.run([sys.executable, "-c", deep], cwd=tmp_path / "top", check=True)
    found = cgroups.cgroups_below(Host(str(tmp_path)), "/top", most=100)
    assert 15 < len(found.directories) < 25
    assert not found.complete
    subprocess.run(["rm", "-rf", tmp_path / "top"], check=True)
