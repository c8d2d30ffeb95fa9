"""Every query of the dashboards and alerts, run by a real Prometheus that scrapes a real agent under pressure."""

import functools
import json
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fake_kube import ApiServer, pod
from tests.support.dashboards import FLEET, NODE, Dashboard
from tests.support.livenode import HARD, Kubepods, StartAgent, needs_cgroup_v1, until
from tests.support.paths import REPOSITORY

pytestmark = [
    pytest.mark.real_cgroup,
    needs_cgroup_v1,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus (Debian: prometheus)"),
]
HOG, CHILL = str(uuid.uuid4()), str(uuid.uuid4())
RANGES = {"$__rate_interval": "30s", "$__range": "1h", "$node": "lab-node"}
"""What Grafana puts in, for a scrape each second."""


@pytest.fixture
def api() -> Iterator[ApiServer]:
    pods = [
        pod("hog", uid=HOG, owner=("ReplicaSet", "hog"), qos="Burstable", requests={"memory": "50Mi"}, grace=7),
        pod("chill", uid=CHILL, owner=("ReplicaSet", "chill"), qos="BestEffort"),
    ]
    with ApiServer(node="lab-node", pods=pods, linger_s=None) as server:
        yield server


class Prometheus:
    """The real program with the rules of `monitoring/`, scraping one agent each second."""

    def __init__(self, directory: Path, *, agent_port: int) -> None:
        self.port = free_port()
        target = {"targets": [f"127.0.0.1:{agent_port}"], "labels": {"node": "lab-node"}}
        content = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(REPOSITORY / "monitoring" / "alerts.yaml")],
            "scrape_configs": [{"job_name": "nodeagent", "static_configs": [target]}],
        }
        (directory / "prometheus.yml").write_text(yaml.safe_dump(content))
        self._log = (directory / "prometheus.log").open("wb")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
            ],
            stdout=self._log,
            stderr=self._log,
        )

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The samples of an instant query now. No answer yet counts as none."""
        url = f"http://127.0.0.1:{self.port}/api/v1/query?{urllib.parse.urlencode({'query': expr})}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                content = json.load(answer)
        except ConnectionError:
            return []
        except urllib.error.HTTPError as error:
            error.close()
            if error.code != 503:  # until it has read its storage
                raise
            return []
        except urllib.error.URLError as error:
            if isinstance(error.reason, ConnectionError):
                return []
            raise
        result: list[dict[str, Any]] = content["data"]["result"]
        return result

    def alerts(self) -> set[str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/rules", timeout=30) as answer:
            groups = json.load(answer)["data"]["groups"]
        assert [rule["lastError"] for group in groups for rule in group["rules"] if rule.get("lastError")] == []
        return {rule["name"] for group in groups for rule in group["rules"] if rule["state"] != "inactive"}

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._log.close()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def queries(dashboard: Dashboard) -> dict[str, str]:
    found = {}
    for panel in dashboard.panels:
        for query in panel.queries:
            expr = query.expr
            for variable, value in RANGES.items():
                expr = expr.replace(variable, value)
            found[f"{dashboard.title}, {panel.title}, {query.legend}"] = expr
    return found


def test_no_panel_is_empty_after_an_eviction_and_the_figures_are_those_of_the_agent(
    kubepods: Kubepods, api: ApiServer, start_agent: StartAgent, tmp_path: Path
) -> None:
    port = free_port()
    kubepods.start(HOG, qos="burstable")
    kubepods.start(CHILL, qos="besteffort")
    changes: dict[str, Any] = {
        **HARD,
        "evictionHard": {**HARD["evictionHard"], "nodefs.inodesFree": "1", "pid.available": "1"},
        "sampling": {"interval": "200ms", "cgroupRoot": f"/{kubepods.root}", "kubeletDir": str(tmp_path)},
        "metrics": {"address": f"127.0.0.1:{port}"},
    }
    agent = start_agent(**changes)
    prometheus = Prometheus(tmp_path, agent_port=port)
    try:
        until(lambda: prometheus.query("nodeagent_sync_age_seconds"), "the first scrape")
        kubepods.eat(CHILL, 5)
        kubepods.eat(HOG, 400)
        assert api.wait_for(lambda: api.sent("POST", "/eviction"), 60), agent.events()
        evicted = 'nodeagent_evictions_total{outcome="accepted"}'
        until(lambda: prometheus.query(evicted), "the eviction in the metrics")
        for dashboard in (NODE, FLEET):
            for where, expr in queries(dashboard).items():
                until(functools.partial(prometheus.query, expr), f"data of {where}: {expr}", timeout_s=40)
        until(
            lambda: (
                sum(int(each["value"][1]) for each in prometheus.query(evicted)) == len(api.sent("POST", "/eviction"))
            ),
            "every eviction that the API server accepted",
        )
        [wanted] = prometheus.query('nodeagent_condition_wanted{condition="MemoryPressure", status="True"}')
        assert wanted["value"][1] == "1"
        assert "NodeAgentNotSyncing" not in prometheus.alerts(), "and no rule has an error"
    finally:
        prometheus.close()
    assert agent.stop() == 0
