"""What the tests of this directory claim, and what became of each claim."""

import ast
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

import pytest

HERE: Final = Path(__file__).parent
PASSED, FAILED, NOT_TRIED = "passed", "failed", "not tried"


class Claim(NamedTuple):
    """One test."""

    suite: str
    """The file's name."""
    sentence: str
    outcome: str = NOT_TRIED
    why: str = ""


def claim_of(nodeid: str) -> Claim:
    """The claim of a test that has not run."""
    path, _, name = nodeid.partition("::")
    name, bracket, case = name.removeprefix("test_").partition("[")
    return Claim(Path(path).name, name.replace("_", " ") + (f" [{case}" if bracket else ""))


def with_report(claim: Claim, report: pytest.TestReport) -> Claim:
    """The claim after one more phase of its test."""
    if report.failed:
        text = report.longreprtext.strip().splitlines()
        message = next((line[1:].strip() for line in text if line.startswith("E ")), text[-1] if text else "")
        return claim._replace(outcome=FAILED, why=f"{report.when}: {message}")
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        return claim._replace(outcome=NOT_TRIED, why=reason.removeprefix("Skipped: "))
    return claim._replace(outcome=PASSED, why="") if report.when == "call" else claim


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


def not_tried(reports: Iterable[pytest.TestReport]) -> list[str]:
    """The claims of skipped tests, by the reason, as lines."""
    by_reason: dict[str, list[Claim]] = {}
    for report in reports:
        if HERE.name == Path(report.nodeid.partition("::")[0]).parent.name:
            claim = with_report(claim_of(report.nodeid), report)
            by_reason.setdefault(claim.why, []).append(claim)
    lines = []
    for why, claims in by_reason.items():
        lines += [f"{len(claims)} claims: {why}"]
        lines += [f"  {claim.suite}: {claim.sentence}" for claim in claims]
    return lines
