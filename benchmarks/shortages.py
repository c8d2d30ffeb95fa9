"""Fillers of bytes and of inodes of nodefs, and a fork storm, in the virtual machine, beside nodeagent and a kubelet.

    python -m benchmarks.shortages [--quick] [--runs 3] [--resources bytes inodes pids] [--seconds 20 5 1]
                                   [--contenders unit container kubelet] [--minutes N] [--json FILE]

Needs the same as tests/vm. nodefs is an ext4 of 1.5 GiB and 32,768 inodes on a loop device, and the node may have 4,096
threads (kernel.threads-max). A pod holds what is left above the start (of PIDs: as threads), and from then on takes as
much a second as brings the node from nodeagent's hard threshold to zero in 20, 5 or 1 s. Two more pods do nothing. The
thresholds are the built-in ones, nodeagent's 12%, 7% and 5%:

* `unit`: the systemd unit with systemd/config.yaml, nothing changed;
* `container`: daemonset.yaml's container with its own configuration, memory limit and CPU request;
* `kubelet`: a loop that follows a kubelet's eviction manager (tests/vm/disk_kubelet.py), with its default thresholds of
  10% and 5%. It has none for PIDs, which the storm therefore takes until the benchmark ends it;
* earlyoom and systemd-oomd see neither disks nor PIDs, so they are not run, and the table has a line that says so.

The kubelet's part of each eviction is SIGKILL 1.5 s after it, and then the removal of the pod's directory. A race is
lost if nothing was left at any time, if an idle pod ended, or if the pod was not evicted. Times are medians of seconds
after the contender's own threshold was crossed: to the eviction on the wire, to zero, and until above the threshold for
good. `then` and `lowest` are what was left at the eviction (median) and at least (of all runs), as a share of the
capacity, for PIDs of the threads that may run. A filler may be slower than it was meant to be: `then` shows it; a race
in which it never came to the threshold is not counted. Nothing is asserted, because the machine is emulated: its
processes run about ten times slower than those of a node.
"""

import argparse
import contextlib
import functools
import itertools
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks import contenders
from benchmarks.contenders import Running
from tests.fake_kube import ApiServer, Json
from tests.vm import agent_container
from tests.vm.agent_container import AgentContainer
from tests.vm.image import image, why_not
from tests.vm.machine import Machine, booted
from tests.vm.pods import go, start_pod
from tests.vm.ramps import MIB, NODE, Node

CONTENDERS: Final = ("unit", "container", "kubelet")
SECONDS: Final = (20.0, 5.0, 1.0)
NODEFS: Final = "/var/lib/kubelet"
NODEFS_MIB: Final = 1536
NODEFS_INODES: Final = 32768
THREADS: Final = 4096
"""Few, so that memory is never short."""
LEAD_S: Final = 5.0
"""From the start of the filler to nodeagent's threshold."""
QUIET_S: Final = 5.0
"""From the start of a contender to that of the filler."""
PATIENCE_S: Final = 30.0
"""A race without an eviction ends so long after the zero that the filler was meant to reach: three kubelet syncs."""
SLOW_S: Final = 120.0
"""A filler that has not come to the threshold ends so long after the time that it was meant to take."""
IDLE: Final = ("idle-a", "idle-b")
NOT_RUN: Final = "earlyoom and systemd-oomd: not run, they see neither disks nor PIDs"
PROGRAMS: Final = Path(__file__).parents[1] / "tests" / "vm"


class Resource(NamedTuple):
    """What runs out."""

    percent: dict[str, float]
    """The hard threshold of nodeagent and of a kubelet; without one: none."""
    unit: int = 1
    """What the filler takes at once."""


RESOURCES: Final = {
    "bytes": Resource({"nodeagent": 12, "kubelet": 10}, MIB),
    "inodes": Resource({"nodeagent": 7, "kubelet": 5}),
    "pids": Resource({"nodeagent": 5}),
}


class Result(NamedTuple):
    """What came of one race; seconds are from the crossing of the contender's threshold, without one of nodeagent's."""

    crossed: bool
    """False: the filler never came to the contender's threshold, so this was no race."""
    lowest: float
    """The least that was left, as a share of the capacity."""
    then: float | None
    """What was left at the eviction."""
    evicted_s: float | None
    zero_s: float | None
    back_s: float | None
    victims: tuple[str, ...]
    alive: frozenset[str]
    """Names of the pods that ran in the end."""
    log: str

    @property
    def lost(self) -> bool:
        if not self.crossed:
            return False
        return self.zero_s is not None or self.victims != ("filler",) or not self.alive.issuperset(IDLE)


