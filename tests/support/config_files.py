"""Configuration files for tests: one header, and bodies that are right or wrong for a known reason."""

import textwrap
from typing import Final, NamedTuple

from nodeagent.config import load
from nodeagent.config.problems import ConfigError, Problem

HEADER: Final = "apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\n"


class Wrong(NamedTuple):
    """A body, with the place and the reason of its error."""

    body: str
    key: str
    why: str
    schema_sees_it: bool = True
    """True if the JSON Schema rejects it too; its module lists what it cannot check."""


def file(body: str) -> str:
    """A file with this body behind the header."""
    return HEADER + textwrap.dedent(body)


def read(body: str) -> load.LoadedConfig:
    return load.loads(file(body), name="node.yaml")


def problems(body: str) -> tuple[Problem, ...]:
    """The problems of this body; fails if there is none."""
    try:
        loaded = read(body)
    except ConfigError as error:
        return error.problems
    raise AssertionError(f"accepted: {loaded.config}")


GOOD: Final = (
    "",
    "mode: enforce",
    "nodeName: worker-1.example",
    "evictionHard: {memory.available: 500Mi}",
    "evictionHard: {}",
    "evictionHard:",
    "evictionHard: {memory.available: '0%', nodefs.available: '100%'}",
    "evictionHard: {memory.available: '100.0%', nodefs.available: 00%, pid.available: 1e3}",
    "evictionHard: {memory.available: 15%%, nodefs.available: 0%%, imagefs.available: 7Ei}",
    "evictionHard: {memory.available: .5Gi, containerfs.available: 10%, allocatableMemory.available: +1G}",
    "evictionSoft: {memory.available: 1Gi}\nevictionSoftGracePeriod: {memory.available: 1m30s, pid.available: 1.5h}",
    "evictionSoft: {memory.available: 1Gi}\nevictionSoftGracePeriod: {memory.available: 0s}",
    "evictionSoft: {memory.available: 0%}",
    "evictionHard: {memory.available: '2%, at least 200Mi, at most 1Gi', nodefs.available: '10%, at most 50Gi'}",
    "aboveKubelet: false",
    "evictionSoftGracePeriod: {memory.available: 300ms}",
    "evictionMinimumReclaim: {memory.available: '0', nodefs.available: 150%}",
    "mergeDefaultEvictionSettings: true",
    "enforceNodeAllocatable: [pods, kube-reserved]",
    "enforceNodeAllocatable: []",
    "evictionPressureTransitionPeriod: 0s",
    "evictionMaxPodGracePeriod: 0",
    "signals: {memory.available: {memoryModel: memavailable, requireStall: {atLeast: 10}, exhaustionWithin: 30s}}",
    "signals: {memory.available: {soft: {requireStall: {atLeast: 0.5, scope: kubepods, kind: full}}, hard: {}}}",
    "signals: {pid.available: {requireStall: null}}",
    "ranking: {order: kubelet}",
    "ranking: {order: [usage, age, restartCount, duplicateOnNode]}",
    "ranking:",
    "relief: {minimumRelief: 10Mi, maxVictims: 1, onFutile: evict}",
    "relief: {minimumRelief: 0%}",
    "damping: {jitter: 0, penalty: 1000.5, halfLife: 1ms}",
    "ownLimit: {enabled: true, namespaces: [shop], trendAbove: 0.6, share: 1, margin: 0s, stall: 50}",
    "ownLimit: {enabled: true}\nprotection: {trustedNamespaces: ['*']}",
    "protection: {namespaces: [], labels: [a=b, c], trustedNamespaces: ['*'], daemonSets: false}",
    "rateLimits: {node: {burst: 1}, owner: {perHour: 0.5}}",
    "rateLimits: {namespaces: {shop: {burst: 9, perHour: 0}, 'no': &b {burst: 1, perHour: 2}, 0-1: *b}}",
    "protection: {namespaceRules: {shop: {protect: soft}, batch: {barePods: false, minimumAge: 0s}, ci: {}}}",
    "profiles: [{name: a, nodeSelector: {x.y/pool: gpu}, mode: enforce, rateLimits: {node: {burst: 2}}, signals: }]",
    'conditions: {standard: "off", own: false}',
    "sampling: {interval: 20ms, cgroupRoot: /kubelet, imageDir: ''}",
    "cluster: {kubeconfig: /etc/kubernetes/kubelet.conf}",
    "logging: {level: debug, format: console}",
    "stateDir: /var/lib/nodeagent",
)

