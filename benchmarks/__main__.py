"""Runs every benchmark that this machine can run, and prints one table.

    python -m benchmarks [--quick] [--runs N] [--only NAME...] [--json FILE]
    python -m benchmarks --list

A full run takes about three hours, most of them for the ramps in virtual machines and the fleet; --quick takes less
than five minutes and leaves out what takes minutes alone. Progress is on stderr. FILE is written again after each
benchmark, so that a run that is ended early keeps what it has. A benchmark that cannot run here is in the table with
the reason. One that fails stops no other one, and the exit code is then 1.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import registry, runner
from benchmarks.runner import Result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [each.name for each in registry.BENCHMARKS]
    parser.add_argument("--quick", action="store_true", help="shorter runs, only what takes seconds")
    parser.add_argument(
        "--runs", type=int, help="runs of each that repeats nothing by itself (default: 3, with --quick 1)"
    )
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="only these")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, commands and outputs to this file")
    parser.add_argument("--list", action="store_true", help="list the benchmarks and what they need")
    options = parser.parse_args(arguments)
    if options.list:
        for each in registry.BENCHMARKS:
            print(f"{each.name:<16} {each.measures:<50} needs {each.need}")
        return 0
    wanted = [each for each in registry.BENCHMARKS if each.name in (options.only or names)]
    facts = runner.machine()  # before the benchmarks load it
    runs = max(1, options.runs or (1 if options.quick else 3))
    results: list[Result] = []
    for result in runner.run_each(wanted, quick=options.quick, runs=runs):
        results.append(result)
        if options.json:
            document = runner.document(results, facts, quick=options.quick)
            options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    for name, value in facts.items():
        print(f"{name}: {value}")
    print(runner.table(results))
    return 1 if any(result.failed for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
