"""Check the rules between keys.

An error is a combination that the kubelet rejects or that has no meaning. A warning is a combination that works, but
probably not as intended. Each rule is one generator of (key path, message, fix).
"""

from collections.abc import Iterator, Mapping

from nodeagent.config import duration, hook_url, problems, profiles
from nodeagent.config.problems import Origin, Problem
from nodeagent.config.schema import DROPPED, Config, EvictionConfig, ReclaimKind
from nodeagent.model import CONTAINERFS_SIGNALS, Amount, Signal

_Findings = Iterator[tuple[str, str, str]]


def errors(config: Config, eviction: EvictionConfig, *, origins: Mapping[str, Origin]) -> tuple[Problem, ...]:
    """The problems that make the configuration invalid."""
    return _located(
        origins,
        _grace_for_every_soft(eviction, origins),
        _memory_model(eviction),
        _none_alone(eviction),
        _order_of_numbers(config),
        _reclaim_actions(config),
        _hooks(config),
        _marks_without_trusted_namespace(config),
        _own_limit(config),
        _profile_names(config),
    )


def warnings(config: Config, eviction: EvictionConfig, *, origins: Mapping[str, Origin]) -> tuple[Problem, ...]:
    """The combinations that may be intended."""
    return _located(
        origins,
        _nothing_to_do(config, eviction),
        _soft_below_hard(eviction),
        _soft_without_grace_is_hard(eviction),
        _containerfs(eviction),
        _refines_nothing(eviction),
        _rules_of_protected_namespaces(config),
    )


def _located(origins: Mapping[str, Origin], *findings: _Findings) -> tuple[Problem, ...]:
    return tuple(
        Problem(_origin(origins, path), path, message, fix) for found in findings for path, message, fix in found
    )


def _origin(origins: Mapping[str, Origin], path: str) -> Origin:
    """The origin of the key, or of the nearest enclosing map in the file."""
    while path and path not in origins:
        path = path.rpartition(".")[0]
    return origins.get(path, problems.BUILT_IN)


# --- errors ----------------------------------------------------------------------------------------------------------


def _grace_for_every_soft(eviction: EvictionConfig, origins: Mapping[str, Origin]) -> _Findings:
    for signal, value in eviction.eviction_soft.items():
        written = f"evictionSoftGracePeriod.{signal}" in origins  # its value is invalid and already a problem
        if value.text not in DROPPED and signal not in eviction.eviction_soft_grace_period and not written:
            yield (
                f"evictionSoft.{signal}",
                "has no grace period",
                f'add `{signal}: "1m30s"` or another duration to evictionSoftGracePeriod',
            )


def _memory_model(eviction: EvictionConfig) -> _Findings:
    for signal, refined in eviction.signals.items():
        for tier, part in (("", refined), (".hard", refined.hard), (".soft", refined.soft)):
            if part.memory_model is not None and signal is not Signal.MEMORY:
                path = f"signals.{signal}{tier}.memoryModel"
                yield path, "only memory.available has a memory model", "remove it"
        if refined.hard.exhaustion_within_s is not None:
            path = f"signals.{signal}.hard.exhaustionWithin"
            yield path, "a trend never triggers a hard threshold", "move it under `soft:`"


def _none_alone(eviction: EvictionConfig) -> _Findings:
    if "none" in eviction.enforce_node_allocatable and len(eviction.enforce_node_allocatable) > 1:
        yield "enforceNodeAllocatable", "`none` excludes all other values", "remove it or the others"


def _order_of_numbers(config: Config) -> _Findings:
    damping, limits, sampling = config.damping, config.rate_limits, config.sampling
    if damping.release_below >= damping.suppress_above:
        yield (
            "damping.releaseBelow",
            f"{damping.release_below:g} is not below suppressAbove ({damping.suppress_above:g})",
            "a condition is released at a lower penalty than it is held",
        )
    if limits.owner_backoff_max_s < limits.owner_backoff_s:
        yield (
            "rateLimits.ownerBackoffMax",
            f"{duration.format_duration(limits.owner_backoff_max_s)} is shorter than ownerBackoff "
            f"({duration.format_duration(limits.owner_backoff_s)})",
            "raise it",
        )
    if sampling.stale_after_s <= sampling.interval_s:
        yield (
            "sampling.staleAfter",
            f"{duration.format_duration(sampling.stale_after_s)} is not longer than interval "
            f"({duration.format_duration(sampling.interval_s)})",
            "every sample would be stale before the next one",
        )


def _own_limit(config: Config) -> _Findings:
    own = config.own_limit
    resize, trusted = own.resize, config.protection.trusted_namespaces
    if own.enabled and not (own.namespaces or trusted or (resize.enabled and resize.namespaces)):
        yield "ownLimit.enabled", "no pod can opt in", "add `namespaces`, or protection.trustedNamespaces"
    if resize.enabled and not own.enabled:
        yield "ownLimit.resize.enabled", "has no effect while ownLimit is off", "set ownLimit.enabled"
    elif resize.enabled and not (resize.namespaces or trusted):
        yield "ownLimit.resize.enabled", "no pod can opt in", "add `namespaces`, or protection.trustedNamespaces"
    if own.share < own.trend_above:
        message = f"{own.share:g} is below trendAbove ({own.trend_above:g}), so that no trend counts"
        yield "ownLimit.share", message, "raise it"


