"""The zombies of a node in one line: how many, and which pods and units do not wait for their processes."""

from typing import Final

from nodeagent.model import NodeSnapshot, Signal, Unit, units

MIN_ZOMBIES: Final = 10
"""Fewer are not mentioned: every node has some for a moment."""
NOTABLE_SHARE: Final = 0.05
"""Of the PIDs in use: fewer zombies explain no shortage of PIDs."""
MAX_HOLDERS: Final = 5


def zombies_text(snapshot: NodeSnapshot) -> str:
    """`412 zombies of 9870 PIDs in use: kubelet.service 400 (kubelet, PID 812), pod shop/web 12 (sh, PID 4711)`; empty
    for few or unknown ones. Not escaped."""
    count = snapshot.zombies
    if count is None or count.total < MIN_ZOMBIES:
        return ""
    pods = {view.pod.cgroup_uid: view.pod.key for view in snapshot.pods}
    holders = []
    for each in count.holders[:MAX_HOLDERS]:
        name = f"pod {pods.get(each.pod_uid, each.pod_uid)}" if each.pod_uid else each.unit or "parent not visible"
        holders.append(f"{name} {each.zombies} ({each.command or units.UNKNOWN_TEXT}, PID {each.pid})")
    at_least = "" if count.complete else "at least "
    amount = f"{at_least}{count.total} zombies of {units.format_amount(_used(snapshot), Unit.PIDS)} PIDs in use"
    return f"{amount}: {', '.join(holders)}" if holders else amount


def notable(snapshot: NodeSnapshot) -> bool:
    """Whether zombies are a part of the PIDs in use that explains a shortage. Unknown is False."""
    used, count = _used(snapshot), snapshot.zombies
    return used is not None and count is not None and count.total >= max(MIN_ZOMBIES, NOTABLE_SHARE * used)


def _used(snapshot: NodeSnapshot) -> int | None:
    observed = snapshot.observations[Signal.PID]
    return None if observed.available is None or observed.capacity is None else observed.capacity - observed.available
