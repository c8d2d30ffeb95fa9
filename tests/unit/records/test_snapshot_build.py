"""What a snapshot file is made of: the records of a window, and what came of its decisions after it."""

import io
import json
import zipfile
from pathlib import Path

from nodeagent.model import (
    HookOutcome,
    HookResult,
    Outcome,
    OutcomeKind,
    ReclaimReport,
    ReclaimResult,
    ReliefReport,
    ResizeOutcome,
    ResizeResult,
    Signal,
)
from nodeagent.records import flight_recorder, recording, snapshot_build, snapshot_file
from nodeagent.records.flight_recorder import FlightRecorder
from nodeagent.records.snapshot_build import FOLLOWING_S, Window
from nodeagent.records.snapshot_documents import Documents
from nodeagent.records.snapshot_file import Manifest
from nodeagent.report import recorded_decisions
from tests.support import named_node, recordings
from tests.support.nodes import NOW, WALL

UNTIL = WALL + 5


def kinds_in_a_snapshot(state: Path) -> list[str]:
    """The kinds of the records in a snapshot of the window until `UNTIL`."""
    file = io.BytesIO()
    snapshot_build.build(
        file,
        name="a.zip",
        recording=recording.open_recording(state),
        documents=Documents(),
        manifest=Manifest("node-1", "0", WALL),
        window=Window(WALL - 10, UNTIL),
    )
    lines = zipfile.ZipFile(file).read(snapshot_file.DECISIONS).splitlines()
    return [json.loads(line)["record"] for line in lines]


def record_each_kind(state: Path, plan_id: str, *, wall: float) -> None:
    """One record of each kind about this decision."""
    recorder = FlightRecorder(state)
    recorder.outcome(Outcome(plan_id, "u", OutcomeKind.ACCEPTED, "", NOW), wall_time=wall)
    recorder.relief(ReliefReport(plan_id, Signal.MEMORY, ("u",), 2, 1, 1.0), wall_time=wall)
    recorder.reclaim(ReclaimReport(plan_id, "images", Signal.NODEFS, ReclaimResult.DONE, 1, 1.0), wall_time=wall)
    recorder.hook(HookOutcome(plan_id, "u", HookResult.DONE, "", NOW), wall_time=wall)
    resized = ResizeOutcome(plan_id, "u", "shop", "web", "main", ResizeResult.RESIZED, "", NOW)
    recorder.resize(resized, wall_time=wall)


def test_whatever_came_of_a_decision_after_the_window_is_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    recordings.write_recording(tmp_path / "samples" / "samples-1.rec", named_node.header(), [named_node.sample()])
    plan, inputs, _ = named_node.decision()
    FlightRecorder(tmp_path).decision(plan, wall_time=WALL, inputs=inputs)
    record_each_kind(tmp_path, plan.id, wall=UNTIL + 1)
    record_each_kind(tmp_path, "other", wall=UNTIL + 1)
    record_each_kind(tmp_path, plan.id, wall=UNTIL + FOLLOWING_S + 1)
    assert kinds_in_a_snapshot(tmp_path) == ["decision", *flight_recorder.RECORDS_OF_A_DECISION]


def test_every_kind_of_record_is_a_decision_or_belongs_to_one_or_is_of_oom_kills(tmp_path: Path) -> None:
    kinds = {name for name in vars(FlightRecorder) if not name.startswith("_")}
    assert kinds == {"decision", "oom", *flight_recorder.RECORDS_OF_A_DECISION}
    record_each_kind(tmp_path, "a-1", wall=WALL)
    (decision,) = recorded_decisions.read_decisions(tmp_path)
    assert [len(records) for records in decision[2:]] == [1] * len(flight_recorder.RECORDS_OF_A_DECISION)
