"""Memory ramps in the machine: a pod that grows at so many MiB a second, an agent that is to stop it, and the result.

Theory of operation. Two pods run, a bloated one that waits for its start and a chill one. An observer in the machine,
which memory pressure cannot slow down, reads MemAvailable every 10 ms and does the kubelet's part: `KUBELET_S` after an
eviction was accepted it ends the pod's processes. The ramp is over when memory is back and the pod is gone from the
double; the winner is read from the kernel's count of OOM kills.
"""

import contextlib
import json
import queue
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.fake_kube import ApiServer, Json, pod
from tests.vm.machine import HOST_LOOPBACK, Machine
from tests.vm.pods import LOAD, VmPod, go, kill_pod, start_pod

MIB: Final = 1 << 20
NODE: Final = "vm-node"
HARD_MIB: Final = 300
SOFT_MIB: Final = 500
KUBELET_S: Final = 1.5
"""From an accepted eviction to the end of the pod's processes. A real kubelet took 1 to 3 s (performance.md R6)."""
RAMP_TIMEOUT_S: Final = 120.0
"""The slowest ramp takes 30 s, more on a busy host."""
SETTLE_S: Final = 60.0
"""Longest wait for memory that the pod's end brings back; freeing a GiB takes 0.1 s."""
_UNIT_FILES: Final = "/etc/systemd/system"
OBSERVER: Final = Path(__file__).with_name("observer.py")

CONFIGURATION: Final[dict[str, Any]] = {
    "apiVersion": "nodeagent.io/v1alpha1",
    "kind": "NodeAgentConfiguration",
    "mode": "enforce",
    "evictionHard": {"memory.available": f"{HARD_MIB}Mi"},
    "evictionSoft": {"memory.available": f"{SOFT_MIB}Mi"},
    "evictionSoftGracePeriod": {"memory.available": "10s"},
    "evictionPressureTransitionPeriod": "5s",
    "signals": {"memory.available": {"memoryModel": "memavailable"}},
    "protection": {"minimumAge": "0s"},
}
"""What stops a ramp. MemAvailable, so that it is the same limit as earlyoom's."""


class Ramp(NamedTuple):
    """One ramp."""

    mib_per_s: int
    leave_mib: int
    """MemAvailable at its start: what is above that is taken before, at once."""
    hard_mib: int = HARD_MIB
    """Where the crossing is."""
    soft_mib: int = SOFT_MIB
    """From where on its speed is measured."""
    ignores_term: bool = False
    """Its process ignores SIGTERM, as the first process of a container does without a handler (pid_namespaces(7))."""


class Result(NamedTuple):
    """What came of one ramp."""

    oom_kills: int
    lowest: int
    """Bytes of MemAvailable."""
    mib_per_s: float | None
    """How fast MemAvailable went from `Ramp.soft_mib` to `Ramp.hard_mib`; None: it did not."""
    back_s: float | None
    """From the first time below `Ramp.hard_mib` until above it for good; None: it never was below."""
    stall_s: float | None
    """Full stall of the node (PSI) in that time. The growing pod's own counts, also where a brake is its cause."""
    system_stall_s: float | None
    """Stall of any process of system.slice (PSI some) in that time."""
    victims: tuple[str, ...]
    """Names of the pods that were evicted, in order."""
    alive: frozenset[str]
    """Names of the pods that still run."""
    log: str
    """The log of the agent."""


