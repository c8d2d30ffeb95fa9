"""docs/escalation.md names what the code has."""

import re

from nodeagent.model import OutcomeKind, RefusalCode
from nodeagent.policy import backoffs, in_flight, pending_release, protection
from tests.support.paths import REPOSITORY

TEXT = (REPOSITORY / "docs" / "escalation.md").read_text(encoding="utf-8")
CODES = (REPOSITORY / "docs" / "reasons.md").read_text(encoding="utf-8")


def test_every_code_of_the_page_is_in_the_list_of_codes() -> None:
    known = {str(code) for code in (*RefusalCode, *OutcomeKind)}
    table = TEXT[: TEXT.index("Hard comes before soft")]
    in_brackets = {each for each in re.findall(r"\(`([a-z-]+)`\)", table) if "-" in each}
    assert "circuit-breaker" in in_brackets
    assert in_brackets <= known
    assert [code for code in in_brackets if f"`{code}`" not in CODES] == []


def test_every_protection_is_in_the_list_of_codes() -> None:
    rows = [row.code for row in protection.OBJECT_RULES] + [row.code for row in protection.MOMENTARY_RULES]
    for code in (*rows, protection.OWN_POD.code):
        assert f"`{code}`" in CODES


def test_every_code_of_a_wait_is_in_the_list_of_codes() -> None:
    for kind in OutcomeKind:
        if kind not in (OutcomeKind.ACCEPTED, OutcomeKind.DRY_RUN, OutcomeKind.RECHECK_REFUSED, OutcomeKind.KILLED):
            assert f"`{kind.value}`" in CODES


def test_the_seconds_are_those_of_the_code() -> None:
    assert f"at most {pending_release.SOFT_PATIENCE_S:.0f} s (or" in " ".join(TEXT.split())
    assert f"{pending_release.HARD_PATIENCE_S:.0f} s in the hard tier" in TEXT
    assert f"more than {pending_release.HARD_PATIENCE_S:.0f} s of grace left" in TEXT
    assert f"not longer than {in_flight.SLACK_S:.0f} s after its grace" in " ".join(TEXT.split())
    assert f"else {backoffs.POD_BACKOFF_S:.0f} s doubling to {backoffs.POD_BACKOFF_MAX_S / 60:.0f} min" in TEXT
    assert f"else {backoffs.API_BACKOFF_S:.0f} s doubling to {backoffs.API_BACKOFF_MAX_S:.0f} s" in TEXT
    assert f"up to {backoffs.JITTER:.0%}" in TEXT
