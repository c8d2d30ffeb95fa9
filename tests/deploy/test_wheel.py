"""The sdist and the wheel that is built from it: complete, small, and enough for `check` and `demo` on their own."""

import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import Final

import pytest

from tests.support import terminals
from tests.support.paths import REPOSITORY

BUILD: Final = "import sys, hatchling.build as build; print(build.{hook}(sys.argv[1]))"
LEFT_OUT: Final = {".ci", ".dockerignore", ".github", ".gitignore", "benchmarks", "mkdocs.yml", "tests"}
"""What only a clone needs. The tests are among it, because most of them read data of several MiB."""
EMPTY: Final = {"PATH": "/usr/bin:/bin"}


def built(hook: str, tree: Path, target: Path) -> Path:
    """What a hook of the build backend makes of this tree, without the network."""
    command = [sys.executable, "-c", BUILD.format(hook=hook), str(target)]
    made = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=120, check=False)
    assert made.returncode == 0, made.stderr
    return target / made.stdout.split()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("build_sdist", REPOSITORY, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def tree(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist."""
    target = tmp_path_factory.mktemp("tree")
    with tarfile.open(sdist) as archive:
        archive.extractall(target, filter="data")
    (found,) = target.iterdir()
    return found


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("build_wheel", tree, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `nodeagent` of a new virtual environment, which takes the dependencies from this one and nothing else."""
    target = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(target, with_pip=False)
    python = target / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    ended = subprocess.run([*install, str(wheel)], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    packages = target / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    # After its own packages, so that an installed development version of this project is not found first.
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    return target / "bin" / "nodeagent"


def run(command: Path, *options: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run the command with an empty environment, outside the repository."""
    return subprocess.run(
        [str(command), *options],
        cwd=directory,
        env=EMPTY,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )


def test_the_wheel_has_the_package_with_its_data_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    packaged = {path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "nodeagent").rglob("*")}
    data = {name for name in packaged if not name.endswith((".py", ".pyc")) and (REPOSITORY / name).is_file()}
    assert data <= names
    assert {"nodeagent/analysis/recorded_incident/samples.rec", "nodeagent/py.typed"} <= names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"nodeagent"}
    assert not any("__pycache__" in name for name in names)
    assert wheel.stat().st_size < 2 << 20


def tracked() -> set[str]:
    """The files of the repository; those of the package where it is no clone."""
    command = ["git", "-c", "safe.directory=*", "ls-files"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    if listed.returncode == 0:
        return set(listed.stdout.splitlines())
    files = [*(REPOSITORY / "nodeagent").rglob("*.py"), *REPOSITORY.glob("*.md")]
    return {path.relative_to(REPOSITORY).as_posix() for path in files}


def test_the_sdist_has_everything_that_is_tracked_except_what_only_a_clone_needs(tree: Path) -> None:
    expected = {name for name in tracked() if name.partition("/")[0] not in LEFT_OUT}
    packed = {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()}
    assert expected - packed == set()
    assert not any(name.partition("/")[0] in LEFT_OUT - {".gitignore"} for name in packed)


def test_the_demo_plays_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    printed = run(installed, "demo", "--no-animation", directory=tmp_path)
    assert (printed.returncode, printed.stderr) == (0, "")
    assert "OUTCOME" in printed.stdout
    played = terminals.run([str(installed), "demo", "--speed", "40"], environment=EMPTY)
    assert played.code == 0
    assert "nodeagent check" in played.screen


def test_check_reports_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    ended = run(installed, "check", "--no-api", directory=tmp_path)
    assert ended.returncode in (0, 1, 2, 3), ended.stderr
    assert "SIGNALS" in ended.stdout
    assert ended.stderr == ""


@pytest.mark.parametrize(
    "words",
    [
        ("version",),
        ("--help",),
        ("config", "show"),
        ("config", "schema"),
        ("completion", "bash"),
        ("demo", "--html", "-"),
    ],
    ids=" ".join,
)
def test_each_command_that_needs_no_node_works_from_the_wheel(
    installed: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    ended = run(installed, *words, directory=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout


def test_the_version_is_that_of_the_tree(installed: Path, wheel: Path, tmp_path: Path) -> None:
    version = run(installed, "version", directory=tmp_path).stdout.split()[1]
    assert wheel.name.startswith(f"nodeagent-{version}-")
