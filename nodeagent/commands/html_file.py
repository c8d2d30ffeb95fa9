"""Writes the page of `--html FILE`.

1. The file appears complete or not at all: it is written beside its name and renamed. A reader never sees half a page.
2. An existing file is replaced, as by `-o` of other programs; its permissions stay. A link stays one, its target is
   replaced.
3. `-` is standard output. A device or a pipe is written to, not replaced.
"""

import contextlib
import os
import stat
from collections.abc import Iterable
from typing import Final

from nodeagent.commands import standard_streams
from nodeagent.report import html_page
from nodeagent.report.html_page import Html

STANDARD_OUTPUT: Final = "-"


def write(path: str, title: str, blocks: Iterable[Html], *, refresh_s: int | None = None) -> None:
    """Write a page of these blocks. Raises OutputError."""
    page = html_page.page(title, blocks, refresh_s=refresh_s)
    if path == STANDARD_OUTPUT:
        standard_streams.write_output(page)
        return
    try:
        _replace(os.path.realpath(path), page.encode("utf-8"))
    except OSError as error:
        raise standard_streams.OutputError(f"--html {path}: {error.strerror or error}") from error


def _replace(path: str, content: bytes) -> None:
    try:
        before: os.stat_result | None = os.stat(path)
    except FileNotFoundError:
        before = None
    if before is not None and not stat.S_ISREG(before.st_mode):
        with open(path, "wb") as file:  # a directory fails here, with its reason
            file.write(content)
        return
    beside = f"{path}.{os.getpid()}.part"
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with open(descriptor, "wb") as file:
            if before is not None:
                os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
            file.write(content)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
