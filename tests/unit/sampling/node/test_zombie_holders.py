"""The pod or unit of the parents of zombies, from a real parent and from cgroup files of both versions."""

import subprocess
import sys
from pathlib import Path

import pytest

from nodeagent.model import ZombieHolder
from nodeagent.sampling.hostfs.host import Host
from nodeagent.sampling.node import zombie_holders, zombies
from nodeagent.sampling.node.zombies import ParentZombies, Zombies

UID = "1f0e2d3c-4b5a-4678-9abc-def012345678"
POD = f"/kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice/cri-containerd-ab.scope"
KUBELET = "0::/system.slice/kubelet.service\n"
KUBELET_V1 = "12:pids:/system.slice/kubelet.service\n3:cpu,cpuacct:/\n1:name=systemd:/system.slice/kubelet.service\n"


def process(root: Path, pid: int, cgroup: str, command: str = "sh") -> None:
    (root / f"proc/{pid}").mkdir(parents=True)
    (root / f"proc/{pid}/cgroup").write_text(cgroup)
    (root / f"proc/{pid}/comm").write_text(f"{command}\n")
    (root / f"proc/{pid}/stat").write_text(f"{pid} ({command}) S 1 1 1 0 -1 4194560 0 0\n")


def named(root: Path, *parents: ParentZombies) -> tuple[ZombieHolder, ...]:
    counted = Zombies(sum(each.zombies for each in parents), parents, complete=True)
    found = zombie_holders.name_holders(Host(str(root)), counted)
    assert (found.total, found.complete) == (counted.total, True)
    return found.holders


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        (KUBELET, "kubelet.service"),
        (KUBELET_V1, "kubelet.service"),
        ("0::/../../system.slice/kubelet.service/sub\n", "kubelet.service"),
        ("0::/user.slice/user-0.slice/session-3.scope\n", "session-3.scope"),
        ("0::/podruntime/kubelet\n", "/podruntime/kubelet"),
        ("0::/\n", "/"),
    ],
)
def test_a_parent_outside_of_pods_is_named_by_its_unit(tmp_path: Path, cgroup: str, unit: str) -> None:
    process(tmp_path, 7, cgroup, "kubelet")
    assert named(tmp_path, ParentZombies(7, 40)) == (ZombieHolder(40, "", unit, 7, "kubelet"),)


def test_the_parents_of_one_pod_and_of_one_unit_are_one_holder_each(tmp_path: Path) -> None:
    process(tmp_path, 7, KUBELET)
    process(tmp_path, 8, f"0::{POD}\n", "web")
    process(tmp_path, 9, f"0::{POD}\n")
    process(tmp_path, 10, KUBELET)
    parents = (ParentZombies(8, 30), ParentZombies(7, 20), ParentZombies(9, 10), ParentZombies(10, 5))
    assert named(tmp_path, *parents) == (
        ZombieHolder(40, UID, "", 8, "web"),
        ZombieHolder(25, "", "kubelet.service", 7, "sh"),
    )


def test_a_parent_that_is_gone_or_not_visible_has_neither_pod_nor_unit(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    assert named(tmp_path, ParentZombies(0, 3), ParentZombies(7, 2)) == (ZombieHolder(5, "", "", 0, ""),)
    (tmp_path / "proc/7").mkdir()
    (tmp_path / "proc/7/cgroup").write_bytes(b"\xff\x00nonsense")
    [holder] = named(tmp_path, ParentZombies(7, 2))
    assert (holder.pod_uid, holder.zombies) == ("", 2)


def test_the_number_of_holders_is_bounded(tmp_path: Path) -> None:
    for pid in range(1, 40):
        process(tmp_path, pid, f"0::/system.slice/s{pid}.service\n")
    holders = named(tmp_path, *(ParentZombies(pid, pid) for pid in range(39, 0, -1)))
    assert len(holders) == zombie_holders.MAX_HOLDERS
    assert holders[0].unit == "s39.service"


def test_a_real_parent_is_found() -> None:
    program = (
        "import os, sys\nfor _ in range(12):\n    os.fork() or os._exit(0)\nprint('x', flush=True)\nsys.stdin.read()"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        parent.stdout.readline()
        counted = zombies.count_zombies(Host("/"))
        assert counted is not None
        own = counted._replace(parents=tuple(each for each in counted.parents if each.pid == parent.pid))
        [holder] = zombie_holders.name_holders(Host("/"), own).holders
        assert (holder.pid, holder.command[:6]) == (parent.pid, "python")
        assert holder.unit or holder.pod_uid
        assert holder.zombies <= 12
    finally:
        parent.kill()
        parent.communicate()
