"""Generate the JSON Schema of the configuration file for editors: `python -m nodeagent.config.jsonschema`.

It is generated from `schema.py` and has every key, type, word and range of a number. Only the loader checks ranges of
durations and percentages, rules between keys, and repeated keys.
"""

import enum
import json
import sys
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from nodeagent.config import field_docs, keys, show
from nodeagent.config.bounds import AmountRule, MapKey, Mark, OneOf, Range, Shape
from nodeagent.config.keys import ConfigKey
from nodeagent.config.schema import API_VERSION, CONFIG_KIND, Profile, RankingKey
from nodeagent.model import Amount, Signal

SCHEMA_FILE: Final = Path(__file__).parent / "nodeagent.schema.json"
"""The generated file in the package."""

_DURATION: Final = r"^\+?(0|([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|\u00b5s|\u03bcs|ms|s|m|h))" + (
    r"(([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|\u00b5s|\u03bcs|ms|s|m|h))*$"
)
_NUMBER: Final = r"\+?([0-9]+\.?[0-9]*|\.[0-9]+)"
_SUFFIX: Final = "n|u|m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE][+-]?[0-9]+"
_PERCENT: Final = "([eE][+-]?[0-9]+)?%+"
_AMOUNT: Final = f"^{_NUMBER}({_SUFFIX}|{_PERCENT})?$"
_THRESHOLD: Final = f"^{_NUMBER}({_SUFFIX}|{_PERCENT}(, at (least|most) {_NUMBER}({_SUFFIX})?){{0,2}})?$"


def generate() -> dict[str, Any]:
    """The schema as a JSON object."""
    header = {"apiVersion": {"const": API_VERSION}, "kind": {"const": CONFIG_KIND}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": CONFIG_KIND,
        "description": "Configuration of nodeagent",
        "type": "object",
        "additionalProperties": False,
        "required": ["apiVersion", "kind"],
        "properties": header | _properties(keys.top_level()),
        "$defs": {key.name: _element(key) for key in keys.top_level() if typing.get_origin(key.type) is Mapping},
    }


def text() -> str:
    """The schema as shipped."""
    return json.dumps(generate(), indent=2) + "\n"


def _properties(section_keys: Iterable[ConfigKey]) -> dict[str, Any]:
    return {
        key.name: {"description": field_docs.field_doc(key.owner, key.field), **_of(key, key.type)}
        for key in section_keys
    }


def _of(key: ConfigKey, type_: Any) -> dict[str, Any]:
    """The schema of one value."""
    origin: Any = typing.get_origin(type_)
    if origin is Mapping and (names := key.bound(MapKey)) is not None:
        pattern = {"pattern": f"^({names.pattern})$"}
        found = {"type": ["object", "null"], "propertyNames": pattern, "additionalProperties": _element(key)}
        return found | ({"minProperties": 1, "type": "object"} if Mark.NOT_EMPTY in key.bounds else {})
    if origin is Mapping:
        signals = {str(signal): {"$ref": f"#/$defs/{key.name}"} for signal in Signal}
        return {"type": ["object", "null"], "additionalProperties": False, "properties": signals}
    if origin is tuple:
        return _list(key, typing.get_args(type_)[0])
    if keys.is_section(type_):
        return _section(key, type_)
    found = _default(key) | _scalar(key, type_)
    if key.optional:
        return {"anyOf": [found, {"type": "null"}]}
    return found


def _element(key: ConfigKey) -> dict[str, Any]:
    """The schema of the values of a map from signals."""
    return _of(key._replace(optional=False, default=None), typing.get_args(key.type)[1])


def _section(key: ConfigKey, section: type) -> dict[str, Any]:
    parts = keys.config_keys(section)
    if isinstance(key.default, section):
        parts = tuple(part._replace(default=getattr(key.default, part.field), required=False) for part in parts)
    properties = _properties(parts) | (_overrides() if section is Profile else {})
    found = {"type": ["object", "null"], "additionalProperties": False, "properties": properties}
    required = [part.name for part in parts if part.required]
    return found | ({"required": required} if required else {})


def _overrides() -> dict[str, Any]:
    """What a profile overrides. The descriptions are those of the keys at the left margin."""
    return {key.name: _undescribed(_of(key, key.type)) for key in keys.profile_keys()}


def _undescribed(schema: dict[str, Any]) -> dict[str, Any]:
    """Without descriptions, defaults and required keys: the rest of a section is that of the file."""
    found = {word: value for word, value in schema.items() if word not in ("description", "default", "required")}
    if "properties" in found:
        found["properties"] = {name: _undescribed(value) for name, value in found["properties"].items()}
    for word in ("items", "additionalProperties"):
        if isinstance(found.get(word), dict):
            found[word] = _undescribed(found[word])
    if "anyOf" in found:
        found["anyOf"] = [_undescribed(each) for each in found["anyOf"]]
    return found


def _list(key: ConfigKey, element: Any) -> dict[str, Any]:
    items = _section(key, element) if keys.is_section(element) else _scalar(key, element)
    found = {"type": "array", "uniqueItems": Mark.MAY_REPEAT not in key.bounds, "items": items}
    if Mark.NOT_EMPTY in key.bounds:
        found["minItems"] = 1
    if element is RankingKey:
        return _default(key) | {"anyOf": [{"const": "kubelet"}, found]}
    return _default(key) | found


def _scalar(key: ConfigKey, type_: Any) -> dict[str, Any]:
    words, shape, bounds = key.bound(OneOf), key.bound(Shape), key.bound(Range)
    if type_ is Amount:
        return {"type": "string", "pattern": _THRESHOLD if key.bound(AmountRule) is AmountRule.THRESHOLD else _AMOUNT}
    if key.duration:
        return {"type": "string", "pattern": _DURATION}
    if isinstance(type_, type) and issubclass(type_, enum.StrEnum):
        return {"enum": [str(word) for word in type_]}
    if words is not None:
        return {"enum": list(words.words)}
    if type_ is bool:
        return {"type": "boolean"}
    if type_ in (int, float):
        integer = type_ is int or Mark.WHOLE_SECONDS in key.bounds
        limits = {} if bounds is None else {"minimum": bounds.minimum, "maximum": bounds.maximum}
        return {"type": "integer" if integer else "number", **limits}
    return {"type": "string"} | ({} if shape is None else {"pattern": f"^({shape.pattern})$"})


def _default(key: ConfigKey) -> dict[str, Any]:
    """The default in the form of the file; empty for a key without a default."""
    if key.default is None or isinstance(key.default, Mapping):
        return {}
    return {"default": show.plain_value(key, key.default)}


if __name__ == "__main__":
    sys.stdout.write(text())
