"""Tells what the agent saw, decided and did: log lines and the flight recorder, from the same values.

Promises:

1. One line for each thing that changed, and one for each act and refusal, with the id that the record, the Event and
   the metric carry. What lasts is said once and then rarely.
2. Telling never fails the agent: what cannot be recorded is itself a line.
"""

import re
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from nodeagent.config.config_file import Change
from nodeagent.model import (
    ConditionStatus,
    ConditionVerdict,
    NodeSnapshot,
    Note,
    Outcome,
    OutcomeKind,
    Plan,
    ReclaimOutcome,
    ReclaimResult,
    SignalState,
    SignalVerdict,
)
from nodeagent.policy import ranking
from nodeagent.records.flight_recorder import DecisionInputs, FlightRecorder

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

TELL_PODS: Final = 10
"""Pods named in a log line; the record has all of them."""
RECORD_AGAIN_S: Final = 60.0
"""The same refusals for the same signal are recorded this often at most: while pressed there are 50 decisions a second,
whose reasons may alternate, and each record is 60 KiB of a few MiB that are kept."""
AWAITED: Final = 256
"""Victims whose names are kept for their outcome; each has one within seconds."""
_PASSING: Final = re.compile(r"\b0x[0-9a-f]+|\b\d+(?:\.\d+)?\s?m?s\b|:\d+(?=->)")
"""Parts of a message that differ with every try of the same: addresses of objects, times, the ports that a connection
of somebody else's comes from (`read tcp 10.0.0.1:39244->10.0.0.2:443: connection reset by peer`)."""
_GOOD_NEWS: Final = (OutcomeKind.ACCEPTED, OutcomeKind.DRY_RUN, OutcomeKind.NOT_FOUND)


