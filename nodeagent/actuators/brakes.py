"""Which cgroups have a brake, and when each brake is released.

Promises:

1. No brake outlives its deadline while a process of the agent runs. A release that failed is repeated at every
   `expire`, with a note.
2. A brake survives no restart. The next process releases what the saved state lists and what is marked
   (`leftover_brakes`).
3. A growth cap never takes the place of a victim's brake, and never counts as one.

Theory of operation. `TRANSITIONS` is the life of the brake of one pod; only `ActiveBrakes._advance` assigns a state.
NONE means that the cgroup is unchanged and not marked. PLANNED means that the record exists and the cgroup is
unchanged: the caller marks the cgroup, or saves the record first. The mark costs 8 us, so the saved state is needed
beforehand only where the kernel stores no extended attributes on cgroups.

An accepted victim keeps its brake until its pod is gone or the deadline passes. Its brake is released at once if its
request failed or its recheck refused it. With `hardKill` it is killed first and then released.
"""

import enum
from collections.abc import Collection, Iterable
from typing import Final

from nodeagent.actuators.cgroup_brake import Brake, BrakeError, BrakeKind, CgroupBrake, NoXattrError
from nodeagent.model import Note, NoteKind
from nodeagent.model.machines import Machine

THAW_AFTER_GRACE_S: Final = 1.0
"""A frozen process cannot be killed on cgroup v1. The brake is released this long after the grace period: by then the
kubelet has sent SIGKILL, which ends the process before it runs again."""

OVERDUE_AT: Final = 0.0
"""A time that has passed on CLOCK_BOOTTIME. Not minus infinity, which the saved state cannot carry."""


class BrakeState(enum.StrEnum):
    """The state of the brake of one pod."""

    NONE = "none"
    CAPPED = "capped"
    """Its growth is capped: memory.high is lowered, but not below what it uses."""
    PLANNED = "planned"
    """The record exists, the cgroup is unchanged."""
    ACTIVE = "active"
    OVERDUE = "overdue"
    """A release failed and is repeated."""
    LEFTOVER = "leftover"
    """An earlier process left it behind."""


class BrakeEvent(enum.StrEnum):
    """What happens to a brake."""

    CAP = "cap"
    PLAN = "plan"
    APPLIED = "applied"
    APPLY_FAILED = "apply-failed"
    RELEASE = "release"
    RELEASE_FAILED = "release-failed"


_NONE, _CAPPED, _PLANNED, _ACTIVE = BrakeState.NONE, BrakeState.CAPPED, BrakeState.PLANNED, BrakeState.ACTIVE
_OVERDUE, _LEFTOVER = BrakeState.OVERDUE, BrakeState.LEFTOVER
_CAP, _PLAN, _APPLIED = BrakeEvent.CAP, BrakeEvent.PLAN, BrakeEvent.APPLIED
_APPLY_FAILED, _RELEASE, _RELEASE_FAILED = BrakeEvent.APPLY_FAILED, BrakeEvent.RELEASE, BrakeEvent.RELEASE_FAILED

