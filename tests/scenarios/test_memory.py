"""The whole path: a real process in a real pod-shaped cgroup, the real program, and an API server over HTTP.

A memory hog drives `nodeagent run` through threshold, grace, condition, eviction, recovery and clearing; what is
asserted are the requests that arrived.
"""

import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nodeagent.analysis import simulation
from nodeagent.commands import cli
from nodeagent.config import load
from nodeagent.policy import engine, ranking
from nodeagent.records import status_file
from nodeagent.records.flight_recorder import Packer, plan_to_json, read_records
from nodeagent.records.recording import open_recording
from tests.fake_kube import Answer, ApiServer, RefusedError, Request, pod
from tests.support.livenode import HARD, Kubepods, StartAgent, needs_cgroup_v1, until

pytestmark = [pytest.mark.real_cgroup, needs_cgroup_v1]

HOG, CHILL = str(uuid.uuid4()), str(uuid.uuid4())


@pytest.fixture
def api(kubepods: Kubepods) -> Iterator[ApiServer]:
    pods = [
        pod("hog", uid=HOG, owner=("ReplicaSet", "hog"), qos="Burstable", requests={"memory": "50Mi"}, grace=7),
        pod("chill", uid=CHILL, owner=("ReplicaSet", "chill"), qos="BestEffort"),
    ]
    with ApiServer(node="lab-node", pods=pods, linger_s=None) as server:
        yield server


def _condition_is(api: ApiServer, kind: str, status: str) -> bool:
    found = api.condition(kind)
    return found is not None and found["status"] == status


def test_a_memory_hog_is_evicted_after_its_grace_and_the_conditions_follow(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent
) -> None:
    kubepods.start(HOG, qos="burstable")
    kubepods.start(CHILL, qos="besteffort")
    kubepods.eat(CHILL, 5)
    evicted_at: list[float] = []

    def kubelet(entry: dict[str, Any], _body: dict[str, Any]) -> None:
        evicted_at.append(time.monotonic())
        assert entry["metadata"]["name"] == "hog"

    api.on_eviction = kubelet
    agent = start_agent()
    assert api.wait_for(lambda: _condition_is(api, "NodeAgentMemoryPressure", "False"), 30), agent.events()

    crossed_at = time.monotonic()
    kubepods.eat(HOG, 400)
    assert api.wait_for(lambda: _condition_is(api, "MemoryPressure", "True"), 30), agent.events()
    assert _condition_is(api, "NodeAgentMemoryPressure", "True")
    published_at = min(r.at for r in api.sent("PATCH", "/status") if "'True'" in str(r.body))
    assert api.wait_for(lambda: evicted_at, 30), agent.events()
    assert published_at < evicted_at[0], "the condition is published before the grace is over"
    assert evicted_at[0] - crossed_at >= 2.0, "a soft threshold waits for its grace"
    [request] = api.sent("POST", "/eviction")
    assert request.path == "/api/v1/namespaces/default/pods/hog/eviction"
    assert request.body["deleteOptions"] == {"gracePeriodSeconds": 7, "preconditions": {"uid": HOG}}

    kubepods.kill(HOG)
    api.delete_pod("default", "hog")
    assert api.wait_for(lambda: _condition_is(api, "MemoryPressure", "False"), 30), agent.events()
    assert api.wait_for(lambda: _condition_is(api, "NodeAgentMemoryPressure", "False"), 30)
    assert agent.stop() == 0
    assert api.condition("NodeAgentMemoryPressure") is None, "what is ours is taken back on a clean exit"
    assert len(api.sent("POST", "/eviction")) == 1
    assert agent.logged("evicting")
    assert agent.logged("eviction accepted")


