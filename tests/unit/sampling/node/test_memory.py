"""/proc/meminfo and huge pages."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.config.schema import SamplingConfig
from nodeagent.model import NodeSnapshot, Signal, units
from nodeagent.sampling.hostfs.host import open_host
from nodeagent.sampling.node import memory
from nodeagent.sampling.sampler import Sampler
from tests.support.trees import GI, KI, MI, Node, write_node


def _sample(root: str | Path, config: SamplingConfig | None = None) -> NodeSnapshot:
    with Sampler(open_host(str(root)), config or SamplingConfig(), node_name="n") as sampler:
        return sampler.sample()


def test_huge_pages_of_every_size_are_read(tmp_path: Path) -> None:
    root = write_node(tmp_path, Node())
    meminfo = tmp_path / "proc/meminfo"
    text = meminfo.read_text().replace("HugePages_Total:       0", "HugePages_Total:      10")
    text = text.replace("HugePages_Free:        0", "HugePages_Free:        4")
    meminfo.write_text(text.replace("Hugetlb:               0", f"Hugetlb: {10 * 2 * KI + KI * KI}"))
    pools = tmp_path / "sys/kernel/mm/hugepages/hugepages-1048576kB"
    pools.mkdir(parents=True)
    for name, value in (("nr", 1), ("free", 1), ("resv", 0)):
        (pools / f"{name}_hugepages").write_text(f"{value}\n")
    found = _sample(root).memory
    assert found is not None
    assert found.hugepages == ((2 * MI, 10, 4, 0), (1 * GI, 1, 1, 0))
    assert found.hugetlb == 20 * MI + GI


def test_a_meminfo_without_a_required_field_still_gives_the_signal(tmp_path: Path) -> None:
    root = write_node(tmp_path, Node())
    meminfo = tmp_path / "proc/meminfo"
    meminfo.write_text("".join(line for line in meminfo.read_text().splitlines(True) if "KernelStack" not in line))
    snapshot = _sample(root)
    assert snapshot.memory is None
    assert snapshot.observations[Signal.MEMORY].available == 4 * GI


LINES = st.lists(
    st.tuples(
        st.sampled_from(memory.ALL_FIELDS),
        st.integers(-9, 1 << 70).map(lambda number: b"%d" % number) | st.binary(max_size=24),
        st.sampled_from([b" kB", b"", b" MB"]),
    )
)


@given(LINES, st.binary(max_size=40))
def test_any_bytes_are_parsed_as_meminfo(lines: list[tuple[bytes, bytes, bytes]], rest: bytes) -> None:
    data = b"".join(b"%s:        %s%s\n" % line for line in lines) + rest
    fields = memory.parse_meminfo(data, memory.ALL_FIELDS)
    assert all(0 <= value < units.MAX_PLAUSIBLE for value in fields.values())
    if lines and lines[0][1].isdigit() and lines[0][2] == b" kB":
        kib = int(lines[0][1])
        assert fields.get(lines[0][0]) == (kib * 1024 if kib * 1024 < units.MAX_PLAUSIBLE else None)
    memory.node_memory(fields)
