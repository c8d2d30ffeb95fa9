"""Growth of a pod is measured between kept samples that are far enough apart."""

from typing import Any

import pytest

from nodeagent.model import (
    DiskLayout,
    PodView,
    Signal,
)
from nodeagent.policy import usage_growth
from tests.support.nodes import NOW, snapshot, view


def processes(name: str, count: int, **more: Any) -> PodView:
    return view(name, usage_more={"process_count": count, "thread_count": count}, **more)


def test_growth_is_measured_over_at_least_half_the_sample_distance() -> None:
    growth = usage_growth.GrowthState()
    for second in range(8):
        growth = usage_growth.record_sample(growth, snapshot(processes("one", 100 + second), at=NOW + second))
    rate = usage_growth.growth_rate(growth, Signal.PID, DiskLayout.SINGLE, at=NOW + 8)
    now = processes("one", 108).usage
    assert rate(now, 108) == pytest.approx(1.0)


@pytest.mark.parametrize("ranked_by", [1, 160])
def test_growth_is_of_the_threads_also_where_the_order_counts_processes(ranked_by: int) -> None:
    growth = usage_growth.GrowthState()
    for second in (0, 6):
        leak = view("leak", usage_more={"process_count": 1, "thread_count": 100 + 5 * second})
        growth = usage_growth.record_sample(growth, snapshot(leak, at=NOW + second))
    now = view("leak", usage_more={"process_count": 1, "thread_count": 160}).usage
    assert usage_growth.certain_growth_rate(growth, Signal.PID, at=NOW + 12)(now, ranked_by) == pytest.approx(5.0)
