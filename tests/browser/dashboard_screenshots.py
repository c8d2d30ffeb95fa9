"""The dashboards with the data of a real agent, in docs/images: `python -m tests.browser.dashboard_screenshots`.

A Prometheus scrapes an agent while a pod grows until it is evicted, as in tests/scenarios/test_dashboards.py. Each
query of each panel is sent as Grafana would send it, and drawn by the charts of the reports. Takes two minutes and
needs what that test needs, and Chromium.
"""

import contextlib
import math
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from nodeagent.model import Unit
from nodeagent.report import chart_scales, charts, html_page
from nodeagent.report.cells import Cell, Column
from nodeagent.report.charts import Line
from nodeagent.report.html_page import Html
from tests.fake_kube import ApiServer
from tests.support import browser, png, scraped_agent
from tests.support.browser import Browser, View
from tests.support.dashboards import FLEET, NODE, Dashboard, Panel
from tests.support.livenode import MIB, Kubepods, Run, configuration, until
from tests.support.paths import REPOSITORY
from tests.support.scraped_agent import CHILL, HOG, Prometheus

IMAGES: Final = REPOSITORY / "docs" / "images"
WIDTH: Final = 1180
UNITS: Final = {
    "bytes": str(Unit.BYTES),
    "s": chart_scales.SECONDS,
    "percentunit": chart_scales.PERCENT,
    "short": chart_scales.COUNT,
}
"""Grafana's name of a unit, and that of our charts."""
MAX_LINES: Final = 8
GRID: Final = """
body { max-width: none; } main { display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); gap: 10px; }
details, .skip { display: none; } figure { margin: 0; } p { grid-column: 1 / -1; margin: 0; }
"""
"""Three panels beside each other, and no text versions: this page is only for a picture."""


def main() -> int:
    """Take both screenshots; 1 where something that they need is missing."""
    program = browser.find()
    if program is None or shutil.which("prometheus") is None:
        print("needs Chromium and prometheus", file=sys.stderr)
        return 1
    with (
        tempfile.TemporaryDirectory() as directory,
        browser.start(program) as chromium,
        under_pressure(Path(directory)) as prometheus,
    ):
        ended = time.time()
        for dashboard in (NODE, FLEET):
            blocks = [panel_block(prometheus, panel, ended=ended) for panel in dashboard.panels]
            shoot(chromium, dashboard, blocks, Path(directory))
    return 0


@contextlib.contextmanager
def under_pressure(directory: Path) -> Iterator[Prometheus]:
    """The Prometheus, after a pod has grown until it was evicted and ended, and the pressure is over."""
    with contextlib.ExitStack() as running:
        kubepods = Kubepods(limit=600 * MIB)
        running.callback(kubepods.close)
        api = running.enter_context(scraped_agent.api_server())
        port = scraped_agent.free_port()
        scraped_agent.start_pods(kubepods, directory)
        config = configuration(directory, kubepods, **scraped_agent.configuration(kubepods, directory, port=port))
        credentials = api.kubeconfig(directory / "kubeconfig")
        agent = Run(
            *("--config", str(config), "--kubeconfig", str(credentials), "--node-name", "lab-node"),
            log=directory / "log",
        )
        running.callback(agent.kill)
        prometheus = Prometheus(directory, agent_port=port)
        running.callback(prometheus.close)
        until(lambda: prometheus.query("nodeagent_sync_age_seconds"), "the first scrape")
        time.sleep(10)
        ramp(kubepods, api)
        time.sleep(25)
        yield prometheus


def ramp(kubepods: Kubepods, api: ApiServer) -> None:
    """The pod grows by 10 MiB a second until it is evicted, and is then ended as by a kubelet."""
    kubepods.eat(CHILL, 20)
    for _ in range(50):
        kubepods.eat(HOG, 10)
        if api.wait_for(lambda: api.sent("POST", "/eviction"), 1.0):
            break
    time.sleep(3)
    kubepods.kill(HOG)
    api.delete_pod("default", "hog")


def panel_block(prometheus: Prometheus, panel: Panel, *, ended: float) -> Html:
    """A panel as a chart, or as a table of the last values if it is a `stat` panel."""
    began = ended - 80
    lines = [
        Line(legend(query.legend, series["metric"]), points(series["values"], panel.unit))
        for query in panel.queries
        for series in prometheus.query_range(scraped_agent.expression(query), start=began, end=ended, step_s=1.0)
    ]
    if panel.kind == "stat":
        rows = [(Cell(line.name), Cell(chart_scales.value_text(last(line), UNITS[panel.unit]))) for line in lines]
        return html_page.table((Column(panel.title.upper()), Column("LAST", right=True)), rows, name=panel.title)
    most = sorted(
        lines, key=lambda line: -max((abs(value) for _, value in line.points if value is not None), default=0)
    )
    shown = [line for line in lines if line in most[:MAX_LINES]]
    note = f"{len(lines) - len(shown)} smaller series are not drawn." if len(shown) < len(lines) else ""
    return charts.time_chart(panel.title, shown, unit=UNITS[panel.unit], note=note, span=(began, ended))


def legend(template: str, labels: dict[str, str]) -> str:
    """The name of a series, as Grafana makes it."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), template).strip() or "(none)"


def points(values: list[list[Any]], unit: str) -> list[tuple[float, float | None]]:
    factor = 100.0 if unit == "percentunit" else 1.0
    found = [(float(at), float(text) * factor) for at, text in values]
    return [(at, value if math.isfinite(value) else None) for at, value in found]


def last(line: Line) -> float | None:
    return line.points[-1][1]


def shoot(chromium: Browser, dashboard: Dashboard, blocks: list[Html], directory: Path) -> None:
    """The whole page as docs/images/dashboard-NAME.png."""
    words = "The queries of the dashboard, drawn by nodeagent's own charts and not by Grafana."
    page = html_page.page(dashboard.title, [html_page.paragraph(words), *blocks])
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', f"<style>{GRID}</style>", page)
    page = page.replace("</head>", f"<style>{GRID}</style></head>")
    file = directory / "page.html"
    file.write_text(page, "utf-8")
    chromium.load(file.as_uri(), View(WIDTH, 800))
    chromium.load(file.as_uri(), View(WIDTH, int(chromium.evaluate("document.documentElement.scrollHeight"))))
    image = IMAGES / f"dashboard-{dashboard.uid.removeprefix('nodeagent-')}.png"
    chromium.screenshot(image)
    png.shrink(image)


if __name__ == "__main__":
    sys.exit(main())
