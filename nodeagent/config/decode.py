"""Decode the YAML nodes of a file into values of the schema and collect every error.

1. Decoding never stops at the first error.
2. A wrong value stays at its default, so that the remaining values are checked as well.
3. Every value that the file sets has an origin.

`rules.py` checks whether the values fit together.
"""

import enum
import math
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

from nodeagent.config import amount, duration, keys
from nodeagent.config.bounds import AmountRule, MapKey, Mark, OneOf, Range, Shape
from nodeagent.config.keys import ConfigKey
from nodeagent.config.problems import Origin, Problem
from nodeagent.config.schema import Profile, RankingConfig, RankingKey
from nodeagent.config.yaml_nodes import YamlNode
from nodeagent.model import Amount, Signal

MAX_SHOWN: Final = 60
"""Characters of the user's text that a message repeats."""

MAX_SUGGESTIONS: Final = 100
"""Unknown words for which a similar one is searched, at 0.5 ms each. More of them are not typing errors."""

MAX_PATHS: Final = 4
"""Sections that a message lists for a misplaced key: `burst` and `perHour` have four."""

_INVALID: Final = object()
_KUBELET: Final = "kubelet"
_INTEGER: Final = re.compile(r"[-+]?[0-9]+", re.ASCII)
_NUMBER: Final = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?", re.ASCII)
_KINDS: Final = {
    "map": "a map",
    "seq": "a list",
    "null": "nothing",
    "str": "text",
    "int": "a number",
    "float": "a number",
}


class Reader:
    """The problems and origins of one file."""

    __slots__ = ("_suggested", "file", "origins", "problems")

    def __init__(self, file: str) -> None:
        self.file = file
        self.problems: list[Problem] = []
        self.origins: dict[str, Origin] = {}
        self._suggested = 0

    def origin(self, node: YamlNode) -> Origin:
        return Origin(self.file, node.line, node.column, node.profile)

    def add_problem(self, node: YamlNode, path: str, message: str, fix: str = "") -> None:
        self.problems.append(Problem(self.origin(node), path, message, fix))

    def suggest(self, word: str, known: list[str]) -> str:
        """A fix for an unknown word; none after `MAX_SUGGESTIONS`."""
        self._suggested += 1
        return suggest_fix(word, known) if self._suggested <= MAX_SUGGESTIONS else ""


def read_keys(
    reader: Reader,
    node: YamlNode,
    path: str,
    section_keys: Iterable[ConfigKey],
    *,
    read_elsewhere: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Field -> value for each key with a valid value in the map. Other code reads the keys in `read_elsewhere`."""
    by_name = {key.name: key for key in section_keys}
    values: dict[str, Any] = {}
    present: set[str] = set()
    for name, key_node, value in map_entries(reader, node, path):
        here = join_path(path, name)
        key = by_name.get(name)
        present.add(name)
        if key is not None:
            found = _read(reader, value, here, key, key.type)
            if found is not _INVALID:
                values[key.field] = found
        elif name not in read_elsewhere:
            if read_elsewhere and name in keys.SAME_ON_ALL_NODES:
                message, fix = "must be the same on all nodes", "set it at the left margin"
                reader.add_problem(key_node, join_path(path, name), message, fix)
                continue
            fix = _misplaced(name) or reader.suggest(name, [*by_name, *read_elsewhere])
            reader.add_problem(key_node, join_path(path, quoted(name, quote="")), "unknown key", fix)
    for key in by_name.values():
        if key.required and key.name not in present:
            reader.add_problem(node, join_path(path, key.name), "is missing", f"add `{key.name}:`")
    return values


def map_entries(reader: Reader, node: YamlNode, path: str) -> Iterator[tuple[str, YamlNode, YamlNode]]:
    """The map's entries, each name once. A repeated name or a key that is not a name becomes a problem."""
    first: dict[str, YamlNode] = {}
    for key, value in node.items:
        if key.tag in ("map", "seq"):
            reader.add_problem(key, path, "a key that is not a name", "keys are plain words")
        elif key.tag == "merge":
            reader.add_problem(key, path, "merge keys (<<) are not supported", "write the keys out")
        elif key.text in first:
            line = first[key.text].line
            reader.add_problem(
                key, join_path(path, quoted(key.text, quote="")), f"is set already in line {line}", "keep one"
            )
        else:
            first[key.text] = key
            yield key.text, key, value


def join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def quoted(text: str, *, quote: str = '"') -> str:
    """The text of the file in quotes, shortened and printable."""
    printable = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text[:MAX_SHOWN])
    return f"{quote}{printable}{'...' if len(text) > MAX_SHOWN else ''}{quote}"


def _misplaced(name: str) -> str:
    """A fix for a key that exists in another section, which wrong indentation causes. Empty: no section has it."""
    if name in list(Signal):
        return "signals belong below evictionHard, evictionSoft or another map of signals: indent it by two more spaces"
    paths = _section_paths().get(name)
    if not paths:
        return ""
    below = "below " + ", ".join(f"`{path}`" for path in paths[:MAX_PATHS])
    return f"it belongs {'at the left margin' if '' in paths else below}: check the indentation"


