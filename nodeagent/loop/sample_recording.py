"""What the loop hands to the recorder of samples, and the facts about this process at the start of a recording."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from nodeagent import __version__
from nodeagent.config import show
from nodeagent.config.load import LoadedConfig
from nodeagent.model import NodeSnapshot, Note, Plan, Threshold
from nodeagent.model.recording import RecordedSample, RecordingHeader
from nodeagent.records import recorder_paths
from nodeagent.records.entry_queue import InForce
from nodeagent.records.sample_recorder import RecorderCounts, SampleRecorder

MAX_BYTES_IN_MEMORY: Final = 8 << 20
"""Of the default directory, which is usually a tmpfs: it counts against the memory limit of the agent, 128 MiB in
daemonset.yaml."""


class HeaderFacts(NamedTuple):
    """What does not change while the process runs."""

    node: str
    instance: str
    boot_id: str


def open_recorder(
    facts: HeaderFacts, loaded: LoadedConfig, *, kubelet: Callable[[], tuple[Threshold, ...] | None]
) -> SampleRecorder | None:
    """The recorder of the configuration at the start; None if it is off. `kubelet` returns the kubelet's thresholds, as
    far as they are known then."""
    config, system = loaded.config, os.uname()
    if not config.recorder.enabled:
        return None

    def header(in_force: InForce) -> RecordingHeader:
        return RecordingHeader(
            facts.node,
            __version__,
            facts.instance,
            facts.boot_id,
            in_force.since_wall,
            show.show(show.without_secrets(in_force.loaded or loaded)),
            f"{system.release} {system.machine}",
            kubelet() or (),
        )

    most = config.recorder.max_bytes.quantity or 0
    if config.recorder.dir:
        return SampleRecorder(Path(config.recorder.dir), max_bytes=most, header=header)
    directory = Path(config.state_dir) / recorder_paths.SAMPLES
    return SampleRecorder(directory, max_bytes=min(most, MAX_BYTES_IN_MEMORY), header=header)


def record_decision(
    recorder: SampleRecorder, plan: Plan, snapshot: NodeSnapshot, loaded: LoadedConfig, *, exact: bool
) -> None:
    """Record the sample of a decision with this configuration. `exact`: it was recorded with its inputs."""
    recorder.configure(loaded)
    if exact or recorder.due(plan.signals, now=snapshot.taken_at):
        decided = plan.victims or plan.refusals or plan.reclaims
        plan_id = plan.id if decided else ""
        count = snapshot.zombies.total if snapshot.zombies is not None else None
        recorder.record(RecordedSample(snapshot, plan.signals, plan.conditions, plan_id, count, exact=exact))


def notes(recorder: SampleRecorder | None) -> tuple[Note, ...]:
    """Why samples are not stored on disk."""
    return recorder.notes() if recorder is not None else ()


def counts(recorder: SampleRecorder | None) -> RecorderCounts | None:
    """For the metrics page."""
    return recorder.counts() if recorder is not None else None
