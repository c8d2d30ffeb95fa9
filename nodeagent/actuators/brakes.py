"""The cgroups that are held now, and when each is let go.

Theory of operation. A hold goes through these states, and every way ends in `gone`:

    plan      nothing changed yet
    held      written down and applied; the victim stands still or grows no further. Its mark on the cgroup says enough
              (8 us); only where the kernel keeps none the saved state has to say it before
    gone      let go and the mark taken away, or its cgroup is gone

    planned, the process dies     a restart releases it: putting back what was there is harmless
    held, the request failed      released at once (`drop`)
    held, the re-check refused    released at once (`drop`)
    held, accepted                kept until the pod is gone or the deadline; with `hardKill` ended at once (`end`)
    not held, to be ended         planned first (`plan_end`) where ending freezes
    held, the deadline passed     released (`expire`)
    held, the process dies        a restart releases it, from its saved state or by its mark (`left_behind`)
    guarded, then to be held      released, planned, held
    guarded, and nothing came     released at its deadline, as any hold

Promises: nothing stays held longer than its deadline while a process of ours runs; what could not be released is tried
again at every `expire`, and told.
"""

from collections.abc import Collection, Iterable
from typing import Final

from nodeagent.actuators.cgroup_brake import Brake, BrakeError, BrakeKind, CgroupBrake, NoXattrError
from nodeagent.model import Note

THAW_AFTER_GRACE_S: Final = 1.0
"""On cgroup v1 a frozen process cannot even be killed: it is let go this long after its grace, when the kubelet has
sent SIGKILL, which then ends it before it runs again."""

OVERDUE: Final = 0.0
"""A time that has passed on CLOCK_BOOTTIME. Not minus infinity, which the saved state cannot carry."""


class ActiveBrakes:
    """All holds of one agent."""

    def __init__(self, brake: CgroupBrake, held: Iterable[Brake] = (), *, notes: Iterable[Note] = ()) -> None:
        """`held` is what an earlier process had written down: it is released by the first `expire`, being overdue.
        `notes` are told as if they were ours."""
        self._brake = brake
        self._held: dict[str, Brake] = {hold.pod_uid: hold._replace(until=OVERDUE) for hold in held}
        self._guarded: set[str] = set()
        """Those of them that may still grow, up to a limit: see `guard`."""
        self.notes: list[Note] = list(notes)
        """What has happened and has not been told; the reader clears it."""

    @property
    def frozen_cannot_die(self) -> bool:
        """On cgroup v1 a frozen process has to be let go before it can be killed."""
        return self._brake.frozen_cannot_die

    @property
    def active(self) -> tuple[Brake, ...]:
        """What is held or about to be, for the saved state."""
        return tuple(self._held.values())

    @property
    def can_cap_growth(self) -> bool:
        """Whether `guard` does anything on this host."""
        return self._brake.throttles

    def cap_growth(self, cgroup: str, limit: int, *, pod_uid: str, until: float) -> None:
        """Let a pod that is about to be held grow to `limit` bytes of memory and no further: the kernel keeps it there
        while nobody of us runs. Only where it can be marked as ours."""
        if pod_uid in self._guarded:
            self.release(pod_uid)
        if pod_uid in self._held:
            return
        try:
            hold = self._brake.plan_brake(cgroup, BrakeKind.THROTTLE, pod_uid=pod_uid, until=until, limit=limit)
        except BrakeError as error:
            self._say(f"{cgroup} is not held: {error}")
            return
        self._held[pod_uid] = hold
        self._guarded.add(pod_uid)
        if not self.apply(pod_uid, saved=False):
            self._forget(pod_uid)
        elif pod_uid in self._held:
            self._say(f"{cgroup}: memory.high is lowered while a hard threshold is about to be crossed")

    def uncap_others(self, *, but: Collection[str]) -> None:
        """Let go of the pods that are guarded, but for these."""
        for pod_uid in self._guarded.difference(but):
            self.release(pod_uid)

    def plan(self, cgroup: str, kind: BrakeKind, *, pod_uid: str, until: float) -> None:
        """Prepare to hold a pod, for `apply`. A host that cannot is a note."""
        if pod_uid in self._guarded:
            self.release(pod_uid)
        if pod_uid in self._held:
            return
        try:
            self._held[pod_uid] = self._brake.plan_brake(cgroup, kind, pod_uid=pod_uid, until=until)
        except BrakeError as error:
            self._say(f"{cgroup} is not held: {error}")

    def apply(self, pod_uid: str, *, saved: bool) -> bool:
        """Mark a pod that was planned, and hold it. False: it could not be marked and has to wait until the plan is
        `saved`; then it is held without a mark."""
        hold = self._held.get(pod_uid)
        if hold is None:
            return True
        if not (saved or self._mark(hold)):
            return False
        try:
            if not self._brake.apply(hold):
                self._forget(pod_uid)
        except BrakeError as error:
            self._say(f"{hold.cgroup} is not held: {error}")
            self.release(pod_uid)
        return True

    def release(self, pod_uid: str) -> None:
        """Let a pod go, now."""
        hold = self._held.get(pod_uid)
        if hold is None:
            return
        try:
            self._brake.release(hold)
        except BrakeError as error:
            self._held[pod_uid] = hold._replace(until=OVERDUE)
            self._say(f"{hold.cgroup} could not be let go, trying again: {error}")
            return
        self._forget(pod_uid)

    def plan_kill(self, cgroup: str, *, pod_uid: str) -> bool:
        """True when ending this pod holds it for a moment, and the state is to be saved before `end`: on cgroup v1 it
        is frozen while it is signalled, and would stay so for ever if we died in between."""
        if not self._brake.freezes_to_kill or pod_uid in self._held:
            return False
        try:
            hold = self._brake.plan_brake(cgroup, BrakeKind.FREEZE, pod_uid=pod_uid, until=OVERDUE)
        except BrakeError:
            return False  # its cgroup has gone: there is nothing to end
        self._held[pod_uid] = hold
        return True

    def kill(self, cgroup: str, *, pod_uid: str) -> str:
        """End every process of a pod, held or not, and let go what is left of it: a kubelet that cannot be told may put
        new containers into its cgroup. Returns why that was not possible; empty when it was."""
        if (hold := self._held.get(pod_uid)) is not None:
            self._mark(hold)
        try:
            self._brake.kill(cgroup)
        except BrakeError as error:
            self._say(f"{cgroup} could not be ended: {error}")
            return str(error)
        self.release(pod_uid)
        return ""

    def expire(self, *, now: float) -> None:
        """Let go of what is overdue."""
        for pod_uid in [uid for uid, hold in self._held.items() if hold.until <= now]:
            self.release(pod_uid)

    def close(self) -> None:
        """Let go of everything."""
        for pod_uid in list(self._held):
            self.release(pod_uid)

    def _forget(self, pod_uid: str) -> None:
        del self._held[pod_uid]
        self._guarded.discard(pod_uid)

    def _mark(self, hold: Brake) -> bool:
        """A hold without a mark is as good, while the saved state lasts."""
        try:
            return self._brake.write_xattr(hold)
        except BrakeError as error:
            self._say(f"{hold.cgroup} cannot be marked as held: {error}")
            return False

    def _say(self, message: str) -> None:
        self.notes.append(Note("brake", message))


