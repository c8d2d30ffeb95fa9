"""Exit codes of every command: one table for the code, `--help` and the README."""

from collections.abc import Iterable
from typing import Final

OK: Final = 0
SOFT: Final = 1
HARD: Final = 2
WARNING, CRITICAL = SOFT, HARD
"""Of `check --rights`, as monitoring plugins call them."""
UNKNOWN: Final = 3
USAGE: Final = 64
"""EX_USAGE of sysexits.h: argparse's own 2 reads as `hard`."""
INTERNAL: Final = 70
"""EX_SOFTWARE of sysexits.h: Python's own 1 for an unexpected error reads as `soft`."""
CONFIG: Final = 78
"""EX_CONFIG of sysexits.h."""
INTERRUPTED: Final = 130
"""128 + SIGINT, as in shells."""

TABLE: Final = (
    (OK, "ok", "every signal with a threshold that the node has was read, and no threshold is met"),
    (SOFT, "soft", "a soft threshold is met, but no hard one"),
    (HARD, "hard", "a hard threshold is met"),
    (
        UNKNOWN,
        "unknown",
        "no threshold is met, but a signal with a threshold could not be read; or no report could be made",
    ),
    (USAGE, "usage", "the command line was wrong"),
    (INTERNAL, "internal error", "a defect of nodeagent; please report it with the traceback on standard error"),
    (CONFIG, "configuration", "the configuration could not be read or is invalid"),
    (INTERRUPTED, "interrupted", "stopped by Ctrl-C"),
)
"""(code, name, meaning). Monitoring plugins expect 0 to 3; `config validate` uses 0 for valid and 1 for invalid."""

RIGHTS_TABLE: Final = (
    (OK, "ok", "the credentials have every right that the configuration uses, and no others were found"),
    (
        WARNING,
        "warning",
        "a right that one feature needs is missing, there are rights beyond need, or a request is not sent as the node "
        "although the API server could limit it so",
    ),
    (CRITICAL, "critical", "a right is missing without which evictions or conditions fail"),
    (UNKNOWN, "unknown", "whether a right is missing is unknown, or the API server did not answer"),
)
"""The same for `check --rights`; the codes from 64 on are those of every command."""

_BY_STATE: Final = {"ok": OK, "soft": SOFT, "hard": HARD, "unknown": UNKNOWN}


def exit_code_of(state: str) -> int:
    """The exit code of a state (a `SignalState`, not imported here to keep `--help` fast)."""
    return _BY_STATE[state]


def as_text() -> str:
    """The tables for a help text."""
    return f"{_as_lines(TABLE)}\nwith check --rights:\n{_as_lines(RIGHTS_TABLE)}"


def as_markdown() -> str:
    """The tables for the README."""
    return f"{_as_table(TABLE)}\n\nWith `check --rights`:\n\n{_as_table(RIGHTS_TABLE)}"


def _as_lines(table: Iterable[tuple[int, str, str]]) -> str:
    return "\n".join(f"  {code:>3}  {name}: {meaning}" for code, name, meaning in table)


def _as_table(table: Iterable[tuple[int, str, str]]) -> str:
    rows = [f"| {code} | {name} | {meaning} |" for code, name, meaning in table]
    return "\n".join(["| code | name | meaning |", "| --- | --- | --- |", *rows])
