"""Every query of the dashboards and alerts, run by a real Prometheus that scrapes a real agent under pressure."""

import functools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_kube import ApiServer
from tests.support import scraped_agent
from tests.support.dashboards import FLEET, NODE
from tests.support.livenode import Kubepods, StartAgent, needs_cgroup_v1, until
from tests.support.scraped_agent import CHILL, HOG, Prometheus

pytestmark = [
    pytest.mark.real_cgroup,
    needs_cgroup_v1,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus (Debian: prometheus)"),
]


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with scraped_agent.api_server() as server:
        yield server


def test_no_panel_is_empty_after_an_eviction_and_the_figures_are_those_of_the_agent(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent, tmp_path: Path
) -> None:
    port = scraped_agent.free_port()
    scraped_agent.start_pods(kubepods, tmp_path)
    agent = start_agent(**scraped_agent.configuration(kubepods, tmp_path, port=port))
    prometheus = Prometheus(tmp_path, agent_port=port)
    try:
        until(lambda: prometheus.query("nodeagent_sync_age_seconds"), "the first scrape")
        kubepods.eat(CHILL, 5)
        kubepods.eat(HOG, 400)
        assert api.wait_for(lambda: api.sent("POST", "/eviction"), 60), agent.events()
        evicted = 'nodeagent_evictions_total{outcome="accepted"}'
        until(lambda: prometheus.query(evicted), "the eviction in the metrics")
        for dashboard in (NODE, FLEET):
            for panel in dashboard.panels:
                for query in panel.queries:
                    if "increase(nodeagent_evictions" in query.expr:
                        shown = f"max(max_over_time(({scraped_agent.expression(query)})[10m:1s])) > 0"
                        until(functools.partial(prometheus.query, shown), f"the first eviction in {panel.title}")
        for dashboard in (NODE, FLEET):
            for panel in dashboard.panels:
                for query in panel.queries:
                    expr = scraped_agent.expression(query)
                    what = f"data of {dashboard.title}, {panel.title}, {query.legend}: {expr}"
                    until(functools.partial(prometheus.query, expr), what, timeout_s=40)
        until(
            lambda: (
                sum(int(each["value"][1]) for each in prometheus.query(evicted)) == len(api.sent("POST", "/eviction"))
            ),
            "every eviction that the API server accepted",
        )
        [wanted] = prometheus.query('nodeagent_condition_wanted{condition="MemoryPressure", status="True"}')
        assert wanted["value"][1] == "1"
        on_disk = {
            (each["metric"]["namespace"], each["metric"]["pod"]): int(each["value"][1])
            for each in prometheus.query("nodeagent_pod_disk_bytes")
        }
        assert on_disk.keys() == {("default", "hog"), ("default", "chill")}
        assert on_disk["default", "hog"] > 20 << 20 > on_disk["default", "chill"] > 2 << 20
        assert "NodeAgentNotSyncing" not in prometheus.alerts(), "and no rule has an error"
    finally:
        prometheus.close()
    assert agent.stop() == 0
