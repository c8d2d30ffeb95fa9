"""Say that memory grows outside of pods, in a service of the host or in the kernel.

What evictions free lasts for minutes only then, and the next pods are evicted for the same cause. They are evicted
nevertheless: the OOM killer takes containers before services of the host (their `oom_score_adj` is higher), and an
eviction ends a pod gracefully, by its budget and to start again on another node. (PIDs and disks kill nobody when they
are used up: `host_zombies` and `fresh_usage` evict nobody there.) But the cause is for people to mend, so a note names
it.
"""

import math

from nodeagent.config.schema import Config
from nodeagent.model import NodeSnapshot, Note, NoteKind, Signal, ThresholdVerdict, units
from nodeagent.policy import lasting_relief, plausibility, pod_usage, trend, usage_growth


def notes(
    growth: usage_growth.GrowthState,
    snapshot: NodeSnapshot,
    verdict: ThresholdVerdict,
    history: trend.History,
    *,
    config: Config,
) -> tuple[Note, ...]:
    """That memory outside of pods grows, if it uses up within `lasting_relief.MEMORY_S` what the threshold reserves.

    `history` is that of the threshold. The growth is at least half of its present loss: while a pod grew by 50 MiB a
    second, 1 MiB a second was seen outside of pods on a real kernel. What grew a few seconds ago and takes no more is
    not said.
    """
    reserve = verdict.value
    if verdict.threshold.signal is not Signal.MEMORY or not reserve:
        return ()
    memory_rule = pod_usage.memory_rule(snapshot, config=config)
    per_s = usage_growth.growth_outside_pods(growth, snapshot, memory_rule=memory_rule)
    loss_per_s = -(trend.between_neighbours(history) or 0.0)
    if per_s * lasting_relief.MEMORY_S < reserve or not loss_per_s / 2 <= per_s <= loss_per_s * 2:
        return ()
    about = units.format_amount(1 << round(math.log2(max(1.0, per_s))))
    text = (
        f"memory outside of pods grows by about {about} a second: whatever is evicted, it uses up the threshold's "
        f"{units.format_amount(reserve)} in {reserve / per_s:.0f}s"
    )
    largest = _largest_holder(snapshot)
    return (Note(NoteKind.MEMORY, f"{text}; the largest holder is {largest}" if largest else text),)


def _largest_holder(snapshot: NodeSnapshot) -> str:
    """Empty if it is unknown. Without its amount, which differs each time: the log has a note once."""
    groups = [(plausibility.plausible(each.memory_working_set) or 0, each.path) for each in snapshot.cgroups]
    slab = plausibility.plausible(snapshot.memory.slab_unreclaimable) if snapshot.memory is not None else None
    return max([*groups, (slab, "slab") if slab else (0, "")])[1]
