"""The DaemonSet's container in the machine, started by runc as a kubelet's runtime starts it.

The container is made from the Dockerfile, whose steps are taken without a container engine, and from the manifest: its
mounts, capabilities, namespaces, user, command line, memory limit and CPU request. Not from them: the seccomp and
AppArmor profiles, which a kubelet's runtime brings, the network, and the way to the API server, which is a kubeconfig.
"""

import json
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from nodeagent.config.quantity import parse_milli, parse_quantity
from tests.fake_kube import ApiServer, pod
from tests.support.manifests import Document, container, document_of, pod_spec
from tests.support.paths import REPOSITORY
from tests.vm.dockerfile import Built, base_root, build
from tests.vm.image import cache_folder
from tests.vm.machine import HOST_LOOPBACK, Machine
from tests.vm.pods import VmPod

BUNDLE: Final = "/var/tmp/bundle"
SPEC: Final = f"{BUNDLE}/config.json"
MEMORY_LIMIT: Final = parse_quantity(container()["resources"]["limits"]["memory"])
CPU_SHARES: Final = parse_milli(container()["resources"]["requests"]["cpu"]) * 1024 // 1000
OOM_SCORE_ADJ: Final = -997
"""Of a pod of priority class system-node-critical, whatever its QoS class."""
MASKED: Final = ["acpi", "asound", "kcore", "keys", "latency_stats", "sched_debug", "scsi", "timer_list", "timer_stats"]
READ_ONLY: Final = ["bus", "fs", "irq", "sys", "sysrq-trigger"]
"""Below /proc, as containerd has them; `pressure` is in neither list."""
CONFIGURATION: Final = "/run/vm/agent-configuration"
LOG: Final = "/var/tmp/agent.log"
NAME: Final = "agent"
START_TIMEOUT_S: Final = 240.0
QOS_SLICES: Final = {
    "kubepods.slice": 2 * 1024,
    "kubepods-burstable.slice": CPU_SHARES,
    "kubepods-besteffort.slice": 2,
}
"""CPU shares that a kubelet gives them: the node's CPUs, the sum of the requests, the minimum."""


def build_image(scratch: Path) -> Built:
    """The image, below `scratch`."""
    return build(REPOSITORY / "Dockerfile", base=base_root(cache_folder()), scratch=scratch)


def unpack_image(machine: Machine, built: Built) -> None:
    """Copy the image to BUNDLE in the machine, unless it is there."""
    if machine.run(f"test -e {BUNDLE}/rootfs", check=False).returncode == 0:
        return
    machine.copy(built.root, BUNDLE, timeout_s=180)
    # A mount of its own, as runtimes have it. runc makes the mount private; that of the directory has the volumes too.
    machine.run(
        f"mv {BUNDLE}/{built.root.name} {BUNDLE}/rootfs && mount --bind {BUNDLE}/rootfs {BUNDLE}/rootfs && "
        "mkdir -p /run/nodeagent"
    )


def install_image(machine: Machine, scratch: Path) -> Built:
    """The image, unpacked in the machine at BUNDLE. What is made below `scratch` is removed again."""
    try:
        built = build_image(scratch)
        unpack_image(machine, built)
    finally:
        shutil.rmtree(scratch)
    return built