class Observer:
    """tests/vm/observer.py in the machine."""

    def __init__(self, machine: Machine) -> None:
        source = OBSERVER.read_bytes()
        machine.write("/run/vm/observer.py", source)
        self._process = machine.start("exec python3 -u /run/vm/observer.py")
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._gone: dict[str, threading.Event] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._answer()

    def watch(self, *, hard_mib: int = HARD_MIB, soft_mib: int = SOFT_MIB) -> None:
        """Begin to watch MemAvailable again."""
        self._send(f"watch {hard_mib * MIB} {soft_mib * MIB}")
        self._answer()

    def report(self) -> dict[str, Any]:
        """What was seen since `watch`."""
        self._send("report")
        return self._answer()

    def trace(self) -> list[tuple[float, int, float, int]]:
        """Ten times a second since `watch`: time, MemAvailable, full stall of the node in seconds, OOM kills."""
        self._send("trace")
        return [tuple(point) for point in self._answer()["trace"]]

    def rest(self) -> None:
        """End the watch. It takes a fifth of a core of an emulated machine."""
        self._send("rest")

    def kill(self, pod: VmPod, *, after_s: float, term_s: float | None = None) -> threading.Event:
        """End a pod's processes after so long, and send SIGTERM after `term_s`. The event is set when they are gone."""
        gone = self._gone.setdefault("/sys/fs/cgroup" + pod.cgroup, threading.Event())
        if term_s is not None:
            self._send(f"term {pod.cgroup} {term_s}")
        self._send(f"kill {pod.cgroup} {after_s}")
        return gone

    def stop(self) -> None:
        """End the process in the machine."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        return self._answers.get(timeout=120)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                answer = json.loads(line)
                if "gone" in answer:
                    self._gone[answer["gone"]].set()
                else:
                    self._answers.put(answer)


class Node:
    """The machine with the agent's unit installed, an API double and the observer."""

    def __init__(self, machine: Machine, api: ApiServer, kubeconfig: str) -> None:
        """`kubeconfig` is a kubeconfig's text that names the host's loopback."""
        self.machine = machine
        self.api = api
        self.observer = Observer(machine)
        self.term_s: float | None = None
        """When its kubelet sends SIGTERM after an accepted eviction; None: SIGKILL alone, after KUBELET_S."""
        if not machine.touched:
            touch_all = f"import sys; sys.path.insert(0, '/run/vm'); import load; load.fill({HARD_MIB + 60})"
            machine.write("/run/vm/load.py", LOAD.read_bytes())
            machine.run(["python3", "-c", touch_all])
            machine.touched = True
        machine.write("/etc/nodeagent/kubeconfig", kubeconfig.replace("127.0.0.1", HOST_LOOPBACK), mode=0o600)
        machine.run(
            f"install -m 644 /run/vm/systemd/nodeagent.service /run/vm/systemd/nodeagent.slice {_UNIT_FILES}/ && "
            f"install -D -m 644 -t {_UNIT_FILES}/nodeagent.service.d /run/vm/systemd/drop-ins/brake.conf && "
            "systemctl daemon-reload"
        )

    def close(self) -> None:
        with contextlib.ExitStack() as last:  # what comes after a step that fails is done all the same
            last.callback(
                self.machine.run, f"rm -r {_UNIT_FILES}/nodeagent.service.d && systemctl daemon-reload", check=False
            )
            last.callback(self.observer.stop)
            self.stop_agent()

    def allow_brake(self, allow: bool) -> None:
        """Install the unit's drop-in for a brake, or remove it."""
        drop_ins = f"{_UNIT_FILES}/nodeagent.service.d"
        change = (
            f"install -D -m 644 -t {drop_ins} /run/vm/systemd/drop-ins/brake.conf" if allow else f"rm -r {drop_ins}"
        )
        self.machine.run(f"{change} && systemctl daemon-reload")

    def start_agent(self, **changes: Any) -> None:
        """Restart the agent without saved state; returns when it has published that there is no pressure."""
        self.start_configured(json.dumps({**CONFIGURATION, **changes}))  # JSON is YAML

    def start_configured(self, configuration: str) -> None:
        """The same with the text of a whole configuration."""
        self.stop_agent()
        self.api.requests.clear()
        self.machine.write("/etc/nodeagent/config.yaml", configuration)
        started = self.machine.run("systemctl restart nodeagent.service", timeout_s=120, check=False)
        assert started.returncode == 0, self.log()
        assert self.api.wait_for(self.published, 120), self.log()

    def stop_agent(self) -> None:
        self.machine.run(
            "systemctl stop nodeagent.service; systemctl reset-failed nodeagent.service; rm -rf /run/nodeagent/*",
            check=False,
        )

    def log(self) -> str:
        """The log of the agent since its start."""
        return self.machine.run(
            "journalctl --output=cat --unit=nodeagent.service "
            "_SYSTEMD_INVOCATION_ID=$(systemctl show --value --property=InvocationID nodeagent.service)"
        ).stdout

    def published(self) -> bool:
        """Whether the agent has published that there is no pressure."""
        condition = self.api.condition("NodeAgentMemoryPressure")
        return condition is not None and condition["status"] == "False" and bool(self.api.sent("PATCH", "/status"))

    def ramp(self, ramp: Ramp, *, agent: bool = True) -> Result:
        """Run one ramp to its end."""
        with self.cast() as cast:
            cast.add(start_pod(self.machine, "chill", work="hold 48 1"))
            work = f"flood {ramp.leave_mib} {ramp.mib_per_s} {int(ramp.ignores_term)}"
            bloated = cast.add(start_pod(self.machine, "bloated", work=work))
            self.observer.watch(hard_mib=ramp.hard_mib, soft_mib=ramp.soft_mib)
            go(self.machine, bloated)
            over = self.wait_until_ended(bloated)
            seen = self._settled()
            assert over, f"{ramp} did not end: {seen}\n{self.log() if agent else ''}"
            back = seen["back_at"] - seen["crossed_at"] if seen["back_at"] is not None else None
            speed = seen["per_s"] / MIB if seen["per_s"] is not None else None
            log = self.log() if agent else ""
            alive = cast.alive()
            return Result(
                oom_kills=seen["oom_kills"],
                lowest=seen["lowest"],
                mib_per_s=speed,
                back_s=back,
                stall_s=seen["stall_s"],
                system_stall_s=seen["system_stall_s"],
                victims=tuple(cast.victims),
                alive=alive,
                log=log,
            )

    @contextlib.contextmanager
    def cast(self) -> Iterator["Cast"]:
        """Pods that the API knows, and a kubelet that ends those that are evicted."""
        made = Cast(self)
        self.api.on_eviction = made.as_a_kubelet_does
        try:
            yield made
        finally:
            self.api.on_eviction = None
            made.close()
            self.observer.rest()

    def wait_until_ended(self, pod: VmPod) -> bool:
        """Wait until a pod has no process any more, whoever ended it."""
        watched = self.machine.run(
            f'timeout {RAMP_TIMEOUT_S:.0f} sh -c \'while grep -q "populated 1" /sys/fs/cgroup{pod.cgroup}/'
            "cgroup.events; do sleep 0.2; done 2>/dev/null'",
            timeout_s=RAMP_TIMEOUT_S + 60,
            check=False,
        )
        return watched.returncode == 0

    def _settled(self) -> dict[str, Any]:
        """The observer's report, once memory is back."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            seen = self.observer.report()
            if seen["crossed_at"] is None or seen["back_at"] is not None or time.monotonic() > deadline:
                return seen


class Cast:
    """The pods of one test."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._pods: dict[str, VmPod] = {}
        self.victims: list[str] = []
        """Names of the pods that were evicted, in order."""

    @property
    def machine(self) -> Machine:
        return self._node.machine

    def add(self, made: VmPod, **fields: Any) -> VmPod:
        """Have the API know this pod. `fields`: of `fake_kube.pod`."""
        self._pods[made.name] = made
        self._node.api.add_pod(as_object(made, **fields))
        return made

    def as_a_kubelet_does(self, entry: Json, _body: Json) -> None:
        name = entry["metadata"]["name"]
        if name not in self.victims:
            self.victims.append(name)
            threading.Thread(target=self._end, args=(self._pods[name],), daemon=True).start()

    def _end(self, pod: VmPod) -> None:
        if self._node.observer.kill(pod, after_s=KUBELET_S, term_s=self._node.term_s).wait(60):
            kill_pod(self._node.machine, pod)
            self._node.api.delete_pod(pod.namespace, pod.name)

    def alive(self) -> frozenset[str]:
        """Names of the pods that have processes."""
        places = {f"/sys/fs/cgroup{pod.cgroup}/cgroup.events": name for name, pod in self._pods.items()}
        listed = self._node.machine.run(f"grep -l 'populated 1' {' '.join(places)}", check=False).stdout
        return frozenset(places[line] for line in listed.split())

    def close(self) -> None:
        """Everything ends."""
        for each in self._pods.values():
            kill_pod(self._node.machine, each)
            with contextlib.suppress(KeyError):  # its kubelet has done it
                self._node.api.delete_pod(each.namespace, each.name)


def mem_available_mib(machine: Machine) -> int:
    """MiB that the machine has left."""
    output = machine.run("grep MemAvailable /proc/meminfo").stdout
    return int(output.split()[1]) // 1024


def as_object(made: VmPod, **fields: Any) -> Json:
    """The pod as the API has it."""
    return pod(
        made.name,
        namespace=made.namespace,
        node=NODE,
        uid=made.uid,
        qos=made.qos_class,
        **{"owner": ("ReplicaSet", made.name), **fields},
    )
