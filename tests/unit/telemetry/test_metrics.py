"""The metrics show the decisions, are bounded, and contain no name of a pod."""

import math
import shutil
import subprocess
from typing import Any, cast

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from nodeagent.actuators.conditions import ConditionConflict
from nodeagent.config.schema import Config, Mode
from nodeagent.kube.cluster_readers import WatchCounts
from nodeagent.model import (
    ConditionType,
    DiskUsageQuality,
    HookOutcome,
    HookResult,
    NodeSnapshot,
    Outcome,
    OutcomeKind,
    Plan,
    ReclaimOutcome,
    ReclaimReport,
    ReclaimResult,
    Refusal,
    RefusalCode,
    ReliefReport,
    Signal,
    Stall,
    StallScope,
    UnattributedDisk,
    ZombieCount,
    ZombieHolder,
)
from nodeagent.policy import engine
from nodeagent.policy.state import initial
from nodeagent.telemetry.label_counts import MAX_METRIC_SERIES
from nodeagent.telemetry.metric_families import FAMILIES
from nodeagent.telemetry.metrics import MAX_AWAITED_VICTIMS, Failure, Metrics, SyncStage
from nodeagent.telemetry.runtime_counters import RuntimeCounters, WalkCounters
from tests.support.nodes import GI, MI, NOW, config, hard, snapshot, soft, view

CONFIG = config(hard(value=2 * GI), soft(value=4 * GI, grace_s=30.0), hard(Signal.NODEFS_INODES, value=1000))


def decided(*, available: int, pods: int = 3, conf: Config = CONFIG) -> tuple[Plan, NodeSnapshot]:
    views = [view(f"pod-{number}", 3 * GI) for number in range(pods)]
    stall = Stall(StallScope.NODE, "memory", 1.0, 1.0, 2_500_000, 0.5, 0.5, 1_000_000, NOW)
    seen = snapshot(*views, available={Signal.MEMORY: available}, stalls=(stall,))
    plan, _ = engine.decide(seen, initial("abc", now=NOW - 60), now=NOW, config=conf)
    return plan, seen


NOTHING = RuntimeCounters()


def make(figures: RuntimeCounters = NOTHING, *, conf: Config = CONFIG, at: float = NOW + 2.0) -> Metrics:
    return Metrics(conf, boottime=lambda: at, runtime_counters=lambda: figures)


def read(metrics: Metrics) -> dict[Any, float]:
    """Samples by name, or by name and label values in the label names' order."""
    found: dict[Any, float] = {}
    for family in read_text(metrics.render().decode()):
        for sample in family.samples:
            values = tuple(value for _, value in sorted(sample.labels.items()))
            found[(sample.name, *values) if values else sample.name] = sample.value
    return found


def test_what_was_reclaimed_is_counted_by_action_and_unit() -> None:
    plan, seen = decided(available=3 * GI)
    gains = (
        ReclaimReport("a-1", "images", Signal.NODEFS, ReclaimResult.DONE, 3 * GI, 2.0),
        ReclaimReport("a-1", "images", Signal.NODEFS_INODES, ReclaimResult.DONE, 70, 2.0),
        ReclaimReport("a-2", "journal", Signal.NODEFS, ReclaimResult.TIMED_OUT, -5, 2.0),
        ReclaimReport("a-3", "reap", Signal.PID, ReclaimResult.DONE, 9, 2.0),
    )
    metrics = make()
    metrics.observe_plan(plan._replace(reclaim_reports=gains), seen)
    series = read(metrics)
    assert series["nodeagent_reclaims_total", "images", "done"] == 2
    assert series["nodeagent_reclaims_total", "journal", "timed-out"] == 1
    assert series["nodeagent_reclaim_gained_bytes_total", "images"] == 3 * GI
    assert series["nodeagent_reclaim_gained_inodes_total", "images"] == 70
    assert series["nodeagent_reclaim_gained_bytes_total", "journal"] == 0
    assert series["nodeagent_reclaim_gained_pids_total", "reap"] == 9


def test_reclaimed_page_cache_is_counted_in_bytes() -> None:
    metrics = make()
    metrics.observe_plan(*decided(available=3 * GI))
    for size in (GI, 2 * GI):
        metrics.observe_reclaim(ReclaimOutcome("a-1", "pageCache", ReclaimResult.DONE, "", NOW, size))
    assert read(metrics)["nodeagent_page_cache_reclaimed_bytes_total"] == 3 * GI


def test_the_progress_of_a_walk_and_usage_in_no_pod_have_series() -> None:
    plan, seen = decided(available=3 * GI)
    partial = seen.pods[0].usage
    assert partial is not None
    pods = (
        seen.pods[0]._replace(usage=partial._replace(disk_usage_quality=DiskUsageQuality(NOW, complete=False))),
        *seen.pods[1:],
    )
    signals = (Signal.NODEFS, Signal.NODEFS_INODES)
    rest = UnattributedDisk(signals, 9 * GI, 4 * GI, 900, 1000, (), NOW)
    walk = WalkCounters(running=True, paths=30, paths_done=10, entries=12_345, took_s=1.5, finished_at=NOW - 8)
    metrics = make(RuntimeCounters(walk=walk))
    metrics.observe_plan(plan, seen._replace(pods=pods, unattributed_disks=(rest,)))
    series = read(metrics)
    names = ("running", "paths", "paths_done", "entries", "duration_seconds", "age_seconds")
    assert [series[f"nodeagent_disk_walk_{name}"] for name in names] == [1, 30, 10, 12_345, 1.5, 10]
    assert series["nodeagent_disk_pods_incomplete"] == 1
    assert series["nodeagent_disk_unattributed_bytes", "nodefs.available"] == 5 * GI
    assert series["nodeagent_disk_unattributed_inodes", "nodefs.inodesFree"] == 0


def test_before_any_disk_was_near_there_are_no_figures_of_walks() -> None:
    metrics = make()
    metrics.observe_plan(*decided(available=3 * GI))
    assert not [name for name in read(metrics) if "disk" in str(name)]


def test_signals_thresholds_and_headroom_have_their_own_unit() -> None:
    metrics = make()
    metrics.observe_plan(*decided(available=3 * GI))
    seen = read(metrics)
    assert seen["nodeagent_signal_available_bytes", "memory.available"] == 3 * GI
    assert seen["nodeagent_signal_capacity_bytes", "memory.available"] == 16 * GI
    assert seen["nodeagent_threshold_bytes", "memory.available", "hard"] == 2 * GI
    assert seen["nodeagent_threshold_headroom_bytes", "memory.available", "hard"] == GI
    assert seen["nodeagent_threshold_headroom_bytes", "memory.available", "soft"] == -GI
    assert seen["nodeagent_threshold_met", "memory.available", "soft"] == 1
    assert seen["nodeagent_threshold_due", "memory.available", "soft"] == 0
    assert seen["nodeagent_signal_available_inodes", "nodefs.inodesFree"] == 500_000
    assert seen["nodeagent_threshold_inodes", "nodefs.inodesFree", "hard"] == 1000
    assert seen["nodeagent_signal_available_pids", "pid.available"] == 16_384
    assert not any("bytes" in key[0] and "pid.available" in key for key in seen if isinstance(key, tuple))
    assert seen["nodeagent_signal_state", "memory.available", "soft"] == 1
    assert seen["nodeagent_signal_state", "memory.available", "hard"] == 0
    assert seen["nodeagent_pressure_stalled_seconds_total", "full", "memory", "node"] == 1.0
    assert seen["nodeagent_sample_age_seconds"] == 2.0


def test_both_figures_of_memory_are_exported() -> None:
    metrics = make()
    plan, seen = decided(available=3 * GI)
    seen = seen._replace(mem_available=seen.mem_available._replace(available=2 * GI))
    plan, _ = engine.decide(seen, initial("abc", now=NOW), now=NOW, config=CONFIG)
    metrics.observe_plan(plan, seen)
    found = read(metrics)
    assert found["nodeagent_memory_figure_bytes", "workingset", "memory.available"] == 3 * GI
    assert found["nodeagent_memory_figure_bytes", "memavailable", "memory.available"] == 2 * GI


def test_zombies_are_counted_once_they_are_known() -> None:
    metrics = make()
    plan, seen = decided(available=3 * GI)
    metrics.observe_plan(plan, seen)
    assert not [name for name in read(metrics) if "zombies" in name]
    holders = (ZombieHolder(40, "", "kubelet.service", 812, "kubelet"), ZombieHolder(5, "uid-1", "", 4711, "sh"))
    metrics.observe_plan(plan, seen._replace(zombies=ZombieCount(50, holders, complete=True, read_at=NOW)))
    found = read(metrics)
    assert (found["nodeagent_zombies"], found["nodeagent_zombies_of_host"]) == (50, 40)


