"""`nodeagent explain` lists OOM kills among the decisions and shows their story; a damaged record is shown as it is."""

import json
from pathlib import Path
from typing import Any

import pytest

from nodeagent.model import (
    LostRace,
    MemorySample,
    OomCause,
    OomKill,
    OomLevel,
    OomPlace,
    OomProcess,
    OomReport,
    RaceLoss,
)
from nodeagent.records.flight_recorder import DECISIONS_FILE, FlightRecorder
from nodeagent.report import explain, recorded_decisions, text

MI = 1 << 20
PLACE = OomPlace("/kubepods/podu/c", OomLevel.CONTAINER, "u", "c" * 64)
SAMPLES = tuple(MemorySample(90.0 + n / 10, (900 - 10 * n) * MI, (600 - 10 * n) * MI, 1.0, None) for n in range(40))
REPORT = OomReport(
    "abc-oom1",
    100.0,
    99.75,
    (OomKill(2, OomCause.NODE, PLACE, "shop/web", "main", False, "", (OomProcess(7, "python3", 256 * MI, 5.0),)),),
    SAMPLES,
    LostRace(RaceLoss.NOT_MET, "200Mi", 120 * MI, 0.25, met=False, in_flight=("shop/old",), victims=("shop/large",)),
)


def shown(directory: Path, wanted: str = "last") -> str:
    return text.render(
        explain.sections(recorded_decisions.find_decision(recorded_decisions.read_decisions(directory), wanted))
    )


def test_a_lost_race_is_listed_and_explained_with_its_samples(tmp_path: Path) -> None:
    FlightRecorder(tmp_path).oom(REPORT, wall_time=1.8e9)
    listed = text.render((explain.list_section(recorded_decisions.read_decisions(tmp_path)),))
    assert "abc-oom1" in listed
    assert "2 killed: shop/web (main)" in listed
    assert "too late: not-met" in listed
    story = shown(tmp_path, "abc-oom")
    for part in (
        "found 250ms after the first kill",
        "python3 (PID 7, 256Mi)",
        "120Mi below the threshold of 200Mi, 250ms before",
        "the victim would have been: shop/large",
        "in flight: shop/old",
        "and 25 earlier ones",
    ):
        assert part in story, story
    assert "510Mi" in story, "the last sample"


def test_a_kill_by_an_own_limit_has_no_race(tmp_path: Path) -> None:
    [kill] = REPORT.kills
    limited = kill._replace(cause=OomCause.POD_LIMIT, limit="/kubepods/podu", group=True)
    FlightRecorder(tmp_path).oom(REPORT._replace(kills=(limited,), race=None, samples=()), wall_time=1.8e9)
    story = shown(tmp_path)
    assert "pod-limit of /kubepods/podu, whole cgroup" in story
    assert "WHY NO EVICTION" not in story


def test_the_json_has_everything(tmp_path: Path) -> None:
    FlightRecorder(tmp_path).oom(REPORT, wall_time=1.8e9)
    [recorded] = recorded_decisions.read_decisions(tmp_path)
    found = explain.to_json(recorded)
    assert (found["kind"], found["id"], len(found["samples"])) == ("OOMKills", "abc-oom1", 40)
    assert found["race"]["victims"] == ["shop/large"]
    assert explain.as_list([recorded])["items"][0]["kind"] == "OOMKills"


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"kills": None, "race": 3, "samples": "x"},
        {"kills": [None, 3, {}], "race": {"deficit": "x", "victims": {}}, "samples": [{}, None]},
        {"kills": [{"number": "x", "place": [], "processes": [{}], "pod": {"a": 1}}], "at": "x", "killedAt": -1e300},
        {"kills": [{"pod": "\x1b[31m", "container": "\n", "cause": "\x07", "place": {"path": "\x1b"}}]},
    ],
)
def test_a_damaged_or_hostile_record_is_shown(tmp_path: Path, record: dict[str, Any]) -> None:
    (tmp_path / DECISIONS_FILE).write_text(json.dumps({"record": "oom", "id": "x-oom1", **record}) + "\n")
    story = shown(tmp_path)
    assert "x-oom1" in story
    assert "\x1b" not in story
    assert "\x07" not in story
    text.render((explain.list_section(recorded_decisions.read_decisions(tmp_path)),))
