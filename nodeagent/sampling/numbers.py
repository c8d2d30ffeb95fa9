"""Numbers out of kernel text: malformed, missing, negative or absurd is None, never zero, never an exception."""

from nodeagent.lean import Final

# 2^62: above it a byte count is the kernel's way of saying "unlimited" or broken (KUBELET-CONTRACT, pods cgroup limit).
ABSURD: Final = 1 << 62


def count(text: bytes) -> int | None:
    """A whole file or field that is one non-negative decimal number below 2^62."""
    text = text.strip()
    # isdigit of bytes is ASCII only; the length is checked first because int() is quadratic.
    if not text.isdigit() or len(text) > 19:
        return None
    value = int(text)
    return value if value < ABSURD else None


def field(data: bytes, key: bytes) -> int | None:
    """The number of the line `key number` in a flat keyed file (memory.stat)."""
    if data.startswith(key + b" "):
        start = 0
    else:
        start = data.find(b"\n" + key + b" ") + 1
        if start == 0:
            return None
    end = data.find(b"\n", start)
    return count(data[start + len(key) + 1 : end if end >= 0 else len(data)])


def total(data: bytes, keys: tuple[bytes, ...]) -> int:
    """Sum of those fields that are there: older kernels lack some."""
    return sum([field(data, key) or 0 for key in keys])


def percent(text: bytes) -> float | None:
    """A PSI average: decimal percent, 0.00 to 100.00."""
    whole, _, fraction = text.partition(b".")
    if not whole.isdigit() or (fraction and not fraction.isdigit()) or len(text) > 12:
        return None
    value = float(text)
    return value if value <= 100.0 else None