@lru_cache(maxsize=1)
def _section_paths() -> Mapping[str, tuple[str, ...]]:
    """Name of a key -> the paths of the sections that have it."""
    paths: dict[str, tuple[str, ...]] = {}
    for path, section_keys in keys.sections():
        for key in section_keys:
            paths[key.name] = (*paths.get(key.name, ()), path)
    return paths


def suggest_fix(word: str, known: list[str]) -> str:
    """A fix for an unknown word."""
    import difflib

    by_folded = {name.casefold(): name for name in known}
    folded = word.replace("_", "").replace("-", "").casefold()
    near = difflib.get_close_matches(folded[:MAX_SHOWN], list(by_folded), n=1, cutoff=0.6)
    if near:
        return f"did you mean `{by_folded[near[0]]}`?"
    return f"known: {', '.join(known)}"


def _read(reader: Reader, node: YamlNode, path: str, key: ConfigKey, type_: Any) -> Any:
    """The value, or _INVALID after a problem was added."""
    if (
        node.tag == "null"
        and not key.required
        and (keys.is_section(type_) or typing.get_origin(type_) is Mapping or key.optional)
    ):
        return _INVALID  # `evictionSoft:` without a value counts as absent, as in the kubelet
    if keys.is_section(type_):
        return _read_section(reader, node, path, type_, base=key.default if isinstance(key.default, type_) else None)
    origin: Any = typing.get_origin(type_)
    if origin is Mapping:
        return _read_map(reader, node, path, key, typing.get_args(type_)[1])
    if origin is tuple:
        return _read_list(reader, node, path, key, typing.get_args(type_)[0])
    reader.origins[path] = reader.origin(node)
    if node.tag in ("map", "seq", "null"):
        reader.add_problem(node, path, f"is {_KINDS[node.tag]}", f"must be {describe_type(key, type_)}")
        return _INVALID
    try:
        return _scalar(node, key, type_)
    except ValueError as error:
        reader.add_problem(node, path, f"{quoted(node.text)}: {error}", _fix(key, type_))
        return _INVALID


def _read_section(reader: Reader, node: YamlNode, path: str, section: Any, *, base: Any) -> Any:
    """The section. Keys that the file leaves out are those of `base`; if it is None, the schema's defaults."""
    section_keys = keys.config_keys(section)
    if node.tag != "map":
        names = ", ".join(key.name for key in section_keys)
        reader.add_problem(node, path, f"is {_KINDS.get(node.tag, node.tag)}", f"must be a map of {names}")
        return _INVALID
    reader.origins[path] = reader.origin(node)
    if base is not None:
        section_keys = tuple(key._replace(required=False) for key in section_keys)
    overrides = tuple(key.name for key in keys.profile_keys()) if section is Profile else ()
    values = read_keys(reader, node, path, section_keys, read_elsewhere=overrides)
    if any(key.required and key.field not in values for key in section_keys):
        return _INVALID
    if section is RankingConfig and values.get("order") == _KUBELET:
        return RankingConfig(kubelet=True)
    return section(**values) if base is None else base._replace(**values)


def _read_map(reader: Reader, node: YamlNode, path: str, key: ConfigKey, value_type: Any) -> Any:
    """A map whose keys are eviction signals, or names of the form that the key's `MapKey` states."""
    names: MapKey | None = key.bound(MapKey)
    if node.tag != "map":
        example = "200Mi" if value_type is Amount else "30s" if key.duration else "..."
        fix = f"must be a map of eviction signals, a line each: `{Signal.MEMORY}: {example}`"
        if names is not None:
            fix = f"must be a map, a line for each {names.what}"
        reader.add_problem(node, path, f"is {_KINDS.get(node.tag, node.tag)}", fix)
        return _INVALID
    known = [str(signal) for signal in Signal]
    values: dict[Any, Any] = {}
    for name, key_node, value in map_entries(reader, node, path):
        here = join_path(path, name)
        if names is None and name not in known:
            reader.add_problem(
                key_node, join_path(path, quoted(name, quote="")), "unknown signal", reader.suggest(name, known)
            )
            continue
        if names is not None and not re.fullmatch(names.pattern, name):
            message = f"must be {names.description}"
            reader.add_problem(key_node, join_path(path, quoted(name, quote="")), message)
            continue
        found = _read(reader, value, here, key, value_type)
        if found is not _INVALID:
            values[Signal(name) if names is None else name] = found
    if not node.items and names is not None and Mark.NOT_EMPTY in key.bounds:
        reader.add_problem(node, path, "is empty", f"must have at least one {names.what}")
        return _INVALID
    reader.origins.setdefault(path, reader.origin(node))
    return values


