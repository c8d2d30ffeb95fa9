"""Pods' cgroups, which several tests of actuators brake."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import freezer_cgroups


@pytest.fixture
def pod() -> Iterator[Path]:
    """A cgroup of the v1 freezer with a child, as a pod with a container."""
    with freezer_cgroups.freezer_pod() as directory:
        yield directory


@pytest.fixture
def unified(tmp_path: Path) -> Path:
    """Where cgroup v2 is "mounted": plain files with the cgroup `/pod`."""
    freezer_cgroups.make_unified_pod(tmp_path)
    return tmp_path
