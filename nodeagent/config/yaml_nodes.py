"""Parse YAML text into a tree of nodes with line and column.

Theory of operation. This module builds the tree from the parser's *events* (libyaml's if PyYAML has it), not with
PyYAML's composer. The composer recurses in C, so that a file of brackets would crash the process. The constructor after
it drops one of two equal keys and converts dates to objects. Here nesting is limited in advance, every key is kept, and
a scalar stays text with its YAML tag. Aliases are shared nodes, never copies.
"""

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import yaml

from nodeagent.config.problems import ConfigError, Origin, Problem

MAX_CONFIG_BYTES: Final = 256 * 1024
"""Ten times the largest useful file and a quarter of the size of a ConfigMap; parsing it takes 0.3 s."""

MAX_YAML_DEPTH: Final = 16
"""The schema needs 4; the kubelet's own files 6."""

MAX_EXPANDED: Final = 4 * MAX_CONFIG_BYTES
"""Characters and values of a file with every alias expanded. Aliases of aliases can expand ten lines to a billion
values; without them no file exceeds MAX_CONFIG_BYTES."""

_WRONG_FILE: Final = "is it the right file?"
_TOO_DEEP: Final = f"nested deeper than {MAX_YAML_DEPTH} levels"

_Loader: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_RESOLVER: Final[Any] = yaml.resolver.Resolver()
_PREFIX: Final = "tag:yaml.org,2002:"


class YamlNode(NamedTuple):
    """One value of the file."""

    tag: str
    """`map`, `seq`, `str`, `int`, `float`, `bool`, `null`, or another tag that YAML gives the text."""
    text: str
    """The scalar as written; empty for maps and sequences."""
    line: int
    column: int
    items: tuple[tuple["YamlNode", "YamlNode"], ...] = ()
    """Keys and values of a map, all of them, in the file's order."""
    elements: tuple["YamlNode", ...] = ()
    """Elements of a sequence."""
    size: int = 1
    """The value with all its contents, in the unit of MAX_EXPANDED."""
    profile: str = ""
    """The profile that sets it (`config.profiles`); empty outside of profiles."""


class SeveralDocumentsError(ConfigError):
    """There is more than one document where one is expected."""


class _Open:
    """A map or sequence whose end event has not been read."""

    __slots__ = ("anchor", "children", "column", "line", "size", "tag")

    def __init__(self, tag: str, event: Any) -> None:
        self.tag = tag
        self.anchor: str | None = event.anchor
        self.line = event.start_mark.line + 1
        self.column = event.start_mark.column + 1
        self.children: list[YamlNode] = []
        self.size = 1

    def add(self, node: YamlNode) -> None:
        self.children.append(node)
        self.size += node.size

    def close(self) -> YamlNode:
        children = self.children
        if self.tag == "map":
            pairs = tuple(zip(children[::2], children[1::2], strict=True))
            return YamlNode("map", "", self.line, self.column, items=pairs, size=self.size)
        return YamlNode("seq", "", self.line, self.column, elements=tuple(children), size=self.size)


def parse(data: bytes, *, name: str) -> YamlNode:
    """The root of the only document in `data`. Raises SeveralDocumentsError if there are more, and ConfigError if the
    text is not valid."""
    return _roots(data, name=name, most=1)[0]


def parse_all(data: bytes, *, name: str) -> tuple[YamlNode, ...]:
    """The roots of all documents that are not empty. Raises ConfigError if there is none or the text is not valid."""
    return _roots(data, name=name)


def _roots(data: bytes, *, name: str, most: int | None = None) -> tuple[YamlNode, ...]:
    if len(data) > MAX_CONFIG_BYTES:
        raise _fail(name, f"the file is larger than {MAX_CONFIG_BYTES // 1024} KiB", _WRONG_FILE)
    text = _decode(data, name=name)
    try:
        roots = tuple([root for root in _build(_events(text), name=name, most=most) if root.tag != "null"])
    except yaml.MarkedYAMLError as error:
        raise _syntax(error, text, name=name) from error
    except yaml.YAMLError as error:
        raise _unprintable(error, text, name=name) from error
    if not roots:
        raise _fail(name, "the file is empty", "it needs at least apiVersion and kind")
    return roots


