"""Which request would have kept a pod."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.config.schema import Config
from nodeagent.model import Container, DiskUsage, PodView, QOSClass, Resources, Signal
from nodeagent.policy import effective_thresholds, engine
from nodeagent.policy.state import initial
from nodeagent.records.flight_recorder import DecisionInputs
from nodeagent.report import kept_request
from nodeagent.report.kept_request import STEP, KeptRequest, Verdict
from tests.support.nodes import GI, MI, NOW, config, hard, snapshot, view

CONFIG = config(hard(value=2 * GI))


def inputs_of(*pods: PodView, configuration: Config = CONFIG, **more: Any) -> DecisionInputs:
    node = snapshot(*pods, **({"available": {Signal.MEMORY: GI}} | more))
    thresholds = effective_thresholds.effective(configuration, node.layout)
    return DecisionInputs(node, initial("abc", now=NOW - 60), NOW, thresholds, 1)


def find(uid: str, *pods: PodView, configuration: Config = CONFIG, **more: Any) -> KeptRequest:
    return kept_request.find(inputs_of(*pods, configuration=configuration, **more), uid, configuration)


def test_the_smallest_request_is_the_one_behind_the_next_pod() -> None:
    pods = (view("web", 3 * GI, request=GI), view("batch", 2 * GI, request=512 * MI))
    found = find("uid-shop-web", *pods)
    # batch uses 1536 MiB over its request; web comes after it with as much, by its name.
    assert (found.verdict, found.request, found.now) == (Verdict.KEPT, 1536 * MI, GI)
    assert [pod.name for pod in found.victims] == ["batch"]
    assert found.limit is None


@given(st.lists(st.tuples(st.integers(0, 4096), st.integers(0, 4096)), min_size=2, max_size=6))
def test_one_step_less_evicts_the_pod_and_the_answer_does_not(sizes: list[tuple[int, int]]) -> None:
    pods = [view(f"p{n}", usage * MI, request=request * MI) for n, (usage, request) in enumerate(sizes)]
    inputs = inputs_of(*pods)
    plan, _ = engine.decide(inputs.snapshot, inputs.state, now=NOW, config=CONFIG)
    for victim in plan.victims:
        found = kept_request.find(inputs, victim.pod.uid, CONFIG)
        if found.verdict is not Verdict.KEPT:
            continue
        assert found.request is not None
        for request, evicted in ((found.request, False), (found.request - STEP, True)):
            changed = [
                each if each.pod.uid != victim.pod.uid else view(victim.pod.name or "", 0, request=request)
                for each in pods
            ]
            changed = [
                each if each.pod.uid != victim.pod.uid else PodView(each.pod, old.usage)
                for each, old in zip(changed, pods, strict=True)
            ]
            again, _ = engine.decide(
                inputs.snapshot._replace(pods=tuple(changed)), inputs.state, now=NOW, config=CONFIG
            )
            assert (victim.pod.uid in {each.pod.uid for each in again.victims}) is evicted


def test_a_best_effort_pod_becomes_burstable_with_a_request() -> None:
    pods = (view("web", 3 * GI, qos=QOSClass.BEST_EFFORT), view("batch", 3 * GI, request=GI))
    found = find("uid-shop-web", *pods)
    assert found.verdict is Verdict.KEPT
    assert (found.now, found.request) == (0, GI)


def test_no_request_keeps_the_only_pod_that_frees_anything() -> None:
    found = find("uid-shop-web", view("web", 3 * GI), view("idle", 0))
    assert (found.verdict, found.request) == (Verdict.NONE, None)


def test_a_request_above_the_own_limit_names_the_limit() -> None:
    limited = view(
        "web", 3 * GI, containers=(Container("main", requests=Resources(memory=GI), limits=Resources(memory=GI)),)
    )
    found = find("uid-shop-web", limited, view("batch", 2 * GI, request=512 * MI))
    assert found.limit == GI


def test_requests_beyond_the_node_are_visible() -> None:
    pods = (view("web", 3 * GI, request=GI), view("batch", 2 * GI, request=512 * MI), view("big", GI, request=15 * GI))
    found = find("uid-shop-web", *pods)
    assert found.sum_of_requests is not None
    assert found.capacity is not None
    assert found.sum_of_requests > found.capacity


def test_disk_has_a_request_of_its_own() -> None:
    disk = config(hard(Signal.NODEFS, 10 * GI))

    def writer(name: str, used: int, request: int) -> PodView:
        main = Container("main", requests=Resources(ephemeral_storage=request), running=True)
        return view(name, containers=(main,), usage_more={"disk": DiskUsage(rootfs_bytes=used, logs_bytes=0)})

    pods = (writer("web", 30 * GI, GI), writer("batch", 20 * GI, GI))
    found = find("uid-shop-web", *pods, configuration=disk, available={Signal.NODEFS: 5 * GI})
    assert (found.verdict, found.signal) == (Verdict.KEPT, Signal.NODEFS)
    assert found.request == 11 * GI


def test_processes_have_no_request() -> None:
    pids = config(hard(Signal.PID, 1000))
    bomb = view("bomb", 0, usage_more={"process_count": 20_000, "thread_count": 20_000})
    found = find("uid-shop-bomb", bomb, view("web"), configuration=pids, available={Signal.PID: 100})
    assert found.verdict is Verdict.NO_REQUEST


def test_another_configuration_than_the_one_in_force_gives_no_answer() -> None:
    inputs = inputs_of(view("web", 3 * GI))
    found = kept_request.find(inputs, "uid-shop-web", config(hard(value=512 * MI)))
    assert found.verdict is Verdict.NOT_REPEATED


@pytest.mark.parametrize("uid", ["", "uid-shop-nobody"])
def test_a_pod_that_was_no_victim_gives_no_answer(uid: str) -> None:
    assert find(uid, view("web", 3 * GI)).verdict is Verdict.NOT_REPEATED
