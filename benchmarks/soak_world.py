"""The world of `benchmarks.soak`: a clock that skips sleep, a node in a directory, an API server, and what happens.

The whole agent is real (`loop.assembly.build_agent`, `Agent.run`), and so are its requests. Only its sleep is not: each
wait of the loop ends at once, and the clock of host and session jumps by what it would have slept. While something must
arrive (a pod in the view, an eviction at the server), real time passes.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.soak_api import NODE
from nodeagent.config.config_file import ConfigFile
from nodeagent.loop import assembly
from nodeagent.loop.agent import Agent
from nodeagent.runtime.agent_lock import AgentLock
from nodeagent.runtime.wakeups import Wakeups
from nodeagent.sampling.hostfs.host import FileSystem, Host
from nodeagent.telemetry import log as agent_log
from tests.support.trees import GI, MI, Node, TreePod, write_node

PODS: Final = 30
BATCH: Final = 10
"""Pods that are replaced at once."""
POLL_S: Final = 0.02
MOST_S: Final = 90.0
"""Longest wait for something that must arrive: a hang, not a slow machine."""
CONFIG: Final = """\
apiVersion: nodeagent.io/v1alpha1
kind: NodeAgentConfiguration
mode: enforce
nodeName: {node}
stateDir: {state}
evictionHard: {{memory.available: 1Gi}}
evictionSoft: {{}}
evictionSoftGracePeriod: {{}}
startup: {{freshSamples: 1}}
sampling: {{interval: {interval}}}
metrics: {{address: "127.0.0.1:0", perPod: {{top: 10}}}}
cluster: {{kubeconfig: {kubeconfig}, requestTimeout: {timeout}, evictionTimeout: {timeout}}}
rateLimits:
  node: {{burst: 100000, perHour: 100000}}
  namespace: {{burst: 100000, perHour: 100000}}
  owner: {{burst: 100000, perHour: 100000}}
  signal: {{burst: 100000, perHour: 100000}}
"""


class SoakError(Exception):
    """The agent did not do what it must. The message has what."""


class Plan(NamedTuple):
    """What happens in a run."""

    samples: int
    pods: int
    evictions: int
    reloads: int
    outages: int

    def scaled(self, part: float) -> "Plan":
        """A shorter run; at least two of each, because the first one also fills caches, and a reading after each of six
        evictions."""
        shorter = Plan(*(max(2, round(each * part)) for each in self))
        return shorter._replace(evictions=max(6, shorter.evictions))


WHOLE: Final = Plan(samples=1_000_000, pods=100_000, evictions=1_000, reloads=100, outages=100)


class SkippingClock:
    """CLOCK_BOOTTIME, CLOCK_MONOTONIC and the wall clock, ahead by the sleep that was skipped."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def read(self, clock: int) -> float:
        return time.clock_gettime(clock) + self.ahead_s


class SoakHost(Host):
    """A live host in a directory: with the clock, disks of its own, and without PSI triggers, which no plain file
    takes."""

    def __init__(self, root: str, clock: SkippingClock) -> None:
        super().__init__(root, clock_gettime=clock.read)
        self._clock = clock

    def wall(self) -> float:
        return time.time() + self._clock.ahead_s

    def real(self, path: str) -> str:
        return super().real(path) + (".no-trigger" if path.endswith(("/pressure/memory", "memory.pressure")) else "")

    def statvfs(self, path: str) -> FileSystem:  # noqa: ARG002 - one disk
        return FileSystem(50 * GI, 100 * GI, 5_000_000, 6_000_000, 1)


