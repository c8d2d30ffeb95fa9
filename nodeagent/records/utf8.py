"""Replaces bytes that are not UTF-8, which names on the host may contain and JSON cannot.

Python represents such bytes as lone surrogates (`os.listdir`), and an encoder refuses them. A chosen name must neither
fail a sync nor prevent the record of a decision.
"""

from collections.abc import Mapping
from typing import Any


def writable(value: Any) -> Any:
    """The same value with every lone surrogate escaped (`\\udcff`), in keys and at any depth. NamedTuples keep their
    type. Slow: for values that an encoder has refused with UnicodeEncodeError."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, tuple):
        items = [writable(item) for item in value]
        make = getattr(value, "_make", tuple)
        return make(items)
    if isinstance(value, list | set | frozenset):
        return [writable(item) for item in value]
    if isinstance(value, Mapping):
        return {writable(key): writable(item) for key, item in value.items()}
    return value
