"""docs/escalation.md names what the code has."""

from pathlib import Path

from nodeagent.model import OutcomeKind
from nodeagent.policy import budget, ledger, protection

TEXT = (Path(__file__).parents[2] / "docs" / "escalation.md").read_text(encoding="utf-8")


def test_every_protection_is_in_the_list_of_codes() -> None:
    rows = [row.code for row in protection.STANDING] + [row.code for row in protection.MOMENTARY]
    for code in (*rows, protection.OWN_POD.code):
        assert f"`{code}`" in TEXT


def test_every_code_of_a_wait_is_in_the_list_of_codes() -> None:
    for kind in OutcomeKind:
        if kind not in (OutcomeKind.ACCEPTED, OutcomeKind.DRY_RUN, OutcomeKind.RECHECK_REFUSED, OutcomeKind.KILLED):
            assert f"`{kind.value}`" in TEXT


def test_the_seconds_are_those_of_the_code() -> None:
    assert f"at most {ledger.SOFT_PATIENCE_S:.0f} s (or" in " ".join(TEXT.split())
    assert f"{ledger.HARD_PATIENCE_S:.0f} s in the hard tier" in TEXT
    assert f"more than {ledger.HARD_PATIENCE_S:.0f} s of grace left" in TEXT
    assert f"not longer than {ledger.SLACK_S:.0f} s after its grace" in " ".join(TEXT.split())
    assert f"else {budget.POD_BACKOFF_S:.0f} s doubling to {budget.POD_BACKOFF_MAX_S / 60:.0f} min" in TEXT
    assert f"else {budget.API_BACKOFF_S:.0f} s doubling to {budget.API_BACKOFF_MAX_S:.0f} s" in TEXT
    assert f"up to {budget.JITTER:.0%}" in TEXT
