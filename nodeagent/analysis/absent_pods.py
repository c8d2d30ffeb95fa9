"""The node without the pods that a simulation evicted: a stated simplification of what their eviction changes.

Theory of operation. From the eviction on, a victim is terminating for its whole grace period; the kubelet may be
faster. After that it is no longer listed, and each later sample in which the recording still has it has more available
by what the pod uses in that sample: its working set in the kubelet's figure of memory, the policy's own prediction
(`relief.predicted_relief`) in every other signal. When the recording shows it gone, nothing is added any more.

What a recording cannot tell: the replacement of the victim, which may start on this node again; the page cache that
takes the memory's place; whether other pods would have grown differently; answers of the API server.
"""

from typing import NamedTuple

from nodeagent.config.schema import Config
from nodeagent.model import (
    MEMORY_SIGNALS,
    NodeSnapshot,
    Observation,
    PodUsage,
    PodView,
    Signal,
    Victim,
)
from nodeagent.policy import relief


class AbsentPod(NamedTuple):
    """A pod that the simulation evicted."""

    ends_at: float
    """CLOCK_BOOTTIME at which its grace is over."""
    deletion_wall: float
    grace_s: float


class AbsentPods:
    """The evicted pods of one simulation, by UID."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._pods: dict[str, AbsentPod] = {}

    def __bool__(self) -> bool:
        return bool(self._pods)

    def add(self, victim: Victim, snapshot: NodeSnapshot) -> None:
        """A victim of the decision on this snapshot."""
        grace_s = victim.grace_period_s
        self._pods[victim.pod.uid] = AbsentPod(snapshot.taken_at + grace_s, snapshot.wall_time + grace_s, grace_s)

    def clear(self) -> None:
        """After a restart of the machine no pod of before is left."""
        self._pods.clear()

    def without(self, snapshot: NodeSnapshot) -> NodeSnapshot:
        """The sample as the simulated node would have shown it. A pod that the recording shows gone is forgotten."""
        if not self._pods:
            return snapshot
        kept: list[PodView] = []
        gone: list[PodUsage] = []
        listed: set[str] = set()
        for view in snapshot.pods:
            absent = self._pods.get(view.pod.uid)
            if absent is None:
                kept.append(view)
                continue
            listed.add(view.pod.uid)
            if snapshot.taken_at < absent.ends_at:
                pod = view.pod
                if pod.deletion_wall is None:
                    pod = pod._replace(deletion_wall=absent.deletion_wall, deletion_grace_s=absent.grace_s)
                kept.append(PodView(pod, view.usage))
            elif view.usage is not None:
                gone.append(view.usage)
        self._pods = {uid: each for uid, each in self._pods.items() if uid in listed}
        return self._relieved(snapshot, gone)._replace(pods=tuple(kept)) if listed else snapshot

    def _relieved(self, snapshot: NodeSnapshot, gone: list[PodUsage]) -> NodeSnapshot:
        """The sample with what these pods use available."""
        if not gone:
            return snapshot
        swap_memory = relief.swap_memory(snapshot, config=self._config)
        freed = {
            signal: sum(
                [
                    relief.predicted_relief(usage, signal, snapshot.layout, swap_memory=swap_memory) or 0
                    for usage in gone
                ]
            )
            for signal in Signal
        }
        working_set = sum([usage.memory_working_set or 0 for usage in gone])
        by_kernel = snapshot.allocatable_by_kernel
        return snapshot._replace(
            observations={
                signal: _more(observation, working_set if signal in MEMORY_SIGNALS else freed[signal])
                for signal, observation in snapshot.observations.items()
            },
            mem_available=_more(snapshot.mem_available, freed[Signal.MEMORY]),
            allocatable_by_kernel=None if by_kernel is None else _more(by_kernel, freed[Signal.ALLOCATABLE_MEMORY]),
        )


def _more(observation: Observation, amount: int) -> Observation:
    """The observation with this much more available, at most its capacity."""
    if observation.available is None or observation.capacity is None or amount <= 0:
        return observation
    return observation._replace(available=min(observation.capacity, observation.available + amount))
