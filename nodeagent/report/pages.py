"""The pages that the endpoint serves: what stands on each, made from the agent's figures."""

from collections.abc import Callable, Mapping

from nodeagent.config.schema import Config
from nodeagent.report import exposition, health
from nodeagent.report.metrics import Metrics
from nodeagent.report.server import Maker, Page


def pages(metrics: Metrics, *, config: Callable[[], Config], boottime: Callable[[], float]) -> Mapping[str, Maker]:
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
