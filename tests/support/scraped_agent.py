"""A real Prometheus that scrapes a real agent under pressure, and the node that it is on."""

import json
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
import uuid
from pathlib import Path
from typing import Any, Final

import yaml

from tests.fake_kube import ApiServer, pod
from tests.support.dashboards import Query
from tests.support.livenode import HARD, MIB, Kubepods
from tests.support.paths import REPOSITORY

HOG: Final = str(uuid.uuid4())
CHILL: Final = str(uuid.uuid4())
RANGES: Final = {"$__rate_interval": "30s", "$__range": "1h", "$node": "lab-node"}
"""What Grafana puts in, for a scrape each second."""


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

    def query_range(self, expr: str, *, start: float, end: float, step_s: float) -> list[dict[str, Any]]:
        """The series of a query between two instants of wall time."""
        words = urllib.parse.urlencode({"query": expr, "start": start, "end": end, "step": step_s})
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/query_range?{words}", timeout=30) as answer:
            result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
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


def expression(query: Query) -> str:
    """The query, as Grafana sends it."""
    expr = query.expr
    for variable, value in RANGES.items():
        expr = expr.replace(variable, value)
    return expr


def api_server() -> ApiServer:
    """The API server of the node, with its two pods."""
    pods = [
        pod("hog", uid=HOG, owner=("ReplicaSet", "hog"), qos="Burstable", requests={"memory": "50Mi"}, grace=7),
        pod("chill", uid=CHILL, owner=("ReplicaSet", "chill"), qos="BestEffort"),
    ]
    return ApiServer(node="lab-node", pods=pods, linger_s=None)


def start_pods(kubepods: Kubepods, directory: Path) -> None:
    """The pods' processes, and their volumes below `directory`, the kubelet's."""
    for uid, qos, size in ((HOG, "burstable", 24 * MIB), (CHILL, "besteffort", 3 * MIB)):
        kubepods.start(uid, qos=qos)
        volume = directory / "pods" / uid / "volumes" / "kubernetes.io~empty-dir" / "scratch"
        volume.mkdir(parents=True)
        (volume / "data").write_bytes(b"x" * size)


def configuration(kubepods: Kubepods, directory: Path, *, port: int) -> dict[str, Any]:
    """Memory thresholds for these pods; and a disk that is short, for which nothing is evicted yet, so that the usage
    of the pods is measured."""
    return {
        **HARD,
        "evictionHard": {**HARD["evictionHard"], "nodefs.inodesFree": "1", "pid.available": "1"},
        "evictionSoft": {"nodefs.available": "99%"},
        "evictionSoftGracePeriod": {"nodefs.available": "1h"},
        "sampling": {
            "interval": "200ms",
            "cgroupRoot": f"/{kubepods.root}",
            "kubeletDir": str(directory),
            "podLogsDir": str(directory / "logs"),
        },
        "metrics": {"address": f"127.0.0.1:{port}", "perPod": {"top": 20}},
    }
