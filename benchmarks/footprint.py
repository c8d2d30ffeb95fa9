"""What the agent takes of what daemonset.yaml gives it: `python -m benchmarks.footprint [pods...]`.

The running agent (`nodeagent run`, with its defaults, against an API double) in v1 cgroups of its own that have exactly
the memory and CPU limits of the DaemonSet's container, on a node of pods in real cgroups (110, then 500; needs root):

* `start`: until it has published its first conditions;
* `calm`: nothing is near a threshold;
* `near`: a pod grows slowly to just above the hard threshold, so that the loop samples as often as it ever does;
* `pressure`: three pods in turn grow fast through it; each is evicted and ended.

For each: CPU as a share of one core, and for how much of the time the CPU limit held the agent up. Then the most memory
that was ever charged to it, kernel memory and page cache included, what of that was kernel memory, and how often the
limit was hit. Files that others have read before are not charged: a fresh node charges some MiB of page cache more,
which goes when it is needed.
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

from nodeagent.config.quantity import parse_milli, parse_quantity
from tests.fake_kube import ApiServer, Json, pod
from tests.support.livenode import MIB, Kubepods, configuration, until

DAEMONSET: Final = Path(__file__).parents[1] / "daemonset.yaml"
SIZES: Final = (110, 500)
CALM_S: Final = 20.0
NEAR_S: Final = 8.0
HARD_MIB: Final = 300
LIMIT_MIB: Final = 900
"""Of all pods together: what is left of it is the signal."""
HOGS: Final = ("first", "second", "third")
PERIOD_US: Final = 100_000
"""Of a kubelet's CFS quota."""
START_S: Final = 60.0


class Limits(NamedTuple):
    """Of the DaemonSet's container."""

    memory: int
    """Bytes."""
    cpu: float
    """Cores."""


class Phase(NamedTuple):
    """One part of the run."""

    name: str
    seconds: float
    core: float
    """Share of one core."""
    throttled: float
    """Share of the time that the CPU limit held it up."""


class Footprint(NamedTuple):
    """What one run took."""

    phases: tuple[Phase, ...]
    peak: int
    """Bytes charged at most."""
    peak_kernel: int
    """Bytes of kernel memory at most."""
    resident: int
    """Bytes resident at the end."""
    limit_hits: int
    evicted: tuple[str, ...]
    """Names of the pods, in order."""


def limits() -> Limits:
    """As daemonset.yaml has them."""
    documents = yaml.safe_load_all(DAEMONSET.read_text(encoding="utf-8"))
    [spec] = [each["spec"]["template"]["spec"] for each in documents if each["kind"] == "DaemonSet"]
    [container] = spec["containers"]
    told = container["resources"]["limits"]
    return Limits(parse_quantity(told["memory"]), parse_milli(told["cpu"]) / 1000)


