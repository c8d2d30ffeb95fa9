"""A progress bar on standard error while a recording is read; nothing if that is no terminal."""

import os
import sys
from types import TracebackType
from typing import Any, TextIO


class ProgressBar:
    """`with ProgressBar("reading", total=n) as bar: bar.show(done)`. It is erased at the end."""

    def __init__(self, title: str, *, total: float | None, stream: TextIO | None = None) -> None:
        """`total` None: unknown, so that the bar only shows that something moves."""
        self._title = title
        self._total = total
        self._stream = sys.stderr if stream is None else stream
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> "ProgressBar":
        if self._stream.isatty() and os.environ.get("TERM") != "dumb":
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(file=self._stream), transient=True)
            self._task = self._bar.add_task(self._title, total=self._total)
            self._bar.start()
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, done: float) -> None:
        """Advance the bar."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done)
