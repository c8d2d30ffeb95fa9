"""Read the kubelet's arguments from the configuration of k3s, whose process contains the kubelet.

The kubelet of RKE2 is a process of its own and has its arguments on its command line. That of k3s has none: its
arguments are `kubelet-arg` in /etc/rancher/k3s/config.yaml and config.yaml.d and on the command line of k3s, and its
settings are drop-ins in DATA-DIR/agent/etc/kubelet.conf.d (since 1.32; before, k3s added eviction flags of its own).
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from nodeagent.config.problems import ConfigError

ANY_DIRECTORY: Final = "/etc/rancher"
CONFIG_FILE: Final = "/etc/rancher/k3s/config.yaml"
CONFIG_DIRECTORY: Final = "/etc/rancher/k3s/config.yaml.d"
DATA_DIRECTORY: Final = "/var/lib/rancher/k3s"
DROP_IN_DIRECTORY: Final = "agent/etc/kubelet.conf.d"
FLAGS_BEFORE_DROP_INS: Final = {
    "eviction-hard": "imagefs.available<5%,nodefs.available<5%",
    "eviction-minimum-reclaim": "imagefs.available=10%,nodefs.available=10%",
}
"""The flags of k3s before 1.32 (pkg/daemons/agent). The map has no memory.available: such a kubelet evicts for disks
only."""
_COPIED: Final = ("--config=", "--config-dir=")
"""k3s copies the files of these arguments into its drop-in directory."""


class K3sSettings(NamedTuple):
    """The settings of k3s that concern its kubelet."""

    kubelet_flags: tuple[str, ...]
    """In their order. The name may end with + or -, which mean: after or before the value of k3s."""
    data_directory: str = DATA_DIRECTORY
    unread: str = ""
    """Why a file could not be read; its arguments are then unknown."""


def read_settings(files: Sequence[tuple[str, str]], arguments: Sequence[str]) -> K3sSettings:
    """The settings of k3s with these configuration files (name and text, in their order) and this command line. Never
    raises."""
    flags: list[str] = []
    directory, unread = DATA_DIRECTORY, ""
    for name, text in files:
        try:
            for key, values in _entries(text, name):
                if key in ("kubelet-arg", "kubelet-arg+"):
                    flags = [*(flags if key.endswith("+") else ()), *values]
                elif key == "data-dir" and values:
                    directory = values[-1]
        except ConfigError as error:
            unread = unread or str(error)
    for word, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        name, equals, value = word.lstrip("-").partition("=")
        if word.startswith("-") and name == "kubelet-arg":
            flags.append(value if equals else following)
        elif word.startswith("-") and name in ("data-dir", "d"):
            directory = value if equals else following
    return K3sSettings(tuple(f"--{flag.lstrip('-')}" for flag in flags), directory.rstrip("/"), unread)


def with_drop_ins(settings: K3sSettings) -> tuple[str, ...]:
    """The kubelet's flags where its settings are drop-ins, which contain the files of `config` and `config-dir`."""
    return tuple(flag for flag in _merge({}, settings.kubelet_flags) if not flag.startswith(_COPIED))


def without_drop_ins(settings: K3sSettings) -> tuple[str, ...]:
    """The kubelet's flags of a k3s that writes no drop-ins."""
    return _merge(FLAGS_BEFORE_DROP_INS, settings.kubelet_flags)


def _merge(own: Mapping[str, str], flags: Sequence[str]) -> tuple[str, ...]:
    """The flags of k3s and then those of the user. The user's replaces that of k3s, unless its name ends with + or -
    (GetArgs in pkg/util)."""
    values: dict[str, list[str]] = {}
    for flag in flags:
        given, equals, value = flag.removeprefix("--").partition("=")
        name = given.rstrip("+-")
        if name not in values:
            values[name] = [own[name]] if name in own and given != name else []
        values[name].insert(0 if given.endswith("-") else len(values[name]), value if equals else "true")
    merged = {**{name: [value] for name, value in own.items()}, **values}
    return tuple(f"--{name}={value}" for name, each in merged.items() for value in each)


def _entries(text: str, name: str) -> list[tuple[str, list[str]]]:
    """Raises ConfigError if the text is no YAML."""
    from nodeagent.config import yaml_nodes

    if not text.strip():
        return []
    root = yaml_nodes.parse(text.encode("utf-8", "surrogatepass"), name=name)
    return [
        (key.text, [each.text for each in value.elements] if value.tag == "seq" else [value.text])
        for key, value in root.items
    ]