def _read_list(reader: Reader, node: YamlNode, path: str, key: ConfigKey, element: Any) -> Any:
    reader.origins[path] = reader.origin(node)
    if element is RankingKey and node.tag == "str" and node.text == _KUBELET:
        return _KUBELET
    if node.tag != "seq":
        fix = f"must be a list of {describe_type(key, element)}"
        if element is RankingKey:
            fix += f", or the word {_KUBELET}"
        reader.add_problem(node, path, f"is {_KINDS.get(node.tag, node.tag)}", fix)
        return _INVALID
    found = [
        (child, _read(reader, child, f"{path}[{index}]", key, element)) for index, child in enumerate(node.elements)
    ]
    once = Mark.MAY_REPEAT not in key.bounds
    earlier: set[Any] = set()
    for index, (child, value) in enumerate(found):
        if not keys.is_section(element):
            reader.origins.pop(f"{path}[{index}]", None)
        if once and value is not _INVALID and value in earlier:
            reader.add_problem(child, f"{path}[{index}]", f"{quoted(child.text)} is in the list already", "keep one")
        if once:
            earlier.add(value)
    if not found and Mark.NOT_EMPTY in key.bounds:
        reader.add_problem(node, path, "is empty", f"must have at least one {describe_type(key, element)}")
    if any(value is _INVALID for _, value in found):
        return _INVALID
    return tuple(value for _, value in found)


def _scalar(node: YamlNode, key: ConfigKey, type_: Any) -> Any:
    """Raises ValueError with what is wrong."""
    if type_ is Amount:
        rule = key.bound(AmountRule)
        text = _text(node)
        return amount.parse_threshold(text) if rule is AmountRule.THRESHOLD else amount.parse_amount(text, rule=rule)
    if key.duration:
        return _within(duration.parse_duration(_text(node)), key)
    if isinstance(type_, type) and issubclass(type_, enum.StrEnum):
        return type_(_word(node, [str(word) for word in type_]))
    if type_ is bool:
        return _boolean(node)
    if type_ in (int, float):
        number = _number(node, integer=type_ is int or Mark.WHOLE_SECONDS in key.bounds)
        return type_(_within(number, key))
    words = key.bound(OneOf)
    if words is not None:
        return _word(node, list(words.words))
    text = _text(node)
    shape = key.bound(Shape)
    if shape is not None and not re.fullmatch(shape.pattern, text):
        raise ValueError(f"must be {shape.description}")
    return text


def _text(node: YamlNode) -> str:
    if node.tag != "str":
        raise ValueError(f"YAML reads this as {_KINDS.get(node.tag, node.tag)}, it must be text in quotes")
    return node.text


def _word(node: YamlNode, words: list[str]) -> str:
    if node.text not in words:
        raise ValueError(f"must be one of {', '.join(words)}" if len(words) > 1 else f"must be {words[0]}")
    return node.text


def _boolean(node: YamlNode) -> bool:
    if node.tag != "bool":
        raise ValueError("must be true or false")
    return node.text.lower() in ("true", "yes", "on")


def _number(node: YamlNode, *, integer: bool) -> float:
    """Accept plain decimal numbers only. YAML reads 010 as 8 and 1:30 as 90, which the author rarely means."""
    if node.tag not in ("int", "float") or len(node.text) > MAX_SHOWN:
        raise ValueError("must be a number, without quotes")
    if not _NUMBER.fullmatch(node.text):
        raise ValueError("must be a plain decimal number")
    if integer and not _INTEGER.fullmatch(node.text):
        raise ValueError("must be a whole number")
    if len(node.text.lstrip("+-")) > 1 and re.match(r"[-+]?0[0-9]", node.text):
        raise ValueError("must not begin with 0, which YAML reads as octal")
    number = float(node.text)
    if not math.isfinite(number):
        raise ValueError("is too large")
    return number


def _within(number: float, key: ConfigKey) -> float:
    bounds: Range | None = key.bound(Range)
    if bounds is None or bounds.minimum <= number <= bounds.maximum:
        return number
    if key.duration:
        low, high = duration.format_duration(bounds.minimum), duration.format_duration(bounds.maximum)
    else:
        low, high = f"{bounds.minimum:.10g}", f"{bounds.maximum:.10g}"
    raise ValueError(f"must be from {low} to {high}")


def describe_type(key: ConfigKey, type_: Any) -> str:
    """The valid values of a scalar or an element, in words."""
    if keys.is_section(type_):
        return "a map"
    if type_ is Amount:
        return "a quantity such as 200Mi or a percentage such as 12%"
    if key.duration:
        return "a duration such as 1m30s"
    if isinstance(type_, type) and issubclass(type_, enum.StrEnum):
        return " | ".join(type_)
    words = key.bound(OneOf)
    if words is not None:
        return " | ".join(words.words)
    shape = key.bound(Shape)
    if shape is not None:
        return str(shape.description)
    if Mark.WHOLE_SECONDS in key.bounds:
        return "a whole number of seconds"
    return {bool: "true or false", int: "a whole number", float: "a number"}.get(type_, "text")


def _fix(key: ConfigKey, type_: Any) -> str:
    if type_ is Amount:
        return "write a quantity such as 200Mi or a percentage such as 12%"
    if key.duration:
        return "write a duration such as 30s, 5m or 1h30m"
    return ""
