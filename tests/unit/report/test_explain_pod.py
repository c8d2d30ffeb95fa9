"""Everything that touched one pod."""

from typing import Any

import pytest

from nodeagent.report import explain_pod, recorded_decisions, text
from nodeagent.report.recorded_decisions import RecordedDecision
from tests.support import incident


@pytest.fixture(scope="module")
def decisions(tmp_path_factory: pytest.TempPathFactory) -> tuple[RecordedDecision, ...]:
    return recorded_decisions.read_decisions(incident.record(tmp_path_factory.mktemp("records")).directory)


def test_a_victim_has_its_reasons_and_outcome(decisions: tuple[RecordedDecision, ...]) -> None:
    first, second = explain_pod.entries(decisions, "shop/batch")
    assert (first.what, first.outcome) == ("evicted", "accepted")
    assert "uses 5.02Gi over its request" in first.reason
    assert (second.what, second.number) == ("candidate", 2)
    assert "pending-release" in second.reason


def test_a_pod_that_was_not_needed_has_its_rank(decisions: tuple[RecordedDecision, ...]) -> None:
    first = explain_pod.entries(decisions, "shop/web")[0]
    assert (first.what, first.outcome) == ("not-needed", "")
    assert first.reason.startswith("rank 2; Burstable")


def test_an_unknown_pod_has_one_sentence(decisions: tuple[RecordedDecision, ...]) -> None:
    found = explain_pod.entries(decisions, "shop/none")
    assert "no decision and no OOM kill in these records touched it" in text.render(
        (explain_pod.section(found, "shop/none"),)
    )


def test_a_protected_pod_has_its_refusal_and_an_oom_kill_its_cause() -> None:
    pod = {"namespace": "shop", "name": "db", "uid": "u1"}
    refused: dict[str, Any] = {
        "record": "decision",
        "id": "d1",
        "wallTime": 1.0,
        "ranking": [{**pod, "rank": 1, "refusals": [{"code": "minimum-age", "message": "is 5s old"}]}],
    }
    kill = {"pod": "shop/db", "number": 3, "cause": "container-limit", "place": {"cgroupUid": "u1"}}
    oom: dict[str, Any] = {"record": "oom", "id": "o1", "wallTime": 2.0, "kills": [kill, {"pod": "shop/other"}]}
    first, second = explain_pod.entries([RecordedDecision("d1", refused), RecordedDecision("o1", oom)], "shop/db")
    assert (first.what, first.reason) == ("refused", "minimum-age: is 5s old")
    assert (second.what, second.reason) == ("oom-kill", "container-limit; processes killed: 3")


def test_the_last_eviction_is_the_newest_decision_with_the_pod_as_victim(
    decisions: tuple[RecordedDecision, ...],
) -> None:
    found = explain_pod.last_eviction(decisions, "shop/batch")
    assert found is not None
    assert found.decision["victims"][0]["name"] == "batch"
    assert explain_pod.last_eviction(decisions, "shop/web") is None


def test_programs_get_the_same_rows(decisions: tuple[RecordedDecision, ...]) -> None:
    items = explain_pod.to_json(explain_pod.entries(decisions, "shop/batch"), "shop/batch")["items"]
    assert [(each["what"], each["count"]) for each in items] == [("evicted", 1), ("candidate", 2)]
