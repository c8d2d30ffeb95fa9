"""`nodeagent explain --pod NAMESPACE/NAME --owner`: an eviction in plain words for the owner of the pod.

1. An application's developer understands it without knowing the agent: what the pod used, what it asked for, how that
   compares with the other pods of the node, and which request would have kept it.
2. It names no pod of another namespace: numbers of the node may be shown to its tenants, their names may not.
3. What is not recorded is stated as not known.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from nodeagent.config.schema import API_VERSION, Config
from nodeagent.model import EVICTED_OUTCOMES, SIGNAL_TABLE, Pod, RefusalCode, Signal, Unit, units
from nodeagent.policy import own_limits, owner_messages
from nodeagent.records import flight_recorder
from nodeagent.report import kept_request, record_fields, sparkline, stories, wording
from nodeagent.report.cells import BAD, GOOD, STRONG, Cell, Section
from nodeagent.report.kept_request import KeptRequest, Verdict
from nodeagent.report.record_fields import JsonObject
from nodeagent.report.recorded_decisions import RecordedDecision
from nodeagent.report.stories import Story

_CURVE_WIDTH: Final = 45


class OwnerView(NamedTuple):
    """An eviction for the owner of the pod."""

    pod: str
    """`namespace/name`, not escaped."""
    owner: str
    """`ReplicaSet/web`; empty: none, or not recorded."""
    id: str
    time: str
    signal: Signal
    evicted: bool
    """False: it was decided, and the eviction was refused or its outcome is not recorded."""
    cause: str
    usage: int | None
    request: int | None
    pods: int
    """Pods on the node."""
    using_more: int
    """Pods that used more."""
    over_request: int
    """Pods that used more than they asked for."""
    reasons: tuple[str, ...]
    """Why it has its place in the order, in the order of their weight."""
    spared: int
    """Pods before it in the order that were spared, because it would have used up what they free."""
    curve: str
    """Its usage before; empty: not recorded."""
    kept: KeptRequest | None
    unknown: str
    """Why `kept` is None."""


def view(story: Story, pod: str, *, config: Config | None, unknown: str = "") -> OwnerView | None:
    """The eviction of this pod by the decision of `story`; None if it was no victim of it.

    `config`: the configuration in force; None: not known, `unknown` states why.
    """
    decision = story.recorded.decision
    victim = next((each for each in story.victims if record_fields.pod_name(each) == pod), None)
    if victim is None:
        return None
    ranking = record_fields.items(decision, "ranking")
    ranked = next((each for each in ranking if each.get("uid") == victim.get("uid")), {})
    usage, request = record_fields.integer(ranked.get("usage")), record_fields.integer(ranked.get("request"))
    kept, why = _kept(story.recorded, str(victim.get("uid")), config, unknown)
    uid = str(victim.get("uid"))
    kinds = {str(each.get("kind")) for each in story.recorded.outcomes if str(each.get("podUid")) == uid}
    return OwnerView(
        pod=pod,
        owner=str(victim.get("owner") or ""),
        id=story.recorded.id,
        time=record_fields.time_text(decision),
        signal=story.signal,
        evicted=bool(kinds & EVICTED_OUTCOMES),
        cause=_cause(story, victim),
        usage=usage,
        request=request,
        pods=len(ranking),
        using_more=_count(ranking, lambda each: _more(record_fields.integer(each.get("usage")), usage)),
        over_request=_count(ranking, _is_over),
        reasons=tuple(str(key.get("text")) for key in record_fields.items(ranked, "keys")),
        spared=_count(ranking, _is_spared),
        curve=_curve(story, pod),
        kept=kept,
        unknown=why,
    )


def _kept(recorded: RecordedDecision, uid: str, config: Config | None, unknown: str) -> tuple[KeptRequest | None, str]:
    if config is None:
        return None, unknown or "the configuration that was in force is not recorded"
    inputs, trouble = flight_recorder.Packer().unpack(recorded.decision.get("inputs"))
    if inputs is None:
        return None, trouble
    try:
        return kept_request.find(inputs, uid, config), ""
    except Exception as error:
        # The policy relies on invariants of a snapshot, which an altered file may break.
        return None, f"the recorded inputs are inconsistent: {type(error).__name__}"


def _cause(story: Story, victim: JsonObject) -> str:
    if victim.get("limit") == own_limits.OWN_LIMIT:
        return f"it was about to reach a memory limit of its own: {str(victim.get('message') or '').strip()}"
    if victim.get("limit"):
        return f"it exceeded a limit of its own: {str(victim.get('message') or '').strip()}"
    acting = record_fields.mapping(story.recorded.decision, "actingOn")
    unit = SIGNAL_TABLE[story.signal].unit
    what = owner_messages.resource(story.signal)
    cause = f"the node was low on {what}"
    for verdict in record_fields.items(story.recorded.decision, "signals"):
        observation = record_fields.mapping(verdict, "observation")
        if observation.get("signal") != story.signal.value:
            continue
        available = units.format_amount(record_fields.integer(observation.get("available")), unit)
        capacity = units.format_amount(record_fields.integer(observation.get("capacity")), unit)
        level = units.format_amount(record_fields.integer(acting.get("value")), unit)
        cause += f": {available} of {capacity} were left, and pods are evicted below {level}"
    return cause


def _curve(story: Story, pod: str) -> str:
    at = story.at
    if story.history is None or at is None:
        return ""
    series = next((each for each in story.history.pods if each.name == pod), None)
    if series is None:
        return ""
    points = tuple(point for point in series.points if point.at <= at)
    curve = stories.Curve(pod, series.unit, points, falls=False)
    if curve.first is None:
        return ""
    began = points[0].at
    values = stories.columns(curve, began, max(at, began + 1.0), _CURVE_WIDTH)
    first, last = stories.amount(curve.first, curve.unit), stories.amount(curve.last, curve.unit)
    drawn = sparkline.sparkline(values, _CURVE_WIDTH, low=0.0)
    return f"{drawn}  from {first} to {last} in the {units.format_duration(at - began)} before"


def _count(ranking: Sequence[JsonObject], test: Callable[[JsonObject], bool]) -> int:
    return sum(1 for each in ranking if test(each))


def _more(usage: int | None, than: int | None) -> bool:
    return usage is not None and than is not None and usage > than


def _is_over(ranked: JsonObject) -> bool:
    request = record_fields.integer(ranked.get("request"))
    return _more(record_fields.integer(ranked.get("usage")), request)


def _is_spared(ranked: JsonObject) -> bool:
    codes = [refusal.get("code") for refusal in record_fields.items(ranked, "refusals")]
    return RefusalCode.SHORT_LIVED_RELIEF in codes


# --- for people ------------------------------------------------------------------------------------------------------


def sections(found: OwnerView) -> tuple[Section, ...]:
    """What happened, how the pod compares, and what would have kept it."""
    of = f" of {found.owner}" if found.owner else ""
    happened = "was evicted" if found.evicted else "was to be evicted"
    head = [
        Cell(wording.escape_terminal(f"Pod {found.pod}{of}"), STRONG),
        Cell(wording.escape_terminal(f"It {happened} at {found.time} because {found.cause}.")),
        Cell(owner_messages.usage_text(found.usage, found.request, found.signal), BAD),
    ]
    if found.curve:
        head.append(Cell(found.curve))
    return (
        Section("", lines=tuple(head)),
        Section("COMPARED WITH THE OTHER PODS OF THE NODE", lines=tuple(map(Cell, comparison(found)))),
        Section(
            "WHAT WOULD HAVE KEPT IT",
            lines=tuple(Cell(line, GOOD if not n else "") for n, line in enumerate(advice(found))),
        ),
        Section("", lines=(Cell(wording.escape_terminal(f"Decision {found.id}: `nodeagent explain {found.id}`")),)),
    )


def comparison(found: OwnerView) -> tuple[str, ...]:
    """How the pod compares with the others, in sentences."""
    lines = []
    what = owner_messages.resource(found.signal)
    others = max(0, found.pods - 1)
    if found.usage is not None:
        rank = "no other pod" if not found.using_more else f"{found.using_more} of {others} other pods"
        lines.append(f"{rank} used more {what} than it.".capitalize())
    if SIGNAL_TABLE[found.signal].unit is Unit.BYTES:
        lines.append(f"{found.over_request} of {found.pods} pods used more {what} than they requested.")
    if found.reasons:
        reasons = wording.escape_terminal("; ".join(found.reasons))
        if found.spared:
            pods = "one pod" if found.spared == 1 else f"{found.spared} pods"
            lines.append(
                f"It grew, and would soon have used up what {pods} before it in the order of eviction would have freed."
            )
            lines.append(f"It has its place in that order because of: {reasons}.")
        else:
            lines.append(f"It came first in the order of eviction because of: {reasons}.")
    return tuple(lines)


def advice(found: OwnerView, *, names: bool = False) -> tuple[str, ...]:
    """Which request would have kept the pod, in sentences. `names`: for the operator of the node, who may read the
    names of pods of other namespaces."""
    kept, what = found.kept, owner_messages.resource(found.signal)
    if kept is None:
        return (f"Not known: {wording.escape_terminal(found.unknown)}.",)
    if kept.verdict is Verdict.NOT_REPEATED:
        return (
            "Not known: with this configuration the decision does not evict the pod again, so another one was in "
            "force.",
        )
    if kept.verdict is Verdict.NO_REQUEST:
        return (f"No request: pods cannot request {what} in a way that this decision weighs. Use less of it.",)
    if kept.verdict is Verdict.NONE or kept.request is None:
        return (
            f"No {what} request, however high: no other pod of the node could have been evicted instead. Use less "
            f"{what}, or run the pod on a node with more of it.",
        )
    unit = SIGNAL_TABLE[kept.signal].unit
    request, now = units.format_quantity(kept.request), units.format_amount(kept.now, unit)
    lines = [
        f"A {what} request of {request} or more, instead of {now}: {_instead(found, kept.victims, names=names)}",
        "A request reserves that much on the node: the pod is scheduled only where it is free.",
    ]
    if kept.limit is not None:
        lines.append(
            f"Its limit of {units.format_amount(kept.limit, unit)} is below that and would have to be raised as well."
        )
    if kept.sum_of_requests is not None and kept.capacity is not None and kept.sum_of_requests > kept.capacity:
        lines.append(
            f"All pods together would then request {units.format_amount(kept.sum_of_requests, unit)} of the node's "
            f"{units.format_amount(kept.capacity, unit)}: the pod would have been scheduled to another node."
        )
    return tuple(lines)


def _instead(found: OwnerView, victims: Sequence[Pod], *, names: bool) -> str:
    if not victims:
        return "no pod would have been evicted by this decision."
    namespace = found.pod.partition("/")[0]
    shown = [pod.key for pod in victims if names or pod.namespace == namespace]
    others = len(victims) - len(shown)
    parts = [*map(wording.escape_terminal, shown)]
    parts += [f"{others} {'pod' if others == 1 else 'pods'} of another namespace"] if others else []
    return f"{' and '.join(parts)} would have been evicted instead."


def to_json(found: OwnerView) -> dict[str, Any]:
    """The view as one JSON object; amounts in the unit of the signal."""
    kept = found.kept
    return {
        "apiVersion": API_VERSION,
        "kind": "OwnerReport",
        "pod": found.pod,
        "owner": found.owner or None,
        "id": found.id,
        "time": found.time,
        "signal": found.signal.value,
        "evicted": found.evicted,
        "cause": found.cause,
        "usage": found.usage,
        "request": found.request,
        "podsOnNode": found.pods,
        "podsUsingMore": found.using_more,
        "podsOverRequest": found.over_request,
        "reasons": list(found.reasons),
        "podsSpared": found.spared,
        "requestThatKeepsIt": None
        if kept is None
        else {
            "verdict": kept.verdict.value,
            "request": kept.request,
            "limitToRaise": kept.limit,
            "sumOfRequests": kept.sum_of_requests,
            "capacity": kept.capacity,
        },
        "unknown": found.unknown or None,
        "advice": list(advice(found)),
    }
