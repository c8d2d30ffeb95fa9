"""`nodeagent check --recording`: the report of a recorded sample, marked as such."""

import json
from pathlib import Path

import pytest

from nodeagent.commands import cli, exit_codes
from nodeagent.model import Signal
from tests.support import nodes, recorded_samples, recordings, schemas


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Two minutes; in the second one memory is short."""
    path = tmp_path / "samples-1.rec"
    samples = [recorded_samples.sample(index) for index in range(120)]
    samples[60] = samples[60]._replace(plan_id="abcd1234-7")
    recordings.write_recording(path, recorded_samples.HEADER, samples)
    return path


def report(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, object]:
    assert cli.main(["check", "-o", "json", *map(str, words)]) in (0, 1, 2)
    loaded: dict[str, object] = json.loads(capsys.readouterr().out)
    return loaded


def test_the_last_sample_is_reported_and_marked(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--recording", str(recorded)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        f"RECORDING, not the node as it is now: {recorded}: recorded at 2027-01-15T08:01:59.000Z, by nodeagent 0.1.0"
    )
    assert lines[1].startswith("OK node-1: ")


def test_no_text_of_a_recording_moves_the_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample = recorded_samples.sample()
    (verdict,), (stall,) = sample.signals, sample.snapshot.stalls
    threshold = verdict.thresholds[0]
    amount = threshold.threshold.value._replace(text="1Gi\x1b[2J\nOK n1")
    forged = threshold._replace(threshold=threshold.threshold._replace(value=amount))
    path = tmp_path / "samples-1.rec"
    snapshot = sample.snapshot._replace(stalls=(stall._replace(resource="memory\x1b]0;x\x07\n"),))
    signals = (verdict._replace(thresholds=(forged,)),)
    recordings.write_recording(path, recorded_samples.HEADER, [sample._replace(snapshot=snapshot, signals=signals)])
    for color in ("never", "always"):
        cli.main(["check", "--recording", str(path), "--color", color])
        printed = capsys.readouterr().out
        assert r"1Gi\x1b[2J\x0aOK n1" in printed
        assert r"memory\x1b]0;x\x07\x0a" in printed
        assert "\x1b[2J" not in printed
        assert "\x1b]0" not in printed


def test_the_json_has_the_recording_and_follows_the_schema(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "--recording", recorded)
    assert str(found["recording"]).startswith(f"{recorded}: recorded at 2027-01-15T08:01:59.000Z")
    assert [error.message for error in schemas.strict().iter_errors(found)] == []


@pytest.mark.parametrize(
    ("at", "index"),
    [
        ("2027-01-15T08:00:30Z", 30),
        ("2027-01-15T09:00:30.700+01:00", 30),
        (str(int(nodes.WALL) + 45), 45),
        ("abcd1234-7", 60),
        ("2030-01-01T00:00:00Z", 119),
    ],
)
def test_the_sample_of_a_time_or_a_decision_is_reported(
    recorded: Path, at: str, index: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = report(capsys, "--recording", recorded, "--at", at)
    (memory,) = [each for each in found["signals"] if each["name"] == str(Signal.MEMORY)]  # type: ignore[attr-defined]
    assert memory["available"] == 4 * nodes.GI - index * nodes.MI
    assert ("decision abcd1234-7" in str(found["recording"])) == (index == 60)


def test_the_verdicts_are_the_recorded_ones_unless_a_configuration_is_given(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    header = "apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\n"
    config.write_text(f"{header}evictionHard: {{memory.available: 8Gi}}\n")
    assert report(capsys, "--recording", recorded)["state"] == "ok"
    found = report(capsys, "--recording", recorded, "--config", config)
    assert (found["state"], found["configuration"]) == ("hard", str(config))


def test_a_page_can_be_written(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert cli.main(["check", "--recording", str(recorded), "--html", str(page)]) == 0
    assert "<svg" in page.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--at", "2020-01-01T00:00:00Z"],
            "no sample at 2020-01-01T00:00:00.000Z: the first sample is from 2027-01-15",
        ),
        (["--at", "zzz"], "no decision zzz; `nodeagent explain` lists the recorded ones"),
    ],
)
def test_a_sample_that_does_not_exist_is_an_error(
    recorded: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", "--recording", str(recorded), *words]) == exit_codes.UNKNOWN
    assert capsys.readouterr().err.startswith(f"nodeagent: {recorded}: {message}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--at", "x"], "--at: only with --recording"),
        (["--recording", "x", "--disk"], "--recording: cannot be combined with --disk"),
        (["--recording", "x", "--rights", "--watch"], "--recording: cannot be combined with --watch, --rights"),
        (["--recording", "x", "--signal", "cpu"], "--signal cpu: must be one of"),
    ],
)
def test_options_of_the_live_node_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", *words]) == exit_codes.USAGE
    assert capsys.readouterr().err.startswith(f"nodeagent: {message}")


def test_a_file_that_is_no_recording_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file"
    path.write_text("hello")
    assert cli.main(["check", "--recording", str(path)]) == exit_codes.UNKNOWN
    assert capsys.readouterr().err == f"nodeagent: {path}: not a recording of nodeagent\n"
