"""Reads only the snapshots of a recording, several times as fast as whole samples: for simulations over weeks.

Promises:

1. The snapshots are those of `Recording.samples`, equal in every field that a decision reads. `notes` is empty; the
   verdicts and conditions of the sample are not read at all.
2. A file whose header lists other fields than this version's is read in the ordinary way, with the same result.

Theory of operation. Whole samples are made from a tree of stored lists, which each change copies along its path and
which is then compared with the one before. Here a change is applied to the values themselves: what it does not name is
the same object as before. Verdicts are not decoded, because an entry is a map from the field's position to its change,
and msgspec can leave a value as bytes. `compile_change` makes one function for each type: it gets the old value and a
change in the form that `recording_format.change_between` writes, and returns the new value.
"""

import enum
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, Final

from nodeagent.model.recording import RecordedSample
from nodeagent.model.snapshot import NodeSnapshot
from nodeagent.records import recording_format, recording_shape
from nodeagent.records.recording_format import FormatError, Frame
from nodeagent.records.recording_shape import MismatchError

SNAPSHOT: Final = RecordedSample._fields.index("snapshot")
_SKIPPED: Final = NodeSnapshot._fields.index("notes")
_NONE: Final = type(None)
_ABSENT: Final = object()

Change = Callable[[Any, Any], Any]
"""(old value, change) -> new value. The old value is `_ABSENT` if the change is a whole one. Raises MismatchError."""


class LeanReader:
    """The snapshots of the groups of one file."""

    def __init__(self) -> None:
        import msgspec

        self._change = compile_change(NodeSnapshot)
        self._entry = msgspec.msgpack.Decoder(dict[int, msgspec.Raw] | list[msgspec.Raw])
        self._decode = msgspec.msgpack.Decoder().decode
        self._errors = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
        self._position = (-1, -1)
        self._snapshot: NodeSnapshot | None = None

    def read(self, file: BinaryIO, frame: Frame) -> Iterator[NodeSnapshot]:
        """The snapshots of a frame, oldest first. Raises FormatError and MismatchError."""
        index = frame.position
        for data in recording_format.raw_entries(file, frame):
            if index and self._position != (frame.group, index - 1):
                raise FormatError("the one before is missing")
            self._position = (-1, -1)
            try:
                entry = self._entry.decode(data)
                if type(entry) is dict:
                    change = self._decode(entry[SNAPSHOT]) if SNAPSHOT in entry else {}
                elif len(entry) == 1:
                    stored = self._decode(entry[0])[SNAPSHOT]
                    stored[_SKIPPED] = []
                    change = [stored]
                else:
                    raise FormatError("no change of this version")
            except self._errors as error:
                raise FormatError(f"has an entry that cannot be read: {error}") from error
            except (TypeError, LookupError) as error:
                raise FormatError("the first one is not whole") from error
            if index == 0 and type(change) is not list:
                raise FormatError("the first one is not whole")
            if type(change) is dict:
                change.pop(_SKIPPED, None)
            before = self._snapshot if index else _ABSENT
            self._snapshot = snapshot = recording_shape.with_all_signals(self._change(before, change))
            self._position = (frame.group, index)
            index += 1
            yield snapshot


def compile_change(hint: Any, _made: dict[Any, Any] | None = None) -> Change:
    """The function for one type of the model."""
    made = _made if _made is not None else {}
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        inner = [each for each in args if each is not _NONE]
        if len(inner) == 1:
            return _optional(compile_change(inner[0], made))
        return _leaf(frozenset(args))
    if origin is tuple:
        return _sequence(compile_change(args[0], made))
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(_leaf_or_enum(args[0]), compile_change(args[1], made))
    if hasattr(hint, "_fields"):
        if hint not in made:
            changes: list[Change] = []
            plain: list[frozenset[type]] = []
            made[hint] = _record(hint, changes, plain)
            hints = typing.get_type_hints(hint)
            changes.extend([compile_change(hints[name], made) for name in hint._fields])
            plain.extend([_plain_types(hints[name]) for name in hint._fields])
        found: Change = made[hint]
        return found
    return _leaf_or_enum(hint)


