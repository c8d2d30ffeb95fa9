"""Which tests run beside each other when pytest-xdist runs several at once (`pytest -n 2`).

Promises:

1. The tests of a module run in one worker, so that what they share is made once.
2. What needs the machine to itself is one group: the virtual machine, and the tests that start agents and fill pods of
   real cgroups, which would be pressure for each other, with those that count every fork of the machine.
3. The groups that take longest start first.
4. The names of tests stay as they are without xdist, so that `--last-failed` finds them.
"""

from typing import Any, Final

import pytest

GROUPS: Final = {
    "tests/vm/": "virtual machine",
    "tests/scenarios/": "agents",
    "tests/agent/": "agents",
    "tests/unit/sampling/events/test_fork_meter.py": "agents",
    "tests/unit/sampling/events/test_process_connector.py": "agents",
}
"""The group of each directory whose tests do not run beside each other; the longest first."""


def group_of(nodeid: str) -> str:
    """The tests of one group run in one worker, in their order."""
    for directory, group in GROUPS.items():
        if nodeid.startswith(directory):
            return group
    return nodeid.partition("::")[0]


def rank(nodeid: str) -> int:
    """When the group of a test starts: the lowest first."""
    ranks = (rank for rank, directory in enumerate(GROUPS) if nodeid.startswith(directory))
    return next(ranks, len(GROUPS))


def make_scheduler(config: pytest.Config, log: Any) -> object:
    """Gives each worker one group after the other, in the order in which the tests are collected."""
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False
    return GroupScheduling(config, log)
