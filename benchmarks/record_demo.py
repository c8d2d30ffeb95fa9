"""Record the incident that `nodeagent demo` plays, in the machine of tests/vm.

    python -m benchmarks.record_demo [--to nodeagent/analysis/recorded_incident]

Needs the same as tests/vm (QEMU, and root for the first build of the image). The same memory ramp runs twice in one
machine of 2 GiB: first with a kubelet's eviction manager alone (tests/vm/memory_kubelet.py: a sample every 10 s, the
kubelet's default threshold of 100Mi), then with that and the systemd unit of nodeagent with systemd/config.yaml,
nothing changed. Four pods run; `report`, whose request is 64Mi, grows by `MIB_PER_S`. It starts `AFTER_SYNC_S` after a
sync of the kubelet, so that memory is used up between two of its syncs, as in most ramps of this speed
(docs/performance.md, R1). An API double answers; the kubelet's part of an eviction is SIGTERM after 0.3 s and SIGKILL
after 1.5 s.

Two files are written: `samples.rec` has the samples of the agent's flight recorder, `incident.json` what was seen from
outside in both runs: MemAvailable and the node's stall ten times a second, the kubelet's syncs, the kernel's OOM kills,
the end of the pod.
"""

import argparse
import base64
import io
import json
import queue
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks import contenders, ramps
from benchmarks.ramps import TERM_S
from nodeagent.analysis import incident as played
from nodeagent.records import flight_recorder, recording
from tests.fake_kube import ApiServer
from tests.support import recordings
from tests.support.paths import REPOSITORY
from tests.vm.image import image, why_not
from tests.vm.machine import Machine, booted
from tests.vm.pods import VmPod, start_pod
from tests.vm.ramps import MIB, NODE, Cast, Node

MIB_PER_S: Final = 40
LEAVE_MIB: Final = 700
KUBELET_MIB: Final = 100
AFTER_SYNC_S: Final = 0.5
CALM_S: Final = 4.0
"""Before the ramp, as much as is recorded of it."""
AFTER_S: Final = 8.0
"""Recorded after the growing pod has ended."""
PODS_AGE_S: Final = 50.0
"""With the wait for the kubelet, longer than `protection.minimumAge`: younger pods are not evicted."""
KUBELET: Final = REPOSITORY / "tests" / "vm" / "memory_kubelet.py"


class Role(NamedTuple):
    """A pod of the incident."""

    name: str
    qos_class: str
    request_mib: int
    work: str
    priority: int = 0
    owner: str = "ReplicaSet"


ROLES: Final = (
    Role("database-0", "Guaranteed", 192, "hold 170 2", priority=1000, owner="StatefulSet"),
    Role("web-6c9f8", "Burstable", 128, "hold 90 2"),
    Role("cache-58b7d", "Burstable", 64, "hold 110 1"),
)
GROWING: Final = Role("report-4m2xk", "Burstable", 64, f"flood {LEAVE_MIB} {MIB_PER_S}", owner="Job")


class Kubelet:
    """tests/vm/memory_kubelet.py in the machine, and what a kubelet would do at a sync that is below its threshold."""

    def __init__(self, node: Node, growing: VmPod) -> None:
        node.machine.write("/run/vm/memory_kubelet.py", KUBELET.read_bytes())
        self._process = node.machine.start(f"exec python3 -u /run/vm/memory_kubelet.py {KUBELET_MIB * MIB}")
        self._node, self._growing = node, growing
        self._new: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.syncs: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for_sync(self) -> dict[str, Any]:
        """The next sync."""
        return self._new.get(timeout=60)

    def stop(self) -> None:
        try:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                sync = json.loads(line)
                if sync["evicts"] and not any(each["evicts"] for each in self.syncs):
                    self._node.observer.kill(self._growing, after_s=0)  # its hard evictions have no grace period
                self.syncs.append(sync)
                self._new.put(sync)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=REPOSITORY / "nodeagent" / "analysis" / played.DIRECTORY)
    options = parser.parse_args(arguments)
    if reason := why_not():
        print(f"needs a virtual machine: {reason}", file=sys.stderr)
        return 1
    with (
        tempfile.TemporaryDirectory(prefix="record-demo-") as scratch,
        ApiServer(node=NODE, linger_s=None) as api,
        booted(image(), Path(scratch)) as machine,
    ):
        kubeconfig = api.kubeconfig(Path(scratch) / "kubeconfig").read_text(encoding="utf-8")
        contenders.install(machine, Path(scratch))
        node = Node(machine, api, kubeconfig)
        node.allow_brake(False)
        node.term_s = TERM_S
        alone = run(node)
        node.start_configured((REPOSITORY / "systemd" / "config.yaml").read_text(encoding="utf-8"))
        beside = run(node, at_least_s=alone["until"], age_s=PODS_AGE_S)
        print(node.log(), file=sys.stderr)
        time.sleep(2)
        fetch_state(machine, Path(scratch) / "state")
        facts = machine.run("uname -sr; grep MemTotal /proc/meminfo; nproc").stdout.splitlines()
        node.stop_agent()
        node.close()
        options.to.mkdir(parents=True, exist_ok=True)
        write_samples(Path(scratch) / "state", options.to / "samples.rec", beside)
        beside["accepted"] = accepted(Path(scratch) / "state", beside["began"])
        incident = {
            "formatVersion": 1,
            "recordedAt": time.strftime("%Y-%m-%d", time.gmtime()),
            "machine": {
                "kernel": facts[0],
                "memory": int(facts[1].split()[1]) * 1024,
                "cpus": int(facts[2]),
                "emulated": True,
            },
            "kubelet": {"threshold": KUBELET_MIB * MIB, "everySeconds": 10},
            "pod": f"shop/{GROWING.name}",
            "bytesPerSecond": MIB_PER_S * MIB,
            "alone": alone,
            "beside": beside,
        }
        text = json.dumps(incident, separators=(",", ":")) + "\n"
        (options.to / "incident.json").write_text(text, encoding="utf-8")
    return 0


