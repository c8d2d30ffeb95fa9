"""Samples as a recorder stores them: a series of a node with pods, and any value that the model allows."""

import enum
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from nodeagent.model import (
    ConditionStatus,
    ConditionType,
    ConditionVerdict,
    Signal,
    SignalState,
    SignalVerdict,
    Stall,
    StallScope,
    ThresholdVerdict,
)
from nodeagent.model.recording import RecordedSample, RecordingHeader
from tests.support import nodes

HEADER = RecordingHeader("node-1", "0.1.0", "abcd1234", "boot-1", nodes.WALL, "mode: enforce\n", "6.1", (nodes.hard(),))


def sample(index: int = 0, *, pods: int = 3, available: int = 4 * nodes.GI) -> RecordedSample:
    """The sample `index` seconds after the first. The usage of one pod after the other grows."""
    at = nodes.NOW + index
    views = [
        nodes.view(f"web-{number}", (100 + number + (index if index % pods == number else 0)) * nodes.MI)
        for number in range(pods)
    ]
    snapshot = nodes.snapshot(*views, at=at, available={Signal.MEMORY: available - index * nodes.MI})
    snapshot = snapshot._replace(
        stalls=(Stall(StallScope.NODE, "memory", 0.5 * index, 0.1, index, None, None, None, at),)
    )
    verdict = SignalVerdict(
        snapshot.observations[Signal.MEMORY],
        SignalState.OK,
        (ThresholdVerdict(nodes.hard(), nodes.GI, False, None, False),),
    )
    condition = ConditionVerdict(ConditionType.MEMORY_PRESSURE, ConditionStatus.FALSE, "Enough", "enough", nodes.NOW)
    return RecordedSample(snapshot, (verdict,), (condition,), zombies=index % 2)


def samples(count: int, **more: Any) -> list[RecordedSample]:
    return [sample(index, **more) for index in range(count)]


@functools.cache
def any_value(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of this type that a file can have: whole numbers of 64 bits, UTF-8. No NaN: it is unequal to itself."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([st.none() if each is type(None) else any_value(each) for each in args])
    if origin is tuple:
        return st.lists(any_value(args[0]), max_size=1).map(tuple)
    if origin is not None and issubclass(origin, Mapping):
        return st.dictionaries(any_value(args[0]), any_value(args[1]), max_size=1)
    if hasattr(hint, "_fields"):
        hints = typing.get_type_hints(hint)
        return st.tuples(*[any_value(hints[name]) for name in hint._fields]).map(hint._make)
    if issubclass(hint, enum.Enum):
        return st.sampled_from(list(hint))
    return _LEAVES[hint]


_LEAVES: dict[type, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(min_value=-(1 << 63), max_value=(1 << 64) - 1),
    float: st.floats(allow_nan=False),
    str: st.text(st.characters(codec="utf-8"), max_size=8),
}
