"""Runs in the machine, with the agent's Python: one reclaim of page cache, as the agent's worker does it.

reclaim_once.py CGROUP AMOUNT KEEP -> {"result", "message", "reclaimed", "took_s"}
"""

import json
import sys
import time
from pathlib import Path

from nodeagent.actuators import page_cache
from nodeagent.model import ReclaimOrder, ReclaimTarget, Signal, Tier


def main() -> None:
    cgroup, amount, keep = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    target = ReclaimTarget("shop/pod", cgroup, amount, keep)
    order = ReclaimOrder("pageCache", Signal.MEMORY, Tier.SOFT, 0, 0, 0.0, targets=(target,))
    paths = page_cache.Paths(Path("/sys/fs/cgroup"), Path("/proc/meminfo"))
    began = time.monotonic()
    done = page_cache.build_job(order, paths, figure=lambda: 0)(began + 60)
    took_s = time.monotonic() - began
    print(json.dumps({"result": done.result, "message": done.message, "reclaimed": done.reclaimed, "took_s": took_s}))


if __name__ == "__main__":
    main()
