"""The documentation as a site: it builds without a warning, no link is broken, and nothing is loaded from elsewhere."""

import html.parser
import os
import posixpath
import subprocess
import sys
import urllib.parse
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY

LOADS = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


class Page(html.parser.HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.names |= {name for name in (values.get("id"), values.get("name")) if name}
        if tag == "a" and (target := values.get("href")):
            self.links.append(target)
        relation = values.get("rel") or ""
        if tag in LOADS and (target := values.get(LOADS[tag])) and relation not in ("canonical", "prev", "next"):
            self.loads.append(target)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(place)],
        cwd=REPOSITORY,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return place


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Page]:
    return {path.relative_to(site).as_posix(): Page(path.read_text("utf-8")) for path in site.rglob("*.html")}


def test_every_link_leads_to_a_page_and_to_the_heading_that_it_names(site: Path, pages: dict[str, Page]) -> None:
    broken = []
    for name, page in pages.items():
        if name == "404.html":  # shown at any address, its links are absolute
            continue
        for link in page.links:
            target = urllib.parse.urlsplit(link)
            if target.scheme or target.netloc:
                continue
            path = urllib.parse.unquote(target.path)
            place = posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) if path else name
            if (site / place).is_dir():
                place = posixpath.normpath(posixpath.join(place, "index.html"))
            if not (site / place).is_file():
                broken.append(f"{name}: {link}")
            elif target.fragment and place in pages and urllib.parse.unquote(target.fragment) not in pages[place].names:
                broken.append(f"{name}: no heading {link}")
    assert broken == []
    assert sum(len(page.links) for page in pages.values()) > 500


def test_a_page_loads_nothing_from_elsewhere(pages: dict[str, Page]) -> None:
    assert [
        f"{name}: {load}"
        for name, page in pages.items()
        for load in page.loads
        if urllib.parse.urlsplit(load).netloc not in ("", "nodeagent.io")
    ] == []


def test_a_linked_manifest_is_part_of_the_site(site: Path) -> None:
    assert (site / "files" / "daemonset.yaml.txt").read_bytes() == (REPOSITORY / "daemonset.yaml").read_bytes()


def test_every_page_of_the_documentation_is_in_the_navigation(pages: dict[str, Page]) -> None:
    text = (REPOSITORY / "mkdocs.yml").read_text("utf-8")
    missing = [path.name for path in (REPOSITORY / "docs").glob("*.md") if f"{path.name}\n" not in text]
    assert missing == []
