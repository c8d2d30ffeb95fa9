"""Finds OOM kills and reports them: log, record, metrics, Events, notes.

Promises:

1. A kill is found by the next node sample, at most a second later with the default interval. Without a kill this costs
   one file of 4 KiB for each `CHECK_EVERY_S`.
2. A kill is reported once. A counter that was there at the first start is not a new kill. The saved state has the last
   counters, so kills while no agent was running are reported as such, also that of the agent itself.
3. A kill is never a reason to evict: nothing here reaches the policy.
4. The sum of what is reported is the kernel's total; what cannot be attributed is reported as that.

Theory of operation. `observe` runs in every sync, after everything that acts. The node's counter is the hint. If it
moved, the cgroups and the kernel log are read and `oom_attribution` joins them with the pods of the last samples.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from nodeagent.loop.components import Components, Runtime
from nodeagent.loop.state_store import OomState, StateStore
from nodeagent.model import (
    LoggedKill,
    LostRace,
    MemorySample,
    NodeSnapshot,
    Note,
    NoteKind,
    OomCount,
    OomEvents,
    OomKill,
    OomPlace,
    OomReport,
    Plan,
    PodView,
    Signal,
    StallScope,
)
from nodeagent.policy import candidates, lost_race, oom_attribution, oom_messages
from nodeagent.policy.state import PolicyState
from nodeagent.report import wording
from nodeagent.sampling.node import oom_counters
from nodeagent.sampling.node.kernel_log import OomLogParser
from nodeagent.telemetry.decision_log import DecisionLog
from nodeagent.telemetry.metrics import Metrics

CHECK_EVERY_S: Final = 0.1
"""Least time between two readings of the counter: 20 us of CPU each, at most 0.02% of a core."""
REPORT_EVERY_S: Final = 0.9
"""Least time between two reports: a container whose child processes are killed without end makes one a second, not
ten."""
SETTLE_S: Final = 10.0
"""How long a limit that was reached, or a log line, waits for its kill: the kernel writes its log in between, which on
a slow serial console takes seconds. Later it belongs to no kill."""
NAMES_WAIT_S: Final = 10.0
"""How long after a start the kills of before wait for the API server to list the pods, which takes 0.3 s."""
MAX_SAMPLES: Final = 60
SAMPLE_EVERY_S: Final = 0.1
"""Least distance of two kept samples, except the newest one."""
PODS_EVERY_S: Final = 1.0
PODS_KEPT_S: Final = 600.0
"""How long a pod that is gone keeps its name."""
SEEN_LATELY_S: Final = 15.0
"""A calm agent samples the pods every 10 s."""
MAX_PODS: Final = 2000
NOTE_S: Final = 3600.0
"""How long a report stays in the notes for `check`."""
MAX_NOTES: Final = 10


class _Remembered(NamedTuple):
    view: PodView
    at: float


class _Judged(NamedTuple):
    """What a lost race is judged by."""

    plan: Plan
    """The last decision."""
    snapshot: NodeSnapshot
    """The newest pods, which may have been read after it."""
    state: PolicyState
    """After that decision."""


class OomMonitor:
    """The OOM kills of one node. Only the loop's thread calls it."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        components: Callable[[], Components],
        store: StateStore,
        decision_log: DecisionLog,
        metrics: Metrics,
        cache: candidates.RankingCache,
        latest: Callable[[], NodeSnapshot | None],
    ) -> None:
        """`latest`: the newest snapshot with pods, which may be newer than that of the last decision."""
        self._sources, self._saved = runtime.oom_sources, runtime.oom_state
        self._components = components
        self._store = store
        self._decision_log = decision_log
        self._metrics = metrics
        self._cache = cache
        self._latest = latest
        self._snapshots = runtime.auto_snapshots
        self._kills: int | None = None
        """The counter at the last check."""
        self._ahead = 0
        self._checked_at = float("-inf")
        self._reported_at = float("-inf")
        self._read_at = float("-inf")
        """When the cgroups were last read."""
        self._parser = OomLogParser()
        self._ooms: dict[OomPlace, tuple[OomEvents, float]] = {}
        """Limits that were reached, without a kill so far or with those of a group, which may not be all."""
        self._lines: list[tuple[LoggedKill, float]] = []
        """Log lines without a counted kill so far."""
        self._samples: deque[MemorySample] = deque(maxlen=MAX_SAMPLES)
        self._last: tuple[Plan, NodeSnapshot] | None = None
        self._before_check: _Judged | None = None
        """At the last check: before every kill that the next check finds."""
        self._pods: dict[str, _Remembered] = {}
        self._pods_at = float("-inf")
        self._reports: deque[tuple[float, float, OomReport]] = deque(maxlen=MAX_NOTES)
        """With the time on both clocks."""
        self._sequence = 0
        self._first_at: float | None = None

    @property
    def state(self) -> OomState | None:
        """For the saved state; None before the first check, or where kills are not counted."""
        if self._kills is None:
            return self._saved
        return OomState(self._kills, dict(self._sources.cgroups.totals))

    def notes(self) -> tuple[Note, ...]:
        """The last reports, for `check`."""
        now = self._checked_at
        return tuple(
            Note(NoteKind.OOM_KILLS, oom_messages.note_text(kill, report, at_wall=wording.rfc3339(wall)))
            for at, wall, report in self._reports
            if now - at <= NOTE_S
            for kill in report.kills
        )[-MAX_NOTES:]

    def remember(self, plan: Plan, snapshot: NodeSnapshot) -> None:
        """The last decision, and the pods that it saw: a pod may be gone when its kill is found."""
        self._last = (plan, snapshot)
        now = snapshot.taken_at
        if now - self._pods_at < PODS_EVERY_S:
            return
        self._pods_at = now
        self._pods.update({view.pod.cgroup_uid: _Remembered(view, now) for view in snapshot.pods})
        if len(self._pods) > len(snapshot.pods):
            kept = [(uid, each) for uid, each in self._pods.items() if now - each.at <= PODS_KEPT_S]
            self._pods = dict(sorted(kept, key=lambda each: each[1].at)[-MAX_PODS:])

    def observe(self, node: NodeSnapshot) -> None:
        """Keep the sample, and report the kills since the last check."""
        now = node.taken_at
        before = self._checked_at
        self._keep(node)
        if 0.0 <= now - before < CHECK_EVERY_S or 0.0 <= now - self._reported_at < REPORT_EVERY_S:
            return
        kills = self._sources.counter.read()
        self._checked_at = now
        if kills is not None:
            self._check(kills, node, before=before)
            self._before_check = self._newest()

    # --- parts

    def _check(self, kills: int, node: NodeSnapshot, *, before: float) -> None:
        now = node.taken_at
        if self._kills is None:
            self._start(kills, node)
            return
        new = kills - self._kills
        self._kills = kills
        hierarchy = self._components().sampler.host_layout().hierarchy
        if new > 0:
            self._report(new, self._read_counts(now), node, before=before)
            return
        self._sources.log.mark(now)
        if now - self._read_at >= SETTLE_S and oom_counters.counts_limits(hierarchy):
            counts = self._read_counts(now)
            if any(count.own.kills or count.gone.kills for count in counts):
                # Since the node's counter was read. The next reading of the cgroups shows these kills no more.
                self._report(0, counts, node, before=before)
            else:
                self._store_ooms(counts, now)

    def _newest(self) -> _Judged | None:
        if self._last is None:
            return None
        plan, snapshot = self._last
        latest = self._latest()
        if latest is not None and latest.taken_at > snapshot.taken_at:
            snapshot = latest
        return _Judged(plan, snapshot, self._store.policy_state)

    def _start(self, kills: int, node: NodeSnapshot) -> None:
        """The first check: what an earlier process has not seen, or the baseline."""
        saved = self._saved
        new = kills - saved.kills if saved is not None else 0
        if new > 0 and node.taken_at < self._start_by(node.taken_at):
            return
        self._kills = kills
        if saved is None or new <= 0:
            self._read_counts(node.taken_at)  # the counters so far are no new kills
            self._sources.log.mark(node.taken_at)
            return
        self._report(new, self._read_counts(node.taken_at), node, before=node.taken_at, while_down=True)

    def _start_by(self, now: float) -> float:
        """Until when the kills of before wait for the API server, which names the pods and takes the Events."""
        view = self._components().session.pods()
        if self._first_at is None:
            self._first_at = now
        return self._first_at + NAMES_WAIT_S if view.awaited and view.synced_at is None else now

    def _read_counts(self, now: float) -> tuple[OomCount, ...]:
        layout = self._components().sampler.host_layout()
        self._read_at = now
        return self._sources.cgroups.read(layout.hierarchy, layout.kubepods.path if layout.kubepods else "")

    def _store_ooms(self, counts: tuple[OomCount, ...], now: float) -> None:
        self._ooms = {place: each for place, each in self._ooms.items() if now - each[1] < SETTLE_S}
        for count in counts:
            # The kernel kills the processes of a group (memory.oom.group) one by one: the next reading may have more.
            if count.own.ooms and (not count.own.kills or count.own.group_kills):
                self._ooms[count.place] = (count.own, now)

    def _report(
        self, new: int, counts: tuple[OomCount, ...], node: NodeSnapshot, *, before: float, while_down: bool = False
    ) -> None:
        """Report `new` kills of the node's counter with those that the cgroups count. The last sample before them was
        taken at `before`."""
        now = node.taken_at
        earlier = {place: events for place, (events, at) in self._ooms.items() if now - at < SETTLE_S}
        pods = self._known_pods(now)
        lines = [*self._settled(now), *self._read_log(now, new if while_down else None)]
        total = max(0, new - self._ahead)
        result = oom_attribution.attribute(total, oom_attribution.merge_ooms(counts, earlier), lines, pods)
        self._ahead = max(0, self._ahead - new) + result.ahead
        read_at = dict(self._lines)
        self._lines = [(line, read_at.get(line, now)) for line in result.unused]
        limits = {kill.limit for kill in result.kills}
        self._ooms = {place: each for place, each in self._ooms.items() if place.path not in limits}
        self._store_ooms(counts, now)
        if not result.kills:
            return
        killed_at = _killed_at(result.kills, node, before=None if while_down else before)
        if killed_at is not None:
            before = killed_at
        samples = [each for each in self._samples if each.at <= before and not while_down]
        self._sequence += 1
        report = OomReport(
            id=f"{self._store.policy_state.instance}-oom{self._sequence}",
            at=now,
            killed_at=killed_at,
            kills=result.kills,
            # Those of the last report are in its record.
            samples=tuple([each for each in samples if each.at > self._reported_at]),
            race=self._race(result.kills, samples, before, while_down=while_down),
            while_down=while_down,
        )
        self._publish(report, pods, node)

    def _publish(self, report: OomReport, pods: Mapping[str, PodView], node: NodeSnapshot) -> None:
        self._reported_at = report.at
        self._reports.append((report.at, node.wall_time, report))
        self._metrics.observe_oom_kills(report)
        self._decision_log.log_oom_kills(report)
        if self._snapshots is not None:
            self._snapshots.observe_oom(report, now=report.at, wall=node.wall_time)
        self._components().session.announce_oom_kills(report, pods)
        # Reported once, also if the agent is killed next.
        self._store.save(now=report.at, urgent=True)

    def _race(
        self, kills: tuple[OomKill, ...], samples: Sequence[MemorySample], before: float, *, while_down: bool
    ) -> LostRace | None:
        # After a kill its memory is free: the pods of that sample, and what was decided on them, name other victims.
        judged = self._before_check or self._newest()
        if while_down or judged is None:
            return lost_race.not_running() if any(kill.cause.race for kill in kills) else None
        return lost_race.assess(
            kills,
            samples,
            before=before,
            plan=judged.plan,
            snapshot=judged.snapshot,
            state=judged.state,
            config=self._components().config,
            cache=self._cache,
        )

    def _settled(self, now: float) -> list[LoggedKill]:
        return [line for line, at in self._lines if now - at < SETTLE_S]

    def _read_log(self, now: float, most: int | None) -> list[LoggedKill]:
        """`most`: the log begins before the kills that are searched, which are the last ones in it."""
        layout = self._components().sampler.host_layout()
        kubepods = layout.kubepods.path if layout.kubepods else ""
        lines = self._parser.parse(self._sources.log.read(now), lambda path: oom_counters.place_of(path, kubepods))
        return lines if most is None else lines[-most:]

    def _known_pods(self, now: float) -> dict[str, PodView]:
        """The pods of the last samples with the newest objects of the API server. One that was not seen lately has no
        usage: it is not the one that is gone since then."""
        pods = {
            uid: each.view if now - each.at <= SEEN_LATELY_S else PodView(each.view.pod, None)
            for uid, each in self._pods.items()
        }
        if self._last is not None:
            pods |= {view.pod.cgroup_uid: view for view in self._last[1].pods}
        if self._before_check is not None:
            pods |= {
                view.pod.cgroup_uid: _with_containers_of(view, pods[view.pod.cgroup_uid])
                for view in self._before_check.snapshot.pods
                if view.pod.cgroup_uid in pods
            }
        for pod in self._components().session.pods().pods:
            known = pods.get(pod.cgroup_uid)
            pods[pod.cgroup_uid] = PodView(pod, known.usage if known is not None else None)
        return pods

    def _keep(self, node: NodeSnapshot) -> None:
        """Keep both figures of a sample. Samples that follow fast replace each other, so that the ring covers some
        seconds."""
        some = full = None
        if self._last is not None:
            for stall in self._last[1].stalls:
                if stall.scope is StallScope.NODE and stall.resource == "memory":
                    some, full = stall.some_avg10, stall.full_avg10
        memory = node.observations[Signal.MEMORY]
        sample = MemorySample(node.taken_at, memory.available, node.mem_available.available, some, full)
        samples = self._samples
        if len(samples) > 1 and samples[-1].at - samples[-2].at < SAMPLE_EVERY_S:
            samples.pop()
        samples.append(sample)


def _with_containers_of(before: PodView, after: PodView) -> PodView:
    """`after` with the containers of both: a container that was killed may be gone when its pod is read again."""
    if before.usage is None or after.usage is None:
        return after
    containers = {each.container_id: each for each in (*before.usage.containers, *after.usage.containers)}
    return PodView(after.pod, after.usage._replace(containers=tuple(containers.values())))


def _killed_at(kills: tuple[OomKill, ...], node: NodeSnapshot, *, before: float | None) -> float | None:
    """The time of the first kill by the kernel log, on CLOCK_BOOTTIME. The log has a clock of its own, which may run
    away from it: a time that is not between the last two checks, give or take a second, is no time. `before`: the
    check before; None: any time."""
    logged = [each.logged_at + node.suspended_s for kill in kills for each in kill.processes]
    if not logged or (before is not None and not before - 1.0 <= min(logged) <= node.taken_at + 1.0):
        return None
    return min([*logged, node.taken_at])
