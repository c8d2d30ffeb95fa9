"""`nodeagent snapshot`: one file with samples, decisions, configuration, versions and kernel facts, for a ticket.

1. The file appears complete or not at all: it is written beside its name and renamed. An existing file stays unless
   --force is given.
2. Secrets are never in it: no token, no kubeconfig, no environment, no argument of a configured command, and of
   annotations those that decisions read.
3. Nothing of the agent or the cluster is changed, and the API server is not asked.
"""

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final, NamedTuple

from nodeagent import __version__
from nodeagent.commands import exit_codes, standard_streams
from nodeagent.config import load
from nodeagent.config.schema import Config
from nodeagent.model import Unit, units
from nodeagent.records import kept_snapshots, pseudonyms, recorder_paths, recording, snapshot_build, snapshot_documents
from nodeagent.records.recording import Recording, RecordingError
from nodeagent.records.snapshot_build import Window
from nodeagent.records.snapshot_file import Manifest, SnapshotError
from nodeagent.report import text, wording
from nodeagent.report.cells import Cell, Column, Section
from nodeagent.report.progress import ProgressLine
from nodeagent.sampling.hostfs.host import Unreadable, open_host

STANDARD_OUTPUT: Final = "-"
LAST: Final = "last"
MAX_NODE_CHARS: Final = 200
_NO_PART_OF_A_NAME: Final = re.compile(r"[^A-Za-z0-9.-]")


class SnapshotCommandError(Exception):
    """No snapshot was written. The message is for the user."""

    def __init__(self, message: str, code: int = exit_codes.UNKNOWN) -> None:
        super().__init__(message)
        self.kind = code


class SnapshotOptions(NamedTuple):
    """The options of the command line."""

    output: str | None = None
    """None: `default_name` in the working directory, without the node's name if there are pseudonyms."""
    around: str | None = None
    since: float | None = None
    """Epoch seconds."""
    pseudonyms: bool = False
    force: bool = False
    host_root: str = "/"
    state_dir: str | None = None


class Written(NamedTuple):
    """What was written."""

    path: str
    size: int
    manifest: Manifest


def write(options: SnapshotOptions, loaded: load.LoadedConfig, *, wall: float | None = None) -> Written:
    """Write the file. Raises SnapshotCommandError. `wall` is the present time."""
    wall = time.time() if wall is None else wall
    try:
        host = open_host(options.host_root)
    except Unreadable as error:
        raise SnapshotCommandError(f"--host-root: {error}", exit_codes.USAGE) from error
    recorded, missing = _open(options, loaded.config)
    window, identity = _window(options, recorded)
    manifest = Manifest(
        node=_node(recorded, loaded.config),
        version=__version__,
        made_at=wall,
        reason="command",
        id=identity,
        since=window.since,
        until=window.until,
        missing=missing,
    )
    output = options.output or default_name("" if options.pseudonyms else manifest.node, wall=wall)
    line = ProgressLine()
    try:
        with _target(output, force=options.force) as file:
            written = snapshot_build.build(
                file,
                name=output,
                recording=recorded,
                documents=snapshot_documents.read_documents(host, loaded, recorded, at=window.until),
                manifest=manifest,
                window=window,
                names=pseudonyms.Pseudonyms() if options.pseudonyms else None,
                on_progress=line.show,
            )
        size = 0 if output == STANDARD_OUTPUT else os.stat(output).st_size
    except (SnapshotError, RecordingError) as error:
        raise SnapshotCommandError(str(error)) from error
    except OSError as error:
        if output == STANDARD_OUTPUT:
            standard_streams.output_failed(error)
            return Written(output, 0, manifest)
        raise SnapshotCommandError(f"{output}: cannot be written: {error.strerror or error}") from error
    finally:
        line.clear()
    return Written(output, size, written)


