"""Make the image without a container engine: `python -m tests.vm.release_image NEW-DIRECTORY`, as root on Debian.

Writes an OCI layout for this machine's architecture (`oci`) and its contents as CycloneDX (`nodeagent.cdx.json`), and
prints the digest, which is the same each time with the same SOURCE_DATE_EPOCH (default: the time of the last commit),
base and packages. docs/image.md shows how to push, sign and check it.
"""

import argparse
import datetime as dt
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from nodeagent import __version__
from tests.support import oci_layout, sbom
from tests.support.paths import REPOSITORY
from tests.vm import agent_container
from tests.vm.dockerfile import Built

LAYOUT: Final = "oci"
CONTENTS: Final = "nodeagent.cdx.json"
AGENT: Final = "opt/nodeagent"
"""A layer of its own: the rest changes with Debian only."""


def write(built: Built, directory: Path, *, created: dt.datetime) -> str:
    """Write both into the directory and return the image's digest."""
    command = oci_layout.Command(built.command, built.arguments, built.environment)
    digest = oci_layout.write(
        directory / LAYOUT, built.root, command, apart=(AGENT,), reference=__version__, created=created
    )
    (directory / CONTENTS).write_text(sbom.make_bom(built.root, created=created), "utf-8")
    return digest


def commit_time() -> str:
    """Of the last commit, as SOURCE_DATE_EPOCH."""
    return subprocess.check_output(["git", "log", "-1", "--format=%ct"], cwd=REPOSITORY, text=True).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the image and its list of contents without a container engine.")
    parser.add_argument("directory", type=Path, metavar="NEW-DIRECTORY")
    directory = parser.parse_args().directory
    directory.mkdir(parents=True)
    os.environ.setdefault("SOURCE_DATE_EPOCH", commit_time())
    with tempfile.TemporaryDirectory(prefix="nodeagent-image.") as scratch:
        print(write(agent_container.build_image(Path(scratch)), directory, created=sbom.creation_time()))


if __name__ == "__main__":
    main()
