"""The hierarchies, the place of the pods in them, and the numbers in a cgroup's files."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.sampling.hostfs import cgroups
from nodeagent.sampling.hostfs.cgroups import MemoryV1, MemoryV2
from nodeagent.sampling.hostfs.host import Host, open_host
from nodeagent.sampling.hostfs.parse import line_starts, parse_count, parse_keyed, parse_percent
from tests.support.trees import Node, TreePod, write_node

UID = "2fc932ce-fdcc-454b-97bd-aadfdeb4c340"
HEX64 = "0123456789abcdef" * 4
V2_STAT = b"anon 100\nfile 70\nkernel 30\nsock 5\nshmem 7\nfile_dirty 3\nfile_writeback 1\n" + (
    b"inactive_file 40\nslab_reclaimable 10\n"
)


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


# --- memory files


def test_v2_memory_is_split_into_working_set_and_unreclaimable_memory() -> None:
    numbers = MemoryV2().numbers(b"200\n", V2_STAT)
    assert numbers[:4] == (200, 160, 100 + (30 - 10) + 7 + 5 + 3 + 1, "")


def test_v2_file_cache_is_what_can_be_dropped_without_writing() -> None:
    assert MemoryV2().numbers(b"200\n", V2_STAT + b"active_file 20\n").file_cache == 40 + 20 - 3 - 1
    assert MemoryV2().numbers(b"200\n", V2_STAT).file_cache is None
    dirty = b"inactive_file 1\nactive_file 1\nfile_dirty 9\nanon 1\n"
    assert MemoryV2().numbers(b"200\n", dirty).file_cache == 0


LOCKED = "{0}cache 900\n{0}file 900\n{0}shmem 100\n{0}active_file 50\n{0}inactive_file 50\n{0}unevictable {1}\n"
"""Of 900 pages 700 are on no list of file pages."""


@pytest.mark.parametrize(("files", "prefix", "anon"), [(MemoryV1(), "total_", "total_rss"), (MemoryV2(), "", "anon")])
def test_locked_file_pages_are_unreclaimable(files: cgroups.MemoryFiles, prefix: str, anon: str) -> None:
    """A pod that locks files (mlock) holds memory that only its end frees."""

    def unreclaimable(unevictable: int, more: str = "") -> int | None:
        stat = LOCKED.format(prefix, unevictable) + f"{anon} 10\n" + more
        return files.numbers(b"910\n", stat.encode()).unreclaimable

    assert unreclaimable(0) == 10 + 100, "pages that are on no list yet are not locked"
    assert unreclaimable(300) == 10 + 100 + 300
    assert unreclaimable(9999) == 10 + 100 + 700, "locked anonymous pages count as anonymous"
    assert unreclaimable(9999, f"{prefix}swapcached 200\n") == 10 + 100 + 500
    dirty = "dirty" if prefix else "file_dirty"
    assert unreclaimable(300, f"{prefix}{dirty} 20\n") == 10 + 100 + 300, "locked and dirty pages count once"


def test_v2_pages_in_swap_and_in_memory_are_known_as_such() -> None:
    assert MemoryV2().numbers(b"200\n", V2_STAT + b"swapcached 20\n").swap_cached == 20
    assert MemoryV2().numbers(b"200\n", V2_STAT).swap_cached == 0


def test_v1_swap_is_that_of_the_descendants_too() -> None:
    stat = b"swap 1\ntotal_inactive_file 40\ntotal_active_file 9\ntotal_rss 100\ntotal_swap 30\n"
    assert (MemoryV1().numbers(b"200\n", stat).swap, MemoryV1().numbers(b"200\n", stat).file_cache) == (30, None)
    assert MemoryV1().numbers(b"200\n", stat.replace(b"total_swap", b"total_swapx")).swap is None


def test_v2_root_usage_is_anon_and_file() -> None:
    assert MemoryV2().root_working_set(b"", V2_STAT) == (130, "")


@pytest.mark.parametrize("files", [MemoryV1(), MemoryV2()])
def test_a_root_without_inactive_file_leaves_the_signal_unknown(files: cgroups.MemoryFiles) -> None:
    value, reason = files.root_working_set(b"200\n", b"anon 100\nfile 70\ntotal_rss 1\n")
    assert value is None
    assert "inactive_file" in reason


def test_v2_of_an_older_kernel_sums_the_kernel_memory() -> None:
    stat = (
        b"anon 100\nfile 70\nkernel_stack 4\npagetables 3\nslab_unreclaimable 2\ninactive_file 40\nslab_reclaimable 9\n"
    )
    assert MemoryV2().numbers(b"200\n", stat).unreclaimable == 109


def test_v1_memory_includes_the_descendants() -> None:
    stat = b"inactive_file 1\nrss 1\nshmem 1\ntotal_inactive_file 40\ntotal_rss 100\ntotal_shmem 7\ntotal_dirty 3\n"
    assert MemoryV1().numbers(b"200\n", stat)[:4] == (200, 160, 110, "")


@pytest.mark.parametrize("files", [MemoryV1(), MemoryV2()])
def test_more_inactive_than_used_is_a_working_set_of_zero(files: cgroups.MemoryFiles) -> None:
    assert files.numbers(b"10\n", V2_STAT + b"total_inactive_file 40\ntotal_rss 1\n").working_set == 0


@pytest.mark.parametrize(
    "usage", [b"", b"\n", b"-5\n", b"1e9\n", b"12 13\n", b"max\n", b"0x10", b"9" * 19, b"9" * 4000]
)
@pytest.mark.parametrize("files", [MemoryV1(), MemoryV2()])
def test_an_implausible_usage_is_unknown_with_a_reason_never_zero(files: cgroups.MemoryFiles, usage: bytes) -> None:
    numbers = files.numbers(usage, V2_STAT)
    assert numbers.usage is None
    assert numbers.working_set is None
    assert files.usage in numbers.reason


@pytest.mark.parametrize("files", [MemoryV1(), MemoryV2()])
def test_a_stat_without_inactive_file_leaves_the_working_set_unknown(files: cgroups.MemoryFiles) -> None:
    numbers = files.numbers(b"200\n", b"anon 1\ntotal_rss 1\nxinactive_file 3\n")
    assert (numbers.usage, numbers.working_set) == (200, None)
    assert "inactive_file" in numbers.reason


@given(st.binary(), st.binary())
def test_any_bytes_give_memory_numbers_or_none(usage: bytes, stat: bytes) -> None:
    for files in (MemoryV1(), MemoryV2()):
        numbers = files.numbers(usage, stat)
        assert all(value is None or value >= 0 for value in numbers[:3])
        assert numbers.reason or None not in numbers[:3]
        assert files.working_set(usage, stat).value == numbers.working_set
        root = files.root_working_set(usage, stat)
        assert (root.value is None) == bool(root.reason)
        assert root.value is None or root.value >= 0


@given(st.integers(0, (1 << 62) - 1), st.integers(0, (1 << 62) - 1))
def test_what_the_kernel_writes_is_read_back(usage: int, inactive: int) -> None:
    numbers = MemoryV2().numbers(b"%d\n" % usage, b"anon 1\ninactive_file %d\nfile 2\n" % inactive)
    assert (numbers.usage, numbers.working_set) == (usage, max(0, usage - inactive))


@given(st.binary())
def test_any_bytes_give_a_number_or_none(data: bytes) -> None:
    number, share = parse_count(data), parse_percent(data)
    assert number is None or 0 <= number < 1 << 62
    assert share is None or 0.0 <= share <= 100.0


@given(
    st.lists(st.tuples(st.sampled_from(["anon", "file", "file_dirty", "anon_thp"]), st.integers(0, (1 << 62) - 1))),
    st.booleans(),
)
def test_each_field_is_the_number_of_its_own_line(lines: list[tuple[str, int]], ends: bool) -> None:
    text = "\n".join(f"{name} {number}" for name, number in lines) + "\n" * ends
    first = dict(reversed(lines))
    assert parse_keyed(text.encode(), line_starts("file", "anon")) == [first.get("file"), first.get("anon")]


@given(st.binary())
def test_any_bytes_give_a_field_or_none(data: bytes) -> None:
    [found] = parse_keyed(data, line_starts("anon"))
    assert found is None or b"anon " in data


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
