"""What is readable of a recording is read; the rest is listed, and costs neither a traceback nor much memory."""

import io
import os
import tracemalloc
import typing
import zipfile
import zlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.model import DiskLayout, NodeSnapshot, Pod, PodView, Signal
from nodeagent.model.recording import RecordedSample
from nodeagent.records import recorder_paths, recording, recording_format, recording_shape
from nodeagent.records.recording import RecordingError, open_recording
from nodeagent.records.recording_format import Encoder
from tests.support import nodes, recorded_samples, recordings
from tests.support.recorded_samples import HEADER

PODS = NodeSnapshot._fields.index("pods")


def written(directory: Path, samples: list[RecordedSample]) -> Path:
    path = directory / "samples-1.rec"
    recordings.write_recording(path, HEADER, samples)
    return path


def test_samples_read_back_as_they_were_written(tmp_path: Path) -> None:
    samples = recorded_samples.samples(1500)
    found = open_recording(written(tmp_path, samples))
    assert list(found.samples()) == samples
    assert found.trouble == ()
    assert found.headers == (HEADER,)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_samples_read_back_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    first = data.draw(recorded_samples.any_value(RecordedSample))
    others = data.draw(st.lists(changed(first), max_size=3))
    samples = [complete(each) for each in (first, *others)]
    found = open_recording(written(tmp_path_factory.mktemp("any"), samples))
    assert list(found.samples()) == samples
    assert found.trouble == ()


def changed(sample: RecordedSample) -> st.SearchStrategy[RecordedSample]:
    """The sample with other pods, observations or notes, or an entirely different one."""
    hints = typing.get_type_hints(type(sample.snapshot))
    parts = {name: recorded_samples.any_value(hints[name]) for name in ("notes", "stalls", "memory", "taken_at")}
    parts["pods"] = st.permutations(sample.snapshot.pods).flatmap(
        lambda pods: recorded_samples.any_value(hints["pods"]).map(lambda new: (*pods[1:], *new))
    )
    part = st.sampled_from(sorted(parts)).flatmap(lambda name: parts[name].map(lambda value: (name, value)))
    one_changed = part.map(lambda found: sample._replace(snapshot=sample.snapshot._replace(**dict([found]))))
    return st.one_of(st.just(sample), one_changed, recorded_samples.any_value(RecordedSample))


def complete(sample: RecordedSample) -> RecordedSample:
    """With an observation of every signal, which every snapshot has."""
    snapshot = sample.snapshot
    missing = {
        signal: nodes.snapshot().observations[signal] for signal in Signal if signal not in snapshot.observations
    }
    return sample._replace(snapshot=snapshot._replace(observations={**snapshot.observations, **missing}))


def test_pods_that_come_and_go_cost_no_whole_sample(tmp_path: Path) -> None:
    def size(samples: list[RecordedSample]) -> int:
        return written(tmp_path, samples).stat().st_size

    one = recorded_samples.sample(pods=100)
    fewer = one._replace(snapshot=one.snapshot._replace(pods=(*one.snapshot.pods[:40], *one.snapshot.pods[41:])))
    more = one._replace(snapshot=one.snapshot._replace(pods=(nodes.view("new"), *one.snapshot.pods)))
    samples = [one, fewer, one, more]
    assert list(open_recording(written(tmp_path, samples)).samples()) == samples
    assert len(Encoder().entry(fewer, one)) < 600
    assert size(samples) < size([one]) * 1.5


def test_a_time_range_reads_only_its_samples(tmp_path: Path) -> None:
    samples = recorded_samples.samples(1500)
    found = open_recording(written(tmp_path, samples))
    middle = samples[700].wall_time
    assert list(found.samples(since_wall=middle, until_wall=middle + 2)) == samples[700:703]
    assert found.count == 1500
    assert found.span == (samples[0].wall_time, samples[-1].wall_time)


# --- damage ----------------------------------------------------------------------------------------------------------


def test_a_recording_with_one_damaged_byte_loses_no_more_than_its_group(tmp_path: Path) -> None:
    samples = recorded_samples.samples(3, pods=1)
    path = written(tmp_path, samples)
    whole = path.read_bytes()
    for position in positions(whole):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x55]) + whole[position + 1 :])
        found = read_or_refused(path)
        if found is None:
            continue
        read, trouble = found
        assert read in (samples, [])
        assert trouble, f"byte {position}"


def test_a_tail_with_one_damaged_byte_keeps_the_samples_before_it(tmp_path: Path) -> None:
    samples = recorded_samples.samples(4, pods=1)
    path, whole = tmp_path / "samples-1-tail.rec", tail_of(samples)
    lengths = set()
    for position in positions(whole):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x01]) + whole[position + 1 :])
        found = read_or_refused(path)
        if found is None:  # the number of the format
            continue
        read, trouble = found
        assert read == samples[: len(read)]
        assert trouble, f"byte {position}"
        lengths.add(len(read))
    assert lengths == {0, 1, 2, 3, 4}


