"""HTTP to the API server: bytes in, bytes out, and nothing that waits without a bound.

Promises:

1. Configuration, authentication and TLS are the official `kubernetes` package's (`official`, the only other module that
   touches it): kubeconfigs with exec plugins, tokens and client certificates, and the pod's service account.
2. Every request has a deadline for the whole of it: connecting, sending, each header byte and each body byte count
   against it, so that a half-open connection or a server that drips cannot hold a worker. (A DNS look-up cannot be
   bounded; on a connection that is already open there is none.)
3. Every body and every line of a stream has a size limit. Nothing is retried but once, at once, and only when a
   kept-alive connection turns out to have been closed by the server or the credentials have been renewed.
4. Credentials are read again once a minute and after a 401: projected tokens, exec plugins and client certificates
   rotate. White space around a token never reaches a header.
5. Every failure is an `ApiError` whose kind tells what it means for a request that was to change something. That
   nothing was sent is claimed only where the socket was given nothing; all else is uncertain.
6. An answer below 400 counts only as the API gives it: 200, 201 or 202 with a JSON object that is no failed Status. No
   redirect is followed.

A `Transport` is used by many threads at once; each request is driven by the thread that makes it.
"""

import contextlib
import json
import os
import socket
import ssl
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from nodeagent.kube import kubernetes_client
from nodeagent.kube.credentials import Credentials, CredentialSource
from nodeagent.kube.deadline_http import DeadlineResponse, RequestLimits, current, with_deadline
from nodeagent.kube.timestamps import boottime
from nodeagent.model import OutcomeKind
from nodeagent.runtime import regular_files, workers

with kubernetes_client.without_ballast():
    import urllib3
    from urllib3.exceptions import (
        HTTPError,
        ProtocolError,
        ReadTimeoutError,
    )

JSON: Final = "application/json"
STRATEGIC_MERGE: Final = "application/strategic-merge-patch+json"

CONNECT_TIMEOUT_S: Final = 5.0
"""TCP and TLS each. In a cluster both take milliseconds; 5 s survives one lost SYN (1 s + 2 s)."""
MAX_BODY_BYTES: Final = 64 << 20
"""A pod with everything set is about 20 KiB in a list, etcd allows 1.5 MiB: 500 ordinary pods are 10 MiB."""
MAX_LINE_BYTES: Final = 12 << 20
"""One watch event, or one object of a list: etcd holds 1.5 MiB of an object, and JSON makes up to six bytes of one
(`<` becomes `\\u003c`), so that whatever a tenant may create fits."""
RELOAD_CREDENTIALS_S: Final = 60.0
"""The kubelet renews a projected token at 80% of its life (8 minutes for the shortest), so a minute is early enough."""
RENEW_AFTER_401_S: Final = 5.0
"""At least this long between two renewals that a 401 asks for: exec plugins are slow, a wrong token stays wrong."""
EXEC_PLUGIN_TIMEOUT_S: Final = 30.0
PATIENCE_S: Final = EXEC_PLUGIN_TIMEOUT_S + 10.0
"""A thread that comes back from a request so much later than it should hangs where no deadline reaches: a DNS look-up,
a file with credentials on a dead mount. An exec plugin may take its own time first."""
MAX_REFUSAL_BYTES: Final = 256 << 10
"""Of an answer of 400 and above. A Status of a refused patch quotes what it refuses, which is ours and small. Parsed, 8
MiB of brackets are 200 MiB of lists."""
MAX_MESSAGE: Final = 2048
"""Characters of a Status' message that are kept."""
_SUCCESS: Final = frozenset({200, 201, 202})
"""What the API server answers to a read, an eviction and a deletion (KUBELET-CONTRACT §14)."""
MAX_TOKEN_BYTES: Final = 64 << 10
"""A projected token has 1 to 2 KiB."""
_POOL_SIZE: Final = 12
"""Connections kept open: two or three watches, the evictor's workers, one each for conditions and events."""
_CHUNK: Final = 64 << 10
_MAX_KUBECONFIG_BYTES: Final = 1 << 20
"""Hundreds of clusters with their certificates. The package's YAML parser takes a second for that much."""


