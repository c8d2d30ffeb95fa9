"""Every benchmark: what it measures, what it needs, and its arguments for a quick and for a full run."""

import enum
import os
from pathlib import Path
from typing import Final, NamedTuple

from tests.vm import image

HIERARCHIES: Final = tuple(Path("/sys/fs/cgroup", name) for name in ("memory", "pids"))


class Need(enum.StrEnum):
    """What a machine must have."""

    NOTHING = "nothing"
    CGROUPS = "root and cgroup v1"
    VM = "a virtual machine"


class Benchmark(NamedTuple):
    """One line of `python -m benchmarks --list`."""

    name: str
    measures: str
    need: Need
    quick: tuple[str, ...] | None
    """Arguments with --quick; None: only a full run has it, because it takes minutes."""
    full: tuple[str, ...] = ()
    module: str = ""
    """Below `benchmarks`; empty: as the name."""
    once: bool = False
    """A full run has it once, because it repeats by itself what it measures, or takes most of an hour."""

    def module_name(self) -> str:
        return self.module or self.name


BENCHMARKS: Final = (
    Benchmark("check_start", "a report against `python -c pass`", Need.NOTHING, ("--rounds", "5")),
    Benchmark("decision", "one decision, CPU time", Need.NOTHING, ("110", "500")),
    Benchmark("recorder", "bytes and CPU of the recording of samples", Need.NOTHING, ("110",)),
    Benchmark("replay", "a simulation over recorded samples", Need.NOTHING, ("--samples", "7200")),
    Benchmark("walk", "disk walks against `du`", Need.NOTHING, ("--files", "20000", "--rounds", "3")),
    Benchmark(
        "soak", "what grows in the whole agent", Need.NOTHING, ("--part", "0.002"), ("--minutes", "25"), once=True
    ),
    Benchmark("fleet", "requests of 5,000 agents", Need.NOTHING, None, once=True),
    Benchmark("own_limits", "one reading of the own limits of pods", Need.CGROUPS, ("110",), ("110", "500")),
    Benchmark(
        "agent",
        "the running agent: RSS, CPU, wake-ups",
        Need.CGROUPS,
        ("--rss", "--quick", "110"),
        ("--rss", "0", "30", "110", "500"),
        "loop",
    ),
    Benchmark("loop", "calm and pressed syncs against C", Need.CGROUPS, None),
    Benchmark("latency", "from the crossing to the request", Need.CGROUPS, ("--runs", "5", "--pods", "110")),
    Benchmark("first_decision", "from the start to the first decision of a dry run", Need.CGROUPS, ("--runs", "3")),
    Benchmark("forks", "the fork meter in a storm", Need.CGROUPS, ("5000",)),
    Benchmark("footprint", "the agent with the DaemonSet's resources", Need.CGROUPS, ("110",)),
    Benchmark("ramps", "memory ramps beside earlyoom and systemd-oomd", Need.VM, None, once=True),
    Benchmark("shortages", "fillers of nodefs and a fork storm beside a kubelet", Need.VM, None, once=True),
    Benchmark("page_cache", "evictions by a kubelet for page cache", Need.VM, None, ("--runs", "5"), once=True),
    Benchmark(
        "own_limit_ramps",
        "containers that grow towards their own limit",
        Need.VM,
        None,
        ("--runs", "3"),
        once=True,
    ),
)
"""In the order in which they run."""
OTHER_MODULES: Final = {
    "__main__": "the command",
    "contenders": "starts nodeagent and its peers, for benchmarks in the virtual machine",
    "registry": "this list",
    "runner": "runs the benchmarks",
    "fleet_traffic": "the requests of one node, for `fleet`",
    "fleet_world": "the clock and the server of `fleet`",
    "realnode": "pods in real cgroups",
    "record_demo": "records the incident of `nodeagent demo`, measures nothing",
    "soak_api": "the server of `soak`",
    "soak_world": "the clock and the node of `soak`",
}
"""Modules that are no benchmarks."""


def why_not(need: Need) -> str:
    """Why this machine does not have it; empty if it does."""
    if need is Need.VM:
        return image.why_not()
    if need is Need.CGROUPS:
        if os.geteuid() != 0:
            return "needs root"
        missing = [str(path) for path in HIERARCHIES if not os.access(path / "cgroup.procs", os.W_OK)]
        return f"needs writable cgroup v1: {', '.join(missing)}" if missing else ""
    return ""
