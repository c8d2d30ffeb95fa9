"""The story of a decision in words and curves."""

import json

import pytest

from nodeagent.report import recorded_decisions, stories, story_text, text
from nodeagent.report.stories import Moment, Story
from tests.support import incident


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> incident.Incident:
    return incident.record(tmp_path_factory.mktemp("records"))


def build(made: incident.Incident, *, samples: bool = True) -> Story:
    decisions = recorded_decisions.read_decisions(made.directory)
    own = recorded_decisions.find_decision(decisions, made.plan.id)
    return stories.build(own, decisions, made.samples if samples else (), missing="the recorder is off")


def test_it_is_told_what_was_seen_decided_done_and_came_of_it(made: incident.Incident) -> None:
    parts = dict(story_text.summary(build(made)))
    assert list(parts) == ["seen", "decided", "done", "came of it"]
    assert parts["seen"] == (
        "memory.available fell from 7Gi to 1.98Gi in the 1m 26s before; the hard threshold of 2Gi was due, met for 0s; "
        "the pods that grew most: shop/batch (+5.02Gi)"
    )
    assert parts["decided"].startswith("to evict shop/batch, rank 1 of 3 (Burstable; over its request of 512Mi;")
    assert parts["done"] == "shop/batch: accepted (HTTP 201) after 17ms"
    assert parts["came of it"] == (
        "+5.02Gi measured of 5.52Gi predicted; no threshold of memory.available was met 3s later"
    )


def test_the_story_stands_on_top_of_the_tables(made: incident.Incident) -> None:
    output = text.render(story_text.sections(build(made)))
    titles = (
        "IN SHORT",
        "THE 1m 26s BEFORE AND 2m 33s AFTER",
        "WHAT HAPPENED",
        "SIGNALS",
        "VICTIMS",
        "PODS IN EVICTION",
    )
    places = [output.index(f"\n{title}") for title in titles]
    assert places == sorted(places)
    curve = next(line for line in output.splitlines() if line.startswith("memory.available  "))
    assert curve.split()[-4:] == ["7Gi", "1.87Gi", "1.98Gi", "7Gi"]


def test_without_samples_one_line_states_why(made: incident.Incident) -> None:
    output = text.render(story_text.sections(build(made, samples=False)))
    assert "no curves: the recorder is off" in output
    assert "seen: memory.available was 1.98Gi of 16Gi; the hard threshold" in output
    assert "WHAT HAPPENED" in output


def test_the_axis_marks_the_decision_between_both_ends() -> None:
    axis = story_text.axis(0.0, 30.0, 90.0, 45)
    assert axis.index("|") == 15
    assert axis.startswith("-30s")
    assert axis.endswith("+1m")
    assert len(axis) == 45


def test_endless_moments_are_cut_around_the_decision() -> None:
    own = recorded_decisions.RecordedDecision("x", {"wallTime": 500.0, "record": "decision"})
    moments = tuple(Moment(float(at), f"m{at}") for at in range(1000))
    story = Story(own, 500.0, 0.0, 1000.0, None, moments)
    shown = story_text.shown_moments(story)
    assert len(shown) == story_text.MAX_MOMENTS
    assert {485.0, 499.0, 500.0, 524.0} <= {moment.at for moment in shown}
    assert "and 960 more moments" in text.render(story_text.sections(story))


def test_programs_get_moments_with_offsets_and_series(made: incident.Incident) -> None:
    story = json.loads(json.dumps(story_text.to_json(build(made))))["story"]
    own = next(each for each in story["moments"] if each["text"] == "this decision: evict shop/batch")
    assert own["offsetSeconds"] == 0.0
    assert [each["name"] for each in story["series"]][:2] == ["memory.available", "shop/batch"]
    assert story["missing"] is None


def test_hostile_names_stay_on_their_line(tmp_path_factory: pytest.TempPathFactory) -> None:
    made = incident.record(tmp_path_factory.mktemp("records"), hog="x\x1b[2J\n\u202e")
    output = text.render(story_text.sections(build(made)))
    assert all(line.isprintable() for line in output.splitlines())
    assert r"shop/x\x1b[2J\x0a\u202e" in output