class CredentialsError(Exception):
    """The credentials cannot be used: no file, no context, an exec plugin that fails. The message says which."""


class ApiError(Exception):
    """A request that did not succeed."""

    def __init__(
        self, kind: OutcomeKind, message: str, *, status: int | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.status = status
        """HTTP status; None when there was no answer."""
        self.retry_after_s = retry_after_s
        """What the server asked for with Retry-After, seconds; None when it did not."""
        self.from_api = False
        """The answer is one that an API server gives, not a proxy's page: what it refuses was not carried out."""
        self.doubtful = False
        """An earlier try of the same request got no answer and may have been carried out, whatever this answer says."""

    @property
    def expired(self) -> bool:
        """410: the resourceVersion is too old to go on from, list again."""
        return self.status == 410


class TooLargeError(ApiError):
    """The answer, or one line of it, is longer than may be kept."""


class Response(NamedTuple):
    """An answer of the API: 200, 201 or 202 with a JSON object."""

    status: int
    headers: Mapping[str, str]
    """Names are case-insensitive."""
    body: bytes


class _AnyAnswer(msgspec.Struct):
    """Any object of the API."""

    kind: str = ""
    status: msgspec.Raw = msgspec.Raw(b"null")
    """Of a Status a word, of other objects an object."""


_answer_decoder: Final = msgspec.json.Decoder(_AnyAnswer)

_T = TypeVar("_T")

SUSPENDED_S: Final = 0.1
"""The two clocks are read one after the other: less is no suspend."""


class ApiReachability:
    """Since when the API server has not answered.

    Only requests tell: a stream that is silent may be a watch on which nothing happens, so it is the next request that
    finds out. Any HTTP answer, whatever its status, counts as one. Time that the machine was suspended is no outage.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, boot: Callable[[], float] = boottime) -> None:
        """`clock` stands still while the machine is suspended, `boot` does not."""
        self.clock = clock
        self._boot = boot
        self._suspended_s = boot() - clock()
        self._lock = threading.Lock()
        self._answered_at = float("-inf")
        self._lost_at: float | None = None

    @property
    def unreachable_since(self) -> float | None:
        """CLOCK_BOOTTIME at which the first of the requests was begun that have all gone unanswered, later by what the
        machine was suspended since; None when the last one was answered, or none was sent."""
        lost_at = self._lost_at
        if lost_at is None:
            return None
        suspended_s = self._boot() - self.clock()
        if suspended_s > self._suspended_s + SUSPENDED_S:
            self._suspended_s = suspended_s
        return lost_at + self._suspended_s

    def answered(self) -> None:
        """A request was answered, now."""
        with self._lock:
            self._answered_at = self.clock()
            self._lost_at = None

    def unanswered(self, begun_at: float) -> None:
        """A request that was begun at `begun_at` on `clock` was given up. It says nothing when another one, sent beside
        it, was answered."""
        with self._lock:
            if self._lost_at is None and begun_at >= self._answered_at:
                self._lost_at = begun_at


class LineStream:
    """The lines of a streaming answer, as they arrive. Iterate in one thread; `abort` from any."""

    def __init__(self, response: urllib3.BaseHTTPResponse, limits: RequestLimits) -> None:
        self._response = response
        self._limits = limits
        self._aborted = False

    def lines(self) -> Iterator[bytes]:
        """Each complete line, without its newline. Ends when the server ends the stream; an unfinished last line is
        dropped. Raises `ApiError` when nothing comes for the idle time, at the deadline, or when the connection breaks.
        """
        rest = bytearray()
        for chunk in self.chunks():
            rest += chunk
            if b"\n" not in chunk:
                if len(rest) > MAX_LINE_BYTES:
                    raise _too_large(MAX_LINE_BYTES)
                continue
            *complete, rest = rest.split(b"\n")
            yield from (bytes(line) for line in complete if line)

    def chunks(self) -> Iterator[bytes]:
        """What comes, as it comes, until the server ends it. Raises `ApiError` as `lines` does."""
        while chunk := self._read():
            yield chunk

    def abort(self) -> None:
        """Make `lines` end now."""
        self._aborted = True
        _shut(self._limits.socket)

    def close(self) -> None:
        """Give the connection up: a watch that is not read to its end cannot be used again."""
        self._response.close()

    def _read(self) -> bytes:
        try:
            return self._response.read1(_CHUNK, decode_content=False)
        except Exception as error:
            # Whatever http.client makes of a response that `abort` closed under the reader, or of a server's nonsense.
            if self._aborted:
                return b""
            raise _broken(error) from error


class Transport:
    """Connections to one API server with one set of credentials. Made by `connect`."""

    def __init__(
        self,
        credentials: Credentials,
        *,
        request_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        light: bool = True,
    ) -> None:
        self.credentials = credentials
        self.request_timeout_s = request_timeout_s
        self._clock = clock
        self.reach = ApiReachability()
        self._renewing = threading.Lock()
        kubeconfig = credentials.source is not CredentialSource.SERVICE_ACCOUNT
        text = _texts(credentials.kubeconfig) if kubeconfig else ""
        # `auth-provider` is the one thing that needs the whole package; `exec` is the one that must not run at will.
        self._official = kubernetes_client.load(kubeconfig=kubeconfig, light=light and "auth-provider" not in text)
        self._runs_plugin = "exec:" in text or '"exec"' in text
        self._configuration: Any = None
        self._pool: Any = None
        self._authorization: str | None = None
        self._loaded_at = 0.0
        self._renewed_at = float("-inf")
        self.trouble = ""
        """Why the credentials could not be read again; empty when they could."""
        self._load(first=True)

    @property
    def server(self) -> str:
        """URL of the API server."""
        return str(self._configuration.host).rstrip("/")

    @property
    def light(self) -> bool:
        """The official package's parents were not executed (`official`)."""
        return self._official.light

    # --- requests ---------------------------------------------------------------------------------------------------

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
    ) -> Response:
        """One request, answered as the API does within `timeout_s` (default: the transport's) or `ApiError`. A body of
        another type than JSON, for a path that has one, is handed over as it is."""
        limits = self._limits(timeout_s)
        with _at(method, path, limit_s=limits.idle_s):
            try:
                response = self._answer(method, path, body, content_type, limits=limits, accept=accept)
                content = _read_all(response, max_bytes)
                if accept == JSON:
                    _check_object(response.status, content)
                return Response(response.status, response.headers, content)
            except ApiError:
                raise
            except Exception as error:
                # No memory for the answer, a defect of ours: whoever asked has to know whether it may have been sent.
                raise self._failure(error, limits) from error

    @contextmanager
    def stream(self, path: str, *, idle_s: float, total_s: float) -> Iterator[LineStream]:
        """A GET whose answer comes line by line. `idle_s` bounds the silence, `total_s` the whole of it.

        The headers must come within the transport's request time-out. Raises `ApiError` as `request` does.
        """
        limits = self._limits(None)
        with _at("GET", path, limit_s=limits.idle_s):
            response = self._answer("GET", path, None, JSON, limits=limits, accept=JSON)
        limits.deadline = time.monotonic() + total_s
        limits.idle_s = idle_s
        stream = LineStream(response, limits)
        try:
            with _at("GET", path, limit_s=total_s):
                yield stream
        finally:
            stream.close()

    def _answer(
        self, method: str, path: str, body: bytes | None, content_type: str, *, limits: RequestLimits, accept: str
    ) -> urllib3.BaseHTTPResponse:
        """An answer that may be the API's by its status and type; its body is not read. Any other is an `ApiError`."""
        may_renew = True
        while True:
            response, used = self._send(method, path, body=body, content_type=content_type, limits=limits)
            if response.status < 400:
                _check_head(response, accept)
                return response
            error = error_of(response.status, response.headers, _read_all(response, MAX_REFUSAL_BYTES, cut=True))
            error.doubtful = limits.doubtful
            if response.status == 401 and may_renew and self._renew(used):
                may_renew = False
                limits.doubtful = limits.doubtful or not error.from_api
                continue
            raise error

    def warm(self, connections: int) -> int:
        """Have this many connections open and idle; returns how many are. Costs that many cheap requests.

        The API server closes a connection that was idle for 90 s, so whoever wants to find one open calls this more
        often than that. Raises `ApiError` when not even one could be opened.
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
                _read_all(response, MAX_LINE_BYTES)
                ready += 1
            except ApiError as error:
                failure = error
        if failure is not None and not ready:
            raise failure
        return ready

    def close(self) -> None:
        """Close idle connections. Streams in use are closed by their owners."""
        self._pool.clear()

    def _limits(self, timeout_s: float | None) -> RequestLimits:
        seconds = self.request_timeout_s if timeout_s is None else timeout_s
        return RequestLimits(deadline=time.monotonic() + seconds, idle_s=seconds)

    def _send(
        self, method: str, path: str, *, body: bytes | None, content_type: str, limits: RequestLimits
    ) -> tuple[urllib3.BaseHTTPResponse, str | None]:
        """The head of the answer, and the authorization that was sent."""
        headers = {"Accept": JSON, "User-Agent": _user_agent()}
        authorization = self._current_authorization()
        if authorization:
            headers["Authorization"] = authorization
        if body is not None:
            headers["Content-Type"] = content_type
        may_reconnect = True
        while True:
            left = limits.deadline - time.monotonic()
            if left <= 0:
                if limits.doubtful:
                    raise _broken(TimeoutError())
                raise ApiError(OutcomeKind.UNREACHABLE, "the deadline passed before the request was sent")
            current.limits = limits
            limits.handed_over = False
            begun_at = self.reach.clock()
            try:
                response = self._http_pool().urlopen(
                    method,
                    "/" + path.lstrip("/"),
                    body=body,
                    headers=headers,
                    timeout=urllib3.Timeout(connect=min(left, CONNECT_TIMEOUT_S), read=left),
                    retries=False,
                    redirect=False,
                    preload_content=False,
                    decode_content=False,
                )
            except (HTTPError, OSError) as error:
                # A kept-alive connection that the server closed while idle fails before any answer; the requests of
                # this agent carry a UID or replace what they write, so sending one again is safe. What the second
                # answer says is not the whole truth, though: the first may have been carried out.
                if may_reconnect and isinstance(error, ProtocolError) and _closed_by_peer(error):
                    may_reconnect = False
                    limits.doubtful = limits.doubtful or limits.handed_over
                    continue
                self.reach.unanswered(begun_at)
                raise self._failure(error, limits) from error
            except Exception as error:
                # A header that cannot be sent, an answer that our own libraries trip over: no sign of an outage.
                raise self._failure(error, limits) from error
            self.reach.answered()
            return response, authorization

    def _failure(self, error: Exception, limits: RequestLimits) -> ApiError:
        """What a request without an answer means."""
        if limits.handed_over or limits.doubtful:
            return _broken(error)
        proxy = " through its proxy" if isinstance(self._pool, urllib3.ProxyManager) else ""
        what = f"cannot connect to {self.server}{proxy}" if isinstance(error, HTTPError | OSError) else "cannot send"
        return ApiError(OutcomeKind.UNREACHABLE, f"{what}: {explain(error)}")

    def _http_pool(self) -> Any:
        pool = self._pool.connection_from_url(self.server)
        if pool.ConnectionCls.response_class is not DeadlineResponse:
            pool.ConnectionCls = with_deadline(pool.ConnectionCls)
        return pool

    # --- credentials ------------------------------------------------------------------------------------------------

    def _current_authorization(self) -> str | None:
        if self._clock() - self._loaded_at >= RELOAD_CREDENTIALS_S and self._renewing.acquire(blocking=False):
            # One thread renews, the others go on with what there is.
            try:
                # A token file in the middle of being replaced: the old token is still good, and if not, a 401 says so.
                self._loaded_at = self._clock()
                self._read_again(new_pool=False)
            finally:
                self._renewing.release()
        return self._authorization

    def _renew(self, used: str | None) -> bool:
        """After a 401 to a request with this authorization: True when other credentials are there to try again with."""
        with self._renewing:
            if self._authorization != used:
                return True
            # A token's file costs nothing to read, and may be renewed at any moment.
            slow = self._runs_plugin or used is None or bool(self._configuration.cert_file)
            if slow and self._clock() - self._renewed_at < RENEW_AFTER_401_S:
                return False
            self._renewed_at = self._clock()
            # Where it fails, what we have stays: the 401 itself is what the caller gets to see.
            # Without a token it is the client certificate that may have been renewed in its file.
            return self._read_again(new_pool=slow) and (self._authorization != used or used is None)

    def _read_again(self, *, new_pool: bool) -> bool:
        """Read the credentials once more. False when that cannot be done: those in use stay, and `trouble` says why."""
        try:
            if self._runs_plugin and not new_pool:
                # The package runs the plugin again when what it gave has expired, and only then.
                self._authorization = _within(
                    EXEC_PLUGIN_TIMEOUT_S, lambda: self._authorization_of(self._configuration)
                )
                self._loaded_at = self._clock()
            else:
                self._load(first=new_pool)
        except Exception as error:
            # The plugin's library lets out whatever goes wrong, and no request may end its thread for it.
            text = str(error) if isinstance(error, CredentialsError) else explain(error)
            self.trouble = f"{text}; the credentials read before stay in use, and are read again every minute"
            return False
        self.trouble = ""
        return True

    def _load(self, *, first: bool) -> None:
        """Read the credentials. `first` also opens a new pool, since client certificates may be new as well."""
        configuration = self._official.configuration()
        configuration.retries = False
        configuration.keep_alive = True
        configuration.connection_pool_maxsize = _POOL_SIZE
        try:
            _within(EXEC_PLUGIN_TIMEOUT_S, lambda: self._fill(configuration))
            authorization = self._authorization_of(configuration)
        except CredentialsError:
            raise
        except Exception as error:
            # The package lets out whatever its YAML, JSON and subprocess calls raise; all of it means the same here.
            raise CredentialsError(f"{self.credentials.source.value}: {error}") from error
        if self._runs_plugin and authorization is None and not configuration.cert_file:
            raise CredentialsError(
                f"{self.credentials.source.value}: the exec plugin gave neither token nor certificate"
            )
        if authorization is None and self._authorization is not None and not configuration.cert_file:
            # The package takes an empty token file for none at all, and we would go on as nobody.
            raise CredentialsError(f"{self.credentials.kubeconfig} has no token any more: is its tokenFile empty?")
        pool = self._new_pool(configuration) if first else None
        self._authorization = authorization
        if pool is not None:
            old, self._configuration, self._pool = self._pool, configuration, pool
            if old is not None:
                old.clear()
        self._loaded_at = self._clock()

    def _new_pool(self, configuration: Any) -> Any:
        try:
            return self._official.rest_client(configuration).pool_manager
        except Exception as error:
            # It reads the proxy variables and the certificates, and lets out whatever is wrong with them.
            source = self.credentials.source.value
            if configuration.proxy and not isinstance(error, OSError):
                # Not the error's text: a proxy's URL may hold a password.
                raise CredentialsError(
                    f"{source}: the proxy is not one that can be used ({type(error).__name__}); set HTTPS_PROXY to "
                    "http://HOST:PORT, or unset it"
                ) from error
            raise CredentialsError(f"{source}: {error}") from error

    def _authorization_of(self, configuration: Any) -> str | None:
        """The Authorization header's value, or None without a token. White space inside a token file ends up around it.

        Raises CredentialsError for a token that no header can carry."""
        key = configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        if not key:
            return None
        scheme, _, token = str(key).strip().partition(" ")
        token = token.strip()
        if flaw := _flaw(token):
            raise CredentialsError(f"the token of {self.credentials.kubeconfig or 'the service account'} {flaw}")
        return f"{scheme.capitalize()} {token}"

    def _fill(self, configuration: Any) -> None:
        credentials = self.credentials
        if credentials.source is CredentialSource.SERVICE_ACCOUNT:
            host, _, port = credentials.server.rpartition(":")
            _check_token_file(f"{credentials.service_account_dir}/token")
            self._official.in_cluster_loader(
                token_filename=f"{credentials.service_account_dir}/token",
                cert_filename=f"{credentials.service_account_dir}/ca.crt",
                try_refresh_token=False,
                environ={"KUBERNETES_SERVICE_HOST": host.strip("[]"), "KUBERNETES_SERVICE_PORT": port},
            ).load_and_set(configuration)
        else:
            self._official.load_kube_config(
                config_file=credentials.kubeconfig, client_configuration=configuration, persist_config=False
            )


def connect(credentials: Credentials, *, request_timeout_s: float = 5.0, light: bool = True) -> Transport:
    """Load these credentials. Nothing is sent yet. Raises `CredentialsError` when they cannot be used.

    `light` False imports the whole official package, which is otherwise only the fall-back.
    """
    if not credentials.found:
        raise CredentialsError(credentials.reason)
    return Transport(credentials, request_timeout_s=request_timeout_s, light=light)


def error_of(status: int, headers: Mapping[str, str], body: bytes) -> ApiError:
    """What an answer of 400 and above means (KUBELET-CONTRACT §14 and the recordings)."""
    message, causes, is_status = _status_of(body)
    plain = _media_type(headers) == "text/plain"
    if not is_status and not plain:
        # A proxy's page differs with each request, and its markup is for browsers.
        message = ""
    error = ApiError(
        _kind(status, message, causes),
        message or f"HTTP {status}, not from the Kubernetes API",
        status=status,
        retry_after_s=_seconds(headers.get("Retry-After")),
    )
    error.from_api = is_status or (plain and status == 429)  # priority and fairness answers in plain text
    return error


_BUDGET_REFUSED: Final = {403: "poddisruptionbudget.policy ", 504: "couldn't update PodDisruptionBudget"}
"""Further answers by which a budget, and not the server, refuses (KUBELET-CONTRACT §14; the texts are those of
pkg/registry/core/pod/storage/eviction.go): its allowance is negative, or more than 2,000 evictions are unconfirmed (a
missing right is about `poddisruptionbudgets`); too many others wrote it at once. Nobody was evicted, and the server is
well.
"""


_ADMISSION_REFUSED: Final = ("denied request: ", "denied the request")
"""What a 403 says that comes of an admission policy or webhook (k8s.io/apiserver, plugin/policy/validating and
plugin/webhook/errors): this request was refused, and another pod's may pass. A missing right speaks of a user who
cannot."""


def _kind(status: int, message: str, causes: tuple[str, ...]) -> OutcomeKind:
    if status == 429:
        return OutcomeKind.BLOCKED_BY_PDB if "DisruptionBudget" in causes else OutcomeKind.TOO_MANY_REQUESTS
    if status == 500 and "more than one PodDisruptionBudget" in message:
        return OutcomeKind.PDB_CONFLICT
    if _BUDGET_REFUSED.get(status, "\0") in message:
        return OutcomeKind.BLOCKED_BY_PDB
    if status >= 500:
        return OutcomeKind.SERVER_ERROR
    if status == 403 and any(text in message for text in _ADMISSION_REFUSED):
        return OutcomeKind.INVALID
    return {
        401: OutcomeKind.UNAUTHORIZED,
        403: OutcomeKind.FORBIDDEN,
        404: OutcomeKind.NOT_FOUND,
        409: OutcomeKind.CONFLICT,
    }.get(status, OutcomeKind.INVALID)


def _status_of(body: bytes) -> tuple[str, tuple[str, ...], bool]:
    """Message, causes' reasons, and whether it is a failed Status; the plain text where it is none (fairness)."""
    plain = body[:512].decode("utf-8", "replace").strip()
    try:
        status = json.loads(body)
    except (ValueError, RecursionError):
        return plain, (), False
    if not isinstance(status, dict) or not isinstance(status.get("message"), str):
        return plain, (), False
    is_status = status.get("kind") == "Status" and status.get("status") == "Failure"
    message = status["message"]
    details = status.get("details")
    causes = details.get("causes") if isinstance(details, dict) else None
    known = [cause for cause in causes if isinstance(cause, dict)] if isinstance(causes, list) else []
    told = [cause["message"] for cause in known if isinstance(cause.get("message"), str)]
    if told and told[0] not in message:
        message = f"{message} {told[0]}"
    # Half a surrogate pair is valid JSON, and no text that could be written anywhere.
    message = message[:MAX_MESSAGE].encode("utf-8", "replace").decode()
    return message, tuple(str(cause.get("reason", "")) for cause in known), is_status


