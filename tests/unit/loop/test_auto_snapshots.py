"""Snapshots that the agent writes by itself: when, how many, and never in the way."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog

from nodeagent.config import load
from nodeagent.loop import auto_snapshots
from nodeagent.loop.auto_snapshots import AutoSnapshots
from nodeagent.model import (
    LostRace,
    Observation,
    OomReport,
    Plan,
    RaceLoss,
    Refusal,
    RefusalCode,
    Signal,
    SignalState,
)
from nodeagent.records import kept_snapshots
from nodeagent.records.recorder_paths import SnapshotPlace
from nodeagent.records.recording import open_recording
from nodeagent.sampling.hostfs.host import open_host
from tests.support import named_node, nodes, recorded_samples, recordings

CALM = Plan("ab12-1", 0.0, 0.0, (), ())
REFUSING = CALM._replace(refusals=(Refusal(RefusalCode.NO_CANDIDATES, "no candidate"),))
EVICTING = named_node.decision()[0]
RACE = OomReport("ab12-oom1", 0.0, None, (), race=LostRace(RaceLoss.NOT_MET, "", None, None, False))


class Started:
    """Collects the threads that would be started; `run` runs them."""

    def __init__(self) -> None:
        self.works: list[Callable[[], object]] = []
        self.count = 0
        self.pids = True

    def __call__(self, work: Callable[[], object]) -> bool:
        if self.pids:
            self.works.append(work)
            self.count += 1
        return self.pids

    def run(self) -> None:
        for work in self.works:
            work()
        self.works.clear()


@pytest.fixture
def started() -> Started:
    return Started()


@pytest.fixture
def place(tmp_path: Path) -> SnapshotPlace:
    samples = tmp_path / "state" / "samples"
    samples.mkdir(parents=True)
    recordings.write_recording(samples / "samples-1.rec", recorded_samples.HEADER, recorded_samples.samples(30))
    return SnapshotPlace(samples, tmp_path / "state", tmp_path / "snapshots", 3, 1 << 20)


@pytest.fixture
def lines() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def auto(place: SnapshotPlace, started: Started, lines: list[dict[str, Any]], tmp_path: Path) -> AutoSnapshots:
    def collect(_: object, __: str, event: Any) -> Any:
        lines.append(dict(event))
        raise structlog.DropEvent

    log = structlog.wrap_logger(None, processors=[collect], wrapper_class=structlog.make_filtering_bound_logger(0))
    return AutoSnapshots(place, node="node-1", host=open_host(str(tmp_path)), log=log, start=started)


def observe(auto: AutoSnapshots, plan: Plan, *times: float) -> None:
    for now in times:
        auto.observe_plan(plan, now=now, wall=nodes.WALL + now)
        auto.step(now=now, loaded=load.defaults())


def reasons(place: SnapshotPlace) -> list[str]:
    return [each.manifest.reason for each in kept_snapshots.listed(place.directory)]


def test_an_eviction_is_written_with_what_came_of_it(
    auto: AutoSnapshots, started: Started, place: SnapshotPlace, lines: list[dict[str, Any]]
) -> None:
    observe(auto, EVICTING, 100.0)
    observe(auto, CALM, 110.0, 159.0)
    assert started.works == [], "its outcome is awaited"
    observe(auto, CALM, 160.0)
    started.run()
    observe(auto, CALM, 170.0)
    (kept,) = kept_snapshots.listed(place.directory)
    assert (kept.manifest.reason, kept.manifest.id, kept.manifest.node) == ("eviction", EVICTING.id, "node-1")
    assert kept.path.name.endswith(f"-eviction-{EVICTING.id}.zip")
    assert list(open_recording(kept.path).samples()) == recorded_samples.samples(30)
    (line,) = lines
    assert (line["event"], line["file"], line["id"]) == ("snapshot written", str(kept.path), EVICTING.id)
    assert auto.notes[0].message == f"eviction {EVICTING.id}: {kept.path}"


def test_a_lost_race_is_written_at_once(auto: AutoSnapshots, started: Started, place: SnapshotPlace) -> None:
    auto.observe_oom(RACE, now=10.0, wall=nodes.WALL)
    observe(auto, CALM, 11.0, 12.0)
    started.run()
    assert reasons(place) == ["race-lost"]


def test_an_oom_kill_by_a_limit_of_its_own_is_none(auto: AutoSnapshots, started: Started) -> None:
    auto.observe_oom(RACE._replace(race=None), now=10.0, wall=nodes.WALL)
    observe(auto, CALM, 100.0)
    assert started.works == []


def test_a_refusal_is_written_once_when_it_has_lasted_a_minute(
    auto: AutoSnapshots, started: Started, place: SnapshotPlace
) -> None:
    observe(auto, REFUSING, 0.0, 30.0, 59.9)
    assert started.works == []
    observe(auto, REFUSING, 60.0)
    started.run()
    observe(auto, REFUSING, *range(61, 1000, 10))
    assert started.works == []
    assert reasons(place) == ["refusal"]
    observe(auto, CALM, 1000.0)
    observe(auto, REFUSING, 1010.0, 1069.0)
    assert started.works == []
    observe(auto, REFUSING, 1070.0)
    assert len(started.works) == 1


def test_a_refusal_that_stays_hides_no_later_one(auto: AutoSnapshots, started: Started) -> None:
    stays = Refusal(RefusalCode.PAGE_CACHE_ONLY, "only page cache")
    staying = CALM._replace(refusals=(stays,))
    both = CALM._replace(refusals=(stays, *REFUSING.refusals))
    observe(auto, staying, 0.0, 60.0)
    started.run()
    observe(auto, staying, *range(70, 1000, 10))
    observe(auto, both, 1000.0, 1059.0)
    assert started.works == []
    observe(auto, both, 1060.0)
    started.run()
    observe(auto, both, *range(1070, 2000, 10))
    observe(auto, staying, *range(2000, 3000, 10))
    assert started.works == [], "what stays is written once"
    observe(auto, both, 3000.0, 3060.0)
    assert len(started.works) == 1


def test_a_refusal_for_reasons_that_take_turns_is_written_once(auto: AutoSnapshots, started: Started) -> None:
    other = CALM._replace(refusals=(Refusal(RefusalCode.PAGE_CACHE_ONLY, "only page cache"),))
    for now in range(0, 600, 60):
        observe(auto, REFUSING if now % 120 else other, now, now + 59.0)
        started.run()
    assert started.count == 1


def test_a_memory_limit_that_is_not_raised_is_no_refusal_to_evict(auto: AutoSnapshots, started: Started) -> None:
    refusal = Refusal(RefusalCode.RESIZE_CEILING, "the memory limit of shop/web is not raised")
    observe(auto, CALM._replace(refusals=(refusal,)), *[100.0 + 10 * number for number in range(30)])
    assert started.works == []


def test_nothing_is_written_to_a_file_system_below_a_threshold_until_that_has_passed(
    auto: AutoSnapshots, started: Started, place: SnapshotPlace, tmp_path: Path
) -> None:
    disk = Observation(Signal.NODEFS, 1, 100, 0.0, "", device=tmp_path.stat().st_dev)
    verdict = recorded_samples.sample().signals[0]._replace(observation=disk, state=SignalState.HARD)
    observe(auto, EVICTING._replace(signals=(verdict,)), 100.0)
    observe(auto, CALM._replace(signals=(verdict,)), 160.0)
    started.run()
    observe(auto, CALM, 170.0)
    assert auto.notes[0].message == f"not written: {place.directory}: its file system is below a threshold"
    assert not place.directory.exists()
    observe(auto, EVICTING, 300.0)
    observe(auto, CALM, 360.0)
    started.run()
    assert reasons(place) == ["eviction"]


def test_nothing_is_written_to_a_file_system_that_is_short(
    place: SnapshotPlace, started: Started, tmp_path: Path
) -> None:
    log = structlog.wrap_logger(None, wrapper_class=structlog.make_filtering_bound_logger(50))
    auto = AutoSnapshots(
        place._replace(max_bytes=1 << 60),
        node="node-1",
        host=open_host(str(tmp_path)),
        log=log,
        start=started,
    )
    auto.observe_oom(RACE, now=10.0, wall=nodes.WALL)
    observe(auto, CALM, 12.0)
    started.run()
    observe(auto, CALM, 13.0)
    assert auto.notes[0].message == f"not written: {place.directory}: its file system is short of space"
    assert not place.directory.exists()


def test_there_is_at_most_one_a_minute(auto: AutoSnapshots, started: Started) -> None:
    count = 0
    for now in range(600):
        auto.observe_oom(RACE, now=now, wall=nodes.WALL + now)
        observe(auto, EVICTING, now)
        count += len(started.works)
        started.run()
    assert 8 <= count <= 10


def test_no_second_thread_starts_while_one_runs(auto: AutoSnapshots, started: Started) -> None:
    auto.observe_oom(RACE, now=0.0, wall=nodes.WALL)
    observe(auto, CALM, 5.0)
    auto.observe_oom(RACE, now=10.0, wall=nodes.WALL)
    observe(auto, CALM, 500.0, 1000.0)
    assert len(started.works) == 1


def test_the_number_of_files_is_bounded(auto: AutoSnapshots, started: Started, place: SnapshotPlace) -> None:
    for now in range(0, 1000, 100):
        auto.observe_oom(RACE, now=now, wall=nodes.WALL + now)
        observe(auto, CALM, now + 5)
        started.run()
    assert len(reasons(place)) == place.most


def test_a_failure_is_a_note_and_the_next_event_tries_again(
    auto: AutoSnapshots, started: Started, place: SnapshotPlace, lines: list[dict[str, Any]]
) -> None:
    place.directory.write_text("in the way")
    auto.observe_oom(RACE, now=0.0, wall=nodes.WALL)
    observe(auto, CALM, 5.0)
    started.run()
    observe(auto, CALM, 10.0)
    assert lines[0]["event"] == "snapshot not written"
    assert auto.notes[0].message.startswith(f"not written: {place.directory}: ")
    place.directory.unlink()
    auto.observe_oom(RACE, now=100.0, wall=nodes.WALL)
    observe(auto, CALM, 105.0)
    started.run()
    assert reasons(place) == ["race-lost"]


def test_without_a_free_pid_it_is_tried_again_in_a_minute(
    auto: AutoSnapshots, started: Started, place: SnapshotPlace
) -> None:
    started.pids = False
    auto.observe_oom(RACE, now=0.0, wall=nodes.WALL)
    observe(auto, CALM, 5.0)
    started.pids = True
    observe(auto, CALM, 30.0, 65.0)
    started.run()
    assert reasons(place) == ["race-lost"]


def test_a_file_above_the_limit_is_not_kept(auto: AutoSnapshots, started: Started, place: SnapshotPlace) -> None:
    small = AutoSnapshots(place._replace(max_bytes=1000), node="n", host=auto._host, log=auto._log, start=started)
    small.observe_oom(RACE, now=0.0, wall=nodes.WALL)
    observe(small, CALM, 5.0)
    started.run()
    observe(small, CALM, 10.0)
    assert "larger than" in small.notes[0].message
    assert list(place.directory.iterdir()) == []


def test_a_configuration_without_files_has_none(tmp_path: Path) -> None:
    header = "apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\n"
    off = load.loads(f"{header}recorder: {{snapshots: {{max: 0}}}}\n")
    assert auto_snapshots.open_snapshots(open_host(str(tmp_path)), off, node="n", log=structlog.get_logger()) is None
