"""The part of a kubelet's configuration that matters for evictions, for a snapshot file.

1. Only the keys and flags listed here are included, so that no header, token or path of a key file ever is. A key that
   a later kubelet adds is left out until it is listed.
2. Bad content never raises: it is a sentence in `problems`.
"""

from collections.abc import Sequence
from typing import Any, Final

from nodeagent.config import yaml_nodes
from nodeagent.config.problems import ConfigError
from nodeagent.config.yaml_nodes import YamlNode

KEYS: Final = frozenset(
    {
        "apiVersion",
        "cgroupDriver",
        "cgroupRoot",
        "cgroupsPerQOS",
        "containerLogMaxFiles",
        "containerLogMaxSize",
        "enforceNodeAllocatable",
        "evictionHard",
        "evictionMaxPodGracePeriod",
        "evictionMinimumReclaim",
        "evictionPressureTransitionPeriod",
        "evictionSoft",
        "evictionSoftGracePeriod",
        "failSwapOn",
        "featureGates",
        "imageGCHighThresholdPercent",
        "imageGCLowThresholdPercent",
        "imageMaximumGCAge",
        "imageMinimumGCAge",
        "kind",
        "kubeReserved",
        "kubeReservedCgroup",
        "localStorageCapacityIsolation",
        "maxPods",
        "memoryManagerPolicy",
        "memorySwap",
        "memoryThrottlingFactor",
        "mergeDefaultEvictionSettings",
        "nodeStatusReportFrequency",
        "nodeStatusUpdateFrequency",
        "podPidsLimit",
        "reservedMemory",
        "shutdownGracePeriod",
        "shutdownGracePeriodCriticalPods",
        "syncFrequency",
        "systemReserved",
        "systemReservedCgroup",
        "volumeStatsAggPeriod",
    }
)
FLAGS: Final = frozenset(
    {
        "cgroup-driver",
        "cgroup-root",
        "config",
        "config-dir",
        "enforce-node-allocatable",
        "eviction-hard",
        "eviction-max-pod-grace-period",
        "eviction-minimum-reclaim",
        "eviction-pressure-transition-period",
        "eviction-soft",
        "eviction-soft-grace-period",
        "fail-swap-on",
        "feature-gates",
        "image-gc-high-threshold",
        "image-gc-low-threshold",
        "kernel-memcg-notification",
        "kube-reserved",
        "kube-reserved-cgroup",
        "max-pods",
        "pod-max-pids",
        "root-dir",
        "system-reserved",
        "system-reserved-cgroup",
    }
)


def excerpt(files: Sequence[tuple[str, str]], flags: Sequence[str]) -> dict[str, Any]:
    """The listed keys of these files (path and text, in the order of their merging), and the listed flags."""
    shown, problems = [], []
    for path, text in files:
        try:
            root = yaml_nodes.parse(text.encode("utf-8", "surrogatepass"), name=path)
        except ConfigError as error:
            problems += [f"{path}: not YAML at line {each.origin.line}" for each in error.problems]
            continue
        shown.append({"path": path, "settings": _settings(root)})
    return {"files": shown, "flags": _flags(flags), "problems": problems}


def _settings(root: YamlNode) -> dict[str, Any]:
    top = {key.text: value for key, value in root.items}
    if "kubeletconfig" in top:  # the answer of /configz
        return _settings(top["kubeletconfig"])
    return {key: _plain(value) for key, value in top.items() if key in KEYS}


def _plain(node: YamlNode) -> Any:
    if node.tag == "map":
        return {key.text: _plain(value) for key, value in node.items}
    if node.tag == "seq":
        return [_plain(element) for element in node.elements]
    return node.text


def _flags(words: Sequence[str]) -> list[str]:
    """The listed flags as `--name=value`; a flag without a value stays alone."""
    found = []
    for index, word in enumerate(words):
        name, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("-") or name not in FLAGS:
            continue
        following = words[index + 1] if index + 1 < len(words) else ""
        if not equals and following and not following.startswith("-"):
            value, equals = following, "="
        found.append(f"--{name}{equals}{value}")
    return found
