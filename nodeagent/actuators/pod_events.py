"""The Events of an eviction: on the pod, and on its owner.

The owner has an Event as well, because a pod's own cannot be found by its name once the pod is replaced. Only owners of
the kinds in `OWNERS` get one: the admission policy nodeagent-events allows no other object.

The evictions of one owner for one resource are one series on it, so that an owner whose pods are evicted again and
again has one Event whose count grows, not one for each pod. Each pod has its own, and the log and the records have all.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from nodeagent.actuators import event_writer
from nodeagent.actuators.event_writer import EventReason, KubernetesEvent
from nodeagent.model import Owner, Plan, RankedPod, ResizeOutcome, ResizeResult, Victim
from nodeagent.policy import owner_messages

OWNERS: Final = frozenset(
    {
        ("apps/v1", "ReplicaSet"),
        ("apps/v1", "StatefulSet"),
        ("apps/v1", "DaemonSet"),
        ("batch/v1", "Job"),
        ("v1", "ReplicationController"),
    }
)
"""API version and kind of the owners that get Events."""


_RESIZES: Final = {
    ResizeResult.RESIZED: EventReason.MEMORY_LIMIT_RAISED,
    ResizeResult.RESTORED: EventReason.MEMORY_LIMIT_RESTORED,
    ResizeResult.REFUSED: EventReason.MEMORY_LIMIT_UNCHANGED,
    ResizeResult.DEFERRED: EventReason.MEMORY_LIMIT_UNCHANGED,
    ResizeResult.INFEASIBLE: EventReason.MEMORY_LIMIT_UNCHANGED,
    ResizeResult.FAILED: EventReason.MEMORY_LIMIT_UNCHANGED,
    ResizeResult.NO_RESULT: EventReason.MEMORY_LIMIT_UNCHANGED,
}


def known_owner(owner: Owner | None) -> Owner | None:
    """The owner if it gets Events."""
    return owner if owner is not None and (owner.api_version, owner.kind) in OWNERS else None


class RankedVictim(NamedTuple):
    """A victim and its rank."""

    victim: Victim
    ranked: RankedPod | None
    """None: it was not ranked for the resource that it is evicted for."""


def ranks_of(plan: Plan) -> dict[tuple[str, str], RankedPod]:
    """The rank of each victim, by plan and UID. One that is evicted for another resource than the ranked one has
    none."""
    victims = {
        victim.pod.uid for victim in plan.victims if not victim.limit and victim.threshold.signal is plan.ranked_for
    }
    return {(plan.id, each.view.pod.uid): each for each in plan.ranking if each.view.pod.uid in victims}


def evicted(plan_id: str, ranked: RankedVictim, *, node: str) -> Iterator[KubernetesEvent]:
    """The Events of an eviction that the API server accepted. An owner has none if its pod was terminating already."""
    # For a terminating pod the request shortened the grace period.
    terminating = ranked.victim.pod.terminating
    reason = EventReason.EVICTION_GRACE_SHORTENED if terminating else EventReason.EVICTED
    yield _about_pod(plan_id, ranked.victim, reason)
    if not terminating:
        yield from _about_owner(plan_id, ranked, node=node)


def killed(plan_id: str, ranked: RankedVictim, *, node: str, at_wall: float) -> Iterator[KubernetesEvent]:
    """The Events of a kill through the cgroup."""
    for event in (_about_pod(plan_id, ranked.victim, EventReason.KILLED), *_about_owner(plan_id, ranked, node=node)):
        yield event._replace(action="Killing", at_wall=at_wall)


def resized(outcome: ResizeOutcome) -> KubernetesEvent | None:
    """The Event about what came of a raise or of its end; None for a result that decides nothing yet."""
    reason = _RESIZES.get(outcome.result)
    if reason is None:
        return None
    return KubernetesEvent(
        "Pod",
        outcome.namespace,
        outcome.name,
        outcome.pod_uid,
        reason,
        f"Container {outcome.container}: {outcome.result}: {outcome.message}",
        action="Resizing",
        annotations={event_writer.PLAN_ANNOTATION: outcome.plan_id},
    )


def _about_pod(plan_id: str, victim: Victim, reason: EventReason) -> KubernetesEvent:
    pod = victim.pod
    annotations = {**victim.annotations, event_writer.PLAN_ANNOTATION: plan_id}
    if victim.hook:
        annotations[event_writer.HOOK_ANNOTATION] = victim.hook
    return KubernetesEvent(
        "Pod", pod.namespace or "", pod.name or "", pod.uid, reason, victim.message, annotations=annotations
    )


def _about_owner(plan_id: str, ranked: RankedVictim, *, node: str) -> Iterator[KubernetesEvent]:
    victim = ranked.victim
    owner = known_owner(victim.pod.owner)
    if owner is None or not victim.pod.namespace:
        return
    yield KubernetesEvent(
        owner.kind,
        victim.pod.namespace,
        owner.name,
        owner.uid,
        EventReason.POD_EVICTED,
        owner_messages.eviction_note(victim, ranked.ranked, node=node),
        annotations={**victim.annotations, event_writer.PLAN_ANNOTATION: plan_id},
        api_version=owner.api_version,
        series=victim.limit or victim.threshold.signal,
    )
