"""The state machines of the policy, for the documents."""

from collections.abc import Mapping
from typing import Any

from nodeagent.model.machines import Machine
from nodeagent.policy import conditions, in_flight, resize_stages, thresholds


def machines() -> Mapping[str, Machine[Any, Any]]:
    """Every machine of the policy, by its name."""
    tables: tuple[Machine[Any, Any], ...] = (
        thresholds.MACHINE,
        conditions.MACHINE,
        in_flight.MACHINE,
        resize_stages.MACHINE,
    )
    return {table.name: table for table in tables}
