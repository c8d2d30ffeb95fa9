"""Pods that stream twice the memory of a machine of 2 GiB: evictions by a kubelet for page cache alone.

    python -m benchmarks.page_cache [--runs 10]

Needs the same as tests/vm. First beside the agent, with the unit's brake.conf, which makes cgroups writable; then the
kubelet alone. For each: in how many streams the kubelet would have evicted a pod, in how many of its syncs, and the
lowest figure that it saw. Nothing is asserted.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import contenders
from tests.fake_kube import ApiServer
from tests.vm import streams
from tests.vm.image import image, why_not
from tests.vm.machine import booted
from tests.vm.ramps import NODE, Node
from tests.vm.streams import Stream


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    options = parser.parse_args(arguments)
    if reason := why_not():
        print(f"needs a virtual machine: {reason}", file=sys.stderr)
        return 1
    with (
        tempfile.TemporaryDirectory(prefix="page-cache-") as scratch,
        ApiServer(node=NODE, linger_s=None) as api,
        booted(image(), Path(scratch)) as machine,
    ):
        kubeconfig = api.kubeconfig(Path(scratch) / "kubeconfig").read_text(encoding="utf-8")
        contenders.install(machine, Path(scratch))
        node = Node(machine, api, kubeconfig)
        node.start_agent(**streams.CONFIGURATION)
        measure(node, "beside nodeagent", options.runs)
        print(node.log(), file=sys.stderr, flush=True)
        node.stop_agent()
        measure(node, "kubelet alone", options.runs)
        node.close()
    return 0


def measure(node: Node, name: str, runs: int) -> None:
    """Run all streams, and print what came of each and of all."""
    found: list[Stream] = []
    for run in range(runs):
        found.append(streams.stream(node))
        print(f"{name} {run + 1}/{runs}: {found[-1]}", file=sys.stderr, flush=True)
    syncs = [sync for each in found for sync in each.syncs]
    print(
        f"{name:<18} evicted in {sum(each.evicted for each in found)} of {runs} streams, in "
        f"{sum(sync.evicts for sync in syncs)} of {len(syncs)} syncs; lowest {min(each.lowest_mib for each in found)} "
        f"MiB of {streams.KUBELET_MIB}; evicted by the agent {sum(not each.alive for each in found)}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
