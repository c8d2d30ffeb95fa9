"""How the disk walk compares with GNU `du`: ratios of CPU time (user + system), all measured in turns in one run.

    python benchmarks/walk.py [--files 200000] [--per-directory 100] [--rounds 7] [--cold] [--keep DIR]
    python benchmarks/walk.py --memory 1000000 10000000

Each round runs `du -s --block-size=512` and every kind of walk once, so that what disturbs the machine disturbs all.
Shown are the medians of the ratios within a round. `--cold` (root) empties the kernel's caches before each run.

`--memory` (root) makes trees of so many empty files, each on an ext4 image of its own (10 million take 4 GB and some
minutes), and shows how much memory a walk of each takes at its peak.
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

REMEMBER = 64 << 20
GOALS = {
    "first walk": "1.45",
    "first walk, remembering": "1.45",
    "inodes only": "0.45",
    "second walk": "1.1",
    "second walk, nobody wrote": "",
    "1% of the files changed": "1.1",
    "1% changed, the rest known to be unwritten": "0.1",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=200_000)
    parser.add_argument("--per-directory", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cold", action="store_true", help="drop the kernel's caches before each run (root)")
    parser.add_argument("--keep", type=Path, help="make the tree here, or use the one that is there, and leave it")
    parser.add_argument("--memory", type=int, nargs="+", metavar="FILES", help="only: memory of walks of so many files")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="walk-") as scratch:
        if given.memory:
            for files in given.memory:
                memory(Path(scratch) / str(files), files=files, per_directory=given.per_directory)
            return 0
        top = given.keep or Path(scratch) / "tree"
        if not top.exists():
            make_tree(top, files=given.files, per_directory=given.per_directory)
            time.sleep(2.1)  # only directories that are left alone for 2 s are remembered
        run(top, rounds=given.rounds, cold=given.cold)
    return 0


def make_tree(top: Path, *, files: int, per_directory: int, content: bytes = b"x" * 100) -> None:
    """Directories of files, 40 directories in each directory above; every tenth file has this content."""
    made = number = 0
    while made < files:
        place = top / f"branch-{number // 40}" / f"directory-{number % 40}"
        place.mkdir(parents=True)
        directory = os.open(place, os.O_RDONLY)
        for index in range(min(per_directory, files - made)):
            file = os.open(f"file-{index}.dat", os.O_CREAT | os.O_WRONLY | os.O_EXCL, dir_fd=directory)
            if index % 10 == 0 and content:
                os.write(file, content)
            os.close(file)
            made += 1
        os.close(directory)
        number += 1


def memory(scratch: Path, *, files: int, per_directory: int) -> None:
    """Prints the peak of each kind of walk over a tree of so many files."""
    scratch.mkdir()
    inodes = files + files // per_directory * 2 + 10_000
    with ext4(scratch, size_mb=256 + inodes // 1500, inodes=inodes) as place:
        make_tree(place / "tree", files=files, per_directory=per_directory, content=b"")
        time.sleep(2.1)
        kinds: dict[str, Callable[[], TreeUsage]] = {
            "first walk": lambda: walk(place)[0],
            "first walk, remembering 8 MiB": lambda: walk(place, cache_bytes=MAX_CACHE_BYTES)[0],
            "inodes only": lambda: walk(place, count=CountMode.INODES)[0],
        }
        for name, action in kinds.items():
            seen, grown, cpu_s = peak(action)
            print(
                f"{seen:10} inodes: {name:32} {grown / 2**20:6.1f} MiB more than before, {cpu_s:6.1f} s CPU", flush=True
            )


def peak(action: Callable[[], TreeUsage]) -> tuple[int, int, float]:
    """(inodes, bytes that the largest resident set exceeded the one before, CPU seconds) of a walk in a process of its
    own."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        before, began = status("VmRSS"), cpu()
        usage = action()
        os.write(writing, f"{usage.inodes} {status('VmHWM') - before} {cpu() - began}".encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        inodes, grown, cpu_s = answer.read().split()
    os.waitpid(child, 0)
    return int(inodes), int(grown), float(cpu_s)


def status(name: str) -> int:
    """Bytes, from /proc/self/status."""
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
    ) as walking:
        walking.step()
        return walking.usage, walking.cache


def change(top: Path, share: float) -> int:
    """Adds a file to this share of the leaf directories."""
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
    usage, cache = walk(top, cache_bytes=REMEMBER)
    if usage.bytes != expected * 512 or cache is None:
        raise SystemExit(f"the walk says {usage.bytes} bytes, du {expected * 512}")
    known = cache
    print(f"{usage.inodes} inodes, {usage.directories} of them directories; {known.size >> 10} KiB remembered")

    runs: dict[str, Callable[[], object]] = {
        "first walk": lambda: walk(top),
        "first walk, remembering": lambda: walk(top, cache_bytes=REMEMBER),
        "inodes only": lambda: walk(top, count=CountMode.INODES),
        "second walk": lambda: walk(top, previous=known, cache_bytes=REMEMBER),
        "second walk, nobody wrote": lambda: walk(top, previous=known, unwritten=True, cache_bytes=REMEMBER),
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
        du, asking, trusting, known = changed_round(top, known, cold)
        ratios["1% of the files changed"].append(asking / du)
        ratios["1% changed, the rest known to be unwritten"].append(trusting / du)
    print(f"{'du':45} {statistics.median(base) * 1000:7.0f} ms CPU ({'cold' if cold else 'warm'}, {rounds} rounds)")
    for name, values in ratios.items():
        goal = f"  goal {GOALS[name]}" if GOALS[name] else ""
        print(f"{name:45} {statistics.median(values):7.2f} x du   [{min(values):.2f} .. {max(values):.2f}]{goal}")
    print(f"{'largest memory of this process':45} {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10:7} MiB")


def changed_round(top: Path, known: WalkCache, cold: bool) -> tuple[float, float, float, WalkCache]:
    """CPU seconds of `du`, of a second walk and of one that trusts, after a change; and what to remember from it."""
    change(top, 0.01)
    du = measure(lambda: subprocess.run(["du", "-s", "--block-size=512", top], capture_output=True, check=True), cold)
    asking = measure(lambda: walk(top, previous=known, cache_bytes=REMEMBER), cold)
    trusting = measure(lambda: walk(top, previous=known, unwritten=True), cold)
    return du, asking, trusting, walk(top, cache_bytes=REMEMBER)[1] or known


def measure(action: Callable[[], object], cold: bool) -> float:
    """CPU seconds of this process and its children."""
    if cold:
        subprocess.run(["sync"], check=True)
        Path("/proc/sys/vm/drop_caches").write_text("3")
    before = cpu()
    action()
    return cpu() - before


def cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


if __name__ == "__main__":
    sys.exit(main())
