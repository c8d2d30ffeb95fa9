"""What is left on a file system of the machine: now, and at least while a test runs."""

import contextlib
from collections.abc import Iterator
from typing import Final

from tests.vm.machine import Machine

_WATCH: Final = """\
import os, select, sys
least = [1 << 62, 1 << 62]
print("up")
while not select.select([sys.stdin], [], [], 0.01)[0]:
    numbers = os.statvfs(sys.argv[1])
    least = list(map(min, least, [numbers.f_bavail * numbers.f_frsize, numbers.f_favail]))
print(*least)
"""
"""Prints the least that was left, when its stdin is closed."""


def free(machine: Machine, what: str, path: str) -> int:
    """`avail` bytes or `iavail` inodes of a file system."""
    unit = "--block-size=1 " if what == "avail" else ""
    return int(machine.run(f"df {unit}--output={what} {path}").stdout.split()[-1])


class Least:
    """What was left at least, once the watch is over."""

    bytes: int
    inodes: int


@contextlib.contextmanager
def watched(machine: Machine, path: str) -> Iterator[Least]:
    """Samples a file system 100 times a second; the result is filled in at the end."""
    least = Least()
    with machine.start(f"python3 -u -c '{_WATCH}' {path}") as watcher:
        assert watcher.stdout is not None
        assert watcher.stdout.readline() == "up\n"
        yield least
        least.bytes, least.inodes = map(int, watcher.communicate(timeout=60)[0].split())
