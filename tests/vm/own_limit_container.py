"""Runs in the machine: a container with a memory limit of its own, and the kubelet's part of its eviction.

    own_limit_container.py POD_CGROUP CONTAINER_ID LIMIT_MIB START_MIB MIB_PER_S PRE_STOP_S

The container holds START_MIB and prints `ready`. A line `go` lets it grow without end. A line `evict` runs preStop, a
process in the container, then sends SIGTERM. One JSON line is printed when the container has ended: its exit code as a
container runtime reports it, whether preStop ended before it, and what it used at the eviction and at most. It is
killed at the end of stdin.
"""

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

sys.path.insert(0, "/run/vm")

MIB = 1 << 20


class Eviction(threading.Thread):
    """preStop, then SIGTERM, as a kubelet does once an eviction is accepted."""

    def __init__(self, cgroup: Path, pidfd: int, pre_stop_s: str) -> None:
        super().__init__(daemon=True)
        self._cgroup = cgroup
        self._pidfd = pidfd
        self._script = f"echo 0 >{cgroup}/cgroup.procs && exec sleep {pre_stop_s}"
        self.used_mib: float | None = None
        self.pre_stop_ended = False
        """preStop has succeeded, and the container still ran then."""

    def run(self) -> None:
        self.used_mib = int((self._cgroup / "memory.current").read_text()) / MIB
        succeeded = subprocess.run(["sh", "-c", self._script], check=False).returncode == 0
        with contextlib.suppress(ProcessLookupError):  # the kernel was faster
            signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
            self.pre_stop_ended = succeeded


def run_container(cgroup: Path, start_mib: int, per_s: int, go: int) -> None:
    """The container's first process."""
    load = importlib.import_module("load")
    (cgroup / "cgroup.procs").write_text("0")
    load.touch(start_mib)
    print("ready", flush=True)
    os.read(go, 1)
    load.ramp(1 << 20, per_s)


def main() -> None:
    pod, identity, limit_mib, start_mib, per_s, pre_stop_s = sys.argv[1:]
    cgroup = Path(f"/sys/fs/cgroup{pod}/cri-containerd-{identity}.scope")
    cgroup.mkdir()
    (cgroup / "memory.max").write_text(str(int(limit_mib) * MIB))
    (cgroup / "memory.oom.group").write_text("1")  # as a kubelet sets it
    go_read, go_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        run_container(cgroup, int(start_mib), int(per_s), go_read)
    pidfd = os.pidfd_open(pid)
    eviction = Eviction(cgroup, pidfd, pre_stop_s)
    while pidfd not in (readable := select.select([pidfd, 0], [], [])[0]):
        lines = os.read(0, 100).decode() if 0 in readable else ""
        if not lines:
            os.kill(pid, signal.SIGKILL)
            break
        if "go" in lines:
            os.write(go_write, b"g")
        if "evict" in lines and eviction.ident is None:
            eviction.start()
    status = os.waitpid(pid, 0)[1]
    if eviction.ident is not None:
        eviction.join()
    code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    peak_mib = int((cgroup / "memory.peak").read_text()) // MIB
    found = {"exit": code, "preStop": eviction.pre_stop_ended, "evictedAt": eviction.used_mib, "peak": peak_mib}
    print(json.dumps(found), flush=True)
    cgroup.rmdir()


if __name__ == "__main__":
    main()
