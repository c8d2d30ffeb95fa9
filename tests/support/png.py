"""Smaller PNG files: the screenshots of text need a few colours, and Chromium writes 32 bits for each pixel."""

import collections
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_COLOURS: Final = 256


def shrink(path: Path) -> None:
    """Write the file again with its 256 most frequent colours, and the nearest of them for the others.

    For 8-bit RGB or RGBA without transparency, as Chromium writes it; ValueError for others.
    """
    chunks = list(_chunks(path.read_bytes()))
    width, height, depth, kind = struct.unpack(">IIBB", chunks[0][1][:10])
    if depth != 8 or kind not in (2, 6):
        raise ValueError(f"{path}: not 8-bit RGB or RGBA")
    size = 3 if kind == 2 else 4
    data = zlib.decompress(b"".join(content for name, content in chunks if name == b"IDAT"))
    rows = [
        list(zip(row[::size], row[1::size], row[2::size], strict=True)) for row in _unfiltered(data, width * size, size)
    ]
    counts = collections.Counter(colour for row in rows for colour in row)
    palette = [colour for colour, _ in counts.most_common(_COLOURS)]
    index = {
        colour: min(range(len(palette)), key=lambda each: _distance(palette[each], colour))
        if number >= _COLOURS
        else number
        for number, (colour, _) in enumerate(counts.most_common())
    }
    lines = b"".join(b"\0" + bytes([index[colour] for colour in row]) for row in rows)
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    parts = (
        (b"IHDR", header),
        (b"PLTE", bytes(value for colour in palette for value in colour)),
        (b"IDAT", zlib.compress(lines, 9)),
        (b"IEND", b""),
    )
    path.write_bytes(_SIGNATURE + b"".join(_chunk(name, content) for name, content in parts))


def _distance(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return sum((a - b) ** 2 for a, b in zip(one, other, strict=True))


def _chunks(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = len(_SIGNATURE)
    while at < len(content):
        (length,) = struct.unpack(">I", content[at : at + 4])
        yield content[at + 4 : at + 8], content[at + 8 : at + 8 + length]
        at += length + 12


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def _unfiltered(data: bytes, stride: int, size: int) -> Iterator[bytearray]:
    """The rows, after the filter of each (PNG specification, 9.2)."""
    before = bytearray(stride)
    for start in range(0, len(data), stride + 1):
        kind, row = data[start], bytearray(data[start + 1 : start + 1 + stride])
        for at in range(stride):
            left = row[at - size] if at >= size else 0
            above = before[at]
            corner = before[at - size] if at >= size else 0
            row[at] = (row[at] + (0, left, above, (left + above) // 2, _paeth(left, above, corner))[kind]) & 255
        before = row
        yield row


def _paeth(left: int, above: int, corner: int) -> int:
    guess = left + above - corner
    distances = abs(guess - left), abs(guess - above), abs(guess - corner)
    return (left, above, corner)[distances.index(min(distances))]