def test_a_hard_threshold_does_not_wait_asks_for_a_short_grace_and_the_recording_repeats_the_decisions(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent, tmp_path: Path
) -> None:
    kubepods.start(HOG, qos="burstable")
    agent = start_agent(**HARD)
    assert api.wait_for(lambda: _condition_is(api, "NodeAgentMemoryPressure", "False"), 30), agent.events()
    kubepods.eat(HOG, 400)
    assert api.wait_for(lambda: api.sent("POST", "/eviction"), 30), agent.events()
    [request] = api.sent("POST", "/eviction")
    assert request.body["deleteOptions"]["gracePeriodSeconds"] == 1
    assert agent.stop() == 0
    check_recording(tmp_path / "state", tmp_path / "nodeagent.yaml")


def test_a_leak_is_evicted_before_an_idle_pod_of_a_lower_class(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent
) -> None:
    """The idle pod comes first in the order and would be enough, for five seconds."""
    kubepods.start(HOG, qos="burstable")
    kubepods.start(CHILL, qos="besteffort")
    kubepods.eat(CHILL, 100)
    kubepods.eat(HOG, 60)
    agent = start_agent(**HARD)
    assert api.wait_for(lambda: _condition_is(api, "NodeAgentMemoryPressure", "False"), 30), agent.events()

    def evicted_after_growth() -> bool:
        kubepods.eat(HOG, 4)
        time.sleep(0.2)
        return bool(api.sent("POST", "/eviction"))

    until(evicted_after_growth, "an eviction")
    [request] = api.sent("POST", "/eviction")
    assert request.path == "/api/v1/namespaces/default/pods/hog/eviction"
    kubepods.kill(HOG)
    api.delete_pod("default", "hog")
    assert agent.stop() == 0
    assert kubepods.running(CHILL)


