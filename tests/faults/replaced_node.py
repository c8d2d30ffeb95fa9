"""A Node is deleted and made again under the same name with another UID, with its pods or without, in each phase.

The agent may evict only the pod that runs here, by its UID: not one of the same name that belongs to the new Node. It
sets its conditions and taints on the new Node as they are now, and takes none from the old one.
"""

import time
import traceback
from collections.abc import Callable
from typing import Final, NamedTuple

from tests.fake_kube import ApiServer, node_object
from tests.faults import api_scene, runs
from tests.faults.api_scene import NODE, SOFT_PRESSED, ApiScene
from tests.faults.scene import CALM, PODS, PRESSED
from tests.support.trees import Node

RUNS: Final = 3
AWAY_S: Final = 0.5
"""How long the Node does not exist, where that is the fault."""
CONDITION: Final = "NodeAgentMemoryPressure"
TAINT: Final = "nodeagent"


def _replace(api: ApiServer, *, away_s: float = 0.0, unwatched: bool = False) -> None:
    """Another Node with the conditions of a new kubelet. `unwatched`: no watch sends the change, and each begins again
    with a list."""
    store = api.store
    with store.changed:
        old = store.objects["nodes"].pop(("", NODE))
        store.record("nodes", old, "DELETED")
        if not away_s:
            _add(api)
        if unwatched:
            api.compact()
            api.end_watches()
    if away_s:
        api_scene.pause(away_s)
        _add(api)


def _add(api: ApiServer) -> None:
    new = node_object(NODE)
    new["metadata"]["labels"]["topology.kubernetes.io/zone"] = "a"
    api.add_node(new)


def replace_pods(api: ApiServer) -> None:
    """Pods of the same names on the new Node: with UIDs that no cgroup here has."""
    for entry in PODS:
        namespace, _, name = entry.key.partition("/")
        api.delete_pod(namespace, name)
        pod = api_scene.api_pod(entry)
        pod["metadata"]["uid"] = f"new-{entry.cgroup_uid}"
        api.add_pod(pod)


class Kind(NamedTuple):
    """How the Node is replaced."""

    steps: tuple[Callable[[ApiServer], None], ...]
    pods_too: bool = False


KINDS: Final[dict[str, Kind]] = {
    "replaced at once": Kind((_replace,)),
    "away for half a second": Kind((lambda api: _replace(api, away_s=AWAY_S),)),
    "replaced while no watch was open": Kind((lambda api: _replace(api, unwatched=True),)),
    "replaced twice": Kind((_replace, _replace)),
    "replaced with its pods": Kind((_replace, replace_pods), pods_too=True),
    "its pods first": Kind((replace_pods, _replace), pods_too=True),
}
PHASES: Final[dict[str, tuple[Node, Node]]] = {
    "calm": (CALM, CALM),
    "hard pressure begins": (CALM, PRESSED),
    "soft pressure begins": (CALM, SOFT_PRESSED),
    "after a hard eviction": (PRESSED, PRESSED),
    "after a soft eviction": (SOFT_PRESSED, SOFT_PRESSED),
    "the pressure ends": (PRESSED, CALM),
}
"""The node before, and from the moment on in which the Node is replaced."""


def replaced_nodes(table: runs.Table, every: int) -> None:
    """Each kind in each phase."""
    cases = ((phase, kind) for phase in PHASES for kind in KINDS)
    for phase, kind in runs.sample(cases, every):
        result, detail = run(*PHASES[phase], KINDS[kind])
        for _ in range(RUNS - 1):
            if result == "hang":  # it counts if each run has it: a virtual machine stops for moments
                result, detail = run(*PHASES[phase], KINDS[kind])
        table.add(f"Node, {phase}", kind, result, detail)


def run(before: Node, after: Node, kind: Kind, *, recover_s: float = api_scene.RECOVER_S) -> tuple[str, str]:
    """What happened in one case. `recover_s`: real time for all to be well again."""
    try:
        with api_scene.api_scene() as world:
            return _judged(world, before, after, kind, recover_s)
    except Exception:
        return "traceback", traceback.format_exc(limit=-6)


def _judged(world: ApiScene, before: Node, after: Node, kind: Kind, recover_s: float) -> tuple[str, str]:
    api = world.api
    uids: list[str] = []
    carried_out = api.on_eviction
    assert carried_out is not None

    def note(entry: dict[str, object], body: dict[str, object]) -> None:
        uids.append(str(entry["metadata"]["uid"]))  # type: ignore[index]
        carried_out(entry, body)

    api.on_eviction = note
    if not world.until(lambda: not world.unknown, within_s=world.recover_s, step_s=0.1):
        return "not recovered", f"before the fault: {world.unknown}"
    world.write(before)
    if before is not CALM and not world.until(lambda: world.carried_out, within_s=world.recover_s, step_s=1.0):
        return "not recovered", "no eviction before the fault"
    known = api.condition(CONDITION)
    world.write(after)
    for replace in kind.steps:
        replace(api)
    pressed = after is not CALM
    wanted = "True" if pressed else "False"
    began = time.monotonic()

    def settled() -> bool:
        condition = api.condition(CONDITION)
        tainted = any(TAINT in each["key"] for each in api.node()["spec"].get("taints", ()))
        evicted = bool(world.carried_out) or not pressed or kind.pods_too
        return condition is not None and condition["status"] == wanted and tainted == pressed and evicted

    def recover() -> None:
        for _ in range(api_scene.LASTING):
            world.advance(1.0)
        calm = 0
        while calm < api_scene.LASTING and time.monotonic() - began < recover_s:
            world.advance(1.0 if calm or time.monotonic() - began < 5.0 else 10.0)
            calm = calm + 1 if settled() else 0

    try:
        recover()
    except Exception:
        return "traceback", traceback.format_exc(limit=-6)
    if defects := world.defects():
        return "traceback", defects
    if any(uid != PODS[0].cgroup_uid for uid in uids):
        return "wrong eviction", str(uids)
    if any(name != PODS[0].key for name in world.evicted) or (world.carried_out and before is after is CALM):
        return "wrong eviction", str(world.evicted)
    if len(world.carried_out) > 2:
        return "lost rate limit", str(world.carried_out)
    if world.blocked_s > api_scene.BLOCKED_S:
        return "hang", f"a sync waited for {world.blocked_s:.1f} s"
    if not settled():
        taints = api.node()["spec"].get("taints")
        return "not recovered", f"{api.condition(CONDITION)}, taints {taints}, evicted {world.evicted}, before {known}"
    return (
        "conditions and taints as they are now, evicted the right pod"
        if world.carried_out
        else "conditions and taints as they are now, no eviction"
    ), ""
