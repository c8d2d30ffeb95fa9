"""Reads for the loop: the node in every sync, the pods when a decision or a prearm needs them.

Promises:

1. The schedule state is what `plan_next` returned, unchanged; only `observe_node` and `reset` replace it.
2. A decision has one snapshot, assembled once. A pod reading that was prearmed replaces a part, never a field.
3. Nothing here waits for the API server or a disk.
"""

from collections.abc import Callable, Mapping
from typing import Final

from nodeagent.loop import schedule
from nodeagent.loop.components import Components, Runtime
from nodeagent.loop.own_limit_watch import OwnLimitWatch, WatchResult
from nodeagent.loop.schedule import Schedule, ScheduleInputs, ScheduleState
from nodeagent.loop.state_store import StateStore
from nodeagent.model import (
    ConditionStatus,
    DiskLayout,
    NodeSnapshot,
    Plan,
    PodSource,
    Signal,
    Threshold,
    Tier,
)
from nodeagent.policy import (
    candidates,
    effective_thresholds,
    eviction_hook,
    eviction_request,
    in_flight,
    kubelet_first,
    resizes,
    victim_preview,
)
from nodeagent.policy.victim_preview import PredictedVictim
from nodeagent.runtime import own_cost
from nodeagent.sampling.disk.monitor import DiskUrgency
from nodeagent.sampling.snapshot import PodReading, SnapshotParts, assemble_snapshot
from nodeagent.telemetry.metrics import Metrics, SyncStage

STARTUP_API_WAIT_S: Final = 3.0
"""How long after its start a calm agent reads no pod before the API server has listed them, which takes 0.3 s: what it
lists need not be read from the processes of each pod."""
PIDS_LOW: Final = 0.25
"""Share of the PIDs. Below it zombies are counted every `zombies.SHORT_S`: a decision then knows their parents."""
LISTING_DELAY_S: Final = 1.5
"""A pod on the host that is older than this and not listed is missing from the API server's view: a kubelet starts only
pods that the API server has sent to it, and a watch is at most that late."""


