"""Runs in the machine: a kubelet's eviction manager for memory alone, which counts what it would evict.

It follows KUBELET-CONTRACT 1 and 3: every 10 s, the working set of the root cgroup from memory.stat, read at that
moment, and one hard threshold. It prints one JSON line for each sync and ends at the end of its stdin.

    memory_kubelet.py THRESHOLD_BYTES
"""

import json
import select
import sys
import time
from pathlib import Path

SYNC_S = 10.0


def memory_available() -> int:
    """MemTotal - working set; on cgroup v2 the usage of the root is anon + file."""
    stat = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
    usage = int(stat["anon"]) + int(stat["file"])
    return _meminfo("MemTotal") - max(0, usage - int(stat["inactive_file"]))


def _meminfo(name: str) -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


def main() -> None:
    threshold, due = int(sys.argv[1]), time.monotonic()
    while not select.select([sys.stdin], [], [], max(0.0, due - time.monotonic()))[0]:
        available = memory_available()
        seen = {"available": available, "memAvailable": _meminfo("MemAvailable"), "evicts": threshold > available}
        print(json.dumps({"at": time.clock_gettime(time.CLOCK_BOOTTIME), **seen}), flush=True)
        due += SYNC_S


if __name__ == "__main__":
    main()
