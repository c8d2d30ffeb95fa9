"""What `check` reads of the agent that runs on its node."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.model import Note, NoteKind
from nodeagent.records import status_file

NOTES = (Note(NoteKind.WORKERS, "the thread disk hangs"), Note(NoteKind.OTHER_OOM_HANDLERS, "earlyoom runs"))


def test_what_was_told_is_read_with_its_age(tmp_path: Path) -> None:
    status_file.write(str(tmp_path), NOTES, now=1000.0)
    assert status_file.read_status(str(tmp_path), now=1012.4) == (
        Note(NoteKind.WORKERS, "the thread disk hangs (the running agent, 12s ago)"),
        Note(NoteKind.OTHER_OOM_HANDLERS, "earlyoom runs (the running agent, 12s ago)"),
    )


def test_only_the_newest_is_told(tmp_path: Path) -> None:
    status_file.write(str(tmp_path), NOTES, now=1000.0)
    status_file.write(str(tmp_path), (), now=1001.0)
    assert status_file.read_status(str(tmp_path), now=1002.0) == ()


def test_who_has_told_nothing_for_minutes_is_not_called_running(tmp_path: Path) -> None:
    status_file.write(str(tmp_path), NOTES[:1], now=1000.0)
    words = "the thread disk hangs (an agent that was killed or hangs, 121s ago)"
    assert status_file.read_status(str(tmp_path), now=1121.0) == (Note(NoteKind.WORKERS, words),)


def test_an_agent_that_has_ended_says_nothing(tmp_path: Path) -> None:
    status_file.write(str(tmp_path), NOTES, now=1000.0)
    status_file.forget(str(tmp_path))
    assert status_file.read_status(str(tmp_path), now=1001.0) == ()
    status_file.forget(str(tmp_path))


def test_where_no_agent_has_told_anything_there_is_nothing(tmp_path: Path) -> None:
    assert status_file.read_status(str(tmp_path), now=1.0) == ()


def test_what_was_told_before_the_last_reboot_is_not_told_again(tmp_path: Path) -> None:
    status_file.write(str(tmp_path), NOTES, now=1000.0)
    assert status_file.read_status(str(tmp_path), now=30.0) == ()


def test_a_note_stays_one_line_and_too_many_are_cut_between_two(tmp_path: Path) -> None:
    status_file.write(
        str(tmp_path),
        [
            Note(NoteKind.POD, "two\nlines \x1b[31m", about="a\tb"),
            *[Note(NoteKind.POD, "x" * 1000)] * 100,
        ],
        now=0.0,
    )
    first, *others = status_file.read_status(str(tmp_path), now=0.0)
    assert first == Note(NoteKind.POD, "two?lines ?[31m (the running agent, 0s ago)", about="a?b")
    assert 10 < len(others) < 20
    assert {each.message for each in others} == {"x" * 1000 + " (the running agent, 0s ago)"}


@given(data=st.binary(max_size=200) | st.text("0123456789 .-\nMena\tif", max_size=200).map(str.encode))
def test_what_is_no_file_of_ours_never_fails(tmp_path_factory, data: bytes) -> None:  # type: ignore[no-untyped-def]
    directory = tmp_path_factory.getbasetemp()
    (directory / status_file.FILE).write_bytes(data)
    assert isinstance(status_file.read_status(str(directory), now=1000.0), tuple)
