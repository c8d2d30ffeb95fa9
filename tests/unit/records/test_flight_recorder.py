"""Recorded decisions can be read back, and a failed write never raises."""

import base64
import zlib
from pathlib import Path

import pytest

from nodeagent.model import (
    Amount,
    ConditionStatus,
    ConditionType,
    ConditionVerdict,
    Outcome,
    OutcomeKind,
    Plan,
    Refusal,
    RefusalCode,
    ReliefReport,
    Signal,
    Threshold,
    ThresholdVerdict,
)
from nodeagent.policy import effective_thresholds, engine, ranking
from nodeagent.policy.state import initial
from nodeagent.records import flight_recorder
from tests.support import nodes

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
    refusals=(Refusal(RefusalCode.RATE_LIMIT_NODE, "no token left"),),
)


def test_a_decision_and_its_outcome_have_one_id(tmp_path: Path) -> None:
    recorder = flight_recorder.FlightRecorder(tmp_path)
    assert recorder.decision(PLAN, wall_time=1.0) == ""
    assert recorder.outcome(Outcome("abc-1", "uid-1", OutcomeKind.ACCEPTED, "201", 13.0), wall_time=2.0) == ""
    decision, outcome = list(flight_recorder.read_records(tmp_path))
    assert (decision["record"], outcome["record"]) == ("decision", "outcome")
    assert decision["id"] == outcome["planId"] == "abc-1"
    assert decision["actingOn"]["threshold"]["gracePeriodSeconds"] == 30.0
    assert decision["actingOn"]["threshold"]["signal"] == "memory.available"
    assert decision["conditions"][0]["message"] == "low \x1b\n on memory"
    assert decision["refusals"] == [{"code": "rate-limit-node", "message": "no token left"}]
    assert outcome["kind"] == "accepted"


def test_the_files_stay_within_their_limit_and_keep_the_newest_records(
    tmp_path: Path,
) -> None:
    recorder = flight_recorder.FlightRecorder(tmp_path)
    big = PLAN._replace(refusals=(Refusal(RefusalCode.FUTILE, "x" * 1_000_000),))
    for number in range(30):
        recorder.decision(big._replace(id=f"abc-{number}"), wall_time=float(number))
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 2
    assert max(sizes) <= flight_recorder.MAX_FILE_BYTES
    kept = [record["id"] for record in flight_recorder.read_records(tmp_path)]
    assert kept[-1] == "abc-29"
    assert kept == [f"abc-{number}" for number in range(30 - len(kept), 30)]


def test_a_line_truncated_by_a_crash_is_the_only_loss(tmp_path: Path) -> None:
    recorder = flight_recorder.FlightRecorder(tmp_path)
    recorder.decision(PLAN, wall_time=1.0)
    recorder.decision(PLAN._replace(id="abc-2"), wall_time=1.0)
    path = tmp_path / "decisions.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    assert [record["id"] for record in flight_recorder.read_records(tmp_path)] == ["abc-1"]
    for number in (3, 4):
        assert flight_recorder.FlightRecorder(tmp_path).decision(PLAN._replace(id=f"abc-{number}"), wall_time=1.0) == ""
    assert [record["id"] for record in flight_recorder.read_records(tmp_path)] == ["abc-1", "abc-3", "abc-4"]


def test_a_directory_that_cannot_be_written_is_a_reason_and_no_error(tmp_path: Path) -> None:
    recorder = flight_recorder.FlightRecorder(tmp_path / "gone")
    assert "No such file" in recorder.decision(PLAN, wall_time=1.0)


@pytest.mark.parametrize(
    ("snake", "camel"),
    [("id", "id"), ("grace_period_s", "gracePeriodSeconds"), ("qos_class", "qosClass"), ("s", "s")],
)
def test_keys_are_spelled_as_in_kubernetes_objects(snake: str, camel: str) -> None:
    assert flight_recorder.camel_case(snake) == camel


# --- the inputs of a decision ----------------------------------------------------------------------------------------


def made() -> tuple[Plan, flight_recorder.DecisionInputs]:
    config = nodes.config(nodes.hard(value=2 * nodes.GI), nodes.soft(Signal.NODEFS, nodes.GI, grace_s=30.0))
    views = [nodes.view(f"pod-{number}", (3 + number) * nodes.GI) for number in range(4)]
    seen = nodes.snapshot(*views, available={Signal.MEMORY: nodes.GI})
    state = initial("abc", now=nodes.NOW - 60, tokens_spent=False)
    plan, after = engine.decide(seen, state, now=nodes.NOW, config=config)
    # The state after a decision contains evictions in flight, rate limits, growth and history.
    return plan, flight_recorder.DecisionInputs(
        seen, after, nodes.NOW, effective_thresholds.effective(config, seen.layout), 3
    )


