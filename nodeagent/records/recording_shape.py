"""Reads the values of a recording by the names of their fields, not by their positions.

A recording stores a NamedTuple as a list, and its header has the field names of every NamedTuple (`field_names`). So a
file of another version is readable: fields that this version does not have are skipped, missing ones get their default.

Theory of operation. `Shape` compiles the type hints of `RecordedSample`, together with the field names of one file, to
a tree of converters. Each converter gets the list that was read and, for speed, the list and the value of the sample
before. What is the same list as before is not converted again. A value of a wrong type raises `MismatchError`, so that
a reader only sees values of the types that the model declares.
"""

import enum
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, Protocol

from nodeagent.model.recording import RecordedSample, RecordingHeader
from nodeagent.model.signals import Signal
from nodeagent.model.snapshot import NodeSnapshot, Observation

FieldNames = Mapping[str, tuple[str, ...]]
"""The fields of each NamedTuple, by the name of its class."""

NOT_RECORDED: Final = "not recorded"
_NONE: Final = type(None)
_NUMBERS: Final = frozenset({int, float})


class MismatchError(ValueError):
    """A stored value does not have the type that this version expects."""


class UnknownValueError(MismatchError):
    """A word of an enumeration that this version does not have."""


class Converter(Protocol):
    """Makes a value of one type from what was stored."""

    def convert(self, raw: Any, old_raw: Any, old: Any, /) -> Any:
        """`old` is the value that `old_raw` was converted to; both None if there is none. Raises MismatchError."""


class _Leaf(NamedTuple):
    types: frozenset[type]

    def convert(self, raw: Any, _old_raw: Any, _old: Any, /) -> Any:
        if type(raw) in self.types:
            return raw
        raise MismatchError(f"{type(raw).__name__} instead of {_type_names(self.types)}")


class _Enum(NamedTuple):
    name: str
    members: Mapping[Any, enum.Enum]

    def convert(self, raw: Any, _old_raw: Any, _old: Any, /) -> Any:
        if type(raw) is str and raw in self.members:
            return self.members[raw]
        raise UnknownValueError(f"{str(raw)[:40]!r} is no {self.name} of this version")


class _Optional(NamedTuple):
    inner: Converter

    def convert(self, raw: Any, old_raw: Any, old: Any, /) -> Any:
        if raw is None:
            return None
        try:
            return self.inner.convert(raw, old_raw, old)
        except UnknownValueError:
            return None


class _Sequence(NamedTuple):
    item: Converter

    def convert(self, raw: Any, old_raw: Any, old: Any, /) -> Any:
        if type(raw) is not list:
            raise MismatchError(f"{type(raw).__name__} instead of a list")
        convert = self.item.convert
        try:
            if old is not None and type(old_raw) is list and len(raw) == len(old_raw) == len(old):
                return tuple(
                    [
                        value if now is before else convert(now, before, value)
                        for now, before, value in zip(raw, old_raw, old, strict=True)
                    ]
                )
            return tuple([convert(each, None, None) for each in raw])
        except UnknownValueError:
            return self._known(raw)

    def _known(self, raw: list[Any]) -> tuple[Any, ...]:
        """The items without those that only a newer version knows."""
        items = []
        for each in raw:
            try:
                items.append(self.item.convert(each, None, None))
            except UnknownValueError:
                continue
        return tuple(items)


class _Mapping(NamedTuple):
    key: Converter
    value: Converter

    def convert(self, raw: Any, old_raw: Any, old: Any, /) -> Any:
        if type(raw) is not dict:
            raise MismatchError(f"{type(raw).__name__} instead of a map")
        before = old_raw if type(old_raw) is dict else {}
        values = {}
        for stored, each in raw.items():
            try:
                key = self.key.convert(stored, None, None)
                values[key] = self.value.convert(each, before.get(stored), old.get(key) if old else None)
            except UnknownValueError:
                continue
        return values


class _Record:
    """A NamedTuple."""

    def __init__(self, cls: Any, stored: tuple[str, ...]) -> None:
        self._make: Callable[[Any], Any] = cls._make
        self._name: str = cls.__name__
        self._width = len(stored)
        positions = {name: position for position, name in enumerate(stored)}
        self._positions = [positions.get(name, -1) for name in cls._fields]
        self._same = self._positions == list(range(self._width))
        self._defaults: Mapping[str, Any] = cls._field_defaults
        self._names: tuple[str, ...] = cls._fields
        self._hints = _hints(cls)
        self._converters: list[Converter] = []

    def compile(self, converter_for: Callable[[Any], Converter]) -> None:
        self._converters = [converter_for(hint) for hint in self._hints.values()]

    def convert(self, raw: Any, old_raw: Any, old: Any, /) -> Any:
        if raw is old_raw and old is not None:
            return old
        if type(raw) is not list or len(raw) != self._width:
            raise MismatchError(f"not the fields of {self._name}")
        if old is None or type(old_raw) is not list or len(old_raw) != self._width:
            old_raw, old = [None] * self._width, [None] * len(self._positions)
            if self._same:
                return self._make(
                    [each.convert(now, None, None) for each, now in zip(self._converters, raw, strict=True)]
                )
        elif self._same:
            return self._make(
                [
                    value if now is before else each.convert(now, before, value)
                    for each, now, before, value in zip(self._converters, raw, old_raw, old, strict=True)
                ]
            )
        return self._make([self._field(index, raw, old_raw, old) for index in range(len(self._positions))])

    def _field(self, index: int, raw: list[Any], old_raw: Any, old: Any) -> Any:
        position = self._positions[index]
        if position >= 0:
            return self._converters[index].convert(raw[position], old_raw[position], old[index])
        name = self._names[index]
        if name in self._defaults:
            return self._defaults[name]
        return _empty(self._hints[name])


