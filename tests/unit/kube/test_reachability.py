"""Since when the API server is unreachable: by unanswered requests, never by silence."""

import threading
from pathlib import Path

import pytest

from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.credentials import find_credentials
from nodeagent.kube.pod_watch import PodWatch
from nodeagent.kube.reachability import ApiReachability
from nodeagent.kube.transport import Transport, connect
from nodeagent.runtime.clock import boottime
from tests.fake_kube import ApiServer
from tests.support.rawserver import RawServer


def transport_to(server: ApiServer | RawServer, tmp_path: Path, *, timeout_s: float = 10.0) -> Transport:
    return connect(find_credentials(str(server.kubeconfig(tmp_path / "kubeconfig"))), request_timeout_s=timeout_s)


def ask(transport: Transport) -> None:
    transport.request("GET", "/version")


def test_a_server_without_requests_is_not_unreachable(tmp_path: Path) -> None:
    with ApiServer() as api:
        assert transport_to(api, tmp_path).reach.unreachable_since is None


def test_the_server_is_unreachable_from_the_first_unanswered_request_to_any_answer(tmp_path: Path) -> None:
    with ApiServer() as api:
        transport = transport_to(api, tmp_path)
        ask(transport)
        api.go_down()
        before = boottime()
        for _ in range(2):
            with pytest.raises(ApiError):
                ask(transport)
        first = transport.reach.unreachable_since
        assert first is not None
        assert first >= before
        with pytest.raises(ApiError):
            ask(transport)
        assert transport.reach.unreachable_since == first
        api.come_back()
        api.forbid("get", "nodes")
        with pytest.raises(ApiError, match="forbidden"):
            transport.request("GET", "/api/v1/nodes/lab-node")
        assert transport.reach.unreachable_since is None, "a refusal is an answer"


def test_a_server_that_accepts_and_never_answers_is_unreachable(tmp_path: Path) -> None:
    with RawServer(lambda _connection, _number: server.over.wait()) as server:
        transport = transport_to(server, tmp_path, timeout_s=0.3)
        with pytest.raises(ApiError):
            ask(transport)
        assert transport.reach.unreachable_since is not None


def test_one_lost_request_beside_an_answered_one_does_not_count() -> None:
    now = [0.0]
    reach = ApiReachability(lambda: now[0], boot=lambda: now[0])
    now[0] = 3.0
    reach.answered()
    now[0] = 5.0
    times = []
    for begun_at in (0.0, 3.5, 4.0):
        reach.unanswered(begun_at)
        times.append(reach.unreachable_since)
    assert times == [None, 3.5, 3.5]


def test_the_time_of_a_suspend_is_no_outage() -> None:
    awake_s, suspended_s = [100.0], [0.0]
    reach = ApiReachability(lambda: awake_s[0], boot=lambda: awake_s[0] + suspended_s[0])
    begun_at = reach.clock()
    awake_s[0], suspended_s[0] = 103.0, 3600.0
    reach.unanswered(begun_at)
    assert reach.unreachable_since == 100.0 + 3600.0, "lost for three seconds"
    awake_s[0], suspended_s[0] = 110.0, 7200.0
    assert reach.unreachable_since == 100.0 + 7200.0, "lost for ten"


def test_a_watch_on_which_nothing_happens_is_no_outage(tmp_path: Path) -> None:
    with ApiServer() as api:
        transport = transport_to(api, tmp_path)
        pods = PodWatch(transport, "lab-node", idle_s=0.4)
        pods.start()
        lost: list[float] = []
        for _ in range(6000):  # over several watches that ended for silence
            if (at := transport.reach.unreachable_since) is not None:
                lost.append(at)
            if len([r for r in api.requests if "watch" in r.query]) >= 4:
                break
            threading.Event().wait(0.01)
        assert len([r for r in api.requests if "watch" in r.query]) >= 4
        assert not lost
        pods.stop()
