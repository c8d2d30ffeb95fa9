"""The protobuf wire format, as far as the CRI's messages need it: varints, texts and messages in messages.

https://protobuf.dev/programming-guides/encoding/. Generated classes would need the protobuf package and its native code
for a dozen fields. Unknown fields are skipped, as every reader of protobuf does.
"""

from collections.abc import Iterator
from typing import Final

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
"""Wire types."""
_FIXED: Final = {_FIXED64: 8, _FIXED32: 4}
_MAX_VARINT_BYTES: Final = 10


class MalformedError(ValueError):
    """The bytes are no protobuf message."""


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field in the order of the message: int for a varint, bytes for all others. Raises
    MalformedError."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        if wire == _BYTES:
            size, at = _varint(message, at)
        elif wire in _FIXED:
            size = _FIXED[wire]
        else:
            raise MalformedError(f"wire type {wire} at byte {at}")
        if at + size > len(message):
            raise MalformedError(f"field {number} ends after the message")
        yield number, message[at : at + size]
        at += size


def texts(message: bytes, number: int) -> list[str]:
    """The values of a field of strings."""
    return [value.decode("utf-8", "replace") for value in messages(message, number)]


def text(message: bytes, number: int) -> str:
    """The value of a string; empty if it is not set. The last one counts, as protobuf says."""
    return (texts(message, number) or [""])[-1]


def number_of(message: bytes, number: int) -> int:
    """The value of an unsigned number, an enum or a bool; 0 if it is not set."""
    return next((value for each, value in reversed(list(fields(message))) if each == number and type(value) is int), 0)


def messages(message: bytes, number: int) -> list[bytes]:
    """The values of a field of messages."""
    return [value for each, value in fields(message) if each == number and isinstance(value, bytes)]


def text_map(message: bytes, number: int) -> dict[str, str]:
    """The value of a map<string, string>."""
    return {text(entry, 1): text(entry, 2) for entry in messages(message, number)}


def encode(number: int, value: int | str | bytes) -> bytes:
    """One field: a varint, a string or a message."""
    if isinstance(value, int):
        return _encode_varint(number << 3 | _VARINT) + _encode_varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _encode_varint(number << 3 | _BYTES) + _encode_varint(len(data)) + data


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(value, the byte after it)."""
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        if at + index >= len(data):
            raise MalformedError("the message ends within a number")
        byte = data[at + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at + index + 1
    raise MalformedError(f"a number of more than {_MAX_VARINT_BYTES} bytes")


def _encode_varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