class DecisionLog:
    """The voice of one agent."""

    def __init__(
        self,
        log: "FilteringBoundLogger",
        recorder: FlightRecorder | None,
        *,
        unrecorded: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`recorder` is None where there is no directory to write to; `unrecorded` is called when one cannot write;
        `clock` is seconds, for what is not told again too soon."""
        self._log = log
        self._recorder = recorder
        self._unrecorded = unrecorded
        self._clock = clock
        self._told: dict[str, object] = {}
        self._going: dict[tuple[str, str], str] = {}
        """Names of victims whose outcome is awaited, by plan and UID: an outcome knows the UID alone."""
        self._intended = ""
        """The last plan whose victims were told."""
        self._recorded_at: dict[tuple[str, ...], float] = {}
        """When a decision with these refusals was last recorded, by signal and codes."""

    def log_victims(self, plan: Plan, *, acts: bool) -> None:
        """The victims of a plan, before anything is done to them, so that their lines stand before their outcomes' and
        are there should the agent not live to tell more. `acts` is False in a dry run."""
        self._intended = plan.id
        for victim in plan.victims:
            self._log.warning(
                "evicting" if acts else "would evict",
                id=plan.id,
                pod=victim.pod.key,
                uid=victim.pod.uid,
                tier=victim.tier,
                method=victim.method,
                signal=victim.threshold.signal,
                grace_s=victim.grace_period_s,
                predicted_relief=victim.predicted_relief,
                message=victim.message,
            )
            self._going[plan.id, victim.pod.uid] = victim.pod.key
        while len(self._going) > AWAITED:
            del self._going[next(iter(self._going))]

    def log_plan(self, plan: Plan, *, acts: bool, notes: Iterable[Note], inputs: DecisionInputs | None = None) -> None:
        """Everything about one plan. `acts` is False in a dry run; `inputs` let `nodeagent replay` make it again."""
        for verdict in plan.signals:
            if self._news(f"signal {verdict.signal}", verdict.state):
                self._log.info("signal", **_signal_line(verdict), once=f"{verdict.signal} {verdict.state}")
        for condition in plan.conditions:
            self._condition(condition)
        if plan.victims:
            if self._intended != plan.id:
                self.log_victims(plan, acts=acts)
            self._record(plan, inputs)
        self._refusals(plan, inputs=inputs)
        self._reliefs(plan)
        self.notes((*notes, *plan.notes))

    def notes(self, notes: Iterable[Note]) -> None:
        """What the reader should know, each once and then rarely."""
        for note in notes:
            same = _PASSING.sub("", note.message)
            self._log.info("note", subject=note.subject, message=note.message, once=f"{note.subject}\0{same}")

    def log_outcome(self, outcome: Outcome) -> None:
        """What became of one victim."""
        line = self._log.info if outcome.kind in _GOOD_NEWS else self._log.warning
        line(
            "eviction " + outcome.kind.value,
            id=outcome.plan_id,
            pod=self._going.pop((outcome.plan_id, outcome.pod_uid), None),
            uid=outcome.pod_uid,
            message=outcome.message,
            status=outcome.http_status,
        )
        if self._recorder is not None:
            self._recorded(self._recorder.outcome(outcome, wall_time=time.time()))

    def log_reclaim_orders(self, plan: Plan, *, acts: bool) -> None:
        """What is tried before anybody is evicted."""
        for order in plan.reclaims:
            self._log.warning(
                "reclaim started" if acts else "would reclaim",
                id=plan.id,
                action=order.name,
                signal=order.signal,
                tier=order.tier,
                deficit=order.deficit,
            )

    def log_reclaim_outcome(self, outcome: ReclaimOutcome) -> None:
        """How an action ended; what it brought back is the next plan's note."""
        good = outcome.result in (ReclaimResult.DONE, ReclaimResult.DRY_RUN)
        line = self._log.info if good else self._log.warning
        line("reclaim " + outcome.result.value, id=outcome.plan_id, action=outcome.name, message=outcome.message)

    def changes(self, changes: Iterable[Change]) -> None:
        """A new configuration, key by key."""
        for change in changes:
            self._log.info("configuration changed", key=change.key, before=change.before, after=change.after)

    def _condition(self, condition: ConditionVerdict) -> None:
        if self._news(f"condition {condition.type}", (condition.status, condition.reason)):
            line = self._log.warning if condition.status is ConditionStatus.TRUE else self._log.info
            line(
                "condition",
                type=condition.type,
                status=condition.status,
                reason=condition.reason,
                message=condition.message,
            )

    def _refusals(self, plan: Plan, *, inputs: DecisionInputs | None) -> None:
        """Why nobody, or not more, goes; the first pods in rank with what spares them."""
        for refusal in plan.refusals:
            spared = {pod.view.pod.key: pod.refusals[0].message for pod in plan.ranking[:TELL_PODS] if pod.refusals}
            self._log.info(
                "not evicting",
                id=plan.id,
                signal=plan.ranked_for,
                code=refusal.code,
                reason=refusal.message,
                spared=spared,
                once=f"{plan.ranked_for} {refusal.code}",
            )
        why = (plan.ranked_for, *(refusal.code for refusal in plan.refusals))
        changed = self._news("refusals", why)
        if changed and plan.refusals and not plan.victims and self._not_lately(why):
            self._record(plan, inputs)

    def _not_lately(self, why: tuple[str, ...]) -> bool:
        now = self._clock()
        if now - self._recorded_at.get(why, float("-inf")) < RECORD_AGAIN_S:
            return False
        self._recorded_at = {key: at for key, at in self._recorded_at.items() if now - at < RECORD_AGAIN_S}
        self._recorded_at[why] = now
        return True

    def _reliefs(self, plan: Plan) -> None:
        """What earlier decisions brought back, under their ids; the line is the plan's own note."""
        if self._recorder is not None:
            for report in plan.relief_reports:
                self._recorded(self._recorder.relief(report, wall_time=time.time()))
            for gain in plan.reclaim_reports:
                self._recorded(self._recorder.reclaim(gain, wall_time=time.time()))

    def _record(self, plan: Plan, inputs: DecisionInputs | None) -> None:
        if self._recorder is not None:
            self._recorded(self._recorder.decision(ranking.with_key_texts(plan), wall_time=time.time(), inputs=inputs))

    def _recorded(self, trouble: str) -> None:
        if trouble:
            self._unrecorded()
            self._log.warning("decision not recorded", reason=trouble, once="recorder")

    def _news(self, subject: str, value: object) -> bool:
        if self._told.get(subject) == value:
            return False
        self._told[subject] = value
        return True


def status(plan: Plan, snapshot: NodeSnapshot) -> str:
    """One line for the service manager."""
    states = [verdict.state for verdict in plan.signals]
    worst = next((s for s in (SignalState.HARD, SignalState.SOFT, SignalState.UNKNOWN) if s in states), SignalState.OK)
    pressure = [str(c.type) for c in plan.conditions if c.status is ConditionStatus.TRUE]
    return f"{worst}; {len(snapshot.pods)} pods; " + (", ".join(pressure) or "no pressure")


def _signal_line(verdict: SignalVerdict) -> dict[str, Any]:
    seen = verdict.observation
    line: dict[str, Any] = {"signal": verdict.signal, "state": verdict.state, "available": seen.available}
    if seen.reason:
        line["reason"] = seen.reason
    met = [met for met in verdict.thresholds if met.met]
    if met:
        line["threshold"] = met[0].threshold.value.text
        line["threshold_value"] = met[0].value
        line["held_back"] = met[0].not_due_reason
    return line
