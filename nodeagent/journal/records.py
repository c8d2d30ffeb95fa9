"""The flight recorder: one line of JSON for every decision that did or refused something, and for every outcome.

Promises:

1. The record has everything that the decision rested on: signals with their ages, thresholds, the deficit, the whole
   ranking with each key, every refusal, the victims and the relief expected of them. `nodeagent explain ID` reads it.
2. Bounded: two files of at most `MAX_BYTES`, the older one is dropped when the newer one is full.
3. Never in the way: a recorder that cannot write says so once, through its return value, and the agent goes on.
"""

import enum
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from nodeagent.model import Outcome, Plan

MAX_BYTES: Final = 8 * 2**20
"""A decision over 110 pods is about 40 KiB: this keeps the last two to four hundred. The directory is usually a tmpfs,
so it is memory."""


class Recorder:
    """Appends to `decisions.jsonl` in the state directory."""

    def __init__(self, directory: Path) -> None:
        import msgspec

        self._path = directory / "decisions.jsonl"
        self._older = directory / "decisions.1.jsonl"
        self._encode = msgspec.json.Encoder().encode

    def decision(self, plan: Plan, *, wall_time: float) -> str:
        """Record a plan. Returns why it could not be written, or nothing."""
        return self._append({"record": "decision", "wallTime": wall_time, **as_object(plan)})

    def outcome(self, outcome: Outcome, *, wall_time: float) -> str:
        """Record what became of a victim. Returns why it could not be written, or nothing."""
        return self._append({"record": "outcome", "wallTime": wall_time, **as_object(outcome)})

    def read(self) -> Iterator[dict[str, Any]]:
        """All records that are kept, oldest first. A line that was cut by a crash is skipped."""
        import msgspec

        for path in (self._older, self._path):
            try:
                lines = path.read_bytes().splitlines()
            except FileNotFoundError:
                continue
            for line in lines:
                try:
                    yield msgspec.json.decode(line)
                except msgspec.DecodeError:
                    continue

    def _append(self, record: Mapping[str, Any]) -> str:
        line = self._encode(record) + b"\n"
        try:
            if self._path.exists() and self._path.stat().st_size + len(line) > MAX_BYTES:
                self._path.replace(self._older)
            with self._path.open("ab") as file:
                file.write(line)
        except OSError as error:
            return f"{self._path}: {error.strerror}"
        return ""


def as_object(value: Any) -> Any:
    """NamedTuples as objects with camelCase keys, for JSON that people read; everything else as it is."""
    if isinstance(value, tuple):
        fields = getattr(value, "_fields", None)
        if fields is None:
            return [as_object(item) for item in value]
        return {camel(name): as_object(item) for name, item in zip(fields, value, strict=True)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(as_object(key)): as_object(item) for key, item in value.items()}
    return value


def camel(name: str) -> str:
    """`grace_period_s` -> `gracePeriodSeconds`: the unit is spelled out, as in Kubernetes objects."""
    words = name.split("_")
    if words[-1] == "s" and len(words) > 1:
        words[-1] = "seconds"
    return words[0] + "".join(word.capitalize() for word in words[1:])
