"""Evictions are sent in parallel and in time, and every answer becomes its outcome."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.actuators.evictions import EvictionSender
from nodeagent.kube.credentials import find_credentials
from nodeagent.kube.transport import Transport, connect
from nodeagent.model import Method, Outcome, OutcomeKind, Victim
from nodeagent.runtime.clock import boottime
from tests.fake_kube import ApiServer, Request, pod
from tests.support.rawserver import RawServer
from tests.support.victims import victim


class Evicting:
    """A sender and its outcomes."""

    def __init__(self, transport: Transport, **options: Any) -> None:
        self._arrived = threading.Condition()
        self.evictor = EvictionSender(transport, wake=self._wake, **options)

    def _wake(self) -> None:
        with self._arrived:
            self._arrived.notify_all()

    def outcomes(self, count: int = 1, timeout_s: float = 30.0) -> list[Outcome]:
        outcomes: list[Outcome] = []

        def complete() -> bool:
            outcomes.extend(self.evictor.take())
            return len(outcomes) >= count

        with self._arrived:
            self._arrived.wait_for(complete, timeout_s)
        assert len(outcomes) == count, outcomes
        return outcomes

    def one(self, victim: Victim) -> Outcome:
        self.evictor.submit("plan-1", victim)
        return self.outcomes()[0]


def _wait(event: threading.Event) -> None:
    event.wait(60)


def connected(server: ApiServer | RawServer, tmp_path: Path) -> Transport:
    return connect(find_credentials(str(server.kubeconfig(tmp_path / "kubeconfig"))))


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer(pods=[pod(f"p{n}", labels={"app": "a"}) for n in range(6)], linger_s=None) as server:
        yield server


@pytest.fixture
def evicting(api: ApiServer, tmp_path: Path) -> Iterator[Evicting]:
    evicting = Evicting(connected(api, tmp_path))
    yield evicting
    evicting.evictor.stop()


def test_a_request_from_before_a_suspend_is_not_sent(api: ApiServer, tmp_path: Path) -> None:
    suspended_s, received, go_on = [0.0], threading.Event(), threading.Event()
    evicting = Evicting(connected(api, tmp_path), threads=1, clock=lambda: boottime() + suspended_s[0])

    def hold(request: Request, done: bool) -> None:
        if request.path.endswith("/eviction") and not done:
            received.set()
            _wait(go_on)

    api.at_request = hold
    evicting.evictor.submit("plan-1", victim(api, "p0"))
    evicting.evictor.submit("plan-1", victim(api, "p1"))
    assert received.wait(30)
    suspended_s[0] = 3600.0
    go_on.set()
    first, second = evicting.outcomes(2)
    evicting.evictor.stop()
    assert (first.kind, second.kind) == (OutcomeKind.ACCEPTED, OutcomeKind.UNREACHABLE)
    assert [request.path for request in api.sent("POST", "/eviction")] == [
        "/api/v1/namespaces/default/pods/p0/eviction"
    ]


def test_an_eviction_contains_uid_and_grace_period(api: ApiServer, evicting: Evicting) -> None:
    target = victim(api, "p0", grace_s=2.2)
    outcome = evicting.one(target)
    assert (outcome.kind, outcome.plan_id, outcome.pod_uid) == (OutcomeKind.ACCEPTED, "plan-1", target.pod.uid)
    (request,) = api.sent("POST", "/pods/p0/eviction")
    assert request.body["apiVersion"] == "policy/v1"
    assert request.body["deleteOptions"] == {"gracePeriodSeconds": 3, "preconditions": {"uid": target.pod.uid}}
    stored = api.get_pod("default", "p0")
    assert stored is not None
    assert stored["metadata"]["deletionGracePeriodSeconds"] == 3


def test_no_grace_period_becomes_zero_which_would_orphan_the_containers(api: ApiServer, evicting: Evicting) -> None:
    for name, method in (("p0", Method.EVICT), ("p1", Method.DELETE)):
        evicting.one(victim(api, name, grace_s=0.0, method=method))
    assert api.sent("POST", "/eviction")[0].body["deleteOptions"]["gracePeriodSeconds"] == 1
    assert api.sent("DELETE")[0].body["gracePeriodSeconds"] == 1


def test_a_new_pod_of_the_same_name_is_not_evicted(api: ApiServer, evicting: Evicting) -> None:
    for method in (Method.EVICT, Method.DELETE):
        outcome = evicting.one(victim(api, "p0", uid="00000000-0000-0000-0000-000000000000", method=method))
        assert outcome.kind is OutcomeKind.CONFLICT
    stored = api.get_pod("default", "p0")
    assert stored is not None
    assert "deletionTimestamp" not in stored["metadata"]


def test_a_pdb_blocks_and_its_retry_after_is_passed_on(api: ApiServer, evicting: Evicting) -> None:
    api.set_pdb("b", {"app": "a"}, allowed=0)
    blocked = evicting.one(victim(api, "p0"))
    assert (blocked.kind, blocked.retry_after_s, blocked.http_status) == (OutcomeKind.BLOCKED_BY_PDB, None, 429)
    assert "needs 2 healthy pods" in blocked.message
    api.set_pdb("b", {"app": "a"}, allowed=0, observed=False)
    assert evicting.one(victim(api, "p0")).retry_after_s == 10.0
    api.set_pdb("c", {"app": "a"}, allowed=1)
    assert evicting.one(victim(api, "p0")).kind is OutcomeKind.PDB_CONFLICT


def test_each_refusal_of_the_server_has_its_outcome(api: ApiServer, evicting: Evicting) -> None:
    assert evicting.one(victim(None, "gone")).kind is OutcomeKind.NOT_FOUND
    api.throttle(2, path="eviction")
    throttled = evicting.one(victim(api, "p0"))
    assert (throttled.kind, throttled.retry_after_s) == (OutcomeKind.TOO_MANY_REQUESTS, 2.0)
    api.throttle(0)
    api.forbid("create", "pods/eviction")
    assert evicting.one(victim(api, "p0")).kind is OutcomeKind.FORBIDDEN
    api.tokens.clear()
    assert evicting.one(victim(api, "p0")).kind is OutcomeKind.UNAUTHORIZED


def test_a_refused_request_is_not_repeated(api: ApiServer, evicting: Evicting) -> None:
    api.set_pdb("b", {"app": "a"}, allowed=0)
    evicting.one(victim(api, "p0"))
    assert len(api.sent("POST", "/eviction")) == 1


def test_a_pod_without_a_name_is_refused_before_it_is_sent(api: ApiServer, evicting: Evicting) -> None:
    target = victim(api, "p0")
    outcome = evicting.one(target._replace(pod=target.pod._replace(name=None)))
    assert outcome.kind is OutcomeKind.INVALID
    assert not api.sent("POST")


def test_a_delete_adds_disruption_target_first_and_ignores_pdbs(api: ApiServer, evicting: Evicting) -> None:
    api.set_pdb("b", {"app": "a"}, allowed=0)
    target = victim(api, "p0", method=Method.DELETE)
    assert evicting.one(target).kind is OutcomeKind.ACCEPTED
    assert [r.method for r in api.requests] == ["PATCH", "DELETE"]
    stored = api.get_pod("default", "p0")
    assert stored is not None
    (mark,) = [c for c in stored["status"]["conditions"] if c["type"] == "DisruptionTarget"]
    assert (mark["status"], mark["message"]) == ("True", target.message)
    assert stored["metadata"]["deletionGracePeriodSeconds"] == 1


def test_a_forbidden_disruption_target_does_not_stop_the_delete(api: ApiServer, evicting: Evicting) -> None:
    api.forbid("patch", "pods/status")
    assert evicting.one(victim(api, "p0", method=Method.DELETE)).kind is OutcomeKind.ACCEPTED
    assert evicting.one(victim(None, "gone", method=Method.DELETE)).kind is OutcomeKind.NOT_FOUND


def test_several_evictions_are_in_flight_at_once(api: ApiServer, evicting: Evicting) -> None:
    together = threading.Barrier(5)

    def wait_for_the_others(request: Request, done: bool) -> None:
        if not done and request.method == "POST":
            together.wait(60)

    api.at_request = wait_for_the_others
    for n in range(4):
        evicting.evictor.submit("plan", victim(api, f"p{n}"))
    assert evicting.evictor.in_flight == 4, "submit never waits"
    together.wait(60)
    assert {o.kind for o in evicting.outcomes(4)} == {OutcomeKind.ACCEPTED}
    assert evicting.evictor.in_flight == 0


def test_a_request_past_its_deadline_is_never_sent(tmp_path: Path) -> None:
    with ApiServer(pods=[pod("p0"), pod("p1")], linger_s=None) as api:
        late = threading.Event()
        evictor = EvictionSender(connected(api, tmp_path), wake=lambda: _wait(late), threads=1, timeout_s=0.5)
        evictor.submit("plan", victim(api, "p0"))
        evictor.submit("plan", victim(api, "p1"))
        threading.Event().wait(0.6)
        late.set()
        evictor.stop()
        assert [o.kind for o in evictor.take()][1:] == [OutcomeKind.UNREACHABLE]
        assert not api.sent("POST", "/p1/eviction")


def test_outcomes_arrive_in_time_during_a_partition_and_evictions_work_after_it(tmp_path: Path) -> None:
    with RawServer(lambda connection, number: server.over.wait()) as server:
        evicting = Evicting(connected(server, tmp_path), timeout_s=1.0)
        began = time.monotonic()
        for n in range(8):
            evicting.evictor.submit("plan", victim(None, f"p{n}"))
        kinds = {o.kind for o in evicting.outcomes(8)}
        assert kinds <= {OutcomeKind.TIMED_OUT, OutcomeKind.UNREACHABLE}
        assert OutcomeKind.TIMED_OUT in kinds
        assert time.monotonic() - began < 4
    assert evicting.one(victim(None, "p")).kind is OutcomeKind.UNREACHABLE


def test_evictions_use_the_prewarmed_connections(api: ApiServer, evicting: Evicting) -> None:
    evicting.evictor.prewarm()
    for thread in [t for t in threading.enumerate() if t.name == "prewarm"]:
        thread.join()
    assert len({r.connection for r in api.requests}) == 4
    evicting.evictor.prewarm()
    api.delay_s = 0.1
    for n in range(4):
        evicting.evictor.submit("plan", victim(api, f"p{n}"))
    evicting.outcomes(4)
    assert len(api.sent("GET", "/version")) == 4, "a second hint soon after costs nothing"
    warm = {r.connection for r in api.sent("GET")}
    assert {r.connection for r in api.sent("POST")} <= warm


def test_a_dry_run_is_checked_by_the_server_and_changes_nothing(api: ApiServer, tmp_path: Path) -> None:
    evicting = Evicting(connected(api, tmp_path), dry_run=True)
    for method in (Method.EVICT, Method.DELETE):
        assert evicting.one(victim(api, "p0", method=method)).kind is OutcomeKind.ACCEPTED
    stored = api.get_pod("default", "p0")
    assert stored is not None
    assert "deletionTimestamp" not in stored["metadata"]
    assert not [c for c in stored["status"]["conditions"] if c["type"] == "DisruptionTarget"]


@pytest.mark.parametrize(
    ("method", "kind"), [(Method.REQUEST, OutcomeKind.NOT_REQUESTED), (Method.KILL, OutcomeKind.UNREACHABLE)]
)
def test_a_victim_with_a_method_that_is_no_eviction_of_the_api_is_never_deleted(
    api: ApiServer, evicting: Evicting, method: Method, kind: OutcomeKind
) -> None:
    assert evicting.one(victim(api, "p0", method=method)).kind is kind
    assert not [request for request in api.requests if "/p0" in request.path]
