"""Fuzzes the parsers: `python -m tests.fuzz --seconds 600`.

With atheris (libFuzzer) if it is installed, each target in a process of its own; else with the search of `engine`. A
defect is written to `tests/data/fuzz/NAME/crash-...` and fails the run; `--keep` also writes the inputs that reach new
lines.
"""

import argparse
import importlib.util
import subprocess
import sys
import time

from tests.fuzz import engine
from tests.fuzz.engine import Target
from tests.support.paths import REPOSITORY


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", help="names of targets; default: all")
    parser.add_argument("--seconds", type=float, default=60.0, help="of CPU, for all targets together")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the mutations; default: the time")
    parser.add_argument("--engine", choices=("search", "atheris"), default=None, help="default: atheris if installed")
    parser.add_argument("--keep", action="store_true", help="add inputs that reach new lines to the corpus")
    parser.add_argument("--no-write", action="store_true", help="do not write a defect to the corpus")
    parser.add_argument("--list", action="store_true", help="print the names of the targets")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    atheris = options.engine == "atheris" or (
        options.engine is None and importlib.util.find_spec("atheris") is not None
    )
    if options.in_process:
        from tests.fuzz import libfuzzer

        libfuzzer.run(options.targets[0], seconds=options.seconds, seed=options.seed, keep=options.keep)
    from tests.fuzz.targets import TARGETS

    names = options.targets or list(TARGETS)
    if options.list or not set(names) <= TARGETS.keys():
        print(*TARGETS, sep="\n")
        return 0 if options.list else 64
    print(f"{'atheris' if atheris else 'search'}, seed {options.seed}, {options.seconds:g} s for {len(names)} targets")
    share_s = options.seconds / len(names)
    if atheris:
        failed = [name for name in names if not _by_libfuzzer(name, options, share_s)]
    else:
        failed = [name for name in names if not _by_search(TARGETS[name], options, share_s)]
    print(f"{len(names) - len(failed)} of {len(names)} targets without a finding", *failed)
    return 1 if failed else 0


def _by_libfuzzer(name: str, options: argparse.Namespace, seconds: float) -> bool:
    """One target in a process of its own, because libFuzzer ends the process."""
    command = [sys.executable, "-m", "tests.fuzz", name, "--in-process", "--seconds", f"{seconds}"]
    command += ["--seed", str(options.seed), *(["--keep"] if options.keep else [])]
    done = subprocess.run(command, cwd=REPOSITORY, check=False, stderr=subprocess.PIPE, text=True, errors="replace")
    figures = [line for line in done.stderr.splitlines() if line.startswith("stat::")]
    print(f"{name:18} {' '.join(' '.join(figures).replace('stat::', '').split())}", flush=True)
    if done.returncode != 0:
        print(done.stderr[-5000:])
    return done.returncode == 0


def _by_search(target: Target, options: argparse.Namespace, seconds: float) -> bool:
    found = engine.search(target, seconds=seconds, seed=options.seed)
    print(
        f"{target.name:18} {found.inputs:8} inputs, {found.lines:5} lines, {len(found.findings)} findings", flush=True
    )
    for finding in found.findings:
        where = repr(finding.data[:500])
        if not options.no_write:
            where = str(engine.keep(target, finding.data, why=finding.what).relative_to(REPOSITORY))
        print(f"{finding.what} at {finding.place}: {where}\n{finding.text}")
    for data in engine.smallest(target, found.reached) if options.keep else ():
        engine.keep(target, data, why="lines")
    return not found.findings


if __name__ == "__main__":
    raise SystemExit(main())
