"""Real OOM kills on a real cgroup v2 node: each is attributed, with its cause, within a second of the kernel's time."""

import json
import re
import time
import uuid
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import pytest

from tests.vm.machine import Machine
from tests.vm.pods import VmPod, go, start_pod
from tests.vm.ramps import Cast, Node

pytestmark = [pytest.mark.vm, pytest.mark.timeout(1500)]

LIMIT_MIB: Final = 60
FOUND_WITHIN_S: Final = 1.0
"""From the kernel's own timestamp to the record."""
EARLIER_S: Final = 5.0
"""A record has the time at which its sample began. A kill while it is read is found before it is logged, and with no
memory left the reading itself stalls: by 0.8 s in an emulated machine on a busy host."""
DROP_IN: Final = "/etc/systemd/system/nodeagent.service.d/kernel-log.conf"
LOWEST: Final[dict[str, Any]] = {
    "evictionHard": {"memory.available": "1Mi"},
    "evictionSoft": {},
    "evictionSoftGracePeriod": {},
}
"""Nothing is evicted before the OOM killer."""
DRY_RUN: Final = {
    "apiVersion": "nodeagent.io/v1alpha1",
    "kind": "NodeAgentConfiguration",
    "mode": "dry-run",
    "evictionHard": {"memory.available": "100Mi"},
    "evictionSoft": {},
    "evictionSoftGracePeriod": {},
    "protection": {"minimumAge": "0s"},
}

WORK: Final = {
    "own": "eat 300",
    "child": "breed 300",
    "group": "breed 300",
    "pod": "eat 300",
    "vanished": "eat 300",
    "gone": "eat 300",
}
"""The pods that are killed in turn, and what each does then."""


class Logged(NamedTuple):
    """A kill as the kernel logged it."""

    at: float
    cgroup: str
    name: str


