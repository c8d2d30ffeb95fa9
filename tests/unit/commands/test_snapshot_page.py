"""`nodeagent snapshot --html`: the page has what the file has."""

import re
from pathlib import Path

import pytest

from nodeagent.commands import cli, exit_codes
from nodeagent.model import RecordingHeader
from tests.support import incident, recordings
from tests.support.nodes import WALL


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state directory with an incident: samples, and a decision that evicts."""
    made = incident.record(tmp_path)
    (tmp_path / "samples").mkdir()
    header = RecordingHeader("node-1", "0.1.0", "abc", "boot", WALL, incident.CONFIGURATION)
    recordings.write_recording(tmp_path / "samples" / "samples-1.rec", header, made.samples)
    return tmp_path


def snapshot(state: Path, *words: object) -> int:
    output = ["-o", str(state / "ticket.zip"), "--html", str(state / "ticket.html")]
    return cli.main(["snapshot", "--state-dir", str(state), *output, *map(str, words)])


def test_the_page_has_the_charts_the_decisions_and_the_configuration(state: Path) -> None:
    assert snapshot(state) == exit_codes.OK
    page = (state / "ticket.html").read_text("utf-8")
    assert page.count('<figure class="chart">') >= 2
    assert "eviction: shop/batch (memory.available, hard, accepted)" in page
    assert "evictionSoftGracePeriod" in page
    assert "<dd>240</dd>" in page  # samples


def test_the_page_of_pseudonyms_has_no_name(state: Path) -> None:
    assert snapshot(state, "--pseudonyms") == exit_codes.OK
    page = (state / "ticket.html").read_text("utf-8")
    assert "batch" not in page
    assert re.search(r"\bnode-1\b", page) is None, "a pseudonym of it may begin so"
    assert "replaced by pseudonyms" in page


def test_both_files_need_a_name(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["snapshot", "--state-dir", str(state), "-o", "-", "--html", "x.html"]) == exit_codes.USAGE
    assert "needs names for both files" in capsys.readouterr().err
