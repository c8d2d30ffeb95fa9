"""OOM kills are found by a node sample, attributed to the pods of the last samples, and reported once."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.actuators.brakes import ActiveBrakes
from nodeagent.actuators.cgroup_brake import CgroupBrake
from nodeagent.actuators.session import NoCluster
from nodeagent.config import load
from nodeagent.config.config_file import ConfigFile
from nodeagent.config.schema import Config, Mode
from nodeagent.loop.components import Components
from nodeagent.loop.oom_monitor import SETTLE_S, OomMonitor
from nodeagent.loop.state_store import AgentState, OomState, StateStore
from nodeagent.model import NodeSnapshot, OomCause, OomReport, PodView, RaceLoss, Signal
from nodeagent.policy import state as policy_state
from nodeagent.policy.candidates import RankingCache
from nodeagent.records import flight_recorder
from nodeagent.records.flight_recorder import FlightRecorder
from nodeagent.records.state_file import StateFile, Trust
from nodeagent.sampling.disk.monitor import DiskMonitor
from nodeagent.sampling.hostfs.host import Host
from nodeagent.sampling.node import oom_sources
from nodeagent.sampling.sampler import Sampler
from nodeagent.telemetry.decision_log import DecisionLog
from nodeagent.telemetry.log import open_log
from nodeagent.telemetry.metrics import Metrics
from tests.support import nodes
from tests.support.runtime import bare_runtime
from tests.support.trees import Node, TreePod, container_id, write_node

POD = TreePod("shop/web")
KEYS = ("oom", "oom_kill", "oom_group_kill")


class Session(NoCluster):
    """Records the reports that get Events."""

    def __init__(self) -> None:
        super().__init__("none here")
        self.reports: list[OomReport] = []

    def announce_oom_kills(self, report: OomReport, pods: Any) -> None:
        assert all(isinstance(each, PodView) for each in pods.values())
        self.reports.append(report)


class Scene:
    """A written node with cgroup v2, one pod with one container, and a monitor that is called by hand."""

    def __init__(self, directory: Path, root: Path) -> None:
        self.directory = directory
        self.root = root
        self.session = Session()
        write_node(root, Node(pods=(POD,)))
        top = root / "sys/fs/cgroup"
        [self.pod] = top.rglob(f"*{POD.cgroup_uid.replace('-', '_')}.slice")
        [self.container] = self.pod.glob(f"*{container_id(POD, POD.containers[0])}*")
        self.counts: dict[tuple[Path, str], list[int]] = {}
        for path in [each for each in top.rglob("*") if each.is_dir()]:
            self._write(path)
        self.kills = 0
        self.vmstat(7)
        self.now = nodes.NOW
        self.log, self._writer = open_log(level="error", style="json", fd=os.open(os.devnull, os.O_WRONLY))
        self.brakes = ActiveBrakes(CgroupBrake(unified=top, freezer=None))
        self.monitor = self.restart(None)

    def restart(self, saved: OomState | None, config: Config | None = None) -> OomMonitor:
        """A new process."""
        host = Host(str(self.root))
        loaded = load.load(None, overrides=())
        self.config = config or nodes.config(nodes.hard(value=nodes.GI))
        loaded = loaded._replace(config=self.config._replace(sampling=loaded.config.sampling))
        runtime = bare_runtime(host, file=ConfigFile(None, overrides=()), brakes=self.brakes, log=self.log)
        runtime.oom_sources.close()
        totals = saved.totals if saved is not None else None
        runtime = runtime._replace(oom_sources=oom_sources.open_sources(host, totals), oom_state=saved)
        runtime.oom_sources.log.close()  # the log of this machine does not belong to the written node
        self.metrics = Metrics(loaded.config, boottime=host.boottime)
        self.store = StateStore(
            policy_state.initial("i", now=0.0),
            StateFile(self.directory / "state", shape=AgentState, boot_id="boot"),
            brakes=self.brakes,
            owned=tuple,
            status_notes=tuple,
            oom=lambda: self.monitor.state,
            metrics=self.metrics,
            log=self.log,
        )
        sampler = Sampler(host, loaded.config.sampling, node_name="n")
        components = Components(loaded, sampler, self.session, DiskMonitor(host, loaded.config.sampling))
        self.monitor = OomMonitor(
            runtime,
            components=lambda: components,
            store=self.store,
            decision_log=DecisionLog(self.log, FlightRecorder(self.directory)),
            metrics=self.metrics,
            cache=RankingCache(),
            latest=lambda: None,
        )
        self.sampler = sampler
        return self.monitor

    def _write(self, path: Path) -> None:
        for file in ("memory.events", "memory.events.local"):
            numbers = self.counts.setdefault((path, file), [0, 0, 0])
            (path / file).write_text("".join(f"{key} {n}\n" for key, n in zip(KEYS, numbers, strict=True)))

    def vmstat(self, kills: int) -> None:
        self.kills = kills
        (self.root / "proc/vmstat").write_text(f"nr_free_pages 1\noom_kill {kills}\nnr_x 3\n")

    def kill(self, path: Path, *, kills: int = 1, ooms: int = 0, groups: int = 0, counted: bool = True) -> None:
        """As the kernel counts it."""
        top = self.root / "sys/fs/cgroup"
        for each in [path, *[parent for parent in path.parents if top in parent.parents]]:
            for file in ("memory.events", "memory.events.local"):
                if file == "memory.events" or each == path:
                    self.counts[each, file][0] += ooms
                    self.counts[each, file][1] += kills
                    self.counts[each, file][2] += groups
            self._write(each)
        if counted:
            self.vmstat(self.kills + kills)

    def sync(self, after_s: float = 1.0, *, available: int | None = None, full: bool = False) -> None:
        """One node sample; `full`: with a decision before it."""
        self.now += after_s
        memory = nodes.CAPACITY[Signal.MEMORY] // 2 if available is None else available
        node = nodes.snapshot(at=self.now, available={Signal.MEMORY: memory})
        if full:
            listed = nodes.pod("web")._replace(uid=POD.cgroup_uid, cgroup_uid=POD.cgroup_uid)
            seen = [PodView(listed, view.usage) for view in self.sampler.sample().pods]
            snapshot = nodes.snapshot(
                nodes.view("large", 4 * nodes.GI), *seen, at=self.now, available={Signal.MEMORY: memory}
            )
            self.decide(snapshot)
        self.monitor.observe(node)

    def decide(self, snapshot: NodeSnapshot) -> None:
        self.monitor.remember(self.store.decide(snapshot, config=self.config, cache=RankingCache()), snapshot)

    def records(self) -> list[dict[str, Any]]:
        return [each for each in flight_recorder.read_records(self.directory) if each["record"] == "oom"]

    def close(self) -> None:
        self.sampler.close()
        self._writer.close()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    (tmp_path / "state").mkdir()
    made = Scene(tmp_path / "state", tmp_path / "node")
    yield made
    made.close()


def test_counters_of_before_the_first_start_are_no_new_kills(scene: Scene) -> None:
    scene.kill(scene.container, kills=3)
    scene.sync(full=True)
    scene.sync()
    assert scene.session.reports == []
    assert scene.monitor.state is not None
    assert scene.monitor.state.kills == 10


def test_a_kill_is_reported_once_everywhere(scene: Scene) -> None:
    scene.sync(full=True)
    scene.kill(scene.container, kills=2, ooms=1)
    scene.sync()
    scene.sync()
    [report] = scene.session.reports
    [kill] = report.kills
    assert (kill.number, kill.pod, kill.cause) == (2, "shop/web", OomCause.CONTAINER_LIMIT)
    assert report.race is None
    [record] = scene.records()
    assert record["id"] == report.id == "i-oom1"
    assert record["kills"][0]["pod"] == "shop/web"
    page = scene.metrics.render().decode()
    assert 'nodeagent_oom_kills_total{cause="container-limit",victim="pod"} 2' in page
    [note] = scene.monitor.notes()
    assert "pod shop/web" in note.message
    assert "nodeagent explain i-oom1" in note.message


def test_a_shortage_of_the_node_is_a_lost_race_with_its_samples(scene: Scene) -> None:
    scene.sync(full=True)
    for available in (nodes.GI, 500 * nodes.MI, 100 * nodes.MI):
        scene.sync(0.2, available=available)
    scene.kill(scene.container)
    scene.sync(0.2, available=8 * nodes.GI)
    [report] = scene.session.reports
    race = report.race
    assert race is not None
    assert (race.loss, race.deficit) == (RaceLoss.NOT_MET, 924 * nodes.MI)
    assert race.victims == ("shop/large",), race
    assert [each.mem_available for each in report.samples][-2:] == [500 * nodes.MI, 100 * nodes.MI]
    assert 'nodeagent_lost_races_total{loss="not-met"} 1' in scene.metrics.render().decode()
    [record] = scene.records()
    assert record["race"]["deficit"] == 924 * nodes.MI
    assert record["samples"][-1]["memAvailable"] == 100 * nodes.MI


def test_the_victims_of_a_lost_race_are_those_of_before_the_kill(scene: Scene) -> None:
    large, small = nodes.view("large", 4 * nodes.GI), nodes.view("small", nodes.GI)
    scene.decide(nodes.snapshot(large, small, at=scene.now, available={Signal.MEMORY: 2 * nodes.GI}))
    scene.sync(0.0)
    scene.kill(scene.container)
    killed = nodes.view("large", 10 * nodes.MI)
    scene.decide(nodes.snapshot(killed, small, at=scene.now + 0.2, available={Signal.MEMORY: 6 * nodes.GI}))
    scene.sync(0.2, available=6 * nodes.GI)
    [report] = scene.session.reports
    assert report.race is not None
    assert report.race.victims == ("shop/large",)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("available", [6 * nodes.GI, 100 * nodes.MI], ids=["free again", "still short"])
def test_a_lost_race_is_judged_by_the_state_of_before_the_kill(scene: Scene, available: int, mode: Mode) -> None:
    """The sync that finds a kill has decided before, on what the kill has left."""
    scene.restart(None, nodes.config(nodes.hard(value=nodes.GI), mode=mode))
    large, other = nodes.view("large", 4 * nodes.GI), nodes.view("other", 3 * nodes.GI)
    scene.decide(nodes.snapshot(large, other, at=scene.now, available={Signal.MEMORY: 2 * nodes.GI}))
    scene.sync(0.0)
    scene.kill(scene.container)
    left = nodes.view("large", 10 * nodes.MI)
    scene.decide(nodes.snapshot(left, other, at=scene.now + 0.2, available={Signal.MEMORY: available}))
    assert bool(scene.store.policy_state.in_flight.entries) == (available < nodes.GI)
    scene.sync(0.2, available=available)
    [report] = scene.session.reports
    race = report.race
    assert race is not None
    assert (race.loss, race.in_flight, race.victims, race.refusals) == (RaceLoss.NOT_MET, (), ("shop/large",), ())


def test_a_kill_that_no_cgroup_counts_is_reported_as_not_attributed(scene: Scene) -> None:
    scene.sync(full=True)
    scene.vmstat(9)
    scene.sync()
    [report] = scene.session.reports
    assert [(kill.number, kill.victim) for kill in report.kills] == [(2, "unattributed")]


def test_a_pod_that_is_gone_has_its_name(scene: Scene) -> None:
    scene.sync(full=True)
    scene.kill(scene.container)
    write_node(scene.root, Node(pods=()))
    scene.vmstat(scene.kills)
    scene.sync()
    [report] = scene.session.reports
    assert [kill.pod for kill in report.kills] == ["shop/web"]


def test_a_container_that_is_gone_when_its_pod_is_read_again_has_its_name(scene: Scene) -> None:
    scene.sync(full=True)
    scene.kill(scene.container, ooms=1)
    shutil.rmtree(scene.container)
    scene.sync(12.0, full=True)
    [report] = scene.session.reports
    [kill] = report.kills
    assert (kill.pod, kill.container, kill.cause) == ("shop/web", "c", OomCause.CONTAINER_LIMIT)


def test_kills_while_no_agent_ran_are_reported_as_such(scene: Scene) -> None:
    scene.sync(full=True)
    saved = scene.monitor.state
    scene.kill(scene.container)
    scene.restart(saved)
    scene.sync(full=True)
    [report] = scene.session.reports
    assert report.while_down
    assert [kill.pod for kill in report.kills] == ["shop/web"]
    assert report.samples == ()
    assert report.race is not None
    assert report.race.loss is RaceLoss.NOT_RUNNING
    scene.sync()
    assert len(scene.session.reports) == 1


def test_what_was_reported_is_saved_at_once(scene: Scene) -> None:
    """A process that is killed right after it does not report the same again."""
    scene.sync(full=True)
    scene.kill(scene.container)
    scene.sync()
    loaded = StateFile(scene.directory / "state", shape=AgentState, boot_id="boot").load()
    assert loaded.trust is Trust.RESTORED
    scene.restart(loaded.value.oom)
    scene.sync(full=True)
    assert len(scene.session.reports) == 1


def test_a_state_of_another_boot_is_not_used(scene: Scene) -> None:
    scene.sync(full=True)
    scene.kill(scene.container)
    scene.sync()
    loaded = StateFile(scene.directory / "state", shape=AgentState, boot_id="next boot").load()
    assert loaded.trust is Trust.OTHER_BOOT


def test_a_counter_that_went_back_is_no_kill(scene: Scene) -> None:
    """A restored state of the same boot has no larger counter; a damaged one may."""
    scene.sync(full=True)
    scene.vmstat(3)
    scene.sync()
    scene.restart(OomState(1000, {}))
    scene.sync(full=True)
    assert scene.session.reports == []


def test_a_limit_that_was_reached_before_its_kill_is_its_cause_but_not_for_ever(scene: Scene) -> None:
    scene.sync(full=True)
    for wait_s, cause in ((1.0, OomCause.CONTAINER_LIMIT), (3 * SETTLE_S, OomCause.NODE)):
        scene.kill(scene.container, kills=0, ooms=1)
        scene.sync(SETTLE_S)  # the counters are read without a kill
        scene.sync(wait_s)
        scene.kill(scene.container)
        scene.sync(0.2)
        assert scene.session.reports[-1].kills[0].cause is cause


def test_a_kill_between_the_two_readings_is_not_reported_twice(scene: Scene) -> None:
    """The node's counter is read first."""
    scene.sync(full=True)
    scene.kill(scene.container, kills=2, counted=False)
    scene.vmstat(scene.kills + 1)
    scene.sync()
    scene.vmstat(scene.kills + 1)
    scene.sync()
    assert [[kill.number for kill in report.kills] for report in scene.session.reports] == [[2]]


