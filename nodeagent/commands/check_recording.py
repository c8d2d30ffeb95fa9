"""`nodeagent check --recording FILE`: the report of one recorded sample instead of the live node.

1. Nothing of this machine is read but the file and the configuration: no host, no API server.
2. Signals and conditions are those that the agent recorded, with their history. Order, victims and refusals are what
   the policy decides on the sample from an empty state, as in every report; `nodeagent explain ID` has the decision
   itself. With --config, or where a recording has no verdicts, everything is decided again.
3. The report says that it is recorded, from when, and from which version.
"""

from collections import deque
from pathlib import Path
from typing import Final, NamedTuple

from nodeagent.commands import check
from nodeagent.commands.check import CheckError
from nodeagent.config import above_kubelet, load
from nodeagent.config.kubelet import KubeletThresholds
from nodeagent.config.problems import ConfigError
from nodeagent.config.schema import Config, StartupConfig
from nodeagent.model import Note, NoteKind, RecordedSample, RecordingHeader, Signal
from nodeagent.policy import engine, page_cache, ranking
from nodeagent.policy import state as policy_state
from nodeagent.records import recording
from nodeagent.records.recording import Recording, RecordingError
from nodeagent.report import wording
from nodeagent.report.node_report import Report

MAX_SAMPLES: Final = 900
"""Samples before the reported one, for the curves of a page: fifteen minutes at one a second."""
NOT_SAMPLED: Final = Note(NoteKind.HOST, "OOM kills since each cgroup was made are not in a recording")


class RecordedReport(NamedTuple):
    """The report of a recorded sample."""

    report: Report
    samples: tuple[RecordedSample, ...]
    """The sample and those before it."""


def make_report(
    place: Path,
    *,
    at: float | str | None = None,
    loaded: load.LoadedConfig | None = None,
    config_source: str | None = None,
    signal: Signal | None = None,
) -> RecordedReport:
    """The report of the last sample, of the last one at a time (epoch seconds), or of that of a decision. `loaded` is
    the configuration of the file `config_source`; None: the recorded one. Raises CheckError."""
    try:
        found = recording.open_recording(place)
        header, samples = _find(found, at, place)
    except RecordingError as error:
        raise CheckError(str(error)) from error
    config, source, notes = _configuration(loaded, header, place)
    source = config_source or source
    sample = samples[-1]
    snapshot = sample.snapshot
    state = policy_state.initial("check", now=snapshot.taken_at)
    plan, _ = engine.decide(snapshot, state, now=snapshot.taken_at, config=config)
    if loaded is None and sample.signals:
        plan = plan._replace(signals=sample.signals, conditions=sample.conditions)
    if signal is not None:
        plan = check.ranked_for(plan, snapshot, signal, now=snapshot.taken_at, config=config)
    what = f"recorded at {wording.rfc3339(sample.wall_time)}"
    if sample.plan_id:
        what += f", decision {sample.plan_id}"
    if header.version:
        what += f", by nodeagent {header.version}"
    kubelet = KubeletThresholds("the recording", header.kubelet) if header.kubelet else None
    trouble = tuple([Note(NoteKind.HOST, each) for each in found.trouble])
    report = Report(
        snapshot=snapshot,
        plan=ranking.with_key_texts(plan),
        mode=config.mode.value,
        config_source=source,
        pods_source="the recording",
        kubelet=kubelet,
        notes=tuple(dict.fromkeys((*snapshot.notes, *plan.notes, *notes, *trouble, NOT_SAMPLED))),
        page_cache=page_cache.reclaimable(snapshot, config=config),
        recording=f"{place}: {what}",
    )
    return RecordedReport(report, tuple(samples))


def _find(found: Recording, at: float | str | None, place: Path) -> tuple[RecordingHeader, deque[RecordedSample]]:
    """The sample after those before it, and the header of the process that recorded it. Raises CheckError."""
    until = _time_of(found, at, place) if isinstance(at, str) else at
    chosen: deque[RecordedSample] = deque(maxlen=MAX_SAMPLES)
    header = RecordingHeader("", "", "", "", 0.0)
    for its_header, samples in found.parts(until_wall=until):
        for sample in samples:
            header = its_header
            chosen.append(sample)
            if isinstance(at, str) and _is_of(sample, at):
                return header, chosen
    if not chosen and at is None:
        raise CheckError(f"{place}: contains no sample")
    if not chosen:
        span = found.span
        first = f": the first sample is from {wording.rfc3339(span.first)}" if span is not None else ""
        raise CheckError(f"{place}: no sample at {wording.rfc3339(at) if isinstance(at, float) else at}{first}")
    return header, chosen


def _is_of(sample: RecordedSample, identity: str) -> bool:
    return bool(sample.plan_id) and sample.plan_id == identity


def _time_of(found: Recording, identity: str, place: Path) -> float:
    """When the decision or the OOM kills with this id were recorded. Raises CheckError."""
    for record in found.records():
        wall = record.get("wallTime")
        if record.get("id") == identity and isinstance(wall, int | float):
            return float(wall)
    for _, samples in found.parts():
        for sample in samples:
            if _is_of(sample, identity):
                return sample.wall_time
    raise CheckError(f"{place}: no decision {identity}; `nodeagent explain` lists the recorded ones")


def _configuration(
    loaded: load.LoadedConfig | None, header: RecordingHeader, place: Path
) -> tuple[Config, str, tuple[Note, ...]]:
    """The configuration to decide with, its source, and notes about it."""
    notes: tuple[Note, ...] = ()
    source = "--config"
    if loaded is None and header.configuration:
        source = "the recording"
        try:
            loaded = load.loads(header.configuration, name=str(place))
        except ConfigError as error:
            notes = (Note(NoteKind.CONFIGURATION, f"the recorded one is not valid here, defaults assumed: {error}"),)
    if loaded is None:
        loaded, source = load.defaults(), "built-in defaults"
    config = above_kubelet.keep_above(loaded.config, header.kubelet)
    return config._replace(startup=StartupConfig(fresh_samples=1)), source, notes
