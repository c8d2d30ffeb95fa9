"""Files from untrusted writers on the command line: each ends with a documented exit code."""

import base64
import copy
import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nodeagent.commands import cli
from nodeagent.model import QOSClass, Signal
from nodeagent.records import flight_recorder
from tests.support.nodes import GI, config, hard, snapshot, soft, view
from tests.support.paths import REPOSITORY
from tests.support.recorded import Run

CALM = REPOSITORY / "tests" / "data" / "nodes" / "cgroupv2-calm-8pods"

HOSTILE: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(
        [
            None,
            True,
            [],
            {},
            [[]],
            [None],
            [{}],
            {"": {}},
            "",
            "?",
            "\x1b[2J\u202e",
            "\ud800",
            "x" * 5000,
            -1,
            0,
            1.5,
            -1e308,
            1e308,
            2**63,
            -(2**64),
            10**400,
            10**5000,
            float("nan"),
            float("inf"),
        ]
    ),
    st.text(max_size=5),
    st.integers(),
    st.floats(),
)
"""What takes the place of a value. JSON's own forms of NaN and infinity are written as Python writes them."""


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in this document."""
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        found += places(child, (*path, key))
    return found


def changed(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with this value at that place."""
    if not path:
        return value
    made = copy.deepcopy(document)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return made


def digits(document: Any) -> str:
    """JSON that may hold integers of any length, which `json` refuses to write beyond 4,300 digits."""
    long = 10**5000
    text = json.dumps(replaced(document, long, "LONG NUMBER"))
    return text.replace('"LONG NUMBER"', "1" + "0" * 5000)