def test_the_owner_gets_an_event_and_explain_finds_the_request_that_would_have_kept_the_pod(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The decision of a real agent, repeated from its records with its configuration."""
    kubepods.start(HOG, qos="burstable")
    kubepods.start(CHILL, qos="besteffort")
    kubepods.eat(HOG, 400)  # before the agent samples: at the crossing itself the other pod might be enough
    agent = start_agent(**HARD)
    assert api.wait_for(lambda: [r for r in api.sent("POST", "/events") if r.body["reason"] == "PodEvicted"], 30)
    [event] = [r.body for r in api.sent("POST", "/events") if r.body["reason"] == "PodEvicted"]
    assert event["regarding"] == {
        "kind": "ReplicaSet",
        "apiVersion": "apps/v1",
        "name": "hog",
        "uid": "uid-hog",
        "namespace": "default",
    }
    assert event["note"].startswith(
        "Pod hog was evicted from node lab-node because the node was low on memory. It used"
    )
    assert "more than its request of 50Mi." in event["note"]
    kubepods.kill(HOG)
    api.delete_pod("default", "hog")
    assert agent.stop() == 0
    assert cli.main(["explain", "--pod", "default/hog", "--owner", "--config", str(tmp_path / "nodeagent.yaml")]) == 0
    output = capsys.readouterr().out
    assert "Pod default/hog of ReplicaSet/hog\n" in output
    assert re.search(r"^(A memory request of \d+(Mi|Gi) or more|No memory request, however high)", output, re.MULTILINE)


def test_a_hog_that_claims_to_be_static_and_whose_cgroup_another_pod_claims_is_evicted(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent
) -> None:
    """With everything that its author can write: even the owner reference that a kubelet gives a mirror pod."""
    node = {"apiVersion": "v1", "kind": "Node", "name": "lab-node", "uid": api.node()["metadata"]["uid"]}

    def forge(entry: dict[str, Any], claimed: str) -> dict[str, Any]:
        marks = {"source": "file", "mirror": claimed, "hash": claimed}
        entry["metadata"]["annotations"] = {f"kubernetes.io/config.{key}": value for key, value in marks.items()}
        entry["metadata"]["ownerReferences"] = [node | {"controller": True}]
        return entry

    api.modify_pod("default", "hog", lambda entry: entry.update(forge(entry, uuid.uuid4().hex)))
    api.add_pod(forge(pod("a-thief", uid=str(uuid.uuid4())), HOG))
    kubepods.start(HOG, qos="burstable")
    kubepods.start(CHILL, qos="besteffort")
    kubepods.eat(CHILL, 5)
    kubepods.eat(HOG, 400)  # before the agent samples: at the crossing itself the other pod might be enough
    agent = start_agent(**HARD)
    assert api.wait_for(lambda: api.sent("POST", "/eviction"), 30), agent.events()
    assert agent.stop() == 0
    assert {request.path.split("/")[-2] for request in api.sent("POST", "/eviction")} == {"hog"}


def test_a_dry_run_logs_what_it_would_do_and_sends_nothing(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent
) -> None:
    kubepods.start(HOG, qos="burstable")
    kubepods.eat(HOG, 400)
    agent = start_agent("--dry-run")
    until(lambda: agent.logged("would evict"), "what it would do")
    assert agent.stop() == 0
    assert not api.sent("POST", "/eviction")
    assert not api.sent("PATCH")
    assert not api.sent("DELETE")


def test_without_pressure_no_pod_is_evicted(kubepods: Kubepods, api: ApiServer, start_agent: StartAgent) -> None:
    kubepods.start(HOG, qos="burstable")
    kubepods.eat(HOG, 100)
    agent = start_agent()
    assert api.wait_for(lambda: _condition_is(api, "NodeAgentMemoryPressure", "False"), 30), agent.events()
    assert agent.stop() == 0
    assert not api.sent("POST", "/eviction")
    assert not api.sent("DELETE")


def test_a_pdb_without_headroom_protects_its_pods_and_the_refusal_is_logged(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent
) -> None:
    api.modify_pod("default", "hog", lambda entry: entry["metadata"].update(labels={"app": "hog"}))
    api.set_pdb("hog", {"app": "hog"}, allowed=0)
    kubepods.start(HOG, qos="burstable")
    kubepods.eat(HOG, 400)
    agent = start_agent()
    until(lambda: "PodDisruptionBudget hog" in str(agent.logged("not evicting")), "the refusal with its reason")
    assert agent.stop() == 0
    assert not agent.logged("evicting")
    assert not api.sent("POST", "/eviction")
    assert not api.sent("DELETE")


def test_a_pdb_that_refuses_is_respected_and_the_refusal_is_logged(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent
) -> None:
    api.modify_pod("default", "hog", lambda entry: entry["metadata"].update(labels={"app": "hog"}))
    api.set_pdb("hog", {"app": "hog"}, allowed=0)
    kubepods.start(HOG, qos="burstable")
    kubepods.eat(HOG, 400)
    agent = start_agent(protection={"minimumAge": "0s", "disruptionBudgets": False})
    until(lambda: agent.logged("eviction blocked-by-pdb"), "the refusal")
    assert agent.stop() == 0
    assert api.get_pod("default", "hog") is not None
    assert not api.sent("DELETE")


def test_check_reports_that_the_kubelet_overwrites_a_condition_of_the_running_agent(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent, tmp_path: Path
) -> None:
    kubepods.start(HOG, qos="burstable")
    kubepods.eat(HOG, 400)
    api.kubelet(1.0)
    agent = start_agent(evictionSoftGracePeriod={"allocatableMemory.available": "10m"})
    state = tmp_path / "state"

    until(lambda: " overwrites; " in str(status_file.read_status(str(state), now=1e12)), "the overwrite is reported")
    command = [sys.executable, "-m", "nodeagent", "check", "--no-api", "--config", str(tmp_path / "nodeagent.yaml")]
    report = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60).stdout
    assert re.search(r"MemoryPressure: the kubelet owns this condition: \d+ overwrites; ", " ".join(report.split())), (
        report
    )
    assert agent.stop() == 0


def test_a_braked_victim_stands_still_when_its_eviction_is_requested_and_a_hard_kill_ends_it(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent
) -> None:
    kubepods.start(HOG, qos="burstable")
    frozen_at_request: list[bool] = []
    api.on_eviction = lambda _entry, _body: frozen_at_request.append(kubepods.frozen(HOG, qos="burstable"))
    agent = start_agent(**HARD, escalation={"brake": "freeze", "hardKill": "cgroup"})
    assert api.wait_for(lambda: _condition_is(api, "NodeAgentMemoryPressure", "False"), 30), agent.events()
    kubepods.eat(HOG, 400, to_the_end=False)
    assert api.wait_for(lambda: frozen_at_request, 30), agent.events()
    until(lambda: not kubepods.running(HOG), "the victim has ended")
    assert frozen_at_request == [True]
    assert agent.stop() == 0


def _once(answer: Answer) -> Callable[[Request], Answer | None]:
    """The first eviction is answered so, and not carried out."""
    left = [answer]
    return lambda request: left.pop() if left and request.path.endswith("/eviction") else None


@pytest.mark.parametrize(
    "page",
    [
        Answer(302, b"", headers=(("Location", "/login"),)),
        Answer(200, b"<html>Sign in</html>", "text/html"),
        Answer(201, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "no", "code": 500}),
    ],
    ids=["redirect", "page", "failure"],
)
def test_no_hard_kill_follows_an_answer_that_is_not_the_apis(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent, page: Answer
) -> None:
    """The eviction reached no API server and no PDB was checked."""
    api.instead = lambda request: page if request.path.endswith("/eviction") else None
    kubepods.start(HOG, qos="burstable")
    kubepods.start(CHILL, qos="besteffort")
    kubepods.eat(CHILL, 5)
    kubepods.eat(HOG, 400)
    agent = start_agent(**HARD, escalation={"hardKill": "cgroup"})
    until(lambda: agent.logged("eviction server-error"), "the answer is logged")
    time.sleep(1.0)
    assert kubepods.running(HOG)
    assert kubepods.running(CHILL)
    assert not api.sent("POST", "/pods/chill/eviction")
    assert not agent.logged("eviction accepted")
    assert agent.stop() == 0


@pytest.mark.parametrize(("status", "reason"), [(400, "BadRequest"), (404, "NotFound"), (409, "Conflict"), (422, "X")])
def test_one_refusal_that_passes_evicts_no_other_pod_instead_of_the_hog(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent, status: int, reason: str
) -> None:
    api.instead = _once(RefusedError(status, reason, "for a moment").answer)
    kubepods.start(HOG, qos="burstable")
    kubepods.start(CHILL, qos="besteffort")
    kubepods.eat(CHILL, 100)
    kubepods.eat(HOG, 400)
    agent = start_agent(**HARD)
    until(lambda: agent.logged("eviction accepted"), "the hog is evicted")
    assert [request.path for request in api.sent("POST", "/eviction")] == [
        "/api/v1/namespaces/default/pods/hog/eviction",
        "/api/v1/namespaces/default/pods/hog/eviction",
    ]
    assert len(agent.logged("evicting")) == 1
    assert agent.stop() == 0


def test_a_victim_whose_eviction_is_refused_is_released(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent
) -> None:
    api.modify_pod("default", "hog", lambda entry: entry["metadata"].update(labels={"app": "hog"}))
    api.set_pdb("hog", {"app": "hog"}, allowed=0)
    kubepods.start(HOG, qos="burstable")
    kubepods.eat(HOG, 400)
    agent = start_agent(**HARD, escalation={"brake": "freeze", "brakeDeadline": "10m"})
    until(lambda: agent.logged("eviction blocked-by-pdb"), "the refusal")
    until(lambda: not kubepods.frozen(HOG, qos="burstable"), "the pod is let go")
    assert kubepods.running(HOG)
    assert agent.stop() == 0


def test_an_agent_killed_while_it_brakes_a_pod_releases_it_after_a_restart_and_evicts_it_once(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent
) -> None:
    api.delay_s = 2.0  # the request hangs in the server while the agent dies
    kubepods.start(HOG, qos="burstable")
    kubepods.eat(HOG, 400)
    changes: dict[str, Any] = {**HARD, "escalation": {"brake": "freeze", "brakeDeadline": "10m"}}
    first = start_agent(**changes)
    until(lambda: kubepods.frozen(HOG, qos="burstable"), "the pod is held")
    first.process.kill()
    first.process.wait()
    assert kubepods.frozen(HOG, qos="burstable")
    api.delay_s = 0.0
    second = start_agent(**HARD)  # without a brake: it can only release the brakes of the saved state
    until(lambda: not kubepods.frozen(HOG, qos="burstable"), "the pod is let go")
    until(lambda: second.logged("state loaded"), "the state is loaded")
    [state] = second.logged("state loaded")
    assert state["trust"] == "restored"
    assert second.stop() == 0


def test_rate_limits_hold_across_kill_minus_nine(kubepods: Kubepods, api: ApiServer, start_agent: StartAgent) -> None:
    """One eviction an hour is allowed; three processes, each killed right after its request, must not make two."""
    kubepods.start(HOG, qos="burstable")
    kubepods.eat(HOG, 400)
    once = {"burst": 1, "perHour": 1}
    changes: dict[str, Any] = {**HARD, "rateLimits": {"node": once, "namespace": once, "owner": once, "signal": once}}
    first = start_agent(**changes)
    assert api.wait_for(lambda: api.sent("POST", "/eviction"), 30), first.events()
    first.process.kill()
    first.process.wait()
    # As if the eviction had been lost: with the pod terminating, that alone would spare it.
    api.modify_pod("default", "hog", lambda entry: entry["metadata"].pop("deletionTimestamp"))
    for _ in range(2):
        again = start_agent(**changes)
        until(lambda again=again: again.logged("not evicting"), "a refusal")  # type: ignore[misc]
        again.process.kill()
        again.process.wait()
    assert len(api.sent("POST", "/eviction")) == 1


def test_a_configuration_that_is_refused_is_an_event_on_the_node(
    tmp_path: Path, api: ApiServer, run: StartAgent
) -> None:
    agent = run()
    (tmp_path / "nodeagent.yaml").write_text("mode: perhaps\n")
    agent.process.send_signal(signal.SIGHUP)

    def rejections() -> list[Request]:
        return [each for each in api.sent("POST", "/events") if each.body["reason"] == "ConfigurationRejected"]

    assert api.wait_for(rejections, 30), agent.events()
    [event] = rejections()
    assert event.body["regarding"]["kind"] == "Node"
    assert event.body["type"] == "Warning"
    assert "mode" in event.body["note"]
    assert agent.stop() == 0


def check_recording(state: Path, config_file: Path) -> None:
    """The samples that the agent recorded exactly repeat its decisions, and a replay of all samples evicts the same pod
    on the same sample first."""
    config = load.load(str(config_file)).config
    records = [each for each in read_records(state) if each["record"] == "decision"]
    found = open_recording(state)
    samples = list(found.samples())
    assert found.trouble == ()
    exact = {each.plan_id: each for each in samples if each.exact}
    assert [each["id"] for each in records if each["victims"]]
    assert {each["id"] for each in records} == set(exact)
    for record in records:
        inputs = Packer().unpack(record["inputs"]).inputs
        assert inputs is not None
        sample = exact[record["id"]]
        assert sample.snapshot == inputs.snapshot
        plan, _ = engine.decide(sample.snapshot, inputs.state, now=sample.at, config=config)
        assert (plan.signals, plan.conditions) == (sample.signals, sample.conditions)
        repeated = msgspec.json.decode(msgspec.json.encode(plan_to_json(ranking.with_key_texts(plan))))
        assert repeated == {key: each for key, each in record.items() if key not in ("record", "wallTime", "inputs")}
    first = next(each for each in records if each["victims"])
    # Between two recorded samples of the start the agent had taken others, so that a simulation begins later.
    config = config._replace(startup=config.startup._replace(fresh_samples=1))
    simulator = simulation.Simulator(config)
    for each in samples:
        simulator.feed(each.snapshot)
    eviction = simulator.result().evictions[0]
    assert (eviction.pod, eviction.wall_time) == ("default/hog", exact[first["id"]].wall_time)