def leftover_brakes(
    brake: CgroupBrake, pods: Iterable[tuple[str, str]], *, saved: Iterable[Brake] | None, acts: bool = True
) -> tuple[tuple[Brake, ...], tuple[Note, ...]]:
    """What an earlier process has left held, and what there is to say about it.

    A cgroup with our mark is ours, of whatever kind its hold was. One that is frozen without a mark was frozen by
    somebody else, and stays so: it is not known what for. Only a kernel that keeps no marks cannot tell the two apart;
    there, when the state was lost, what is frozen is ours, for runtimes pause containers and not whole pods.

    Args:
        pods: path of the cgroup, and UID, of every pod.
        saved: what the state of that process says, which may be older than the last hold; None when it is lost.
        acts: in a dry run only what was saved is let go.
    """
    holds, notes = {hold.cgroup: hold for hold in saved or ()}, []
    for cgroup, pod_uid in pods:
        if cgroup in holds:
            continue
        frozen = brake.frozen(cgroup, pod_uid=pod_uid, until=OVERDUE) if saved is None and acts else None
        try:
            hold, others = brake.read_xattr(cgroup, pod_uid=pod_uid, until=OVERDUE), frozen
        except NoXattrError:
            hold, others = frozen, None
        except BrakeError as error:
            notes.append(Note("brake", f"{cgroup} is left as it is: {error}"))
            continue
        if hold is not None and acts:
            holds[cgroup] = hold
        elif hold is not None:
            notes.append(Note("brake", f"{cgroup} is marked as held ({hold.kind}): a dry run does not let it go"))
        elif others is not None:
            notes.append(Note("brake", f"{cgroup} is frozen, and not by this agent: it is left as it is"))
    return tuple(holds.values()), tuple(notes)
