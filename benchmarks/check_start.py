"""Compares the CPU time of `nodeagent check`, from process start to the end of its report, with `python -c pass`.

    python -m benchmarks.check_start [--rounds 41] [--pods 110]

Both run alternately, so that other load affects both. The figure is the child's user and system CPU time (`os.wait4`),
with cached bytecode as after an installation. The node is a generated tree with that many pods. `check` reads it
without the API, through the entry point of the console script. Bound: 6 times `python -c pass`.
"""

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from nodeagent.model import QOSClass  # noqa: E402
from tests.support.trees import MI, Node, TreePod, write_node  # noqa: E402

ENTRY = "import sys; from nodeagent.commands.cli import main; sys.exit(main())"
GOAL = 6.0


def tree(where: Path, pods: int) -> str:
    """A node with this many pods of all QoS classes, to be read as a live host."""
    classes = list(QOSClass)
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    root = write_node(
        where,
        Node(
            memory_total=64 << 30,
            memory_available=32 << 30,
            uptime=now,
            pods=tuple(
                TreePod(
                    f"namespace-{number % 7}/workload-{number}",
                    qos=classes[number % 3],
                    started_s_ago=now / 2,
                    working_set=(10 + number % 50) * MI,
                    request=0 if classes[number % 3] is QOSClass.BEST_EFFORT else 16 * MI,
                )
                for number in range(pods)
            ),
        ),
    )
    shutil.rmtree(where / "listing")
    return root


def cpu_ms(*arguments: str, environment: dict[str, str]) -> float:
    """User and system CPU time of one child."""
    silence = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    child = os.posix_spawn(sys.executable, [sys.executable, *arguments], environment, file_actions=silence)
    _, status, usage = os.wait4(child, 0)
    if os.waitstatus_to_exitcode(status) not in (0, 1, 2, 3):
        raise SystemExit(f"{' '.join(arguments)} failed")
    return (usage.ru_utime + usage.ru_stime) * 1000


def verify_report(arguments: tuple[str, ...], *, pods: int, environment: dict[str, str]) -> None:
    """Check that a run prints the complete report. Fills the caches as well."""
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    ranks = re.findall(r"^ +\d+  namespace-", done.stdout, re.MULTILINE)
    if done.stderr or "memory.available" not in done.stdout or len(ranks) != pods:
        raise SystemExit(f"{' '.join(arguments)}: no report of {pods} pods\n{done.stderr}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--pods", type=int, default=110)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "PYTHONPATH": str(ROOT),
            "PYTHONPYCACHEPREFIX": f"{scratch}/bytecode",
        }
        empty = Path(scratch, "empty")
        empty.mkdir()
        check = ("-c", ENTRY, "check", "--no-api", "--host-root")
        commands = {
            "python -c pass": ("-c", "pass"),
            "import argparse, typing": ("-c", "import argparse, typing"),
            "nodeagent version": ("-c", ENTRY, "version"),
            "nodeagent check, no pods": (*check, str(empty)),
            f"nodeagent check, {options.pods} pods": (*check, tree(Path(scratch, "node"), options.pods)),
        }
        *_, (_, bare), (_, full) = commands.items()
        verify_report(bare, pods=0, environment=environment)
        verify_report(full, pods=options.pods, environment=environment)
        spent: dict[str, list[float]] = {name: [] for name in commands}
        for number in range(options.rounds + 1):
            for name, command in commands.items():
                cost = cpu_ms(*command, environment=environment)
                if number:  # the first round fills the caches
                    spent[name].append(cost)
    base = statistics.median(spent["python -c pass"])
    print(f"{'command':<30} {'median ms':>10} {'lowest':>8} {'times':>7}   ({options.rounds} rounds, CPU of the child)")
    for name, costs in spent.items():
        median = statistics.median(costs)
        print(f"{name:<30} {median:>10.1f} {min(costs):>8.1f} {median / base:>7.2f}")
    reached = statistics.median(costs) / base
    print(f"goal: at most {GOAL:g} times; {'reached' if reached <= GOAL else 'NOT reached'} ({reached:.2f})")


if __name__ == "__main__":
    main()
