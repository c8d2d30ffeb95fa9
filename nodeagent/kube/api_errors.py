"""What a failed request means: the error, its kind, and its message.

The kinds follow KUBELET-CONTRACT §14 and recordings of API servers. A message has the same text whenever the same thing
happens: no addresses, object identities or times, and nothing that was sent.
"""

import json
import os
import re
import socket
import ssl
from collections.abc import Mapping
from http.client import HTTPException
from typing import Final

from nodeagent.kube import kubernetes_client
from nodeagent.model import OutcomeKind

with kubernetes_client.without_unused_modules():
    from urllib3.exceptions import HTTPError, ReadTimeoutError

MAX_STATUS_MESSAGE: Final = 2048
"""Characters of a Status' message that are kept."""

_PDB_REFUSED: Final = {403: "poddisruptionbudget.policy ", 504: "couldn't update PodDisruptionBudget"}
"""Further answers by which a PodDisruptionBudget refuses (KUBELET-CONTRACT §14; the texts are those of
pkg/registry/core/pod/storage/eviction.go). 403: its allowance is negative, or more than 2,000 evictions are
unconfirmed; a missing right is about `poddisruptionbudgets`. 504: too many clients wrote it at once. No pod was
evicted, and the server is well."""

NOT_ON_NODE: Final = "pods with spec.nodeName set to itself"
"""Text of NodeRestriction's 403 to a node's eviction of a pod that is not, or not yet, on it
(plugin/pkg/admission/noderestriction/admission.go)."""

_MISSING_RIGHT: Final = re.compile(r'User "[^"]*" cannot ')
"""Text of the authorizer's 403 (k8s.io/apiserver, pkg/endpoints/handlers/responsewriters/errors.go). Every other 403
with a Status is admission's: a policy, a webhook, NodeRestriction, a namespace that is being terminated, or a plugin
that is not ready just after the start of the API server. It is about this request; one for another pod may pass."""

_WEBHOOK: Final = re.compile(r'admission webhook ".*" denied the request|failed calling webhook ')
"""Texts of a webhook's refusal, whose HTTP status the webhook chooses (KubeVirt's has 429), and of one that fails while
its failurePolicy is Fail, a 500 (k8s.io/apiserver, pkg/admission/plugin/webhook/errors/statuserror.go and
pkg/util/webhook/error.go). Admission comes before the eviction, so nothing was evicted."""


class ApiError(Exception):
    """A request that did not succeed."""

    def __init__(
        self, kind: OutcomeKind, message: str, *, status: int | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.status = status
        """HTTP status; None without an answer."""
        self.retry_after_s = retry_after_s
        """The Retry-After header, seconds; None without one."""
        self.from_api = False
        """True if an API server gives such an answer, not a proxy: a refused request was not carried out."""
        self.uncertain = False
        """True if an earlier try of the same request got no answer: the server may have carried it out, whatever this
        answer is."""

    @property
    def expired(self) -> bool:
        """410: the resourceVersion is too old to continue from, list again."""
        return self.status == 410


class TooLargeError(ApiError):
    """The answer, or one line of it, exceeds its size limit."""


def from_response(status: int, headers: Mapping[str, str], body: bytes) -> ApiError:
    """The error of an answer of 400 and above."""
    message, causes, is_status = _read_status(body)
    plain = media_type(headers) == "text/plain"
    if not is_status and not plain:
        # A proxy's page differs with each request, and its markup is for browsers.
        message = ""
    error = ApiError(
        _kind(status, message, causes, is_status=is_status),
        message or f"HTTP {status}, not from the Kubernetes API",
        status=status,
        retry_after_s=_retry_after_s(headers.get("Retry-After")),
    )
    error.from_api = is_status or (plain and status == 429)  # API priority and fairness answers in plain text
    return error


def no_answer(error: Exception) -> ApiError:
    """The error of a request that may have been carried out: it got no answer, or no complete one."""
    if isinstance(error, ReadTimeoutError | TimeoutError) or isinstance(root_cause(error), TimeoutError):
        return ApiError(OutcomeKind.TIMED_OUT, "no answer within the deadline")
    return ApiError(OutcomeKind.TIMED_OUT, f"the connection broke before the answer was complete: {explain(error)}")


def foreign(status: int, what: str) -> ApiError:
    """The error of an answer below 400 that no API server gives. A proxy in between may have passed the request on."""
    message = f"HTTP {status} with {what} is no answer of the Kubernetes API; whether it was carried out is not known"
    return ApiError(OutcomeKind.SERVER_ERROR, message, status=status)


def too_large(limit: int) -> TooLargeError:
    return TooLargeError(OutcomeKind.SERVER_ERROR, f"the answer is larger than {limit >> 20} MiB")


def media_type(headers: Mapping[str, str]) -> str:
    return headers.get("Content-Type", "").partition(";")[0].strip().lower()[:100]


def explain(error: BaseException) -> str:
    """The cause of an exception of the socket, TLS and HTTP libraries, for people."""
    error = root_cause(error)
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
        return "the HTTP answer is incomplete"
    text = str(error)
    return text if text.isprintable() and "<" not in text else type(error).__name__


def _kind(status: int, message: str, causes: tuple[str, ...], *, is_status: bool) -> OutcomeKind:
    if is_status and _WEBHOOK.search(message):
        return OutcomeKind.DENIED
    if status == 429:
        return OutcomeKind.BLOCKED_BY_PDB if "DisruptionBudget" in causes else OutcomeKind.TOO_MANY_REQUESTS
    if status == 500 and "more than one PodDisruptionBudget" in message:
        return OutcomeKind.PDB_CONFLICT
    if _PDB_REFUSED.get(status, "\0") in message:
        return OutcomeKind.BLOCKED_BY_PDB
    if status >= 500:
        return OutcomeKind.SERVER_ERROR
    if status == 403 and is_status and not _MISSING_RIGHT.search(message):
        # A node's own pod that the server does not know to be bound yet is retried soon: no policy denies that.
        return OutcomeKind.INVALID if NOT_ON_NODE in message else OutcomeKind.DENIED
    return {
        401: OutcomeKind.UNAUTHORIZED,
        403: OutcomeKind.FORBIDDEN,
        404: OutcomeKind.NOT_FOUND,
        409: OutcomeKind.CONFLICT,
    }.get(status, OutcomeKind.INVALID)


def _read_status(body: bytes) -> tuple[str, tuple[str, ...], bool]:
    """Message, reasons of the causes, and whether the body is a failed Status; if it is none, its plain text."""
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
    entries = details.get("causes") if isinstance(details, dict) else None
    causes = [cause for cause in entries if isinstance(cause, dict)] if isinstance(entries, list) else []
    texts = [cause["message"] for cause in causes if isinstance(cause.get("message"), str)]
    if texts and texts[0] not in message:
        message = f"{message} {texts[0]}"
    # Half a surrogate pair is valid JSON, but cannot be written as UTF-8.
    message = message[:MAX_STATUS_MESSAGE].encode("utf-8", "replace").decode()
    return message, tuple(str(cause.get("reason", "")) for cause in causes), is_status


def _retry_after_s(text: str | None) -> float | None:
    """Retry-After as the API server sends it: whole seconds. None for any other text."""
    return float(text) if text and text.isascii() and text.isdigit() and len(text) < 7 else None


def root_cause(error: BaseException) -> BaseException:
    """The innermost cause; urllib3 stores it as an argument or as `__cause__`."""
    for _ in range(10):
        cause = next((each for each in error.args if isinstance(each, BaseException)), error.__cause__)
        if cause is None:
            break
        error = cause
    return error
