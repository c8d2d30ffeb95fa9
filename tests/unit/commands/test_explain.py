"""`nodeagent explain` from the command line: sources, views and errors."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from nodeagent.commands import cli, exit_codes
from nodeagent.model import RecordingHeader
from tests.support import incident, recordings
from tests.support.nodes import WALL


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> incident.Incident:
    """A state directory with records and a recording."""
    directory = tmp_path_factory.mktemp("state")
    made = incident.record(directory)
    (directory / "samples").mkdir()
    header = RecordingHeader("node-1", "0.1.0", "abc", "boot", WALL, incident.CONFIGURATION)
    recordings.write_recording(directory / "samples" / "samples-1.rec", header, made.samples)
    return made


@pytest.fixture(scope="module")
def snapshot(made: incident.Incident) -> Path:
    """The same as a snapshot file."""
    path = made.directory.parent / "incident.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(made.directory / "decisions.jsonl", "decisions.jsonl")
        archive.write(made.directory / "samples" / "samples-1.rec", "samples/samples-1.rec")
        archive.writestr("manifest.json", '{"format": 1}')
    return path


def run(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    code = cli.main(["explain", *map(str, words)])
    output = capsys.readouterr()
    assert code == 0, output.err
    return output.out


def fails(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    code = cli.main(["explain", *map(str, words)])
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1, output.err
    return code, output.err


def test_a_state_directory_with_a_recording_gives_the_whole_story(
    made: incident.Incident, capsys: pytest.CaptureFixture[str]
) -> None:
    output = run(capsys, made.plan.id, "--state-dir", made.directory)
    assert "seen: memory.available fell from 7Gi to 1.98Gi in the 1m 26s before" in output
    assert "THE 1m 26s BEFORE AND 2m 33s AFTER" in output
    assert "no curves" not in output


def test_a_snapshot_file_gives_the_same_story(
    made: incident.Incident, snapshot: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_directory = run(capsys, made.plan.id, "--state-dir", made.directory)
    assert run(capsys, made.plan.id, "--recording", snapshot) == by_directory


def test_without_a_recording_it_says_so_and_prints_what_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = incident.record(tmp_path)
    output = run(capsys, made.plan.id, "--state-dir", tmp_path)
    assert f"no curves: {tmp_path} has no samples\n" in output
    assert "PODS IN EVICTION ORDER FOR memory.available" in output
    only_records = run(capsys, made.plan.id, "--state-dir", tmp_path / "decisions.jsonl")
    assert "no curves: " in only_records


def test_the_recorders_own_directory_is_read_with_the_records_of_the_state_directory(
    made: incident.Incident, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    incident.record(tmp_path)
    config = tmp_path / "config.yaml"
    recorder = f"recorder: {{dir: {made.directory / 'samples'}}}"
    config.write_text(f"{incident.CONFIGURATION}stateDir: {tmp_path}\n{recorder}\n")
    output = run(capsys, made.plan.id, "--config", config)
    assert "THE 1m 26s BEFORE AND 2m 33s AFTER" in output


def test_the_begin_of_the_curves_can_be_chosen(
    made: incident.Incident, snapshot: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = run(capsys, made.plan.id, "--recording", snapshot, "--since", "2027-01-15T08:01:00Z")
    assert "THE 26s BEFORE" in output


def test_the_list_begins_at_a_time_counted_from_the_end_of_a_file(
    snapshot: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(run(capsys, "--recording", snapshot, "--since", "1h").splitlines()) == 4
    assert "no decision is recorded" in run(capsys, "--recording", snapshot, "--since", "1s")


def test_the_owner_gets_the_request_by_the_recorded_configuration(
    snapshot: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = run(capsys, "--pod", "shop/batch", "--owner", "--recording", snapshot)
    assert "Pod shop/batch of ReplicaSet/batch" in output
    assert "Mi or more, instead of 512Mi: shop/web would have been evicted instead." in output
    report = json.loads(run(capsys, "--pod", "shop/batch", "--owner", "--recording", snapshot, "-o", "json"))
    assert report["requestThatKeepsIt"]["verdict"] == "kept"


def test_the_owner_gets_the_request_by_the_configuration_of_the_time_of_the_decision(
    snapshot: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An hour later the agent got another configuration, which would evict no pod."""
    made = incident.record(tmp_path)
    (tmp_path / "samples").mkdir()
    header = RecordingHeader("node-1", "0.1.0", "abc", "boot", WALL, incident.CONFIGURATION)
    recordings.write_recording(tmp_path / "samples" / "samples-1.rec", header, made.samples)
    loose = "apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\nevictionHard: {memory.available: 1Mi}\n"
    later = made.samples[-1]._replace(
        snapshot=made.samples[-1].snapshot._replace(wall_time=WALL + 3600, taken_at=made.samples[-1].at + 3600)
    )
    header = header._replace(began_wall=WALL + 3600, configuration=loose)
    recordings.write_recording(tmp_path / "samples" / "samples-2.rec", header, [later])
    owner = ("--pod", "shop/batch", "--owner")
    assert run(capsys, *owner, "--state-dir", tmp_path) == run(capsys, *owner, "--recording", snapshot)


def test_the_configuration_can_be_given_where_none_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    incident.record(tmp_path)
    place = ("--pod", "shop/batch", "--owner", "--state-dir", tmp_path)
    assert "Not known: the configuration that was in force is not recorded: name it with --config." in run(
        capsys, *place
    )
    (tmp_path / "config.yaml").write_text(incident.CONFIGURATION)
    assert "Mi or more, instead of 512Mi" in run(capsys, *place, "--config", tmp_path / "config.yaml")


