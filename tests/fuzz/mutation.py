"""Changes inputs at random: as bytes, as lines with numbers, and as JSON."""

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

NUMBERS: Final = (
    b"0",
    b"-1",
    b"1",
    b"007",
    b"+1",
    b"1_0",
    b" 1",
    b"1e309",
    b"1e-400",
    b"nan",
    b"-inf",
    b"0x10",
    b"4294967296",
    b"9223372036854775807",
    b"9223372036854775808",
    b"18446744073709551616",
    b"\xc2\xb2",  # a superscript two: str.isdigit() is true, int() raises
    b"\xd9\xa3",  # an Arabic three
    b"9" * 4301,  # more digits than int() converts
    b"",
)
"""What stands where a number is expected."""
WORDS: Final = (
    b"\0",
    b"\xff",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b"\n",
    b"\r\n",
    b"\x1b[2J",
    b" ",
    b"\t",
    b":",
    b"/",
    b"..",
    b"\\",
    b'"',
    b"{",
    b"[",
    b"}",
    b"max",
    b"\xe2\x80\xa8",
)
VALUES: Final[tuple[Any, ...]] = (
    None,
    True,
    0,
    -1,
    2**31,
    2**63 - 1,
    2**63,
    -(2**63) - 1,
    10**400,
    1e308,
    1.5,
    "",
    "0",
    "-1",
    "\u00b2",
    "9" * 4301,
    "1e309",
    "1Ei",
    "\0",
    "\ud800",
    "x" * 3000,
    "9999-12-31T23:59:59Z",
    "0001-01-01T00:00:00Z",
    "0001-01-01T00:00:00+23:59",
    "2026-01-01T00:00:00",
    [],
    {},
    [[]],
    {"": None},
)
"""What stands where a value of JSON is expected."""
_NUMBER: Final = re.compile(rb"\d+")
_DEEP: Final = 3000


def mutate(rng: random.Random, data: bytes, other: bytes, tokens: Sequence[bytes]) -> bytes:
    """`data` with one to four changes; `other` lends parts."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        change = rng.choice(_JSON if rng.random() < 0.5 and data[:1] in b"{[" and data else _BYTES)
        data = change(rng, data, other, tokens)
    return data


Change = Callable[[random.Random, bytes, bytes, Sequence[bytes]], bytes]


def _place(rng: random.Random, data: bytes) -> int:
    return rng.randrange(len(data) + 1)


def _flip(rng: random.Random, data: bytes, _other: bytes, _tokens: Sequence[bytes]) -> bytes:
    if not data:
        return bytes([rng.randrange(256)])
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def _remove(rng: random.Random, data: bytes, _other: bytes, _tokens: Sequence[bytes]) -> bytes:
    at = _place(rng, data)
    return data[:at] + data[at + rng.choice((1, 2, 8, 64)) :]


def _cut(rng: random.Random, data: bytes, _other: bytes, _tokens: Sequence[bytes]) -> bytes:
    return data[: _place(rng, data)]


def _repeat(rng: random.Random, data: bytes, _other: bytes, _tokens: Sequence[bytes]) -> bytes:
    at = _place(rng, data)
    part = data[at : at + rng.choice((1, 4, 32, 256))]
    return data[:at] + part * rng.choice((2, 3, 50)) + data[at:]


def _insert(rng: random.Random, data: bytes, _other: bytes, tokens: Sequence[bytes]) -> bytes:
    at = _place(rng, data)
    return data[:at] + rng.choice((*WORDS, *NUMBERS, *tokens, *tokens)) + data[at:]


def _number(rng: random.Random, data: bytes, _other: bytes, _tokens: Sequence[bytes]) -> bytes:
    found = list(_NUMBER.finditer(data))
    if not found:
        return data
    match = rng.choice(found)
    return data[: match.start()] + rng.choice(NUMBERS) + data[match.end() :]


def _splice(rng: random.Random, data: bytes, other: bytes, _tokens: Sequence[bytes]) -> bytes:
    return data[: _place(rng, data)] + other[_place(rng, other) :]


def _lines(rng: random.Random, data: bytes, other: bytes, _tokens: Sequence[bytes]) -> bytes:
    lines, others = data.split(b"\n"), other.split(b"\n")
    at = rng.randrange(len(lines))
    match rng.randrange(4):
        case 0:
            del lines[at]
        case 1:
            lines.insert(at, rng.choice(lines))
        case 2:
            lines[at] = rng.choice(others)
        case _:
            rng.shuffle(lines)
    return b"\n".join(lines)


def _json(rng: random.Random, data: bytes, _other: bytes, tokens: Sequence[bytes]) -> bytes:
    """One value of a document, or of one of its lines, replaced, removed or doubled."""
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    try:
        value = json.loads(lines[at])
    except (ValueError, RecursionError):
        return _flip(rng, data, b"", tokens)
    lines[at] = json.dumps(_changed(rng, value, tokens)).encode()
    return b"\n".join(lines)


def _deep(rng: random.Random, data: bytes, _other: bytes, _tokens: Sequence[bytes]) -> bytes:
    """Nested where a value is."""
    at = data.find(b":", _place(rng, data)) + 1
    return data[:at] + rng.choice((b"[", b'{"a":')) * _DEEP + data[at:]


def _changed(rng: random.Random, value: Any, tokens: Sequence[bytes]) -> Any:
    """The document with one change, somewhere."""
    inner = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if not inner or rng.random() < 0.15:
        word = rng.choice(tokens).decode("utf-8", "replace") if tokens and rng.random() < 0.3 else None
        return rng.choice(VALUES) if word is None else word
    key = rng.choice(inner)
    copy = dict(value) if isinstance(value, dict) else list(value)
    match rng.randrange(12):
        case 0:
            del copy[key]
        case 1 if isinstance(copy, list):
            copy += copy[key : key + 1] * rng.choice((1, 30))
        case _:
            copy[key] = _changed(rng, value[key], tokens)
    return copy


_BYTES: Final[tuple[Change, ...]] = (_flip, _remove, _cut, _repeat, _insert, _insert, _number, _number, _splice, _lines)
_JSON: Final[tuple[Change, ...]] = (_json, _json, _json, _json, _json, _deep, _number)