BAD: Final = (
    Wrong("mode: on", "mode", "must be one of dry-run, enforce"),
    Wrong("mode: [enforce]", "mode", "is a list"),
    Wrong("mode:", "mode", "is nothing"),
    Wrong("nodeName: Worker", "nodeName", "must be a node name"),
    Wrong("nodeName: 12", "nodeName", "must be text in quotes"),
    Wrong("evictionhard: {}", "evictionhard", "unknown key"),
    Wrong("featureGates: {}", "featureGates", "unknown key"),
    Wrong("evictionHard: memory.available<1Gi", "evictionHard", "must be a map"),
    Wrong("evictionHard: [memory.available]", "evictionHard", "must be a map"),
    Wrong("evictionHard: {Memory.available: 1Gi}", "evictionHard.Memory.available", "unknown signal"),
    Wrong("evictionHard: {memory: 1Gi}", "evictionHard.memory", "unknown signal"),
    Wrong("evictionHard: {memory.available: 100}", "evictionHard.memory.available", "in quotes"),
    Wrong("evictionHard: {memory.available: 1_000}", "evictionHard.memory.available", "in quotes"),
    Wrong("evictionHard: {memory.available: '1_000'}", "evictionHard.memory.available", "cannot be grouped"),
    Wrong("evictionHard: {memory.available: '\uff11Gi'}", "evictionHard.memory.available", "plain digits"),
    Wrong("evictionHard: {memory.available: ' 1Gi'}", "evictionHard.memory.available", "white space"),
    Wrong("evictionHard: {memory.available: NaN}", "evictionHard.memory.available", "plain digits"),
    Wrong("evictionHard: {memory.available: nan%}", "evictionHard.memory.available", "not a plain number"),
    Wrong("evictionHard: {memory.available: '%'}", "evictionHard.memory.available", "not a plain number"),
    Wrong("evictionHard: {memory.available: 10%5%}", "evictionHard.memory.available", "not a plain number"),
    Wrong("evictionHard: {memory.available: ''}", "evictionHard.memory.available", "empty"),
    Wrong("evictionHard: {memory.available: }", "evictionHard.memory.available", "is nothing"),
    Wrong("evictionHard: {memory.available: {a: b}}", "evictionHard.memory.available", "is a map"),
    Wrong("evictionHard: {memory.available: -5Mi}", "evictionHard.memory.available", "negative"),
    Wrong("evictionHard: {memory.available: -5%}", "evictionHard.memory.available", "negative"),
    Wrong("evictionHard: {memory.available: '0'}", "evictionHard.memory.available", "zero", False),
    Wrong("evictionHard: {memory.available: 100.1%}", "evictionHard.memory.available", "above 100%", False),
    Wrong("evictionHard: {memory.available: 16Ei}", "evictionHard.memory.available", "64 bits", False),
    Wrong(
        "evictionMinimumReclaim: {memory.available: 8Ei}", "evictionMinimumReclaim.memory.available", "64 bits", False
    ),
    Wrong("evictionHard: {pid.available: 1%, pid.available: 2%}", "evictionHard.pid.available", "set already", False),
    Wrong("evictionSoft: {memory.available: 1Gi}", "evictionSoft.memory.available", "no grace period", False),
    Wrong(
        "evictionHard: {memory.available: 1Gi}\nevictionSoft: {containerfs.available: 10%}",
        "evictionSoft.containerfs.available",
        "no grace period",
        False,
    ),
    Wrong("evictionSoftGracePeriod: {pid.available: 30}", "evictionSoftGracePeriod.pid.available", "in quotes"),
    Wrong("evictionSoftGracePeriod: {pid.available: '30'}", "evictionSoftGracePeriod.pid.available", "write 30s"),
    Wrong("evictionSoftGracePeriod: {pid.available: ''}", "evictionSoftGracePeriod.pid.available", "empty"),
    Wrong("evictionSoftGracePeriod: {pid.available: 1d}", "evictionSoftGracePeriod.pid.available", "24h"),
    Wrong("evictionSoftGracePeriod: {pid.available: -1s}", "evictionSoftGracePeriod.pid.available", "must be from 0s"),
    Wrong("evictionSoftGracePeriod: {pids: 1s}", "evictionSoftGracePeriod.pids", "unknown signal"),
    Wrong("evictionMinimumReclaim: {pid.available: 0%}", "evictionMinimumReclaim.pid.available", "above 0%", False),
    Wrong("evictionMinimumReclaim: {pid.available: '-1'}", "evictionMinimumReclaim.pid.available", "negative"),
    Wrong("mergeDefaultEvictionSettings: 1", "mergeDefaultEvictionSettings", "must be true or false"),
    Wrong("mergeDefaultEvictionSettings: 'true'", "mergeDefaultEvictionSettings", "must be true or false"),
    Wrong("enforceNodeAllocatable: pods", "enforceNodeAllocatable", "must be a list"),
    Wrong("enforceNodeAllocatable: [pod]", "enforceNodeAllocatable[0]", "must be one of"),
    Wrong("enforceNodeAllocatable: [none, pods]", "enforceNodeAllocatable", "excludes all other values", False),
    Wrong("evictionPressureTransitionPeriod: 300", "evictionPressureTransitionPeriod", "in quotes"),
    Wrong("evictionPressureTransitionPeriod: -5m", "evictionPressureTransitionPeriod", "must be from 0s"),
    Wrong("evictionPressureTransitionPeriod: 9000h", "evictionPressureTransitionPeriod", "to 8760h", False),
    Wrong("evictionMaxPodGracePeriod: 30s", "evictionMaxPodGracePeriod", "must be a number"),
    Wrong("evictionMaxPodGracePeriod: -1", "evictionMaxPodGracePeriod", "must be from 0"),
    Wrong("evictionMaxPodGracePeriod: 1.5", "evictionMaxPodGracePeriod", "whole number"),
    Wrong("evictionMaxPodGracePeriod: 1:30", "evictionMaxPodGracePeriod", "plain decimal", False),
    Wrong("evictionMaxPodGracePeriod: 010", "evictionMaxPodGracePeriod", "octal", False),
    Wrong("signals: {memory.available: {memoryModel: rss}}", "signals.memory.available.memoryModel", "one of"),
    Wrong("signals: {cpu: {}}", "signals.cpu", "unknown signal"),
    Wrong("signals: {memory.available: []}", "signals.memory.available", "must be a map"),
    Wrong(
        "signals: {memory.available: {requireStall: {resource: cpu, atLeast: 1}}}",
        "signals.memory.available.requireStall.resource",
        "must be one of memory, io",
    ),
    Wrong(
        "signals: {memory.available: {requireStall: {}}}",
        "signals.memory.available.requireStall.atLeast",
        "is missing",
    ),
    Wrong(
        "signals: {memory.available: {requireStall: {atLeast: 101}}}",
        "signals.memory.available.requireStall.atLeast",
        "must be from 0 to 100",
    ),
    Wrong(
        "signals: {nodefs.available: {hard: {memoryModel: workingset}}}",
        "signals.nodefs.available.hard.memoryModel",
        "only memory.available",
        False,
    ),
    Wrong(
        "signals: {memory.available: {hard: {exhaustionWithin: 30s}}}",
        "signals.memory.available.hard.exhaustionWithin",
        "never triggers a hard",
        False,
    ),
    Wrong("ranking: {order: []}", "ranking.order", "is empty"),
    Wrong("ranking: {order: default}", "ranking.order", "the word kubelet"),
    Wrong("ranking: {order: [qos, qos]}", "ranking.order[1]", "in the list already"),
    Wrong("ranking: {order: [[qos]]}", "ranking.order[0]", "is a list"),
    Wrong("ranking: {kubelet: true}", "ranking.kubelet", "unknown key"),
    Wrong("relief: {minimumRelief: 101%}", "relief.minimumRelief", "above 100%", False),
    Wrong("relief: {maxVictims: 0}", "relief.maxVictims", "must be from 1"),
    Wrong("relief: {maxVictims: 2.5}", "relief.maxVictims", "whole number"),
    Wrong("damping: {jitter: .nan}", "damping.jitter", "plain decimal", False),
    Wrong("damping: {jitter: 1.1}", "damping.jitter", "must be from 0 to 1"),
    Wrong("damping: {maxTransitionsPerHour: 1}", "damping.maxTransitionsPerHour", "must be from 2"),
    Wrong("damping: {penalty: .inf}", "damping.penalty", "plain decimal"),
    Wrong("damping: {penalty: -1}", "damping.penalty", "must be from 1"),
    Wrong("damping: {halfLife: 0s}", "damping.halfLife", "must be from 1ms", False),
    Wrong("damping: {releaseBelow: 3000}", "damping.releaseBelow", "not below suppressAbove", False),
    Wrong("protection: {namespaces: kube-system}", "protection.namespaces", "must be a list"),
    Wrong("protection: {namespaces: [A_b]}", "protection.namespaces[0]", "must be a namespace"),
    Wrong("protection: {labels: ['=x']}", "protection.labels[0]", "`key` or `key=value`"),
    Wrong("ownLimit: {enabled: true}", "ownLimit.enabled", "no pod can opt in", False),
    Wrong("ownLimit: {share: 0.5}", "ownLimit.share", "no trend counts", False),
    Wrong("ownLimit: {share: 0.3}", "ownLimit.share", "from 0.4 to 1"),
    Wrong("protection: {labels: [a]}", "protection.labels", "trustedNamespaces is empty", False),
    Wrong("protection: {annotations: [a=b]}", "protection.annotations", "trustedNamespaces is empty", False),
    Wrong("protection: {trustedNamespaces: ['a*']}", "protection.trustedNamespaces[0]", "or `*`"),
    Wrong("rateLimits: {node: {burst: 0}}", "rateLimits.node.burst", "must be from 1"),
    Wrong("rateLimits: {node: 5}", "rateLimits.node", "must be a map of burst, perHour"),
    Wrong("rateLimits: {namespaces: [shop]}", "rateLimits.namespaces", "a line for each namespace"),
    Wrong(
        "rateLimits: {namespaces: {A_b: {burst: 1, perHour: 1}}}", "rateLimits.namespaces.A_b", "must be a namespace"
    ),
    Wrong("rateLimits: {namespaces: {shop: {burst: 1}}}", "rateLimits.namespaces.shop.perHour", "is missing"),
    Wrong("rateLimits: {namespaces: {shop: {burst: 0, perHour: 0}}}", "rateLimits.namespaces.shop.burst", "from 1"),
    Wrong("protection: {namespaceRules: {shop: {protect: hard}}}", "protection.namespaceRules.shop.protect", "one of"),
    Wrong("profiles: {name: a}", "profiles", "must be a list"),
    Wrong("profiles: [{name: a, nodeSelector: {}}]", "profiles[0].nodeSelector", "at least one label"),
    Wrong("profiles: [{name: a, nodeSelector: {a: b}, stateDir: /a}]", "profiles[0].stateDir", "left margin"),
    Wrong(
        "profiles: [{name: a, nodeSelector: {a: b}, relief: {maxVictims: 0}}]",
        "profiles[0].relief.maxVictims",
        "from 1",
    ),
    Wrong("rateLimits: {ownerBackoff: 1h}", "rateLimits.ownerBackoffMax", "shorter than ownerBackoff", False),
    Wrong("sampling: {interval: 1ms}", "sampling.interval", "must be from 20ms to 1m", False),
    Wrong("sampling: {staleAfter: 500ms}", "sampling.staleAfter", "not longer than interval", False),
    Wrong("sampling: {kubeletDir: var/lib}", "sampling.kubeletDir", "absolute path"),
    Wrong("stateDir: ''", "stateDir", "absolute path"),
    Wrong("logging: {level: INFO}", "logging.level", "must be one of"),
    Wrong("half_life: 1", "half_life", "unknown key"),
)
