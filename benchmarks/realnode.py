"""A full node for benchmarks: pods in real v1 cgroups, each with a process in its sandbox and in one container.

Needs root and cgroup v1. All cgroups are below one scratch cgroup and are removed at the end.
"""

import os
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from nodeagent.config.schema import SamplingConfig
from nodeagent.model import Container, Owner, Pod, PodSource, QOSClass, Resources

HIERARCHIES = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup/pids"))
MI, GI = 1 << 20, 1 << 30


class PodIds(NamedTuple):
    uid: str
    sandbox: str
    container: str

    @property
    def path(self) -> str:
        return f"kubepods/burstable/pod{self.uid}"

    @property
    def name(self) -> str:
        return f"app-{self.uid[:8]}"


class RealNode(NamedTuple):
    root: str
    """The scratch cgroup, as a kubelet's cgroupRoot."""
    logs: Path
    pods: tuple[PodIds, ...]

    def config(self) -> SamplingConfig:
        return SamplingConfig(cgroup_root=f"/{self.root}", pod_logs_dir=str(self.logs / "pods"))

    def api_pods(self) -> tuple[Pod, ...]:
        """The pods as the API server would list them."""
        return tuple(
            Pod(
                pod.uid,
                pod.uid,
                "default",
                pod.name,
                PodSource.API,
                QOSClass.BURSTABLE,
                priority=0,
                phase="Running",
                created_wall=time.time() - 60,
                started_wall=time.time() - 60,
                containers=(
                    Container("c", requests=Resources(100, 16 * MI), container_id=pod.container, running=True),
                ),
                owner=Owner("ReplicaSet", pod.name, f"owner-{pod.uid}"),
                ready=True,
            )
            for pod in self.pods
        )


@contextmanager
def real_node(pods: int) -> Iterator[RealNode]:
    """Create the node. Raises PermissionError if cgroups cannot be created."""
    directory = Path(tempfile.mkdtemp())
    node = RealNode(
        f"nodeagent-bench-{uuid.uuid4().hex[:8]}",
        directory,
        tuple([PodIds(str(uuid.uuid4()), uuid.uuid4().hex * 2, uuid.uuid4().hex * 2) for _ in range(pods)]),
    )
    made: list[Path] = []
    processes: list[subprocess.Popen[bytes]] = []
    try:
        _make(node, made)
        _fill(node, processes)
        yield node
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        for path in reversed(made):
            _remove(path)
        shutil.rmtree(directory)


def _make(node: RealNode, made: list[Path]) -> None:
    below = ["", "kubepods", "kubepods/burstable", "kubepods/besteffort"]
    for pod in node.pods:
        below += [pod.path, f"{pod.path}/{pod.sandbox}", f"{pod.path}/{pod.container}"]
    for hierarchy in HIERARCHIES:
        for path in below:
            (hierarchy / node.root / path).mkdir()
            made.append(hierarchy / node.root / path)
    (HIERARCHIES[0] / node.root / "kubepods/memory.limit_in_bytes").write_text(str(64 * GI))
    (node.logs / "containers").mkdir()
    for pod in node.pods:
        (node.logs / f"pods/default_{pod.name}_{pod.uid}").mkdir(parents=True)
        (node.logs / f"containers/{pod.name}_default_c-{pod.container}.log").symlink_to("nowhere")


def _fill(node: RealNode, processes: list[subprocess.Popen[bytes]]) -> None:
    for pod in node.pods:
        for identity in (pod.sandbox, pod.container):
            process = subprocess.Popen(["sleep", "3600"])
            processes.append(process)
            for hierarchy in HIERARCHIES:
                (hierarchy / node.root / pod.path / identity / "cgroup.procs").write_text(str(process.pid))
            # A sandbox's -998 would need CAP_SYS_RESOURCE; a sandbox is recognized by its missing log link.
            Path(f"/proc/{process.pid}/oom_score_adj").write_text("990")


def _remove(path: Path) -> None:
    deadline = time.monotonic() + 20
    while path.exists():
        try:
            path.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            os.sched_yield()
