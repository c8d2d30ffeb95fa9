"""Read the effective eviction settings of this node's kubelet and find where it acts before nodeagent.

The sources are the text of its configuration file (or the `configz` answer of a running kubelet), the drop-ins of its
`--config-dir` and its command line. Unlike nodeagent's own loader, this one is tolerant: it ignores keys that do not
concern eviction, and an unreadable value becomes a problem beside the settings, not an error.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from nodeagent.config import above_kubelet, amount, defaults, duration, resolve, thresholds
from nodeagent.config.bounds import AmountRule
from nodeagent.config.problems import ConfigError, Origin, Problem
from nodeagent.config.schema import DROPPED, EvictionConfig
from nodeagent.model import Amount, MemoryModel, Signal, Threshold

if TYPE_CHECKING:
    from nodeagent.config.yaml_nodes import YamlNode

MAX_PROBLEMS: Final = 20
"""Each becomes a note of every sample, and clients of the API server write the arguments of k3s."""


class KubeletSettings(NamedTuple):
    """A kubelet's effective settings for eviction and the cgroup tree."""

    thresholds: tuple[Threshold, ...]
    """With the copies for allocatableMemory.available; without containerfs, which follows nodefs or imagefs."""
    transition_period_s: float = defaults.KUBELET_TRANSITION_PERIOD_S
    max_pod_grace_period_s: float = 0.0
    cgroup_root: str = ""
    """Empty: the root of the hierarchy."""
    cgroup_driver: str = ""
    """`systemd`, `cgroupfs`, or empty if neither file nor flags set it (the container runtime may choose it)."""
    root_dir: str = "/var/lib/kubelet"
    problems: tuple[str, ...] = ()
    """One sentence for each value that could not be read. A kubelet would not start with such a file."""
    unread: str = ""
    """Why the whole file could not be read. Values that no flag sets are then only assumed defaults."""


class KubeletThresholds(NamedTuple):
    """The kubelet's own eviction thresholds, from its configuration on this host."""

    path: str
    """The file they were read from, below the host root; `command line` without one."""
    thresholds: tuple[Threshold, ...]
    """Effective: defaults, merging and the copies for allocatable memory are included."""
    unread: str = ""
    """Why its configuration could not be read: a threshold that no flag sets is then the kubelet's default."""
    flags_visible: bool = True
    """False: the kubelet's process is not visible, and its flags may replace what its files contain."""


class EarlierThreshold(NamedTuple):
    """A signal on which the kubelet acts before nodeagent, or at the same moment."""

    signal: Signal
    kubelet: Threshold
    ours: Threshold | None
    """nodeagent's highest threshold of this signal; None if it has none."""
    message: str


class _Raw(NamedTuple):
    """The maps and values as strings, from a file or flags. None: not set."""

    hard: Mapping[str, str] | None = None
    soft: Mapping[str, str] | None = None
    grace: Mapping[str, str] | None = None
    reclaim: Mapping[str, str] | None = None
    merge: bool = False
    enforce: tuple[str, ...] = ("pods",)
    transition: str = ""
    max_grace: str = "0"
    cgroup_root: str = ""
    cgroup_driver: str = ""
    root_dir: str = "/var/lib/kubelet"


_MAP_FLAGS = {
    "eviction-hard": ("hard", "<"),
    "eviction-soft": ("soft", "<"),
    "eviction-soft-grace-period": ("grace", "="),
    "eviction-minimum-reclaim": ("reclaim", "="),
}
_WORD_FLAGS = {
    "eviction-pressure-transition-period": "transition",
    "eviction-max-pod-grace-period": "max_grace",
    "cgroup-root": "cgroup_root",
    "cgroup-driver": "cgroup_driver",
    "root-dir": "root_dir",
}
_MAP_KEYS = {
    "evictionHard": "hard",
    "evictionSoft": "soft",
    "evictionSoftGracePeriod": "grace",
    "evictionMinimumReclaim": "reclaim",
}
_WORD_KEYS = {
    "evictionPressureTransitionPeriod": "transition",
    "evictionMaxPodGracePeriod": "max_grace",
    "cgroupRoot": "cgroup_root",
    "cgroupDriver": "cgroup_driver",
}


