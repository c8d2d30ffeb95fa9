"""Bolt databases of a real containerd, whole, damaged and written meanwhile."""

import contextlib
import gzip
import struct
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nodeagent.sampling.disk import bolt
from nodeagent.sampling.disk.bolt import BoltError, Bucket
from nodeagent.sampling.hostfs.host import Host, Unreadable
from tests.support.paths import REPOSITORY

DATA: Final = REPOSITORY / "tests/data/containerd"
SMALL: Final = gzip.decompress((DATA / "small.db.gz").read_bytes())
MANY: Final = gzip.decompress((DATA / "many.db.gz").read_bytes())
"""Some 90 snapshots: the tree has branch pages."""
PAGE: Final = 4096


def read(tmp_path: Path, data: bytes) -> Bucket:
    (tmp_path / "db").write_bytes(data)
    return bolt.read_database(Host(str(tmp_path)), "/db")


def names(bucket: Bucket | None) -> list[str]:
    assert bucket is not None
    return [key.decode() for key, _ in bucket.items()]


def everything(bucket: Bucket) -> dict[bytes, object]:
    return {key: everything(value) if isinstance(value, Bucket) else value for key, value in bucket.items()}


def test_buckets_and_values_are_found(tmp_path: Path) -> None:
    root = read(tmp_path, SMALL)
    snapshots = root.bucket("v1", "snapshots")
    assert [name.split("/")[:2] for name in names(snapshots)] == [
        ["build", "2"],
        ["build", "4"],
        ["k8s.io", "10"],
        ["k8s.io", "2"],
        ["k8s.io", "4"],
        ["k8s.io", "6"],
        ["k8s.io", "8"],
        ["k8s.io", "9"],
    ]
    assert snapshots is not None
    first = dict(snapshots.items())[names(snapshots)[0].encode()]
    assert isinstance(first, Bucket)
    assert dict(first.items())[b"id"] == b"\x07"


def test_a_name_that_is_missing_or_a_value_is_no_bucket(tmp_path: Path) -> None:
    root = read(tmp_path, SMALL)
    assert root.bucket("v2") is None
    key = names(root.bucket("v1", "snapshots"))[0]
    assert root.bucket("v1", "snapshots", key, "id") is None


def test_a_tree_with_branch_pages_is_read_in_order(tmp_path: Path) -> None:
    found = names(read(tmp_path, MANY).bucket("v1", "snapshots"))
    assert found == sorted(found)
    assert len([name for name in found if "/many-" in name]) > 80


def test_the_newest_state_is_read_whichever_page_has_it(tmp_path: Path) -> None:
    # The two meta pages take turns: without the newer one, the state before it is read.
    transactions = [struct.unpack_from("<Q", MANY, page * PAGE + 16 + 48)[0] for page in (0, 1)]
    newest = transactions.index(max(transactions))
    damaged = bytearray(MANY)
    damaged[newest * PAGE + 20] ^= 0xFF
    older = names(read(tmp_path, bytes(damaged)).bucket("v1", "snapshots"))
    newer = names(read(tmp_path, MANY).bucket("v1", "snapshots"))
    assert set(older) < set(newer)
    assert len(newer) == len(older) + 1


@pytest.mark.parametrize("data", [b"", b"x" * 10_000, b"\0" * 65536, SMALL[:70]], ids=["empty", "text", "zero", "cut"])
def test_a_file_that_is_no_database_is_an_error(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(BoltError, match="no bolt database"):
        read(tmp_path, data)


def test_a_missing_file_is_unreadable(tmp_path: Path) -> None:
    with pytest.raises(Unreadable):
        bolt.read_database(Host(str(tmp_path)), "/db")


def test_a_database_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "db").open("wb") as file:
        file.truncate(bolt.MAX_BYTES + 1)
    with pytest.raises(BoltError, match="more than"):
        bolt.read_database(Host(str(tmp_path)), "/db")


def test_a_page_that_leads_to_itself_is_an_error(tmp_path: Path) -> None:
    damaged = bytearray(MANY)
    branches = [
        at
        for at in range(2 * PAGE, len(MANY), PAGE)
        if struct.unpack_from("<QHH", MANY, at)[0] == at // PAGE and struct.unpack_from("<QHH", MANY, at)[1] == 1
    ]
    for at in branches:
        struct.pack_into("<Q", damaged, at + 16 + 8, at // PAGE)
    with pytest.raises(BoltError, match="its own descendant"):
        everything(read(tmp_path, bytes(damaged)))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, len(SMALL) - 1), st.integers(0, 255)), min_size=1, max_size=40))
def test_a_damaged_file_ends_in_an_error_or_a_result(tmp_path: Path, damage: list[tuple[int, int]]) -> None:
    data = bytearray(SMALL)
    for at, value in damage:
        data[at] = value
    with contextlib.suppress(BoltError):
        everything(read(tmp_path, bytes(data)))
