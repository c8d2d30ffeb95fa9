"""Victims for the tests of actuators, made from the API objects of their pods."""

import json
from typing import Any

from nodeagent.actuators import pod_events
from nodeagent.actuators.pod_events import RankedVictim
from nodeagent.kube import pod_decoder
from nodeagent.model import Amount, Method, Plan, Signal, Threshold, Tier, Victim
from tests.fake_kube import ApiServer, pod


def victim(
    api: ApiServer | None, name: str, *, uid: str = "", grace_s: float = 1.0, method: Method = Method.EVICT
) -> Victim:
    """The victim for this pod of `api`, or for a new pod of this name."""
    entry = (api.get_pod("default", name) if api else None) or pod(name)
    if uid:
        entry["metadata"]["uid"] = uid
    return victim_of(entry, grace_s=grace_s, method=method)


def victim_of(entry: dict[str, Any], *, grace_s: float = 1.0, method: Method = Method.EVICT) -> Victim:
    """The victim for a pod's API object."""
    return Victim(
        pod=pod_decoder.decode_pod(json.dumps(entry).encode()),
        cgroup="",
        threshold=Threshold(Signal.MEMORY, Amount(100 << 20, None, "100Mi")),
        tier=Tier.HARD,
        method=method,
        grace_period_s=grace_s,
        message="The node was low on resource: memory. ",
        annotations={},
        predicted_relief=None,
    )


def with_rank(of: Victim, plan: Plan) -> RankedVictim:
    """The victim with its rank in this plan."""
    return RankedVictim(of, pod_events.ranks_of(plan).get((plan.id, of.pod.uid)))
