"""The processes of a cgroup or a service, and the pod of a process."""

import errno
from collections.abc import Iterable
from typing import Final, NamedTuple

from nodeagent.sampling.hostfs import cgroups, parse
from nodeagent.sampling.hostfs.host import Host, Unreadable

HOST: Final = "host"
"""Stands for everything outside of pods."""
# 60 ms. A systemd inside a container makes a hundred cgroups.
MAX_SERVICE_CGROUPS: Final = 4096
MAX_SERVICE_PROCESSES: Final = 512
"""Processes of a service that are read: beside the kubelet of RKE2 there are containerd and a shim for each pod."""
_PROCS: Final = tuple(
    f"/sys/fs/cgroup{hierarchy}/{{}}/cgroup.procs" for hierarchy in ("", "/systemd", "/unified", "/memory")
)
_KUBELETS: Final = ("kubelet", "hyperkube")
_K3S: Final = ("k3s", "k3s-server", "k3s-agent")
_KUBELET_CGROUPS: Final = (
    ("system.slice/kubelet.service", _KUBELETS),
    ("podruntime/kubelet", _KUBELETS),  # Talos
    ("runtime.slice/kubelet.service", _KUBELETS),  # Bottlerocket
    ("kubereserved.slice/kubelet.service", _KUBELETS),  # AKS with node hardening
    ("system.slice/rke2-server.service", _KUBELETS),
    ("system.slice/rke2-agent.service", _KUBELETS),
    ("system.slice/k0sworker.service", _KUBELETS),
    ("system.slice/k0scontroller.service", _KUBELETS),
    ("system.slice/k3s.service", _K3S),
    ("system.slice/k3s-agent.service", _K3S),
)
"""Where distributions run the kubelet, below the root of a hierarchy, and the programs that contain it."""
_EXITING: Final = 0x4
"""PF_EXITING (include/linux/sched.h)."""


class CgroupProcesses(NamedTuple):
    """The processes of a cgroup and of the cgroups below it."""

    pids: list[int]
    complete: bool
    """False: the cgroup has more descendants than the limit, one could not be read, or processes are outside our PID
    namespace."""


def processes_below(host: Host, directory: str, *, max_cgroups: int = MAX_SERVICE_CGROUPS) -> CgroupProcesses:
    """Processes of the cgroup at `directory` and of its descendants; a cgroup that is gone has none. Never raises."""
    groups = cgroups.cgroups_below(host, directory, most=max_cgroups)
    pids: list[int] = []
    complete = groups.complete
    for group in groups.directories:
        try:
            found = parse.parse_pids(host.read(f"{group}/cgroup.procs"))
            complete = complete and 0 not in found  # a process outside our PID namespace
            pids += [pid for pid in found if pid]
        except Unreadable as error:
            # Gone, or threaded: the parent lists the processes of a threaded cgroup.
            complete = complete and error.errno in (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP)
    return CgroupProcesses(pids, complete)


def pod_uid_of_process(host: Host, pid: int) -> str | None:
    """The UID in the pod cgroup of a process, `HOST` if it is in no pod, None if it is gone."""
    try:
        lines = host.text(f"/proc/{pid}/cgroup").splitlines()
    except Unreadable:
        return None
    uid = _first_pod_uid(lines)
    if uid is not None:
        return uid
    # cgroup v1 shows a process that is ending in the root, whatever its cgroup was.
    if lines and all(line.endswith(":/") for line in lines) and _is_exiting(host, pid):
        return None
    return HOST


class ServiceProcess(NamedTuple):
    """A program in a service."""

    arguments: tuple[str, ...]
    """Without the program."""
    pid: str
    k3s: bool = False
    """It is k3s, which contains the kubelet and hides its own arguments."""


def service_command_line(host: Host, service: str, programs: tuple[str, ...]) -> tuple[str, ...]:
    """Arguments of the first of these programs in a systemd service; empty if none is visible."""
    found = _find_program(host, f"system.slice/{service}", programs)
    return found.arguments if found is not None else ()


def kubelet_process(host: Host) -> ServiceProcess | None:
    """The kubelet's process; None if it is not visible."""
    for cgroup, programs in _KUBELET_CGROUPS:
        found = _find_program(host, cgroup, programs)
        if found is not None:
            return found._replace(k3s=programs is _K3S)
    return None


def kubelet_command_line(host: Host) -> tuple[str, ...]:
    """Arguments of the kubelet; empty if it has no visible process of its own."""
    process = kubelet_process(host)
    return process.arguments if process is not None and not process.k3s else ()


def _find_program(host: Host, cgroup: str, programs: tuple[str, ...]) -> ServiceProcess | None:
    """The first of these programs in a cgroup; None if none is visible. Reading a cgroup takes a few reads, while a
    search of all of /proc takes 10 us for each process."""
    for procs in _PROCS:
        try:
            pids = host.text(procs.format(cgroup)).split()
        except Unreadable:
            continue
        for pid in pids[:MAX_SERVICE_PROCESSES]:
            try:
                words = host.text(f"/proc/{pid}/cmdline").rstrip("\0").split("\0")
            except Unreadable:
                continue  # it has ended
            # k3s sets its title to one text with spaces, in which the first word is the program.
            if len(words) == 1:
                words = words[0].split()
            if words and words[0].rpartition("/")[2] in programs:
                return ServiceProcess(tuple(words[1:]), pid)
    return None


def _first_pod_uid(lines: Iterable[str]) -> str | None:
    """The first pod in the lines `hierarchy:controllers:path`."""
    for line in lines:
        if "pod" in line:
            for name in line.split("/"):
                if (uid := cgroups.pod_uid(name)) is not None:
                    return uid
    return None


def _is_exiting(host: Host, pid: int) -> bool:
    try:
        fields = host.read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    except Unreadable:
        return True
    # Fields 3 (state) and 9 (flags) of proc(5); the command before them may contain any character.
    if len(fields) < 7 or fields[0] in (b"Z", b"X"):
        return True
    return bool((parse.parse_count(fields[6]) or 0) & _EXITING)
