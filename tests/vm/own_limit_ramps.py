"""Ramps towards a container's own memory limit in the machine: the speed, an agent that evicts or none, and the result.

Theory of operation. The pod has a container whose memory.max is `LIMIT_MIB`. It holds the memory of its start until
the agent's metrics show that the agent has read it, and grows then. Once its eviction is accepted, the program in the
machine does the kubelet's part: preStop, a process in the container that takes `PRE_STOP_S`, then SIGTERM.
"""

import contextlib
import json
import threading
import uuid
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.vm.pods import start_pod
from tests.vm.ramps import MIB, Cast, Node

LIMIT_MIB: Final = 512
START_MIB: Final = {1: 420, 10: 250, 50: 60}
"""By MiB a second, what the container holds before: slow ones begin nearer to the limit, all of them before 70% and
with several seconds until the agent may evict, except the slowest, which has most of a minute."""
PRE_STOP_S: Final = 1
GRACE_S: Final = 30
LONGEST_S: Final = 900
"""More than the slowest ramp takes on a busy host."""
PROGRAM: Final = Path(__file__).with_name("own_limit_container.py")
METRICS: Final = "127.0.0.1:9655"
CONFIGURATION: Final[dict[str, Any]] = {
    "metrics": {"address": METRICS, "perPod": {"top": 20}},
    "ownLimit": {"enabled": True, "namespaces": ["shop"]},
    "rateLimits": {"ownLimit": {"burst": 100, "perHour": 1000}},
}
"""Changes to `ramps.CONFIGURATION`: the thresholds of the node stay, and none of them is near."""
WAIT_UNTIL_READ: Final = """\
import sys, time, urllib.request
series, least = f'nodeagent_pod_memory_above_request_bytes{{namespace="shop",pod="{sys.argv[1]}"}} ', float(sys.argv[2])
while True:
    page = urllib.request.urlopen(f"http://{sys.argv[3]}/metrics").read().decode()
    found = [float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(series)]
    if found and least <= found[0] < 0:
        break
    time.sleep(0.5)
"""
"""The request is the limit, so that the figure is negative once the pod of the API server was joined with its usage."""


class Ramp(NamedTuple):
    """What came of one ramp."""

    exit_code: int
    """143: SIGTERM, 137: the kernel's OOM killer."""
    pre_stop_ended: bool
    """preStop ended while the container ran."""
    evicted_at_mib: float | None
    """What the container used when its eviction was accepted; None: it was not evicted."""
    peak_mib: int
    graces: tuple[int, ...]
    """The grace period of each eviction request, in seconds."""

    @property
    def polite(self) -> bool:
        """Whether it ended as after a drain."""
        return self.exit_code == 143 and self.pre_stop_ended


def run(node: Node, per_s: int, *, agent: bool) -> Ramp:
    """Run one ramp of so many MiB a second. `agent`: one runs with `CONFIGURATION`."""
    node.machine.write(f"/run/vm/{PROGRAM.name}", PROGRAM.read_bytes())
    with node.cast() as cast:
        return _run(node, cast, f"leak-{uuid.uuid4().hex[:8]}", per_s, agent=agent)


def _run(node: Node, cast: Cast, name: str, per_s: int, *, agent: bool) -> Ramp:
    machine, start_mib = node.machine, START_MIB[per_s]
    pod = start_pod(machine, name, qos_class="Burstable")
    cast.add(pod, grace=GRACE_S, requests={"memory": f"{LIMIT_MIB}Mi"})
    words = (pod.cgroup, uuid.uuid4().hex * 2, LIMIT_MIB, start_mib, per_s, PRE_STOP_S)
    command = f"exec timeout {LONGEST_S} python3 -u /run/vm/{PROGRAM.name} {' '.join(map(str, words))}"
    container = machine.start(command)
    assert container.stdin is not None
    assert container.stdout is not None
    stdin, stdout, lock = container.stdin, container.stdout, threading.Lock()

    def send(line: str) -> None:
        with lock, contextlib.suppress(OSError):  # it has ended
            stdin.write(line + "\n")
            stdin.flush()

    graces: list[int] = []

    def kubelet(_entry: dict[str, Any], body: dict[str, Any]) -> None:
        graces.append(body["deleteOptions"]["gracePeriodSeconds"])
        send("evict")

    node.api.on_eviction = kubelet
    try:
        assert stdout.readline() == "ready\n"
        if agent:
            least = (start_mib - LIMIT_MIB) * MIB
            machine.run(["timeout", "150", "python3", "-c", WAIT_UNTIL_READ, name, str(least), METRICS])
        send("go")
        found = json.loads(stdout.readline())
    finally:
        node.api.on_eviction = None
        container.communicate(timeout=60)
    return Ramp(found["exit"], found["preStop"], found["evictedAt"], found["peak"], tuple(graces))
