"""Read the kubelet's arguments from those of k3s, whose process contains the kubelet.

The kubelet of RKE2 is a process of its own and has its arguments on its command line. That of k3s has none: its
arguments are `kubelet-arg` of k3s, and its settings are drop-ins in DATA-DIR/agent/etc/kubelet.conf.d (since 1.32;
before, k3s added eviction flags of its own). k3s hides its own command line (pkg/proctitle) and writes its arguments,
those of its configuration files included, to an annotation of its Node (pkg/nodeconfig).
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

NODE_ARGS: Final = "k3s.io/node-args"
"""The annotation: a JSON array, in which `--name=value` is two words."""
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


def read_settings(arguments: Sequence[str]) -> K3sSettings:
    """The settings in the words of the annotation. Never raises."""
    flags: list[str] = []
    directory = DATA_DIRECTORY
    for index, word in enumerate(arguments):
        name, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("-"):
            continue
        following, after = (*arguments[index + 1 : index + 3], "", "")[:2]
        if name == "kubelet-arg" and equals:
            flags.append(value)
        elif name == "kubelet-arg":
            # `--kubelet-arg --name=value` is three words.
            cut = following.startswith("--") and "=" not in following and after and not after.startswith("-")
            flags.append(f"{following}={after}" if cut else following)
        elif name in ("data-dir", "d"):
            directory = value if equals else following
    return K3sSettings(tuple(f"--{flag.lstrip('-')}" for flag in flags), directory.rstrip("/"))


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
