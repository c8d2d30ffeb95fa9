"""Series of single pods: bounded, gone with the pod, and none for what was not measured."""

from typing import Any

from prometheus_client.parser import text_string_to_metric_families as read_text

from nodeagent.config.schema import Config, MetricsConfig, PerPodConfig
from nodeagent.model import DiskUsage, DiskUsageQuality, NodeSnapshot, PodView
from nodeagent.policy import engine, pod_usage
from nodeagent.policy.state import initial
from nodeagent.telemetry import pod_series
from nodeagent.telemetry.metrics import Metrics
from tests.support.nodes import GI, MI, NOW, config, hard, snapshot, view

ABOVE = "nodeagent_pod_memory_above_request_bytes"
DISK = "nodeagent_pod_disk_bytes"
INODES = "nodeagent_pod_disk_inodes"


def with_top(top: int) -> Config:
    return config(hard(value=GI), metrics=MetricsConfig(per_pod=PerPodConfig(top=top)))


def series(seen: NodeSnapshot, *, top: int = 20) -> dict[tuple[str, ...], int]:
    found = list(pod_series.samples(seen, config=with_top(top)))
    assert len({(name, labels) for name, labels, _ in found}) == len(found), "no series twice"
    return {(name, *labels): value for name, labels, value in found}


def on_disk(name: str, size: int | None, *, read_at: float = NOW, memory: int | None = None, **more: Any) -> PodView:
    """A pod whose disk was measured (None: no path of it)."""
    disk = DiskUsage(rootfs_bytes=size, rootfs_inodes=size and size // MI)
    quality = DiskUsageQuality(read_at, complete=size is not None)
    return view(name, memory, usage_more={"disk": disk, "disk_usage_quality": quality}, **more)


def test_by_default_there_is_none() -> None:
    assert Config().metrics.per_pod.top == 0
    assert list(pod_series.samples(snapshot(on_disk("web", GI)), config=config())) == []


def test_the_largest_pods_have_series_however_many_pods_there_are() -> None:
    pods = [on_disk(f"pod-{number}", number * MI, memory=number * MI, request=10 * MI) for number in range(1, 501)]
    found = series(snapshot(*pods), top=2)
    assert found == {
        (DISK, "shop", "pod-500"): 500 * MI,
        (DISK, "shop", "pod-499"): 499 * MI,
        (INODES, "shop", "pod-500"): 500,
        (INODES, "shop", "pod-499"): 499,
        (ABOVE, "shop", "pod-500"): 490 * MI,
        (ABOVE, "shop", "pod-499"): 489 * MI,
    }


def test_a_pod_below_its_request_has_a_negative_value() -> None:
    assert series(snapshot(view("web", 5 * MI, request=7 * MI))) == {(ABOVE, "shop", "web"): -2 * MI}


def test_an_unmeasured_pod_has_no_series() -> None:
    unmeasured = [
        view("not-walked", None),
        on_disk("no-path-found", None),
        on_disk("walked-long-ago", GI, read_at=NOW - pod_usage.DISK_MAX_AGE_S - 1),
        PodView(view("no-cgroup").pod, None),
    ]
    assert series(snapshot(*unmeasured)) == {}
    assert series(snapshot(on_disk("empty", 0))) == {(DISK, "shop", "empty"): 0, (INODES, "shop", "empty"): 0}


def test_a_pod_without_a_name_has_no_series() -> None:
    known = on_disk("web", GI, memory=GI)
    nameless = known._replace(pod=known.pod._replace(namespace=None, name=None))
    assert series(snapshot(nameless)) == {}


def test_two_pods_of_one_name_are_one_series_with_the_larger_amount() -> None:
    """A pod of a StatefulSet that terminates and its successor: a scrape with a series twice is refused as a whole."""
    old, new = on_disk("db-0", 5 * GI), on_disk("db-0", GI)
    new = new._replace(pod=new.pod._replace(uid="successor"))
    for pods in ((old, new), (new, old)):
        assert series(snapshot(*pods))[DISK, "shop", "db-0"] == 5 * GI


def test_under_churn_a_scrape_has_the_series_of_the_present_pods_alone() -> None:
    conf = with_top(3)
    metrics = Metrics(conf, boottime=lambda: NOW)
    for generation in range(5):
        seen = snapshot(*(on_disk(f"job-{generation}-{number}", GI, memory=GI) for number in range(10)))
        plan, _ = engine.decide(seen, initial("abc", now=NOW - 60), now=NOW, config=conf)
        metrics.observe_plan(plan, seen)
        samples = [
            sample
            for family in read_text(metrics.render().decode())
            for sample in family.samples
            if sample.name.startswith("nodeagent_pod_")
        ]
        assert len(samples) == 9
        assert {sample.labels["pod"].split("-")[1] for sample in samples} == {str(generation)}
        assert {sample.labels["namespace"] for sample in samples} == {"shop"}


def test_a_reload_that_switches_them_off_takes_effect_at_the_next_scrape() -> None:
    conf = with_top(3)
    metrics = Metrics(conf, boottime=lambda: NOW)
    seen = snapshot(on_disk("web", GI))
    plan, _ = engine.decide(seen, initial("abc", now=NOW - 60), now=NOW, config=conf)
    metrics.observe_plan(plan, seen)
    assert b"nodeagent_pod_disk" in metrics.render()
    metrics.observe_reload(with_top(0))
    assert b"nodeagent_pod_" not in metrics.render()
