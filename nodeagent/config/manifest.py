"""Kubernetes objects where a configuration is expected: what they are, and the configurations that ConfigMaps hold."""

import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nodeagent.config.decode import quoted
from nodeagent.config.problems import ConfigError, Origin, Problem
from nodeagent.config.schema import API_VERSION, KIND
from nodeagent.config.yaml_nodes import YamlNode

HEADER = f"`apiVersion: {API_VERSION}` and `kind: {KIND}`"
MAX_HELD = 100
"""A file for each node of a large cluster is several files. Each is read with the lines above it."""
_KUBELETS = "KubeletConfiguration"
_NO_OBJECTS = (_KUBELETS, "Config")
"""Files of other programs (the kubelet's, a kubeconfig): who has one judged has mistaken it."""
_GROUP = API_VERSION.partition("/")[0]
_MEANT = re.compile(rf"{KIND}|apiVersion\W+{re.escape(_GROUP)}/")
"""Text that is meant as a configuration of ours, even where the kind is misspelt."""


class EmbeddedConfig(NamedTuple):
    """A configuration that a ConfigMap holds."""

    place: str
    """`ConfigMap nodeagent, data.config.yaml`."""
    origin: Origin
    """Of the key's value."""
    text: str
    in_place: bool
    """`text` has the lines and columns of the file. False: it stands there otherwise, in quotes for example."""

    def of_file(self, problem: Problem) -> Problem:
        """The problem, found in `text`, as one of the file."""
        if self.in_place:
            key = f"{self.place}: {problem.key}" if problem.key else self.place
            return problem._replace(key=key)
        line = f" line {problem.origin.line}" if problem.origin.line is not None else ""
        key = f": {problem.key}" if problem.key else ""
        return problem._replace(origin=self.origin, key=f"{self.place}{line}{key}")


def embedded_configs(roots: Sequence[YamlNode], data: bytes, *, name: str) -> tuple[EmbeddedConfig, ...]:
    """The configurations in the ConfigMaps of a file whose documents are `roots`."""
    lines = data.decode("utf-8-sig").replace("\r\n", "\n").split("\n")
    found: list[EmbeddedConfig] = []
    for thing in _objects(roots):
        if _word(thing, "kind") != "ConfigMap":
            continue
        owner = f"ConfigMap {quoted(_word(_field(thing, 'metadata'), 'name'), quote='')}".rstrip()
        for key, value in _field(thing, "data").items:
            if value.tag == "str" and _MEANT.search(value.text):
                there = "\n".join(lines[value.line : value.line + len(value.text.splitlines())]) + "\n"
                verbatim = textwrap.dedent(there).rstrip() == textwrap.dedent(value.text).rstrip()
                text = "\n" * value.line + there if verbatim else value.text
                place = f"{owner}, data.{quoted(key.text, quote='')}"
                if len(found) == MAX_HELD:
                    message = f"more than {MAX_HELD} configurations in one file"
                    raise ConfigError((Problem(Origin(name, value.line, value.column), place, message, "split it"),))
                found.append(EmbeddedConfig(place, Origin(name, value.line, value.column), text, verbatim))
    return tuple(found)


def refusal(roots: Sequence[YamlNode], data: bytes, *, name: str) -> ConfigError | None:
    """Why these documents cannot be a configuration of ours: they are other objects. None when they seem to be meant as
    one: there is no kind, or it or the apiVersion is ours."""
    strangers = [root for root in roots if _word(root, "kind") and not _ours(root)]
    if not strangers or len(strangers) < len(roots):
        return None
    kind = _field(strangers[0], "kind")
    origin, where = Origin(name, kind.line, kind.column), "kind"
    what = (
        f"these are {len(roots)} Kubernetes objects" if len(roots) > 1 else f"this is a {quoted(kind.text, quote='')}"
    )
    message, mend = f"{what}, not nodeagent's configuration", f"name a file that begins with {HEADER}"
    if kind.text == _KUBELETS:
        message = "this is a kubelet's configuration, not nodeagent's"
        mend = f"copy its eviction... keys, as they are, into a file that begins with {HEADER}"
    if inside := embedded_configs(roots, data, name=name):
        origin, where = inside[0].origin, inside[0].place
        message = f"{what}; only this key is nodeagent's configuration"
        mend = "`nodeagent config validate` reads it where it is; to use it, copy it into a file of its own"
    return ConfigError((Problem(origin, where, message, mend),))


def describe(roots: Sequence[YamlNode]) -> str:
    """What these documents are, when they are Kubernetes objects or patches of some and none is meant as a
    configuration of ours: there is nothing to be judged. Empty when they are anything else."""
    kinds = [_kind_of(root) for root in roots]
    if not kinds or not all(kinds):
        return ""
    names = ", ".join(dict.fromkeys(kinds))
    what = f"a {names}" if len(kinds) == 1 else f"{len(kinds)} Kubernetes objects ({names})"
    return f"{what}, without a configuration of nodeagent"


def _kind_of(root: YamlNode) -> str:
    """The kind of an object that is not ours, or that this is a patch; empty for anything else."""
    if root.tag == "seq" and root.elements:
        patch = all(_word(each, "op") and _word(each, "path") for each in root.elements)
        return "JSON patch" if patch else ""
    kind = _word(root, "kind")
    stranger = _word(root, "apiVersion") and not _ours(root) and _GROUP.partition(".")[0] not in kind.lower()
    return quoted(kind, quote="") if stranger and kind not in _NO_OBJECTS else ""


def _ours(root: YamlNode) -> bool:
    return _word(root, "kind") == KIND or _word(root, "apiVersion").startswith(_GROUP)


def _objects(roots: Sequence[YamlNode]) -> Iterator[YamlNode]:
    """The objects in these documents and in their Lists, which may hold Lists."""
    for root in roots:
        yield root
        yield from _objects(_field(root, "items").elements)


_NOTHING = YamlNode("null", "", 1, 1)


def _field(node: YamlNode, name: str) -> YamlNode:
    return next((value for key, value in node.items if key.text == name), _NOTHING)


def _word(node: YamlNode, name: str) -> str:
    return _field(node, name).text