def _reclaim_actions(config: Config) -> _Findings:
    names: set[str] = set()
    for index, action in enumerate(config.reclaim.actions):
        path = f"reclaim.actions[{index}]"
        if action.name in names:
            yield f"{path}.name", f"{action.name} is already the name of another action", "give each a different name"
        names.add(action.name)
        if action.kind is ReclaimKind.PAGE_CACHE:
            yield f"{path}.kind", "pageCache is built in", "remove the action; `reclaim.pageCache` switches it"
        if action.name == ReclaimKind.PAGE_CACHE:
            yield f"{path}.name", "pageCache is the name of the built-in action", "give the action a different name"
        if action.kind is ReclaimKind.COMMAND and not action.command:
            yield f"{path}.command", "is missing", "name the program and its arguments, one word each"
        if action.kind is ReclaimKind.CONTAINER_LOGS and action.command:
            yield f"{path}.command", "containerLogs runs no command", "remove it, or make it `kind: command`"


def _hooks(config: Config) -> _Findings:
    hook, path = config.hooks.before_eviction, "hooks.beforeEviction"
    if hook.command and hook.url:
        yield f"{path}.url", "a hook is a command or an HTTP call", "remove `url` or `command`"
    if hook.url and (trouble := hook_url.refusal(hook.url)):
        yield f"{path}.url", trouble, "use https://, or http:// to this host, without user, password or fragment"


def _marks_without_trusted_namespace(config: Config) -> _Findings:
    for key, marks in (("labels", config.protection.labels), ("annotations", config.protection.annotations)):
        if marks and not config.protection.trusted_namespaces:
            yield (
                f"protection.{key}",
                "protects no pod, because trustedNamespaces is empty",
                'list the namespaces whose pods may protect themselves, or `trustedNamespaces: ["*"]` for all of them',
            )


def _profile_names(config: Config) -> _Findings:
    names = [profile.name for profile in config.profiles]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield f"profiles[{index}].name", f"{name} is already the name of another profile", "give each its own name"
    if len(names) > profiles.MAX_PROFILES:
        yield "profiles", f"has {len(names)} profiles, at most {profiles.MAX_PROFILES} are possible", "join some"


# --- warnings --------------------------------------------------------------------------------------------------------


def _nothing_to_do(config: Config, eviction: EvictionConfig) -> _Findings:
    if not config.thresholds:
        yield "evictionHard", "there is no threshold: no pod is ever evicted", ""
    elif not any(threshold.hard for threshold in config.thresholds) and not eviction.eviction_hard:
        yield (
            "evictionHard",
            "there is no hard threshold: an empty evictionHard drops the built-in ones",
            "remove the key, or set mergeDefaultEvictionSettings: true, to keep them",
        )


def _soft_below_hard(eviction: EvictionConfig) -> _Findings:
    for signal, soft in eviction.eviction_soft.items():
        hard = eviction.eviction_hard.get(signal)
        if hard is None or hard.text in DROPPED or soft.text in DROPPED or not _not_above(soft, hard):
            continue
        yield (
            f"evictionSoft.{signal}",
            f"{soft.text} is not above the hard threshold, {hard.text}: it acts too late",
            "",
        )


def _not_above(soft: Amount, hard: Amount) -> bool:
    """False also if the two cannot be compared without the node."""
    if None not in (soft.percentage, hard.percentage) and not {
        soft.at_least,
        soft.at_most,
        hard.at_least,
        hard.at_most,
    } - {None}:
        return (soft.percentage or 0.0) <= (hard.percentage or 0.0)
    highest_soft = soft.quantity if soft.quantity is not None else soft.at_most
    lowest_hard = hard.quantity if hard.quantity is not None else hard.at_least
    return highest_soft is not None and lowest_hard is not None and highest_soft <= lowest_hard


def _soft_without_grace_is_hard(eviction: EvictionConfig) -> _Findings:
    for signal, grace in eviction.eviction_soft_grace_period.items():
        if grace == 0 and signal in eviction.eviction_soft:
            yield f"evictionSoftGracePeriod.{signal}", "without grace a soft threshold is a hard one", ""


def _containerfs(eviction: EvictionConfig) -> _Findings:
    for name, signals in (("evictionHard", eviction.eviction_hard), ("evictionSoft", eviction.eviction_soft)):
        for signal in CONTAINERFS_SIGNALS:
            if signal in signals:
                yield f"{name}.{signal}", "is ignored: containerfs follows nodefs or imagefs", "remove it"


def _refines_nothing(eviction: EvictionConfig) -> _Findings:
    for signal, refined in eviction.signals.items():
        soft, hard = signal in eviction.eviction_soft, signal in eviction.eviction_hard
        derived = signal in CONTAINERFS_SIGNALS or (
            signal is Signal.ALLOCATABLE_MEMORY and Signal.MEMORY in eviction.eviction_hard
        )
        if derived:
            yield f"signals.{signal}", "thresholds that follow another signal take its refinement, not this one", ""
        elif not (soft or hard):
            yield f"signals.{signal}", "refines nothing: the signal has no threshold", ""
        elif refined.exhaustion_within_s is not None and not soft:
            yield f"signals.{signal}.exhaustionWithin", "has no effect: the signal has no soft threshold", ""


def _rules_of_protected_namespaces(config: Config) -> _Findings:
    for name in config.protection.namespace_rules:
        if name in config.protection.namespaces:
            yield (
                f"protection.namespaceRules.{name}",
                "has no effect: the namespace is in protection.namespaces, which protects all its pods",
                "",
            )
