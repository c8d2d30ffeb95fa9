"""Whatever a file of records contains, each view of it is a text, a document and JSON, or one clear error."""

import copy
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.records import flight_recorder
from nodeagent.report import (
    explain_pod,
    history,
    owner_view,
    post_mortem,
    record_fields,
    recorded_decisions,
    stories,
    story_text,
    text,
)
from nodeagent.report.recorded_decisions import RecordedDecision
from tests.support import incident
from tests.support.nodes import WALL

JUNK: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from(
        [0, -1, 2**63, 10**400, 1e308, WALL, "", "\x1b[2J\n# x|<b>@all", "memory.available", "uid-shop-batch"]
    )
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


class Records:
    """Good ones to damage. Its repr is short, because hypothesis prints the arguments of a test."""

    def __init__(self, records: list[dict[str, Any]]) -> None:
        self._records = records

    def copied(self) -> list[dict[str, Any]]:
        return copy.deepcopy(self._records)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Records:
    made = incident.record(tmp_path_factory.mktemp("records"))
    found = list(flight_recorder.read_records(made.directory))
    kill = {"pod": "shop/batch", "number": 1, "cause": "node", "place": {"path": "/"}, "processes": [{"pid": 1}]}
    oom = {"record": "oom", "id": "o-1", "wallTime": WALL + 90, "at": 9.0, "killedAt": 8.0, "kills": [kill]}
    samples = [{"at": 1.0, "memAvailable": 5}]
    race = {"loss": "too late", "deficit": 1, "victims": ["a"]}
    return Records([*found, {**oom, "race": race, "samples": samples}])


def paths(value: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [each for key, item in inner for each in ((*before, key), *paths(item, (*before, key)))]


def put(record: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    target: Any = record
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value


def show_all(decisions: Sequence[RecordedDecision]) -> None:
    for own in decisions:
        story = stories.build(own, decisions, ())
        rendered = text.render(story_text.sections(story))
        assert all(line.isprintable() for line in rendered.splitlines())
        json.dumps(story_text.to_json(story))
        pods = [record_fields.pod_name(victim) for victim in story.victims[:2]]
        views = [owner_view.view(story, pod, config=None) for pod in pods]
        found = [view for view in views if view is not None]
        for view in found:
            assert all(line.isprintable() for line in text.render(owner_view.sections(view)).splitlines())
            json.dumps(owner_view.to_json(view))
        document = post_mortem.document(story, found)
        assert document.startswith("# ")
        assert all(line.isprintable() for line in document.splitlines())
    entries = explain_pod.entries(decisions, "shop/batch")
    assert all(line.isprintable() for line in text.render((explain_pod.section(entries, "shop/batch"),)).splitlines())
    flat = [each for own in decisions for each in (own.decision, *own.outcomes, *own.reliefs)]
    history.evictions(flat)
    history.oom_kills(flat)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9999), JUNK), min_size=1, max_size=4))
def test_a_record_with_any_field_replaced_is_shown(good: Records, changes: list[tuple[int, int, Any]]) -> None:
    changed = [{key: value for key, value in each.items() if key != "inputs"} for each in good.copied()]
    for number, place, value in changes:
        record = changed[number % len(changed)]
        if places := paths(record):
            put(record, places[place % len(places)], copy.deepcopy(value))
    show_all(recorded_decisions.group(changed))


@pytest.mark.parametrize("inputs", [None, 5, {}, {"shape": "x", "data": "y"}, {"data": "~"}, "cut"])
def test_inputs_that_cannot_be_read_leave_the_request_unknown(good: Records, inputs: object) -> None:
    changed = good.copied()
    decision = changed[0]
    packed = decision["inputs"]
    decision["inputs"] = {**packed, "data": packed["data"][: len(packed["data"]) // 2]} if inputs == "cut" else inputs
    decisions = recorded_decisions.group(changed)
    view = owner_view.view(stories.build(decisions[0], decisions, ()), "shop/batch", config=incident.CONFIG)
    assert view is not None
    assert view.kept is None
    assert owner_view.advice(view)[0].startswith("Not known: ")


@settings(max_examples=40)
@given(
    st.lists(
        st.dictionaries(st.sampled_from(["record", "id", "planId", "wallTime", "victims", "kills"]), JUNK), max_size=4
    )
)
def test_records_of_junk_are_shown(records: list[dict[str, Any]]) -> None:
    kinds = ("decision", "outcome", "relief", "reclaim", "oom")
    show_all(recorded_decisions.group([{**each, "record": kinds[n % 5]} for n, each in enumerate(records)]))
