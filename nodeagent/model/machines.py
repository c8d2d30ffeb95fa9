"""State machines as data: each machine of the agent is one table that the code runs and the documents print.

A module that owns a machine exports `TRANSITIONS`, a mapping from every (state, event) to the next state, and guards:
functions that turn a sample or a result into an event. No other code assigns a state. A condition that decides between
two next states belongs to the guard and gives two events, so that the table alone decides.
"""

import enum
from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar

State = TypeVar("State", bound=enum.StrEnum)
Event = TypeVar("Event", bound=enum.StrEnum)


class Machine(NamedTuple, Generic[State, Event]):
    """One machine, complete enough to print it."""

    name: str
    """A heading: `Evictions in flight`."""
    module: str
    """The file of its table and guards, below the repository's root."""
    states: type[State]
    events: type[Event]
    transitions: Mapping[tuple[State, Event], State | None]
    """Every pair. None: the value is removed."""
    meanings: Mapping[Event, str] = {}
    """When the guards give the event."""
    remarks: Mapping[tuple[State, Event], str] = {}
    """Footnotes of single pairs."""

    def missing(self) -> list[tuple[State, Event]]:
        """Pairs that the table does not list."""
        return [
            (state, event) for state in self.states for event in self.events if (state, event) not in self.transitions
        ]


def row(
    state: State, events: type[Event], changes: Mapping[str, State | None]
) -> dict[tuple[State, Event], State | None]:
    """The pairs of one state: an event that `changes` does not name keeps it."""
    return {(state, event): changes.get(event.name, state) for event in events}


def to_markdown(machine: Machine[State, Event]) -> str:
    """The machine as a Markdown table, one row for each state and one column for each event, with footnotes and the
    meaning of each event below. `=`: the state stays."""
    numbers: dict[str, int] = {}
    lines = [
        "| | " + " | ".join(_code(event) for event in machine.events) + " |",
        "| --- |" + " --- |" * len(machine.events),
    ]
    for state in machine.states:
        cells = []
        for event in machine.events:
            after = machine.transitions[state, event]
            text = "(removed)" if after is None else "=" if after is state else _code(after)
            remark = machine.remarks.get((state, event))
            if remark is not None:
                text += f" [{numbers.setdefault(remark, len(numbers) + 1)}]"
            cells.append(text)
        lines.append(f"| **{_code(state)}** | " + " | ".join(cells) + " |")
    lines.append("")
    lines += [f"- `{event}`: {machine.meanings[event]}" for event in machine.events if event in machine.meanings]
    if machine.meanings:
        lines.append("")
    lines += [f"{number}. {remark}" for remark, number in numbers.items()]
    return "\n".join(lines).strip() + "\n"


def _code(member: enum.StrEnum) -> str:
    return f"`{member}`"
