"""What was decided can be read back, and recording never stands in the way."""

from pathlib import Path

import pytest

from nodeagent.journal import records
from nodeagent.model import (
    Amount,
    ConditionStatus,
    ConditionType,
    ConditionVerdict,
    Outcome,
    OutcomeKind,
    Plan,
    Refusal,
    Signal,
    Threshold,
    ThresholdVerdict,
)

THRESHOLD = Threshold(Signal.MEMORY, Amount(100 << 20, None, "100Mi"), grace_period_s=30.0)
PLAN = Plan(
    id="abc-1",
    made_at=12.5,
    snapshot_taken_at=12.25,
    signals=(),
    conditions=(
        ConditionVerdict(ConditionType.MEMORY_PRESSURE, ConditionStatus.TRUE, "Reason", "low \x1b\n on memory", 10.0),
    ),
    acting_on=ThresholdVerdict(THRESHOLD, 100 << 20, met=True, active_since=1.0, due=True),
    refusals=(Refusal("budget", "no token left"),),
)


def test_a_decision_and_its_outcome_come_back_under_one_id(tmp_path: Path) -> None:
    recorder = records.Recorder(tmp_path)
    assert recorder.decision(PLAN, wall_time=1.0) == ""
    assert recorder.outcome(Outcome("abc-1", "uid-1", OutcomeKind.ACCEPTED, "201", 13.0), wall_time=2.0) == ""
    decision, outcome = list(records.Recorder(tmp_path).read())
    assert (decision["record"], outcome["record"]) == ("decision", "outcome")
    assert decision["id"] == outcome["planId"] == "abc-1"
    assert decision["actingOn"]["threshold"]["gracePeriodSeconds"] == 30.0
    assert decision["actingOn"]["threshold"]["signal"] == "memory.available"
    assert decision["conditions"][0]["message"] == "low \x1b\n on memory"
    assert decision["refusals"] == [{"code": "budget", "message": "no token left"}]
    assert outcome["kind"] == "accepted"


def test_the_files_stay_within_their_bound_and_keep_the_newest(
    tmp_path: Path,
) -> None:
    recorder = records.Recorder(tmp_path)
    big = PLAN._replace(refusals=(Refusal("filler", "x" * 1_000_000),))
    for number in range(30):
        recorder.decision(big._replace(id=f"abc-{number}"), wall_time=float(number))
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 2
    assert max(sizes) <= records.MAX_BYTES
    kept = [record["id"] for record in recorder.read()]
    assert kept[-1] == "abc-29"
    assert kept == [f"abc-{number}" for number in range(30 - len(kept), 30)]


def test_a_line_cut_by_a_crash_loses_only_itself(tmp_path: Path) -> None:
    recorder = records.Recorder(tmp_path)
    recorder.decision(PLAN, wall_time=1.0)
    recorder.decision(PLAN._replace(id="abc-2"), wall_time=1.0)
    path = tmp_path / "decisions.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    assert [record["id"] for record in recorder.read()] == ["abc-1"]


def test_a_directory_that_cannot_be_written_is_said_not_raised(tmp_path: Path) -> None:
    recorder = records.Recorder(tmp_path / "gone")
    assert "No such file" in recorder.decision(PLAN, wall_time=1.0)


@pytest.mark.parametrize(
    ("snake", "camel"),
    [("id", "id"), ("grace_period_s", "gracePeriodSeconds"), ("qos_class", "qosClass"), ("s", "s")],
)
def test_keys_are_spelled_as_in_kubernetes_objects(snake: str, camel: str) -> None:
    assert records.camel(snake) == camel
