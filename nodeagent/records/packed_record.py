"""A record that is unpacked when it is read.

Full files of records would need 80 MiB as objects, in a container that has 128 MiB for the agent and a command.
"""

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec


class PackedRecord(Mapping[str, Any]):
    """A record, compressed. Its own numbers and texts are read without unpacking, those within its fields are not."""

    __slots__ = ("_data", "_plain")
    _last: "tuple[PackedRecord, dict[str, Any]] | None" = None
    """The record that was unpacked last: its fields are read one after another."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        self._plain = {key: value for key, value in record.items() if not isinstance(value, dict | list)}
        self._data = zlib.compress(msgspec.json.encode(record), 1)

    def __getitem__(self, key: str) -> Any:
        return self._plain[key] if key in self._plain else self._unpacked()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._unpacked())

    def __len__(self) -> int:
        return len(self._unpacked())

    def _unpacked(self) -> dict[str, Any]:
        last = PackedRecord._last
        if last is None or last[0] is not self:
            record: dict[str, Any] = msgspec.json.decode(zlib.decompress(self._data))
            PackedRecord._last = last = (self, record)
        return last[1]
