"""`nodeagent replay`: repeat recorded decisions with another configuration and report the different victims.

1. Nothing is changed and no request is sent: records and a configuration go in, differences come out.
2. Each decision is repeated on its own, with the recorded snapshot and state. What the other configuration would have
   done before (earlier evictions, tokens taken) is not simulated.
3. The recorded configuration gives no differences, because the policy is pure.

Theory of operation. The recorded state contains the thresholds of that time. A threshold that was not in force then has
no history, so its grace period counts as over, and the report marks it. A stream of samples that had passed
`startup.freshSamples` then also passes that of the other configuration.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nodeagent.config import above_kubelet
from nodeagent.config.schema import API_VERSION, Config, Mode
from nodeagent.model import Plan, RankedPod, Victim, units
from nodeagent.policy import effective_thresholds, engine, ranking
from nodeagent.policy.state import PolicyState
from nodeagent.records import flight_recorder
from nodeagent.report import wording
from nodeagent.report.cells import BAD, DIM, GOOD, STRONG, WARN, Cell, Column, Section


class ReplayError(Exception):
    """No decision can be replayed. The message is for the user."""


class RecordedVictim(NamedTuple):
    """A victim of the recorded decision."""

    key: str
    uid: str


class Replayed(NamedTuple):
    """One recorded decision and its repetition."""

    id: str
    wall_time: float | None
    recorded_signal: str
    """The signal and tier that was acted on, and the refusals."""
    recorded_victims: tuple[RecordedVictim, ...]
    plan: Plan | None
    """None: not repeatable, see `trouble`."""
    assumed: tuple[str, ...] = ()
    """Soft thresholds that are met now and were not in force then: their grace period counts as over."""
    trouble: str = ""

    @property
    def differs(self) -> bool:
        return self.plan is not None and {each.uid for each in self.recorded_victims} != {
            victim.pod.uid for victim in self.plan.victims
        }


# --- replaying -------------------------------------------------------------------------------------------------------


def replay(place: Path, config: Config) -> tuple[Replayed, ...]:
    """Repeat every decision of a state directory or a file of records with `config`.

    Raises:
        ReplayError: there are no records.
    """
    try:
        rows = repeat_decisions(flight_recorder.read_records(place), config)
    except flight_recorder.RecordsError as error:
        raise ReplayError(str(error)) from error
    if not rows:
        raise ReplayError(f"{place}: contains no decision")
    return rows


def repeat_decisions(records: Iterable[Mapping[str, Any]], config: Config) -> tuple[Replayed, ...]:
    """Repeat every decision of these records with `config`."""
    packer = flight_recorder.Packer()
    return tuple([_repeat(record, config, packer) for record in records if record.get("record") == "decision"])


def _repeat(record: Mapping[str, Any], config: Config, packer: flight_recorder.Packer) -> Replayed:
    wall = record.get("wallTime")
    row = Replayed(
        id=str(record.get("id")),
        wall_time=wall if isinstance(wall, int | float) else None,
        recorded_signal=_recorded_signal(record),
        recorded_victims=tuple(_recorded_victims(record)),
        plan=None,
    )
    inputs, trouble = packer.unpack(record.get("inputs"))
    if inputs is None:
        return row._replace(trouble=trouble)
    try:
        plan, assumed = _decide(inputs, config)
    except Exception as error:
        # The policy relies on invariants of a snapshot, which an altered file may break.
        return row._replace(trouble=f"inputs are inconsistent: {type(error).__name__}: {error}")
    return row._replace(plan=plan, assumed=assumed)


def _decide(inputs: flight_recorder.DecisionInputs, config: Config) -> tuple[Plan, tuple[str, ...]]:
    """The plan for these inputs, and the soft thresholds whose grace period counts as over."""
    config = above_kubelet.keep_above(config, inputs.kubelet)
    in_force = effective_thresholds.effective(config, inputs.snapshot.layout)
    recorded = {effective_thresholds.identity(each) for each in inputs.thresholds}
    added = [each for each in in_force if effective_thresholds.identity(each) not in recorded]
    state = _adapted_state(
        inputs, config, since={effective_thresholds.identity(each): each.grace_period_s for each in added}
    )
    # A dry run evicts nothing and counts the dry-run evictions in the recorded state as before.
    config = config._replace(mode=Mode.DRY_RUN)
    plan, _ = engine.decide(inputs.snapshot, state, now=inputs.now, config=config)
    new = {effective_thresholds.identity(each) for each in added if not each.hard}
    assumed = tuple(
        f"{each.threshold.signal} {each.threshold.value.text}"
        for verdict in plan.signals
        for each in verdict.thresholds
        if each.met and effective_thresholds.identity(each.threshold) in new
    )
    return ranking.with_key_texts(plan), assumed


def _adapted_state(
    inputs: flight_recorder.DecisionInputs, config: Config, *, since: Mapping[str, float]
) -> PolicyState:
    """The recorded state with the histories that the other configuration needs."""
    recorded = inputs.state.thresholds
    good_samples = {
        stream: config.startup.fresh_samples if count >= inputs.fresh_samples else count
        for stream, count in recorded.good_samples.items()
    }
    observed = {**{identity: inputs.now - grace_s for identity, grace_s in since.items()}, **recorded.first_observed}
    return inputs.state._replace(thresholds=recorded._replace(good_samples=good_samples, first_observed=observed))


def _recorded_victims(record: Mapping[str, Any]) -> Iterable[RecordedVictim]:
    victims = record.get("victims")
    for victim in victims if isinstance(victims, list) else ():
        if isinstance(victim, Mapping):
            yield RecordedVictim(f"{victim.get('namespace')}/{victim.get('name')}", str(victim.get("uid")))


def _recorded_signal(record: Mapping[str, Any]) -> str:
    refusals = record.get("refusals")
    listed = refusals if isinstance(refusals, list) else []
    codes = [str(each.get("code")) for each in listed if isinstance(each, Mapping)]
    acting = record.get("actingOn")
    threshold = acting.get("threshold") if isinstance(acting, Mapping) else None
    if not isinstance(threshold, Mapping):
        return ", ".join(codes)
    tier = "soft" if threshold.get("gracePeriodSeconds") else "hard"
    return f"{threshold.get('signal')} ({tier})" + (f": {', '.join(codes)}" if codes else "")


# --- for programs ----------------------------------------------------------------------------------------------------


def to_json(rows: Iterable[Replayed], *, config_source: str) -> dict[str, Any]:
    """The report as one JSON object."""
    return {
        "apiVersion": API_VERSION,
        "kind": "ReplayReport",
        "configuration": config_source,
        "decisions": [_row_object(row) for row in rows],
    }


def _row_object(row: Replayed) -> dict[str, Any]:
    plan = row.plan
    return {
        "id": row.id,
        "time": wording.rfc3339(row.wall_time) if row.wall_time is not None else None,
        "differs": row.differs if plan is not None else None,
        "reason": row.trouble or None,
        "then": {"for": row.recorded_signal, "victims": [each._asdict() for each in row.recorded_victims]},
        "now": None
        if plan is None
        else {
            "for": _decision_text(plan),
            "victims": [{"key": victim.pod.key, "uid": victim.pod.uid} for victim in plan.victims],
            "refusals": [refusal._asdict() for refusal in plan.refusals],
        },
        "graceAssumedOver": list(row.assumed),
        "differences": [{"change": change, "pod": pod, "reason": reason} for change, pod, reason in _differences(row)],
    }


# --- for people ------------------------------------------------------------------------------------------------------


def sections(rows: tuple[Replayed, ...], *, config_source: str) -> tuple[Section, ...]:
    """A summary, a row for each decision, and the differences pod by pod."""
    differing = [row for row in rows if row.differs]
    failed = sum(row.plan is None for row in rows)
    same = len(rows) - len(differing) - failed
    source = wording.escape_terminal(config_source)
    summary = f"{len(rows)} decisions with {source}: {same} the same, {len(differing)} different"
    if failed:
        summary += f", {failed} not repeatable"
    columns = (Column("TIME"), Column("ID"), Column("RECORDED"), Column("REPLAYED"), Column("DIFFERENCE"))
    table = Section("", columns, tuple(_row(row) for row in rows))
    head = Section("", lines=(Cell(summary, STRONG),))
    return (head, table, *(_difference_section(row) for row in differing))


def _row(row: Replayed) -> tuple[Cell, ...]:
    time = wording.rfc3339(row.wall_time) if row.wall_time is not None else units.UNKNOWN_TEXT
    recorded = f"{row.recorded_signal or '?'}: {_named([each.key for each in row.recorded_victims])}"
    if row.plan is None:
        return (
            Cell(time),
            Cell(wording.escape_terminal(row.id)),
            Cell(wording.escape_terminal(recorded)),
            Cell("?"),
            Cell(wording.escape_terminal(row.trouble), WARN),
        )
    now = f"{_decision_text(row.plan)}: {_named([victim.pod.key for victim in row.plan.victims])}"
    notes = f" (grace period of {', '.join(row.assumed)} counts as over)" if row.assumed else ""
    difference = Cell("different" + notes, BAD) if row.differs else Cell("same" + notes, DIM)
    return (
        Cell(time),
        Cell(wording.escape_terminal(row.id)),
        Cell(wording.escape_terminal(recorded)),
        Cell(wording.escape_terminal(now)),
        difference,
    )


def _named(pods: list[str]) -> str:
    return ", ".join(pods) if pods else "no pod"


def _decision_text(plan: Plan) -> str:
    codes = ", ".join(refusal.code for refusal in plan.refusals)
    if plan.acting_on is None:
        return codes or "nothing due"
    threshold = plan.acting_on.threshold
    return f"{threshold.signal} ({'hard' if threshold.hard else 'soft'})" + (f": {codes}" if codes else "")


def _difference_section(row: Replayed) -> Section:
    lines = [
        Cell(
            wording.escape_terminal(f"{'+' if change == 'evicted' else '-'} {pod}: {reason}"),
            BAD if change == "evicted" else GOOD,
        )
        for change, pod, reason in _differences(row)
    ]
    return Section(wording.escape_terminal(row.id), lines=tuple(lines))


def _differences(row: Replayed) -> list[tuple[str, str, str]]:
    """(evicted or not-evicted, pod, reason): first the new victims, then the recorded victims that are none now."""
    plan = row.plan
    if plan is None:
        return []
    recorded = {each.uid for each in row.recorded_victims}
    ranked_pods = {ranked.view.pod.uid: ranked for ranked in plan.ranking}
    added = [victim for victim in plan.victims if victim.pod.uid not in recorded]
    victims = {victim.pod.uid for victim in plan.victims}
    return [
        *[("evicted", victim.pod.key, _reason_evicted(victim, ranked_pods.get(victim.pod.uid))) for victim in added],
        *[
            ("not-evicted", each.key, _reason_not_evicted(ranked_pods.get(each.uid), plan))
            for each in row.recorded_victims
            if each.uid not in victims
        ],
    ]


def _reason_evicted(victim: Victim, ranked: RankedPod | None) -> str:
    if ranked is None:
        return victim.tier.value
    return f"rank {ranked.rank}, {victim.tier.value}: " + "; ".join(key.text for key in ranked.keys)


def _reason_not_evicted(ranked: RankedPod | None, plan: Plan) -> str:
    if plan.acting_on is None:
        return "; ".join(refusal.message for refusal in plan.refusals) or "nothing is due"
    if ranked is None:
        return "not on the node"
    if ranked.refusals:
        return f"rank {ranked.rank}: " + "; ".join(refusal.message for refusal in ranked.refusals)
    if not plan.victims:
        return "; ".join(refusal.message for refusal in plan.refusals)
    return f"rank {ranked.rank}: other pods free enough"