def test_a_recording_truncated_anywhere_keeps_its_start(tmp_path: Path) -> None:
    samples = recorded_samples.samples(4, pods=1)
    path, whole = tmp_path / "samples-1-tail.rec", tail_of(samples)
    ends = frame_ends(whole)
    start = recording_format.read_header(io.BytesIO(whole)).size
    for size in positions(whole):
        path.write_bytes(whole[:size])
        found = read_or_refused(path)
        complete_frames = sum(end <= size for end in ends)
        if found is None:
            assert complete_frames == 0
            continue
        assert found[0] == samples[:complete_frames]
        assert found[1] or size in ends or size == start


@given(garbage=st.binary(max_size=200), cut=st.integers(0, 2000))
@settings(max_examples=100, deadline=None)
def test_garbage_within_a_recording_raises_no_other_error(
    tmp_path_factory: pytest.TempPathFactory, garbage: bytes, cut: int
) -> None:
    whole = tail_of(recorded_samples.samples(3, pods=1))
    path = tmp_path_factory.mktemp("garbage") / "samples-1-tail.rec"
    path.write_bytes(whole[:cut] + garbage + whole[cut:])
    read_or_refused(path)


def positions(whole: bytes) -> list[int]:
    """Every byte, except within the field names, of which every 29th."""
    end = whole.index(b"\n") - 20
    return [*range(40), *range(40, end, 29), *range(end, len(whole))]


def read_or_refused(path: Path) -> tuple[list[RecordedSample], tuple[str, ...]] | None:
    try:
        found = open_recording(path)
    except RecordingError:
        return None
    samples = list(found.samples())
    assert found.count >= 0
    list(found.records())
    return samples, found.trouble


def tail_of(samples: list[RecordedSample]) -> bytes:
    encoder = Encoder()
    parts = [encoder.header(HEADER)]
    for index, (before, each) in enumerate(zip([None, *samples], samples, strict=False)):
        entry = encoder.entry(each, before)
        parts.append(encoder.single(entry, group=0, position=index, wall=each.wall_time))
    return b"".join(parts)


def frame_ends(whole: bytes) -> list[int]:
    file = io.BytesIO(whole)
    start = recording_format.read_header(file).size
    return [
        part.offset + part.size
        for part in recording_format.frames(file, start=start, verify=True)
        if isinstance(part, recording_format.Frame)
    ]


# --- hostile files ---------------------------------------------------------------------------------------------------


def test_a_group_that_unpacks_to_more_than_it_claims_needs_no_memory(tmp_path: Path) -> None:
    bomb = zlib.compress(bytes(1 << 28), 9)
    assert peak_of(tmp_path, framed(bomb, unpacked=1 << 20)) < 8 << 20
    assert peak_of(tmp_path, framed(bomb, unpacked=1 << 28)) < 8 << 20


def framed(payload: bytes, *, unpacked: int) -> bytes:
    return recording_format._frame(payload, unpacked, True, Encoder().shape, 0, 0, 1, 0.0, 0.0)


def peak_of(directory: Path, frame: bytes) -> int:
    path = directory / "bomb.rec"
    path.write_bytes(Encoder().header(HEADER) + frame)
    tracemalloc.start()
    try:
        found = open_recording(path)
        assert list(found.samples()) == []
        assert found.trouble
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "change",
    [
        {},
        [[1]],
        [{"a": 1}],
        7,
        [[1, 2], {}],
        [[0] * 7, {}],
        [recorded_samples.sample(), 1, 2],
        [recorded_samples.sample()._replace(zombies="many")],  # type: ignore[arg-type]
        [recorded_samples.sample()._replace(snapshot=None)],  # type: ignore[arg-type]
    ],
)
def test_values_of_wrong_types_are_reported(tmp_path: Path, change: object) -> None:
    encoder = Encoder()
    path = tmp_path / "wrong.rec"
    entry = msgspec.msgpack.encode(change)
    path.write_bytes(encoder.header(HEADER) + encoder.single(entry, group=0, position=0, wall=0.0))
    found = open_recording(path)
    assert list(found.samples()) == []
    assert found.trouble


def test_a_change_of_what_does_not_exist_is_reported(tmp_path: Path) -> None:
    encoder = Encoder()
    first = recorded_samples.sample()
    for change in (
        {99: 1},
        {-1: 1},
        {"a": 1},
        {0: {0: {0: 1}}},
        {0: [[5], {}]},
        {0: {3: {"other": 1}}},
        {0: {PODS: [[0, 0], {}]}},
    ):
        path = tmp_path / "wrong.rec"
        frames = [encoder.entry(first, None), msgspec.msgpack.encode(change)]
        singles = [encoder.single(each, group=0, position=n, wall=0.0) for n, each in enumerate(frames)]
        path.write_bytes(encoder.header(HEADER) + b"".join(singles))
        found = open_recording(path)
        assert list(found.samples()) == [first]
        assert found.trouble, change


