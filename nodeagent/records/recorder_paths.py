"""Where recordings and snapshot files are: names, without the modules that read and build them.

An agent that runs records and never reads a recording, so that it imports this module and not `recording`.
"""

import re
from pathlib import Path
from typing import Final, NamedTuple

from nodeagent.config.schema import Config

SAMPLES: Final = "samples"
"""Below the state directory, and in a snapshot file."""
SNAPSHOTS: Final = "snapshots"
SUFFIX: Final = ".rec"
TAIL: Final = "-tail"
SEGMENT: Final = re.compile(r"samples-([0-9]{1,9})(-tail)?\.rec\Z")


def snapshots_directory(config: Config, *, state_dir: str | None = None) -> Path:
    """Below the recorder's directory, or below the state directory. `state_dir` replaces that of the configuration."""
    return Path(state_dir or config.recorder.dir or config.state_dir) / SNAPSHOTS


class SnapshotPlace(NamedTuple):
    """What the agent's own snapshot files are made from, and where they go."""

    samples: Path
    records: Path
    """The state directory."""
    directory: Path
    most: int
    max_bytes: int