Races = list[tuple[str, float, str, Result]]
"""The resource, the seconds, the contender, and what came of it."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one run of 5 s of each, without the container")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--resources", nargs="+", default=list(RESOURCES), choices=RESOURCES, metavar="NAME")
    parser.add_argument("--seconds", type=float, nargs="+", default=SECONDS, help="from nodeagent's threshold to zero")
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS, choices=CONTENDERS, metavar="NAME")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no race after this time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every race to this file")
    options = parser.parse_args(arguments)
    if options.quick:
        options.runs, options.seconds = 1, (5.0,)
        options.contenders = [name for name in options.contenders if name != "container"]
    if reason := why_not():
        print(f"needs a virtual machine: {reason}", file=sys.stderr)
        return 1
    with (
        tempfile.TemporaryDirectory(prefix="shortages-") as scratch,
        ApiServer(node=NODE, linger_s=None) as api,
        booted(image(), Path(scratch)) as machine,
    ):
        kubeconfig = api.kubeconfig(Path(scratch) / "kubeconfig").read_text(encoding="utf-8")
        contenders.install(machine, Path(scratch))
        running: dict[str, Running] = {"unit": contenders.unit, "kubelet": kubelet}
        if "container" in options.contenders:
            built = agent_container.install_image(machine, Path(tempfile.mkdtemp(dir=scratch)))
            agent = AgentContainer(machine, built, api, kubeconfig, node=NODE)
            running["container"] = functools.partial(contenders.container, agent=agent)
        for name in ("shortage_watch.py", "disk_kubelet.py"):
            machine.write(f"/run/vm/{name}", (PROGRAMS / name).read_bytes())
        allow_threads(machine)
        node = Node(machine, api, kubeconfig)
        node.allow_brake(False)
        races: Races = []
        try:
            measure(node, {name: running[name] for name in options.contenders}, options, races)
        finally:
            print_table(races)
    return 0


def measure(node: Node, running: dict[str, Running], options: argparse.Namespace, races: Races) -> None:
    """Run all contenders in turns on each shortage, and add what came of it."""
    ends_at = time.monotonic() + 60 * options.minutes
    for run, name, seconds, contender in itertools.product(
        range(options.runs), options.resources, options.seconds, running
    ):
        if time.monotonic() > ends_at:
            print(f"stopped after {options.minutes:g} min", file=sys.stderr)
            break
        began = time.monotonic()
        result = race(node, name, seconds, contender, running[contender])
        races.append((name, seconds, contender, result))
        took_s, shown = time.monotonic() - began, result._replace(log="")
        print(
            f"{name} {seconds:g} s {contender} {run + 1}/{options.runs}, {took_s:.0f} s: {shown}",
            file=sys.stderr,
            flush=True,
        )
        if options.json:
            options.json.write_text(json.dumps([as_json(*each) for each in races], indent=1), encoding="utf-8")


def race(node: Node, name: str, seconds: float, contender: str, running: Running) -> Result:
    """One race, on a new file system."""
    percents, unit = RESOURCES[name]
    capacity = make_nodefs(node.machine)[name]
    hard = percents["nodeagent"] / 100 * capacity
    limit = percents.get(contender if contender == "kubelet" else "nodeagent", percents["nodeagent"]) / 100 * capacity
    per_s = max(1, round(hard / seconds / unit))
    leave = round(hard / unit + LEAD_S * per_s)
    with node.cast() as cast:
        for idle in IDLE:
            cast.add(start_pod(node.machine, idle, volume="disk"))
        work = f"deplete {name} {{volume}} {leave} {per_s}"
        filler = cast.add(start_pod(node.machine, "filler", work=work, volume="disk"))
        with running(node) as log, watching(node, name, round(limit)) as watch:
            time.sleep(QUIET_S)
            go(node.machine, filler)
            seen = until_over(watch, seconds)
            if seen["zero_at"] is not None and seen["back_at"] is None:  # no command runs without a PID
                node.observer.kill(filler, after_s=0.0).wait(60)
            text = log()
        evicted_s, zero_s, back_s = [since(seen["crossed_at"], seen[f"{key}_at"]) for key in ("marked", "zero", "back")]
        return Result(
            crossed=seen["crossed_at"] is not None,
            lowest=seen["lowest"] / capacity,
            then=None if seen["then"] is None else seen["then"] / capacity,
            evicted_s=evicted_s,
            zero_s=zero_s,
            back_s=back_s,
            victims=tuple(cast.victims),
            alive=cast.alive(),
            log=text,
        )


def make_nodefs(machine: Machine) -> dict[str, int]:
    """A new and empty file system for nodefs. Returns the capacity of each resource."""
    file = "/var/tmp/nodefs.img"
    machine.run(
        f"if mountpoint -q {NODEFS}; then umount {NODEFS}; fi; rm -f {file}; truncate -s {NODEFS_MIB}M {file} && "
        f"mke2fs -q -t ext4 -N {NODEFS_INODES} {file} && mount -o loop {file} {NODEFS} && mkdir {NODEFS}/pods"
    )
    blocks, inodes = machine.run(f"stat --file-system --format='%b %S %c' {NODEFS}").stdout.rsplit(maxsplit=1)
    number, size = map(int, blocks.split())
    return {"bytes": number * size, "inodes": int(inodes), "pids": THREADS}


def allow_threads(machine: Machine) -> None:
    """So many on the node, and as many in each pod: a kubelet sets no limit by default, but systemd does."""
    machine.write("/etc/systemd/system.conf.d/benchmark.conf", "[Manager]\nDefaultTasksMax=infinity\n")
    machine.run(f"sysctl --quiet kernel.threads-max={THREADS} && systemctl daemon-reload")


# --- observation -----------------------------------------------------------------------------------------------------


class Watch:
    """tests/vm/shortage_watch.py in the machine."""

    def __init__(self, machine: Machine, name: str, limit: int) -> None:
        self._process = machine.start(f"exec python3 -u /run/vm/shortage_watch.py {name} {NODEFS} {limit}")
        self._lock = threading.Lock()
        self._answer()

    def mark(self) -> None:
        """A pod has been evicted just now."""
        self._send("mark")

    def report(self) -> dict[str, Any]:
        """What it has seen."""
        self._send("report")
        return self._answer()

    def stop(self) -> None:
        self._process.communicate(timeout=60)

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


@contextlib.contextmanager
def watching(node: Node, name: str, limit: int) -> Iterator[Watch]:
    """A watch that knows of evictions."""
    watch, kubelet_part = Watch(node.machine, name, limit), node.api.on_eviction
    assert kubelet_part is not None

    def evicted(entry: Json, body: Json) -> None:
        watch.mark()
        kubelet_part(entry, body)

    node.api.on_eviction = evicted
    try:
        yield watch
    finally:
        node.api.on_eviction = kubelet_part
        watch.stop()


def until_over(watch: Watch, seconds: float) -> dict[str, Any]:
    """The last report of a race. `seconds`: how long the filler is meant to take from the threshold to zero."""
    began = watch.report()["now"]
    while True:
        seen = watch.report()
        settled = seen["back_at"] is not None and seen["marked_at"] is not None
        waits_from = began + LEAD_S + SLOW_S if seen["crossed_at"] is None else seen["crossed_at"] + PATIENCE_S
        if settled or seen["now"] > waits_from + seconds:
            return seen
        time.sleep(0.2)


def since(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin


# --- the kubelet -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def kubelet(node: Node) -> Iterator[Callable[[], str]]:
    """A kubelet's eviction manager, without an agent."""
    process = node.machine.start(f"exec python3 -u /run/vm/disk_kubelet.py {NODEFS}")
    lines: list[str] = []
    assert process.stdout is not None
    process.stdout.readline()

    def evict() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            entries = [node.api.get_pod("shop", name) for name in (*IDLE, "filler")]
            for entry in entries:
                if entry is not None and entry["metadata"]["uid"] == json.loads(line)["evict"] and node.api.on_eviction:
                    node.api.on_eviction(entry, {})

    reader = threading.Thread(target=evict, daemon=True)
    reader.start()
    try:
        yield lambda: "".join(lines)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)
        reader.join()