def test_what_is_not_known_has_no_series() -> None:
    metrics = make()
    before = read(metrics)
    assert not [name for name in before if "sample_age" in name or "pods_view_age" in name]
    plan, seen = decided(available=3 * GI)
    blind = seen.observations[Signal.MEMORY]._replace(available=None, reason="gone")
    plan, _ = engine.decide(
        seen._replace(observations={**seen.observations, Signal.MEMORY: blind}, mem_available=blind),
        initial("abc", now=NOW), now=NOW, config=CONFIG,
    )  # fmt: skip
    metrics.observe_plan(plan, seen._replace(mem_available=blind))
    after = read(metrics)
    assert ("nodeagent_signal_available_bytes", "memory.available") not in after
    assert not [key for key in after if "nodeagent_memory_figure_bytes" in key and "memory.available" in key]
    assert after["nodeagent_signal_state", "memory.available", "unknown"] == 1


def test_a_falling_signal_has_a_predicted_time_and_a_steady_one_infinity() -> None:
    state = initial("abc", now=NOW - 60)
    metrics = make()
    for step in range(6):
        seen = snapshot(at=NOW + step, available={Signal.MEMORY: 12 * GI - step * GI})
        plan, state = engine.decide(seen, state, now=NOW + step, config=CONFIG)
        metrics.observe_plan(plan, seen)
    series = read(metrics)
    assert series["nodeagent_signal_change_bytes_per_second", "memory.available"] == -GI
    assert series["nodeagent_signal_time_to_exhaustion_seconds", "memory.available"] == 7.0
    assert series["nodeagent_signal_time_to_threshold_seconds", "memory.available"] == 3.0
    assert series["nodeagent_signal_trend_confidence_ratio", "memory.available"] == 1.0
    assert series["nodeagent_signal_time_to_exhaustion_seconds", "nodefs.inodesFree"] == math.inf


def test_an_eviction_is_counted_by_signal_qos_tier_and_outcome_and_its_answer_timed() -> None:
    metrics = make()
    plan, seen = decided(available=GI)
    assert plan.victims
    metrics.observe_plan(plan, seen)
    for victim in plan.victims:
        outcome = Outcome(plan.id, victim.pod.uid, OutcomeKind.ACCEPTED, "", NOW + 0.02, http_status=201)
        metrics.observe_outcome(outcome)
    series = read(metrics)
    key = ("nodeagent_evictions_total", "accepted", "Burstable", "memory.available", "hard")
    assert series[key] == len(plan.victims)
    assert series["nodeagent_decisions_total", "evict"] == 1
    assert series["nodeagent_stage_duration_seconds_count", "decision-to-outcome"] == len(plan.victims)
    assert series["nodeagent_stage_duration_seconds_bucket", "0.01", "decision-to-outcome"] == 0
    assert series["nodeagent_stage_duration_seconds_bucket", "0.025", "decision-to-outcome"] == len(plan.victims)


@pytest.mark.parametrize("last", [OutcomeKind.EVICTED_BY_OTHERS, OutcomeKind.REQUEST_WITHDRAWN])
def test_each_outcome_of_an_eviction_request_has_the_labels_of_its_victim(last: OutcomeKind) -> None:
    metrics = make()
    plan, seen = decided(available=GI)
    metrics.observe_plan(plan, seen)
    kinds = (OutcomeKind.REQUEST_UNCERTAIN, OutcomeKind.REQUESTED, OutcomeKind.REQUEST_FAILED, last)
    for kind in kinds:
        metrics.observe_outcome(Outcome(plan.id, plan.victims[0].pod.uid, kind, "", NOW + 1))
    series = read(metrics)
    for kind in kinds:
        assert series["nodeagent_evictions_total", kind.value, "Burstable", "memory.available", "hard"] == 1
    metrics.observe_outcome(Outcome(plan.id, plan.victims[0].pod.uid, last, "", NOW + 2))
    assert read(metrics)["nodeagent_evictions_total", last.value, "other", "other", "other"] == 1


