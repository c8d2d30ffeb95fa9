"""The decision log: a line for each act before its outcome, lasting facts once, and a bounded number of records."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from nodeagent.config.config_file import Change
from nodeagent.model import (
    HookOrder,
    HookOutcome,
    HookResult,
    LostRace,
    Note,
    NoteKind,
    OomCause,
    OomKill,
    OomLevel,
    OomPlace,
    OomProcess,
    OomReport,
    Outcome,
    OutcomeKind,
    Plan,
    RaceLoss,
    ReclaimOrder,
    ReclaimOutcome,
    ReclaimResult,
    ReclaimTarget,
    Refusal,
    RefusalCode,
    ReliefReport,
    Signal,
    Tier,
)
from nodeagent.policy import engine
from nodeagent.policy.state import initial
from nodeagent.records import flight_recorder
from nodeagent.telemetry.decision_log import MAX_AWAITED, RACES_RECORDED, RECORD_AGAIN_S, DecisionLog
from nodeagent.telemetry.log import open_log
from tests.support.nodes import GI, NOW, config, hard, snapshot, view

CONFIG = config(hard(value=2 * GI))


class LoggedAgent:
    """A decision log with its records and lines."""

    def __init__(self, directory: Path) -> None:
        self.now = 0.0
        self.unrecorded = 0
        self.directory = directory
        self._file = os.memfd_create("log")  # never full, unlike a pipe: a blocked writer is a stuck worker
        logger, self._writer = open_log(level="info", style="json", fd=self._file)
        self.decision_log = DecisionLog(
            logger, flight_recorder.FlightRecorder(directory), unrecorded=self._count, clock=lambda: self.now
        )

    def _count(self) -> None:
        self.unrecorded += 1

    def lines(self) -> list[dict[str, Any]]:
        """All lines; nothing can be logged afterwards."""
        self._writer.close(timeout_s=10)
        os.lseek(self._file, 0, os.SEEK_SET)
        with os.fdopen(self._file, "rb") as file:
            return [json.loads(line) for line in file]

    def recorded(self) -> list[dict[str, Any]]:
        return list(flight_recorder.read_records(self.directory))


@pytest.fixture
def logged(tmp_path: Path) -> LoggedAgent:
    return LoggedAgent(tmp_path)


def acting() -> Plan:
    seen = snapshot(view("big", 3 * GI), available={Signal.MEMORY: GI})
    plan, _ = engine.decide(seen, initial("abc", now=NOW - 60), now=NOW, config=CONFIG)
    assert len(plan.victims) == 1
    return plan


def test_an_act_is_logged_once_before_its_outcome_and_both_have_the_pod_and_the_id(logged: LoggedAgent) -> None:
    plan = acting()
    logged.decision_log.log_victims(plan, acts=False)
    logged.decision_log.log_outcome(Outcome(plan.id, plan.victims[0].pod.uid, OutcomeKind.DRY_RUN, "", NOW))
    logged.decision_log.log_plan(plan, acts=False, notes=())
    lines = [line for line in logged.lines() if line.get("id")]
    assert [(line["event"], line["id"], line["pod"]) for line in lines] == [
        ("would evict", "abc-1", "shop/big"),
        ("eviction dry-run", "abc-1", "shop/big"),
    ]


def test_each_outcome_of_an_eviction_request_is_logged_with_the_pod(logged: LoggedAgent) -> None:
    plan = acting()
    logged.decision_log.log_victims(plan, acts=True)
    for kind in (OutcomeKind.REQUESTED, OutcomeKind.REQUEST_FAILED, OutcomeKind.REQUEST_WITHDRAWN):
        logged.decision_log.log_outcome(Outcome(plan.id, plan.victims[0].pod.uid, kind, "", NOW))
    lines = [line for line in logged.lines() if line["event"].startswith("eviction ")]
    assert [(line["pod"], line["level"]) for line in lines] == [
        ("shop/big", "info"),
        ("shop/big", "warning"),
        ("shop/big", "info"),
    ]


def test_a_plan_whose_victims_were_not_logged_before_is_logged_with_its_decision(logged: LoggedAgent) -> None:
    logged.decision_log.log_plan(acting(), acts=True, notes=())
    assert [line["pod"] for line in logged.lines() if line["event"] == "evicting"] == ["shop/big"]


def test_an_outcome_of_an_earlier_process_is_logged_without_a_name(logged: LoggedAgent) -> None:
    logged.decision_log.log_outcome(Outcome("old-1", "uid-1", OutcomeKind.ACCEPTED, "", NOW))
    [line] = logged.lines()
    assert (line["pod"], line["uid"]) == (None, "uid-1")


def test_names_of_victims_without_an_outcome_do_not_pile_up(logged: LoggedAgent) -> None:
    plan = acting()
    for number in range(2 * MAX_AWAITED):
        logged.decision_log.log_victims(plan._replace(id=f"x-{number}"), acts=True)
    assert len(logged.decision_log._awaited) == MAX_AWAITED


def test_the_same_refusal_is_logged_once_for_each_signal(logged: LoggedAgent) -> None:
    plan = acting()._replace(victims=(), refusals=(Refusal(RefusalCode.FUTILE, "nothing helps"),))
    for _ in range(100):
        logged.decision_log.log_plan(plan, acts=True, notes=(Note(NoteKind.PSI, "missing"),))
        logged.decision_log.log_plan(plan._replace(ranked_for=Signal.PID), acts=True, notes=())
    lines = logged.lines()
    assert [line["signal"] for line in lines if line["event"] == "not evicting"] == [
        "memory.available",
        "pid.available",
    ]
    assert len([line for line in lines if line["event"] == "note"]) == 1


def test_a_met_threshold_that_is_not_due_is_logged_for_its_own_signal(logged: LoggedAgent) -> None:
    plan = acting()
    code, reason = RefusalCode.BYTES_FIRST, "bytes run out first"
    (memory, *_) = plan.signals
    (threshold, *_) = memory.thresholds
    not_due = threshold._replace(met=True, due=False, not_due_code=code, not_due_reason=reason)
    inodes = [
        memory._replace(observation=memory.observation._replace(signal=signal), thresholds=(not_due,))
        for signal in (Signal.NODEFS_INODES, Signal.IMAGEFS_INODES)
    ]
    refusals = (Refusal(code, reason), Refusal(RefusalCode.FUTILE, "nothing helps"))
    for signals in (inodes[:1], inodes[1:]):
        logged.decision_log.log_plan(
            plan._replace(victims=(), signals=tuple(signals), refusals=refusals), acts=True, notes=()
        )
    lines = [line for line in logged.lines() if line["event"] == "not evicting"]
    assert [(line["signal"], line["code"]) for line in lines] == [
        ("nodefs.inodesFree", "bytes-first"),
        ("memory.available", "futile"),
        ("imagefs.inodesFree", "bytes-first"),
    ]
    assert not lines[0]["protected"], "pods are ranked for another signal"


def test_why_a_limit_is_not_raised_is_recorded_and_logged_beside_an_eviction_as_no_refusal_of_one(
    logged: LoggedAgent,
) -> None:
    refusal = Refusal(RefusalCode.RATE_LIMIT_RESIZE, "the memory limit of shop/web is not raised: burst 0")
    evicting = acting()._replace(refusals=(refusal,))
    alone = evicting._replace(id="x-2", victims=(), resizes=())
    logged.decision_log.log_plan(evicting, acts=True, notes=())
    for _ in range(3):
        logged.decision_log.log_plan(alone, acts=True, notes=())
    assert [each["id"] for each in logged.recorded()] == [evicting.id]
    logged.decision_log.log_plan(alone._replace(ranked_for=Signal.PID), acts=True, notes=())
    assert [each["id"] for each in logged.recorded()] == [evicting.id, "x-2"]
    lines = [line for line in logged.lines() if line["event"] in ("evicting", "not evicting", "not raising limit")]
    assert [line["event"] for line in lines] == ["evicting", "not raising limit"]
    assert (lines[1]["code"], lines[1]["reason"]) == (refusal.code, refusal.message)
    assert "protected" not in lines[1]


def test_a_signal_that_oscillates_around_its_threshold_is_logged_once_for_each_state(logged: LoggedAgent) -> None:
    state = initial("abc", now=NOW - 60)
    for number in range(100):
        seen = snapshot(at=NOW + number, available={Signal.MEMORY: (GI, 8 * GI)[number % 2]})
        plan, state = engine.decide(seen, state, now=NOW + number, config=CONFIG)
        logged.decision_log.log_plan(plan, acts=True, notes=())
    lines = [
        line for line in logged.lines() if line["event"] == "signal changed" and line["signal"] == "memory.available"
    ]
    assert [line["state"] for line in lines] == ["hard", "ok"]


def test_refusals_that_alternate_fifty_times_a_second_do_not_fill_the_records(
    logged: LoggedAgent,
) -> None:
    one = acting()._replace(victims=(), refusals=(Refusal(RefusalCode.FUTILE, ""),))
    other = one._replace(refusals=(Refusal(RefusalCode.PENDING_RELEASE, ""),))
    for number in range(100):
        logged.now = number * 0.02
        logged.decision_log.log_plan((one, other)[number % 2], acts=True, notes=())
    assert len(logged.recorded()) == 2
    logged.now = RECORD_AGAIN_S + 2.0
    logged.decision_log.log_plan(one, acts=True, notes=())
    assert [record["refusals"][0]["code"] for record in logged.recorded()] == ["futile", "pending-release", "futile"]


def test_every_decision_that_acts_is_recorded_with_its_relief(logged: LoggedAgent) -> None:
    plan = acting()
    report = ReliefReport("abc-0", Signal.MEMORY, ("uid",), predicted=2, measured=1, took_s=1.0)
    for number in range(3):
        logged.decision_log.log_plan(plan._replace(id=f"x-{number}", relief_reports=(report,)), acts=True, notes=())
    kinds = [record["record"] for record in logged.recorded()]
    assert kinds == ["decision", "relief"] * 3


def test_reclaim_of_page_cache_is_recorded_at_most_once_a_minute_and_logged_with_its_result(
    logged: LoggedAgent,
) -> None:
    target = ReclaimTarget("shop/reader", "/kubepods/podu", 300, 0)
    order = ReclaimOrder("pageCache", Signal.MEMORY, Tier.HARD, 100, 50, NOW, level=150, targets=(target,))
    plan = acting()._replace(victims=(), refusals=(), reclaims=(order,))
    for second in range(int(RECORD_AGAIN_S) + 1):
        logged.now = float(second)
        logged.decision_log.log_reclaim_orders(plan, acts=True)
        logged.decision_log.log_plan(plan, acts=True, notes=())
        logged.decision_log.log_reclaim_outcome(
            ReclaimOutcome(plan.id, "pageCache", ReclaimResult.STOPPED, "reclaimed 100", NOW, 100)
        )
    assert [record["record"] for record in logged.recorded()] == ["decision"] * 2
    lines = logged.lines()
    [started] = [line for line in lines if line["event"] == "reclaim started"]
    assert (started["until"], started["pods"], started["level"]) == (150, ["shop/reader"], "info")
    stopped = [line for line in lines if line["event"] == "reclaim stopped"]
    assert len(stopped) == RECORD_AGAIN_S + 1
    assert stopped[0]["message"] == "reclaimed 100"


@pytest.mark.parametrize(("acts", "event"), [(True, "hook started"), (False, "would run hook")])
def test_a_hook_is_recorded_with_its_decision_once_and_with_its_end(
    logged: LoggedAgent, acts: bool, event: str
) -> None:
    order = HookOrder("u-1", "shop", "web", "/kubepods/podu", Signal.MEMORY, 100, 50, NOW + 10)
    wait = Refusal(RefusalCode.WAITS_FOR_HOOK, "the hook before the eviction of shop/web runs")
    plan = acting()._replace(victims=(), refusals=(wait,), hooks=(order,))
    logged.decision_log.log_hook_orders(plan, acts=acts)
    logged.decision_log.log_plan(plan, acts=acts, notes=())
    logged.decision_log.log_hook_outcome(HookOutcome(plan.id, "u-1", HookResult.FAILED, "exit code 3", NOW))
    decision, end = logged.recorded()
    assert (decision["record"], decision["hooks"][0]["podUid"]) == ("decision", "u-1")
    assert (end["record"], end["planId"], end["result"], end["message"]) == ("hook", plan.id, "failed", "exit code 3")
    started, ended = [line for line in logged.lines() if "hook" in line["event"]]
    assert (started["event"], started["pod"], started["id"]) == (event, "shop/web", plan.id)
    assert (ended["event"], ended["level"]) == ("hook failed", "warning")


@pytest.mark.parametrize("cause", [OomCause.CONTAINER_LIMIT, OomCause.ALLOCATABLE])
def test_oom_kills_of_one_container_without_end_do_not_fill_the_records(logged: LoggedAgent, cause: OomCause) -> None:
    """A hog without a limit of its own whose child processes are killed each second, for minutes."""
    place = OomPlace("/kubepods/podu/c", OomLevel.CONTAINER, "u", "c" * 64)
    race = LostRace(RaceLoss.REFUSED, "200Mi", 1, 0.1, met=True) if cause.race else None
    for second in range(240):
        logged.now = float(second)
        processes = (OomProcess(second, f"name-{second}", 1, 1.0),)
        kill = OomKill(1 + second % 7, cause, place, "shop/hog", "main", processes=processes)
        logged.decision_log.log_oom_kills(OomReport(f"i-oom{second}", logged.now, None, (kill,), (), race))
    other = OomKill(1, cause, place, "shop/other", "main")
    logged.decision_log.log_oom_kills(OomReport("i-other", logged.now, None, (other,), (), race))
    recorded = [each["id"] for each in logged.recorded()]
    in_a_minute = RACES_RECORDED if cause.race else 1
    assert recorded[:in_a_minute] == [f"i-oom{n}" for n in range(in_a_minute)]
    assert len(recorded) == 4 * in_a_minute + 1
    assert recorded[-1] == "i-other"


def test_a_failed_record_is_logged_once_and_counted_each_time(tmp_path: Path) -> None:
    failing = LoggedAgent(tmp_path / "gone")
    for number in range(3):
        failing.decision_log.log_plan(acting()._replace(id=f"x-{number}"), acts=True, notes=())
    assert failing.unrecorded == 3
    assert len([line for line in failing.lines() if line["event"] == "decision not recorded"]) == 1


def test_an_error_whose_times_and_ports_vary_is_logged_once(logged: LoggedAgent) -> None:
    for again in range(3):
        for message in (
            f"no answer for {again}.{again}s",
            f"read tcp 10.0.0.1:3924{again}->10.0.0.2:443: connection reset by peer",
            f"<Thing at 0x7f64c0513cd{again}> failed",
        ):
            logged.decision_log.log_notes([Note(NoteKind.API, message)])
    logged.decision_log.log_notes(
        [Note(NoteKind.API, "read tcp 10.0.0.1:39249->10.0.0.2:6443: connection reset by peer")]
    )
    logged.decision_log.log_notes([Note(NoteKind.POD, "cannot be read", about=name) for name in ("web-1", "web-2")])
    assert [line["message"] for line in logged.lines()] == [
        "no answer for 0.0s",
        "read tcp 10.0.0.1:39240->10.0.0.2:443: connection reset by peer",
        "<Thing at 0x7f64c0513cd0> failed",
        "read tcp 10.0.0.1:39249->10.0.0.2:6443: connection reset by peer",
        "cannot be read",
        "cannot be read",
    ]


def test_a_note_whose_amounts_vary_is_logged_once_and_those_of_other_things_are_logged_too(logged: LoggedAgent) -> None:
    for again in range(3):
        for message in (
            f"nodefs.available: 1.4{again}Gi of {again + 20}Gi are left",
            f"nodefs.inodesFree: 1234{again} of 655360 are left",
            f"CPU {again + 3}.0% of a core",
            f"memory {again + 70} MiB resident, limit 64 MiB",
            f"job-1000{again} waits",
            f"uid/1000{again} waits",
            f"answer 50{again}",
            f"7000000{again}-5: pageCache (done) freed 5Mi",
        ):
            logged.decision_log.log_notes([Note(NoteKind.PODS, message)])
    assert [line["message"] for line in logged.lines()] == [
        "nodefs.available: 1.40Gi of 20Gi are left",
        "nodefs.inodesFree: 12340 of 655360 are left",
        "CPU 3.0% of a core",
        "memory 70 MiB resident, limit 64 MiB",
        *[
            message
            for again in range(3)
            for message in (
                f"job-1000{again} waits",
                f"uid/1000{again} waits",
                f"answer 50{again}",
                f"7000000{again}-5: pageCache (done) freed 5Mi",
            )
        ],
    ]


def test_under_a_changed_configuration_a_note_is_logged_again(logged: LoggedAgent) -> None:
    change = Change("evictionHard.memory.available", "200Mi", "300Mi")
    for changes, amount in (([], 200), ([], 210), ([change], 300), ([], 310)):
        logged.decision_log.log_config_changes(changes)
        logged.decision_log.log_notes([Note(NoteKind.KUBELET, f"the kubelet acts before {amount}Mi")])
    notes = [line["message"] for line in logged.lines() if line["event"] == "note"]
    assert notes == ["the kubelet acts before 200Mi", "the kubelet acts before 300Mi"]
