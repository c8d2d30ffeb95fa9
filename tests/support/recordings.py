"""Recordings made by the real policy: a stretch of samples of a node, decided one after the other."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from nodeagent.config.schema import Config
from nodeagent.model import NodeSnapshot, Plan, RecordedSample
from nodeagent.model.recording import RecordingHeader
from nodeagent.policy import engine
from nodeagent.policy.state import PolicyState, initial
from nodeagent.records import recording


class Decided(NamedTuple):
    """One sample, and what was decided on it."""

    sample: RecordedSample
    plan: Plan
    state: PolicyState
    """Before the decision."""


def decide_all(snapshots: Iterable[NodeSnapshot], config: Config, *, instance: str = "test") -> Iterator[Decided]:
    """Each snapshot with the plan of the policy. What is ordered has no outcome: an eviction stays in flight."""
    state: PolicyState | None = None
    for snapshot in snapshots:
        before = state if state is not None else initial(instance, now=snapshot.taken_at)
        plan, state = engine.decide(snapshot, before, now=snapshot.taken_at, config=config)
        kept = plan.id if plan.victims or plan.refusals else ""
        sample = RecordedSample(snapshot, plan.signals, plan.conditions, plan_id=kept, exact=bool(kept))
        yield Decided(sample, plan, before)


def record(
    make: Callable[[float], NodeSnapshot], config: Config, *, seconds: int, every_s: float = 1.0
) -> tuple[RecordedSample, ...]:
    """The samples of `make(second)` for so many seconds."""
    times = (number * every_s for number in range(int(seconds / every_s)))
    return tuple(each.sample for each in decide_all(map(make, times), config))


def write_recording(path: Path, header: RecordingHeader, samples: Iterable[RecordedSample]) -> None:
    """Write these samples to one `.rec` file."""
    path.write_bytes(b"".join(recording.encode(header, samples)))