def test_an_outcome_without_a_known_victim_is_counted_as_other() -> None:
    metrics = make()
    metrics.observe_outcome(Outcome("old-1", "uid", OutcomeKind.TIMED_OUT, "", NOW))
    assert read(metrics)["nodeagent_evictions_total", "timed-out", "other", "other", "other"] == 1


def test_refusals_are_counted_by_code_for_decisions_and_for_pods() -> None:
    metrics = make(conf=CONFIG)
    all_protected = CONFIG._replace(protection=CONFIG.protection._replace(namespaces=("shop",)))
    plan, seen = decided(available=GI, conf=all_protected)
    metrics.observe_plan(plan, seen)
    metrics.observe_plan(*decided(available=8 * GI))
    series = read(metrics)
    assert series["nodeagent_refusals_total", "no-candidates"] == 1
    assert series["nodeagent_decisions_total", "refuse"] == 1
    assert series["nodeagent_decisions_total", "calm"] == 1
    metrics.observe_plan(plan, seen)
    assert read(metrics)["nodeagent_pods_refused", "namespace"] == 3


def test_relief_is_summed_as_predicted_and_as_measured_and_a_shortfall_is_counted() -> None:
    metrics = make()
    plan, seen = decided(available=8 * GI)
    reports = (
        ReliefReport("a-1", Signal.MEMORY, ("u",), predicted=100 * MI, measured=90 * MI, took_s=1.5),
        ReliefReport("a-2", Signal.MEMORY, ("u",), predicted=100 * MI, measured=-MI, took_s=40.0),
        ReliefReport("a-3", Signal.PID, ("u",), predicted=10, measured=9, took_s=1.0),
    )
    metrics.observe_plan(plan._replace(relief_reports=reports), seen)
    series = read(metrics)
    assert series["nodeagent_relief_predicted_bytes_total", "memory.available"] == 200 * MI
    assert series["nodeagent_relief_measured_bytes_total", "memory.available"] == 90 * MI
    assert series["nodeagent_relief_measured_pids_total", "pid.available"] == 9
    assert series["nodeagent_relief_shortfalls_total", "memory.available"] == 1
    assert series["nodeagent_relief_shortfalls_total", "pid.available"] == 0
    assert series["nodeagent_relief_duration_seconds_bucket", "2.5"] == 2


def test_counters_of_other_packages_are_read_at_the_scrape() -> None:
    figures = RuntimeCounters(
        pods_synced_at=NOW - 5.0,
        condition_conflicts=(ConditionConflict(ConditionType.MEMORY_PRESSURE, 7, 100.0, 99.9, true_by_other=False),),
        asserted=frozenset({"MemoryPressure"}),
        tainted=frozenset({"MemoryPressure"}),
        watches=(WatchCounts("pods", 3, 2),),
        brakes_active=1,
        api_identity="node",
        log_lines_dropped=9,
        workers_stuck=("statvfs", "statvfs", "log"),
    )
    metrics = make(figures, conf=CONFIG._replace(mode=Mode.ENFORCE))
    metrics.observe_plan(*decided(available=GI))
    series = read(metrics)
    assert series["nodeagent_enforcing"] == 1
    assert series["nodeagent_pods_view_age_seconds"] == 7.0
    assert series["nodeagent_condition_wanted", "MemoryPressure", "True"] == 1
    assert series["nodeagent_condition_asserted", "MemoryPressure"] == 1
    assert series["nodeagent_taint_present", "MemoryPressure"] == 1
    assert series["nodeagent_condition_overwrites_total", "MemoryPressure"] == 7
    assert series["nodeagent_condition_true_seconds_total", "MemoryPressure"] == 99.9
    assert series["nodeagent_api_relists_total", "pods"] == 2
    assert series["nodeagent_brakes_active"] == 1
    assert series["nodeagent_api_identity", "node"] == 1
    assert series["nodeagent_log_lines_dropped_total"] == 9
    assert series["nodeagent_workers_stuck", "statvfs"] == 2
    assert series["nodeagent_workers_stuck", "log"] == 1


