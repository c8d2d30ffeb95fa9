"""The snapshots that the agent keeps: bounded, whole, and nothing else is touched."""

import os
from pathlib import Path
from typing import IO

import pytest

from nodeagent.records import kept_snapshots
from nodeagent.records.snapshot_file import Manifest, SnapshotWriter

WALL = 1_800_000_000.0


def writing(size: int, *, fails: bool = False) -> object:
    def write(file: IO[bytes]) -> None:
        writer = SnapshotWriter(file, name="x")
        writer.add("samples/samples-0.rec", [os.urandom(size)])
        if fails:
            writer.abandon()
            raise ValueError
        writer.finish(Manifest("node-1", "0.1.0", WALL, "eviction"))

    return write


def keep(directory: Path, number: int, *, size: int = 1000, most: int = 3, max_bytes: int = 1 << 20) -> Path:
    name = kept_snapshots.file_name("eviction", f"ab12-{number}", wall=WALL + number)
    path, written = kept_snapshots.keep(directory, name, writing(size), most=most, max_bytes=max_bytes)  # type: ignore[arg-type]
    assert path.stat().st_size == written
    return path


def test_the_name_has_time_reason_and_id() -> None:
    assert kept_snapshots.file_name("eviction", "ab12-7", wall=WALL) == "20270115T080000Z-eviction-ab12-7.zip"
    assert kept_snapshots.file_name("race-lost", "ab12-oom3", wall=WALL) == "20270115T080000Z-race-lost-ab12-oom3.zip"
    assert kept_snapshots.file_name("eviction", "../../x", wall=WALL) == "20270115T080000Z-eviction.zip"


def test_the_oldest_are_removed_by_number_and_by_bytes(tmp_path: Path) -> None:
    paths = [keep(tmp_path, number) for number in range(5)]
    assert sorted(tmp_path.iterdir()) == paths[2:]
    assert [each.path for each in kept_snapshots.listed(tmp_path)] == paths[2:]
    last = keep(tmp_path, 9, size=5000, max_bytes=7000)
    assert sorted(tmp_path.iterdir()) == [paths[4], last]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.iterdir())


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = keep(tmp_path, 1)
    with pytest.raises(ValueError):  # noqa: PT011 - raised above
        kept_snapshots.keep(tmp_path, "20270115T080000Z-eviction.zip", writing(10, fails=True), most=1, max_bytes=10)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    left = tmp_path / "20270115T080000Z-eviction-ab12-7.zip.partial"
    mine = [tmp_path / "ticket.zip", tmp_path / "ticket.zip.partial"]
    for path in (left, *mine):
        path.write_text("x")
    kept = keep(tmp_path, 1, most=1)
    assert sorted(tmp_path.iterdir()) == sorted([*mine, kept])


def test_a_file_that_cannot_be_read_is_not_listed(tmp_path: Path) -> None:
    (tmp_path / "20270115T080000Z-eviction.zip").write_text("x")
    assert kept_snapshots.listed(tmp_path) == ()
    assert kept_snapshots.listed(tmp_path / "missing") == ()
