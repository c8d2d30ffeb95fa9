"""The published schemas of the reports, and strict ones for tests of the code."""

import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from tests.support.paths import REPOSITORY

SCHEMA_FILE = REPOSITORY / "nodeagent" / "report" / "node_report.schema.json"
RIGHTS_SCHEMA_FILE = SCHEMA_FILE.with_name("rights_report.schema.json")


def schema(file: Path = SCHEMA_FILE) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return loaded


def strict(file: Path = SCHEMA_FILE) -> Draft202012Validator:
    """As published, but a field that the schema does not name is an error: nothing is printed undocumented."""
    closed = schema(file)
    _close(closed)
    Draft202012Validator.check_schema(closed)
    return Draft202012Validator(closed)


def _close(part: Any) -> None:
    if isinstance(part, dict):
        if part.get("type") == "object" and "properties" in part:
            part["additionalProperties"] = False
        for value in part.values():
            _close(value)
    elif isinstance(part, list):
        for value in part:
            _close(value)