def replaced(value: Any, old: Any, new: Any) -> Any:
    if isinstance(value, dict):
        return {key: replaced(child, old, new) for key, child in value.items()}
    if isinstance(value, list):
        return [replaced(child, old, new) for child in value]
    return new if type(value) is int and value == old else value


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Records of every kind, made by the real policy and recorder."""
    place = tmp_path_factory.mktemp("recorded")
    made = Run(place, config(hard(value=2 * GI), soft(value=4 * GI, grace_s=30.0)))
    pods = (view("best-effort", GI + 1, qos=QOSClass.BEST_EFFORT), view("huge", 3 * GI))
    made.decide(snapshot(*pods, available={Signal.MEMORY: GI}))
    lines = [json.loads(line) for line in (place / flight_recorder.DECISIONS_FILE).read_text().splitlines()]
    identity = lines[0]["id"]
    after = {"planId": identity, "podUid": lines[0]["victims"][0]["uid"], "kind": "accepted", "at": 1.0, "message": ""}
    relief = {"planId": identity, "signal": "memory.available", "measured": 1, "predicted": 2, "tookSeconds": 1.0}
    reclaim = {"planId": identity, "name": "x", "signal": "memory.available", "gained": 1, "result": "done"}
    return [
        *lines,
        {"record": "outcome", **after, "httpStatus": 201, "wallTime": 1.0},
        {"record": "relief", **relief},
        {"record": "reclaim", **reclaim},
    ]


def judged(arguments: list[str], capsys: pytest.CaptureFixture[str], *, codes: tuple[int, ...]) -> None:
    code = cli.main(arguments)
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err, shown.err
    assert code in codes
    assert not [char for char in shown.out + shown.err if not char.isprintable() and char != "\n"]
    if "json" in arguments and code in (0, 1, 2):
        json.loads(shown.out)


EVERY = settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])


@EVERY
@given(data=st.data())
def test_a_record_with_any_value_anywhere_is_explained_and_replayed_or_passed_over(
    data: st.DataObject, recorded: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document: Any = recorded
    for _ in range(data.draw(st.integers(1, 3))):
        document = changed(document, data.draw(st.sampled_from(places(document)[1:])), data.draw(HOSTILE))
    file = tmp_path / "records.jsonl"
    file.write_text("".join(f"{digits(line)}\n" for line in document))
    settings_file = tmp_path / "config.yaml"
    settings_file.write_text("apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\n")
    for command in (
        ["explain", "--state-dir", str(file)],
        ["explain", "--state-dir", str(file), "last"],
        ["explain", "--state-dir", str(file), "last", "-o", "json"],
        ["explain", "--state-dir", str(file), "-o", "json"],
        ["replay", str(file), "--config", str(settings_file)],
        ["replay", str(file), "--config", str(settings_file), "-o", "json"],
    ):
        judged(command, capsys, codes=(0, 3))


@EVERY
@given(data=st.data())
def test_inputs_with_any_value_are_replayed_or_reported_as_not_repeatable(
    data: st.DataObject, recorded: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = recorded[0]["inputs"]
    inputs = msgspec.msgpack.decode(zlib.decompress(base64.b85decode(packed["data"])))
    for _ in range(data.draw(st.integers(1, 3))):
        inputs = changed(inputs, data.draw(st.sampled_from(places(inputs)[1:])), data.draw(HOSTILE))
    try:
        values = msgspec.msgpack.encode(inputs)
    except (OverflowError, UnicodeEncodeError):
        return  # MessagePack cannot encode it
    repacked = base64.b85encode(zlib.compress(values)).decode()
    file = tmp_path / "records.jsonl"
    file.write_text(json.dumps({**recorded[0], "inputs": {**packed, "data": repacked}}) + "\n")
    settings_file = tmp_path / "config.yaml"
    settings_file.write_text(
        "apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\nevictionHard: {memory.available: 2Gi}\n"
    )
    judged(["replay", str(file), "--config", str(settings_file)], capsys, codes=(0,))
    judged(["replay", str(file), "--config", str(settings_file), "-o", "json"], capsys, codes=(0,))


@pytest.mark.parametrize("depth", [40, 500, 900, 990, 100_000])
def test_a_record_of_brackets_is_passed_over(
    depth: int, recorded: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "records.jsonl"
    deep = '{"record": "decision", "id": "deep", "x": ' + "[" * depth + "]" * depth + "}"
    file.write_text(deep + "\n" + json.dumps(recorded[0]) + "\n")
    judged(["explain", "--state-dir", str(file), "-o", "json"], capsys, codes=(0,))
    judged(["explain", "--state-dir", str(file), recorded[0]["id"], "-o", "json"], capsys, codes=(0,))
    file.write_text(deep + "\n")
    judged(["explain", "--state-dir", str(file), "last", "-o", "json"], capsys, codes=(3,))


@EVERY
@given(data=st.data())
def test_a_list_of_pods_with_any_value_anywhere_is_reported_or_refused(
    data: st.DataObject, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads((CALM / "api" / "pods.json").read_text())
    for _ in range(data.draw(st.integers(1, 3))):
        document = changed(document, data.draw(st.sampled_from(places(document))), data.draw(HOSTILE))
    file = tmp_path / "pods.json"
    file.write_text(digits(document))
    check = ["check", "--host-root", str(CALM), "--pods", str(file)]
    judged(check, capsys, codes=(0, 1, 2, 3))
    judged([*check, "-o", "json"], capsys, codes=(0, 1, 2, 3))


@pytest.mark.parametrize("depth", [500, 900, 990, 100_000])
def test_a_list_of_pods_of_brackets_is_reported_or_refused(
    depth: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "pods.json"
    brackets = "[" * depth + "]" * depth
    for text in (brackets, f'{{"kind": "List", "x": {brackets}}}', f'{{"kind": "List", "items": [{brackets}]}}'):
        file.write_text(text)
        judged(["check", "--host-root", str(CALM), "--pods", str(file)], capsys, codes=(0, 3))


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(CALM, tmp_path_factory.mktemp("recording") / "node", symlinks=True))


@EVERY
@given(data=st.data())
def test_a_recording_with_any_value_anywhere_is_reported_or_refused(
    data: st.DataObject, recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = data.draw(st.sampled_from(sorted(path.name for path in (CALM / "listing").glob("*.json"))))
    document = json.loads((CALM / "listing" / name).read_text())
    for _ in range(data.draw(st.integers(1, 3))):
        document = changed(document, data.draw(st.sampled_from(places(document))), data.draw(HOSTILE))
    try:
        (recording / "listing" / name).write_text(digits(document))
        judged(["check", "--host-root", str(recording)], capsys, codes=(0, 1, 2, 3, 64))
        judged(["check", "--host-root", str(recording), "-o", "json"], capsys, codes=(0, 1, 2, 3, 64))
    finally:
        shutil.copy(CALM / "listing" / name, recording / "listing" / name)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("listing/capture.json", "[" * 100_000),
        ("listing/statvfs.json", "[" * 100_000),
        ("listing/statvfs.json", "7"),
        ("proc/uptime", "9" * 400 + " 1\n"),
        ("proc/uptime", "nan nan\n"),
    ],
)
def test_a_recording_of_another_world_is_refused_in_one_line(
    file: str, content: str, recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (recording / file).read_bytes()
    try:
        (recording / file).write_text(content)
        assert cli.main(["check", "--host-root", str(recording)]) == 64
    finally:
        (recording / file).write_bytes(before)
    shown = capsys.readouterr()
    assert shown.err.startswith("nodeagent: --host-root: /listing: not a valid recording: ")
    assert shown.err.count("\n") == 1
