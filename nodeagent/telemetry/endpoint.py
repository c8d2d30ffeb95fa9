"""The pages of the endpoint and its address, which a reload may change."""

import contextlib
from collections.abc import Callable, Mapping

from nodeagent.config.schema import Config
from nodeagent.telemetry import exposition, health
from nodeagent.telemetry.http_server import AddressError, Page, PageBuilder, Server
from nodeagent.telemetry.metrics import Metrics


def build_pages(
    metrics: Metrics, *, config: Callable[[], Config], boottime: Callable[[], float]
) -> Mapping[str, PageBuilder]:
    """`/metrics`, `/healthz`, `/readyz`. `config` is called for each request, because it may be reloaded.

    There is no page with the report: it contains names of pods, and every client of the port may read. `nodeagent
    check` prints it for users of the node.
    """

    def exposition_page(accept: str) -> Page:
        openmetrics = "application/openmetrics-text" in accept
        kind = exposition.OPENMETRICS if openmetrics else exposition.PROMETHEUS_TEXT
        return Page(metrics.render(openmetrics=openmetrics), content_type=kind)

    def alive(_: str) -> Page:
        return _verdict(health.not_alive(metrics.liveness(), now=boottime(), config=config()))

    def ready(_: str) -> Page:
        return _verdict(health.not_ready(metrics.liveness(), now=boottime(), config=config()))

    return {"/metrics": exposition_page, "/healthz": alive, "/readyz": ready}


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
