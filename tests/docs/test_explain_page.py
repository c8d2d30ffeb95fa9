"""docs/explain.md: its examples are what the commands print about the incident of the tests."""

import re
import shlex
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent.actuators import pod_events
from nodeagent.commands import cli
from nodeagent.model import RecordingHeader
from tests.support import incident, recordings, victims
from tests.support.nodes import WALL
from tests.support.paths import REPOSITORY

PAGE = (REPOSITORY / "docs/explain.md").read_text("utf-8")
EXAMPLES = dict(re.findall(r"^```console\n\$ nodeagent explain (.*)\n((?:.*\n)*?)```$", PAGE, re.MULTILINE))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[incident.Incident]:
    """The working directory has the incident as a snapshot file."""
    directory = tmp_path_factory.mktemp("incident")
    made = incident.record(directory)
    samples = directory / "samples-1.rec"
    recordings.write_recording(
        samples, RecordingHeader("node-1", "0.1.0", "abc", "boot", WALL, incident.CONFIGURATION), made.samples
    )
    with zipfile.ZipFile(directory / "incident.zip", "w") as archive:
        archive.write(directory / "decisions.jsonl", "decisions.jsonl")
        archive.write(samples, "samples/samples-1.rec")
        archive.writestr("manifest.json", '{"format": 1}')
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        yield made


def test_the_page_has_an_example_of_the_story_a_pod_and_its_owner() -> None:
    assert len(EXAMPLES) == 3


@pytest.mark.parametrize("words", EXAMPLES)
def test_an_example_is_what_the_command_prints(
    words: str, made: incident.Incident, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Path("incident.zip").exists()
    assert made.plan.id == "abc-87"
    assert cli.main(["explain", *shlex.split(words)]) == 0
    assert capsys.readouterr().out.startswith(EXAMPLES[words])


def test_the_event_is_the_one_of_the_incident(made: incident.Incident) -> None:
    victim = victims.with_rank(made.plan.victims[0], made.plan)
    _, owner = pod_events.evicted(made.plan.id, victim, node="node-1")
    assert f"\n{owner.note}\n" in PAGE