def _seconds(text: str | None) -> float | None:
    """Retry-After as the API server sends it: whole seconds. A date or rubbish is None."""
    return float(text) if text and text.isascii() and text.isdigit() and len(text) < 7 else None


def _broken(error: Exception) -> ApiError:
    """A request that may have been carried out got no answer, or none that could be read to its end."""
    if isinstance(error, ReadTimeoutError | TimeoutError) or isinstance(_root(error), TimeoutError):
        return ApiError(OutcomeKind.TIMED_OUT, "no answer within the deadline")
    return ApiError(OutcomeKind.TIMED_OUT, f"the connection broke before the answer was complete: {explain(error)}")


def explain(error: BaseException) -> str:
    """What went wrong, in words that are the same whenever the same goes wrong: no objects, addresses or timings, and
    nothing of what was sent."""
    error = _root(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{error.reason}: {error.verify_message}"
    if isinstance(error, ConnectionResetError | BrokenPipeError | ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return "the server closed the connection"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or 'failed'}"
    if isinstance(error, socket.gaierror):
        return f"its name cannot be resolved: {error.strerror}"
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, ValueError):
        # Its text may quote the header that could not be sent, and with it the token.
        return type(error).__name__
    if isinstance(error, HTTPException | HTTPError):
        return "what came is no complete HTTP answer"
    text = str(error)
    return text if text.isprintable() and "<" not in text else type(error).__name__


