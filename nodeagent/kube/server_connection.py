"""The connection pool and the credentials for one API server, read again while the agent runs.

Promises:

1. Configuration, authentication and TLS are those of the official `kubernetes` package (`kubernetes_client`):
   kubeconfigs with exec plugins, tokens and client certificates, and the pod's service account.
2. Credentials are read again once a minute and after a 401: projected tokens, exec plugins, client certificates, and
   the CA and the address in a kubeconfig change. If that fails, the credentials read before stay in use, and `trouble`
   has the reason.
3. White space around a token never reaches a header, and no message contains a token.
4. Reading has a time limit: the package runs exec plugins without one.
"""

import os
import stat
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

from nodeagent.kube import api_errors, deadline_http, kubeconfig, kubernetes_client
from nodeagent.kube.credentials import Credentials, CredentialsError, CredentialSource
from nodeagent.kube.deadline_http import DeadlineResponse
from nodeagent.runtime import workers

with kubernetes_client.without_unused_modules():
    import urllib3

RELOAD_CREDENTIALS_S: Final = 60.0
"""The kubelet renews a projected token at 80% of its life (8 minutes for the shortest), so a minute is early enough."""
RENEW_AFTER_401_S: Final = 5.0
"""Least time between two renewals because of a 401: exec plugins are slow, and a wrong token stays wrong."""
EXEC_PLUGIN_TIMEOUT_S: Final = 30.0
MAX_TOKEN_BYTES: Final = 64 << 10
"""A projected token has 1 to 2 KiB."""
_POOL_SIZE: Final = 12
"""Connections kept open: two or three watches, the eviction workers, one each for conditions and events."""

_T = TypeVar("_T")


