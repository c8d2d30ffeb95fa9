"""The names that docs/support.md promises: `python -m tests.support.public_names` prints those of this tree.

A release stores them in `tests/data/public-names/VERSION.txt`.
"""

import argparse
import enum
from collections.abc import Iterator

from nodeagent.actuators.event_writer import EventReason
from nodeagent.commands import arguments
from nodeagent.config import keys
from nodeagent.model import ConditionType, NoteKind, OutcomeKind, RefusalCode, Signal
from nodeagent.telemetry import metric_families


def names() -> list[str]:
    """Each name with its kind, sorted: `key rateLimits.node.burst`, `metric nodeagent_up`."""
    return sorted({*_keys(), *_metrics(), *_words(), *_command_line(arguments.parser(), "nodeagent")})


def _keys() -> Iterator[str]:
    yield from (f"key {key.name}" for key in keys.top_level())
    for path, section in keys.sections():
        yield from (f"key {path}.{key.name}" for key in section)


def _metrics() -> Iterator[str]:
    for family in metric_families.FAMILIES:
        yield f"metric {family.name}"
        yield from (f"metric {family.name}{{{label}}}" for label in family.labels)


def _words() -> Iterator[str]:
    kinds: dict[str, type[enum.StrEnum]] = {
        "code": RefusalCode,
        "outcome": OutcomeKind,
        "note": NoteKind,
        "event": EventReason,
        "signal": Signal,
        "condition": ConditionType,
    }
    for kind, words in kinds.items():
        yield from (f"{kind} {word.value}" for word in words)


def _command_line(parser: argparse.ArgumentParser, command: str) -> Iterator[str]:
    yield f"command {command}"
    for action in parser._actions:
        yield from (f"option {command} {option}" for option in action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from _command_line(child, f"{command} {name}")


if __name__ == "__main__":
    print("\n".join(names()))
