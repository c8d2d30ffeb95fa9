"""The whole path: a real process in a real pod-shaped cgroup, the real program, and an API server over HTTP.

A memory hog drives `nodeagent run` through threshold, grace, condition, eviction, recovery and clearing; what is
asserted are the requests that arrived.
"""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.apiserver import ApiServer, pod

HIERARCHIES = [Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup/freezer")]
MIB = 1 << 20

pytestmark = [
    pytest.mark.real_cgroup,
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(os.access(root / "cgroup.procs", os.W_OK) for root in HIERARCHIES),
        reason="needs root and writable cgroup v1 memory, pids and freezer hierarchies",
    ),
]

EATER = """
import sys
held = []
print("up", flush=True)
for line in sys.stdin:
    held.append(bytearray(b"x") * (int(line) << 20))
    print("ate", flush=True)
"""


class Kubepods:
    """A `kubepods` of the cgroupfs driver in a scratch parent, as a kubelet with `cgroupRoot` makes it."""

    def __init__(self, limit: int) -> None:
        self.root = f"nodeagent-test-{uuid.uuid4().hex[:12]}"
        self._made: list[Path] = []
        for hierarchy in HIERARCHIES:
            self._make(hierarchy / self.root / "kubepods" / "burstable")
            self._make(hierarchy / self.root / "kubepods" / "besteffort")
        (HIERARCHIES[0] / self.root / "kubepods" / "memory.limit_in_bytes").write_text(str(limit))
        self._processes: dict[str, subprocess.Popen[str]] = {}

    def _make(self, directory: Path) -> None:
        missing = [parent for parent in (directory, *directory.parents) if not parent.exists()]
        for each in reversed(missing):
            each.mkdir()
            self._made.append(each)

    def start(self, uid: str, *, qos: str) -> None:
        """A pod with one container and one process in it."""
        process = subprocess.Popen(
            [sys.executable, "-c", EATER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for hierarchy in HIERARCHIES:
            container = self._pod(hierarchy, uid, qos) / uuid.uuid5(uuid.NAMESPACE_DNS, uid).hex.ljust(64, "0")
            self._make(container)
            (container / "cgroup.procs").write_text(str(process.pid))
        self._processes[uid] = process
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"

    def eat(self, uid: str, mib: int, *, to_the_end: bool = True) -> None:
        process = self._processes[uid]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{mib}\n")
        process.stdin.flush()
        if to_the_end:
            assert process.stdout.readline() == "ate\n"

    def frozen(self, uid: str, *, qos: str) -> bool:
        return (self._pod(HIERARCHIES[2], uid, qos) / "freezer.state").read_text().strip() != "THAWED"

    def running(self, uid: str) -> bool:
        return self._processes[uid].poll() is None

    def kill(self, uid: str) -> None:
        """What a kubelet does with a terminating pod: end its processes, remove its cgroups."""
        process = self._processes.pop(uid)
        process.kill()
        process.communicate()
        for directory in [each for each in reversed(self._made) if f"pod{uid}" in each.parts]:
            _remove(directory)
            self._made.remove(directory)
        for directory in [each for each in reversed(self._made) if f"pod{uid}" in str(each)]:
            _remove(directory)
            self._made.remove(directory)

    def close(self) -> None:
        for uid in list(self._processes):
            self.kill(uid)
        for directory in reversed(self._made):
            _remove(directory)

    def _pod(self, hierarchy: Path, uid: str, qos: str) -> Path:
        return hierarchy / self.root / "kubepods" / qos / f"pod{uid}"


def _remove(directory: Path) -> None:
    deadline = time.monotonic() + 20
    while directory.exists():
        assert time.monotonic() < deadline, f"{directory} stays busy"
        try:
            directory.rmdir()
        except OSError:
            os.sched_yield()


class Run:
    """`nodeagent run` as a process, with its log."""

    def __init__(self, *arguments: str, log: Path) -> None:
        self._log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "nodeagent", "run", *arguments], stdout=file, stderr=subprocess.STDOUT
            )

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._log.read_text().splitlines() if line.startswith("{")]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)


HOG, CHILL = str(uuid.uuid4()), str(uuid.uuid4())


@pytest.fixture
def kubepods() -> Iterator[Kubepods]:
    made = Kubepods(limit=600 * MIB)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def api(kubepods: Kubepods) -> Iterator[ApiServer]:
    pods = [
        pod("hog", uid=HOG, owner=("ReplicaSet", "hog"), qos="Burstable", requests={"memory": "50Mi"}, grace=7),
        pod("chill", uid=CHILL, owner=("ReplicaSet", "chill"), qos="BestEffort"),
    ]
    with ApiServer(node="lab-node", pods=pods, linger_s=None) as server:
        yield server


