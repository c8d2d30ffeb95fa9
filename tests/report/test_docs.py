"""The pages that are generated are current, and every word that the agent gives as a reason is explained in one."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent.cluster import session
from nodeagent.model import OutcomeKind
from nodeagent.policy import budget, protection
from nodeagent.report import docs, families, metrics, reasons
from nodeagent.report.exposition import sample_name

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "nodeagent").rglob("*.py"))


def calls(name: str) -> Iterator[ast.Call]:
    """Every call of a function or class of this name in the program."""
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text("utf-8"))):
            if isinstance(node, ast.Call) and name in (getattr(node.func, "id", ""), getattr(node.func, "attr", "")):
                yield node


def literal(call: ast.Call, position: int) -> str | None:
    if len(call.args) <= position:
        return None
    value = call.args[position]
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


@pytest.mark.parametrize("name", docs.PAGES)
def test_each_page_is_what_is_generated(name: str) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text("utf-8")
    assert page == docs.PAGES[name](), f"run: python -m nodeagent.report.docs {name} > docs/{name}.md"


def test_every_code_of_a_refusal_is_explained_and_every_explained_code_exists() -> None:
    written = {code for call in calls("Refusal") if (code := literal(call, 0)) is not None}
    written |= {code for call in calls("Wait") if (code := literal(call, 3)) is not None}
    written |= {row.code for row in (*protection.STANDING, *protection.MOMENTARY)}
    written |= {f"waits-for-{what}" for what in session.WAITS}
    buckets = (budget.NODE, budget.NAMESPACE, budget.OWNER, budget.SIGNAL, budget.LAST_RESORT)
    written |= {f"budget-{kind}" for kind in buckets}
    assert written == set(reasons.REFUSALS)


def test_no_code_is_explained_twice() -> None:
    groups = (reasons.PROTECTIONS, reasons.LIMITS, reasons.DECISIONS, reasons.RECHECKS)
    assert sum(map(len, groups)) == len(reasons.REFUSALS)


def test_every_protection_that_is_configured_names_its_key_on_the_page() -> None:
    page = docs.reasons_page()
    keys = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    for row in (*protection.STANDING, *protection.MOMENTARY):
        assert f"| `{row.code}` | {f'`{row.switch}`' if row.switch else 'always'} |" in page
        if row.switch:
            assert f"| `{row.switch.removeprefix('protection.')}` |" in keys


def test_every_reason_of_an_event_is_explained_and_every_explained_one_is_emitted() -> None:
    emitted = {reason for call in calls("tell_node") if (reason := literal(call, 0)) is not None}
    emitted |= {reason for call in calls("_about_pod") if (reason := literal(call, 1)) is not None}
    emitted |= set(session._NEWS.values())
    source = (ROOT / "nodeagent" / "cluster" / "session.py").read_text("utf-8")
    for choice in re.findall(r'reason = ("\w+" if .* else "\w+")', source):
        emitted |= set(re.findall(r'"(\w+)"', choice))
    assert emitted == {each.reason for each in reasons.EVENTS}


def test_every_outcome_stage_and_failure_has_a_meaning() -> None:
    for kind in (OutcomeKind, metrics.Stage, metrics.Failure):
        said = docs.meanings(kind)
        assert set(said) == {str(member) for member in kind}
        assert all(meaning.strip(". ") for word, meaning in said.items()), said


def test_every_series_is_on_the_page_under_the_name_that_prometheus_has() -> None:
    page = docs.metrics_page()
    for family in families.FAMILIES:
        assert f"| `{sample_name(family)}` |" in page


def test_the_alerts_on_the_page_use_series_that_exist() -> None:
    names = {sample_name(family) for family in families.FAMILIES}
    alerts = docs.metrics_page().partition("## Worth an alert")[2]
    used = set(re.findall(r"\b(?:nodeagent|process)_\w+", alerts))
    assert used
    assert used <= names
