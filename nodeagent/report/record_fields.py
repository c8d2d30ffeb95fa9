"""Reads fields of records, which may be older than this program: a missing or malformed one is empty or None."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from nodeagent.model import RefusalCode, RefusalKind, units
from nodeagent.report import wording

JsonObject = Mapping[str, Any]
_OF_RESIZES: Final = frozenset(str(code) for code in RefusalCode if code.kind is RefusalKind.RESIZE)


def items(record: JsonObject, key: str) -> Sequence[JsonObject]:
    value = record.get(key)
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def mapping(record: JsonObject, key: str) -> JsonObject:
    value = record.get(key)
    return value if isinstance(value, Mapping) else {}


def refusals(record: JsonObject) -> list[tuple[str, str]]:
    """Codes and messages of a pod or a decision."""
    return [(str(each.get("code")), str(each.get("message"))) for each in items(record, "refusals")]


def eviction_refusals(decision: JsonObject) -> list[tuple[str, str]]:
    """Codes and messages of why no pod, or not more, was evicted."""
    return [each for each in refusals(decision) if each[0] not in _OF_RESIZES]


def resize_refusals(decision: JsonObject) -> list[tuple[str, str]]:
    """Codes and messages of why memory limits were not raised."""
    return [each for each in refusals(decision) if each[0] in _OF_RESIZES]


def integer(value: object) -> int | None:
    return value if type(value) is int else None


def number(value: object) -> float | None:
    try:
        return float(value) if type(value) in (int, float) else None  # type: ignore[arg-type]
    except OverflowError:  # an integer of 400 digits
        return None


def time_text(record: JsonObject) -> str:
    wall = number(record.get("wallTime"))
    return units.UNKNOWN_TEXT if wall is None else wording.rfc3339(wall)


def pod_name(record: JsonObject) -> str:
    """`namespace/name` of a pod in a record, else `uid/...`. Not escaped."""
    namespace, name = record.get("namespace"), record.get("name")
    return f"{namespace}/{name}" if namespace and name else f"uid/{record.get('uid')}"
