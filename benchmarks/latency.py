"""From the moment a real process crosses a real threshold to the eviction request on the wire.

    python -m benchmarks.latency [--runs 30] [--pods 110 500]

Needs root and cgroup v1. In a scratch `kubepods` with that many pods a process allocates until the pods' cgroup crosses
its threshold; it stamps the moment. The loop is the agent's own, in this process, so that its stages can be stamped:

    wake      the sample that saw it was begun
    victim    the decision was made, saved and looked at a second time; the ranked victim is handed to the API worker
    wire      the request arrived at the API double (another process) on loopback

Beside it, in the same runs, what a loop costs that only waits for the kernel's own notification (eventfd of
`cgroup.event_control`) and does nothing: the limit that no agent can beat here. Prints medians and 99th percentiles in
ms; nothing is asserted.
"""

import argparse
import json
import multiprocessing
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from nodeagent.agent import Agent
from nodeagent.cluster import credentials, identity, transport
from nodeagent.cluster.session import ClusterSession
from nodeagent.config.watch import ConfigFile
from nodeagent.daemon import brake_of
from nodeagent.host import protect
from nodeagent.host.holds import Holds
from nodeagent.host.hooks import Hooks
from nodeagent.host.notify import Silent
from nodeagent.host.wakeup import Wakeups
from nodeagent.journal.log import open_log
from nodeagent.journal.state import StateFile
from nodeagent.keeper import AgentState
from nodeagent.model import Victim
from nodeagent.parts import Means, Parts
from nodeagent.policy import state as policy_state
from nodeagent.sampling.alarms import Alarms
from nodeagent.sampling.disk.watch import DiskWatch
from nodeagent.sampling.forks import NoForks
from nodeagent.sampling.host import open_host
from nodeagent.sampling.sampler import Sampler
from nodeagent.sampling.wake import MemoryLevel
from tests.apiserver import ApiServer, pod
from tests.livenode import HIERARCHIES, MIB, Kubepods, configuration

LIMIT = 600 * MIB
THRESHOLD = 300 * MIB

HOG = """
import sys, time
from pathlib import Path
usage, level = Path(sys.argv[1]), int(sys.argv[2])
held, chunk = [], b"x" * (1 << 20)
print("up", flush=True)
sys.stdin.readline()
with usage.open("rb", buffering=0) as file:
    crossed = 0
    for _ in range(450):
        held.append(bytearray(chunk))
        file.seek(0)
        if not crossed and int(file.read()) > level:
            crossed = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
            print(crossed, flush=True)
sys.stdin.readline()
"""


class Stages(NamedTuple):
    """Seconds from the crossing."""

    kernel: float
    wake: float
    victim: float
    wire: float


class StampedSession(ClusterSession):
    """The agent's session; stamps when a victim is handed to it."""

    handed_at = 0.0

    def evict(self, plan_id: str, victim: Victim) -> None:
        self.handed_at = _now()
        super().evict(plan_id, victim)


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def serve(pipe: Connection, count: int) -> None:
    """The API server's process: answers with when each eviction arrived."""
    pods = [pod(f"pod-{n}", uid=_uid(n), owner=("ReplicaSet", f"rs-{n}"), qos="Burstable") for n in range(count)]
    with ApiServer(node="lab-node", pods=pods, linger_s=None) as api:
        api.on_eviction = lambda *_: pipe.send(_now())
        pipe.send(api.url)
        while (message := pipe.recv()) is not None:
            name, uid = message
            if uid:
                api.add_pod(pod(name, uid=uid, owner=("ReplicaSet", name), qos="BestEffort"))
            else:
                api.delete_pod("default", name)


def _uid(number: int) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_DNS, f"pod-{number}"))