def test_the_inputs_of_a_decision_come_back_equal(tmp_path: Path) -> None:
    plan, inputs = made()
    flight_recorder.FlightRecorder(tmp_path).decision(ranking.with_key_texts(plan), wall_time=1.0, inputs=inputs)
    (record,) = flight_recorder.read_records(tmp_path)
    assert flight_recorder.Packer().unpack(record["inputs"]) == (inputs, "")


def test_inputs_with_infinity_and_a_name_that_is_not_utf8_come_back() -> None:
    _, inputs = made()
    odd = inputs._replace(now=float("inf"), snapshot=inputs.snapshot._replace(node="n\udcffde"))
    packer = flight_recorder.Packer()
    back = packer.unpack(packer.pack(odd)).inputs
    assert back is not None
    assert (back.now, back.snapshot.node) == (float("inf"), "n\\udcffde")


def test_a_decision_with_a_name_that_is_not_utf8_is_recorded(tmp_path: Path) -> None:
    odd = PLAN._replace(refusals=(Refusal(RefusalCode.FUTILE, "pod \udcff"),))
    assert flight_recorder.FlightRecorder(tmp_path).decision(odd, wall_time=1.0) == ""
    (record,) = flight_recorder.read_records(tmp_path)
    assert record["refusals"][0]["message"] == "pod \\udcff"


@pytest.mark.parametrize(
    ("change", "trouble"),
    [
        ({"shape": "0123456789abcdef"}, "another shape"),
        ({"data": "!!!"}, "cannot be unpacked"),
        ({"data": ""}, "cannot be unpacked"),
        ({"data": base64.b85encode(zlib.compress(b"\xc0")).decode()}, "cannot be unpacked"),
        (
            {"data": base64.b85encode(zlib.compress(bytes(flight_recorder.MAX_UNPACKED_BYTES + 1))).decode()},
            "unpacks to more",
        ),
    ],
)
def test_inputs_that_do_not_match_are_rejected_with_a_reason(change: dict[str, str], trouble: str) -> None:
    packer = flight_recorder.Packer()
    packed = packer.pack(made()[1]) | change
    unpacked = packer.unpack(packed)
    assert unpacked.inputs is None
    assert trouble in unpacked.trouble


def test_the_readable_record_lists_each_pod_with_its_keys_and_refusals(tmp_path: Path) -> None:
    plan, inputs = made()
    flight_recorder.FlightRecorder(tmp_path).decision(ranking.with_key_texts(plan), wall_time=1.0, inputs=inputs)
    (record,) = flight_recorder.read_records(tmp_path)
    first = record["ranking"][0]
    assert (first["namespace"], first["name"], first["rank"], first["refusals"]) == ("shop", "pod-3", 1, [])
    assert [key["name"] for key in first["keys"]] == list(plan.rank_order)
    assert all(key["text"] for key in first["keys"])
    assert record["victims"][0]["uid"] == plan.victims[0].pod.uid
    assert record["victims"][0]["threshold"]["signal"] == "memory.available"


def test_measured_relief_is_recorded_under_its_decision(tmp_path: Path) -> None:
    report = ReliefReport("abc-1", Signal.MEMORY, ("uid-1",), predicted=10, measured=9, took_s=1.5)
    flight_recorder.FlightRecorder(tmp_path).relief(report, wall_time=3.0)
    (record,) = flight_recorder.read_records(tmp_path)
    assert (record["record"], record["planId"], record["measured"], record["tookSeconds"]) == (
        "relief",
        "abc-1",
        9,
        1.5,
    )


def test_records_are_as_private_as_the_state(tmp_path: Path) -> None:
    flight_recorder.FlightRecorder(tmp_path).decision(PLAN, wall_time=1.0)
    assert (tmp_path / flight_recorder.DECISIONS_FILE).stat().st_mode & 0o777 == 0o600


def test_one_file_can_be_read_by_itself_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    flight_recorder.FlightRecorder(tmp_path).decision(PLAN, wall_time=1.0)
    assert [record["id"] for record in flight_recorder.read_records(tmp_path / flight_recorder.DECISIONS_FILE)] == [
        "abc-1"
    ]
    with pytest.raises(flight_recorder.RecordsError, match="no such file"):
        list(flight_recorder.read_records(tmp_path / "elsewhere"))


@pytest.mark.parametrize("other", [b"\x7fELF\0\n\1", b"kind: Pod\n", b'{"kind": "PodList"}\n', b"\n"])
def test_a_file_without_records_is_an_error_and_an_empty_one_is_not(other: bytes, tmp_path: Path) -> None:
    file = tmp_path / "other"
    file.write_bytes(other)
    with pytest.raises(flight_recorder.RecordsError, match="no record in this file"):
        list(flight_recorder.read_records(file))
    file.write_bytes(b"")
    assert list(flight_recorder.read_records(file)) == []
