"""The pages that are generated are current, and every word that the agent gives as a reason is explained in one."""

import ast
from collections.abc import Iterator

import pytest

from nodeagent.actuators.event_writer import EventReason
from nodeagent.commands import reference_docs
from nodeagent.model import OutcomeKind, RefusalCode
from nodeagent.telemetry import metric_families, metrics
from nodeagent.telemetry.exposition import sample_name
from tests.support.paths import REPOSITORY

SOURCES = sorted((REPOSITORY / "nodeagent").rglob("*.py"))


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


@pytest.mark.parametrize("name", reference_docs.PAGES)
def test_each_page_is_what_is_generated(name: str) -> None:
    page = (REPOSITORY / "docs" / f"{name}.md").read_text("utf-8")
    assert page == reference_docs.PAGES[name](), (
        f"run: python -m nodeagent.commands.reference_docs {name} > docs/{name}.md"
    )


def test_every_refusal_code_is_given_somewhere_and_no_text_stands_in_for_one() -> None:
    given = {
        node.attr
        for source in SOURCES
        if source.name != "refusals.py"
        for node in ast.walk(ast.parse(source.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "RefusalCode"
    }
    assert given == set(RefusalCode.__members__)
    assert [call for call in calls("Refusal") if literal(call, 0) is not None] == []


def test_every_refusal_code_names_its_configuration_key_on_the_page() -> None:
    page = reference_docs.reasons_page()
    keys = (REPOSITORY / "docs" / "configuration.md").read_text("utf-8")
    for code in RefusalCode:
        assert f"| `{code}` | " in page
        assert code.meaning in page
        if code.config_key:
            assert f" `{code.config_key}` | " in page
            assert f"| `{code.config_key.rpartition('.')[2]}` |" in keys


def test_every_reason_of_an_event_is_emitted_and_none_is_written_as_a_string() -> None:
    emitted = {
        node.attr
        for source in SOURCES
        for node in ast.walk(ast.parse(source.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "EventReason"
    }
    assert emitted == set(EventReason.__members__)
    assert [call for call in calls("emit_node_event") if literal(call, 0) is not None] == []
    assert [call for call in calls("_about_pod") if literal(call, 1) is not None] == []
    assert all(f"| `{reason}` | {reason.object} |" in reference_docs.events_page() for reason in EventReason)


def test_every_outcome_stage_and_failure_has_a_meaning() -> None:
    for kind in (OutcomeKind, metrics.SyncStage, metrics.Failure):
        texts = reference_docs.enum_docs(kind)
        assert set(texts) == {str(member) for member in kind}
        assert all(meaning.strip(". ") for word, meaning in texts.items()), texts


def test_every_series_is_on_the_page_under_the_name_that_prometheus_has() -> None:
    page = reference_docs.metrics_page()
    for family in metric_families.FAMILIES:
        assert f"| `{sample_name(family)}` |" in page