TRANSITIONS: Final = {
    (_NONE, _CAP): _CAPPED,
    (_NONE, _PLAN): _PLANNED,
    (_NONE, _APPLIED): _NONE,
    (_NONE, _APPLY_FAILED): _NONE,
    (_NONE, _RELEASE): _NONE,
    (_NONE, _RELEASE_FAILED): _NONE,
    (_CAPPED, _CAP): _CAPPED,
    (_CAPPED, _PLAN): _PLANNED,
    (_CAPPED, _APPLIED): _CAPPED,
    (_CAPPED, _APPLY_FAILED): _NONE,
    (_CAPPED, _RELEASE): _NONE,
    (_CAPPED, _RELEASE_FAILED): _OVERDUE,
    (_PLANNED, _CAP): _PLANNED,
    (_PLANNED, _PLAN): _PLANNED,
    (_PLANNED, _APPLIED): _ACTIVE,
    (_PLANNED, _APPLY_FAILED): _NONE,
    (_PLANNED, _RELEASE): _NONE,
    (_PLANNED, _RELEASE_FAILED): _OVERDUE,
    (_ACTIVE, _CAP): _ACTIVE,
    (_ACTIVE, _PLAN): _ACTIVE,
    (_ACTIVE, _APPLIED): _ACTIVE,
    (_ACTIVE, _APPLY_FAILED): _NONE,
    (_ACTIVE, _RELEASE): _NONE,
    (_ACTIVE, _RELEASE_FAILED): _OVERDUE,
    (_OVERDUE, _CAP): _OVERDUE,
    (_OVERDUE, _PLAN): _OVERDUE,
    (_OVERDUE, _APPLIED): _OVERDUE,
    (_OVERDUE, _APPLY_FAILED): _OVERDUE,
    (_OVERDUE, _RELEASE): _NONE,
    (_OVERDUE, _RELEASE_FAILED): _OVERDUE,
    (_LEFTOVER, _CAP): _LEFTOVER,
    (_LEFTOVER, _PLAN): _LEFTOVER,
    (_LEFTOVER, _APPLIED): _LEFTOVER,
    (_LEFTOVER, _APPLY_FAILED): _LEFTOVER,
    (_LEFTOVER, _RELEASE): _NONE,
    (_LEFTOVER, _RELEASE_FAILED): _OVERDUE,
}
"""The state after each event. The guards are the methods of `ActiveBrakes` that return a `BrakeEvent`."""

MACHINE: Final = Machine(
    name="Brakes",
    module="nodeagent/actuators/brakes.py",
    states=BrakeState,
    events=BrakeEvent,
    transitions=TRANSITIONS,
    meanings={
        _CAP: "A hard memory crossing is near and the pod is a predicted victim.",
        _PLAN: "The pod is a victim and `escalation.brake` applies, or its kill freezes it (no `cgroup.kill`).",
        _APPLIED: "The kernel accepted the write to the control file.",
        _APPLY_FAILED: "Nothing was written: the cgroup is gone, or a growth cap could not be marked.",
        _RELEASE: "The control file has its previous value and the mark is removed, or the cgroup is gone.",
        _RELEASE_FAILED: "The kernel refused the write.",
    },
    remarks={
        (_NONE, _CAP): "Only if the cgroup can be marked.",
        (_CAPPED, _CAP): "The cap is released first and applied again with the new limit.",
        (_CAPPED, _PLAN): "The cap is released first.",
    },
)


