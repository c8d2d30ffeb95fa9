"""Files that are kept open are read as they are now, within their bounds."""

import os
from pathlib import Path

import pytest

from nodeagent.sampling.hostfs.fd_cache import FdCache
from nodeagent.sampling.hostfs.host import Host, Unreadable


def test_a_kept_file_is_read_as_it_is_now(tmp_path: Path) -> None:
    file = tmp_path / "level"
    kept = FdCache(Host(str(tmp_path)), limit=4)
    for content in (b"1\n", b"22222\n", b"", b"x" * 8191, b"y" * 8192, b"z" * 100_000, b"3\n"):
        file.write_bytes(content)
        assert kept.read("/level") == content
    assert len(kept) == 1
    kept.close()


def test_beyond_the_limit_files_are_read_but_not_kept(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    kept = FdCache(Host(str(tmp_path)), limit=3)
    for i in range(10):
        (tmp_path / str(i)).write_text(str(i))
    for _ in range(2):
        assert [kept.read(f"/{i}") for i in range(10)] == [b"%d" % i for i in range(10)]
    assert len(kept) == 3
    assert len(os.listdir("/proc/self/fd")) == before + 3
    kept.drop("/0", "/never opened")
    assert len(os.listdir("/proc/self/fd")) == before + 2
    kept.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_cannot_be_read_takes_no_descriptor(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    before = len(os.listdir("/proc/self/fd"))
    kept = FdCache(Host(str(tmp_path)), limit=3)
    for path in ("/missing", "/directory"):
        with pytest.raises(Unreadable):
            kept.read(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_proc_is_read_again_through_one_descriptor() -> None:
    kept = FdCache(Host("/"), limit=3)
    first = kept.read("/proc/uptime")
    while kept.read("/proc/uptime") == first:
        os.sched_yield()
    assert len(kept) == 1
    kept.close()


def test_numbers_are_read_again_each_time_and_only_while_all_files_are_kept(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text(f"1{name}\n")
    kept, row = FdCache(Host(str(tmp_path)), limit=2), ["/a", "/b"]
    assert kept.numbers(row) is None, "none is open yet"
    for path in ("/a", "/b", "/c"):
        kept.read(path)
    assert kept.numbers(row) == [b"1a\n", b"1b\n"]
    (tmp_path / "b").write_text("22\n")
    assert kept.numbers(row) == [b"1a\n", b"22\n"]
    assert kept.numbers(["/a", "/c"]) is None, "one is beyond the limit"
    kept.drop("/a")
    assert kept.closed == 1
    kept.read("/c")  # has the number of the descriptor that was closed
    assert kept.numbers(row) is None
    kept.close()
    assert kept.numbers(["/b"]) is None
