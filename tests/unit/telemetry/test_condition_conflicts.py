"""The words for conditions that the agent and the kubelet share."""

from nodeagent.actuators.conditions import ConditionConflict
from nodeagent.model import ConditionType
from nodeagent.telemetry import condition_conflicts

FOUGHT = ConditionConflict(ConditionType.MEMORY_PRESSURE, 6, 64.0, 63.97, true_by_other=False)
CALM = ConditionConflict(ConditionType.DISK_PRESSURE, 0, 0.0, 0.0, true_by_other=False)


def test_a_condition_that_the_kubelet_resets_is_told_with_how_long_it_read_true() -> None:
    [note] = condition_conflicts.notes([FOUGHT, CALM])
    assert note.subject == "MemoryPressure"
    assert note.message == (
        "the kubelet owns this condition: it was reset 6 times and read True 99.95% of the 64s in which it was to be"
    )


def test_a_true_of_the_kubelets_own_is_told_as_such() -> None:
    [note] = condition_conflicts.notes([CALM._replace(true_by_other=True)])
    assert "holds it True itself" in note.message


def test_without_a_contest_nothing_is_told() -> None:
    assert condition_conflicts.notes([CALM, FOUGHT._replace(overwrites=0, true_s=64.0)]) == ()
