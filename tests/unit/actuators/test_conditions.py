"""Conditions stay against a kubelet that overwrites them, and foreign ones are never changed."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.actuators import conditions
from nodeagent.actuators.conditions import CONFLICT_REASON, NodeConditions, OwnedCondition
from nodeagent.config.schema import StandardConditions
from nodeagent.kube import backoff
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.backoff import UNDELAYED_REPEATS, RetryBackoff
from nodeagent.kube.credentials import find_credentials
from nodeagent.kube.node_watch import NodeWatch
from nodeagent.kube.transport import connect
from nodeagent.model import ConditionStatus, ConditionType, ConditionVerdict, OutcomeKind
from nodeagent.runtime.clock import boottime
from tests.fake_kube import KUBELET_FALSE, ApiServer, Request

MEMORY = ConditionType.MEMORY_PRESSURE
OWN = "NodeAgentMemoryPressure"


def verdict(
    status: ConditionStatus, *, reason: str = "NodeAgentLowMemory", message: str = "m", since: float | None = None
) -> ConditionVerdict:
    return ConditionVerdict(MEMORY, status, reason, message, boottime() if since is None else since)


PRESSURE = ConditionStatus.TRUE
CALM = ConditionStatus.FALSE


def eventually(holds: Callable[[], object]) -> None:
    deadline = boottime() + 30
    while not holds():
        assert boottime() < deadline, "it never came true"
        threading.Event().wait(0.005)


class Publisher:
    """A node watch and a condition writer against the double."""

    def __init__(self, api: ApiServer, tmp_path: Path, **options: Any) -> None:
        self.api = api
        transport = connect(find_credentials(str(api.kubeconfig(tmp_path / "kubeconfig"))))
        self.node = NodeWatch(transport, api.node_name)
        self.conditions = NodeConditions(transport, self.node, **options)
        self.node.start()
        self.conditions.start()
        assert api.wait_for(lambda: [r for r in api.requests if "watch" in r.query])

    def publish(self, what: ConditionVerdict) -> None:
        self.conditions.publish([what])

    def reads(self, kind: str, status: str | None) -> None:
        def holds() -> bool:
            condition = self.api.condition(kind)
            return (condition["status"] if condition else None) == status

        assert self.api.wait_for(holds, 30), self.api.condition(kind)

    def knows(self, status: str) -> None:
        """Wait until the writer's view has the standard condition so."""

        def in_view() -> bool:
            view = self.node.view()
            return view is not None and view.conditions["MemoryPressure"].status == status

        eventually(in_view)

    def patches(self) -> list[Any]:
        return [r.body["status"]["conditions"] for r in self.api.sent("PATCH", "/status")]

    def settle(self) -> None:
        """A short time in which nothing may be written."""
        threading.Event().wait(0.2)

    def close(self) -> None:
        self.conditions.stop(clear=False)
        self.node.stop()


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer() as server:
        yield server


@pytest.fixture
def start(api: ApiServer, tmp_path: Path) -> Iterator[Callable[..., Publisher]]:
    started: list[Publisher] = []

    def begin(**options: Any) -> Publisher:
        started.append(Publisher(api, tmp_path, **options))
        return started[-1]

    yield begin
    for publisher in started:
        publisher.close()


def kubelet_resets(api: ApiServer) -> None:
    api.write_condition("MemoryPressure", "False", *KUBELET_FALSE["MemoryPressure"])


def test_pressure_is_published_on_both_types_in_one_write(api: ApiServer, start: Callable[..., Publisher]) -> None:
    publisher = start()
    publisher.publish(verdict(PRESSURE, message="available 90Mi of 2Gi"))
    publisher.reads("MemoryPressure", "True")
    publisher.reads(OWN, "True")
    assert len(publisher.patches()) == 1
    written = api.condition("MemoryPressure")
    assert written is not None
    assert (written["reason"], written["message"]) == ("NodeAgentLowMemory", "available 90Mi of 2Gi")
    assert written["lastHeartbeatTime"]


def test_no_pressure_is_published_on_the_own_type_only(api: ApiServer, start: Callable[..., Publisher]) -> None:
    before = api.condition("MemoryPressure")
    publisher = start()
    publisher.publish(verdict(CALM, reason="NodeAgentEnough"))
    publisher.reads(OWN, "False")
    assert api.condition("MemoryPressure") == before


