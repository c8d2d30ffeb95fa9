"""Finds the configuration of the kubelet that runs on this host.

It is searched in this order: the command line of the kubelet's process (`--config`, `--config-dir` and eviction flags),
or the arguments of k3s, whose process contains the kubelet, from its Node; then, if no process is visible, the files
where distributions keep it. A search of all of /proc for a process called kubelet would cost more than the rest of a
report. A recorded host may contain the answer of the kubelet's own /configz instead.

`KubeletReader` reads again: a file is parsed only if the content of one of them has changed.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from nodeagent.config import k3s, kubelet
from nodeagent.config.kubelet import KubeletThresholds
from nodeagent.model import Note, NoteKind, Threshold
from nodeagent.sampling.hostfs import cgroups, processes
from nodeagent.sampling.hostfs.host import Host, Unreadable

USUAL_FILES: Final = (
    "/var/lib/kubelet/config.yaml",  # kubeadm
    "/etc/kubernetes/kubelet/config.json",  # EKS, Amazon Linux 2023
    "/etc/kubernetes/kubelet/kubelet-config.json",  # EKS, Amazon Linux 2
    "/home/kubernetes/kubelet-config.yaml",  # GKE
    "/etc/kubernetes/kubelet.conf",  # OpenShift; elsewhere it is a kubeconfig
    "/etc/kubernetes/kubelet-config.yaml",  # kubespray, from scratch
    "/etc/kubernetes/kubelet.yaml",  # Talos
)
USUAL_DIRECTORIES: Final = (
    "/var/lib/rancher/k3s/agent/etc/kubelet.conf.d",
    "/var/lib/rancher/rke2/agent/etc/kubelet.conf.d",
)
"""Directories of drop-ins without a main file."""
NOT_FOUND: Final = "no process and no file of the kubelet is visible"
"""Of a host with the cgroup of the pods, which only a kubelet makes."""
_KUBEPODS: Final = ("kubepods", "kubepods.slice")
_MOUNT: Final = "; in a container mount it read-only, as examples/kubelet does"
"""Behind the refusal of a file whose directory is missing."""
_RELATIVE: Final = "; below the kubelet's working directory, which needs CAP_SYS_PTRACE: give it an absolute path"
MAX_DROP_INS: Final = 64
MAX_FILE_BYTES: Final = 1 << 20
"""The name of a file may come from an annotation of the Node."""
_RECORDED: Final = "/kubelet/configz.json"
_HIDDEN: Final = (
    f"k3s hides its command line, and the annotation {k3s.NODE_ARGS} of its Node, which has the same arguments, was "
    "not read from the API server"
)
_NO_FLAGS: Final = ", flags not visible"


class KubeletSources(NamedTuple):
    """What was found of one kubelet, before it is parsed."""

    path: str = ""
    """The configuration file; empty: none."""
    text: str = ""
    drop_ins: tuple[tuple[str, str], ...] = ()
    """Path and text of each, in the order in which the kubelet merges them."""
    flags: tuple[str, ...] = ()
    refusal: str = ""
    """Why a file that the kubelet uses could not be read."""
    place: str = ""
    """The sources in words, for reports."""
    flags_visible: bool = True


class KubeletReading(NamedTuple):
    """The kubelet's thresholds, and notes about what is unknown of them."""

    kubelet: KubeletThresholds | None
    """None: there is no kubelet on this host, as far as its process, the usual files and the cgroups show."""
    notes: tuple[Note, ...] = ()

    @property
    def known(self) -> tuple[Threshold, ...] | None:
        """The thresholds that are facts; None if they are not known."""
        return None if self.kubelet is None or self.kubelet.unread else self.kubelet.thresholds