class ActiveBrakes:
    """All brakes of one agent."""

    def __init__(self, mechanism: CgroupBrake, leftover: Iterable[Brake] = (), *, notes: Iterable[Note] = ()) -> None:
        """`leftover`: brakes of an earlier process, which the first `expire` releases. `notes`: returned with the first
        `take_notes`."""
        self._mechanism = mechanism
        self._brakes: dict[str, Brake] = {brake.pod_uid: brake._replace(until=OVERDUE_AT) for brake in leftover}
        self._states: dict[str, BrakeState] = dict.fromkeys(self._brakes, BrakeState.LEFTOVER)
        """By pod UID, as `_brakes`; NONE is not stored."""
        self._notes: list[Note] = list(notes)

    @property
    def frozen_cannot_die(self) -> bool:
        """True on cgroup v1: a frozen process must be released before it can be killed."""
        return self._mechanism.frozen_cannot_die

    @property
    def active(self) -> tuple[Brake, ...]:
        """Every brake that is planned or applied, for the saved state."""
        return tuple(self._brakes.values())

    @property
    def can_cap_growth(self) -> bool:
        """True if `cap_growth` has an effect on this host."""
        return self._mechanism.throttles

    def state(self, pod_uid: str) -> BrakeState:
        return self._states.get(pod_uid, BrakeState.NONE)

    def take_notes(self) -> tuple[Note, ...]:
        """The notes since the last call."""
        notes, self._notes = tuple(self._notes), []
        return notes

    def cap_growth(self, cgroup: str, limit: int, *, pod_uid: str, until: float) -> None:
        """Let a predicted victim grow to `limit` bytes and no further: the kernel keeps it there while the agent does
        not run. Only where the cgroup can be marked."""
        if not self._can_plan(pod_uid):
            return
        brake = self._plan_brake(cgroup, BrakeKind.THROTTLE, pod_uid=pod_uid, until=until, limit=limit)
        if brake is None:
            return
        self._advance(pod_uid, BrakeEvent.CAP, brake)
        if not self._write_xattr(brake):
            self._advance(pod_uid, BrakeEvent.APPLY_FAILED)
            return
        self._advance(pod_uid, self._apply(brake))
        if self.state(pod_uid) is BrakeState.CAPPED:
            self._note(f"{cgroup}: memory.high lowered, because a hard memory threshold is about to be crossed")

    def uncap_others(self, *, keep: Collection[str]) -> None:
        """Release every growth cap, except those of these pods."""
        capped = [uid for uid, state in self._states.items() if state is BrakeState.CAPPED]
        for pod_uid in set(capped).difference(keep):
            self.release(pod_uid)

    def plan(self, cgroup: str, kind: BrakeKind, *, pod_uid: str, until: float) -> None:
        """Plan the brake of a victim, for `apply`. A host without this kind of brake is a note."""
        if not self._can_plan(pod_uid):
            return
        brake = self._plan_brake(cgroup, kind, pod_uid=pod_uid, until=until)
        if brake is not None:
            self._advance(pod_uid, BrakeEvent.PLAN, brake)

    def apply(self, pod_uid: str, *, saved: bool) -> bool:
        """Mark the cgroup of a planned brake, and brake it. Returns False if it could not be marked and the plan is not
        `saved` yet; a saved plan is applied without a mark."""
        brake = self._brakes.get(pod_uid)
        if brake is None:
            return True
        if not (saved or self._write_xattr(brake)):
            return False
        self._advance(pod_uid, self._apply(brake))
        return True

    def release(self, pod_uid: str) -> None:
        """Release the brake of a pod now."""
        brake = self._brakes.get(pod_uid)
        if brake is not None:
            self._advance(pod_uid, self._release(brake))

    def plan_kill(self, cgroup: str, *, pod_uid: str) -> bool:
        """True if killing this pod brakes it for a moment, so that the state must be saved before `kill`: without
        `cgroup.kill` the pod is frozen while it is signalled, and would stay frozen if the agent died meanwhile."""
        if not self._mechanism.freezes_to_kill(cgroup):
            return False
        brake = self._brakes.get(pod_uid)
        if brake is not None and brake.kind is BrakeKind.THROTTLE:
            self.release(pod_uid)  # a pod has one record: that of the freeze must not be lost
        if pod_uid in self._brakes:
            return False
        try:
            brake = self._mechanism.plan_brake(cgroup, BrakeKind.FREEZE, pod_uid=pod_uid, until=OVERDUE_AT)
        except BrakeError:
            return False  # the cgroup is gone, so there is no process to kill
        self._advance(pod_uid, BrakeEvent.PLAN, brake)
        return True

    def kill(self, cgroup: str, *, pod_uid: str) -> str:
        """Kill every process of a pod, with or without a brake, and release the brake: a kubelet without an API server
        may start new containers in the same cgroup. Returns why that failed; empty on success."""
        if (brake := self._brakes.get(pod_uid)) is not None:
            self._write_xattr(brake)
        try:
            self._mechanism.kill(cgroup)
        except BrakeError as error:
            self._note(f"{cgroup}: kill failed: {error}")
            return str(error)
        self.release(pod_uid)
        return ""

    def expire(self, *, now: float) -> None:
        """Release every brake whose deadline has passed."""
        for pod_uid in [uid for uid, brake in self._brakes.items() if brake.until <= now]:
            self.release(pod_uid)

    def close(self) -> None:
        """Release every brake."""
        for pod_uid in list(self._brakes):
            self.release(pod_uid)

    # --- the machine ------------------------------------------------------------------------------------------------

    def _advance(self, pod_uid: str, event: BrakeEvent, brake: Brake | None = None) -> None:
        """The one place that assigns a state. `brake`: the record that comes with CAP and PLAN."""
        state = TRANSITIONS[self.state(pod_uid), event]
        if state is BrakeState.NONE:
            self._states.pop(pod_uid, None)
            self._brakes.pop(pod_uid, None)
            return
        self._states[pod_uid] = state
        if brake is not None:
            self._brakes[pod_uid] = brake
        if state is BrakeState.OVERDUE:
            self._brakes[pod_uid] = self._brakes[pod_uid]._replace(until=OVERDUE_AT)

    def _apply(self, brake: Brake) -> BrakeEvent:
        try:
            return BrakeEvent.APPLIED if self._mechanism.apply(brake) else BrakeEvent.APPLY_FAILED
        except BrakeError as error:
            self._note(f"{brake.cgroup}: brake failed: {error}")
            return self._release(brake)

    def _release(self, brake: Brake) -> BrakeEvent:
        try:
            self._mechanism.release(brake)
        except BrakeError as error:
            self._note(f"{brake.cgroup}: brake not released, trying again: {error}")
            return BrakeEvent.RELEASE_FAILED
        return BrakeEvent.RELEASE

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _can_plan(self, pod_uid: str) -> bool:
        """True if the pod may get a new brake: it has none, or a growth cap, which is released here."""
        state = self.state(pod_uid)
        if state is not BrakeState.CAPPED:
            return state is BrakeState.NONE
        event = self._release(self._brakes[pod_uid])
        if event is BrakeEvent.RELEASE_FAILED:
            self._advance(pod_uid, event)
        return event is BrakeEvent.RELEASE

    def _plan_brake(
        self, cgroup: str, kind: BrakeKind, *, pod_uid: str, until: float, limit: int | None = None
    ) -> Brake | None:
        """The brake, after `_can_plan`; None if the host has none of this kind, or the cgroup is gone."""
        try:
            return self._mechanism.plan_brake(cgroup, kind, pod_uid=pod_uid, until=until, limit=limit)
        except BrakeError as error:
            self._note(f"{cgroup}: brake failed: {error}")
            self._advance(pod_uid, BrakeEvent.RELEASE)
            return None

    def _write_xattr(self, brake: Brake) -> bool:
        """False if the cgroup has no mark now. That is no loss while the saved state exists."""
        try:
            return self._mechanism.write_xattr(brake)
        except BrakeError as error:
            self._note(f"{brake.cgroup}: brake cannot be marked: {error}")
            return False

    def _note(self, message: str) -> None:
        self._notes.append(Note(NoteKind.BRAKE, message))