def test_syncs_failures_and_reloads_have_series() -> None:
    metrics = make()
    metrics.observe_sync(at=NOW, reasons=("timer", "psi"))
    metrics.observe_sync(at=NOW + 1.0, reasons=("timer",))
    metrics.observe_failure(Failure.STATE_SAVE)
    metrics.observe_stage(SyncStage.SAMPLE, 0.0006)
    metrics.observe_reload(None)
    series = read(metrics)
    assert series["nodeagent_syncs_total"] == 2
    assert series["nodeagent_wakeups_total", "timer"] == 2
    assert series["nodeagent_sync_age_seconds"] == 1.0
    assert series["nodeagent_failures_total", "state-save"] == 1
    assert series["nodeagent_stage_duration_seconds_sum", "sample"] == 0.0006
    assert series["nodeagent_config_last_reload_successful"] == 0
    metrics.observe_reload(CONFIG._replace(mode=Mode.ENFORCE))
    series = read(metrics)
    assert (series["nodeagent_config_last_reload_successful"], series["nodeagent_enforcing"]) == (1, 1)


def test_own_cost_has_the_names_of_every_prometheus_client() -> None:
    series = read(make())
    assert 1 << 20 < series["process_resident_memory_bytes"] < 1 << 33
    assert series["process_cpu_seconds_total"] > 0
    assert 0 < series["process_open_fds"] <= series["process_max_fds"]


def test_series_stay_bounded_and_no_label_is_a_pods_name() -> None:
    metrics = make()
    plan, seen = decided(available=GI, pods=1)
    for number in range(3000):
        odd = plan._replace(id=f"x-{number}", refusals=(Refusal(cast("RefusalCode", f"code-{number}"), "text"),))
        metrics.observe_plan(odd, seen)
        metrics.observe_sync(at=NOW, reasons=(f"reason-{number}",))
    series = read(metrics)
    refusals = {key: value for key, value in series.items() if key[0] == "nodeagent_refusals_total"}
    assert len(refusals) <= MAX_METRIC_SERIES + 1
    assert sum(refusals.values()) == 3000
    assert len(metrics._awaited) <= MAX_AWAITED_VICTIMS
    text = metrics.render().decode()
    for word in ("pod-0", "shop", "uid-", "node-1"):
        assert word not in text


def test_both_formats_have_the_same_series_and_every_family_is_in_the_table_once() -> None:
    metrics = make(RuntimeCounters(pods_synced_at=NOW))
    metrics.observe_plan(*decided(available=GI))
    text = {family.name for family in read_text(metrics.render().decode())}
    other: Any = read_openmetrics  # it has no types
    openmetrics = {family.name for family in other(metrics.render(openmetrics=True).decode())}
    assert text == openmetrics
    names = [family.name for family in FAMILIES]
    assert len(names) == len(set(names))
    assert all(name.startswith(("nodeagent_", "process_")) for name in names)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian package prometheus) is not installed")
def test_promtool_has_nothing_to_object_to() -> None:
    metrics = make(RuntimeCounters(pods_synced_at=NOW, watches=(WatchCounts("pods", 0, 1),)))
    plan, seen = decided(available=GI)
    metrics.observe_plan(plan, seen)
    metrics.observe_outcome(Outcome(plan.id, plan.victims[0].pod.uid, OutcomeKind.ACCEPTED, "", NOW, http_status=201))
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=metrics.render(), capture_output=True, check=False, timeout=30
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")


def test_hooks_are_counted_by_their_result() -> None:
    metrics = make()
    metrics.observe_plan(*decided(available=3 * GI))
    for result in (HookResult.DONE, HookResult.DONE, HookResult.TIMED_OUT):
        metrics.observe_hook(HookOutcome("a-1", "u", result, "", NOW))
    series = read(metrics)
    assert (series["nodeagent_hooks_total", "done"], series["nodeagent_hooks_total", "timed-out"]) == (2, 1)


def test_a_memory_limit_that_is_not_raised_is_counted_by_its_code_and_refuses_no_eviction() -> None:
    plan, seen = decided(available=100 * GI)
    refusal = Refusal(RefusalCode.RESIZE_NO_HEADROOM, "the memory limit of shop/web is not raised")
    metrics = make()
    metrics.observe_plan(plan._replace(refusals=(refusal,)), seen)
    series = read(metrics)
    assert series["nodeagent_decisions_total", "calm"] == 1
    assert series["nodeagent_decisions_total", "refuse"] == 0
    assert series["nodeagent_refusals_total", "resize-no-headroom"] == 1
