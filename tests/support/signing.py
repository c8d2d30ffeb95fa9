"""Programs that pack, push and sign images, and a registry on the loopback for them. Nothing leaves the machine."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.paths import REPOSITORY

UNPACKED: Final = str(REPOSITORY / "build/newer-debian/usr/bin")
"""Where `.ci/newer_debian build/newer-debian cosign docker-registry` puts them."""
START_TIMEOUT_S: Final = 30.0


def program(name: str) -> str:
    """Its path; where it is missing, the test is skipped."""
    found = shutil.which(name) or shutil.which(name, path=UNPACKED)
    if found is None:
        pytest.skip(
            f"needs {name} (Debian; for cosign and docker-registry `.ci/newer_debian build/newer-debian {name}`)"
        )
    return found


def run(*command: str, home: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run one of them. `home`: where it may write; keys have an empty password."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "COSIGN_PASSWORD": "", "TMPDIR": str(home)}
    ran = subprocess.run(
        (program(command[0]), *command[1:]),
        cwd=home,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert not check or ran.returncode == 0, ran.stderr
    return ran


@contextlib.contextmanager
def registry(directory: Path) -> Iterator[str]:
    """A registry with its data in the directory; its address."""
    server = program("docker-registry")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    configuration = directory / "registry.yml"
    configuration.write_text(
        "version: 0.1\nlog: {level: error, accesslog: {disabled: true}}\n"
        f"storage: {{filesystem: {{rootdirectory: {directory}/registry}}}}\nhttp: {{addr: '{address}'}}\n"
    )
    with (directory / "registry.log").open("w") as log:
        process = subprocess.Popen((server, "serve", str(configuration)), stdout=log, stderr=log)
    try:
        ends = time.monotonic() + START_TIMEOUT_S
        while not _listens(port):
            assert process.poll() is None, (directory / "registry.log").read_text()
            assert time.monotonic() < ends
            time.sleep(0.05)
        yield address
    finally:
        process.terminate()
        process.wait(20)


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