def run(node: Node, *, at_least_s: float = 0.0, age_s: float = 0.0) -> dict[str, Any]:
    """One ramp and what was seen of it. Times are seconds since it began, `began` is CLOCK_BOOTTIME."""
    with node.cast() as cast:
        names = {}
        for role in (*ROLES, GROWING):
            started = start_role(node.machine, cast, role)
            names[started.cgroup] = f"{started.namespace}/{started.name}"
        growing = started
        time.sleep(age_s)
        kubelet = Kubelet(node, growing)
        try:
            kubelet.wait_for_sync()
            node.observer.watch(hard_mib=contenders.HARD_MIB, soft_mib=ramps.SOFT_MIB)
            kubelet.wait_for_sync()
            time.sleep(AFTER_SYNC_S)
            clocks = "cut -d' ' -f1 /proc/uptime; date +%s.%N"
            shown = node.machine.run(f"{clocks}; systemctl kill --signal=USR1 {growing.slice}").stdout
            began, began_wall = map(float, shown.split())
            ended = node.wait_until_ended(growing)
            assert ended, "the ramp did not end"
            growing_ended = float(node.machine.run("cut -d' ' -f1 /proc/uptime").stdout)
            time.sleep(max(at_least_s - (growing_ended - began), AFTER_S) + 2)
        finally:
            kubelet.stop()
        report, trace = node.observer.report(), node.observer.trace()
        print(report, kubelet.syncs, began, file=sys.stderr)
        alive = cast.alive()
        kills = [
            {"at": round(at - began, 2), "pod": names.get(cgroup, cgroup), "process": process}
            for at, cgroup, process in oom_kills(node.machine, since=began)
        ]
        until = max(at_least_s, (report["back_at"] or growing_ended) - began + AFTER_S)
        return {
            "began": began,
            "beganWall": round(began_wall, 3),
            "trace": [
                [round(at - began, 2), available, round(stall_s - trace[0][2], 3)]
                for at, available, stall_s, _ in trace
                if -CALM_S <= at - began <= until
            ],
            "syncs": [
                {
                    "at": round(sync["at"] - began, 2),
                    "available": sync["available"],
                    "memAvailable": sync["memAvailable"],
                    "evicts": sync["evicts"],
                }
                for sync in kubelet.syncs
                if began - 10 - CALM_S < sync["at"] <= began + until
            ],
            "oomKills": kills,
            "requested": list(cast.victims),
            "alive": sorted(alive),
            "lowest": report["lowest"],
            "backAt": None if report["back_at"] is None else round(report["back_at"] - began, 2),
            "until": round(until, 2),
        }


def start_role(machine: Machine, cast: Cast, role: Role) -> VmPod:
    """Start the pod and have the API list it."""
    amount = {"memory": f"{role.request_mib}Mi", "cpu": "100m"}
    limits = amount if role.qos_class == "Guaranteed" else {}
    made = start_pod(machine, role.name, qos_class=role.qos_class, work=role.work)
    owner = (role.owner, role.name.rpartition("-")[0])
    return cast.add(made, requests=amount, limits=limits, priority=role.priority, owner=owner)


def oom_kills(machine: Machine, *, since: float) -> list[tuple[float, str, str]]:
    """The time, the pod's cgroup and the process of each OOM kill in the kernel's log."""
    kills = []
    for line in machine.run("dmesg").stdout.splitlines():
        stamp, _, text = line.removeprefix("[").partition("]")
        if text.strip().startswith("oom-kill:") and float(stamp) >= since:
            facts = dict(each.partition("=")[::2] for each in text.strip().removeprefix("oom-kill:").split(","))
            kills.append((float(stamp), facts["task_memcg"].rpartition("/")[0], facts["task"]))
    return kills


def fetch_state(machine: Machine, target: Path) -> None:
    """Copy the agent's state directory out of the machine."""
    packed = base64.b64decode(machine.run("tar -C /run/nodeagent -cf - . | base64").stdout)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(target, filter="data")


def accepted(state: Path, began: float) -> list[dict[str, Any]]:
    """When the API server accepted which eviction."""
    return [
        {"at": round(record["at"] - began, 2), "podUid": record["podUid"]}
        for record in flight_recorder.read_records(state)
        if record["record"] == "outcome" and record["kind"] == "accepted"
    ]


def write_samples(state: Path, target: Path, seen: dict[str, Any]) -> None:
    """The samples of the incident alone."""
    recorded = recording.open_recording(state)
    began, until = seen["began"] - CALM_S - 10, seen["began"] + seen["until"]
    samples = [sample for sample in recorded.samples() if began <= sample.at <= until]
    recordings.write_recording(target, recorded.headers[-1], samples)
    print(f"{len(samples)} samples, {target.stat().st_size} bytes", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