def _configuration(tmp_path: Path, kubepods: Kubepods, **changes: object) -> Path:
    configuration: dict[str, object] = {
        "apiVersion": "nodeagent.io/v1alpha1",
        "kind": "NodeAgentConfiguration",
        "mode": "enforce",
        "evictionHard": {},
        "evictionSoft": {"allocatableMemory.available": "300Mi"},
        "evictionSoftGracePeriod": {"allocatableMemory.available": "2s"},
        "evictionPressureTransitionPeriod": "2s",
        "sampling": {"interval": "200ms", "cgroupRoot": f"/{kubepods.root}"},
        "protection": {"minimumAge": "0s"},
        "stateDir": str(tmp_path / "state"),
        "logging": {"format": "json"},
        **changes,
    }
    path = tmp_path / "nodeagent.yaml"
    path.write_text(json.dumps(configuration))  # JSON is YAML
    return path


@pytest.fixture
def run(tmp_path: Path, kubepods: Kubepods, api: ApiServer) -> Iterator[Callable[..., Run]]:
    started: list[Run] = []

    def start(*arguments: str, **changes: object) -> Run:
        config = _configuration(tmp_path, kubepods, **changes)
        kubeconfig = api.kubeconfig(tmp_path / "kubeconfig")
        log = tmp_path / f"log-{len(started)}"
        common = ("--config", str(config), "--kubeconfig", str(kubeconfig), "--node-name", "lab-node")
        started.append(Run(*common, *arguments, log=log))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()


def _says(api: ApiServer, kind: str, status: str) -> bool:
    found = api.condition(kind)
    return found is not None and found["status"] == status


def test_a_memory_hog_is_evicted_after_its_grace_and_the_conditions_follow(
    kubepods: Kubepods, api: ApiServer, run: Callable[..., Run]
) -> None:
    kubepods.start(HOG, qos="burstable")
    kubepods.start(CHILL, qos="besteffort")
    kubepods.eat(CHILL, 5)
    evicted_at: list[float] = []

    def kubelet(entry: dict[str, Any], _body: dict[str, Any]) -> None:
        evicted_at.append(time.monotonic())
        assert entry["metadata"]["name"] == "hog"

    api.on_eviction = kubelet
    agent = run()
    assert api.wait_for(lambda: _says(api, "NodeAgentMemoryPressure", "False"), 30), agent.events()

    crossed_at = time.monotonic()
    kubepods.eat(HOG, 400)
    assert api.wait_for(lambda: _says(api, "MemoryPressure", "True"), 20), agent.events()
    assert _says(api, "NodeAgentMemoryPressure", "True")
    assert not evicted_at, "the condition is published before the grace is over"
    assert api.wait_for(lambda: evicted_at, 20), agent.events()
    assert evicted_at[0] - crossed_at >= 2.0, "a soft threshold waits for its grace"
    [request] = api.sent("POST", "/eviction")
    assert request.path == "/api/v1/namespaces/default/pods/hog/eviction"
    assert request.body["deleteOptions"] == {"gracePeriodSeconds": 7, "preconditions": {"uid": HOG}}

    kubepods.kill(HOG)
    api.delete_pod("default", "hog")
    assert api.wait_for(lambda: _says(api, "MemoryPressure", "False"), 30), agent.events()
    assert api.wait_for(lambda: _says(api, "NodeAgentMemoryPressure", "False"), 30)
    assert agent.stop() == 0
    assert api.condition("NodeAgentMemoryPressure") is None, "what is ours is taken back on a clean exit"
    assert len(api.sent("POST", "/eviction")) == 1
    told = [event["event"] for event in agent.events()]
    assert "evicting" in told
    assert "eviction accepted" in told


def test_a_hard_threshold_does_not_wait_and_asks_for_a_short_grace(
    kubepods: Kubepods, api: ApiServer, run: Callable[..., Run]
) -> None:
    kubepods.start(HOG, qos="burstable")
    agent = run(evictionHard={"allocatableMemory.available": "300Mi"}, evictionSoft={}, evictionSoftGracePeriod={})
    assert api.wait_for(lambda: _says(api, "NodeAgentMemoryPressure", "False"), 30), agent.events()
    kubepods.eat(HOG, 400)
    assert api.wait_for(lambda: api.sent("POST", "/eviction"), 20), agent.events()
    [request] = api.sent("POST", "/eviction")
    assert request.body["deleteOptions"]["gracePeriodSeconds"] == 1
    assert agent.stop() == 0


def test_a_dry_run_tells_what_it_would_do_and_sends_nothing(
    kubepods: Kubepods, api: ApiServer, run: Callable[..., Run]
) -> None:
    kubepods.start(HOG, qos="burstable")
    kubepods.eat(HOG, 400)
    agent = run("--dry-run")
    deadline = time.monotonic() + 30
    while not any(event["event"] == "would evict" for event in agent.events()):
        assert time.monotonic() < deadline, agent.events()
        assert agent.process.poll() is None, agent.events()
        os.sched_yield()
    assert agent.stop() == 0
    assert not api.sent("POST", "/eviction")
    assert not api.sent("PATCH")
    assert not api.sent("DELETE")


def test_without_pressure_nobody_is_touched(kubepods: Kubepods, api: ApiServer, run: Callable[..., Run]) -> None:
    kubepods.start(HOG, qos="burstable")
    kubepods.eat(HOG, 100)
    agent = run()
    assert api.wait_for(lambda: _says(api, "NodeAgentMemoryPressure", "False"), 30), agent.events()
    assert agent.stop() == 0
    assert not api.sent("POST", "/eviction")
    assert not api.sent("DELETE")


