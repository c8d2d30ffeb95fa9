"""Of two agents on one node one acts. The other is a dry run, logs that, and takes over."""

import signal
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fake_kube import ApiServer, pod
from tests.support.livenode import HARD, Kubepods, Run, StartAgent, configuration, needs_cgroup_v1, until

pytestmark = [pytest.mark.real_cgroup, needs_cgroup_v1]

HOGS = {str(uuid.uuid4()): f"hog-{n}" for n in range(6)}
SETTINGS: dict[str, Any] = {
    **HARD,
    # A pod that was evicted and has not ended may be the largest: its back-off would hide what is spent.
    "rateLimits": {"node": {"burst": 2, "perHour": 1}, "ownerBackoff": "0s"},
    "escalation": {"brake": "freeze", "brakeDeadline": "10m"},
}


@pytest.fixture
def api(kubepods: Kubepods) -> Iterator[ApiServer]:
    pods = [pod(name, uid=uid, owner=("ReplicaSet", name), qos="Burstable") for uid, name in HOGS.items()]
    with ApiServer(node="lab-node", pods=pods, linger_s=None) as server:
        for uid in HOGS:
            kubepods.start(uid, qos="burstable")
        yield server


def eat(kubepods: Kubepods) -> None:
    for uid in HOGS:
        kubepods.eat(uid, 70, to_the_end=False)


def grow_others(kubepods: Kubepods, api: ApiServer) -> None:
    """Then the release of the evicted pods, which do not end, no longer covers what is missing, and they are not the
    largest: after their time, no other pod would be evicted in place of such a one."""
    evicted = {request.path.split("/")[-2] for request in api.sent("POST", "/eviction")}
    for uid in [uid for uid, name in HOGS.items() if name not in evicted]:
        kubepods.eat(uid, 20, to_the_end=False)


def watches(agent: Run) -> bool:
    return any("another agent acts on this node" in str(line) for line in agent.events())


@pytest.mark.parametrize("directory", ["state", "other"], ids=["one state directory", "two state directories"])
def test_two_agents_evict_no_more_than_one_and_the_second_takes_over(
    directory: str, kubepods: Kubepods, api: ApiServer, run: StartAgent, start_agent: StartAgent, tmp_path: Path
) -> None:
    first = run(**SETTINGS)
    second = start_agent(**SETTINGS, stateDir=str(tmp_path / directory))
    until(lambda: watches(second), "the note of the second agent")
    if directory == "other":
        assert not (tmp_path / "other").exists(), "it keeps nothing"
    eat(kubepods)
    until(lambda: len(api.sent("POST", "/eviction")) == 2, "the evictions of the first")
    grow_others(kubepods, api)
    until(lambda: second.logged("would evict"), "a decision of the second agent")
    refused = len(second.logged("not evicting"))
    first.kill()
    until(lambda: second.logged("no other agent acts any more"), "the second one takes over")
    until(lambda: len(second.logged("started")) == 2, "and starts again")
    assert [line["mode"] for line in second.logged("started")] == ["dry-run", "enforce"]
    trust = "restored" if directory == "state" else "first"
    assert [line["trust"] for line in second.wait_for_log("state loaded")] == [trust]
    until(
        lambda: any(line["code"].startswith("rate-limit-") for line in second.logged("not evicting")[refused:]),
        "what the first one has spent",
    )
    assert len(api.sent("POST", "/eviction")) == 2
    until(
        lambda: not any(kubepods.frozen(uid, qos="burstable") for uid in HOGS),
        "the brakes of the first agent are released",
    )
    assert second.stop() == 0


def test_a_second_agent_changes_neither_the_node_nor_the_brakes_of_the_first(
    kubepods: Kubepods, api: ApiServer, run: StartAgent, start_agent: StartAgent
) -> None:
    first = run(**SETTINGS)
    eat(kubepods)
    until(lambda: len(api.sent("POST", "/eviction")) == 2, "the evictions of the first")
    first.process.send_signal(signal.SIGSTOP)  # it hangs: its brakes stay until it continues
    frozen = [uid for uid in HOGS if kubepods.frozen(uid, qos="burstable")]
    assert frozen
    second = start_agent(**SETTINGS)
    until(lambda: watches(second), "the note of the second agent")
    third = start_agent("--dry-run", **SETTINGS)
    for agent in (second, third):
        until(lambda agent=agent: agent.logged("would evict") or agent.logged("not evicting"), "a decision")  # type: ignore[misc]
        assert agent.stop() == 0
    assert [uid for uid in HOGS if kubepods.frozen(uid, qos="burstable")] == frozen
    pressure = api.condition("NodeAgentMemoryPressure")
    assert pressure is not None
    assert pressure["status"] == "True"
    assert len(api.sent("POST", "/eviction")) == 2
    first.process.send_signal(signal.SIGCONT)
    assert first.stop() == 0


