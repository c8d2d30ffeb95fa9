"""Finds other programs that kill or evict pods of this node, and reports what each does and which setting stops it.

Two agents that act on the same pods at the same time free twice as much as is needed, and the kills of the other one
pass by the PodDisruptionBudgets and reasons of this one. So each handler is a note, in `check` and at the start.

Promises:

1. Not on the loop: `find_handlers` reads each process once, about 5 us each and at most `MAX_PROCESSES`. The caller
   runs it in a worker, at the start and every few minutes. Each process that is read takes 1.8 KiB of kernel memory
   while it runs, so those of pods that see no other processes may be left out.
2. A process is a handler by its command name *and* the name of its program; the note of one in a pod names the pod. A
   process that fakes both only adds a line to a report.
3. An unreadable process or file is treated as missing: no decision depends on it.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Final, NamedTuple

from nodeagent.model import Note, NoteKind, Threshold
from nodeagent.sampling.hostfs import cgroups, parse, processes
from nodeagent.sampling.hostfs.host import Host, Unreadable

MAX_PROCESSES: Final = 20_000
"""0.2 s. Daemons of the host start early and have low PIDs, which are read first."""

_UNIT_DIRECTORIES: Final = (
    "/etc/systemd/system",
    "/run/systemd/system.control",
    "/run/systemd/transient",
    "/run/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
)
# The runtime directory of the service, which exists while it runs.
_OOMD_RUNTIME: Final = "/run/systemd/oom"
_MANAGED: Final = ("ManagedOOMSwap", "ManagedOOMMemoryPressure")
_MAX_DROP_INS: Final = 64
# earlyoom's default of -m, in percent of MemTotal; it sends SIGKILL at half of it (earlyoom(1)).
_EARLYOOM_PERCENT: Final = 10.0
_TALOS_HANDLER_SINCE: Final = (1, 12)


class OomHandler(NamedTuple):
    """A running program that kills processes or cgroups."""

    name: str
    pid: int
    arguments: tuple[str, ...]
    """The command line, with the program."""
    pod_uid: str
    """The pod it runs in; empty on the host itself."""

    @property
    def where(self) -> str:
        return f"PID {self.pid}" + (f" in pod {self.pod_uid}" if self.pod_uid else "")


def find_handlers(
    host: Host,
    *,
    kubepods: str = "",
    kubelet: Sequence[Threshold] | None = None,
    kubelet_unread: str = "",
    isolated: frozenset[str] = frozenset(),
) -> tuple[Note, ...]:
    """One note for each handler. Never raises.

    Args:
        kubepods: path of the pods' cgroup, whose units systemd-oomd may manage; empty: unknown.
        kubelet: the kubelet's effective thresholds (`config.kubelet.read_settings`); None: no kubelet was found.
        kubelet_unread: why its configuration could not be read, so that the thresholds are assumed.
        isolated: cgroup UIDs of pods whose processes see no others (no hostPID); they are not read.
    """
    handlers = running_handlers(host, isolated=isolated)
    notes = [_NOTES[handler.name](host, handler, kubepods) for handler in handlers]
    if not any(handler.name == "systemd-oomd" for handler in handlers) and host.exists(_OOMD_RUNTIME):
        # In a PID namespace of our own the process is invisible, but its directory exists.
        notes.append(_systemd_oomd(host, OomHandler("systemd-oomd", 0, (), ""), kubepods))
    notes += [note for note in (_talos(host), _kubelet(kubelet or (), kubelet_unread)) if note is not None]
    return tuple(notes)


# --- processes -------------------------------------------------------------------------------------------------------


def running_handlers(
    host: Host, *, max_processes: int = MAX_PROCESSES, isolated: frozenset[str] = frozenset()
) -> tuple[OomHandler, ...]:
    """The handlers of `_NOTES` that run on the host, by PID; the first of each name on the host and in each pod. Reads
    at most `max_processes`, the lowest PIDs first."""
    try:
        pids = (
            cgroups.processes_outside(host, cgroups.detect_hierarchy(host), isolated) if isolated else host.processes()
        )
    except Unreadable:
        return ()
    found: dict[tuple[str, str], OomHandler] = {}
    for pid, command in host.commands(sorted(pids)[:max_processes]):
        handler = _handler(host, pid, _COMMANDS[command]) if command in _COMMANDS else None
        if handler is not None:
            found.setdefault((handler.name, handler.pod_uid), handler)
    return tuple(found.values())


def _handler(host: Host, pid: int, name: str) -> OomHandler | None:
    try:
        arguments = tuple(host.text(f"/proc/{pid}/cmdline").rstrip("\0").split("\0"))
    except Unreadable:
        return None  # ended meanwhile
    # The first word of a script is its interpreter.
    if name not in [os.path.basename(word) for word in arguments[:2]]:
        return None
    pod_uid = processes.pod_uid_of_process(host, pid)
    return OomHandler(name, pid, arguments, "" if pod_uid is None or pod_uid == processes.HOST else pod_uid)


# --- what each does --------------------------------------------------------------------------------------------------


def _earlyoom(_host: Host, handler: OomHandler, _kubepods: str) -> Note:
    level = earlyoom_level(handler.arguments[1:])
    return _note(
        f"earlyoom runs ({handler.where}): when MemAvailable is below {level} (and swap is as short) it kills the "
        "process with the highest oom_score in any pod, without a PDB check, a grace period or an Event. Stop it on "
        "nodes with nodeagent, or keep its -m below every hard memory.available threshold"
    )


def earlyoom_level(words: Sequence[str]) -> str:
    """The threshold of earlyoom by its arguments: `-m PERCENT[,KILL]` or `-M KIB[,KILL]`, the lower one of both."""
    percent, kibibytes = "", ""
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        if word.startswith(("-m", "-M")):
            value = (word[2:] or following).partition(",")[0]
            if word[1] == "m":
                percent = f"{value}% of the node's memory"
            else:
                count = parse.parse_count(value.encode("utf-8", "surrogateescape"))
                kibibytes = value if count is None else f"{count // 1024}Mi"
    if percent and kibibytes:
        return f"the lower of {percent} and {kibibytes}"
    return percent or kibibytes or f"{_EARLYOOM_PERCENT:g}% of the node's memory"


def _oomd(_host: Host, handler: OomHandler, _kubepods: str) -> Note:
    return _note(
        f"oomd runs ({handler.where}): its rules (/etc/oomd.json) kill whole cgroups by memory pressure and swap, "
        "also pods if they name kubepods or the root. Remove kubepods from its rules, or stop it"
    )


def _nohang(_host: Host, handler: OomHandler, _kubepods: str) -> Note:
    return _note(
        f"nohang runs ({handler.where}): it kills the process with the highest badness in any pod, by "
        "MemAvailable, swap and PSI (/etc/nohang/nohang.conf). Stop it on nodes with nodeagent"
    )


def _systemd_oomd(host: Host, handler: OomHandler, kubepods: str) -> Note:
    managed = managed_units(host, _units_above(kubepods))
    evidence = handler.where if handler.pid else f"{_OOMD_RUNTIME} exists"
    if not managed:
        return _note(
            f"systemd-oomd runs ({evidence}) and manages no unit with pods (ManagedOOMSwap=, "
            "ManagedOOMMemoryPressure=): it does not kill pods"
        )
    units = "; ".join(f"{unit} has {settings}" for unit, settings in managed.items())
    return _note(
        f"systemd-oomd runs ({evidence}) and {units}: under swap or memory pressure it kills whole cgroups below, "
        "also pods, without a PDB check, a grace period or an Event. Set these to `auto` in a drop-in, or stop it"
    )


def _units_above(kubepods: str) -> tuple[str, ...]:
    """The slices above the pods: `-.slice`, and those of the path."""
    return "-.slice", *[part for part in kubepods.split("/") if part.endswith(".slice")]


def managed_units(host: Host, units: Sequence[str]) -> Mapping[str, str]:
    """The settings by which systemd-oomd manages these units (`ManagedOOMSwap=kill`), by unit. As in systemd.unit(5), a
    file hides one of the same name in a later directory, and drop-ins are applied in the order of their names."""
    managed = {}
    for unit in units:
        settings: dict[str, str] = {}
        for path in _unit_files(host, unit):
            try:
                text = host.text(path)
            except Unreadable:
                continue
            for line in text.splitlines():
                key, equals, value = line.partition("=")
                if equals and key.strip() in _MANAGED:
                    settings[key.strip()] = value.strip()
        kills = [f"{key}={value}" for key, value in settings.items() if value == "kill"]
        if kills:
            managed[unit] = ", ".join(kills)
    return managed


def _unit_files(host: Host, unit: str) -> list[str]:
    """The unit's file, if it exists, then its drop-ins."""
    main = [f"{directory}/{unit}" for directory in _UNIT_DIRECTORIES if host.exists(f"{directory}/{unit}")][:1]
    drop_ins: dict[str, str] = {}
    for directory in _UNIT_DIRECTORIES:
        try:
            names = host.listdir(f"{directory}/{unit}.d")
        except Unreadable:
            continue
        for name in names[:_MAX_DROP_INS]:
            if name.endswith(".conf"):
                drop_ins.setdefault(name, f"{directory}/{unit}.d/{name}")
    return main + [drop_ins[name] for name in sorted(drop_ins)]


