"""Pods that fill a file system with bytes or inodes, and the least that was left of it."""

import os
import shutil
import threading
from pathlib import Path

WRITER = """
import os, sys, time
directory, rate_mib = sys.argv[1], float(sys.argv[2])
print("up", flush=True)
sys.stdin.readline()
piece, written = b"x" * (1 << 20), 0
try:
    while True:
        with open(f"{directory}/{written // 64}", "ab", buffering=0) as file:
            file.write(piece)
        written += 1
        time.sleep(1 / rate_mib)  # and no faster after a moment in which the machine was busy
except OSError:
    sys.stdin.readline()
"""


LITTERER = """
import sys, time
directory, per_s = sys.argv[1], float(sys.argv[2])
print("up", flush=True)
sys.stdin.readline()
made = 0
try:
    while True:
        open(f"{directory}/{made}", "w").close()
        made += 1
        time.sleep(1 / per_s)
except OSError:
    sys.stdin.readline()
"""


class Disk:
    """A node's directories on a file system of their own, and the lowest that was ever left of it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        for name in ("kubelet/pods", "images", "logs"):
            (place / name).mkdir(parents=True)
        self.lowest_bytes = self.lowest_inodes = 1 << 62
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            numbers = os.statvfs(self.place)
            self.lowest_bytes = min(self.lowest_bytes, numbers.f_bavail * numbers.f_frsize)
            self.lowest_inodes = min(self.lowest_inodes, numbers.f_ffree)

    def close(self) -> None:
        self._over.set()
        self._watcher.join()

    @property
    def left(self) -> float:
        """The share of it that is available."""
        numbers = os.statvfs(self.place)
        return numbers.f_bavail / numbers.f_blocks

    @property
    def sampling(self) -> dict[str, str]:
        return {
            "kubeletDir": f"{self.place}/kubelet",
            "imageDir": f"{self.place}/images",
            "podLogsDir": f"{self.place}/logs",
        }

    def volume(self, uid: str) -> Path:
        made = self.place / f"kubelet/pods/{uid}/volumes/kubernetes.io~empty-dir/data"
        made.mkdir(parents=True, exist_ok=True)
        return made

    def remove(self, uid: str) -> None:
        shutil.rmtree(self.place / f"kubelet/pods/{uid}")