def test_a_few_bytes_make_no_more_than_a_few_samples_and_values(tmp_path: Path) -> None:
    first = Encoder().entry(recorded_samples.sample(pods=1), None)
    many_pods = msgspec.msgpack.encode({0: {PODS: [[0] * 100_000, {}]}})
    no_pods = msgspec.msgpack.encode({0: {PODS: [[-1] * 100_000, {}]}})
    empty_lists = b"\xdd" + (8 << 20).to_bytes(4, "big") + b"\x90" * (8 << 20)
    for entries, samples in (
        ([first, many_pods], 1),
        ([first, no_pods], 1),
        ([empty_lists], 0),
        ([first] + [msgspec.msgpack.encode({})] * recording_format.GROUP_SAMPLES, 0),
    ):
        path = tmp_path / "small.rec"
        frame = Encoder().packed(entries, group=0, first_wall=0.0, last_wall=0.0, level=9)
        path.write_bytes(Encoder().header(HEADER) + frame)
        tracemalloc.start()
        for read in (open_recording(path).samples, open_recording(path).snapshots):
            assert len(list(read())) == samples
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
        tracemalloc.stop()


def test_pods_with_the_same_uid_are_read_back(tmp_path: Path) -> None:
    first = recorded_samples.sample(pods=2)
    pod = first.snapshot.pods[0]
    twice = first._replace(snapshot=first.snapshot._replace(pods=(pod, pod, pod)))
    found = open_recording(written(tmp_path, [first, twice, first]))
    assert (list(found.samples()), found.trouble) == ([first, twice, first], ())


