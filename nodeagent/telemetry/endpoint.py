"""What the endpoint serves, made from the agent's figures, and where: at one address, which a reload may change."""

import contextlib
from collections.abc import Callable, Mapping

from nodeagent.config.schema import Config
from nodeagent.telemetry import exposition, health
from nodeagent.telemetry.http_server import AddressError, Page, PageBuilder, Server
from nodeagent.telemetry.metrics import Metrics


def build_pages(
    metrics: Metrics, *, config: Callable[[], Config], boottime: Callable[[], float]
) -> Mapping[str, PageBuilder]:
    """`/metrics`, `/healthz`, `/readyz`. `config` is asked each time, because it may be reloaded.

    There is no page with the report: it has names of pods, and whoever reaches the port may read. `nodeagent check`
    tells that to who is on the node.
    """

    def figures(accept: str) -> Page:
        openmetrics = "application/openmetrics-text" in accept
        kind = exposition.OPENMETRICS if openmetrics else exposition.TEXT
        return Page(metrics.render(openmetrics=openmetrics), content_type=kind)

    def alive(_: str) -> Page:
        return _verdict(health.not_alive(metrics.vitals(), now=boottime(), config=config()))

    def ready(_: str) -> Page:
        return _verdict(health.not_ready(metrics.vitals(), now=boottime(), config=config()))

    return {"/metrics": figures, "/healthz": alive, "/readyz": ready}


def _verdict(missing: tuple[str, ...]) -> Page:
    if not missing:
        return Page(b"ok\n")
    return Page("".join(f"{line}\n" for line in missing).encode(), 503)


class Endpoint:
    """The pages at the configured address, or nowhere."""

    def __init__(self, served: Mapping[str, PageBuilder], *, failed: Callable[[str], None]) -> None:
        """`failed` is told of pages that could not be made, from another thread."""
        self._served = served
        self._failed = failed
        self._address = ""
        self._server: Server | None = None

    def move(self, address: str) -> None:
        """Serve at this address from now on; empty: nowhere.

        Raises:
            AddressError: that is not possible; the pages stay where they were.
        """
        if address == self._address:
            return
        # The old one first: `127.0.0.1:9655` and `:9655` cannot be bound at once.
        before = self._address
        self.close()
        try:
            self._open(address)
        except AddressError:
            with contextlib.suppress(
                AddressError
            ):  # somebody took it meanwhile; the new one's error is the one to tell
                self._open(before)
            raise

    def close(self) -> None:
        """Serve no more."""
        if self._server is not None:
            self._server.close()
        self._server, self._address = None, ""

    @property
    def port(self) -> int | None:
        """Where it listens; None: nowhere."""
        return self._server.port if self._server is not None else None

    def _open(self, address: str) -> None:
        if address:
            self._server = Server(address, self._served, failed=self._failed)
        self._address = address
