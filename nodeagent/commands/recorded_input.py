"""What `replay` and `tune` read: a recording, a file of records, or the history of a node in a Prometheus."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from nodeagent.analysis import prometheus_client
from nodeagent.analysis.prometheus_client import PrometheusClient, PrometheusError, Server
from nodeagent.analysis.prometheus_history import PrometheusHistory, Wanted
from nodeagent.commands.arguments_common import Since
from nodeagent.model import NodeSnapshot, RecordedSample, Threshold
from nodeagent.records import flight_recorder, recording
from nodeagent.records.recording import Recording

Progress = Callable[[float], None]
"""Gets the number of samples, or steps, so far."""


class InputError(Exception):
    """Nothing can be read. The message is for the user."""


class RecordedInput(Protocol):
    """The samples and records of one node."""

    name: str
    total: float | None
    """What the progress counts to; 0 without samples."""
    first_wall: float
    """About when it begins, epoch seconds."""
    kubelet: tuple[Threshold, ...]
    """The kubelet's own thresholds, as far as they were recorded."""

    def samples(self, progress: Progress) -> Iterator[RecordedSample]:
        """Oldest first. Raises InputError."""
        ...

    def snapshots(self, progress: Progress) -> Iterator[NodeSnapshot]:
        """The snapshots of the samples, which are read faster than whole samples. Raises InputError."""
        ...

    def records(self) -> list[dict[str, Any]]:
        """Raises InputError."""
        ...

    def remarks(self) -> tuple[str, ...]:
        """What it lacks. Complete after `samples` has ended."""
        ...


class PrometheusOptions(NamedTuple):
    """The options of a history from a Prometheus."""

    url: str
    node: str
    since: Since
    step_s: float
    header_file: str | None
    ca_file: str | None


MAX_STEPS: Final = 5_000_000
"""Samples from a Prometheus: 57 days of seconds."""
EVERY: Final = 2000
"""Samples between two calls of the progress function."""


class RecordingInput:
    """A recording."""

    def __init__(self, path: Path, found: Recording) -> None:
        self.name = str(path)
        self._found = found
        self.total: float | None = found.count
        headers = found.headers
        self.kubelet = headers[-1].kubelet if headers else ()
        self.first_wall = found.span.first if found.span is not None else 0.0

    def samples(self, progress: Progress) -> Iterator[RecordedSample]:
        for number, sample in enumerate(self._found.samples()):
            if number % EVERY == 0:
                progress(number)
            yield sample

    def snapshots(self, progress: Progress) -> Iterator[NodeSnapshot]:
        for number, snapshot in enumerate(self._found.snapshots()):
            if number % EVERY == 0:
                progress(number)
            yield snapshot

    def records(self) -> list[dict[str, Any]]:
        return list(self._found.records())

    def remarks(self) -> tuple[str, ...]:
        return tuple([f"{self.name}: {each}" for each in self._found.trouble])


class RecordsInput:
    """A file of records without samples."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.total: float | None = 0
        self.kubelet: tuple[Threshold, ...] = ()
        self.first_wall = 0.0
        self._path = path

    def samples(self, progress: Progress) -> Iterator[RecordedSample]:  # noqa: ARG002
        return iter(())

    def snapshots(self, progress: Progress) -> Iterator[NodeSnapshot]:  # noqa: ARG002
        return iter(())

    def records(self) -> list[dict[str, Any]]:
        try:
            return list(flight_recorder.read_records(self._path))
        except flight_recorder.RecordsError as error:
            raise InputError(str(error)) from error

    def remarks(self) -> tuple[str, ...]:
        return ()


class PrometheusInput:
    """The history of a node in a Prometheus."""

    def __init__(self, options: PrometheusOptions, *, now: float) -> None:
        """Raises InputError."""
        steps = int((now - options.since.wall(now)) / options.step_s)
        if not 0 < steps <= MAX_STEPS:
            raise InputError(f"--since and --step: {max(0, steps)} samples, not between 1 and {MAX_STEPS}")
        wanted = Wanted(options.node, now - steps * options.step_s, options.step_s, steps)
        try:
            header = prometheus_client.read_header(options.header_file) if options.header_file else None
            client = PrometheusClient(Server(options.url, header, options.ca_file or ""))
            self._history = PrometheusHistory(client, wanted)
        except PrometheusError as error:
            raise InputError(str(error)) from error
        self.name = f"{options.node} in {options.url}"
        self.total: float | None = steps
        self.kubelet: tuple[Threshold, ...] = ()
        self.first_wall = wanted.start

    def samples(self, progress: Progress) -> Iterator[RecordedSample]:
        try:
            yield from self._history.samples(progress=lambda done, _: progress(done))
        except PrometheusError as error:
            raise InputError(str(error)) from error

    def snapshots(self, progress: Progress) -> Iterator[NodeSnapshot]:
        return (sample.snapshot for sample in self.samples(progress))

    def records(self) -> list[dict[str, Any]]:
        return []

    def remarks(self) -> tuple[str, ...]:
        return self._history.remarks


def open_file(path: Path) -> RecordingInput | RecordsInput:
    """A recorder's or a state directory, a `.rec` file, a snapshot file, or a file of records. Raises InputError."""
    if path.is_file() and path.suffix not in (".rec", ".zip") and not _is_recording(path):
        return RecordsInput(path)
    try:
        return RecordingInput(path, recording.open_recording(path))
    except recording.RecordingError as error:
        raise InputError(str(error)) from error


def open_prometheus(options: PrometheusOptions) -> PrometheusInput:
    """Raises InputError."""
    return PrometheusInput(options, now=time.time())


def _is_recording(path: Path) -> bool:
    """Whether a file with another name is a recording: it does not begin as a line of JSON does."""
    try:
        with path.open("rb") as file:
            start = file.read(1)
    except OSError:
        return False
    return start not in (b"{", b"")
