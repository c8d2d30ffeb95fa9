"""Collects the members of a snapshot file from the records of an agent.

1. One pass over the samples and one over the records; with pseudonyms two, because a message may name a pod that only
   a later sample contains. Nothing is held in memory but what is written next.
2. The window is inclusive. Samples and records outside of it are left out; the outcome of a decision inside is not.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO, Any, Final, NamedTuple

from nodeagent.model import RecordedSample
from nodeagent.records import flight_recorder, snapshot_file
from nodeagent.records import recording as recordings
from nodeagent.records.pseudonyms import Pseudonyms
from nodeagent.records.recording import Recording
from nodeagent.records.snapshot_documents import Documents
from nodeagent.records.snapshot_file import Manifest, SnapshotWriter

BEFORE_S: Final = 900.0
"""Of a snapshot about a decision: a leak that ends in an eviction takes minutes."""
AFTER_S: Final = 300.0
"""The release of its memory takes seconds, a second eviction a minute or two."""
FOLLOWING_S: Final = 900.0
"""How long after the window the outcomes of its decisions are searched."""

Progress = Callable[[str], None]


class Window(NamedTuple):
    """A time, in epoch seconds. None: without a limit."""

    since: float | None = None
    until: float | None = None

    def contains(self, wall: object) -> bool:
        """True for a time inside. A record without a time counts as inside."""
        if not isinstance(wall, int | float):
            return True
        return (self.since is None or wall >= self.since) and (self.until is None or wall <= self.until)


def around(wall: float) -> Window:
    """The window of a decision that was made at this time."""
    return Window(wall - BEFORE_S, wall + AFTER_S)


def build(
    file: IO[bytes],
    *,
    name: str,
    recording: Recording | None,
    documents: Documents,
    manifest: Manifest,
    window: Window,
    names: Pseudonyms | None = None,
    max_bytes: int = snapshot_file.MAX_FILE_BYTES,
    on_progress: Progress = lambda _: None,
) -> Manifest:
    """Write one snapshot to `file`. Returns the manifest as it was written. Raises SnapshotError and OSError."""
    if names is not None and recording is not None:
        _learn(recording, window, names.learn(), on_progress)
        names.replace()
    writer = SnapshotWriter(file, name=name, max_bytes=max_bytes)
    try:
        manifest = _write(writer, recording, documents, _rewrite_manifest(manifest, names), window, names, on_progress)
    except BaseException:
        writer.abandon()
        raise
    return manifest


def _write(
    writer: SnapshotWriter,
    recording: Recording | None,
    documents: Documents,
    manifest: Manifest,
    window: Window,
    names: Pseudonyms | None,
    on_progress: Progress,
) -> Manifest:
    if recording is not None:
        for member, chunks in _samples(recording, window, names, on_progress):
            writer.add(f"{snapshot_file.SAMPLES_PREFIX}{member}", chunks)
        writer.add(snapshot_file.DECISIONS, _lines(_records(recording, window, names), on_progress))
        trouble = [names.text(each) if names is not None else each for each in recording.trouble]
        manifest = manifest._replace(missing=(*manifest.missing, *trouble))
    if documents.config:
        text = documents.config if names is None else _by_lines(documents.config, names)
        writer.add(snapshot_file.CONFIG, [text.encode("utf-8", "backslashreplace")])
    if documents.kubelet:
        writer.add(snapshot_file.KUBELET, [_json(_renamed_object(documents.kubelet, names))])
    if documents.facts:
        recorded = _renamed_object(documents.facts.get("recorded", {}), names)
        writer.add(snapshot_file.FACTS, [_json({**documents.facts, "recorded": recorded})])
    writer.finish(manifest)
    return manifest


def _renamed_object(value: Mapping[str, Any], names: Pseudonyms | None) -> Mapping[str, Any]:
    return value if names is None else names.object(value)


def _rewrite_manifest(manifest: Manifest, names: Pseudonyms | None) -> Manifest:
    if names is None:
        return manifest
    missing = tuple([names.text(each) for each in manifest.missing])
    return manifest._replace(node=names.name("node", manifest.node), missing=missing, pseudonyms=True)


def _learn(recording: Recording, window: Window, names: Pseudonyms, on_progress: Progress) -> None:
    for header in recording.headers:
        names.header(header)
    for number, sample in enumerate(recording.samples(since_wall=window.since, until_wall=window.until)):
        names.sample(sample)
        on_progress(f"reading names: sample {number}")
    for record in recording.records():
        names.record(record)


def _samples(
    recording: Recording, window: Window, names: Pseudonyms | None, on_progress: Progress
) -> Iterator[tuple[str, Iterator[bytes]]]:
    """Files of samples by name. Without pseudonyms they are copies, which decode nothing."""
    if names is None:
        yield from recording.copies(since_wall=window.since, until_wall=window.until)
        return
    parts = recording.parts(since_wall=window.since, until_wall=window.until)
    for number, (header, samples) in enumerate(parts):
        first = next(samples, None)
        if first is not None:
            renamed = _renamed(itertools.chain([first], samples), names, on_progress)
            yield f"samples-{number}.rec", recordings.encode(names.header(header), renamed)


def _renamed(samples: Iterable[RecordedSample], names: Pseudonyms, on_progress: Progress) -> Iterator[RecordedSample]:
    for number, sample in enumerate(samples):
        on_progress(f"replacing names: sample {number}")
        yield names.sample(sample)


def _records(recording: Recording, window: Window, names: Pseudonyms | None) -> Iterator[dict[str, Any]]:
    """The records of the window, and what came of its decisions shortly after it."""
    later = Window(window.since, None if window.until is None else window.until + FOLLOWING_S)
    inside: set[str] = set()
    for record in recording.records():
        wall = record.get("wallTime")
        follows = record.get("record") in flight_recorder.RECORDS_OF_A_DECISION and str(record.get("planId")) in inside
        if window.contains(wall):
            inside.add(str(record.get("id")))
        elif not (follows and later.contains(wall)):
            continue
        yield record if names is None else names.record(record)


def _lines(records: Iterable[Mapping[str, Any]], on_progress: Progress) -> Iterator[bytes]:
    import msgspec

    encode = msgspec.json.Encoder().encode
    for number, record in enumerate(records):
        on_progress(f"decisions: {number}")
        yield encode(record) + b"\n"


def _by_lines(text: str, names: Pseudonyms) -> str:
    return "".join([names.text(line) for line in text.splitlines(keepends=True)])


def _json(value: Mapping[str, Any]) -> bytes:
    import msgspec

    from nodeagent.records import utf8

    return msgspec.json.format(msgspec.json.encode(utf8.writable(value)), indent=2)
