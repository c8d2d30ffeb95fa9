"""The races for disks and PIDs: when one is lost, what the table has, and the programs that run in the machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import shortages
from benchmarks.shortages import Result
from tests.support.livenode import MIB
from tests.support.mounts import ext4
from tests.vm import disk_kubelet, load

WON = Result(True, 0.03, 0.05, 1.0, None, 4.0, ("filler",), frozenset(shortages.IDLE), "")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with ext4(tmp_path, size_mb=32, inodes=256) as place:
        yield place


def test_a_race_is_lost_at_zero_or_without_an_eviction_or_with_an_idle_pod_that_ended() -> None:
    assert not WON.lost
    assert WON._replace(zero_s=2.0).lost
    assert WON._replace(victims=()).lost
    assert WON._replace(victims=("idle-a", "filler")).lost
    assert WON._replace(alive=frozenset({"idle-a"})).lost


def test_a_filler_that_never_came_to_the_threshold_counts_in_no_column() -> None:
    never = WON._replace(crossed=False, lowest=0.2, then=None, evicted_s=None, back_s=None, victims=())
    assert not never.lost
    assert shortages.row([never]).split() == ["0/0", "-", "-", "-", "-", "-"]
    assert shortages.row([WON, never]) == shortages.row([WON])


def test_the_table_has_lost_runs_medians_and_what_is_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    lost = WON._replace(lowest=0.0, then=None, evicted_s=None, zero_s=2.0, back_s=None, victims=())
    races = [("bytes", 5.0, "unit", WON), ("bytes", 5.0, "unit", WON._replace(evicted_s=3.0)), ("pids", 1.0, "k", lost)]
    shortages.print_table(races)
    _, first, second, last = capsys.readouterr().out.splitlines()
    assert first.split() == ["bytes", "5", "unit", "0/2", "5.0%", "3.0%", "2.00", "-", "4.00"]
    assert second.split() == ["pids", "1", "k", "1/1", "-", "0.0%", "-", "2.00", "-"]
    assert last == shortages.NOT_RUN


def test_the_kubelet_sees_a_shortage_of_bytes_and_of_inodes(disk: Path) -> None:
    assert disk_kubelet.short(disk) == ""
    while load.take("bytes", str(disk), 0):
        pass
    assert disk_kubelet.short(disk) == "bytes"
    (disk / "grows").unlink()
    made = 0
    while load.take("inodes", str(disk), made):
        made += 1
    assert disk_kubelet.short(disk) == "inodes"


def test_the_kubelet_counts_the_files_of_a_pod(disk: Path) -> None:
    (disk / "pod" / "volumes").mkdir(parents=True)
    for _ in range(2):
        load.take("bytes", str(disk / "pod" / "volumes"), 0)
    load.take("inodes", str(disk / "pod" / "volumes"), 0)
    assert disk_kubelet.usage(disk / "pod") == {"bytes": 2 * MIB, "inodes": 4}
    assert disk_kubelet.usage(disk / "gone") == {"bytes": 0, "inodes": 0}
