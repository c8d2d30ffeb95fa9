"""One machine for the whole suite, with the project installed as docs/bare-metal.md tells."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.apiserver import ApiServer
from tests.vm.image import REPOSITORY, image, why_not
from tests.vm.machine import Machine
from tests.vm.ramps import NODE, Node


@pytest.fixture(scope="session")
def bare_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A machine that has just booted, without the project."""
    reason = why_not()
    if reason:
        pytest.skip(f"needs a virtual machine: {reason}")
    machine = Machine(image(), directory=tmp_path_factory.mktemp("vm"))
    try:
        machine.wait_until_ready()
        yield machine
    finally:
        machine.stop()


@pytest.fixture(scope="session")
def machine(bare_machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """The machine as a node: the directories of a kubelet and a runtime, and the project from its wheel."""
    wheels = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", f"--wheel-dir={wheels}", str(REPOSITORY)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = wheels.glob("*.whl")
    bare_machine.copy(wheel, "/run/vm")
    bare_machine.run(f"/opt/nodeagent/bin/pip install --quiet --no-index --no-deps /run/vm/{wheel.name}", timeout_s=180)
    bare_machine.copy(Path(REPOSITORY / "systemd"), "/run/vm")
    bare_machine.run("mkdir -p /var/lib/kubelet /var/log/pods")
    return bare_machine


@pytest.fixture(scope="module")
def node(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """The machine with the agent's unit, an API double and somebody who does the kubelet's part."""
    with ApiServer(node=NODE, linger_s=None) as api:
        kubeconfig = api.kubeconfig(tmp_path_factory.mktemp("api") / "kubeconfig").read_text(encoding="utf-8")
        made = Node(machine, api, kubeconfig)
        yield made
        made.close()
