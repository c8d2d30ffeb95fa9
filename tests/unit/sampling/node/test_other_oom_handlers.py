"""Other programs that kill on the same node are found and reported, with what they do."""

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.config import kubelet
from nodeagent.model import NoteKind
from nodeagent.sampling.hostfs import cgroups
from nodeagent.sampling.hostfs.host import Host, open_host
from nodeagent.sampling.node.other_oom_handlers import earlyoom_level, find_handlers, running_handlers
from tests.support.paths import RECORDED_NODES
from tests.support.trees import Node, TreePod, write_node

POD = "2fc932ce-fdcc-454b-97bd-aadfdeb4c340"


def process(root: Path, pid: int, comm: str, *words: str, cgroup: str = "/system.slice/x.service") -> None:
    directory = root / f"proc/{pid}"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "comm").write_text(f"{comm}\n")
    (directory / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in words))
    (directory / "cgroup").write_text(f"0::{cgroup}\n")


def unit(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def messages(root: Path, kubepods: str = "/kubepods.slice") -> list[str]:
    notes = find_handlers(Host(str(root)), kubepods=kubepods)
    assert {note.kind for note in notes} <= {NoteKind.OTHER_OOM_HANDLERS}
    return [note.message for note in notes]


def test_a_node_without_other_handlers_has_no_note(tmp_path: Path) -> None:
    write_node(tmp_path, Node(pods=(TreePod("default/web"),)))
    process(tmp_path, 1, "systemd", "/sbin/init")
    assert find_handlers(open_host(str(tmp_path)), kubepods="/kubepods.slice") == ()
    assert find_handlers(Host(str(tmp_path / "nowhere"))) == ()


@pytest.mark.parametrize("name", sorted(path.name for path in RECORDED_NODES.iterdir() if path.is_dir()))
def test_recorded_nodes_have_no_other_handlers(name: str) -> None:
    assert find_handlers(open_host(str(RECORDED_NODES / name)), kubepods="/kubepods.slice") == ()


def test_each_handler_is_found_by_its_process(tmp_path: Path) -> None:
    write_node(tmp_path, Node())
    process(tmp_path, 300, "systemd-oomd", "/usr/lib/systemd/systemd-oomd")
    process(tmp_path, 400, "earlyoom", "/usr/bin/earlyoom", "-r", "3600")
    process(tmp_path, 500, "oomd", "/usr/bin/oomd", "--config", "/etc/oomd.json")
    process(tmp_path, 600, "nohang", "/usr/bin/python3", "/usr/sbin/nohang", "--monitor")
    found = messages(tmp_path)
    assert [message.split(" runs ")[0] for message in found] == ["systemd-oomd", "earlyoom", "oomd", "nohang"]
    for message, pid in zip(found, (300, 400, 500, 600), strict=True):
        assert f"(PID {pid})" in message


def test_a_process_with_only_one_of_the_two_names_is_no_handler(tmp_path: Path) -> None:
    process(tmp_path, 300, "earlyoom", "/usr/bin/sleep", "1000")
    process(tmp_path, 301, "sleep", "/usr/bin/earlyoom")
    process(tmp_path, 302, "earlyoom")  # a kernel thread has no command line
    assert messages(tmp_path) == []


def test_a_handler_in_a_pod_is_reported_once_with_the_pod(tmp_path: Path) -> None:
    inside = f"/kubepods.slice/kubepods-pod{POD.replace('-', '_')}.slice/cri-containerd-{'ab' * 32}.scope"
    for pid in (800, 801):
        process(tmp_path, pid, "earlyoom", "earlyoom", cgroup=inside)
    process(tmp_path, 900, "earlyoom", "/usr/bin/earlyoom")
    found = messages(tmp_path)
    assert len(found) == 2
    assert f"(PID 800 in pod {POD})" in found[0]
    assert "(PID 900)" in found[1]


def test_processes_of_isolated_pods_may_be_left_out(tmp_path: Path) -> None:
    one, other = TreePod("default/one"), TreePod("default/other")
    write_node(tmp_path, Node(pods=(one, other)))
    unit(tmp_path, "sys/fs/cgroup/system.slice/x.service/cgroup.procs", "400\n0\n")
    host = Counting(str(tmp_path))
    running_handlers(host, isolated=frozenset({one.cgroup_uid}))
    files = (tmp_path / "sys/fs/cgroup").rglob(f"*{other.cgroup_uid.replace('-', '_')}*/*/cgroup.procs")
    in_other = {int(pid) for file in files for pid in file.read_text().split()}
    assert in_other
    assert host.read_pids == in_other | {400}
    running_handlers(host)
    assert host.read_pids > in_other, "every process"


class Counting(Host):
    """Records the processes whose command names were read."""

    read_pids: frozenset[int] = frozenset()

    def commands(self, pids: Iterable[int]) -> list[tuple[int, bytes]]:
        self.read_pids = frozenset(pids)
        return super().commands(sorted(self.read_pids))


def lives(pid: int) -> bool:
    """A process that has ended and is not waited for is in `/proc` and in no cgroup.procs."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_without_isolated_pods_every_process_of_this_machine_is_in_some_cgroup() -> None:
    host = Host("/")
    hierarchy = cgroups.detect_hierarchy(host)
    if hierarchy.pids is None and hierarchy.memory is None:
        pytest.skip(hierarchy.reason)
    before = set(host.processes())
    outside = set(cgroups.processes_outside(host, hierarchy, frozenset()))
    missed = (before & set(host.processes())) - outside
    # One that is moved to another cgroup during the walk may be in none that was still to be read.
    again = set(cgroups.processes_outside(host, hierarchy, frozenset()))
    assert {pid for pid in missed if lives(pid)} <= again


def test_the_number_of_processes_is_bounded_and_starts_with_the_oldest(tmp_path: Path) -> None:
    for pid in range(1, 51):
        (tmp_path / f"proc/{pid}").mkdir(parents=True)
    process(tmp_path, 17, "earlyoom", "earlyoom")
    process(tmp_path, 100, "nohang", "python3", "nohang")
    host = Host(str(tmp_path))
    assert [handler.name for handler in running_handlers(host, max_processes=50)] == ["earlyoom"]
    assert [handler.name for handler in running_handlers(host, max_processes=51)] == ["earlyoom", "nohang"]


# --- earlyoom ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "level"),
    [
        ("", "10% of the node's memory"),
        ("-r 60 -m 5", "5% of the node's memory"),
        ("-m4,2 -s 100", "4% of the node's memory"),
        ("-M 307200,204800", "300Mi"),
        ("-M307200 -m 3", "the lower of 3% of the node's memory and 300Mi"),
        ("--avoid (^|/)(init|kubelet)$", "10% of the node's memory"),
    ],
)
def test_the_level_of_earlyoom_is_read_from_its_arguments(arguments: str, level: str) -> None:
    assert earlyoom_level(arguments.split()) == level


@given(st.lists(st.text(max_size=8) | st.sampled_from(["-m", "-M", "-M1", "-m\u0661"]), max_size=6))
def test_any_arguments_give_a_level(words: list[str]) -> None:
    assert earlyoom_level(words)


def test_a_real_process_of_that_name_is_found(tmp_path: Path) -> None:
    program = tmp_path / "earlyoom"
    shutil.copy("/bin/cat", program)
    with subprocess.Popen([program, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as cat:
        assert cat.stdin is not None
        assert cat.stdout is not None
        cat.stdin.write(b"up\n")
        cat.stdin.flush()
        assert cat.stdout.readline() == b"up\n"  # the program runs, so its names are there
        found = [handler for handler in running_handlers(Host("/")) if handler.name == "earlyoom"]
        cat.stdin.close()
    assert [(handler.pid, handler.arguments, handler.pod_uid) for handler in found] == [
        (cat.pid, (str(program), "-"), "")
    ]


# --- systemd-oomd -----------------------------------------------------------------------------------------------------


def test_systemd_oomd_that_manages_no_unit_with_pods_does_not_kill_them(tmp_path: Path) -> None:
    process(tmp_path, 300, "systemd-oomd", "/usr/lib/systemd/systemd-oomd")
    unit(tmp_path, "usr/lib/systemd/system/user@.service.d/10-oomd.conf", "[Service]\nManagedOOMMemoryPressure=kill\n")
    (message,) = messages(tmp_path)
    assert "does not kill pods" in message


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("usr/lib/systemd/system/-.slice.d/10-oomd-root-slice-defaults.conf", "ManagedOOMSwap=kill"),
        ("etc/systemd/system/kubepods.slice.d/oomd.conf", "ManagedOOMMemoryPressure = kill"),
        ("run/systemd/transient/kubepods.slice", "ManagedOOMSwap=kill"),
    ],
)
def test_a_managed_slice_above_the_pods_is_named(tmp_path: Path, path: str, line: str) -> None:
    process(tmp_path, 300, "systemd-oomd", "/usr/lib/systemd/systemd-oomd")
    unit(tmp_path, path, f"[Slice]\n# ManagedOOMSwap=auto\n{line}\n")
    (message,) = messages(tmp_path)
    name = "-.slice" if "/-.slice" in path else "kubepods.slice"
    assert f"{name} has {line.replace(' ', '')}:" in message


def test_a_later_drop_in_or_a_hiding_file_reverts_a_setting(tmp_path: Path) -> None:
    process(tmp_path, 300, "systemd-oomd", "/usr/lib/systemd/systemd-oomd")
    unit(tmp_path, "usr/lib/systemd/system/-.slice.d/10-oomd.conf", "[Slice]\nManagedOOMSwap=kill\n")
    unit(tmp_path, "etc/systemd/system/-.slice.d/50-ours.conf", "[Slice]\nManagedOOMSwap=auto\n")
    assert "does not kill pods" in messages(tmp_path)[0]
    unit(tmp_path, "etc/systemd/system/-.slice.d/50-ours.conf", "[Slice]\n")
    assert "-.slice has ManagedOOMSwap=kill" in messages(tmp_path)[0]
    unit(tmp_path, "etc/systemd/system/-.slice.d/10-oomd.conf", "")
    assert "does not kill pods" in messages(tmp_path)[0]


def test_drop_ins_are_applied_by_their_names_whatever_directory_they_are_in(tmp_path: Path) -> None:
    process(tmp_path, 300, "systemd-oomd", "/usr/lib/systemd/systemd-oomd")
    unit(tmp_path, "etc/systemd/system/-.slice.d/10-ours.conf", "[Slice]\nManagedOOMSwap=auto\n")
    unit(tmp_path, "usr/lib/systemd/system/-.slice.d/50-oomd.conf", "[Slice]\nManagedOOMSwap=kill\n")
    assert "-.slice has ManagedOOMSwap=kill" in messages(tmp_path)[0]


def test_without_visible_processes_systemd_oomd_is_found_by_its_runtime_directory(tmp_path: Path) -> None:
    (tmp_path / "run/systemd/oom").mkdir(parents=True)
    (message,) = messages(tmp_path)
    assert message.startswith("systemd-oomd runs (/run/systemd/oom exists)")


# --- Talos, kubelet ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "has_handler"),
    [
        ('NAME="Talos"\nID=talos\nVERSION_ID=v1.12.1\n', True),
        ("ID=talos\nVERSION_ID=v1.11.5\n", False),
        ("ID=talos\n", True),
        ('ID=debian\nVERSION_ID="13"\n', False),
    ],
)
def test_talos_has_an_oom_handler_since_1_12(tmp_path: Path, release: str, has_handler: bool) -> None:
    unit(tmp_path, "etc/os-release", release)
    assert [message.startswith("Talos") for message in messages(tmp_path)] == [True] * has_handler


def test_a_kubelet_that_evicts_is_reported_with_its_thresholds_and_another_is_not(tmp_path: Path) -> None:
    on, off = kubelet.read_settings(""), kubelet.read_settings("evictionHard:\n  memory.available: 0%\n")
    host = Host(str(tmp_path))
    (note,) = find_handlers(host, kubelet=on.thresholds)
    assert "memory.available<100Mi, nodefs.available<10%" in note.message
    assert "allocatableMemory" not in note.message
    assert find_handlers(host, kubelet=off.thresholds) == ()
