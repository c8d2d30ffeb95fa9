"""CPU and memory of the agent with the resources of daemonset.yaml: `python -m benchmarks.footprint [pods...]`.

The agent (`nodeagent run` with its defaults, against an API double) runs in v1 cgroups with the memory limit and the
CPU shares of the DaemonSet's container, which has no CPU limit, on a node of pods in real cgroups (110, then 500; needs
root):

* `start`: until its first conditions are published;
* `calm`: nothing is near a threshold;
* `near`: a pod grows slowly to just above the hard threshold, so that the loop samples at its highest rate;
* `pressure`: three pods, one after the other, grow fast through the threshold; each is evicted and ended.

For each phase the output has the CPU share of one core. Then follow the peak of the charged memory, including kernel
memory and page cache, its part of kernel memory, and the number of limit hits. Files that other processes have read
before are not charged: a new node charges several MiB of page cache more, which the kernel reclaims when necessary.
"""

import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from nodeagent.config import quantity
from tests.fake_kube import ApiServer, Json, pod
from tests.support.livenode import MIB, Kubepods, configuration, until

DAEMONSET: Final = Path(__file__).parents[1] / "daemonset.yaml"
SIZES: Final = (110, 500)
CALM_S: Final = 20.0
NEAR_S: Final = 8.0
HARD_MIB: Final = 300
LIMIT_MIB: Final = 900
"""Limit of all pods together. The rest of it is the signal."""
HOGS: Final = ("first", "second", "third")
START_S: Final = 60.0


class Resources(NamedTuple):
    """The resources of the DaemonSet's container."""

    memory_limit: int
    """Bytes."""
    cpu_request: float
    """Cores."""


class Phase(NamedTuple):
    """One phase of a run."""

    name: str
    seconds: float
    core: float
    """Share of one core."""


class Footprint(NamedTuple):
    """The result of one run."""

    phases: tuple[Phase, ...]
    peak: int
    """Most bytes charged."""
    peak_kernel: int
    """Most bytes of kernel memory."""
    resident: int
    """Bytes resident at the end."""
    limit_hits: int
    evicted: tuple[str, ...]
    """Names of the pods, in order."""


def container_resources() -> Resources:
    """The resources in daemonset.yaml."""
    documents = yaml.safe_load_all(DAEMONSET.read_text(encoding="utf-8"))
    [spec] = [each["spec"]["template"]["spec"] for each in documents if each["kind"] == "DaemonSet"]
    [container] = spec["containers"]
    limits, requests = container["resources"]["limits"], container["resources"]["requests"]
    return Resources(quantity.parse_quantity(limits["memory"]), quantity.parse_milli(requests["cpu"]) / 1000)


class LimitedCgroups:
    """Cgroups with the resources of the container."""

    def __init__(self, resources: Resources) -> None:
        name = f"nodeagent-test-{uuid.uuid4().hex[:12]}"
        self.memory, self.cpu, self.account = (
            Path("/sys/fs/cgroup", each).resolve(strict=True) / name for each in ("memory", "cpu", "cpuacct")
        )
        self._paths = sorted({self.memory, self.cpu, self.account})  # cpu and cpuacct are one hierarchy on most hosts
        for path in self._paths:
            path.mkdir()
        (self.memory / "memory.limit_in_bytes").write_text(str(resources.memory_limit))
        (self.cpu / "cpu.shares").write_text(str(int(resources.cpu_request * 1024)))  # as a kubelet does

    def number(self, name: str) -> int:
        return int((self.memory / name).read_text())

    def spent_s(self) -> float:
        """CPU time."""
        return int((self.account / "cpuacct.usage").read_text()) / 1e9

    def command(self, *arguments: str) -> list[str]:
        """A command that runs Python with these arguments in the cgroups from its first instruction."""
        paths = " ".join(f"{path}/cgroup.procs" for path in self._paths)
        return ["sh", "-c", f'for f in {paths}; do echo $$ >$f; done; exec "$@"', "sh", sys.executable, *arguments]

    def close(self) -> None:
        for path in self._paths:
            path.rmdir()


