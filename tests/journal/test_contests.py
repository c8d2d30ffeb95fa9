"""What `check` reads of the conditions that the agent and the kubelet share."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.cluster.conditions import Contest
from nodeagent.journal import contests
from nodeagent.model import ConditionType

MEMORY, DISK = ConditionType.MEMORY_PRESSURE, ConditionType.DISK_PRESSURE
FOUGHT = Contest(MEMORY, 6, 64.0, 63.97, held_by_other=False)
CALM = Contest(DISK, 0, 0.0, 0.0, held_by_other=False)


def notes(directory: Path, *, now: float) -> list[str]:
    told, age_s = contests.read(str(directory), now=now)
    return [f"{note.subject}: {note.message}" for note in contests.notes(told, age_s=age_s)]


def test_a_condition_that_the_kubelet_resets_is_told_with_how_long_it_read_true(tmp_path: Path) -> None:
    contests.write(str(tmp_path), [FOUGHT, CALM], now=1000.0)
    assert notes(tmp_path, now=1012.4) == [
        "MemoryPressure: the kubelet owns this condition: it was reset 6 times and read True 99.95% of the 64s in "
        "which it was to be, as the running agent told 12s ago"
    ]


def test_a_true_of_the_kubelets_own_is_told_as_such(tmp_path: Path) -> None:
    contests.write(str(tmp_path), [CALM._replace(held_by_other=True)], now=1000.0)
    [note] = notes(tmp_path, now=1000.0)
    assert "holds it True itself" in note


def test_without_a_contest_nothing_is_told(tmp_path: Path) -> None:
    assert notes(tmp_path, now=1.0) == []
    contests.write(str(tmp_path), [CALM, FOUGHT._replace(resets=0, true_s=64.0)], now=1000.0)
    assert notes(tmp_path, now=1001.0) == []


def test_what_was_told_before_the_last_reboot_is_not_told_again(tmp_path: Path) -> None:
    contests.write(str(tmp_path), [FOUGHT], now=1000.0)
    assert notes(tmp_path, now=30.0) == []


@given(data=st.binary(max_size=200) | st.text("0123456789 .-\nMenaif", max_size=200).map(str.encode))
def test_what_is_no_file_of_ours_tells_nothing_or_figures_and_never_fails(tmp_path_factory, data: bytes) -> None:  # type: ignore[no-untyped-def]
    directory = tmp_path_factory.getbasetemp()
    (directory / contests.FILE).write_bytes(data)
    told, age_s = contests.read(str(directory), now=1000.0)
    assert all(len(each) == 5 for each in told)
    contests.notes(told, age_s=age_s)
