"""Which tests run beside each other when pytest-xdist runs several at once (`pytest -n 4`).

Promises:

1. The tests of a module run in one worker, so that what they share is made once. Only what uses both virtual machines
   is in two groups.
2. What would disturb each other is one group: the tests that start agents and fill pods of real cgroups, with those
   that count every fork of the machine; those in one virtual machine. What runs on either machine is divided so that
   all groups end together; the DaemonSet's image is built and run in one of them.
3. The groups, which take longest, start first. They wait much: the tests of no group run beside them, with the CPU time
   that they leave.
4. The names of tests stay as they are without xdist, so that `--last-failed` finds them.
"""

import contextlib
import os
import re
from typing import Any, Final

import pytest

AGENTS: Final = "agents"
OLDER_MACHINE: Final = "older machine"
NEWER_MACHINE: Final = "newer machine"
GROUPS: Final = (
    (
        re.compile(
            r"tests/vm/test_(container|daemonset_ramps|image_store|imagefs|images|leftover_brakes|memory_protection"
            r"|own_limit|pressure|release_image|swap)\.py|tests/vm/.*(newer_machine|\[systemd 257)"
        ),
        NEWER_MACHINE,
    ),
    (re.compile(r"tests/vm/"), OLDER_MACHINE),
    (
        re.compile(r"tests/(agent|scenarios)/|tests/unit/sampling/events/test_(fork_meter|process_connector)\.py"),
        AGENTS,
    ),
)
"""The group of the tests whose names match: the first that does."""
LONGEST_FIRST: Final = (OLDER_MACHINE, AGENTS, NEWER_MACHINE)
GIVES_WAY: Final = 5
"""The nice value of the tests of no group: a third of the CPU time of those of a group, if both want all of it."""


def group_of(nodeid: str) -> str:
    """The tests of one group run in one worker, in their order."""
    module = nodeid.partition("::")[0]
    return next((group for pattern, group in GROUPS if pattern.match(nodeid)), module)


def rank(nodeid: str) -> int:
    """When the group of a test starts: the lowest first."""
    group = group_of(nodeid)
    return LONGEST_FIRST.index(group) if group in LONGEST_FIRST else len(LONGEST_FIRST)


def set_priority(nodeid: str) -> None:
    """Of this thread and of what it starts, for a test of this name."""
    # Without root it stays nice.
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, 0 if group_of(nodeid) in LONGEST_FIRST else GIVES_WAY)


def make_scheduler(config: pytest.Config, log: Any) -> object:
    """Gives each worker one group after the other, in the order in which the tests are collected."""
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False
    return GroupScheduling(config, log)
