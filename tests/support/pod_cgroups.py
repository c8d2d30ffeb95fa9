"""Pod-shaped cgroups of the v1 pids hierarchy in a scratch subtree, with real processes in them."""

import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Final

from tests.support.livenode import remove_cgroup

PIDS: Final = Path("/sys/fs/cgroup/pids")
NEEDS: Final = "needs root and a writable cgroup v1 pids hierarchy"


def usable() -> bool:
    """True if this machine permits it."""
    return os.geteuid() == 0 and os.access(PIDS / "cgroup.procs", os.W_OK)


class PodCgroups:
    """Makes pods, runs Python in them, removes all of it. At most `limit` processes in each, so that a fork storm stays
    small."""

    def __init__(self, *, limit: int = 600) -> None:
        self._top = PIDS / f"nodeagent-test-{uuid.uuid4().hex[:8]}"
        self._top.mkdir()
        self._limit = limit
        self._pods: list[Path] = []
        self.processes: list[subprocess.Popen[str]] = []

    def pod(self) -> str:
        """A new pod's UID."""
        uid = str(uuid.uuid4())
        place = self._top / f"pod{uid}"
        place.mkdir()
        (place / "pids.max").write_text(str(self._limit))
        self._pods.append(place)
        return uid

    def run(self, uid: str, code: str) -> subprocess.Popen[str]:
        """Start `code` in the pod. The process prints a line when it is in the cgroup, and waits for a line on standard
        input before it runs the code."""
        join = f"open({str(self._top / f'pod{uid}' / 'cgroup.procs')!r}, 'w').write('0')\n"
        ready = "import os, sys, threading\nprint(os.getpid(), flush=True)\nsys.stdin.readline()\n"
        process = subprocess.Popen(
            [sys.executable, "-c", join + ready + code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == f"{process.pid}\n"
        return process

    def go(self, process: subprocess.Popen[str]) -> None:
        """Let the process run its code."""
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()

    def close(self) -> None:
        """End everything (processes end with their standard input) and remove the cgroups."""
        for process in self.processes:
            process.communicate(timeout=60)
        for place in (*self._pods, self._top):
            remove_cgroup(place)