class Server:
    """The process of `benchmarks.soak_api`."""

    def __init__(self, kubeconfig: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.soak_api", str(kubeconfig)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._commands, self._output = self._process.stdin, self._process.stdout
        if self._output.readline() != b"ready\n":
            raise SoakError("the API server did not start")
        os.set_blocking(self._output.fileno(), False)
        self._read = b""
        self.evicted: list[str] = []
        """Names, in order."""

    def command(self, name: str, *arguments: str) -> None:
        self._commands.write(json.dumps([name, *arguments]).encode() + b"\n")
        self._commands.flush()

    def has_evicted(self, name: str) -> bool:
        self._read += self._output.read() or b""
        *lines, self._read = self._read.split(b"\n")
        self.evicted += [line.decode().removeprefix("evicted ") for line in lines]
        return name in self.evicted[-1:]

    def close(self) -> None:
        self._commands.close()
        self._process.wait()
        self._output.close()


class World:
    """The node, and the script of what happens on it."""

    def __init__(self, scratch: Path, plan: Plan, read: Callable[["World"], None], *, for_s: float) -> None:
        """`read` takes a reading; it is called between two calm samples, once for each eviction. After `for_s` the run
        ends early."""
        self.plan = plan
        self._until = time.monotonic() + for_s
        self.done = Plan(0, 0, 0, 0, 0)
        self.events = 0
        """Of the watch of pods: each new and each removed pod."""
        self.clock = SkippingClock()
        self.root, self.state = scratch / "node", scratch / "state"
        self.config = scratch / "nodeagent.yaml"
        self._kubeconfig = scratch / "kubeconfig"
        self.root.mkdir()
        self.server = Server(self._kubeconfig)
        self.host = SoakHost(str(self.root), self.clock)
        self._read = read
        self._serial = 0
        self._pods = [self._new_pod() for _ in range(PODS)]
        self._write()
        self.configure()
        self.agent: Agent | None = None

    def configure(self) -> None:
        """The next configuration: sampler, disks and session are made again for it."""
        odd = self.done.reloads % 2
        text = CONFIG.format(
            node=NODE,
            state=self.state,
            kubeconfig=self._kubeconfig,
            interval="900ms" if odd else "1s",
            timeout="4s" if odd else "5s",
        )
        self.config.write_text(text, encoding="utf-8")

    def count_sample(self) -> None:
        self.done = self.done._replace(samples=self.done.samples + 1)

    # --- the script --------------------------------------------------------------------------------------------------

    def script(self) -> Iterator[Callable[[], bool] | None]:
        """One step for each wait of the loop: None lets it sleep, a condition lets real time pass until it is true."""
        yield self._synced
        plan = self.plan
        for cycle in range(1, plan.evictions + 1):
            batches = max(1, round(plan.pods / plan.evictions / BATCH))
            for _ in range(batches):
                self._replace(range(PODS - BATCH, PODS))
                yield self._synced
                for _ in range(max(1, round(plan.samples / plan.evictions / batches))):
                    yield None
            yield from self._evict()
            if cycle * plan.reloads // plan.evictions > self.done.reloads:
                yield from self._reload()
            if cycle * plan.outages // plan.evictions > self.done.outages:
                yield from self._outage()
            self._read(self)
            if time.monotonic() > self._until:
                break
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            yield None

    def _evict(self) -> Iterator[Callable[[], bool] | None]:
        self._replace([0])  # the last event of the watch is too old for an eviction
        yield self._synced
        hog, count = self._pods[0], len(self.server.evicted)
        self._pods[0] = hog._replace(working_set=3 * GI)
        self._write(memory_available=300 * MI)
        name = _name(hog)
        yield lambda: self.server.has_evicted(name)
        if self.server.evicted[count:] != [name]:
            raise SoakError(f"evicted {self.server.evicted[count:]} instead of {name}")
        self._replace([0])
        self.done = self.done._replace(evictions=self.done.evictions + 1)
        yield self._synced

    def _reload(self) -> Iterator[Callable[[], bool] | None]:
        before = self._agent.session
        self.done = self.done._replace(reloads=self.done.reloads + 1)
        self.configure()
        os.kill(os.getpid(), signal.SIGHUP)
        yield lambda: self._agent.session is not before
        yield self._synced

    def _outage(self) -> Iterator[Callable[[], bool] | None]:
        self.server.command("down")
        yield lambda: bool(self._agent.session.pods().reason)
        for _ in range(BATCH):
            yield None
        self.server.command("up")
        self._replace([1])  # the view is current again with the first event after an outage
        yield lambda: not self._agent.session.pods().reason and self._synced()
        self.done = self.done._replace(outages=self.done.outages + 1)

    # --- the node ----------------------------------------------------------------------------------------------------

    @property
    def _agent(self) -> Agent:
        assert self.agent is not None
        return self.agent

    def _synced(self) -> bool:
        """The agent's view has the pods of the node and no others."""
        return {pod.uid for pod in self._agent.session.pods().pods} == {pod.uid for pod in self._pods}

    def _new_pod(self) -> TreePod:
        self._serial += 1
        made = TreePod(
            f"default/pod-{self._serial}",
            uid=str(uuid.uuid4()),
            working_set=100 * MI,
            request=100 * MI,
            logs=False,
        )
        self.server.command("add", _name(made), made.uid)
        self.done, self.events = self.done._replace(pods=self.done.pods + 1), self.events + 1
        return made

    def _replace(self, slots: "range | list[int]") -> None:
        for slot in slots:
            self.server.command("delete", _name(self._pods[slot]))
            self.events += 1
            self._pods[slot] = self._new_pod()
        self._write()

    def _write(self, memory_available: int = 4 * GI) -> None:
        write_node(self.root, Node(memory_available=memory_available, pods=tuple(self._pods)))


def _name(pod: TreePod) -> str:
    return pod.key.partition("/")[2]


# --- the agent -------------------------------------------------------------------------------------------------------


def build_agent(stack: contextlib.ExitStack, host: Host, config: Path, log_file: Path) -> tuple[Agent, Wakeups]:
    """The agent as `nodeagent run` builds it, and its wake-ups. `stack` closes what they hold open."""
    out = stack.enter_context(log_file.open("wb"))
    log, writer = agent_log.open_log(level="info", style="json", fd=out.fileno())
    stack.callback(writer.close)
    file = ConfigFile(str(config), overrides=())
    loaded = file.load()
    lock = AgentLock(state_dir=loaded.config.state_dir, kubepods=lambda: None)
    stack.callback(lock.release)
    with _same_priority():
        return assembly.build_agent(
            loaded, file, host, log, writer, stack, lock=lock, other="", beside_since=float("-inf")
        )


@contextlib.contextmanager
def _same_priority() -> Iterator[None]:
    """An agent raises its priority and protects itself from the OOM killer; a benchmark takes both back."""
    nice, score = os.getpriority(os.PRIO_PROCESS, 0), Path("/proc/self/oom_score_adj")
    before = score.read_text()
    try:
        yield
    finally:
        score.write_text(before)
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, int(thread), nice)