def runtime_spec(
    command: tuple[str, ...],
    environment: dict[str, str],
    *,
    cgroup: str,
    host_pid: bool = True,
    host_network: bool = False,
    daemonset: Document | None = None,
) -> dict[str, Any]:
    """The OCI configuration that a kubelet's runtime would make of the manifest."""
    manifest = daemonset or document_of("DaemonSet")
    context = container(manifest)["securityContext"]
    user = pod_spec(manifest)["securityContext"]
    capabilities = [f"CAP_{name}" for name in context["capabilities"].get("add", ())]
    namespaces = ["mount", "ipc", "uts", "cgroup"]
    namespaces += [] if host_network else ["network"]
    namespaces += [] if host_pid else ["pid"]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": user["runAsUser"], "gid": user["runAsGroup"]},
            "args": command,
            "env": [f"{name}={value}" for name, value in environment.items()],
            "cwd": "/",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
            "noNewPrivileges": not context["allowPrivilegeEscalation"],
            "oomScoreAdj": OOM_SCORE_ADJ,
        },
        "root": {"path": f"{BUNDLE}/rootfs", "readonly": context["readOnlyRootFilesystem"]},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro", "nosuid", "noexec"]},
            {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs"},
            *host_mounts(manifest),
        ],
        "linux": {
            "namespaces": [{"type": name} for name in namespaces],
            "resources": {"memory": {"limit": MEMORY_LIMIT}, "cpu": {"shares": CPU_SHARES}},
            "cgroupsPath": cgroup,
            "maskedPaths": [f"/proc/{name}" for name in MASKED] + ["/sys/firmware"],
            "readonlyPaths": [f"/proc/{name}" for name in READ_ONLY],
            # As containerd does if a mount is to follow the host's (HostToContainer).
            "rootfsPropagation": "rslave",
        },
    }


def host_mounts(daemonset: Document) -> Iterator[dict[str, Any]]:
    """The manifest's hostPath volumes as bind mounts, which a container runtime makes recursive, and its empty ones."""
    volumes = pod_spec(daemonset)["volumes"]
    paths = {volume["name"]: volume["hostPath"]["path"] for volume in volumes if "hostPath" in volume}
    empty = {volume["name"] for volume in volumes if "emptyDir" in volume}
    for mount in container(daemonset)["volumeMounts"]:
        if mount["name"] in empty:
            # As a kubelet makes it, whose fsGroup then owns it.
            yield {"destination": mount["mountPath"], "type": "tmpfs", "source": "tmpfs", "options": ["mode=777"]}
        if mount["name"] in paths:
            propagation = "rslave" if mount.get("mountPropagation") == "HostToContainer" else "rprivate"
            recursive = mount.get("recursiveReadOnly", "Disabled") != "Disabled"
            access = "rro" if recursive else "ro" if mount.get("readOnly") else "rw"
            yield {
                "destination": mount["mountPath"],
                "type": "bind",
                "source": paths[mount["name"]],
                "options": ["rbind", access, propagation],
            }