# --- the report ------------------------------------------------------------------------------------------------------


def print_table(races: Races) -> None:
    """One line for each resource, time and contender."""
    print(f"{'short of':<8} {'zero in, s':>10}  {'contender':<9} {'lost':>5} {'then':>7} {'lowest':>7} ", end="")
    print(f"{'evicted, s':>10} {'zero, s':>8} {'back, s':>8}")
    for name, seconds, contender in dict.fromkeys(each[:3] for each in races):
        found = [result for *key, result in races if key == [name, seconds, contender]]
        print(f"{name:<8} {seconds:>10g}  {contender:<9} {row(found)}", flush=True)
    print(NOT_RUN)


def row(found: Sequence[Result]) -> str:
    """The results of one line. A run in which the threshold was not reached counts in none of them."""
    raced = [each for each in found if each.crossed]
    lost = f"{sum(each.lost for each in raced)}/{len(raced)}"
    lowest = f"{min(each.lowest for each in raced):.1%}" if raced else "-"
    times = [median(getattr(each, key) for each in raced) for key in ("evicted_s", "zero_s", "back_s")]
    shares = [each.then for each in raced if each.then is not None]
    then = f"{statistics.median(shares):.1%}" if shares else "-"
    return f"{lost:>5} {then:>7} {lowest:>7} {times[0]:>10} {times[1]:>8} {times[2]:>8}"


def median(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.2f}" if known else "-"


def as_json(name: str, seconds: float, contender: str, result: Result) -> dict[str, Any]:
    values = {key: sorted(value) if key == "alive" else value for key, value in result._asdict().items()}
    return {"resource": name, "seconds": seconds, "contender": contender, "lost": result.lost, **values}


if __name__ == "__main__":
    sys.exit(main())
