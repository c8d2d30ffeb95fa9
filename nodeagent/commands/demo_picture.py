"""The picture at the README's top, printed by `python -m nodeagent.commands.demo_picture > docs/images/demo.svg`.

It is the end of `nodeagent demo` as a terminal of 100 columns shows it, without the list of moments.
"""

import sys

from nodeagent.analysis import incident
from nodeagent.report import demo_frames, demo_story, terminal

WIDTH = 100


def svg() -> str:
    """The picture."""
    story = incident.read().story
    head = demo_story.head(story)
    return terminal.as_svg(
        "nodeagent demo",
        before=(head._replace(lines=head.lines[:1]),),
        lines=demo_frames.charts(story, width=WIDTH),
        after=(demo_story.comparison(story),),
        width=WIDTH,
    )


if __name__ == "__main__":
    sys.stdout.write(svg())
