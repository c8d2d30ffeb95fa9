"""Builds the Dockerfile without a container engine: each stage is a directory, each RUN a chroot into it.

Only what the Dockerfile uses is understood; anything else is an error, never skipped. The base image is mmdebstrap's
minimal Debian of the same release with its security updates, as `debian:bookworm-slim` is (less the documentation).
"""

import contextlib
import json
import os
import re
import shutil
import ssl
import string
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tests.vm.image import OLDER

SUITE: Final = OLDER.name
BASE_IMAGE: Final = f"debian:{SUITE}-slim"
STEP_TIMEOUT_S: Final = 600.0
_CERTIFICATES: Final = "etc/build-certificates.pem"
"""Where a RUN finds a copy of the host's trusted certificates."""
_ENVIRONMENT: Final = ("PIP_INDEX_URL", "http_proxy", "https_proxy", "no_proxy")
"""Of the host's environment: how it reaches its package sources."""


class Built(NamedTuple):
    """The last stage."""

    root: Path
    environment: dict[str, str]
    command: tuple[str, ...]
    """ENTRYPOINT."""
    arguments: tuple[str, ...]
    """CMD."""


def why_not() -> str:
    """Why no image can be built here; empty if one can."""
    if os.geteuid() != 0:
        return "mmdebstrap and chroot need root"
    return "" if shutil.which("mmdebstrap") else "missing: mmdebstrap"


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, arguments) for each, with continued lines joined and comments dropped."""
    lines = (line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [(name.upper(), rest.strip()) for name, _, rest in (line.partition(" ") for line in joined.splitlines())]


def build(dockerfile: Path, *, base: Path, scratch: Path) -> Built:
    """Every stage of the Dockerfile, below `scratch`. `base` is a root directory to start stages from."""
    stages: dict[str, Path] = {}
    root, environment, command, command_arguments = scratch, dict[str, str](), ("",), ("",)
    arguments: dict[str, str] = {}
    for name, rest in instructions(dockerfile.read_text(encoding="utf-8")):
        if name == "ARG":
            arguments |= dict(re.findall(r"(\w+)=(\S+)", rest))
        elif name == "FROM":
            image, _, alias = rest.partition(" AS ")
            image = string.Template(image).substitute(arguments)
            root, environment = scratch / (alias or "last"), {}
            if image == BASE_IMAGE:
                _run("cp", "--archive", "--reflink=auto", str(base), str(root))
            elif image == "scratch":
                root.mkdir()
            else:
                msg = f"FROM {image}: only {BASE_IMAGE} can be made here"
                raise ValueError(msg)
            stages[alias] = root
        elif name == "RUN":
            _chroot(root, rest, environment)
        elif name == "COPY":
            _copy(rest, dockerfile.parent, stages, root)
        elif name == "ENV":
            environment |= dict(re.findall(r"(\w+)=(\S+)", rest))
        elif name == "ENTRYPOINT":
            command = tuple(json.loads(rest))
        elif name == "CMD":
            command_arguments = tuple(json.loads(rest))
        else:
            msg = f"{name}: not understood"
            raise ValueError(msg)
    return Built(root, environment, command, command_arguments)


def base_root(folder: Path) -> Path:
    """The base image's root directory, made in `folder` once."""
    root = folder / f"base-{SUITE}"
    if not root.exists():
        scratch = folder / f"base-{SUITE}.{os.getpid()}"
        try:
            _run("mmdebstrap", "--mode=root", "--variant=minbase", SUITE, str(scratch))
            shutil.rmtree(scratch / "usr/share/doc")
            scratch.rename(root)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
    return root


def _copy(arguments: str, context: Path, stages: dict[str, Path], root: Path) -> None:
    words = arguments.split()
    source_root = context
    if words[0].startswith("--from="):
        source_root = stages[words.pop(0).removeprefix("--from=")]
    *sources, target = words
    for source in sources:
        origin = source_root / source.lstrip("/")
        into = root / target.lstrip("/")
        if origin.is_dir():
            ignored = shutil.ignore_patterns("__pycache__") if source_root == context else None
            shutil.copytree(origin, into, symlinks=True, ignore=ignored, dirs_exist_ok=True)
        else:
            into = into / origin.name if target.endswith("/") else into
            into.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(origin, into)


def _chroot(root: Path, command: str, environment: dict[str, str]) -> None:
    given = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "DEBIAN_FRONTEND": "noninteractive",
        "PIP_CERT": f"/{_CERTIFICATES}",
        **{name: value for name, value in os.environ.items() if name in _ENVIRONMENT},
        **environment,
    }
    with _lent(root):
        _run("chroot", str(root), "/bin/sh", "-c", command, environment=given)


@contextlib.contextmanager
def _lent(root: Path) -> Iterator[None]:
    """Copies of the host's name servers and trusted certificates in the root for as long as this lasts.

    Copies, and nothing mounted: maintainer scripts write below /etc/ssl, and through a bind mount that is the host's.
    """
    copies = {"etc/resolv.conf": Path("/etc/resolv.conf"), _CERTIFICATES: _trusted()}
    for name, source in copies.items():
        shutil.copyfile(source, root / name)
    try:
        yield
    finally:
        for name in copies:
            (root / name).unlink()


def _trusted() -> Path:
    """The certificates that the host's own clients trust."""
    found = os.environ.get("PIP_CERT") or ssl.get_default_verify_paths().cafile
    return Path(found or "/etc/ssl/certs/ca-certificates.crt")


def _run(*command: str, environment: dict[str, str] | None = None) -> None:
    ran = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=STEP_TIMEOUT_S,
        check=False,
    )
    if ran.returncode != 0:
        msg = f"{' '.join(command)} ended with {ran.returncode}:\n{ran.stdout[-8000:]}"
        raise RuntimeError(msg)
