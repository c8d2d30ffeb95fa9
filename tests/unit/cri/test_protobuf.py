"""The wire format of protobuf: what is encoded is read back, and nothing else is read as a message."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.cri import protobuf
from nodeagent.cri.protobuf import MalformedError


@given(st.lists(st.tuples(st.integers(1, 1 << 28), st.integers(0, (1 << 64) - 1) | st.binary(max_size=300))))
def test_what_is_encoded_is_read_back(values: list[tuple[int, int | bytes]]) -> None:
    message = b"".join(protobuf.encode(number, value) for number, value in values)
    assert list(protobuf.fields(message)) == values


@given(st.binary(max_size=200))
def test_any_bytes_are_fields_or_malformed(data: bytes) -> None:
    with contextlib.suppress(MalformedError):
        for _, value in protobuf.fields(data):
            assert isinstance(value, int | bytes)


def test_the_examples_of_the_specification() -> None:
    # https://protobuf.dev/programming-guides/encoding/
    assert list(protobuf.fields(bytes.fromhex("089601"))) == [(1, 150)]
    assert protobuf.text(bytes.fromhex("120774657374696e67"), 2) == "testing"
    assert protobuf.encode(1, 150) == bytes.fromhex("089601")


def test_fields_of_other_types_are_skipped() -> None:
    message = bytes.fromhex("0d01000000") + bytes.fromhex("110102030405060708") + protobuf.encode(3, "here")
    assert protobuf.text(message, 3) == "here"


def test_a_field_that_is_not_set_has_its_default() -> None:
    assert (protobuf.text(b"", 1), protobuf.number_of(b"", 1), protobuf.messages(b"", 1)) == ("", 0, [])


def test_of_a_field_that_is_set_twice_the_last_value_counts() -> None:
    assert protobuf.number_of(protobuf.encode(4, 1) + protobuf.encode(4, 7), 4) == 7
    assert protobuf.text(protobuf.encode(4, "a") + protobuf.encode(4, "b"), 4) == "b"


def test_a_map_is_a_list_of_entries() -> None:
    entries = [protobuf.encode(2, protobuf.encode(1, key) + protobuf.encode(2, key * 2)) for key in ("a", "b")]
    assert protobuf.text_map(b"".join(entries), 2) == {"a": "aa", "b": "bb"}


@pytest.mark.parametrize("data", [b"\x08", b"\x0a\x05abc", b"\x08" + b"\xff" * 11, b"\x0b"])
def test_a_message_that_ends_early_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedError):
        list(protobuf.fields(data))