def test_a_dry_run_stops_no_agent_from_acting_and_does_not_start_to_act_beside_it(
    kubepods: Kubepods, api: ApiServer, run: StartAgent, start_agent: StartAgent, tmp_path: Path
) -> None:
    shared = {**SETTINGS, "stateDir": str(tmp_path / "state")}
    (tmp_path / "other").mkdir()
    file = configuration(tmp_path / "other", kubepods, **shared, mode="dry-run")
    kubeconfig = api.kubeconfig(tmp_path / "other" / "kubeconfig")
    arguments = ("--config", str(file), "--kubeconfig", str(kubeconfig), "--node-name", "lab-node")
    dry_run = Run(*arguments, log=tmp_path / "other" / "log")
    try:
        until((tmp_path / "state" / "state").exists, "its state")
        acting = run(**shared)
        eat(kubepods)
        until(lambda: len(api.sent("POST", "/eviction")) == 2, "the evictions")
        grow_others(kubepods, api)
        configuration(tmp_path / "other", kubepods, **shared)
        dry_run.process.send_signal(signal.SIGHUP)
        until(lambda: "another agent acts on this node" in str(refusals(dry_run)), "the refusal")
        acting.kill()
        dry_run.process.send_signal(signal.SIGHUP)
        until(lambda: "restart it" in str(refusals(dry_run)), "the second refusal")
        assert dry_run.stop() == 0
    finally:
        dry_run.kill()
    last = start_agent(**shared)
    until(
        lambda: any(line["code"].startswith("rate-limit-") for line in last.logged("not evicting")), "the spent tokens"
    )
    assert [line["trust"] for line in last.wait_for_log("state loaded")] == ["restored"]
    assert len(api.sent("POST", "/eviction")) == 2
    assert last.stop() == 0


def test_an_agent_that_becomes_a_dry_run_releases_its_brakes_and_another_agent_acts(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent, tmp_path: Path
) -> None:
    (tmp_path / "first").mkdir()
    file = configuration(tmp_path / "first", kubepods, **SETTINGS)
    kubeconfig = api.kubeconfig(tmp_path / "first" / "kubeconfig")
    arguments = ("--config", str(file), "--kubeconfig", str(kubeconfig), "--node-name", "lab-node")
    first = Run(*arguments, log=tmp_path / "first" / "log")
    try:
        until(lambda: api.condition("NodeAgentMemoryPressure"), "the first verdict")
        second = start_agent(**SETTINGS)
        until(lambda: watches(second), "the note of the second agent")
        eat(kubepods)
        until(lambda: len(api.sent("POST", "/eviction")) == 2, "the evictions of the first")
        until(lambda: any(kubepods.frozen(uid, qos="burstable") for uid in HOGS), "their brakes")
        configuration(tmp_path / "first", kubepods, **SETTINGS, mode="dry-run")
        first.process.send_signal(signal.SIGHUP)
        second.wait_for_log("started", mode="enforce")
        assert not any(kubepods.frozen(uid, qos="burstable") for uid in HOGS)
        configuration(tmp_path / "first", kubepods, **SETTINGS)
        first.process.send_signal(signal.SIGHUP)
        until(lambda: "another agent acts on this node" in str(refusals(first)), "the refusal")
        assert second.stop() == 0
        assert first.stop() == 0
    finally:
        first.kill()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_no_signal_is_lost_while_the_second_agent_takes_over(
    number: signal.Signals, kubepods: Kubepods, api: ApiServer, run: StartAgent, start_agent: StartAgent
) -> None:
    first = run(**SETTINGS)
    second = start_agent(**SETTINGS)
    until(lambda: watches(second), "the note of the second agent")
    first.kill()
    second.wait_for_log("no other agent acts any more")
    if number is signal.SIGTERM:
        second.process.send_signal(number)
        assert second.process.wait(60) == 0
        return

    def started_again() -> bool:
        second.process.send_signal(number)
        assert second.process.poll() is None, second.log_end()
        return len(second.logged("started")) == 2

    until(started_again, "its start as the first")
    second.wait_for_log("started", mode="enforce")
    assert second.stop() == 0


def test_the_second_agent_stays_a_dry_run_while_its_file_is_invalid(
    kubepods: Kubepods, api: ApiServer, run: StartAgent, start_agent: StartAgent, tmp_path: Path
) -> None:
    first = run(**SETTINGS)
    second = start_agent(**SETTINGS)
    until(lambda: watches(second), "the note of the second agent")
    file = tmp_path / "nodeagent.yaml"
    valid = file.read_text()
    replace(file, valid.replace('"300Mi"', '"much"'))
    first.kill()
    until(lambda: "much" in str(refusals(second)), "the refusal")
    threading.Event().wait(1.0)  # five syncs
    assert second.process.poll() is None
    replace(file, valid)
    second.wait_for_log("started", mode="enforce")
    assert len(refusals(second)) == 1
    assert second.stop() == 0


def replace(file: Path, text: str) -> None:
    """At once: the waiting agent reads it at any time, and would refuse an empty file too."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.rename(file)


def refusals(agent: Run) -> list[dict[str, Any]]:
    return agent.logged("configuration rejected")
