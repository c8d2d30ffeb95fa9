"""Print the effective configuration and its problems, for `nodeagent config show` and `config validate`.

`show` writes YAML with the origin of every value as a comment, for a threshold also the kubelet's above which it is
kept. The loader reads it back to the same configuration.
"""

import enum
import urllib.parse
from collections.abc import Iterable, Mapping
from typing import Any, Final

from nodeagent.config import above_kubelet, duration, keys
from nodeagent.config.keys import ConfigKey
from nodeagent.config.load import LoadedConfig
from nodeagent.config.problems import ConfigError, Problem
from nodeagent.config.schema import API_VERSION, CONFIG_KIND, EvictionConfig, Mode, RankingConfig
from nodeagent.model import Amount, Note, NoteKind, Signal

_COMMENT_COLUMN: Final = 56
LABELS_UNKNOWN: Final = "the labels of the node are not known"
HIDDEN: Final = "(arguments hidden)"
_YAML_WORDS: Final = ("on", "off", "yes", "no", "y", "n", "true", "false", "null")


def show(loaded: LoadedConfig, *, notes: Iterable[Note] = ()) -> str:
    """The effective configuration as YAML: warnings and notes as comments first, then each value with its origin."""
    notes = tuple(notes)
    lines = [f"# warning: {_one_line(str(warning))}" for warning in loaded.warnings]
    lines += [f"# {note.subject}: {_one_line(note.message)}" for note in notes]
    if (profiles := active_profiles(loaded)) is not None and not any(note.kind is NoteKind.PROFILES for note in notes):
        lines.append(f"# profiles: {_one_line(profiles)}")
    lines += [f"apiVersion: {API_VERSION}", f"kind: {CONFIG_KIND}"]
    for key in keys.top_level():
        if key.field == "profiles":  # what applies to the node is in the values
            continue
        owner = loaded.eviction if key.owner is EvictionConfig else loaded.config
        lines += _entry(loaded, key, getattr(owner, key.field), key.name, indent=0, name=key.name)
    return "\n".join(lines) + "\n"


def active_profiles(loaded: LoadedConfig) -> str | None:
    """Which profiles apply to the node; None for a file without profiles."""
    if loaded.profiles is None:
        return None
    if loaded.active is None:
        enforces = loaded.profiles.base.config.mode is Mode.ENFORCE
        return f"{LABELS_UNKNOWN}, so no profile applies{' and nothing is enforced' if enforces else ''}"
    known = ", ".join(each.name for each in loaded.config.profiles)
    return ", ".join(loaded.active) if loaded.active else f"none of {known} matches this node"


def without_secrets(loaded: LoadedConfig) -> LoadedConfig:
    """The configuration without the arguments of commands and the path of a hook's address: they may be anything, and
    all else is no secret."""
    config = loaded.config
    actions = tuple([action._replace(command=_without_arguments(action.command)) for action in config.reclaim.actions])
    hook = config.hooks.before_eviction
    hook = hook._replace(command=_without_arguments(hook.command), url=_without_path(hook.url))
    return loaded._replace(
        config=config._replace(
            reclaim=config.reclaim._replace(actions=actions), hooks=config.hooks._replace(before_eviction=hook)
        )
    )


def _without_arguments(command: tuple[str, ...]) -> tuple[str, ...]:
    return (command[0], HIDDEN) if len(command) > 1 else command


