"""Set the version, or the image's digest, everywhere: `python -m tests.support.release 0.2.0 [--digest sha256:...]`.

Only places that name the version of this project change (`PLACES`); then the generated files are written again. The
changelog's heading `Unreleased` becomes that of the version.
"""

import argparse
import datetime as dt
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.support.paths import REPOSITORY

_VERSION: Final = r"\d+\.\d+\.\d+"
PLACES: Final = {
    "nodeagent/__init__.py": (r'(__version__ = ")<V>(")',),
    "charts/nodeagent/Chart.yaml": (r"(^version: )<V>($)", r'(^appVersion: ")<V>(")'),
    "daemonset.yaml": (r"(image: \S*nodeagent:)<V>($)",),
    "kustomize/overlays/dry-run/kustomization.yaml": (r"(newTag: )<V>(\})",),
    "kustomize/overlays/brake/kustomization.yaml": (r"(newTag: )<V>(\})",),
    "Dockerfile": (r"(nodeagent:)<V>([ `])",),
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
    """Name the image by its digest in the manifest and the overlays. Raises ValueError for what is no digest."""
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise ValueError(f"{digest}: not sha256: and 64 hexadecimal digits")
    manifest = root / "daemonset.yaml"
    text, found = re.subn(
        r"(image: \S*nodeagent)(?::[\w.-]+|@sha256:\w+)$",
        rf"\1@{digest}",
        manifest.read_text("utf-8"),
        flags=re.MULTILINE,
    )
    if found != 1:
        raise ValueError("daemonset.yaml: not one image")
    manifest.write_text(text, "utf-8")
    for overlay in ("dry-run", "brake"):
        file = root / "kustomize" / "overlays" / overlay / "kustomization.yaml"
        file.write_text(
            re.sub(r"(newTag: [\w.-]+|digest: sha256:\w+)\}", f"digest: {digest}}}", file.read_text("utf-8"))
        )
    values = root / "charts" / "nodeagent" / "values.yaml"
    values.write_text(re.sub(r'^(  digest: )"[^"]*"$', rf'\1"{digest}"', values.read_text("utf-8"), flags=re.MULTILINE))


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
    parser.add_argument("version", metavar="VERSION", help="for example 0.2.0")
    parser.add_argument("--digest", metavar="sha256:...", help="of the image that daemonset.yaml and the overlays name")
    options = parser.parse_args()
    if not re.fullmatch(_VERSION, options.version):
        parser.error(f"{options.version}: not MAJOR.MINOR.PATCH")
    try:
        set_version(REPOSITORY, options.version, today=dt.datetime.now(dt.UTC).date())
        if options.digest:
            set_digest(REPOSITORY, options.digest)
    except ValueError as error:
        parser.error(str(error))
    generate(REPOSITORY, options.version)


if __name__ == "__main__":
    main()
