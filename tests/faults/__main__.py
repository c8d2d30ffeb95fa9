"""Injects faults and prints one table: what was injected, how often, what happened. `--quick` takes a sample.

    python -m tests.faults [--quick | --every N] [--only calls|kernel|state|recording|api|lifecycle]

Progress and findings are on stderr as they come. The exit code is 1 if there was a wrong eviction, a lost rate limit,
a hang or a traceback.
"""

import argparse
import sys
import time

from tests.faults.groups import GROUPS, QUICK_EVERY
from tests.faults.runs import Table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    how_many = parser.add_mutually_exclusive_group()
    how_many.add_argument("--quick", action="store_true", help="a sample of each kind, about a minute")
    how_many.add_argument("--every", type=int, default=1, metavar="N", help="one of so many faults")
    parser.add_argument("--only", choices=GROUPS, help="one group of faults")
    options = parser.parse_args()
    began = time.monotonic()
    table = Table(lambda line: print(line, file=sys.stderr, flush=True))
    for name in [options.only] if options.only else GROUPS:
        every = QUICK_EVERY[name] if options.quick else options.every
        GROUPS[name](table, every)
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    print(table.text())
    for finding in table.findings[:20]:
        print(finding)
    return 1 if table.findings else 0


if __name__ == "__main__":
    raise SystemExit(main())
