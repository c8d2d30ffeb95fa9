"""The agent knows what it costs, and lives within a budget."""

import gc
import json
import os
import resource
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.runtime import own_cost
from nodeagent.runtime.own_cost import MOST_STRETCH, CostLimits, ProcessCost, assess_cost, stretched

CALM = ProcessCost(100.0, 40 << 20, 5.0, 4, 100, 4096, 0, 1000, 500, 3)


def after(seconds: float, *, cpu_s: float) -> ProcessCost:
    return CALM._replace(read_at=CALM.read_at + seconds, cpu_s=CALM.cpu_s + cpu_s)


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout


# --- reading ---------------------------------------------------------------------------------------------------------


def test_a_reading_sees_memory_cpu_descriptors_faults_and_switches_grow() -> None:
    gc.collect()
    before = own_cost.read(0.0)
    held = bytearray(b"x") * (32 << 20)
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(10)]
    begin = time.process_time()
    while time.process_time() - begin < 0.1:
        pass
    time.sleep(0.01)  # nobody can sleep without giving up the processor of their own will
    now = own_cost.read(1.0)
    for file in files:
        os.close(file)
    assert now.rss - before.rss >= (32 << 20) - (1 << 20)
    assert len(held) == 32 << 20
    assert now.cpu_s - before.cpu_s >= 0.08  # psutil counts in ticks of 10 ms
    assert now.descriptors - before.descriptors == 10
    assert now.minor_faults > before.minor_faults
    assert now.voluntary_switches > before.voluntary_switches
    assert now.descriptor_limit == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert now.threads >= 1


def test_importing_it_does_not_import_psutil() -> None:
    python("import sys, nodeagent.runtime.own_cost\nassert 'psutil' not in sys.modules")


def test_memory_that_was_freed_is_given_back() -> None:
    # Small pieces with one that lives after them stay in the heap when they are freed, until it is trimmed.
    code = (
        "from nodeagent.runtime import own_cost\n"
        "held = [bytes(600) for _ in range(100_000)]; last = bytes(600)\n"
        "del held; full = own_cost.read(0.0).rss\n"
        "own_cost.trim(); print(full - own_cost.read(1.0).rss)\n"
    )
    assert int(python(code)) > 20 << 20


# --- judging ---------------------------------------------------------------------------------------------------------


def test_within_the_budget_nothing_is_said_and_nothing_stretched() -> None:
    verdict = assess_cost(CALM, after(30, cpu_s=0.03), CostLimits())
    assert verdict.cpu_share == pytest.approx(0.001)
    assert verdict[1:] == (1.0, False, ())


def test_the_first_reading_has_no_share_and_changes_nothing() -> None:
    assert assess_cost(None, CALM, CostLimits(), stretch=3.0) == (None, 3.0, False, ())
    assert assess_cost(CALM, CALM, CostLimits(), stretch=3.0) == (None, 3.0, False, ())


def test_twice_the_budget_doubles_the_interval_and_says_so() -> None:
    verdict = assess_cost(CALM, after(10, cpu_s=0.6), CostLimits(cpu_share=0.03))
    assert verdict.interval_factor == pytest.approx(2.0)
    (note,) = verdict.notes
    assert note.message == "6.0% of a core, over the budget of 3.0%: calm samples are taken 2.0 times as rarely"


def test_a_stretch_that_worked_stays_and_one_that_is_not_needed_any_more_goes() -> None:
    budget = CostLimits(cpu_share=0.03)
    stays = assess_cost(CALM, after(10, cpu_s=0.3), budget, stretch=2.0)
    assert stays.interval_factor == pytest.approx(2.0)
    assert not stays.notes
    goes = assess_cost(CALM, after(10, cpu_s=0.05), budget, stretch=2.0)
    assert (goes.interval_factor, goes.notes) == (1.0, ())


@given(demand=st.floats(0.0, 0.29), first=st.floats(1.0, MOST_STRETCH))
def test_a_steady_demand_settles_within_the_budget_at_once(demand: float, first: float) -> None:
    budget = CostLimits(cpu_share=0.03)
    stretch = first
    for _ in range(3):
        verdict = assess_cost(CALM, after(10, cpu_s=10 * demand / stretch), budget, stretch=stretch)
        stretch = verdict.interval_factor
    assert demand / stretch <= budget.cpu_share * 1.001
    assert stretch == pytest.approx(max(1.0, demand / budget.cpu_share))


@given(share=st.floats(0, 100), stretch=st.floats(1, MOST_STRETCH), passed=st.floats(-5, 1e6))
def test_the_stretch_is_bounded_whatever_is_read(share: float, stretch: float, passed: float) -> None:
    verdict = assess_cost(CALM, after(passed, cpu_s=share * passed), CostLimits(), stretch=stretch)
    assert 1.0 <= verdict.interval_factor <= MOST_STRETCH


def test_too_much_memory_too_many_descriptors_and_pages_read_back_are_told() -> None:
    much = after(10, cpu_s=0.0)._replace(rss=70 << 20, descriptors=4000, major_faults=200)
    verdict = assess_cost(CALM, much, CostLimits())
    assert verdict.trim
    assert [note.message.split(":")[0] for note in verdict.notes] == [
        "200 pages of the agent were read back from disk in 10 s",
        "70 MiB resident, over the budget of 64",
        "4000 descriptors of 4096 are open",
    ]


# --- descriptors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("soft", "hard", "limit", "notes"),
    [(1024, 8192, 4096, 0), (8192, 8192, 4096, 0), (4096, 4096, 4096, 0), (256, 1024, 1024, 1)],
)
def test_the_descriptor_limit_is_raised_or_lowered_to_ours(soft: int, hard: int, limit: int, notes: int) -> None:
    code = (
        "import json, os, resource\n"
        "from nodeagent.runtime import own_cost\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        "limit, notes = own_cost.bound_descriptors()\n"
        "opened = []\n"
        "try:\n"
        "    while True: opened.append(os.open('/dev/null', os.O_RDONLY))\n"
        "except OSError as error: refused = error.errno\n"
        "os.close(opened.pop())\n"
        "now = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "print(json.dumps([limit, len(notes), now, opened[-1] + 2, refused]))\n"
    )
    assert json.loads(python(code)) == [limit, notes, [limit, hard], limit, 24]


@pytest.mark.parametrize(
    ("interval_s", "stretch", "stale_after_s", "taken_s"),
    [
        (1.0, 1.0, 30.0, 1.0),
        (1.0, 4.0, 30.0, 4.0),
        (5.0, 10.0, 30.0, 10.0),
        (30.0, 10.0, 31.0, 30.0),
        (1.0, 10.0, 6.0, 3.0),
        (5.0, 10.0, 6.0, 5.0),
    ],
)
def test_a_stretched_interval_stays_within_what_the_probes_allow(
    interval_s: float, stretch: float, stale_after_s: float, taken_s: float
) -> None:
    assert stretched(interval_s, stretch, stale_after_s=stale_after_s) == taken_s
