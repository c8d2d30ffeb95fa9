"""CPU and memory of the agent's loop: `python -m benchmarks.loop [--rss [--quick]] [pods...]`.

On pods in real v1 cgroups (110, 500 and 1,000; needs root), each with a sandbox and a container:

* `node`: the node sample and the schedule, the most frequent part of a sync, CPU us;
* `sync`: a sync at 1 Hz on a calm node, CPU ms, mean over 60 s. Each contains a node sample, every tenth also limits,
  disk, all pods and a decision. In that time the usage of a pod is read 6 times, its memory 3 times, its threads once.
  (Its containers, read every five minutes, are not included: 0.1 ms per pod.) One second passes between two syncs,
  in which other processes use the CPU caches; without it a sync is four times as fast;
* `C same`: a C program (compiled here if there is a compiler) in the same seconds, which reads the same files as often
  and in the same way, and searches one number in each: the lower limit;
* `C all`: the same, but it reads all files of the node and usage and threads of every pod in every pass;
* `pressed`: a sync with every pod read completely and ranked, which is more than a crossed threshold requires, and the
  C program for that.

With `--rss`: memory, kernel memory, descriptors, CPU and wake-ups of the running agent (`nodeagent run` against an API
double in another process) on a calm node, over 60 s that begin 85 s after the start; with `--quick` over the 10 s that
begin 3 s after it, in which the agent still reads every pod more often. Bound: 0.3% of a core with 110 pods.
"""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.realnode import HIERARCHIES, RealNode, real_node
from nodeagent.config.schema import Config, StartupConfig
from nodeagent.loop import schedule
from nodeagent.model import Amount, MemoryModel, NodeSnapshot, Pod, Signal, Threshold
from nodeagent.policy import candidates, effective_thresholds, engine, state
from nodeagent.sampling.hostfs.host import Host
from nodeagent.sampling.pods import pod_ages
from nodeagent.sampling.sampler import Sampler

SIZES = (110, 500, 1000)
SECONDS: Final = 60
"""Calm syncs of a run: in this many a pod's threads are read once (`pod_ages.AGES`)."""
SETTLED: Final = 85
"""Syncs until the caches of the first sample are complete and the loop is calm."""
PRESSED: Final = 11
WHOLE, MEMORY, THREADS = int(schedule.CALM_S), int(pod_ages.AGES["memory"].max_age_s), SECONDS
"""Calm syncs for one full sample, for one read of a pod's memory, and of its threads."""
RUNS: Final = 3
START_S: Final = 3.0
OBSERVED_S: Final = 60.0
"""In this time each value of a pod that did not change is read once, but the containers."""
GI = 1 << 30

READER_C = r"""
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>
/* Lines of the list: how, in which of the passes (1: each, 10: every tenth), path. k: pread of a kept descriptor, o:
   open, read and close, d: list a directory, s: statvfs. */
struct file { char how; int often; char *path; int fd; };
static volatile long long sum;
static void add_number(char *text, ssize_t length) {
    text[length < 0 ? 0 : length] = 0;
    char *at = strstr(text, "inactive_file");
    sum += strtoll(at ? at + 14 : text, NULL, 10);
}
int main(int argc, char **argv) {
    static char text[65536], line[4096];
    FILE *list = fopen(argv[1], "r");
    int passes = atoi(argv[2]), number = 0, apart_us = atoi(argv[3]);
    struct file *files = calloc(100000, sizeof *files);
    while (fgets(line, sizeof line, list)) {
        line[strcspn(line, "\n")] = 0;
        files[number++] = (struct file){line[0], atoi(line + 2), strdup(strchr(line + 2, ' ') + 1), -1};
    }
    struct rusage before, after;
    for (int pass = -1; pass < passes; pass++) {
        if (pass == 0) getrusage(RUSAGE_SELF, &before);
        if (apart_us) usleep(apart_us);
        for (int i = 0; i < number; i++) {
            struct file *file = &files[i];
            if ((i + pass + 1) % file->often != 0) continue;
            if (file->how == 'k') {
                if (file->fd < 0) file->fd = open(file->path, O_RDONLY);
                add_number(text, pread(file->fd, text, sizeof text - 1, 0));
            } else if (file->how == 'o') {
                int fd = open(file->path, O_RDONLY);
                add_number(text, read(fd, text, sizeof text - 1));
                close(fd);
            } else if (file->how == 'd') {
                DIR *directory = opendir(file->path);
                while (readdir(directory)) sum++;
                closedir(directory);
            } else {
                struct statvfs numbers;
                sum += statvfs(file->path, &numbers);
            }
        }
    }
    getrusage(RUSAGE_SELF, &after);
    double us = (after.ru_utime.tv_sec - before.ru_utime.tv_sec + after.ru_stime.tv_sec - before.ru_stime.tv_sec) * 1e6
        + after.ru_utime.tv_usec - before.ru_utime.tv_usec + after.ru_stime.tv_usec - before.ru_stime.tv_usec;
    printf("%f\n", us / passes / 1000);
}
"""
API = """
import json, sys, time
from tests.fake_kube import ApiServer, pod
small, started = {"memory": "16Mi"}, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
def running(name, uid, container):
    state = {"name": "c", "state": {"running": {}}, "containerID": f"containerd://{container}"}
    status = {"startTime": started, "containerStatuses": [state]}
    return pod(name, uid=uid, node="bench-node", owner=("ReplicaSet", name), requests=small, status=status)
pods = [running(*each) for each in json.load(sys.stdin)]
with ApiServer(node="bench-node", pods=pods) as api:
    api.kubeconfig(__import__("pathlib").Path(sys.argv[1]))
    print("ready", flush=True)
    import signal
    signal.sigwait([signal.SIGTERM])
"""


