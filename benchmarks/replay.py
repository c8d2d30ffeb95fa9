"""A week of samples: how long `nodeagent replay` and `nodeagent tune` take, and what each part costs for a sample.

The recording has 110 pods at 1 Hz. Each second five pods change and every signal is read anew, and each day ends with a
ramp in which another pod takes all memory within a quarter of an hour. `--samples` shortens it; the last column is then
the time of a week.

    python -m benchmarks.replay [--samples N]
"""

import argparse
import itertools
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from nodeagent.analysis import comparison
from nodeagent.analysis.simulation import Simulator
from nodeagent.analysis.tuning import Tuner
from nodeagent.config import load
from nodeagent.config.schema import Config
from nodeagent.model import DISK_SIGNALS, NodeSnapshot, PodView, RecordedSample, RecordingHeader, Signal
from nodeagent.records import recording
from tests.support import nodes, recordings
from tests.support.nodes import GI, MI

WEEK: Final = 604_800
DAY: Final = 86_400
RAMP_S: Final = 900
PODS: Final = 110
CHANGED: Final = 5


def samples(count: int) -> Iterator[RecordedSample]:
    """The recording, one sample a second."""
    chance = random.Random(19)
    base = nodes.snapshot(*[nodes.view(f"pod-{number}", 100 * MI, namespace="other") for number in range(PODS - 1)])
    pods = list(base.pods)
    for second in range(count):
        at = nodes.NOW + second
        if second % DAY == 0:
            hog = nodes.view(f"hog-{second // DAY}", 50 * MI)
        for number in chance.sample(range(PODS - 1), CHANGED):
            pods[number] = _with_memory(pods[number], 100 * MI + chance.randrange(20 * MI), at)
        ramp = max(0, second % DAY - (DAY - RAMP_S)) * 8 * GI // RAMP_S
        available = max(0, 8 * GI - ramp - chance.randrange(50 * MI))
        yield RecordedSample(_snapshot(base, (*pods, _with_memory(hog, 50 * MI + ramp, at)), at, available, second))


def _with_memory(view: PodView, size: int, at: float) -> PodView:
    assert view.usage is not None
    usage = view.usage._replace(memory_working_set=size, memory_usage=size, memory_unreclaimable=size, read_at=at)
    return PodView(view.pod, usage)


def _snapshot(base: NodeSnapshot, pods: tuple[PodView, ...], at: float, available: int, second: int) -> NodeSnapshot:
    observations = {
        signal: each._replace(
            read_at=at - second % 10 if signal in DISK_SIGNALS else at,
            available=available if signal is Signal.MEMORY else (each.available or 0) - second % 50,
        )
        for signal, each in base.observations.items()
    }
    return base._replace(
        taken_at=at,
        wall_time=nodes.WALL + second,
        observations=observations,
        mem_available=observations[Signal.MEMORY],
        pods=pods,
        pods_synced_at=at,
    )


def measured(title: str, count: int, run: Callable[[], str]) -> None:
    """Print the CPU time of `run`, of one sample and of a week."""
    began = time.process_time()
    result = run()
    took = time.process_time() - began
    print(f"{title:<34}{took:8.1f} s {1e6 * took / count:8.0f} us {took * WEEK / count:8.1f} s  {result}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=WEEK)
    count = parser.parse_args().samples
    config = load.defaults().config
    other = config._replace(thresholds=config.thresholds[:1])
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "week.rec"
        recordings.write_recording(path, RecordingHeader("node-1", "0", "b", "boot", nodes.WALL), samples(count))
        print(f"{count} samples of {PODS} pods, {path.stat().st_size / 2**20:.1f} MiB; CPU time, one core")
        print(f"{'':<34}{'all':>10} {'a sample':>11} {'a week':>10}")

        def read() -> str:
            return f"{sum(1 for _ in recording.open_recording(path).snapshots())} snapshots"

        def replay(*configs: tuple[str, Config]) -> str:
            found = comparison.compare(recording.open_recording(path).snapshots(), configs, source="")
            return ", ".join(f"{len(each.evictions)} evictions, {each.decided} decided" for each in found.simulations)

        def tune() -> str:
            tuner = Tuner(config)
            for snapshot in recording.open_recording(path).snapshots():
                tuner.feed(snapshot)
            return f"{len(tuner.result().signals)} signals"

        measured("read the snapshots", count, read)
        measured("replay", count, lambda: replay(("a", config)))
        measured("replay, two configurations", count, lambda: replay(("a", config), ("b", other)))
        measured("tune", count, tune)
        few = min(count, 3000)

        def decide() -> str:
            simulator = Simulator(config, pass_over=False)
            for snapshot in itertools.islice(recording.open_recording(path).snapshots(), few):
                simulator.feed(snapshot)
            return f"{few} samples, each decided on"

        measured("replay without passing over", few, decide)


if __name__ == "__main__":
    main()
