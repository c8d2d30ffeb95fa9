"""A log line is one line, is not repeated, and never waits for its reader."""

import json
import os
import threading
import time
from typing import Any

import pytest

from nodeagent.runtime import workers
from nodeagent.telemetry import log


class Pipe:
    """A pipe with an optional reader."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()

    def lines(self) -> list[bytes]:
        os.close(self.writer)
        with os.fdopen(self.reader, "rb") as file:
            return file.read().splitlines()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def pipe() -> Pipe:
    return Pipe()


def _events(lines: list[bytes]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines]


def test_an_event_is_one_json_object_with_level_and_utc_time(pipe: Pipe) -> None:
    logger, writer = log.open_log(level="info", style="json", fd=pipe.writer)
    logger.warning("threshold met", signal="memory.available", available=5)
    writer.close()
    [event] = _events(pipe.lines())
    assert event["event"] == "threshold met"
    assert event["level"] == "warning"
    assert event["available"] == 5
    assert event["timestamp"].endswith("Z")


def test_levels_below_the_configured_one_are_not_written(pipe: Pipe) -> None:
    logger, writer = log.open_log(level="warning", style="json", fd=pipe.writer)
    logger.info("calm")
    logger.error("storm")
    writer.close()
    assert [event["event"] for event in _events(pipe.lines())] == ["storm"]


@pytest.mark.parametrize("style", ["json", "console"])
def test_text_from_pods_can_neither_forge_a_line_nor_move_the_cursor(pipe: Pipe, style: str) -> None:
    logger, writer = log.open_log(level="info", style=style, fd=pipe.writer)
    logger.info("evicted", pod="ns/\x1b[2Jname\nfake line")
    writer.close()
    [line] = pipe.lines()
    assert b"\x1b[2J" not in line


@pytest.mark.parametrize("style", ["json", "console"])
def test_no_character_of_a_name_reaches_a_terminal_that_is_not_printable(pipe: Pipe, style: str) -> None:
    logger, writer = log.open_log(level="info", style=style, fd=pipe.writer)
    odd = "".join(map(chr, [*range(0x20), *range(0x7F, 0xA1), 0x202E, 0x2028, 0xE0001, 0xFEFF])) + "日本"
    logger.info("note", message=odd, spared={odd: odd}, items=[odd])
    writer.close()
    [line] = pipe.lines()
    assert line.decode().isprintable()
    assert "日本" in line.decode()
    if style == "json":
        event = json.loads(line)
        assert (event["message"], event["spared"], event["items"]) == (odd, {odd: odd}, [odd])


@pytest.mark.parametrize("style", ["json", "console"])
def test_a_name_that_is_no_utf8_is_written_and_ends_nothing(pipe: Pipe, style: str) -> None:
    logger, writer = log.open_log(level="info", style=style, fd=pipe.writer)
    logger.info("note", message="a\udcffb", spared={"n\udc80": ("t\udcfe", 1)})
    writer.close()
    [line] = pipe.lines()
    for part in (rb"a\udcffb", rb"n\udc80", rb"t\udcfe"):
        assert part in line.replace(rb"\\", b"\\")


def test_a_lasting_fact_is_logged_once_and_later_again_with_its_count(pipe: Pipe) -> None:
    clock = Clock()
    logger, writer = log.open_log(level="info", style="json", fd=pipe.writer, clock=clock)
    for second in range(700):
        clock.now = float(second)
        logger.info("cannot read", once="mount")
    logger.info("cannot read", once="another mount")
    writer.close()
    events = _events(pipe.lines())
    assert [event.get("repeated") for event in events] == [None, 299, 299, None]


def test_more_lasting_facts_than_the_bound_are_counted_and_do_not_flood_the_log(pipe: Pipe) -> None:
    clock = Clock()
    logger, writer = log.open_log(level="info", style="json", fd=pipe.writer, clock=clock)
    received = bytearray()

    def read() -> None:
        while chunk := os.read(pipe.reader, 1 << 20):
            received.extend(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    for second in range(3):
        clock.now = float(second)
        for number in range(log.REPEAT_KEYS + 100):
            logger.info("note", number=number, once=str(number))
    clock.now = log.LOG_REPEAT_S + 1.0
    logger.info("note", number=-1, once="new")
    writer.close(timeout_s=10)
    os.close(pipe.writer)
    reader.join(10)
    os.close(pipe.reader)
    events = _events(bytes(received).splitlines())
    notes = [event for event in events if event["event"] == "note"]
    dropped = sum(event["count"] for event in events if event["event"] != "note")
    assert len(notes) + dropped == log.REPEAT_KEYS + 1, "each that is remembered once, and the new one"
    assert notes[-1]["others_suppressed"] == 300


def test_logging_does_not_wait_for_a_reader_that_does_not_read(pipe: Pipe) -> None:
    logger, writer = log.open_log(level="info", style="json", fd=pipe.writer)
    done = threading.Event()

    def storm() -> None:
        for number in range(3 * log.QUEUE_LINES):
            logger.info("storm", number=number, filler="x" * 200)
        done.set()

    threading.Thread(target=storm, daemon=True).start()
    assert done.wait(30), "the logger waited for the pipe"
    assert writer.dropped > 0
    drained = threading.Thread(target=lambda: os.read(pipe.reader, 1 << 24))
    drained.start()
    drained.join(10)
    assert not drained.is_alive()
    os.close(pipe.reader)  # the writer thread gets EPIPE and ends on close
    writer.close(timeout_s=10)
    os.close(pipe.writer)


def test_what_was_dropped_is_counted_in_the_log(pipe: Pipe) -> None:
    writer = log.LineWriter(pipe.writer)
    filler = b"x" * 1000
    while writer.dropped < 10:
        writer.line(filler)
    received = bytearray()

    def read() -> None:
        while chunk := os.read(pipe.reader, 1 << 20):
            received.extend(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    writer.close(timeout_s=10)
    os.close(pipe.writer)
    reader.join(10)
    os.close(pipe.reader)
    reports = [json.loads(line) for line in bytes(received).splitlines() if line.startswith(b"{")]
    assert sum(event["count"] for event in reports) >= 10
    assert writer.dropped_total == sum(event["count"] for event in reports)


def test_a_log_without_a_reader_is_a_stuck_worker(pipe: Pipe) -> None:
    logger, writer = log.open_log(level="info", style="json", fd=pipe.writer)
    logger.info("unread", filler="x" * (1 << 20))  # more than a pipe holds
    deadline = time.monotonic() + 20
    while not (
        reports := [each.message for each in workers.stuck_workers(time.monotonic() + 31) if each.name == "log"]
    ):
        assert time.monotonic() < deadline
    assert reports == ["stuck in writing the log for more than 30s"]
    assert not [each for each in workers.stuck_workers() if each.name == "log"], "a short pause is nothing"
    os.close(pipe.reader)
    os.close(pipe.writer)
    writer.close(timeout_s=20)
