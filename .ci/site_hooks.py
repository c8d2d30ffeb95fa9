"""Hooks of mkdocs: README.md and the other pages at the top join the site, and files that pages link to come with it.

The pages link to each other and to files as on the hosting service, so the same text is right in both places.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"index.md": "README.md", **{name: name for name in ("SECURITY.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md")}}
"""Page of the site: file of the repository."""
LINK = re.compile(r"(?P<start>(?<!!)\[[^\]\n]*(?:\n[^\]\n]*)?\]\()(?P<target>[^)\s]+)(?P<end>[^)]*\))")
IMAGE = re.compile(r"(?P<start>!\[[^\]\n]*\]\()(?P<target>[^)\s]+)(?P<end>[^)]*\))")
FILES = "files"
"""Where files outside of docs/ are, in the site."""


def on_files(files: Files, *, config: Any) -> Files:
    """The pages at the top, and each linked file of the repository, as files of the site."""
    texts = {page: (ROOT / source).read_text("utf-8") for page, source in PAGES.items()}
    linked: set[str] = set()
    for page, text in texts.items():
        files.append(File.generated(config, page, content=_rewritten(text, PAGES[page], linked)))
    for each in list(files.documentation_pages()):
        if each.src_uri not in PAGES:
            _rewritten(each.content_string, f"docs/{each.src_uri}", linked)
    for path in sorted(linked):
        # Read as text: a browser shows a manifest instead of downloading it.
        files.append(File.generated(config, f"{FILES}/{path}.txt", content=(ROOT / path).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Links of the pages in docs/ to files outside of it."""
    if page.file.src_uri in PAGES:
        return markdown
    return _rewritten(markdown, f"docs/{page.file.src_uri}", set())


def _rewritten(markdown: str, source: str, linked: set[str]) -> str:
    """The text of the repository's file `source` with links that are right in the site; adds to `linked`."""

    def replace(match: re.Match[str]) -> str:
        target, hash_, anchor = match["target"].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        pages = {name: page for page, name in PAGES.items()}
        if path in pages:
            place = pages[path]
        elif path.startswith("docs/"):
            place = path.removeprefix("docs/")
        elif (ROOT / path).is_file():
            linked.add(path)
            place = f"{FILES}/{path}.txt"
        else:
            return match[0]  # a directory: mkdocs warns of it
        return f"{match['start']}{place}{hash_}{anchor}{match['end']}"

    return IMAGE.sub(replace, LINK.sub(replace, markdown))
