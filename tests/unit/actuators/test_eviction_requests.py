"""EvictionRequests against the double: discovered, made, read and withdrawn, and every answer becomes its outcome."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.actuators.eviction_requests import EvictionRequests
from nodeagent.kube.backoff import RetryBackoff
from nodeagent.kube.credentials import find_credentials
from nodeagent.kube.transport import connect
from nodeagent.model import EvictionRequestOrder, Method, Outcome, OutcomeKind, Victim
from nodeagent.runtime.clock import boottime
from tests.fake_kube import Answer, ApiServer, Request, pod
from tests.fake_kube import eviction_requests as double
from tests.support.victims import victim

NAMED = pytest.mark.parametrize("field", ["requester", "requesterName"])
"""As released in Kubernetes 1.37, and as in the KEP."""


class Requesting:
    """A worker and its outcomes."""

    def __init__(self, api: ApiServer, tmp_path: Path, **options: Any) -> None:
        self.api = api
        self._arrived = threading.Condition()
        settings: dict[str, Any] = {
            "poll_s": 0.05,
            "make_backoff": lambda: RetryBackoff(first_s=0.02, last_s=0.05),
            "timeout_s": 5.0,
        }
        transport = connect(find_credentials(str(api.kubeconfig(tmp_path / "kubeconfig"))))
        self.worker = EvictionRequests(transport, wake=self._wake, **(settings | options))
        self.worker.start()

    def _wake(self) -> None:
        with self._arrived:
            self._arrived.notify_all()

    def wait_for(self, condition: Callable[[], Any], timeout_s: float = 20.0) -> Any:
        until = time.monotonic() + timeout_s
        while not (result := condition()):
            assert time.monotonic() < until
            with self._arrived:
                self._arrived.wait(0.02)
        return result

    def outcome(self) -> Outcome:
        outcomes: list[Outcome] = self.wait_for(lambda: list(self.worker.take()))
        [one] = outcomes
        return one

    def make(self, wanted: Victim, plan_id: str = "plan-1") -> Outcome:
        self.worker.submit(plan_id, wanted)
        return self.outcome()

    def follow(self, wanted: Victim, *, withdraw: bool = False, plan_id: str = "plan-1") -> None:
        order = EvictionRequestOrder(plan_id, wanted.pod.uid, wanted.pod.namespace or "", withdraw=withdraw)
        self.worker.follow([order])


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer(pods=[pod("p0"), pod("p1")], linger_s=None) as server:
        server.eviction_requests = "requester"
        yield server


@pytest.fixture
def requesting(api: ApiServer, tmp_path: Path) -> Iterator[Requesting]:
    requesting = Requesting(api, tmp_path)
    yield requesting
    requesting.worker.stop()


@pytest.fixture
def chosen(api: ApiServer) -> Victim:
    return victim(api, "p0")._replace(method=Method.REQUEST, message="low on memory")


def sent(api: ApiServer, method: str) -> list[Request]:
    return [each for each in api.sent(method) if each.path.startswith(double.ROOT)]


def failing(status: int, method: str, *, times: int = 1000) -> Callable[[Request], Answer | None]:
    """So many answers of this status to requests with this method, as a passing fault gives."""
    left = [times]

    def instead(request: Request) -> Answer | None:
        if request.method != method or not request.path.startswith(f"{double.ROOT}/namespaces") or not left[0]:
            return None
        left[0] -= 1
        body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "a fault", "code": status}
        return Answer(status, body)

    return instead


# --- discovery -------------------------------------------------------------------------------------------------------


def test_the_resource_is_discovered_once_and_not_in_every_sync(requesting: Requesting, chosen: Victim) -> None:
    requesting.wait_for(lambda: requesting.worker.served)
    requesting.make(chosen)
    requesting.follow(chosen)
    time.sleep(0.3)
    assert len([each for each in sent(requesting.api, "GET") if each.path == double.ROOT]) == 1
    assert requesting.worker.reason == ""


def test_where_it_is_not_served_the_reason_tells_so(api: ApiServer, tmp_path: Path) -> None:
    api.eviction_requests = ""
    requesting = Requesting(api, tmp_path)
    reason = requesting.wait_for(lambda: requesting.worker.reason)
    requesting.worker.stop()
    assert not requesting.worker.served
    assert reason == (
        "the API server serves no evictionrequests in /apis/lifecycle.k8s.io/v1alpha1: the Eviction API is used"
    )


def test_a_group_without_the_resource_does_not_serve_it(api: ApiServer, tmp_path: Path) -> None:
    resources = {"kind": "APIResourceList", "apiVersion": "v1", "resources": [{"name": "evictions"}]}
    api.instead = lambda request: Answer(200, resources) if request.path == double.ROOT else None
    requesting = Requesting(api, tmp_path)
    requesting.wait_for(lambda: requesting.worker.reason)
    requesting.worker.stop()
    assert not requesting.worker.served


def test_a_discovery_that_fails_is_repeated(api: ApiServer, tmp_path: Path) -> None:
    left = [2]

    def instead(request: Request) -> Answer | None:
        if request.path == double.ROOT and left[0]:
            left[0] -= 1
            return Answer(503, b"no upstream", "text/html")
        return None

    api.instead = instead
    requesting = Requesting(api, tmp_path)
    requesting.wait_for(lambda: requesting.worker.served)
    requesting.worker.stop()


def test_when_it_is_no_longer_served_the_next_request_shows_it(requesting: Requesting, chosen: Victim) -> None:
    """A feature gate was switched off: 404 without a Status."""
    requesting.wait_for(lambda: requesting.worker.served)
    requesting.api.eviction_requests = ""
    assert requesting.make(chosen).kind is OutcomeKind.NOT_REQUESTED
    requesting.wait_for(lambda: not requesting.worker.served)


# --- creation --------------------------------------------------------------------------------------------------------


@NAMED
def test_the_request_names_the_pod_its_uid_and_the_requester(
    requesting: Requesting, chosen: Victim, field: str
) -> None:
    requesting.api.eviction_requests = field
    outcome = requesting.make(chosen)
    assert (outcome.kind, outcome.plan_id, outcome.pod_uid) == (OutcomeKind.REQUESTED, "plan-1", chosen.pod.uid)
    stored = double.of_pod(requesting.api, chosen.pod.uid)
    assert stored is not None
    target = {"pod": {"name": "p0", "uid": chosen.pod.uid}}
    assert stored["spec"] == {"target": target, field: "nodeagent.io/nodeagent", "intent": "Eviction"}
    metadata = stored["metadata"]
    assert metadata["name"] == f"nodeagent-{chosen.pod.uid}"
    assert metadata["annotations"] == {"nodeagent.io/plan": "plan-1", "nodeagent.io/message": "low on memory"}
    owner = {"apiVersion": "v1", "kind": "Pod", "name": "p0", "uid": chosen.pod.uid}
    assert metadata["ownerReferences"] == [owner], "the API server removes it with the pod"
    assert not requesting.api.sent("POST", "/eviction")


@pytest.mark.parametrize("status", [400, 401, 403, 409, 422, 429])
def test_a_refusal_means_that_nothing_was_requested(requesting: Requesting, chosen: Victim, status: int) -> None:
    requesting.api.instead = failing(status, "POST")
    outcome = requesting.make(chosen)
    assert outcome.kind is OutcomeKind.NOT_REQUESTED
    assert len(sent(requesting.api, "POST")) == 1


def test_what_the_types_do_not_allow_is_refused(requesting: Requesting, chosen: Victim) -> None:
    """Static pods have UIDs that are no UUIDs; the policy never chooses one."""
    outcome = requesting.make(chosen._replace(pod=chosen.pod._replace(uid="abc")))
    assert outcome.kind is OutcomeKind.NOT_REQUESTED
    assert "spec.target.pod.uid" in outcome.message


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_a_server_error_may_hide_a_request(requesting: Requesting, chosen: Victim, status: int) -> None:
    requesting.api.instead = failing(status, "POST")
    assert requesting.make(chosen).kind is OutcomeKind.REQUEST_UNCERTAIN


def test_a_page_of_a_proxy_proves_nothing(requesting: Requesting, chosen: Victim) -> None:
    requesting.api.instead = lambda r: Answer(403, b"<html>", "text/html") if r.method == "POST" else None
    assert requesting.make(chosen).kind is OutcomeKind.REQUEST_UNCERTAIN


def test_a_time_out_may_hide_a_request_and_the_next_read_finds_it(api: ApiServer, tmp_path: Path) -> None:
    requesting = Requesting(api, tmp_path, timeout_s=0.3)
    chosen = victim(api, "p0")

    def hold(request: Request, done: bool) -> None:
        if done and request.method == "POST":
            time.sleep(0.8)

    api.at_request = hold
    assert requesting.make(chosen).kind is OutcomeKind.REQUEST_UNCERTAIN
    requesting.follow(chosen)
    assert requesting.outcome().kind is OutcomeKind.REQUESTED
    requesting.worker.stop()


def test_a_time_out_that_made_nothing_ends_the_request(requesting: Requesting, chosen: Victim) -> None:
    requesting.api.instead = failing(500, "POST")
    requesting.make(chosen)
    requesting.follow(chosen)
    outcome = requesting.outcome()
    assert (outcome.kind, outcome.message) == (
        OutcomeKind.REQUEST_FAILED,
        "the EvictionRequest does not exist any more",
    )


def test_an_answer_without_the_object_proves_nothing(requesting: Requesting, chosen: Victim) -> None:
    requesting.api.instead = answering(Answer(201, ODD), "POST")
    assert requesting.make(chosen).kind is OutcomeKind.REQUEST_UNCERTAIN


@pytest.mark.parametrize("status", [403, 404, 503])
def test_an_object_of_its_name_that_cannot_be_read_may_be_an_open_request(
    requesting: Requesting, chosen: Victim, status: int
) -> None:
    requesting.make(chosen)
    requesting.follow(chosen)
    not_served = answering(double.not_served(), "GET")  # as a proxy's: no Status
    requesting.api.instead = not_served if status == 404 else failing(status, "GET")
    assert requesting.make(chosen, "plan-2").kind is OutcomeKind.REQUEST_UNCERTAIN
    time.sleep(0.3)
    assert requesting.worker.take() == ()


def test_a_request_that_waited_too_long_is_never_sent(api: ApiServer, tmp_path: Path) -> None:
    suspended_s = [0.0]
    requesting = Requesting(api, tmp_path, clock=lambda: boottime() + suspended_s[0])
    requesting.wait_for(lambda: requesting.worker.served)
    received, go_on = threading.Event(), threading.Event()

    def hold(request: Request, done: bool) -> None:
        if request.method == "POST" and not done and not received.is_set():
            received.set()
            go_on.wait(20)

    api.at_request = hold
    requesting.worker.submit("plan-1", victim(api, "p0"))
    requesting.worker.submit("plan-1", victim(api, "p1"))
    assert received.wait(20)
    suspended_s[0] = 3600.0
    go_on.set()
    found: list[Outcome] = []

    def complete() -> bool:
        found.extend(requesting.worker.take())
        return len(found) == 2

    requesting.wait_for(complete)
    requesting.worker.stop()
    assert [each.kind for each in found] == [OutcomeKind.REQUESTED, OutcomeKind.NOT_REQUESTED]
    assert len(sent(api, "POST")) == 1


def test_an_unreachable_server_gets_no_request(api: ApiServer, tmp_path: Path) -> None:
    requesting = Requesting(api, tmp_path)
    requesting.wait_for(lambda: requesting.worker.served)
    chosen = victim(api, "p0")
    api.go_down()
    assert requesting.make(chosen).kind is OutcomeKind.NOT_REQUESTED
    requesting.worker.stop()
    api.come_back()


def test_an_earlier_request_of_this_agent_is_taken_up_again(requesting: Requesting, chosen: Victim) -> None:
    requesting.make(chosen)
    assert requesting.make(chosen, "plan-2").kind is OutcomeKind.REQUESTED
    requesting.follow(chosen, withdraw=True)
    assert requesting.outcome().kind is OutcomeKind.REQUEST_WITHDRAWN
    outcome = requesting.make(chosen, "plan-3")
    assert (outcome.kind, outcome.message) == (OutcomeKind.REQUESTED, "it existed already")
    stored = double.of_pod(requesting.api, chosen.pod.uid)
    assert stored is not None
    assert (stored["spec"]["intent"], stored["metadata"]["generation"]) == ("Eviction", 3)


def test_another_object_of_that_name_is_left_alone(requesting: Requesting, chosen: Victim) -> None:
    foreign = {
        "metadata": {"name": f"nodeagent-{chosen.pod.uid}", "namespace": "default", "generation": 1},
        "spec": {
            "target": {"pod": {"name": "p0", "uid": chosen.pod.uid}},
            "requester": "example.com/other",
            "intent": "Withdrawn",
        },
        "status": {},
    }
    requesting.api.store.put("evictionrequests", foreign, "ADDED")
    assert requesting.make(chosen).kind is OutcomeKind.NOT_REQUESTED
    requesting.follow(chosen, withdraw=True)
    assert requesting.outcome().kind is OutcomeKind.REQUEST_WITHDRAWN
    stored = double.of_pod(requesting.api, chosen.pod.uid)
    assert stored is not None
    assert stored["spec"] == foreign["spec"]


# --- reading ---------------------------------------------------------------------------------------------------------


def test_an_open_request_is_read_and_gives_no_second_outcome(requesting: Requesting, chosen: Victim) -> None:
    requesting.make(chosen)
    requesting.follow(chosen)
    requesting.wait_for(lambda: len(sent(requesting.api, "GET")) > 3)
    assert requesting.worker.take() == ()
    requesting.worker.follow([])
    time.sleep(0.1)
    before = len(sent(requesting.api, "GET"))
    time.sleep(0.3)
    assert len(sent(requesting.api, "GET")) == before, "nothing is followed any more"


def test_a_failed_request_is_told_once_with_its_reason(requesting: Requesting, chosen: Victim) -> None:
    requesting.make(chosen)
    requesting.follow(chosen)
    double.set_condition(requesting.api, chosen.pod.uid, "Failed", "NoFurtherResponder", "nobody evicts it")
    outcome = requesting.outcome()
    assert (outcome.kind, outcome.message) == (OutcomeKind.REQUEST_FAILED, "NoFurtherResponder: nobody evicts it")
    requesting.follow(chosen)
    time.sleep(0.3)
    assert requesting.worker.take() == ()


def test_a_condition_of_an_earlier_intent_does_not_count(requesting: Requesting, chosen: Victim) -> None:
    """`CanceledDueToNoRequesters` of the withdrawal before."""
    requesting.make(chosen)
    requesting.follow(chosen, withdraw=True)
    requesting.outcome()
    double.set_condition(requesting.api, chosen.pod.uid, "Failed", "CanceledDueToNoRequesters")
    requesting.make(chosen, "plan-2")
    requesting.follow(chosen, plan_id="plan-2")
    time.sleep(0.4)
    assert requesting.worker.take() == ()
    double.set_condition(requesting.api, chosen.pod.uid, "Failed", "NoFurtherResponder")
    assert requesting.outcome().kind is OutcomeKind.REQUEST_FAILED


def test_an_evicted_target_is_no_failure(requesting: Requesting, chosen: Victim) -> None:
    requesting.make(chosen)
    requesting.follow(chosen)
    double.set_condition(requesting.api, chosen.pod.uid, "TargetEvicted", "PodDeleted")
    time.sleep(0.3)
    assert requesting.worker.take() == ()


def test_a_request_that_another_client_deletes_or_withdraws_has_failed(requesting: Requesting, chosen: Victim) -> None:
    requesting.make(chosen)
    requesting.follow(chosen)
    double.delete(requesting.api, chosen.pod.uid)
    assert requesting.outcome().message == "the EvictionRequest does not exist any more"
    requesting.make(chosen, "plan-2")
    requesting.follow(chosen, plan_id="plan-2")
    with requesting.api.store.changed:
        [stored] = requesting.api.store.objects["evictionrequests"].values()
        stored["spec"]["intent"] = "Withdrawn"
    assert requesting.outcome().message == "its intent is 'Withdrawn' now"


def test_a_read_that_fails_is_repeated_and_ends_nothing(requesting: Requesting, chosen: Victim) -> None:
    requesting.make(chosen)
    requesting.api.instead = failing(503, "GET", times=3)
    requesting.follow(chosen)
    requesting.wait_for(lambda: len(sent(requesting.api, "GET")) > 5)
    assert requesting.worker.take() == ()


# --- withdrawal ------------------------------------------------------------------------------------------------------


@NAMED
def test_a_withdrawal_changes_the_intent_alone(requesting: Requesting, chosen: Victim, field: str) -> None:
    requesting.api.eviction_requests = field
    requesting.make(chosen)
    before = double.of_pod(requesting.api, chosen.pod.uid)
    assert before is not None
    requesting.follow(chosen, withdraw=True)
    assert requesting.outcome().kind is OutcomeKind.REQUEST_WITHDRAWN
    stored = double.of_pod(requesting.api, chosen.pod.uid)
    assert stored is not None
    assert stored["spec"] == {**before["spec"], "intent": "Withdrawn"}


def test_a_withdrawal_is_repeated_until_it_is_confirmed(requesting: Requesting, chosen: Victim) -> None:
    requesting.make(chosen)
    for status in (500, 403, 429, 503):
        requesting.api.instead = failing(status, "PATCH", times=2)
        requesting.follow(chosen, withdraw=True, plan_id=f"plan-{status}")
        assert requesting.outcome().kind is OutcomeKind.REQUEST_WITHDRAWN
    assert len(sent(requesting.api, "PATCH")) == 4 * 3


def test_a_withdrawal_of_a_request_that_is_gone_is_done(requesting: Requesting, chosen: Victim) -> None:
    requesting.make(chosen)
    double.delete(requesting.api, chosen.pod.uid)
    requesting.follow(chosen, withdraw=True)
    assert requesting.outcome().kind is OutcomeKind.REQUEST_WITHDRAWN


def answering(answer: Answer, method: str, path: str = f"{double.ROOT}/namespaces") -> Callable[..., Answer | None]:
    return lambda r: answer if r.method == method and r.path.startswith(path) else None


ODD = {"kind": "Something", "apiVersion": "v1"}


@pytest.mark.parametrize(
    "answer",
    [Answer(200, ODD), Answer(200, {**ODD, "spec": {"intent": "Withdrawn"}}), double.not_served(), Answer(422, ODD)],
    ids=["no object of the type", "of another requester", "group not served", "422, though it is this agent's"],
)
def test_no_odd_answer_confirms_a_withdrawal(requesting: Requesting, chosen: Victim, answer: Answer) -> None:
    requesting.make(chosen)
    requesting.api.instead = answering(answer, "PATCH")
    requesting.follow(chosen, withdraw=True)
    requesting.wait_for(lambda: len(sent(requesting.api, "PATCH")) > 2)
    assert requesting.worker.take() == ()
    requesting.wait_for(lambda: requesting.worker.reason)
    requesting.api.instead = None
    assert requesting.outcome().kind is OutcomeKind.REQUEST_WITHDRAWN
    requesting.wait_for(lambda: not requesting.worker.reason)


def test_a_request_that_is_made_after_its_answer_was_lost_is_withdrawn(requesting: Requesting, chosen: Victim) -> None:
    requesting.make(chosen)
    made = double.of_pod(requesting.api, chosen.pod.uid)
    assert made is not None
    double.delete(requesting.api, chosen.pod.uid)
    requesting.follow(chosen, withdraw=True, plan_id="plan-2")  # of a process that was killed before the answer
    requesting.wait_for(lambda: len(sent(requesting.api, "PATCH")) > 2)
    assert requesting.worker.take() == ()
    requesting.api.store.put("evictionrequests", made, "ADDED")
    assert requesting.outcome().kind is OutcomeKind.REQUEST_WITHDRAWN
    found = double.of_pod(requesting.api, chosen.pod.uid)
    assert found is not None
    assert found["spec"]["intent"] == "Withdrawn"


def test_a_request_that_never_was_made_is_awaited_for_a_minute(api: ApiServer, tmp_path: Path) -> None:
    later_s = [0.0]
    requesting = Requesting(api, tmp_path, clock=lambda: boottime() + later_s[0])
    requesting.follow(victim(api, "p0"), withdraw=True)
    requesting.wait_for(lambda: "may still be made" in requesting.worker.reason)
    later_s[0] = 60.0
    assert requesting.outcome().kind is OutcomeKind.REQUEST_WITHDRAWN
    requesting.worker.stop()


def test_neither_discovery_nor_another_request_that_fails_delays_a_withdrawal(api: ApiServer, tmp_path: Path) -> None:
    requesting = Requesting(api, tmp_path, make_backoff=lambda: RetryBackoff(first_s=600.0, last_s=600.0))
    requesting.wait_for(lambda: requesting.worker.served)
    first, second = victim(api, "p0"), victim(api, "p1")
    requesting.make(first)
    requesting.make(second)
    requesting.worker.stop()
    other = Requesting(api, tmp_path, make_backoff=lambda: RetryBackoff(first_s=600.0, last_s=600.0))
    api.instead = lambda r: Answer(500, ODD) if r.path == double.ROOT or first.pod.uid in r.path else None
    other.worker.follow([EvictionRequestOrder("plan-1", each.pod.uid, "default", True) for each in (first, second)])
    assert other.outcome().pod_uid == second.pod.uid
    other.worker.stop()


def test_an_order_that_becomes_a_withdrawal_is_carried_out_at_once(api: ApiServer, tmp_path: Path) -> None:
    requesting = Requesting(api, tmp_path, poll_s=600.0)
    chosen = victim(api, "p0")
    requesting.make(chosen)
    requesting.follow(chosen)
    requesting.follow(chosen, withdraw=True)
    assert requesting.outcome().kind is OutcomeKind.REQUEST_WITHDRAWN
    requesting.worker.stop()


def test_the_worker_stops_while_it_waits(api: ApiServer, tmp_path: Path) -> None:
    requesting = Requesting(api, tmp_path)
    requesting.wait_for(lambda: requesting.worker.served)
    began = time.monotonic()
    requesting.worker.stop()
    assert time.monotonic() - began < 2.0
