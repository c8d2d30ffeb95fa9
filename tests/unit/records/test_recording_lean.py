"""The fast reader gives the snapshots of whole samples."""

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.model import Note, NoteKind
from nodeagent.model.recording import RecordedSample
from nodeagent.records import recording
from tests.support import recorded_samples, recordings
from tests.support.recorded_samples import HEADER


def assert_same(path: Path) -> int:
    """Both ways read the same. Returns the number of samples."""
    whole, lean = recording.open_recording(path), recording.open_recording(path)
    expected = [sample.snapshot._replace(notes=()) for sample in whole.samples()]
    assert list(lean.snapshots()) == expected
    assert lean.trouble == whole.trouble
    return len(expected)


@settings(deadline=None, max_examples=4)
@given(st.lists(recorded_samples.any_value(RecordedSample), min_size=1, max_size=2))
def test_any_recorded_samples_have_the_same_snapshots_both_ways(
    tmp_path_factory: pytest.TempPathFactory, samples: list[RecordedSample]
) -> None:
    path = tmp_path_factory.mktemp("recording") / "samples-1.rec"
    recordings.write_recording(path, HEADER, samples)
    assert assert_same(path) == len(samples)


def test_a_series_of_samples_with_pods_that_come_and_go_has_the_same_snapshots_both_ways(tmp_path: Path) -> None:
    path = tmp_path / "samples-1.rec"
    series = [recorded_samples.sample(index, pods=3 + index % 4) for index in range(700)]
    recordings.write_recording(path, HEADER, series)
    assert assert_same(path) == 700


def test_notes_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "samples-1.rec"
    first, second = recorded_samples.samples(2)
    noted = first._replace(snapshot=first.snapshot._replace(notes=(Note(NoteKind.MEMORY, "short"),)))
    recordings.write_recording(path, HEADER, [noted, second, noted])
    assert assert_same(path) == 3


def test_what_did_not_change_is_the_same_object(tmp_path: Path) -> None:
    path = tmp_path / "samples-1.rec"
    recordings.write_recording(path, HEADER, recorded_samples.samples(2))
    first, second = recording.open_recording(path).snapshots()
    assert first.pods[0].pod is second.pods[0].pod
    assert first.observations is not second.observations


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_a_damaged_file_never_raises_and_gives_no_snapshot_that_was_not_recorded(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("recording") / "samples-1.rec"
    recordings.write_recording(path, HEADER, recorded_samples.samples(5))
    recorded = list(recording.open_recording(path).snapshots())
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(bytes(content[: data.draw(st.integers(1, len(content)))]))
    with contextlib.suppress(recording.RecordingError):
        assert all(each in recorded for each in recording.open_recording(path).snapshots())
