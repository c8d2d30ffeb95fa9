"""A session that a reload replaces, or that the exit stops, at any step: nothing of it goes on, nothing is lost."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.actuators.cluster_session import ClusterSession
from nodeagent.actuators.conditions import OwnedCondition
from nodeagent.config.schema import Config, Mode
from nodeagent.kube.credentials import find_credentials
from nodeagent.kube.node_identity import Identity
from nodeagent.kube.transport import connect
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
