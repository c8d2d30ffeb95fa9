"""The work of the thread that writes one snapshot file.

`auto_snapshots` imports this module when a file is due: what reads recordings and builds files, zipfile among it, needs
1.5 MiB, and most agents never write one.
"""

import time
from pathlib import Path
from typing import IO, NamedTuple

from nodeagent import __version__
from nodeagent.config.load import LoadedConfig
from nodeagent.records import kept_snapshots, recording, segment_files, snapshot_build, snapshot_documents
from nodeagent.records.recorder_paths import SnapshotPlace
from nodeagent.records.recording import RecordingError
from nodeagent.records.snapshot_build import Window
from nodeagent.records.snapshot_file import Manifest, SnapshotError
from nodeagent.sampling.hostfs.host import Host


class SnapshotJob(NamedTuple):
    """One file."""

    place: SnapshotPlace
    node: str
    host: Host
    loaded: LoadedConfig
    reason: str
    id: str
    wall: float
    """Of the event."""


class WrittenSnapshot(NamedTuple):
    """The result."""

    path: Path | None
    """None if there is no file."""
    size: int
    trouble: str
    """Why there is none."""


def write(job: SnapshotJob, *, short_devices: frozenset[int]) -> WrittenSnapshot:
    """Write the file, unless its file system is short of space or one of `short_devices`. Raises only for a defect."""
    place = job.place
    try:
        if segment_files.device_of(place.directory) in short_devices:
            raise SnapshotError(f"{place.directory}: its file system is below a threshold")
        if segment_files.is_short(place.directory, further=place.max_bytes):
            raise SnapshotError(f"{place.directory}: its file system is short of space")
        path, size = kept_snapshots.keep(
            place.directory,
            kept_snapshots.file_name(job.reason, job.id, wall=job.wall),
            lambda file: _build(file, job),
            most=place.most,
            max_bytes=place.max_bytes,
        )
    except (SnapshotError, RecordingError) as error:
        return WrittenSnapshot(None, 0, str(error))
    except OSError as error:
        return WrittenSnapshot(None, 0, f"{place.directory}: {error.strerror or error}")
    return WrittenSnapshot(path, size, "")


def _build(file: IO[bytes], job: SnapshotJob) -> None:
    place, wall = job.place, time.time()
    found = recording.open_recording(place.samples, records=place.records)
    window = Window(job.wall - snapshot_build.BEFORE_S, None)
    snapshot_build.build(
        file,
        name=job.reason,
        recording=found,
        documents=snapshot_documents.read_documents(job.host, job.loaded, found, at=job.wall),
        manifest=Manifest(job.node, __version__, wall, job.reason, job.id, window.since, wall),
        window=window,
        max_bytes=place.max_bytes,
    )
