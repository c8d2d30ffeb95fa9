"""Two machines for the whole suite, an older and a newer one, with the project as docs/bare-metal.md installs it."""

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_kube import ApiServer
from tests.support import scheduler
from tests.vm import agent_container, dockerfile, installation
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
    """The project, as it is published."""
    return installation.build_wheel(tmp_path_factory.mktemp("wheel"))


class Kept:
    """A machine that the modules of a session share. One that answers no more is replaced before the next module, so
    that what ended it fails the tests of its own module only."""

    def __init__(self, suite: Suite, directory: Path) -> None:
        self._suite, self._directory = suite, directory
        self._running = contextlib.ExitStack()
        self._machine: Machine | None = None
        self._is_node = False

    def machine(self) -> Machine:
        """The machine, at first as it has booted."""
        if self._machine is not None and not self._machine.answers():
            print(f"replaced: a machine that answered no more\n{self._machine.console()[-4000:]}", file=sys.stderr)
            self.stop()
        if self._machine is None:
            directory = Path(tempfile.mkdtemp(dir=self._directory))
            booting = booted(image_of(self._suite), directory, cpus=self._suite.cpus)
            self._machine = self._running.enter_context(booting)
        return self._machine

    def node(self, wheel: Path) -> Machine:
        """The machine as a node."""
        machine = self.machine()
        if not self._is_node:
            installation.install(machine, wheel)
            self._is_node = True
        return machine

    def stop(self) -> None:
        self._running.close()
        self._machine, self._is_node = None, False


@pytest.fixture(scope="session")
def older(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    kept = Kept(OLDER, tmp_path_factory.mktemp("vm"))
    yield kept
    kept.stop()


@pytest.fixture(scope="session")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    kept = Kept(NEWER, tmp_path_factory.mktemp("vm"))
    yield kept
    kept.stop()


@pytest.fixture(scope="module")
def bare_machine(older: Kept) -> Machine:
    """The older machine, as it has booted."""
    return older.machine()


@pytest.fixture(scope="module")
def machine(request: pytest.FixtureRequest, wheel: Path) -> Machine:
    """The machine that the scheduler has for the module, as a node: the older or the newer one."""
    of_module = scheduler.group_of(request.node.nodeid)
    kept: Kept = request.getfixturevalue("newer" if of_module == scheduler.NEWER_MACHINE else "older")
    return kept.node(wheel)


@pytest.fixture(scope="module")
def newer_machine(newer: Kept, wheel: Path) -> Machine:
    """A node with a newer kernel, systemd and Python."""
    return newer.node(wheel)


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
