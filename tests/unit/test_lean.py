"""The lean NamedTuple against typing's: the same class statement made by both has to behave the same."""

import copy
import pickle
import typing
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent import lean


class Lean(lean.NamedTuple):
    """A record."""

    name: str
    size: int | None
    share: float = 0.5
    labels: Mapping[str, str] = {}

    @property
    def long(self) -> str:
        return f"{self.name} {self.size}"


class Plain(typing.NamedTuple):
    """A record."""

    name: str
    size: int | None
    share: float = 0.5
    labels: Mapping[str, str] = {}

    @property
    def long(self) -> str:
        return f"{self.name} {self.size}"


BOTH = pytest.mark.parametrize("made", [Lean, Plain])


@given(st.text(), st.none() | st.integers(), st.floats(allow_nan=False))
def test_records_hold_compare_hash_and_order_as_typings_do(name: str, size: int | None, share: float) -> None:
    ours, theirs = Lean(name, size, share=share), Plain(name, size, share=share)
    assert tuple(ours) == tuple(theirs)
    assert (ours.name, ours.size, ours.share, ours.labels) == (name, size, share, {})
    assert ours.long == theirs.long
    assert hash(Lean(name, size, share, ())) == hash(Plain(name, size, share, ()))  # type: ignore[arg-type]
    assert repr(ours).removeprefix("Lean") == repr(theirs).removeprefix("Plain")
    assert ours._asdict() == theirs._asdict()
    assert tuple(ours._replace(size=7)) == tuple(theirs._replace(size=7))
    assert type(ours._replace(size=7)) is Lean
    assert Lean._make(theirs) == ours


def test_records_describe_themselves_as_typings_do() -> None:
    for attribute in ("_fields", "_field_defaults", "__match_args__", "__doc__", "__annotations__", "__slots__"):
        assert getattr(Lean, attribute) == getattr(Plain, attribute)
    assert (Lean.__name__, Lean.__qualname__, Lean.__module__) == ("Lean", "Lean", __name__)
    assert not hasattr(Lean("a", 1), "__dict__")


@BOTH
def test_records_refuse_what_typings_refuse(made: Any) -> None:
    for arguments, keywords in (((), {}), (("a",), {}), (("a", 1, 2.0, {}, 5), {}), (("a", 1), {"no": 1})):
        with pytest.raises(TypeError):
            made(*arguments, **keywords)
    with pytest.raises(TypeError, match="multiple values"):
        made("a", 1, name="b")
    with pytest.raises(TypeError):
        made._make(["a"])
    with pytest.raises((ValueError, TypeError), match="unexpected field names"):
        made("a", 1)._replace(no=1)
    with pytest.raises(AttributeError):
        made("a", 1).name = "b"


@pytest.mark.parametrize("count", [1, 2, 12, 21, 22, 23, 24, 40])
def test_records_of_any_width_take_fields_by_place_and_by_name(count: int) -> None:
    names = [f"field_{number}" for number in range(count)]
    made: Any = types_new(lean.NamedTuple, {"__annotations__": dict.fromkeys(names, int), names[-1]: -1})
    values = range(count)
    assert made._make(values) == made(*values) == made(**dict(zip(names, values, strict=True))) == tuple(values)
    assert [getattr(made(*values), name) for name in names] == list(values)
    assert made(*values[:-1])[-1] == -1
    with pytest.raises(TypeError):
        made(*values, count)


@BOTH
def test_records_survive_copies_and_pickles(made: Any) -> None:
    record = made("a", None, 0.25, {"x": "y"})
    for again in (copy.copy(record), copy.deepcopy(record), pickle.loads(pickle.dumps(record))):
        assert again == record
        assert type(again) is made


@BOTH
def test_records_match_patterns(made: Any) -> None:
    match made("a", 1):
        case Lean(name, 1) | Plain(name, 1):
            assert name == "a"
        case _:
            pytest.fail("no match")


@BOTH
def test_other_libraries_take_records_for_named_tuples(made: Any) -> None:
    import msgspec

    assert msgspec.json.encode(made("a", None)) == b'["a",null,0.5,{}]'
    assert msgspec.json.decode(b'["a",null,0.5,{}]', type=made) == made("a", None)


def test_a_field_without_a_default_after_one_with_a_default_is_refused_by_both() -> None:
    body = {"__annotations__": {"a": int, "b": int}, "a": 1}
    for base in (lean.NamedTuple, typing.NamedTuple):
        with pytest.raises(TypeError):
            types_new(base, dict(body))


def types_new(base: Any, body: dict[str, Any]) -> type:
    import types

    return types.new_class("Made", (base,), exec_body=lambda namespace: namespace.update(body))


def test_what_is_annotated_can_be_read_again() -> None:
    annotated: Any = lean.Annotated[int, "bound", 2]
    assert lean.unwrapped(annotated) == (int, ("bound", 2))
    assert lean.unwrapped(int | None) == (int | None, ())


def test_silent_names_can_be_subscripted() -> None:
    silent: list[Any] = [lean.Final, lean.Any, lean.Protocol]
    assert all(name[int] is name for name in silent)
