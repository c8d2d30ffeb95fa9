"""Every relative link of the pages leads somewhere, to the heading it names; every command shown exists."""

import re
import shlex
from pathlib import Path

import pytest

from nodeagent.commands import arguments
from tests.support.pages import PAGES, prose
from tests.support.paths import REPOSITORY

LINK = re.compile(r"(?<!!)\[[^\]\n]*(?:\n[^\]\n]*)?\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*\s*$", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings: lower case, punctuation dropped, blanks as hyphens, counted."""
    found: dict[str, int] = {}
    names = set()
    for heading in HEADING.findall(prose(page)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        names.add(f"{name}-{found[name]}" if name in found else name)
        found[name] = found.get(name, 0) + 1
    return names | set(re.findall(r'<a (?:id|name)="([^"]+)"', page.read_text("utf-8")))


def links(page: Path) -> list[str]:
    text = re.sub(r"`[^`\n]*`", "", prose(page))
    return [target for target in LINK.findall(text) if not re.match(r"[a-z]+:", target)]


def broken(page: Path) -> list[str]:
    wrong = []
    for target in links(page):
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        leads = place.is_relative_to(REPOSITORY) and place.exists()
        if not leads or (anchor and (place.suffix != ".md" or anchor not in anchors(place))):
            wrong.append(target)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_relative_link_leads_to_a_page_and_heading_that_exist(page: Path) -> None:
    assert broken(page) == []


def test_a_broken_link_and_a_missing_heading_are_found(tmp_path: Path) -> None:
    page = REPOSITORY / "docs" / "reasons.md"
    assert links(page), "there is something to check"
    assert {"outcomes", "why-a-pod-is-protected"} <= anchors(page)
    odd = tmp_path / "odd.md"
    odd.write_text(
        "# One `two` (three)\n\n# Same\n\n# Same\n\n[a](#one-two-three) [b](#same-1) [c](#none)\n"
        "[d](no.md)\n```\n[e](f)\n```\n"
    )
    assert links(odd) == ["#one-two-three", "#same-1", "#none", "no.md"]
    assert anchors(odd) == {"one-two-three", "same", "same-1"}
    assert broken(odd) == links(odd), "outside the project nothing counts"


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached: set[Path] = set()
    coming = [(REPOSITORY / "README.md").resolve()]
    while coming:
        page = coming.pop()
        reached.add(page)
        targets = {(page.parent / link.partition("#")[0]).resolve() for link in links(page)}
        coming += [target for target in targets if target.suffix == ".md" and target not in reached]
    assert {page.resolve() for page in PAGES} - reached <= {(REPOSITORY / "CHANGELOG.md").resolve()}


def commands() -> list[str]:
    """Command lines of nodeagent in the code blocks of the pages."""
    found = set()
    for page in PAGES:
        for block in re.findall(r"^```[^\n]*\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL):
            found |= {line.strip() for line in block.splitlines() if line.startswith("nodeagent ")}
    return sorted(found)


def words(line: str) -> list[str]:
    """Up to a pipe, a redirection, a comment or the explanation that some blocks have on the right."""
    return shlex.split(re.split(r"\s{2,}|\s[|#>&;]|\s\d?>", line)[0])[1:]


@pytest.mark.parametrize("line", commands())
def test_every_command_that_is_shown_is_understood(line: str) -> None:
    assert arguments.parser().parse_args(words(line)).command


GLOSSARY_TERMS = 25


def test_the_readme_names_files_that_exist_and_has_a_short_glossary() -> None:
    readme = (REPOSITORY / "README.md").read_text("utf-8")
    paths = re.findall(r"`((?:nodeagent|tests|docs|systemd|examples)/[\w./-]+\.\w+)`", readme)
    assert paths
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []
    glossary = readme.partition("### Glossary")[2].partition("\n#")[0]
    terms = re.findall(r"^\| (?!term|---)", glossary, re.MULTILINE)
    assert 0 < len(terms) <= GLOSSARY_TERMS
