"""Evict the pods that would use up what others free.

Memory that a leak takes again within minutes helps nobody: pods that are first by their QoS class would be evicted one
after another, and in the end the leaking pod as well. (A kubelet's order begins with what exceeds its request.) The
largest pod, which may have been idle for months, would be evicted for a small one that grows: for a leak the memory of
a database, for a disk that is filled its data, for leaked threads its connections.

So where the selection would free a resource only for pods that grow, these are evicted instead, in their own order, if
they

* use more than they request, and grow: together so fast that they use up soon (`MEMORY_S`, `DISK_AND_PIDS_S`) what the
  selection frees or what the threshold reserves, whichever is less, and each at least half as fast as the fastest;
* are not behind the selection by any key that says whose loss is worse (priority, the pod's own preference, deletion
  cost and so on): only class, usage and growth are passed over.
"""

from collections.abc import Callable, Sequence
from typing import Final

from nodeagent.config.schema import RankingKey
from nodeagent.model import MEMORY_SIGNALS, RankedPod, Signal
from nodeagent.policy import ranking

MEMORY_S: Final = 300.0
"""Slower growth is left to people, who were told: a pod that warms up grows for a while as slowly."""
DISK_AND_PIDS_S: Final = 3600.0
"""As pods that fill a disk are told from a disk that stays full (`kubelet_first.PODS_FILL_S`)."""
_BY_USAGE: Final = frozenset[str](
    {
        RankingKey.QOS,
        RankingKey.EXCEEDS_REQUEST,
        RankingKey.USAGE_OVER_REQUEST,
        RankingKey.USAGE,
        RankingKey.GROWTH,
        ranking.PROJECTED_USAGE,
    }
)


def growing_instead(
    selected: Sequence[RankedPod],
    pool: Sequence[RankedPod],
    *,
    deficit: int,
    reserve: int,
    signal: Signal,
    order: Sequence[str],
    growth_per_s: Callable[[RankedPod], float],
) -> list[RankedPod]:
    """The pods of the pool that are evicted instead of the `selected` ones; empty: these are evicted.

    `reserve` is what the threshold keeps free. `order` are the names of the keys in `RankedPod.values`. `growth_per_s`
    is how fast a pod certainly grows.
    """
    if not selected:
        return []
    chosen = {pod.view.pod.uid for pod in selected}
    first = min([_worth(pod, order) for pod in selected])
    growing = [pod for pod in pool if over_request(pod) and (pod.view.pod.uid in chosen or _worth(pod, order) <= first)]
    fastest = max([growth_per_s(pod) for pod in growing], default=0.0)
    growing = [pod for pod in growing if growth_per_s(pod) * 2 >= fastest > 0.0]
    others_per_s = sum(growth_per_s(pod) for pod in growing if pod.view.pod.uid not in chosen)
    soon_s = MEMORY_S if signal in MEMORY_SIGNALS else DISK_AND_PIDS_S
    used_up = others_per_s * soon_s >= min(reserve, _freed(selected))
    return growing if used_up and others_per_s > 0.0 and _freed(growing) >= deficit else []


def _freed(pods: Sequence[RankedPod]) -> int:
    return sum(pod.relief or 0 for pod in pods)


def over_request(pod: RankedPod) -> bool:
    """Whether it uses more than it requests."""
    return pod.usage is not None and pod.usage > (pod.request or 0)


def _worth(pod: RankedPod, order: Sequence[str]) -> tuple[float, ...]:
    """What the order says about the pod beside class, usage and growth; the smallest is evicted first."""
    return tuple([value for name, value in zip(order, pod.values, strict=True) if name not in _BY_USAGE])