class ServerConnection:
    """The pool and the Authorization header for one API server. Safe to use from any thread.

    Raises `CredentialsError` if the credentials cannot be used.
    """

    def __init__(self, credentials: Credentials, *, clock: Callable[[], float], light: bool) -> None:
        """`light` False imports the whole official package."""
        self.credentials = credentials
        self._clock = clock
        self._light = light
        self._renewing = threading.Lock()
        self._uses_kubeconfig = credentials.source is not CredentialSource.SERVICE_ACCOUNT
        self._text = ""
        self._runs_plugin = False
        self._client: Any = None
        self._configuration: Any = None
        self._pool: Any = None
        self._authorization: str | None = None
        self._loaded_at = 0.0
        self._renewed_at = float("-inf")
        self.trouble = ""
        """Why the credentials could not be read again; empty if they could."""
        self._load()

    @property
    def server(self) -> str:
        """URL of the API server."""
        return str(self._configuration.host).rstrip("/")

    @property
    def path_prefix(self) -> str:
        """The path of that URL, without a slash at its end: a proxy with several clusters chooses by it."""
        return (urllib3.util.parse_url(self.server).path or "").rstrip("/")

    @property
    def light(self) -> bool:
        """True if the official package's parents were not executed (`kubernetes_client`)."""
        return bool(self._client.light)

    @property
    def uses_proxy(self) -> bool:
        return isinstance(self._pool, urllib3.ProxyManager)

    def http_pool(self) -> Any:
        """The urllib3 connection pool, with a deadline for every read."""
        pool = self._pool.connection_from_url(self.server)
        if pool.ConnectionCls.response_class is not DeadlineResponse:
            pool.ConnectionCls = deadline_http.with_deadline(pool.ConnectionCls)
        return pool

    def has(self, credentials: Credentials) -> bool:
        """True if these are the credentials in use, and their kubeconfig is as it was when it was loaded."""
        if credentials != self.credentials:
            return False
        try:
            return not self._kubeconfig_changed()
        except CredentialsError:
            return False

    def close(self) -> None:
        """Close idle connections."""
        self._pool.clear()

    def authorization(self) -> str | None:
        """The Authorization header's value, read again once a minute; None without a token."""
        if self._clock() - self._loaded_at >= RELOAD_CREDENTIALS_S and self._renewing.acquire(blocking=False):
            # One thread reads, the others continue with the old token. It is still good while its file is being
            # replaced; if not, the next answer is a 401.
            try:
                self._loaded_at = self._clock()
                self._read_again()
            finally:
                self._renewing.release()
        return self._authorization

    def renew(self, used: str | None) -> bool:
        """After a 401 to a request with the authorization `used`: True if other credentials are available."""
        with self._renewing:
            if self._authorization != used:
                return True
            # A token's file costs nothing to read, and may be renewed at any moment.
            slow = self._runs_plugin or used is None or bool(self._configuration.cert_file)
            if slow and self._clock() - self._renewed_at < RENEW_AFTER_401_S:
                return False
            self._renewed_at = self._clock()
            # Without a token, the file of the client certificate may have been renewed.
            return self._read_again(refused=slow) and (self._authorization != used or used is None)

    # --- reading the credentials ------------------------------------------------------------------------------------

    def _read_again(self, *, refused: bool = False) -> bool:
        """Read the credentials again. False if that fails: those in use stay, and `trouble` has the reason. `refused`:
        the server refused the plugin's credential or the client certificate."""
        failure = self._try(lambda: self._load_changed(refused=refused))
        if self._runs_plugin and not refused:
            # The package runs the plugin again only when its credential has expired. It has to, whatever the file is.
            failure = self._try(self._ask_plugin) or failure
        self.trouble = (
            failure and f"{failure}; the credentials read before stay in use, and are read again every minute"
        )
        return not failure

    def _try(self, read: Callable[[], None]) -> str:
        """Why that fails; empty if it does not."""
        try:
            read()
        except Exception as error:
            # The plugin's library raises anything, and no such error may end the thread of a request.
            return str(error) if isinstance(error, CredentialsError) else api_errors.explain(error)
        return ""

    def _load_changed(self, *, refused: bool) -> None:
        if refused or not self._runs_plugin or self._kubeconfig_changed():
            self._load(new_pool=refused)

    def _ask_plugin(self) -> None:
        self._authorization = _run_within(EXEC_PLUGIN_TIMEOUT_S, self._plugin_authorization)
        self._loaded_at = self._clock()

    def _kubeconfig_changed(self) -> bool:
        """True if the files are not as they were when they were loaded. Raises CredentialsError."""
        return self._uses_kubeconfig and kubeconfig.read_text(self.credentials.kubeconfig) != self._text

    def _plugin_authorization(self) -> str | None:
        with kubeconfig.plugin_errors():
            return self._authorization_of(self._configuration)

    def _load(self, *, new_pool: bool = False) -> None:
        """Read the credentials. `new_pool`: also open a new pool, because certificates may be new."""
        source, paths = self.credentials.source.value, self.credentials.kubeconfig
        text = kubeconfig.read_text(paths) if self._uses_kubeconfig else ""
        client, runs_plugin = self._client, self._runs_plugin
        if client is None or text != self._text:
            new_pool = True
            # Only `auth-provider` needs the whole package, and only `exec` must not run too often.
            light = self._light and "auth-provider" not in text
            client = kubernetes_client.load(kubeconfig=self._uses_kubeconfig, light=light)
            runs_plugin = kubeconfig.runs_plugin(text)
        configuration = client.configuration()
        configuration.retries = False
        configuration.keep_alive = True
        configuration.connection_pool_maxsize = _POOL_SIZE
        try:
            _run_within(EXEC_PLUGIN_TIMEOUT_S, lambda: self._configure(client, configuration))
            authorization = self._authorization_of(configuration)
        except CredentialsError as error:
            raise CredentialsError(f"{source}: {error}") from error
        except Exception as error:
            # The package raises whatever its YAML, JSON and subprocess calls raise; all of it means the same here.
            said = kubeconfig.explain(error, paths) if self._uses_kubeconfig else str(error)
            raise CredentialsError(f"{source}: {said}") from error
        if runs_plugin and authorization is None and not configuration.cert_file:
            raise CredentialsError(f"{source}: the exec plugin gave neither token nor certificate")
        if authorization is None and self._authorization is not None and not configuration.cert_file:
            # The package treats an empty token file as no token, and requests would be anonymous.
            raise CredentialsError(f"{self.credentials.kubeconfig} has no token any more: is its tokenFile empty?")
        pool = self._open_pool(client, configuration) if new_pool else None
        self._client, self._runs_plugin, self._text = client, runs_plugin, text
        self._authorization = authorization
        if pool is not None:
            old, self._configuration, self._pool = self._pool, configuration, pool
            if old is not None:
                old.clear()
        self._loaded_at = self._clock()

    def _open_pool(self, client: Any, configuration: Any) -> Any:
        source = self.credentials.source.value
        try:
            if self._uses_kubeconfig:
                kubeconfig.check(configuration, self.credentials.kubeconfig)
            pool = client.rest_client(configuration).pool_manager
            pool.connection_pool_kw["socket_options"] = deadline_http.SOCKET_OPTIONS
            return pool
        except CredentialsError as error:
            raise CredentialsError(f"{source}: {error}") from error
        except Exception as error:
            # It reads the proxy variables and the certificates, and raises anything.
            if configuration.proxy and not isinstance(error, OSError):
                # Without the error's text: a proxy's URL may contain a password.
                raise CredentialsError(
                    f"{source}: the proxy is not one that can be used ({type(error).__name__}); set HTTPS_PROXY to "
                    "http://HOST:PORT, or unset it"
                ) from error
            raise CredentialsError(f"{source}: {error}") from error

    def _authorization_of(self, configuration: Any) -> str | None:
        """The Authorization header's value; None without a token. The package keeps white space of a token file.

        Raises CredentialsError for a token that no header can contain.
        """
        key = configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        if not key:
            return None
        scheme, _, token = str(key).strip().partition(" ")
        token = token.strip()
        if flaw := _token_flaw(token):
            raise CredentialsError(f"the token of {self.credentials.kubeconfig or 'the service account'} {flaw}")
        return f"{scheme.capitalize()} {token}"

    def _configure(self, client: Any, configuration: Any) -> None:
        credentials = self.credentials
        if credentials.source is CredentialSource.SERVICE_ACCOUNT:
            host, _, port = credentials.server.rpartition(":")
            _check_token_file(f"{credentials.service_account_dir}/token")
            client.in_cluster_loader(
                token_filename=f"{credentials.service_account_dir}/token",
                cert_filename=f"{credentials.service_account_dir}/ca.crt",
                try_refresh_token=False,
                environ={"KUBERNETES_SERVICE_HOST": host.strip("[]"), "KUBERNETES_SERVICE_PORT": port},
            ).load_and_set(configuration)
        else:
            with kubeconfig.plugin_errors():
                client.load_kube_config(
                    config_file=credentials.kubeconfig, client_configuration=configuration, persist_config=False
                )