def _without_path(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    return url if parts.path in ("", "/") and not parts.query else f"{parts.scheme}://{parts.netloc}/(hidden)"


def plain_value(key: ConfigKey, value: Any) -> Any:
    """The value of one key in the form of the file: text, a number, true or false, or a list of these."""
    if isinstance(value, Amount):
        return value.text
    if isinstance(value, tuple):
        return [plain_value(key, element) for element in value]
    if key.duration:
        return duration.format_duration(value)
    if isinstance(value, enum.StrEnum):
        return str(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def explain_problems(error: ConfigError) -> str:
    """One line for each problem, `file:line:column: key: message; fix`, and their number at the end."""
    count = len(error.problems)
    return _list(error.problems) + f"{count} error{'s' if count != 1 else ''}\n"


def explain_warnings(loaded: LoadedConfig) -> str:
    """One line for each warning; empty if there is none."""
    return _list(loaded.warnings, prefix="warning: ")


def _list(problems: Iterable[Problem], *, prefix: str = "") -> str:
    return "".join(f"{prefix}{problem}\n" for problem in problems)


def _entry(loaded: LoadedConfig, key: ConfigKey, value: Any, path: str, *, indent: int, name: str) -> list[str]:
    """The lines of one key; none for an optional key that is not set."""
    if value is None or (key.optional and value == key.default):
        return []
    margin = "  " * indent
    if isinstance(value, RankingConfig) and value.kubelet:
        return [f"{margin}{name}:", _line(f"{margin}  order: kubelet", loaded, f"{path}.order")]
    if isinstance(value, Mapping):
        inner = [
            line
            for name_of, element in value.items()
            for line in _entry(
                loaded,
                key._replace(optional=False),
                element,
                f"{path}.{name_of}",
                indent=indent + 1,
                name=str(name_of) if isinstance(name_of, Signal) else _rendered(name_of),
            )
        ]
        return [f"{margin}{name}:", *inner] if inner else [_line(f"{margin}{name}: {{}}", loaded, path)]
    if keys.is_section(type(value)):
        inner = [
            line
            for part in keys.config_keys(type(value))
            if getattr(value, part.field) != part.default or not _refines(type(value))
            for line in _entry(
                loaded, part, getattr(value, part.field), f"{path}.{part.name}", indent=indent + 1, name=part.name
            )
        ]
        return [f"{margin}{name}:", *inner] if inner else [_line(f"{margin}{name}: {{}}", loaded, path)]
    if isinstance(value, tuple) and value and keys.is_section(type(value[0])):
        return [f"{margin}{name}:", *_elements(loaded, value, path, indent=indent)]
    return [_line(f"{margin}{name}: {_yaml(key, value)}", loaded, path)]


def _elements(loaded: LoadedConfig, values: Iterable[Any], path: str, *, indent: int) -> Iterable[str]:
    """The lines of a list of maps."""
    margin = "  " * indent
    for index, value in enumerate(values):
        here = f"{path}[{index}]"
        lines = [
            line
            for part in keys.config_keys(type(value))
            for line in _entry(
                loaded, part, getattr(value, part.field), f"{here}.{part.name}", indent=indent + 2, name=part.name
            )
        ]
        yield f"{margin}  - {lines[0].lstrip()}"
        yield from lines[1:]


def _refines(section: type) -> bool:
    """True for a section of which only the set keys are printed."""
    return (
        all(key.optional or keys.is_section(key.type) for key in keys.config_keys(section))
        and section is not RankingConfig
    )


def _line(text: str, loaded: LoadedConfig, path: str) -> str:
    remarks = [loaded.origin(path).short, *_kept_above(loaded, path)]
    return f"{text:<{_COMMENT_COLUMN}}  # {_one_line('; '.join(remarks))}"


def _kept_above(loaded: LoadedConfig, path: str) -> list[str]:
    """What a threshold is kept above on this node, `at least the kubelet's 500Mi + 250Mi`, or to what its grace period
    is shortened."""
    section, _, signal = path.partition(".")
    if section == "evictionSoftGracePeriod":
        return [
            f"{duration.format_duration(threshold.grace_period_s)}, to end before the kubelet's"
            for threshold in loaded.config.thresholds
            if threshold.signal == signal and threshold.configured_grace_s is not None
        ]
    values = {"evictionHard": loaded.eviction.eviction_hard, "evictionSoft": loaded.eviction.eviction_soft}.get(section)
    if values is None:
        return []
    found = {
        f"at least {above_kubelet.describe_level(level)}": None
        for threshold in loaded.config.thresholds
        if threshold.signal == signal and threshold.value == values.get(threshold.signal)
        for level in above_kubelet.exceeding_levels(threshold)
    }
    return list(found)


def _one_line(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _yaml(key: ConfigKey, value: Any) -> str:
    return _rendered(plain_value(key, value), bare=key.duration)


def _rendered(value: Any, *, bare: bool = False) -> str:
    import json

    if isinstance(value, list):
        return f"[{', '.join(_rendered(element) for element in value)}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        text = repr(value)
        # YAML reads an exponent without a dot as text.
        return text.replace("e", ".0e") if "e" in text and "." not in text else text
    if bare or (value.isalnum() and value.isascii() and value[0].isalpha() and value.lower() not in _YAML_WORDS):
        return str(value)
    return json.dumps(value)  # YAML reads JSON's escapes
