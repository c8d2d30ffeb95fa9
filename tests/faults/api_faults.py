"""The faults of API answers: recorded errors, broken transports, wrong bodies, wrong watches.

A fault acts `instead` of the answer (the server does not carry the request out), on the bytes of the answer (the server
has carried it out), or on the lines of a watch. Each gets `active`, which turns False when the fault has passed;
whatever waits then ends.
"""

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from tests.fake_kube import Answer, CutError
from tests.support.paths import REPOSITORY

Active = Callable[[], bool]
Lines = Iterator[bytes | None]
_RECORDINGS: Final = REPOSITORY / "tests" / "data" / "recordings"
RETRY_AFTER: Final = "503 with Retry-After of a day"
_LATE_S: Final = 0.15
"""Less than the agent's time-out."""
_TOO_LATE_S: Final = 0.6
"""More than it."""
_HTML: Final = b"<html><body><h1>Bad Gateway</h1></body></html>"
_MANY: Final = 10_000
"""Brackets, or bytes of a long line."""


class Fault(NamedTuple):
    """One of the three."""

    instead: Callable[[Active], Answer | None] | None = None
    answer: Callable[[bytes, bytes, Active], Iterator[bytes]] | None = None
    """The bytes to be sent for a head and a body."""
    watch: Callable[[Lines, Active], Lines] | None = None


def _recorded() -> Iterator[tuple[str, Fault]]:
    """Of errors that differ only in their message, one."""
    known = set()
    for path in sorted(_RECORDINGS.glob("*.json")):
        response = json.loads(path.read_text())["response"]
        status, headers = response["status"], dict(response["headers"])
        if status < 400:
            continue
        body = response["body"] if "body" in response else "".join(each["line"] or "" for each in response["lines"])
        content_type = headers.get("Content-Type", "")
        error = json.loads(body) if content_type == "application/json" else {}
        causes = [each.get("reason") for each in error.get("details", {}).get("causes", ())]
        kind = (status, content_type, headers.get("Retry-After"), error.get("reason"), str(causes), "details" in error)
        if kind not in known:
            known.add(kind)
            sent = tuple((name, value) for name, value in headers.items() if name in ("Retry-After", "Warning"))
            answer = Answer(status, body.encode(), content_type, sent)
            yield f"{status} {path.stem}", _always(answer)


def wait(seconds: float, active: Active) -> None:
    """Wait so long, or until the fault has passed."""
    for _ in range(round(seconds / 0.01)):
        if not active():
            return
        threading.Event().wait(0.01)


# --- instead of the answer ------------------------------------------------------------------------------------------


def _late(active: Active) -> None:
    wait(_LATE_S, active)


def _cut(_: Active) -> None:
    raise CutError


def _silent(active: Active) -> None:
    wait(10.0, active)
    raise CutError


def _fixed(status: int, body: bytes, content_type: str = "application/json", *headers: tuple[str, str]) -> Fault:
    return _always(Answer(status, body, content_type, headers))


def _always(answer: Answer) -> Fault:
    return Fault(instead=lambda _: answer)


INSTEAD: Final[dict[str, Fault]] = {
    "late": Fault(instead=_late),
    "cut before it was carried out": Fault(instead=_cut),
    "no answer at all": Fault(instead=_silent),
    "502 of a proxy, not carried out": _fixed(502, _HTML, "text/html"),
    "503 with Retry-After 1": _fixed(503, b"overloaded", "text/plain", ("Retry-After", "1")),
    RETRY_AFTER: _fixed(503, b"overloaded", "text/plain", ("Retry-After", "86400")),
    "429 with a broken Retry-After": _fixed(429, b"slow down", "text/plain", ("Retry-After", "soon")),
    "302 to another server": _fixed(302, b"", "text/html", ("Location", "http://127.0.0.1:1/")),
    "200 with HTML": _fixed(200, _HTML, "text/html"),
    "200 with HTML as JSON": _fixed(200, _HTML),
    "200 with no body": _fixed(200, b""),
    "200 with NUL bytes": _fixed(200, b"\0" * 64),
    "200 with null": _fixed(200, b"null"),
    "200 with {}": _fixed(200, b"{}"),
    "200 with a list": _fixed(200, b"[]"),
    "200 with many brackets": _fixed(200, b"[" * _MANY),
    "200 with a Status of a failure": _fixed(200, b'{"kind":"Status","apiVersion":"v1","status":"Failure","code":500}'),
    "200 with another kind": _fixed(200, b'{"kind":"ConfigMap","apiVersion":"v1","metadata":{"name":"x"}}'),
    "204": _fixed(204, b""),
    "999": _fixed(999, b"{}"),
}


# --- the bytes of the answer ----------------------------------------------------------------------------------------


def _too_late(head: bytes, body: bytes, active: Active) -> Iterator[bytes]:
    wait(_TOO_LATE_S, active)
    yield head + body


