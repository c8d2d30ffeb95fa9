"""Records every decision that acted or refused, and its outcomes, as lines of JSON: the flight recorder.

Promises:

1. A record contains everything that the decision used: signals with their ages, thresholds, the deficit, the ranking
   with each key, every refusal, the victims and their predicted relief. `nodeagent explain ID` reads it.
2. A decision can be repeated: the record also contains the inputs of the policy (`DecisionInputs`), packed, with a
   fingerprint of their shape, so that another version never misreads them. `nodeagent replay` reads them.
3. The records are bounded: two files of at most `MAX_FILE_BYTES`. When the newer one is full, the older one is dropped.
4. A failed write never raises. The return value has the reason, and the agent continues.
"""

import base64
import enum
import io
import itertools
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from nodeagent.model import (
    HookOutcome,
    NodeSnapshot,
    OomReport,
    Outcome,
    Plan,
    Pod,
    RankedPod,
    ReclaimReport,
    ReliefReport,
    ResizeOutcome,
    Threshold,
    Victim,
)
from nodeagent.policy.state import PolicyState
from nodeagent.records import state_file, utf8
from nodeagent.runtime import regular_files

MAX_FILE_BYTES: Final = 8 * 2**20
"""A decision over 110 pods has about 60 KiB readable and 8 KiB packed, so the files keep the last 100 to 200 decisions.
The directory is usually a tmpfs, which uses memory."""
MAX_UNPACKED_BYTES: Final = 64 * 2**20
"""Inputs of 5,000 pods have about 4 MiB; larger ones are not from a flight recorder."""
MAX_READ_BYTES: Final = 8 * MAX_FILE_BYTES
"""A larger file is not read; several concatenated files of records are."""
MAX_RECORD_DEPTH: Final = 32
"""Nesting of a record: ours have 7 levels. The readers are recursive."""
DECISIONS_FILE: Final = "decisions.jsonl"
OLDER_FILE: Final = "decisions.1.jsonl"
RECORDS_OF_A_DECISION: Final = ("outcome", "relief", "reclaim", "hook", "resize")
"""The kinds of records about what came of a decision; `planId` is its id."""


class RecordsError(Exception):
    """The records cannot be read; the message has the reason."""


class DecisionInputs(NamedTuple):
    """The inputs of the policy for one decision, with the configuration that the state refers to."""

    snapshot: NodeSnapshot
    state: PolicyState
    """Before the decision."""
    now: float
    thresholds: tuple[Threshold, ...]
    """All thresholds at the time, including derived ones."""
    fresh_samples: int
    """`startup.freshSamples` at the time."""
    kubelet: tuple[Threshold, ...] = ()
    """The kubelet's own thresholds at the time, as far as they were known."""


class FlightRecorder:
    """Appends to the records in the state directory."""

    def __init__(self, directory: Path) -> None:
        import msgspec

        self._path = directory / DECISIONS_FILE
        self._older = directory / OLDER_FILE
        self._encode = msgspec.json.Encoder().encode
        self._packer = Packer()

    def decision(self, plan: Plan, *, wall_time: float, inputs: DecisionInputs | None = None) -> str:
        """Record a plan and its inputs. Returns why the write failed; empty on success."""
        packed = {"inputs": self._packer.pack(inputs)} if inputs is not None else {}
        return self._append({"record": "decision", "wallTime": wall_time, **plan_to_json(plan), **packed})

    def outcome(self, outcome: Outcome, *, wall_time: float) -> str:
        """Record the outcome of a victim. Returns as `decision`."""
        return self._append({"record": "outcome", "wallTime": wall_time, **to_json(outcome)})

    def relief(self, report: ReliefReport, *, wall_time: float) -> str:
        """Record the measured relief of a decision. Returns as `decision`."""
        return self._append({"record": "relief", "wallTime": wall_time, **to_json(report)})

    def reclaim(self, report: ReclaimReport, *, wall_time: float) -> str:
        """Record what a reclaim action freed. Returns as `decision`."""
        return self._append({"record": "reclaim", "wallTime": wall_time, **to_json(report)})

    def hook(self, outcome: HookOutcome, *, wall_time: float) -> str:
        """Record the end of a hook. Returns as `decision`."""
        return self._append({"record": "hook", "wallTime": wall_time, **to_json(outcome)})

    def resize(self, outcome: ResizeOutcome, *, wall_time: float) -> str:
        """Record what came of a resize. Returns as `decision`."""
        return self._append({"record": "resize", "wallTime": wall_time, **to_json(outcome)})

    def oom(self, report: OomReport, *, wall_time: float) -> str:
        """Record OOM kills with the samples before them. Returns as `decision`."""
        return self._append({"record": "oom", "wallTime": wall_time, **to_json(report)})

    def _append(self, record: Mapping[str, Any]) -> str:
        try:
            line = self._encode(record) + b"\n"
        except UnicodeEncodeError:
            line = self._encode(utf8.writable(record)) + b"\n"
        try:
            if self._path.exists() and self._path.stat().st_size + len(line) > MAX_FILE_BYTES:
                self._path.replace(self._older)
            # A write that was cut off, by a full disk or a kill, must not take the next record with it.
            line = b"\n" + line if self._ends_within_a_line() else line
            with os.fdopen(regular_files.open_to_append(self._path), "ab") as file:
                file.write(line)
        except OSError as error:
            return f"{self._path}: {error.strerror}"
        return ""

    def _ends_within_a_line(self) -> bool:
        try:
            fd = regular_files.open_to_read(self._path)
        except FileNotFoundError:
            return False
        try:
            size = os.fstat(fd).st_size
            return size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        finally:
            os.close(fd)


