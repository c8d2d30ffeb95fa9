"""Walks of real directories: they agree with `du`, and no owner of a tree can redirect them."""

import contextlib
import os
import subprocess
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.sampling.disk.walk import CountMode, TreeWalk
from nodeagent.sampling.disk.walk_cache import MAX_CACHE_BYTES
from tests.support.disk_trees import SETTLED_S, du, walk

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")


def let_settle(path: Path) -> None:
    """Wait until every directory may be cached by the walks of these tests."""
    newest = max(os.lstat(directory).st_ctime for directory, _, _ in os.walk(path))
    while time.time() < newest + 1.5 * SETTLED_S:
        os.sched_yield()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- counting


NAME = st.binary(min_size=1, max_size=12).filter(lambda n: b"/" not in n and b"\0" not in n and n not in (b".", b".."))
KIND = st.sampled_from(["directory", "file", "sparse", "link", "symlink", "fifo"])
ENTRY = st.tuples(st.integers(0, 10**6), NAME, KIND, st.integers(0, 20000))


@given(st.lists(ENTRY, max_size=40))
@settings(max_examples=60, deadline=None)
def test_any_tree_has_the_numbers_of_du(entries: list[tuple[int, bytes, str, int]]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        top = os.fsencode(scratch)
        directories, files = [top], [b"/etc/passwd"]
        for where, name, kind, size in entries:
            path = os.path.join(directories[where % len(directories)], name)
            with contextlib.suppress(FileExistsError, PermissionError, OSError):
                make(path, kind, size, files[where % len(files)])
                (directories if kind == "directory" else files).append(path)
        usage, cache = walk(Path(scratch))
        assert (usage.bytes, usage.inodes) == du(Path(scratch))
        assert usage.complete
        assert (usage.unknown, usage.vanished, usage.mounts) == (0, 0, 0)
        assert walk(Path(scratch), count=CountMode.INODES)[0].inodes == usage.inodes
        again, _ = walk(Path(scratch), previous=cache)
        assert (again.bytes, again.inodes, again.directories) == (usage.bytes, usage.inodes, usage.directories)


def make(path: bytes, kind: str, size: int, other: bytes) -> None:
    if kind == "directory":
        os.mkdir(path)
    elif kind == "link":
        os.link(other, path, follow_symlinks=False)
    elif kind == "symlink":
        os.symlink(b"/" + b"x" * (size % 200), path)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        with open(path, "xb") as file:
            if kind == "sparse":
                file.truncate(size << 20)
            file.write(bytes(size))


def test_a_large_directory_is_streamed_and_its_links_count_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 5000)
    for number in range(3000):
        os.link(tmp_path / "a", tmp_path / f"a-rather-long-name-of-a-link-{number:06}")
        if number % 3 == 0:
            (tmp_path / f"file-{number}").write_bytes(b"")
        if number % 100 == 0:
            (tmp_path / f"directory-{number}").mkdir()
            os.link(tmp_path / "a", tmp_path / f"directory-{number}" / "b")
    assert tmp_path.stat().st_size > 65536, "the directory is not large"
    usage, _ = walk(tmp_path)
    assert (usage.bytes, usage.inodes) == du(tmp_path)
    assert walk(tmp_path, count=CountMode.INODES)[0].inodes == usage.inodes


def test_memory_stays_flat_over_a_directory_of_a_hundred_thousand_entries(tmp_path: Path) -> None:
    directory = os.open(tmp_path, os.O_RDONLY)
    for number in range(100_000):
        if number % 50_000 == 0:
            source = f"source-{number}"
            os.close(os.open(source, os.O_CREAT | os.O_WRONLY, dir_fd=directory))
        os.link(source, f"{number}", src_dir_fd=directory, dst_dir_fd=directory)
    os.close(directory)
    for count in CountMode:
        tracemalloc.start()
        usage, _ = walk(tmp_path, count=count)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert usage.inodes == 3
        assert peak < 2 << 20, f"{peak} bytes for 100,000 names"