def read_settings(
    text: str = "",
    *,
    drop_ins: Sequence[tuple[str, str]] = (),
    flags: Sequence[str] = (),
    name: str = "kubelet configuration",
) -> KubeletSettings:
    """The settings of a kubelet with this configuration file (empty: none), these drop-ins (name and text) in their
    order, and these command line arguments.

    A drop-in replaces single entries of a map, flags the whole map (KEP-3983). Bad content never raises; it is listed
    in `problems`.
    """
    problems: list[str] = []
    raw = _Raw()
    unread = ""
    for index, (file, content) in enumerate([(name, text), *drop_ins]):
        if content.strip():
            try:
                raw = _from_file(content, raw, name=file, problems=problems)
            except ConfigError as error:
                unread = unread or str(error)
                problems.append(str(error))
        if index == 0 and content.strip() and drop_ins and raw.hard is None:
            # The kubelet completes its file before it merges the drop-ins (loadConfigFile in cmd/kubelet/app).
            raw = raw._replace(hard={str(each): value.text for each, value in defaults.KUBELET_EVICTION_HARD.items()})
    settings = _to_settings(_with_flags(raw, flags, problems=problems), problems=problems)
    if (more := len(problems) - MAX_PROBLEMS) > 0:
        problems[MAX_PROBLEMS:] = [f"and {more} more problems"]
    return settings._replace(problems=tuple(problems), unread=unread)


def describe_thresholds(thresholds: Sequence[Threshold]) -> str:
    """`memory.available<250Mi, memory.available<500Mi for 1m30s`, without the copies for allocatable memory."""
    parts = [f"{each.signal}<{_to_text(each)}" for each in thresholds if each.signal is not Signal.ALLOCATABLE_MEMORY]
    return ", ".join(dict.fromkeys(parts)) or "none"


def flag_value(flags: Sequence[str], flag: str) -> str | None:
    """The last value of a command line flag, `--config=x` or `--config x`; None if it is absent."""
    values = _flag_values(flags, flag)
    return values[-1] if values else None


def find_earlier_thresholds(
    ours: Sequence[Threshold],
    kubelets: Sequence[Threshold],
    *,
    capacities: Mapping[Signal, int | None],
    enforce_node_allocatable: bool = True,
) -> tuple[EarlierThreshold, ...]:
    """The thresholds of the kubelet that act before nodeagent or at the same moment.

    nodeagent is earlier if one of its thresholds has a higher value (resolved against the signal's capacity) and no
    longer grace. A threshold of the kubelet that can never be met (0) is left out. A percentage and a quantity are not
    compared if the capacity is unknown.
    """
    found = []
    for theirs in kubelets:
        mine = [
            threshold for threshold in _effective(ours, enforce_node_allocatable) if threshold.signal is theirs.signal
        ]
        capacity = capacities.get(theirs.signal)
        if resolve.resolve_amount(theirs.value, capacity=capacity) == 0 or any(
            _not_comparable(theirs, own, capacity) for own in mine
        ):
            continue
        if any(own.grace_period_s <= theirs.grace_period_s and _above(own, theirs, capacity) for own in mine):
            continue
        highest = max(mine, key=lambda own: _level(own, capacity), default=None)
        found.append(EarlierThreshold(theirs.signal, theirs, highest, _sentence(theirs, highest, capacity)))
    return tuple(found)


# --- reading ---------------------------------------------------------------------------------------------------------


def _flag_values(flags: Sequence[str], flag: str) -> list[str]:
    found = []
    for word, following in itertools.zip_longest(flags, flags[1:], fillvalue=""):
        flag_name, equals, value = word.lstrip("-").partition("=")
        if word.startswith("-") and flag_name == flag:
            found.append(value if equals else following)
    return found


