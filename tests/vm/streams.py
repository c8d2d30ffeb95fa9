"""Pods in the machine that read files, and a kubelet that would evict them for the page cache that this takes.

Theory of operation. A pod reads files of more than twice the machine's memory, one after another and each twice, as an
import or a query does, and then waits. Pages that are read again are active, so the kubelet's figure falls although the
kernel could drop every one of them. `tests/vm/memory_kubelet.py` does what a kubelet does about it.
"""

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.vm.machine import Machine
from tests.vm.pods import go, start_pod
from tests.vm.ramps import MIB, Node

KUBELET_MIB: Final = 450
"""The kubelet's hard threshold."""
HARD_MIB: Final = 500
SOFT_MIB: Final = 650
"""The agent's, shortly above the kubelet's."""
FILES: Final = 15
FILE_MIB: Final = 280
"""Together more than twice the machine's 2 GiB. Each one fits into the inactive list, which the kernel keeps at a
quarter of this page cache (`inactive_is_low` in mm/vmscan.c); pages of a larger one are dropped before the second
read."""
HELD_MIB: Final = 400
"""Anonymous memory of the reading pod."""
TIMES: Final = 2
MIB_PER_S: Final = 400
"""A fast disk. A stream takes about 30 s under emulation."""
LINGER_S: Final = 12
"""More than a sync of the kubelet: a reader that waits keeps its page cache."""
STREAM_TIMEOUT_S: Final = 300.0
KUBELET: Final = Path(__file__).with_name("memory_kubelet.py")
CONFIGURATION: Final[dict[str, Any]] = {
    "evictionHard": {"memory.available": f"{HARD_MIB}Mi"},
    "evictionSoft": {"memory.available": f"{SOFT_MIB}Mi"},
    "evictionSoftGracePeriod": {"memory.available": "30s"},
    "signals": {},
}
"""What differs from `ramps.CONFIGURATION`: no other measure than the built-in one."""


class KubeletSync(NamedTuple):
    """One sync of the kubelet in the machine."""

    available: int
    mem_available: int
    evicts: bool


class Stream(NamedTuple):
    """What came of one stream."""

    syncs: tuple[KubeletSync, ...]
    alive: bool
    """The reading pod was not evicted by the agent."""

    @property
    def evicted(self) -> bool:
        """The kubelet would have evicted a pod."""
        return any(sync.evicts for sync in self.syncs)

    @property
    def lowest_mib(self) -> int:
        return min(sync.available for sync in self.syncs) // MIB


@contextlib.contextmanager
def kubelet(machine: Machine) -> Iterator[list[KubeletSync]]:
    """A kubelet that runs for as long as the context lasts; afterwards the list has its syncs."""
    machine.write("/run/vm/memory_kubelet.py", KUBELET.read_bytes())
    process = machine.start(f"exec python3 -u /run/vm/memory_kubelet.py {KUBELET_MIB * MIB}")
    syncs: list[KubeletSync] = []
    try:
        yield syncs
    finally:
        try:
            output, _ = process.communicate("stop\n", timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
    for line in output.splitlines():
        seen = json.loads(line)
        syncs.append(KubeletSync(seen["available"], seen["memAvailable"], seen["evicts"]))


def stream(node: Node) -> Stream:
    """One pod streams once."""
    machine = node.machine
    work = f"stream /var/tmp {FILES} {FILE_MIB} {TIMES} {MIB_PER_S} {HELD_MIB}"
    with node.cast() as cast:
        machine.run("echo 1 >/proc/sys/vm/drop_caches")
        reader = cast.add(start_pod(machine, "reader", work=work))
        try:
            machine.run(f"mkfifo /run/vm/{reader.uid}.done")
            with kubelet(machine) as syncs:
                go(machine, reader)
                machine.run(
                    f"timeout {STREAM_TIMEOUT_S:.0f} cat /run/vm/{reader.uid}.done && sleep {LINGER_S}",
                    timeout_s=STREAM_TIMEOUT_S + 60,
                )
            return Stream(tuple(syncs), cast.alive() == {"reader"} and not cast.victims)
        finally:
            machine.run("rm -f /var/tmp/stream-* /run/vm/*.done")