class Bench:
    """One node with so many pods, one agent on it."""

    def __init__(self, directory: Path, count: int) -> None:
        self.kubepods = Kubepods(LIMIT)
        for number in range(count):
            self.kubepods.make_idle(_uid(number), qos="burstable")
        self.pipe, far = multiprocessing.Pipe()
        self.server = multiprocessing.get_context("spawn").Process(target=serve, args=(far, count), daemon=True)
        self.server.start()
        self.kubeconfig = _kubeconfig(directory, self.pipe.recv())
        self.directory = directory

    def measure(self, runs: int) -> list[Stages]:
        settings = configuration(
            self.directory,
            self.kubepods,
            evictionHard={"allocatableMemory.available": "300Mi"},
            evictionSoft={},
            evictionSoftGracePeriod={},
            relief={"failuresBeforeStop": 100000},  # the next hog follows before the last one's relief is measured
            sampling={"interval": "1s", "cgroupRoot": f"/{self.kubepods.root}"},
            budgets={
                **{name: {"burst": 1000, "perHour": 100000} for name in ("node", "namespace", "owner", "signal")},
                "ownerBackoff": "0s",
            },
        )
        file = ConfigFile(str(settings), overrides=())
        loaded = file.load()
        host = open_host("/")
        log, writer = open_log(level="error", style="json", fd=os.open(os.devnull, os.O_WRONLY))
        with Wakeups() as wakeups, Sampler(host, loaded.config.sampling, node_name="lab-node") as sampler:
            link = transport.connect(credentials.find_credentials(str(self.kubeconfig)))
            guess = identity.local_name(given="lab-node")
            session = StampedSession(link, loaded.config, guess, wake=wakeups.wake)
            alarms = Alarms(host)
            kept = AgentState(policy_state.initial("bench", now=_now()))
            (self.directory / "state").mkdir()
            store = StateFile(self.directory / "state" / "state", shape=AgentState, boot_id="bench")
            means = Means(
                file=file,
                alarms=alarms,
                holds=Holds(brake_of(host)),
                hooks=Hooks(boottime=host.boottime),
                forks=NoForks(),
                neighbours=tuple,
                store=store,
                recorder=None,
                found=(),
                log=log,
                lines_dropped=lambda: 0,
                notifier=Silent(),
                boottime=host.boottime,
            )
            parts = Parts(loaded, sampler, session, DiskWatch(host, loaded.config.sampling))
            agent = Agent(parts, means, rebuild=lambda parts, _: parts, policy=kept.policy)
            session.start()
            protect.freeze_collector()
            stages = [self._one(agent, wakeups, session, number) for number in range(runs + 2)][2:]
            agent.stop()
            alarms.close()
        writer.close()
        return stages

    def _one(self, agent: Agent, wakeups: Wakeups, session: StampedSession, number: int) -> Stages:
        name, uid = f"hog-{number}", str(uuid.uuid4())
        self.pipe.send((name, uid))
        top = HIERARCHIES[0] / self.kubepods.root / "kubepods"
        level = LIMIT - THRESHOLD
        command = [sys.executable, "-c", HOG, str(top / "memory.usage_in_bytes"), str(level)]
        hog = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.kubepods.adopt(uid, hog, qos="besteffort")
        assert hog.stdin is not None
        assert hog.stdout is not None
        hog.stdout.readline()
        self._turn_until(agent, wakeups, lambda: any(p.uid == uid for p in session.pods().pods))
        for _ in range(4):
            self._turn(agent, wakeups, most_s=0.05)
        session.handed_at, woken = 0.0, []
        bare = multiprocessing.get_context("fork").Process
        listener, told = multiprocessing.Pipe()
        kernel = bare(target=_kernel_alone, args=(str(top), level, told), daemon=True)
        kernel.start()
        listener.recv()
        hog.stdin.write("go\n")
        hog.stdin.flush()
        while not session.handed_at:
            woken.append(_now())
            self._turn(agent, wakeups, most_s=1.0)
        crossed = int(hog.stdout.readline()) / 1e9
        wire = self.pipe.recv()
        notified = listener.recv()
        kernel.join()
        began = max(at for at in woken if at <= session.handed_at)
        self.kubepods.kill(uid)
        self.pipe.send((name, ""))
        self._turn_until(agent, wakeups, lambda: all(p.uid != uid for p in session.pods().pods))
        self._turn_until(agent, wakeups, lambda: not session.outcomes())
        return Stages(notified - crossed, began - crossed, session.handed_at - crossed, wire - crossed)

    def _turn(self, agent: Agent, wakeups: Wakeups, *, most_s: float) -> None:
        agent.watch(wakeups)
        sleep_s = agent.turn()
        wakeups.wait(min(sleep_s, most_s))

    def _turn_until(self, agent: Agent, wakeups: Wakeups, condition: Any) -> None:
        deadline = _now() + 30
        while not condition():
            assert _now() < deadline
            self._turn(agent, wakeups, most_s=0.05)

    def close(self) -> None:
        self.pipe.send(None)
        self.server.join(5)
        self.kubepods.close()


def _kernel_alone(directory: str, level: int, told: Connection) -> None:
    """Wait for the kernel's notification and do nothing else."""
    memory = MemoryLevel(directory)
    memory.arm(level)
    with select.epoll() as epoll:
        epoll.register(memory.source().fd, select.EPOLLIN)
        told.send("armed")
        epoll.poll(30)
        told.send(_now())
    memory.close()


def _kubeconfig(directory: Path, url: str) -> Path:
    path = directory / "kubeconfig"
    path.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "c",
                "clusters": [{"name": "c", "cluster": {"server": url}}],
                "users": [{"name": "c", "user": {"token": "agent-token"}}],
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
            }
        )
    )
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--pods", type=int, nargs="+", default=[110, 500])
    options = parser.parse_args()
    print(f"{'pods':>5} {'stage':8} {'median':>8} {'p99':>8} {'max':>8}   ms after the crossing, {options.runs} runs")
    for count in options.pods:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:  # a tmpfs, as the default /run is
            bench = Bench(Path(directory), count)
            try:
                stages = bench.measure(options.runs)
            finally:
                bench.close()
        for field in Stages._fields:
            values = sorted(1000 * getattr(each, field) for each in stages)
            p99 = values[min(len(values) - 1, round(0.99 * len(values)))]
            print(f"{count:5} {field:8} {statistics.median(values):8.2f} {p99:8.2f} {values[-1]:8.2f}")


if __name__ == "__main__":
    main()