def test_a_kill_while_the_limits_are_read_is_attributed(scene: Scene) -> None:
    """A calm node reads them, after the counter of its kills, for limits that were reached without a kill."""
    scene.sync(full=True)
    scene.kill(scene.container, ooms=1, counted=False)
    scene.sync(SETTLE_S)
    scene.vmstat(scene.kills + 1)
    scene.sync()
    [report] = scene.session.reports
    assert [(kill.number, kill.pod, kill.cause) for kill in report.kills] == [(1, POD.key, OomCause.CONTAINER_LIMIT)]


def test_a_node_that_does_not_count_kills_reports_none(scene: Scene) -> None:
    (scene.root / "proc/vmstat").write_text("nr_free_pages 1\n")
    scene.sync(full=True)
    scene.kill(scene.container, counted=False)
    scene.sync()
    assert scene.session.reports == []
    assert scene.monitor.state is None


def test_fast_samples_keep_some_seconds_and_the_newest(scene: Scene) -> None:
    for number in range(400):
        scene.sync(0.02, available=number)
    scene.kill(scene.container)
    scene.sync(0.2)
    samples = scene.session.reports[-1].samples
    assert (samples[-1].mem_available or 0) >= 394, "of the last check: a later one may be newer than the kill"
    assert len(samples) <= 60
    assert samples[-1].at - samples[0].at > 4.0


