"""Keep each threshold above the kubelet's own (`aboveKubelet`), so that the agent acts first.

Theory of operation. `keep_above` adds to each threshold the levels that the kubelet's thresholds of the same signal
require: a hard one must be above the kubelet's hard ones, a soft one above its soft and its hard ones. The margins are
those of `defaults`. `resolve.resolve_threshold` then takes the highest value for the capacity. A soft threshold's
grace period is shortened to end `defaults.KUBELET_GRACE_LEAD_S` before the kubelet's, because on a fast fall both
levels are crossed at the same time. A threshold of the kubelet that can never be met (0) raises nothing, and one
without a counterpart of the same signal has no effect. A signal for which a known kubelet has no threshold gets such a
0: then it is known that this kubelet never evicts for it.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from nodeagent.config import defaults, resolve
from nodeagent.config.schema import Config
from nodeagent.model import (
    MEMORY_SIGNALS,
    SIGNAL_TABLE,
    Amount,
    KubeletLevel,
    NodeSnapshot,
    Note,
    NoteKind,
    Threshold,
    Unit,
    units,
)

_NO_THRESHOLD: Final = Amount(0, None, "0")


def keep_above(config: Config, kubelet: Sequence[Threshold]) -> Config:
    """The configuration with each threshold above these of the kubelet. Levels from an earlier call are replaced, and
    removed if `aboveKubelet` is off, if the ranking order is the kubelet's, or if `kubelet` is empty."""
    if not config.above_kubelet or config.ranking.kubelet:
        kubelet = ()
    kept = tuple(_keep_above(each, kubelet) for each in config.thresholds)
    return config if kept == config.thresholds else config._replace(thresholds=kept)


def leading_level(threshold: Threshold, *, capacity: int | None) -> KubeletLevel | None:
    """The level that determines the threshold's value for this capacity; None if the configured value does."""
    configured = resolve.resolve_amount(threshold.value, capacity=capacity)
    if configured is None:
        return None
    above = [
        (value, index)
        for index, level in enumerate(threshold.above_kubelet)
        if (value := resolve.resolve_level(level, capacity=capacity)) is not None and value > configured
    ]
    return threshold.above_kubelet[max(above)[1]] if above else None


def describe_value(threshold: Threshold, *, capacity: int | None, unit: Unit) -> str:
    """`200Mi`, `12% = 2.4Gi`, `2%, at least 200Mi`, or with its origin `750Mi (kubelet 500Mi + margin 250Mi; configured
    200Mi)`."""
    configured, value = threshold.value, resolve.resolve_threshold(threshold, capacity=capacity)
    level = leading_level(threshold, capacity=capacity)
    if value is None or (level is None and configured.percentage is None):
        return configured.text
    if level is None:
        share, bounded = configured.text.partition(",")[0], units.format_amount(value, unit)
        if value in (configured.at_least, configured.at_most):
            return f"{share}, at {'least' if value == configured.at_least else 'most'} {bounded}"
        return f"{share} = {bounded}"
    kubelet = resolve.resolve_amount(level.kubelet, capacity=capacity) or 0
    margin = units.format_amount(value - kubelet, unit)
    own = short_value(threshold._replace(above_kubelet=()), capacity=capacity)
    origin = f"kubelet {level.kubelet.text} + margin {margin}; configured {own}"
    return f"{units.format_amount(value, unit)} ({origin})"


def short_value(threshold: Threshold, *, capacity: int | None) -> str:
    """`200Mi` or `12%` as configured; the effective amount if the threshold has bounds or was raised."""
    bounded = threshold.value.at_least is not None or threshold.value.at_most is not None
    if not bounded and leading_level(threshold, capacity=capacity) is None:
        return threshold.value.text
    value = resolve.resolve_threshold(threshold, capacity=capacity)
    return threshold.value.text if value is None else units.format_amount(value, SIGNAL_TABLE[threshold.signal].unit)


def describe_grace(threshold: Threshold) -> str:
    """`1m 15s`, or with its origin `1m 15s (before the kubelet's; configured 2m)`."""
    grace = units.format_duration(threshold.grace_period_s)
    if threshold.configured_grace_s is None:
        return grace
    return f"{grace} (before the kubelet's; configured {units.format_duration(threshold.configured_grace_s)})"


