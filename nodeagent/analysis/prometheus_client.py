"""Read series from the HTTP API of a Prometheus server, with the standard library.

Promises:

1. Only GET requests to the configured server: no redirect is followed, because it would carry the authorization header
   to another host.
2. An answer is bounded in size and time, and is data: nothing of it is executed or written to a file.
3. Every failure is one `PrometheusError` with the server, what was asked and what it answered.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

TIMEOUT_S: Final = 60.0
MAX_ANSWER_BYTES: Final = 256 << 20
"""110 pods over 2,000 points are 7 MiB."""
MAX_POINTS: Final = 2000
"""Of one series in one request; a Prometheus refuses more than 11,000."""
MAX_HEADER_BYTES: Final = 64 << 10


class PrometheusError(Exception):
    """The history cannot be read. The message is for the user."""


class Server(NamedTuple):
    """How to reach a Prometheus."""

    url: str
    """`http(s)://host[:port][/prefix]`, without `/api/v1`."""
    header: tuple[str, str] | None = None
    """An additional header, such as Authorization."""
    ca_file: str = ""
    """PEM file of the authorities that sign the server's certificate; empty: those of the system."""


class Series(NamedTuple):
    """One series of a range."""

    labels: Mapping[str, str]
    points: Mapping[int, float]
    """By the number of the step since the start of the range. NaN and infinite values are left out."""


def read_header(path: str) -> tuple[str, str]:
    """The header in this file: `Name: value`, or a bearer token alone. Raises PrometheusError."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_HEADER_BYTES + 1).decode("utf-8").strip()
    except OSError as error:
        raise PrometheusError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PrometheusError(f"{path}: not text in UTF-8") from error
    if not text or len(text) > MAX_HEADER_BYTES or not text.isprintable():
        raise PrometheusError(f"{path}: needs one line, `Name: value` or a bearer token")
    name, colon, value = text.partition(":")
    if colon and name.replace("-", "").isalnum():
        return name, value.strip()
    return "Authorization", f"Bearer {text}"


def quoted(text: str) -> str:
    """A label value as a string of PromQL."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


class PrometheusClient:
    """Requests to one server."""

    def __init__(self, server: Server) -> None:
        """Raises PrometheusError if the server's address or CA file is unusable."""
        import ssl
        import urllib.parse
        import urllib.request

        parts = urllib.parse.urlsplit(server.url)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
            raise PrometheusError(f"{server.url}: not an address like http://prometheus:9090")
        if parts.username is not None or parts.password is not None:
            raise PrometheusError("the address of the Prometheus contains a password: put the header into a file")
        self._base = server.url.rstrip("/")
        self._headers = {"Accept": "application/json", "User-Agent": "nodeagent"}
        if server.header is not None:
            self._headers[server.header[0]] = server.header[1]
        handlers: list[urllib.request.BaseHandler] = [_no_redirect()]
        if parts.scheme == "https":
            try:
                context = ssl.create_default_context(cafile=server.ca_file or None)
            except (OSError, ssl.SSLError) as error:
                raise PrometheusError(f"{server.ca_file}: not a file of certificates: {error}") from error
            handlers.append(urllib.request.HTTPSHandler(context=context))
        self._open = urllib.request.build_opener(*handlers).open

    def series(self, selector: str, *, start: float, end: float) -> list[Mapping[str, str]]:
        """The labels of the series that the selector matches in this time."""
        data = self._get("series", {"match[]": selector, "start": f"{start:.3f}", "end": f"{end:.3f}"})
        if not isinstance(data, list):
            raise PrometheusError(f"{self._base}: the answer about {selector} is no list of series")
        return [_labels(each) for each in data]

    def query_range(self, query: str, *, start: float, step_s: float, count: int) -> list[Series]:
        """The result of a query at `count` times from `start` on."""
        end = start + step_s * (count - 1)
        data = self._get(
            "query_range",
            {"query": query, "start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step_s:.3f}"},
        )
        result = data.get("result") if isinstance(data, Mapping) else None
        if not isinstance(result, list) or data.get("resultType") != "matrix":
            raise PrometheusError(f"{self._base}: the answer to {query} is no matrix")
        found = []
        for each in result:
            values = each.get("values") if isinstance(each, Mapping) else None
            points = dict(_points(values, start=start, step_s=step_s, count=count))
            found.append(Series(_labels(each.get("metric") if isinstance(each, Mapping) else None), points))
        return found

    def _get(self, path: str, parameters: Mapping[str, str]) -> Any:
        """The `data` of an answer."""
        import http.client
        import urllib.error
        import urllib.parse
        import urllib.request

        asked = f"{self._base}/api/v1/{path}"
        address = f"{asked}?{urllib.parse.urlencode(parameters)}"
        # The scheme is http or https: the constructor refuses others.
        request = urllib.request.Request(address, headers=self._headers)  # noqa: S310
        try:
            with self._open(request, timeout=TIMEOUT_S) as response:
                body = response.read(MAX_ANSWER_BYTES + 1)
        except urllib.error.HTTPError as error:
            with error:
                raise PrometheusError(f"{asked}: {_refusal(error.code, error.read(1 << 16))}") from None
        except urllib.error.URLError as error:
            raise PrometheusError(f"{asked}: {error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            raise PrometheusError(f"{asked}: {str(error) or type(error).__name__}") from error
        if len(body) > MAX_ANSWER_BYTES:
            raise PrometheusError(f"{asked}: answered with more than {MAX_ANSWER_BYTES >> 20} MiB; use a longer --step")
        answer = _json(body)
        if not isinstance(answer, Mapping) or answer.get("status") != "success":
            raise PrometheusError(f"{asked}: the answer is not one of a Prometheus API")
        return answer.get("data")


def _json(body: bytes) -> Any:
    """None if it is no JSON."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _refusal(status: int, body: bytes) -> str:
    """What an answer with an HTTP error says."""
    answer = _json(body)
    if isinstance(answer, Mapping) and answer.get("status") == "error":
        return f"HTTP {status}, {answer.get('errorType')}: {answer.get('error')}"
    if status in (401, 403):
        return f"HTTP {status}: the credentials are missing or not allowed (--header-file)"
    if 300 <= status < 400:
        return f"HTTP {status}: a redirect, which is not followed; give the final address"
    return f"HTTP {status}, and the answer is not one of a Prometheus API"


def _labels(value: object) -> Mapping[str, str]:
    return {str(name): str(text) for name, text in value.items()} if isinstance(value, Mapping) else {}


def _points(values: object, *, start: float, step_s: float, count: int) -> Iterator[tuple[int, float]]:
    """(number of the step, value) of each usable point."""
    for each in values if isinstance(values, list) else ():
        if not (isinstance(each, list) and len(each) == 2 and isinstance(each[0], int | float)):
            continue
        try:
            number, value = round((each[0] - start) / step_s), float(each[1])
        except (TypeError, ValueError, OverflowError):
            continue
        if 0 <= number < count and math.isfinite(value):
            yield number, value


def _no_redirect() -> Any:
    """A handler that leaves a redirect to the error handler. Made here, because urllib.request costs 30 ms."""
    import urllib.request

    class NoRedirect(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: Any, **__: Any) -> None:
            return None

    return NoRedirect()
