"""Compares the disk walk with GNU `du`: ratios of CPU time (user + system), alternating in one run.

    python -m benchmarks.walk [--files 200000] [--per-directory 100] [--rounds 7] [--cold] [--keep DIR]
    python -m benchmarks.walk --memory 1000000 10000000

Each round runs `du -s --block-size=512` and every kind of walk once, so that other load affects all of them. The output
has the medians of the ratios within a round. `--cold` (root) drops the kernel's caches before each run.

`--memory` (root) creates a tree of that many empty files on its own ext4 image (10 million take 4 GB and several
minutes), and prints the peak memory of a walk.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from nodeagent.sampling.disk.walk import CountMode, TreeUsage, TreeWalk
from nodeagent.sampling.disk.walk_cache import MAX_CACHE_BYTES, WalkCache
from tests.support.mounts import ext4

CACHE_BYTES = 64 << 20
GOALS = {
    "first walk": "1.45",
    "first walk with cache": "1.45",
    "inodes only": "0.45",
    "second walk": "1.1",
    "second walk, unwritten": "",
    "1% of the files changed": "1.1",
    "1% changed, the rest unwritten": "0.1",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=200_000)
    parser.add_argument("--per-directory", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cold", action="store_true", help="drop the kernel's caches before each run (root)")
    parser.add_argument("--keep", type=Path, help="create the tree here, or use an existing one, and keep it")
    parser.add_argument("--memory", type=int, nargs="+", metavar="FILES", help="only: memory of a walk")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="walk-") as scratch:
        if options.memory:
            for files in options.memory:
                memory(Path(scratch) / str(files), files=files, per_directory=options.per_directory)
            return 0
        top = options.keep or Path(scratch) / "tree"
        if not top.exists():
            make_tree(top, files=options.files, per_directory=options.per_directory)
            time.sleep(2.1)  # only directories unchanged for 2 s are cached
        run(top, rounds=options.rounds, cold=options.cold)
    return 0


def make_tree(top: Path, *, files: int, per_directory: int, content: bytes = b"x" * 100) -> None:
    """Directories with files, 40 in each parent directory. Every tenth file has this content."""
    created = number = 0
    while created < files:
        path = top / f"branch-{number // 40}" / f"directory-{number % 40}"
        path.mkdir(parents=True)
        directory = os.open(path, os.O_RDONLY)
        for index in range(min(per_directory, files - created)):
            file = os.open(f"file-{index}.dat", os.O_CREAT | os.O_WRONLY | os.O_EXCL, dir_fd=directory)
            if index % 10 == 0 and content:
                os.write(file, content)
            os.close(file)
            created += 1
        os.close(directory)
        number += 1


def memory(scratch: Path, *, files: int, per_directory: int) -> None:
    """Print the peak memory of each kind of walk over a tree of this many files."""
    scratch.mkdir()
    inodes = files + files // per_directory * 2 + 10_000
    with ext4(scratch, size_mb=256 + inodes // 1500, inodes=inodes) as path:
        make_tree(path / "tree", files=files, per_directory=per_directory, content=b"")
        time.sleep(2.1)
        kinds: dict[str, Callable[[], TreeUsage]] = {
            "first walk": lambda: walk(path)[0],
            "first walk, 8 MiB cache": lambda: walk(path, cache_bytes=MAX_CACHE_BYTES)[0],
            "inodes only": lambda: walk(path, count=CountMode.INODES)[0],
        }
        for name, action in kinds.items():
            inodes, grown, cpu_s = peak(action)
            print(
                f"{inodes:10} inodes: {name:32} {grown / 2**20:6.1f} MiB more than before, {cpu_s:6.1f} s CPU",
                flush=True,
            )


def peak(action: Callable[[], TreeUsage]) -> tuple[int, int, float]:
    """(inodes, growth of the resident set at its peak, CPU seconds) of a walk in a process of its own."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before, began = status("VmRSS"), cpu()
        usage = action()
        os.write(writing, f"{usage.inodes} {status('VmHWM') - before} {cpu() - began}".encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as result:
        inodes, grown, cpu_s = result.read().split()
    os.waitpid(child, 0)
    return int(inodes), int(grown), float(cpu_s)


def status(name: str) -> int:
    """Bytes of this line in /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) << 10


def walk(
    top: Path,
    *,
    count: CountMode = CountMode.BYTES_AND_INODES,
    previous: WalkCache | None = None,
    unwritten: bool = False,
    cache_bytes: int = 0,
) -> tuple[TreeUsage, WalkCache | None]:
    with TreeWalk(
        os.open(top, os.O_RDONLY), count=count, previous=previous, unwritten=unwritten, cache_bytes=cache_bytes
    ) as tree_walk:
        tree_walk.step()
        return tree_walk.usage, tree_walk.cache


def change(top: Path, share: float) -> int:
    """Add a file to this share of the leaf directories."""
    leaves = sorted(top.glob("branch-*/directory-*"))
    step = max(1, round(1 / share))
    for leaf in leaves[::step]:
        name = leaf / f"new-{time.monotonic_ns()}"
        name.write_bytes(b"x" * 100)
    return len(leaves[::step])


def run(top: Path, *, rounds: int, cold: bool) -> None:
    expected = int(
        subprocess.run(["du", "-s", "--block-size=512", top], capture_output=True, check=True).stdout.split()[0]
    )
    usage, cache = walk(top, cache_bytes=CACHE_BYTES)
    if usage.bytes != expected * 512 or cache is None:
        raise SystemExit(f"the walk counts {usage.bytes} bytes, du {expected * 512}")
    known = cache
    print(f"{usage.inodes} inodes, {usage.directories} of them directories; {known.size >> 10} KiB cached")

    runs: dict[str, Callable[[], object]] = {
        "first walk": lambda: walk(top),
        "first walk with cache": lambda: walk(top, cache_bytes=CACHE_BYTES),
        "inodes only": lambda: walk(top, count=CountMode.INODES),
        "second walk": lambda: walk(top, previous=known, cache_bytes=CACHE_BYTES),
        "second walk, unwritten": lambda: walk(top, previous=known, unwritten=True, cache_bytes=CACHE_BYTES),
    }
    ratios: dict[str, list[float]] = {name: [] for name in GOALS}
    base = []
    for _ in range(rounds):
        du = measure(
            lambda: subprocess.run(["du", "-s", "--block-size=512", top], capture_output=True, check=True), cold
        )
        base.append(du)
        for name, action in runs.items():
            ratios[name].append(measure(action, cold) / du)
    for _ in range(rounds):
        du, reading, reusing, known = changed_round(top, known, cold)
        ratios["1% of the files changed"].append(reading / du)
        ratios["1% changed, the rest unwritten"].append(reusing / du)
    print(f"{'du':45} {statistics.median(base) * 1000:7.0f} ms CPU ({'cold' if cold else 'warm'}, {rounds} rounds)")
    for name, values in ratios.items():
        goal = f"  goal {GOALS[name]}" if GOALS[name] else ""
        print(f"{name:45} {statistics.median(values):7.2f} x du   [{min(values):.2f} .. {max(values):.2f}]{goal}")
    print(f"{'largest memory of this process':45} {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10:7} MiB")


def changed_round(top: Path, known: WalkCache, cold: bool) -> tuple[float, float, float, WalkCache]:
    """CPU seconds of `du`, of a second walk and of an unwritten one, after a change; and the new cache."""
    change(top, 0.01)
    du = measure(lambda: subprocess.run(["du", "-s", "--block-size=512", top], capture_output=True, check=True), cold)
    reading = measure(lambda: walk(top, previous=known, cache_bytes=CACHE_BYTES), cold)
    reusing = measure(lambda: walk(top, previous=known, unwritten=True), cold)
    return du, reading, reusing, walk(top, cache_bytes=CACHE_BYTES)[1] or known


def measure(action: Callable[[], object], cold: bool) -> float:
    """CPU seconds of this process and its children."""
    if cold:
        subprocess.run(["sync"], check=True)
        Path("/proc/sys/vm/drop_caches").write_text("3")
    before = cpu()
    action()
    return cpu() - before


def cpu() -> float:
    used = [resource.getrusage(scope) for scope in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


if __name__ == "__main__":
    sys.exit(main())
