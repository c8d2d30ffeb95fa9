"""The screenshots of docs/images: `python -m tests.browser.screenshots`.

They show a recorded node under memory pressure, an incident of the real policy, and the live page of an agent on that
incident. The same input gives the same picture with the same Chromium and fonts, so that a difference is a change.
"""

import contextlib
import io
import sys
import tempfile
from pathlib import Path
from typing import Final

from nodeagent.commands import cli
from nodeagent.loop.live_page import LivePage
from nodeagent.model import RecordingHeader
from tests.support import browser, incident, recordings
from tests.support.browser import Browser, View
from tests.support.nodes import WALL
from tests.support.paths import REPOSITORY

IMAGES: Final = REPOSITORY / "docs" / "images"
NODE: Final = REPOSITORY / "tests" / "data" / "nodes" / "cgroupv2-memory-pressure"
WIDTH, HEIGHT = 900, 1000


def main() -> int:
    """Take every screenshot; 1 without a Chromium."""
    program = browser.find()
    if program is None:
        print("no Chromium on this machine", file=sys.stderr)
        return 1
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory, browser.start(program) as chromium:
        place = Path(directory)
        shoot(chromium, check(place), "check", View(WIDTH, 1300))
        story = explain(place)
        shoot(chromium, story, "explain", View(WIDTH, HEIGHT))
        shoot(chromium, story, "explain-phone", View(390, 800, dark=True, phone=True))
        shoot(chromium, live(place), "live", View(WIDTH, HEIGHT, dark=True))
    return 0


def shoot(chromium: Browser, page: Path, name: str, view: View) -> None:
    """The top of a page as docs/images/NAME.png."""
    chromium.load(page.as_uri(), view)
    chromium.screenshot(IMAGES / f"{name}.png")


def check(place: Path) -> Path:
    """`check --html` on a recorded node."""
    page = place / "check.html"
    with contextlib.chdir(NODE):  # the page names the file of pods
        run("check", "--host-root", ".", "--pods", "api/pods.json", "--html", page)
    return page


def explain(place: Path) -> Path:
    """`explain --html` of an incident."""
    made = incident.record(place)
    (place / "samples").mkdir()
    header = RecordingHeader("node-1", "0.1.0", "abc", "boot", WALL, incident.CONFIGURATION)
    recordings.write_recording(place / "samples" / "samples-1.rec", header, made.samples)
    page = place / "explain.html"
    run("explain", made.plan.id, "--state-dir", place, "--html", page)
    return page


def live(place: Path) -> Path:
    """The live page of an agent after the same incident."""
    (place / "again").mkdir()
    made = incident.record(place / "again")
    page = LivePage(config=lambda: incident.CONFIG, config_source="/etc/nodeagent/config.yaml", monotonic=lambda: 0.0)
    for decided in recordings.decide_all((each.snapshot for each in made.samples), incident.CONFIG):
        page.remember(decided.plan, decided.sample.snapshot, acts=True)
    written = place / "live.html"
    written.write_bytes(page.document("still")[0])
    return written


def run(*words: object) -> None:
    """One command of ours, without its text."""
    with contextlib.redirect_stdout(io.StringIO()):
        cli.main([str(word) for word in words])


if __name__ == "__main__":
    sys.exit(main())
