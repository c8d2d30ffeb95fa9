"""Everything that only a cluster can show, in one report: `python -m tests.e2e [--report FILE] [options of pytest]`.

Each test is a claim. Without NODEAGENT_E2E_KUBECONFIG nothing is tried and the claims are listed: what no machine of
the project has checked. Exits with 1 when a claim failed or the tests could not be collected.
"""

import ast
import os
import sys
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.e2e.cluster import KUBECONFIG

HERE: Final = Path(__file__).parent
PASSED, FAILED, NOT_TRIED = "passed", "failed", "not tried"


class Claim(NamedTuple):
    """One test."""

    suite: str
    """The file's name."""
    sentence: str
    outcome: str = NOT_TRIED
    why: str = ""


class Claims:
    """A plugin of pytest that writes down what it collects and what becomes of it."""

    def __init__(self, why: str) -> None:
        """`why`: nothing is run because of this."""
        self._why = why
        self.found: dict[str, Claim] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            name, bracket, case = item.name.removeprefix("test_").partition("[")
            sentence = name.replace("_", " ") + (f" [{case}" if bracket else "")
            self.found[item.nodeid] = Claim(item.path.name, sentence, why=self._why or "the run ended before it")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        claim = self.found[report.nodeid]
        if report.failed:
            text = report.longreprtext.strip().splitlines()
            message = next((line[1:].strip() for line in text if line.startswith("E ")), text[-1] if text else "")
            claim = claim._replace(outcome=FAILED, why=f"{report.when}: {message}")
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            claim = claim._replace(outcome=NOT_TRIED, why=reason.removeprefix("Skipped: "))
        elif report.when == "call":
            claim = claim._replace(outcome=PASSED, why="")
        self.found[report.nodeid] = claim


def promise(suite: str) -> str:
    """What the tests of a file are about: the first sentence of its docstring."""
    text = ast.get_docstring(ast.parse((HERE / suite).read_text(encoding="utf-8"))) or suite
    return " ".join(text.split("\n\n")[0].split()).partition(". ")[0].rstrip(".")


def render(claims: list[Claim]) -> str:
    """The report: each promise with its claims, and how many there are of each outcome."""
    lines = []
    for suite in sorted({claim.suite for claim in claims}):
        lines += [f"{suite}: {promise(suite)}"]
        for claim in (each for each in claims if each.suite == suite):
            lines.append(f"  {claim.outcome:<9}  {claim.sentence}" + (f": {claim.why}" if claim.why else ""))
        lines.append("")
    counts = (f"{sum(claim.outcome == each for claim in claims)} {each}" for each in (PASSED, FAILED, NOT_TRIED))
    return "\n".join([*lines, f"{len(claims)} claims: {', '.join(counts)}"])


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
