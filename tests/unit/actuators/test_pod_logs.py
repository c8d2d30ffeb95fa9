"""Only old logs are removed: neither the current log nor the target of a link."""

import os
import time
from pathlib import Path

import pytest

from nodeagent.actuators.pod_logs import RemovedLogs, remove_old_logs
from nodeagent.actuators.reclaim_runner import build_job, read_only_directories
from nodeagent.config.schema import ReclaimAction, ReclaimKind
from nodeagent.model import ReclaimOrder, ReclaimResult, Signal, Tier
from tests.support import mounts

ORDER = ReclaimOrder("old-logs", Signal.NODEFS, Tier.SOFT, 1234, 99, 0.0)


def remove(top: Path, *ended: str, until: float | None = None) -> tuple[int, int, bool]:
    deadline = time.monotonic() + 60 if until is None else until
    removed = remove_old_logs(str(top), ended=lambda pod: pod in ended, until=deadline)
    assert removed == RemovedLogs(*removed[:3]), "nothing was refused"
    return removed[:3]


def container(top: Path, pod: str, name: str, *files: str) -> Path:
    place = top / pod / name
    place.mkdir(parents=True)
    for file in files:
        (place / file).write_bytes(b"x" * 5000)
    return place


def test_logs_of_earlier_starts_are_removed_and_those_of_the_newest_stay(tmp_path: Path) -> None:
    files = ("0.log", "1.log", "1.log.20261121-010203.gz", "2.log", "2.log.20261121-020304", "12.log", "notes.txt")
    place = container(tmp_path, "shop_web_u1", "web", *files)
    assert remove(tmp_path) == (5, 5 * 8192, True)
    assert sorted(os.listdir(place)) == ["12.log", "notes.txt"]
    assert remove(tmp_path) == (0, 0, True)


def test_of_a_running_container_even_rotated_logs_stay(tmp_path: Path) -> None:
    place = container(tmp_path, "shop_web_u1", "web", "0.log", "0.log.20261121-010203")
    assert remove(tmp_path) == (0, 0, True)
    assert len(os.listdir(place)) == 2


def test_of_an_ended_pod_only_the_newest_log_stays(tmp_path: Path) -> None:
    place = container(tmp_path, "shop_job_u2", "job", "0.log", "0.log.20261121-010203", "0.log.20261121-010203.gz")
    assert remove(tmp_path, "shop_job_u2") == (2, 2 * 8192, True)
    assert os.listdir(place) == ["0.log"]


def test_links_and_special_files_are_neither_followed_nor_removed(tmp_path: Path) -> None:
    outside = container(tmp_path / "outside", "pod", "c", "0.log", "1.log")
    top = tmp_path / "pods"
    place = container(top, "shop_web_u1", "web", "5.log")
    (place / "1.log").symlink_to(outside / "0.log")
    (place / "2.log").mkdir()
    os.mkfifo(place / "3.log")
    (top / "shop_web_u1" / "link").symlink_to(outside)
    (top / "link").symlink_to(outside.parent)
    assert remove(top) == (0, 0, True)
    assert sorted(os.listdir(outside)) == ["0.log", "1.log"]
    assert sorted(os.listdir(place)) == ["1.log", "2.log", "3.log", "5.log"]


def test_a_log_with_a_second_hard_link_frees_nothing(tmp_path: Path) -> None:
    place = container(tmp_path, "shop_web_u1", "web", "0.log", "1.log")
    os.link(place / "0.log", tmp_path / "kept")
    assert remove(tmp_path) == (1, 0, True)


def test_the_deadline_is_kept_and_reported(tmp_path: Path) -> None:
    place = container(tmp_path, "shop_web_u1", "web", "0.log", "1.log")
    assert remove(tmp_path, until=time.monotonic() - 1) == (0, 0, False)
    assert len(os.listdir(place)) == 2


def test_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        remove(tmp_path / "none")


@mounts.root_only
def test_a_read_only_directory_is_a_failure_that_names_the_file(tmp_path: Path) -> None:
    container(tmp_path, "shop_web_u1", "web", "0.log", "1.log", "2.log")
    action = ReclaimAction("old-logs", kind=ReclaimKind.CONTAINER_LOGS)
    directories = {ReclaimKind.CONTAINER_LOGS: (f"{tmp_path}/none", str(tmp_path))}
    assert read_only_directories([action], directories) == ()
    with mounts.mounted(tmp_path, "-o", "bind,ro", tmp_path):
        ended = build_job(
            action, ORDER, pod_logs_dir=lambda: str(tmp_path), cri_socket=lambda: "", ended=lambda _: False
        )(time.monotonic() + 60)
        (note,) = read_only_directories([action], directories)
        one_writable = {ReclaimKind.CONTAINER_LOGS: (str(tmp_path), str(tmp_path.parent))}
        assert read_only_directories([action], one_writable) == ()
    assert ended.result is ReclaimResult.FAILED
    first = f"{tmp_path}/shop_web_u1/web/0.log: Read-only file system"
    assert ended.message in [
        f"removed 0 files, 0 bytes; 2 could not be removed, first {first.replace('0.log', name)}"
        for name in ("0.log", "1.log")
    ]
    assert note.message.startswith(f"old-logs will fail: {tmp_path} is read-only where the agent runs (")
