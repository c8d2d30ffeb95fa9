"""List the keys of the file with their names, types and bounds, as the classes in `schema.py` define them.

The loader, `config show`, the JSON Schema and the reference page all read this list, so that they always agree.
"""

import functools
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, NamedTuple

from nodeagent.config.bounds import Mark
from nodeagent.config.schema import Config, EvictionConfig
from nodeagent.model import Amount


class ConfigKey(NamedTuple):
    """One key of a section."""

    name: str
    """As in the file: camelCase, without unit."""
    field: str
    owner: type
    """The class whose field it is."""
    type: Any
    """Annotation without `Annotated` and without `None`."""
    bounds: tuple[Any, ...]
    """The metadata of `Annotated`."""
    default: Any
    required: bool
    optional: bool
    """May be None, which is a key without a value in the file."""
    duration: bool
    """The value is a Go duration in the file and seconds in the field."""

    def bound(self, kind: Any) -> Any:
        """The bound of this class; None if the key has none."""
        return next((bound for bound in self.bounds if isinstance(bound, kind)), None)


def config_keys(section: type) -> tuple[ConfigKey, ...]:
    """The keys of a section in the order of the documentation."""
    return _config_keys(section)


@functools.cache
def _config_keys(section: type) -> tuple[ConfigKey, ...]:
    hints: dict[str, Any] = section.__annotations__
    return tuple(
        key
        for field, annotation in hints.items()
        if Mark.DERIVED not in (key := _key(section, field, annotation)).bounds
    )


@functools.cache
def top_level() -> tuple[ConfigKey, ...]:
    """The keys of the file itself, without apiVersion and kind."""
    settings = config_keys(Config)
    first = next(index for index, key in enumerate(settings) if key.field == "node_name") + 1
    return (*settings[:first], *config_keys(EvictionConfig), *settings[first:])


SAME_ON_ALL_NODES: Final = frozenset(
    {"nodeName", "fleet", "metrics", "cluster", "logging", "recorder", "stateDir", "profiles"}
)
"""What no profile overrides: it is read before the labels are known, belongs to the agent's pod, or is an agreement
between the nodes."""


@functools.cache
def profile_keys() -> tuple[ConfigKey, ...]:
    """The keys that a profile may override."""
    return tuple(key for key in top_level() if key.name not in SAME_ON_ALL_NODES)


NEEDS_RESTART: Final = ("nodeName", "stateDir", "logging", "recorder")
"""What lasts as long as the process: a change is logged and takes effect at the next start."""


def restart_keys() -> tuple[ConfigKey, ...]:
    """The keys of `NEEDS_RESTART`."""
    return tuple(key for key in config_keys(Config) if key.name in NEEDS_RESTART)


def is_section(type_: Any) -> bool:
    """True if the value is a map with keys of its own."""
    return isinstance(type_, type) and hasattr(type_, "_fields") and type_ is not Amount


def sections() -> Iterator[tuple[str, tuple[ConfigKey, ...]]]:
    """The path of every section and its keys, first the file itself; `*` means any signal."""
    return _sections_of(top_level(), "")


def _sections_of(own: tuple[ConfigKey, ...], path: str) -> Iterator[tuple[str, tuple[ConfigKey, ...]]]:
    yield path, own
    for key in own:
        here = f"{path}.{key.name}" if path else key.name
        if typing.get_origin(key.type) is Mapping:
            here += ".*"
        for type_ in (key.type, *typing.get_args(key.type)):
            if is_section(type_):
                yield from _sections_of(config_keys(type_), here)


_SECONDS: Final = "_s"


def _key(section: type, field: str, annotation: Any) -> ConfigKey:
    bounds: tuple[Any, ...] = ()
    if typing.get_origin(annotation) is Annotated:
        bounds, annotation = annotation.__metadata__, annotation.__origin__
    optional = isinstance(annotation, types.UnionType)
    if optional:
        annotation = next(member for member in typing.get_args(annotation) if member is not types.NoneType)
    defaults: dict[str, Any] = section._field_defaults  # type: ignore[attr-defined]
    seconds = field.endswith(_SECONDS)
    return ConfigKey(
        name=_camel(field.removesuffix(_SECONDS)),
        field=field,
        owner=section,
        type=annotation,
        bounds=bounds,
        default=defaults.get(field),
        required=field not in defaults,
        optional=optional,
        duration=(seconds and Mark.WHOLE_SECONDS not in bounds) or field == "eviction_soft_grace_period",
    )


def _camel(field: str) -> str:
    first, *rest = field.split("_")
    return first + "".join(word.capitalize() for word in rest)
