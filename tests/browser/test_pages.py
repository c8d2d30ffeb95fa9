"""The pages in a real browser: nothing runs, nothing is loaded, nothing is cut off."""

from collections.abc import Iterator
from typing import Final

import pytest

from nodeagent.config.schema import Config
from nodeagent.loop.live_page import LivePage
from nodeagent.model import Signal
from nodeagent.report import check_page, history, history_page, html_page
from nodeagent.report.charts import Mark
from nodeagent.report.html_page import Html
from nodeagent.telemetry.endpoint import build_pages
from nodeagent.telemetry.http_server import Server
from nodeagent.telemetry.metrics import Metrics
from nodeagent.telemetry.runtime_counters import RuntimeCounters
from tests.support import browser, nodes, recordings, reports
from tests.support.browser import Browser, View
from tests.support.nodes import GI, NOW

PROGRAM: Final = browser.find()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine")

WIDTH_EXCESS: Final = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
PHONE: Final = View(width=360, height=780, phone=True)
HOSTILE: Final = (
    "<script>document.title='run'</script>",
    '"><img src=http://127.0.0.1:9/x onerror="document.title=1">',
    "</style></svg></title><script>document.title='run'</script>",
    "\u202egnp.exe",
    "\u05d0\u05d1\u05d2-\u0627\u0644\u0639",
    "x" * 10_000,
)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    assert PROGRAM is not None
    with browser.start(PROGRAM) as made:
        yield made


