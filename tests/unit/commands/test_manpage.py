"""The manual page is current, complete, and good troff."""

import argparse
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from nodeagent.commands import arguments, exit_codes, manpage
from tests.support.paths import REPOSITORY

PAGE = REPOSITORY / "docs" / "nodeagent.1"


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from parsers(command)


def test_the_page_is_what_is_generated() -> None:
    assert PAGE.read_text("utf-8") == manpage.text(), "run: python -m nodeagent.commands.manpage > docs/nodeagent.1"


def test_every_option_of_every_command_and_every_exit_code_is_on_it() -> None:
    page = manpage.text()
    root, *commands = parsers(arguments.parser())
    for command in commands:
        for action in command._actions:
            for option in action.option_strings:
                written = option.replace("-", "\\-")
                assert option in ("-h", "--help") or f"\\fB{written}\\fR" in page
    assert root.prog == "nodeagent"
    for code, name, _ in exit_codes.TABLE:
        assert f"\\fB{code}\\fR\n{name}: " in page


def test_no_line_of_text_is_taken_for_a_request() -> None:
    known = (".TH", ".SH", ".SS", ".B", ".I", ".TP", ".PP", ".nf", ".fi", '.\\"')
    for line in manpage.text().splitlines():
        assert not line.startswith("'")
        if line.startswith("."):
            assert line.split(" ")[0] in known


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff (Debian package groff-base) is not installed")
def test_groff_has_nothing_to_object_to() -> None:
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", "-z", str(PAGE)], capture_output=True, text=True, check=False, timeout=30
    )
    assert (done.returncode, done.stderr) == (0, "")
