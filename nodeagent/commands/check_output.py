"""The output of `nodeagent check`: text, JSON, YAML or a page, once or repeatedly, or a live view on a terminal."""

import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from nodeagent.commands import exit_codes, standard_streams
from nodeagent.commands.check import CheckError, CheckOptions, NodeChecker
from nodeagent.report import node_report, sections, text
from nodeagent.report.node_report import Report

if TYPE_CHECKING:
    from nodeagent.model import RecordedSample

MAX_SAMPLES: Final = 900
"""Samples of `--watch --html` in the page: half an hour at the default interval."""
_STANDARD_OUTPUT: Final = "-"


def show(
    options: CheckOptions,
    *,
    output: str = "text",
    color: str = "auto",
    every_s: float | None = None,
    html: str | None = None,
) -> int:
    """Print one report, or one every `every_s` seconds until Ctrl-C, and return the last exit code. `html`: write a
    page to this file as well, or only a page to `-`.

    Raises CheckError if no report can be made, OutputError if it cannot be written.
    """
    if html == _STANDARD_OUTPUT and (output != "text" or every_s is not None):
        raise CheckError("--html -: cannot be combined with --output or --watch", exit_codes.USAGE)
    checker = NodeChecker(options)
    try:
        if every_s is not None and output == "text" and html is None and _live(color):
            from nodeagent.commands import check_watch

            return check_watch.run(checker.make_report, every_s=every_s)
        samples: deque[RecordedSample] = deque(maxlen=MAX_SAMPLES)
        while True:
            report = checker.make_report()
            code = exit_codes.exit_code_of(node_report.state(report))
            if html is not None:
                _write_page(report, samples, path=html, every_s=every_s)
            if html != _STANDARD_OUTPUT:
                try:
                    _print(report, output=output, color=color, repeated=every_s is not None)
                    sys.stdout.flush()
                except OSError as error:
                    standard_streams.output_failed(error)
                    return code
            if every_s is None:
                return code
            time.sleep(every_s)
    finally:
        checker.close()


def show_recorded(
    report: Report, samples: Sequence["RecordedSample"], *, output: str, color: str, html: str | None
) -> int:
    """Print the report of a recorded sample and return the exit code. `html` as in `show`; the page has the curves of
    `samples`, the last of which is that of the report. Raises as `show`."""
    if html == _STANDARD_OUTPUT and output != "text":
        raise CheckError("--html -: cannot be combined with --output", exit_codes.USAGE)
    if html is not None:
        _write_page(report, deque(samples[:-1], MAX_SAMPLES), path=html, every_s=None)
    if html != _STANDARD_OUTPUT:
        try:
            _print(report, output=output, color=color, repeated=False)
            sys.stdout.flush()
        except OSError as error:
            standard_streams.output_failed(error)
    return exit_codes.exit_code_of(node_report.state(report))


def _live(color: str) -> bool:
    """True if standard output is a terminal that can be drawn on."""
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    dumb = os.environ.get("TERM", "dumb") in ("dumb", "")
    return color != "never" and sys.stdout.isatty() and not dumb and encoding == "utf8"


def _write_page(report: Report, samples: "deque[RecordedSample]", *, path: str, every_s: float | None) -> None:
    from nodeagent.commands import html_file
    from nodeagent.model import RecordedSample
    from nodeagent.report import check_page, history

    samples.append(RecordedSample(report.snapshot, report.plan.signals, report.plan.conditions))
    html_file.write(
        path,
        check_page.title(report),
        check_page.blocks(report, history=history.history(samples)),
        refresh_s=None if every_s is None else max(2, round(every_s)),
    )


def _print(report: Report, *, output: str, color: str, repeated: bool) -> None:
    write = sys.stdout.write
    if output == "json":
        import json

        from nodeagent.records import utf8
        from nodeagent.report import json_document

        facts = utf8.writable(json_document.to_json(report))
        # With --watch one line for each report, so that a reader can parse them one by one.
        write(json.dumps(facts, indent=None if repeated else 2, allow_nan=False) + "\n")
    elif output == "yaml":
        import yaml

        from nodeagent.records import utf8
        from nodeagent.report import json_document

        dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
        facts = utf8.writable(json_document.to_json(report))
        write(yaml.dump(facts, Dumper=dumper, sort_keys=False, explicit_start=repeated))
    elif _uses_color(color):
        from nodeagent.report import terminal

        console = terminal.console(force=color == "always")
        if repeated:
            console.clear()
        terminal.draw(console, sections.sections(report))
    else:
        write(text.render(sections.sections(report)) + ("\n" if repeated else ""))


def _uses_color(color: str) -> bool:
    if color == "auto":
        return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    return color == "always"