def read_records(location: Path) -> Iterator[dict[str, Any]]:
    """The records of a state directory, of one file of records or of a snapshot file, oldest first. Raises
    RecordsError."""
    from nodeagent.records import snapshot_file  # an agent writes records and reads none

    try:
        if snapshot_file.is_snapshot(location):
            yield from _in_snapshot(location)
            return
        paths = [location / OLDER_FILE, location / DECISIONS_FILE] if location.is_dir() else [location]
        if not location.exists():
            raise RecordsError(f"{location}: no such file or directory")
        found = False
        for record in itertools.chain.from_iterable(_lines(path) for path in paths if path.exists()):
            found = True
            yield record
        if not found and location.is_file() and location.stat().st_size:
            raise RecordsError(f"{location}: no record in this file")
    except OSError as error:
        raise RecordsError(f"{error.filename or location}: {error.strerror}") from error


def _in_snapshot(path: Path) -> Iterator[dict[str, Any]]:
    from nodeagent.records import snapshot_file

    try:
        with snapshot_file.SnapshotFile(path) as found:
            data = found.read(snapshot_file.DECISIONS)
    except snapshot_file.SnapshotError as error:
        raise RecordsError(str(error)) from error
    yield from records_in(io.BytesIO(data))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        fd = regular_files.open_to_read(path)
    except FileNotFoundError:
        return
    with os.fdopen(fd, "rb") as file:
        if os.fstat(fd).st_size > MAX_READ_BYTES:
            raise RecordsError(f"{path}: larger than {MAX_READ_BYTES >> 20} MiB, not a file of records")
        yield from records_in(file)


def records_in(file: BinaryIO) -> Iterator[dict[str, Any]]:
    """The records of an open file; lines that are none are skipped. Raises OSError."""
    import msgspec

    while line := file.readline(MAX_READ_BYTES):
        try:
            record = msgspec.json.decode(line)
        # RecursionError: a thousand brackets in one line.
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        if isinstance(record, dict) and "record" in record and not _too_deep(record):
            yield record


def _too_deep(record: dict[str, Any]) -> bool:
    level: list[Any] = [record]
    for _ in range(MAX_RECORD_DEPTH):
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
    """The result of unpacking."""

    inputs: DecisionInputs | None
    trouble: str
    """Why `inputs` is None."""


class Packer:
    """Converts inputs to a small JSON value and back."""

    def __init__(self) -> None:
        import msgspec

        self._shape = state_file.fingerprint(DecisionInputs)
        # MessagePack, because the state of a threshold that was never met contains infinity, which JSON has not.
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoder: msgspec.msgpack.Decoder[DecisionInputs] = msgspec.msgpack.Decoder(DecisionInputs)
        self._errors = (msgspec.MsgspecError, UnicodeDecodeError, ValueError, zlib.error)

    def pack(self, inputs: DecisionInputs) -> dict[str, str]:
        """110 pods: 47 KiB become 8 KiB in 0.6 ms, after everything urgent."""
        try:
            values = self._encode(inputs)
        except UnicodeEncodeError:
            values = self._encode(utf8.writable(inputs))
        return {"shape": self._shape, "data": base64.b85encode(zlib.compress(values, 1)).decode("ascii")}

    def unpack(self, packed: object) -> Unpacked:
        """Never raises: the result contains the cause of a failure."""
        if not isinstance(packed, Mapping):
            return Unpacked(None, "recorded without inputs")
        if packed.get("shape") != self._shape:
            return Unpacked(None, "recorded by a version with another shape of the inputs")
        try:
            unzipper = zlib.decompressobj()
            data = unzipper.decompress(base64.b85decode(str(packed.get("data"))), MAX_UNPACKED_BYTES)
            if unzipper.unconsumed_tail:
                return Unpacked(None, f"unpacks to more than {MAX_UNPACKED_BYTES} bytes")
            return Unpacked(self._decoder.decode(data), "")
        except self._errors as error:
            return Unpacked(None, f"cannot be unpacked: {error}")


# --- objects ---------------------------------------------------------------------------------------------------------


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """A plan without the specifications of its pods, which the packed inputs contain. With them 110 pods would need 220
    KiB and 11 ms."""
    pods = {
        "ranking": [_ranked(ranked) for ranked in plan.ranking],
        "victims": [_victim(victim) for victim in plan.victims],
    }
    return {**to_json(plan._replace(ranking=(), victims=())), **pods}


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
    rest = {camel_case(name): to_json(value) for name, value in victim._asdict().items() if name != "pod"}
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


def to_json(value: Any) -> Any:
    """NamedTuples as objects with camelCase keys, enums as their values; everything else unchanged."""
    if isinstance(value, tuple):
        fields = getattr(value, "_fields", None)
        if fields is None:
            return [to_json(item) for item in value]
        return {camel_case(name): to_json(item) for name, item in zip(fields, value, strict=True)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(to_json(key)): to_json(item) for key, item in value.items()}
    return value


def camel_case(name: str) -> str:
    """`grace_period_s` -> `gracePeriodSeconds`, with the unit as in Kubernetes objects."""
    words = name.split("_")
    if words[-1] == "s" and len(words) > 1:
        words[-1] = "seconds"
    return words[0] + "".join(word.capitalize() for word in words[1:])
