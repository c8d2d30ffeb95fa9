"""Parsers of what the agent and its commands have written: state, status, records, recordings, snapshot files."""

import base64
import hashlib
import io
import json
import struct
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import Final

import msgspec

from nodeagent.commands import recorded_input
from nodeagent.commands.recorded_input import InputError
from nodeagent.loop import state_store
from nodeagent.loop.state_store import AgentState
from nodeagent.model import RecordingHeader
from nodeagent.policy.state import PolicyState, initial
from nodeagent.records import flight_recorder, recording, recording_format, snapshot_file, state_file, status_file
from nodeagent.records.flight_recorder import Packer, RecordsError
from nodeagent.records.recording import RecordingError
from nodeagent.records.recording_format import Encoder
from nodeagent.records.snapshot_file import SnapshotError, SnapshotFile, SnapshotWriter
from nodeagent.records.state_file import StateFile, Trust
from nodeagent.report import explain_pod, history, recorded_decisions, stories, story_text, text
from tests.fuzz import scratch
from tests.fuzz.engine import Target
from tests.support import incident
from tests.support.incident import Incident

_BOOT: Final = "11111111-2222-3333-4444-555555555555"
_SHAPE: Final = state_file.fingerprint(AgentState)
_directory = tempfile.TemporaryDirectory(dir=scratch.PARENT)
_place = Path(_directory.name)
_store = StateFile(_place / "state", shape=AgentState, boot_id=_BOOT)
_encoder = Encoder()
_packer = Packer()


def _incident() -> Incident:
    directory = _place / "incident"
    directory.mkdir()
    return incident.record(directory, seconds=150)


_recorded = _incident()
_HEADER: Final = RecordingHeader("n", "0.1.0", "abc", _BOOT, 1.8e9, configuration="kind: NodeAgentConfiguration\n")
_FEW: Final = tuple(sample._replace(snapshot=sample.snapshot._replace(notes=())) for sample in _recorded.samples[-3:])
_RECORDING: Final = b"".join(recording.encode(_HEADER, _FEW))
_LINES: Final = (_recorded.directory / flight_recorder.DECISIONS_FILE).read_bytes()


# --- state and status ------------------------------------------------------------------------------------------------


def _state(data: bytes) -> None:
    (_place / "state").write_bytes(data)
    loaded = _store.load()
    assert (loaded.trust is Trust.RESTORED) == (loaded.value is not None)
    assert (loaded.trust is Trust.RESTORED) == (not loaded.message)
    recalled = state_store.recall(loaded, instance="fuzz", now=100.0)
    if loaded.trust not in (Trust.RESTORED, Trust.FIRST):
        assert recalled.message  # the tokens of a lost state count as spent
    _store.save(recalled.state)


def _state_body(data: bytes) -> None:
    """With the header and the checksum that belong to it: what an agent of this version could have written."""
    header = f"{state_file.FORMAT} {_BOOT} {_SHAPE} {hashlib.sha256(data).hexdigest()}\n"
    _state(header.encode() + data)


def _status(data: bytes) -> None:
    (_place / status_file.STATUS_FILE).write_bytes(data)
    status_file.read_status(str(_place), now=100.0)


# --- recordings ------------------------------------------------------------------------------------------------------


def _recording(data: bytes) -> None:
    path = _place / "samples-1.rec"
    path.write_bytes(data)
    found = recording.open_recording(path)
    _ = found.headers, found.count, found.span
    for sample in found.samples():
        assert isinstance(sample.wall_time, float | int)
    for snapshot in found.snapshots():
        assert snapshot.observations is not None
    for _, part in found.parts(since_wall=1.8e9):
        sum(1 for _ in part)
    for _, copy in found.copies():
        sum(map(len, copy))
    list(found.records())


def _recording_entries(data: bytes) -> None:
    """One group with right checksums: the first entry whole, the others changes, separated as in a frame."""
    entries, rest = [], data
    while len(rest) > 4:
        (size,) = struct.unpack_from("<I", rest)
        size %= 1 << 16
        entries.append(rest[4 : 4 + size])
        rest = rest[4 + size :]
    frame = _encoder.packed(entries, group=0, first_wall=1.8e9, last_wall=1.8e9 + 9, level=1)
    _recording(_encoder.header(_HEADER) + frame)


def _recording_header(data: bytes) -> None:
    """A header line with the right checksum, and the frames of a good file behind it."""
    version = b"%d" % recording_format.VERSION
    line = data.replace(b"\n", b" ")
    crc = recording_format.header_checksum(version, line)
    frames = _RECORDING.partition(b"\n")[2]
    _recording(b"%s%s %08x %s\n" % (recording_format.MAGIC, version, crc, line) + frames)


# --- snapshot files --------------------------------------------------------------------------------------------------


def _snapshot(data: bytes) -> None:
    path = _place / "a.snapshot"
    path.write_bytes(data)
    with SnapshotFile(path) as found:
        for member in (snapshot_file.KUBELET, snapshot_file.FACTS):
            try:
                found.read_json(member)
            except SnapshotError:
                continue
        found.read_text(snapshot_file.CONFIG)
    opened = recorded_input.open_file(path)
    assert isinstance(opened, recorded_input.RecordingInput)
    sum(1 for _ in opened.samples(lambda _: None))
    opened.records()
    opened.remarks()