@pytest.mark.parametrize(
    ("count", "cache_bytes"),
    [(CountMode.BYTES_AND_INODES, 0), (CountMode.INODES, 0), (CountMode.BYTES_AND_INODES, 1 << 20)],
)
def test_memory_does_not_grow_with_the_tree(tmp_path: Path, count: CountMode, cache_bytes: int) -> None:
    """`benchmarks/walk.py --memory` does the same with ten million files."""
    made = 0
    peaks = []
    for directories in (100, 1000):
        for number in range(made, directories):
            path = tmp_path / f"{number % 40}" / f"{number}"
            path.mkdir(parents=True)
            for name in range(50):
                os.mknod(path / f"file-{name}")
        made = directories
        tracemalloc.start()
        with TreeWalk(os.open(tmp_path, os.O_RDONLY), count=count, cache_bytes=cache_bytes, settled_s=0.0) as tree_walk:
            assert tree_walk.step()
            assert tree_walk.usage.inodes == 1 + 40 + directories * 51
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < cache_bytes + (1 << 19), f"{peaks} bytes for 45,000 files more"


def test_the_cache_of_a_directory_of_directories_is_bounded(tmp_path: Path) -> None:
    here = os.open(tmp_path, os.O_RDONLY)
    peaks = []
    for made, directories in ((0, 20_000), (20_000, 40_000)):
        for number in range(made, directories):
            os.mkdir(f"directory-{number}", dir_fd=here)
        tracemalloc.start()
        with TreeWalk(os.open(tmp_path, os.O_RDONLY), cache_bytes=1 << 18, settled_s=0.0) as tree_walk:
            assert tree_walk.step()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert tree_walk.usage.directories == directories + 1
    os.close(here)
    assert peaks[1] - peaks[0] < 1 << 19, f"{peaks} bytes"


def test_a_tree_deeper_than_any_path_is_walked_with_few_descriptors(tmp_path: Path) -> None:
    depth = 3000
    here = os.open(tmp_path, os.O_RDONLY)
    for level in range(depth):
        os.mkdir("down", dir_fd=here)
        if level % 7 == 0:
            os.mkdir("aside", dir_fd=here)
        below = os.open("down", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    before = descriptors()
    most = 0
    try:
        with TreeWalk(os.open(tmp_path, os.O_RDONLY), cache_bytes=MAX_CACHE_BYTES) as tree_walk:
            while not tree_walk.step(entries=50):
                most = max(most, descriptors())
            usage = tree_walk.usage
    finally:
        subprocess.run(["rm", "-rf", tmp_path / "down"], check=True)
    assert usage.inodes == 1 + depth + len(range(0, depth, 7))
    assert (usage.unknown, usage.vanished) == (0, 0)
    assert most - before <= 70
    assert descriptors() == before


def test_wide_directories_above_a_deep_one_are_read_to_their_end_before_they_are_closed(tmp_path: Path) -> None:
    here = tmp_path
    for level in range(80):
        if level in (0, 1, 2):
            for number in range(2500):
                (here / f"side-directory-with-a-long-name-{number}").mkdir()
        here = here / "d"
        here.mkdir()
    usage, _ = walk(tmp_path)
    assert (usage.bytes, usage.inodes) == du(tmp_path)
    assert walk(tmp_path, count=CountMode.INODES)[0].inodes == usage.inodes


# --- pausing


def test_a_walk_pauses_at_its_limit_and_continues_from_there(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number}").mkdir()
        for name in range(20):
            (tmp_path / f"{number}" / f"{name}").touch()
    seen = []
    with TreeWalk(os.open(tmp_path, os.O_RDONLY)) as tree_walk:
        while not tree_walk.step(entries=50):
            assert not tree_walk.usage.complete
            seen.append(tree_walk.usage.inodes)
    assert tree_walk.usage.complete
    assert len(seen) >= 9
    assert seen == sorted(seen)
    assert (tree_walk.usage.bytes, tree_walk.usage.inodes) == du(tmp_path)


def test_a_walk_after_its_deadline_does_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with TreeWalk(os.open(tmp_path, os.O_RDONLY)) as tree_walk:
        assert not tree_walk.step(until=time.monotonic() - 1)
        assert not tree_walk.usage.complete


def test_a_closed_walk_holds_no_descriptor(tmp_path: Path) -> None:
    for name in ("a/b/c", "d/e"):
        (tmp_path / name).mkdir(parents=True)
    before = descriptors()
    tree_walk = TreeWalk(os.open(tmp_path, os.O_RDONLY))
    tree_walk.step(entries=1)
    assert descriptors() > before
    tree_walk.close()
    assert descriptors() == before
    assert not tree_walk.usage.complete


def test_a_file_is_no_root_and_its_descriptor_is_closed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    before = descriptors()
    with pytest.raises(NotADirectoryError):
        TreeWalk(os.open(tmp_path / "file", os.O_RDONLY))
    assert descriptors() == before


# --- traps


def test_a_symlink_is_an_inode_and_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "out").symlink_to("/usr")
    (tmp_path / "tree" / "up").symlink_to("..")
    assert walk(tmp_path / "tree")[0].inodes == 3


