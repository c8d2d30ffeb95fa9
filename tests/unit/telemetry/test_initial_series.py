"""Counters whose labels are known begin at 0, so that a Prometheus sees their first step."""

from typing import Final

import pytest

from nodeagent.config.schema import Config, Mode
from nodeagent.model import Outcome, OutcomeKind, Plan, QOSClass, RaceLoss, Signal
from nodeagent.policy import engine
from nodeagent.policy.state import initial
from nodeagent.telemetry import initial_series
from nodeagent.telemetry.metrics import Failure, Metrics
from tests.support.nodes import GI, NOW, config, hard, snapshot, soft, view

CONFIG: Final = config(hard(value=2 * GI), soft(value=4 * GI, grace_s=30.0), hard(Signal.NODEFS_INODES, value=1000))
ENFORCE: Final = CONFIG._replace(mode=Mode.ENFORCE)


def decided(conf: Config, *, available: int = 8 * GI) -> Plan:
    seen = snapshot(view("pod", 3 * GI), available={Signal.MEMORY: available})
    plan, _ = engine.decide(seen, initial("abc", now=NOW - 60), now=NOW, config=conf)
    return plan


def exposed(metrics: Metrics, name: str) -> dict[str, float]:
    """The series of a counter by the text of their labels."""
    lines = [line for line in metrics.render().decode().splitlines() if line.startswith(f"{name}_total{{")]
    return {line[line.index("{") : line.index(" ")]: float(line.split(" ")[1]) for line in lines}


@pytest.mark.parametrize(("conf", "outcome"), [(ENFORCE, "accepted"), (CONFIG, "dry-run")], ids=["enforce", "dry-run"])
def test_each_threshold_has_evictions_at_zero_by_qos_class_with_the_outcome_of_the_mode(
    conf: Config, outcome: str
) -> None:
    wanted = {
        (signal, qos, tier, outcome)
        for signal, tier in (("memory.available", "hard"), ("memory.available", "soft"), ("nodefs.inodesFree", "hard"))
        for qos in QOSClass
    }
    found = set(initial_series.evictions(conf, decided(conf)))
    derived = {labels for labels in found if labels[0].startswith("containerfs.")}
    assert found - derived == wanted


def test_with_eviction_requests_the_soft_tier_has_evictions_by_others_at_zero() -> None:
    conf = ENFORCE._replace(eviction_request=ENFORCE.eviction_request._replace(enabled=True))
    added = set(initial_series.evictions(conf, decided(conf))) - set(initial_series.evictions(ENFORCE, decided(conf)))
    assert added == {("memory.available", qos, "soft", "evicted-by-others") for qos in QOSClass}


def test_limits_of_pods_have_theirs_while_they_are_configured() -> None:
    conf = CONFIG._replace(local_storage_limits=True, own_limit=CONFIG.own_limit._replace(enabled=True))
    signals = {(signal, tier) for signal, _, tier, _ in initial_series.evictions(conf, decided(conf))}
    assert {
        ("memory.max", "soft"),
        ("emptydirfs.limit", "hard"),
        ("ephemeralpodfs.limit", "hard"),
        ("ephemeralcontainerfs.limit", "hard"),
    } < signals


def test_the_first_eviction_is_a_step_from_zero_and_its_labels_were_there_before() -> None:
    metrics = Metrics(ENFORCE, boottime=lambda: NOW + 2.0)
    seen = snapshot(view("pod", 3 * GI), available={Signal.MEMORY: GI})
    calm = decided(ENFORCE)
    metrics.observe_plan(calm, seen)
    before = exposed(metrics, "nodeagent_evictions")
    assert set(before.values()) == {0}
    plan = decided(ENFORCE, available=GI)
    metrics.observe_plan(plan, seen)
    [victim] = plan.victims
    metrics.observe_outcome(Outcome(plan.id, victim.pod.uid, OutcomeKind.ACCEPTED, "", NOW + 0.02, http_status=201))
    after = exposed(metrics, "nodeagent_evictions")
    assert after.keys() == before.keys()
    assert sorted(after.values()) == [0] * (len(before) - 1) + [1]


def test_failures_decisions_and_lost_races_begin_at_zero_and_refusals_do_not() -> None:
    metrics = Metrics(CONFIG, boottime=lambda: NOW)
    for name, words in (("failures", Failure), ("lost_races", RaceLoss), ("decisions", initial_series.DECISIONS)):
        series = exposed(metrics, f"nodeagent_{name}")
        assert (len(series), set(series.values())) == (len(tuple(words)), {0})
    assert exposed(metrics, "nodeagent_refusals") == {}


def test_relief_begins_at_zero_for_each_signal_with_a_threshold() -> None:
    metrics = Metrics(CONFIG, boottime=lambda: NOW)
    metrics.observe_plan(decided(CONFIG), snapshot(view("pod", 3 * GI)))
    assert exposed(metrics, "nodeagent_relief_measured_bytes") == {'{signal="memory.available"}': 0}
    assert exposed(metrics, "nodeagent_relief_predicted_inodes")['{signal="nodefs.inodesFree"}'] == 0
    assert exposed(metrics, "nodeagent_relief_shortfalls")['{signal="memory.available"}'] == 0