def test_the_end_of_pressure_clears_the_own_true(api: ApiServer, start: Callable[..., Publisher]) -> None:
    publisher = start()
    publisher.publish(verdict(PRESSURE))
    publisher.reads("MemoryPressure", "True")
    assert publisher.conditions.owned[0].type == "MemoryPressure"
    publisher.publish(verdict(CALM))
    publisher.reads("MemoryPressure", "False")
    publisher.knows("False")
    eventually(lambda: publisher.conditions.owned == ())


def test_an_overwrite_is_answered_at_once_by_one_write(api: ApiServer, start: Callable[..., Publisher]) -> None:
    publisher = start()
    publisher.publish(verdict(PRESSURE))
    publisher.reads("MemoryPressure", "True")
    for _ in range(3):
        publisher.knows("True")
        kubelet_resets(api)
        publisher.reads("MemoryPressure", "True")
    publisher.settle()
    assert len(publisher.patches()) == 4
    (memory,) = [c for c in publisher.conditions.conflicts() if c.type is MEMORY]
    assert memory.overwrites == 3
    assert 0 < memory.true_s <= memory.wanted_s


def test_asserting_again_is_not_a_transition(api: ApiServer, start: Callable[..., Publisher]) -> None:
    publisher = start()
    publisher.publish(verdict(PRESSURE, since=boottime() - 60))
    publisher.reads("MemoryPressure", "True")
    first = api.condition("MemoryPressure")
    kubelet_resets(api)
    publisher.reads("MemoryPressure", "True")
    again = api.condition("MemoryPressure")
    assert first is not None
    assert again is not None
    assert first["lastTransitionTime"] == again["lastTransitionTime"]


def test_the_condition_is_true_nearly_all_the_time_against_a_kubelet_that_overwrites_it(
    api: ApiServer, start: Callable[..., Publisher]
) -> None:
    publisher = start()
    stop = api.kubelet(1.0)
    publisher.publish(verdict(PRESSURE))

    def holds_its_own() -> bool:
        memory = publisher.conditions.conflicts()[0]
        return memory.overwrites >= 4 and memory.true_s / memory.wanted_s > 0.9

    # The real one resets every 10 s, ten times less often. A moment in which this machine was busy is made up for.
    assert api.wait_for(holds_its_own, 80), publisher.conditions.conflicts()[0]
    stop.set()
    publisher.reads("MemoryPressure", "True")
    assert len(publisher.patches()) <= 2 * publisher.conditions.conflicts()[0].overwrites + 1


def test_an_endless_conflict_is_answered_less_and_less_often(api: ApiServer, start: Callable[..., Publisher]) -> None:
    publisher = start()
    publisher.publish(verdict(PRESSURE))
    publisher.reads("MemoryPressure", "True")
    began = boottime()
    stop = api.kubelet(0.01)
    publisher.settle()
    publisher.settle()
    publisher.settle()
    stop.set()
    patches = len(publisher.patches())
    assert patches <= 1 + UNDELAYED_REPEATS + (boottime() - began) / 0.5, "the first, a burst, then ever fewer"
    assert publisher.conditions.reason == CONFLICT_REASON


def test_own_types_that_another_client_removes_return_at_once_but_not_for_ever(
    api: ApiServer, start: Callable[..., Publisher]
) -> None:
    """As a webhook does, or a controller that replaces the status."""

    def strip(request: Request, done: bool) -> None:
        if done and request.method == "PATCH":
            entry = api.node()
            conditions = entry["status"]["conditions"]
            entry["status"]["conditions"] = [each for each in conditions if not each["type"].startswith("NodeAgent")]
            api.put_node(entry)

    api.at_request = strip
    publisher = start()
    publisher.publish(verdict(CALM))
    assert api.wait_for(lambda: len(publisher.patches()) > UNDELAYED_REPEATS, 20)
    assert publisher.patches()[UNDELAYED_REPEATS]
    took_s = api.sent("PATCH", "/status")[UNDELAYED_REPEATS].at - api.sent("PATCH", "/status")[0].at
    assert took_s < 2.0, "the first answers are quick"
    threading.Event().wait(5.0)
    assert len(publisher.patches()) <= 1 + UNDELAYED_REPEATS + 5, "then after 0.5 s, 1 s, 2 s, 4 s at least"
    assert publisher.conditions.reason == CONFLICT_REASON
    before = len(publisher.patches())
    publisher.publish(verdict(PRESSURE))
    assert api.wait_for(lambda: len(publisher.patches()) > before, 1.0), "a new verdict waits for nothing"
    assert "'MemoryPressure'" in str(publisher.patches()[before])


