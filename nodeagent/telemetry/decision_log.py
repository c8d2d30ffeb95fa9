"""Logs and records what the agent samples, decides and does, from the same values.

1. Each change, act and refusal is one line, with the id of the record, the Event and the annotation. A lasting fact is
   logged once and then rarely.
2. Logging never fails the agent: a record that cannot be written becomes a line.
"""

import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from nodeagent.config import kubelet
from nodeagent.config.config_file import Change
from nodeagent.model import (
    GOOD_RESIZES,
    ConditionStatus,
    ConditionVerdict,
    HookOutcome,
    HookResult,
    NodeSnapshot,
    Note,
    OomKill,
    OomReport,
    Outcome,
    Plan,
    ReclaimOrder,
    ReclaimOutcome,
    ReclaimResult,
    Refusal,
    RefusalKind,
    ResizeOutcome,
    Signal,
    SignalState,
    SignalVerdict,
    Threshold,
)
from nodeagent.policy import oom_messages, ranking
from nodeagent.records.flight_recorder import DecisionInputs, FlightRecorder

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

MAX_PODS_IN_LINE: Final = 10
"""Pods in a log line; the record has all of them."""
RECORD_AGAIN_S: Final = 60.0
"""The same refusals for the same signal are recorded at most this often. Under pressure there are 50 decisions a
second, whose reasons may alternate, and each record is 60 KiB of the few MiB that are kept."""
RACES_RECORDED: Final = 10
"""Lost races of the same containers that are recorded in `RECORD_AGAIN_S`."""
MAX_AWAITED: Final = 256
"""Victims without a last outcome whose names are kept: it follows within seconds, that of an EvictionRequest in its
deadline."""
_VARYING: Final = re.compile(
    r"\b0x[0-9a-f]+|\b\d+(?:\.\d+)?(?:\s?m?s\b|\s?[KMGTPE]iB?\b|%)|:\d+(?=->)|(?<![\w.:/-])\d{4,}(?![\w.:/-])"
)
"""Parts of a message that differ in each repetition: addresses of objects, times, amounts (`1.46Gi of 20Gi are left`),
counts, source ports (`read tcp 10.0.0.1:39244->10.0.0.2:443: connection reset by peer`)."""