def measure(size: int, *, calm_s: float = CALM_S) -> Footprint:
    """One run with this many pods."""
    kubepods, cgroups = Kubepods(limit=LIMIT_MIB * MIB), LimitedCgroups(container_resources())
    names = {name: str(uuid.uuid4()) for name in HOGS} | {f"calm-{number}": str(uuid.uuid4()) for number in range(size)}
    pods = [pod(name, uid=uid, owner=("ReplicaSet", name), requests={"memory": "8Mi"}) for name, uid in names.items()]
    evicted: list[str] = []
    try:
        with tempfile.TemporaryDirectory() as directory, ApiServer(node="lab-node", pods=pods, linger_s=None) as api:
            for name, uid in names.items():
                if name not in HOGS:
                    sleeper = subprocess.Popen(
                        ["sleep", "3600"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                    )
                    kubepods.adopt(uid, sleeper, qos="burstable")
            api.on_eviction = lambda entry, _body: evicted.append(entry["metadata"]["name"])
            kubeconfig = str(api.kubeconfig(Path(directory) / "kubeconfig"))
            config = configuration(
                Path(directory), kubepods, **CONFIGURATION, sampling={"cgroupRoot": f"/{kubepods.root}"}
            )
            with (Path(directory) / "log").open("wb") as log:
                command = cgroups.command("-m", "nodeagent", "run", "--config", str(config), "--kubeconfig", kubeconfig,
                                       "--node-name", "lab-node")  # fmt: skip
                agent = subprocess.Popen(command, stdout=log, stderr=log)
            try:
                return _watch(agent, cgroups, kubepods, api, {name: names[name] for name in HOGS}, evicted, calm_s)
            finally:
                agent.send_signal(signal.SIGTERM)
                agent.wait(30)
    finally:
        kubepods.close()
        cgroups.close()


CONFIGURATION: Final[dict[str, Any]] = {
    "evictionHard": {"allocatableMemory.available": f"{HARD_MIB}Mi"},
    "evictionSoft": {},
    "evictionSoftGracePeriod": {},
    "evictionPressureTransitionPeriod": "1s",
}


def _watch(
    agent: subprocess.Popen[bytes],
    cgroups: LimitedCgroups,
    kubepods: Kubepods,
    api: ApiServer,
    hogs: dict[str, str],
    evicted: Sequence[str],
    calm_s: float,
) -> Footprint:
    phases = []

    def during(name: str, work: Callable[[], object]) -> None:
        began, cpu = time.monotonic(), cgroups.spent_s()
        work()
        passed = time.monotonic() - began
        phases.append(Phase(name, passed, (cgroups.spent_s() - cpu) / passed))

    def condition_is(status: str) -> bool:
        found: Json | None = api.condition("NodeAgentMemoryPressure")
        return found is not None and found["status"] == status

    def grow_slowly() -> None:
        kubepods.start(hogs["first"], qos="burstable")
        kubepods.eat(hogs["first"], LIMIT_MIB - HARD_MIB - 140)
        for _ in range(int(NEAR_S * 10)):
            kubepods.eat(hogs["first"], 1)
            time.sleep(0.1)

    def crash_through() -> None:
        for name, uid in hogs.items():
            if name != "first":
                kubepods.start(uid, qos="burstable")
                kubepods.eat(uid, LIMIT_MIB - HARD_MIB - 140)
            kubepods.eat(uid, 200)
            until(lambda name=name: name in evicted, f"the eviction of {name}")  # type: ignore[misc]
            kubepods.kill(uid)
            api.delete_pod("default", name)

    during("start", lambda: until(lambda: condition_is("False"), "the first condition", START_S))
    during("calm", lambda: time.sleep(calm_s))
    during("near", grow_slowly)
    during("pressure", crash_through)
    pages = int(Path(f"/proc/{agent.pid}/statm").read_text().split()[1])
    return Footprint(
        phases=tuple(phases),
        peak=cgroups.number("memory.max_usage_in_bytes"),
        peak_kernel=cgroups.number("memory.kmem.max_usage_in_bytes"),
        resident=pages * 4096,
        limit_hits=cgroups.number("memory.failcnt"),
        evicted=tuple(evicted),
    )


def main(arguments: Sequence[str]) -> None:
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return
    resources = container_resources()
    print(f"memory limit {resources.memory_limit / MIB:.0f} MiB, CPU request {resources.cpu_request:g} of a core")
    for size in [int(each) for each in arguments] or SIZES:
        result = measure(size)
        print(f"{size} pods: at most {result.peak / MIB:.1f} MiB charged, {result.peak_kernel / MIB:.1f} of them "
              f"kernel memory; resident {result.resident / MIB:.1f}; limit hit {result.limit_hits} times")  # fmt: skip
        for phase in result.phases:
            print(f"  {phase.name:<9} {phase.seconds:5.1f} s  {phase.core:7.2%} of a core")


if __name__ == "__main__":
    main(sys.argv[1:])
