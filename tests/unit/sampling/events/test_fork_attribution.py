"""Forks count for the pods of their parents, with few reads."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.sampling.events.fork_attribution import MAX_READS, UNKNOWN_POD, ForkAttribution
from nodeagent.sampling.hostfs import processes
from nodeagent.sampling.hostfs.host import Host


def tree(root: Path, cgroups: dict[int, str]) -> Host:
    """A /proc of processes in cgroups."""
    for pid, cgroup in cgroups.items():
        directory = root / f"proc/{pid}"
        directory.mkdir(parents=True)
        (directory / "cgroup").write_text(f"0::{cgroup}\n")
        (directory / "stat").write_text(f"{pid} (x) y) S 1 1 1 0 -1 4194560 0\n")
    return Host(str(root))


POD, OTHER = "2fc932ce-fdcc-454b-97bd-aadfdeb4c340", "0b073eb9-1111-2222-3333-444455556666"
SYSTEMD = (
    "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod2fc932ce_fdcc_454b_97bd_aadfdeb4c340.slice"
    "/cri-containerd-" + "ab" * 32 + ".scope/init.scope"
)


def test_a_fork_without_its_parent_counts_for_the_childs_pod_and_without_both_as_unknown(tmp_path: Path) -> None:
    attribution = ForkAttribution(tree(tmp_path, {11: SYSTEMD}))
    forks, threads = attribution.count_by_pod([1, 2], [11, 12], [3], now=0.0)
    assert forks == {POD: 1, UNKNOWN_POD: 1}
    assert threads == {UNKNOWN_POD: 1}


class Counting(Host):
    """A host that counts its reads."""

    reads = 0

    def read(self, path: str, **options: Any) -> bytes:
        self.reads += 1
        return super().read(path, **options)


def test_a_bomb_of_a_thousand_parents_costs_a_few_reads_and_counts_for_the_pod_of_the_latest(tmp_path: Path) -> None:
    parents = [pid for pid in range(1000, 2000) for _ in range(2)]
    cgroups = dict.fromkeys(range(1500, 2000), SYSTEMD)  # the first half is gone, with its children
    tree(tmp_path, {**cgroups, 7: "/system.slice/sshd.service"})
    host = Counting(str(tmp_path))
    forks, _ = ForkAttribution(host).count_by_pod([7, 7, 7, *parents], list(range(10_000, 12_003)), [], now=0.0)
    assert host.reads <= 2 * MAX_READS
    assert sum(forks.values()) == 2003
    assert forks[processes.HOST] == 3
    assert forks[POD] >= 1900


def test_a_cached_process_is_not_read_again_until_its_pid_may_be_reused(tmp_path: Path) -> None:
    tree(tmp_path, {1: SYSTEMD})
    host = Counting(str(tmp_path))
    attribution = ForkAttribution(host)
    for at in (0.0, 0.3, 0.6, 0.9):
        assert attribution.count_by_pod([1], [100], [], now=at)[0] == {POD: 1}
    assert host.reads == 1
    attribution.count_by_pod([1], [100], [], now=1.1)
    assert host.reads == 2


@given(
    parents=st.lists(st.integers(1, 60), max_size=200),
    owners=st.lists(st.integers(1, 60), max_size=200),
    alive=st.dictionaries(st.integers(1, 60), st.sampled_from([SYSTEMD, f"/pod{OTHER}", "/system.slice"])),
)
def test_every_event_counts_once_and_the_reads_are_bounded(
    tmp_path_factory: pytest.TempPathFactory, parents: list[int], owners: list[int], alive: dict[int, str]
) -> None:
    root = tmp_path_factory.mktemp("proc")
    tree(root, alive)
    host = Counting(str(root))
    forks, threads = ForkAttribution(host).count_by_pod(parents, [pid + 1000 for pid in parents], owners, now=0.0)
    assert (sum(forks.values()), sum(threads.values())) == (len(parents), len(owners))
    assert all(number >= 0 for number in (*forks.values(), *threads.values()))
    assert {*forks, *threads} <= {POD, OTHER, processes.HOST, UNKNOWN_POD}
    assert host.reads <= 4 * MAX_READS
