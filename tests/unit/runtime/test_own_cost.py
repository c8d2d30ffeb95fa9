"""The agent measures its own cost and keeps its limits."""

import gc
import json
import mmap
import os
import resource
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.runtime import own_cost
from nodeagent.runtime.own_cost import CostLimits, ProcessCost

CALM = ProcessCost(100.0, 40 << 20, 5.0, 4, 100, 4096, 0, 1000, 500, 3)


def after(seconds: float, *, cpu_s: float) -> ProcessCost:
    return CALM._replace(read_at=CALM.read_at + seconds, cpu_s=CALM.cpu_s + cpu_s)


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout


# --- reading ---------------------------------------------------------------------------------------------------------


def test_a_reading_shows_the_growth_of_memory_cpu_descriptors_faults_and_switches() -> None:
    gc.collect()
    before = own_cost.read_cost(0.0)
    block = mmap.mmap(-1, 32 << 20)  # new pages, whatever the heap has free
    block.write(bytes(len(block)))
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(10)]
    begin = time.process_time()
    while time.process_time() - begin < 0.1:
        pass
    time.sleep(0.01)  # a voluntary context switch
    now = own_cost.read_cost(1.0)
    for file in files:
        os.close(file)
    assert now.rss - before.rss >= (32 << 20) - (1 << 20)
    block.close()
    assert now.cpu_s - before.cpu_s >= 0.08  # psutil counts in ticks of 10 ms
    assert now.descriptors - before.descriptors == 10
    assert now.minor_faults > before.minor_faults
    assert now.voluntary_switches > before.voluntary_switches
    assert now.descriptor_limit == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert now.threads >= 1


def test_without_a_free_descriptor_the_cost_is_unknown_with_a_reason() -> None:
    """Every sync reads it first: it must not fail."""
    code = (
        "import resource; from nodeagent.runtime import own_cost\n"
        "own_cost.read_cost(0.0)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "try: own_cost.read_cost(1.0)\n"
        "except own_cost.CostError as error: print(own_cost.unread_note(error).message)\n"
    )
    assert python(code).startswith("the agent's own cost is unknown: [Errno 24] Too many open files")


def test_importing_it_does_not_import_psutil() -> None:
    python("import sys, nodeagent.runtime.own_cost\nassert 'psutil' not in sys.modules")


def test_freed_memory_returns_to_the_kernel() -> None:
    # Freed blocks below a living one stay in the heap until it is trimmed.
    code = (
        "from nodeagent.runtime import own_cost\n"
        "blocks = [bytes(600) for _ in range(100_000)]; last = bytes(600)\n"
        "del blocks; full = own_cost.read_cost(0.0).rss\n"
        "own_cost.trim_memory(); print(full - own_cost.read_cost(1.0).rss)\n"
    )
    assert int(python(code)) > 20 << 20


# --- judging ---------------------------------------------------------------------------------------------------------


def test_within_the_limits_there_is_no_note_and_no_longer_interval() -> None:
    verdict = own_cost.assess_cost(CALM, after(30, cpu_s=0.03), CostLimits())
    assert verdict.cpu_share == pytest.approx(0.001)
    assert verdict[1:] == (1.0, False, ())


def test_the_first_reading_has_no_share_and_changes_nothing() -> None:
    assert own_cost.assess_cost(None, CALM, CostLimits(), interval_factor=3.0) == (None, 3.0, False, ())
    assert own_cost.assess_cost(CALM, CALM, CostLimits(), interval_factor=3.0) == (None, 3.0, False, ())


def test_twice_the_cpu_limit_doubles_the_interval_with_a_note() -> None:
    verdict = own_cost.assess_cost(CALM, after(10, cpu_s=0.6), CostLimits(cpu_share=0.03))
    assert verdict.interval_factor == pytest.approx(2.0)
    (note,) = verdict.notes
    assert note.message == "CPU 6.0% of a core, limit 3.0%: calm interval 2.0 times as long"


def test_a_sufficient_factor_stays_and_an_unnecessary_one_ends() -> None:
    limits = CostLimits(cpu_share=0.03)
    stays = own_cost.assess_cost(CALM, after(10, cpu_s=0.3), limits, interval_factor=2.0)
    assert stays.interval_factor == pytest.approx(2.0)
    assert not stays.notes
    goes = own_cost.assess_cost(CALM, after(10, cpu_s=0.05), limits, interval_factor=2.0)
    assert (goes.interval_factor, goes.notes) == (1.0, ())


@given(demand=st.floats(0.0, 0.29), first=st.floats(1.0, own_cost.MAX_INTERVAL_FACTOR))
def test_a_steady_load_is_within_the_limit_after_one_step(demand: float, first: float) -> None:
    limits = CostLimits(cpu_share=0.03)
    factor = first
    for _ in range(3):
        verdict = own_cost.assess_cost(CALM, after(10, cpu_s=10 * demand / factor), limits, interval_factor=factor)
        factor = verdict.interval_factor
    assert demand / factor <= limits.cpu_share * 1.001
    assert factor == pytest.approx(max(1.0, demand / limits.cpu_share))


@given(share=st.floats(0, 100), factor=st.floats(1, own_cost.MAX_INTERVAL_FACTOR), passed=st.floats(-5, 1e6))
def test_the_factor_is_bounded_for_any_reading(share: float, factor: float, passed: float) -> None:
    verdict = own_cost.assess_cost(CALM, after(passed, cpu_s=share * passed), CostLimits(), interval_factor=factor)
    assert 1.0 <= verdict.interval_factor <= own_cost.MAX_INTERVAL_FACTOR


def test_much_memory_many_descriptors_and_page_faults_are_noted() -> None:
    much = after(10, cpu_s=0.0)._replace(rss=70 << 20, descriptors=4000, major_faults=200)
    verdict = own_cost.assess_cost(CALM, much, CostLimits())
    assert verdict.trim
    assert [note.message.split(";")[0] for note in verdict.notes] == [
        "200 pages of the agent read from disk in 10s, which delays decisions",
        "memory 70 MiB resident, limit 64 MiB",
        "4000 descriptors open, limit 4096",
    ]


# --- descriptors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("soft", "hard", "limit", "notes"),
    [(1024, 8192, 4096, 0), (8192, 8192, 4096, 0), (4096, 4096, 4096, 0), (256, 1024, 1024, 1)],
)
def test_the_descriptor_limit_is_raised_or_lowered_to_the_agents_own(
    soft: int, hard: int, limit: int, notes: int
) -> None:
    code = (
        "import json, os, resource\n"
        "from nodeagent.runtime import own_cost\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        "limit, notes = own_cost.limit_descriptors()\n"
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
    ("interval_s", "factor", "stale_after_s", "longer_s"),
    [
        (1.0, 1.0, 30.0, 1.0),
        (1.0, 4.0, 30.0, 4.0),
        (5.0, 10.0, 30.0, 10.0),
        (30.0, 10.0, 31.0, 30.0),
        (1.0, 10.0, 6.0, 3.0),
        (5.0, 10.0, 6.0, 5.0),
    ],
)
def test_a_longer_interval_stays_within_the_limits_of_the_probes(
    interval_s: float, factor: float, stale_after_s: float, longer_s: float
) -> None:
    assert own_cost.longer_interval(interval_s, factor, stale_after_s=stale_after_s) == longer_s
