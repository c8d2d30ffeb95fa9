"""A live node for end-to-end tests: real pod-shaped cgroups with real processes, and the real program as a process.

Needs root and cgroup v1 (`needs_cgroup_v1` is the mark for it); everything made is removed again.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

HIERARCHIES = [Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup/freezer")]
MIB = 1 << 20

EATER = """
import sys
held = []
print("up", flush=True)
for line in sys.stdin:
    held.append(bytearray(b"x") * (int(line) << 20))
    print("ate", flush=True)
"""


needs_cgroup_v1 = pytest.mark.skipif(
    os.geteuid() != 0 or not all(os.access(root / "cgroup.procs", os.W_OK) for root in HIERARCHIES),
    reason="needs root and writable cgroup v1 memory, pids and freezer hierarchies",
)


class Kubepods:
    """A `kubepods` of the cgroupfs driver in a scratch parent, as a kubelet with `cgroupRoot` makes it."""

    def __init__(self, limit: int) -> None:
        self.root = f"nodeagent-test-{uuid.uuid4().hex[:12]}"
        self._made: list[Path] = []
        for hierarchy in HIERARCHIES:
            self._make(hierarchy / self.root / "kubepods" / "burstable")
            self._make(hierarchy / self.root / "kubepods" / "besteffort")
        (HIERARCHIES[0] / self.root / "kubepods" / "memory.limit_in_bytes").write_text(str(limit))
        self._processes: dict[str, subprocess.Popen[str]] = {}

    def _make(self, directory: Path) -> None:
        missing = [parent for parent in (directory, *directory.parents) if not parent.exists()]
        for each in reversed(missing):
            each.mkdir()
            self._made.append(each)

    def start(self, uid: str, *, qos: str) -> None:
        """A pod with one container and one process in it."""
        process = subprocess.Popen(
            [sys.executable, "-c", EATER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.adopt(uid, process, qos=qos)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"

    def make_idle(self, uid: str, *, qos: str) -> None:
        """A pod with a container that has no process."""
        for hierarchy in HIERARCHIES:
            self._make(self._pod(hierarchy, uid, qos) / container_id(uid))

    def adopt(self, uid: str, process: subprocess.Popen[str], *, qos: str) -> None:
        """A pod whose one process is this one."""
        self.make_idle(uid, qos=qos)
        for hierarchy in HIERARCHIES:
            [container] = [each for each in self._pod(hierarchy, uid, qos).iterdir() if each.is_dir()]
            (container / "cgroup.procs").write_text(str(process.pid))
        self._processes[uid] = process

    def eat(self, uid: str, mib: int, *, to_the_end: bool = True) -> None:
        process = self._processes[uid]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{mib}\n")
        process.stdin.flush()
        if to_the_end:
            assert process.stdout.readline() == "ate\n"

    def freeze(self, uid: str) -> None:
        """As another program does."""
        [state] = (HIERARCHIES[2] / self.root / "kubepods").glob(f"*/pod{uid}/freezer.state")
        state.write_text("FROZEN")

    def frozen(self, uid: str, *, qos: str) -> bool:
        return (self._pod(HIERARCHIES[2], uid, qos) / "freezer.state").read_text().strip() != "THAWED"

    def running(self, uid: str) -> bool:
        return self._processes[uid].poll() is None

    def kill(self, uid: str) -> None:
        """What a kubelet does with a terminating pod: end its processes, remove its cgroups."""
        process = self._processes.pop(uid)
        process.kill()
        self._thaw(uid)
        process.communicate()
        for directory in [each for each in reversed(self._made) if f"pod{uid}" in each.parts]:
            remove_cgroup(directory)
            self._made.remove(directory)
        for directory in [each for each in reversed(self._made) if f"pod{uid}" in str(each)]:
            remove_cgroup(directory)
            self._made.remove(directory)

    def kill_all(self, uid: str) -> None:
        """As `kill`, with processes in the pod's container that others have put there."""
        self._thaw(uid)
        for procs in (HIERARCHIES[0] / self.root / "kubepods").glob(f"*/pod{uid}/*/cgroup.procs"):
            # Again and again: one of them may be forking, and another just ending.
            while pids := procs.read_text().split():
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
        self.kill(uid)

    def _thaw(self, uid: str) -> None:
        """What a failed test left frozen would not die."""
        for state in (HIERARCHIES[2] / self.root / "kubepods").glob(f"*/pod{uid}/freezer.state"):
            state.write_text("THAWED")

    def close(self) -> None:
        for uid in list(self._processes):
            self.kill_all(uid)
        for directory in reversed(self._made):
            remove_cgroup(directory)

    def _pod(self, hierarchy: Path, uid: str, qos: str) -> Path:
        return hierarchy / self.root / "kubepods" / qos / f"pod{uid}"


