"""Numbers in kernel text: a malformed, missing, negative or implausible one is None, never zero, never an exception."""

from nodeagent.model.units import MAX_PLAUSIBLE


def parse_count(text: bytes) -> int | None:
    """A whole file or field that is one non-negative decimal number below 2^62; None for any other text."""
    text = text.strip()
    # isdigit of bytes is ASCII only; the length is checked first because int() is quadratic.
    if len(text) > 19 or not text.isdigit():
        return None
    value = int(text)
    return value if value < MAX_PLAUSIBLE else None


def parse_pids(data: bytes) -> list[int]:
    """The numbers of a file with one PID in each line (cgroup.procs), in its order; malformed ones are left out."""
    return [pid for word in data.split() if (pid := parse_count(word)) is not None]


def line_starts(*names: str) -> tuple[bytes, ...]:
    """The keys of `parse_keyed`, as bytes that it can search for."""
    return tuple([f"\n{name} ".encode() for name in names])


def parse_keyed(data: bytes, keys: tuple[bytes, ...]) -> list[int | None]:
    """The number of each line `key number` in a flat keyed file (memory.stat), in the order of `keys` (`line_starts`).
    Searches in C instead of splitting 50 lines."""
    data = b"\n" + data + b"\n"
    find, numbers = data.find, list[int | None]()
    for key in keys:
        start = find(key)
        if start < 0:
            numbers.append(None)
            continue
        start += len(key)
        text = data[start : find(b"\n", start)]
        # The same as `parse_count` for the usual number, without a call: twice as fast.
        numbers.append(int(text) if len(text) < 19 and text.isdigit() else parse_count(text))
    return numbers


def parse_percent(text: bytes) -> float | None:
    """A PSI average: decimal percent, 0.00 to 100.00; None for any other text."""
    integer, _, fraction = text.partition(b".")
    if not integer.isdigit() or (fraction and not fraction.isdigit()) or len(text) > 12:
        return None
    value = float(text)
    return value if value <= 100.0 else None