class SyncCost(NamedTuple):
    """CPU ms."""

    node: float
    calm: float
    same: float | None
    every: float | None
    pressed: float
    pressed_c: float | None


def thresholds() -> tuple[Threshold, ...]:
    """None of them is near on a calm machine."""
    return (
        Threshold(Signal.MEMORY, Amount(100 << 20, None, "100Mi"), memory_model=MemoryModel.LOWER),
        Threshold(Signal.NODEFS, Amount(None, 1.0, "1%")),
        Threshold(Signal.PID, Amount(None, 5.0, "5%")),
    )


class Loop:
    """The reads and decisions of a sync, without actuators, records and log."""

    def __init__(self, node: RealNode) -> None:
        self.now = Host("/").boottime()
        self.config = Config(thresholds=thresholds(), startup=StartupConfig(fresh_samples=1), sampling=node.config())
        self.sampler = Sampler(
            Host("/"),
            node.config(),
            node_name="bench-node",
            boottime=lambda: self.now,
            pod_stalls=False,  # as in an agent without a threshold that needs them
        )
        self.pods: Sequence[Pod] = node.api_pods()
        self.cache, self.schedule_state = candidates.RankingCache(), schedule.ScheduleState()
        self.policy = state.initial("benchmark", now=self.now)
        self.effective: tuple[Threshold, ...] | None = None

    def sample_node(self) -> tuple[NodeSnapshot, bool]:
        """The node sample, and whether a full sample is due."""
        before = self.schedule_state
        node = self.sampler.sample_node(disks=self.now >= before.filesystems_at, limits=self.now >= before.limits_at)
        if self.effective is None:
            self.effective = effective_thresholds.effective(self.config, node.layout)
        inputs = schedule.ScheduleInputs(node, self.effective, interval_s=1.0)
        verdict, self.schedule_state = schedule.plan_next(inputs, self.schedule_state)
        return node, verdict.full_sample

    def sync(self, *, fresh: bool = False) -> bool:
        """A sync one second later. Returns True if it took a full sample."""
        self.now += 1.0
        node, full = self.sample_node()
        if not (full or fresh):
            return False
        snapshot = self.sampler.sample(self.pods, self.now, fresh=fresh, node=node)
        plan, self.policy = engine.decide(
            snapshot, self.policy, now=self.now, config=self.config, cache=self.cache, always_rank=fresh
        )
        measured = [
            view for view in snapshot.pods if view.usage is not None and view.usage.memory_working_set is not None
        ]
        if len(measured) != len(self.pods) or bool(plan.ranking) is not fresh:
            raise SystemExit("unexpected sync: pods are missing, or the ranking")
        return True


def mean_ms(work: Callable[[], object], times: int) -> float:
    """The least mean of several runs, CPU ms."""
    best = float("inf")
    for _ in range(RUNS):
        begin = time.process_time()
        for _ in range(times):
            work()
        best = min(best, (time.process_time() - begin) / times)
    return 1000 * best


def calm_syncs(loop: Loop) -> float:
    """Mean CPU ms of calm syncs at 1 Hz."""
    spent = full_samples = 0.0
    for _ in range(SECONDS):
        time.sleep(1.0)
        begin = time.process_time()
        full_samples += loop.sync()
        spent += time.process_time() - begin
    if full_samples != SECONDS / WHOLE:
        raise SystemExit(f"{full_samples} full samples in {SECONDS} syncs")
    return 1000 * spent / SECONDS


