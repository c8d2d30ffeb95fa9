"""The incident of `nodeagent demo` as a page."""

from nodeagent.report import charts, demo_story, history_page, html_page
from nodeagent.report.charts import Line, Mark
from nodeagent.report.demo_story import Lane, Story
from nodeagent.report.history_values import History
from nodeagent.report.html_page import Html


def blocks(story: Story, history: History) -> tuple[Html, ...]:
    """The content of the page. `history` is that of the samples with nodeagent."""
    return (
        html_page.verdict(demo_story.headline(story)),
        html_page.paragraph(demo_story.origin(story), "dim"),
        html_page.section(demo_story.comparison(story)),
        html_page.group("Available memory", *(_chart(story, lane) for lane in story.lanes)),
        html_page.section(demo_story.ranking(story)),
        html_page.section(demo_story.timeline(story)),
        html_page.details("The samples that nodeagent recorded", *history_page.blocks(history)),
        html_page.section(demo_story.next_commands()),
    )


def _chart(story: Story, lane: Lane) -> Html:
    """The memory of one lane, with the time of day at which it was recorded."""
    points = [(lane.began_wall + point.at, float(point.available)) for point in lane.curve]
    ends = [points[0][0], points[-1][0]]
    limits = [
        Line(f"{name} {demo_story.amount(value)}", [(at, float(value)) for at in ends], style)
        for name, value, style in (
            ("kubelet", story.kubelet, "line"),
            ("hard", story.hard, "hard"),
            ("soft", story.soft, "soft"),
        )
    ]
    marks = [
        Mark(lane.began_wall + moment.at, f"{moment.who}: {moment.text}", minor=moment.at != lane.acted_at)
        for moment in lane.moments
    ]
    return charts.time_chart(lane.name, [Line("MemAvailable", points), *limits], marks=marks, span=(ends[0], ends[1]))
