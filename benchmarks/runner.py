"""Runs benchmarks one after the other, each in a process of its own, and puts the runs of each side by side."""

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import nodeagent
from benchmarks import registry
from benchmarks.registry import Benchmark

REPOSITORY: Final = Path(__file__).parents[1]
PACKAGES: Final = ("h2", "kubernetes", "msgspec", "psutil", "pyroute2", "PyYAML", "structlog")
MOST_S: Final = 4 * 3600.0
"""Longest run of one benchmark: a hang."""
_NUMBER: Final = re.compile(r"(?<![\w.])[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


class Run(NamedTuple):
    """One run of one benchmark."""

    seconds: float
    load_average: float
    """Of the last minute, before it."""
    output: str
    trouble: str
    """Empty if it ended well."""


class Result(NamedTuple):
    """All runs of one benchmark."""

    benchmark: Benchmark
    command: str
    runs: tuple[Run, ...] = ()
    reason: str = ""
    """Why it was not run."""

    @property
    def failed(self) -> bool:
        return any(run.trouble for run in self.runs)


def run_each(benchmarks: Iterable[Benchmark], *, quick: bool, runs: int) -> Iterator[Result]:
    """Run all that can run here, each so often unless once is enough. One that fails stops no other one."""
    for each in benchmarks:
        yield _run(each, quick=quick, runs=runs)


def _run(benchmark: Benchmark, *, quick: bool, runs: int) -> Result:
    arguments = benchmark.quick if quick else benchmark.full
    command = ["python", "-m", f"benchmarks.{benchmark.module_name()}", *(arguments or ())]
    shown = " ".join(command)
    reason = "takes minutes: run it without --quick" if arguments is None else registry.why_not(benchmark.need)
    if reason:
        return Result(benchmark, shown, reason=reason)
    done: list[Run] = []
    runs = 1 if benchmark.once else runs
    for number in range(runs):
        print(f"{benchmark.name}, run {number + 1} of {runs}: {shown}", file=sys.stderr, flush=True)
        done.append(_run_once([sys.executable, *command[1:]]))
    return Result(benchmark, shown, tuple(done))


def _run_once(command: Sequence[str]) -> Run:
    began, load = time.monotonic(), os.getloadavg()[0]
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=MOST_S)
    except subprocess.TimeoutExpired:
        return Run(time.monotonic() - began, load, "", f"did not end in {MOST_S:g} s")
    trouble = ""
    if done.returncode:
        last = "\n".join([*done.stdout.splitlines()[-5:], *done.stderr.splitlines()[-5:]])
        trouble = f"exit code {done.returncode}:\n{last}"
    return Run(time.monotonic() - began, load, done.stdout, trouble)


# --- the report ------------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """What figures depend on."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    model = re.search(r"^model name\s*: (.*)$", cpuinfo, flags=re.MULTILINE)
    memory = re.search(r"^MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {
        "kernel": platform.release(),
        "cpu": model.group(1) if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mib": int(memory.group(1)) >> 10 if memory else None,
        "load_average": [round(each, 2) for each in os.getloadavg()],
        "python": platform.python_version(),
        "versions": {"nodeagent": nodeagent.__version__} | {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """Of the working tree; empty outside a repository."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip()


def table(results: Sequence[Result]) -> str:
    """One table: benchmark, seconds, what it printed. A figure that differs between runs is `least..most`."""
    rows = [("benchmark", "seconds", "output")]
    for result in results:
        seconds = merged([f"{run.seconds:.0f}" for run in result.runs])[0] if result.runs else "-"
        lines = merged([run.output for run in result.runs]) if result.runs else [f"not run: {result.reason}"]
        for run in result.runs:
            lines += [f"failed: {line}" for line in run.trouble.splitlines()]
        rows += [
            (result.benchmark.name if n == 0 else "", seconds if n == 0 else "", line) for n, line in enumerate(lines)
        ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]}".rstrip() for row in rows)


def merged(outputs: Sequence[str]) -> list[str]:
    """The lines of several runs as one: each number that differs is `least..most`. Runs that differ in anything else
    stand one below the other."""
    texts = [output.rstrip().splitlines() or [""] for output in outputs]
    shapes = [[_NUMBER.sub("0", " ".join(line.split())) for line in lines] for lines in texts]
    if any(shape != shapes[0] for shape in shapes):
        return [line for lines in texts for line in lines]
    return [_spread(lines) for lines in zip(*texts, strict=True)]


def _spread(lines: Sequence[str]) -> str:
    columns = zip(*[_NUMBER.findall(line) for line in lines], strict=True)
    texts = iter(
        [min(each, key=float) + ".." + max(each, key=float) if len(set(each)) > 1 else each[0] for each in columns]
    )
    return _NUMBER.sub(lambda _: next(texts), lines[0])


def document(results: Sequence[Result], facts: dict[str, Any], *, quick: bool) -> dict[str, Any]:
    """The report as JSON."""
    return {
        "machine": facts,
        "quick": quick,
        "benchmarks": [
            {
                "name": result.benchmark.name,
                "measures": result.benchmark.measures,
                "needs": result.benchmark.need,
                "command": result.command,
                "status": "not run" if result.reason else "failed" if result.failed else "ran",
                "reason": result.reason,
                "runs": [run._asdict() for run in result.runs],
            }
            for result in results
        ],
    }
