import re

from nodeagent.report import bar_charts
from nodeagent.report.bar_charts import Level, Limit, Share


def test_a_level_is_filled_to_what_is_available_and_has_its_thresholds() -> None:
    chart = bar_charts.level_chart(
        "now", [Level("pids", 25, 100, "pids", [Limit(10, hard=True), Limit(20, hard=False)])]
    )
    assert '<rect class="fill " y="5" width="25.00%"' in chart
    assert re.findall('class="tick (hard|soft)" x1="([^"]*)"', chart) == [("hard", "10.00%"), ("soft", "20.00%")]
    assert "25 of 100" in chart
    assert "hard 10, soft 20" in chart


def test_an_unknown_level_has_no_bar_but_its_reason() -> None:
    chart = bar_charts.level_chart("now", [Level("pids", None, 100, "pids", remark="/proc/loadavg: not readable")])
    assert 'class="fill' not in chart
    assert "? of 100" in chart
    assert "/proc/loadavg: not readable" in chart


def test_shares_fill_the_bar_one_after_the_other() -> None:
    chart = bar_charts.share_chart("memory", [Share("a", 20), Share("b", 30)], 100, "pids")
    assert re.findall('class="area a[01]" x="([^"]*)" width="([^"]*)"', chart) == [
        ("0.00%", "20.00%"),
        ("20.00%", "30.00%"),
    ]
    assert "30, 30%" in chart


def test_shares_above_the_total_still_fit() -> None:
    chart = bar_charts.share_chart("memory", [Share("a", 150), Share("<b>", 50)], 100, "pids")
    assert 'width="75.00%"' in chart
    assert "<b>" not in chart
