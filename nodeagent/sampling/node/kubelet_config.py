"""Finds the configuration of the kubelet that runs on this host.

It is searched in this order: the command line of the process in the kubelet's service cgroup (`--config` and eviction
flags), then the files where distributions keep it. A search of all of /proc for a process called kubelet would cost
more than the rest of a report. A recorded host may contain the answer of the kubelet's own /configz instead.
"""

from typing import Final

from nodeagent.config import kubelet
from nodeagent.config.kubelet import KubeletThresholds
from nodeagent.model import Note, NoteKind, Threshold
from nodeagent.sampling.hostfs import processes
from nodeagent.sampling.hostfs.host import Host, Unreadable

USUAL_FILES: Final = (
    "/var/lib/kubelet/config.yaml",  # kubeadm
    "/etc/kubernetes/kubelet/config.json",  # EKS, Amazon Linux 2023
    "/etc/kubernetes/kubelet/kubelet-config.json",  # EKS, Amazon Linux 2
    "/home/kubernetes/kubelet-config.yaml",  # GKE
    "/etc/kubernetes/kubelet-config.yaml",  # kubespray, from scratch
    "/etc/kubernetes/kubelet.yaml",
)
_RECORDED: Final = "/kubelet/configz.json"


def read_thresholds(host: Host) -> tuple[KubeletThresholds | None, tuple[Note, ...]]:
    """The kubelet's effective thresholds, and notes about what is unknown of them.

    None: there is no kubelet on this host, as far as its process and the usual files show.
    """
    flags = processes.kubelet_command_line(host)
    path, text, refusal = _read_file(host, flags)
    if not flags and not (text or refusal):
        return None, ()
    settings = kubelet.read_settings(text, flags=flags, name=path)
    notes = tuple(Note(NoteKind.KUBELET, problem) for problem in settings.problems if problem != settings.unread)
    unread = refusal or settings.unread
    if unread and kubelet.flag_value(flags, "eviction-hard") is not None:
        notes += (Note(NoteKind.KUBELET, f"configuration file not read, flags only: {unread}"),)
        unread = ""
    elif unread:
        notes += (Note(NoteKind.KUBELET, f"configuration unknown, defaults assumed: {unread}"),)
    directory = kubelet.flag_value(flags, "config-dir")
    if directory:
        notes += (Note(NoteKind.KUBELET, f"files in its --config-dir {directory} are not read"),)
    return KubeletThresholds(path or "command line", settings.thresholds, unread), notes


def known_thresholds(kubelet: KubeletThresholds | None) -> tuple[Threshold, ...]:
    """The kubelet's thresholds that are facts; none if its configuration is only assumed."""
    return () if kubelet is None or kubelet.unread else kubelet.thresholds


def _read_file(host: Host, flags: tuple[str, ...]) -> tuple[str, str, str]:
    """(path, content, why an existing file cannot be read). Content is empty without a file."""
    candidates: tuple[str, ...] = USUAL_FILES
    if flags:
        configured = kubelet.flag_value(flags, "config")
        candidates = (configured,) if configured and configured.startswith("/") else ()
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
