"""The groups of faults, by name."""

from collections.abc import Callable
from typing import Final

from tests.faults import api, clocks, lifecycle, replaced_node, runs, two_agents
from tests.faults.runs import Table


def whole_lifecycle(table: Table, every: int) -> None:
    """Start, stop and the world around the agent."""
    for part in (
        lifecycle.kills,
        lifecycle.full_disks,
        clocks.clocks_and_mounts,
        two_agents.two_agents,
        replaced_node.replaced_nodes,
    ):
        part(table, every)


GROUPS: Final[dict[str, Callable[[Table, int], None]]] = {
    "calls": runs.system_calls,
    "kernel": runs.kernel_files,
    "state": runs.state_bytes,
    "recording": runs.recording_bytes,
    "api": api.api_answers,
    "lifecycle": whole_lifecycle,
}
QUICK_EVERY: Final = {"calls": 29, "kernel": 97, "state": 31, "recording": 997, "api": 131, "lifecycle": 211}
"""With `--quick` one of so many: primes, so that every kind and place has its turn."""