def _from_file(text: str, before: _Raw, *, name: str, problems: list[str]) -> _Raw:
    """What the file adds to the files before it. Raises ConfigError if the text is no YAML, or no map."""
    from nodeagent.config import yaml_nodes

    root = yaml_nodes.parse(text.encode("utf-8", "surrogatepass"), name=name)
    if root.tag != "map":
        raise ConfigError((Problem(Origin(name, root.line, root.column), "", "the file is not a map of keys"),))
    top = {key.text: value for key, value in root.items}
    if "kubeletconfig" in top:  # the answer of /configz
        top = {key.text: value for key, value in top["kubeletconfig"].items}
    raw = before
    for key, field in _MAP_KEYS.items():
        if key in top and top[key].tag == "map":
            values = {**(getattr(raw, field) or {}), **_strings(top[key], key, problems)}
            raw = raw._replace(**{field: values})  # type: ignore[arg-type]
        elif key in top and top[key].tag != "null":
            problems.append(f"{key} is not a map")
    for key, field in _WORD_KEYS.items():
        if key in top and top[key].text:
            raw = raw._replace(**{field: top[key].text})  # type: ignore[arg-type]
    if "mergeDefaultEvictionSettings" in top:
        raw = raw._replace(merge=top["mergeDefaultEvictionSettings"].text.lower() in ("true", "yes", "on"))
    if "enforceNodeAllocatable" in top and top["enforceNodeAllocatable"].tag == "seq":
        raw = raw._replace(enforce=tuple(node.text for node in top["enforceNodeAllocatable"].elements))
    return raw


def _strings(node: "YamlNode", path: str, problems: list[str]) -> dict[str, str]:
    values = {}
    for key, value in node.items:
        if value.tag in ("str", "null"):
            values[key.text] = value.text if value.tag == "str" else ""
        else:
            problems.append(f"{path}.{key.text} is not text")
    return values


def _with_flags(raw: _Raw, flags: Sequence[str], *, problems: list[str]) -> _Raw:
    for flag, (field, separator) in _MAP_FLAGS.items():
        values = _flag_values(flags, flag)
        if values:  # the first one replaces the map, each further one adds to it
            pairs = _pairs(",".join(values), separator, flag=flag, problems=problems)
            raw = raw._replace(**{field: pairs})  # type: ignore[arg-type]
    for flag, field in _WORD_FLAGS.items():
        value = flag_value(flags, flag)
        if value:
            raw = raw._replace(**{field: value})  # type: ignore[arg-type]
    enforce = flag_value(flags, "enforce-node-allocatable")
    return raw if enforce is None else raw._replace(enforce=tuple(part.strip() for part in enforce.split(",")))


def _pairs(text: str, separator: str, *, flag: str, problems: list[str]) -> dict[str, str]:
    """Split `a<1,b<2` as the kubelet does: entries are trimmed, empty ones ignored."""
    pairs = {}
    for part in text.split(","):
        signal, found, value = part.strip().partition(separator)
        if found:
            pairs[signal.strip()] = value.strip()
        elif signal:
            problems.append(f"--{flag}: {signal!r} has no {separator!r}")
    return pairs


# --- the kubelet's rules ---------------------------------------------------------------------------------------------


def _to_settings(raw: _Raw, *, problems: list[str]) -> KubeletSettings:
    hard = defaults.KUBELET_EVICTION_HARD if raw.hard is None else _amounts(raw.hard, "evictionHard", problems)
    if raw.merge and raw.hard is not None:
        hard = {**defaults.KUBELET_EVICTION_HARD, **hard}
    eviction = EvictionConfig(
        eviction_hard=hard,
        eviction_soft=_amounts(raw.soft or {}, "evictionSoft", problems),
        eviction_soft_grace_period=_graces(raw.grace or {}, problems),
        eviction_minimum_reclaim=_amounts(raw.reclaim or {}, "evictionMinimumReclaim", problems, AmountRule.RECLAIM),
    )
    for signal, value in eviction.eviction_soft.items():
        if value.text not in DROPPED and signal not in eviction.eviction_soft_grace_period:
            problems.append(f"evictionSoft.{signal}: has no grace period")
    return KubeletSettings(
        thresholds=_effective(
            thresholds.make_thresholds(eviction, memory_model=MemoryModel.WORKING_SET), "pods" in raw.enforce
        ),
        transition_period_s=_seconds(raw.transition or "0s", "evictionPressureTransitionPeriod", problems)
        or defaults.KUBELET_TRANSITION_PERIOD_S,
        max_pod_grace_period_s=float(raw.max_grace) if raw.max_grace.lstrip("-").isdecimal() else 0.0,
        cgroup_root=raw.cgroup_root,
        cgroup_driver=raw.cgroup_driver,
        root_dir=raw.root_dir,
        problems=tuple(problems),
    )


