"""Real v1 cgroups in the layout of a kubelet, with real processes in them."""

import os
import select
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Final

from nodeagent.config.schema import SamplingConfig
from nodeagent.model import QOSClass
from tests.support.livenode import remove_cgroup

MEMORY: Final = Path("/sys/fs/cgroup/memory")
PIDS: Final = Path("/sys/fs/cgroup/pids")


def reason_against() -> str:
    """Why this machine does not permit it; empty if it does."""
    if os.geteuid() != 0:
        return "needs root"
    for top in (MEMORY, PIDS):
        if not (top / "cgroup.procs").exists():
            return f"needs a cgroup v1 hierarchy at {top}"
        if not os.access(top, os.W_OK):
            return f"{top} is not writable"
    return ""


def is_readable(descriptor: int, *, timeout_s: float = 0.0) -> bool:
    """Wait for it so long. Other tests keep descriptors open, and select.select takes none above 1023."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


class KubeletCgroups:
    """Makes pod-shaped cgroups below a scratch cgroup, and processes in them."""

    def __init__(self, logs: Path) -> None:
        self.root = f"/nodeagent-test-{uuid.uuid4().hex[:8]}"
        self.logs = logs
        self.processes: list[subprocess.Popen[bytes]] = []
        self.made: list[Path] = []
        (logs / "containers").mkdir(parents=True)
        (logs / "pods").mkdir()
        for path in ("", "/kubepods", "/kubepods/burstable", "/kubepods/besteffort"):
            self.mkdir(self.root + path)

    def config(self) -> SamplingConfig:
        return SamplingConfig(cgroup_root=self.root, pod_logs_dir=str(self.logs / "pods"))

    def mkdir(self, path: str) -> None:
        for top in (MEMORY, PIDS):
            (top / path.lstrip("/")).mkdir()
            self.made.append(top / path.lstrip("/"))

    def pod(self, name: str, qos: QOSClass = QOSClass.BURSTABLE) -> str:
        """The new pod's UID."""
        uid = str(uuid.uuid4())
        self.mkdir(self.path(uid, qos))
        (self.logs / "pods" / f"default_{name}_{uid}").mkdir()
        return uid

    def path(self, uid: str, qos: QOSClass = QOSClass.BURSTABLE) -> str:
        middle = {QOSClass.GUARANTEED: "", QOSClass.BURSTABLE: "burstable/", QOSClass.BEST_EFFORT: "besteffort/"}[qos]
        return f"{self.root}/kubepods/{middle}pod{uid}"

    def container(self, uid: str, code: str, *, name: str, inner: str = "", score: int | None = None) -> str:
        """Path of the cgroup of a new container of a Burstable pod, whose `code` runs and has printed `ready`."""
        identity = uuid.uuid4().hex * 2
        path = f"{self.path(uid)}/{identity}"
        self.mkdir(path)
        if inner:
            self.mkdir(f"{path}/{inner}")
        (self.logs / "containers" / f"x_default_{name}-{identity}.log").symlink_to("nowhere")

        def join() -> None:
            for top in (MEMORY, PIDS):
                with open(f"{top}{path}/{inner}/cgroup.procs", "w") as file:
                    file.write(f"{os.getpid()}\n")
            if score is not None:
                with open("/proc/self/oom_score_adj", "w") as file:
                    file.write(f"{score}\n")

        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=join,  # noqa: PLW1509 - no threads here, and it must be in the cgroup before it takes memory
            env={"MALLOC_ARENA_MAX": "1"},
        )
        self.processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return path

    def stop(self) -> None:
        """End the processes (their children end with their standard input) and wait for their end."""
        for process in self.processes:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            if process.poll() is None:
                descriptor = os.pidfd_open(process.pid)
                assert is_readable(descriptor, timeout_s=60), "a test process did not end"
                os.close(descriptor)
            process.stdout.read()  # to the end: every child that inherited it has ended
            process.stdout.close()
            process.wait()
        self.processes.clear()

    def remove(self) -> None:
        self.stop()
        for path in reversed(self.made):
            if path.exists():
                remove_cgroup(path)
        self.made.clear()
