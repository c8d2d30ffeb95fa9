"""Notes about conditions that the agent and the kubelet both write."""

from nodeagent.actuators.conditions import ConditionConflict
from nodeagent.model import ConditionType
from nodeagent.telemetry import condition_conflicts

OVERWRITTEN = ConditionConflict(ConditionType.MEMORY_PRESSURE, 6, 64.0, 63.97, true_by_other=False)
CALM = ConditionConflict(ConditionType.DISK_PRESSURE, 0, 0.0, 0.0, true_by_other=False)


def test_a_note_lists_the_overwrites_and_the_share_of_time_that_a_condition_was_true() -> None:
    [note] = condition_conflicts.conflict_notes([OVERWRITTEN, CALM])
    assert note.subject == "MemoryPressure"
    assert note.message == (
        "the kubelet owns this condition: 6 overwrites; it was True for 99.95% of the 64s it should have been"
    )


def test_a_note_reports_a_true_that_the_kubelet_has_set() -> None:
    [note] = condition_conflicts.conflict_notes([CALM._replace(true_by_other=True)])
    assert "has set it True" in note.message


def test_without_a_conflict_there_is_no_note() -> None:
    assert condition_conflicts.conflict_notes([CALM, OVERWRITTEN._replace(overwrites=0, true_s=64.0)]) == ()
