"""Everything that only a cluster can show, in one report: `python -m tests.e2e [--report FILE] [options of pytest]`.

Each test is a claim. Without NODEAGENT_E2E_KUBECONFIG nothing is tried and the claims are listed: what no machine of
the project has checked. Exits with 1 when a claim failed or the tests could not be collected.
"""

import os
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.claims import FAILED, Claim, claim_of, render, with_report
from tests.e2e.cluster import KUBECONFIG

HERE: Final = Path(__file__).parent


class Claims:
    """A plugin of pytest that writes down what it collects and what becomes of it."""

    def __init__(self, why: str) -> None:
        """`why`: nothing is run because of this."""
        self._why = why
        self.found: dict[str, Claim] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            self.found[item.nodeid] = claim_of(item.nodeid)._replace(why=self._why or "the run ended before it")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.found[report.nodeid] = with_report(self.found[report.nodeid], report)


def main(arguments: list[str]) -> int:
    file = None
    if arguments[:1] == ["--report"]:
        file, arguments = Path(arguments[1]), arguments[2:]
    why = "" if os.environ.get(KUBECONFIG) else f"{KUBECONFIG} names no cluster"
    claims = Claims(why)
    options = ["--collect-only", "-qq"] if why else ["-v"]
    code = pytest.main([*options, *arguments, str(HERE)], plugins=[claims])
    text = render(list(claims.found.values()))
    print(f"\n{text}")
    if file is not None:
        file.write_text(f"{text}\n", encoding="utf-8")
    failed = any(claim.outcome == FAILED for claim in claims.found.values())
    return int(failed or code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
