"""A node in a directory: /proc, the cgroup hierarchies, mounts and log directories, written from one literal.

    root = write_node(tmp_path, Node(pods=(TreePod("default/web", working_set=200 * MI),)))
    snapshot = Sampler(open_host(root), Sampling(), node_name="n").sample()

The tree is a recording (it has `listing/`), so file system numbers and the clock come from the literal and never from
the machine that runs the test. Writing another literal into the same directory changes the node in place: files keep
their inodes, and pods that the new literal lacks are removed. For a cgroup that was removed and made again, write once
without it.

Contents have the form of a Linux 6.1 kernel's, reduced to the lines that matter. A test breaks a file afterwards with
`Path.write_bytes`.
"""

import json
import os
import shutil
import uuid
from pathlib import Path
from typing import Final, NamedTuple

from nodeagent.model import QOSClass
from nodeagent.sampling.pods.pod_containers import SANDBOX_ADJ

KI: Final = 1 << 10
MI: Final = 1 << 20
GI: Final = 1 << 30

_V1_MAX: Final = 9223372036854771712


class TreeContainer(NamedTuple):
    """A container with `processes` invented PIDs; the first has `oom_score_adj`."""

    name: str = "c"
    processes: int = 1
    oom_score_adj: int | None = None
    """None: the kubelet's value for the pod's QoS class and an equal share of its request."""


class TreePod(NamedTuple):
    """A pod. `key` is `namespace/name`; the UID is derived from it unless given."""

    key: str
    qos: QOSClass = QOSClass.BURSTABLE
    working_set: int = 10 * MI
    inactive_file: int = 0
    active_file: int = 0
    """Part of the working set."""
    dirty_file: int = 0
    swap: int = 0
    memory_min: int = 0
    memory_low: int = 0
    request: int = 0
    """Memory request in bytes, divided over the containers; for Guaranteed pods also the cgroup's limit."""
    containers: tuple[TreeContainer, ...] = (TreeContainer(),)
    uid: str = ""
    sandbox: bool = True
    logs: bool = True
    """True: it has a log directory, which gives it a name."""
    system: bool = False
    """In the system partition (KEP-5894)."""
    stall: float = 0.0
    started_s_ago: float = 3600.0

    @property
    def cgroup_uid(self) -> str:
        return self.uid or str(uuid.uuid5(uuid.NAMESPACE_DNS, self.key))


_EMPTY: Final = TreePod("")


class TreeDisk(NamedTuple):
    """A file system. Equal devices are one file system."""

    available: int = 50 * GI
    capacity: int = 100 * GI
    inodes_free: int = 5_000_000
    inodes: int = 6_553_600
    device: tuple[int, int] = (259, 1)


class Node(NamedTuple):
    """A node. `memory_available` is the signal; all other memory numbers follow from it."""

    cgroup: str = "v2"
    """`v2`, `v1`, or `hybrid`: v1 controllers and a v2 tree that has only pressure files."""
    systemd: bool = True
    """The cgroup driver."""
    cgroup_root: str = ""
    """Parent of kubepods in the cgroupfs spelling: `/kubelet` for kind."""
    memory_total: int = 8 * GI
    memory_available: int = 4 * GI
    mem_available: int | None = None
    """MemAvailable; None: the same."""
    swap_total: int = 0
    swap_free: int = 0
    swap_accounting: bool = True
    """False: the kernel does not count swap by cgroup."""
    allocatable_limit: int | None = 7 * GI
    """Limit of the pods' cgroup; None: unlimited."""
    pods_working_set: int | None = None
    """None: the sum over the pods."""
    threads: int = 500
    pid_max: int = 32768
    threads_max: int = 60000
    nodefs: TreeDisk = TreeDisk()
    imagefs: TreeDisk | None = None
    """None: on the nodefs."""
    runtime: str = "containerd"
    """`containerd`, `cri-o`, or empty for none."""
    pods: tuple[TreePod, ...] = ()
    kubepods: bool = True
    stall_memory: float = 0.0
    """Node-wide `some avg10` and `full avg10` of memory, percent."""
    uptime: float = 100_000.0
    wall: float = 1_800_000_000.0


def write_node(root: Path, node: Node) -> str:
    """Write `node` below `root`; the root as a string."""
    writer = _Writer(root, node)
    writer.proc()
    writer.cgroups()
    writer.disks()
    return str(root)


