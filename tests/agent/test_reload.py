"""A running agent uses a valid new configuration, keeps the old one instead of an invalid one, and logs both."""

import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_kube import ApiServer, pod
from tests.support.livenode import Run, until

HEAD = "apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\nlogging: {format: json}\n"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(HEAD + f"stateDir: {tmp_path}/state\n")
    return path


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.settimeout(60)
        yield receiver


@pytest.fixture
def agent(tmp_path: Path, config: Path, manager: socket.socket) -> Iterator[Run]:
    """No cluster: neither a kubeconfig nor a home to find one in."""
    environ = {"PATH": os.environ["PATH"], "NOTIFY_SOCKET": str(tmp_path / "notify"), "PYTHONPATH": ":".join(sys.path)}
    run = Run("--config", str(config), "--node-name", "n", log=tmp_path / "log", environ=environ)
    until(lambda: run.logged("started"), "the start")
    yield run
    run.process.kill()
    run.process.wait()


def rewrite(config: Path, text: str) -> None:
    """In one step: the agent may read it at any moment."""
    replacement = config.with_name("next")
    replacement.write_text(text)
    replacement.replace(config)


def _wait_for_message(manager: socket.socket, message: str) -> None:
    while not manager.recv(4096).decode().startswith(message):
        pass


def test_a_changed_file_is_loaded_on_sighup_and_logged_key_by_key(
    agent: Run, config: Path, manager: socket.socket
) -> None:
    _wait_for_message(manager, "READY=1")
    rewrite(config, config.read_text() + "evictionHard: {memory.available: 123Mi}\n")
    agent.process.send_signal(signal.SIGHUP)
    _wait_for_message(manager, "RELOADING=1")
    _wait_for_message(manager, "READY=1")
    for key, before, after in (
        ("evictionHard.memory.available", "2%, at least 200Mi, at most 1Gi", "123Mi"),
        ("evictionHard.pid.available", "5%", "not set"),
    ):
        (change,) = agent.wait_for_log("configuration changed", key=key)
        assert (change["before"], change["after"]) == (before, after)
    assert agent.stop() == 0


def test_a_mounted_file_is_loaded_without_a_signal(agent: Run, config: Path) -> None:
    rewrite(config, config.read_text() + "evictionHard: {memory.available: 123Mi}\n")
    until(lambda: agent.logged("configuration changed"), "the change")
    assert agent.stop() == 0


def test_an_invalid_file_is_rejected_with_every_problem_and_the_old_one_stays(agent: Run, config: Path) -> None:
    good = config.read_text()
    rewrite(config, good + "evictionHard: {memory.avialable: 1Gi}\nmode: enforced\n")
    agent.process.send_signal(signal.SIGHUP)
    until(lambda: agent.logged("configuration rejected"), "the refusal")
    refused, *_ = agent.logged("configuration rejected")
    assert "did you mean" in str(refused["problems"])
    assert len(refused["problems"]) == 2
    assert not agent.logged("configuration changed")
    rewrite(config, good + "evictionHard: {memory.available: 123Mi}\n")
    agent.process.send_signal(signal.SIGHUP)
    until(lambda: agent.logged("configuration changed"), "the fixed file")
    assert agent.stop() == 0


@pytest.mark.parametrize(
    ("line", "key", "why"),
    [
        ("mode: enforce", "mode", "no credentials"),
        ("cluster: {kubeconfig: /nowhere}", "cluster.kubeconfig", "/nowhere does not exist"),
    ],
    ids=["mode", "kubeconfig"],
)
def test_a_configuration_that_this_machine_cannot_use_is_rejected(
    agent: Run, config: Path, line: str, key: str, why: str
) -> None:
    rewrite(config, config.read_text() + f"{line}\n")
    agent.process.send_signal(signal.SIGHUP)
    until(lambda: agent.logged("configuration rejected"), "the refusal")
    refused, *_ = agent.logged("configuration rejected")
    [problem] = refused["problems"]
    assert f" {key}: " in problem
    assert why in problem
    assert agent.process.poll() is None
    assert agent.stop() == 0


def test_keys_of_the_process_take_effect_at_the_next_start(agent: Run, config: Path, tmp_path: Path) -> None:
    rewrite(config, HEAD + f"stateDir: {tmp_path}/elsewhere\n")
    agent.process.send_signal(signal.SIGHUP)
    until(lambda: agent.logged("configuration change needs a restart"), "the warning")
    rewrite(config, HEAD + f"stateDir: {tmp_path}/elsewhere\nevictionHard: {{memory.available: 123Mi}}\n")
    agent.process.send_signal(signal.SIGHUP)
    agent.wait_for_log("configuration changed", key="evictionHard.memory.available")
    assert {line["key"] for line in agent.logged("configuration change needs a restart")} == {"stateDir"}
    assert not [line for line in agent.logged("configuration changed") if line["key"] == "stateDir"]
    assert agent.stop() == 0
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone rejects a file that others may write")
def test_a_file_that_others_may_write_is_rejected_and_the_old_one_stays(agent: Run, config: Path) -> None:
    rewrite(config, config.read_text() + "mode: enforce\n")
    config.chmod(0o666)
    agent.process.send_signal(signal.SIGHUP)
    why = "is writable for all users (mode 0666)"
    until(lambda: why in str(agent.logged("configuration rejected")), "the refusal")
    assert not agent.logged("configuration changed")
    assert agent.stop() == 0


def test_a_named_pipe_in_place_of_the_file_does_not_block_the_loop(agent: Run, config: Path) -> None:
    """Opening it for reading would block the loop, which could not be stopped then."""
    pipe = config.with_name("pipe")
    os.mkfifo(pipe)
    pipe.rename(config)
    agent.process.send_signal(signal.SIGHUP)
    why = "it is a named pipe, not a regular file"
    until(lambda: why in str(agent.logged("configuration rejected")), "the refusal")
    assert agent.stop() == 0


@pytest.mark.parametrize(
    ("off", "on", "asked"),
    [
        (
            "protection: {nodeBound: false}",
            "protection: {nodeBound: true}",
            "/api/v1/namespaces/default/persistentvolumeclaims/data",
        ),
        ("evictionRequest: {enabled: false}", "evictionRequest: {enabled: true}", "/apis/lifecycle.k8s.io/v1alpha1"),
    ],
    ids=["nodeBound", "evictionRequest"],
)
def test_a_switch_that_needs_the_api_server_takes_effect_with_the_reload(
    tmp_path: Path, off: str, on: str, asked: str
) -> None:
    mounting = pod("db", spec={"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]})
    config = tmp_path / "config.yaml"
    head = HEAD + f"stateDir: {tmp_path}/state\nsampling: {{cgroupRoot: /no-such-cgroup}}\n"
    config.write_text(head + off)
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(sys.path)}
    with ApiServer(node="lab-node", pods=[mounting], linger_s=None) as api:
        api.set_volume("data", {"local": {"path": "/mnt/disk1"}})
        options = ("--config", str(config), "--kubeconfig", str(api.kubeconfig(tmp_path / "kubeconfig")))
        agent = Run(*options, "--node-name", "lab-node", log=tmp_path / "log", environ=environ)
        try:
            assert api.wait_for(
                lambda: [r for r in api.requests if r.path == "/api/v1/pods" and "watch" in r.query], 60
            )
            assert not [request for request in api.requests if request.path == asked]
            rewrite(config, head + on)
            agent.process.send_signal(signal.SIGHUP)
            assert api.wait_for(lambda: [r for r in api.requests if r.path == asked], 60), agent.events()
            assert agent.stop() == 0
        finally:
            agent.kill()
