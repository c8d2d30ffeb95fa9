"""State is restored completely from the same boot and version, and otherwise not at all."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.records.state_file import StateFile, Trust
from tests.support.paths import REPOSITORY


class Bucket(NamedTuple):
    tokens: float
    at: float


class State(NamedTuple):
    sequence: int
    buckets: Mapping[str, Bucket] = {}
    note: str | None = None


class Wider(NamedTuple):
    sequence: int
    buckets: Mapping[str, Bucket] = {}
    note: str | None = None
    more: int = 0


STATE = State(7, {"node": Bucket(1.5, 1234.5), "namespace/dëfault": Bucket(0.0, 0.0)}, None)


def _file(directory: Path, *, boot_id: str = "boot-1", shape: type = State) -> StateFile:
    return StateFile(directory / "state", shape=shape, boot_id=boot_id)


def test_a_saved_state_is_restored(tmp_path: Path) -> None:
    _file(tmp_path).save(STATE)
    loaded = _file(tmp_path).load()
    assert (loaded.trust, loaded.value) == (Trust.RESTORED, STATE)
    assert isinstance(loaded.value.buckets["node"], Bucket)


def test_a_first_start_a_lost_state_and_a_corrupt_one_are_distinct(tmp_path: Path) -> None:
    assert _file(tmp_path / "not-made-yet").load().trust is Trust.FIRST
    assert _file(tmp_path).load().trust is Trust.FIRST
    (tmp_path / "decisions.jsonl").touch()
    lost = _file(tmp_path).load()
    assert lost.trust is Trust.LOST
    assert "decisions.jsonl" in lost.message
    (tmp_path / "state").mkdir()
    assert _file(tmp_path).load().trust is Trust.CORRUPT


def test_state_from_before_a_reboot_is_not_used(tmp_path: Path) -> None:
    _file(tmp_path).save(STATE)
    loaded = _file(tmp_path, boot_id="boot-2").load()
    assert (loaded.trust, loaded.value) == (Trust.OTHER_BOOT, None)


def test_state_of_another_shape_is_not_used(tmp_path: Path) -> None:
    _file(tmp_path).save(STATE)
    loaded = _file(tmp_path, shape=Wider).load()
    assert loaded.trust is Trust.CORRUPT
    assert "shape" in loaded.message


@given(st.data())
def test_every_damage_is_detected(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = tmp_path_factory.mktemp("damage")
    written = _file(directory)
    written.save(STATE)
    written.close()
    path = directory / "state"
    saved = path.read_bytes()
    kind = data.draw(st.sampled_from(["cut", "flip", "append"]))
    if kind == "cut":
        damaged = saved[: data.draw(st.integers(0, len(saved) - 1))]
    elif kind == "append":
        damaged = saved + data.draw(st.binary(min_size=1, max_size=40))
    else:
        position = data.draw(st.integers(0, len(saved) - 1))
        damaged = saved[:position] + bytes([saved[position] ^ data.draw(st.integers(1, 255))]) + saved[position + 1 :]
    path.write_bytes(damaged)
    loaded = _file(directory).load()
    assert loaded.trust in (Trust.CORRUPT, Trust.OTHER_BOOT) or not damaged
    assert loaded.value is None
    assert str(path) in loaded.message


def test_a_failed_save_keeps_the_old_state_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    _file(tmp_path).save(STATE)
    (tmp_path / "state.new").mkdir()
    with pytest.raises(IsADirectoryError):
        _file(tmp_path).save(STATE._replace(sequence=8))
    assert _file(tmp_path).load().value == STATE


def test_the_file_is_private(tmp_path: Path) -> None:
    _file(tmp_path).save(STATE)
    assert (tmp_path / "state").stat().st_mode & 0o077 == 0


def test_a_process_killed_while_saving_leaves_the_old_or_the_new_state(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import sys
        from pathlib import Path
        from typing import NamedTuple
        from nodeagent.records.state_file import StateFile
        Bucket = NamedTuple("Bucket", [("tokens", float), ("at", float)])
        class State(NamedTuple):
            sequence: int
            buckets: dict[str, Bucket] = {}
            note: str | None = None
        file = StateFile(Path(sys.argv[1]) / "state", shape=State, boot_id="boot-1")
        buckets = {"node": Bucket(1.5, 1234.5)}
        sequence = 0
        while True:
            sequence += 1
            file.save(State(sequence, buckets, "x" * (sequence % 5000)))
            if sequence == 20:
                print("going", flush=True)
    """)
    for _ in range(5):
        with subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, cwd=REPOSITORY
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"going\n"
            os.kill(process.pid, signal.SIGKILL)
        loaded = _file(tmp_path).load()
        assert loaded.trust is Trust.RESTORED
        assert loaded.value.sequence >= 20


def test_a_state_with_a_name_that_is_not_utf8_is_saved(tmp_path: Path) -> None:
    store = _file(tmp_path)
    store.save(STATE._replace(buckets={"namespace/n\udcff": Bucket(1.0, 2.0)}))
    assert store.load().value == STATE._replace(buckets={"namespace/n\\udcff": Bucket(1.0, 2.0)})


def test_a_wiped_state_is_not_restored_and_is_no_first_start(tmp_path: Path) -> None:
    store = _file(tmp_path)
    store.save(STATE)
    assert store.wipe()
    assert _file(tmp_path).load().trust is Trust.LOST
    (tmp_path / "state").unlink()
    assert store.wipe()
    assert _file(tmp_path).load().trust is Trust.LOST


def test_a_removed_directory_is_created_again(tmp_path: Path) -> None:
    store = _file(tmp_path / "run" / "nodeagent")
    store.save(STATE)
    shutil.rmtree(tmp_path / "run")
    store.save(STATE._replace(sequence=8))
    assert _file(tmp_path / "run" / "nodeagent").load().value.sequence == 8


def test_a_directory_that_was_hidden_by_a_mount_returns_without_its_state(tmp_path: Path) -> None:
    """Another directory is mounted over it and unmounted later."""
    directory, hidden = tmp_path / "state", tmp_path / "hidden"
    store = _file(directory)
    store.save(STATE)
    directory.rename(hidden)
    directory.mkdir()
    store.save(STATE._replace(sequence=8))
    assert _file(directory).load().value.sequence == 8
    assert _file(hidden).load().trust is Trust.LOST
