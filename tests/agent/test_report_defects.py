"""A defect in what only reports neither stops the loop nor a decision: it is logged once, counted and noted."""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nodeagent.actuators.brakes import ActiveBrakes
from nodeagent.actuators.cgroup_brake import CgroupBrake
from nodeagent.actuators.session import NoCluster
from nodeagent.config.config_file import ConfigFile
from nodeagent.loop import auto_snapshots
from nodeagent.loop.agent import Agent
from nodeagent.loop.components import Components, Runtime
from nodeagent.loop.observe import STARTUP_API_WAIT_S
from nodeagent.loop.reporting import Part
from nodeagent.loop.state_store import AgentState
from nodeagent.model import ConditionVerdict, Note, NoteKind, Plan
from nodeagent.model.recording import RecordingHeader
from nodeagent.policy import state as policy_state
from nodeagent.records import status_file
from nodeagent.records.flight_recorder import FlightRecorder
from nodeagent.records.sample_recorder import SampleRecorder
from nodeagent.records.state_file import StateFile
from nodeagent.sampling.disk.monitor import DiskMonitor
from nodeagent.sampling.hostfs.host import open_host
from nodeagent.sampling.sampler import Sampler
from nodeagent.telemetry.log import LineWriter, open_log
from tests.support.runtime import bare_runtime
from tests.support.trees import MI, Node, TreePod, write_node

BEGAN = 100_000.0
HEAD = "apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\n"
SYNCS = 12
"""More than the failures of syncs after which the process ends."""
ERRORS = (MemoryError(), OSError(28, "No space left on device"), TypeError("no such thing"), RecursionError())


class Cluster(NoCluster):
    """Records what the loop hands over."""

    def __init__(self) -> None:
        super().__init__("none here")
        self.published = 0
        self.announced: list[Plan] = []

    def publish(self, verdicts: Iterable[ConditionVerdict]) -> None:
        self.published += 1

    def announce(self, plan: Plan) -> None:
        self.announced.append(plan)


class Faulty:
    """Stands before a component of the loop, one method of which fails."""

    def __init__(self, component: Any, method: str, fail: Callable[[], Exception]) -> None:
        self._component, self._method, self._fail = component, method, fail

    def __getattr__(self, name: str) -> Any:
        if name != self._method:
            return getattr(self._component, name)

        def failing(*_: Any, **__: Any) -> Any:
            raise self._fail()

        return failing


class Loop(NamedTuple):
    agent: Agent
    cluster: Cluster
    log: Path
    writer: LineWriter
    state: str
    advance: Callable[[float], None]
    now: Callable[[], float]

    def lines(self, event: str) -> list[dict[str, Any]]:
        self.writer.close()
        return [each for each in map(json.loads, self.log.read_bytes().splitlines()) if each["event"] == event]


Start = Callable[..., Loop]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """An agent in a dry run below a hard threshold, with everything that it records. `faults` by component and method:
    what the method raises."""
    now = BEGAN
    (tmp_path / "node").mkdir()
    state = tmp_path / "state"
    state.mkdir()
    host = open_host(write_node(tmp_path / "node", Node(memory_available=50 * MI, pods=(TreePod("a/web"),))))
    config = tmp_path / "nodeagent.yaml"
    config.write_text(f"{HEAD}stateDir: {state}\nstartup: {{freshSamples: 1}}\nsampling: {{interval: 1s}}\n")
    file = ConfigFile(str(config), overrides=())
    loaded = file.load()
    log, writer = open_log(level="info", style="json", fd=os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT))
    header = RecordingHeader("n", "0", "i", "boot", 0.0)
    runtime = bare_runtime(host, file=file, brakes=ActiveBrakes(CgroupBrake(unified=tmp_path, freezer=None)), log=log)
    runtime = runtime._replace(
        boottime=lambda: now,
        monotonic=lambda: now,
        store=StateFile(state / "state", shape=AgentState, boot_id="boot"),
        recorder=FlightRecorder(state),
        sample_recorder=SampleRecorder(state / "samples", max_bytes=1 << 20, header=lambda _: header),
        auto_snapshots=auto_snapshots.open_snapshots(host, loaded, node="n", log=log),
    )

    def advance(seconds: float) -> None:
        nonlocal now
        now += seconds

    with Sampler(host, loaded.config.sampling, node_name="n", boottime=lambda: now) as sampler:
        cluster = Cluster()
        components = Components(loaded, sampler, cluster, DiskMonitor(host, loaded.config.sampling))

        def loop(component: str, method: str, fail: Callable[[], Exception]) -> Loop:
            faults: dict[str, Any] = {}
            if component in Runtime._fields:
                faults[component] = Faulty(getattr(runtime, component), method, fail)
            policy = policy_state.initial("i", now=now)
            agent = Agent(components, runtime._replace(**faults), rebuild=lambda before, _: before, policy=policy)
            if component not in Runtime._fields:
                setattr(agent, component, Faulty(getattr(agent, component), method, fail))
            return Loop(agent, cluster, tmp_path / "log", writer, str(state), advance, lambda: now)

        yield loop
    writer.close()


CALLS = (
    (Part.METRICS, "metrics", "observe_plan"),
    (Part.DECISIONS, "decision_log", "log_victims"),
    (Part.DECISIONS, "decision_log", "log_plan"),
    (Part.DECISIONS, "brakes", "take_notes"),
    (Part.SAMPLES, "sample_recorder", "record"),
    (Part.SAMPLES, "sample_recorder", "due"),
    (Part.SAMPLES, "sample_recorder", "notes"),
    (Part.SAMPLES, "sample_recorder", "stop"),
    (Part.STATUS, "notifier", "status"),
    (Part.STATUS, "oom_monitor", "notes"),
    (Part.SNAPSHOTS, "auto_snapshots", "observe_plan"),
    (Part.SNAPSHOTS, "auto_snapshots", "step"),
    (Part.OOM_KILLS, "oom_monitor", "observe"),
    (Part.OOM_KILLS, "oom_monitor", "remember"),
    (Part.PAGE, "live_page", "remember"),
)
"""The calls of the loop that only report."""


@pytest.mark.parametrize(("part", "component", "method"), CALLS)
def test_a_defect_in_a_report_is_logged_once_and_the_agent_decides_in_every_sync(
    start: Start, part: Part, component: str, method: str
) -> None:
    raised: list[Exception] = []

    def fail() -> Exception:
        raised.append(ERRORS[len(raised) % len(ERRORS)])
        return raised[-1]

    loop = start(component, method, fail)
    for _ in range(SYNCS):
        loop.advance(STARTUP_API_WAIT_S)
        loop.agent.sync()
    assert loop.cluster.published == len(loop.cluster.announced) == SYNCS
    assert all(plan.refusals for plan in loop.cluster.announced)
    if method != "stop":
        assert part_noted(status_file.read_status(loop.state, now=loop.now()), part)
    loop.agent.stop()
    assert part_noted(loop.agent.reporting.notes(), part)
    assert f'nodeagent_failures_total{{what="report"}} {len(raised)}' in loop.agent.metrics.render().decode()
    logged = loop.lines("report failed")
    assert len(logged) == len({type(each) for each in raised})
    assert {each["part"] for each in logged} == {part.value}
    assert "Traceback" in logged[0]["exception"]


def part_noted(notes: tuple[Note, ...], part: Part) -> bool:
    messages = [note.message for note in notes if note.kind is NoteKind.REPORTING]
    return len(messages) == 1 and messages[0].startswith(f"{part.value} failed, which is a defect of nodeagent")
