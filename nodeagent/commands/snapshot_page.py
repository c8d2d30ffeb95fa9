"""The page of `snapshot --html`, made from the file that was written: it has the same names and the same time."""

from pathlib import Path

from nodeagent.commands import html_file
from nodeagent.commands.snapshot import SnapshotCommandError, Written
from nodeagent.records import recording
from nodeagent.records.recording import RecordingError
from nodeagent.report import recording_page, wording


def write(written: Written, path: str) -> None:
    """Write the page of a snapshot file. Raises SnapshotCommandError, OutputError."""
    manifest = written.manifest
    try:
        found = recording.open_recording(Path(written.path))
        blocks = recording_page.blocks(
            found.headers,
            found.samples(),
            list(found.records()),
            facts={
                "Snapshot of": manifest.node,
                "Made (UTC)": wording.rfc3339(manifest.made_at),
                "About": manifest.id,
                "Names": "replaced by pseudonyms" if manifest.pseudonyms else "",
                "Not included": "; ".join(manifest.missing),
            },
            trouble=found.trouble,
        )
    except RecordingError as error:
        raise SnapshotCommandError(str(error)) from error
    html_file.write(path, f"nodeagent: what {manifest.node} recorded", blocks)
