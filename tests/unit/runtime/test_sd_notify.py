"""The service manager receives the notifications of sd_notify(3), and its absence is no error."""

import os
import socket
from pathlib import Path

import pytest

from nodeagent.runtime import sd_notify


@pytest.fixture
def manager(tmp_path: Path) -> socket.socket:
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    receiver.bind(str(tmp_path / "notify"))
    receiver.settimeout(5)
    return receiver


def test_ready_alive_status_and_stopping_arrive_as_datagrams(manager: socket.socket) -> None:
    with manager:
        notifier = sd_notify.open_notifier({"NOTIFY_SOCKET": manager.getsockname()})
        notifier.ready()
        notifier.alive()
        notifier.status("two\nlines")
        notifier.stopping()
        received = [manager.recv(4096) for _ in range(4)]
        notifier.close()
    assert received == [b"READY=1", b"WATCHDOG=1", b"STATUS=two lines", b"STOPPING=1"]


def test_a_reload_carries_the_monotonic_time_of_its_start(manager: socket.socket) -> None:
    with manager:
        notifier = sd_notify.open_notifier({"NOTIFY_SOCKET": manager.getsockname()})
        notifier.reloading()
        lines = manager.recv(4096).decode().split("\n")
        notifier.close()
    assert lines[0] == "RELOADING=1"
    assert lines[1].startswith("MONOTONIC_USEC=")
    assert int(lines[1].split("=")[1]) > 0


def test_a_missing_manager_is_no_error(manager: socket.socket, tmp_path: Path) -> None:
    notifier = sd_notify.open_notifier({"NOTIFY_SOCKET": str(tmp_path / "notify")})
    manager.close()
    notifier.alive()
    notifier.close()


def test_an_address_with_an_at_sign_is_an_abstract_socket() -> None:
    name = f"nodeagent-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("\0" + name)
        receiver.settimeout(5)
        notifier = sd_notify.open_notifier({"NOTIFY_SOCKET": "@" + name})
        notifier.ready()
        assert receiver.recv(100) == b"READY=1"
        notifier.close()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_the_watchdog_interval_counts_only_for_its_own_process(environ: dict[str, str], expected: float | None) -> None:
    notifier = sd_notify.open_notifier({"NOTIFY_SOCKET": "/nowhere", **environ})
    assert notifier.watchdog_s == expected
    notifier.close()


def test_without_a_service_manager_nothing_is_sent_and_there_is_no_watchdog() -> None:
    assert isinstance(sd_notify.open_notifier({}), sd_notify.NullNotifier)
