"""The order of one sync, from the node sample to the record.

Theory of operation. A sync observes, decides, acts and records. Every line below has the number of a rule, and
`tests/unit/loop/test_sync_order.py` runs a sync against recording steps and compares their order with this list.

1.  Own descriptors and cost first. Spare descriptors are released before a file is opened, and the interval factor is
    an input of 4. Threads that found no PID start now.
2.  Outcomes before anything reads the policy state. For each: kill or release, then state, metric, log. Then the
    outcomes of reclaim actions, hooks and resizes. Expired brakes last: an accepted victim is killed first.
3.  Whether an eviction awaits its release: after 2, before the sample. If so, limits and file systems are read in every
    sync, because relief is measured as soon as the pod is gone.
4.  The node sample, then the schedule as a pure function of it. Both clocks are read together and before the files:
    otherwise a suspend in between could not be dated. Own limits of pods are read after it, if `ownLimit` is on.
5.  Disk walks are requested before the pods are read: a walk starts in the sync of the crossing, and a snapshot has
    disk usage only while disks matter.
6.  The soft-tier block is read before the pod view. If nothing blocks, the view that is read after it has the PDBs.
7.  The pods, then the node's signals again if an eviction awaits its release: memory that is freed in between counts
    twice, not zero times, so no extra pod is evicted. The later time counts.
8.  A prearmed pod reading is used if it is at most 80 ms older than the node sample. The node sample is always new.
9.  The store has the new state, with tokens taken and evictions planned, before anything acts: no crash spends twice.
10. The brake is the first act, before anything that wakes a thread or logs. Mark and brake, save, then brake what could
    not be marked. Nothing is sent before the save. If the save fails, only hard evictions through the API go on.
11. The recheck sample after the brake and before 15: with other threads awake it takes 3 ms instead of 0.4. It must be
    newer than the decision's sample.
12. Plan metrics before the first outcome: dry-run, refused and killed victims have theirs in the same sync.
13. A victim's log line before its request: it precedes the outcome, and it exists if the agent dies now.
14. A victim is registered before it is submitted, so that its outcome finds it. A kill: save (cgroup v1 freezes first),
    kill, outcome. Its Event is sent last.
15. Conditions and taints, then Node Event and slot request, right after the first request of a hard victim is handed
    over, also if that failed. They wake up to five threads: on a slow node (emulated) these delayed the request by 0.1
    to 1.3 s. A replacement is created and scheduled later than the taint, whose request starts milliseconds after the
    eviction's. The soft tier has waited for the taint in 6.
16. Reclaim orders: log, save, start. After the evictions, because a hard decision may order an action and evict too.
    Hooks before evictions of the soft tier: log, save, start. Only a later decision evicts their pods.
    Resizes of pods: log, save, send. They replace evictions that can wait.
    Then the kernel's order: oom_score_adj of the next victims, if configured. It reads all their processes.
17. Recounts are requested before the record and take effect in rule 5 of the next sync.
18. The record last: 0.6 ms and 8 KiB after everything urgent. The flight recorder gets the state from before the
    decision, for replay, the sample recorder the sample. The periodic save follows. Samples without a decision are
    recorded at most once a second, and never in a sync that prearms or caps. A defect in what only reports (12, 13, 18,
    19) is logged and counted, and the sync goes on.
19. OOM kills are found and reported after everything that acts: none of it waits for a report, and a kill is never a
    reason to evict.
20. API connections are prewarmed after the decision, because their threads share the interpreter with it.
21. memcg thresholds are armed last: without a PID for the arming thread the kernel blocks the loop for 13 to 32 ms.
22. Brake deadlines and the startup wait bound the sleep. A successful sync moves the wake-up sources to its cgroups and
    feeds the watchdog. Signals and reload wait for its end.
23. Start: the first rule 2 releases leftover brakes and scores. Stop: brakes, scores, reclaim jobs and hooks, API
    writers, state, disks, descriptors. No brake waits for the API; the state lists what is still set.
"""

from typing import Protocol

from nodeagent.actuators.session import Session
from nodeagent.loop.executor import Executor
from nodeagent.loop.observe import Observer
from nodeagent.loop.oom_monitor import OomMonitor
from nodeagent.loop.reporting import Part, Reporting
from nodeagent.model import NodeSnapshot, Plan
from nodeagent.sampling.events.wakeup_sources import WakeupSources
from nodeagent.telemetry.decision_log import DecisionLog
from nodeagent.telemetry.metrics import Metrics


class Steps(Protocol):
    """What a sync is made of. `loop.agent.Agent` has it."""

    observer: Observer
    executor: Executor
    decision_log: DecisionLog
    metrics: Metrics
    wakeup_sources: WakeupSources
    oom_monitor: OomMonitor
    reporting: Reporting

    @property
    def session(self) -> Session: ...
    @property
    def acts(self) -> bool: ...
    def check_own_cost(self) -> None: ...
    def decide(self, snapshot: NodeSnapshot) -> Plan: ...
    def record(self, plan: Plan, snapshot: NodeSnapshot) -> None: ...
    def record_between(self, node: NodeSnapshot) -> None: ...
    def next_deadline_s(self, now: float) -> float: ...


def sync(agent: Steps) -> float:
    """One pass of the loop: observe, decide, act, record. Returns how long to sleep, in seconds."""
    agent.check_own_cost()  # 1
    agent.executor.apply_outcomes()  # 2
    node, due = agent.observer.observe_node()  # 3-5
    if due.full_sample:
        decide_and_act(agent, agent.observer.observe_pods(node))  # 6-8    observe
    elif due.prearm or due.growth_cap:
        victims = agent.observer.prearm(node, predict=due.growth_cap)
        if due.growth_cap:
            agent.executor.cap_growth(victims, now=node.taken_at)
    else:
        agent.record_between(node)  # 18
    agent.reporting.run(Part.OOM_KILLS, agent.oom_monitor.observe, node)  # 19
    if due.under_pressure or due.own_limit_near:
        agent.session.prewarm()  # 20
    agent.wakeup_sources.arm(due.headroom)  # 21
    return min(due.sleep_s, agent.next_deadline_s(node.taken_at))  # 22


def decide_and_act(agent: Steps, snapshot: NodeSnapshot) -> None:
    """One decision and everything that follows from it."""
    plan = agent.decide(snapshot)  # 9      decide
    saved = agent.executor.brake(plan)  # 10     brake, save
    recheck = agent.executor.recheck(plan, snapshot)  # 11     second sample
    agent.reporting.run(Part.METRICS, agent.metrics.observe_plan, plan, snapshot)  # 12
    try:
        agent.reporting.run(Part.DECISIONS, agent.decision_log.log_victims, plan, acts=agent.acts)  # 13
        agent.executor.evict(plan, recheck, saved=saved)  # 14     second verdict, evict or kill
    finally:
        agent.session.publish(plan.conditions)  # 15     conditions, taints
        agent.session.announce(plan)  # 15     Node Event, eviction slot
    agent.executor.start_reclaim(plan, snapshot)  # 16
    agent.executor.start_hooks(plan, snapshot)  # 16
    agent.executor.resize(plan)  # 16
    agent.executor.prefer_for_oom(plan, snapshot)  # 16
    agent.observer.follow(plan)  # 17
    agent.record(plan, snapshot)  # 18     log, flight recorder, status, periodic save
