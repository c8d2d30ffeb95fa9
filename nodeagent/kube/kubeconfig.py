"""Reads and checks a kubeconfig for `server_connection`: an error names the file, the key and the remedy."""

import contextlib
import logging
import re
import ssl
import threading
from collections.abc import Iterator
from typing import Any, Final

from nodeagent.kube.credentials import CredentialsError
from nodeagent.runtime import regular_files

_MAX_BYTES: Final = 1 << 20
"""Hundreds of clusters with their certificates. The package's YAML parser takes a second for that much."""
_ENTRY: Final = re.compile(r"/\{.*\}")
_NO_KUBECONFIG: Final = (
    "no kubeconfig: it must be a mapping with the lists `clusters`, `users` and `contexts`, and `current-context`"
)


def read_text(paths: str) -> str:
    """The text of one kubeconfig, or of several separated by `:`. Raises CredentialsError."""
    texts = []
    for path in paths.split(":"):
        try:
            content = regular_files.read_file(path, max_bytes=_MAX_BYTES + 1)
        except OSError as error:
            raise CredentialsError(f"{path}: {error.strerror}") from error
        if len(content) > _MAX_BYTES:
            raise CredentialsError(f"{path}: larger than {_MAX_BYTES >> 20} MiB, which is no kubeconfig")
        texts.append(content.decode("utf-8", "replace"))
    return "\n".join(texts)


def runs_plugin(text: str) -> bool:
    """Whether a user of this kubeconfig may get the credentials from an exec plugin."""
    return "exec:" in text or '"exec"' in text


def explain(error: Exception, paths: str) -> str:
    """Why these files cannot be used, from what the official package raised."""
    if isinstance(error, TypeError | AttributeError | KeyError | IndexError):
        return f"{paths}: {_NO_KUBECONFIG}"
    # The package quotes a whole entry of `users`, with its token.
    text = _ENTRY.sub("", " ".join(str(error).split()))
    for said in ("Invalid kube-config file. ", "Invalid kube-config. "):
        text = text.removeprefix(said)
    where = "" if any(path in text for path in paths.split(":")) else f"{paths}: "
    return f"{where}{text}; correct the file (`kubectl config view` prints it)"


def check(configuration: Any, paths: str) -> None:
    """Raises CredentialsError for a server, a CA or a client certificate with which every request would fail."""
    server = str(configuration.host or "")
    if not server.startswith(("https://", "http://")):
        raise CredentialsError(f"{paths}: `clusters[].cluster.server` must be https://HOST:PORT, not {server!r}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if configuration.ssl_ca_cert:
        try:
            context.load_verify_locations(configuration.ssl_ca_cert)
        except OSError as error:
            raise CredentialsError(
                f"{paths}: `clusters[].cluster.certificate-authority` (or `-data`) has no PEM certificate; "
                "take it from a kubeconfig that works"
            ) from error
    if configuration.cert_file:
        try:
            # A password would otherwise be asked for on the terminal.
            context.load_cert_chain(configuration.cert_file, configuration.key_file, password="")
        except OSError as error:
            raise CredentialsError(
                f"{paths}: `users[].user.client-certificate` and `client-key` (or `-data`) are no PEM certificate with "
                "its private key; renew them"
            ) from error


@contextlib.contextmanager
def plugin_errors() -> Iterator[None]:
    """Meanwhile, an error of an exec plugin that the package would only log is raised, as a CredentialsError."""
    errors = _ErrorsOfThisThread()
    logging.root.addHandler(errors)
    try:
        yield
    finally:
        logging.root.removeHandler(errors)
    if errors.texts:
        raise CredentialsError(f"the exec plugin failed: {errors.texts[-1].removeprefix('exec: ')}")


class _ErrorsOfThisThread(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "root" and record.thread == self._thread:
            self.texts.append(record.getMessage())
