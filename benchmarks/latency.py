"""Latency from the moment a real process crosses a real threshold to the eviction request on the wire.

    python -m benchmarks.latency [--runs 30] [--pods 110 500]

Needs root and cgroup v1. In a scratch `kubepods` with that many pods, a process allocates 256 KiB at a time, as fast as
it can, until the pods' cgroup is beyond its threshold. The crossing is the start of the allocation that crossed: a
stamp after it may be late, because the woken process takes the core. The agent's loop runs in this process, with its
self-protection, so that its stages can be stamped:

    wake      start of the sample that found the crossing
    ranked    the decision is made: the victim is known
    victim    the state is saved and the recheck done; the victim is handed to the API worker
    wire      the request has arrived at the API double (another process) on loopback

Alternating with it, on the same pods and with the same priority, a C program (compiled here if there is a compiler)
waits for the kernel's notification (`cgroup.event_control`) at the same level: the lower limit.

    C wake    it has returned from its wait
    C ranked  it has read the usage of every pod through open descriptors, and knows the largest

The kernel checks a level after every 128 pages charged on a CPU. The output has medians and 99th percentiles in ms.
Bound: p99 of `wire` 50 ms.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from nodeagent.actuators.brakes import ActiveBrakes
from nodeagent.actuators.cluster_session import ClusterSession
from nodeagent.config.config_file import ConfigFile
from nodeagent.kube import credentials, node_identity, transport
from nodeagent.loop.agent import Agent
from nodeagent.loop.assembly import open_cgroup_brake
from nodeagent.loop.components import Components
from nodeagent.loop.state_store import AgentState
from nodeagent.model import Outcome, Victim
from nodeagent.policy import state as policy_state
from nodeagent.records.state_file import StateFile
from nodeagent.runtime import self_protection
from nodeagent.runtime.wakeups import Wakeups
from nodeagent.sampling.disk.monitor import DiskMonitor
from nodeagent.sampling.hostfs.host import open_host
from nodeagent.sampling.hostfs.statvfs_timeout import StatvfsWithTimeout
from nodeagent.sampling.sampler import Sampler
from nodeagent.telemetry.log import open_log
from tests.fake_kube import ApiServer, pod
from tests.support.livenode import HIERARCHIES, MIB, Kubepods, configuration
from tests.support.runtime import bare_runtime

LIMIT = 600 * MIB
THRESHOLD = 300 * MIB
LEVEL = LIMIT - THRESHOLD

HOG = """
import sys, time
from pathlib import Path
usage, level = Path(sys.argv[1]), int(sys.argv[2])
blocks, chunk = [], b"x" * (1 << 18)
print("up", flush=True)
sys.stdin.readline()
with usage.open("rb", buffering=0) as file:
    crossed = 0
    for _ in range(1800):
        before = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        blocks.append(bytearray(chunk))
        file.seek(0)
        if not crossed and int(file.read()) > level:
            crossed = before
            print(crossed, flush=True)