def _amounts(
    texts: Mapping[str, str], path: str, problems: list[str], rule: AmountRule = AmountRule.THRESHOLD
) -> dict[Signal, Amount]:
    amounts = {}
    for name, text in texts.items():
        try:
            amounts[Signal(name)] = amount.parse_amount(text, rule=rule)
        except ValueError as error:
            problems.append(f"{path}.{name}: {text!r}: {error}")
    return amounts


def _graces(texts: Mapping[str, str], problems: list[str]) -> dict[Signal, float]:
    graces = {}
    for name, text in texts.items():
        try:
            seconds = duration.parse_duration(text)
            if seconds < 0:
                raise ValueError("it is negative")
            graces[Signal(name)] = seconds
        except ValueError as error:
            problems.append(f"evictionSoftGracePeriod.{name}: {text!r}: {error}")
    return graces


def _seconds(text: str, path: str, problems: list[str]) -> float:
    try:
        return duration.parse_duration(text)
    except ValueError as error:
        problems.append(f"{path}: {text!r}: {error}")
        return 0.0


def _effective(thresholds: Sequence[Threshold], enforce_node_allocatable: bool) -> tuple[Threshold, ...]:
    """Add a copy of each hard memory.available threshold for allocatableMemory.available."""
    if not enforce_node_allocatable:
        return tuple(thresholds)
    copies = [
        threshold._replace(signal=Signal.ALLOCATABLE_MEMORY)
        for threshold in thresholds
        if threshold.signal is Signal.MEMORY and threshold.hard
    ]
    return tuple(dict.fromkeys((*thresholds, *copies)))


# --- comparing -------------------------------------------------------------------------------------------------------


def _not_comparable(theirs: Threshold, own: Threshold, capacity: int | None) -> bool:
    return capacity is None and (theirs.value.quantity is None) != (own.value.quantity is None)


def _level(threshold: Threshold, capacity: int | None) -> float:
    """Bytes, inodes or PIDs; percent if the capacity is unknown."""
    value = resolve.resolve_threshold(threshold, capacity=capacity)
    return float(threshold.value.percentage or 0.0) if value is None else value


def _above(own: Threshold, theirs: Threshold, capacity: int | None) -> bool:
    return _level(own, capacity) > _level(theirs, capacity)


def _sentence(theirs: Threshold, own: Threshold | None, capacity: int | None) -> str:
    kubelet = f"the kubelet evicts at {theirs.signal} < {_to_text(theirs)}"
    if own is None:
        return f"{kubelet}; nodeagent has no threshold for it"
    when = "at the same level" if _level(own, capacity) == _level(theirs, capacity) else "only"
    if own.grace_period_s > theirs.grace_period_s and _above(own, theirs, capacity):
        when = "earlier, but perhaps not in time,"
    note = ", of MemAvailable, which is a different value" if own.memory_model is MemoryModel.MEM_AVAILABLE else ""
    level = above_kubelet.short_value(own, capacity=capacity)
    return f"{kubelet}; nodeagent {when} at {level}{_grace_text(own)}{note}"


def _to_text(threshold: Threshold) -> str:
    return f"{threshold.value.text}{_grace_text(threshold)}"


def _grace_text(threshold: Threshold) -> str:
    return "" if threshold.hard else f" for {duration.format_duration(threshold.grace_period_s)}"