def _root(error: BaseException) -> BaseException:
    """The innermost cause; urllib3 hands it over as an argument or as `__cause__`."""
    for _ in range(10):
        cause = next((each for each in error.args if isinstance(each, BaseException)), error.__cause__)
        if cause is None:
            break
        error = cause
    return error


def _closed_by_peer(error: ProtocolError) -> bool:
    inner = error.args[1] if len(error.args) > 1 else None
    return isinstance(inner, ConnectionError)


def _read_all(response: urllib3.BaseHTTPResponse, max_bytes: int, *, cut: bool = False) -> bytes:
    """The whole body; what is longer is an error, or with `cut` left out."""
    _check_length(response)
    content = bytearray()
    try:
        while len(content) <= max_bytes and (chunk := response.read1(_CHUNK, decode_content=False)):
            content += chunk
    except Exception as error:
        raise _broken(error) from error
    finally:
        if not response.closed:
            # Not read to its end, or without a body, which http.client does not take for an end.
            response.close()
    if len(content) > max_bytes and not cut:
        raise _too_large(max_bytes)
    return bytes(content[:max_bytes])


def _check_length(response: urllib3.BaseHTTPResponse) -> None:
    if "Content-Length" not in response.headers and "Transfer-Encoding" not in response.headers:
        response.close()
        # Headers that broke off look like this. The API server always says how long an answer is.
        raise ApiError(OutcomeKind.TIMED_OUT, "the connection broke before the answer was complete")


