"""Refuses to evict for PIDs that zombies of the host hold: the kubelet, a runtime or another service does not wait for
its children.

Theory of operation. Evicting pods frees no such PID, and the holder takes what the pods give: one pod after another
would be evicted for a defect of the host. So no pod is evicted while all of this is true:

1. the zombies were counted at most `FRESH_S` before the sample,
2. without those of the host the threshold would not be met: they are at least the deficit,
3. they are more than any candidate holds, and
4. no candidate starts as many processes as are missing within seconds: a fork bomb is evicted whatever else is wrong.

An unknown count changes nothing. A pod that does not wait for its children holds their PIDs itself (`pids.current`),
and is ranked by them.
"""

from collections.abc import Sequence
from typing import Final

from nodeagent.model import NodeSnapshot, RankedPod, Refusal, RefusalCode, Signal, ZombieCount
from nodeagent.policy import usage_growth

FRESH_S: Final = 60.0
"""While PIDs are nearly short they are counted every 10 s."""
TOP_HOLDERS: Final = 3


def refusal(snapshot: NodeSnapshot, pods: Sequence[RankedPod], signal: Signal, deficit: int) -> Refusal | None:
    """Why no pod is evicted for this deficit; None if zombies of the host are no reason. `pods`: all ranked pods."""
    count = snapshot.zombies
    if signal is not Signal.PID or count is None or not 0 <= snapshot.taken_at - count.read_at <= FRESH_S:
        return None
    held = sum(holder.zombies for holder in count.of_host)
    candidates = [ranked for ranked in pods if not ranked.refusals]
    largest = max((ranked.relief or 0 for ranked in candidates), default=0)
    forks = max((usage_growth.expected_forks(ranked.view.usage) for ranked in candidates), default=0)
    if not deficit or held < deficit or held <= largest or forks >= deficit:
        return None
    return Refusal(
        RefusalCode.HOST_ZOMBIES,
        f"{signal.value}: {deficit} missing, and zombies of the host hold {held} ({describe(count)}), more than any "
        f"candidate (at most {largest}); no eviction ends them",
    )


def describe(count: ZombieCount) -> str:
    """`kubelet.service 400 (kubelet, PID 812), cron.service 3 (cron, PID 99)`: the holders outside of pods."""
    return ", ".join(
        f"{holder.unit} {holder.zombies} ({holder.command or 'a process'}, PID {holder.pid})"
        for holder in count.of_host[:TOP_HOLDERS]
    )
