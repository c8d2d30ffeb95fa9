"""The memory files of both cgroup versions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.sampling.hostfs import cgroup_memory
from nodeagent.sampling.hostfs.cgroup_memory import MemoryV1, MemoryV2
from nodeagent.sampling.hostfs.parse import line_starts, parse_count, parse_keyed, parse_percent

V2_STAT = b"anon 100\nfile 70\nkernel 30\nsock 5\nshmem 7\nfile_dirty 3\nfile_writeback 1\n" + (
    b"inactive_file 40\nslab_reclaimable 10\n"
)


def test_v2_memory_is_split_into_working_set_and_unreclaimable_memory() -> None:
    numbers = MemoryV2().numbers(b"200\n", V2_STAT)
    assert numbers[:4] == (200, 160, 100 + (30 - 10) + 7 + 5 + 3 + 1, "")


def test_v2_file_cache_is_what_can_be_dropped_without_writing() -> None:
    assert MemoryV2().numbers(b"200\n", V2_STAT + b"active_file 20\n").file_cache == 40 + 20 - 3 - 1
    assert MemoryV2().numbers(b"200\n", V2_STAT).file_cache is None
    dirty = b"inactive_file 1\nactive_file 1\nfile_dirty 9\nanon 1\n"
    assert MemoryV2().numbers(b"200\n", dirty).file_cache == 0


LOCKED = "{0}cache 900\n{0}file 900\n{0}shmem 100\n{0}active_file 50\n{0}inactive_file 50\n{0}unevictable {1}\n"
"""Of 900 pages 700 are on no list of file pages."""


@pytest.mark.parametrize(("files", "prefix", "anon"), [(MemoryV1(), "total_", "total_rss"), (MemoryV2(), "", "anon")])
def test_locked_file_pages_are_unreclaimable(files: cgroup_memory.MemoryFiles, prefix: str, anon: str) -> None:
    """A pod that locks files (mlock) holds memory that only its end frees."""

    def unreclaimable(unevictable: int, more: str = "") -> int | None:
        stat = LOCKED.format(prefix, unevictable) + f"{anon} 10\n" + more
        return files.numbers(b"910\n", stat.encode()).unreclaimable

    assert unreclaimable(0) == 10 + 100, "pages that are on no list yet are not locked"
    assert unreclaimable(300) == 10 + 100 + 300
    assert unreclaimable(9999) == 10 + 100 + 700, "locked anonymous pages count as anonymous"
    assert unreclaimable(9999, f"{prefix}swapcached 200\n") == 10 + 100 + 500
    dirty = "dirty" if prefix else "file_dirty"
    assert unreclaimable(300, f"{prefix}{dirty} 20\n") == 10 + 100 + 300, "locked and dirty pages count once"


def test_v2_pages_in_swap_and_in_memory_are_known_as_such() -> None:
    assert MemoryV2().numbers(b"200\n", V2_STAT + b"swapcached 20\n").swap_cached == 20
    assert MemoryV2().numbers(b"200\n", V2_STAT).swap_cached == 0


def test_v1_swap_is_that_of_the_descendants_too() -> None:
    stat = b"swap 1\ntotal_inactive_file 40\ntotal_active_file 9\ntotal_rss 100\ntotal_swap 30\n"
    assert (MemoryV1().numbers(b"200\n", stat).swap, MemoryV1().numbers(b"200\n", stat).file_cache) == (30, None)
    assert MemoryV1().numbers(b"200\n", stat.replace(b"total_swap", b"total_swapx")).swap is None


def test_v2_root_usage_is_anon_and_file() -> None:
    assert MemoryV2().root_working_set(b"", V2_STAT) == (130, "")


@pytest.mark.parametrize("files", [MemoryV1(), MemoryV2()])
def test_a_root_without_inactive_file_leaves_the_signal_unknown(files: cgroup_memory.MemoryFiles) -> None:
    value, reason = files.root_working_set(b"200\n", b"anon 100\nfile 70\ntotal_rss 1\n")
    assert value is None
    assert "inactive_file" in reason


def test_v2_of_an_older_kernel_sums_the_kernel_memory() -> None:
    stat = (
        b"anon 100\nfile 70\nkernel_stack 4\npagetables 3\nslab_unreclaimable 2\ninactive_file 40\nslab_reclaimable 9\n"
    )
    assert MemoryV2().numbers(b"200\n", stat).unreclaimable == 109


def test_v1_memory_includes_the_descendants() -> None:
    stat = b"inactive_file 1\nrss 1\nshmem 1\ntotal_inactive_file 40\ntotal_rss 100\ntotal_shmem 7\ntotal_dirty 3\n"
    assert MemoryV1().numbers(b"200\n", stat)[:4] == (200, 160, 110, "")


@pytest.mark.parametrize("files", [MemoryV1(), MemoryV2()])
def test_more_inactive_than_used_is_a_working_set_of_zero(files: cgroup_memory.MemoryFiles) -> None:
    assert files.numbers(b"10\n", V2_STAT + b"total_inactive_file 40\ntotal_rss 1\n").working_set == 0


@pytest.mark.parametrize(
    "usage", [b"", b"\n", b"-5\n", b"1e9\n", b"12 13\n", b"max\n", b"0x10", b"9" * 19, b"9" * 4000]
)
@pytest.mark.parametrize("files", [MemoryV1(), MemoryV2()])
def test_an_implausible_usage_is_unknown_with_a_reason_never_zero(
    files: cgroup_memory.MemoryFiles, usage: bytes
) -> None:
    numbers = files.numbers(usage, V2_STAT)
    assert numbers.usage is None
    assert numbers.working_set is None
    assert files.usage in numbers.reason


@pytest.mark.parametrize("files", [MemoryV1(), MemoryV2()])
def test_a_stat_without_inactive_file_leaves_the_working_set_unknown(files: cgroup_memory.MemoryFiles) -> None:
    numbers = files.numbers(b"200\n", b"anon 1\ntotal_rss 1\nxinactive_file 3\n")
    assert (numbers.usage, numbers.working_set) == (200, None)
    assert "inactive_file" in numbers.reason


@given(st.binary(), st.binary())
def test_any_bytes_give_memory_numbers_or_none(usage: bytes, stat: bytes) -> None:
    for files in (MemoryV1(), MemoryV2()):
        numbers = files.numbers(usage, stat)
        assert all(value is None or value >= 0 for value in numbers[:3])
        assert numbers.reason or None not in numbers[:3]
        assert files.working_set(usage, stat).value == numbers.working_set
        root = files.root_working_set(usage, stat)
        assert (root.value is None) == bool(root.reason)
        assert root.value is None or root.value >= 0


@given(st.integers(0, (1 << 62) - 1), st.integers(0, (1 << 62) - 1))
def test_what_the_kernel_writes_is_read_back(usage: int, inactive: int) -> None:
    numbers = MemoryV2().numbers(b"%d\n" % usage, b"anon 1\ninactive_file %d\nfile 2\n" % inactive)
    assert (numbers.usage, numbers.working_set) == (usage, max(0, usage - inactive))


@given(st.binary())
def test_any_bytes_give_a_number_or_none(data: bytes) -> None:
    number, share = parse_count(data), parse_percent(data)
    assert number is None or 0 <= number < 1 << 62
    assert share is None or 0.0 <= share <= 100.0


@given(
    st.lists(st.tuples(st.sampled_from(["anon", "file", "file_dirty", "anon_thp"]), st.integers(0, (1 << 62) - 1))),
    st.booleans(),
)
def test_each_field_is_the_number_of_its_own_line(lines: list[tuple[str, int]], ends: bool) -> None:
    text = "\n".join(f"{name} {number}" for name, number in lines) + "\n" * ends
    first = dict(reversed(lines))
    assert parse_keyed(text.encode(), line_starts("file", "anon")) == [first.get("file"), first.get("anon")]


@given(st.binary())
def test_any_bytes_give_a_field_or_none(data: bytes) -> None:
    [found] = parse_keyed(data, line_starts("anon"))
    assert found is None or b"anon " in data
