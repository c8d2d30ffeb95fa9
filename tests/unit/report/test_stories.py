"""The moments and curves of a decision."""

from pathlib import Path

import pytest

from nodeagent.model import ConditionType, RecordedSample, Signal
from nodeagent.report import recorded_decisions, stories
from nodeagent.report.downsampling import Point
from nodeagent.report.recorded_decisions import RecordedDecision
from nodeagent.report.stories import Curve, Story
from tests.support import incident
from tests.support.nodes import GI, NOW, WALL


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> incident.Incident:
    return incident.record(tmp_path_factory.mktemp("records"))


def build(made: incident.Incident, samples: tuple[RecordedSample, ...] | None = None) -> Story:
    decisions = recorded_decisions.read_decisions(made.directory)
    own = recorded_decisions.find_decision(decisions, made.plan.id)
    return stories.build(own, decisions, made.samples if samples is None else samples, missing="no recorder")


def test_the_moments_are_in_the_order_of_time_and_have_cause_act_and_result(made: incident.Incident) -> None:
    story = build(made)
    texts = [moment.text for moment in story.moments]
    assert [moment.at for moment in story.moments] == sorted(moment.at for moment in story.moments)
    expected = [
        "memory.available < 3Gi (soft, 30s) is met",
        f"{ConditionType.MEMORY_PRESSURE} becomes True",
        "memory.available < 2Gi (hard) is met",
        "this decision: evict shop/batch",
        "shop/batch: accepted (HTTP 201)",
        "a decision evicts no pod: pending-release",
        "memory.available < 2Gi (hard) is no longer met",
    ]
    assert [text for text in texts if text in expected] == expected
    assert any(text.startswith(f"{made.plan.id}: +5") and "measured of" in text for text in texts)


def test_refusals_in_a_row_are_one_moment_with_their_number(made: incident.Incident) -> None:
    (refused,) = [each for each in build(made).moments if "pending-release" in each.text]
    assert refused.number == 2
    assert refused.until == refused.at + 1


def test_the_curves_have_the_short_signal_first_and_then_the_victim(made: incident.Incident) -> None:
    curves = stories.curves(build(made))
    assert [curve.name for curve in curves] == ["memory.available", "shop/batch", "shop/db", "shop/web"]
    memory, batch = curves[:2]
    assert (memory.first, memory.falls) == (7 * GI, True)
    assert memory.extreme is not None
    assert memory.extreme < 2 * GI
    assert (batch.first, batch.victim) == (GI // 2, True)
    assert batch.value_at(made.plan.made_at - NOW + WALL) == batch.points[86].value


def test_the_pods_that_grew_are_named_with_how_much(made: incident.Incident) -> None:
    ((name, more),) = stories.growth(build(made))
    assert name == "shop/batch"
    assert more == 86 * 7 * GI // 120


def test_without_samples_the_records_are_still_a_story(made: incident.Incident) -> None:
    story = build(made, ())
    assert story.missing == "no recorder"
    assert story.history is None
    assert "this decision: evict shop/batch" in [moment.text for moment in story.moments]
    assert stories.curves(story) == ()
    assert stories.growth(story) == ()


def test_a_gap_in_the_samples_is_a_moment(made: incident.Incident) -> None:
    samples = (*made.samples[:60], *(each for each in made.samples[200:]))
    assert "no samples for 2m 21s" in [moment.text for moment in build(made, samples).moments]


def test_a_column_is_the_extreme_of_its_time_and_a_gap_stays_one() -> None:
    points = (*(Point(float(at), float(at)) for at in range(10)), Point(9.0, None), Point(90.0, 1.0))
    low, high = Curve("a", "bytes", points, falls=True), Curve("a", "bytes", points, falls=False)
    assert stories.columns(low, 0.0, 100.0, 10)[:2] == [0.0, None]
    assert stories.columns(high, 0.0, 100.0, 10)[0] == 9.0
    assert stories.columns(high, 0.0, 100.0, 10)[9] == 1.0


def test_between_two_samples_of_calm_the_last_value_counts() -> None:
    points = (Point(0.0, 5.0), Point(10.0, 6.0), Point(20.0, 7.0))
    assert stories.columns(Curve("a", "bytes", points, falls=True), 0.0, 20.0, 4) == [5.0, 5.0, 6.0, 7.0]


def test_oom_kills_are_at_the_time_of_the_kill() -> None:
    kill = {"pod": "shop/web", "number": 2}
    record = {"record": "oom", "id": "o1", "wallTime": 100.0, "at": 50.0, "killedAt": 48.0, "kills": [kill]}
    own = RecordedDecision("o1", record)
    story = stories.build(own, [own], ())
    assert [(moment.at, moment.text) for moment in story.moments] == [(98.0, "OOM kill in shop/web (processes: 2)")]


@pytest.mark.parametrize(
    "decision",
    [
        {},
        {"wallTime": "soon"},
        {"wallTime": 1e308, "victims": [{}], "actingOn": {"threshold": {"signal": ["x"]}}},
        {"wallTime": 5, "victims": "all", "refusals": [{"code": None}], "rankedFor": {}},
        {"wallTime": 10**400, "ranking": [{"keys": 3}]},
    ],
)
def test_a_damaged_record_is_a_story_without_what_is_damaged(decision: dict[str, object], tmp_path: Path) -> None:
    own = RecordedDecision("x", {"record": "decision", "id": "x", **decision})
    assert stories.build(own, [own], ()).signal is Signal.MEMORY
