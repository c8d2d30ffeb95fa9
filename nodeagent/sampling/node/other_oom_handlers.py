"""Who else kills or evicts on this node when memory runs out, what each would do to pods, and what to set.

Two agents that act on the same pods at the same time take twice as much as is needed, and the one that kills without
asking makes the budgets and reasons of the other worthless. So each that is found is a note, in `check` and at start.

Promises:

1. Off the loop: `find` looks at each process once, about 5 us a process and at most `MOST_PROCESSES`; the caller has
   it done in a worker, at start and every few minutes. Each process that was looked at costs 1.8 KiB of kernel memory
   for as long as it lives, so those of pods that see only themselves may be left out.
2. A process is taken for a killer by its command name *and* its program's name; one that runs inside a pod is told with
   that pod. Whoever fakes both only gets a line in a report.
3. What cannot be read is not there: nothing is refused because of it.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Final, NamedTuple

from nodeagent.model import Note, NoteKind, Threshold
from nodeagent.sampling.hostfs import cgroups, processes
from nodeagent.sampling.hostfs.host import Host, Unreadable

MOST_PROCESSES: Final = 20_000
"""0.2 s. Daemons of the host start early and have low PIDs, which are looked at first."""

_UNIT_DIRECTORIES: Final = (
    "/etc/systemd/system",
    "/run/systemd/system.control",
    "/run/systemd/transient",
    "/run/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
)
_OOMD_RUNTIME: Final = "/run/systemd/oom"
"""The service's runtime directory: there while it runs."""
_MANAGED: Final = ("ManagedOOMSwap", "ManagedOOMMemoryPressure")
_MOST_DROP_INS: Final = 64
_EARLYOOM_PERCENT: Final = 10.0
"""earlyoom's default of -m, in percent of MemTotal; it sends SIGKILL at half of it (earlyoom(1))."""
_TALOS_HANDLER_SINCE: Final = (1, 12)


class OomHandler(NamedTuple):
    """A program that was found running."""

    name: str
    pid: int
    words: tuple[str, ...]
    """Its command line."""
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
    harmless: frozenset[str] = frozenset(),
) -> tuple[Note, ...]:
    """One note for each of the others. Never raises.

    Args:
        kubepods: path of the pods' cgroup, whose units systemd-oomd may be told to manage; empty: not known.
        kubelet: a kubelet's effective thresholds (`config.kubelet.read_settings`); None: there is no sign of one.
        kubelet_unread: why its configuration could not be read, so that these are assumed.
        harmless: cgroup UIDs of pods whose processes see no others (no hostPID) and are not looked at.
    """
    killers = running(host, harmless=harmless)
    notes = [_TELL[killer.name](host, killer, kubepods) for killer in killers]
    if not any(killer.name == "systemd-oomd" for killer in killers) and host.exists(_OOMD_RUNTIME):
        # Seen from a PID namespace of our own the process is not there, but its directory is.
        notes.append(_systemd_oomd(host, OomHandler("systemd-oomd", 0, (), ""), kubepods))
    notes += [note for note in (_talos(host), _kubelet(kubelet or (), kubelet_unread)) if note is not None]
    return tuple(notes)


# --- processes -------------------------------------------------------------------------------------------------------


def running(
    host: Host, *, most: int = MOST_PROCESSES, harmless: frozenset[str] = frozenset()
) -> tuple[OomHandler, ...]:
    """The programs of the table that run on the host, by PID; the first of each name and place. Looks at `most`."""
    try:
        pids = (
            cgroups.processes_outside(host, cgroups.detect_hierarchy(host), harmless) if harmless else host.processes()
        )
    except Unreadable:
        return ()
    found: dict[tuple[str, str], OomHandler] = {}
    for pid, command in host.commands(sorted(pids)[:most]):
        killer = _look(host, pid, _COMMANDS[command]) if command in _COMMANDS else None
        if killer is not None:
            found.setdefault((killer.name, killer.pod_uid), killer)
    return tuple(found.values())


def _look(host: Host, pid: int, name: str) -> OomHandler | None:
    try:
        words = tuple(host.text(f"/proc/{pid}/cmdline").rstrip("\0").split("\0"))
    except Unreadable:
        return None  # ended meanwhile
    # A script's first word is its interpreter.
    if name not in [os.path.basename(word) for word in words[:2]]:
        return None
    pod_uid = processes.pod_uid_of_process(host, pid)
    return OomHandler(name, pid, words, "" if pod_uid is None or pod_uid == processes.HOST else pod_uid)


# --- what each would do ----------------------------------------------------------------------------------------------


def _earlyoom(_host: Host, killer: OomHandler, _kubepods: str) -> Note:
    level = earlyoom_level(killer.words[1:])
    return _note(
        f"earlyoom runs ({killer.where}): when MemAvailable is below {level} (and swap is as short) it kills the "
        "process with the highest oom_score, in whatever pod, without a budget, a grace period or an Event. Stop it on "
        "nodes that nodeagent guards, or keep its -m below every hard memory.available threshold"
    )


