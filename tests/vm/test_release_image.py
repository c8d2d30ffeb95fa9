"""The image of the Dockerfile: what is in it, that a second build is equal, and that its contents are listed."""

import datetime as dt
import json
import os
import re
import stat
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.utils import canonicalize_name

from tests.fake_kube import ApiServer, pod
from tests.support.paths import REPOSITORY
from tests.vm import agent_container, release_image
from tests.vm.dockerfile import Built

pytestmark = [pytest.mark.vm, pytest.mark.timeout(900)]

CREATED: Final = dt.datetime(2026, 11, 20, tzinfo=dt.UTC)
WITHOUT: Final = {"_curses", "_curses_panel", "_dbm", "nis", "readline"}
"""Modules of Python whose libraries are not in the image, as the Dockerfile says."""
PROGRAMS: Final = {"python3.11"}
IMPORT_ALL: Final = """
import importlib, pathlib, sys
for file in sorted(pathlib.Path("/usr/lib/python3.11/lib-dynload").iterdir()):
    name = file.name.partition(".")[0]
    try:
        importlib.import_module(name)
    except ImportError:
        print(name)
"""


LOAD_ALL: Final = """
import importlib, pkgutil, nodeagent, pyroute2
names = [each.name for each in pkgutil.walk_packages(nodeagent.__path__, "nodeagent.")]
names = [name for name in names if not name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
print(len(names))
"""


