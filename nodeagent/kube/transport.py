"""HTTP to the API server: requests and streams, with a limit for each wait and each size.

Promises:

1. Every request has one deadline: connecting, sending, each header byte and each body byte count against it, so that a
   half-open connection or a slow server cannot hold a worker. A suspend counts. (A DNS look-up has no limit; an open
   connection needs none.) Nothing is sent after the deadline, however long connecting has taken.
2. Every body and every line of a stream has a size limit. A request is repeated only once, at once, and only if its
   connection was closed or lost before an answer, or the credentials have been renewed.
3. Every failure is an `ApiError` whose kind states what it means for a request that changes something. "Nothing was
   sent" is claimed only if the socket was given no byte; all else is uncertain.
4. No redirect is followed.
5. The requests in `impersonation.IMPERSONATED` are sent as the own node while that is the identity; a caller does not
   choose.

A `Transport` is used by many threads at once; each request is driven by the thread that makes it. Credentials and TLS:
`server_connection`. Errors: `api_errors`. Answers: `api_responses`.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from nodeagent import __version__
from nodeagent.kube import (
    api_errors,
    api_responses,
    deadline_http,
    impersonation,
    kubernetes_client,
    line_stream,
    server_connection,
)
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.api_responses import Response
from nodeagent.kube.credentials import Credentials, CredentialsError
from nodeagent.kube.deadline_http import RequestLimits
from nodeagent.kube.impersonation import Impersonation
from nodeagent.kube.line_stream import LineStream
from nodeagent.kube.reachability import ApiReachability
from nodeagent.kube.server_connection import ServerConnection
from nodeagent.model import OutcomeKind
from nodeagent.runtime import clock, workers

with kubernetes_client.without_unused_modules():
    import urllib3
    from urllib3.exceptions import HTTPError, ProtocolError

JSON: Final = "application/json"
STRATEGIC_MERGE: Final = "application/strategic-merge-patch+json"

CONNECT_TIMEOUT_S: Final = 5.0
"""TCP and TLS each. In a cluster both take milliseconds; 5 s survives one lost SYN (1 s + 2 s)."""
MAX_BODY_BYTES: Final = 64 << 20
"""A pod with every field set takes about 20 KiB in a list, etcd allows 1.5 MiB: 500 ordinary pods are 10 MiB."""
MAX_REFUSAL_BYTES: Final = 256 << 10
"""Of an answer of 400 and above. A Status of a refused patch quotes the patch, which is small. Parsed, 8 MiB of
brackets are 200 MiB of lists."""
STUCK_AFTER_S: Final = server_connection.EXEC_PLUGIN_TIMEOUT_S + 10.0
"""A thread that exceeds its request's deadline by this much is stuck where no deadline applies: a DNS look-up, a file
with credentials on a dead mount. An exec plugin may take its own time first."""
_HEADERS: Final = {"Accept": JSON, "User-Agent": f"nodeagent/{__version__}"}


class Transport:
    """Requests to one API server with one set of credentials. Made by `connect`."""

    def __init__(
        self,
        credentials: Credentials,
        *,
        request_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        light: bool = True,
        connection: ServerConnection | None = None,
    ) -> None:
        self.request_timeout_s = request_timeout_s
        self.reach = ApiReachability()
        self.impersonation = Impersonation()
        self._connection = connection or ServerConnection(credentials, clock=clock, light=light)
        self._is_shared = False

    @property
    def server(self) -> str:
        """URL of the API server."""
        return self._connection.server

    @property
    def light(self) -> bool:
        """True if the official package's parents were not executed (`kubernetes_client`)."""
        return self._connection.light

    @property
    def trouble(self) -> str:
        """Why the credentials could not be read again; empty if they could."""
        return self._connection.trouble

    def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        content_type: str = JSON,
        timeout_s: float | None = None,
        max_bytes: int = MAX_BODY_BYTES,
        accept: str = JSON,
        user: str | None = None,
    ) -> Response:
        """One request, answered as the API defines it within `timeout_s` (default: the transport's), or `ApiError`. A
        body of another `accept`ed type than JSON is returned unchecked. `user`: impersonate this user, or none with an
        empty one, whatever the identity is; only for a probe, and for what the own node may not read."""
        limits = self._limits(timeout_s)
        with _as_step(method, path, limit_s=limits.idle_s):
            try:
                response = self._answer(method, path, body, content_type, limits=limits, accept=accept, user=user)
                content = api_responses.read_body(response, max_bytes)
                if accept == JSON:
                    api_responses.check_object(response.status, content)
                return Response(response.status, response.headers, content)
            except ApiError:
                raise
            except Exception as error:
                # No memory for the answer, or a defect of the agent: the caller needs to know if it may have been sent.
                raise self._failure(error, limits) from error

    @contextmanager
    def stream(self, path: str, *, idle_s: float, total_s: float, user: str | None = None) -> Iterator[LineStream]:
        """A GET whose answer arrives line by line, with at most `idle_s` without a byte and `total_s` in all. `user`:
        as for `request`; empty for what the own node may not read.

        The headers must arrive within the transport's request timeout. Raises `ApiError` as `request` does.
        """
        limits = self._limits(None)
        with _as_step("GET", path, limit_s=limits.idle_s):
            response = self._answer("GET", path, None, JSON, limits=limits, accept=JSON, user=user)
        limits.deadline = clock.boottime() + total_s
        limits.idle_s = idle_s
        stream = LineStream(response, limits)
        try:
            with _as_step("GET", path, limit_s=total_s):
                yield stream
        finally:
            stream.close()

    def prewarm(self, connections: int) -> int:
        """Open this many connections and keep them idle; returns how many are open. Costs that many cheap requests.

        The API server closes a connection after 90 s without a request, so call this more often to find one open.
        Raises `ApiError` if none could be opened.
        """
        opened: list[urllib3.BaseHTTPResponse] = []
        failure: ApiError | None = None
        for _ in range(connections):
            try:
                response, _ = self._send("GET", "/version", body=None, content_type=JSON, limits=self._limits(None))
                opened.append(response)
            except ApiError as error:
                failure = error
                break
        ready = 0
        for response in opened:
            try:
                api_responses.read_body(response, line_stream.MAX_LINE_BYTES)
                ready += 1
            except ApiError as error:
                failure = error
        if failure is not None and not ready:
            raise failure
        return ready

    def connection_for(self, credentials: Credentials) -> ServerConnection | None:
        """The connection to use for `credentials` as well, which `close` leaves open then; None if others have to be
        loaded."""
        self._is_shared = self._connection.has(credentials)
        return self._connection if self._is_shared else None

    def close(self) -> None:
        """Close idle connections. The owner of a stream closes it."""
        if not self._is_shared:
            self._connection.close()

    def _limits(self, timeout_s: float | None) -> RequestLimits:
        seconds = self.request_timeout_s if timeout_s is None else timeout_s
        return RequestLimits(deadline=clock.boottime() + seconds, idle_s=seconds)

    def _answer(
        self,
        method: str,
        path: str,
        body: bytes | None,
        content_type: str,
        *,
        limits: RequestLimits,
        accept: str,
        user: str | None = None,
    ) -> urllib3.BaseHTTPResponse:
        """An answer that can be the API's by its status and type; its body is not read. Any other is an `ApiError`."""
        may_renew = True
        acts_as = self.impersonation.user_for(method, path) if user is None else user
        while True:
            response, used = self._send(
                method, path, body=body, content_type=content_type, limits=limits, acts_as=acts_as
            )
            if response.status < 400:
                api_responses.check_head(response, accept)
                if user is None:
                    self.impersonation.succeeded(method, path, directly=not acts_as)
                return response
            content = api_responses.read_body(response, MAX_REFUSAL_BYTES, cut=True)
            error = api_errors.from_response(response.status, response.headers, content)
            error.uncertain = limits.uncertain
            if response.status == 401 and may_renew and self._connection.renew(used):
                may_renew = False
                limits.uncertain = limits.uncertain or not error.from_api
                continue
            if user is None and response.status == 403 and error.from_api:
                if not acts_as:
                    self.impersonation.refuse_directly(method, path, error.message)
                elif self.impersonation.refuse(method, path, error.message):
                    # The refusal precedes the request itself, so that a repetition is safe.
                    acts_as = ""
                    continue
            raise error

    def _send(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None,
        content_type: str,
        limits: RequestLimits,
        acts_as: str = "",
    ) -> tuple[urllib3.BaseHTTPResponse, str | None]:
        """The head of the answer, and the authorization that was sent."""
        headers = dict(_HEADERS)
        authorization = self._connection.authorization()
        if authorization:
            headers["Authorization"] = authorization
        if body is not None:
            headers["Content-Type"] = content_type
        if acts_as:
            headers[impersonation.HEADER] = acts_as
        may_reconnect = True
        while True:
            left_s = limits.deadline - clock.boottime()
            if left_s <= 0:
                if limits.uncertain:
                    raise api_errors.no_answer(TimeoutError())
                raise ApiError(OutcomeKind.UNREACHABLE, "the deadline passed before the request was sent")
            deadline_http.current.limits = limits
            limits.handed_over = False
            begun_at = self.reach.clock()
            try:
                response = self._connection.http_pool().urlopen(
                    method,
                    f"{self._connection.path_prefix}/{path.lstrip('/')}",
                    body=body,
                    headers=headers,
                    timeout=urllib3.Timeout(connect=min(left_s, CONNECT_TIMEOUT_S), read=left_s),
                    retries=False,
                    redirect=False,
                    preload_content=False,
                    decode_content=False,
                )
            except (HTTPError, OSError) as error:
                # A kept-alive connection that the server closed while idle fails before any answer, and so does one
                # whose other end has vanished. The agent's requests carry a UID or replace what they write, so that a
                # repetition is safe. But the second answer is not the whole truth: the server may have carried out the
                # first request.
                if may_reconnect and (_closed_by_peer(error) or _is_lost(error, limits)):
                    # urllib3 opens a new connection then, although others may be idle.
                    may_reconnect = False
                    limits.uncertain = limits.uncertain or limits.handed_over
                    continue
                self.reach.unanswered(begun_at)
                raise self._failure(error, limits) from error
            except Exception as error:
                # A header that cannot be sent, or an answer on which a library fails: no sign of an outage.
                raise self._failure(error, limits) from error
            if self.reach.answered():
                self.impersonation.server_returned()
            return response, authorization

    def _failure(self, error: Exception, limits: RequestLimits) -> ApiError:
        """The error of a request without an answer."""
        if limits.handed_over or limits.uncertain:
            return api_errors.no_answer(error)
        proxy = " through its proxy" if self._connection.uses_proxy else ""
        what = f"cannot connect to {self.server}{proxy}" if isinstance(error, HTTPError | OSError) else "cannot send"
        return ApiError(OutcomeKind.UNREACHABLE, f"{what}: {api_errors.explain(error)}")