def _check_head(response: urllib3.BaseHTTPResponse, accept: str) -> None:
    """Raise for an answer below 400 that no API server gives. Nothing more is read of it: what follows a 103 would be
    taken for the answer to the next request."""
    if response.status in _SUCCESS:
        _check_length(response)
        if _media_type(response.headers) == accept:
            return
    response.close()
    kind = _media_type(response.headers) or "no Content-Type"
    raise _foreign(response.status, kind)


def _check_object(status: int, body: bytes) -> None:
    """Raise for a body that is no JSON object, or is a Status that does not say Success."""
    try:
        answer = _answer_decoder.decode(body)
        success = answer.kind != "Status" or msgspec.json.decode(answer.status) == "Success"
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise _foreign(status, "a body that is no object") from None
    if not success:
        raise _foreign(status, "a Status that does not say Success")


def _foreign(status: int, what: str) -> ApiError:
    # Whatever stands between us and the API server may have passed the request on.
    message = f"HTTP {status} with {what} is no answer of the Kubernetes API; whether it was carried out is not known"
    return ApiError(OutcomeKind.SERVER_ERROR, message, status=status)


def _media_type(headers: Mapping[str, str]) -> str:
    return headers.get("Content-Type", "").partition(";")[0].strip().lower()[:100]


