"""The Events of OOM kills: on the pod, on its owner, and on the node.

The owner has the Event as well, because a pod's own is hard to find once the pod is replaced. Only owners of the kinds
in `pod_events.OWNERS` get one: the admission policy nodeagent-events allows no other object.

The kills of one container for one cause are one series, whatever their number, the names of the processes (which the
container chooses) and the figures of the node are: a container that is killed without end makes one Event, not one a
second. The log has each of them.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from nodeagent.actuators import event_writer, pod_events
from nodeagent.actuators.event_writer import EventReason, KubernetesEvent
from nodeagent.model import OomKill, OomReport, Pod, PodSource, PodView
from nodeagent.policy import oom_messages

MAX_KILLS: Final = 5
"""Kills of one reading that get Events; the log and the record have all."""
_ACTION: Final = "Observing"


def events(report: OomReport, pods: Mapping[str, PodView], *, node_name: str) -> Iterator[KubernetesEvent]:
    """The Events of one report. `pods`: by the UID in the cgroup's name; a pod that only the host knows gets none."""
    annotations = {event_writer.PLAN_ANNOTATION: report.id}
    for kill in report.kills[:MAX_KILLS]:
        series = _series(kill)
        view = pods.get(kill.place.cgroup_uid) if kill.place is not None else None
        if view is not None and view.pod.source is PodSource.API and view.pod.namespace and view.pod.name:
            yield from _about_pod(kill, report, view.pod, annotations)
        if view is None or kill.cause.race:
            note = oom_messages.event_note(kill, report, about_pod=False)
            yield _event("Node", "", node_name, node_name, note, annotations, series)


def _about_pod(kill: OomKill, report: OomReport, pod: Pod, annotations: Mapping[str, str]) -> Iterator[KubernetesEvent]:
    namespace = pod.namespace or ""
    series = _series(kill)
    note = oom_messages.event_note(kill, report, about_pod=True)
    yield _event("Pod", namespace, pod.name or "", pod.uid, note, annotations, series)
    if (owner := pod_events.known_owner(pod.owner)) is not None:
        note = oom_messages.event_note(kill, report, about_pod=False)
        event = _event(owner.kind, namespace, owner.name, owner.uid, note, annotations, series)
        yield event._replace(api_version=owner.api_version)


def _series(kill: OomKill) -> str:
    return f"{oom_messages.subject(kill)}: {kill.cause}"


def _event(
    kind: str, namespace: str, name: str, uid: str, note: str, annotations: Mapping[str, str], series: str
) -> KubernetesEvent:
    return KubernetesEvent(
        kind,
        namespace,
        name,
        uid,
        EventReason.OOM_KILL_OBSERVED,
        note,
        action=_ACTION,
        annotations=annotations,
        urgent=True,
        series=series,
    )
