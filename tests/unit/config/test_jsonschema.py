"""The JSON Schema for editors is current, valid, and agrees with the loader."""

import json
from typing import Any

import jsonschema
import pytest
import yaml

from nodeagent.config import jsonschema as generator
from nodeagent.config import reference
from nodeagent.config.keys import config_keys, top_level
from nodeagent.config.show import show
from tests.support.config_files import BAD, GOOD, Wrong, file, read
from tests.support.paths import REPOSITORY


@pytest.fixture(scope="module")
def validator() -> Any:
    return jsonschema.Draft202012Validator(json.loads(generator.SCHEMA_FILE.read_text("utf-8")))


def test_the_shipped_schema_is_what_is_generated() -> None:
    assert generator.SCHEMA_FILE.read_text("utf-8") == generator.text(), "run: python -m nodeagent.config.jsonschema"


def test_the_configuration_page_is_what_is_generated() -> None:
    page = (REPOSITORY / "docs" / "configuration.md").read_text("utf-8")
    assert page == reference.text(), "run: python -m nodeagent.config.reference > docs/configuration.md"


def test_the_schema_is_itself_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(generator.generate())


def test_the_page_names_every_key() -> None:
    page = reference.text()
    for key in top_level():
        assert f"| `{key.name}` |" in page
        if isinstance(key.default, tuple) and hasattr(key.default, "_fields"):
            assert all(f"| `{part.name}` |" in page for part in config_keys(type(key.default)))


@pytest.mark.parametrize("body", GOOD)
def test_what_the_loader_accepts_the_schema_accepts(body: str, validator: Any) -> None:
    assert [error.message for error in validator.iter_errors(yaml.safe_load(file(body)))] == []


@pytest.mark.parametrize("wrong", BAD, ids=lambda wrong: wrong.body[:60])
def test_what_the_loader_refuses_the_schema_refuses_where_it_can_know(wrong: Wrong, validator: Any) -> None:
    assert validator.is_valid(yaml.safe_load(file(wrong.body))) is not wrong.schema_sees_it


def test_the_schema_accepts_the_example_and_what_config_show_prints(validator: Any) -> None:
    for text in ((REPOSITORY / "examples" / "nodeagent.yaml").read_text("utf-8"), show(read("mode: enforce"))):
        assert validator.is_valid(yaml.safe_load(text))


def test_the_schema_wants_the_header(validator: Any) -> None:
    assert not validator.is_valid({"apiVersion": "nodeagent.io/v1alpha1"})
    assert not validator.is_valid({"apiVersion": "v1", "kind": "NodeAgentConfiguration"})