class KubeletReader:
    """Reads the configuration of one host's kubelet, again and again."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._sources: KubeletSources | None = None
        self._reading = KubeletReading(None)

    def read(self, k3s_arguments: Sequence[str] = ()) -> KubeletReading:
        """The reading. It is the same object while no source has changed. Never raises."""
        sources = read_sources(self._host, k3s_arguments)
        if sources != self._sources:
            self._sources, self._reading = sources, parse_sources(sources)
        return self._reading


def read_thresholds(host: Host, k3s_arguments: Sequence[str] = ()) -> KubeletReading:
    """One reading. Never raises."""
    return parse_sources(read_sources(host, k3s_arguments))


def parse_sources(sources: KubeletSources | None) -> KubeletReading:
    """The effective thresholds of these sources."""
    if sources is None:
        return KubeletReading(None)
    settings = kubelet.read_settings(
        sources.text, drop_ins=sources.drop_ins, flags=sources.flags, name=sources.path or "kubelet configuration"
    )
    notes = tuple(Note(NoteKind.KUBELET, problem) for problem in settings.problems if problem != settings.unread)
    unread = sources.refusal or settings.unread
    if unread and kubelet.flag_value(sources.flags, "eviction-hard") is not None:
        notes += (Note(NoteKind.KUBELET, f"configuration file not read, flags only: {unread}"),)
        unread = ""
    elif unread:
        notes += (Note(NoteKind.KUBELET, f"configuration not known, defaults assumed: {unread}"),)
    return KubeletReading(KubeletThresholds(sources.place, settings.thresholds, unread, sources.flags_visible), notes)


def from_configz(text: str) -> KubeletReading:
    """The thresholds in the kubelet's own answer of /configz, which contains what files and flags have set."""
    return parse_sources(KubeletSources(path="configz", text=text, place="configz, from the API server"))


def not_known(reading: KubeletReading, refusal: str) -> KubeletReading:
    """The reading of a kubelet that this host does not show, and that the API server did not describe either."""
    found = reading.kubelet or KubeletThresholds("not found", kubelet.read_settings().thresholds, "")
    unread = f"{found.unread or NOT_FOUND}; /configz through the API server: {refusal}"
    note = Note(NoteKind.KUBELET, f"configuration not known, defaults assumed: {unread}")
    return KubeletReading(found._replace(unread=unread), (note,))


def require_known_flags(reading: KubeletReading, known: KubeletReading) -> KubeletReading:
    """The reading; its thresholds are not known if it lacks the flags that those known before contain."""
    now, before = reading.kubelet, known.kubelet
    if now is None or now.unread or now.flags_visible or known.known is None or not before or not before.flags_visible:
        return reading
    unread = f"the kubelet's process is not visible, and its flags may replace {now.path}"
    return reading._replace(kubelet=now._replace(unread=unread))


def read_sources(host: Host, k3s_arguments: Sequence[str] = ()) -> KubeletSources | None:
    """The files and flags of this host's kubelet; None if nothing shows one. `k3s_arguments` are those of the Node's
    annotation. Never raises."""
    process = processes.kubelet_process(host)
    if process is None:
        return _usual_sources(host)
    if process.k3s:
        return _k3s_sources(host, k3s_arguments, process.pid)
    return _sources_of_flags(host, process.arguments, pid=process.pid)


def _sources_of_flags(host: Host, flags: tuple[str, ...], *, pid: str, place: str = "command line") -> KubeletSources:
    """The sources of a kubelet with this command line, which names its files."""
    path = _path_flag(flags, "config", pid)
    text, refusal = "", ""
    if path:
        text, refusal = _read(host, path)
        place = path
        if refusal:
            refusal += _remedy(host, path.rpartition("/")[0])
    if not text and host.recorded and (recorded := _read(host, _RECORDED)[0]):
        path = place = _RECORDED
        text, refusal = recorded, ""
    directory = _path_flag(flags, "config-dir", pid)
    drop_ins, drop_ins_refusal = _read_drop_ins(host, directory) if directory else ((), "")
    if drop_ins:
        place += f", {directory}"
    return KubeletSources(path, text, drop_ins, flags, refusal or drop_ins_refusal, place)


