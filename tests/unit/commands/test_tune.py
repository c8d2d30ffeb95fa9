"""`nodeagent tune` prints candidates and a stanza, and changes nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from nodeagent.commands import cli
from nodeagent.model import OomCause, Outcome, OutcomeKind, RecordedSample, RecordingHeader, Signal
from tests.support import recordings, simulated_node
from tests.support.nodes import GI, MI, NOW, WALL, snapshot, view
from tests.support.recorded import Run

HEADER = RecordingHeader("node-1", "0.1.0", "abc", "boot", WALL)


def write_ramps(path: Path, *, lowest: int, start: int = 0, node: str = "node-1") -> str:
    """A calm minute, a fall from 8 GiB to `lowest`, and a calm minute."""
    fall = [8 * GI - second * 50 * MI for second in range((8 * GI - lowest) // (50 * MI) + 1)]
    levels = [8 * GI] * 60 + fall + [8 * GI] * 60
    recordings.write_recording(
        path,
        HEADER._replace(node=node),
        [
            RecordedSample(
                snapshot(view("a", GI), at=NOW + start + number, available={Signal.MEMORY: level})._replace(node=node)
            )
            for number, level in enumerate(levels)
        ],
    )
    return str(path)


def evict(directory: Path) -> None:
    """Records of one eviction that was carried out."""
    run = Run(directory, simulated_node.acting())
    low = snapshot(view("leak", 3 * GI), at=NOW + 215, available={Signal.MEMORY: 300 * MI})
    [victim] = run.decide(low).victims
    done = Outcome("abc-1", victim.pod.uid, OutcomeKind.ACCEPTED, "", NOW + 215)
    assert run.recorder.outcome(done, wall_time=WALL + 215) == ""


def read_report(capsys: pytest.CaptureFixture[str], *places: str) -> dict[str, Any]:
    assert cli.main(["tune", *places, "-o", "json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_the_stanza_of_the_report_is_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = write_ramps(tmp_path / "samples-1.rec", lowest=20 * MI)
    assert cli.main(["tune", place, "-o", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kind"] == "TuneReport"
    stanza = tmp_path / "stanza.yaml"
    stanza.write_text(report["stanza"], "utf-8")
    assert cli.main(["config", "validate", str(stanza)]) == 0
    [memory] = [each for each in report["signals"] if each["signal"] == "memory.available"]
    assert len(memory["exhaustions"]) == 1
    proposed = {each["proposed"]: each for each in memory["candidates"] if each["proposed"]}
    assert set(proposed) == {"hard", "soft"}
    assert proposed["hard"]["missed"] == 0
    assert proposed["hard"]["leadSeconds"][0] >= 15


def test_the_text_has_a_table_a_curve_and_the_stanza(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = write_ramps(tmp_path / "samples-1.rec", lowest=20 * MI)
    assert cli.main(["tune", place]) == 0
    text = capsys.readouterr().out
    for part in ("CANDIDATES FOR memory.available", "CURVE FOR memory.available", "STANZA TO PASTE", "evictionHard:"):
        assert part in text
    assert "Nothing was changed" in text


def test_several_recordings_are_read_oldest_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    later = write_ramps(tmp_path / "samples-1.rec", lowest=20 * MI, start=10_000)
    earlier = write_ramps(tmp_path / "samples-2.rec", lowest=20 * MI)
    assert cli.main(["tune", later, earlier, "-o", "json"]) == 0
    [memory] = [each for each in json.loads(capsys.readouterr().out)["signals"] if each["signal"] == "memory.available"]
    assert len(memory["exhaustions"]) == 2


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_recordings_of_several_nodes_at_the_same_time_all_count(
    order: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {
        "a": write_ramps(tmp_path / "a.rec", lowest=8 * GI, node="node-a"),
        "b": write_ramps(tmp_path / "b.rec", lowest=20 * MI, node="node-b"),
    }
    alone, both = (
        read_report(capsys, places["b"]),
        read_report(capsys, *[places[each] for each in order]),
    )
    assert sorted(both["nodes"]) == ["node-a", "node-b"]
    assert both["cannotTell"] == []
    assert both["stanza"] == alone["stanza"]
    [memory] = [each for each in both["signals"] if each["signal"] == "memory.available"]
    assert len(memory["exhaustions"]) == 1
    assert memory["lowest"] < 100 * MI
    assert cli.main(["tune", *places.values()]) == 0
    assert "b.rec, 2 nodes from" in capsys.readouterr().out


def test_a_recording_that_is_given_twice_counts_once_and_is_remarked_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "samples").mkdir()
    write_ramps(tmp_path / "samples" / "samples-1.rec", lowest=200 * MI)
    evict(tmp_path)
    report = read_report(capsys, str(tmp_path), str(tmp_path))
    [memory] = [each for each in report["signals"] if each["signal"] == "memory.available"]
    assert len(memory["acts"]) == 1
    [remark] = report["cannotTell"]
    assert remark == f"{memory['samples']} samples of node-1 are not newer than the ones before them and were left out."


def test_records_without_samples_are_of_no_node_beside_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = [write_ramps(tmp_path / f"{name}.rec", lowest=200 * MI, node=f"node-{name}") for name in ("a", "b")]
    evict(tmp_path)
    records = str(tmp_path / "decisions.jsonl")
    report = read_report(capsys, *places, records)
    assert [len(each["acts"]) for each in report["signals"] if each["signal"] == "memory.available"] == [0]
    assert report["cannotTell"] == [f"{records}: left out, because without a sample its node is unknown."]
    report = read_report(capsys, places[0], records)
    assert [len(each["acts"]) for each in report["signals"] if each["signal"] == "memory.available"] == [1]


def test_evictions_that_the_recorded_agent_carried_out_answer_an_alarm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "samples").mkdir()
    write_ramps(tmp_path / "samples" / "samples-1.rec", lowest=200 * MI)
    evict(tmp_path)
    assert cli.main(["tune", str(tmp_path), "-o", "json"]) == 0
    [memory] = [each for each in json.loads(capsys.readouterr().out)["signals"] if each["signal"] == "memory.available"]
    assert len(memory["acts"]) == 1
    at_4 = next(each for each in memory["candidates"] if (each["value"], each["gracePeriodSeconds"]) == ("4%", 0.0))
    assert (at_4["answered"], at_4["falseAlarms"]) == (1, 0)


def test_an_oom_kill_of_the_node_counts_and_one_of_a_limit_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "samples").mkdir()
    write_ramps(tmp_path / "samples" / "samples-1.rec", lowest=200 * MI)
    kills = [
        {"record": "oom", "wallTime": WALL + at, "id": "oom-1", "kills": [{"cause": cause.value, "number": 1}]}
        for at, cause in ((100, OomCause.CONTAINER_LIMIT), (212, OomCause.NODE))
    ]
    (tmp_path / "decisions.jsonl").write_text("".join(json.dumps(each) + "\n" for each in kills), "utf-8")
    assert cli.main(["tune", str(tmp_path), "-o", "json"]) == 0
    [memory] = [each for each in json.loads(capsys.readouterr().out)["signals"] if each["signal"] == "memory.available"]
    assert [each["what"] for each in memory["exhaustions"]] == ["OOM kill"]


def test_the_page_has_a_curve(tmp_path: Path) -> None:
    place, page = write_ramps(tmp_path / "samples-1.rec", lowest=20 * MI), tmp_path / "tune.html"
    assert cli.main(["tune", place, "--html", str(page)]) == 0
    text = page.read_text("utf-8")
    assert "<svg" in text
    assert "false alarms and misses by value" in text


def test_records_without_samples_cannot_be_tuned_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Run(tmp_path, simulated_node.acting()).decide(snapshot(available={Signal.MEMORY: MI}))
    assert cli.main(["tune", str(tmp_path / "decisions.jsonl")]) == 3
    assert "contains no sample with a signal" in capsys.readouterr().err
