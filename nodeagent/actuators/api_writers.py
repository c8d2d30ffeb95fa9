"""The workers that write to the API server: started together once the node is known, stopped together, absent in a dry
run."""

import functools
import queue
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from nodeagent.actuators.conditions import NodeConditions, OwnedCondition
from nodeagent.actuators.event_writer import EventWriter
from nodeagent.actuators.eviction_slots import EvictionSlots
from nodeagent.actuators.evictions import EvictionSender
from nodeagent.actuators.pod_resizes import PodResizer
from nodeagent.actuators.taints import NodeTaints
from nodeagent.config.schema import Config
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.node_identity import Identity
from nodeagent.kube.node_watch import NodeWatch
from nodeagent.kube.transport import Transport
from nodeagent.model import Outcome, ResizeOutcome

EVENT_SPREAD_S: Final = 3.0
"""Longest wait of an Event, so that the Events of a fleet do not arrive in one second; people read them minutes later
(benchmarks/fleet.py)."""
FETCH_NODE_S: Final = 3.0
"""Longest wait of a clean exit for a Node that was not read yet; no other step of the exit waits longer."""


class ApiWriters(NamedTuple):
    """All workers."""

    node: NodeWatch
    conditions: NodeConditions
    taints: NodeTaints | None
    """None with node credentials, which cannot change taints."""
    evictions: EvictionSender
    events: EventWriter
    slots: EvictionSlots | None
    resizes: PodResizer

    def finish_requests(self) -> None:
        """Let the evictions and resizes in flight end; their outcomes are in the queues then. Sends no others."""
        self.evictions.stop()
        self.resizes.stop()

    def stop(self, *, clear: bool, mark: bool) -> str:
        """Stop the workers; see `Session.stop`. Returns what could not be cleared or marked on the Node."""
        stops: list[tuple[str, Callable[[], None]]] = [
            ("conditions", functools.partial(self.conditions.stop, clear=clear, mark=mark))
        ]
        if self.taints is not None:
            stops.append(("taints", functools.partial(self.taints.stop, clear=clear)))
        if self.slots is not None:
            stops.append(("lease", functools.partial(self.slots.stop, clear=clear or mark)))
        failed = []
        if clear or mark:
            # This process may be stopped before it has read the Node, with conditions of an earlier process on it.
            stops.insert(0, ("node", functools.partial(self.node.fetch, timeout_s=FETCH_NODE_S)))
        for what, stop in stops:
            try:
                stop()
            except ApiError as error:
                failed.append(f"{what} not {'marked' if mark else 'cleared'}: {error.message}")
        self.finish_requests()
        self.events.stop()
        return "; ".join(failed)


def start_writers(
    transport: Transport,
    config: Config,
    confirmed: Identity,
    *,
    node: NodeWatch,
    owned: Sequence[OwnedCondition],
    outcomes: "queue.SimpleQueue[Outcome]",
    resize_outcomes: "queue.SimpleQueue[ResizeOutcome]",
    wake: Callable[[], None],
    clock: Callable[[], float],
) -> ApiWriters:
    """Start the workers for this node, and its watch, once they listen to it; the caller stops the watch. `owned`:
    conditions that an earlier process set on the node. `outcomes`, `resize_outcomes`: where the answers are put.
    `clock`: CLOCK_BOOTTIME."""
    conditions = NodeConditions(
        transport,
        node,
        standard=config.conditions.standard,
        own=config.conditions.own,
        heartbeat_s=config.conditions.heartbeat_s,
        owned=owned,
        clock=clock,
    )
    taints = None if confirmed.node_credentials else NodeTaints(transport, node, wake=wake, clock=clock)
    events = EventWriter(
        transport, confirmed.name, core=confirmed.node_credentials, spread_s=EVENT_SPREAD_S, clock=clock
    )
    slots = None
    if config.fleet.max_concurrent_evictions:
        slots = EvictionSlots(
            transport,
            holder=confirmed.name,
            zone=lambda: view.zone if (view := node.view()) is not None else None,
            slots=config.fleet.max_concurrent_evictions,
            namespace=config.fleet.lease_namespace,
            duration_s=config.fleet.lease_duration_s,
            wake=wake,
            clock=clock,
        )
    for worker in (node, conditions, taints, events, slots):
        if worker is not None:
            worker.start()
    evictions = EvictionSender(
        transport,
        node_name=confirmed.name,
        wake=wake,
        timeout_s=config.cluster.eviction_timeout_s,
        clock=clock,
        outcomes=outcomes,
    )
    resizes = PodResizer(
        transport, wake=wake, timeout_s=config.cluster.request_timeout_s, clock=clock, outcomes=resize_outcomes
    )
    return ApiWriters(node, conditions, taints, evictions, events, slots, resizes)
