"""Nothing grows in the whole agent while pods, evictions, reloads and outages come and go."""

import os
import re
import subprocess
import sys

import pytest

from benchmarks import soak
from benchmarks.soak import Reading
from tests.support.paths import REPOSITORY

MIB = 1 << 20
FLAT = [Reading(100 * n, 50 * MIB, 300_000, 90, 22, None, 10_000, MIB) for n in range(1, 11)]


@pytest.mark.timeout(600)
def test_a_short_soak_evicts_the_right_pods_and_nothing_grows() -> None:
    """`python -m benchmarks.soak` is the long one."""
    command = [sys.executable, "-m", "benchmarks.soak", "--part", "0.002"]
    done = subprocess.run(command, cwd=REPOSITORY, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    figures = re.match(
        r"(\d+) samples, (\d+) pods, (\d+) watch events, (\d+) evictions, (\d+) reloads, (\d+) outages", done.stdout
    )
    assert figures is not None, done.stdout
    samples, pods, events, evictions, reloads, outages = map(int, figures.groups())
    assert samples >= 2000
    assert pods >= 200
    assert events >= 2 * pods - 30  # the last pods are still there
    assert (evictions, reloads, outages) == (6, 2, 2)


def test_what_grows_is_found() -> None:
    assert soak.growth(FLAT) == []
    for column, slope in (("rss", 2 * MIB), ("blocks", 9_000), ("descriptors", 1), ("threads", 1), ("state", 5_000)):
        growing = [each._replace(**{column: getattr(each, column) + slope * n}) for n, each in enumerate(FLAT)]
        [finding] = soak.growth(growing)
        assert finding.startswith(f"{column} grew from ")
    [finding] = soak.growth([each._replace(recorder=soak.MAX_RECORDER + 1) for each in FLAT])
    assert finding.startswith("recorder has ")
    kernel = [each._replace(kernel=n * MIB) for n, each in enumerate(FLAT)]
    assert soak.growth(kernel) != []


def test_the_slope_is_that_of_a_line() -> None:
    line = [each._replace(rss=50 * MIB + 3 * each.samples) for each in FLAT]
    assert soak.slope(line, "rss") == pytest.approx(300_000.0)
    assert soak.slope(line, "threads") == 0.0
    assert soak.slope(line, "kernel") is None
    assert "+3e+05 B RSS, +0 blocks, +0 descriptors, +0 threads, - B kernel" in soak.table(line)
