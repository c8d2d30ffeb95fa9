"""TLS and client certificates as a kubeconfig has them."""

import base64
import json
import shutil
import ssl
import subprocess
import threading
import time
from pathlib import Path

import pytest

from nodeagent.cluster.credentials import find_credentials
from nodeagent.cluster.pods import PodWatch
from nodeagent.cluster.transport import ApiError, Transport, connect
from nodeagent.model import OutcomeKind
from tests.apiserver import ApiServer, pod

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA, and what it signed: a server on 127.0.0.1 and two clients."""
    here = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=here, timeout=60)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.crt", "-days", "2", "-subj", "/CN=ca")
    (here / "server.ext").write_text("subjectAltName=IP:127.0.0.1\n")
    for name in ("server", "client", "renewed"):
        openssl("req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        extensions = ("-extfile", "server.ext") if name == "server" else ()
        sign = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.crt", *sign, *extensions)
    return here


def serve(certificates: Path, *, client_certificates: bool = False) -> ApiServer:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.crt", certificates / "server.key")
    if client_certificates:
        context.load_verify_locations(certificates / "ca.crt")
        context.verify_mode = ssl.CERT_REQUIRED
    return ApiServer(tls=context, pods=[pod("one")])


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
    return connect(find_credentials(str(path)), request_timeout_s=2.0)


def test_a_server_that_the_kubeconfigs_ca_signed_is_talked_to(certificates: Path, tmp_path: Path) -> None:
    with serve(certificates) as api:
        transport = trusted(api, certificates, tmp_path)
        assert transport.light
        assert transport.request("GET", "/version").status == 200


def test_a_server_that_nobody_vouches_for_is_unreachable(certificates: Path, tmp_path: Path) -> None:
    with serve(certificates) as api:
        transport = trusted(api, certificates, tmp_path, ca="")
        with pytest.raises(ApiError, match="certificate") as refused:
            transport.request("GET", "/version")
        assert refused.value.kind is OutcomeKind.UNREACHABLE
        assert not api.requests, "the token has not left this machine"


def test_a_client_certificate_is_shown_and_read_again_when_renewed(certificates: Path, tmp_path: Path) -> None:
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
