"""Memory ramps in the virtual machine, stopped by nodeagent and by Debian's earlyoom alternately.

    python -m benchmarks.ramps [--runs 2] [--speeds 50 100 1024]

Needs the same as tests/vm (QEMU, and root for the first build of the image). Every contender has the same limit, 300
MiB of MemAvailable, in the same machine, on the same ramp; the kubelet's part of an eviction takes 1.5 s. For each ramp
and contender the output has the number of runs in which the OOM killer was faster, the lowest MemAvailable of all runs
as a share of the limit, the median time from the crossing to the recovery, and the actual speed of the last 200 MiB
before the limit. Nothing is asserted, because the machine is emulated; the order of the contenders is the result.
"""

import argparse
import functools
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests.fake_kube import ApiServer
from tests.support.paths import REPOSITORY
from tests.vm.image import image, why_not
from tests.vm.machine import Machine, booted
from tests.vm.ramps import HARD_MIB, MIB, NODE, Node, Ramp, Result

LEAVE_MIB: Final = {10: 560, 50: 700, 100: 1200}
"""MemAvailable before the start; faster ramps begin at 1,500 MiB."""
EARLYOOM: Final = f"earlyoom -M {HARD_MIB * 1024},{HARD_MIB * 512} -r 0"
"""SIGTERM below the limit, SIGKILL below half of it, which is its default ratio."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--speeds", type=int, nargs="+", default=[50, 100, 1024], metavar="MIB_PER_S")
    options = parser.parse_args()
    if reason := why_not():
        print(f"needs a virtual machine: {reason}", file=sys.stderr)
        return 1
    with (
        tempfile.TemporaryDirectory(prefix="ramps-") as scratch,
        ApiServer(node=NODE, linger_s=None) as api,
        booted(image(), Path(scratch)) as machine,
    ):
        install(machine, Path(scratch))
        node = Node(machine, api, api.kubeconfig(Path(scratch) / "kubeconfig").read_text(encoding="utf-8"))
        compare(node, runs=options.runs, speeds=options.speeds)
        node.close()
    return 0


def install(machine: Machine, scratch: Path) -> None:
    """Install the project from its wheel, as in tests/vm."""
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", f"--wheel-dir={scratch}", str(REPOSITORY)]
    subprocess.run(wheel, check=True)
    [built] = scratch.glob("*.whl")
    machine.copy(built, "/run/vm")
    machine.run(f"/opt/nodeagent/bin/pip install --quiet --no-index --no-deps /run/vm/{built.name}", timeout_s=180)
    machine.copy(REPOSITORY / "systemd", "/run/vm")
    machine.run("mkdir -p /var/lib/kubelet /var/log/pods")


def compare(node: Node, *, runs: int, speeds: list[int]) -> None:
    """Run all contenders and print the table."""
    contenders: dict[str, Callable[[Ramp], Result]] = {
        "evict": functools.partial(by_agent, node),
        "throttle, evict, kill": functools.partial(by_agent, node, brake="throttle", hardKill="cgroup"),
        "freeze, evict, kill": functools.partial(by_agent, node, brake="freeze", hardKill="cgroup"),
        "earlyoom": functools.partial(by_earlyoom, node),
    }
    print(f"{'MiB/s':>6}  {'contender':<22} {'lost':>5}  {'lowest/limit':>12}  {'back, s':>8}  {'real MiB/s':>10}")
    for speed in speeds:
        ramp = Ramp(speed, LEAVE_MIB.get(speed, 1500))
        results: dict[str, list[Result]] = {name: [] for name in contenders}
        for _ in range(runs):
            for name, run in contenders.items():
                results[name].append(run(ramp))
        for name, found in results.items():
            print(f"{speed:>6}  {name:<22} {row(found)}", flush=True)


def row(found: list[Result]) -> str:
    """One line of the table."""
    lost = sum(result.oom_kills > 0 or result.alive != {"chill"} for result in found)
    lowest = min(result.lowest for result in found) / (HARD_MIB * MIB)
    back = [result.back_s for result in found if result.back_s is not None]
    real = [result.mib_per_s for result in found if result.mib_per_s is not None]
    share = f"{lost}/{len(found)}"
    return (
        f"{share:>5}  {lowest:>12.2f}  {statistics.median(back) if back else 0:>8.2f}  "
        f"{statistics.median(real) if real else 0:>10.0f}"
    )


def by_agent(node: Node, ramp: Ramp, **escalation: Any) -> Result:
    node.start_agent(escalation=escalation)
    try:
        return node.ramp(ramp)
    finally:
        node.stop_agent()


def by_earlyoom(node: Node, ramp: Ramp) -> Result:
    node.machine.run(f"systemd-run --quiet --unit=rival --property=Nice=-20 --property=OOMScoreAdjust=-999 {EARLYOOM}")
    try:
        return node.ramp(ramp, agent=False)
    finally:
        node.machine.run("systemctl stop rival")


if __name__ == "__main__":
    sys.exit(main())