def show_list(state_dir: str | None, config: Config) -> int:
    """Print the snapshots that the agent has made by itself."""
    columns = (Column("TIME"), Column("REASON"), Column("ID"), Column("SIZE", right=True), Column("FILE"))
    rows = tuple(
        [
            (
                Cell(wording.rfc3339(each.manifest.made_at)),
                Cell(wording.escape_terminal(each.manifest.reason)),
                Cell(wording.escape_terminal(each.manifest.id)),
                Cell(units.format_amount(each.size, Unit.BYTES)),
                Cell(wording.escape_terminal(str(each.path))),
            )
            for each in kept_snapshots.listed(recorder_paths.snapshots_directory(config, state_dir=state_dir))
        ]
    )
    standard_streams.write_output(text.render((Section("SNAPSHOTS", columns, rows),)) if rows else "no snapshots\n")
    return exit_codes.OK


def default_name(node: str, *, wall: float) -> str:
    """`nodeagent-NODE-20261124T190000Z.zip`, in the working directory: a recording may name its node `../x`."""
    name = _NO_PART_OF_A_NAME.sub("_", node)[:MAX_NODE_CHARS] or "node"
    return f"nodeagent-{name}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(wall))}.zip"


def _open(options: SnapshotOptions, config: Config) -> tuple[Recording | None, tuple[str, ...]]:
    """The recording, and what it lacks and why. A snapshot without samples still has the decisions, configuration and
    facts."""
    state_dir, missing = Path(options.state_dir or config.state_dir), tuple[str, ...]()
    if options.state_dir is None and config.recorder.dir:
        try:
            return recording.open_recording(Path(config.recorder.dir), records=state_dir), ()
        except RecordingError as error:
            missing = (f"no samples of recorder.dir: {error}",)
    try:
        return recording.open_recording(state_dir), missing
    except RecordingError as error:
        return None, (*missing, f"no samples and no decisions: {error}")


def _window(options: SnapshotOptions, recorded: Recording | None) -> tuple[Window, str]:
    """The time that is wanted, and the id of the decision that it is about."""
    if options.since is not None:
        return Window(options.since, None), ""
    if options.around is None:
        return Window(), ""
    found: dict[str, float] = {}
    for record in recorded.records() if recorded is not None else ():
        at, identity = record.get("wallTime"), str(record.get("id", ""))
        if record.get("record") in ("decision", "oom") and isinstance(at, int | float):
            found[identity] = float(at)
    if options.around == LAST and found:
        identity = list(found)[-1]
        return snapshot_build.around(found[identity]), identity
    wanted = options.around
    matching = [wanted] if wanted in found else [each for each in found if each.startswith(wanted)]
    if not matching:
        raise SnapshotCommandError(f"{wanted}: no such decision; `nodeagent explain` lists the recorded ones")
    if len(matching) > 1:
        raise SnapshotCommandError(f"{wanted}: {len(matching)} decisions start with it: {', '.join(matching[:5])}")
    return snapshot_build.around(found[matching[0]]), matching[0]


def _node(recorded: Recording | None, config: Config) -> str:
    if recorded is not None and recorded.headers:
        return recorded.headers[-1].node
    return config.node_name or os.uname().nodename.lower()


@contextlib.contextmanager
def _target(output: str, *, force: bool) -> Iterator[IO[bytes]]:
    """The file to write to. Raises SnapshotCommandError if it exists, OSError if it cannot be written."""
    if output == STANDARD_OUTPUT:
        if sys.stdout.isatty():
            raise SnapshotCommandError(
                "-o -: a terminal cannot show the file; redirect standard output", exit_codes.USAGE
            )
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    path = Path(output)
    if path.is_dir():
        raise SnapshotCommandError(f"{path}: it is a directory; name a file in it", exit_codes.USAGE)
    if os.path.lexists(path) and not force:
        raise SnapshotCommandError(f"{path}: exists already; --force replaces it", exit_codes.USAGE)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            yield file
            file.flush()
            os.fsync(fd)
        os.rename(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
