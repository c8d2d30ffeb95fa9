"""A machine prints as a table, and names the pairs that its table lacks."""

import enum

from nodeagent.model.machines import Machine, to_markdown


class _State(enum.StrEnum):
    OPEN = "open"
    SHUT = "shut"


class _Event(enum.StrEnum):
    PUSH = "push"
    LOCK = "lock"


_DOOR = Machine(
    "Door",
    "tests/unit/model/test_machines.py",
    _State,
    _Event,
    {
        (_State.OPEN, _Event.PUSH): _State.SHUT,
        (_State.OPEN, _Event.LOCK): _State.OPEN,
        (_State.SHUT, _Event.PUSH): _State.OPEN,
        (_State.SHUT, _Event.LOCK): None,
    },
    meanings={_Event.PUSH: "a person pushes"},
    remarks={(_State.SHUT, _Event.LOCK): "for good"},
)


def test_a_machine_prints_one_row_for_each_state_with_footnotes_and_meanings() -> None:
    assert to_markdown(_DOOR) == (
        "| | `push` | `lock` |\n"
        "| --- | --- | --- |\n"
        "| **`open`** | `shut` | = |\n"
        "| **`shut`** | `open` | (removed) [1] |\n"
        "\n"
        "- `push`: a person pushes\n"
        "\n"
        "1. for good\n"
    )


def test_a_machine_names_the_pairs_that_its_table_lacks() -> None:
    partial = {pair: state for pair, state in _DOOR.transitions.items() if pair[1] is not _Event.LOCK}

    assert _DOOR.missing() == []
    assert _DOOR._replace(transitions=partial).missing() == [(_State.OPEN, _Event.LOCK), (_State.SHUT, _Event.LOCK)]
