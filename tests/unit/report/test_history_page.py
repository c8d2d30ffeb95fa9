"""The charts of a recording."""

import re

from nodeagent.model import NodeSnapshot, RecordedSample, Signal, Stall, StallScope
from nodeagent.report import history, history_page
from nodeagent.report.charts import Mark
from nodeagent.report.history_values import EvictionMark, OomKillMark
from tests.support import nodes, recordings
from tests.support.nodes import GI, MI, NOW, WALL

SOFT, HARD = nodes.soft(value=2 * GI, grace_s=10.0), nodes.hard(value=GI)


def falling(second: float) -> NodeSnapshot:
    """8 GiB, then below both thresholds from second 20 to 60, then 8 GiB again."""
    available = 8 * GI if second < 20 or second >= 60 else 1536 * MI if second < 40 else 512 * MI
    web, batch = nodes.view("web", GI), nodes.view("batch", int(second) * 10 * MI)
    return nodes.snapshot(web, batch, at=NOW + second, available={Signal.MEMORY: available})


def recorded() -> tuple[RecordedSample, ...]:
    return recordings.record(falling, nodes.config(SOFT, HARD), seconds=120)


def titles(blocks: tuple[str, ...]) -> list[str]:
    return re.findall("<figcaption>([^<]*)", "".join(blocks))


def test_a_signal_whose_threshold_was_met_comes_first_with_its_windows() -> None:
    blocks = history_page.blocks(history.history(recorded()))
    assert titles(blocks)[:2] == ["memory.available", "Memory of the pods"]
    assert "grace period of memory.available" in blocks[0]
    assert "MemoryPressure" in blocks[0]


def test_calm_signals_are_folded() -> None:
    config = nodes.config(SOFT, HARD, nodes.hard(Signal.PID, value=10))
    samples = recordings.record(falling, config, seconds=30)
    blocks = history_page.blocks(history.history(samples))
    assert "1 further signal, no threshold met" in blocks[-1]
    assert titles(blocks)[-1] == "pid.available"


def test_evictions_and_oom_kills_are_marked_in_the_signal_and_in_the_pods() -> None:
    eviction = EvictionMark(WALL + 40, "shop/web", "u1", "p-1", "memory.available", "hard", "evict", "accepted")
    kill = OomKillMark(WALL + 50, "shop/db", "p-o1", 3, race_lost=True)
    blocks = history_page.blocks(history.history(recorded()), evictions=[eviction], oom_kills=[kill])
    for block in blocks[:2]:
        assert "eviction: shop/web (memory.available, hard, accepted), decision p-1" in block
        assert "OOM kill: shop/db, 3 processes, before this agent could act, report p-o1" in block


def test_other_marks_are_drawn_as_well() -> None:
    blocks = history_page.blocks(
        history.history(recorded()), marks=[Mark(WALL + 3, "configuration reloaded", minor=True)]
    )
    assert "configuration reloaded" in blocks[0]


def test_a_recording_without_samples_has_no_chart_but_a_sentence() -> None:
    (only,) = history_page.blocks(history.history([]))
    assert "no samples" in only


def test_stalls_have_a_chart_only_if_there_were_any() -> None:
    def stalled(share: float) -> list[str]:
        stall = Stall(StallScope.NODE, "memory", share, 0.0, 1, 0.0, 0.0, 1, NOW)
        samples = [nodes.snapshot(at=NOW + second)._replace(stalls=(stall,)) for second in range(3)]
        return titles(history_page.blocks(history.history([RecordedSample(each) for each in samples])))

    assert "Memory stalls (PSI)" in stalled(40.0)
    assert "Memory stalls (PSI)" not in stalled(0.2)
