"""daemonset.yaml and its patch for a brake, each run as a container beside a ramp, with the manifest's resources."""

from collections.abc import Iterator
from typing import Any, Final

import pytest
import yaml

from tests.support.manifests import Document, document_of, with_brake
from tests.vm import agent_container
from tests.vm.agent_container import CPU_SHARES, MEMORY_LIMIT, AgentContainer
from tests.vm.dockerfile import Built
from tests.vm.machine import Machine, wait_for_text
from tests.vm.ramps import NODE, Node, Ramp

pytestmark = [pytest.mark.vm, pytest.mark.timeout(900)]

DEFAULT_HARD_MIB: Final = 200
DEFAULT_SOFT_MIB: Final = 300
"""The built-in thresholds of a node of 2 GiB."""
EVICTED: Final = Ramp(50, 500, DEFAULT_HARD_MIB, DEFAULT_SOFT_MIB)
BRAKED: Final = Ramp(1024, 1200, DEFAULT_HARD_MIB, DEFAULT_SOFT_MIB)
WRITABLE: Final = 2
"""O_RDWR in the flags of fdinfo."""


@pytest.fixture(scope="module")
def agent(node: Node, agent_image: Built, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentContainer]:
    agent_container.unpack_image(node.machine, agent_image)
    kubeconfig = node.api.kubeconfig(tmp_path_factory.mktemp("kubeconfig") / "kubeconfig").read_text(encoding="utf-8")
    made = AgentContainer(node.machine, agent_image, node.api, kubeconfig, node=NODE)
    yield made
    made.close()


def open_triggers(agent: AgentContainer, machine: Machine) -> list[str]:
    """Pressure files that the agent has open for writing, as it sees them."""
    pid = agent.number("cgroup.procs").split()[0]
    listed = machine.run(
        f"cd /proc/{pid}/fd; for fd in *; do case $(readlink $fd) in *pressure*) "
        f"echo $(readlink $fd) $(sed -n 's/flags:\t//p' ../fdinfo/$fd);; esac; done"
    ).stdout
    opened = (line.split() for line in listed.splitlines())
    return [path for path, flags in opened if int(flags, 8) & WRITABLE]


def assert_evicted_in_time(
    node: Node, agent: AgentContainer, ramp: Ramp, *, daemonset: Document, configuration: str, triggers: int
) -> None:
    start_s = agent.start(daemonset=daemonset, configuration=configuration)
    try:
        print(f"the endpoint answers after {start_s:.1f} s")
        assert node.api.wait_for(node.published, 120), agent.log()
        assert agent.number("cpu.max").startswith("max ")
        assert agent.number("cpu.weight") == str(agent_container.cpu_weight(CPU_SHARES))
        assert agent.number("memory.max") == str(MEMORY_LIMIT)
        armed = open_triggers(agent, node.machine)
        assert len(armed) == triggers, agent.log()
        # What a read-only mount prevents is one note, after the first conditions: the log has it once.
        assert triggers == 2 or wait_for_text(agent.log, "no PSI trigger")
        assert agent.log().count("no PSI trigger") == 2 - triggers, agent.log()
        assert agent.probe("/readyz") == 200
        probes = agent.start_probes()
        result = node.ramp(ramp, agent=False)
        probed, _ = probes.communicate(timeout=60)
        log = agent.log()
        seen = (result.oom_kills, result.victims, result.alive)
        assert seen == (0, ("bloated",), frozenset({"chill"})), f"{result}\n{log}"
        answers = [line.split() for line in probed.splitlines()]
        assert answers
        assert {status for _, status, _ in answers} == {"200"}, probed
        slowest_s = max(float(seconds) for _, _, seconds in answers)
        assert slowest_s < agent_container.timeout_s(), probed
        print(result, slowest_s)
    finally:
        agent.stop()


def test_daemonset_yaml_evicts_in_time_with_its_own_configuration_and_resources(
    node: Node, agent: AgentContainer
) -> None:
    plain, configuration = document_of("DaemonSet"), document_of("ConfigMap")["data"]["config.yaml"]
    # The pods' own memory.pressure is on the cgroups' read-only mount: one trigger, and one note.
    assert_evicted_in_time(node, agent, EVICTED, daemonset=plain, configuration=configuration, triggers=1)


def test_with_the_patch_for_a_brake_it_stops_a_ramp_at_full_speed(node: Node, agent: AgentContainer) -> None:
    values: dict[str, Any] = yaml.safe_load(document_of("ConfigMap")["data"]["config.yaml"])
    values["escalation"] = {"brake": "throttle"}
    braked = yaml.safe_dump(values)
    assert_evicted_in_time(node, agent, BRAKED, daemonset=with_brake(), configuration=braked, triggers=2)
