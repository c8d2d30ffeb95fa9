"""`nodeagent replay` with recorded samples, and the decisions of a recording bit for bit."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.commands import cli, replay
from nodeagent.model import RecordedSample, RecordingHeader, Signal, Tier
from nodeagent.policy import ranking
from tests.support import recordings, simulated_node
from tests.support.nodes import GI, MI, NOW, WALL, snapshot, view
from tests.support.recorded import Run
from tests.support.simulated_node import HogView, SimulatedNode

HEADER = RecordingHeader("node-1", "0.1.0", "abc", "boot", WALL)


def write_config(path: Path, memory: str, *, soft: str = "") -> str:
    lines = [
        "apiVersion: nodeagent.io/v1alpha1",
        "kind: NodeAgentConfiguration",
        f'evictionHard: {{memory.available: "{memory}"}}',
        "enforceNodeAllocatable: [none]",
    ]
    if soft:
        lines += [f'evictionSoft: {{memory.available: "{soft}"}}', "evictionSoftGracePeriod: {memory.available: 30s}"]
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return str(path)


def write_leak(path: Path) -> str:
    """Ten minutes in which a pod takes the memory down to 700 MiB and ends."""
    samples = []
    for second in range(600):
        grown = max(0, second - 100) * 25 * MI if second < 400 else 0
        pods = [view("web", 300 * MI), view("leak\x1b[31m", GI + grown)]
        at = NOW + second
        samples.append(RecordedSample(snapshot(*pods, at=at, available={Signal.MEMORY: 8 * GI - grown})))
    recordings.write_recording(path, HEADER, samples)
    return str(path)


@settings(deadline=None, max_examples=12)
@given(
    rate=st.integers(5, 120),
    sibling=st.sampled_from((0, GI)),
    others=st.integers(1, 6),
    tier=st.sampled_from(list(Tier)),
)
def test_a_recording_replays_to_the_plans_that_were_made_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, rate: int, sibling: int, others: int, tier: Tier
) -> None:
    place = tmp_path_factory.mktemp("records")
    with_config = simulated_node.acting(tier)
    node = SimulatedNode(with_config, HogView(), rate=rate * float(MI), sibling=sibling, others=others)
    made, plans = Run(place, with_config), []
    for _ in range(120):
        plan = made.decide(node.snapshot())
        if plan.victims or plan.refusals:
            plans.append(ranking.with_key_texts(plan))
        node.state = made.state
        node.step()
        made.state = node.state
    rows = replay.replay(place, with_config) if plans else ()
    assert [row.plan for row in rows] == plans


def test_two_configurations_are_simulated_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = write_leak(tmp_path / "samples-1.rec")
    early, late = write_config(tmp_path / "early.yaml", "2Gi"), write_config(tmp_path / "late.yaml", "500Mi")
    assert cli.main(["replay", place, "--config", early, "--compare", late, "-o", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["decisions"] == []
    first, second = report["simulation"]["configurations"]
    [eviction] = first["evictions"]
    assert eviction["pod"] == "shop/leak\x1b[31m"
    assert eviction["tier"] == "hard"
    assert second["evictions"] == []
    assert second["spared"] == [{"pod": eviction["pod"], "uid": eviction["uid"]}]
    assert first["spared"] == []
    assert first["closest"]["memory.available"]["available"] > second["closest"]["memory.available"]["available"]
    assert first["conditions"]["MemoryPressure"]["raises"] == 1
    assert second["conditions"]["MemoryPressure"]["raises"] == 0
    assert len(report["simulation"]["cannotTell"]) >= 6


def test_the_text_has_both_columns_the_evictions_and_what_the_recording_cannot_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = write_leak(tmp_path / "samples-1.rec")
    early, late = write_config(tmp_path / "early.yaml", "2Gi"), write_config(tmp_path / "late.yaml", "500Mi")
    assert cli.main(["replay", place, "--config", early, "--compare", late]) == 0
    text = capsys.readouterr().out
    assert f"EVICTIONS WITH {early}" in text
    assert "pods spared" in text
    assert "shop/leak\\x1b[31m" in text
    assert "\x1b" not in text
    assert "WHAT THE RECORDING CANNOT TELL" in text


def test_one_file_given_twice_has_two_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place, only = write_leak(tmp_path / "samples-1.rec"), write_config(tmp_path / "c.yaml", "2Gi")
    assert cli.main(["replay", place, "--config", only, "--compare", only, "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["simulation"]["configurations"]
    assert [each["configuration"] for each in found] == [f"{only} (A)", f"{only} (B)"]


def test_samples_and_decisions_of_one_state_directory_are_both_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "samples").mkdir()
    write_leak(tmp_path / "samples" / "samples-1.rec")
    run = Run(tmp_path, simulated_node.acting())
    run.decide(snapshot(view("leak", 3 * GI), available={Signal.MEMORY: 100 * MI}))
    named = write_config(tmp_path / "c.yaml", "2Gi")
    assert cli.main(["replay", str(tmp_path), "--config", named, "-o", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["decisions"]) == 1
    assert report["simulation"]["configurations"][0]["samples"] == 600


def test_the_page_has_a_chart_of_memory_with_the_thresholds_and_the_eviction(tmp_path: Path) -> None:
    place, named = write_leak(tmp_path / "samples-1.rec"), write_config(tmp_path / "c.yaml", "2Gi", soft="4Gi")
    page = tmp_path / "replay.html"
    assert cli.main(["replay", place, "--config", named, "--html", str(page)]) == 0
    text = page.read_text("utf-8")
    assert "<svg" in text
    assert "memory.available" in text
    assert "4Gi (soft, 30s)" in text
    assert "evicted" in text
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a recording, or a server with --prometheus"),
        (["FILE", "--prometheus", "http://127.0.0.1:1", "--node", "n"], "--prometheus: cannot be combined with FILE"),
        (["--prometheus", "http://127.0.0.1:1"], "--prometheus: needs --node"),
        (["FILE", "--node", "n"], "--node: needs --prometheus"),
    ],
)
def test_a_wrong_combination_of_options_is_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    named = write_config(tmp_path / "c.yaml", "2Gi")
    for command in (["replay", "--config", named], ["tune"]):
        assert cli.main([command[0], *words, *command[1:]]) == 64
        assert message in capsys.readouterr().err


def test_a_server_that_does_not_answer_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = write_config(tmp_path / "c.yaml", "2Gi")
    server = ["--prometheus", "http://127.0.0.1:1", "--node", "n"]
    assert cli.main(["replay", *server, "--config", named]) == 3
    assert "Connection refused" in capsys.readouterr().err
    assert cli.main(["tune", *server, "--since", "1h", "--step", "2h"]) == 3
    assert "0 samples" in capsys.readouterr().err


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_damaged_recording_gives_a_report_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("hostile")
    path = directory / "samples-1.rec"
    samples = [RecordedSample(snapshot(view("a", GI), at=NOW + n, available={Signal.MEMORY: GI})) for n in range(4)]
    recordings.write_recording(path, HEADER, samples)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(bytes(content[: data.draw(st.integers(0, len(content)))]))
    named = write_config(directory / "c.yaml", "2Gi")
    assert cli.main(["replay", str(path), "--config", named]) in (0, 3)
    assert cli.main(["tune", str(path)]) in (0, 3)