class Kills:
    """What the kernel killed and what the agent recorded, since the last call."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.machine: Machine = node.machine
        self.seen = len(self._records())
        self.logged = len(self._kernel())

    def wait(self, what: str) -> tuple[list[dict[str, Any]], list[Logged]]:
        """The new records, once there is one, and the new kills in the kernel log."""
        deadline = time.monotonic() + 60
        while len(records := self._records()) <= self.seen:
            assert time.monotonic() < deadline, (
                f"{what}: {self.machine.run('dmesg | tail -30').stdout}{self.node.log()}"
            )
            time.sleep(0.3)
        time.sleep(1.5)  # kills that follow
        records, logged = self._records(), self._kernel()
        new = records[self.seen :], logged[self.logged :]
        self.seen, self.logged = len(records), len(logged)
        return new

    def _records(self) -> list[dict[str, Any]]:
        found = self.machine.run("cat /run/nodeagent/decisions.jsonl", check=False).stdout
        lines, _, _being_written = found.rpartition("\n")
        return [record for line in lines.splitlines() if (record := json.loads(line))["record"] == "oom"]

    def _kernel(self) -> list[Logged]:
        return [
            Logged(float(at), cgroup, name)
            for at, cgroup, name in re.findall(
                r"^\[ *([\d.]+)\] oom-kill:.*,task_memcg=(.*),task=(.*),pid=",
                self.machine.run("dmesg").stdout,
                re.MULTILINE,
            )
        ]


@pytest.fixture(params=["kernel log", "counters alone"])
def kills(node: Node, request: pytest.FixtureRequest) -> Iterator[Kills]:
    """The agent as a unit, with the drop-in for the kernel log or without it."""
    with_log = request.param == "kernel log"
    if with_log:
        node.machine.run(f"install -D -m 644 /run/vm/systemd/drop-ins/kernel-log.conf {DROP_IN}")
    node.machine.run("systemctl daemon-reload")
    node.start_agent(**LOWEST)
    made = Kills(node)
    yield made
    node.stop_agent()
    node.machine.run(f"rm -f {DROP_IN}; systemctl daemon-reload")


class Container(NamedTuple):
    """A pod with one container whose cgroup systemd does not manage: it would stop the whole scope after a kill."""

    pod: VmPod
    cgroup: str
    identity: str


def started(cast: Cast, name: str, work: str) -> Container:
    """A pod that the API and the agent know, beside a sandbox that keeps its cgroup, as a kubelet does."""
    machine = cast.machine
    pod = cast.add(start_pod(machine, name, work=work))
    identity = uuid.uuid4().hex * 2
    sandbox, container = f"cri-containerd-{uuid.uuid4().hex * 2}.scope", f"{pod.cgroup}/cri-containerd-{identity}.scope"
    machine.run(
        f"systemd-run --quiet --collect --scope --slice={pod.slice} --unit={sandbox} sleep 1000 >/dev/null 2>&1 & "
        f"mkdir /sys/fs/cgroup{container} && cat /sys/fs/cgroup{pod.cgroup}/*{pod.container_id}*/cgroup.procs "
        f">/sys/fs/cgroup{container}/cgroup.procs; "
        f"timeout 30 sh -c 'until grep -q . /sys/fs/cgroup{pod.cgroup}/{sandbox}/cgroup.procs; do sleep 0.1; done'"
    )
    return Container(pod, container, identity)


def limit(machine: Machine, cgroup: str) -> None:
    machine.run(f"echo {LIMIT_MIB}M >/sys/fs/cgroup{cgroup}/memory.max")


def begin(machine: Machine, container: Container) -> None:
    """Let its process begin."""
    machine.run(f"kill -USR1 $(cat /sys/fs/cgroup{container.cgroup}/cgroup.procs)")


def _without(records: list[dict[str, Any]], pod: str) -> list[dict[str, Any]]:
    """The records without the kills of this pod."""
    left = [{**each, "kills": [kill for kill in each["kills"] if kill["pod"] != pod]} for each in records]
    return [each for each in left if each["kills"]]


def report(case: str, records: list[dict[str, Any]], logged: list[Logged]) -> dict[str, Any]:
    """The kills of one case as one; prints its row of the table."""
    found = [kill for record in records for kill in record["kills"]]
    delay = records[0]["at"] - logged[0].at if logged else float("nan")
    merged = {
        "number": sum(kill["number"] for kill in found),
        "pods": sorted({kill["pod"] for kill in found}),
        "containers": sorted({kill["container"] for kill in found}),
        "causes": sorted({kill["cause"] for kill in found}),
        "group": any(kill["group"] for kill in found),
        "paths": sorted({str((kill["place"] or {}).get("path")) for kill in found}),
        "names": sorted({each["name"] for kill in found for each in kill["processes"]}),
        "delay": delay,
    }
    print(
        f"OOM | {case} | {merged['number']} | {', '.join(merged['pods']) or merged['paths']} | {merged['causes']} | "
        f"{merged['names']} | {delay:.2f}"
    )
    assert -EARLIER_S <= delay <= FOUND_WITHIN_S, (case, delay, records, logged)
    return merged


def test_kills_by_a_limit_are_attributed(kills: Kills, request: pytest.FixtureRequest) -> None:
    with_log = "kernel log" in request.node.name
    node, machine, mode = kills.node, kills.machine, request.node.callspec.id
    with node.cast() as cast:
        cast.add(start_pod(machine, "chill", work="hold 20 1"))
        pods = {name: started(cast, name, work) for name, work in WORK.items()}
        machine.run("sleep 12")  # a calm agent reads the pods every 10 s

        made = pods["own"]
        limit(machine, made.cgroup)
        begin(machine, made)
        own = report(f"{mode}: container limit", *kills.wait("container limit"))
        assert (own["number"], own["pods"], own["causes"]) == (1, ["shop/own"], ["container-limit"])
        assert own["containers"] == [made.identity[:12]]
        assert own["names"] == (["python3"] if with_log else [])

        # The container survives.
        made = pods["child"]
        limit(machine, made.cgroup)
        begin(machine, made)
        child = report(f"{mode}: child process", *kills.wait("child process"))
        assert (child["number"], child["pods"], child["causes"]) == (1, ["shop/child"], ["container-limit"])
        assert not child["group"]
        assert machine.run(f"cat /sys/fs/cgroup{made.cgroup}/cgroup.procs").stdout.split()

        # As a kubelet sets it.
        made = pods["group"]
        limit(machine, made.cgroup)
        machine.run(f"echo 1 >/sys/fs/cgroup{made.cgroup}/memory.oom.group")
        begin(machine, made)
        group = report(f"{mode}: memory.oom.group", *kills.wait("memory.oom.group"))
        assert (group["pods"], group["causes"]) == (["shop/group"], ["container-limit"])
        assert group["number"] >= 2
        assert group["group"]

        made = pods["pod"]
        limit(machine, made.pod.cgroup)
        begin(machine, made)
        records, logged = kills.wait("pod limit")
        later = [kill for each in records for kill in each["kills"] if kill["pod"] == "shop/group"]
        assert {kill["cause"] for kill in later} <= {"container-limit"}, "the kernel kills a group one by one"
        whole = report(f"{mode}: pod limit", _without(records, "shop/group"), logged)
        assert (whole["number"], whole["pods"], whole["causes"]) == (1, ["shop/pod"], ["pod-limit"])

        made = pods["vanished"]
        limit(machine, made.cgroup)
        machine.run(
            f"cd /sys/fs/cgroup{made.cgroup}; pid=$(cat cgroup.procs); cd ..; kill -USR1 $pid; "
            f"until rmdir /sys/fs/cgroup{made.cgroup} 2>/dev/null; do :; done"
        )
        gone = report(f"{mode}: container gone at once", *kills.wait("container gone"))
        assert (gone["number"], gone["pods"], gone["causes"]) == (1, ["shop/vanished"], ["container-limit"])
        assert gone["containers"] == [made.identity[:12]]

        made = pods["gone"]
        limit(machine, made.cgroup)
        machine.run(
            f"cd /sys/fs/cgroup{made.cgroup}; pid=$(cat cgroup.procs); cd /; kill -USR1 $pid; "
            f"until rmdir /sys/fs/cgroup{made.cgroup} 2>/dev/null; do :; done; "
            f"systemctl kill -s KILL {made.pod.slice}; systemctl stop {made.pod.slice}; "
            f"! test -e /sys/fs/cgroup{made.pod.cgroup}"
        )
        gone = report(f"{mode}: pod gone at once", *kills.wait("pod gone"))
        assert (gone["number"], gone["pods"]) == (1, ["shop/gone"])
        assert gone["causes"] in (["container-limit"], ["pod-limit"])

    # a service of the host
    machine.run(
        f"systemd-run --quiet --unit=greedy.service -p MemoryMax={LIMIT_MIB}M -p MemorySwapMax=0 "
        "python3 -c 'x = bytearray(300 << 20); x[::4096] = b\"1\" * len(x[::4096])'"
    )
    service = report(f"{mode}: system service", *kills.wait("system service"))
    machine.run("systemctl reset-failed greedy.service", check=False)
    assert (service["number"], service["pods"], service["causes"]) == (1, [""], ["host-limit"])
    assert service["paths"] == ["/system.slice/greedy.service"] or (
        not with_log and service["paths"] == ["/system.slice"]
    )

    about = [request.body for request in node.api.sent("POST", "/events")]
    about = [event for event in about if event["reason"] == "OOMKillObserved"]
    regarding = {(event["regarding"]["kind"], event["regarding"]["name"]) for event in about}
    for name in ("own", "child", "group", "pod", "vanished", "gone"):
        assert {("Pod", name), ("ReplicaSet", name)} <= regarding, regarding
    assert ("Node", "vm-node") in regarding


def test_a_shortage_of_the_node_is_a_lost_race_of_a_dry_run(node: Node) -> None:
    node.stop_agent()
    node.machine.write("/etc/nodeagent/config.yaml", json.dumps(DRY_RUN))
    machine = node.machine
    machine.run("systemctl restart nodeagent.service", timeout_s=120)
    machine.run("timeout 100 sh -c 'until test -s /run/nodeagent/state; do sleep 0.5; done'", timeout_s=120)
    kills = Kills(node)
    with node.cast() as cast:
        cast.add(start_pod(machine, "chill", work="hold 48 1"))
        pod = cast.add(start_pod(machine, "bloated", work="flood 400 100"))
        machine.run("sleep 12")  # a calm agent reads the pods every 10 s
        before = len(node.api.sent("POST", "/events"))
        go(machine, pod)
        records, logged = kills.wait("shortage of the node")
        found = report("node shortage, dry run", records, logged)
        assert (found["number"], found["pods"], found["causes"]) == (1, ["shop/bloated"], ["node"])
        race = records[0]["race"]
        print(f"OOM | race | {race['loss']} | deficit {race['deficit']} | {race['victims']} {race['inFlight']}")
        assert race["loss"] in ("dry-run", "not-met")
        assert race["victims"] == ["shop/bloated"], race
        assert race["deficit"] is not None
        assert records[0]["samples"]
        assert len(node.api.sent("POST", "/events")) == before, "a dry run sends nothing"
    explained = machine.run(
        f"/opt/nodeagent/bin/nodeagent explain {records[0]['id']} --config /etc/nodeagent/config.yaml"
    ).stdout
    assert "shop/bloated" in explained
    assert "WHY NO EVICTION CAME FIRST" in explained
