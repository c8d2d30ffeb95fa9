"""What runs against what in the virtual machine: nodeagent as it is installed, and its peers.

Each contender is a context that starts it, returns its log on request, and stops it again.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from tests.support.paths import REPOSITORY
from tests.vm import installation
from tests.vm.agent_container import AgentContainer
from tests.vm.machine import Machine
from tests.vm.ramps import Node

HARD_MIB: Final = 200
"""The built-in hard threshold for memory in this machine."""
EARLYOOM: Final = f"earlyoom -M {HARD_MIB * 1024},{HARD_MIB * 512} -r 0"
EARLY_OOMD: Final = "[OOM]\nDefaultMemoryPressureLimit=5%\nDefaultMemoryPressureDurationSec=1s\n"
PODS_SLICE: Final = "kubepods.slice"

Running = Callable[[Node], contextlib.AbstractContextManager[Callable[[], str]]]
"""Runs a contender for as long as the context lasts, which returns its log."""


def install(machine: Machine, scratch: Path) -> None:
    """Install the project from its wheel, as in tests/vm."""
    installation.install(machine, installation.build_wheel(scratch))


def _journal(node: Node, unit: str) -> str:
    return node.machine.run(f"journalctl --output=cat --lines=40 --unit={unit}").stdout


@contextlib.contextmanager
def unit(node: Node, **changes: Any) -> Iterator[Callable[[], str]]:
    """The systemd unit with its own configuration and these changes."""
    text = (REPOSITORY / "systemd" / "config.yaml").read_text(encoding="utf-8")
    node.start_configured(yaml.safe_dump({**yaml.safe_load(text), **changes}) if changes else text)
    try:
        yield node.log
    finally:
        node.stop_agent()


@contextlib.contextmanager
def brake(node: Node) -> Iterator[Callable[[], str]]:
    """The unit with its drop-in, which throttles a victim."""
    node.allow_brake(True)
    try:
        with unit(node, escalation={"brake": "throttle"}) as log:
            yield log
    finally:
        node.allow_brake(False)


@contextlib.contextmanager
def container(node: Node, agent: AgentContainer) -> Iterator[Callable[[], str]]:
    """The DaemonSet's container."""
    agent.start()
    try:
        assert node.api.wait_for(node.published, 120), agent.log()
        yield agent.log
    finally:
        agent.stop()
        agent.close()


@contextlib.contextmanager
def earlyoom(node: Node) -> Iterator[Callable[[], str]]:
    """Debian's earlyoom with nodeagent's threshold."""
    node.machine.run(f"systemd-run --quiet --unit=rival --property=Nice=-20 --property=OOMScoreAdjust=-999 {EARLYOOM}")
    try:
        yield functools.partial(_journal, node, "rival.service")
    finally:
        node.machine.run("systemctl stop rival")


@contextlib.contextmanager
def oomd(node: Node, configuration: str = "") -> Iterator[Callable[[], str]]:
    """Debian's systemd-oomd, which watches the slice of the pods."""
    node.machine.write("/etc/systemd/oomd.conf.d/benchmark.conf", configuration)
    node.machine.run(
        f"systemctl set-property --runtime {PODS_SLICE} ManagedOOMMemoryPressure=kill && "
        "systemctl start systemd-oomd.service"
    )
    try:
        yield functools.partial(_journal, node, "systemd-oomd.service")
    finally:
        node.machine.run(
            f"systemctl stop systemd-oomd.socket systemd-oomd.service; "
            f"systemctl set-property --runtime {PODS_SLICE} ManagedOOMMemoryPressure=auto"
        )
