"""`nodeagent demo`: play the recorded incident of the package in the terminal.

1. Nothing of this machine is read, sent or changed: one packaged recording goes in, text comes out.
2. On a terminal it is played on the alternate screen, and its end is printed. q ends the playing, Ctrl-C the command;
   the terminal is as before in each case. Anywhere else the end is printed at once.
"""

import os
import select
import sys
import time
from typing import Final

from nodeagent.analysis import incident
from nodeagent.commands import check_watch, exit_codes, html_file, printing, standard_streams
from nodeagent.records.recording import RecordingError
from nodeagent.report import demo_frames, demo_story
from nodeagent.report.cells import Cell, Section
from nodeagent.report.demo_story import Story

FRAME_S: Final = 1 / 15
_WIDTH: Final = 100
"""Of the charts without a terminal."""


class DemoError(Exception):
    """The incident cannot be shown. The message is for the user."""

    def __init__(self, message: str, kind: int = exit_codes.UNKNOWN) -> None:
        super().__init__(message)
        self.kind = kind


def show(*, output: str, color: str, html: str | None, animation: bool, speed: float) -> int:
    """Play or print the incident. Returns the exit code."""
    if html == html_file.STANDARD_OUTPUT and output != "text":
        raise DemoError("--html -: cannot be combined with --output", exit_codes.USAGE)
    try:
        story, samples = incident.read()
    except (OSError, ValueError, KeyError, RecordingError) as error:
        raise DemoError(f"the recorded incident of this package cannot be read: {error}") from error
    if html is not None:
        from nodeagent.report import demo_page, history

        html_file.write(html, "nodeagent demo", demo_page.blocks(story, history.history(samples)))
    if html == html_file.STANDARD_OUTPUT:
        return exit_codes.OK
    if output == "json":
        printing.show((), lambda: demo_story.to_json(story), output=output, color=color)
    elif color == "always" or (color == "auto" and _is_terminal()):
        _draw(story, force=color == "always", animation=animation and _is_terminal(), speed=speed)
    else:
        charts = Section("", lines=tuple(Cell(line) for line in _plain_charts(story)))
        printing.show((demo_story.head(story), charts, *demo_story.sections(story)), dict, output=output, color="never")
    return exit_codes.OK


def _is_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def _plain_charts(story: Story) -> list[str]:
    return demo_frames.plain(demo_frames.charts(story, width=_WIDTH)).splitlines()


def _draw(story: Story, *, force: bool, animation: bool, speed: float) -> None:
    """Play it, then print its end in colours."""
    from nodeagent.report import terminal

    try:
        if animation:
            _play(story, force=force, speed=speed)
        target = terminal.console(force=force)
        terminal.draw(target, (demo_story.head(story),))
        target.print()
        terminal.print_lines(target, demo_frames.charts(story, width=target.width))
        target.print()
        terminal.draw(target, demo_story.sections(story))
    except OSError as error:
        standard_streams.output_failed(error)


def _play(story: Story, *, force: bool, speed: float) -> None:
    """Show frames until the end of the incident, or until q."""
    from nodeagent.report import live_view

    player = demo_frames.Player(story, speed=speed)
    with check_watch.signals() as woken, check_watch.keys() as keyboard, live_view.screen(force=force) as screen:
        began = time.monotonic()
        while player.at < story.ended:
            player.at = min(story.ended, story.began + (time.monotonic() - began) * speed)
            screen.show(player)
            ready, _, _ = select.select([each for each in (woken, keyboard) if each >= 0], [], [], FRAME_S)
            if woken in ready:
                os.read(woken, 64)
            if keyboard in ready:
                pressed = os.read(keyboard, 64)
                if not pressed or pressed[0] in check_watch.QUIT_KEYS:
                    return