sys.stdin.readline()
"""


WAITER_C = r"""
#define _GNU_SOURCE
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <fcntl.h>
#include <stdint.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>
static double now(void) { struct timespec t; clock_gettime(CLOCK_BOOTTIME, &t); return t.tv_sec + t.tv_nsec / 1e9; }
int main(int argc, char **argv) {
    char text[4096];
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    glob_t pods;
    snprintf(text, sizeof text, "%s/*/pod*/memory.usage_in_bytes", argv[1]);
    if (glob(text, 0, NULL, &pods)) return 1;
    int *fds = calloc(pods.gl_pathc, sizeof *fds);
    for (size_t i = 0; i < pods.gl_pathc; i++) fds[i] = open(pods.gl_pathv[i], O_RDONLY);
    snprintf(text, sizeof text, "%s/memory.usage_in_bytes", argv[1]);
    int usage = open(text, O_RDONLY), event = eventfd(0, 0);
    snprintf(text, sizeof text, "%s/cgroup.event_control", argv[1]);
    int control = open(text, O_WRONLY);
    snprintf(text, sizeof text, "%d %d %s", event, usage, argv[2]);
    if (write(control, text, strlen(text)) < 0) return 1;
    puts("armed");
    fflush(stdout);
    uint64_t number;
    if (read(event, &number, sizeof number) < 0) return 1;
    double woke = now();
    long long most = -1;
    for (size_t i = 0; i < pods.gl_pathc; i++) {
        ssize_t length = pread(fds[i], text, sizeof text - 1, 0);
        text[length < 0 ? 0 : length] = 0;
        long long used = atoll(text);
        if (used > most) most = used;
    }
    printf("%.9f %.9f\n", woke, now());
}
"""


class Stages(NamedTuple):
    """Seconds from the crossing."""

    wake: float
    ranked: float
    victim: float
    wire: float


class Limit(NamedTuple):
    """Stages of the C program, seconds from the crossing."""

    c_wake: float
    c_ranked: float


class Hog(NamedTuple):
    """The process that crosses the threshold."""

    name: str
    uid: str
    process: subprocess.Popen[str]

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def crossed(self) -> float:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline()) / 1e9


class StampedSession(ClusterSession):
    """The agent's session; stamps when it gets a victim, and counts the outcomes."""

    handed_at = 0.0
    outcome_count = 0

    def evict(self, plan_id: str, victim: Victim) -> None:
        self.handed_at = _now()
        super().evict(plan_id, victim)

    def outcomes(self) -> tuple[Outcome, ...]:
        outcomes = super().outcomes()
        self.outcome_count += len(outcomes)
        return outcomes


