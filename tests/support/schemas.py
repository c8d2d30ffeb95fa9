"""The published schema of the report, and a strict one for tests of the code."""

import json
from typing import Any

from jsonschema import Draft202012Validator

from tests.support.paths import REPOSITORY

SCHEMA_FILE = REPOSITORY / "nodeagent" / "report" / "node_report.schema.json"


def schema() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    return loaded


def strict() -> Draft202012Validator:
    """As published, but a field that the schema does not name is an error: nothing is printed undocumented."""
    closed = schema()
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