def _k3s_sources(host: Host, arguments: Sequence[str], pid: str) -> KubeletSources:
    settings = k3s.read_settings(arguments)
    directory = f"{settings.data_directory}/{k3s.DROP_IN_DIRECTORY}"
    parent = directory.rpartition("/")[0]
    if not parent.startswith("/") or not host.exists(parent):
        # k3s writes its container runtime's configuration into it.
        return KubeletSources(refusal=f"{parent}: not visible, and k3s has a kubelet{_MOUNT}", place="k3s")
    refusal = "" if arguments else _HIDDEN
    drop_ins, trouble = _read_drop_ins(host, directory) if host.exists(directory) else ((), "")
    if drop_ins or trouble or refusal:
        place = f"k3s, {directory}" if drop_ins else "k3s"
        return KubeletSources("", "", drop_ins, k3s.with_drop_ins(settings), refusal or trouble, place)
    return _sources_of_flags(host, k3s.without_drop_ins(settings), pid=pid, place="k3s")


def _usual_sources(host: Host) -> KubeletSources | None:
    """The first of the usual files; its process, and so its flags, are not visible."""
    candidates = (*USUAL_FILES, _RECORDED) if host.recorded else USUAL_FILES
    refusals = []
    for path in candidates:
        text, refusal = _read(host, path)
        if text and not _is_kubeconfig(text):
            visible = path == _RECORDED
            return KubeletSources(path, text, place=path if visible else f"{path}{_NO_FLAGS}", flags_visible=visible)
        if refusal and not text and host.exists(path):
            refusals.append(refusal)
    for directory in USUAL_DIRECTORIES:
        drop_ins, refusal = _read_drop_ins(host, directory)
        if drop_ins:
            place = f"{directory}{_NO_FLAGS}"
            return KubeletSources(drop_ins=drop_ins, place=place, refusal=refusal, flags_visible=False)
        if refusal and host.exists(directory):
            refusals.append(refusal)
    if refusals:
        return KubeletSources(refusal=refusals[0], place="usual files")
    memory = cgroups.detect_hierarchy(host).memory
    pods = memory is not None and any(host.exists(f"{memory}/{name}") for name in _KUBEPODS)
    return KubeletSources(refusal=NOT_FOUND, place="not found") if pods else None


def _path_flag(flags: tuple[str, ...], flag: str, pid: str) -> str:
    """The path in a flag of this process, below its working directory if it is relative; empty without the flag."""
    path = kubelet.flag_value(flags, flag) or ""
    return path if not path or path.startswith("/") else f"/proc/{pid}/cwd/{path}"


def _is_kubeconfig(text: str) -> bool:
    """True for the kubeconfig that kubeadm writes to /etc/kubernetes/kubelet.conf, where OpenShift has the settings."""
    return "\nclusters:" in f"\n{text}" and "KubeletConfiguration" not in text


def _read(host: Host, path: str) -> tuple[str, str]:
    """(content, why it cannot be read). One of both is empty."""
    try:
        text = host.read(path, max_bytes=MAX_FILE_BYTES).decode("utf-8", "surrogateescape")
    except Unreadable as error:
        return "", str(error)
    return (text, "") if text.strip() else ("", f"{path}: it is empty")


def _remedy(host: Host, directory: str) -> str:
    """What makes a directory visible; empty if it is."""
    if host.exists(directory):
        return ""
    return _RELATIVE if directory.startswith("/proc/") else _MOUNT


def _read_drop_ins(host: Host, directory: str) -> tuple[tuple[tuple[str, str], ...], str]:
    """The files `*.conf` of the directory and of those below it, in the order of their names, and why one cannot be
    read."""
    found: list[tuple[str, str]] = []
    refusal = ""
    try:
        names = sorted(host.listdir(directory))
        directories = {name for name, _ in host.subdirectories(directory)}  # as 20-cli-config-dir of k3s
    except Unreadable as error:
        return (), f"{error}{_remedy(host, directory)}"
    for name in names[:MAX_DROP_INS]:
        path = f"{directory}/{name}"
        if name in directories:
            inner, trouble = _read_drop_ins(host, path)
            found += inner
        elif name.endswith(".conf"):
            trouble = ""
            try:
                found.append((path, host.text(path)))
            except Unreadable as error:
                trouble = str(error)
        else:
            continue
        refusal = refusal or trouble
    return tuple(found[:MAX_DROP_INS]), refusal