def leftover_brakes(
    mechanism: CgroupBrake, pods: Iterable[tuple[str, str]], *, saved: Iterable[Brake] | None, acts: bool = True
) -> tuple[tuple[Brake, ...], tuple[Note, ...]]:
    """The brakes that an earlier process left behind, and notes about them.

    A cgroup with the agent's mark has the agent's brake, whatever its kind. A frozen cgroup without a mark was frozen
    by another program and stays frozen, because the reason is unknown. A kernel without extended attributes on cgroups
    cannot tell the two apart. There, if the state was lost, a frozen cgroup counts as the agent's: container runtimes
    pause containers, not whole pods.

    Args:
        pods: path of the cgroup, and UID, of every pod.
        saved: the brakes of the saved state, which may be older than the last brake; None: the state is lost.
        acts: False in a dry run, which releases only saved brakes.
    """
    brakes, notes = {brake.cgroup: brake for brake in saved or ()}, []
    for cgroup, pod_uid in pods:
        if cgroup in brakes:
            continue
        frozen = mechanism.frozen(cgroup, pod_uid=pod_uid, until=OVERDUE_AT) if saved is None and acts else None
        try:
            brake, foreign = mechanism.read_xattr(cgroup, pod_uid=pod_uid, until=OVERDUE_AT), frozen
        except NoXattrError:
            brake, foreign = frozen, None
        except BrakeError as error:
            notes.append(Note(NoteKind.BRAKE, f"{cgroup}: left unchanged: {error}"))
            continue
        if brake is not None and acts:
            brakes[cgroup] = brake
        elif brake is not None:
            notes.append(
                Note(NoteKind.BRAKE, f"{cgroup}: marked with a brake ({brake.kind}); a dry run does not release it")
            )
        elif foreign is not None:
            notes.append(Note(NoteKind.BRAKE, f"{cgroup}: frozen by another program; left unchanged"))
    return tuple(brakes.values()), tuple(notes)
