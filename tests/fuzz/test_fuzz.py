"""Whatever bytes a parser gets: a value or its own error, in time and in bounded memory. `tests.fuzz` has the targets.

A run here is short and tries the same inputs each time; `python -m tests.fuzz --seconds 3600` searches for others.
"""

import os
import subprocess
import sys

import pytest

from tests.fuzz import engine
from tests.fuzz.engine import Target
from tests.fuzz.targets import TARGETS
from tests.support.paths import REPOSITORY

SECONDS = 15.0


@pytest.mark.parametrize("name", TARGETS)
def test_the_inputs_of_the_corpus_show_no_defect(name: str) -> None:
    target = TARGETS[name]
    for file, data in [*enumerate(target.seeds), *engine.kept(target)]:
        finding = engine.try_input(target, data)
        assert finding is None, f"{file}: {finding.what} at {finding.place}\n{finding.text}"


def test_every_directory_of_the_corpus_belongs_to_a_target() -> None:
    assert {path.name for path in engine.CORPUS.iterdir()} <= TARGETS.keys()


def test_a_short_search_finds_no_defect() -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--engine", "search", "--seed", "1", "--seconds", str(SECONDS)]
    done = subprocess.run(
        [*command, "--no-write"], cwd=REPOSITORY, env=dict(os.environ), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


# --- a search that finds nothing proves something only if it would find something ------------------------------------


def _fails_on_a_number(data: bytes) -> None:
    if data.startswith(b"a=") and b"18446744073709551616" in data:
        raise KeyError("found")


def _hangs(data: bytes) -> None:
    while b"-1" in data:
        pass


def _grows(data: bytes) -> None:
    if b"nan" in data:
        assert b"x" * (engine.LIMIT_BYTES + (64 << 20))


@pytest.mark.parametrize(
    ("parse", "what"),
    [(_fails_on_a_number, "crash"), (_hangs, "hang"), (_grows, "memory")],
    ids=["crash", "hang", "memory"],
)
def test_a_search_finds_what_breaks_the_property(parse: object, what: str) -> None:
    target = Target("none", parse, seeds=(b"a=1\n",))  # type: ignore[arg-type]
    found = engine.search(target, seconds=30.0, limit_s=0.05, most=3000 if what == "crash" else 200)
    assert [finding.what for finding in found.findings] == [what]


def test_documented_errors_are_no_finding() -> None:
    target = Target("none", _fails_on_a_number, (LookupError,), seeds=(b"a=18446744073709551616",))
    assert engine.try_input(target, target.seeds[0]) is None