def test_resource_versions_that_decrease_cause_no_flood_of_writes(
    api: ApiServer, start: Callable[..., Publisher]
) -> None:
    publisher = start()
    eventually(publisher.node.view)
    api.store.version = 1  # as after a restored backup
    publisher.publish(verdict(PRESSURE))
    threading.Event().wait(4.0)
    assert 1 <= len(publisher.patches()) <= 1 + UNDELAYED_REPEATS + 5


def test_mode_once_asserts_once_per_verdict(api: ApiServer, start: Callable[..., Publisher]) -> None:
    publisher = start(standard=StandardConditions.ONCE)
    publisher.publish(verdict(PRESSURE))
    publisher.reads("MemoryPressure", "True")
    kubelet_resets(api)
    publisher.settle()
    publisher.reads("MemoryPressure", "False")
    publisher.reads(OWN, "True")
    publisher.publish(verdict(CALM))
    publisher.reads(OWN, "False")
    publisher.publish(verdict(PRESSURE))
    publisher.reads("MemoryPressure", "True")


def test_mode_off_never_writes_the_standard_types(api: ApiServer, start: Callable[..., Publisher]) -> None:
    publisher = start(standard=StandardConditions.OFF)
    publisher.publish(verdict(PRESSURE))
    publisher.reads(OWN, "True")
    publisher.reads("MemoryPressure", "False")
    assert {c["type"] for patch in publisher.patches() for c in patch} == {OWN}


@pytest.mark.parametrize("status", [PRESSURE, CALM], ids=["pressure", "calm"])
def test_own_types_of_an_earlier_configuration_are_removed(
    api: ApiServer, start: Callable[..., Publisher], status: ConditionStatus
) -> None:
    api.write_condition(OWN, "True", "NodeAgentLowMemory", "from before")
    publisher = start(own=False)
    publisher.settle()
    assert api.condition(OWN) is not None, "nothing is written before the first verdict"
    publisher.publish(verdict(status))
    publisher.reads(OWN, None)
    publisher.reads("MemoryPressure", "True" if status is PRESSURE else "False")
    publisher.settle()
    assert [each for patch in publisher.patches() for each in patch if each["type"] == OWN] == [
        {"type": OWN, "$patch": "delete"}
    ]
    before = len(publisher.patches())
    publisher.publish(verdict(CALM, reason="NodeAgentEnough"))
    publisher.reads("MemoryPressure", "False")
    publisher.conditions.stop()
    assert not [each for patch in publisher.patches()[before:] for each in patch if each["type"] == OWN]


def test_own_types_that_another_agent_writes_are_not_removed_for_ever(
    api: ApiServer, start: Callable[..., Publisher]
) -> None:
    def write_again(request: Request, done: bool) -> None:
        if done and request.method == "PATCH":
            api.write_condition(OWN, "False", "NodeAgentHasSufficientMemory", "of another agent")

    api.write_condition(OWN, "False", "NodeAgentHasSufficientMemory", "of another agent")
    api.at_request = write_again
    publisher = start(own=False)
    publisher.publish(verdict(CALM))
    assert api.wait_for(lambda: len(publisher.patches()) > UNDELAYED_REPEATS, 20)
    eventually(lambda: publisher.conditions.reason == CONFLICT_REASON)


