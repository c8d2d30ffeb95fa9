"""A session that a reload replaces, or that the exit stops, at any step: nothing of it goes on, nothing is lost."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.actuators.cluster_session import ClusterSession
from nodeagent.actuators.conditions import OwnedCondition
from nodeagent.config.schema import Config, FleetConfig, Mode, ProtectionConfig
from nodeagent.kube.credentials import find_credentials
from nodeagent.kube.node_identity import Identity
from nodeagent.kube.transport import connect
from nodeagent.model import (
    Amount,
    MemoryAmounts,
    Method,
    Outcome,
    OutcomeKind,
    RefusalCode,
    ResizeOrder,
    ResizeResult,
    Signal,
    Threshold,
    Tier,
    Victim,
)
from tests.fake_kube import ApiServer, Request, pod

ENFORCE = Config(mode=Mode.ENFORCE)
TAINT = {"key": "nodeagent.io/memory-pressure", "effect": "NoSchedule"}
OWN = "NodeAgentMemoryPressure"


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer(pods=[pod("hog", uid="uid-hog")], linger_s=None) as server:
        yield server


@pytest.fixture
def session(api: ApiServer, tmp_path: Path) -> Iterator[Callable[..., ClusterSession]]:
    started: list[ClusterSession] = []

    def start(config: Config = ENFORCE, **more: Any) -> ClusterSession:
        transport = connect(find_credentials(str(api.kubeconfig(tmp_path / "kubeconfig"))))
        made = ClusterSession(transport, config, Identity("lab-node", "test"), wake=lambda: None, **more)
        made.start()
        started.append(made)
        return made

    yield start
    for each in started:
        each.stop(clear=False)


def eventually(holds: Callable[[], object], *, within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        threading.Event().wait(0.005)


class Held:
    """Requests whose path ends with this are carried out once they are released."""

    def __init__(self, api: ApiServer, ending: str) -> None:
        self.arrived, self._over = threading.Event(), threading.Event()
        self._ending = ending
        api.at_request = self._hold

    def _hold(self, request: Request, done: bool) -> None:
        if not done and request.path.endswith(self._ending):
            self.arrived.set()
            self._over.wait(60)

    def release(self) -> None:
        self._over.set()


def leave_marks(api: ApiServer) -> None:
    """As a process leaves them that was killed."""
    with api.store.changed:
        api.patch_node({"spec": {"taints": [TAINT]}})
    api.write_condition(OWN, "True", "NodeAgentLowMemory", "from before")
    api.write_condition("MemoryPressure", "True", "LowMemory", "from before")


OWNED = (OwnedCondition("MemoryPressure", "LowMemory", "from before"),)


def status(api: ApiServer, kind: str) -> str | None:
    condition = api.condition(kind)
    return None if condition is None else str(condition["status"])


# --- stopped while its identity is being confirmed --------------------------------------------------------------------


def test_a_session_that_is_stopped_does_not_open_afterwards(
    api: ApiServer, session: Callable[..., ClusterSession]
) -> None:
    leave_marks(api)
    before = set(threading.enumerate())
    reviews = Held(api, "/selfsubjectreviews")
    agent = session(owned=OWNED)
    assert reviews.arrived.wait(30)
    assert agent.stop(clear=False) == ""
    reviews.release()
    eventually(lambda: not [each for each in set(threading.enumerate()) - before if each.name == "identity"])
    assert agent.identity() is None
    assert not [request for request in api.requests if "watch" in request.query]
    assert not api.sent("PATCH"), "the next session continues it"


@pytest.mark.parametrize("mode", Mode)
def test_a_session_that_is_confirmed_while_it_stops_clears_what_an_earlier_process_has_left(
    api: ApiServer, session: Callable[..., ClusterSession], mode: Mode
) -> None:
    leave_marks(api)
    reviews = Held(api, "/selfsubjectreviews")
    agent = session(Config(mode=mode), owned=OWNED)
    assert reviews.arrived.wait(30)
    left: list[str] = []
    stop = threading.Thread(target=lambda: left.append(agent.stop(clear=True, confirm_s=30.0)))
    stop.start()
    threading.Event().wait(0.1)
    reviews.release()
    stop.join(30)
    assert left == [""]
    if mode is Mode.ENFORCE:
        assert api.node()["spec"].get("taints", []) == []
        assert (status(api, OWN), status(api, "MemoryPressure")) == (None, "False")
    else:
        assert not api.sent("PATCH")
    assert not api.watched("/api/v1/pods")


def test_a_session_that_is_never_confirmed_reports_that_it_has_cleared_nothing(
    api: ApiServer, session: Callable[..., ClusterSession]
) -> None:
    api.go_down()
    agent = session()
    eventually(lambda: agent.pods().unreachable_since is not None)
    assert "conditions and taints not cleared: cannot connect" in agent.stop(clear=True)


# --- replaced while an eviction is in flight --------------------------------------------------------------------------


CHANGED = ENFORCE._replace(fleet=FleetConfig(max_concurrent_evictions=1))


def victim(agent: ClusterSession, *, method: Method = Method.EVICT) -> Victim:
    threshold = Threshold(Signal.MEMORY, Amount(1, None, "1"))
    return Victim(agent.pods().pods[0], "/kubepods/poduid-hog", threshold, Tier.HARD, method, 3.0, "low", {}, None)


def synced(agent: ClusterSession) -> ClusterSession:
    eventually(lambda: agent.pods().synced_at is not None)
    return agent


def outcome(agent: ClusterSession) -> Outcome:
    found: list[Outcome] = []

    def arrived() -> bool:
        found.extend(agent.outcomes())
        return bool(found)

    eventually(arrived)
    [only] = found
    return only


@pytest.mark.parametrize("late", [False, True], ids=["before the new session opens", "afterwards"])
def test_the_answer_to_a_request_in_flight_reaches_the_next_session_with_its_event(
    api: ApiServer, session: Callable[..., ClusterSession], late: bool
) -> None:
    first = synced(session())
    evictions = Held(api, "/eviction")
    first.evict("run-7", victim(first))
    assert evictions.arrived.wait(30)
    if late:
        second = synced(session(CHANGED, previous=first))
    else:
        api.forbid("get", "nodes")
        second = session(CHANGED, previous=first)
    stopping = threading.Thread(target=lambda: first.stop(clear=False))
    stopping.start()
    evictions.release()
    assert outcome(second).kind is OutcomeKind.ACCEPTED
    stopping.join(30)
    api.allow("get", "nodes")
    synced(second)
    second.outcomes()

    def evicted() -> list[Request]:
        return [request for request in api.sent("POST", "/events") if request.body["reason"] == "Evicted"]

    assert api.wait_for(evicted, 30)
    assert len(evicted()) == 1


def test_the_answer_reaches_a_dry_run_without_an_event(api: ApiServer, session: Callable[..., ClusterSession]) -> None:
    first = synced(session())
    evictions = Held(api, "/eviction")
    first.evict("run-7", victim(first))
    assert evictions.arrived.wait(30)
    second = session(Config(mode=Mode.DRY_RUN), previous=first)
    stopping = threading.Thread(target=lambda: first.stop(clear=True))
    stopping.start()
    evictions.release()
    assert outcome(second).kind is OutcomeKind.ACCEPTED
    stopping.join(30)
    third = synced(session(previous=second))
    assert third.outcomes() == ()
    third.stop(clear=False)
    assert not api.sent("POST", "/events")


# --- replaced during an outage ----------------------------------------------------------------------------------------


def test_an_outage_goes_on_with_the_pods_that_were_listed_before_it(
    api: ApiServer, session: Callable[..., ClusterSession]
) -> None:
    first = synced(session())
    api.go_down()
    eventually(lambda: first.pods().unreachable_since is not None)
    since, listed = first.pods().unreachable_since, first.pods()
    first.announce_kill("run-8", victim(first, method=Method.KILL))
    second = session(CHANGED, previous=first)
    third = session(ENFORCE, previous=second)
    for each in (second, third):
        eventually(lambda each=each: each.pods().unreachable_since is not None)  # type: ignore[misc]
        view = each.pods()
        assert (view.pods, view.synced_at) == (listed.pods, listed.synced_at)
        assert view.unreachable_since == pytest.approx(since, abs=0.01)
        assert view.reason
        block = each.soft_tier_block()
        assert block is not None
        assert block.code is RefusalCode.PODS_NEVER_SYNCED
    third.evict("run-9", victim(third))
    refused = outcome(third)
    assert (refused.kind, refused.plan_id, refused.pod_uid) == (OutcomeKind.UNREACHABLE, "run-9", "uid-hog")
    amounts = MemoryAmounts(1 << 20, None)
    third.resize("run-9", ResizeOrder("uid-hog", "default", "hog", "1", "main", False, amounts, amounts, False, ""))
    [answer] = third.resize_outcomes()
    assert answer.result is ResizeResult.NOT_SENT
    first.stop(clear=False)
    second.stop(clear=False)
    api.come_back()
    eventually(lambda: third.pods().synced_at not in (None, listed.synced_at))
    assert third.pods().unreachable_since is None
    assert third.soft_tier_block() is None
    third.outcomes()
    assert api.wait_for(lambda: [each for each in api.sent("POST", "/events") if each.body["reason"] == "Killed"], 30)


def test_an_outage_that_has_ended_before_the_first_request_does_not_go_on(
    api: ApiServer, session: Callable[..., ClusterSession]
) -> None:
    first = synced(session())
    api.go_down()
    eventually(lambda: first.pods().unreachable_since is not None)
    first.stop(clear=False)
    api.come_back()
    reviews = Held(api, "/selfsubjectreviews")
    second = session(CHANGED, previous=first)
    assert reviews.arrived.wait(30)
    assert (second.pods().unreachable_since, second.pods().synced_at) == (None, None)
    reviews.release()
    synced(second)


def test_pods_that_were_read_without_what_protects_them_now_are_not_taken_over(
    api: ApiServer, session: Callable[..., ClusterSession]
) -> None:
    first = synced(session())
    api.go_down()
    eventually(lambda: first.pods().unreachable_since is not None)
    protection = ProtectionConfig(annotations=("example.com/keep",))
    second = session(ENFORCE._replace(protection=protection), previous=first)
    eventually(lambda: second.pods().unreachable_since is not None)
    assert (second.pods().pods, second.pods().synced_at) == ((), None)


def test_with_other_credentials_a_failure_is_no_outage_of_the_server_with_the_pods_of_before(
    api: ApiServer, session: Callable[..., ClusterSession]
) -> None:
    first = synced(session())
    api.go_down()
    eventually(lambda: first.pods().unreachable_since is not None)
    other = ENFORCE._replace(cluster=ENFORCE.cluster._replace(kubeconfig="/etc/other"))
    second = session(other, previous=first)
    eventually(lambda: second.pods().unreachable_since is not None)
    assert (second.pods().pods, second.pods().synced_at) == ((), None)
