"""Fixtures of the tests of sampling: scratch cgroups that are removed again."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kubelet_cgroups import KubeletCgroups, reason_against
from tests.support.livenode import HIERARCHIES, remove_cgroup
from tests.support.pod_cgroups import PodCgroups


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """An empty cgroup of the v1 memory hierarchy."""
    directory = HIERARCHIES[0] / f"nodeagent-test-{uuid.uuid4().hex}"
    directory.mkdir()
    yield directory
    remove_cgroup(directory)


@pytest.fixture
def pods() -> Iterator[PodCgroups]:
    """Makes pods in the v1 pids hierarchy."""
    made = PodCgroups()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[KubeletCgroups]:
    reason = reason_against()
    if reason:
        pytest.skip(reason)
    made = KubeletCgroups(tmp_path / "log")
    try:
        yield made
    finally:
        made.remove()