class StampedStore(StateFile):
    """The agent's state file; stamps the start of a save."""

    stamped_at = 0.0

    def save(self, value: object) -> None:
        self.stamped_at = _now()
        super().save(value)


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def serve(pipe: Connection, count: int) -> None:
    """The process of the API server: sends the arrival time of each eviction."""
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
    """One node with this many pods and one agent."""

    def __init__(self, directory: Path, count: int) -> None:
        self.kubepods = Kubepods(LIMIT)
        for number in range(count):
            self.kubepods.make_idle(_uid(number), qos="burstable")
        self.pipe, far = multiprocessing.Pipe()
        self.server = multiprocessing.get_context("spawn").Process(target=serve, args=(far, count), daemon=True)
        self.server.start()
        self.kubeconfig = _kubeconfig(directory, self.pipe.recv())
        self.directory = directory
        self.waiter = _compiled(directory)

    def measure(self, runs: int) -> tuple[list[Stages], list[Limit]]:
        settings = configuration(
            self.directory,
            self.kubepods,
            evictionHard={"allocatableMemory.available": "300Mi"},
            evictionSoft={},
            evictionSoftGracePeriod={},
            relief={"failuresBeforeStop": 100000},  # the next hog starts before the relief of the last one is measured
            sampling={"interval": "1s", "cgroupRoot": f"/{self.kubepods.root}"},
            rateLimits={
                **{name: {"burst": 1000, "perHour": 100000} for name in ("node", "namespace", "owner", "signal")},
                "ownerBackoff": "0s",
            },
        )
        file = ConfigFile(str(settings), overrides=())
        loaded = file.load()
        host = open_host("/")
        log, writer = open_log(level="error", style="json", fd=os.open(os.devnull, os.O_WRONLY))
        statvfs = StatvfsWithTimeout(host.statvfs)
        sampling = loaded.config.sampling
        with Wakeups() as wakeups, Sampler(host, sampling, node_name="lab-node", statvfs=statvfs) as sampler:
            link = transport.connect(credentials.find_credentials(str(self.kubeconfig)))
            guess = node_identity.local_name(given="lab-node")
            session = StampedSession(link, loaded.config, guess, wake=wakeups.wake)
            agent_state = AgentState(policy_state.initial("bench", now=_now()))
            (self.directory / "state").mkdir()
            store = StampedStore(self.directory / "state" / "state", shape=AgentState, boot_id="bench")
            brakes = ActiveBrakes(open_cgroup_brake(host))
            runtime = bare_runtime(host, file=file, brakes=brakes, log=log)._replace(store=store)
            parts = Components(loaded, sampler, session, DiskMonitor(host, loaded.config.sampling))
            agent = Agent(parts, runtime, rebuild=lambda parts, _: parts, policy=agent_state.policy)
            session.start()
            for note in self_protection.protect_process():
                print(f"{note.subject}: {note.message}")
            self_protection.freeze_collector()
            stages, limits = [], []
            for number in range(runs + 2):
                stages.append(self._one(agent, wakeups, session, store, number))
                if self.waiter is not None:
                    limits.append(self._limit(self.waiter))
            agent.stop()
            runtime.wakeup_sources.close()
        writer.close()
        return stages[2:], limits[2:]

    def _one(self, agent: Agent, wakeups: Wakeups, session: StampedSession, store: StampedStore, number: int) -> Stages:
        hog = self._hog(f"hog-{number}")
        self.pipe.send((hog.name, hog.uid))
        self._sync_until(agent, wakeups, lambda: any(p.uid == hog.uid for p in session.pods().pods))
        for _ in range(4):
            self._sync(agent, wakeups, most_s=0.05)
        session.handed_at, session.outcome_count, syncs = 0.0, 0, []
        hog.go()
        while not session.handed_at:
            syncs.append(_now())
            self._sync(agent, wakeups, most_s=1.0)
        crossed = hog.crossed()
        wire = self.pipe.recv()
        began = max(at for at in syncs if at <= session.handed_at)
        ranked = store.stamped_at
        self.kubepods.kill(hog.uid)
        self.pipe.send((hog.name, ""))
        self._sync_until(agent, wakeups, lambda: all(p.uid != hog.uid for p in session.pods().pods))
        self._sync_until(agent, wakeups, lambda: session.outcome_count > 0)
        return Stages(began - crossed, ranked - crossed, session.handed_at - crossed, wire - crossed)

    def _limit(self, waiter: str) -> Limit:
        hog = self._hog("alone")
        process = subprocess.Popen([waiter, self._top, str(LEVEL)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        if process.stdout.readline() != "armed\n":
            raise SystemExit("the C program cannot wait for a level")
        hog.go()
        crossed = hog.crossed()
        woke, ranked = process.communicate(timeout=30)[0].split()
        self.kubepods.kill(hog.uid)
        return Limit(float(woke) - crossed, float(ranked) - crossed)

    @property
    def _top(self) -> Path:
        return HIERARCHIES[0] / self.kubepods.root / "kubepods"

    def _hog(self, name: str) -> Hog:
        usual = str(-os.getpriority(os.PRIO_PROCESS, 0))  # a pod has not the agent's priority
        usage = str(self._top / "memory.usage_in_bytes")
        command = ["nice", "-n", usual, sys.executable, "-c", HOG, usage, str(LEVEL)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        hog = Hog(name, str(uuid.uuid4()), process)
        self.kubepods.adopt(hog.uid, process, qos="besteffort")
        assert process.stdout is not None
        process.stdout.readline()
        return hog

    def _sync(self, agent: Agent, wakeups: Wakeups, *, most_s: float) -> None:
        agent.update_wakeup_sources(wakeups)
        sleep_s = agent.sync()
        wakeups.wait(min(sleep_s, most_s))

    def _sync_until(self, agent: Agent, wakeups: Wakeups, condition: Any) -> None:
        deadline = _now() + 30
        while not condition():
            assert _now() < deadline
            self._sync(agent, wakeups, most_s=0.05)

    def close(self) -> None:
        self.pipe.send(None)
        self.server.join(5)
        self.kubepods.close()


def _compiled(directory: Path) -> str | None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    (directory / "waiter.c").write_text(WAITER_C)
    subprocess.run([compiler, "-O2", "-o", directory / "waiter", directory / "waiter.c"], check=True)
    return str(directory / "waiter")


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
        with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:  # a tmpfs, as the default /run
            bench = Bench(Path(directory), count)
            try:
                stages, limits = bench.measure(options.runs)
            finally:
                bench.close()
        for rows in (stages, limits):
            for field in type(rows[0])._fields if rows else ():
                values = sorted(1000 * getattr(each, field) for each in rows)
                p99 = values[min(len(values) - 1, round(0.99 * len(values)))]
                print(f"{count:5} {field:8} {statistics.median(values):8.2f} {p99:8.2f} {values[-1]:8.2f}")


if __name__ == "__main__":
    main()
