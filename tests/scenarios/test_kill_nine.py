"""An agent is killed at every step of the sync that acts, and the next one completes what was begun.

The steps are real: `strace` sends SIGKILL as the process enters the system call that the step begins with, or the API
server sends it while it has the request in hand. Whichever it was: one eviction at most, nothing left frozen, and what
was set on the Node is the next agent's to take back.
"""

import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.fake_kube import ApiServer, Request, pod
from tests.support.livenode import HARD, HIERARCHIES, Kubepods, Run, StartAgent, needs_cgroup_v1, until

pytestmark = [pytest.mark.real_cgroup, needs_cgroup_v1]

HOG, OTHERS = str(uuid.uuid4()), str(uuid.uuid4())
ACTING: dict[str, Any] = {
    **HARD,
    "escalation": {"brake": "freeze", "brakeDeadline": "10m", "hardKill": "cgroup"},
    "startup": {"freshSamples": 1},
}
"""With one fresh sample the first decision that sees the threshold crossed acts, and saves nothing before."""


@pytest.fixture
def api(kubepods: Kubepods) -> Iterator[ApiServer]:
    hog = pod("hog", uid=HOG, owner=("ReplicaSet", "hog"), qos="Burstable", requests={"memory": "50Mi"}, grace=7)
    with ApiServer(node="lab-node", pods=[hog], linger_s=None) as server:
        yield server


class Call(NamedTuple):
    """A system call on a file, by its number among those since the pod began to grow."""

    step: str
    name: str
    file: str
    frozen: bool
    """Whether the pod is, then."""
    number: int = 1
    brake: str = "freeze"


CALLS = (
    Call("the pod is marked", "setxattr", "pod", frozen=False),
    Call("the pod is held", "write", "freezer.state", frozen=False),
    Call("the state is opened", "openat", "state.new", frozen=True),
    Call("the state is written", "write", "state.new", frozen=True),
    Call("the state reaches the disk", "fsync", "state.new", frozen=True),
    Call("the new state takes the old one's place", "rename", "state.new", frozen=True),
    Call("the directory reaches the disk", "fsync", "directory", frozen=True),
    Call("the state of a victim that is not held is opened", "openat", "state.new", frozen=False, brake="none"),
    Call("the decision is recorded", "openat", "decisions.jsonl", frozen=True),
    Call("the pod is frozen to be ended", "write", "freezer.state", frozen=True, number=2),
    Call("its processes are signalled", "kill", "", frozen=True),
    Call("it is thawed to die", "write", "freezer.state", frozen=True, number=3),
    Call("its mark is taken away", "removexattr", "pod", frozen=False),
    Call("the processes of a pod that was not held are signalled", "kill", "", frozen=True, brake="none"),
)


class Sent(NamedTuple):
    """A request that reached the API server."""

    step: str
    method: str
    ending: str
    carried_out: bool
    mark: str = ""
    """To be found in the body."""


REQUESTS = (
    Sent("the conditions are about to change", "PATCH", "/status", carried_out=False, mark="HasInsufficient"),
    Sent("the conditions have changed", "PATCH", "/status", carried_out=True, mark="HasInsufficient"),
    Sent("the taint is up", "PATCH", "/nodes/lab-node", carried_out=True, mark="memory-pressure"),
    Sent("the node's Event is sent", "POST", "/events", carried_out=True, mark="EvictionThresholdMet"),
    Sent("the eviction gets lost", "POST", "/eviction", carried_out=False),
    Sent("the eviction is accepted and not answered", "POST", "/eviction", carried_out=True),
    Sent("the pod's Event is sent", "POST", "/events", carried_out=True, mark="The node was low on resource"),
)


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace (Debian: strace) is not installed")
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.step)
def test_an_agent_killed_as(
    call: Call, kubepods: Kubepods, api: ApiServer, start_agent: StartAgent, tmp_path: Path
) -> None:
    freezer = HIERARCHIES[2] / kubepods.root / "kubepods" / "burstable" / f"pod{HOG}" / "freezer.state"
    files = {"freezer.state": freezer, "pod": freezer.parent, "directory": tmp_path / "state", "": None}
    file = files.get(call.file, tmp_path / "state" / call.file)
    kubepods.start(HOG, qos="burstable")
    agent = _calm(api, start_agent, tmp_path, brake=call.brake)
    # It stands still until the pod has grown: otherwise the kill may come at the save of slow changes, every 10 s.
    agent.process.send_signal(signal.SIGSTOP)
    killer = _kill_at(call, file, agent.process.pid)
    try:
        kubepods.eat(HOG, 400)
        agent.process.send_signal(signal.SIGCONT)
        assert agent.process.wait(60) == -signal.SIGKILL, agent.events()
    finally:
        agent.kill()
        killer.communicate(timeout=40)
    assert kubepods.frozen(HOG, qos="burstable") is call.frozen
    _next_agent_pays(kubepods, api, start_agent)