def container_id(uid: str) -> str:
    """Of the one container that a pod here has."""
    return uuid.uuid5(uuid.NAMESPACE_DNS, uid).hex.ljust(64, "0")


def remove_cgroup(directory: Path) -> None:
    """Remove it as soon as its processes have left it: a dying one does so a moment after it was reaped."""
    deadline, patience = time.monotonic() + 60, threading.Event()
    while directory.exists():
        assert time.monotonic() < deadline, f"{directory} stays busy"
        try:
            directory.rmdir()
        except OSError:
            patience.wait(0.005)


LOG_END_BYTES: Final = 16384


class Run:
    """`nodeagent run` as a process, with its log."""

    def __init__(
        self, *arguments: str, log: Path, environ: dict[str, str] | None = None, procs: Path | None = None
    ) -> None:
        """`environ` replaces the environment; without it the process has ours. `procs` is the `cgroup.procs` of the
        cgroup that it is to be in."""
        self._log = log
        command = [sys.executable, "-m", "nodeagent", "run", *arguments]
        if procs is not None:
            command = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(procs), *command]
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environ)

    def events(self) -> list[dict[str, Any]]:
        lines = self._log.read_bytes().split(b"\n")[:-1]  # the last one may be half written
        return [json.loads(line) for line in lines if line.startswith(b"{")]

    def logged(self, event: str) -> list[dict[str, Any]]:
        """The log lines with this event."""
        return [line for line in self.events() if line.get("event") == event]

    def log_end(self) -> str:
        """The last lines of the log, as they are."""
        return self._log.read_bytes()[-LOG_END_BYTES:].decode(errors="replace")

    def wait_for_log(self, event: str, **fields: object) -> list[dict[str, Any]]:
        """The log lines with this event and these fields, once there is one: an act may be visible before its line."""

        def logged() -> list[dict[str, Any]]:
            return [line for line in self.logged(event) if fields.items() <= line.items()]

        until(logged, f"{event} {fields or ''} in the log")
        return logged()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(40)

    def kill(self) -> None:
        """End it at once, if it has not ended."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


StartAgent = Callable[..., Run]
"""Arguments of `nodeagent run`, and keys of its configuration as keywords."""

HARD: dict[str, Any] = {
    "evictionHard": {"allocatableMemory.available": "300Mi"},
    "evictionSoft": {},
    "evictionSoftGracePeriod": {},
}
"""Half of what the pods of the `kubepods` fixture may have."""


def until(condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    deadline, patience = time.monotonic() + timeout_s, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"never seen: {what}"
        patience.wait(0.005)


def configuration(directory: Path, kubepods: Kubepods, **changes: object) -> Path:
    """A configuration that watches only these pods and keeps its state in `directory`; `changes` replace its keys."""
    settings: dict[str, object] = {
        "apiVersion": "nodeagent.io/v1alpha1",
        "kind": "NodeAgentConfiguration",
        "mode": "enforce",
        "evictionHard": {},
        "evictionSoft": {"allocatableMemory.available": "300Mi"},
        "evictionSoftGracePeriod": {"allocatableMemory.available": "2s"},
        "evictionPressureTransitionPeriod": "2s",
        "sampling": {"interval": "200ms", "cgroupRoot": f"/{kubepods.root}"},
        "protection": {"minimumAge": "0s"},
        "stateDir": str(directory / "state"),
        "logging": {"format": "json"},
        **changes,
    }
    path = directory / "nodeagent.yaml"
    path.write_text(json.dumps(settings))  # JSON is YAML
    return path