def _talos(host: Host) -> Note | None:
    try:
        lines = host.text("/etc/os-release").splitlines()
    except Unreadable:
        return None
    facts = {key: value.strip('"') for key, _, value in (line.partition("=") for line in lines)}
    if facts.get("ID") != "talos":
        return None
    version = facts.get("VERSION_ID", "").removeprefix("v")
    major, minor = map(parse.parse_count, f"{version}..".encode("utf-8", "surrogateescape").split(b".")[:2])
    if major is not None and minor is not None and (major, minor) < _TALOS_HANDLER_SINCE:
        return None
    return _note(
        f"Talos {version or 'of an unknown version'} has an OOM handler, on by default since 1.12: by memory pressure "
        "it sends SIGKILL to the pod cgroup that it ranks highest, BestEffort first, without a PDB check or an Event. "
        'To disable it, apply an OOMConfig document with triggerExpression: "false"'
    )


def _kubelet(thresholds: Sequence[Threshold], unread: str) -> Note | None:
    active = [f"{threshold.signal}<{threshold.value.text}" for threshold in thresholds if not _is_copy(threshold)]
    if not active:
        return None
    levels = ", ".join(dict.fromkeys(active))
    if unread:
        return _note(
            f"kubelet eviction not known, defaults assumed ({levels}): {unread}. Make its configuration readable for "
            "the agent, and compare with `nodeagent check`"
        )
    return _note(
        f"the kubelet's own eviction is on ({levels}): it evicts one pod at a time with a grace of 1 s and without a "
        "PDB check. Keep nodeagent's thresholds above these (`aboveKubelet`, on by default), so that it acts first, or "
        'disable the kubelet\'s one by one with evictionHard: {memory.available: "0%"} (an empty map restores the '
        "defaults)"
    )


def _is_copy(threshold: Threshold) -> bool:
    return threshold.signal.startswith("allocatableMemory")


def _note(message: str) -> Note:
    return Note(NoteKind.OTHER_OOM_HANDLERS, message)


_NOTES: Final[Mapping[str, Callable[[Host, OomHandler, str], Note]]] = {
    "earlyoom": _earlyoom,
    "systemd-oomd": _systemd_oomd,
    "oomd": _oomd,
    "nohang": _nohang,
}
_COMMANDS: Final[Mapping[bytes, str]] = {name.encode(): name for name in _NOTES}