def test_the_configuration_of_the_agents_pod_is_the_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    incident.record(tmp_path)
    config = tmp_path / "config.yaml"
    config.write_text(f"{incident.CONFIGURATION}stateDir: {tmp_path}\n")
    monkeypatch.setenv("NODEAGENT_CONFIG", str(config))
    assert "Mi or more, instead of 512Mi" in run(capsys, "--pod", "shop/batch", "--owner")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a directory at the default of stateDir")
def test_the_built_in_configuration_is_not_taken_for_the_one_in_force(tmp_path: Path) -> None:
    incident.record(tmp_path)
    script = (
        f"mount -t tmpfs none /run && mkdir /run/nodeagent && mount --bind {tmp_path} /run/nodeagent && "
        f"{sys.executable} -m nodeagent explain --pod shop/batch --owner"
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, check=False, timeout=60
    )
    assert "Not known: the configuration that was in force is not recorded: name it with --config." in done.stdout


def test_a_pod_has_everything_that_touched_it(snapshot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = run(capsys, "--pod", "shop/batch", "--recording", snapshot)
    assert output.startswith("POD shop/batch\n")
    assert "victim" in output


def test_markdown_is_one_document_with_the_recorded_configuration(
    made: incident.Incident, snapshot: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = run(capsys, made.plan.id, "--markdown", "--recording", snapshot)
    assert output.startswith("# Eviction of shop/batch, 2027-01-15T08:01:26.000Z\n")
    assert f"```yaml\n{incident.CONFIGURATION}```\n" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--owner",), "--owner: needs --pod NAMESPACE/NAME"),
        (("--markdown",), "--markdown: needs the ID of a decision"),
        (("last", "--markdown", "-o", "json"), "--markdown: cannot be combined with -o json"),
        (("last", "--pod", "a/b"), "--pod: lists every decision; an ID needs --owner"),
        (("./a.zip",), "./a.zip: is no ID; a file or directory is read with --recording"),
        (("--recording", "a", "--state-dir", "b"), "--recording: cannot be combined with --state-dir"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, error = fails(capsys, *words)
    assert code == 64
    assert message in error


def test_samples_without_decisions_are_told_apart_from_nothing(
    made: incident.Incident, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = made.directory / "samples" / "samples-1.rec"
    assert "has samples and no decision" in fails(capsys, "last", "--recording", samples)[1]
    (tmp_path / "decisions.jsonl").write_text("")
    assert f"{tmp_path}: has no decision" in fails(capsys, "last", "--state-dir", tmp_path)[1]


def test_a_pod_that_was_never_evicted_has_no_view_for_its_owner(
    snapshot: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        "shop/web: no decision in these records evicts it"
        in fails(capsys, "--pod", "shop/web", "--owner", "--recording", snapshot)[1]
    )


def test_each_wrong_source_is_one_clear_error(
    snapshot: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = snapshot.read_bytes()
    files = {
        "cut.zip": whole[: len(whole) // 2],
        "empty.zip": b"",
        "text.zip": b"hello\n",
        "text.jsonl": b"hello\n",
        "cut.rec": b"\0" * 100,
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        _, error = fails(capsys, "last", "--recording", tmp_path / name)
        assert name in error
    assert "no such file" in fails(capsys, "last", "--recording", tmp_path / "none.zip")[1].lower()


def test_a_story_is_a_page_with_the_signal_the_pods_and_the_eviction(
    made: incident.Incident, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "story.html"
    output = run(capsys, made.plan.id, "--state-dir", made.directory, "--html", page)
    assert "seen: memory.available fell" in output
    written = page.read_text("utf-8")
    assert written.count('<figure class="chart">') >= 2
    assert "eviction: shop/batch (memory.available, hard, accepted)" in written
    assert "BEFORE THE NEXT BY" in written
    assert "WHAT HAPPENED WHEN" in written


def test_a_story_without_samples_is_a_page_that_says_so(
    made: incident.Incident, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "decisions.jsonl").write_bytes((made.directory / "decisions.jsonl").read_bytes())
    output = run(capsys, made.plan.id, "--state-dir", tmp_path, "--html", "-")
    assert output.startswith("<!DOCTYPE html>")
    assert "no charts: " in output


def test_a_list_is_a_page_as_well(made: incident.Incident, capsys: pytest.CaptureFixture[str]) -> None:
    output = run(capsys, "--state-dir", made.directory, "--html", "-")
    assert made.plan.id in output
    assert output.count("<html") == 1


@pytest.mark.parametrize("other", [("-o", "json"), ("--markdown",)])
def test_a_page_is_not_combined_with_another_form(
    made: incident.Incident, other: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, error = fails(capsys, made.plan.id, "--state-dir", made.directory, "--html", "-", *other)
    assert code == exit_codes.USAGE
    assert "--html" in error


@pytest.mark.parametrize("name", ["decisions.jsonl", "decisions.1.jsonl"])
def test_a_named_pipe_in_place_of_the_records_is_an_error_and_not_an_empty_list(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / name)
    code, message = fails(capsys, "--state-dir", tmp_path)
    assert code == exit_codes.UNKNOWN
    assert name in message
    assert "named pipe" in message
