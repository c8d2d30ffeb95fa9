"""The pages of the endpoint and its address, which a reload may change."""

import contextlib
from collections.abc import Callable, Mapping
from ipaddress import IPv6Address, ip_address
from typing import Final

from nodeagent.config.schema import Config, PageAccess
from nodeagent.telemetry import exposition, health
from nodeagent.telemetry.http_server import AddressError, Page, PageBuilder, Request, Server
from nodeagent.telemetry.metrics import Metrics

LivePage = Callable[[str], tuple[bytes, str]]
"""Makes the live page for a query: the document and its Content-Security-Policy."""

_LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]", ""})


def build_pages(
    metrics: Metrics,
    *,
    config: Callable[[], Config],
    boottime: Callable[[], float],
    live_page: LivePage | None = None,
) -> Mapping[str, PageBuilder]:
    """`/metrics`, `/healthz`, `/readyz`, and `/` with the live page. `config` is called for each request, because it
    may be reloaded.

    The live page contains names of pods, as nothing else here does by default: see `may_see_page`.
    """

    def exposition_page(request: Request) -> Page:
        openmetrics = "application/openmetrics-text" in request.accept
        kind = exposition.OPENMETRICS if openmetrics else exposition.PROMETHEUS_TEXT
        return Page(metrics.render(openmetrics=openmetrics), content_type=kind)

    def alive(_: Request) -> Page:
        return _verdict(health.not_alive(metrics.liveness(), now=boottime(), config=config()))

    def ready(_: Request) -> Page:
        return _verdict(health.not_ready(metrics.liveness(), now=boottime(), config=config()))

    def live(request: Request) -> Page:
        access = config().metrics.page
        if live_page is None or access is PageAccess.OFF:
            return Page(b"metrics.page is off\n", 404)
        if not may_see_page(request, access):
            return Page(b"only for clients on this node: see metrics.page, or use kubectl port-forward\n", 403)
        document, policy = live_page(request.query)
        return Page(document, content_type="text/html; charset=utf-8", headers=_page_headers(policy))

    return {"/metrics": exposition_page, "/healthz": alive, "/readyz": ready, "/": live}


def may_see_page(request: Request, access: PageAccess) -> bool:
    """True if this client may see the names of pods.

    With `loopback` it must be on this host, or in the agent's pod, and must have asked for it by a loopback name: a web
    site whose name an attacker resolves to 127.0.0.1 would otherwise read it through a browser with a port-forward.
    """
    if access is PageAccess.ALL:
        return True
    if access is PageAccess.OFF:
        return False
    try:
        address = ip_address(request.peer.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    name, colon, port = request.host.rpartition(":")
    host = name if colon and port.isdigit() else request.host
    return address.is_loopback and host.lower() in _LOCAL_NAMES


def _page_headers(policy: str) -> tuple[tuple[str, str], ...]:
    return (
        ("Content-Security-Policy", f"{policy}; frame-ancestors 'none'"),
        ("X-Frame-Options", "DENY"),
        ("Referrer-Policy", "no-referrer"),
        ("Cross-Origin-Resource-Policy", "same-origin"),
    )


def _verdict(missing: tuple[str, ...]) -> Page:
    if not missing:
        return Page(b"ok\n")
    return Page("".join(f"{line}\n" for line in missing).encode(), 503)


class Endpoint:
    """The pages at the configured address, or nowhere."""

    def __init__(self, pages: Mapping[str, PageBuilder], *, failed: Callable[[str], None]) -> None:
        """`failed` is called with the error of a page, from another thread."""
        self._pages = pages
        self._failed = failed
        self._address = ""
        self._server: Server | None = None

    def move(self, address: str) -> None:
        """Serve at this address from now on; empty: at none.

        Raises:
            AddressError: the address cannot be used; the old one stays.
        """
        if address == self._address:
            return
        # Close the old one first: `127.0.0.1:9655` and `:9655` cannot be bound at once.
        before = self._address
        self.close()
        try:
            self._open(address)
        except AddressError:
            # If the old address is taken meanwhile, the error of the new one is reported.
            with contextlib.suppress(AddressError):
                self._open(before)
            raise

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.close()
        self._server, self._address = None, ""

    @property
    def port(self) -> int | None:
        """The port it listens on; None: not serving."""
        return self._server.port if self._server is not None else None

    def _open(self, address: str) -> None:
        if address:
            self._server = Server(address, self._pages, failed=self._failed)
        self._address = address