@pytest.mark.parametrize("sent", REQUESTS, ids=lambda sent: sent.step)
def test_an_agent_killed_while(
    sent: Sent, kubepods: Kubepods, api: ApiServer, start_agent: StartAgent, tmp_path: Path
) -> None:
    kubepods.start(HOG, qos="burstable")
    agent = _calm(api, start_agent, tmp_path)

    def kill(request: Request, carried_out: bool) -> None:
        asked = (request.method, carried_out) == (sent.method, sent.carried_out)
        if asked and request.path.endswith(sent.ending) and sent.mark in str(request.body):
            api.at_request = None
            agent.kill()
            if not carried_out:
                raise ConnectionAbortedError

    api.at_request = kill
    kubepods.eat(HOG, 400, to_the_end=False)
    assert agent.process.wait(60) == -signal.SIGKILL, agent.events()
    _next_agent_pays(kubepods, api, start_agent)


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace (Debian: strace) is not installed")
@pytest.mark.parametrize("lost", [False, True], ids=["the state is there", "the state is lost"])
def test_an_agent_killed_in_the_middle_of_the_last_resort_leaves_nothing_frozen(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent, tmp_path: Path, lost: bool
) -> None:
    kubepods.start(HOG, qos="burstable")
    escalation = {"lastResort": "cgroupKill", "lastResortAfter": "1s"}
    agent = start_agent(**HARD, escalation=escalation)
    assert api.wait_for(lambda: _condition_is(api, "NodeAgentMemoryPressure", "False"), 30), agent.events()
    assert api.wait_for(lambda: api.watched("/api/v1/pods")), agent.events()
    killer = _kill_at(Call("", "kill", "", frozen=True), None, agent.process.pid)
    api.go_down()
    try:
        kubepods.eat(HOG, 400, to_the_end=False)
        assert agent.process.wait(60) == -signal.SIGKILL, agent.events()
    finally:
        agent.kill()
        killer.communicate(timeout=40)
    assert kubepods.frozen(HOG, qos="burstable")
    if lost:
        (tmp_path / "state" / "state").unlink()
    start_agent(**HARD, escalation=escalation)
    until(lambda: not kubepods.frozen(HOG, qos="burstable"), "the pod is let go")


@pytest.mark.parametrize("state", [b"not a state", None], ids=["corrupt", "lost"])
def test_a_pod_left_frozen_is_released_also_when_the_state_is(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent, tmp_path: Path, state: bytes | None
) -> None:
    """A pod that another program has frozen is not released."""
    api.delay_s = 2.0  # the request hangs in the server while the agent dies
    kubepods.start(OTHERS, qos="besteffort")
    kubepods.freeze(OTHERS)
    kubepods.start(HOG, qos="burstable")
    kubepods.eat(HOG, 400)
    agent = start_agent(**ACTING)
    until(lambda: kubepods.frozen(HOG, qos="burstable"), "the pod is held")
    agent.kill()
    (tmp_path / "state" / "state").unlink()
    if state is not None:
        (tmp_path / "state" / "state").write_bytes(state)
    agent = start_agent(**ACTING)
    until(lambda: not kubepods.frozen(HOG, qos="burstable"), "the pod is let go")
    assert [line["trust"] for line in agent.wait_for_log("state loaded")] == ["lost" if state is None else "corrupt"]
    until(lambda: "another program" in str(agent.events()), "the other one is logged")
    assert kubepods.frozen(OTHERS, qos="besteffort")