def run_in(image: Built, code: str) -> subprocess.CompletedProcess[str]:
    """Run it with the image's Python in the image's root directory."""
    python = ("chroot", str(image.root), "/opt/nodeagent/bin/python", "-c", code)
    environment = image.environment | {"PATH": os.environ["PATH"]}
    ran = subprocess.run(python, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran


class Release:
    """What the command writes of the image."""

    def __init__(self, built: Built, directory: Path) -> None:
        self.digest = release_image.write(built, directory, created=CREATED)
        self.layout = directory / release_image.LAYOUT
        self.contents = (directory / release_image.CONTENTS).read_text("utf-8")


@pytest.fixture(scope="module")
def release(agent_image: Built, tmp_path_factory: pytest.TempPathFactory) -> Release:
    return Release(agent_image, tmp_path_factory.mktemp("release"))


def test_a_second_build_is_equal_bit_for_bit(release: Release, tmp_path: Path) -> None:
    """Another build of every step, at another time and place, from the same base and packages."""
    (tmp_path / "scratch").mkdir()
    second = Release(agent_container.build_image(tmp_path / "scratch"), tmp_path)
    assert second.contents == release.contents
    assert second.digest == release.digest
    assert sorted(os.listdir(second.layout / "blobs/sha256")) == sorted(os.listdir(release.layout / "blobs/sha256"))


def test_there_is_no_shell_and_nothing_that_raises_rights(agent_image: Built) -> None:
    places = [agent_image.root / each for each in ("bin", "sbin", "usr/bin", "usr/sbin", "usr/local/bin")]
    assert {path.name for place in places if place.is_dir() for path in place.iterdir()} == PROGRAMS
    writable = []
    for path in agent_image.root.rglob("*"):
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            assert not mode & (stat.S_ISUID | stat.S_ISGID), path
        if not stat.S_ISLNK(mode) and mode & stat.S_IWOTH:
            writable.append(path.relative_to(agent_image.root).as_posix())
    assert set(writable) == {"tmp", "var/lock", "var/tmp"}
    assert (agent_image.root / "etc/passwd").read_text().splitlines()[1].startswith("nonroot:x:65532:65532:")


def test_only_modules_that_the_agent_does_not_use_lack_their_library(agent_image: Built) -> None:
    assert set(run_in(agent_image, IMPORT_ALL).stdout.split()) == WITHOUT
    used = re.compile(rf"^\s*(?:import|from) (?:{'|'.join(name.lstrip('_') for name in WITHOUT)})\b", re.MULTILINE)
    for path in (REPOSITORY / "nodeagent").rglob("*.py"):
        assert not used.search(path.read_text("utf-8")), path


def test_every_module_of_the_agent_finds_what_it_imports(agent_image: Built) -> None:
    """Also pyroute2 as a whole, which some functions import and which imports sqlite3."""
    assert run_in(agent_image, LOAD_ALL).stdout.strip().isdigit()


AS_NON_ROOT: Final = """
set -e
mount --make-rprivate /
mount -t proc proc "$1/proc"
mount -t tmpfs -o mode=755 tmpfs "$1/run"
mkdir "$1/run/host" "$1/run/nodeagent"
mount --rbind / "$1/run/host"
cp "$2" "$1/run/kubeconfig"
chown 65532 "$1/run/nodeagent" "$1/run/kubeconfig"
exec chroot --userspec=65532:65532 --groups= "$1" /opt/nodeagent/bin/nodeagent run --dry-run --once \\
    --host-root /run/host --node-name lab-node --kubeconfig /run/kubeconfig
"""
"""In a mount namespace of its own: the image's root directory, the kubeconfig."""


def test_a_dry_run_as_a_user_without_rights_reads_the_cluster_and_sends_nothing(
    agent_image: Built, tmp_path: Path
) -> None:
    with ApiServer(node="lab-node") as api:
        api.add_pod(pod("web", node="lab-node"))
        kubeconfig = api.kubeconfig(tmp_path / "kubeconfig")
        kubeconfig.chmod(0o600)
        ran = subprocess.run(
            ("unshare", "--mount", "bash", "-c", AS_NON_ROOT, "bash", str(agent_image.root), str(kubeconfig)),
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr + ran.stdout
        assert '"mode":"dry-run"' in ran.stdout
        assert "mlockall not set" in ran.stdout, "not another user"
        assert api.sent("GET", "/pods"), ran.stdout
        written = [each.path for each in api.requests if each.method != "GET"]
        assert [path for path in written if "/selfsubject" not in path] == [], "more than who it is and what it may"


def test_every_package_is_listed_with_its_version_license_and_hash(agent_image: Built, release: Release) -> None:
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(release.contents) is None
    bom: dict[str, Any] = json.loads(release.contents)
    packages = {
        path.name for path in (agent_image.root / "var/lib/dpkg/status.d").iterdir() if path.suffix != ".md5sums"
    }
    parts = {each["purl"].partition("@")[0]: each for each in bom["components"]}
    debian = {purl.removeprefix("pkg:deb/debian/") for purl in parts if purl.startswith("pkg:deb/")}
    assert debian == packages > {"libc6", "libssl3", "python3.11-minimal"}
    pins = dict(re.findall(r"^(\S+)==(\S+)$", (REPOSITORY / "constraints.txt").read_text("utf-8"), re.MULTILINE))
    python = {purl.removeprefix("pkg:pypi/"): each for purl, each in parts.items() if purl.startswith("pkg:pypi/")}
    assert {"kubernetes", "msgspec", "psutil", "pyroute2", "pyyaml", "rich", "shtab", "structlog"} <= python.keys()
    for name, version in pins.items():
        if canonicalize_name(name) in python:
            assert python.pop(canonicalize_name(name))["version"] == version
    assert python == {}, "a distribution that is not pinned"
    for each in bom["components"]:
        assert re.fullmatch(r"[0-9a-f]{64}", each["hashes"][0]["content"]), each["purl"]
        assert each.get("licenses") or each["purl"].startswith("pkg:deb/"), each["purl"]


def test_what_was_removed_is_not_listed_as_installed(agent_image: Built) -> None:
    """A scanner would report the defects of modules that are not there."""
    (site,) = (agent_image.root / "opt/nodeagent").glob("lib/python*/site-packages")
    for metadata in site.glob("*.dist-info"):
        tops = {line.split(",")[0].split("/")[0] for line in (metadata / "RECORD").read_text("utf-8").splitlines()}
        modules = {
            top for top in tops if not top.endswith((".dist-info", ".data")) and top not in ("..", "__pycache__")
        }
        assert any((site / top).exists() for top in modules), metadata.name