def test_what_is_no_recording_gives_one_clear_error(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("hello\n")
    empty = tmp_path / "empty.rec"
    empty.touch()
    archive = tmp_path / "other.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("a.txt", "a")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (text, empty, archive, pipe, tmp_path, tmp_path / "missing"):
        with pytest.raises(RecordingError, match=path.name):
            open_recording(path)


def test_a_later_format_is_named(tmp_path: Path) -> None:
    path = tmp_path / "later.rec"
    path.write_bytes(b"NODEAGENT-RECORDING 7 00000000 {}\n")
    with pytest.raises(RecordingError, match="written in format 7, this version reads format 1"):
        open_recording(path)


# --- other versions --------------------------------------------------------------------------------------------------


def rewritten(path: Path, alter: typing.Callable[[dict[str, tuple[str, ...]], list[typing.Any]], None]) -> None:
    """The file as a version with other fields would have written it."""
    whole = path.read_bytes()
    file = io.BytesIO(whole)
    header = recording_format.read_header(file)
    fields = dict(header.fields)
    raws = []
    raw: typing.Any = None
    for part in recording_format.frames(file, start=header.size, verify=True):
        assert isinstance(part, recording_format.Frame)
        for change in recording_format.entries(file, part):
            raw = recording_format.with_change(raw, change)
            raws.append(msgspec.msgpack.decode(msgspec.msgpack.encode(raw)))
    for each in raws:
        alter(fields, each)
    text = msgspec.json.encode({"fields": fields, "header": header.recording})
    encoder = Encoder()
    encoder.shape = recording_format.shape_checksum(fields)
    singles = [
        encoder.single(msgspec.msgpack.encode([each]), group=n, position=0, wall=0.0) for n, each in enumerate(raws)
    ]
    line = b"NODEAGENT-RECORDING 1 %08x %s\n" % (recording_format.header_checksum(b"1", text), text)
    path.write_bytes(line + b"".join(singles))


def test_a_newer_recording_with_unknown_fields_and_words_is_readable(tmp_path: Path) -> None:
    samples = recorded_samples.samples(3)
    path = written(tmp_path, samples)

    def alter(fields: dict[str, tuple[str, ...]], raw: list[typing.Any]) -> None:
        fields["RecordedSample"] = ("colour", *RecordedSample._fields)
        raw.insert(0, "blue")
        snapshot = raw[1]
        snapshot[3]["gpu.available"] = snapshot[3]["memory.available"]
        snapshot[NODE_FIELDS.index("layout")] = "single"
        snapshot[NODE_FIELDS.index("notes")] = [["gpu", "hot", ""]]

    rewritten(path, alter)
    found = open_recording(path)
    assert list(found.samples()) == samples


def test_an_older_recording_without_some_fields_is_readable(tmp_path: Path) -> None:
    samples = recorded_samples.samples(3)
    path = written(tmp_path, samples)

    def alter(fields: dict[str, tuple[str, ...]], raw: list[typing.Any]) -> None:
        fields["RecordedSample"] = tuple(name for name in RecordedSample._fields if name != "zombies")
        fields["NodeSnapshot"] = tuple(name for name in NODE_FIELDS if name != "layout")
        fields["Pod"] = tuple(name for name in Pod._fields if name != "namespace")
        for view in raw[0][NODE_FIELDS.index("pods")]:
            del view[0][Pod._fields.index("namespace")]
        del raw[0][3]["pid.available"]
        del raw[0][NODE_FIELDS.index("layout")]
        del raw[RecordedSample._fields.index("zombies")]

    rewritten(path, alter)
    read = list(open_recording(path).samples())
    assert [each.zombies for each in read] == [None] * 3
    assert list(open_recording(path).snapshots()) == [each.snapshot for each in read]
    for each, was in zip(read, samples, strict=True):
        snapshot = each.snapshot
        assert snapshot.layout is DiskLayout.UNKNOWN
        assert snapshot.observations[Signal.PID].reason == recording_shape.NOT_RECORDED
        assert snapshot.pods == tuple(
            PodView(view.pod._replace(namespace=None), view.usage) for view in was.snapshot.pods
        )


NODE_FIELDS = recording_shape.field_names()["NodeSnapshot"]


@pytest.mark.parametrize(
    ("claimed_samples", "claimed_bytes"), [(recording_format.GROUP_SAMPLES, 0), (0, recording_format.MAX_GROUP_BYTES)]
)
def test_a_small_file_with_very_many_samples_is_not_read_to_its_end(
    tmp_path: Path, claimed_samples: int, claimed_bytes: int
) -> None:
    first, last = recorded_samples.samples(2)
    frames = 1 + max(
        recording_format.MAX_READ_SAMPLES // max(1, claimed_samples) if claimed_samples else 0,
        recording_format.MAX_READ_BYTES // max(1, claimed_bytes) if claimed_bytes else 0,
    )
    encoder = Encoder()

    def group(sample: RecordedSample, number: int) -> bytes:
        wall, entry = sample.wall_time, encoder.entry(sample, None)
        return encoder.packed([entry], group=number, first_wall=wall, last_wall=wall, level=6)

    path = tmp_path / "samples-1.rec"
    claims = (claimed_bytes, encoder.shape, 7, 0, claimed_samples, first.wall_time, first.wall_time)
    path.write_bytes(
        encoder.header(HEADER)
        + group(first, 1)
        + frames * recording_format._frame(b"", claims[0], True, *claims[1:])
        + group(last, 2)
    )
    assert path.stat().st_size < 1 << 20
    found = open_recording(path)
    assert list(found.samples()) == [first]
    assert list(found.snapshots()) == [first.snapshot]
    assert [each for each in found.trouble if "not read" in each] == [
        "more than 4,000,000 samples or 4 GiB unpacked: the rest is not read"
    ]
    assert len(found.trouble) <= recording.MAX_TROUBLE + 1


# --- directories and snapshot files ----------------------------------------------------------------------------------


def test_segments_are_read_in_their_order_and_a_tail_after_its_segment(tmp_path: Path) -> None:
    samples = recorded_samples.samples(9)
    recordings.write_recording(tmp_path / "samples-2.rec", HEADER, samples[:3])
    recordings.write_recording(tmp_path / "samples-10.rec", HEADER, samples[3:6])
    (tmp_path / "samples-10-tail.rec").write_bytes(tail_of(samples[6:]))
    (tmp_path / "other.rec").write_text("no segment")
    found = open_recording(tmp_path)
    assert list(found.samples()) == samples[:6]  # the tail has the same group: it was moved already
    assert found.count == 6


def test_a_state_directory_has_samples_and_records(tmp_path: Path) -> None:
    (tmp_path / recorder_paths.SAMPLES).mkdir()
    samples = recorded_samples.samples(2)
    written(tmp_path / recorder_paths.SAMPLES, samples)
    (tmp_path / "decisions.jsonl").write_text('{"record": "decision", "id": "a-1"}\nnot json\n')
    for path in (tmp_path, tmp_path / recorder_paths.SAMPLES):
        found = open_recording(path)
        assert list(found.samples()) == samples
        assert [each["id"] for each in found.records()] == ["a-1"]


def test_a_snapshot_file_is_read_without_extracting_it(tmp_path: Path) -> None:
    samples = recorded_samples.samples(2)
    path = tmp_path / "ticket.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.write(written(tmp_path, samples), "samples/samples-1.rec")
        file.writestr("decisions.jsonl", '{"record": "decision", "id": "a-1"}\n')
        file.writestr("manifest.json", '{"format": 1}')
    found = open_recording(path)
    assert list(found.samples()) == samples
    assert [each["id"] for each in found.records()] == ["a-1"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["samples-1.rec", "ticket.zip"]
