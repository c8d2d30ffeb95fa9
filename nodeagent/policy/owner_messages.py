"""The texts about an eviction for the owner of the pod: an application's developer, who knows the pod and not the node.

They state what is known without a computation: what the pod used, what it asked for, and what that means. Which request
would have kept it is in `nodeagent explain ID --owner`.
"""

from typing import Final

from nodeagent.model import SIGNAL_TABLE, Method, RankedPod, Signal, Unit, Victim, units
from nodeagent.policy import own_limits

RESOURCES: Final = {
    "memory": "memory",
    "ephemeral-storage": "disk space",
    "inodes": "files (inodes)",
    "pids": "PIDs (processes and threads)",
}
"""By the kubelet's name of the resource."""


def resource(signal: Signal) -> str:
    """What is short, in words: `memory`, `disk space`."""
    return RESOURCES[SIGNAL_TABLE[signal].resource]


def usage_text(usage: int | None, request: int | None, signal: Signal) -> str:
    """What a pod used beside what it asked for: `It used 3Gi of memory, 2.5Gi more than its request of 512Mi.`

    `request` None: the resource has none, or it is unknown.
    """
    unit = SIGNAL_TABLE[signal].unit
    if usage is None:
        return f"How much of the node's {resource(signal)} it used is not known."
    used = f"It used {units.format_amount(usage, unit)} of {resource(signal)}"
    if unit is not Unit.BYTES:
        return f"It used {units.format_amount(usage, unit)} {resource(signal)}."
    if request is None:
        return f"{used}."
    if request == 0:
        return f"{used} and requests none."
    if usage <= request:
        return f"{used}, which is within its request of {units.format_amount(request, unit)}."
    more = units.format_amount(usage - request, unit)
    return f"{used}, {more} more than its request of {units.format_amount(request, unit)}."


def eviction_note(victim: Victim, ranked: RankedPod | None, *, node: str) -> str:
    """The note of the Event on the owner. `ranked`: the pod in the order of the decision; None: it was not ranked."""
    signal = victim.threshold.signal
    pod = f"Pod {victim.pod.name}"
    if victim.limit == own_limits.OWN_LIMIT:
        cause = "because it was about to reach a memory limit of its own"
        return f"{pod} was evicted from node {node} {cause}, not for the node. {victim.message.strip()}"
    if victim.limit:
        return f"{pod} was evicted from node {node} because it exceeded a limit of its own. {victim.message.strip()}"
    what = "killed on" if victim.method is Method.KILL else "evicted from"
    cause = f"{pod} was {what} node {node} because the node was low on {resource(signal)}."
    hook = f" Hook before the eviction: {victim.hook}." if victim.hook else ""
    if ranked is None:
        return cause + hook
    text = f"{cause} {usage_text(ranked.usage, ranked.request, signal)}"
    over = ranked.usage is not None and ranked.request is not None and ranked.usage > ranked.request
    if over and SIGNAL_TABLE[signal].unit is Unit.BYTES:
        text += " The scheduler reserves what a pod requests, and no more."
    return text + hook
