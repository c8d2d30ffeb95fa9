"""Own taints are added and removed, foreign ones stay."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.actuators.conditions import CONFLICT_REASON
from nodeagent.actuators.taints import NodeTaints
from nodeagent.kube.backoff import FIRST_S, UNDELAYED_REPEATS
from nodeagent.kube.credentials import find_credentials
from nodeagent.kube.node_watch import NodeWatch
from nodeagent.kube.transport import connect
from nodeagent.model import ConditionStatus, ConditionType
from nodeagent.runtime import clock
from tests.fake_kube import ApiServer, Request

MEMORY, DISK = ConditionType.MEMORY_PRESSURE, ConditionType.DISK_PRESSURE
OURS = {"key": "nodeagent.io/memory-pressure", "effect": "NoSchedule"}
FOREIGN = {"key": "team", "value": "a", "effect": "NoExecute", "timeAdded": "2026-11-20T23:16:53Z"}


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer() as server:
        yield server


@pytest.fixture
def taints(api: ApiServer, tmp_path: Path) -> Iterator[NodeTaints]:
    transport = connect(find_credentials(str(api.kubeconfig(tmp_path / "kubeconfig"))))
    node = NodeWatch(transport, api.node_name)
    taints = NodeTaints(transport, node)
    node.start()
    taints.start()
    assert api.wait_for(lambda: [r for r in api.requests if "watch" in r.query])
    yield taints
    taints.stop(clear=False)
    node.stop()


def taints_on_node(api: ApiServer) -> list[Any]:
    return list(api.node()["spec"].get("taints", []))


def eventually(holds: Callable[[], object]) -> None:
    for _ in range(3000):
        if holds():
            return
        threading.Event().wait(0.01)
    pytest.fail("it never came true")


def set_foreign_taints(api: ApiServer, *entries: dict[str, str]) -> None:
    with api.store.changed:
        api.patch_node({"spec": {"taints": list(entries)}})


def test_nothing_is_written_before_the_first_want(api: ApiServer, taints: NodeTaints) -> None:
    set_foreign_taints(api, FOREIGN)
    threading.Event().wait(0.1)
    assert not api.sent("PATCH")


def test_a_taint_is_added_beside_others_and_removed_alone(api: ApiServer, taints: NodeTaints) -> None:
    set_foreign_taints(api, FOREIGN)
    taints.want([MEMORY])
    assert api.wait_for(lambda: taints_on_node(api) == [FOREIGN, OURS], 30), taints_on_node(api)
    eventually(lambda: taints.present() == {MEMORY})
    taints.want([])
    assert api.wait_for(lambda: taints_on_node(api) == [FOREIGN], 30)
    eventually(lambda: taints.present() == frozenset())


def test_a_conflict_is_resolved_and_the_other_clients_change_kept(api: ApiServer, taints: NodeTaints) -> None:
    # The watch ends, so that the worker does not get the other write before its own is refused.
    api.forbid("list", "nodes")
    api.forbid("watch", "nodes")
    api.end_watches()
    eventually(lambda: "forbidden" in taints._node.reason)
    set_foreign_taints(api, FOREIGN)
    taints.want([DISK])
    wanted = [FOREIGN, {"key": "nodeagent.io/disk-pressure", "effect": "NoSchedule"}]
    assert api.wait_for(lambda: taints_on_node(api) == wanted, 30), taints_on_node(api)
    assert len(api.sent("PATCH")) == 2


def test_a_taint_that_another_client_removed_is_added_again(api: ApiServer, taints: NodeTaints) -> None:
    taints.want([MEMORY])
    assert api.wait_for(lambda: taints_on_node(api) == [OURS], 30)
    eventually(lambda: taints.present() == {MEMORY})
    set_foreign_taints(api)
    assert api.wait_for(lambda: taints_on_node(api) == [OURS], 30)


def test_without_the_right_the_reason_states_it_and_requests_are_rare(api: ApiServer, taints: NodeTaints) -> None:
    api.forbid("patch", "nodes")
    began = time.monotonic()
    taints.want([MEMORY])
    eventually(lambda: "cannot patch" in taints.reason)
    for _ in range(10):
        taints.want([MEMORY, DISK])
    threading.Event().wait(0.1)
    assert len(api.sent("PATCH")) <= 1 + (time.monotonic() - began) / (FIRST_S / 2)
    assert taints.present() == frozenset()
    api.allow("patch", "nodes")
    eventually(lambda: taints.present() == {MEMORY, DISK})


def test_a_clean_exit_removes_the_taints(api: ApiServer, taints: NodeTaints) -> None:
    set_foreign_taints(api, FOREIGN)
    taints.want([MEMORY, DISK])
    eventually(lambda: taints.present() == {MEMORY, DISK})
    taints.stop()
    assert taints_on_node(api) == [FOREIGN]


def test_a_taint_that_is_removed_each_time_is_added_less_and_less_often(api: ApiServer, taints: NodeTaints) -> None:
    def strip(request: Request, done: bool) -> None:
        if done and request.method == "PATCH":
            entry = api.node()
            entry["spec"]["taints"] = []
            api.put_node(entry)

    api.at_request = strip
    taints.want([ConditionType.MEMORY_PRESSURE])
    assert api.wait_for(lambda: len(api.sent("PATCH")) > UNDELAYED_REPEATS, 20), "the first answers are quick"
    threading.Event().wait(4.0)
    assert len(api.sent("PATCH")) <= 1 + UNDELAYED_REPEATS + 5
    assert taints.reason == CONFLICT_REASON


def test_a_wanted_taint_is_missing_since_it_was_first_wanted(api: ApiServer, taints: NodeTaints) -> None:
    taints.want([MEMORY])
    eventually(lambda: taints.present() == {MEMORY})
    api.forbid("patch", "nodes")
    before = clock.boottime()
    taints.want([MEMORY, DISK])
    since = taints.missing()
    after = clock.boottime()
    taints.want([MEMORY, DISK])
    assert list(since) == [DISK]
    assert before <= since[DISK] <= after
    assert taints.missing() == since


def test_an_unknown_condition_keeps_its_taint_and_gets_none(api: ApiServer, taints: NodeTaints) -> None:
    taints.publish({MEMORY: ConditionStatus.TRUE, DISK: ConditionStatus.UNKNOWN})
    eventually(lambda: taints.present() == {MEMORY})
    taints.publish({MEMORY: ConditionStatus.UNKNOWN, DISK: ConditionStatus.TRUE})
    eventually(lambda: taints.present() == {MEMORY, DISK})
    taints.publish({MEMORY: ConditionStatus.FALSE, DISK: ConditionStatus.FALSE})
    eventually(lambda: taints_on_node(api) == [])
