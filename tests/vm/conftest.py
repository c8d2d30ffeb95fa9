"""Two machines for the whole suite, an older and a newer one, with the project as docs/bare-metal.md installs it."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_kube import ApiServer
from tests.support.paths import REPOSITORY
from tests.vm import agent_container, dockerfile
from tests.vm.dockerfile import Built
from tests.vm.image import NEWER, OLDER, Image, Suite, image, why_not
from tests.vm.machine import Machine, booted
from tests.vm.ramps import NODE, Node


def image_of(suite: Suite) -> Image:
    """The image of a machine without the project; where there cannot be one, the test is skipped."""
    reason = why_not(suite)
    if reason:
        pytest.skip(f"needs a virtual machine: {reason}")
    return image(suite)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project, as it is installed."""
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
    return wheel


def as_node(machine: Machine, wheel: Path) -> Machine:
    """The machine with the directories of a kubelet and a runtime, and the project from its wheel."""
    machine.copy(wheel, "/run/vm")
    machine.run(f"/opt/nodeagent/bin/pip install --quiet --no-index --no-deps /run/vm/{wheel.name}", timeout_s=180)
    machine.copy(Path(REPOSITORY / "systemd"), "/run/vm")
    machine.run("mkdir -p /var/lib/kubelet /var/log/pods")
    return machine


@pytest.fixture(scope="session")
def bare_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """The machine of nearly all tests, as it has booted."""
    with booted(image_of(OLDER), tmp_path_factory.mktemp("vm")) as machine:
        yield machine


@pytest.fixture(scope="session")
def machine(bare_machine: Machine, wheel: Path) -> Machine:
    """The machine of nearly all tests, as a node."""
    return as_node(bare_machine, wheel)


@pytest.fixture(scope="session")
def newer_machine(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Iterator[Machine]:
    """A node with a newer kernel, systemd and Python."""
    with booted(image_of(NEWER), tmp_path_factory.mktemp("vm")) as machine:
        yield as_node(machine, wheel)


@pytest.fixture(scope="session")
def agent_image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    """The DaemonSet's image, built from the Dockerfile."""
    reason = dockerfile.why_not()
    if reason:
        pytest.skip(f"needs the image: {reason}")
    scratch = tmp_path_factory.mktemp("image")
    yield agent_container.build_image(scratch)
    shutil.rmtree(scratch)


@pytest.fixture(scope="module")
def node(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """The machine with the agent's unit, an API double and a process that acts as the kubelet."""
    with ApiServer(node=NODE, linger_s=None) as api:
        kubeconfig = api.kubeconfig(tmp_path_factory.mktemp("api") / "kubeconfig").read_text(encoding="utf-8")
        made = Node(machine, api, kubeconfig)
        yield made
        made.close()