@functools.cache
def _hints(cls: Any) -> Mapping[str, Any]:
    hints = typing.get_type_hints(cls)
    return {name: hints[name] for name in cls._fields}


def _empty(hint: Any) -> Any:
    """The value of a field that the file does not have and that has no default."""
    origin = typing.get_origin(hint)
    if _NONE in typing.get_args(hint):
        return None
    if origin is tuple:
        return ()
    if hint in (str, int, float, bool):
        return hint()
    if origin is not None and issubclass(origin, Mapping):
        return {}
    raise MismatchError(f"a field of type {hint} is missing")


class Shape:
    """The values of one file."""

    def __init__(self, fields: FieldNames) -> None:
        """`fields` is what the file's header lists; a type that it lacks is read as one without fields."""
        self._fields = fields
        self._records: dict[Any, _Record] = {}
        self._sample = self._converter(RecordedSample)

    @property
    def is_current(self) -> bool:
        """Whether the file has exactly the fields of this version."""
        return self._fields == field_names()

    def sample(self, raw: Any, old_raw: Any = None, old: RecordedSample | None = None) -> RecordedSample:
        """The sample, made from that before it where both are the same. Raises MismatchError."""
        sample: RecordedSample = self._sample.convert(raw, old_raw, old)
        if len(sample.snapshot.observations) < len(Signal):
            return sample._replace(snapshot=with_all_signals(sample.snapshot))
        return sample

    def header(self, raw: Any) -> RecordingHeader:
        """Raises MismatchError."""
        header: RecordingHeader = self._converter(RecordingHeader).convert(raw, None, None)
        return header

    def _converter(self, hint: Any) -> Converter:
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if origin in (typing.Union, types.UnionType):
            inner = [each for each in args if each is not _NONE]
            if len(inner) == 1:
                return _Optional(self._converter(inner[0]))
            return _Leaf(frozenset(args))
        if origin is tuple:
            return _Sequence(self._converter(args[0]))
        if origin is not None and issubclass(origin, Mapping):
            return _Mapping(self._converter(args[0]), self._converter(args[1]))
        if hasattr(hint, "_fields"):
            return self._record(hint)
        if issubclass(hint, enum.Enum):
            return _Enum(hint.__name__, {member.value: member for member in hint})
        # An implausible reading may be a fraction where whole numbers are declared; the policy reports it.
        return _Leaf(_NUMBERS if hint in _NUMBERS else frozenset({hint}))

    def _record(self, cls: Any) -> _Record:
        if cls not in self._records:
            record = self._records[cls] = _Record(cls, self._fields.get(cls.__name__, ()))
            record.compile(self._converter)
        return self._records[cls]


def shape_of(fields: FieldNames) -> Shape:
    """The shape of a file with these fields; that of several files with the same fields is made once."""
    return _shape_of(tuple(sorted(fields.items())))


@functools.lru_cache(maxsize=4)
def _shape_of(fields: tuple[tuple[str, tuple[str, ...]], ...]) -> Shape:
    return Shape(dict(fields))


def with_all_signals(snapshot: NodeSnapshot) -> NodeSnapshot:
    """The snapshot with an unknown observation for each signal that was not recorded."""
    if len(snapshot.observations) == len(Signal):
        return snapshot
    at = snapshot.taken_at
    missing = {signal: Observation(signal, None, None, at, "", NOT_RECORDED) for signal in Signal}
    return snapshot._replace(observations={**missing, **snapshot.observations})


@functools.cache
def field_names() -> FieldNames:
    """The fields of every NamedTuple of a recording in this version."""
    found: dict[str, tuple[str, ...]] = {}
    waiting: list[Any] = [RecordedSample, RecordingHeader]
    while waiting:
        hint = waiting.pop()
        if hasattr(hint, "_fields"):
            if hint.__name__ not in found:
                found[hint.__name__] = hint._fields
                waiting.extend(_hints(hint).values())
        else:
            waiting.extend(typing.get_args(hint))
    return dict(sorted(found.items()))


def _type_names(types_: frozenset[type]) -> str:
    return " or ".join(sorted(each.__name__ for each in types_))