def measure(node: RealNode, readers: "Readers | None") -> SyncCost:
    import gc

    loop = Loop(node)
    with loop.sampler:
        loop.sync(fresh=True)
        gc.collect()
        gc.freeze()  # as the agent after its start
        for _ in range(SETTLED):
            loop.sync()
        figures = readers.start(node) if readers else None
        calm = calm_syncs(loop)
        same, every = figures() if figures else (None, None)
        result = SyncCost(
            node=mean_ms(loop.sample_node, 200),
            calm=calm,
            same=same,
            every=every,
            pressed=mean_ms(lambda: loop.sync(fresh=True), PRESSED),
            pressed_c=readers.pressed(node) if readers else None,
        )
        gc.unfreeze()
    return result


def files(node: RealNode, kind: str) -> list[str]:
    """The list for the C reader: the files of a `calm` or `pressed` sync, or usage and threads of `all` pods."""
    memory, pids = (f"{top}/{node.root}" for top in HIERARCHIES)
    kubepods, top = f"{memory}/kubepods", str(HIERARCHIES[0])
    samples, memory_syncs, thread_syncs = (WHOLE, MEMORY, THREADS) if kind == "calm" else (1, 1, 1)
    rows = [f"k 1 {path}/{name}" for path in (top, kubepods) for name in ("memory.usage_in_bytes", "memory.stat")]
    limits = ("/proc/meminfo", "/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max")
    rows += [f"k {samples} {path}" for path in (*limits, f"{kubepods}/memory.limit_in_bytes")]
    rows += ["k 1 /proc/loadavg", f"s {samples} /"]
    for pod in node.pods:
        path, threads = f"{memory}/{pod.path}", f"{pids}/{pod.path}/pids.current"
        rows += [f"k {samples} {path}/memory.usage_in_bytes"]
        if kind == "all":
            rows.append(f"k 1 {threads}")
            continue
        rows += [f"o {memory_syncs} {path}/memory.stat", f"o {thread_syncs} {threads}"]
        if kind == "pressed":
            rows += [f"d 1 {path}", *[f"o 1 {path}/{each}/cgroup.procs" for each in (pod.sandbox, pod.container)]]
    return rows


class Readers:
    """The C program, compiled."""

    def __init__(self, directory: Path, compiler: str) -> None:
        (directory / "reader.c").write_text(READER_C)
        self._directory = directory
        self._program = directory / "reader"
        subprocess.run([compiler, "-O2", "-o", str(self._program), str(directory / "reader.c")], check=True)

    def start(self, node: RealNode) -> Callable[[], tuple[float, float]]:
        """Start both readers. The result waits for their figures: (same files, all files)."""
        same, every = (self._run(node, kind, after_s=after_s) for kind, after_s in (("calm", 0.3), ("all", 0.3)))
        return lambda: (float(same.communicate()[0]), float(every.communicate()[0]))

    def pressed(self, node: RealNode) -> float:
        return min(float(self._run(node, "pressed").communicate()[0]) for _ in range(RUNS))

    def _run(self, node: RealNode, kind: str, *, after_s: float = 0.0) -> subprocess.Popen[str]:
        listing = self._directory / kind
        listing.write_text("".join(f"{row}\n" for row in files(node, kind)))
        time.sleep(after_s)
        apart_us = 1_000_000 if after_s else 0
        command = [str(self._program), str(listing), str(SECONDS), str(apart_us)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def syncs(sizes: Sequence[int]) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    with tempfile.TemporaryDirectory() as directory:
        readers = Readers(Path(directory), compiler) if compiler else None
        print(
            f"{'pods':>5} {'node us':>8} {'sync ms':>8} {'C same':>6} {'ratio':>6} {'C all':>6} {'ratio':>6} "
            f"{'pressed ms':>11} {'C':>6} {'ratio':>6}"
        )
        for size in sizes:
            with real_node(size) as node:
                cost = measure(node, readers)
            cells = f"{cost.calm:>8.2f} {limit_and_ratio(cost.calm, cost.same)} "
            cells += f"{limit_and_ratio(cost.calm, cost.every)} "
            pressed = f"{cost.pressed:>11.2f} {limit_and_ratio(cost.pressed, cost.pressed_c)}"
            print(f"{size:>5} {1000 * cost.node:>8.0f} {cells}{pressed}", flush=True)


def limit_and_ratio(figure: float, limit: float | None) -> str:
    return f"{limit:>6.2f} {figure / limit:>6.2f}" if limit else f"{'-':>6} {'-':>6}"


# --- the running agent -----------------------------------------------------------------------------------------------


class AgentCost(NamedTuple):
    rss: int
    kernel: int | None
    """Bytes of kernel memory charged to the agent's cgroup."""
    descriptors: int
    core: float
    """CPU share while calm at 1 Hz."""
    wakeups_per_s: float
    start_cpu_s: float
    """CPU of the start and the first three seconds."""


def status(pid: int, key: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1])
    raise KeyError(key)