@pytest.mark.parametrize("count", list(CountMode))
def test_a_directory_replaced_by_a_symlink_during_the_walk_is_not_followed(tmp_path: Path, count: CountMode) -> None:
    outside = tmp_path / "outside"
    (outside / "much").mkdir(parents=True)
    for number in range(10):
        (outside / "much" / f"{number}").write_bytes(b"x" * 8192)
    tree = tmp_path / "tree"
    (tree / "victim").mkdir(parents=True)
    (tree / "victim" / "much").mkdir()
    with TreeWalk(os.open(tree, os.O_RDONLY), count=count) as tree_walk:
        while tree_walk.usage.directories != 2:
            tree_walk.step(entries=1)
        (tree / "victim").rename(tmp_path / "gone")
        (tree / "victim").symlink_to(outside)
        assert tree_walk.step()
        usage = tree_walk.usage
    assert usage.inodes == 2
    assert usage.vanished == 1


def test_an_entry_that_vanishes_during_the_walk_is_not_unknown(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name / "below").mkdir(parents=True)
    with TreeWalk(os.open(tmp_path, os.O_RDONLY)) as tree_walk:
        subprocess.run(["rm", "-r", tmp_path / "a", tmp_path / "b", tmp_path / "c"], check=True)
        assert tree_walk.step()
        usage = tree_walk.usage
    assert usage.vanished == 3
    assert usage.unknown == 0


