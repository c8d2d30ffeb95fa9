"""The header of a recording that was in force at a time."""

from nodeagent.model.recording import RecordingHeader, header_at

FIRST, SECOND, THIRD = (RecordingHeader("n", "0.1.0", "abc", "boot", wall) for wall in (100.0, 200.0, 300.0))


def test_the_last_header_that_had_begun_is_in_force() -> None:
    headers = (FIRST, SECOND, THIRD)
    assert [header_at(headers, wall) for wall in (100.0, 199.9, 200.0, 1e9, None)] == [
        FIRST,
        FIRST,
        SECOND,
        THIRD,
        THIRD,
    ]


def test_before_the_first_header_there_is_none() -> None:
    """What was in force then is no longer recorded. The first one may begin a moment after its decision."""
    assert header_at((SECOND, THIRD), 100.0) is None
    assert header_at((SECOND, THIRD), 199.5) == SECOND
    assert header_at((), 100.0) is None
    assert header_at((), None) is None


def test_a_clock_that_was_set_back_leaves_the_headers_that_follow() -> None:
    """The first one began by a clock that was an hour ahead."""
    ahead = FIRST._replace(began_wall=3700.0)
    assert [header_at((ahead, SECOND), wall) for wall in (150.0, 250.0)] == [None, SECOND]
