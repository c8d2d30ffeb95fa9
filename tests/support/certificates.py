"""Certificates for tests, made by openssl as a cluster's are: a CA, a server and clients."""

import ssl
import subprocess
from pathlib import Path


def make(here: Path, *, address: str = "127.0.0.1", clients: tuple[str, ...] = ("client",)) -> Path:
    """`ca`, `server` (for this address) and each client as .crt and .key in `here`, which is returned."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=here, timeout=60)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    # Python 3.13 wants certificates by the letter of RFC 5280: the usage of the key, and whose it is.
    usage = "keyUsage=critical,digitalSignature,keyEncipherment"
    authority = ("-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=ca", "-addext", f"{usage},keyCertSign")
    openssl("req", "-x509", *curve, "-days", "2", *authority)
    for name in ("server", *clients):
        openssl("req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        names = f"subjectAltName=IP:{address}\n" if name == "server" else ""
        (here / "extensions").write_text(f"{usage}\nsubjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n{names}")
        sign = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "extensions")
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.crt", *sign)
    return here


def server_context(made: Path, *, client_certificates: bool = False) -> ssl.SSLContext:
    """For the server of `make`; with `client_certificates` it accepts no connection without one that the CA signed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made / "server.crt", made / "server.key")
    if client_certificates:
        context.load_verify_locations(made / "ca.crt")
        context.verify_mode = ssl.CERT_REQUIRED
    return context