def _token_flaw(token: str) -> str:
    """Why this cannot be sent as a bearer token; empty if it can. The text does not contain the token."""
    if not token:
        return "is empty: write it again"
    if any(mark in token for mark in "\r\n"):
        return "has more than one line: write it again, as one line of ASCII"
    if not all("!" <= character <= "~" for character in token):
        return "has a character that is no visible ASCII: write it again, as one line of ASCII"
    return ""


def _check_token_file(path: str) -> None:
    """Raises CredentialsError with the file, the problem and the remedy, before the package reads it whole."""
    try:
        with open(path, "rb", opener=_open_nonblocking) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CredentialsError(f"{path} is no regular file; a token belongs there")
            content = file.read(MAX_TOKEN_BYTES + 1)
    except OSError as error:
        raise CredentialsError(f"{path} cannot be read: {error.strerror}; a token belongs there") from error
    if len(content) > MAX_TOKEN_BYTES:
        raise CredentialsError(f"{path} is larger than {MAX_TOKEN_BYTES >> 10} KiB; a token belongs there")
    if flaw := _token_flaw(content.decode("latin-1").strip()):
        raise CredentialsError(f"the token in {path} {flaw}")


def _open_nonblocking(path: str, flags: int) -> int:
    """Does not wait for the writer of a FIFO."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _run_within(seconds: float, work: Callable[[], _T]) -> _T:
    """Run `work` in its own thread, for at most this long: the package runs exec plugins without a time limit."""
    result: list[_T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(work())
        except Exception as error:
            failure.append(error)

    thread = workers.start_thread(run, name="credentials")
    if thread is None:
        # No PID is left for a thread, and then the agent is needed most: read files without the time limit. A plugin
        # cannot be started then either.
        run()
        workers.clear_failed_start("credentials")
    else:
        thread.join(seconds)
    if failure:
        raise failure[0]
    if not result:
        raise CredentialsError(f"loading the credentials took longer than {seconds:.0f} s")
    return result[0]
