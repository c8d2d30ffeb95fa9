"""Numbers out of kernel text: malformed, missing, negative or absurd is None, never zero, never an exception."""

from nodeagent.model.units import MAX_PLAUSIBLE


def parse_count(text: bytes) -> int | None:
    """A whole file or field that is one non-negative decimal number below 2^62."""
    text = text.strip()
    # isdigit of bytes is ASCII only; the length is checked first because int() is quadratic.
    if len(text) > 19 or not text.isdigit():
        return None
    value = int(text)
    return value if value < MAX_PLAUSIBLE else None


def keys(*names: str) -> tuple[bytes, ...]:
    """Keys as `fields` looks for them."""
    return tuple([f"\n{name} ".encode() for name in names])


def parse_keyed(data: bytes, wanted: tuple[bytes, ...]) -> list[int | None]:
    """The number of each line `key number` in a flat keyed file (memory.stat), for the `keys` that are wanted, in their
    order. Looks for them in C instead of splitting 50 lines."""
    data = b"\n" + data + b"\n"
    find, found = data.find, list[int | None]()
    for key in wanted:
        start = find(key)
        if start < 0:
            found.append(None)
            continue
        start += len(key)
        text = data[start : find(b"\n", start)]
        # What `count` does, for the usual number without a call: twice as fast.
        found.append(int(text) if len(text) < 19 and text.isdigit() else parse_count(text))
    return found


def percent(text: bytes) -> float | None:
    """A PSI average: decimal percent, 0.00 to 100.00."""
    whole, _, fraction = text.partition(b".")
    if not whole.isdigit() or (fraction and not fraction.isdigit()) or len(text) > 12:
        return None
    value = float(text)
    return value if value <= 100.0 else None
