"""The flight recorder: one line of JSON for every decision that did or refused something, and for what became of it.

Promises:

1. The record has everything that the decision rested on: signals with their ages, thresholds, the deficit, the whole
   ranking with each key, every refusal, the victims and the relief expected of them. `nodeagent explain ID` reads it.
2. A decision can be made again: beside what people read stands what the policy was given (`Inputs`), packed, with a
   fingerprint of its shape, so that another version never misreads it. `nodeagent replay` reads that.
3. Bounded: two files of at most `MAX_BYTES`, the older one is dropped when the newer one is full.
4. Never in the way: a recorder that cannot write says so once, through its return value, and the agent goes on.
"""

import base64
import enum
import itertools
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from nodeagent.model import NodeSnapshot, Outcome, Plan, Pod, RankedPod, ReclaimReport, ReliefReport, Threshold, Victim
from nodeagent.policy.state import PolicyState
from nodeagent.records.state_file import fingerprint
from nodeagent.records.utf8 import writable
from nodeagent.runtime import regular_files

MAX_BYTES: Final = 8 * 2**20
"""A decision over 110 pods is about 60 KiB for people and 8 KiB packed: this keeps the last one to two hundred. The
directory is usually a tmpfs, so it is memory."""
MOST_UNPACKED: Final = 64 * 2**20
"""Inputs of 5,000 pods are about 4 MiB; what unpacks to more than this is not ours."""
MOST_READ: Final = 8 * MAX_BYTES
"""Of a file that is not ours by its size nothing is read: some files of records put together still are."""
MOST_NESTED: Final = 32
"""Levels of a record: ours have 7. Whatever walks one does so by recursion."""
FILE: Final = "decisions.jsonl"
OLDER_FILE: Final = "decisions.1.jsonl"


class RecordsError(Exception):
    """There are no records to read; the message says why."""


class DecisionInputs(NamedTuple):
    """What the policy was given for one decision, and of its configuration what the state refers to."""

    snapshot: NodeSnapshot
    state: PolicyState
    """Before the decision."""
    now: float
    thresholds: tuple[Threshold, ...]
    """In force then, those that follow from others included."""
    fresh_samples: int
    """`startup.freshSamples` then."""


class FlightRecorder:
    """Appends to the records in the state directory."""

    def __init__(self, directory: Path) -> None:
        import msgspec

        self._path = directory / FILE
        self._older = directory / OLDER_FILE
        self._encode = msgspec.json.Encoder().encode
        self._packer = Packer()

    def decision(self, plan: Plan, *, wall_time: float, inputs: DecisionInputs | None = None) -> str:
        """Record a plan, and what it was made from. Returns why it could not be written, or nothing."""
        packed = {"inputs": self._packer.pack(inputs)} if inputs is not None else {}
        return self._append({"record": "decision", "wallTime": wall_time, **plan_object(plan), **packed})

    def outcome(self, outcome: Outcome, *, wall_time: float) -> str:
        """Record what became of a victim. Returns why it could not be written, or nothing."""
        return self._append({"record": "outcome", "wallTime": wall_time, **as_object(outcome)})

    def relief(self, report: ReliefReport, *, wall_time: float) -> str:
        """Record what a decision brought back. Returns why it could not be written, or nothing."""
        return self._append({"record": "relief", "wallTime": wall_time, **as_object(report)})

    def reclaim(self, report: ReclaimReport, *, wall_time: float) -> str:
        """Record what an action brought back. Returns why it could not be written, or nothing."""
        return self._append({"record": "reclaim", "wallTime": wall_time, **as_object(report)})

    def read(self) -> Iterator[dict[str, Any]]:
        """All records that are kept, oldest first. A line that was cut by a crash is skipped."""
        for path in (self._older, self._path):
            yield from _lines(path)

    def _append(self, record: Mapping[str, Any]) -> str:
        try:
            line = self._encode(record) + b"\n"
        except UnicodeEncodeError:
            line = self._encode(writable(record)) + b"\n"
        try:
            if self._path.exists() and self._path.stat().st_size + len(line) > MAX_BYTES:
                self._path.replace(self._older)
            with os.fdopen(regular_files.open_to_append(self._path), "ab") as file:
                file.write(line)
        except OSError as error:
            return f"{self._path}: {error.strerror}"
        return ""


