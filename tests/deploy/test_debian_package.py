"""The package of systemd/debian/build, checked by lintian and by its contents; tests/vm installs it."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from nodeagent import __version__
from tests.support import debian_package
from tests.support.paths import REPOSITORY

pytestmark = pytest.mark.timeout(900)
CONFIG: Final = "/etc/nodeagent/config.yaml"


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := debian_package.why_not():
        pytest.skip(f"needs the package: {reason}")
    return debian_package.build(tmp_path_factory.getbasetemp())


@pytest.mark.skipif(shutil.which("lintian") is None, reason="needs lintian")
def test_lintian_finds_nothing_and_nothing_is_overridden(package: Path) -> None:
    command = ["lintian", "--allow-root", "--fail-on=error,warning", "--show-overrides", str(package)]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (checked.returncode, checked.stdout) == (0, "")


def test_the_version_is_that_of_the_code_and_the_configuration_is_a_conffile_for_a_dry_run(
    package: Path, tmp_path: Path
) -> None:
    subprocess.run(["dpkg-deb", "--raw-extract", package, tmp_path], check=True, timeout=120)
    assert f"\nVersion: {__version__}\n" in (tmp_path / "DEBIAN/control").read_text("utf-8")
    assert (tmp_path / "DEBIAN/conffiles").read_text("utf-8").split() == [CONFIG]
    own = (REPOSITORY / "systemd" / "config.yaml").read_text("utf-8")
    assert (tmp_path / CONFIG[1:]).read_text("utf-8") == own.replace("\nmode: enforce\n", "\nmode: dry-run\n")
    packed = {path.relative_to(tmp_path / "usr/lib/nodeagent") for path in tmp_path.rglob("usr/lib/nodeagent/**/*.py")}
    source = {path.relative_to(REPOSITORY) for path in (REPOSITORY / "nodeagent").rglob("*.py")}
    assert {path for path in packed if path.parts[0] == "nodeagent"} == source


def test_it_leaves_out_the_modules_that_the_image_leaves_out() -> None:
    image = set(re.findall(r"kubernetes/[\w/]+(?=[ \n])", (REPOSITORY / "Dockerfile").read_text("utf-8")))
    rules = (REPOSITORY / "systemd" / "debian" / "rules").read_text("utf-8")
    (listed,) = re.findall(r"addprefix kubernetes/,([^)]*)\)", rules)
    assert {f"kubernetes/{name}" for name in listed.split()} == image