@pytest.fixture
def mount_point(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "tree" / "mounted"
    path.mkdir(parents=True)
    yield path
    subprocess.run(["umount", "-l", path], check=True)


@root_only
@pytest.mark.parametrize("count", list(CountMode))
@pytest.mark.parametrize("kind", ["bind", "tmpfs"])
def test_a_mount_is_not_entered_even_if_it_is_of_the_same_device(
    tmp_path: Path, mount_point: Path, kind: str, count: CountMode
) -> None:
    other = tmp_path / "other"
    (other / "below").mkdir(parents=True)
    command: list[str | Path]
    command = ["mount", "--bind", other, mount_point] if kind == "bind" else ["mount", "-t", "tmpfs", "x", mount_point]
    subprocess.run(command, check=True)
    usage, _ = walk(tmp_path / "tree", count=count)
    assert usage.mounts == 1
    assert usage.inodes == 1


@contextlib.contextmanager
def as_other_user() -> Iterator[None]:
    """Become another user for a moment, because root may read everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("count", list(CountMode))
def test_an_unreadable_directory_is_unknown_with_its_reason(tmp_path: Path, count: CountMode) -> None:
    for name, mode in (("closed", 0), ("open", 0o755)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
        (tmp_path / name).chmod(mode)
    tmp_path.chmod(0o755)
    with TreeWalk(os.open(tmp_path, os.O_RDONLY), count=count) as tree_walk, as_other_user():
        assert tree_walk.step()
        usage = tree_walk.usage
    (tmp_path / "closed").chmod(0o755)
    assert usage.inodes == 4
    assert (usage.unknown, usage.unknown_reason) == (1, "Permission denied")


@root_only
def test_a_file_below_a_mount_point_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"x" * 1_000_000)
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "file").touch()
    (tmp_path / "tree" / "plain").write_bytes(b"x" * 4096)
    subprocess.run(["mount", "--bind", tmp_path / "other", tmp_path / "tree" / "file"], check=True)
    try:
        usage, _ = walk(tmp_path / "tree")
    finally:
        subprocess.run(["umount", "-l", tmp_path / "tree" / "file"], check=True)
    assert (usage.bytes, usage.inodes, usage.mounts) == (8192, 2, 1)


# --- the second walk


def grown(path: Path, size: int) -> None:
    with open(path, "ab") as file:
        file.write(b"x" * size)


def test_a_second_walk_counts_a_file_that_grew_in_an_unchanged_directory(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "log").write_bytes(b"x")
    let_settle(tmp_path)
    first, cache = walk(tmp_path)
    grown(tmp_path / "d" / "log", 100_000)
    second, _ = walk(tmp_path, previous=cache)
    assert first.bytes is not None
    assert second.bytes is not None
    assert second.bytes - first.bytes >= 98_304
    assert (second.bytes, second.inodes) == du(tmp_path)


def test_a_second_walk_counts_new_files_and_not_removed_ones(tmp_path: Path) -> None:
    for name in ("a", "b", "b/c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"x" * 9000)
    let_settle(tmp_path)
    _, cache = walk(tmp_path)
    (tmp_path / "a" / "file").unlink()
    (tmp_path / "b" / "c" / "new").mkdir()
    (tmp_path / "b" / "c" / "new" / "file").write_bytes(b"x" * 50_000)
    for unwritten in (False, True):
        again, _ = walk(tmp_path, previous=cache, unwritten=unwritten)
        assert (again.bytes, again.inodes) == du(tmp_path)


def test_a_replaced_directory_of_the_same_name_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x").mkdir()
    let_settle(tmp_path)
    _, cache = walk(tmp_path)
    subprocess.run(["rm", "-r", tmp_path / "d" / "x"], check=True)
    (tmp_path / "d" / "x").mkdir()
    (tmp_path / "d" / "x" / "file").write_bytes(b"x" * 9000)
    again, _ = walk(tmp_path, previous=cache, unwritten=True)
    assert (again.bytes, again.inodes) == du(tmp_path)


def test_files_come_from_the_cache_only_if_they_are_unwritten(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"x" * 9000)
    let_settle(tmp_path)
    first, cache = walk(tmp_path)
    grown(tmp_path / "a" / "file", 100_000)
    trusting, still = walk(tmp_path, previous=cache, unwritten=True)
    assert trusting.reused == 2
    assert trusting.bytes == first.bytes, "the word was false, and this is what it costs"
    asking, _ = walk(tmp_path, previous=still)
    assert asking.reused == 0
    assert asking.bytes == du(tmp_path)[0]


def test_reused_directories_count_for_the_cache_limit(tmp_path: Path) -> None:
    for number in range(50):
        (tmp_path / f"{number % 5}/{number}").mkdir(parents=True)
        (tmp_path / f"{number % 5}/{number}/file").write_bytes(b"x")
    let_settle(tmp_path)
    _, first = walk(tmp_path)
    usage, second = walk(tmp_path, previous=first, unwritten=True)
    assert first is not None
    assert second is not None
    assert (usage.reused, second.size) == (50, first.size)


def test_a_directory_with_links_is_read_even_if_unwritten(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "file").write_bytes(b"x" * 9000)
    os.link(tmp_path / "a" / "file", tmp_path / "b" / "link")
    let_settle(tmp_path)
    first, cache = walk(tmp_path)
    again, _ = walk(tmp_path, previous=cache, unwritten=True)
    assert again.reused == 0
    assert (again.bytes, again.inodes) == (first.bytes, first.inodes) == du(tmp_path)


def test_a_directory_changed_just_before_it_was_read_is_not_cached(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    with TreeWalk(os.open(tmp_path, os.O_RDONLY), cache_bytes=MAX_CACHE_BYTES) as tree_walk:
        tree_walk.step()
        assert tree_walk.usage.complete
        assert tree_walk.cache is None


def test_the_cache_is_bounded(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}" / "a-name-of-thirty-two-characters-").touch()
    let_settle(tmp_path)
    with TreeWalk(os.open(tmp_path, os.O_RDONLY), cache_bytes=20_000, settled_s=0.02) as tree_walk:
        tree_walk.step()
        cache = tree_walk.cache
    assert cache is not None
    assert cache.size < 20_000 + 400 + 100 * 300
    again, _ = walk(tmp_path, previous=cache, unwritten=True)
    assert 0 < again.reused < 60
    assert (again.bytes, again.inodes) == du(tmp_path)
