"""Texts of a report: trends, time stamps and strings that are safe on a terminal."""

import time
from collections.abc import Iterable
from typing import Final

from nodeagent.model import RefusalCode, RefusalKind, units

_LIMITS: Final = frozenset(str(code) for code in RefusalCode if code.kind is RefusalKind.LIMIT)


def trend_text(to_threshold_s: float | None, to_exhaustion_s: float | None, confidence: float | None) -> str:
    """The forecast of a signal: `threshold in 40s, exhausted in 2m (confidence 93%)`; empty if it does not fall.

    None for a time: not predicted.
    """
    ahead = [] if to_threshold_s is None else [f"threshold in {units.format_duration(to_threshold_s)}"]
    ahead += [] if to_exhaustion_s is None else [f"exhausted in {units.format_duration(to_exhaustion_s)}"]
    suffix = "" if confidence is None else f" (confidence {100 * confidence:.0f}%)"
    return ", ".join(ahead) + suffix if ahead else ""


def rfc3339(wall_time: float) -> str:
    """Seconds since the epoch as UTC with milliseconds: `2026-11-20T23:52:28.123Z`; `?` for a time outside the calendar
    (a damaged record)."""
    try:
        milliseconds = round(wall_time * 1000)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(milliseconds // 1000))
    except (OverflowError, ValueError, OSError):
        return units.UNKNOWN_TEXT
    return f"{stamp}.{milliseconds % 1000:03d}Z"


def refusal_label(codes: Iterable[str]) -> str:
    """What the codes make of a pod: `protected`, or `not evicted now`, a candidate that only limits exclude."""
    return "not evicted now" if _LIMITS.issuperset(codes) else "protected"


def refusal_text(refusals: Iterable[tuple[str, str]]) -> str:
    """Why a pod is not evicted, from codes and messages: `protected: static pod; ...`. Empty without one."""
    codes, messages = [], []
    for code, message in refusals:
        codes.append(code)
        messages.append(message)
    return f"{refusal_label(codes)}: {'; '.join(messages)}" if codes else ""


def escape_terminal(text: str) -> str:
    """`text` with everything escaped that could move a cursor, change colours or forge a line.

    Names and messages come from tenants: a log directory or an annotation may contain any byte. Printable letters of
    every script are kept. Control characters (C0, C1, DEL), line separators, bidirectional overrides and undecodable
    bytes are escaped as in Python source (`str.isprintable` is False for them).
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
