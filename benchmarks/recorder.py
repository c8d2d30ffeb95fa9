"""Size and CPU of a recording of samples: `python -m benchmarks.recorder [pods...]`.

The node changes as `node_series` describes it: every signal, PSI and memory figure in every sample; the memory of about
a third of the pods, for half of these by some MiB. The recorder runs as in an agent, with its thread and a directory,
and gets the samples as fast as it takes them. Columns:

* `MiB/day`: what a day of such samples needs at their pace (calm: one in 10 s; pressure: one a second, and after 15
  minutes every second one);
* `core`: CPU of loop and thread together, at that pace;
* `loop`: CPU time of the loop's thread for one sample, median and longest.

Bounds with 110 pods: 40 MiB for a day, 0.05% of a core.
"""

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import decision
from nodeagent.model import CgroupUsage, NodeMemory, NodeSnapshot, PodView, Signal, Stall, StallScope
from nodeagent.model.recording import RecordedSample, RecordingHeader
from nodeagent.policy import candidates, engine
from nodeagent.policy.state import initial
from nodeagent.records import sample_recorder
from nodeagent.records.sample_recorder import SampleRecorder

MI = 1 << 20
SAMPLES = 1500
HEADER = RecordingHeader("node-1", "0", "benchmark", "boot", decision.WALL)


def node_series(pods: int, count: int, *, every_s: float, available: int) -> Iterator[NodeSnapshot]:
    """A node whose figures all move."""
    chance = random.Random(pods)
    node = decision.node(pods, available=available)
    views = list(node.pods)
    stalls = [Stall(scope, kind, 0.0, 0.0, 0, 0.0, 0.0, 0, 0.0) for scope in StallScope for kind in ("memory", "io")]
    groups = [CgroupUsage(f"/system.slice/unit-{index}.service", 100 * MI, 5) for index in range(10)]
    for number in range(count):
        at = decision.NOW + number * every_s + chance.random() / 100
        views = [_moved(view, chance, at=at) for view in views]
        observations = {
            signal: each._replace(read_at=at, available=(each.available or 0) + int(chance.gauss(0, 4 * MI)))
            for signal, each in node.observations.items()
        }
        memory = node.memory
        assert memory is not None
        yield node._replace(
            taken_at=at,
            wall_time=decision.WALL + at - decision.NOW,
            observations=observations,
            mem_available=observations[Signal.MEMORY],
            memory=NodeMemory._make(
                [each + int(chance.gauss(0, 2 * MI)) if type(each) is int else each for each in memory]
            ),
            stalls=tuple([_stalled(each, chance, at=at) for each in stalls]),
            cgroups=tuple([each._replace(memory_working_set=int(chance.gauss(100, 1) * MI)) for each in groups]),
            pods=tuple(views),
            pods_synced_at=at - 1,
        )


def _moved(view: PodView, chance: random.Random, *, at: float) -> PodView:
    share = chance.random()
    usage = view.usage
    if share > 0.35 or usage is None:
        return view
    memory = max(MI, (usage.memory_working_set or 0) + int(chance.gauss(0, 3 * MI if share < 0.17 else MI // 5)))
    containers = tuple([each._replace(memory_working_set=memory // 3) for each in usage.containers])
    return PodView(
        view.pod,
        usage._replace(
            read_at=at,
            memory_working_set=memory,
            memory_usage=memory + MI,
            memory_unreclaimable=memory * 3 // 4,
            containers=containers,
        ),
    )


def _stalled(stall: Stall, chance: random.Random, *, at: float) -> Stall:
    some, full = round(abs(chance.gauss(5, 1)), 2), round(abs(chance.gauss(2, 0.5)), 2)
    return stall._replace(some_avg10=some, full_avg10=full, some_total_us=int(at * 1e4), read_at=at)


def record(pods: int, *, every_s: float, available: int) -> tuple[float, float, list[float]]:
    """Bytes and CPU seconds of one sample, and the seconds that the loop waited for each."""
    config, cache, state = decision.settings(), candidates.RankingCache(), initial("benchmark", now=decision.NOW)
    cpu, waits = 0.0, []
    with tempfile.TemporaryDirectory() as directory:
        recorder = SampleRecorder(Path(directory), max_bytes=1 << 30, header=lambda _: HEADER)
        recorder.start()
        for node in node_series(pods, SAMPLES, every_s=every_s, available=available):
            plan, state = engine.decide(node, state, now=node.taken_at, config=config, cache=cache)
            sample = RecordedSample(node, plan.signals, plan.conditions)
            began, cpu_began = time.thread_time(), time.process_time()
            recorder.record(sample)
            waits.append(time.thread_time() - began)
            while not recorder.idle:
                time.sleep(0.0005)
            cpu += time.process_time() - cpu_began
        began = time.process_time()
        recorder.stop()
        cpu += time.process_time() - began
        size = recorder.counts().disk_bytes
        assert recorder.counts().dropped == 0
    return size / SAMPLES, cpu / SAMPLES, waits


def main() -> None:
    sizes = [int(each) for each in sys.argv[1:]] or [110, 500]
    print(f"{'pods':>5} {'':10} {'bytes':>7} {'MiB/day':>8} {'core':>8}  loop")
    for pods in sizes:
        for name, every_s, available in (
            ("calm", 10.0, 200 * decision.GI),
            ("1 Hz", 1.0, 2 * decision.GI),
            ("pressure", sample_recorder.LONG_EVERY_S, 2 * decision.GI),
        ):
            size, cpu, waits = record(pods, every_s=every_s, available=available)
            day = size * 86_400 / every_s / MI
            print(
                f"{pods:>5} {name:10} {size:>7.0f} {day:>8.1f} {cpu / every_s:>8.3%}"
                f"  {statistics.median(waits) * 1e3:.2f} and {max(waits) * 1e3:.2f} ms"
            )


if __name__ == "__main__":
    main()