def connect(
    credentials: Credentials,
    *,
    request_timeout_s: float = 5.0,
    light: bool = True,
    previous: Transport | None = None,
) -> Transport:
    """Load these credentials. Nothing is sent yet. Raises `CredentialsError` if they cannot be used.

    `light` False imports the whole official package, which is otherwise only the fall-back. `previous`: if it has the
    same credentials, they are not loaded again, because an exec plugin may take half a minute.
    """
    if not credentials.found:
        raise CredentialsError(credentials.reason)
    connection = previous.connection_for(credentials) if previous is not None else None
    return Transport(credentials, request_timeout_s=request_timeout_s, light=light, connection=connection)


def _closed_by_peer(error: Exception) -> bool:
    inner = error.args[1] if isinstance(error, ProtocolError) and len(error.args) > 1 else None
    return isinstance(inner, ConnectionError)


def _is_lost(error: Exception, limits: RequestLimits) -> bool:
    """True if the kernel gave up the connection of a request that was sent (`deadline_http.UNACKNOWLEDGED_S`): the
    agent's own wait for the answer ends at the deadline."""
    timed_out = isinstance(api_errors.root_cause(error), TimeoutError)
    return timed_out and limits.handed_over and clock.boottime() < limits.deadline


def _as_step(method: str, path: str, *, limit_s: float) -> contextlib.AbstractContextManager[None]:
    """The request as a step of its worker, which is reported if it is stuck."""
    return workers.step(f"{method} {path.partition('?')[0]}", limit_s=limit_s + STUCK_AFTER_S)
