"""What the parsers of all commands share: errors, the width of help texts, the types of values, common options."""

import argparse
import os
import sys
from functools import lru_cache
from typing import Any, NoReturn

from nodeagent.commands import exit_codes, standard_streams


class Parser(argparse.ArgumentParser):
    """argparse exits with 2 on wrong usage, which monitoring reads as `hard`."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(exit_codes.USAGE, f"{self.prog}: {message}\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse prints every text through this method. If one cannot be written, argparse of Python 3.11.2
        # (Debian 12) raises and later versions ignore it.
        if message:
            (standard_streams.write_output if file is sys.stdout else standard_streams.write_error)(message)


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Reads the terminal's size once: argparse makes one formatter for every argument."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=_help_width())


@lru_cache(maxsize=1)
def _help_width() -> int:
    """Columns of the terminal, between 60 and 120; 100 without a terminal."""
    try:
        return max(60, min(os.get_terminal_size(sys.stdout.fileno()).columns - 2, 120))
    except (OSError, ValueError):  # no terminal, or no descriptor at all
        return 100


def add_output(command: argparse.ArgumentParser) -> None:
    """`--output` as text or JSON, and `--color`."""
    command.add_argument("-o", "--output", choices=("text", "json"), default="text", help="default: text")
    command.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="default: on a terminal, unless NO_COLOR"
    )


def interval(text: str) -> float:
    """Seconds between two reports."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds between 0.1 and 86400")
    return seconds


def count(text: str) -> int:
    """The length of a list."""
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= 1_000_000):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 1000000")
    return int(text)