def test_a_budget_that_refuses_is_respected_and_told(
    kubepods: Kubepods, api: ApiServer, run: Callable[..., Run]
) -> None:
    api.modify_pod("default", "hog", lambda entry: entry["metadata"].update(labels={"app": "hog"}))
    api.set_pdb("hog", {"app": "hog"}, allowed=0)
    kubepods.start(HOG, qos="burstable")
    kubepods.eat(HOG, 400)
    agent = run()
    deadline = time.monotonic() + 30
    while not any(event["event"] == "eviction blocked-by-budget" for event in agent.events()):
        assert time.monotonic() < deadline, agent.events()
        os.sched_yield()
    assert agent.stop() == 0
    assert api.get_pod("default", "hog") is not None
    assert not api.sent("DELETE")


HARD: dict[str, object] = {
    "evictionHard": {"allocatableMemory.available": "300Mi"},
    "evictionSoft": {},
    "evictionSoftGracePeriod": {},
}


def test_a_braked_victim_stands_still_when_its_eviction_is_asked_for_and_a_hard_kill_ends_it(
    kubepods: Kubepods, api: ApiServer, run: Callable[..., Run]
) -> None:
    kubepods.start(HOG, qos="burstable")
    frozen_when_asked: list[bool] = []
    api.on_eviction = lambda _entry, _body: frozen_when_asked.append(kubepods.frozen(HOG, qos="burstable"))
    agent = run(**HARD, escalation={"brake": "freeze", "hardKill": "cgroup"})
    assert api.wait_for(lambda: _says(api, "NodeAgentMemoryPressure", "False"), 30), agent.events()
    kubepods.eat(HOG, 400, to_the_end=False)
    assert api.wait_for(lambda: frozen_when_asked, 20), agent.events()
    _until(lambda: not kubepods.running(HOG), "the victim has ended")
    assert frozen_when_asked == [True]
    assert agent.stop() == 0


def test_a_victim_whose_eviction_is_refused_is_let_go(
    kubepods: Kubepods, api: ApiServer, run: Callable[..., Run]
) -> None:
    api.modify_pod("default", "hog", lambda entry: entry["metadata"].update(labels={"app": "hog"}))
    api.set_pdb("hog", {"app": "hog"}, allowed=0)
    kubepods.start(HOG, qos="burstable")
    kubepods.eat(HOG, 400)
    agent = run(**HARD, escalation={"brake": "freeze", "brakeDeadline": "10m"})
    _until(lambda: any(event["event"] == "eviction blocked-by-budget" for event in agent.events()), "the refusal")
    _until(lambda: not kubepods.frozen(HOG, qos="burstable"), "the pod is let go")
    assert kubepods.running(HOG)
    assert agent.stop() == 0


def test_an_agent_killed_while_it_holds_a_pod_lets_it_go_after_a_restart_and_evicts_it_once(
    kubepods: Kubepods, api: ApiServer, run: Callable[..., Run]
) -> None:
    api.delay_s = 2.0  # the request hangs in the server while the agent dies
    kubepods.start(HOG, qos="burstable")
    kubepods.eat(HOG, 400)
    changes: dict[str, Any] = {**HARD, "escalation": {"brake": "freeze", "brakeDeadline": "10m"}}
    first = run(**changes)
    _until(lambda: kubepods.frozen(HOG, qos="burstable"), "the pod is held")
    first.process.kill()
    first.process.wait()
    assert kubepods.frozen(HOG, qos="burstable")
    api.delay_s = 0.0
    second = run(**changes)
    _until(lambda: not kubepods.frozen(HOG, qos="burstable"), "the pod is let go")
    _until(lambda: any(event["event"] == "state" for event in second.events()), "the state is told")
    [state] = [event for event in second.events() if event["event"] == "state"]
    assert state["trust"] == "restored"
    assert second.stop() == 0


def test_budgets_hold_across_kill_minus_nine(kubepods: Kubepods, api: ApiServer, run: Callable[..., Run]) -> None:
    """One eviction an hour is allowed; three processes, each killed right after its request, must not make two."""
    kubepods.start(HOG, qos="burstable")
    kubepods.eat(HOG, 400)
    once = {"burst": 1, "perHour": 1}
    changes: dict[str, Any] = {**HARD, "budgets": {"node": once, "namespace": once, "owner": once, "signal": once}}
    first = run(**changes)
    assert api.wait_for(lambda: api.sent("POST", "/eviction"), 30), first.events()
    first.process.kill()
    first.process.wait()
    for _ in range(2):
        again = run(**changes)
        _until(lambda again=again: any(e["event"] == "not evicting" for e in again.events()), "a refusal")  # type: ignore[misc]
        again.process.kill()
        again.process.wait()
    assert len(api.sent("POST", "/eviction")) == 1


def _until(condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"never seen: {what}"
        os.sched_yield()