def test_the_record_is_valid_json_whatever_the_names(scene: Scene) -> None:
    scene.sync(full=True)
    scene.kill(scene.container)
    scene.sync()
    for line in (scene.directory / flight_recorder.DECISIONS_FILE).read_text().splitlines():
        json.loads(line)


def test_workers_that_are_killed_without_end_are_counted_but_do_not_fill_the_records(scene: Scene) -> None:
    scene.sync(full=True)
    for _ in range(200):
        scene.kill(scene.container, ooms=1)
        scene.sync(0.1)
    scene.sync(1.0)
    reports = scene.session.reports
    assert sum(kill.number for report in reports for kill in report.kills) == 200
    assert len(reports) <= 25, "about one a second, in 21 s"
    assert len(scene.records()) == 1
    assert len((scene.directory / flight_recorder.DECISIONS_FILE).read_bytes()) < 20_000
    page = scene.metrics.render().decode()
    assert 'nodeagent_oom_kills_total{cause="container-limit",victim="pod"} 200' in page


def test_a_lost_race_that_goes_on_repeats_no_sample(scene: Scene) -> None:
    scene.sync(full=True)
    for _ in range(5):
        scene.kill(scene.container)
        for _ in range(10):
            scene.sync(0.1)
    taken = [sample.at for report in scene.session.reports for sample in report.samples]
    assert len(scene.session.reports) > 1
    assert len(taken) == len(set(taken))
    assert len(scene.records()) == len(scene.session.reports)
    deficits = [report.race.deficit for report in scene.session.reports if report.race is not None]
    assert len(deficits) == len(scene.session.reports)
    assert None not in deficits


def test_kills_of_a_group_that_are_counted_later_have_its_limit(scene: Scene) -> None:
    scene.sync(full=True)
    scene.kill(scene.container, kills=2, ooms=1, groups=1)
    scene.sync()
    scene.kill(scene.container)
    scene.sync()
    kills = [(kill.number, kill.cause) for each in scene.session.reports for kill in each.kills]
    assert kills == [(2, OomCause.CONTAINER_LIMIT), (1, OomCause.CONTAINER_LIMIT)]


def test_a_limit_that_was_reached_explains_one_kill(scene: Scene) -> None:
    """A shortage of the node right after it is one."""
    scene.sync(full=True)
    scene.kill(scene.container, kills=0, ooms=1)
    scene.sync(SETTLE_S)
    for cause in (OomCause.CONTAINER_LIMIT, OomCause.NODE):
        scene.kill(scene.container)
        scene.sync()
        assert scene.session.reports[-1].kills[0].cause is cause