def exceeding_levels(threshold: Threshold) -> tuple[KubeletLevel, ...]:
    """The levels that are above the configured value on a node of some capacity."""
    return tuple(level for level in threshold.above_kubelet if _may_exceed(level, threshold.value))


def _may_exceed(level: KubeletLevel, configured: Amount) -> bool:
    kubelet, margin = level.kubelet, level.margin
    if resolve.resolve_amount(kubelet, capacity=units.MAX_PLAUSIBLE) == 0:
        return False
    if not level.margin_of_capacity and kubelet.quantity is not None:
        lowest = configured.quantity if configured.quantity is not None else configured.at_least
        total = kubelet.quantity + (resolve.resolve_amount(margin, capacity=kubelet.quantity) or 0)
        return total > (lowest or 0)
    if level.margin_of_capacity and None not in (kubelet.percentage, configured.percentage):
        unbounded = configured.at_least is None and configured.at_most is None
        shares = (kubelet.percentage or 0.0) + (margin.percentage or 0.0)
        return not unbounded or shares > (configured.percentage or 0.0)
    return True


def describe_level(level: KubeletLevel) -> str:
    """The level without a node: `the kubelet's 500Mi + 250Mi`, `the kubelet's 10% + 2%`."""
    margin = resolve.resolve_amount(level.margin, capacity=level.kubelet.quantity)
    if level.margin_of_capacity or level.kubelet.quantity is None or margin is None:
        of = "" if level.margin_of_capacity else " of it"
        return f"the kubelet's {level.kubelet.text} + {level.margin.text.replace('%', f'%{of}')}"
    return f"the kubelet's {level.kubelet.text} + {units.format_quantity(margin)}"


def notes(thresholds: Iterable[Threshold], snapshot: NodeSnapshot) -> tuple[Note, ...]:
    """A note for each threshold of the kubelet that is not followed on this node."""
    found: dict[str, Note] = {}
    for threshold in thresholds:
        observation = snapshot.observations.get(threshold.signal)
        refused = not_followed(threshold, capacity=observation.capacity if observation is not None else None)
        if refused is not None:
            message = (
                f"its threshold {threshold.signal}<{refused.text} is half of the capacity or more: ours is not kept "
                "above it"
            )
            found[message] = Note(NoteKind.KUBELET, message)
    return tuple(found.values())


def not_followed(threshold: Threshold, *, capacity: int | None) -> Amount | None:
    """The kubelet's threshold that is half of the capacity or more, so that this one is not raised above it."""
    return next(
        (each.kubelet for each in threshold.above_kubelet if resolve.beyond_half(each, capacity=capacity)), None
    )


def _keep_above(threshold: Threshold, kubelet: Sequence[Threshold]) -> Threshold:
    theirs = [each for each in kubelet if each.signal is threshold.signal]
    if kubelet and not theirs:
        theirs = [Threshold(threshold.signal, _NO_THRESHOLD)]
    configured_s = threshold.grace_period_s if threshold.configured_grace_s is None else threshold.configured_grace_s
    graces = [each.grace_period_s for each in theirs if not each.hard and not _never_met(each.value)]
    grace_s = min([configured_s, *map(_grace_before, graces)])
    return threshold._replace(
        above_kubelet=tuple(_levels(threshold, theirs)),
        grace_period_s=grace_s,
        configured_grace_s=configured_s if grace_s < configured_s else None,
    )


def _grace_before(kubelets_s: float) -> float:
    """The longest grace period that ends before the kubelet's."""
    return max(kubelets_s * defaults.KUBELET_GRACE_SHARE, kubelets_s - defaults.KUBELET_GRACE_LEAD_S)


def _never_met(value: Amount) -> bool:
    return not value.quantity and not value.percentage


def _levels(threshold: Threshold, kubelet: Iterable[Threshold]) -> Iterable[KubeletLevel]:
    for theirs in kubelet:
        if threshold.hard and not theirs.hard:
            continue
        memory, soft_above_hard = threshold.signal in MEMORY_SIGNALS, theirs.hard and not threshold.hard
        margin = defaults.KUBELET_MARGINS[memory, soft_above_hard]
        yield KubeletLevel(theirs.value, margin, margin_of_capacity=not memory)
