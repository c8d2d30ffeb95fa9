"""`nodeagent explain` prints the reasons of a decision from any records."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.commands import cli
from nodeagent.config.schema import (
    BeforeEvictionHook,
    EvictionRequestConfig,
    HooksConfig,
    ReclaimAction,
    ReclaimConfig,
    ReliefConfig,
)
from nodeagent.model import (
    Amount,
    DiskUsage,
    HookOutcome,
    HookResult,
    MemoryModel,
    Outcome,
    OutcomeKind,
    Plan,
    ReclaimReport,
    ReclaimResult,
    Signal,
)
from nodeagent.policy import outcomes
from nodeagent.records import flight_recorder
from nodeagent.report import explain, recorded_decisions, text
from tests.support.nodes import GI, MI, NOW, config, hard, snapshot, soft, view
from tests.support.recorded import Run

CONFIG = config(hard(value=2 * GI))
PODS = (view("small", GI // 4), view("big", 3 * GI), view("system", 5 * GI, namespace="kube-system"))


def run(directory: Path) -> Run:
    """One decision that evicts `big`, its outcome, what it brought back, and one that refuses."""
    made = Run(directory, CONFIG)
    plan = made.decide(snapshot(*PODS, available={Signal.MEMORY: GI}))
    assert [victim.pod.name for victim in plan.victims] == ["big"]
    outcome = Outcome(plan.id, plan.victims[0].pod.uid, OutcomeKind.ACCEPTED, "", NOW + 0.017, http_status=201)
    made.recorder.outcome(outcome, wall_time=1.0)
    made.state = outcomes.apply_outcome(made.state, outcome, now=outcome.at, config=CONFIG)
    made.decide(snapshot(PODS[0], PODS[2], at=NOW + 1, available={Signal.MEMORY: GI}))
    made.decide(snapshot(PODS[0], PODS[2], at=NOW + 2, available={Signal.MEMORY: 4 * GI}))
    made.decide(snapshot(PODS[0], PODS[2], at=NOW + 9, available={Signal.MEMORY: GI // 2}))
    return made


def explained(place: Path, wanted: str) -> str:
    return text.render(
        explain.sections(recorded_decisions.find_decision(recorded_decisions.read_decisions(place), wanted))
    )


def test_a_decision_has_its_numbers_ages_pods_outcome_and_relief(tmp_path: Path) -> None:
    run(tmp_path)
    output = explained(tmp_path, "abc-1")
    for part in (
        "memory.available (hard): 1 pod to evict",
        "acting on hard 2Gi, met for 0s",
        "deficit 1Gi",
        "accepted (HTTP 201)",
        "17ms",
        "+3Gi measured of 3Gi predicted, 2s after the decision",
        "evicted: Burstable; over its request of 0; priority 0; uses 3Gi over its request",
        "protected: namespace kube-system is protected",
        "not needed: Burstable",
        "The node was low on resource: memory.",
    ):
        assert part in output, output


def test_a_refusal_has_its_reason(tmp_path: Path) -> None:
    run(tmp_path)
    output = explained(tmp_path, "last")
    assert "no pod to evict" in output
    assert "WHY NO POD\nfutile: " in output
    assert "candidate: Burstable" in output


def test_why_a_limit_is_not_raised_is_no_reason_of_evictions(tmp_path: Path) -> None:
    refusals = [{"code": "resize-ceiling", "message": "the memory limit of shop/web is not raised: too high"}]
    records = [
        {"record": "decision", "id": "a-1", "refusals": refusals},
        {"record": "decision", "id": "a-2", "refusals": [*refusals, {"code": "futile", "message": "nothing helps"}]},
    ]
    (tmp_path / "decisions.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    rows = text.render((explain.list_section(recorded_decisions.read_decisions(tmp_path)),)).splitlines()
    assert "no limit raised: resize-ceiling" in rows[1]
    assert "no pod: futile" in rows[2]
    output = explained(tmp_path, "a-2")
    assert "WHY NO POD\nfutile: nothing helps\n" in output
    assert "RESIZES\nresize-ceiling: the memory limit of shop/web is not raised: too high\n" in output


def test_a_decision_about_page_cache_has_both_figures_and_its_refusal(tmp_path: Path) -> None:
    threshold = hard(value=2 * GI, memory_model=MemoryModel.LOWER)
    made = Run(tmp_path, config(threshold))
    node = snapshot(*PODS, available={Signal.MEMORY: GI})
    made.decide(node._replace(mem_available=node.mem_available._replace(available=8 * GI)))
    output = explained(tmp_path, "last")
    assert "1Gi by working set, 8Gi by MemAvailable" in output
    assert "page-cache-only: memory.available: no more than page cache is short" in output


def test_a_note_has_its_kind_and_what_it_is_about(tmp_path: Path) -> None:
    record = {"record": "decision", "id": "a-1", "notes": [{"kind": "pdbs", "about": "shop", "message": "not listed"}]}
    (tmp_path / "decisions.jsonl").write_text(json.dumps(record) + "\n")
    assert "NOTES\npdbs shop: not listed\n" in explained(tmp_path, "a-1")


def test_a_signal_has_its_trend(tmp_path: Path) -> None:
    made = Run(tmp_path, CONFIG._replace(relief=ReliefConfig(minimum_relief=Amount(100 * GI, None, "100Gi"))))
    for n in range(6):
        made.decide(snapshot(PODS[0], at=NOW + n, available={Signal.MEMORY: 6 * GI - n * GI}))
    assert "exhausted in 1s (confidence 100%)" in explained(tmp_path, "last")


def test_the_list_has_one_row_for_each_decision_with_what_became_of_it(tmp_path: Path) -> None:
    run(tmp_path)
    rows = text.render((explain.list_section(recorded_decisions.read_decisions(tmp_path)),)).splitlines()
    assert len(rows) == 1 + 3
    assert "evict shop/big" in rows[1]
    assert "accepted" in rows[1]
    assert rows[1].split()[-2:] == ["3Gi", "+3Gi"]
    assert "no pod: " in rows[2]
    assert "no pod: futile" in rows[3]


def test_an_id_may_be_cut_short_while_it_is_the_only_one(tmp_path: Path) -> None:
    Run(tmp_path, CONFIG, instance="first").decide(snapshot(*PODS, available={Signal.MEMORY: GI}))
    Run(tmp_path, CONFIG, instance="fourth").decide(snapshot(*PODS, available={Signal.MEMORY: GI}))
    every = recorded_decisions.read_decisions(tmp_path)
    assert recorded_decisions.find_decision(every, "fi").id == "first-1"
    with pytest.raises(recorded_decisions.ExplainError, match="2 decisions start with it"):
        recorded_decisions.find_decision(every, "f")
    with pytest.raises(recorded_decisions.ExplainError, match="no such decision"):
        recorded_decisions.find_decision(every, "zzz")


def test_an_outcome_that_was_written_before_its_decision_belongs_to_it(tmp_path: Path) -> None:
    recorder = flight_recorder.FlightRecorder(tmp_path)
    recorder.outcome(Outcome("abc-1", PODS[1].pod.uid, OutcomeKind.DRY_RUN, "", NOW), wall_time=1.0)
    Run(tmp_path, CONFIG).decide(snapshot(*PODS, available={Signal.MEMORY: GI}))
    assert "dry-run" in explained(tmp_path, "abc-1")


def test_the_later_records_of_a_dropped_decision_are_listed(tmp_path: Path) -> None:
    recorder = flight_recorder.FlightRecorder(tmp_path)
    recorder.outcome(Outcome("abc-1", "uid-1", OutcomeKind.BLOCKED_BY_PDB, "budget web", NOW), wall_time=1.0)
    output = explained(tmp_path, "abc-1")
    assert "dropped with an older file" in output
    assert "blocked-by-pdb" in output


def test_text_from_pods_cannot_move_the_cursor(tmp_path: Path) -> None:
    pods = (view("big", 3 * GI, labels={"a": "b"}), view("x\x1b[2J\u202e", GI))
    Run(tmp_path, CONFIG).decide(snapshot(*pods, available={Signal.MEMORY: GI}))
    output = explained(tmp_path, "last")
    assert all(line.isprintable() for line in output.splitlines())


def test_a_reclaim_action_has_its_gain(tmp_path: Path) -> None:
    actions = (ReclaimAction("images", timeout_s=20.0), ReclaimAction("bad\x1b[2J", timeout_s=20.0))
    made = Run(tmp_path, config(hard(Signal.NODEFS, GI), reclaim=ReclaimConfig(actions, 0.0)))
    held = view("holder", usage_more={"disk": DiskUsage(volumes_bytes=2 * GI)})
    plan = made.decide(snapshot(held, available={Signal.NODEFS: GI // 2}))
    assert "images: no gain recorded" in explained(tmp_path, "last")
    assert [order.name for order in plan.reclaims] == ["images"]
    for name, result, gained in (("images", ReclaimResult.DONE, 3 * GI), ("bad\x1b[2J", ReclaimResult.TIMED_OUT, -MI)):
        made.recorder.reclaim(ReclaimReport(plan.id, name, Signal.NODEFS, result, gained, 2.5), wall_time=1.0)
    output = explained(tmp_path, "last")
    assert "RECLAIM ACTIONS\nimages (done): +3Gi in 2s" in output
    assert "(timed-out): -1Mi in 2s" in output
    assert "\x1b" not in output
    [reclaim, _] = explain.to_json(
        recorded_decisions.find_decision(recorded_decisions.read_decisions(tmp_path), "last")
    )["reclaims"]
    assert (reclaim["name"], reclaim["gained"]) == ("images", 3 * GI)


def test_a_hook_has_its_end_and_the_eviction_says_what_it_waited_for(tmp_path: Path) -> None:
    hook = HooksConfig(BeforeEvictionHook(command=("/bin/dump",)))
    made = Run(tmp_path, config(soft(), hooks=hook))
    low: dict[Signal, int | None] = {Signal.MEMORY: GI // 2}
    made.decide(snapshot(view("fat", 3 * GI), available=low, at=NOW))
    plan = made.decide(snapshot(view("fat", 3 * GI), available=low, at=NOW + 1))
    [order] = plan.hooks
    assert "HOOKS\nbefore the eviction of shop/fat: no result recorded" in explained(tmp_path, plan.id)
    outcome = HookOutcome(plan.id, order.pod_uid, HookResult.FAILED, "exit code 3: \x1b[2J", NOW + 2)
    made.recorder.hook(outcome, wall_time=1.0)
    output = explained(tmp_path, plan.id)
    assert "before the eviction of shop/fat: failed: exit code 3: " in output
    assert "\x1b" not in output
    found = recorded_decisions.find_decision(recorded_decisions.read_decisions(tmp_path), plan.id)
    assert explain.to_json(found)["hookOutcomes"][0]["result"] == "failed"
    made.state = outcomes.apply_hook(made.state, outcome, config=made.config)
    after = made.decide(snapshot(view("fat", 3 * GI), available=low, at=NOW + 3))
    assert "shop/fat, before this eviction: failed after 1s" in explained(tmp_path, after.id)


def test_an_eviction_request_has_its_method_its_outcomes_and_how_it_ended(tmp_path: Path) -> None:
    made = Run(tmp_path, config(soft(), eviction_request=EvictionRequestConfig(enabled=True, deadline_s=10.0)))
    low: dict[Signal, int | None] = {Signal.MEMORY: GI // 2}

    def decide(at: float) -> Plan:
        seen = snapshot(view("fat", 3 * GI), available=low, at=NOW + at)
        return made.decide(seen._replace(eviction_requests=True))

    decide(0)
    plan = decide(1)
    outcome = Outcome(plan.id, plan.victims[0].pod.uid, OutcomeKind.REQUESTED, "", NOW + 2)
    made.recorder.outcome(outcome, wall_time=1.0)
    made.state = outcomes.apply_outcome(made.state, outcome, now=NOW + 2, config=made.config)
    row = next(line for line in explained(tmp_path, plan.id).splitlines() if line.startswith("shop/fat  request"))
    assert " requested " in row
    after = decide(13)
    output = explained(tmp_path, after.id)
    assert f"EvictionRequest for shop/fat by {plan.id}: the pod was not evicted in time" in " ".join(output.split())
    assert any(line.startswith("shop/fat  evict ") for line in output.splitlines())


def test_the_gain_of_a_dropped_decision_is_listed(tmp_path: Path) -> None:
    report = ReclaimReport("abc-1", "journal", Signal.NODEFS, ReclaimResult.DONE, GI, 1.0)
    flight_recorder.FlightRecorder(tmp_path).reclaim(report, wall_time=1.0)
    assert "journal (done): +1Gi in 1s" in explained(tmp_path, "abc-1")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
FIELDS = (
    "id", "wallTime", "madeAt", "signals", "conditions", "actingOn", "deficit", "ranking", "rankedFor", "victims",
    "refusals", "notes", "rankOrder", "reclaims", "hooks",
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(FIELDS), JSON), st.dictionaries(st.sampled_from(("planId", "kind", "at")), JSON))
def test_a_record_of_another_version_is_printed(decision: dict[str, object], outcome: object) -> None:
    after = (outcome,)
    output = recorded_decisions.RecordedDecision("x", {"record": "decision", **decision}, after, after, after, after)  # type: ignore[arg-type]
    assert text.render(explain.sections(output))
    assert text.render((explain.list_section([output]),))
    json.dumps(explain.to_json(output))


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_lists_explains_and_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path)
    assert cli.main(["explain", "--state-dir", str(tmp_path), "-n", "1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert cli.main(["explain", "abc-1", "--state-dir", str(tmp_path), "-o", "json"]) == 0
    decision = json.loads(capsys.readouterr().out)
    assert (decision["kind"], decision["id"], decision["outcomes"][0]["kind"]) == ("Decision", "abc-1", "accepted")
    assert decision["reliefs"][0]["measured"] == 3 * GI
    assert "inputs" not in decision
    assert cli.main(["explain", "--state-dir", str(tmp_path), "-o", "json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [item["id"] for item in listed["items"]] == ["abc-1", "abc-2", "abc-4"]


def test_the_command_takes_the_state_directory_of_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path)
    file = tmp_path / "config.yaml"
    file.write_text(f"apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\nstateDir: {tmp_path}\n")
    assert cli.main(["explain", "last", "--config", str(file)]) == 0
    assert "futile" in capsys.readouterr().out


def test_the_command_reports_that_no_decision_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--state-dir", str(tmp_path)]) == 0
    assert "no decision is recorded" in capsys.readouterr().out
    assert cli.main(["explain", "last", "--state-dir", str(tmp_path)]) == 3
    assert cli.main(["explain", "--state-dir", str(tmp_path / "gone")]) == 3
    assert "no such file or directory" in capsys.readouterr().err
