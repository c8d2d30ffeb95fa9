"""Reads answers of the API server, and rejects an answer below 400 that no API server gives.

An answer counts as a success only as the API defines it: 200, 201 or 202 with a JSON object that is not a failed Status
(KUBELET-CONTRACT §14). Every body has a size limit.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from nodeagent.kube import api_errors, kubernetes_client
from nodeagent.kube.api_errors import ApiError
from nodeagent.model import OutcomeKind

with kubernetes_client.without_unused_modules():
    import urllib3

CHUNK_BYTES: Final = 64 << 10
"""Of one read."""
_SUCCESS: Final = frozenset({200, 201, 202})
"""Answers of the API server to a read, an eviction and a deletion."""


class Response(NamedTuple):
    """An answer of the API: 200, 201 or 202 with a JSON object."""

    status: int
    headers: Mapping[str, str]
    """Names are case-insensitive."""
    body: bytes


class _AnyObject(msgspec.Struct):
    """Any object of the API."""

    kind: str = ""
    status: msgspec.Raw = msgspec.Raw(b"null")
    """A word in a Status, an object in other objects."""


_object_decoder: Final = msgspec.json.Decoder(_AnyObject)


def read_body(response: urllib3.BaseHTTPResponse, max_bytes: int, *, cut: bool = False) -> bytes:
    """The whole body. Raises ApiError if it is longer than `max_bytes`, except with `cut`, or incomplete."""
    check_length(response)
    content = bytearray()
    try:
        while len(content) <= max_bytes and (chunk := response.read1(CHUNK_BYTES, decode_content=False)):
            content += chunk
    except Exception as error:
        raise api_errors.no_answer(error) from error
    finally:
        if not response.closed:
            # Not read to its end, or without a body, which http.client does not take for an end.
            response.close()
    if len(content) > max_bytes and not cut:
        raise api_errors.too_large(max_bytes)
    return bytes(content[:max_bytes])


def check_length(response: urllib3.BaseHTTPResponse) -> None:
    """Raise ApiError for an answer without a length: the API server always sends one, so the headers broke off."""
    if "Content-Length" not in response.headers and "Transfer-Encoding" not in response.headers:
        response.close()
        raise ApiError(OutcomeKind.TIMED_OUT, "the connection broke before the answer was complete")


def check_head(response: urllib3.BaseHTTPResponse, accept: str) -> None:
    """Raise ApiError for an answer below 400 that no API server gives. Its body is not read: the bytes after a 103
    would count as the answer to the next request."""
    content_type = api_errors.media_type(response.headers)
    if response.status in _SUCCESS:
        check_length(response)
        if content_type == accept:
            return
    response.close()
    raise api_errors.foreign(response.status, content_type or "no Content-Type")


def check_object(status: int, body: bytes) -> None:
    """Raise ApiError for a body that is no JSON object, or is a Status other than Success."""
    try:
        answer = _object_decoder.decode(body)
        success = answer.kind != "Status" or msgspec.json.decode(answer.status) == "Success"
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise api_errors.foreign(status, "a body that is no object") from None
    if not success:
        raise api_errors.foreign(status, "a Status other than Success")
