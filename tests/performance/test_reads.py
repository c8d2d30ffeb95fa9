"""What a sample costs, counted in files that it opens: times differ between machines, counts do not.

The time on one machine stands in docs/performance.md.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nodeagent.config.schema import SamplingConfig
from nodeagent.sampling.hostfs import host
from nodeagent.sampling.sampler import Sampler
from tests.support.trees import Node, TreePod, write_node

PODS = 110


class _Opened:
    """Counts what this process opens below a directory. An audit hook cannot be removed, so there is only one."""

    def __init__(self) -> None:
        self.root = ""
        self.paths: list[str] = []
        sys.addaudithook(self._count)

    def _count(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.root and event in ("open", "os.listdir", "os.scandir"):
            self.paths.append(str(arguments[0]))

    def during(self, root: str, action: Callable[[], object]) -> list[str]:
        """The paths that the action opened or listed."""
        self.root, self.paths = root, []
        try:
            action()
        finally:
            self.root = ""
        return self.paths


_opened = _Opened()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    pods = tuple(TreePod(f"default/pod-{number}") for number in range(PODS))
    return Node(pods=pods)


@pytest.fixture
def sampler(tmp_path: Path, node: Node) -> Iterator[Sampler]:
    root = write_node(tmp_path, node)
    # A live host, of which descriptors are kept: the tree is on a real file system.
    with Sampler(host.Host(str(root)), SamplingConfig(), node_name="n") as made:
        yield made


def test_a_node_sample_opens_no_file_that_it_has_opened_before(sampler: Sampler, tmp_path: Path) -> None:
    sampler.sample()
    assert _opened.during(str(tmp_path), lambda: sampler.sample_node(disks=False, limits=False)) == []


def test_a_sample_of_pods_that_did_not_change_opens_less_than_one_file_for_each(
    sampler: Sampler, tmp_path: Path
) -> None:
    def read_pods() -> None:
        sampler.read_pods(sampler.sample_node(), fresh=False)

    assert len(_opened.during(str(tmp_path), read_pods)) > PODS, "the first sample opens several files of a pod"
    assert len(_opened.during(str(tmp_path), read_pods)) < PODS / 2