def _decode(data: bytes, *, name: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        fix = f"save the file as UTF-8; {_WRONG_FILE}"
        raise _fail(name, "not UTF-8 text", fix, line=line, column=column) from error


def _events(text: str) -> Iterable[Any]:
    return yaml.parse(text, Loader=_Loader)


def _build(events: Iterable[Any], *, name: str, most: int | None) -> list[YamlNode]:
    """The roots of the documents."""
    roots: list[YamlNode] = []
    stack: list[_Open] = []
    anchors: dict[str, YamlNode] = {}
    documents = 0
    for event in events:
        node: YamlNode | None = None
        mark, anchor = event.start_mark, getattr(event, "anchor", None)
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            anchors = {}
            if most is not None and documents > most:
                several = _at(event, name, "more than one document", "keep one and remove the '---' between them")
                raise SeveralDocumentsError(several.problems)
        elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            stack.append(_Open("map" if isinstance(event, yaml.MappingStartEvent) else "seq", event))
            if len(stack) > MAX_YAML_DEPTH:
                raise _at(event, name, _TOO_DEEP, _WRONG_FILE)
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            opened = stack.pop()
            node = opened.close()
            if opened.anchor is not None:
                anchors[opened.anchor] = node
        elif isinstance(event, yaml.ScalarEvent):
            node = YamlNode(_tag(event), event.value, mark.line + 1, mark.column + 1, size=1 + len(event.value))
            if anchor is not None:
                anchors[anchor] = node
        elif isinstance(event, yaml.AliasEvent):
            target = anchors.get(str(anchor))
            if target is None:
                raise _at(event, name, f"*{anchor} refers to nothing before it", "write the value out")
            node = target._replace(line=mark.line + 1, column=mark.column + 1)
        if node is not None:
            if stack:
                stack[-1].add(node)
                if stack[-1].size > MAX_EXPANDED:
                    raise _at(event, name, "too large with its aliases written out", _WRONG_FILE)
            else:
                roots.append(node)
    return roots


def _tag(event: Any) -> str:
    tag = event.tag
    if tag is None or tag == "!":
        plain, quoted = event.implicit
        tag = _RESOLVER.resolve(yaml.ScalarNode, event.value, (plain, quoted and not plain))
    return str(tag).removeprefix(_PREFIX)


def _syntax(error: yaml.MarkedYAMLError, text: str, *, name: str) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark else (None, None)
    lines = text.splitlines()
    at = lines[line - 1] if line is not None and line <= len(lines) else ""
    if "\t" in at[: len(at) - len(at.lstrip())] or "'\\t'" in str(error.problem):
        return _fail(name, "a tab", "YAML is indented with spaces", line=line, column=column)
    if "maximum nesting depth" in str(error.problem):  # libyaml from 0.2.6 on reads that far ahead and stops at 1000
        return _fail(name, _TOO_DEEP, _WRONG_FILE, line=line, column=column)
    message = " ".join(part for part in (error.context, error.problem) if part)
    if "nesting depth" in message:  # libyaml's own limit: since PyYAML 6.0.4 it is met before our first event
        return _fail(name, _TOO_DEEP, _WRONG_FILE, line=line, column=column)
    return _fail(name, f"not YAML: {message}", "check indentation, quotes and brackets", line=line, column=column)


def _unprintable(error: yaml.YAMLError, text: str, *, name: str) -> ConfigError:
    found = yaml.reader.Reader.NON_PRINTABLE.search(text)
    if found is None:
        return _fail(name, f"not YAML: {error}".replace("\n", " "), _WRONG_FILE)
    line, column = text.count("\n", 0, found.start()) + 1, found.start() - text.rfind("\n", 0, found.start())
    message = f"not YAML: the character U+{ord(found.group()):04X}"
    return _fail(name, message, f"remove it; {_WRONG_FILE}", line=line, column=column)


def _at(event: Any, name: str, message: str, fix: str) -> ConfigError:
    mark = event.start_mark
    return _fail(name, message, fix, line=mark.line + 1, column=mark.column + 1)


def _fail(name: str, message: str, fix: str, *, line: int | None = None, column: int | None = None) -> ConfigError:
    return ConfigError((Problem(Origin(name, line, column), "", message, fix),))
