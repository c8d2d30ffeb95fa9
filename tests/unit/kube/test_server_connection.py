"""TLS and client certificates follow the kubeconfig."""

import base64
import json
import shutil
import threading
import time
from pathlib import Path

import pytest

from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.credentials import find_credentials
from nodeagent.kube.pod_watch import PodWatch
from nodeagent.kube.transport import Transport, connect
from nodeagent.model import OutcomeKind
from tests.fake_kube import ApiServer, pod
from tests.support.certificates import make, server_context

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA, and what it signed: a server on 127.0.0.1 and two clients."""
    return make(tmp_path_factory.mktemp("tls"), clients=("client", "renewed"))


def serve(certificates: Path, *, client_certificates: bool = False) -> ApiServer:
    return ApiServer(tls=server_context(certificates, client_certificates=client_certificates), pods=[pod("one")])


def trusted(api: ApiServer, certificates: Path, tmp_path: Path, *, ca: str = "ca.crt", client: str = "") -> Transport:
    path = api.kubeconfig(tmp_path / "kubeconfig")
    config = json.loads(path.read_text())
    authority = (certificates / ca).read_bytes() if ca else b""
    if authority:
        config["clusters"][0]["cluster"]["certificate-authority-data"] = base64.b64encode(authority).decode()
    if client:
        # As in /etc/kubernetes/kubelet.conf: files that are renewed in place.
        config["users"][0]["user"].update({"client-certificate": client + ".crt", "client-key": client + ".key"})
    path.write_text(json.dumps(config))
    return connect(find_credentials(str(path)), request_timeout_s=10.0)


def test_a_server_with_a_certificate_of_the_kubeconfigs_ca_is_accepted(certificates: Path, tmp_path: Path) -> None:
    with serve(certificates) as api:
        transport = trusted(api, certificates, tmp_path)
        assert transport.request("GET", "/version").status == 200


def test_a_server_with_an_unknown_certificate_is_unreachable(certificates: Path, tmp_path: Path) -> None:
    with serve(certificates) as api:
        transport = trusted(api, certificates, tmp_path, ca="")
        with pytest.raises(ApiError, match="certificate") as refused:
            transport.request("GET", "/version")
        assert refused.value.kind is OutcomeKind.UNREACHABLE
        assert not api.requests, "the token has not left this machine"


def test_a_client_certificate_is_sent_and_read_again_when_renewed(certificates: Path, tmp_path: Path) -> None:
    def install(name: str) -> None:
        for kind in ("crt", "key"):
            shutil.copy(certificates / f"{name}.{kind}", tmp_path / f"current.{kind}")

    with serve(certificates, client_certificates=True) as api:
        install("client")
        transport = trusted(api, certificates, tmp_path, client="current")
        assert transport.request("GET", "/version").status == 200
        install("renewed")
        transport.close()
        assert transport.request("GET", "/version").status == 200
        without = trusted(api, certificates, tmp_path)
        with pytest.raises(ApiError):
            without.request("GET", "/version")


def test_a_watch_over_tls_ends_at_once_when_stopped(certificates: Path, tmp_path: Path) -> None:
    with serve(certificates) as api:
        watch = PodWatch(trusted(api, certificates, tmp_path), "lab-node")
        watch.start()
        assert api.wait_for(lambda: [r for r in api.requests if "watch" in r.query])
        before = [t for t in threading.enumerate() if t.name == "pods"]
        began = time.monotonic()
        watch.stop()
        assert time.monotonic() - began < 1
        assert len([t for t in before if t.is_alive()]) == len(before) - 1