@pytest.mark.parametrize("status", [PRESSURE, CALM], ids=["pressure", "calm"])
def test_mode_off_clears_a_true_of_an_earlier_configuration(
    api: ApiServer, start: Callable[..., Publisher], status: ConditionStatus
) -> None:
    api.write_condition("MemoryPressure", "True", "NodeAgentLowMemory", "from before")
    publisher = start(standard=StandardConditions.OFF, owned=[OwnedCondition("MemoryPressure", "x", "y")])
    publisher.publish(verdict(status))
    publisher.reads("MemoryPressure", "False")
    eventually(lambda: publisher.conditions.owned == ())
    left = api.condition("MemoryPressure")
    assert left is not None
    assert (left["reason"], left["message"]) == ("NodeAgentStopped", "nodeagent has stopped publishing this type")
    api.write_condition("MemoryPressure", "True", "KubeletHasInsufficientMemory", "kubelet")
    publisher.knows("True")
    publisher.settle()
    publisher.reads("MemoryPressure", "True")


def test_a_kubelets_true_is_neither_overwritten_nor_cleared(api: ApiServer, start: Callable[..., Publisher]) -> None:
    api.write_condition("MemoryPressure", "True", "KubeletHasInsufficientMemory", "kubelet")
    publisher = start()
    publisher.publish(verdict(PRESSURE))
    publisher.reads(OWN, "True")
    assert publisher.conditions.conflicts()[0].true_by_other
    publisher.publish(verdict(CALM))
    publisher.reads(OWN, "False")
    publisher.settle()
    left = api.condition("MemoryPressure")
    assert left is not None
    assert (left["status"], left["reason"]) == ("True", "KubeletHasInsufficientMemory")


def test_when_the_kubelet_clears_its_true_the_agent_asserts_its_own(
    api: ApiServer, start: Callable[..., Publisher]
) -> None:
    api.write_condition("MemoryPressure", "True", "KubeletHasInsufficientMemory", "kubelet")
    publisher = start()
    publisher.publish(verdict(PRESSURE))
    publisher.reads(OWN, "True")
    kubelet_resets(api)
    publisher.reads("MemoryPressure", "True")


def test_a_true_of_an_earlier_process_is_cleared_by_the_next(api: ApiServer, start: Callable[..., Publisher]) -> None:
    api.write_condition("MemoryPressure", "True", "LowMemory", "from before")
    publisher = start(owned=[OwnedCondition("MemoryPressure", "LowMemory", "from before")])
    publisher.publish(verdict(CALM, reason="Enough"))
    publisher.reads("MemoryPressure", "False")


def test_unchanged_verdicts_are_written_by_the_heartbeat_only(api: ApiServer, start: Callable[..., Publisher]) -> None:
    began = boottime()
    publisher = start(heartbeat_s=0.3)
    publisher.publish(verdict(CALM, since=1.0))
    publisher.reads(OWN, "False")
    for _ in range(20):
        publisher.publish(verdict(CALM, since=1.0))
    publisher.settle()
    patches = len(publisher.patches())
    assert patches <= 2 + (boottime() - began) / (0.3 * 0.9), "the first, and one a heartbeat"
    assert api.wait_for(lambda: len(publisher.patches()) >= 3, 30)


def test_a_clean_exit_removes_the_own_types_and_clears_the_own_true(
    api: ApiServer, start: Callable[..., Publisher]
) -> None:
    publisher = start()
    publisher.publish(verdict(PRESSURE))
    publisher.reads("MemoryPressure", "True")
    publisher.conditions.stop()
    assert api.condition(OWN) is None
    left = api.condition("MemoryPressure")
    assert left is not None
    assert (left["status"], left["reason"], left["message"]) == ("False", *KUBELET_FALSE["MemoryPressure"])


@pytest.mark.parametrize("end", [{"clear": True}, {"clear": False, "mark": True}], ids=["clear", "keep"])
def test_a_clean_exit_restores_the_kubelets_reason_and_message(
    api: ApiServer, start: Callable[..., Publisher], end: dict[str, bool]
) -> None:
    publisher = start()
    publisher.publish(verdict(PRESSURE))
    publisher.reads("MemoryPressure", "True")
    publisher.publish(verdict(CALM, reason="NodeAgentHasSufficientMemory"))
    publisher.reads("MemoryPressure", "False")
    publisher.knows("False")
    ours = api.condition("MemoryPressure")
    assert ours is not None
    assert ours["reason"] == "NodeAgentHasSufficientMemory"
    publisher.conditions.stop(**end)
    left = api.condition("MemoryPressure")
    assert left is not None
    assert (left["status"], left["reason"], left["message"]) == ("False", *KUBELET_FALSE["MemoryPressure"])
    assert left["lastTransitionTime"] == ours["lastTransitionTime"], "that is no transition"


