"""Runs in the machine: a kubelet's eviction manager for nodefs alone, with the kubelet's default thresholds.

It follows KUBELET-CONTRACT 1 to 5: a sync every 10 s, which reads the file system at that moment; nodefs.available
below 10% and nodefs.inodesFree below 5%; pods in the order of what their volumes use, measured at most once a minute;
one pod each sync, and the next sync as soon as its directory is gone, or after 30 s. There is no default threshold for
PIDs. Better than a real one: its garbage collection of images, which frees nothing here, takes no time.

    disk_kubelet.py KUBELET_DIRECTORY

It prints `{"evict": UID}` for each pod that it evicts, and ends at the end of its stdin.
"""

import contextlib
import json
import os
import random
import select
import sys
import time
from pathlib import Path

SYNC_S = 10.0
STATS_S = 60.0
"""A kubelet measures the volumes of each pod again after one to two minutes."""
CLEANUP_S = 30.0
BYTES_PERCENT, INODES_PERCENT = 10, 5


def short(directory: Path) -> str:
    """`bytes`, `inodes`, or empty."""
    numbers = os.statvfs(directory)
    if numbers.f_bavail * 100 < BYTES_PERCENT * numbers.f_blocks:
        return "bytes"
    return "inodes" if numbers.f_ffree * 100 < INODES_PERCENT * numbers.f_files else ""


def usage(pod: Path) -> dict[str, int]:
    """Bytes and inodes of a pod's directory, as `du` counts."""
    used = {"bytes": 0, "inodes": 0}
    for directory, _, files in os.walk(pod):
        used["inodes"] += 1 + len(files)
        for name in files:
            with contextlib.suppress(FileNotFoundError):  # the pod is ending
                used["bytes"] += os.lstat(f"{directory}/{name}").st_blocks * 512
    return used


def main() -> None:
    directory = Path(sys.argv[1])
    stats: dict[Path, dict[str, int]] = {}
    measured_at, due = 0.0, time.monotonic() + random.uniform(0, SYNC_S)
    evicted: Path | None = None
    cleaned_by = 0.0
    print(json.dumps({"ready": True}), flush=True)
    while not select.select([sys.stdin], [], [], max(0.0, min(1.0, due - time.monotonic())))[0]:
        if evicted is not None and (not evicted.exists() or time.monotonic() > cleaned_by):
            evicted, due = None, time.monotonic()
        pods = set((directory / "pods").iterdir()) if (directory / "pods").exists() else set()
        if measured_at + STATS_S < time.monotonic() or pods - stats.keys():
            stats = {pod: usage(pod) for pod in pods}
            measured_at = time.monotonic()
        if evicted is not None or time.monotonic() < due:
            continue
        due = time.monotonic() + SYNC_S
        candidates = [pod for pod in stats if pod.exists()]
        if (what := short(directory)) and candidates:
            evicted = max(candidates, key=lambda pod: (stats[pod][what] > 0, stats[pod][what]))
            cleaned_by = time.monotonic() + CLEANUP_S
            print(json.dumps({"evict": evicted.name}), flush=True)


if __name__ == "__main__":
    main()
