"""Pods in the machine as a kubelet with the systemd driver lays them out: slices, scopes, log directories, real
processes. There is no kubelet: a test that wants a pod gone kills it."""

import uuid
from pathlib import Path
from typing import Final, NamedTuple

from tests.vm.machine import Machine

LOAD: Final = Path(__file__).with_name("load.py")
_QOS_PARENT: Final = {"Guaranteed": "kubepods", "Burstable": "kubepods-burstable", "BestEffort": "kubepods-besteffort"}
_OOM_SCORE_ADJ: Final = {"Guaranteed": -997, "Burstable": 900, "BestEffort": 1000}
"""As a kubelet sets them; Burstable for a request of a tenth of the node."""


class VmPod(NamedTuple):
    """A pod that runs in the machine."""

    namespace: str
    name: str
    uid: str
    qos_class: str
    container_id: str

    @property
    def slice(self) -> str:
        """Name of the pod's slice unit."""
        return f"{_QOS_PARENT[self.qos_class]}-pod{self.uid.replace('-', '_')}.slice"

    @property
    def directory(self) -> str:
        """Where the kubelet keeps its volumes."""
        return f"/var/lib/kubelet/pods/{self.uid}"

    def volume(self, name: str) -> str:
        """An emptyDir's directory."""
        return f"{self.directory}/volumes/kubernetes.io~empty-dir/{name}"

    @property
    def cgroup(self) -> str:
        """Path of the pod's cgroup below the hierarchy's root."""
        parent = _QOS_PARENT[self.qos_class]
        above = "/kubepods.slice" if parent == "kubepods" else f"/kubepods.slice/{parent}.slice"
        return f"{above}/{self.slice}"


def start_pod(
    machine: Machine,
    name: str,
    *,
    qos_class: str = "BestEffort",
    work: str = "hold 16 1",
    namespace: str = "shop",
    volume: str = "",
) -> VmPod:
    """Starts a pod with one container; returns when its process reports that it has started (`load.py`).

    `volume`: it has an emptyDir called `data`, on `disk` or in `memory`, which `{volume}` in `work` names.
    """
    pod = VmPod(namespace, name, str(uuid.uuid4()), qos_class, uuid.uuid4().hex * 2)
    work = work.format(volume=pod.volume("data"))
    if volume:
        machine.run(f"mkdir -p {pod.volume('data')}")
    if volume == "memory":
        machine.run(f"mount -t tmpfs -o size=4G tmpfs {pod.volume('data')}")
    fifo, log = f"/run/vm/{pod.uid}", f"/var/log/pods/{namespace}_{name}_{pod.uid}/main"
    script = f"echo {_OOM_SCORE_ADJ[qos_class]} >/proc/self/oom_score_adj; exec python3 /run/vm/load.py {fifo} {work}"
    if machine.run("test -e /run/vm/load.py", check=False).returncode:
        machine.write("/run/vm/load.py", LOAD.read_bytes())
    machine.run(
        f"mkdir -p {log} && echo started >{log}/0.log && mkfifo {fifo} && "
        f"(systemd-run --quiet --collect --scope --slice={pod.slice} --unit=cri-containerd-{pod.container_id} "
        f"sh -c '{script}' </dev/null >{log}/0.log 2>&1 &) && timeout 150 cat {fifo} && rm {fifo}"
    )
    return pod


def go(machine: Machine, pod: VmPod) -> None:
    """Let a pod begin that waits for it."""
    machine.run(f"systemctl kill --signal=USR1 {pod.slice}")


def kill_pod(machine: Machine, pod: VmPod) -> None:
    """Ends every process of the pod and takes its slice away, as a kubelet does after the grace period."""
    machine.run(f"systemctl kill --signal=KILL {pod.slice}; systemctl stop {pod.slice}", check=False)
    machine.run(
        f"rm -rf /var/log/pods/{pod.namespace}_{pod.name}_{pod.uid}; "
        f"if mountpoint -q {pod.volume('data')}; then umount {pod.volume('data')}; fi; rm -rf {pod.directory}"
    )