class SkippingWakeups(Wakeups):
    """The wake-ups of the agent; its sleep is skipped, except while the script waits for something."""

    def __init__(
        self,
        inner: Wakeups,
        clock: SkippingClock,
        script: Iterator[Callable[[], bool] | None],
        *,
        count: Callable[[], None] = lambda: None,
    ) -> None:
        """`script`: see `World.script`. `count` is called for each wait."""
        # Not the constructor of the class: `inner` has the epoll, the signals and the sources.
        self._inner = inner
        self._clock = clock
        self._script = script
        self._count = count
        self._condition: Callable[[], bool] | None = next(script)
        self._since = time.monotonic()
        self.wake = inner.wake  # type: ignore[method-assign]
        self.register = inner.register  # type: ignore[method-assign]
        self.unregister = inner.unregister  # type: ignore[method-assign]

    def wait(self, timeout_s: float) -> tuple[frozenset[str], tuple[signal.Signals, ...]]:
        self._count()
        if self._condition is None or self._condition():
            self._condition, self._since = next(self._script), time.monotonic()
        if self._condition is None:
            self._clock.ahead_s += max(0.0, timeout_s)
            return self._inner.wait(0.0)
        if time.monotonic() - self._since > MOST_S:
            raise SoakError(f"what must arrive has not arrived in {MOST_S:g} s")
        return self._inner.wait(min(timeout_s, POLL_S))
