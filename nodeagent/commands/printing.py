"""Prints sections as text, or the same facts as JSON or YAML, on standard output."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from nodeagent.commands import standard_streams
from nodeagent.report.cells import Section


def show(sections: Sequence[Section], to_json: Callable[[], dict[str, Any]], *, output: str, color: str) -> None:
    """`output` is `text`, `json` or `yaml`; `color` is `auto` (on a terminal), `always` or `never`.

    `to_json` is called only for JSON and YAML. Raises OutputError.
    """
    if output == "json":
        import json

        standard_streams.write_output(json.dumps(to_json(), indent=2) + "\n")
    elif output == "yaml":
        import yaml

        standard_streams.write_output(yaml.safe_dump(to_json(), sort_keys=False))
    elif color == "always" or (color == "auto" and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"):
        from nodeagent.report import terminal

        try:
            terminal.draw(terminal.console(force=color == "always"), sections)
        except OSError as error:
            standard_streams.output_failed(error)
    else:
        from nodeagent.report import text

        standard_streams.write_output(text.render(sections))
