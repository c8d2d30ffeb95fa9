"""What an outcome means is stated once, for the log, the metrics and every report."""

from typing import Any

import pytest

from nodeagent.analysis import comparison
from nodeagent.model import EVICTED_OUTCOMES, GOOD_OUTCOMES, OutcomeKind
from nodeagent.report import explain, owner_view, recorded_decisions, stories

EVICTED = {OutcomeKind.ACCEPTED, OutcomeKind.KILLED, OutcomeKind.EVICTED_BY_OTHERS}
GOOD = {*EVICTED, OutcomeKind.DRY_RUN, OutcomeKind.NOT_FOUND, OutcomeKind.REQUESTED, OutcomeKind.REQUEST_WITHDRAWN}

DECISION = {
    "record": "decision",
    "id": "d-1",
    "wallTime": 1.0,
    "victims": [{"namespace": "shop", "name": "web", "uid": "u"}],
}


def outcome(kind: str) -> dict[str, Any]:
    return {"record": "outcome", "planId": "d-1", "podUid": "u", "kind": kind, "wallTime": 2.0}


def test_what_evicted_a_pod_is_good() -> None:
    assert set(EVICTED_OUTCOMES) == EVICTED
    assert set(GOOD_OUTCOMES) == GOOD


def test_only_outcomes_of_eviction_requests_are_followed_by_another_one() -> None:
    followed = {kind for kind in OutcomeKind if kind.followed}
    assert followed == {OutcomeKind.REQUESTED, OutcomeKind.REQUEST_UNCERTAIN, OutcomeKind.REQUEST_FAILED}
    assert all(kind.of_request for kind in followed)


@pytest.mark.parametrize("kind", [*OutcomeKind, "of another version"])
def test_every_report_agrees_on_what_is_good_and_what_evicted_the_pod(kind: str) -> None:
    record = outcome(kind)
    decided = recorded_decisions.RecordedDecision("d-1", DECISION, (record,))
    story = stories.build(decided, [decided], ())
    cells = [cell for part in explain.sections(decided) for row in part.rows for cell in row if cell.text == kind]
    assert {cells[0].style, story.moments[-1].style} == {"good" if kind in GOOD else "bad"}
    view = owner_view.view(story, "shop/web", config=None)
    assert view is not None
    assert view.evicted is (kind in EVICTED)
    assert bool(comparison.recorded_evictions([DECISION, record])) is (kind in EVICTED)


def test_a_pod_that_others_have_evicted_counts_once() -> None:
    records = [DECISION, outcome("requested"), outcome("evicted-by-others")]
    assert [each.pod for each in comparison.recorded_evictions(records)] == ["shop/web"]


def test_a_damaged_outcome_is_no_eviction() -> None:
    assert not comparison.recorded_evictions([DECISION, {**outcome(""), "kind": ["accepted"]}])