def read_records(place: Path) -> Iterator[dict[str, Any]]:
    """The records of a state directory, or of one file of records, oldest first.

    Raises:
        RecordsError: it is neither, or cannot be read.
    """
    try:
        paths = [place / OLDER_FILE, place / FILE] if place.is_dir() else [place]
        if not place.exists():
            raise RecordsError(f"{place}: there is no such file or directory")
        found = False
        for record in itertools.chain.from_iterable(_lines(path) for path in paths if path.exists()):
            found = True
            yield record
        if not found and place.is_file() and place.stat().st_size:
            raise RecordsError(f"{place}: there is no record in this file; is it the right one?")
    except OSError as error:
        raise RecordsError(f"{error.filename or place}: {error.strerror}") from error


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    import msgspec

    try:
        fd = regular_files.open_to_read(path)
    except FileNotFoundError:
        return
    with os.fdopen(fd, "rb") as file:
        if os.fstat(fd).st_size > MOST_READ:
            raise RecordsError(f"{path}: larger than {MOST_READ >> 20} MiB, which is no file of records")
        while line := file.readline(MOST_READ):
            try:
                record = msgspec.json.decode(line)
            # RecursionError: a thousand brackets.
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
            if isinstance(record, dict) and "record" in record and not _too_deep(record):
                yield record


def _too_deep(record: dict[str, Any]) -> bool:
    level: list[Any] = [record]
    for _ in range(MOST_NESTED):
        level = [
            child
            for each in level
            for child in (each.values() if type(each) is dict else each)
            if type(child) is dict or type(child) is list
        ]
        if not level:
            return False
    return True


# --- inputs ----------------------------------------------------------------------------------------------------------


class Unpacked(NamedTuple):
    """What could be made of packed inputs."""

    inputs: DecisionInputs | None
    trouble: str
    """Why there are none."""


class Packer:
    """Inputs as a small JSON value, and back."""

    def __init__(self) -> None:
        import msgspec

        self._shape = fingerprint(DecisionInputs)
        # MessagePack, because JSON has no infinity, which the state of a threshold that was never met contains.
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoder: msgspec.msgpack.Decoder[DecisionInputs] = msgspec.msgpack.Decoder(DecisionInputs)
        self._errors = (msgspec.MsgspecError, UnicodeDecodeError, ValueError, zlib.error)

    def pack(self, inputs: DecisionInputs) -> dict[str, str]:
        """110 pods: 47 KiB of values become 8 KiB in 0.6 ms, after everything urgent was done."""
        try:
            values = self._encode(inputs)
        except UnicodeEncodeError:
            values = self._encode(writable(inputs))
        return {"shape": self._shape, "data": base64.b85encode(zlib.compress(values, 1)).decode("ascii")}

    def unpack(self, packed: object) -> Unpacked:
        """Never raises: whatever is wrong is in the answer."""
        if not isinstance(packed, Mapping):
            return Unpacked(None, "recorded without what it was made from")
        if packed.get("shape") != self._shape:
            return Unpacked(None, "recorded by a version with another shape of inputs")
        try:
            unzipper = zlib.decompressobj()
            data = unzipper.decompress(base64.b85decode(str(packed.get("data"))), MOST_UNPACKED)
            if unzipper.unconsumed_tail:
                return Unpacked(None, f"unpacks to more than {MOST_UNPACKED} bytes")
            return Unpacked(self._decoder.decode(data), "")
        except self._errors as error:
            return Unpacked(None, f"cannot be unpacked: {error}")


# --- objects ---------------------------------------------------------------------------------------------------------


def plan_object(plan: Plan) -> dict[str, Any]:
    """A plan for people: everything but the pods' whole specifications, which are in the packed inputs. With them 110
    pods would be 220 KiB and 11 ms."""
    whole = {
        "ranking": [_ranked(ranked) for ranked in plan.ranking],
        "victims": [_victim(victim) for victim in plan.victims],
    }
    return {**as_object(plan._replace(ranking=(), victims=())), **whole}


def _ranked(ranked: RankedPod) -> dict[str, Any]:
    return {
        "rank": ranked.rank,
        **_pod(ranked.view.pod),
        "usage": ranked.usage,
        "request": ranked.request,
        "relief": ranked.relief,
        "keys": [{"name": key.name, "value": key.value, "text": key.text} for key in ranked.keys],
        "refusals": [{"code": refusal.code, "message": refusal.message} for refusal in ranked.refusals],
    }


def _victim(victim: Victim) -> dict[str, Any]:
    rest = {camel(name): as_object(value) for name, value in victim._asdict().items() if name != "pod"}
    return {**_pod(victim.pod), **rest}


def _pod(pod: Pod) -> dict[str, Any]:
    return {
        "namespace": pod.namespace,
        "name": pod.name,
        "uid": pod.uid,
        "qosClass": pod.qos_class.value,
        "priority": pod.priority,
        "owner": f"{pod.owner.kind}/{pod.owner.name}" if pod.owner else None,
    }


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
