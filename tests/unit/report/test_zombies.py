"""The line about zombies in `check` and in the story of a decision, and their object in JSON."""

import json

from nodeagent.model import Observation, RecordedSample, Signal, ZombieCount, ZombieHolder
from nodeagent.report import stories, story_text, text
from nodeagent.report.json_document import to_json
from nodeagent.report.node_report import Report
from nodeagent.report.recorded_decisions import RecordedDecision
from nodeagent.report.sections import sections
from tests.support import reports, schemas


def report(*holders: ZombieHolder, complete: bool = True) -> Report:
    view = reports.pod_view("web", working_set=5 << 20)
    made = reports.report(pods=(reports.ranked(view, 1),))
    count = ZombieCount(sum(each.zombies for each in holders), holders, complete, reports.TAKEN_AT)
    observations = dict(made.snapshot.observations)
    observations[Signal.PID] = Observation(Signal.PID, 130, 10_000, reports.TAKEN_AT, "made up")
    snapshot = made.snapshot._replace(pods=(view,), zombies=count, observations=observations)
    return made._replace(snapshot=snapshot)


def holders() -> tuple[ZombieHolder, ...]:
    uid = reports.pod_view("web", working_set=5 << 20).pod.cgroup_uid
    return (
        ZombieHolder(400, "", "kubelet.service", 812, "kubelet"),
        ZombieHolder(12, uid, "", 4711, "s\x1bh"),
        ZombieHolder(3, "", "", 0, ""),
    )


def test_the_holders_are_named_below_the_signals() -> None:
    printed = text.render(sections(report(*holders())))
    key = reports.pod_view("web", working_set=5 << 20).pod.key
    [line] = [line for line in printed.splitlines() if "zombies of" in line]
    assert "415 zombies of 9870 PIDs in use: kubelet.service 400 (kubelet, PID 812)" in line
    assert f"pod {key} 12 (" in line
    assert "parent not visible 3" in line
    assert "\x1b" not in printed


def test_a_partial_count_is_at_least_that() -> None:
    assert "at least 415 zombies" in text.render(sections(report(*holders(), complete=False)))


def test_a_few_zombies_are_not_mentioned() -> None:
    few = ZombieHolder(9, "", "kubelet.service", 812, "kubelet")
    assert "zombies" not in text.render(sections(report(few)))
    assert to_json(report(few))["zombies"]["total"] == 9


def test_the_document_names_pods_and_units() -> None:
    document = json.loads(json.dumps(to_json(report(*holders()))))
    assert list(schemas.strict().iter_errors(document)) == []
    found = document["zombies"]
    assert (found["total"], found["complete"]) == (415, True)
    assert [each["unit"] for each in found["holders"]] == ["kubelet.service", None, None]
    assert [each["name"] for each in found["holders"]] == [None, "web", None]
    assert to_json(reports.report())["zombies"] is None


def seen(signal: Signal, *samples: RecordedSample) -> str:
    """The first line of the story of a decision half a second after `samples[1]`."""
    threshold = {"signal": signal.value, "gracePeriodSeconds": 0.0}
    decision = {
        "planId": "ab12-1",
        "wallTime": samples[1].wall_time + 0.5,
        "madeAt": samples[1].at,
        "actingOn": {"threshold": threshold, "value": 200},
    }
    recorded = RecordedDecision("ab12-1", decision)
    return dict(story_text.summary(stories.build(recorded, [recorded], samples)))["seen"]


def series(*zombies: int) -> list[RecordedSample]:
    found = []
    for second, number in enumerate(zombies):
        snapshot = report(ZombieHolder(number, "", "kubelet.service", 812, "kubelet")).snapshot
        at, wall = snapshot.taken_at + second, snapshot.wall_time + second
        found.append(RecordedSample(snapshot._replace(taken_at=at, wall_time=wall)))
    return found


def test_the_story_of_a_decision_about_pids_names_the_zombies_before_it() -> None:
    assert "900 zombies of 9870 PIDs in use: kubelet.service 900 (kubelet, PID 812)" in seen(
        Signal.PID, *series(20, 900, 4000)
    )


def test_zombies_that_explain_no_shortage_are_not_in_the_story() -> None:
    assert "zombies" not in seen(Signal.PID, *series(900, 400, 900))
    assert "zombies" not in seen(Signal.MEMORY, *series(900, 900, 900))
