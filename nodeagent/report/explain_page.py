"""The page of `explain --html`: the story of a decision with its minutes as charts, and every table of the text."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from nodeagent.report import explain, history, history_page, html_page, pod_sections, ranking_table, story_text, wording
from nodeagent.report.cells import BAD, WARN, Cell, Column, Section
from nodeagent.report.html_page import Html
from nodeagent.report.recorded_decisions import RecordedDecision
from nodeagent.report.stories import Moment, Story

MAX_MOMENTS: Final = 200
"""Rows of what happened when; JSON has all."""


def title(story: Story) -> str:
    """The heading of the page."""
    when = "" if story.at is None else f", {wording.rfc3339(story.at)}"
    return f"nodeagent: decision {story.recorded.id}{when}"


def blocks(story: Story, decisions: Iterable[RecordedDecision] = ()) -> tuple[Html, ...]:
    """The story in short, its charts, what happened when, and the tables. `decisions`: all that are recorded; their
    victims and OOM kills in these minutes are marked as well."""
    tables = explain.sections(story.recorded)
    head = tables[0].lines if tables else ()
    found = [html_page.verdict(head[0].text, BAD if story.victims else WARN)] if head else []
    found.append(html_page.facts((word.capitalize(), words) for word, words in story_text.summary(story)))
    if story.history is None:
        found.append(html_page.paragraph(f"no charts: {story.missing}", WARN))
    else:
        records = [record for each in decisions or (story.recorded,) for record in _records(each)]
        found.extend(
            history_page.blocks(
                story.history,
                evictions=history.evictions(records),
                oom_kills=history.oom_kills(records),
                pods_of=story.signal,
            )
        )
    if story.moments:
        found.append(html_page.section(_moments(story.moments)))
    if len(head) > 1:
        found.append(
            html_page.group("THE DECISION", *[html_page.paragraph(line.text, line.style) for line in head[1:]])
        )
    ranking = ranking_table.section_of_record(story.recorded.decision)
    for content in tables[1:]:
        is_order = content.title.startswith(pod_sections.PODS_TITLE) and bool(ranking.rows)
        found.append(html_page.section(ranking if is_order else content))
    found.extend(html_page.paragraph(f"not readable: {each}", WARN) for each in story.trouble)
    return tuple(found)


def _records(recorded: RecordedDecision) -> Iterable[Mapping[str, Any]]:
    return (recorded.decision, *recorded.outcomes)


def _moments(moments: tuple[Moment, ...]) -> Section:
    rows = tuple(
        (
            Cell(wording.rfc3339(each.at)),
            Cell(wording.escape_terminal(each.text), each.style),
            Cell("" if each.number == 1 else f"{each.number} times"),
        )
        for each in moments[:MAX_MOMENTS]
    )
    more = len(moments) - len(rows)
    lines = (Cell(f"{more} more moments"),) if more else ()
    return Section("WHAT HAPPENED WHEN", (Column("TIME (UTC)"), Column("EVENT"), Column("")), rows, lines)
