"""Containers that grow towards their own memory limit in the virtual machine, with `ownLimit` and without an agent.

    python -m benchmarks.own_limit_ramps [--runs 10] [--speeds 1 10 50] [--minutes N]

Needs the same as tests/vm. The limit is 512 MiB and preStop takes 1 s; 1 MiB/s begins at 420 MiB, 10 MiB/s at 250, 50
MiB/s at 60. For each speed the table has the runs in which preStop ended and the exit code was 143, all exit codes,
what the container used when its eviction was accepted, and at most. Nothing is asserted.
"""

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import contenders
from tests.fake_kube import ApiServer
from tests.vm import own_limit_ramps
from tests.vm.image import image, why_not
from tests.vm.machine import booted
from tests.vm.own_limit_ramps import Ramp
from tests.vm.ramps import NODE, Node


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--speeds", type=int, nargs="+", default=list(own_limit_ramps.START_MIB), metavar="MIB_PER_S")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after this time")
    options = parser.parse_args(arguments)
    if reason := why_not():
        print(f"needs a virtual machine: {reason}", file=sys.stderr)
        return 1
    with (
        tempfile.TemporaryDirectory(prefix="own-limit-") as scratch,
        ApiServer(node=NODE, linger_s=None) as api,
        booted(image(), Path(scratch)) as machine,
    ):
        kubeconfig = api.kubeconfig(Path(scratch) / "kubeconfig").read_text(encoding="utf-8")
        contenders.install(machine, Path(scratch))
        node = Node(machine, api, kubeconfig)
        ends_at = time.monotonic() + 60 * options.minutes
        node.start_agent(**own_limit_ramps.CONFIGURATION)
        measure(node, options.speeds, options.runs, ends_at=ends_at, agent=True)
        node.stop_agent()
        measure(node, options.speeds, options.runs, ends_at=ends_at, agent=False)
        node.close()
    return 0


def measure(node: Node, speeds: Sequence[int], runs: int, *, ends_at: float, agent: bool) -> None:
    """Run each ramp so often, in turns, and print a line for each speed."""
    name = "ownLimit" if agent else "kernel alone"
    results: list[tuple[int, Ramp]] = []
    for run, per_s in itertools.product(range(runs), speeds):
        if time.monotonic() > ends_at:
            print("stopped: the time is over", file=sys.stderr)
            break
        results.append((per_s, own_limit_ramps.run(node, per_s, agent=agent)))
        print(f"{name} {per_s} MiB/s {run + 1}/{runs}: {results[-1][1]}", file=sys.stderr, flush=True)
        if agent and not results[-1][1].polite:
            print(node.log(), file=sys.stderr, flush=True)
    for per_s in speeds:
        found = [ramp for speed, ramp in results if speed == per_s]
        if found:
            print(f"{name:<12} {per_s:>3} MiB/s: {row(found)}", flush=True)


def row(found: Sequence[Ramp]) -> str:
    """The results of one speed."""
    codes = sorted({ramp.exit_code for ramp in found})
    evicted = [ramp.evicted_at_mib for ramp in found if ramp.evicted_at_mib is not None]
    accepted = f"evicted at {min(evicted):.0f} to {max(evicted):.0f} MiB, " if evicted else ""
    peaks = [ramp.peak_mib for ramp in found]
    polite = sum(ramp.polite for ramp in found)
    return f"preStop and 143 in {polite} of {len(found)}, exit codes {codes}, {accepted}at most {max(peaks)} MiB"


if __name__ == "__main__":
    sys.exit(main())
