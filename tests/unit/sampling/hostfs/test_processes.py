"""The processes of a cgroup, and the pod of a process."""

import os
from pathlib import Path

import pytest

from nodeagent.sampling.hostfs import processes
from nodeagent.sampling.hostfs.host import Host
from tests.support.pod_cgroups import NEEDS, PodCgroups, usable

POD, OTHER = "2fc932ce-fdcc-454b-97bd-aadfdeb4c340", "0b073eb9-1111-2222-3333-444455556666"
SYSTEMD = (
    "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod2fc932ce_fdcc_454b_97bd_aadfdeb4c340.slice"
    "/cri-containerd-" + "ab" * 32 + ".scope/init.scope"
)


@pytest.mark.skipif(not usable(), reason=NEEDS)
@pytest.mark.real_cgroup
def test_a_real_process_has_the_pod_of_its_cgroup(pods: PodCgroups) -> None:
    uid = pods.pod()
    process = pods.run(uid, "sys.stdin.read()")
    host = Host("/")
    assert processes.pod_uid_of_process(host, process.pid) == uid
    assert processes.pod_uid_of_process(host, os.getpid()) == processes.HOST
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, not yet reaped: the kernel shows it in the root
    assert processes.pod_uid_of_process(host, process.pid) is None
    process.communicate()
    assert processes.pod_uid_of_process(host, process.pid) is None


def test_pods_of_both_drivers_the_host_and_the_root_are_distinguished(tmp_path: Path) -> None:
    cgroups = {
        1: SYSTEMD,
        2: f"/kubepods/besteffort/pod{OTHER}/{'cd' * 32}",
        3: "/system.slice/podman.service",
        4: "/",
    }
    for pid, cgroup in cgroups.items():
        directory = tmp_path / f"proc/{pid}"
        directory.mkdir(parents=True)
        (directory / "cgroup").write_text(f"0::{cgroup}\n")
        (directory / "stat").write_text(f"{pid} (x) y) S 1 1 1 0 -1 4194560 0\n")
    found = [processes.pod_uid_of_process(Host(str(tmp_path)), pid) for pid in (1, 2, 3, 4, 5)]
    assert found == [POD, OTHER, processes.HOST, processes.HOST, None]


def test_processes_below_a_cgroup_are_those_of_its_descendants_too(tmp_path: Path) -> None:
    inner = tmp_path / "pod/container/init.scope"
    inner.mkdir(parents=True)
    (tmp_path / "pod/cgroup.procs").write_text("7\n")
    (inner.parent / "cgroup.procs").write_text("8\n9\n")
    (inner / "cgroup.procs").write_text("10\n")
    found = processes.processes_below(Host("/"), str(tmp_path / "pod"))
    assert found == processes.CgroupProcesses([7, 8, 9, 10], complete=True)
    assert not processes.processes_below(Host("/"), str(tmp_path / "pod"), max_cgroups=2).complete
    (inner / "cgroup.procs").write_text("0\n")
    assert not processes.processes_below(Host("/"), str(tmp_path / "pod")).complete, "outside our PID namespace"
    (inner / "cgroup.procs").write_bytes(b"\0\n-1\n" + b"9" * 5000 + b"\nx\n11\n")
    assert processes.processes_below(Host("/"), str(tmp_path / "pod")).pids == [7, 8, 9, 11]
