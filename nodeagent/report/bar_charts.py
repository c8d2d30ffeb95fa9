"""Bars as inline SVG: how far each signal is from its thresholds now, and who holds a resource now.

The same rules as in `charts`: an unknown value has no bar, and every number is there as text.
"""

from collections.abc import Sequence
from typing import NamedTuple

from nodeagent.report import chart_scales, charts, html_page
from nodeagent.report.cells import BAD, GOOD, WARN
from nodeagent.report.html_page import Html


class Limit(NamedTuple):
    """A threshold on the scale of its level."""

    value: float
    hard: bool


class Level(NamedTuple):
    """How much of something is available."""

    name: str
    available: float | None
    capacity: float | None
    unit: str
    limits: Sequence[Limit] = ()
    style: str = ""
    """GOOD, WARN or BAD."""
    remark: str = ""


class Share(NamedTuple):
    """One holder of a resource."""

    name: str
    amount: float


def level_chart(title: str, levels: Sequence[Level], *, note: str = "") -> Html:
    """One bar for each level, filled to what is available, with its thresholds as marks."""
    rows = "".join(_level(level) for level in levels)
    small = f"<small>{html_page.text(note)}</small>" if note else ""
    return Html(
        f'<figure class="chart"><figcaption>{html_page.text(title)}{small}</figcaption>'
        f'<ul class="levels">{rows}</ul></figure>'
    )


def _level(level: Level) -> str:
    known = level.available is not None and level.capacity is not None and level.capacity > 0
    words = chart_scales.value_text(level.available, level.unit)
    if level.capacity is not None:
        words += f" of {chart_scales.value_text(level.capacity, level.unit)}"
    limits = ", ".join(
        f"{'hard' if limit.hard else 'soft'} {chart_scales.value_text(limit.value, level.unit)}"
        for limit in level.limits
    )
    remark = f"; {level.remark}" if level.remark else ""
    style = level.style if level.style in (GOOD, WARN, BAD) else ""
    shapes = '<rect class="track" y="5" width="100%" height="10" rx="2"/>'
    if known and level.available is not None and level.capacity is not None:
        share = 100 * min(1.0, max(0.0, level.available / level.capacity))
        shapes += f'<rect class="fill {style}" y="5" width="{share:.2f}%" height="10" rx="2"/>'
        for limit in level.limits:
            place = 100 * min(1.0, max(0.0, limit.value / level.capacity))
            kind = "hard" if limit.hard else "soft"
            shapes += f'<line class="tick {kind}" x1="{place:.2f}%" x2="{place:.2f}%" y1="1" y2="19"/>'
    return (
        f"<li><div><b>{html_page.text(level.name)}</b> <span{html_page.class_of(style)}>{html_page.text(words)}</span>"
        f' <span class="dim">{html_page.text(limits + remark)}</span></div>'
        f'<svg class="level" height="20" aria-hidden="true">{shapes}</svg></li>'
    )


def share_chart(title: str, shares: Sequence[Share], total: float, unit: str, *, note: str = "") -> Html:
    """One bar of the whole, divided among its holders; what is left of `total` stays empty."""
    total = max(total, sum(max(0.0, share.amount) for share in shares))
    shapes, rows, left = [], [], 0.0
    for number, share in enumerate(shares):
        colour = min(number, charts.COLOURS)
        width = 100 * max(0.0, share.amount) / total if total > 0 else 0.0
        words = f"{share.name} {chart_scales.value_text(share.amount, unit)}"
        shapes.append(
            f'<rect class="area a{colour}" x="{left:.2f}%" width="{width:.2f}%" height="100%">'
            f"<title>{html_page.text(words, limit=200)}</title></rect>"
        )
        left += width
        key = f'<svg aria-hidden="true"><rect class="a{colour}" width="100%" height="100%" rx="2"/></svg>'
        amount = chart_scales.value_text(share.amount, unit)
        rows.append(
            f"<li>{key}<bdi>{html_page.text(charts.short_name(share.name))}</bdi> "
            f'<span class="dim">{amount}, {_percent(width)}</span></li>'
        )
    small = f"<small>{html_page.text(note)}</small>" if note else ""
    return Html(
        f'<figure class="chart"><figcaption>{html_page.text(title)}{small}</figcaption>'
        f'<svg class="shares" height="34" role="img" aria-label="{html_page.text(title)}">'
        f'<rect class="track" width="100%" height="100%"/>{"".join(shapes)}</svg>'
        f'<ul class="legend">{"".join(rows)}</ul></figure>'
    )


def _percent(share: float) -> str:
    return "less than 1%" if 0 < share < 1 else f"{share:.0f}%"