class AgentContainer:
    """The DaemonSet's pod beside the pods of a test: in its slices, with the CPU weights that a kubelet writes."""

    def __init__(self, machine: Machine, image: Built, api: ApiServer, kubeconfig: str, *, node: str) -> None:
        """`kubeconfig` is a kubeconfig's text that names the host's loopback."""
        self._machine = machine
        self._image = image
        self._api = api
        self._node = node
        self.pod = VmPod("nodeagent", "nodeagent-x", str(uuid.uuid4()), "Burstable", uuid.uuid4().hex * 2)
        self.scope = f"/sys/fs/cgroup{self.pod.cgroup}/cri-containerd-{self.pod.container_id}.scope"
        machine.write(f"{CONFIGURATION}/kubeconfig", kubeconfig.replace("127.0.0.1", HOST_LOOPBACK), mode=0o600)

    def start(self, *, configuration: str | None = None, daemonset: Document | None = None) -> float:
        """Start it without saved state. `configuration`: instead of the ConfigMap's. Returns the seconds until its
        endpoint answers, which is what the startup probe waits for."""
        manifest = daemonset or document_of("DaemonSet")
        text = configuration if configuration is not None else document_of("ConfigMap")["data"]["config.yaml"]
        self._machine.write(f"{CONFIGURATION}/config.yaml", text)
        environment = {
            "PATH": "/usr/bin:/bin",
            "NODE_NAME": self._node,
            "POD_UID": self.pod.uid,
            "KUBECONFIG": "/etc/nodeagent/kubeconfig",
            **self._image.environment,
            **{each["name"]: each["value"] for each in container(manifest)["env"] if "value" in each},
        }
        spec = runtime_spec(
            (*self._image.command, *container(manifest)["args"]),
            environment,
            cgroup=f"{self.pod.slice}:cri-containerd:{self.pod.container_id}",
            host_network=True,
            daemonset=manifest,
        )
        spec["mounts"].append(
            {"destination": "/etc/nodeagent", "type": "bind", "source": CONFIGURATION, "options": ["rbind", "ro"]}
        )
        self._machine.write(SPEC, json.dumps(spec))
        weights = {**QOS_SLICES, self.pod.slice: CPU_SHARES}
        self._api.requests.clear()
        self._api.add_pod(
            pod(
                self.pod.name,
                namespace=self.pod.namespace,
                node=self._node,
                uid=self.pod.uid,
                qos=self.pod.qos_class,
                owner=("DaemonSet", "nodeagent"),
            )
        )
        properties = "; ".join(
            f"systemctl set-property --runtime {name} CPUWeight={cpu_weight(shares)}"
            for name, shares in weights.items()
        )
        self._machine.run(
            f"{properties}; systemctl set-property --runtime {self.pod.slice} MemoryMax={MEMORY_LIMIT}; "
            f"mkdir -p /run/nodeagent; "
            f"runc --systemd-cgroup run --detach --bundle {BUNDLE} {NAME} </dev/null >{LOG} 2>&1"
        )
        began = time.monotonic()
        while self.probe("/healthz") != 200:
            assert time.monotonic() - began < START_TIMEOUT_S, self.log()
            time.sleep(0.2)
        return time.monotonic() - began

    def probe(self, path: str) -> int:
        """Status of a probe as the kubelet sends it, with the manifest's longest wait; 0 if nothing answers."""
        probed = self._machine.run(
            ["/opt/nodeagent/bin/python", "-c", PROBE, str(port()), path, str(timeout_s())], check=False
        )
        return int(probed.stdout or 0)

    def start_probes(self) -> subprocess.Popen[str]:
        """Probes of /healthz and /readyz, one after the other, each second; a line for each: path, status, seconds.
        They end with stdin."""
        self._machine.write("/run/vm/probes.py", PROBES)
        return self._machine.start(
            f"exec nice -n -10 /opt/nodeagent/bin/python -u /run/vm/probes.py {port()} {timeout_s()}"
        )

    def number(self, file: str) -> str:
        """A file of the container's cgroup."""
        return self._machine.run(f"cat {self.scope}/{file}").stdout.strip()

    def log(self) -> str:
        """Its log."""
        return self._machine.run(f"cat {LOG}", check=False).stdout

    def stop(self) -> None:
        """End it and remove what it stored."""
        self._machine.run(
            f"runc kill {NAME} TERM; for i in $(seq 100); do runc state {NAME} 2>/dev/null | grep -q running || break; "
            f"sleep 0.2; done; runc delete --force {NAME}; systemctl stop {self.pod.slice}; rm -rf /run/nodeagent/*",
            check=False,
        )
        self._api.delete_pod(self.pod.namespace, self.pod.name)

    def close(self) -> None:
        """Undo the weights."""
        self._machine.run("; ".join(f"systemctl set-property --runtime {name} CPUWeight=" for name in QOS_SLICES))


PROBE: Final = """
import http.client, sys
port, path, timeout = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
try:
    connection.request("GET", path)
    print(connection.getresponse().status)
except OSError:
    print(0)
"""
PROBES: Final = """
import http.client, select, sys, time
port, timeout = int(sys.argv[1]), float(sys.argv[2])
while not select.select([0], [], [], 1.0)[0]:
    for path in ("/healthz", "/readyz"):
        began, status = time.monotonic(), 0
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
        try:
            connection.request("GET", path)
            status = connection.getresponse().status
        except OSError:
            pass
        connection.close()
        print(path, status, f"{time.monotonic() - began:.3f}")
"""


def port() -> int:
    """Where the endpoint listens."""
    [found] = container()["ports"]
    number: int = found["containerPort"]
    return number


def timeout_s() -> int:
    """How long a probe waits."""
    seconds: int = container()["livenessProbe"]["timeoutSeconds"]
    return seconds


def cpu_weight(shares: int) -> int:
    """cpu.weight for CPU shares, as runc and kubelets write it (KEP-2254)."""
    return 1 + (shares - 2) * 9999 // 262142