def _too_large(limit: int) -> TooLargeError:
    return TooLargeError(OutcomeKind.SERVER_ERROR, f"the answer is larger than {limit >> 20} MiB")


def _flaw(token: str) -> str:
    """What keeps this from being sent as a bearer token; empty when nothing does. The token itself is not shown."""
    if not token:
        return "is empty: write it anew"
    if any(mark in token for mark in "\r\n"):
        return "has more than one line: write it anew, as one line of ASCII"
    if not all("!" <= character <= "~" for character in token):
        return "has a character that is no visible ASCII: write it anew, as one line of ASCII"
    return ""


def _check_token_file(path: str) -> None:
    """Raises CredentialsError with the file, what is wrong and what to do, before the package reads it whole."""
    try:
        with open(path, "rb", opener=_open_now) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CredentialsError(f"{path} is no regular file; a token belongs there")
            content = file.read(MAX_TOKEN_BYTES + 1)
    except OSError as error:
        raise CredentialsError(f"{path} cannot be read: {error.strerror}; a token belongs there") from error
    if len(content) > MAX_TOKEN_BYTES:
        raise CredentialsError(f"{path} is larger than {MAX_TOKEN_BYTES >> 10} KiB; a token belongs there")
    if flaw := _flaw(content.decode("latin-1").strip()):
        raise CredentialsError(f"the token in {path} {flaw}")


