"""What the parsers of all commands share: errors, the width of help texts, the types of values, common options."""

import argparse
import os
import sys
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

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


def add_config(command: argparse.ArgumentParser) -> None:
    """`--config`; `config_file` has the default."""
    command.add_argument(
        "--config",
        metavar="FILE",
        help="configuration file (default: $NODEAGENT_CONFIG, set in the DaemonSet's pod, or the built-in defaults)",
    )


def config_file(given: str | None) -> str | None:
    """The file of `--config`, or the environment's."""
    return given if given is not None else os.environ.get("NODEAGENT_CONFIG") or None


def add_host_root(command: argparse.ArgumentParser) -> None:
    """`--host-root`."""
    command.add_argument(
        "--host-root",
        metavar="DIR",
        default=os.environ.get("NODEAGENT_HOST_ROOT") or "/",
        help="root of the host or of a recorded node (default: $NODEAGENT_HOST_ROOT, set in the DaemonSet's pod, or /)",
    )


def add_html(command: argparse.ArgumentParser) -> None:
    """`--html`."""
    command.add_argument(
        "--html",
        metavar="FILE",
        help="write a page with pictures as well; it is replaced if it exists; - is stdout alone",
    )


def add_node_labels(command: argparse.ArgumentParser) -> None:
    """`--node-labels`."""
    command.add_argument(
        "--node-labels",
        metavar="KEY=VALUE,...",
        type=node_labels,
        help="labels of the node for `profiles` (default: from the API server, else those that the agent saw last)",
    )


def node_labels(text: str) -> dict[str, str]:
    """`pool=gpu,zone=a`; empty: no labels."""
    labels = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not (key and equals):
            raise argparse.ArgumentTypeError(f"{part!r} is not KEY=VALUE")
        labels[key] = value
    return labels


def interval(text: str) -> float:
    """Seconds between two reports."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds between 0.1 and 86400")
    return seconds


def speed(text: str) -> float:
    """How many times as fast as it happened."""
    try:
        times = float(text)
    except ValueError:
        times = 0.0
    if not 0.1 <= times <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number between 0.1 and 1000")
    return times


def count(text: str) -> int:
    """The length of a list."""
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= 1_000_000):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 1000000")
    return int(text)


def pod(text: str) -> str:
    """`namespace/name` of a pod, or `uid/...`."""
    namespace, slash, name = text.partition("/")
    if not (namespace and slash and name) or "/" in name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAMESPACE/NAME")
    return text


class Since(NamedTuple):
    """A time of `--since`: so long ago, or an instant."""

    ago_s: float | None
    at: float
    """Epoch seconds; without meaning if `ago_s` is given."""

    def wall(self, now: float) -> float:
        """Epoch seconds. `now`: the present, or the end of a recording."""
        return self.at if self.ago_s is None else now - self.ago_s


def instant_or_id(text: str) -> float | str:
    """A time in RFC 3339, or in epoch seconds, or else the id of a decision."""
    from datetime import UTC, datetime

    if text.isascii() and text.isdigit() and len(text) == len("1795525500"):
        return float(text)
    try:
        instant = datetime.fromisoformat(text) if len(text) >= len("2026-11-24T13:05") else None
    except ValueError:
        instant = None
    return text if instant is None else instant.replace(tzinfo=instant.tzinfo or UTC).timestamp()


def since(text: str) -> Since:
    """A duration (`90s`, `1h30m`, `2d`) or an instant in RFC 3339 (`2026-11-24T13:05:00Z`)."""
    from datetime import UTC, datetime

    from nodeagent.config import duration

    days, unit, rest = text.partition("d")
    with_hours = f"{24 * int(days)}h{rest}" if unit and days.isascii() and days.isdigit() and len(days) < 6 else text
    try:
        seconds = duration.parse_duration(with_hours)
        if seconds > 0:
            return Since(seconds, 0.0)
    except ValueError:
        pass
    try:
        instant = datetime.fromisoformat(text) if len(text) >= len("2026-11-24T13:05") else None
        if instant is not None:
            return Since(None, instant.replace(tzinfo=instant.tzinfo or UTC).timestamp())
    except (ValueError, OverflowError):
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is neither a duration like 1h30m nor a time like 2026-11-24T13:05:00Z")


def span(text: str) -> float:
    """A duration in seconds, at least 1."""
    seconds = since(text).ago_s
    if seconds is None or not 1.0 <= seconds <= 3660 * 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration like 90s, 15m or 7d")
    return seconds