def test_a_grace_period_goes_on_although_no_agent_lives_to_its_end(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent
) -> None:
    grace_s = 15.0
    soft = {"evictionSoftGracePeriod": {"allocatableMemory.available": f"{grace_s:g}s"}}
    kubepods.start(HOG, qos="burstable")
    agent = start_agent(**soft)
    assert api.wait_for(lambda: _condition_is(api, "NodeAgentMemoryPressure", "False"), 30), agent.events()
    crossed_at = time.monotonic()
    kubepods.eat(HOG, 400)
    assert api.wait_for(lambda: _condition_is(api, "NodeAgentMemoryPressure", "True"), 30), agent.events()
    for lives_s in (10.0, 1.0):
        api.wait_for(lambda: _evictions(api), lives_s)
        agent.kill()
        agent = start_agent(**soft)
    assert api.wait_for(lambda: _evictions(api), 30), agent.events()
    late_s = _evictions(api)[0].at - crossed_at - grace_s
    assert late_s >= 0.0, "its whole grace period is granted"
    assert late_s < 9.0, "what the first agent had seen of it is not lost"
    assert agent.stop() == 0


def _calm(api: ApiServer, start_agent: StartAgent, directory: Path, *, brake: str = "freeze") -> Run:
    """An agent that has published its conditions and saved its state for the first time."""
    agent = start_agent(**{**ACTING, "escalation": {**ACTING["escalation"], "brake": brake}})
    assert api.wait_for(lambda: _condition_is(api, "NodeAgentMemoryPressure", "False"), 30), agent.events()
    until((directory / "state" / "state").exists, "the first state")
    waits_in = Path(f"/proc/{agent.process.pid}/wchan")
    until(lambda: "epoll" in waits_in.read_text() or "ep_poll" in waits_in.read_text(), "the end of the first save")
    return agent


def _kill_at(call: Call, file: Path | None, pid: int) -> "subprocess.Popen[bytes]":
    where = ("-P", str(file)) if file is not None else ()
    inject = f"inject={call.name}:signal=KILL:when={call.number}"
    command = ["strace", "-f", "-p", str(pid), "-o", os.devnull, *where, "-e", f"trace={call.name}", "-e", inject]
    killer = subprocess.Popen(command, stderr=subprocess.PIPE)
    assert killer.stderr is not None
    line = killer.stderr.readline()
    assert b"attached" in line, line
    return killer


def _next_agent_pays(kubepods: Kubepods, api: ApiServer, start_agent: StartAgent) -> None:
    """The pod runs on and is not terminating, as if the eviction had reached no server: nothing but what the dead agent
    wrote down keeps the next one from evicting it once more."""
    accepted = len(_evictions(api))
    if accepted:
        api.modify_pod("default", "hog", lambda entry: entry["metadata"].pop("deletionTimestamp"))
    agent = start_agent(**ACTING)
    until(lambda: not kubepods.frozen(HOG, qos="burstable"), "the pod is let go")
    until(lambda: agent.logged("not evicting") or len(_evictions(api)) > accepted or _over(kubepods, api), "a decision")
    assert [line["trust"] for line in agent.wait_for_log("state loaded")] == ["restored"]
    assert agent.stop() == 0
    assert len(_evictions(api)) <= 1
    until(lambda: not kubepods.frozen(HOG, qos="burstable"), "nothing is left frozen")
    for kind in ("MemoryPressure", "NodeAgentMemoryPressure"):
        assert not _condition_is(api, kind, "True")
    assert not [taint for taint in api.node()["spec"].get("taints", ()) if "nodeagent" in taint["key"]]


def _over(kubepods: Kubepods, api: ApiServer) -> bool:
    """The pod has died of what the dead agent had begun, and the next one has seen that."""
    return not kubepods.running(HOG) and _condition_is(api, "NodeAgentMemoryPressure", "False")


def _evictions(api: ApiServer) -> list[Request]:
    """Those that arrived whole: an agent killed in the middle of a request has sent none."""
    return [request for request in api.sent("POST", "/eviction") if isinstance(request.body, dict)]


def _condition_is(api: ApiServer, kind: str, status: str) -> bool:
    found = api.condition(kind)
    return found is not None and found["status"] == status
