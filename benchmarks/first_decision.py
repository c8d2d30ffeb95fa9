"""Seconds from the start of the agent to its first decision, as a dry run.

    python -m benchmarks.first_decision [--runs 9]

Needs root and cgroup v1. `nodeagent run` starts as a process on a node that is already under pressure: a pod with a
real process is beyond the hard threshold of its `kubepods`. The API server is a double on loopback, in this process.
Protections and limits are the built-in ones, the mode is dry-run. Two instants of the log, after the start of the
process (so with the interpreter and all imports):

    signal    the first line about a signal: the node is sampled and the threshold is met
    decision  `would evict`: pods are listed and ranked, and the victim is known with its reason

Of each it prints the least, the median and the largest. Not in it: pulling the image and starting its container.
"""

import argparse
import statistics
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any, Final

from tests.fake_kube import ApiServer, pod
from tests.support.livenode import HARD, MIB, Kubepods, Run, configuration, until

LIMIT: Final = 600 * MIB
USED_MIB: Final = 400
EVENTS: Final = {"signal": "signal changed", "decision": "would evict"}


def main() -> None:
    arguments = argparse.ArgumentParser(description="Seconds from the start to the first decision of a dry run.")
    arguments.add_argument("--runs", type=int, default=9)
    runs = [measure() for _ in range(arguments.parse_args().runs)]
    for name in EVENTS:
        times = sorted(run[name] for run in runs)
        print(f"{name:>9} {times[0]:6.2f} s {statistics.median(times):6.2f} s {times[-1]:6.2f} s  {len(times)} runs")


def measure() -> dict[str, float]:
    """Seconds from the start to each of the events."""
    uid = str(uuid.uuid4())
    hog = pod("hog", uid=uid, owner=("ReplicaSet", "hog"), qos="Burstable", requests={"memory": "50Mi"})
    kubepods = Kubepods(LIMIT)
    with tempfile.TemporaryDirectory() as scratch, ApiServer(node="lab-node", pods=[hog], linger_s=None) as api:
        directory = Path(scratch)
        settings: dict[str, Any] = {**HARD, "mode": "dry-run", "protection": {}}
        file = configuration(directory, kubepods, **settings)
        kubeconfig = api.kubeconfig(directory / "kubeconfig")
        try:
            kubepods.start(uid, qos="burstable")
            kubepods.eat(uid, USED_MIB)
            return first_seen(
                Run(
                    "--config", str(file), "--kubeconfig", str(kubeconfig), "--node-name", "lab-node",
                    log=directory / "log",
                ),
                time.monotonic(),
            )  # fmt: skip
        finally:
            kubepods.close()


def first_seen(agent: Run, started: float) -> dict[str, float]:
    """Seconds from `started` until the log has each of the events; the agent is ended."""
    seen: dict[str, float] = {}
    try:
        for name, event in EVENTS.items():
            until(lambda event=event: agent.logged(event), f"{event} in the log")  # type: ignore[misc]
            seen[name] = time.monotonic() - started
    finally:
        agent.kill()
    return seen


if __name__ == "__main__":
    main()
