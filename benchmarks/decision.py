"""CPU time of one decision, by number of pods: `python -m benchmarks.decision [pods...]`.

Every pod has three containers with requests. The node is under hard memory pressure, so that each decision judges
thresholds, ranks and protects pods, selects victims and writes the plan. Three columns:

* `decision`: a decision of a running agent, whose cache contains the pods;
* `first`: the same without a cache, as in `check`, or in an agent with new pods alone;
* `calm`: enough memory, no ranking.

Each figure is the least CPU time of several runs. The ratio to the time per pod at 500 shows a growth that is not
linear. Bound: 10 ms at 500 pods.
"""

import random
import sys
import time
from collections.abc import Callable

from nodeagent.config.schema import Config, RateLimits, StartupConfig, TokenBucket
from nodeagent.model import (
    Amount,
    Container,
    ContainerUsage,
    DiskLayout,
    DiskUsage,
    MemoryModel,
    NodeMemory,
    NodeSnapshot,
    Observation,
    Owner,
    Pod,
    PodSource,
    PodUsage,
    PodView,
    QOSClass,
    Resources,
    Signal,
    Threshold,
)
from nodeagent.policy import candidates, engine, state

SIZES = (110, 500, 1000, 5000)
CONTAINERS = 3
MI, GI = 1 << 20, 1 << 30
NOW, WALL = 100_000.0, 1_800_000_000.0
REPEATS = 30


def node(pods: int, *, available: int, at: float = NOW, shift: int = 0) -> NodeSnapshot:
    """A node full of pods of all kinds; the same for the same arguments."""
    chance = random.Random(pods)
    total = 512 * GI
    sizes = {Signal.MEMORY: total, Signal.ALLOCATABLE_MEMORY: total, Signal.PID: 4_194_304}
    observations = {
        signal: Observation(signal, sizes.get(signal, GI * 1000) // 2, sizes.get(signal, GI * 1000), at, "benchmark")
        for signal in Signal
    }
    observations[Signal.MEMORY] = Observation(Signal.MEMORY, available, total, at, "benchmark")
    return NodeSnapshot(
        node="node-1",
        taken_at=at,
        wall_time=WALL + at - NOW,
        observations=observations,
        mem_available=observations[Signal.MEMORY],
        allocatable_by_kernel=observations[Signal.ALLOCATABLE_MEMORY],
        memory=NodeMemory(total, available, available, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
        layout=DiskLayout.SINGLE,
        pods=tuple([_view(number, chance, at=at, shift=shift) for number in range(pods)]),
        pods_synced_at=at,
    )


def _view(number: int, chance: random.Random, *, at: float, shift: int) -> PodView:
    qos = chance.choice(list(QOSClass))
    request = None if qos is QOSClass.BEST_EFFORT else chance.randrange(16, 256) * MI
    containers = tuple(
        [
            Container(f"c{index}", requests=Resources(100, request), container_id=f"{number:060d}{index}", running=True)
            for index in range(CONTAINERS)
        ]
    )
    uid = f"{number:08d}-0000-4000-8000-000000000000"
    kind = "DaemonSet" if number % 25 == 0 else "ReplicaSet"
    pod = Pod(
        uid,
        uid,
        f"team-{number % 20}",
        f"app-{number // 3}-{number}",
        PodSource.API,
        qos,
        priority=chance.choice((0, 0, 0, 100, 1000)),
        phase="Running",
        created_wall=WALL - 3600,
        started_wall=WALL - 3600,
        containers=containers,
        owner=Owner(kind, f"app-{number // 3}", f"owner-{number // 3}"),
        labels={"app": f"app-{number // 3}"},
        ready=True,
    )
    memory = chance.randrange(8, 600) * MI + shift
    usage = PodUsage(
        uid,
        qos,
        f"/kubepods/burstable/pod{uid}",
        at,
        memory_working_set=memory,
        memory_usage=memory,
        memory_unreclaimable=memory * 3 // 4,
        process_count=9,
        thread_count=30,
        disk=DiskUsage(5 * MI, 100, MI, 3, 0, 0),
        containers=tuple(
            [ContainerUsage(each.container_id, each.name, memory // CONTAINERS, 3) for each in containers]
        ),
    )
    return PodView(pod, usage)


def settings() -> Config:
    plenty = TokenBucket(1000, 1000.0)
    return Config(
        thresholds=(
            Threshold(
                Signal.MEMORY,
                Amount(GI, None, "1Gi"),
                min_reclaim=Amount(200 * MI, None, "200Mi"),
                memory_model=MemoryModel.LOWER,
            ),
            Threshold(Signal.MEMORY, Amount(2 * GI, None, "2Gi"), grace_period_s=30.0, memory_model=MemoryModel.LOWER),
            Threshold(Signal.NODEFS, Amount(None, 12.0, "12%")),
            Threshold(Signal.IMAGEFS, Amount(None, 15.0, "15%")),
            Threshold(Signal.PID, Amount(None, 10.0, "10%")),
        ),
        startup=StartupConfig(fresh_samples=1),
        rate_limits=RateLimits(plenty, plenty, plenty, plenty),
    )


def best_ms(decision: Callable[[], object]) -> float:
    """The least CPU time of one call."""
    best = float("inf")
    for _ in range(REPEATS):
        start = time.process_time_ns()
        decision()
        best = min(best, time.process_time_ns() - start)
    return best / 1e6


def measure(pods: int) -> tuple[float, float, float]:
    """CPU ms of (decision, first, calm)."""
    config, cache = settings(), candidates.RankingCache()
    # Ten samples before the measured one, so that trends and growth have data.
    policy_state = state.initial("benchmark", now=NOW)
    for second in range(10):
        calm = node(pods, available=GI * 100, at=NOW + second)
        _, policy_state = engine.decide(calm, policy_state, now=NOW + second, config=config, cache=cache)
    at = NOW + 10
    pressed, calm = node(pods, available=600 * MI, at=at), node(pods, available=GI * 100, at=at)
    plan, _ = engine.decide(pressed, policy_state, now=at, config=config, cache=cache)
    if len(plan.victims) != 2 or len(plan.ranking) != pods:
        raise SystemExit(f"unexpected decision: {len(plan.victims)} victims")
    return (
        best_ms(lambda: engine.decide(pressed, policy_state, now=at, config=config, cache=cache)),
        best_ms(lambda: engine.decide(pressed, policy_state, now=at, config=config)),
        best_ms(lambda: engine.decide(calm, policy_state, now=at, config=config, cache=cache, always_rank=False)),
    )


def main(arguments: list[str]) -> None:
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return
    sizes = [int(each) for each in arguments] or list(SIZES)
    rows = {pods: measure(pods) for pods in sizes}
    base = rows.get(500, rows[sizes[0]])[0] / (500 if 500 in rows else sizes[0])
    print(f"one decision, {CONTAINERS} containers per pod, CPU ms (python {sys.version.split()[0]})")
    print(f"{'pods':>6} {'decision':>9} {'first':>9} {'calm':>9} {'us/pod':>7} {'ratio':>6}")
    for pods, (known, first, calm) in rows.items():
        each = known / pods
        print(f"{pods:>6} {known:>9.2f} {first:>9.2f} {calm:>9.2f} {1000 * each:>7.2f} {each / base:>6.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
