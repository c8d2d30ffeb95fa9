"""Recorded decisions are equal to what was recorded."""

from pathlib import Path

from nodeagent.records import flight_recorder
from nodeagent.report import recorded_decisions
from tests.support import incident


def test_every_field_of_a_decision_is_as_recorded(tmp_path: Path) -> None:
    records = list(flight_recorder.read_records(incident.record(tmp_path).directory))
    decisions = {each["id"]: each for each in records if each["record"] == "decision"}
    found = {each.id: each.decision for each in recorded_decisions.read_decisions(tmp_path)}
    assert len(found) > 1
    assert found == decisions
