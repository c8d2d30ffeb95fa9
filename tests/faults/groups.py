"""The groups of faults, by name."""

from collections.abc import Callable
from typing import Final

from tests.faults import api, runs
from tests.faults.runs import Table

GROUPS: Final[dict[str, Callable[[Table, int], None]]] = {
    "calls": runs.system_calls,
    "kernel": runs.kernel_files,
    "state": runs.state_bytes,
    "recording": runs.recording_bytes,
    "api": api.api_answers,
}
QUICK_EVERY: Final = {"calls": 29, "kernel": 97, "state": 31, "recording": 997, "api": 131}
"""With `--quick` one of so many: primes, so that every kind and place has its turn."""
