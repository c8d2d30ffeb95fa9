"""`python -m benchmarks` knows every benchmark, and one that fails stops no other one."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from benchmarks import __main__, registry, runner
from benchmarks.registry import BENCHMARKS, Benchmark, Need
from benchmarks.runner import Result, Run
from tests.support.paths import REPOSITORY

CHEAP = Benchmark("decision", "one decision", Need.NOTHING, ("20",))


def test_every_module_is_a_benchmark_or_named_as_something_else() -> None:
    modules = {path.stem for path in (REPOSITORY / "benchmarks").glob("*.py")}
    listed = {each.module_name() for each in BENCHMARKS}
    assert listed | set(registry.OTHER_MODULES) == modules
    assert not listed & set(registry.OTHER_MODULES)
    assert len({each.name for each in BENCHMARKS}) == len(BENCHMARKS)


def test_the_documentation_names_every_benchmark() -> None:
    page = (REPOSITORY / "docs" / "development.md").read_text(encoding="utf-8").partition("\n## Benchmarks\n")[2]
    assert [each.name for each in BENCHMARKS if f"`{each.name}`" not in page] == []


@pytest.mark.timeout(600)
def test_the_command_runs_a_benchmark_and_writes_its_report(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "benchmarks", "--quick", "--only", "decision", "ramps", "--json", str(report)]
    done = subprocess.run(command, cwd=REPOSITORY, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "decision, run 1 of 1: python -m benchmarks.decision 110 500" in done.stderr
    written = json.loads(report.read_text(encoding="utf-8"))
    ran, not_run = written["benchmarks"]
    assert (ran["name"], ran["status"], not_run["name"], not_run["status"]) == (
        "decision",
        "ran",
        "ramps",
        "not run",
    )
    assert ran["runs"][0]["output"].splitlines()[0] in done.stdout
    assert "not run: takes minutes: run it without --quick" in done.stdout
    assert {"kernel", "cpu", "cores", "load_average", "python", "versions"} <= written["machine"].keys()


def test_a_run_that_is_ended_early_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended_early(wanted: Iterable[Benchmark], **_: object) -> Iterator[Result]:
        yield Result(next(iter(wanted)), "python", (Run(1.0, 0.5, "110 pods", ""),))
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run_each", ended_early)
    with pytest.raises(KeyboardInterrupt):
        __main__.main(["--json", str(tmp_path / "file")])
    [ran] = json.loads((tmp_path / "file").read_text("utf-8"))["benchmarks"]
    assert ran["runs"][0]["output"] == "110 pods"


@pytest.mark.timeout(600)
def test_one_that_fails_stops_no_other_one() -> None:
    broken = CHEAP._replace(name="broken", module="decision", quick=("no number",))
    first, second = runner.run_each([broken, CHEAP], quick=True, runs=1)
    assert first.failed
    assert "no number" in first.runs[0].trouble
    assert not second.failed
    assert len(second.runs) == 1
    assert "failed: " in runner.table([first, second])


@pytest.mark.timeout(600)
def test_one_that_repeats_by_itself_runs_once() -> None:
    [result] = runner.run_each([CHEAP._replace(once=True)], quick=True, runs=2)
    assert len(result.runs) == 1


def test_what_the_machine_lacks_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    [result] = runner.run_each([CHEAP._replace(need=Need.CGROUPS)], quick=True, runs=1)
    assert (result.reason, result.runs, result.failed) == ("needs root", (), False)


def test_figures_that_differ_between_runs_have_their_spread() -> None:
    first, second = "pods  1.5 ms\n110 pods", "pods 12.5 ms\n110 pods"
    assert runner.merged([first, second]) == ["pods  1.5..12.5 ms", "110 pods"]
    assert runner.merged([first, "other"]) == ["pods  1.5 ms", "110 pods", "other"]
    runs = tuple(Run(seconds, 0.5, text, "") for seconds, text in ((1.0, first), (2.0, second)))
    table = runner.table([Result(CHEAP, "python", runs), Result(CHEAP, "python", reason="needs root")])
    assert table.splitlines()[1:] == [
        "decision      1..2  pods  1.5..12.5 ms",
        "                    110 pods",
        "decision         -  not run: needs root",
    ]