def _dripped(head: bytes, body: bytes, active: Active) -> Iterator[bytes]:
    # Slow enough to arrive byte by byte, fast enough for the time-out.
    data = head + body
    pause_s, size = 0.001, max(1, len(data) // 100)
    for at in range(0, len(data), size):
        if active():
            threading.Event().wait(pause_s)
        yield data[at : at + size]


def _dripped_for_ever(head: bytes, body: bytes, active: Active) -> Iterator[bytes]:
    yield head
    for at in range(len(body)):
        wait(0.05, active)
        yield body[at : at + 1]


def _changed(change: Callable[[bytes, bytes], bytes], *, cut: bool) -> Fault:
    def send(head: bytes, body: bytes, _: Active) -> Iterator[bytes]:
        yield change(head, body)
        if cut:
            raise CutError

    return Fault(answer=send)


def _with_body(head: bytes, body: bytes) -> bytes:
    """The head with the length of another body."""
    lines = [line for line in head.split(b"\r\n") if line and not line.lower().startswith(b"content-length:")]
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", b""]) + body


def _stalled(head: bytes, body: bytes, active: Active) -> Iterator[bytes]:
    yield head + body[: len(body) // 2]
    wait(10.0, active)
    raise CutError


BYTES: Final[dict[str, Fault]] = {
    "carried out, answered too late": Fault(answer=_too_late),
    "dripped": Fault(answer=_dripped),
    "dripped for ever": Fault(answer=_dripped_for_ever),
    "carried out, cut before the head": _changed(lambda head, body: b"", cut=True),
    "cut in the head": _changed(lambda head, body: head[: len(head) // 2], cut=True),
    "cut after the head": _changed(lambda head, body: head, cut=True),
    "cut in the body": _changed(lambda head, body: head + body[: len(body) // 2], cut=True),
    "cut before the last byte": _changed(lambda head, body: head + body[:-2], cut=True),
    "stalled in the body": Fault(answer=_stalled),
    "half of the body": _changed(lambda head, body: _with_body(head, body[: len(body) // 2]), cut=False),
    "body doubled": _changed(lambda head, body: _with_body(head, body + body), cut=False),
    "answer doubled": _changed(lambda head, body: (head + body) * 2, cut=False),
    "carried out, 502 of a proxy": _changed(
        lambda head, body: (
            b"HTTP/1.1 502 Bad Gateway\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n%b" % (len(_HTML), _HTML)
        ),
        cut=False,
    ),
    "carried out, 504 of a proxy": _changed(
        lambda head, body: b"HTTP/1.1 504 Gateway Timeout\r\nContent-Length: 0\r\n\r\n", cut=False
    ),
    "no HTTP": _changed(lambda head, body: b"SSH-2.0-OpenSSH_9.2\r\n", cut=True),
    "bytes changed": _changed(lambda head, body: head + bytes(byte ^ 0x80 for byte in body), cut=False),
}


# --- bodies of lists ------------------------------------------------------------------------------------------------


def changed_list(change: Callable[[Any], object]) -> Fault:
    """`change` gets the decoded list and changes it in place."""

    def send(head: bytes, body: bytes, _: Active) -> Iterator[bytes]:
        try:
            value = json.loads(body)
            change(value)
        except (ValueError, KeyError, TypeError):  # another answer, such as an error
            yield head + body
        else:
            yield _with_body(head, json.dumps(value).encode())

    return Fault(answer=send)


def _of_another_time(value: Any) -> None:
    """A list from before the pods were replaced under the same names, with an older version."""
    value["metadata"]["resourceVersion"] = "1"
    for item in value["items"]:
        item["metadata"]["uid"] = f"old-{item['metadata']['uid']}"
        item["metadata"]["resourceVersion"] = "1"


def _endless(value: Any) -> None:
    value["metadata"]["continue"] = "bW9yZQ"


LISTS: Final[dict[str, Fault]] = {
    "empty list": changed_list(lambda value: value.update(items=[])),
    "items null": changed_list(lambda value: value.update(items=None)),
    "no items": changed_list(lambda value: value.pop("items")),
    "items doubled": changed_list(lambda value: value.update(items=value["items"] * 2)),
    "items reversed": changed_list(lambda value: value["items"].reverse()),
    "an item missing": changed_list(lambda value: value["items"].pop()),
    "an item is null": changed_list(lambda value: value["items"].append(None)),
    "items without metadata": changed_list(lambda value: [item.pop("metadata") for item in value["items"]]),
    "items without spec": changed_list(lambda value: [item.pop("spec") for item in value["items"]]),
    "items without status": changed_list(lambda value: [item.pop("status") for item in value["items"]]),
    "an old list": changed_list(_of_another_time),
    "no version": changed_list(lambda value: value["metadata"].pop("resourceVersion")),
    "a version that is none": changed_list(lambda value: value["metadata"].update(resourceVersion="x")),
    "a version of the future": changed_list(lambda value: value["metadata"].update(resourceVersion="9" * 18)),
    "a next page for ever": changed_list(_endless),
}


# --- lines of a watch -----------------------------------------------------------------------------------------------


def _lines(change: Callable[[bytes], list[bytes]]) -> Fault:
    """Each line becomes these lines."""

    def send(lines: Lines, active: Active) -> Lines:
        for line in lines:
            if line is None or not active():
                yield line
            else:
                yield from change(line)

    return Fault(watch=send)


def _first(*sent: bytes, cut: bool = False) -> Fault:
    """These lines instead of the server's, then the end."""

    def send(_: Lines, __: Active) -> Lines:
        yield from sent
        if cut:
            raise CutError

    return Fault(watch=send)


def _reordered(lines: Lines, active: Active) -> Lines:
    """Each event after the next one."""
    kept: bytes | None = None
    for line in lines:
        if line is None or _is_bookmark(line):
            yield line
            continue
        if kept is not None:
            yield line
            yield kept
            kept = None
        elif active():
            kept = line
        else:
            yield line
        # A last one is not lost: it is sent once the fault has passed.
    if kept is not None:
        yield kept


def _again(lines: Lines, active: Active) -> Lines:
    """All earlier events again after each one, with their older versions."""
    earlier: list[bytes] = []
    for line in lines:
        yield line
        if line is not None and active() and not _is_bookmark(line):
            yield from earlier
            earlier.append(line)


def _cut_in_line(lines: Lines, _: Active) -> Lines:
    for line in lines:
        if line is not None:
            yield line[: len(line) // 2]
            raise CutError
        yield line


def _silence(_: Lines, active: Active) -> Lines:
    yield None
    wait(10.0, active)
    raise CutError


def _slow(lines: Lines, active: Active) -> Lines:
    for line in lines:
        for at in range(len(line or b"")):
            if active():
                threading.Event().wait(0.002)
            yield (line or b"")[at : at + 1]


def _held_back(lines: Lines, active: Active) -> Lines:
    for line in lines:
        wait(_LATE_S, active)
        yield line


def _is_bookmark(line: bytes) -> bool:
    return b'"BOOKMARK"' in line[:40]


def _event(change: Callable[[Any], object]) -> Fault:
    def changed(line: bytes) -> list[bytes]:
        event = json.loads(line)
        change(event)
        return [json.dumps(event).encode() + b"\n"]

    return _lines(changed)


def _recorded_lines(name: str) -> list[bytes]:
    lines = json.loads((_RECORDINGS / f"{name}.json").read_text())["response"]["lines"]
    return [each["line"].encode() for each in lines if each["line"] is not None]


WATCHES: Final[dict[str, Fault]] = {
    "410 in a loop": _first(*_recorded_lines("watch-rv-old-410")),
    "ended at once": _first(),
    "cut at once": _first(cut=True),
    "ERROR without a Status": _first(b'{"type":"ERROR","object":null}\n'),
    "ERROR 500": _first(b'{"type":"ERROR","object":{"kind":"Status","status":"Failure","code":500}}\n'),
    "a line that is no JSON": _first(b"x\n"),
    "a line of NUL bytes": _first(b"\0" * 64 + b"\n"),
    "a long line": _first(b'{"type":"ADDED","object":"' + b"x" * (100 * _MANY) + b'"}\n'),
    "many brackets": _first(b"[" * _MANY + b"\n"),
    "an event of no object": _first(b'{"type":"ADDED"}\n'),
    "a list instead of events": _first(b'{"kind":"PodList","items":[]}\n'),
    "empty lines": _lines(lambda line: [b"\n", line, b"\n"]),
    "event doubled": _lines(lambda line: [line, line]),
    "events reordered": Fault(watch=_reordered),
    "older versions again": Fault(watch=_again),
    "bookmark missing": _lines(lambda line: [] if _is_bookmark(line) else [line]),
    "event lost": _lines(lambda line: [line] if _is_bookmark(line) else []),
    "events of an unknown type": _event(lambda event: event.update(type="CHANGED")),
    "events without metadata": _event(lambda event: event["object"].pop("metadata", None)),
    "events without a version": _event(lambda event: event["object"]["metadata"].pop("resourceVersion", None)),
    "events with an old version": _event(lambda event: event["object"]["metadata"].update(resourceVersion="1")),
    "deleted although it exists": _event(
        lambda event: event.update(type="DELETED") if event["type"] == "MODIFIED" else None
    ),
    "cut within an event": Fault(watch=_cut_in_line),
    "silence": Fault(watch=_silence),
    "dripped": Fault(watch=_slow),
    "late": Fault(watch=_held_back),
}

RECORDED: Final = dict(_recorded())
"""Every recorded error, also of requests that the agent does not make, and of a kubelet."""
FAULTS: Final[dict[str, dict[str, Fault]]] = {
    "request": {**RECORDED, **INSTEAD, **BYTES},
    "list": {**RECORDED, **INSTEAD, **BYTES, **LISTS},
    "watch": {**RECORDED, **INSTEAD, **WATCHES},
}
"""By the form of the request. A `late` of a watch delays its lines, too."""