def _snapshot_members(data: bytes) -> None:
    """A zip file as we write it, whose members have the parts of the input as their content."""
    members = (snapshot_file.MANIFEST, snapshot_file.FACTS, snapshot_file.CONFIG, snapshot_file.DECISIONS)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as target:
        for member, content in zip(members, data.split(b"\0"), strict=False):
            target.writestr(member, content)
        target.writestr("samples/samples-1.rec", _RECORDING)
    _snapshot(buffer.getvalue())


def _good_snapshot() -> bytes:
    buffer = io.BytesIO()
    writer = SnapshotWriter(buffer, name="a")
    writer.add("samples/samples-1.rec", [_RECORDING])
    writer.add(snapshot_file.DECISIONS, [_LINES[:3000]])
    writer.add(snapshot_file.CONFIG, [b"kind: NodeAgentConfiguration\n"])
    writer.finish(snapshot_file.Manifest("n", "0.1.0", 1.8e9))
    return buffer.getvalue()


# --- records ---------------------------------------------------------------------------------------------------------


def _records(data: bytes) -> None:
    path = _place / "decisions.jsonl"
    path.write_bytes(data)
    decisions = recorded_decisions.group(flight_recorder.read_records(path))
    for own in decisions[:3]:
        _packer.unpack(own.decision.get("inputs"))
        story = stories.build(own, decisions, ())
        assert all(line.isprintable() for line in text.render(story_text.sections(story)).splitlines())
        json.dumps(story_text.to_json(story))
    explain_pod.entries(decisions, "shop/batch")
    flat = [each for own in decisions for each in (own.decision, *own.outcomes, *own.reliefs)]
    history.evictions(flat)
    history.oom_kills(flat)


def _inputs(data: bytes) -> None:
    good = json.loads(_LINES.splitlines()[0])["inputs"]
    _packer.unpack({"shape": good["shape"], "data": base64.b85encode(zlib.compress(data)).decode()})
    _packer.unpack({"shape": good["shape"], "data": data.decode("latin-1")})


def _good_inputs() -> bytes:
    return zlib.decompress(base64.b85decode(json.loads(_LINES.splitlines()[0])["inputs"]["data"]))


def _state_under_way() -> PolicyState:
    """Of the last recorded decision."""
    inputs = _packer.unpack(json.loads(_LINES.splitlines()[0])["inputs"]).inputs
    assert inputs is not None
    return inputs.state


def _sized(*entries: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(each)) + each for each in entries)


_DECISION: Final = b"\n".join(
    [
        msgspec.json.encode({key: value for key, value in json.loads(line).items() if key != "inputs"})
        for line in _LINES.splitlines()[-3:]
    ]
)

TARGETS: Final = (
    Target(
        "state-files",
        _state,
        seeds=(
            f"{state_file.FORMAT} {_BOOT} 0123456789abcdef {'0' * 64}\n[]".encode(),
            b"",
            b"nodeagent-state/1 a b c\n",
        ),
        tokens=(b"\n", b" ", _BOOT.encode()),
    ),
    Target(
        "state-bodies",
        _state_body,
        seeds=(
            msgspec.json.encode(AgentState(initial("a", now=1.0))),
            msgspec.json.encode(AgentState(_state_under_way())),
        ),
        tokens=(b"null", b"1e308", b"-1", b'"uncertain"'),
    ),
    Target(
        "status-files",
        _status,
        seeds=(b"99.0\ntaints\tnode\tmessage\nPDBs in NS\ta\tb\n",),
        tokens=(b"\t", b"\n", b"nan", b"inf"),
    ),
    Target(
        "recordings", _recording, (RecordingError,), seeds=(_RECORDING,), tokens=(b"\xc1NRF", b"NODEAGENT-RECORDING 1 ")
    ),
    Target(
        "recording-entries",
        _recording_entries,
        (RecordingError,),
        seeds=(
            _sized(_encoder.entry(_FEW[0], None), _encoder.entry(_FEW[1], _FEW[0]), _encoder.entry(_FEW[2], _FEW[1])),
            _sized(b"\x91\x90", b"\x80", b"\x81\x00\xc0"),
        ),
        tokens=(
            b"\xc0",
            b"\x91",
            b"\x80",
            b"\xdf\xff\xff\xff\xff",
            b"\xdd\xff\xff\xff\xff",
            b"\xcb\x7f\xf8" + b"\0" * 6,
        ),
    ),
    Target(
        "recording-headers",
        _recording_header,
        (RecordingError,),
        seeds=(_RECORDING.partition(b"\n")[0].split(b" ", 3)[3],),
        tokens=(b'"fields":', b'"header":', b"null", b"NodeSnapshot"),
    ),
    Target(
        "snapshot-files",
        _snapshot,
        (SnapshotError, InputError, RecordsError),
        seeds=(_good_snapshot(),),
        tokens=(b"PK\x05\x06",),
    ),
    Target(
        "snapshot-members",
        _snapshot_members,
        (SnapshotError, InputError, RecordsError),
        seeds=(b'{"format":1,"node":"n","made_at":1.8e9,"missing":[]}\0{"a":"b"}\0kind: a\0' + _DECISION,),
        tokens=(b"\0", b'"format":2', b'"since":null', b"1e999"),
    ),
    Target("records", _records, (RecordsError,), seeds=(_DECISION,), tokens=(b'"record":"oom"', b'"kills":', b"\n")),
    Target("decision-inputs", _inputs, seeds=(_good_inputs(),), tokens=(b"\x93", b"\xc0", b"null")),
)
