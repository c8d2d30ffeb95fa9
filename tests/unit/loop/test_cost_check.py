"""What the agent costs: read now and then, and the interval follows."""

from nodeagent.loop.cost_check import CostCheck
from nodeagent.runtime import own_cost


def test_the_factor_stays_between_two_readings_and_ends_once_the_agent_is_cheap() -> None:
    check = CostCheck()
    assert check.check(0.0, interval_factor=1.0).cpu_share is None
    between = check.check(own_cost.READ_EVERY_S / 2, interval_factor=4.0)
    assert (between.cpu_share, between.interval_factor) == (None, 4.0)
    # As if a day had passed: the CPU time since the first reading is nothing compared with it.
    after = check.check(86_400.0, interval_factor=4.0)
    assert after.cpu_share is not None
    assert after.interval_factor == 1.0
