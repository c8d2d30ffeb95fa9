"""`nodeagent snapshot`: one whole file or none, of the time that is wanted, without secrets and, on request, names."""

import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from nodeagent.commands import cli, exit_codes, snapshot
from nodeagent.config import load
from nodeagent.model import Outcome, OutcomeKind
from nodeagent.records import recording
from nodeagent.records.flight_recorder import FlightRecorder
from nodeagent.records.recording import open_recording
from nodeagent.records.segment_files import SegmentFiles
from tests.support import named_node, nodes, recorded_samples, recordings

SECRET = "s3cr3t-t0ken"


def recorded(directory: Path, *, count: int = 120) -> Path:
    """A state directory with two minutes of samples and a decision in the middle."""
    taken = named_node.sample()
    samples = [
        taken._replace(
            snapshot=taken.snapshot._replace(taken_at=nodes.NOW + index, wall_time=nodes.WALL + index),
            plan_id="",
            exact=False,
        )
        for index in range(count)
    ]
    plan, inputs, _ = named_node.decision()
    samples[60] = samples[60]._replace(plan_id=plan.id, exact=True)
    (directory / "samples").mkdir(parents=True)
    recordings.write_recording(directory / "samples" / "samples-1.rec", named_node.header(), samples)
    recorder = FlightRecorder(directory)
    recorder.decision(plan, wall_time=nodes.WALL + 60, inputs=inputs)
    outcome = Outcome(plan.id, named_node.UID, OutcomeKind.ACCEPTED, "evicted", nodes.NOW + 61)
    recorder.outcome(outcome, wall_time=nodes.WALL + 61)
    return directory


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return recorded(tmp_path / "state")


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A host with a kubelet's configuration that contains a secret."""
    root = tmp_path / "host"
    for path, text in {
        "var/lib/kubelet/config.yaml": "evictionHard: {memory.available: 200Mi}\n"
        f"staticPodURLHeader: {{Authorization: [{SECRET}]}}\n",
        "etc/os-release": 'PRETTY_NAME="Debian GNU/Linux 12"\n',
        "proc/cmdline": f"root=/dev/sda password={SECRET}\n",
        "proc/sys/vm/min_free_kbytes": "67584\n",
        "proc/meminfo": "MemTotal: 16384 kB\n",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def run(*words: object, code: int = 0) -> None:
    assert cli.main(["snapshot", *map(str, words)]) == code


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as file:
        return {info.filename: file.read(info) for info in file.infolist()}


def everything(path: Path) -> bytes:
    """What is in the file, unpacked as far as it can be."""
    found = open_recording(path)
    parts: list[Any] = [list(found.headers), list(found.samples()), list(found.records())]
    return b"".join([repr(parts).encode(), *members(path).values()])


def test_the_whole_recording_is_in_the_file(
    state: Path, host: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "ticket.zip"
    run("--state-dir", state, "--host-root", host, "-o", out)
    assert capsys.readouterr() == (f"{out}\n", "")
    assert os.stat(out).st_mode & 0o777 == 0o600
    before, after = open_recording(state), open_recording(out)
    assert list(after.samples()) == list(before.samples())
    assert list(after.records()) == list(before.records())
    assert after.headers == before.headers
    found = members(out)
    manifest = json.loads(found["manifest.json"])
    assert (manifest["node"], manifest["reason"], manifest["missing"]) == (before.headers[0].node, "command", [])
    assert found["config.yaml"].decode() == named_node.CONFIGURATION
    kubelet = json.loads(found["kubelet.json"])
    assert kubelet["files"] == [
        {"path": "/var/lib/kubelet/config.yaml", "settings": {"evictionHard": {"memory.available": "200Mi"}}}
    ]
    facts = json.loads(found["facts.json"])
    assert facts["now"]["/proc/sys/vm/min_free_kbytes"] == "67584"
    assert facts["recorded"]["abcd1234"]["kernel"] == "6.1.0-18-amd64 x86_64"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["ticket.zip"]


@pytest.mark.parametrize(
    ("hook", "shown"),
    [
        (f"{{command: [/usr/bin/dump, {SECRET}]}}", '["/usr/bin/dump", "(arguments hidden)"]'),
        (f"{{url: 'https://hooks.example:8443/{SECRET}'}}", '"https://hooks.example:8443/(hidden)"'),
        (f"{{url: 'https://hooks.example?token={SECRET}'}}", '"https://hooks.example/(hidden)"'),
    ],
)
def test_no_secret_is_in_the_file(
    hook: str, shown: str, state: Path, host: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_ENVIRONMENT", SECRET)
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(f"token: {SECRET}")
    config = tmp_path / "config.yaml"
    config.write_text(
        "apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\n"
        f"cluster: {{kubeconfig: {kubeconfig}}}\n"
        f"reclaim: {{actions: [{{name: hook, command: [/usr/bin/curl, -H, 'Authorization: {SECRET}']}}]}}\n"
        f"hooks: {{beforeEviction: {hook}}}\n"
    )
    (state / "samples" / "samples-1.rec").unlink()
    header = named_node.header()._replace(configuration="")
    recordings.write_recording(state / "samples" / "samples-1.rec", header, [named_node.sample()])
    out = tmp_path / "ticket.zip"
    run("--state-dir", state, "--host-root", host, "--config", config, "-o", out)
    assert SECRET.encode() not in everything(out)
    text = members(out)["config.yaml"].decode()
    assert '["/usr/bin/curl", "(arguments hidden)"]' in text
    assert shown in text
    assert load.loads(text).config.reclaim.actions[0].name == "hook"


def test_no_name_is_in_the_file_with_pseudonyms(state: Path, host: Path, tmp_path: Path) -> None:
    plain, out = tmp_path / "plain.zip", tmp_path / "ticket.zip"
    run("--state-dir", state, "--host-root", host, "-o", plain)
    run("--state-dir", state, "--host-root", host, "-o", out, "--pseudonyms")
    assert set(named_node.leaks(everything(plain))) >= set(named_node.NAMES) - {"10.11.12.13"}
    assert named_node.leaks(everything(out)) == []
    assert named_node.leaks(out.read_bytes()) == []
    assert json.loads(members(out)["manifest.json"])["pseudonyms"] is True
    before, after = open_recording(plain), open_recording(out)
    assert [each.snapshot.observations for each in after.samples()] == [
        each.snapshot.observations for each in before.samples()
    ]
    assert [each.plan_id for each in after.samples()] == [each.plan_id for each in before.samples()]
    assert load.loads(members(out)["config.yaml"].decode()).config.node_name == after.headers[0].node


def test_the_time_around_a_decision_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = recorded(tmp_path / "state")
    later = [recorded_samples.sample(1500 + index) for index in range(5)]
    recordings.write_recording(state / "samples" / "samples-2.rec", recorded_samples.HEADER, later)
    out = tmp_path / "ticket.zip"
    for wanted in ("last", "abcd1234-1", "abcd"):
        run("--state-dir", state, "--around", wanted, "-o", out, "--force", "--host-root", tmp_path)
        manifest = json.loads(members(out)["manifest.json"])
        assert manifest["id"] == "abcd1234-1"
        assert (manifest["since"], manifest["until"]) == (nodes.WALL + 60 - 900, nodes.WALL + 60 + 300)
        assert [each["record"] for each in open_recording(out).records()] == ["decision", "outcome"]
        times = [sample.wall_time for sample in open_recording(out).samples()]
        assert times[0] == nodes.WALL
        assert times[-1] == nodes.WALL + 119, "the group a quarter of an hour later is left out"
    capsys.readouterr()
    run("--state-dir", state, "--around", "zzz", "-o", out, "--force", code=exit_codes.UNKNOWN)
    assert capsys.readouterr().err == "nodeagent: zzz: no such decision; `nodeagent explain` lists the recorded ones\n"


def test_a_time_without_samples_has_none(state: Path, tmp_path: Path) -> None:
    out = tmp_path / "ticket.zip"
    run("--state-dir", state, "--since", "2030-01-01T00:00:00Z", "-o", out, "--host-root", tmp_path)
    assert (list(open_recording(out).samples()), list(open_recording(out).records())) == ([], [])


def test_a_node_without_a_recording_has_configuration_and_facts(
    tmp_path: Path, host: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "ticket.zip"
    run("--state-dir", tmp_path / "missing", "--host-root", host, "-o", out)
    error = capsys.readouterr().err
    assert error.startswith("nodeagent: not included: no samples and no decisions: ")
    assert sorted(members(out)) == ["config.yaml", "facts.json", "kubelet.json", "manifest.json"]
    assert len(json.loads(members(out)["manifest.json"])["missing"]) == 1


@pytest.mark.parametrize("around", [[], ["--around", "last"]])
def test_a_directory_of_samples_that_does_not_exist_costs_the_samples_alone(
    state: Path, tmp_path: Path, around: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(state / "samples")
    config, out, nowhere = tmp_path / "config.yaml", tmp_path / "ticket.zip", tmp_path / "nowhere"
    header = "apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\n"
    config.write_text(f"{header}stateDir: {state}\nrecorder: {{dir: {nowhere}}}\n")
    run("--config", config, "--host-root", tmp_path, "-o", out, *around)
    assert [each["record"] for each in open_recording(out).records()] == ["decision", "outcome"]
    missing = f"no samples of recorder.dir: {nowhere}: No such file or directory"
    assert json.loads(members(out)["manifest.json"])["missing"] == [missing]
    assert capsys.readouterr().err == f"nodeagent: not included: {missing}\n"


def test_what_a_process_that_restarts_again_and_again_leaves_is_read(tmp_path: Path) -> None:
    samples = tmp_path / "state" / "samples"
    for number in range(150):
        files = SegmentFiles(samples, max_bytes=8 << 20)
        files.open_segment(b"".join(recording.encode(recorded_samples.HEADER, [])))
        [first] = itertools.islice(recording.encode(recorded_samples.HEADER, [recorded_samples.sample(number)]), 1, 2)
        files.complete_group(first)
        files.append_entry(first)
        files.close()
    out = tmp_path / "ticket.zip"
    run("--state-dir", tmp_path / "state", "-o", out, "--host-root", tmp_path)
    assert list(open_recording(out).samples()) == list(open_recording(tmp_path / "state").samples())


def test_an_existing_file_and_a_directory_stay(state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ticket.zip"
    out.write_text("mine")
    run("--state-dir", state, "-o", out, code=exit_codes.USAGE)
    assert capsys.readouterr().err == f"nodeagent: {out}: exists already; --force replaces it\n"
    assert out.read_text() == "mine"
    run("--state-dir", state, "-o", tmp_path, code=exit_codes.USAGE)
    assert capsys.readouterr().err == f"nodeagent: {tmp_path}: it is a directory; name a file in it\n"


def test_a_place_that_cannot_be_written_is_an_error_and_leaves_nothing(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("--state-dir", state, "-o", tmp_path / "no" / "ticket.zip", code=exit_codes.UNKNOWN)
    assert "cannot be written: No such file or directory" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_the_default_name_has_the_node_and_the_time(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run("--state-dir", state)
    name = capsys.readouterr().out.strip()
    assert re.fullmatch(r"nodeagent-node-17\.emea\.contoso\.example-\d{8}T\d{6}Z\.zip", name)
    assert (tmp_path / name).exists()


def test_the_default_name_has_no_name_of_the_node_with_pseudonyms(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run("--state-dir", state, "--pseudonyms")
    assert re.fullmatch(r"nodeagent-node-\d{8}T\d{6}Z\.zip", capsys.readouterr().out.strip())


def test_a_recorded_name_of_the_node_is_no_path() -> None:
    assert snapshot.default_name("../../etc/\x1bx", wall=0.0) == "nodeagent-.._.._etc__x-19700101T000000Z.zip"
    assert len(snapshot.default_name("n" * 5000, wall=0.0)) < 255


def test_standard_output_is_a_pipe(state: Path) -> None:
    words = [sys.executable, "-m", "nodeagent", "snapshot", "--state-dir", str(state), "-o", "-"]
    ran = subprocess.run(words, capture_output=True, check=True, timeout=60)
    with zipfile.ZipFile(io.BytesIO(ran.stdout)) as file:
        assert "manifest.json" in file.namelist()
    assert ran.stderr == b""


def test_a_reader_that_leaves_early_is_no_failure_of_ours(state: Path) -> None:
    words = f"{sys.executable} -m nodeagent snapshot --state-dir {state} -o - | head -c 10 >/dev/null"
    ran = subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=True, timeout=60)
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("command", ["explain", "check", "replay"])
def test_the_other_commands_read_the_file(
    state: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out, config = tmp_path / "ticket.zip", tmp_path / "config.yaml"
    run("--state-dir", state, "-o", out)
    header = "apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\n"
    config.write_text(f"{header}evictionHard: {{memory.available: 1Gi}}\n")
    words = {
        "explain": ["explain", "last", "--state-dir", str(out)],
        "check": ["check", "--recording", str(out)],
        "replay": ["replay", str(out), "--config", str(config)],
    }[command]
    capsys.readouterr()
    assert cli.main(words) in (exit_codes.OK, exit_codes.HARD)
    text = capsys.readouterr()
    assert "abcd1234-1" in text.out or command == "check"
    assert "checkout-7d9f8b6c5d-x2x4z" in text.out


def test_a_recording_of_many_samples_keeps_them_in_order(tmp_path: Path) -> None:
    state = tmp_path / "state"
    (state / "samples").mkdir(parents=True)
    for number in (1, 2, 10):
        header = recorded_samples.HEADER._replace(instance=f"i{number}")
        samples = [recorded_samples.sample(number * 100 + index) for index in range(5)]
        recordings.write_recording(state / "samples" / f"samples-{number}.rec", header, samples)
    for more in ([], ["--pseudonyms"]):
        out = tmp_path / f"{len(more)}.zip"
        run("--state-dir", state, "-o", out, *more)
        times = [sample.wall_time for sample in open_recording(out).samples()]
        assert times == sorted(times)
        assert len(times) == 15
        assert [header.instance for header in open_recording(out).headers] == ["i1", "i2", "i10"]
