"""The table of ages: complete, and applied as it stands."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.sampling.pods import pod_ages
from nodeagent.sampling.pods.pod_ages import AGES, Change
from nodeagent.sampling.pods.pod_cache import PodValues


def test_every_cached_value_has_a_row() -> None:
    assert tuple(AGES) == PodValues._fields


def test_every_change_ends_some_value() -> None:
    assert frozenset[Change]().union(*(row.changes for row in AGES.values())) == frozenset(Change)


@pytest.mark.parametrize("value", AGES)
@given(changes=st.frozensets(st.sampled_from(Change)), age_s=st.floats(0.0, 1000.0), listed=st.booleans())
def test_a_value_is_read_again_after_its_changes_or_its_age(
    value: str, changes: frozenset[Change], age_s: float, listed: bool
) -> None:
    row = AGES[value]
    limit_s = row.max_age_listed_s if listed else row.max_age_s
    expected = bool(changes & row.changes) or age_s >= limit_s
    assert pod_ages.is_outdated(value, changes, age_s=age_s, listed=listed) is expected


def test_a_value_from_the_future_is_read_again() -> None:
    assert pod_ages.is_outdated("containers", frozenset(), age_s=-1.0, listed=True)


@given(stale_after_s=st.floats(0.1, 1000.0))
def test_memory_is_read_again_before_a_decision_rejects_it(stale_after_s: float) -> None:
    assert pod_ages.memory_age_s(stale_after_s) <= min(20.0, stale_after_s * 2 / 3)
