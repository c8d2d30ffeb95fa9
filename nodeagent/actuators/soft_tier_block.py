"""What the soft tier waits for: the end of a maintenance, its taint, the PodDisruptionBudgets, an eviction slot.

The soft tier evicts nothing while the Node is under maintenance. Else it waits until the taint is present on the Node,
at most `TAINT_WAIT_S`, until the PodDisruptionBudgets are listed, and, if the fleet has eviction slots, until this node
has one. The hard tier never waits. What is not known blocks nothing.
"""

from typing import Final

from nodeagent.actuators import taints
from nodeagent.actuators.eviction_slots import EvictionSlots
from nodeagent.actuators.taints import NodeTaints
from nodeagent.kube import node_maintenance
from nodeagent.kube.node_watch import NodeWatch
from nodeagent.kube.pdb_watch import PdbWatch
from nodeagent.model import Refusal, RefusalCode

TAINT_WAIT_S: Final = 2.0
"""Longest wait of the soft tier for its taint. It is present 5 to 20 ms after the request; two seconds include a 409 or
two and a slow API server, and are short compared with a grace period."""


def maintenance(node: NodeWatch, *, now: float, max_age_s: float) -> Refusal | None:
    """The node is under maintenance; None if it is not, or if that is not known: before the Node was read, and if its
    last version is older than `max_age_s`."""
    view, synced_at = node.view(), node.synced_at
    if view is None or synced_at is None or now - synced_at > max_age_s:
        return None
    reason = node_maintenance.reason(view)
    if not reason:
        return None
    code = RefusalCode.NODE_SHUTDOWN if node_maintenance.shutdown(view) else RefusalCode.NODE_MAINTENANCE
    return Refusal(code, f"the node is under maintenance: {reason}")


def first_wait(
    *, worker: NodeTaints | None, pdbs: PdbWatch | None, slots: EvictionSlots | None, now: float
) -> Refusal | None:
    """The first thing that is waited for; None: nothing."""
    if why := _taint_wait(worker, now):
        code = RefusalCode.WAITS_FOR_TAINT
    elif why := _pdbs_wait(pdbs):
        code = RefusalCode.WAITS_FOR_PDBS
    elif why := _slot_wait(slots):
        code = RefusalCode.WAITS_FOR_LEASE
    else:
        return None
    return Refusal(code, f"the soft tier waits for {why}")


def _taint_wait(worker: NodeTaints | None, now: float) -> str:
    for kind, since in (worker.missing() if worker is not None else {}).items():
        left_s = since + TAINT_WAIT_S - now
        if left_s > 0:
            return f"the taint {taints.TAINT_KEYS[kind]}, which is not on the node yet; at most {left_s:.1f}s more"
    return ""


def _pdbs_wait(pdbs: PdbWatch | None) -> str:
    namespace = pdbs.unlisted_namespace() if pdbs is not None else ""
    return f"the PodDisruptionBudgets of {namespace}, which are being listed" if namespace else ""


def _slot_wait(slots: EvictionSlots | None) -> str:
    if slots is None or slots.held():
        return ""
    return f"an eviction slot of its zone: {slots.reason}"
