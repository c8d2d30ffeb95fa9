"""Where the parts of the repository lie that tests read."""

from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).parents[2]
DATA: Final = REPOSITORY / "tests" / "data"
"""Recordings of API servers and of nodes."""
RECORDINGS: Final = DATA / "recordings"
"""What real API servers answered: status, headers and body."""
RECORDED_NODES: Final = DATA / "nodes"
"""Trees of /proc, /sys and cgroups of real nodes."""
