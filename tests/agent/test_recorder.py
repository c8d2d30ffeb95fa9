"""The real program records samples: through kill -9 and a restart, and beside a disk that is full."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent.records.recording import open_recording
from tests.support.livenode import Run, until

CONFIG = "apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\nlogging: {format: json}\n"


def start(directory: Path, name: str, *, samples: str = "") -> Run:
    config = directory / "nodeagent.yaml"
    config.write_text(f"{CONFIG}stateDir: {directory / 'state'}\nrecorder: {{dir: '{samples}', maxBytes: 1Mi}}\n")
    dropped = ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "NODE_NAME", "NODEAGENT_MODE", "HOME")
    environ = {key: value for key, value in os.environ.items() if key not in dropped}
    return Run("--dry-run", "--config", str(config), log=directory / f"{name}.log", environ=environ)


def count(path: Path) -> int:
    return open_recording(path).count if list(path.glob("**/samples-*.rec")) else 0


def test_a_killed_agent_leaves_a_readable_recording_and_the_next_one_continues_it(tmp_path: Path) -> None:
    state, before = tmp_path / "state", 0
    zombie = subprocess.Popen(["true"])
    for name in ("first", "second"):
        run = start(tmp_path, name)
        try:
            until(lambda least=before + 3: count(state) >= least, "three more samples")  # type: ignore[misc]
        finally:
            run.kill()
        before = count(state)
    zombie.wait()
    found = open_recording(state)
    times = [sample.wall_time for sample in found.samples()]
    assert len(times) >= 6
    assert any(sample.zombies for sample in found.samples())
    assert times == sorted(times)
    assert len(found.headers) == 2
    assert all("incomplete" in each for each in found.trouble)


def test_samples_after_a_reload_name_the_new_configuration(tmp_path: Path) -> None:
    run, state = start(tmp_path, "reloaded"), tmp_path / "state"
    try:
        until(lambda: count(state) >= 1, "a sample")
        config = tmp_path / "nodeagent.yaml"
        config.write_text(f"{config.read_text()}evictionHard: {{memory.available: 123Mi}}\n")
        run.process.send_signal(signal.SIGHUP)
        until(lambda: "123Mi" in open_recording(state).headers[-1].configuration, "a sample after the reload")
        assert run.stop() == 0
    finally:
        run.kill()
    before, after = open_recording(state).headers
    assert "123Mi" not in before.configuration
    assert (before.instance, before.boot_id) == (after.instance, after.boot_id)
    assert before.began_wall < after.began_wall


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "disk"
    directory.mkdir()
    if os.geteuid() or subprocess.call(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(directory)]):
        pytest.skip("cannot mount a tmpfs")
    fd = os.open(directory / "ballast", os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(fd, bytes(4096))
    except OSError:
        os.close(fd)
    try:
        yield directory
    finally:
        subprocess.check_call(["umount", "-l", str(directory)])


def test_an_agent_beside_a_full_disk_decides_and_keeps_its_samples_in_memory(full_disk: Path, tmp_path: Path) -> None:
    run = start(tmp_path, "full", samples=str(full_disk / "samples"))
    try:
        until(lambda: [each for each in run.logged("note") if each["subject"] == "recorder"], "the note")
        assert "short of space" in str(run.logged("note"))
        assert run.logged("signal changed")
        (full_disk / "ballast").unlink()
        assert run.stop() == 0
    finally:
        run.kill()
