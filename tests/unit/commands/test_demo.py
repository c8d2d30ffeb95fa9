"""`nodeagent demo` as a stranger runs it: without a cluster, root or configuration, on any terminal or none."""

import html.parser
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest

from nodeagent.commands import cli, demo_picture
from tests.support import terminals
from tests.support.paths import REPOSITORY

PATH: Final = {"PYTHONPATH": str(REPOSITORY)}
COMMAND: Final = (sys.executable, "-m", "nodeagent", "demo")
PICTURE: Final = REPOSITORY / "docs" / "images" / "demo.svg"


class Tags(html.parser.HTMLParser):
    """The names of all elements of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)


def printed(*options: str, environment: dict[str, str] | None = None) -> str:
    ended = subprocess.run(
        [*COMMAND, *options],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=60,
        check=True,
        env={**PATH, "PYTHONUTF8": "1", **(environment or {})},
    )
    assert ended.stderr == ""
    return ended.stdout


def test_without_a_terminal_the_end_is_printed_at_once_and_plain() -> None:
    began = time.monotonic()
    text = printed()
    assert time.monotonic() - began < 8, "no animation"
    assert "\x1b" not in text
    assert text.endswith("changes nothing\n")
    for word in ("KUBELET ALONE", "WITH NODEAGENT", "EVICTION ORDER", "Deciding key", "OUTCOME", "SIGKILL", "NEXT"):
        assert word in text


def test_an_empty_environment_and_an_ascii_locale_are_enough() -> None:
    ended = subprocess.run(
        [*COMMAND], capture_output=True, timeout=60, check=True, env={**PATH, "LC_ALL": "C"}, cwd="/"
    )
    assert b"OUTCOME" in ended.stdout


def test_json_has_both_lanes_and_the_decision() -> None:
    found = json.loads(printed("-o", "json"))
    assert found["kind"] == "DemoReport"
    alone, beside = found["lanes"]
    assert alone["actedAtSeconds"] - alone["crossedAtSeconds"] > 2
    assert 0 <= beside["actedAtSeconds"] - beside["crossedAtSeconds"] < 2
    assert [each["victim"] for each in found["ranking"]] == [True, False, False, False]
    assert len(alone["memory"]) > 100


def test_on_a_terminal_it_plays_on_the_alternate_screen_and_leaves_its_end() -> None:
    ended = terminals.run([*COMMAND, "--speed", "40"], environment=PATH)
    assert ended.code == 0
    assert ended.output.count("\x1b[?1049h") == ended.output.count("\x1b[?1049l") == 1
    assert ended.output.rindex("\x1b[?25h") > ended.output.rindex("\x1b[?25l")
    for act in ("CALM", "RAMP", "OUTCOME"):
        assert act in ended.output
    assert "nodeagent run --dry-run" in ended.screen
    assert "warned   never: no sample below 100Mi" in ended.screen, "the table fits 80 columns"


def test_it_takes_ten_seconds() -> None:
    ended = terminals.run(COMMAND, environment=PATH)
    assert ended.code == 0
    assert 8 < ended.took_s < 14


@pytest.mark.parametrize(("columns", "rows"), [(1, 1), (10, 3), (20, 5), (40, 50), (500, 4)])
def test_it_plays_on_a_terminal_of_any_size(columns: int, rows: int) -> None:
    ended = terminals.run([*COMMAND, "--speed", "100"], columns=columns, rows=rows, environment=PATH)
    assert ended.code == 0
    assert "Traceback" not in ended.output


def test_ctrl_c_restores_the_terminal() -> None:
    ended = terminals.run(COMMAND, environment=PATH, keys="\x03", keys_at="KUBELET ALONE")
    assert ended.code == 130
    assert ended.took_s < 8
    assert ended.output.rindex("\x1b[?1049l") > ended.output.rindex("\x1b[?1049h")
    assert ended.output.rindex("\x1b[?25h") > ended.output.rindex("\x1b[?25l")
    assert "Traceback" not in ended.output


def test_q_ends_the_playing_and_prints_the_end() -> None:
    ended = terminals.run(COMMAND, environment=PATH, keys="q", keys_at="KUBELET ALONE")
    assert ended.code == 0
    assert ended.took_s < 8
    assert "nodeagent run --dry-run" in ended.screen


def test_no_color_and_a_dumb_terminal_are_respected() -> None:
    coloured = terminals.run([*COMMAND, "--no-animation"], environment=PATH)
    plain = terminals.run([*COMMAND, "--no-animation"], environment={**PATH, "NO_COLOR": "1"})
    dumb = terminals.run(COMMAND, environment={**PATH, "TERM": "dumb"})
    assert terminals.colours(coloured.output)
    assert not terminals.colours(plain.output)
    assert "\x1b" not in dumb.output
    assert dumb.took_s < 8


def test_no_animation_prints_the_end_at_once() -> None:
    ended = terminals.run([*COMMAND, "--no-animation"], environment=PATH)
    assert "\x1b[?1049h" not in ended.output
    assert "nodeagent check" in ended.screen


def test_the_page_has_both_charts_and_loads_nothing(tmp_path: Path) -> None:
    place = tmp_path / "demo.html"
    assert "OUTCOME" in printed("--html", str(place))
    page = place.read_text("utf-8")
    for word in ("kubelet alone", "with nodeagent", "SIGKILL", "usageOverRequest"):
        assert word in page
    parser = Tags()
    parser.feed(page)
    assert parser.found.count("svg") > 2
    assert "script" not in parser.found


def test_the_page_alone_goes_to_standard_output() -> None:
    assert printed("--html", "-").startswith("<!DOCTYPE html>")
    assert cli.main(["demo", "--html", "-", "-o", "json"]) == 64


@pytest.mark.parametrize("speed", ["0", "-1", "fast", "nan", "inf", "1e9"])
def test_a_wrong_speed_is_wrong_usage(speed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--speed", speed]) == 64
    assert "is not a number between 0.1 and 1000" in capsys.readouterr().err


# --- the picture -----------------------------------------------------------------------------------------------------


def texts(svg: str) -> list[str]:
    """What the picture says, without its shapes, which depend on the version of rich."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_the_picture_is_what_is_printed_now() -> None:
    made = "run: python -m nodeagent.commands.demo_picture > docs/images/demo.svg"
    assert texts(PICTURE.read_text("utf-8")) == texts(demo_picture.svg()), made


def test_the_picture_is_small_and_loads_nothing() -> None:
    svg = PICTURE.read_text("utf-8")
    assert len(svg) < 100_000
    assert "url(http" not in svg
    assert "<script" not in svg
    assert "href" not in svg


def test_the_picture_is_at_the_top_of_the_readme() -> None:
    readme = (REPOSITORY / "README.md").read_text("utf-8")
    assert readme.index("docs/images/demo.svg") < readme.index("## ")
