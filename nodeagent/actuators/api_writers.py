"""What writes to the API server: made together once the node is known, ended together, absent in a dry run."""

import functools
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from nodeagent.actuators.conditions import NodeConditions, OwnedCondition
from nodeagent.actuators.event_writer import EventWriter
from nodeagent.actuators.eviction_slots import EvictionSlots
from nodeagent.actuators.evictions import EvictionSender
from nodeagent.actuators.taints import NodeTaints
from nodeagent.config.schema import Config
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.node_identity import Identity
from nodeagent.kube.node_watch import NodeWatch
from nodeagent.kube.transport import Transport

SPREAD_EVENTS_S: Final = 3.0
"""Longest wait of an Event, so that a fleet does not write all of its own in one second; whoever reads it reads minutes
later (benchmarks/fleet.py)."""
LOOK_S: Final = 3.0
"""Longest wait of a clean exit for a Node that was not seen yet; nothing else of the exit waits longer."""


class ApiWriters(NamedTuple):
    """All of it."""

    node: NodeWatch
    conditions: NodeConditions
    fence: NodeTaints | None
    """None with node credentials, which may not change taints."""
    evictor: EvictionSender
    events: EventWriter
    leases: EvictionSlots | None

    def stop(self, *, clear: bool, mark: bool) -> str:
        """End their threads; see `Session.stop`. Returns what had to be left on the Node."""
        stops: list[tuple[str, Callable[[], None]]] = [
            ("conditions", functools.partial(self.conditions.stop, clear=clear, mark=mark))
        ]
        if self.fence is not None:
            stops.append(("taints", functools.partial(self.fence.stop, clear=clear)))
        if self.leases is not None:
            stops.append(("lease", functools.partial(self.leases.stop, clear=clear or mark)))
        left = []
        if clear or mark:
            # What an earlier process had set is ours as well, and this one may be stopped before it has seen the Node.
            stops.insert(0, ("node", functools.partial(self.node.fetch, timeout_s=LOOK_S)))
        for what, stop in stops:
            try:
                stop()
            except ApiError as error:
                left.append(f"{what} not {'marked' if mark else 'cleared'}: {error.message}")
        self.evictor.stop()
        self.events.stop()
        self.node.stop()
        return "; ".join(left)


def start_writers(
    transport: Transport,
    config: Config,
    confirmed: Identity,
    *,
    owned: Sequence[OwnedCondition],
    wake: Callable[[], None],
) -> ApiWriters:
    """Start them for this node. `owned` is what an earlier process had set on it."""
    node = NodeWatch(transport, confirmed.name)
    conditions = NodeConditions(
        transport,
        node,
        standard=config.conditions.standard,
        own=config.conditions.own,
        heartbeat_s=config.conditions.heartbeat_s,
        owned=owned,
    )
    fence = None if confirmed.node_credentials else NodeTaints(transport, node, wake=wake)
    events = EventWriter(transport, confirmed.name, core=confirmed.node_credentials, spread_s=SPREAD_EVENTS_S)
    leases = None
    if config.fleet.max_concurrent_evictions:
        leases = EvictionSlots(
            transport,
            holder=confirmed.name,
            zone=lambda: view.zone if (view := node.view()) is not None else None,
            seats=config.fleet.max_concurrent_evictions,
            namespace=config.fleet.lease_namespace,
            duration_s=config.fleet.lease_duration_s,
            wake=wake,
        )
    for part in (node, conditions, fence, events, leases):
        if part is not None:
            part.start()
    evictor = EvictionSender(transport, node_name=confirmed.name, wake=wake, timeout_s=config.cluster.request_timeout_s)
    return ApiWriters(node, conditions, fence, evictor, events, leases)
