"""Failures and conflicts wait longer each time, and never in step."""

import random

import pytest

from nodeagent.kube.backoff import REPEAT_LAST_S, UNDELAYED_REPEATS, Restraint


def writes(*, stays_s: float, for_s: float) -> list[float]:
    """Times of the writes that another client undoes so long after each, and how late each write was."""
    restraint, now, found = Restraint(rng=random.Random(7)), 0.0, []
    while now < for_s:
        while (wait_s := restraint.wait_s(now)) > 0.0:
            now += wait_s
        found.append(now)
        now += stays_s
    return found


def test_a_kubelet_that_overwrites_every_ten_seconds_is_answered_at_once_for_ever() -> None:
    assert writes(stays_s=10.0, for_s=36_000.0) == [10.0 * n for n in range(3600)]


@pytest.mark.parametrize("stays_s", [0.001, 0.1, 1.0, 3.0])
def test_a_conflict_starts_fast_and_ends_with_a_few_writes_a_minute(stays_s: float) -> None:
    found = writes(stays_s=stays_s, for_s=3600.0)
    assert found[UNDELAYED_REPEATS - 1] <= UNDELAYED_REPEATS * stays_s, "the first answers wait for nothing"
    late = [at for at in found if at >= 600.0]
    assert len(late) <= 3000.0 / (REPEAT_LAST_S / 2)
    if stays_s < 1.0:
        assert len([at for at in found if at < 60.0]) <= UNDELAYED_REPEATS + 8


def test_two_agents_in_a_conflict_do_not_write_in_step() -> None:
    first, second = (Restraint(rng=random.Random(seed)) for seed in (1, 2))
    waits = [[restraint.wait_s(0.0) for _ in range(UNDELAYED_REPEATS + 1)][-1] for restraint in (first, second)]
    assert waits[0] != waits[1]
    assert all(0.5 <= wait <= 1.0 for wait in waits)


def test_after_a_conflict_the_burst_is_available_again() -> None:
    restraint, now = Restraint(), 0.0
    for _ in range(UNDELAYED_REPEATS + 3):
        while (wait_s := restraint.wait_s(now)) > 0.0:
            now += wait_s
    assert restraint.exhausted
    assert restraint.wait_s(now + 120.0) == 0.0
    assert not restraint.exhausted
