"""The package of systemd/debian/build, built once for all workers of pytest-xdist."""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.paths import REPOSITORY


def why_not() -> str:
    """Why no package can be built here; empty if one can."""
    missing = [tool for tool in ("dpkg-buildpackage", "dh") if shutil.which(tool) is None]
    return f"missing: {', '.join(missing)} (Debian: dpkg-dev debhelper)" if missing else ""


def build(base: Path) -> Path:
    """The package of this tree. `base` is the base directory of pytest's temporary ones."""
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "debian-package"
    directory.mkdir(exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list(directory.glob("*.deb")):
            built = subprocess.run(
                [str(REPOSITORY / "systemd" / "debian" / "build"), str(directory)],
                env=os.environ | {"PYTHON": sys.executable, "PIP": f"{sys.executable} -m pip"},
                capture_output=True,
                text=True,
                timeout=600,
                check=False,
            )
            assert built.returncode == 0, built.stdout[-4000:] + built.stderr[-4000:]
    (found,) = directory.glob("*.deb")
    return found
