"""The live page: what the loop keeps, and what a reader gets."""

import re
import sys
from collections.abc import Iterator

import pytest

from nodeagent.config.schema import Config
from nodeagent.loop import live_page
from nodeagent.loop.live_page import LivePage
from nodeagent.model import NodeSnapshot, Signal
from tests.support import nodes, recordings
from tests.support.nodes import GI, MI, NOW

CONFIG: Config = nodes.config(nodes.soft(value=2 * GI, grace_s=10.0), nodes.hard(value=GI))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Ground:
    def __init__(self) -> None:
        self.clock = Clock()
        self.page = LivePage(config=lambda: CONFIG, config_source="node.yaml", monotonic=self.clock)

    def pass_samples(self, snapshots: Iterator[NodeSnapshot], *, acts: bool = True) -> None:
        for decided in recordings.decide_all(snapshots, CONFIG):
            self.page.remember(decided.plan, decided.sample.snapshot, acts=acts)

    def read(self, query: str = "") -> str:
        return self.page.document(query)[0].decode()


@pytest.fixture
def ground() -> Ground:
    return Ground()


def calm(seconds: int, *, available: int = 8 * GI, pods: int = 2, start: float = 0) -> Iterator[NodeSnapshot]:
    views = [nodes.view(f"pod-{number}", (number + 1) * 700 * MI) for number in range(pods)]
    for second in range(seconds):
        yield nodes.snapshot(*views, at=NOW + start + second, available={Signal.MEMORY: available})


def falling() -> Iterator[NodeSnapshot]:
    yield from calm(30)
    yield from calm(20, available=1536 * MI, start=30)
    yield from calm(10, available=512 * MI, start=50)
    yield from calm(60, start=60)


def test_before_the_first_sample_the_page_says_so(ground: Ground) -> None:
    assert "no sample yet" in ground.read()


def test_the_page_has_the_verdict_the_history_and_the_order(ground: Ground) -> None:
    ground.pass_samples(calm(120))
    page = ground.read()
    assert "every signal is above its thresholds" in page
    assert re.findall("<figcaption>([^<]*)", page)[:3] == [
        "Available, against the thresholds",
        "memory.available",
        "Memory of the pods",
    ]
    assert "PODS IN EVICTION ORDER FOR memory.available" in page
    assert "node.yaml" in page


def test_pressure_an_eviction_and_damping_are_in_the_chart(ground: Ground) -> None:
    ground.pass_samples(falling())
    page = ground.read()
    assert "grace period of memory.available &lt; " in page
    assert "damping of MemoryPressure" in page
    assert re.search(r"eviction: [^ ]+/pod-\d \(memory.available, (hard|soft)\)", page)


def test_a_dry_run_is_marked_as_one(ground: Ground) -> None:
    ground.pass_samples(falling(), acts=False)
    assert ", dry-run), decision" in ground.read()


def test_a_page_is_built_at_most_every_two_seconds(ground: Ground) -> None:
    ground.pass_samples(calm(2))
    first = ground.read()
    ground.pass_samples(calm(2, available=4 * GI, start=20))
    ground.clock.now += live_page.BUILD_EVERY_S - 0.1
    assert ground.read() == first
    ground.clock.now += 0.2
    assert ground.read() != first


def test_a_page_is_not_built_again_without_a_new_sample(ground: Ground) -> None:
    ground.pass_samples(calm(2))
    first = ground.read()
    ground.clock.now += 1000.0
    assert ground.read() == first


def test_the_page_is_loaded_again_unless_the_reader_stops_it(ground: Ground) -> None:
    ground.pass_samples(calm(2))
    assert '<meta http-equiv="refresh" content="10">' in ground.read()
    still = ground.read("still")
    assert "refresh" not in still
    assert '<a href="/">' in still


def size_of(value: object, seen: set[int]) -> int:
    """Bytes of a value with everything that it alone holds."""
    if id(value) in seen or isinstance(value, type | Signal):
        return 0
    seen.add(id(value))
    inside = value if isinstance(value, tuple | list) else ()
    return sys.getsizeof(value) + sum(size_of(each, seen) for each in inside)


def test_an_hour_of_a_full_node_takes_less_than_a_mebibyte(ground: Ground) -> None:
    for start in range(0, 4000, 10):
        ground.pass_samples(calm(1, pods=110, start=start))
    rows = list(ground.page._rows)
    assert len(rows) == live_page.KEPT
    assert size_of(rows, set()) < MI


def test_in_calm_a_row_is_kept_every_ten_seconds(ground: Ground) -> None:
    ground.pass_samples(calm(100))
    assert re.search(r"Data table \(11 of the times\)", ground.read())


def test_a_hostile_name_is_text(ground: Ground) -> None:
    name = "<script>alert(1)</script>"
    ground.pass_samples(nodes.snapshot(nodes.view(name, GI), at=NOW + second) for second in range(30))
    page = ground.read()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
