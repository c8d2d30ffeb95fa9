"""The number of threads that the kernel can still make."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.config.schema import SamplingConfig
from nodeagent.model import NodeSnapshot, Observation, Signal
from nodeagent.sampling.hostfs.host import open_host
from nodeagent.sampling.node import pids
from nodeagent.sampling.sampler import Sampler
from tests.support.trees import Node, write_node


def _sample(root: str | Path, config: SamplingConfig | None = None) -> NodeSnapshot:
    with Sampler(open_host(str(root)), config or SamplingConfig(), node_name="n") as sampler:
        return sampler.sample()


def _read(root: str | Path, signal: Signal) -> Observation:
    return _sample(root).observations[signal]


def test_more_threads_than_allowed_is_a_negative_number(tmp_path: Path) -> None:
    assert _read(write_node(tmp_path, Node(threads=33_000)), Signal.PID).available == 32768 - 33_000


def test_the_smaller_limit_counts_and_one_is_enough(tmp_path: Path) -> None:
    root = write_node(tmp_path, Node(pid_max=40_000, threads_max=30_000))
    assert _read(root, Signal.PID).capacity == 30_000
    (tmp_path / "proc/sys/kernel/threads-max").unlink()
    assert _read(root, Signal.PID).capacity == 40_000
    (tmp_path / "proc/sys/kernel/pid_max").write_text("0\n")
    assert _read(root, Signal.PID).capacity is None


@given(st.binary())
def test_any_bytes_give_a_number_of_threads_or_none(data: bytes) -> None:
    threads = pids.parse_loadavg(data)
    assert threads is None or threads >= 0