class _Writer:
    def __init__(self, root: Path, node: Node) -> None:
        self.root, self.node = root, node
        self.next_pid = 1000
        self.unified = {"v2": "/sys/fs/cgroup", "v1": None, "hybrid": "/sys/fs/cgroup/unified"}[node.cgroup]
        self.memory = "/sys/fs/cgroup" if node.cgroup == "v2" else "/sys/fs/cgroup/memory"
        self.pids = "/sys/fs/cgroup" if node.cgroup == "v2" else "/sys/fs/cgroup/pids"

    def put(self, path: str, text: str) -> None:
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    # --- /proc

    def proc(self) -> None:
        node = self.node
        total, available = node.memory_total // KI, node.memory_available // KI
        kernel_estimate = available if node.mem_available is None else node.mem_available // KI
        fields = {
            "MemTotal": total,
            "MemFree": available,
            "MemAvailable": kernel_estimate,
            "Buffers": 0,
            "Cached": 0,
            "SwapTotal": node.swap_total // KI,
            "SwapFree": node.swap_free // KI,
            "Dirty": 0,
            "AnonPages": total - available,
            "Shmem": 0,
            "SReclaimable": 0,
            "SUnreclaim": 0,
            "KernelStack": 0,
            "PageTables": 0,
        }
        lines = [f"{name + ':':<16}{value:>8} kB" for name, value in fields.items()]
        lines += ["HugePages_Total:       0", "HugePages_Free:        0", "HugePages_Rsvd:        0"]
        self.put("/proc/meminfo", "\n".join([*lines, "Hugepagesize:       2048 kB", "Hugetlb:               0 kB", ""]))
        self.put("/proc/loadavg", f"0.10 0.20 0.30 1/{node.threads} 4242\n")
        self.put("/proc/sys/kernel/pid_max", f"{node.pid_max}\n")
        self.put("/proc/sys/kernel/threads-max", f"{node.threads_max}\n")
        self.put("/proc/uptime", f"{node.uptime:.2f} {node.uptime:.2f}\n")
        self.put("/proc/pressure/memory", _psi(node.stall_memory))
        self.put("/proc/pressure/io", _psi(0.0))
        self.put("/proc/1/mountinfo", self.mountinfo())

    def mountinfo(self) -> str:
        rows = [(_device(self.node.nodefs), "/", "ext4 /dev/root rw"), ("0:21", "/proc", "proc proc rw")]
        if self.node.imagefs is not None:
            rows.append((_device(self.node.imagefs), _image_root(self.node), "ext4 /dev/images rw"))
        if self.node.cgroup == "v2":
            rows.append(("0:26", "/sys/fs/cgroup", "cgroup2 cgroup2 rw,nsdelegate"))
        else:
            rows.append(("0:27", "/sys/fs/cgroup/memory", "cgroup cgroup rw,memory"))
            rows.append(("0:28", "/sys/fs/cgroup/pids", "cgroup cgroup rw,pids"))
        if self.node.cgroup == "hybrid":
            rows.append(("0:29", "/sys/fs/cgroup/unified", "cgroup2 cgroup2 rw"))
        return "".join(
            f"{20 + i} 1 {device} / {point} rw,relatime shared:{i} - {rest}\n"
            for i, (device, point, rest) in enumerate(rows)
        )

    def process(self, *, oom_score_adj: int, started_s_ago: float) -> int:
        pid, self.next_pid = self.next_pid, self.next_pid + 1
        ticks = int((self.node.uptime - started_s_ago) * os.sysconf("SC_CLK_TCK"))
        self.put(f"/proc/{pid}/oom_score_adj", f"{oom_score_adj}\n")
        self.put(f"/proc/{pid}/stat", f"{pid} (a process) S 1 {'0 ' * 17}{ticks} {'0 ' * 30}\n")
        return pid

    # --- cgroups

    def cgroups(self) -> None:
        node = self.node
        if self.unified is not None:
            controllers = "cpu io memory pids" if node.cgroup == "v2" else ""
            self.put(f"{self.unified}/cgroup.controllers", f"{controllers}\n")
        used = node.memory_total - node.memory_available
        self.memory_files("", usage=used, limit=None)
        self.pressure("/system.slice", 0.0)
        if node.kubepods:
            self.kubepods()

    def kubepods(self) -> None:
        node = self.node
        place = cgroup_path(node.cgroup_root, "kubepods", systemd=node.systemd)
        total = sum(pod.working_set for pod in node.pods)
        working_set = total if node.pods_working_set is None else node.pods_working_set
        inactive = sum(pod.inactive_file for pod in node.pods)
        limit = node.allocatable_limit
        sums = TreePod("", inactive_file=inactive, active_file=sum(pod.active_file for pod in node.pods))
        self.memory_files(place, usage=working_set + inactive, limit=limit, pod=sums)
        self.pressure(place, 0.0)
        parents = [place]
        partitions: list[tuple[str, ...]] = [()]
        if any(pod.system for pod in node.pods):
            partitions.append(("system",))
            parents.append(path := cgroup_path(node.cgroup_root, "kubepods", "system", systemd=node.systemd))
            self.memory_files(path, usage=0, limit=None)
        for partition in partitions:
            for qos in ("burstable", "besteffort"):
                path = cgroup_path(node.cgroup_root, "kubepods", *partition, qos, systemd=node.systemd)
                parents.append(path)
                self.memory_files(path, usage=0, limit=None)
        pods = [self.pod(pod) for pod in node.pods]
        self.remove_others(parents, {*parents, *pods})

    def pod(self, pod: TreePod) -> str:
        """Write one pod; its path."""
        node = self.node
        path = pod_cgroup(node, pod)
        limit = pod.request if pod.qos is QOSClass.GUARANTEED else None
        self.memory_files(path, usage=pod.working_set + pod.inactive_file, limit=limit, pod=pod)
        self.pressure(path, pod.stall)
        processes = sum(container.processes for container in pod.containers) + pod.sandbox
        self.put(f"{self.pids}{path}/pids.current", f"{processes}\n")
        if pod.sandbox:
            self.container(path, pod, TreeContainer("sandbox", 1, SANDBOX_ADJ), started_s_ago=pod.started_s_ago)
        for container in pod.containers:
            self.container(path, pod, container, started_s_ago=pod.started_s_ago - 1)
        if pod.logs:
            self.logs(pod)
        return path

    def container(self, pod_path: str, pod: TreePod, container: TreeContainer, *, started_s_ago: float) -> None:
        identity = container_id(pod, container)
        path = f"{pod_path}/cri-containerd-{identity}.scope" if self.node.systemd else f"{pod_path}/{identity}"
        adj = container.oom_score_adj
        if adj is None:
            adj = oom_score_adj(pod.qos, pod.request // max(1, len(pod.containers)), self.node.memory_total)
        pids = [self.process(oom_score_adj=adj, started_s_ago=started_s_ago) for _ in range(container.processes)]
        for top in {self.memory, self.pids}:
            self.put(f"{top}{path}/cgroup.procs", "".join(f"{pid}\n" for pid in pids))

    def memory_files(self, path: str, *, usage: int, limit: int | None, pod: TreePod = _EMPTY) -> None:
        """`pod` has the numbers beside the usage."""
        place, file = f"{self.memory}{path}", pod.inactive_file + pod.active_file
        if self.node.cgroup == "v2":
            lines = {"anon": usage - file, "file": file, "kernel": 0, "shmem": 0, "file_dirty": pod.dirty_file}
            lines |= {"file_writeback": 0, "inactive_file": pod.inactive_file, "active_file": pod.active_file}
            lines |= {"slab_reclaimable": 0}
            if path:
                files = {"current": usage, "max": "max" if limit is None else limit}
                files |= {"min": pod.memory_min, "low": pod.memory_low}
                if self.node.swap_accounting:
                    files["swap.current"] = pod.swap
                for name, content in files.items():
                    self.put(f"{place}/memory.{name}", f"{content}\n")
        else:
            lines = {"total_rss": usage - file, "total_shmem": 0, "total_dirty": pod.dirty_file}
            lines |= {"total_inactive_file": pod.inactive_file, "total_active_file": pod.active_file}
            if self.node.swap_accounting:
                lines["total_swap"] = pod.swap
            self.put(f"{place}/memory.usage_in_bytes", f"{usage}\n")
            self.put(f"{place}/memory.limit_in_bytes", f"{_V1_MAX if limit is None else limit}\n")
        self.put(f"{place}/memory.stat", "".join(f"{key} {value}\n" for key, value in lines.items()))

    def pressure(self, path: str, some: float) -> None:
        if self.unified is not None:
            self.put(f"{self.unified}{path}/memory.pressure", _psi(some))
            self.put(f"{self.unified}{path}/io.pressure", _psi(0.0))

    def remove_others(self, parents: list[str], wanted: set[str]) -> None:
        """Remove pods of an earlier literal."""
        for top in {self.memory, self.pids, self.unified or self.memory}:
            for parent in parents:
                for child in list((self.root / f"{top}{parent}".lstrip("/")).glob("*")):
                    if child.is_dir() and f"{parent}/{child.name}" not in wanted:
                        shutil.rmtree(child)

    # --- disks and logs

    def logs(self, pod: TreePod) -> None:
        namespace, name = pod.key.split("/")
        for container in pod.containers:
            log = f"/var/log/pods/{namespace}_{name}_{pod.cgroup_uid}/{container.name}/0.log"
            self.put(log, "")
            link = f"{name}_{namespace}_{container.name}-{container_id(pod, container)}.log"
            target = self.root / "var/log/containers" / link
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.is_symlink():
                target.symlink_to(log)

    def disks(self) -> None:
        node = self.node
        (self.root / "var/lib/kubelet").mkdir(parents=True, exist_ok=True)
        numbers = {"/": _statvfs(node.nodefs)}
        if node.runtime:
            image_root = _image_root(node)
            (self.root / image_root.lstrip("/")).mkdir(parents=True, exist_ok=True)
            numbers[image_root] = _statvfs(node.imagefs or node.nodefs)
        self.put("/listing/statvfs.json", json.dumps(numbers))
        self.put("/listing/capture.json", json.dumps({"start": node.wall}))


# --- the conventions of a kubelet -------------------------------------------------------------------------------------


def cgroup_path(cgroup_root: str, *parts: str, systemd: bool) -> str:
    """The path of an internal cgroup name for a driver."""
    names = [part for part in cgroup_root.split("/") if part] + list(parts)
    if not systemd:
        return "".join(f"/{name}" for name in names)
    escaped = [name.replace("-", "_") for name in names]
    return "".join(f"/{'-'.join(escaped[: i + 1])}.slice" for i in range(len(escaped)))


def pod_cgroup(node: Node, pod: TreePod) -> str:
    """Path of a pod below the hierarchy's root, as the kubelet makes it."""
    between = {QOSClass.GUARANTEED: [], QOSClass.BURSTABLE: ["burstable"], QOSClass.BEST_EFFORT: ["besteffort"]}[
        pod.qos
    ]
    partition = ["system"] if pod.system else []
    names = ["kubepods", *partition, *between, f"pod{pod.cgroup_uid}"]
    return cgroup_path(node.cgroup_root, *names, systemd=node.systemd)


def container_id(pod: TreePod, container: TreeContainer) -> str:
    """64 hexadecimal digits, always the same for the same names."""
    return uuid.uuid5(uuid.NAMESPACE_DNS, f"{pod.cgroup_uid}/{container.name}").hex * 2


def oom_score_adj(qos: QOSClass, request: int, capacity: int) -> int:
    """The kubelet's formula (pkg/kubelet/qos/policy.go)."""
    if qos is not QOSClass.BURSTABLE:
        return -997 if qos is QOSClass.GUARANTEED else 1000
    return min(999, max(3, 1000 - 1000 * request // capacity))


def _psi(some: float) -> str:
    line = f"avg10={some:.2f} avg60={some:.2f} avg300={some:.2f} total={int(some * 1000)}"
    return f"some {line}\nfull {line}\n"


def _device(disk: TreeDisk) -> str:
    return f"{disk.device[0]}:{disk.device[1]}"


def _image_root(node: Node) -> str:
    return "/var/lib/containers/storage" if node.runtime == "cri-o" else "/var/lib/containerd"


def _statvfs(disk: TreeDisk) -> dict[str, int]:
    return {
        "f_bavail": disk.available // 4096,
        "f_blocks": disk.capacity // 4096,
        "f_frsize": 4096,
        "f_ffree": disk.inodes_free,
        "f_files": disk.inodes,
        "st_dev": os.makedev(*disk.device),
    }
