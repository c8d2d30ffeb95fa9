"""Certificates for tests, made by openssl: a CA, a server and clients."""

import ssl
import subprocess
from pathlib import Path


def make(here: Path, *, address: str = "127.0.0.1", clients: tuple[str, ...] = ("client",)) -> Path:
    """`ca`, `server` (for this address) and each client as .crt and .key in `here`, which is returned."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=here, timeout=60)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.crt", "-days", "2", "-subj", "/CN=ca")
    (here / "server.ext").write_text(f"subjectAltName=IP:{address}\n")
    for name in ("server", *clients):
        openssl("req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        extensions = ("-extfile", "server.ext") if name == "server" else ()
        sign = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.crt", *sign, *extensions)
    return here


def server_context(made: Path, *, client_certificates: bool = False) -> ssl.SSLContext:
    """For the server of `make`; with `client_certificates` it talks to nobody without one that the CA signed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made / "server.crt", made / "server.key")
    if client_certificates:
        context.load_verify_locations(made / "ca.crt")
        context.verify_mode = ssl.CERT_REQUIRED
    return context
