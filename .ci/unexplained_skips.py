"""Pytest plugin: a test that was skipped although this machine could have run it fails the run.

A skip is accepted when its reason matches a row below *and* the machine really lacks what the row names. Anything else
is listed after the tests and makes the run fail, however many tests passed.

Only the run that was started with it is watched: a test that starts a pytest of its own judges that itself. With
pytest-xdist the workers send their reports to the process that was started, and that one judges.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest


class Excuse(NamedTuple):
    """A reason for which a test may be skipped here."""

    reason: re.Pattern[str]
    lacking: Callable[[], bool]
    """True when this machine lacks it, so that the skip is honest."""


def _no_unified_hierarchy() -> bool:
    """The machine's memory controller is not in a cgroup v2 hierarchy (cgroup v1, or hybrid with the memory in v1)."""
    try:
        return "memory" not in Path("/sys/fs/cgroup/cgroup.controllers").read_text(encoding="ascii").split()
    except FileNotFoundError:
        return True


def _no_kernel_log() -> bool:
    """The kernel log cannot be read: no device, or no CAP_SYSLOG where dmesg_restrict is set."""
    try:
        os.close(os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK))
    except OSError:
        return True
    return False


EXCUSES = (
    Excuse(re.compile(r"NODEAGENT_E2E_KUBECONFIG"), lambda: not os.environ.get("NODEAGENT_E2E_KUBECONFIG")),
    Excuse(re.compile(r"cgroup v2"), _no_unified_hierarchy),
    Excuse(re.compile(r"\bPSI\b|pressure stall"), lambda: not Path("/proc/pressure/memory").exists()),
    Excuse(re.compile(r"kernel log"), _no_kernel_log),
)

_unexplained: list[tuple[str, str]] = []
os.environ.pop("PYTEST_ADDOPTS", None)


def _note(nodeid: str, longrepr: object) -> None:
    reason = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    if not any(excuse.reason.search(reason) and excuse.lacking() for excuse in EXCUSES):
        _unexplained.append((nodeid, reason))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        _note(report.nodeid, report.longrepr)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        _note(report.nodeid, report.longrepr)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return
    if _unexplained and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    elif _unexplained and session.exitstatus == pytest.ExitCode.TESTS_FAILED:
        # Not one of the failures that are repeated, because the repetition would hide this one.
        session.exitstatus = pytest.ExitCode.INTERRUPTED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _unexplained:
        return
    terminalreporter.section("skipped although this machine could have run them", red=True)
    for nodeid, reason in _unexplained:
        terminalreporter.line(f"{nodeid}: {reason}", red=True)
