"""The gate for changes runs the README's test command and accepts a skipped test only with a valid reason."""

import os
import re
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

from tests.support import scheduler
from tests.support.paths import REPOSITORY

CI = REPOSITORY / ".ci"


XDIST: Final = pytest.mark.skipif(find_spec("xdist") is None, reason="pytest-xdist is not installed")
AT_ONCE: Final = pytest.mark.parametrize(
    "workers",
    ["", pytest.param("-n 2", marks=XDIST)],
    ids=["in one process", "in two workers"],
)


def run_pytest(
    directory: Path, test_source: str, workers: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs pytest with the plugin over one test file, as `.ci/run` does."""
    (directory / "test_it.py").write_text(test_source, encoding="utf-8")
    environ = {name: value for name, value in os.environ.items() if name != "NODEAGENT_E2E_KUBECONFIG"}
    environ |= {"PYTHONPATH": str(CI), "PYTEST_ADDOPTS": f"-p unexplained_skips -p no:cacheprovider {workers}"}
    environ |= variables
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(directory), str(directory)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@AT_ONCE
def test_a_skip_without_an_excuse_fails_the_run_and_is_named(tmp_path: Path, workers: str) -> None:
    ran = run_pytest(
        tmp_path,
        "import pytest\ndef test_a(): pass\n@pytest.mark.skip(reason='not in the mood')\ndef test_b(): pass\n",
        workers,
    )
    assert ran.returncode == 1
    assert "test_it.py::test_b: Skipped: not in the mood" in ran.stdout
    assert re.search(r"=+ 1 passed, 1 skipped", ran.stdout.splitlines()[-1])


@AT_ONCE
def test_beside_a_failure_a_skip_without_an_excuse_is_not_forgotten_when_that_is_run_again(
    tmp_path: Path, workers: str
) -> None:
    ran = run_pytest(
        tmp_path,
        "import pytest\ndef test_a(): assert 0\n@pytest.mark.skip(reason='not in the mood')\ndef test_b(): pass\n",
        workers,
    )
    assert ran.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)


@AT_ONCE
def test_a_module_that_skips_itself_needs_an_excuse_too(tmp_path: Path, workers: str) -> None:
    ran = run_pytest(
        tmp_path,
        "import pytest\npytest.skip('no such library', allow_module_level=True)\ndef test_a(): pass\n",
        workers,
    )
    assert ran.returncode != 0
    assert "test_it.py: Skipped: no such library" in ran.stdout


@AT_ONCE
def test_a_skip_for_a_missing_cluster_is_accepted(tmp_path: Path, workers: str) -> None:
    ran = run_pytest(
        tmp_path,
        "import pytest\n"
        "def test_a(): pass\n"
        "def test_b(): pytest.skip('needs a cluster named by NODEAGENT_E2E_KUBECONFIG')\n",
        workers,
    )
    assert ran.returncode == 0, ran.stdout


@AT_ONCE
def test_the_deadline_of_a_test_is_that_of_the_run(tmp_path: Path, workers: str) -> None:
    assert re.search(r"^export PYTEST_TIMEOUT=\d+$", (CI / "run").read_text("utf-8"), re.MULTILINE)
    ran = run_pytest(tmp_path, "import signal\ndef test_a(): signal.pause()\n", workers, PYTEST_TIMEOUT="0.5")
    assert "Timeout (>0.5s)" in ran.stdout


def test_an_excuse_that_is_not_true_of_this_machine_is_none(tmp_path: Path) -> None:
    """PSI is the excuse, and the test runs where /proc/pressure exists."""
    if not Path("/proc/pressure/memory").exists():
        pytest.skip("needs PSI: /proc/pressure/memory is missing")
    ran = run_pytest(tmp_path, "import pytest\ndef test_a(): pytest.skip('needs PSI')\n")
    assert ran.returncode == 1


def test_a_run_inside_a_test_is_left_to_that_test(tmp_path: Path) -> None:
    inner = tmp_path / "case.py"
    inner.write_text("import pytest\ndef test_b(): pytest.skip('as asked')\n", encoding="utf-8")
    ran = run_pytest(
        tmp_path,
        "import subprocess, sys\n"
        "def test_a():\n"
        f"    ran = subprocess.run([sys.executable, '-m', 'pytest', {str(inner)!r}])\n"
        "    assert ran.returncode == 0\n",
    )
    assert ran.returncode == 0, ran.stdout


def test_the_readme_names_one_test_command_and_it_is_pytest() -> None:
    printed = subprocess.run(
        [sys.executable, str(CI / "readme_command.py"), str(REPOSITORY / "README.md")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert printed.returncode == 0, printed.stderr
    set_up, _, tests = printed.stdout.rpartition(" && ")  # where `.ci/run` divides it
    assert re.search(r"\bpytest\b", tests)
    assert set_up
    assert "pytest" not in set_up


def test_with_several_workers_what_would_disturb_each_other_is_one_group() -> None:
    of = scheduler.group_of
    assert of("tests/agent/test_a.py::test") == of("tests/scenarios/test_b.py::test") == "agents"
    assert of("tests/vm/test_a.py::test") == of("tests/vm/test_service.py::test[systemd 252]") == "older machine"
    assert of("tests/vm/test_service.py::test[systemd 257-x]") == "newer machine"
    assert of("tests/unit/test_a.py::test") != of("tests/unit/test_b.py::test[systemd 257]")


def test_with_several_workers_one_boots_the_newer_machine_and_builds_the_image() -> None:
    """The names that the scheduler knows are those of the tests that use them."""
    for path in (REPOSITORY / "tests" / "vm").glob("test_*.py"):
        module = f"tests/vm/{path.name}"
        for name, arguments in re.findall(r"^def (\w+)\((.*?)\) ->", path.read_text("utf-8"), re.MULTILINE | re.DOTALL):
            if re.search(r"newer_machine|agent_image", arguments):
                assert scheduler.group_of(f"{module}::{name}") == "newer machine", f"{module}::{name}"


def test_with_several_workers_what_runs_beside_the_groups_gives_way_to_them() -> None:
    seen: list[int] = []

    def run(nodeid: str) -> None:
        scheduler.set_priority(nodeid)
        seen.append(os.getpriority(os.PRIO_PROCESS, 0))

    # A thread has a priority of its own.
    for nodeid in ("tests/vm/test_a.py::test", "tests/unit/test_a.py::test"):
        thread = threading.Thread(target=run, args=(nodeid,))
        thread.start()
        thread.join()
    first = 0 if os.geteuid() == 0 else os.getpriority(os.PRIO_PROCESS, 0)  # only root ends being nice
    assert seen == [first, scheduler.GIVES_WAY]


@XDIST
def test_with_several_workers_the_tests_of_a_module_run_in_one() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "-v", "-p", "no:cacheprovider", "tests/deploy/test_image.py"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
    assert len(set(re.findall(r"\[(gw\d)\].*PASSED", ran.stdout))) == 1


@pytest.mark.parametrize("text", ["no block", "<!-- test-command -->\n```sh\n```\n"])
def test_a_readme_without_a_test_command_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "README.md").write_text(text, encoding="utf-8")
    printed = subprocess.run(
        [sys.executable, str(CI / "readme_command.py"), str(tmp_path / "README.md")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert printed.returncode == 1
    assert "test-command" in printed.stderr
