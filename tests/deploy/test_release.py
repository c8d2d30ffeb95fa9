"""One command sets the version everywhere, and one the image's digest."""

import datetime as dt
import re
import shutil
from pathlib import Path

import pytest

from nodeagent import __version__
from tests.support import release
from tests.support.paths import REPOSITORY

TODAY = dt.date(2027, 1, 2)
DIGEST = "sha256:" + "ab" * 32


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in (*release.PLACES, "CHANGELOG.md", "charts/nodeagent/values.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    return tmp_path


def test_every_place_that_names_the_version_changes(copy: Path) -> None:
    changelog = copy / "CHANGELOG.md"
    changelog.write_text("## [Unreleased]\n\n" + changelog.read_text("utf-8"))
    release.set_version(copy, "7.8.9", today=TODAY)
    left = [
        name for name in release.PLACES if re.search(rf"\b{re.escape(__version__)}\b", (copy / name).read_text("utf-8"))
    ]
    assert left == []
    assert "## [7.8.9] - 2027-01-02\n" in changelog.read_text("utf-8")
    assert '__version__ = "7.8.9"' in (copy / "nodeagent/__init__.py").read_text("utf-8")


def test_no_other_file_names_the_version() -> None:
    """Generated files and texts about a version apart."""
    generated = {"docs/nodeagent.1", "charts/nodeagent/README.md", "kustomize/base/daemonset.yaml", "CHANGELOG.md"}
    named = set()
    for pattern in ("*", ".github/**/*", "charts/**/*", "docs/*", "examples/*", "kubectl-plugin/*", "kustomize/**/*",
                    "monitoring/*", "nodeagent/**/*.py", "systemd/**/*"):  # fmt: skip
        for path in REPOSITORY.glob(pattern):
            if path.is_file() and path.suffix not in (".png", ".svg", ".zip", ".rec", ".html"):
                text = path.read_text("utf-8", errors="ignore")
                if re.search(rf"(?<![\d.]){re.escape(__version__)}(?![\d.])", text):
                    named.add(path.relative_to(REPOSITORY).as_posix())
    assert named - generated == set(release.PLACES)


def test_a_missing_place_changes_nothing(copy: Path) -> None:
    before = (copy / "nodeagent/__init__.py").read_text("utf-8")
    (copy / "Dockerfile").write_text("FROM scratch\n")
    with pytest.raises(ValueError, match="Dockerfile"):
        release.set_version(copy, "7.8.9", today=TODAY)
    assert (copy / "nodeagent/__init__.py").read_text("utf-8") == before


def test_a_digest_names_the_image_in_every_manifest(copy: Path) -> None:
    release.set_digest(copy, DIGEST)
    release.set_digest(copy, DIGEST)  # a second time as well
    image = rf"image: nodeagent:{re.escape(__version__)}@{DIGEST}$"
    assert re.search(image, (copy / "daemonset.yaml").read_text("utf-8"), re.MULTILINE)
    for overlay in release.OVERLAYS:
        named = f"{{name: nodeagent, newName: nodeagent, newTag: {__version__}, digest: {DIGEST}}}"
        assert named in (copy / overlay).read_text("utf-8")
    assert f'digest: "{DIGEST}"' in (copy / release.VALUES).read_text("utf-8")


def test_the_digest_of_a_version_does_not_stay_for_the_next_one(copy: Path) -> None:
    release.set_digest(copy, DIGEST)
    release.set_version(copy, __version__, today=TODAY)
    assert [name for name in release.PLACES if DIGEST in (copy / name).read_text("utf-8")] == []
    assert '  digest: ""\n' in (copy / release.VALUES).read_text("utf-8")


def test_what_is_no_digest_or_has_no_place_changes_nothing(copy: Path) -> None:
    (copy / release.OVERLAYS[1]).write_text("images: []\n")
    before = (copy / "daemonset.yaml").read_text("utf-8")
    for digest in ("latest", DIGEST):
        with pytest.raises(ValueError, match=r"not (sha256|one image)"):
            release.set_digest(copy, digest)
    assert (copy / "daemonset.yaml").read_text("utf-8") == before
