"""Pressure stall information."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.config.schema import SamplingConfig
from nodeagent.model import NodeSnapshot, StallScope
from nodeagent.sampling.hostfs.host import open_host
from nodeagent.sampling.node import psi
from nodeagent.sampling.sampler import Sampler
from tests.support.trees import Node, write_node


def _sample(root: str | Path, config: SamplingConfig | None = None) -> NodeSnapshot:
    with Sampler(open_host(str(root)), config or SamplingConfig(), node_name="n") as sampler:
        return sampler.sample()


def test_stalls_are_read_for_the_node_the_pods_and_the_system(tmp_path: Path) -> None:
    stalls = _sample(write_node(tmp_path, Node(stall_memory=12.5))).stalls
    assert {(s.scope, s.resource) for s in stalls} == {(s, r) for s in StallScope for r in ("memory", "io")}
    node = next(s for s in stalls if s.scope is StallScope.NODE and s.resource == "memory")
    assert (node.some_avg10, node.full_avg10, node.some_total_us) == (12.5, 12.5, 12500)


def test_a_kernel_without_psi_is_a_note_not_a_stall_of_zero(tmp_path: Path) -> None:
    root = write_node(tmp_path, Node("v1"))
    (tmp_path / "proc/pressure/memory").unlink()
    (tmp_path / "proc/pressure/io").unlink()
    snapshot = _sample(root)
    assert snapshot.stalls == ()
    assert sum(note.subject == "psi" for note in snapshot.notes) == 2


def test_cpu_style_pressure_without_a_full_line_is_parsed() -> None:
    some, full = psi.parse_psi(b"some avg10=1.50 avg60=0.00 avg300=0.00 total=7\n")
    assert (some, full) == ((1.5, 0.0, 7), None)


@given(
    st.one_of(st.binary(), st.from_regex(rb"(some|full) avg10=[0-9.]* avg60=[0-9.]* total=[0-9]*\n?", fullmatch=True))
)
def test_any_bytes_give_a_stall_or_none(data: bytes) -> None:
    for line in psi.parse_psi(data):
        assert line is None or (0 <= line.avg10 <= 100 and line.total_us >= 0)
