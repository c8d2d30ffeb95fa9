"""Describe problems of a configuration with their place and fix, and the origin of an effective value."""

from typing import Final, NamedTuple


class Origin(NamedTuple):
    """Where a value comes from."""

    source: str
    """A file name, `built-in`, `--flag` or `$VARIABLE`."""
    line: int | None = None
    """Counted from 1; None when the source has no lines."""
    column: int | None = None
    profile: str = ""
    """The profile of the file that sets the value; empty outside of profiles."""

    def __str__(self) -> str:
        return ":".join(str(part) for part in self[:3] if part is not None)

    @property
    def short(self) -> str:
        """Without the column."""
        place = self.source if self.line is None else f"{self.source}:{self.line}"
        return f"profile {self.profile}, {place}" if self.profile else place


BUILT_IN: Final = Origin("built-in")


class Problem(NamedTuple):
    """One error or warning."""

    origin: Origin
    key: str
    """Path of the key, `evictionHard.memory.available`; empty if the problem concerns the whole file."""
    message: str
    """What is wrong."""
    fix: str = ""
    """How to fix it; empty if the message already contains it."""

    def __str__(self) -> str:
        key = f"{self.key}: " if self.key else ""
        fix = f"; {self.fix}" if self.fix else ""
        return f"{self.origin}: {key}{self.message}{fix}"


class ConfigError(Exception):
    """The configuration is not valid; `problems` has every error in the order of the file."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems
