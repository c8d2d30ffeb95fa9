"""The eviction order as a table for people, with the key that puts each pod before the next one.

Pods are sorted by several keys. The deciding one is the first whose value differs from the next pod's: a pod with the
same QoS and the same excess but a lower priority is there because of its priority.
"""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from nodeagent.model import SIGNAL_TABLE, Plan, PodSource, RankKey, Signal, Unit, units
from nodeagent.policy import ranking as policy_ranking
from nodeagent.report import pod_sections, record_fields, wording
from nodeagent.report.cells import BAD, DIM, STRONG, Cell, Column, Section
from nodeagent.report.record_fields import JsonObject

BY_NAME: Final = "same keys; by name"


class RankedRow(NamedTuple):
    """One pod of a ranking, from a plan or from its record."""

    rank: int | None
    pod: str
    """`namespace/name`."""
    usage: int | None
    request: str
    relief: int | None
    keys: tuple[RankKey, ...]
    refused: str
    """Why it would not be evicted; empty if it would."""
    victim: bool


def section_of_plan(plan: Plan) -> Section:
    """The order of a plan. Nothing without pods."""
    victims = {victim.pod.uid for victim in plan.victims}
    rows = [
        RankedRow(
            rank=each.rank,
            pod=each.view.pod.key,
            usage=each.usage,
            request=_request(each.request, plan.ranked_for, estimated=each.view.pod.source is PodSource.HOST),
            relief=each.relief,
            keys=each.keys,
            refused=wording.refusal_text([(refusal.code, refusal.message) for refusal in each.refusals]),
            victim=each.view.pod.uid in victims,
        )
        for each in policy_ranking.with_key_texts(plan).ranking
    ]
    return section(rows, str(plan.ranked_for), victims="would be evicted")


def section_of_record(decision: JsonObject) -> Section:
    """The order of a recorded decision. Nothing if it has none."""
    victims = {str(victim.get("uid")) for victim in record_fields.items(decision, "victims")}
    signal = str(decision.get("rankedFor"))
    rows = [
        RankedRow(
            rank=record_fields.integer(pod.get("rank")),
            pod=f"{pod.get('namespace')}/{pod.get('name')}",
            usage=record_fields.integer(pod.get("usage")),
            request=_request(record_fields.integer(pod.get("request")), signal),
            relief=record_fields.integer(pod.get("relief")),
            keys=tuple(_keys(record_fields.items(pod, "keys"))),
            refused=wording.refusal_text(record_fields.refusals(pod)),
            victim=str(pod.get("uid")) in victims,
        )
        for pod in record_fields.items(decision, "ranking")
    ]
    return section(rows, signal)


def section(rows: Sequence[RankedRow], signal: str, *, victims: str = "evicted") -> Section:
    """The table. A pod that is not evicted has the reasons instead of its keys. `victims`: what is said of them."""
    columns = (
        Column("RANK", right=True),
        Column("POD"),
        Column("USAGE", right=True),
        Column("REQUEST", right=True),
        Column("RELIEF", right=True),
        Column("BEFORE THE NEXT BY"),
        Column("ALL KEYS, OR WHY NOT EVICTED"),
    )
    unit = _unit(signal)
    cells = []
    for number, row in enumerate(rows):
        following = rows[number + 1] if number + 1 < len(rows) else None
        style = BAD if row.victim else DIM if row.refused else STRONG
        why = row.refused or "; ".join(key.text for key in row.keys)
        cells.append(
            (
                Cell("?" if row.rank is None else str(row.rank), style),
                Cell(wording.escape_terminal(row.pod + (f" ({victims})" if row.victim else "")), style),
                Cell(units.format_amount(row.usage, unit)),
                Cell(row.request),
                Cell(units.format_amount(row.relief, unit)),
                Cell(wording.escape_terminal(deciding_key(row.keys, following.keys) if following else ""), ""),
                Cell(wording.escape_terminal(why), DIM),
            )
        )
    title = wording.escape_terminal(f"{pod_sections.PODS_TITLE} {signal}")
    return Section(title, columns, tuple(cells)) if cells else Section("")


def deciding_key(keys: Sequence[RankKey], following: Sequence[RankKey]) -> str:
    """The first key in which a pod differs from the next one, with both values in words; empty if either is unknown."""
    if not keys or not following:
        return ""
    for mine, theirs in zip(keys, following, strict=False):
        if mine.value != theirs.value:
            return f"{mine.name}: {mine.text}, next {theirs.text}"
    return BY_NAME


def _request(amount: int | None, signal: str, *, estimated: bool = False) -> str:
    if _unit(signal) is not Unit.BYTES:
        return "-"
    text = units.format_amount(amount)
    return f"~{text}" if amount and estimated else text


def _unit(signal: str) -> Unit:
    return SIGNAL_TABLE[Signal(signal)].unit if signal in list(Signal) else Unit.BYTES


def _keys(found: Iterable[JsonObject]) -> Iterable[RankKey]:
    for key in found:
        value = record_fields.number(key.get("value"))
        if value is not None:
            yield RankKey(str(key.get("name")), value, str(key.get("text")))