class DecisionLog:
    """The log and the records of one agent."""

    def __init__(
        self,
        log: "FilteringBoundLogger",
        recorder: FlightRecorder | None,
        *,
        unrecorded: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`recorder` is None without a state directory; `unrecorded` is called after each failed record; `clock` is in
        seconds and spaces repeated records."""
        self._log = log
        self._recorder = recorder
        self._unrecorded = unrecorded
        self._clock = clock
        self._last_values: dict[str, object] = {}
        self._awaited: dict[tuple[str, str], str] = {}
        """Names of victims without a last outcome, by plan and UID: an outcome contains only the UID."""
        self._logged_plan = ""
        """The last plan whose victims were logged."""
        self._recorded_at: dict[tuple[str, ...], float] = {}
        """When refusals were last recorded, by signal and codes."""
        self._changed_keys = 0
        """Of the configuration since the start: later notes may have other amounts for that reason."""

    def log_victims(self, plan: Plan, *, acts: bool) -> None:
        """Log the victims before their requests: the lines precede the outcomes, and exist if the agent dies now.
        `acts` is False in a dry run."""
        self._logged_plan = plan.id
        for victim in plan.victims:
            self._log.warning(
                "evicting" if acts else "would evict",
                id=plan.id,
                pod=victim.pod.key,
                uid=victim.pod.uid,
                tier=victim.tier,
                method=victim.method,
                signal=victim.limit or victim.threshold.signal,
                grace_s=victim.grace_period_s,
                predicted_relief=victim.predicted_relief,
                message=victim.message,
                **({"hook": victim.hook} if victim.hook else {}),
            )
            self._awaited[plan.id, victim.pod.uid] = victim.pod.key
        while len(self._awaited) > MAX_AWAITED:
            del self._awaited[next(iter(self._awaited))]

    def log_plan(self, plan: Plan, *, acts: bool, notes: Iterable[Note], inputs: DecisionInputs | None = None) -> bool:
        """Log and record one plan. `acts` is False in a dry run; `nodeagent replay` needs `inputs`. True if the
        decision was recorded with its inputs."""
        recorded = False
        for verdict in plan.signals:
            if self._changed(f"signal {verdict.signal}", verdict.state):
                self._log.info("signal changed", **_signal_line(verdict), once=f"{verdict.signal} {verdict.state}")
        for condition in plan.conditions:
            self._condition(condition)
        if plan.victims:
            if self._logged_plan != plan.id:
                self.log_victims(plan, acts=acts)
            recorded = self._record(plan, inputs)
        elif plan.hooks or plan.resizes or (plan.reclaims and not plan.refusals and self._is_new_reclaim(plan)):
            recorded = self._record(plan, inputs)
        recorded = self._refusals(plan, inputs=inputs) or recorded
        self._reliefs(plan)
        self.log_notes((*notes, *plan.notes))
        return recorded

    def log_notes(self, notes: Iterable[Note]) -> None:
        """Log each note once and then rarely, and again when the configuration has changed."""
        for note in notes:
            stable = _VARYING.sub("", note.message)
            key = f"{self._changed_keys} {note.subject}\0{stable}"
            self._log.info("note", subject=note.subject, message=note.message, once=key)

    def log_outcome(self, outcome: Outcome) -> None:
        """Log and record the outcome of one victim."""
        key = outcome.plan_id, outcome.pod_uid
        pod = self._awaited.get(key) if outcome.kind.followed else self._awaited.pop(key, None)
        line = self._log.info if outcome.kind.good else self._log.warning
        line(
            "eviction " + outcome.kind.value,
            id=outcome.plan_id,
            pod=pod,
            uid=outcome.pod_uid,
            message=outcome.message,
            status=outcome.http_status,
        )
        if self._recorder is not None:
            self._check_recorded(self._recorder.outcome(outcome, wall_time=time.time()))

    def log_reclaim_orders(self, plan: Plan, *, acts: bool) -> None:
        """Log the reclaim actions that run before evictions. Page cache may be reclaimed every second: its start is
        logged rarely, its outcome each time."""
        for order in plan.reclaims:
            page_cache = bool(order.targets)
            facts = {"until": order.level, "pods": _target_names(order), "once": order.name} if page_cache else {}
            line = self._log.info if page_cache else self._log.warning
            line(
                "reclaim started" if acts else "would reclaim",
                id=plan.id,
                action=order.name,
                signal=order.signal,
                tier=order.tier,
                deficit=order.deficit,
                **facts,
            )

    def log_reclaim_outcome(self, outcome: ReclaimOutcome) -> None:
        """Log the result of a reclaim action; its gain is a note of a later plan."""
        good = outcome.result in (ReclaimResult.DONE, ReclaimResult.STOPPED, ReclaimResult.DRY_RUN)
        line = self._log.info if good else self._log.warning
        line("reclaim " + outcome.result.value, id=outcome.plan_id, action=outcome.name, message=outcome.message)

    def log_hook_orders(self, plan: Plan, *, acts: bool) -> None:
        """Log the hooks that run before evictions of the soft tier, before they start."""
        for order in plan.hooks:
            self._log.warning(
                "hook started" if acts else "would run hook",
                id=plan.id,
                pod=order.key,
                uid=order.pod_uid,
                signal=order.signal,
                deficit=order.deficit,
            )

    def log_hook_outcome(self, outcome: HookOutcome) -> None:
        """Log and record the end of a hook. The eviction of its pod follows in a later plan."""
        good = outcome.result in (HookResult.DONE, HookResult.DRY_RUN)
        line = self._log.info if good else self._log.warning
        line("hook " + outcome.result.value, id=outcome.plan_id, uid=outcome.pod_uid, message=outcome.message)
        if self._recorder is not None:
            self._check_recorded(self._recorder.hook(outcome, wall_time=time.time()))

    def log_resize_orders(self, plan: Plan, *, acts: bool) -> None:
        """Log the resizes before they are requested."""
        for order in plan.resizes:
            self._log.warning(
                "resizing pod" if acts else "would resize pod",
                id=plan.id,
                pod=order.key,
                uid=order.pod_uid,
                container=order.container,
                limit_before=order.before.limit,
                limit=order.to.limit,
                request=order.to.request,
                message=order.message,
            )

    def log_resize_outcome(self, outcome: ResizeOutcome) -> None:
        """Log and record what came of a resize."""
        line = self._log.info if outcome.result in GOOD_RESIZES else self._log.warning
        line(
            "resize " + outcome.result.value,
            id=outcome.plan_id,
            pod=outcome.key,
            uid=outcome.pod_uid,
            container=outcome.container,
            message=outcome.message,
            status=outcome.http_status,
        )
        if self._recorder is not None:
            self._check_recorded(self._recorder.resize(outcome, wall_time=time.time()))

    def log_oom_kills(self, report: OomReport) -> None:
        """Log and record OOM kills. The same container may be killed for the same limit without end, where a server
        starts its workers again: that is logged as any lasting fact and recorded at most every `RECORD_AGAIN_S`. Lost
        races are all logged, and recorded more often (`RACES_RECORDED`): a pod without a limit can cause one a second
        for hours, which would push the records of evictions out."""
        for kill in report.kills:
            repeated = {} if kill.cause.race else {"once": _oom_key(kill)}
            self._log.warning(
                "OOM kill",
                id=report.id,
                pod=kill.pod or None,
                container=kill.container or None,
                cgroup=kill.place.path if kill.place is not None else None,
                cause=kill.cause,
                number=kill.number,
                processes=[each.name for each in kill.processes],
                message=oom_messages.kill_text(kill),
                **repeated,
            )
        if report.race is not None:
            self._log.warning(
                "eviction too late",
                id=report.id,
                loss=report.race.loss,
                deficit=report.race.deficit,
                threshold=report.race.threshold,
                victims=list(report.race.victims),
                message=oom_messages.race_text(report.race),
            )
        keys = tuple([_oom_key(kill) for kill in report.kills])
        most = RACES_RECORDED if report.race is not None else 1
        if self._recorder is not None and any(
            self._not_recorded_lately(("oom", *keys, str(place))) for place in range(most)
        ):
            self._check_recorded(self._recorder.oom(report, wall_time=time.time()))

    def log_config_changes(self, changes: Iterable[Change]) -> None:
        """Log each changed key of the configuration."""
        for change in changes:
            self._changed_keys += 1
            self._log.info("configuration changed", key=change.key, before=change.before, after=change.after)

    def log_kubelet_thresholds(self, before: Sequence[Threshold] | None, after: Sequence[Threshold]) -> None:
        """Log that the kubelet's own thresholds have changed. `before` None: they were not known."""
        old = "not known" if before is None else kubelet.describe_thresholds(before)
        self._log.warning("kubelet thresholds changed", before=old, after=kubelet.describe_thresholds(after))

    def log_profiles(self, before: str | None, after: str | None) -> None:
        """Log that other profiles apply, because the labels of the node have changed or were read first."""
        self._log.warning("profiles changed", before=before, after=after)

    def _condition(self, condition: ConditionVerdict) -> None:
        if self._changed(f"condition {condition.type}", (condition.status, condition.reason)):
            line = self._log.warning if condition.status is ConditionStatus.TRUE else self._log.info
            line(
                "condition changed",
                type=condition.type,
                status=condition.status,
                reason=condition.reason,
                message=condition.message,
            )

    def _refusals(self, plan: Plan, *, inputs: DecisionInputs | None) -> bool:
        """Log why no pod, or not more pods, are evicted, with the protection of the first pods in rank, and why limits
        are not raised. True if the decision was recorded."""
        for refusal in plan.refusals:
            if refusal.code.kind is RefusalKind.RESIZE:
                facts = {"code": refusal.code, "reason": refusal.message}
                self._log.info("not raising limit", id=plan.id, **facts, once=f"limit {refusal.code}")
                continue
            signal = _signal_of(refusal, plan)
            first = plan.ranking[:MAX_PODS_IN_LINE] if signal is plan.ranked_for else ()
            self._log.info(
                "not evicting",
                id=plan.id,
                signal=signal,
                code=refusal.code,
                reason=refusal.message,
                protected={pod.view.pod.key: pod.refusals[0].message for pod in first if pod.refusals},
                once=f"{signal} {refusal.code}",
            )
        reasons = (plan.ranked_for, *(refusal.code for refusal in plan.refusals))
        changed = self._changed("refusals", reasons)
        acted = plan.victims or plan.hooks or plan.resizes
        if changed and plan.refusals and not acted and self._not_recorded_lately(reasons):
            return self._record(plan, inputs)
        return False

    def _is_new_reclaim(self, plan: Plan) -> bool:
        return self._not_recorded_lately((plan.reclaims[0].name,))

    def _not_recorded_lately(self, reasons: tuple[str, ...]) -> bool:
        now = self._clock()
        if now - self._recorded_at.get(reasons, float("-inf")) < RECORD_AGAIN_S:
            return False
        self._recorded_at = {key: at for key, at in self._recorded_at.items() if now - at < RECORD_AGAIN_S}
        self._recorded_at[reasons] = now
        return True

    def _reliefs(self, plan: Plan) -> None:
        """Record the relief of earlier decisions under their ids; the plan's notes are the lines."""
        if self._recorder is not None:
            for report in plan.relief_reports:
                self._check_recorded(self._recorder.relief(report, wall_time=time.time()))
            for gain in plan.reclaim_reports:
                self._check_recorded(self._recorder.reclaim(gain, wall_time=time.time()))

    def _record(self, plan: Plan, inputs: DecisionInputs | None) -> bool:
        if self._recorder is None:
            return False
        trouble = self._recorder.decision(ranking.with_key_texts(plan), wall_time=time.time(), inputs=inputs)
        self._check_recorded(trouble)
        return not trouble and inputs is not None

    def _check_recorded(self, trouble: str) -> None:
        if trouble:
            self._unrecorded()
            self._log.warning("decision not recorded", reason=trouble, once="recorder")

    def _changed(self, key: str, value: object) -> bool:
        if self._last_values.get(key) == value:
            return False
        self._last_values[key] = value
        return True


def status(plan: Plan, snapshot: NodeSnapshot) -> str:
    """One line for systemd."""
    states = [verdict.state for verdict in plan.signals]
    worst = next((s for s in (SignalState.HARD, SignalState.SOFT, SignalState.UNKNOWN) if s in states), SignalState.OK)
    pressure = [str(c.type) for c in plan.conditions if c.status is ConditionStatus.TRUE]
    return f"{worst}; {len(snapshot.pods)} pods; " + (", ".join(pressure) or "no pressure")


def _signal_of(refusal: Refusal, plan: Plan) -> Signal:
    """The signal whose met threshold is not due because of it; otherwise the one that pods are ranked for."""
    for verdict in plan.signals:
        for each in verdict.thresholds:
            if each.met and (each.not_due_code, each.not_due_reason) == (refusal.code, refusal.message):
                return verdict.signal
    return plan.ranked_for


def _target_names(order: ReclaimOrder) -> list[str]:
    return [target.pod for target in order.targets[:MAX_PODS_IN_LINE]]


def _oom_key(kill: OomKill) -> str:
    """The same for the kills of one container, also after its restart, or of one cgroup outside pods."""
    place = kill.place.path if kill.place is not None else ""
    return f"{kill.pod} {kill.container} {kill.cause}" if kill.pod else f"{place} {kill.cause}"


def _signal_line(verdict: SignalVerdict) -> dict[str, Any]:
    observation = verdict.observation
    line: dict[str, Any] = {"signal": verdict.signal, "state": verdict.state, "available": observation.available}
    if verdict.figures is not None:
        line["by_working_set"], line["by_kernel"] = verdict.figures
    if observation.reason:
        line["reason"] = observation.reason
    met = [met for met in verdict.thresholds if met.met]
    if met:
        line["threshold"] = met[0].threshold.value.text
        line["threshold_value"] = met[0].value
        line["not_due_reason"] = met[0].not_due_reason
    return line
