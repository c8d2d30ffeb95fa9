"""Recognise Kubernetes objects in place of a configuration, and find the configurations in their ConfigMaps."""

import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nodeagent.config import decode
from nodeagent.config.problems import ConfigError, Origin, Problem
from nodeagent.config.schema import API_VERSION, CONFIG_KIND
from nodeagent.config.yaml_nodes import YamlNode

HEADER = f"`apiVersion: {API_VERSION}` and `kind: {CONFIG_KIND}`"
MAX_EMBEDDED = 100
"""Limits the work: each embedded configuration is parsed with as many empty lines as stand above it."""
_KUBELET_KIND = "KubeletConfiguration"
_OTHER_FILES = (_KUBELET_KIND, "Config")
"""Kinds of other programs' files (the kubelet's, a kubeconfig). To validate one is a mistake of the user."""
_GROUP = API_VERSION.partition("/")[0]
_MEANT = re.compile(rf"{CONFIG_KIND}|apiVersion\W+{re.escape(_GROUP)}/")
"""Text that is meant as a configuration of nodeagent, even if its kind is misspelt."""


class EmbeddedConfig(NamedTuple):
    """A configuration in a ConfigMap."""

    place: str
    """`ConfigMap nodeagent, data.config.yaml`."""
    origin: Origin
    """Of the key's value."""
    text: str
    in_place: bool
    """True if `text` has the lines and columns of the file. False: the file writes it in another form, as in quotes."""

    def of_file(self, problem: Problem) -> Problem:
        """The problem in `text` as a problem of the file."""
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
    for item in _objects(roots):
        if _word(item, "kind") != "ConfigMap":
            continue
        owner = f"ConfigMap {decode.quoted(_word(_field(item, 'metadata'), 'name'), quote='')}".rstrip()
        for key, value in _field(item, "data").items:
            if value.tag == "str" and _MEANT.search(value.text):
                source = "\n".join(lines[value.line : value.line + len(value.text.splitlines())]) + "\n"
                verbatim = textwrap.dedent(source).rstrip() == textwrap.dedent(value.text).rstrip()
                text = "\n" * value.line + source if verbatim else value.text
                place = f"{owner}, data.{decode.quoted(key.text, quote='')}"
                if len(found) == MAX_EMBEDDED:
                    message = f"more than {MAX_EMBEDDED} configurations in one file"
                    raise ConfigError((Problem(Origin(name, value.line, value.column), place, message, "split it"),))
                found.append(EmbeddedConfig(place, Origin(name, value.line, value.column), text, verbatim))
    return tuple(found)


def not_a_config(roots: Sequence[YamlNode], data: bytes, *, name: str) -> ConfigError | None:
    """The error if these documents are other objects. None if they are meant as a configuration of nodeagent: they have
    no kind, or its kind or apiVersion."""
    foreign = [root for root in roots if _word(root, "kind") and not _is_config(root)]
    if not foreign or len(foreign) < len(roots):
        return None
    kind = _field(foreign[0], "kind")
    origin, where = Origin(name, kind.line, kind.column), "kind"
    what = (
        f"these are {len(roots)} Kubernetes objects"
        if len(roots) > 1
        else f"this is a {decode.quoted(kind.text, quote='')}"
    )
    message, fix = f"{what}, not nodeagent's configuration", f"name a file that begins with {HEADER}"
    if kind.text == _KUBELET_KIND:
        message = "this is a kubelet's configuration, not nodeagent's"
        fix = f"copy its eviction... keys, as they are, into a file that begins with {HEADER}"
    if embedded := embedded_configs(roots, data, name=name):
        origin, where = embedded[0].origin, embedded[0].place
        message = f"{what}; only this key is nodeagent's configuration"
        fix = "`nodeagent config validate` reads it where it is; to use it, copy it into a file of its own"
    return ConfigError((Problem(origin, where, message, fix),))


def describe_objects(roots: Sequence[YamlNode]) -> str:
    """One line about documents that are Kubernetes objects or patches without a configuration of nodeagent. Empty if
    they are anything else."""
    kinds = [_kind_of(root) for root in roots]
    if not kinds or not all(kinds):
        return ""
    names = ", ".join(dict.fromkeys(kinds))
    what = f"a {names}" if len(kinds) == 1 else f"{len(kinds)} Kubernetes objects ({names})"
    return f"{what}, without a configuration of nodeagent"


def _kind_of(root: YamlNode) -> str:
    """The kind of a foreign object, or `JSON patch`; empty for anything else."""
    if root.tag == "seq" and root.elements:
        patch = all(_word(each, "op") and _word(each, "path") for each in root.elements)
        return "JSON patch" if patch else ""
    kind = _word(root, "kind")
    foreign = _word(root, "apiVersion") and not _is_config(root) and _GROUP.partition(".")[0] not in kind.lower()
    return decode.quoted(kind, quote="") if foreign and kind not in _OTHER_FILES else ""


def _is_config(root: YamlNode) -> bool:
    return _word(root, "kind") == CONFIG_KIND or _word(root, "apiVersion").startswith(_GROUP)


def _objects(roots: Sequence[YamlNode]) -> Iterator[YamlNode]:
    """The objects in these documents and in their Lists, which may contain Lists."""
    for root in roots:
        yield root
        yield from _objects(_field(root, "items").elements)


_NOTHING = YamlNode("null", "", 1, 1)


def _field(node: YamlNode, name: str) -> YamlNode:
    return next((value for key, value in node.items if key.text == name), _NOTHING)


def _word(node: YamlNode, name: str) -> str:
    return _field(node, name).text