def test_a_clean_exit_marks_a_false_without_a_known_kubelet_reason(
    api: ApiServer, start: Callable[..., Publisher]
) -> None:
    """As a killed agent leaves them."""
    api.write_condition("MemoryPressure", "False", "NodeAgentHasSufficientMemory", "available 3Gi of 4Gi")
    publisher = start()
    publisher.knows("False")
    publisher.conditions.stop()
    left = api.condition("MemoryPressure")
    assert left is not None
    assert (left["status"], left["reason"]) == ("False", "NodeAgentStopped")


def test_a_clean_exit_leaves_a_kubelets_true(api: ApiServer, start: Callable[..., Publisher]) -> None:
    api.write_condition("MemoryPressure", "True", "KubeletHasInsufficientMemory", "kubelet")
    publisher = start()
    publisher.publish(verdict(PRESSURE))
    publisher.reads(OWN, "True")
    publisher.conditions.stop()
    assert api.condition(OWN) is None
    publisher.reads("MemoryPressure", "True")


def test_after_an_outage_the_newest_verdict_is_written(api: ApiServer, start: Callable[..., Publisher]) -> None:
    publisher = start()
    api.throttle(1, path="/status")
    publisher.publish(verdict(PRESSURE))
    assert api.wait_for(lambda: api.sent("PATCH", "/status") or publisher.conditions.reason)
    publisher.publish(verdict(CALM, reason="NodeAgentEnough"))
    api.throttle(0)
    publisher.reads(OWN, "False")
    publisher.reads("MemoryPressure", "False")
    assert all(c["status"] != "True" for c in api.node()["status"]["conditions"])


def test_a_missing_right_is_reported_and_new_values_cause_no_further_requests(
    api: ApiServer, start: Callable[..., Publisher]
) -> None:
    api.forbid("patch", "nodes/status")
    publisher = start()
    began = time.monotonic()
    publisher.publish(verdict(PRESSURE))
    assert api.wait_for(lambda: api.sent("PATCH", "/status"))
    for n in range(10):
        publisher.publish(verdict(PRESSURE, message=str(n)))
    publisher.settle()
    eventually(lambda: "cannot patch" in publisher.conditions.reason)
    assert len(publisher.patches()) <= 1 + (time.monotonic() - began) / (backoff.FIRST_S / 2)


def test_a_server_that_refuses_until_it_has_read_its_roles_delays_a_condition_for_seconds_only(
    api: ApiServer, start: Callable[..., Publisher]
) -> None:
    api.forbid("patch", "nodes/status")
    publisher = start()
    publisher.publish(verdict(PRESSURE))
    eventually(lambda: "cannot patch" in publisher.conditions.reason)
    api.allow("patch", "nodes/status")
    publisher.reads(OWN, "True")


def test_a_right_that_stays_missing_is_tried_once_a_minute() -> None:
    waits = RetryBackoff()
    forbidden = ApiError(OutcomeKind.FORBIDDEN, "x", status=403)
    found = [conditions.wait_after(forbidden, waits) for _ in range(20)]
    assert found[0] <= backoff.FIRST_S
    assert 3.7 < sum(wait_s for wait_s in found if wait_s < conditions.FORBIDDEN_S) < 16, found
    assert set(found[5:]) == {conditions.FORBIDDEN_S}
    unreachable = ApiError(OutcomeKind.UNREACHABLE, "x")
    assert conditions.wait_after(unreachable, waits) <= backoff.LAST_S


def test_a_node_that_does_not_exist_is_never_written(tmp_path: Path, api: ApiServer) -> None:
    transport = connect(find_credentials(str(api.kubeconfig(tmp_path / "kubeconfig"))))
    node = NodeWatch(transport, "another-node")
    conditions = NodeConditions(transport, node)
    node.start()
    conditions.start()
    assert api.wait_for(lambda: [r for r in api.requests if "watch" in r.query])
    conditions.publish([verdict(PRESSURE)])
    threading.Event().wait(0.2)
    eventually(lambda: "no node another-node" in node.reason)
    assert not api.sent("PATCH")
    conditions.stop()
    node.stop()
