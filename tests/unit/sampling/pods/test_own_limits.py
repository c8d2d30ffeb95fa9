"""What pods use of their own memory limits, read from trees of both cgroup versions."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from nodeagent.model import ContainerUsage, OwnLimit, PodUsage, QOSClass
from nodeagent.sampling.hostfs import cgroup_memory
from nodeagent.sampling.hostfs.cgroups import Hierarchy
from nodeagent.sampling.hostfs.host import open_host
from nodeagent.sampling.pods.own_limits import LIMIT_AGE_S, OwnLimitReader

MI: Final = 1 << 20
LIMIT: Final = 512 * MI
APP, SIDECAR, SANDBOX = "a" * 64, "b" * 64, "c" * 64
POD: Final = "/kubepods/pod1"
UNLIMITED: Final = {"v1": "9223372036854771712\n", "v2": "max\n"}


class Tree:
    """One pod in one version's files."""

    def __init__(self, root: Path, version: str) -> None:
        self.v2 = version == "v2"
        self.version = version
        self.top = root / "cg"
        self.proc = root / "proc"
        self.proc.mkdir(parents=True)
        self.swap(0)
        (root / "listing").touch()
        for name in ("", SANDBOX):
            self.write(name, 5 * MI)
            self.limit(name, None)
        files = cgroup_memory.V2 if self.v2 else cgroup_memory.V1
        hierarchy = Hierarchy(version, "/cg", files, "/cg", "/cg" if self.v2 else None)
        self.reader = OwnLimitReader(open_host(str(root)), hierarchy)
        self.containers = [APP]

    def directory(self, name: str) -> Path:
        directory = self.top / POD[1:] / name
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def swap(self, free: int, total: int | None = None) -> None:
        self.total = free if total is None else total
        (self.proc / "meminfo").write_text(f"SwapTotal: {self.total >> 10} kB\nSwapFree: {free >> 10} kB\n")

    def limit(self, name: str, limit: int | None) -> None:
        file = "memory.max" if self.v2 else "memory.limit_in_bytes"
        text = UNLIMITED[self.version] if limit is None else f"{limit}\n"
        (self.directory(name) / file).write_text(text)

    def write(
        self, name: str, anon: int, *, file: int = 0, dirty: int = 0, shmem: int = 0, kernel: int = 0, slab: int = 0
    ) -> None:
        """Its usage. `file` is clean or dirty page cache, `slab` reclaimable."""
        usage = anon + file + shmem + kernel + slab
        numbers = {"active_file": file // 2, "inactive_file": file - file // 2, "shmem": shmem, "unevictable": 0}
        if self.v2:
            numbers |= {"anon": anon, "file": file + shmem, "kernel": kernel + slab, "slab_reclaimable": slab}
            numbers |= {"file_dirty": dirty, "sock": 0}
        else:
            numbers |= {"rss": anon, "cache": file + shmem, "dirty": dirty, "swap": 0}
            numbers = {f"total_{key}": value for key, value in numbers.items()}
        directory = self.directory(name)
        (directory / ("memory.current" if self.v2 else "memory.usage_in_bytes")).write_text(f"{usage}\n")
        (directory / "memory.stat").write_text("".join(f"{key} {value}\n" for key, value in numbers.items()))

    def read(self, at: float, *, fresh: bool = False) -> tuple[OwnLimit, ...]:
        containers = tuple([ContainerUsage(each, None, None, 1) for each in self.containers])
        usage = PodUsage("1", QOSClass.BURSTABLE, POD, at, containers=containers)
        found = self.reader.read([usage], now=at, swap_total=self.total, fresh={"1"} if fresh else ())
        return found.get("1", ())


@pytest.fixture(params=["v1", "v2"])
def tree(tmp_path: Path, request: pytest.FixtureRequest) -> Tree:
    made = Tree(tmp_path, request.param)
    made.write(APP, 400 * MI)
    made.limit(APP, LIMIT)
    return made


def test_a_limit_of_a_container_is_found_below_a_pod_without_one(tree: Tree) -> None:
    [own] = tree.read(1.0)
    assert (own.container_id, own.limit, own.used, own.headroom) == (APP, LIMIT, 400 * MI, 112 * MI)
    assert own.read_at == 1.0


def test_the_limit_of_the_pod_and_those_of_its_containers_are_all_read(tree: Tree) -> None:
    tree.limit("", 600 * MI)
    tree.write("", 450 * MI)
    tree.write(SIDECAR, 50 * MI)
    tree.limit(SIDECAR, 64 * MI)
    tree.containers.append(SIDECAR)
    assert {(own.container_id, own.used) for own in tree.read(1.0)} == {
        ("", 450 * MI),
        (APP, 400 * MI),
        (SIDECAR, 50 * MI),
    }


def test_page_cache_and_reclaimable_slab_do_not_count_also_dirty(tree: Tree) -> None:
    tree.write(APP, 60 * MI, file=430 * MI, dirty=300 * MI, shmem=10 * MI)
    [own] = tree.read(1.0)
    assert own.used == 70 * MI
    if tree.v2:
        tree.write(APP, 60 * MI, kernel=20 * MI, slab=300 * MI)
        [own] = tree.read(2.0)
        assert own.used == 80 * MI


def test_far_below_its_limit_only_the_usage_is_read(tree: Tree) -> None:
    tree.write(APP, 100 * MI, file=50 * MI)
    (tree.directory(APP) / "memory.stat").unlink()
    [own] = tree.read(1.0)
    assert own.used == 150 * MI


def test_an_unlimited_pod_has_no_reading(tree: Tree) -> None:
    tree.limit(APP, None)
    assert tree.read(1.0) == ()


@pytest.mark.parametrize(
    "broken", ["memory.stat", "memory.max memory.limit_in_bytes", "memory.current memory.usage_in_bytes"]
)
@pytest.mark.parametrize("content", [None, b"", b"-5\n", b"garbage\xff\n"])
def test_what_is_not_readable_is_unknown(tree: Tree, broken: str, content: bytes | None) -> None:
    for name in broken.split():
        file = tree.directory(APP) / name
        if not file.exists():
            continue
        file.unlink() if content is None else file.write_bytes(content)
    assert tree.read(1.0) == ()


def test_a_container_that_is_gone_is_left_out_and_never_an_error(tree: Tree) -> None:
    assert tree.read(1.0)
    for file in tree.directory(APP).iterdir():
        file.unlink()
    tree.directory(APP).rmdir()
    assert tree.read(20.0) == ()


def test_a_resized_limit_is_noticed(tree: Tree) -> None:
    assert tree.read(1.0)[0].limit == LIMIT
    tree.limit(APP, 2 * LIMIT)
    assert tree.read(1.0 + LIMIT_AGE_S)[0].limit == 2 * LIMIT


def test_a_pod_that_barely_moved_keeps_its_reading_unless_it_must_be_fresh(tree: Tree) -> None:
    first = tree.read(1.0)
    tree.write(APP, 400 * MI + 4096)
    assert tree.read(2.0) == first
    [own] = tree.read(2.5, fresh=True)
    assert (own.read_at, own.used) == (2.5, 400 * MI + 4096)
    assert tree.read(8.0)[0].read_at == 8.0


def test_a_heap_that_displaces_page_cache_at_the_limit_is_read_within_a_second_and_then_often(tree: Tree) -> None:
    def heap(at: float, mib: int) -> int:
        tree.write(APP, mib * MI, file=510 * MI - mib * MI)
        [own] = tree.read(at)
        return own.used // MI

    assert heap(1.0, 350) == 350
    assert heap(1.5, 360) == 350, "full of page cache for days, it is not read with each node sample"
    assert heap(2.0, 370) == 370
    assert [heap(2.0 + 0.2 * step, 370 + 4 * step) for step in range(1, 5)] == [374, 378, 382, 386]
    assert [heap(3.0 + 0.2 * step, 386) for step in range(8)] == [386] * 8
    tree.write(APP, 390 * MI, file=120 * MI)
    assert tree.read(4.6)[0].read_at < 4.6, "it has stopped growing"


def test_a_heap_that_displaces_page_cache_far_below_the_limit_is_read_after_its_age(tree: Tree) -> None:
    tree.write(APP, 210 * MI, file=90 * MI)
    assert tree.read(1.0)[0].used == 210 * MI
    tree.write(APP, 290 * MI, file=10 * MI)
    assert [tree.read(at)[0].used // MI for at in (5.9, 6.1)] == [210, 290]


def test_how_often_the_kernel_reclaimed_and_the_stall_are_read(tree: Tree) -> None:
    directory = tree.directory(APP)
    if tree.v2:
        (directory / "memory.events").write_text("low 3\nhigh 4\nmax 5\noom 1\noom_kill 1\n")
        (directory / "memory.pressure").write_text(
            "some avg10=31.50 avg60=1.00 avg300=0.00 total=9\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
        )
    else:
        (directory / "memory.failcnt").write_text("9\n")
    [own] = tree.read(1.0)
    assert own.reclaims == 9
    assert own.stall_some_avg10 == (31.5 if tree.v2 else None)


def _v2_swap(tree: Tree, limit: str, used: int) -> None:
    (tree.directory(APP) / "memory.swap.max").write_text(f"{limit}\n")
    (tree.directory(APP) / "memory.swap.current").write_text(f"{used}\n")


def _v1_swap(tree: Tree, limit: str, used: int) -> None:
    whole = UNLIMITED["v1"].strip() if limit == "max" else str(LIMIT + int(limit))
    (tree.directory(APP) / "memory.memsw.limit_in_bytes").write_text(f"{whole}\n")
    (tree.directory(APP) / "memory.memsw.usage_in_bytes").write_text(f"{400 * MI + used}\n")


@pytest.mark.parametrize(
    ("limit", "used", "free", "left"),
    [
        ("0", 0, 1024 * MI, 0),  # as a kubelet sets it without LimitedSwap
        (str(100 * MI), 30 * MI, 1024 * MI, 70 * MI),
        (str(100 * MI), 30 * MI, 5 * MI, 5 * MI),
        ("max", 30 * MI, 200 * MI, 200 * MI),
        (str(10 * MI), 30 * MI, 200 * MI, 0),
    ],
)
def test_what_may_be_swapped_out_is_headroom(tree: Tree, limit: str, used: int, free: int, left: int) -> None:
    write: Callable[[Tree, str, int], None] = _v2_swap if tree.v2 else _v1_swap
    tree.swap(free, total=2048 * MI)
    write(tree, limit, used)
    [own] = tree.read(1.0)
    assert own.headroom == 112 * MI + left


def test_unknown_swap_is_no_reading_and_a_kernel_without_the_files_may_swap_all(tree: Tree) -> None:
    tree.swap(300 * MI)
    assert tree.read(1.0)[0].headroom == 412 * MI
    (tree.proc / "meminfo").write_text("SwapTotal: 5 kB\n")
    assert tree.read(9.0) == ()


def test_descriptors_are_closed_with_their_pods(tree: Tree) -> None:
    tree.read(1.0)
    assert len(tree.reader._files) == 1
    tree.reader.read([], now=2.0, swap_total=0)
    assert len(tree.reader._files) == 0
    tree.read(3.0)
    tree.reader.close()
    assert len(tree.reader._files) == 0
