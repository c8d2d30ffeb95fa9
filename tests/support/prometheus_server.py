"""Debian's Prometheus with a data set in its storage, for tests of what reads its HTTP API.

`NodeSeries` writes what node_exporter and the kubelet's cAdvisor expose of one node: their metric names, their labels.
"""

import contextlib
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

needs_prometheus: Final = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None, reason="no Prometheus (Debian: prometheus)"
)
START_S: Final = 30.0
PODS_SLICE: Final = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{uid}.slice"


class NodeSeries:
    """The series of one node, written as OpenMetrics."""

    def __init__(self, node: str, *, start: float, step_s: float, count: int) -> None:
        self.node, self.start, self.step_s, self.count = node, start, step_s, count
        self._metrics: dict[str, list[str]] = {}

    def add(
        self, metric: str, value: Callable[[int], float | None], *, of: str = "node-exporter", **labels: str
    ) -> None:
        """A series: `value` gets the number of the step; None leaves it out."""
        own = {
            "node-exporter": {"job": "node-exporter", "instance": f"{self.node}:9100"},
            "cadvisor": {"job": "kubelet", "metrics_path": "/metrics/cadvisor", "node": self.node},
        }[of]
        text = ",".join(f'{name}="{each}"' for name, each in {**own, **labels}.items())
        lines = self._metrics.setdefault(metric, [])
        for number in range(self.count):
            amount = value(number)
            if amount is not None:
                lines.append(f"{metric}{{{text}}} {amount:.10g} {self.start + number * self.step_s:.3f}")

    def add_pod(self, namespace: str, pod: str, uid: str, memory: Callable[[int], float | None]) -> None:
        """The series of a pod's cgroup, and of its container, which readers must not count again."""
        cgroup = PODS_SLICE.format(uid=uid.replace("-", "_"))
        names = {"namespace": namespace, "pod": pod}
        for metric in ("container_memory_working_set_bytes", "container_memory_rss"):
            self.add(metric, memory, of="cadvisor", id=cgroup, container="", image="", **names)
            container = f"{cgroup}/cri-containerd-0123.scope"
            self.add(metric, memory, of="cadvisor", id=container, container="main", image="x", **names)
        self.add(
            "container_start_time_seconds",
            lambda _: self.start - 3600,
            of="cadvisor",
            id=cgroup,
            container="",
            image="",
            **names,
        )

    def write(self, path: Path) -> None:
        """The OpenMetrics file."""
        lines = []
        for metric, own in self._metrics.items():
            lines += [f"# TYPE {metric} gauge", *own]
        path.write_text("\n".join([*lines, "# EOF", ""]), "utf-8")


@contextlib.contextmanager
def running_prometheus(directory: Path, openmetrics: Path, *, config: str = "") -> Iterator[str]:
    """A server whose storage has these series; its address."""
    storage = directory / "storage"
    command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(openmetrics), str(storage)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert made.returncode == 0, made.stderr
    configuration = directory / "prometheus.yml"
    configuration.write_text(config or "global: {scrape_interval: 1h}\n", "utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={configuration}",
            f"--storage.tsdb.path={storage}",
            "--storage.tsdb.retention.time=10y",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_until_ready(f"{address}/-/ready", server)
        yield address
    finally:
        server.terminate()
        server.wait(timeout=30)


def _wait_until_ready(address: str, server: "subprocess.Popen[bytes]") -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        assert server.poll() is None, "prometheus ended"
        try:
            with urllib.request.urlopen(address, timeout=1) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("prometheus was not ready in time")
