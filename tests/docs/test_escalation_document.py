"""docs/escalation.md names what the code has."""

from nodeagent.model import OutcomeKind
from nodeagent.policy import in_flight, protection, rate_limits
from tests.support.paths import REPOSITORY

TEXT = (REPOSITORY / "docs" / "escalation.md").read_text(encoding="utf-8")


def test_every_protection_is_in_the_list_of_codes() -> None:
    rows = [row.code for row in protection.OBJECT_RULES] + [row.code for row in protection.MOMENTARY_RULES]
    for code in (*rows, protection.OWN_POD.code):
        assert f"`{code}`" in TEXT


def test_every_code_of_a_wait_is_in_the_list_of_codes() -> None:
    for kind in OutcomeKind:
        if kind not in (OutcomeKind.ACCEPTED, OutcomeKind.DRY_RUN, OutcomeKind.RECHECK_REFUSED, OutcomeKind.KILLED):
            assert f"`{kind.value}`" in TEXT


def test_the_seconds_are_those_of_the_code() -> None:
    assert f"at most {in_flight.SOFT_PATIENCE_S:.0f} s (or" in " ".join(TEXT.split())
    assert f"{in_flight.HARD_PATIENCE_S:.0f} s in the hard tier" in TEXT
    assert f"more than {in_flight.HARD_PATIENCE_S:.0f} s of grace left" in TEXT
    assert f"not longer than {in_flight.SLACK_S:.0f} s after its grace" in " ".join(TEXT.split())
    assert f"else {rate_limits.POD_BACKOFF_S:.0f} s doubling to {rate_limits.POD_BACKOFF_MAX_S / 60:.0f} min" in TEXT
    assert f"else {rate_limits.API_BACKOFF_S:.0f} s doubling to {rate_limits.API_BACKOFF_MAX_S:.0f} s" in TEXT
    assert f"up to {rate_limits.JITTER:.0%}" in TEXT