def blocks_with(names: tuple[str, ...]) -> list[Html]:
    """A page of pods with these names, with charts, marks and every section."""
    config = nodes.config(nodes.soft(value=2 * GI, grace_s=5.0), nodes.hard(value=GI))
    views = [nodes.view(name, GI * (number + 1) // 4) for number, name in enumerate(names)]
    samples = recordings.record(
        lambda second: nodes.snapshot(*views, at=NOW + second, available={Signal.MEMORY: int((8 - second / 8) * GI)}),
        config,
        seconds=60,
    )
    ranked = tuple(reports.ranked(view, number) for number, view in enumerate(views, 1))
    charts = history_page.blocks(history.history(samples), marks=[Mark(nodes.WALL + 40, name) for name in names])
    return [*check_page.blocks(reports.report(pods=ranked)), *charts, html_page.preformatted("\n".join(names))]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("pages") / "plain.html"
    path.write_text(html_page.page("nodeagent on node-1", blocks_with(("web", "db", "batch"))), "utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("pages") / "hostile.html"
    path.write_text(html_page.page(HOSTILE[0], blocks_with(HOSTILE)), "utf-8")
    return path.as_uri()


def test_the_browser_complains_about_nothing_and_loads_nothing(chromium: Browser, plain: str) -> None:
    chromium.load(plain)
    assert chromium.complaints() == []
    assert {address for address in chromium.requests() if not address.startswith("data:")} == {plain}


def test_the_style_sheet_is_allowed_by_its_hash(chromium: Browser, plain: str) -> None:
    chromium.load(plain)
    assert chromium.evaluate("getComputedStyle(document.querySelector('.verdict')).borderLeftWidth") == "5px"


def test_hostile_names_are_text(chromium: Browser, hostile: str) -> None:
    chromium.load(hostile)
    assert chromium.complaints() == []
    assert {address for address in chromium.requests() if not address.startswith("data:")} == {hostile}
    assert chromium.evaluate("document.title") == HOSTILE[0]
    assert chromium.evaluate("document.querySelectorAll('script, img, iframe, [onerror]').length") == 0
    assert HOSTILE[1] in chromium.evaluate("document.querySelector('pre').textContent")
    assert chromium.evaluate("document.documentElement.textContent.includes('\\u202e')") is False


@pytest.mark.parametrize("view", [View(), View(width=700), PHONE, View(width=320, phone=True)])
@pytest.mark.parametrize("page", ["plain", "hostile"])
def test_no_width_needs_horizontal_scrolling(
    chromium: Browser, page: str, view: View, request: pytest.FixtureRequest
) -> None:
    chromium.load(request.getfixturevalue(page), view)
    chromium.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert chromium.evaluate(WIDTH_EXCESS) <= 0


def test_letters_of_a_chart_are_as_large_on_a_phone(chromium: Browser, plain: str) -> None:
    chromium.load(plain, PHONE)
    heights = chromium.evaluate("[...document.querySelectorAll('svg.plot text')].map(each => each.getBBox().height)")
    assert min(height for height in heights if height) >= 10  # hidden ones have none


def lightness(color: str) -> float:
    return sum(map(int, color.removeprefix("rgb(").removesuffix(")").split(","))) / 3


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_follows_the_colours_of_the_system(chromium: Browser, plain: str, dark: bool) -> None:
    chromium.load(plain, View(dark=dark))
    back = chromium.evaluate("getComputedStyle(document.body).backgroundColor")
    ink = chromium.evaluate("getComputedStyle(document.body).color")
    assert (lightness(back) < 60) is dark
    assert abs(lightness(back) - lightness(ink)) > 180


def contrast(chromium: Browser, selector: str) -> float:
    """The contrast of a text with its card, as WCAG computes it."""
    script = (
        "(() => { const lum = c => { const v = c.match(/[0-9.]+/g).slice(0, 3).map(x => x / 255).map("
        "x => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);"
        "return .2126 * v[0] + .7152 * v[1] + .0722 * v[2] };"
        f"const e = document.querySelector('{selector}'); let b = e; let back = 'rgba(0, 0, 0, 0)';"
        "while (b && /, 0\\)$/.test(back)) { back = getComputedStyle(b).backgroundColor; b = b.parentElement }"
        "const [x, y] = [lum(getComputedStyle(e).color), lum(back)].sort((p, q) => q - p);"
        "return (x + .05) / (y + .05) })()"
    )
    return float(chromium.evaluate(script))


@pytest.mark.parametrize("dark", [False, True])
def test_texts_have_enough_contrast(chromium: Browser, plain: str, dark: bool) -> None:
    chromium.load(plain, View(dark=dark))
    for selector in (".verdict", "td.dim", "th", "td .dim, .legend .dim", "td.good", "summary", "figcaption"):
        assert contrast(chromium, selector) >= 4.5, selector


def test_the_keyboard_reaches_the_report_and_what_is_folded(chromium: Browser, plain: str) -> None:
    chromium.load(plain)
    chromium.press("Tab")
    assert chromium.evaluate("document.activeElement.className") == "skip"
    assert chromium.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
    chromium.press("Tab")
    assert chromium.evaluate("document.activeElement.tagName") == "SUMMARY"
    assert chromium.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    chromium.evaluate("document.activeElement.click()")
    assert chromium.evaluate("document.activeElement.parentElement.open") is True


def test_every_picture_has_a_description(chromium: Browser, plain: str) -> None:
    chromium.load(plain)
    described = "[...document.querySelectorAll('svg')].every(e => e.closest('[role=img][aria-label],[aria-hidden]'))"
    assert chromium.evaluate(described) is True
    assert chromium.evaluate("document.querySelectorAll('svg.plot[aria-label*=lowest]').length") >= 2


def test_on_paper_the_page_is_light_and_what_is_folded_is_open(chromium: Browser, plain: str) -> None:
    chromium.load(plain, View(dark=True, print=True))
    assert lightness(chromium.evaluate("getComputedStyle(document.body).backgroundColor")) > 200
    folded = "[...document.querySelectorAll('details table')].every(each => each.getBoundingClientRect().height > 20)"
    assert chromium.evaluate(folded) is True
    assert chromium.pdf().startswith(b"%PDF")


def test_the_live_page_works_under_its_headers(chromium: Browser) -> None:
    config: Config = nodes.config(nodes.hard(value=GI))
    page = LivePage(config=lambda: config, config_source="built-in defaults")
    snapshots = (nodes.snapshot(nodes.view(HOSTILE[0], GI), at=NOW + second) for second in range(0, 100, 10))
    for decided in recordings.decide_all(snapshots, config):
        page.remember(decided.plan, decided.sample.snapshot, acts=True)
    metrics = Metrics(config, boottime=lambda: NOW, runtime_counters=RuntimeCounters)
    pages = build_pages(metrics, config=lambda: config, boottime=lambda: NOW, live_page=page.document)
    server = Server("127.0.0.1:0", pages, failed=pytest.fail)
    try:
        address = f"http://127.0.0.1:{server.port}/"
        chromium.load(address, PHONE)
        assert chromium.complaints() == []
        assert {each for each in chromium.requests() if not each.startswith("data:")} == {address}
        assert chromium.evaluate("document.querySelectorAll('svg.plot').length") >= 2
        assert chromium.evaluate(WIDTH_EXCESS) <= 0
    finally:
        server.close()
