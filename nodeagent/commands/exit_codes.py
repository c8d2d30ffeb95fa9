"""Exit codes of every command: one table for the code, `--help` and the README."""

from typing import Final

OK: Final = 0
SOFT: Final = 1
HARD: Final = 2
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
    (OK, "ok", "every signal with a threshold was read, and no threshold is met"),
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

_BY_STATE: Final = {"ok": OK, "soft": SOFT, "hard": HARD, "unknown": UNKNOWN}


def exit_code_of(state: str) -> int:
    """The exit code of a state (a `SignalState`, not imported here to keep `--help` fast)."""
    return _BY_STATE[state]


def as_text() -> str:
    """The table for a help text."""
    return "\n".join(f"  {code:>3}  {name}: {meaning}" for code, name, meaning in TABLE)


def as_markdown() -> str:
    """The table for the README."""
    rows = [f"| {code} | {name} | {meaning} |" for code, name, meaning in TABLE]
    return "\n".join(["| code | name | meaning |", "| --- | --- | --- |", *rows])