class Cage:
    """Cgroups with the limits."""

    def __init__(self, most: Limits) -> None:
        name = f"nodeagent-test-{uuid.uuid4().hex[:12]}"
        self.memory, self.cpu, self.account = (
            Path("/sys/fs/cgroup", each).resolve(strict=True) / name for each in ("memory", "cpu", "cpuacct")
        )
        self._places = sorted({self.memory, self.cpu, self.account})  # cpu and cpuacct are one hierarchy on most hosts
        for place in self._places:
            place.mkdir()
        (self.memory / "memory.limit_in_bytes").write_text(str(most.memory))
        (self.cpu / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (self.cpu / "cpu.cfs_quota_us").write_text(str(int(most.cpu * PERIOD_US)))

    def number(self, name: str) -> int:
        return int((self.memory / name).read_text())

    def spent_s(self) -> tuple[float, float]:
        """(CPU time, time held up by the limit)."""
        held = dict(line.split() for line in (self.cpu / "cpu.stat").read_text().splitlines())
        return int((self.account / "cpuacct.usage").read_text()) / 1e9, int(held["throttled_time"]) / 1e9

    def command(self, *arguments: str) -> list[str]:
        """What runs Python with these arguments in here from its first instruction on."""
        places = " ".join(f"{place}/cgroup.procs" for place in self._places)
        return ["sh", "-c", f'for f in {places}; do echo $$ >$f; done; exec "$@"', "sh", sys.executable, *arguments]

    def close(self) -> None:
        for place in self._places:
            place.rmdir()


def measure(size: int, *, calm_s: float = CALM_S) -> Footprint:
    """One run on so many pods."""
    kubepods, cage = Kubepods(limit=LIMIT_MIB * MIB), Cage(limits())
    names = {name: str(uuid.uuid4()) for name in HOGS} | {f"calm-{number}": str(uuid.uuid4()) for number in range(size)}
    told = [pod(name, uid=uid, owner=("ReplicaSet", name), requests={"memory": "8Mi"}) for name, uid in names.items()]
    evicted: list[str] = []
    try:
        with tempfile.TemporaryDirectory() as directory, ApiServer(node="lab-node", pods=told, linger_s=None) as api:
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
                command = cage.command("-m", "nodeagent", "run", "--config", str(config), "--kubeconfig", kubeconfig,
                                       "--node-name", "lab-node")  # fmt: skip
                agent = subprocess.Popen(command, stdout=log, stderr=log)
            try:
                return _watch(agent, cage, kubepods, api, {name: names[name] for name in HOGS}, evicted, calm_s)
            finally:
                agent.send_signal(signal.SIGTERM)
                agent.wait(30)
    finally:
        kubepods.close()
        cage.close()


CONFIGURATION: Final[dict[str, Any]] = {
    "evictionHard": {"allocatableMemory.available": f"{HARD_MIB}Mi"},
    "evictionSoft": {},
    "evictionSoftGracePeriod": {},
    "evictionPressureTransitionPeriod": "1s",
}


def _watch(
    agent: subprocess.Popen[bytes],
    cage: Cage,
    kubepods: Kubepods,
    api: ApiServer,
    hogs: dict[str, str],
    evicted: Sequence[str],
    calm_s: float,
) -> Footprint:
    phases = []

    def during(name: str, work: Callable[[], object]) -> None:
        began, (cpu, held) = time.monotonic(), cage.spent_s()
        work()
        passed, (cpu_after, held_after) = time.monotonic() - began, cage.spent_s()
        phases.append(Phase(name, passed, (cpu_after - cpu) / passed, (held_after - held) / passed))

    def own(status: str) -> bool:
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

    during("start", lambda: until(lambda: own("False"), "the first condition", START_S))
    during("calm", lambda: time.sleep(calm_s))
    during("near", grow_slowly)
    during("pressure", crash_through)
    pages = int(Path(f"/proc/{agent.pid}/statm").read_text().split()[1])
    return Footprint(
        phases=tuple(phases),
        peak=cage.number("memory.max_usage_in_bytes"),
        peak_kernel=cage.number("memory.kmem.max_usage_in_bytes"),
        resident=pages * 4096,
        limit_hits=cage.number("memory.failcnt"),
        evicted=tuple(evicted),
    )


def main(arguments: Sequence[str]) -> None:
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return
    most = limits()
    print(f"limits: {most.memory / MIB:.0f} MiB, {most.cpu:g} of a core")
    for size in [int(each) for each in arguments] or SIZES:
        seen = measure(size)
        print(f"{size} pods: at most {seen.peak / MIB:.1f} MiB charged, {seen.peak_kernel / MIB:.1f} of them kernel "
              f"memory; resident {seen.resident / MIB:.1f}; limit hit {seen.limit_hits} times")  # fmt: skip
        for phase in seen.phases:
            print(
                f"  {phase.name:<9} {phase.seconds:5.1f} s  {phase.core:7.2%} of a core, held up {phase.throttled:6.2%}"
            )


if __name__ == "__main__":
    main(sys.argv[1:])
