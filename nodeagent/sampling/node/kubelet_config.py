"""Finds the configuration of the kubelet that runs on this host.

Looked for in this order: the command line of the process in the kubelet's service cgroup (`--config` and eviction
flags), then the files where distributions keep it. Walking all of /proc for a process called kubelet would cost more
than the rest of a report. A recorded host may hold the answer of the kubelet's own /configz instead.
"""

from typing import Final

from nodeagent.config import kubelet
from nodeagent.config.kubelet import KubeletThresholds
from nodeagent.model import Note, NoteKind
from nodeagent.sampling.hostfs.host import Host, Unreadable

_SERVICE_PROCS: Final = tuple(
    f"/sys/fs/cgroup{hierarchy}/system.slice/kubelet.service/cgroup.procs"
    for hierarchy in ("", "/systemd", "/unified", "/memory")
)
USUAL_FILES: Final = (
    "/var/lib/kubelet/config.yaml",  # kubeadm
    "/etc/kubernetes/kubelet/config.json",  # EKS, Amazon Linux 2023
    "/etc/kubernetes/kubelet/kubelet-config.json",  # EKS, Amazon Linux 2
    "/home/kubernetes/kubelet-config.yaml",  # GKE
    "/etc/kubernetes/kubelet-config.yaml",  # kubespray, from scratch
    "/etc/kubernetes/kubelet.yaml",
)
_RECORDED: Final = "/kubelet/configz.json"


def find(host: Host) -> tuple[KubeletThresholds | None, tuple[Note, ...]]:
    """The kubelet's effective thresholds, and notes about what could not be read of them.

    None: there is no sign of a kubelet on this host.
    """
    flags = _command_line(host)
    path, text, refusal = _file(host, flags)
    if not flags and not (text or refusal):
        return None, ()
    settings = kubelet.read_settings(text, flags=flags, name=path)
    notes = tuple(Note(NoteKind.KUBELET, problem) for problem in settings.problems if problem != settings.unread)
    unread = refusal or settings.unread
    if unread and kubelet.flag_value(flags, "eviction-hard") is not None:
        notes += (Note(NoteKind.KUBELET, f"only its command line can be read: {unread}"),)
        unread = ""
    elif unread:
        notes += (Note(NoteKind.KUBELET, f"its configuration is not known, defaults assumed: {unread}"),)
    directory = kubelet.flag_value(flags, "config-dir")
    if directory:
        notes += (Note(NoteKind.KUBELET, f"what the files in its --config-dir {directory} change is not looked at"),)
    return KubeletThresholds(path or "command line", settings.thresholds, unread), notes


def _command_line(host: Host) -> tuple[str, ...]:
    """Arguments of the kubelet's process, without its own name; empty when there is none we can see."""
    for procs in _SERVICE_PROCS:
        try:
            pids = host.text(procs).split()
        except Unreadable:
            continue
        for pid in pids:
            try:
                words = host.text(f"/proc/{pid}/cmdline").rstrip("\0").split("\0")
            except Unreadable:
                continue
            if words[0].rpartition("/")[2] in ("kubelet", "hyperkube"):
                return tuple(words[1:])
    return ()


def _file(host: Host, flags: tuple[str, ...]) -> tuple[str, str, str]:
    """(path, content, why a file that is there cannot be read). Content is empty without a file."""
    candidates: tuple[str, ...] = USUAL_FILES
    if flags:
        named = kubelet.flag_value(flags, "config")
        candidates = (named,) if named and named.startswith("/") else ()
    if host.recorded:
        candidates = (*candidates, _RECORDED)
    refusal = ""
    for path in candidates:
        try:
            text = host.text(path)
        except Unreadable as error:
            if (flags and path != _RECORDED) or host.exists(path):
                refusal = refusal or str(error)
            continue
        if text.strip():
            return path, text, ""
        refusal = refusal or f"{path}: it is empty"
    return "", "", refusal