def cpu_s(pid: int) -> float:
    """User and system time of all threads, not from /proc/PID/stat, which has ticks of 10 ms."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def switches(pid: int) -> int:
    """Voluntary context switches of all threads."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    texts = [(task / "status").read_text() for task in tasks]
    return sum(int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0]) for text in texts)


def run_agent(node: RealNode, warm_s: float, observed_s: float) -> AgentCost:
    work = node.logs
    config, kubeconfig = work / "config.yaml", work / "kubeconfig"
    config.write_text(
        f"apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\n"
        f"mode: enforce\nnodeName: bench-node\nevictionHard:\n  memory.available: 100Mi\nlogging:\n  format: json\n"
        f"sampling:\n  interval: 1s\n  cgroupRoot: /{node.root}\n  podLogsDir: {work / 'pods'}\n"
        f"stateDir: {work / 'state'}\n"
    )
    names = json.dumps([(pod.name, pod.uid, pod.container) for pod in node.pods])
    own = HIERARCHIES[0] / f"{node.root}/agent"
    own.mkdir()
    api = subprocess.Popen(
        [sys.executable, "-c", API, kubeconfig], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert api.stdin is not None
    assert api.stdout is not None
    try:
        api.stdin.write(names)
        api.stdin.close()
        if api.stdout.readline() != "ready\n":
            raise SystemExit("the API double did not start")
        return _observe(config, kubeconfig, own, work / "log", warm_s, observed_s)
    finally:
        api.send_signal(signal.SIGTERM)
        api.wait()
        api.stdout.close()


def _observe(config: Path, kubeconfig: Path, own: Path, log: Path, warm_s: float, observed_s: float) -> AgentCost:
    join = f"open({str(own / 'cgroup.procs')!r}, 'w').write('0')\nimport runpy, sys\nsys.argv[0] = 'nodeagent'\n"
    code = join + "runpy.run_module('nodeagent', run_name='__main__')"
    arguments = ["run", "--config", str(config), "--kubeconfig", str(kubeconfig)]
    with log.open("wb") as out:
        agent = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=out, stderr=subprocess.STDOUT)
    try:
        time.sleep(START_S)
        if agent.poll() is not None:
            raise SystemExit(f"the agent ended:\n{log.read_text()}")
        start = cpu_s(agent.pid)
        time.sleep(warm_s)
        before, slept, begin = cpu_s(agent.pid), switches(agent.pid), time.monotonic()
        time.sleep(observed_s)
        passed = time.monotonic() - begin
        kernel = own / "memory.kmem.usage_in_bytes"
        return AgentCost(
            rss=status(agent.pid, "VmRSS") * 1024,
            kernel=int(kernel.read_text()) if kernel.exists() else None,
            descriptors=len(os.listdir(f"/proc/{agent.pid}/fd")),
            core=(cpu_s(agent.pid) - before) / passed,
            wakeups_per_s=(switches(agent.pid) - slept) / passed,
            start_cpu_s=start,
        )
    finally:
        agent.send_signal(signal.SIGTERM)
        agent.wait()
        own.rmdir()


def agents(sizes: Sequence[int], *, quick: bool) -> None:
    print(
        f"{'pods':>5} {'RSS MiB':>8} {'kernel MiB':>11} {'fds':>5} {'core':>7} {'wake-ups/s':>11} {'start CPU s':>12}"
    )
    for size in sizes:
        with real_node(size) as node:
            cost = run_agent(node, *((0.0, 10.0) if quick else (SETTLED - START_S, OBSERVED_S)))
        kernel = "-" if cost.kernel is None else f"{cost.kernel / 2**20:.2f}"
        print(
            f"{size:>5} {cost.rss / 2**20:>8.1f} {kernel:>11} {cost.descriptors:>5} {cost.core:>7.2%} "
            f"{cost.wakeups_per_s:>11.1f} {cost.start_cpu_s:>12.2f}",
            flush=True,
        )


def main(arguments: list[str]) -> None:
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192) if hard > 0 else 8192, hard))
    sizes = [int(each) for each in arguments if each.isdigit()]
    if "--rss" in arguments:
        agents(sizes or SIZES[:2], quick="--quick" in arguments)
    else:
        syncs(sizes or SIZES)


if __name__ == "__main__":
    main(sys.argv[1:])
