"""`nodeagent explain ID --markdown`: one Markdown document of a decision, to paste into a ticket.

Summary, timeline, impact, the minutes before as curves, the ranking, the configuration in force, and what would have
changed the decision. Every text from outside this program passes `markdown`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from nodeagent.model import RefusalCode, Unit, units
from nodeagent.report import explain, explain_oom, markdown, owner_view, record_fields, stories, story_text, wording
from nodeagent.report.cells import Cell
from nodeagent.report.owner_view import OwnerView
from nodeagent.report.record_fields import JsonObject
from nodeagent.report.stories import Story

MAX_RANKED: Final = 25


def document(story: Story, views: Sequence[OwnerView] = ()) -> str:
    """The whole document. `views`: for each victim which request would have kept it."""
    lines = [
        f"# {markdown.text(_title(story))}",
        "",
        *_summary(story),
        *_timeline(story),
        *_impact(story),
        *_curves(story),
        *_ranking(story),
        *_configuration(story),
        *_changes(story, views),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _title(story: Story) -> str:
    victims = [record_fields.pod_name(each) for each in story.victims]
    when = wording.rfc3339(story.at) if story.at is not None else units.UNKNOWN_TEXT
    if explain_oom.is_oom(story.recorded.decision):
        what = "OOM kills"
    elif victims:
        more = f" and {len(victims) - 1} more" if len(victims) > 1 else ""
        what = f"Eviction of {victims[0]}{more}"
    else:
        what = f"No eviction for {story.signal.value}"
    return f"{what}, {when}"


def _summary(story: Story) -> list[str]:
    lines = ["## Summary", ""]
    lines += [f"* **{word.capitalize()}**: {markdown.text(text)}" for word, text in story_text.summary(story)]
    if explain_oom.is_oom(story.recorded.decision):
        lines += [f"* {markdown.text(cell.text)}" for cell in _kill_lines(story)]
    lines.append(f"* **Decision**: {markdown.text(story.recorded.id)}")
    if story.missing:
        lines.append(f"* **Not recorded**: {markdown.text(story.missing)}")
    lines += [f"* **Not readable**: {markdown.text(each)}" for each in story.trouble[: story_text.MAX_TROUBLE]]
    return [*lines, ""]


def _kill_lines(story: Story) -> Iterable[Cell]:
    for section in explain_oom.sections(story.recorded.id, story.recorded.decision):
        if section.title.startswith("WHY NO EVICTION"):
            yield from section.lines


def _timeline(story: Story) -> list[str]:
    at = story.at
    lines = ["## Timeline", ""]
    if at is None or not story.moments:
        return [*lines, "Nothing is recorded of it.", ""]
    rows = [
        (wording.rfc3339(moment.at), story_text.when(moment, at), story_text.moment_text(moment, at))
        for moment in story_text.shown_moments(story)
    ]
    return [*lines, *markdown.table(("Time (UTC)", "Offset", "What happened"), rows, right=(1,))]


def _impact(story: Story) -> list[str]:
    lines = ["## Impact", ""]
    outcomes = {str(each.get("podUid")): str(each.get("kind")) for each in story.recorded.outcomes}
    unit = explain.unit_of(story.signal.value)
    rows = [
        (
            record_fields.pod_name(victim),
            str(victim.get("owner") or "none"),
            str(victim.get("qosClass") or units.UNKNOWN_TEXT),
            str(victim.get("method")),
            units.format_duration(record_fields.number(victim.get("gracePeriodSeconds"))),
            units.format_amount(record_fields.integer(victim.get("predictedRelief")), unit),
            outcomes.get(str(victim.get("uid")), "none recorded"),
        )
        for victim in story.victims
    ]
    kills = [
        (
            str(kill.get("pod") or record_fields.mapping(kill, "place").get("path")),
            str(kill.get("number")),
            str(kill.get("cause")),
        )
        for kill in record_fields.items(story.recorded.decision, "kills")
    ]
    if rows:
        titles = ("Pod", "Owner", "QoS class", "Method", "Grace", "Predicted relief", "Outcome")
        lines += markdown.table(titles, rows, right=(4, 5))
    if kills:
        lines += markdown.table(("Pod or cgroup", "Processes killed", "Cause"), kills, right=(1,))
    if not rows and not kills:
        lines += ["No pod was evicted.", ""]
    facts = [f"* {markdown.text(fact)}" for fact in _facts(story)]
    return [*lines, *facts, *([""] if facts else [])]


def _facts(story: Story) -> Iterable[str]:
    found = story.history
    if found is None:
        return
    for curve in stories.curves(story):
        if curve.name == story.signal.value:
            yield f"Closest approach of {curve.name}: {stories.amount(curve.extreme, curve.unit)}"
    for window in found.met:
        if window.threshold.signal is story.signal:
            end = window.ended if window.ended is not None else found.ended
            lasted = units.format_duration(None if end is None else end - window.began)
            yield f"{window.name}: met for {lasted}" + ("" if window.ended is not None else " and longer")
    for condition in found.conditions:
        end = condition.ended if condition.ended is not None else found.ended
        lasted = units.format_duration(None if end is None else end - condition.began)
        yield f"{condition.type.value} was True for {lasted}" + ("" if condition.ended is not None else " and longer")


def _curves(story: Story) -> list[str]:
    lines = ["## The minutes before", ""]
    if story.at is None or not stories.curves(story):
        return [*lines, markdown.text(story.missing or "No samples are recorded.").rstrip(".") + ".", ""]
    rows = story_text.curve_rows(story)
    widths = [max(len(row[number]) for row in rows) for number in range(len(rows[0]))]
    drawn = "\n".join(story_text.aligned(row, widths) for row in rows)
    return [*lines, *markdown.code(drawn, "text")]


def _ranking(story: Story) -> list[str]:
    ranking = record_fields.items(story.recorded.decision, "ranking")
    if not ranking:
        return []
    unit = explain.unit_of(story.recorded.decision.get("rankedFor"))
    victims = {str(each.get("uid")) for each in story.victims}
    rows = [_ranked(each, victims, unit) for each in ranking[:MAX_RANKED]]
    order = ", ".join(explain.rank_order(story.recorded.decision)) or units.UNKNOWN_TEXT
    titles = ("Rank", "Pod", "Usage", "Request", "Relief", "", "Why")
    more = len(ranking) - len(rows)
    return [
        "## Ranking",
        "",
        f"Pods in the order of eviction for {markdown.text(str(story.recorded.decision.get('rankedFor')))}, by "
        f"{markdown.text(order)}.",
        "",
        *markdown.table(titles, rows, right=(0, 2, 3, 4)),
        *([f"And {more} more.", ""] if more else []),
    ]


def _ranked(pod: JsonObject, victims: set[str], unit: Unit) -> tuple[str, ...]:
    refusals = record_fields.refusals(pod)
    keys = "; ".join(str(each.get("text")) for each in record_fields.items(pod, "keys"))
    evicted = str(pod.get("uid")) in victims
    request = pod.get("request")
    return (
        str(pod.get("rank")),
        record_fields.pod_name(pod),
        units.format_amount(record_fields.integer(pod.get("usage")), unit),
        "-" if request is None else units.format_amount(record_fields.integer(request), unit),
        units.format_amount(record_fields.integer(pod.get("relief")), unit),
        "evicted" if evicted else wording.refusal_label([code for code, _ in refusals]) if refusals else "",
        "; ".join([message for _, message in refusals]) if refusals and not evicted else keys,
    )


def _configuration(story: Story) -> list[str]:
    lines = ["## Configuration in force", ""]
    if not story.configuration:
        return [*lines, "It is not recorded.", ""]
    return [*lines, *markdown.code(story.configuration, "yaml")]


def _changes(story: Story, views: Sequence[OwnerView]) -> list[str]:
    lines = ["## What would have changed it", ""]
    found = [
        f"* {markdown.text(f'{view.pod}: {sentence}')}"
        for view in views
        for sentence in owner_view.advice(view, names=True)
    ]
    codes = dict.fromkeys(str(each.get("code")) for each in record_fields.items(story.recorded.decision, "refusals"))
    for name in codes:
        code = _CODES.get(name)
        if code is not None and code.remedy:
            found.append(f"* {markdown.text(f'{name}: {code.remedy}')}")
    if not found:
        return [*lines, "Nothing that is known.", ""]
    return [*lines, *found, ""]


_CODES: Final[Mapping[str, RefusalCode]] = {code.value: code for code in RefusalCode}
