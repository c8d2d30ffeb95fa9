"""Set the version or the image's digest everywhere: `python -m tests.support.release 0.2.0`, and `--digest sha256:...`.

Only places that name the version of this project change (`PLACES`); then the generated files are written again. The
changelog's heading `Unreleased` becomes that of the version. A new version removes the digest of the one before.
"""

import argparse
import datetime as dt
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from nodeagent import __version__
from tests.support.paths import REPOSITORY

_VERSION: Final = r"\d+\.\d+\.\d+"
_DIGEST: Final = r"sha256:[0-9a-f]{64}"
OVERLAYS: Final = (
    "kustomize/overlays/dry-run/kustomization.yaml",
    "kustomize/overlays/brake/kustomization.yaml",
)
VALUES: Final = "charts/nodeagent/values.yaml"
PLACES: Final = {
    "nodeagent/__init__.py": (r'(__version__ = ")<V>(")',),
    "charts/nodeagent/Chart.yaml": (r"(^version: )<V>($)", r'(^appVersion: ")<V>(")'),
    "daemonset.yaml": (rf"(image: \S*nodeagent:)<V>(?:@{_DIGEST})?($)",),
    **dict.fromkeys(OVERLAYS, (rf"(newTag: )<V>(?:, digest: {_DIGEST})?(\}})",)),
    "Dockerfile": (r"(nodeagent:)<V>([ `])",),
    "docs/image.md": (r"(nodeagent:)<V>([ \n])", r"(oci:out/oci:)<V>( )"),
    "docs/start.md": (r"(nodeagent:)<V>([ \n])",),
    "kubectl-plugin/nodeagent.yaml": (r"(version: v)<V>($)", r"(releases/download/v)<V>(/)"),
    ".github/ISSUE_TEMPLATE/wrong_decision.yml": (r"(placeholder: )<V>(,)",),
}
"""Patterns around each version, by file; every one must be found."""
GENERATORS: Final = (
    ("nodeagent.commands.manpage", "docs/nodeagent.1"),
    ("tests.support.chart", None),
    ("tests.support.public_names", "tests/data/public-names/{version}.txt"),
)
"""Modules that print (to the file) or write files with the version in them."""


def set_version(root: Path, version: str, *, today: dt.date) -> None:
    """Change every place. Raises ValueError, and changes nothing, if one is missing."""
    texts = {}
    for name, patterns in PLACES.items():
        text = (root / name).read_text("utf-8")
        for pattern in patterns:
            text, found = re.subn(pattern.replace("<V>", _VERSION), rf"\g<1>{version}\g<2>", text, flags=re.MULTILINE)
            if not found:
                raise ValueError(f"{name}: no version like {pattern}")
        texts[name] = text
    texts[VALUES] = _with_digest(root, "")
    changelog = (root / "CHANGELOG.md").read_text("utf-8")
    heading = f"## [{version}] - {today.isoformat()}"
    if f"## [{version}]" not in changelog:
        if "## [Unreleased]" not in changelog:
            raise ValueError("CHANGELOG.md: no heading [Unreleased]")
        changelog = changelog.replace("## [Unreleased]", heading, 1)
    texts["CHANGELOG.md"] = changelog
    for name, text in texts.items():
        (root / name).write_text(text, "utf-8")


def set_digest(root: Path, digest: str) -> None:
    """Name the image by its digest in the manifest, the overlays and the chart, beside its tag where that is written.

    Raises ValueError, and changes nothing, for what is no digest or if a place is missing.
    """
    if not re.fullmatch(_DIGEST, digest):
        raise ValueError(f"{digest}: not sha256: and 64 hexadecimal digits")
    texts = {VALUES: _with_digest(root, digest)}
    for name, pattern, replacement in (
        ("daemonset.yaml", rf"(image: \S*nodeagent:[\w.-]+)(?:@{_DIGEST})?$", rf"\1@{digest}"),
        *((name, rf"(newTag: [\w.-]+)(?:, digest: {_DIGEST})?\}}", rf"\1, digest: {digest}}}") for name in OVERLAYS),
    ):
        text, found = re.subn(pattern, replacement, (root / name).read_text("utf-8"), flags=re.MULTILINE)
        if found != 1:
            raise ValueError(f"{name}: not one image with a tag")
        texts[name] = text
    for name, text in texts.items():
        (root / name).write_text(text, "utf-8")


def _with_digest(root: Path, digest: str) -> str:
    """The chart's values with it."""
    text = (root / VALUES).read_text("utf-8")
    text, found = re.subn(r'^(  digest: )"[^"]*"$', rf'\1"{digest}"', text, flags=re.MULTILINE)
    if found != 1:
        raise ValueError(f"{VALUES}: not one digest")
    return text


def generate(root: Path, version: str) -> None:
    """Write the generated files again, in a fresh interpreter that reads the new version."""
    for module, target in GENERATORS:
        done = subprocess.run([sys.executable, "-m", module], cwd=root, capture_output=True, text=True, check=True)
        if target:
            place = root / target.format(version=version)
            place.parent.mkdir(exist_ok=True)
            place.write_text(done.stdout, "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Set the version, and the image's digest, everywhere.")
    parser.add_argument("version", metavar="VERSION", nargs="?", help="for example 0.2.0; default: unchanged")
    parser.add_argument("--digest", metavar="sha256:...", help="of the image that the manifests name")
    options = parser.parse_args()
    version = options.version or __version__
    if not (options.version or options.digest):
        parser.error("neither a version nor a digest")
    if not re.fullmatch(_VERSION, version):
        parser.error(f"{version}: not MAJOR.MINOR.PATCH")
    try:
        if options.version:
            set_version(REPOSITORY, version, today=dt.datetime.now(dt.UTC).date())
        if options.digest:
            set_digest(REPOSITORY, options.digest)
    except ValueError as error:
        parser.error(str(error))
    generate(REPOSITORY, version)


if __name__ == "__main__":
    main()
