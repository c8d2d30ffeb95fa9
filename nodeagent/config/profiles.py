"""Profiles: overrides of the configuration for the nodes with certain labels, so that one file serves all pools.

Promises:

1. A profile changes what it names and nothing else: maps are merged key by key, lists and single values are replaced.
2. Of two profiles that set the same key, the later one in the file wins, on every node and after every restart.
3. Every set of profiles that can match one node together is known (`combinations`), so that all of them are validated
   when the file is loaded.

Theory of operation. The YAML trees of the file and of the profiles that match are merged and decoded as one file. Each
node of the tree keeps its line and the name of its profile, so that errors and origins name them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from nodeagent.config import keys
from nodeagent.config.yaml_nodes import YamlNode

KEY: Final = "profiles"
MAX_PROFILES: Final = 32
"""Clusters have a few pools. Validating one profile takes about 2 ms of the loop at a reload."""
MAX_COMBINATIONS: Final = 32
"""Sets of two and more profiles that match one node together."""
MAX_DECODED: Final = 1 << 20
"""Size of the file (`YamlNode.size`) times the sets of profiles that are validated with it: a second of CPU. A file of
4 KiB with 32 profiles has a tenth of it."""


class TooManyError(ValueError):
    """More sets of profiles can match together than are validated."""


class ProfileSource(NamedTuple):
    """One profile as the file has it."""

    place: int
    """Its place in the list, from 0."""
    name: str
    selector: Mapping[str, str]
    """Labels that the node must have, all of them."""
    overrides: YamlNode
    """The map of the keys that it sets."""


def sources(root: YamlNode) -> tuple[ProfileSource, ...]:
    """The profiles of a file, which need not be valid."""
    found = value_of(root, KEY)
    return tuple(
        _source(place, element)
        for place, element in enumerate(found.elements if found is not None else ())
        if element.tag == "map"
    )


def _source(place: int, element: YamlNode) -> ProfileSource:
    overridable = {key.name for key in keys.profile_keys()}
    name, selector = value_of(element, "name"), value_of(element, "nodeSelector")
    label = name.text if name is not None and name.text else str(place)
    labels = {key.text: value.text for key, value in selector.items} if selector is not None else {}
    overrides = tuple(each for each in element.items if each[0].text in overridable)
    return ProfileSource(place, label, labels, _of_profile(element._replace(items=overrides), label))


def merged(root: YamlNode, overrides: Iterable[ProfileSource]) -> YamlNode:
    """The tree of the file without its profiles, with these overrides in their order."""
    result = root._replace(items=tuple(each for each in root.items if each[0].text != KEY))
    for each in overrides:
        result = _merge(result, each.overrides)
    return result


def matching(profiles: Iterable[ProfileSource], labels: Mapping[str, str]) -> tuple[ProfileSource, ...]:
    """The profiles that match a node with these labels, in the order of the file."""
    return tuple(each for each in profiles if all(labels.get(key) == value for key, value in each.selector.items()))


def combinations(profiles: Sequence[ProfileSource]) -> tuple[tuple[ProfileSource, ...], ...]:
    """Each set of two or more profiles that is the whole of what matches some node. Raises TooManyError if there are
    more than `MAX_COMBINATIONS`."""
    found: dict[tuple[int, ...], tuple[ProfileSource, ...]] = {}
    open_labels: list[Mapping[str, str]] = [each.selector for each in profiles]
    while open_labels:
        labels = open_labels.pop()
        matched = matching(profiles, labels)
        places = tuple(each.place for each in matched)
        if places in found:
            continue
        found[places] = matched
        if sum(len(each) > 1 for each in found) > MAX_COMBINATIONS:
            raise TooManyError
        # Labels that one more profile needs as well, unless they contradict each other.
        open_labels += [
            {**labels, **each.selector}
            for each in profiles
            if each not in matched and all(labels.get(key, value) == value for key, value in each.selector.items())
        ]
    return tuple(each for places, each in sorted(found.items()) if len(places) > 1)


def value_of(root: YamlNode, name: str) -> YamlNode | None:
    """The value of this key in a map; None without the key."""
    return next((value for key, value in root.items if key.text == name), None)


def _of_profile(node: YamlNode, name: str) -> YamlNode:
    """The tree with the profile's name at each node."""
    return node._replace(
        profile=name,
        items=tuple((_of_profile(key, name), _of_profile(value, name)) for key, value in node.items),
        elements=tuple(_of_profile(each, name) for each in node.elements),
    )


def _merge(base: YamlNode, over: YamlNode) -> YamlNode:
    """Promise 1. A key without a value (`null`) in `over` changes nothing."""
    if base.tag != "map" or over.tag != "map":
        return over
    above: dict[str, tuple[YamlNode, YamlNode]] = {}
    repeated = []
    for key, value in over.items:
        if key.text in above:
            repeated.append((key, value))  # an error, which the decoder reports
        elif value.tag != "null":
            above[key.text] = (key, value)
    items = []
    for key, value in base.items:
        replaced = above.pop(key.text, None)
        items.append((key, value) if replaced is None else (replaced[0], _merge(value, replaced[1])))
    return base._replace(items=(*items, *above.values(), *repeated))
