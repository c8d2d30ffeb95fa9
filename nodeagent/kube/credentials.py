"""Finds credentials for an API server in files and the environment.

It imports nothing heavy and opens no connection, so that a command on a machine without a cluster costs only a few
`stat` calls. `transport.connect` loads the credentials."""

import enum
import os
from collections.abc import Mapping
from typing import Final, NamedTuple

SERVICE_ACCOUNT_DIR: Final = "/var/run/secrets/kubernetes.io/serviceaccount"


class CredentialSource(enum.StrEnum):
    """Where credentials come from, in the order of the search."""

    EXPLICIT = "kubeconfig"
    """`--kubeconfig` or the configuration's `cluster.kubeconfig`."""
    ENVIRONMENT = "$KUBECONFIG"
    SERVICE_ACCOUNT = "service account"
    HOME = "~/.kube/config"
    NONE = "none"


class CredentialsError(Exception):
    """The credentials cannot be used: no file, no context, an exec plugin that fails. The message has the reason."""


class Credentials(NamedTuple):
    """The credentials. With `source` NONE, `reason` states why there are none."""

    source: CredentialSource
    kubeconfig: str = ""
    """Kubeconfig file, or several separated by `:` as in $KUBECONFIG; empty for a service account."""
    service_account_dir: str = ""
    """Directory with `token` and `ca.crt`; empty for a kubeconfig."""
    server: str = ""
    """`host:port` of the API server, for a service account only."""
    reason: str = ""
    """Why there are none."""

    @property
    def found(self) -> bool:
        return self.source is not CredentialSource.NONE


def find_credentials(
    kubeconfig: str = "",
    *,
    environ: Mapping[str, str] = os.environ,
    service_account_dir: str = SERVICE_ACCOUNT_DIR,
) -> Credentials:
    """The first of: the kubeconfig given, $KUBECONFIG, the pod's service account, ~/.kube/config.

    A missing file that was configured ends the search: a configured cluster must not be replaced by another one.
    """
    if kubeconfig:
        return _from_files(CredentialSource.EXPLICIT, kubeconfig, environ)
    if environ.get("KUBECONFIG"):
        return _from_files(CredentialSource.ENVIRONMENT, environ["KUBECONFIG"], environ)
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "")
    if host and port and os.path.isfile(os.path.join(service_account_dir, "token")):
        server = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return Credentials(CredentialSource.SERVICE_ACCOUNT, service_account_dir=service_account_dir, server=server)
    home = _expand("~/.kube/config", environ)
    if home and os.path.isfile(home):
        return Credentials(CredentialSource.HOME, kubeconfig=home)
    reason = "no --kubeconfig, no $KUBECONFIG, no service account, no ~/.kube/config"
    if host and port:
        reason = f"the service account's token is missing in {service_account_dir}, and there is no kubeconfig"
    return Credentials(CredentialSource.NONE, reason=reason)


def _from_files(source: CredentialSource, paths: str, environ: Mapping[str, str]) -> Credentials:
    names = [_expand(path, environ) for path in paths.split(os.pathsep) if path]
    present = [name for name in names if os.path.isfile(name)]
    if not present:
        problem = "is no regular file" if any(map(os.path.exists, names)) else "does not exist"
        return Credentials(CredentialSource.NONE, reason=f"{source.value}: {paths} {problem}")
    return Credentials(source, kubeconfig=os.pathsep.join(present))


def _expand(path: str, environ: Mapping[str, str]) -> str:
    """The path with $HOME for `~`; "" without $HOME (a systemd unit without a home)."""
    if not path.startswith("~/"):
        return path
    home = environ.get("HOME", "")
    return os.path.join(home, path[2:]) if home else ""