class Observer:
    """What the loop of one agent reads."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        components: Callable[[], Components],
        store: StateStore,
        metrics: Metrics,
        can_cap_growth: Callable[[], bool],
        own_limits: OwnLimitWatch,
    ) -> None:
        self._runtime = runtime
        self._components = components
        self._store = store
        self._metrics = metrics
        self._can_cap_growth = can_cap_growth
        self._own_limits = own_limits
        self._started_at = runtime.monotonic()
        self._state = ScheduleState()
        self._short: Tier | None = None
        """Of the last node sample (`Schedule.short`)."""
        self._prearmed: SnapshotParts | None = None
        self.latest: NodeSnapshot | None = None
        """The newest snapshot with pods, of a decision or a prearm."""
        self._recount_requested = False
        """The last decision waits for new disk usage of some pods."""
        self._left_to_kubelet: Mapping[Threshold, Threshold] = {}
        """Thresholds that counted as not met at the last decision because of images, each with what counts instead."""
        self._thresholds: dict[DiskLayout, tuple[Threshold, ...]] = {}
        self.ranking_cache = candidates.RankingCache()
        self.interval_factor = 1.0
        """Stretches the interval while the agent costs more than its limits."""

    def skip_startup_wait(self) -> None:
        """For an agent that runs a fixed number of syncs: each of them decides."""
        self._started_at = float("-inf")

    def reset(self) -> None:
        """After a reload: every source is due, and nothing that was read for the old configuration is used."""
        self._thresholds.clear()
        self._prearmed = None
        self._own_limits.reset()
        self._state = self._state._replace(
            full_sample_at=None, calm=0, filesystems_at=schedule.NOT_YET, limits_at=schedule.NOT_YET
        )

    def forget_thresholds(self) -> None:
        """The thresholds of the configuration have changed; what was read stays valid."""
        self._thresholds.clear()

    def observe_node(self) -> tuple[NodeSnapshot, Schedule]:
        """The node sample and what follows from it. Requests the disk walks that are due."""
        components, state, now = self._components(), self._state, self._runtime.boottime()
        awaiting = in_flight.awaits_release(self._store.policy_state.in_flight)
        node = components.sampler.sample_node(
            disks=awaiting or now >= state.filesystems_at, limits=awaiting or now >= state.limits_at
        )
        own = self._own_limits.read(components.sampler, now=node.taken_at, config=components.config)
        inputs = self._inputs(node, own, eviction_in_flight=awaiting)
        due, self._state = schedule.plan_next(inputs, state)
        self._short = due.short
        if Signal.PID in due.crossed or _pids_low(node):
            self._runtime.count_zombies_soon()
        layout = components.sampler.host_layout()
        left = frozenset([each.signal for each in self._left_to_kubelet])
        urgency = DiskUrgency(crossed=due.crossed, soon=due.soon, lasting=due.near | left)
        if left & due.soon:
            self._left_to_kubelet = {}  # pods may fill it now: the next sync decides
        components.disks.request_walks(node, urgency, hierarchy=layout.hierarchy, layout=layout.layout)
        return node, due

    def observe_pods(self, node: NodeSnapshot) -> NodeSnapshot:
        """The snapshot of a decision."""
        with self._metrics.timed(SyncStage.SAMPLE):
            prearmed, self._prearmed = self._prearmed, None
            if prearmed is not None and 0.0 <= node.taken_at - prearmed.node.taken_at <= schedule.PREARM_VALID_S:
                self.latest = assemble_snapshot(prearmed._replace(node=node))
            else:
                self.latest = assemble_snapshot(self._read_parts(node))
            return self.latest

    def prearm(self, node: NodeSnapshot, *, predict: bool) -> tuple[PredictedVictim, ...]:
        """Read the pods right before a hard crossing, so that the decision finds them ready. Returns the victims of the
        next hard memory threshold; empty without `predict`."""
        parts = self._prearmed = self._read_parts(node)
        config, snapshot = self._components().config, assemble_snapshot(parts)
        self.latest = snapshot
        self.ranking_cache.prepare(snapshot, config=config)
        if not predict:
            return ()
        return victim_preview.preview_victims(
            snapshot, self._store.policy_state, now=snapshot.taken_at, config=config, cache=self.ranking_cache
        )

    def follow(self, plan: Plan) -> None:
        """From the next sync on, measure the disk usage that the plan wants again, and treat a disk that is left
        to the kubelet as calm until its threshold counts."""
        self._components().disks.recount(plan.recount)
        self._recount_requested = bool(plan.recount)
        layout = self.latest.layout if self.latest is not None else DiskLayout.UNKNOWN
        self._left_to_kubelet = kubelet_first.next_thresholds(plan.signals, layout)

    def thresholds(self, layout: DiskLayout) -> tuple[Threshold, ...]:
        """The thresholds that are in force with this disk layout."""
        if layout not in self._thresholds:
            self._thresholds[layout] = effective_thresholds.effective(self._components().config, layout)
        return self._thresholds[layout]

    # --- parts

    def _inputs(self, node: NodeSnapshot, own: WatchResult, *, eviction_in_flight: bool) -> ScheduleInputs:
        sampling = self._components().config.sampling
        return ScheduleInputs(
            node,
            tuple([self._left_to_kubelet.get(each, each) for each in self.thresholds(node.layout)]),
            own_cost.longer_interval(sampling.interval_s, self.interval_factor, stale_after_s=sampling.stale_after_s),
            calm_s=min(schedule.CALM_S, sampling.stale_after_s / 2),
            work_pending=self._work_pending(node.taken_at),
            eviction_in_flight=eviction_in_flight,
            startup_wait_s=self._startup_wait_s(),
            can_cap_growth=self._can_cap_growth(),
            near_own_limit=own.near,
            own_limits_s=own.next_s,
        )

    def _work_pending(self, now: float) -> bool:
        """True if decisions follow something that goes on although no threshold is crossed."""
        policy = self._store.policy_state
        return (
            bool(policy.thresholds.first_observed)
            or any(each.status is ConditionStatus.TRUE for each in policy.conditions.conditions.values())
            or any(not run.measured for run in policy.reclaims.runs.values())
            or eviction_hook.is_running(policy.hooks)
            or eviction_request.is_pending(policy.eviction_requests)
            or resizes.is_open(policy.resizes)
            or self._recount_requested
            or self._runtime.forks.storm(now)
        )

    def _startup_wait_s(self) -> float:
        left_s = self._started_at + STARTUP_API_WAIT_S - self._runtime.monotonic()
        view = self._components().session.pods()
        return left_s if view.awaited and view.synced_at is None else 0.0

    def _read_parts(self, node: NodeSnapshot) -> SnapshotParts:
        """The node and its pods. Every pod that moved is read now; the others keep their last reading (0.6 ms instead
        of 10 ms for 110 pods), for some seconds at most where a decision may evict for memory or PIDs."""
        components, runtime = self._components(), self._runtime
        soft_tier_block = components.session.soft_tier_block()
        view = components.session.pods()
        listed = view.pods if view.synced_at is not None else None
        pods = components.sampler.read_pods(node, listed, fresh=False, short=self._short)
        if listed is not None:
            components.session.report_missing(_unlisted(pods, listed=len(listed), now=node.taken_at))
        if in_flight.awaits_release(self._store.policy_state.in_flight):
            node = components.sampler.sample_node()
        components.disks.set_targets(pods.pods)
        self._own_limits.set_targets(pods.pods, components.config)
        return SnapshotParts(
            node,
            pods,
            pods_synced_at=view.synced_at,
            fork_rates=runtime.forks.sustained(node.taken_at),
            own_limits=self._own_limits.limits,
            disks=components.disks.usage(node.taken_at),
            api_unreachable_since=view.unreachable_since,
            soft_tier_blocked_by=soft_tier_block,
            eviction_requests=components.session.eviction_requests_served(),
            own_pod_uid=runtime.own_pod_uid,
            zombies=runtime.zombies(),
            allocatable_memory=view.allocatable_memory,
            unused_images=view.unused_images,
        )


def _pids_low(node: NodeSnapshot) -> bool:
    observed = node.observations[Signal.PID]
    if observed.available is None or observed.capacity is None:
        return False
    return observed.available < observed.capacity * PIDS_LOW


def _unlisted(reading: PodReading, *, listed: int, now: float) -> frozenset[str]:
    """UIDs of the cgroups of pods that the API server should have listed by now. Its own stand first in a reading."""
    return frozenset(
        [
            usage.cgroup_uid
            for pod, usage in reading.pods[listed:]
            if pod.source is PodSource.HOST
            and usage is not None
            and (usage.started_at is None or now - usage.started_at >= LISTING_DELAY_S)
        ]
    )