def _open_now(path: str, flags: int) -> int:
    """Without waiting for whoever would write to a FIFO."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _at(method: str, path: str, *, limit_s: float) -> contextlib.AbstractContextManager[None]:
    return workers.step(f"{method} {path.partition('?')[0]}", limit_s=limit_s + PATIENCE_S)


def _within(seconds: float, work: Callable[[], _T]) -> _T:
    """`work` in a thread of its own, for at most this long: the package runs exec plugins without a time-out."""
    result: list[_T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(work())
        except Exception as error:
            failure.append(error)

    thread = workers.start_thread(run, name="credentials")
    if thread is None:
        # No PID is left for it, and that is when the agent is needed: files are read without the time-out. A plugin
        # cannot be started then either.
        run()
        workers.settled("credentials")
    else:
        thread.join(seconds)
    if failure:
        raise failure[0]
    if not result:
        raise CredentialsError(f"loading the credentials took longer than {seconds:.0f} s")
    return result[0]


def _texts(paths: str) -> str:
    texts = []
    for path in paths.split(":"):
        try:
            content = regular_files.read(path, max_bytes=_MAX_KUBECONFIG_BYTES + 1)
        except OSError as error:
            raise CredentialsError(f"{path}: {error.strerror}") from error
        if len(content) > _MAX_KUBECONFIG_BYTES:
            raise CredentialsError(f"{path}: larger than {_MAX_KUBECONFIG_BYTES >> 20} MiB, which is no kubeconfig")
        texts.append(content.decode("utf-8", "replace"))
    return "\n".join(texts)


def _shut(sock: socket.socket | None) -> None:
    if sock is None:
        return
    try:
        # Not SSLSocket's own shutdown, which pulls the TLS state from under a thread that is reading.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    except OSError:
        # Already closed: then nobody is waiting on it.
        return


def _user_agent() -> str:
    from nodeagent import __version__

    return f"nodeagent/{__version__}"
