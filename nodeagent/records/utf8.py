"""Makes any value of ours writable: names from the host may hold bytes that are no UTF-8, and JSON cannot carry them.

Such bytes come in as lone surrogates (`os.listdir` has to put them somewhere). An encoder refuses them, and a name that
somebody chose must neither end a turn of the loop nor keep a decision from being told.
"""

from collections.abc import Mapping
from typing import Any


def writable(value: Any) -> Any:
    """The same value with every lone surrogate spelled out (`\\udcff`), in keys and at any depth. NamedTuples stay
    what they are. Slow: for values that an encoder has refused with UnicodeEncodeError."""
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
