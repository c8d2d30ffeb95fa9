"""The texts of OOM kills for logs, Events, notes and reports. A text of one kind of kill stays the same in each
repetition, so that the repetitions are one series of Events."""

from collections.abc import Sequence
from typing import Final

from nodeagent.model import LostRace, MemorySample, OomCause, OomKill, OomReport, RaceLoss, units

MAX_NAMES: Final = 3
"""Names of processes in one text."""

_CAUSES: Final = {
    OomCause.CONTAINER_LIMIT: "the container reached its own memory limit",
    OomCause.POD_LIMIT: "the pod reached its own memory limit",
    OomCause.ALLOCATABLE: "all pods together reached the node's allocatable memory",
    OomCause.HOST_LIMIT: "the cgroup reached its own memory limit",
    OomCause.NUMA: "the NUMA nodes that it may use have no memory left",
    OomCause.NODE: "the node has no memory left",
    OomCause.UNKNOWN: "cause unknown",
}
_LOSSES: Final = {
    RaceLoss.NOT_RUNNING: "the agent was not running",
    RaceLoss.NO_THRESHOLD: "no hard memory threshold is configured",
    RaceLoss.NOT_MET: "no threshold was met at the last decision",
    RaceLoss.DRY_RUN: "dry run",
    RaceLoss.IN_FLIGHT: "an eviction was in flight",
    RaceLoss.REFUSED: "no pod was evicted",
}


def subject(kill: OomKill) -> str:
    """`pod shop/web-1, container main`, `cgroup /system.slice/a.service`, or that it is not known."""
    if kill.pod:
        return f"pod {kill.pod}" + (f", container {kill.container}" if kill.container else "")
    if kill.place is None:
        return "a cgroup that is not known"
    return f"cgroup {kill.place.path}"


def kill_text(kill: OomKill) -> str:
    """`OOM kill of 2 processes (python3, sh): the container reached its own memory limit`."""
    number = "1 process" if kill.number == 1 else f"{kill.number} processes"
    names = list(dict.fromkeys(each.name for each in kill.processes))
    named = f" ({', '.join(names[:MAX_NAMES])}{', ...' if len(names) > MAX_NAMES else ''})" if names else ""
    group = ", all of its cgroup (memory.oom.group)" if kill.group else ""
    return f"OOM kill of {number}{named}{group}: {_CAUSES[kill.cause]}"


def race_text(race: LostRace) -> str:
    """Why no eviction came first: `threshold 200Mi, memory.available 80Mi below it 0.3s before the kill; ...`."""
    parts = []
    if race.deficit is not None:
        relation = "below" if race.deficit >= 0 else "above"
        when = f" {units.format_duration(race.before_s)} before the kill" if race.before_s is not None else ""
        parts.append(f"{units.format_amount(abs(race.deficit))} {relation} the threshold of {race.threshold}{when}")
    parts.append(_LOSSES[race.loss])
    if race.in_flight:
        parts.append(f"in flight: {', '.join(race.in_flight)}")
    if race.victims:
        parts.append(f"the victim would have been {', '.join(race.victims)}")
    parts += race.refusals
    return "; ".join(parts)


def samples_text(samples: Sequence[MemorySample]) -> str:
    """Both figures of the last sample; empty without one."""
    if not samples:
        return ""
    last = samples[-1]
    return (
        f"memory.available {units.format_amount(last.working_set_available)} as the kubelet computes it, "
        f"{units.format_amount(last.mem_available)} by the kernel (MemAvailable)"
    )


def event_note(kill: OomKill, report: OomReport, *, about_pod: bool) -> str:
    """The note of an Event: on the pod itself, or on its owner or the node, which needs the pod's name."""
    where = (f"Container {kill.container}: " if kill.container else "") if about_pod else f"{subject(kill)}: "
    text = where + kill_text(kill)
    if report.while_down:
        text += " (while the agent was not running)"
    if not kill.cause.race:
        return text
    facts = [samples_text(report.samples), race_text(report.race) if report.race is not None else ""]
    return "; ".join(filter(None, (text, *facts)))


def note_text(kill: OomKill, report: OomReport, *, at_wall: str) -> str:
    """One line for the notes of a report."""
    race = f"; {race_text(report.race)}" if report.race is not None and kill.cause.race else ""
    down = " while the agent was not running" if report.while_down else ""
    return f"{subject(kill)}: {kill_text(kill)} at {at_wall}{down}{race}; nodeagent explain {report.id}"