def _plain_types(hint: Any) -> frozenset[type]:
    """The types of a stored value that is the new value itself, without a call; empty if there is none."""
    inner = [each for each in typing.get_args(hint) if each is not _NONE] or [hint]
    if inner == [int] or inner == [float]:
        return frozenset({int, float})
    return frozenset({bool}) if inner == [bool] else frozenset()


def _leaf_or_enum(hint: Any) -> Change:
    if issubclass(hint, enum.Enum):
        return _enum({member.value: member for member in hint}, hint.__name__)
    # An implausible reading may be a fraction where whole numbers are declared; the policy reports it.
    return _leaf(frozenset({int, float}) if hint in (int, float) else frozenset({hint}))


def _leaf(allowed: frozenset[type]) -> Change:
    def change(_: Any, raw: Any) -> Any:
        if type(raw) is list and len(raw) == 1:
            raw = raw[0]
        if type(raw) in allowed:
            return raw
        raise MismatchError(f"{type(raw).__name__} is not the type of this field")

    return change


def _enum(members: Mapping[Any, enum.Enum], name: str) -> Change:
    def change(_: Any, raw: Any) -> Any:
        if type(raw) is list and len(raw) == 1:
            raw = raw[0]
        if type(raw) is str and raw in members:
            return members[raw]
        raise MismatchError(f"{str(raw)[:40]!r} is no {name} of this version")

    return change


def _optional(inner: Change) -> Change:
    def change(old: Any, raw: Any) -> Any:
        if raw is None or (type(raw) is list and len(raw) == 1 and raw[0] is None):
            return None
        return inner(_ABSENT if old is None else old, raw)

    return change


def _record(cls: Any, changes: list[Change], plain: list[frozenset[type]]) -> Change:
    new, width = tuple.__new__, len(cls._fields)  # `_make` without its check of the length: 0.2 us for each value

    def change(old: Any, raw: Any) -> Any:
        if type(raw) is dict:
            if old is _ABSENT:
                raise MismatchError("a change of a value that does not exist")
            values = list(old)
            try:
                for position, each in raw.items():
                    if type(each) in plain[position]:
                        values[position] = each
                    else:
                        values[position] = changes[position](values[position], each)
            except (IndexError, TypeError) as error:
                raise MismatchError("a change of a field that does not exist") from error
            return new(cls, values)
        stored = raw[0] if type(raw) is list and len(raw) == 1 else None
        if type(stored) is not list or len(stored) != width:
            raise MismatchError(f"not the fields of {cls.__name__}")
        return new(cls, [each(_ABSENT, [now]) for each, now in zip(changes, stored, strict=True)])

    return change


def _sequence(item: Change) -> Change:
    def change(old: Any, raw: Any) -> Any:
        if type(raw) is dict:
            return _items_changed(old, raw)
        if type(raw) is list and len(raw) == 1 and type(raw[0]) is list:
            return tuple([item(_ABSENT, [each]) for each in raw[0]])
        if type(raw) is list and len(raw) == 2 and type(raw[0]) is list and type(raw[1]) is dict:
            if old is _ABSENT:
                raise MismatchError("a change of an item that does not exist")
            recording_format.check_sources(raw[0], len(old), len(raw[1]))
            changed = _items_changed([_ABSENT if each < 0 else old[each] for each in raw[0]], raw[1])
            if _ABSENT in changed:
                raise MismatchError("an item is missing")
            return changed
        raise MismatchError("no change of a list")

    def _items_changed(old: Any, raw: Mapping[Any, Any]) -> tuple[Any, ...]:
        if old is _ABSENT:
            raise MismatchError("a change of a value that does not exist")
        values = list(old)
        try:
            for position, each in raw.items():
                values[position] = item(values[position], each)
        except (IndexError, TypeError) as error:
            raise MismatchError("a change of an item that does not exist") from error
        return tuple(values)

    return change


def _mapping(key: Change, value: Change) -> Change:
    def change(old: Any, raw: Any) -> Any:
        if type(raw) is dict:
            if old is _ABSENT:
                raise MismatchError("a change of a value that does not exist")
            values = dict(old)
            for stored, each in raw.items():
                name = key(None, stored)
                values[name] = value(values.get(name, _ABSENT), each)
            return values
        if type(raw) is list and len(raw) == 1 and type(raw[0]) is dict:
            return {key(None, stored): value(_ABSENT, [each]) for stored, each in raw[0].items()}
        raise MismatchError("no change of a map")

    return change
