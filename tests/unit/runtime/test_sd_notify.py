"""The service manager hears what sd_notify(3) says it should, and its absence never hurts."""

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
        told = sd_notify.notifier({"NOTIFY_SOCKET": manager.getsockname()})
        told.ready()
        told.alive()
        told.status("two\nlines")
        told.stopping()
        received = [manager.recv(4096) for _ in range(4)]
        told.close()
    assert received == [b"READY=1", b"WATCHDOG=1", b"STATUS=two lines", b"STOPPING=1"]


def test_a_reload_carries_the_monotonic_time_of_its_start(manager: socket.socket) -> None:
    with manager:
        told = sd_notify.notifier({"NOTIFY_SOCKET": manager.getsockname()})
        told.reloading()
        lines = manager.recv(4096).decode().split("\n")
        told.close()
    assert lines[0] == "RELOADING=1"
    assert lines[1].startswith("MONOTONIC_USEC=")
    assert int(lines[1].split("=")[1]) > 0


def test_a_manager_that_is_gone_does_not_hurt(manager: socket.socket, tmp_path: Path) -> None:
    told = sd_notify.notifier({"NOTIFY_SOCKET": str(tmp_path / "notify")})
    manager.close()
    told.alive()
    told.close()


def test_an_abstract_socket_is_reached_by_its_leading_at_sign() -> None:
    name = f"nodeagent-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("\0" + name)
        receiver.settimeout(5)
        told = sd_notify.notifier({"NOTIFY_SOCKET": "@" + name})
        told.ready()
        assert receiver.recv(100) == b"READY=1"
        told.close()


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
def test_the_watchdog_interval_is_taken_only_when_it_is_meant_for_us(
    environ: dict[str, str], expected: float | None
) -> None:
    told = sd_notify.notifier({"NOTIFY_SOCKET": "/nowhere", **environ})
    assert told.watchdog_s == expected
    told.close()


def test_without_a_service_manager_nothing_is_sent_and_nothing_is_watched() -> None:
    assert isinstance(sd_notify.notifier({}), sd_notify.NullNotifier)