def earlyoom_level(words: Sequence[str]) -> str:
    """Where earlyoom acts, by its arguments: `-m PERCENT[,KILL]` or `-M KIB[,KILL]`, of both the lower."""
    percent, kibibytes = "", ""
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        if word.startswith(("-m", "-M")):
            value = (word[2:] or following).partition(",")[0]
            if word[1] == "m":
                percent = f"{value}% of the node's memory"
            else:
                kibibytes = f"{int(value) // 1024}Mi" if value.isascii() and value.isdigit() else value
    if percent and kibibytes:
        return f"the lower of {percent} and {kibibytes}"
    return percent or kibibytes or f"{_EARLYOOM_PERCENT:g}% of the node's memory"


def _oomd(_host: Host, killer: OomHandler, _kubepods: str) -> Note:
    return _note(
        f"oomd runs ({killer.where}): its rules (/etc/oomd.json) kill whole cgroups by memory pressure and swap, "
        "pods as well where they name kubepods or the root. Leave kubepods out of its rules, or stop it"
    )


def _nohang(_host: Host, killer: OomHandler, _kubepods: str) -> Note:
    return _note(
        f"nohang runs ({killer.where}): it signals the process with the highest badness, in whatever pod, by "
        "MemAvailable, swap and PSI (/etc/nohang/nohang.conf). Stop it on nodes that nodeagent guards"
    )


def _systemd_oomd(host: Host, killer: OomHandler, kubepods: str) -> Note:
    managed = managed_units(host, _units_above(kubepods))
    by = killer.where if killer.pid else f"{_OOMD_RUNTIME} is there"
    if not managed:
        return _note(
            f"systemd-oomd runs ({by}), and no unit that holds pods is given to it (ManagedOOMSwap=, "
            "ManagedOOMMemoryPressure=): it leaves pods alone as long as that stays so"
        )
    units = "; ".join(f"{unit} has {settings}" for unit, settings in managed.items())
    return _note(
        f"systemd-oomd runs ({by}) and {units}: under swap or memory pressure it kills whole cgroups below, pods as "
        "well, without a budget, a grace period or an Event. Set these to `auto` in a drop-in of that unit, or stop it"
    )


def _units_above(kubepods: str) -> tuple[str, ...]:
    """The slices whose descendants pods are: `-.slice`, and those of the path."""
    return "-.slice", *[part for part in kubepods.split("/") if part.endswith(".slice")]


def managed_units(host: Host, units: Sequence[str]) -> Mapping[str, str]:
    """Unit -> the settings that give it to systemd-oomd, `ManagedOOMSwap=kill`, read from unit files and drop-ins; as
    in systemd.unit(5), a directory named earlier hides a file of the same name in a later one, and drop-ins are applied
    in the order of their names."""
    managed = {}
    for unit in units:
        settings: dict[str, str] = {}
        for path in _files_of(host, unit):
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


def _files_of(host: Host, unit: str) -> list[str]:
    """The unit's file, if any, then its drop-ins."""
    main = [f"{place}/{unit}" for place in _UNIT_DIRECTORIES if host.exists(f"{place}/{unit}")][:1]
    drop_ins: dict[str, str] = {}
    for place in _UNIT_DIRECTORIES:
        try:
            names = host.listdir(f"{place}/{unit}.d")
        except Unreadable:
            continue
        for name in names[:_MOST_DROP_INS]:
            if name.endswith(".conf"):
                drop_ins.setdefault(name, f"{place}/{unit}.d/{name}")
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
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isascii() and part.isdigit())
    if len(numbers) == 2 and numbers < _TALOS_HANDLER_SINCE:
        return None
    return _note(
        f"Talos {version or 'of an unknown version'} has an OOM handler, on by default since 1.12: by memory pressure "
        "it sends SIGKILL to the pod cgroup that it ranks highest, BestEffort first, without a budget or an Event. To "
        'leave that to nodeagent apply an OOMConfig document with triggerExpression: "false"'
    )


def _kubelet(thresholds: Sequence[Threshold], unread: str) -> Note | None:
    active = [f"{threshold.signal}<{threshold.value.text}" for threshold in thresholds if not _copied(threshold)]
    if not active:
        return None
    levels = ", ".join(dict.fromkeys(active))
    if unread:
        return _note(
            f"whether the kubelet evicts is not known ({unread}): its defaults are assumed ({levels}). Have its "
            "configuration where the agent can read it, and compare with `nodeagent check`"
        )
    return _note(
        f"the kubelet's own eviction is on ({levels}): it evicts one pod at a time with a "
        "grace of 1 s and no budget. Keep nodeagent's thresholds above these, so that it acts first, or switch the "
        'kubelet\'s off one by one with evictionHard: {memory.available: "0%"} (an empty map brings the defaults back)'
    )


def _copied(threshold: Threshold) -> bool:
    return threshold.signal.startswith("allocatableMemory")


def _note(message: str) -> Note:
    return Note(NoteKind.OTHER_OOM_HANDLERS, message)


_TELL: Final[Mapping[str, Callable[[Host, OomHandler, str], Note]]] = {
    "earlyoom": _earlyoom,
    "systemd-oomd": _systemd_oomd,
    "oomd": _oomd,
    "nohang": _nohang,
}
_COMMANDS: Final[Mapping[bytes, str]] = {name.encode(): name for name in _TELL}
