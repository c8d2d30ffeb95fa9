"""What the whole agent costs in counts, in a process of its own: `python -m tests.support.counted_agent`.

    python -m tests.support.counted_agent PODS KUBECONFIG DIRECTORY

`loop.assembly.build_agent` on a node in the directory and an API server that the caller has, both with the pods of
`tree_pods`. The clock moves by the agent's sleep alone, which is skipped, so that a slow machine counts the same. It
prints one JSON object: counts of a calm minute and of 20 s below a soft threshold (the least of three each), and the
memory of the process. System calls are those of the loop's thread, by name.
"""

import contextlib
import gc
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from benchmarks import soak_world
from benchmarks.soak_world import SkippingClock, SkippingWakeups, SoakHost
from nodeagent.loop.agent import Agent
from tests.faults import injected
from tests.support.trees import GI, MI, Node, TreePod, write_node

NODE: Final = "counted-node"
WINDOWS: Final = 3
"""Of each kind. The least counts: a thread of the agent, or a slow machine, may add to one of them."""
SETTLED_S: Final = {"calm": 70.0, "soft": 20.0}
WINDOW_S: Final = {"calm": 60.0, "soft": 20.0}
CONFIG: Final = """\
apiVersion: nodeagent.io/v1alpha1
kind: NodeAgentConfiguration
mode: enforce
nodeName: {node}
stateDir: {state}
evictionHard: {{memory.available: 500Mi}}
evictionSoft: {{memory.available: 2Gi}}
evictionSoftGracePeriod: {{memory.available: 10h}}
startup: {{freshSamples: 1}}
cluster: {{kubeconfig: {kubeconfig}}}
"""
CALM: Final = Node(memory_total=64 * GI, memory_available=8 * GI, allocatable_limit=None, pods_working_set=GI)


def tree_pods(count: int) -> tuple[TreePod, ...]:
    """The pods of the node; the caller's API server must list them under their names and UIDs."""
    return tuple(TreePod(f"default/pod-{n}", working_set=50 * MI, request=40 * MI, logs=False) for n in range(count))


class SteppedClock(SkippingClock):
    """Stands still but for the skipped sleep and a microsecond for each reading, because readings must differ."""

    def read(self, clock: int) -> float:
        self.ahead_s += 1e-6
        return 1e6 + self.ahead_s


class Counted:
    """The agent and what is counted of it."""

    def __init__(self, pods: int, kubeconfig: Path, directory: Path) -> None:
        self.node = CALM._replace(pods=tree_pods(pods))
        self.root = directory / "node"
        self.root.mkdir()
        self.state = directory / "state"
        write_node(self.root, self.node)
        self.config = directory / "nodeagent.yaml"
        self.config.write_text(CONFIG.format(node=NODE, state=self.state, kubeconfig=kubeconfig), encoding="utf-8")
        self.clock = SteppedClock()
        self.host = SoakHost(str(self.root), self.clock)
        self.agent: Agent | None = None
        self.syncs = 0
        self.figures: dict[str, int] = {}

    def script(self) -> Iterator[Callable[[], bool] | None]:
        expected = {pod.cgroup_uid for pod in self.node.pods}
        yield lambda: self._seen() == expected and not self._session_trouble()
        yield from self._windows("calm")
        self._measure_memory()
        write_node(self.root, self.node._replace(memory_available=GI))
        yield from self._windows("soft")
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            yield None

    def _seen(self) -> set[str]:
        assert self.agent is not None
        return {pod.uid for pod in self.agent.session.pods().pods}

    def _session_trouble(self) -> str:
        assert self.agent is not None
        return self.agent.session.pods().reason

    def _sleep(self, seconds: float) -> Iterator[None]:
        until = self.clock.ahead_s + seconds
        while self.clock.ahead_s < until:
            yield None

    def _windows(self, kind: str) -> Iterator[None]:
        yield from self._sleep(SETTLED_S[kind])
        found: list[Counter[str]] = []
        for _ in range(WINDOWS):
            gc.collect()
            syncs, io, blocks = self.syncs, _io(), sys.getallocatedblocks()
            with injected.counted() as calls:
                yield from self._sleep(WINDOW_S[kind])
            after, counts = _io(), Counter(call.name for call in calls)
            del calls
            gc.collect()
            counts["blocks kept"] = max(0, sys.getallocatedblocks() - blocks)
            counts["syncs"] = self.syncs - syncs
            counts["writes of all threads"] = after["syscw"] - io["syscw"]
            counts["bytes written"] = after["wchar"] - io["wchar"]
            found.append(counts)
        for name in sorted(set().union(*found)):
            self.figures[f"{kind}: {name}"] = min(each[name] for each in found)

    def _measure_memory(self) -> None:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        self.figures["RSS KiB"] = int(status["VmRSS"].split()[0])
        self.figures["threads"] = int(status["Threads"])
        self.figures["descriptors"] = len(os.listdir("/proc/self/fd"))

    def count_sync(self) -> None:
        self.syncs += 1


def _io() -> Counter[str]:
    """What all threads wrote; empty on a kernel that does not count it."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return Counter()
    return Counter({name: int(value) for name, _, value in (line.partition(": ") for line in lines)})


def run(pods: int, kubeconfig: Path, directory: Path) -> dict[str, int]:
    counted = Counted(pods, kubeconfig, directory)
    with contextlib.ExitStack() as stack:
        agent, wakeups = soak_world.build_agent(stack, counted.host, counted.config, directory / "log")
        counted.agent = agent
        try:
            agent.run(SkippingWakeups(wakeups, counted.clock, counted.script(), count=counted.count_sync))
        finally:
            agent.stop()
    return counted.figures


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))))
