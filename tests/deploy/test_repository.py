"""The files that the hosting service reads, and the page for contributors."""

from pathlib import Path

import pytest
import yaml

from tests.support.paths import REPOSITORY

FORMS = sorted((REPOSITORY / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"))
FIELD_TYPES = {"markdown", "textarea", "input", "dropdown", "checkboxes"}


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_each_issue_form_has_the_keys_that_the_service_requires(form: Path) -> None:
    content = yaml.safe_load(form.read_text("utf-8"))
    assert {"name", "description", "body"} <= content.keys()
    assert {field["type"] for field in content["body"]} <= FIELD_TYPES
    ids = [field["id"] for field in content["body"] if field["type"] != "markdown"]
    assert len(set(ids)) == len(ids)
    assert all(field["attributes"]["label"] for field in content["body"] if field["type"] != "markdown")


def test_the_workflow_runs_the_gate_and_nothing_else() -> None:
    workflow = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    commands = [step["run"] for step in workflow["jobs"]["gate"]["steps"] if "run" in step]
    assert commands[-1] == ".ci/run"
    assert len(commands) == 2, "the other one installs what checkout and .ci/run need"
    assert workflow["permissions"] == {"contents": "read"}


def test_the_contributing_page_runs_the_commands_of_the_documentation() -> None:
    text = (REPOSITORY / "CONTRIBUTING.md").read_text("utf-8")
    assert "pip install -q -e . --group dev" in text
    assert "pytest tests/unit" in text
