"""`check` reads the notes of the running agent."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.model import Note, NoteKind
from nodeagent.records import status_file

NOTES = (Note(NoteKind.WORKERS, "the thread disk hangs"), Note(NoteKind.OTHER_OOM_HANDLERS, "earlyoom runs"))


def test_notes_are_read_with_their_age(tmp_path: Path) -> None:
    status_file.write_status(str(tmp_path), NOTES, now=1000.0)
    assert status_file.read_status(str(tmp_path), now=1012.4) == (
        Note(NoteKind.WORKERS, "the thread disk hangs (the running agent, 12s ago)"),
        Note(NoteKind.OTHER_OOM_HANDLERS, "earlyoom runs (the running agent, 12s ago)"),
    )


def test_only_the_newest_notes_are_read(tmp_path: Path) -> None:
    status_file.write_status(str(tmp_path), NOTES, now=1000.0)
    status_file.write_status(str(tmp_path), (), now=1001.0)
    assert status_file.read_status(str(tmp_path), now=1002.0) == ()


def test_an_agent_without_new_notes_for_minutes_is_not_called_running(tmp_path: Path) -> None:
    status_file.write_status(str(tmp_path), NOTES[:1], now=1000.0)
    message = "the thread disk hangs (an agent that was killed or hangs, 121s ago)"
    assert status_file.read_status(str(tmp_path), now=1121.0) == (Note(NoteKind.WORKERS, message),)


def test_an_ended_agent_has_no_notes(tmp_path: Path) -> None:
    status_file.write_status(str(tmp_path), NOTES, now=1000.0)
    status_file.remove_status(str(tmp_path))
    assert status_file.read_status(str(tmp_path), now=1001.0) == ()
    status_file.remove_status(str(tmp_path))


def test_without_a_status_file_there_are_no_notes(tmp_path: Path) -> None:
    assert status_file.read_status(str(tmp_path), now=1.0) == ()


def test_notes_from_before_the_last_reboot_are_dropped(tmp_path: Path) -> None:
    status_file.write_status(str(tmp_path), NOTES, now=1000.0)
    assert status_file.read_status(str(tmp_path), now=30.0) == ()


def test_a_note_stays_one_line_and_too_many_notes_are_dropped(tmp_path: Path) -> None:
    status_file.write_status(
        str(tmp_path),
        [
            Note(NoteKind.POD, "two\nlines \x1b[31m", about="a\tb"),
            *[Note(NoteKind.POD, "x" * 1000)] * 100,
        ],
        now=0.0,
    )
    first, *rest = status_file.read_status(str(tmp_path), now=0.0)
    assert first == Note(NoteKind.POD, "two?lines ?[31m (the running agent, 0s ago)", about="a?b")
    assert 10 < len(rest) < 20
    assert {each.message for each in rest} == {"x" * 1000 + " (the running agent, 0s ago)"}


@given(data=st.binary(max_size=200) | st.text("0123456789 .-\nMena\tif", max_size=200).map(str.encode))
def test_no_file_content_is_an_error(tmp_path_factory, data: bytes) -> None:  # type: ignore[no-untyped-def]
    directory = tmp_path_factory.getbasetemp()
    (directory / status_file.STATUS_FILE).write_bytes(data)
    assert isinstance(status_file.read_status(str(directory), now=1000.0), tuple)
