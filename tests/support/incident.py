"""A whole incident by the real policy and the real recorder: a pod grows until the hard threshold, is evicted, and its
memory returns two seconds later."""

from pathlib import Path
from typing import NamedTuple

from nodeagent.config import load
from nodeagent.model import NodeSnapshot, Outcome, OutcomeKind, Plan, PodView, RecordedSample, Signal
from nodeagent.policy import outcomes
from tests.support import nodes
from tests.support.nodes import GI, MI, NOW, WALL
from tests.support.recorded import Run

CONFIGURATION = """\
apiVersion: nodeagent.io/v1alpha1
kind: NodeAgentConfiguration
nodeName: node-1
evictionHard: {memory.available: 2Gi}
evictionSoft: {memory.available: 3Gi}
evictionSoftGracePeriod: {memory.available: 30s}
"""
CONFIG = load.loads(CONFIGURATION).config
GROWS_S = 120


class Incident(NamedTuple):
    """What was recorded."""

    directory: Path
    """Of the records."""
    samples: tuple[RecordedSample, ...]
    plan: Plan
    """That evicted."""


def record(
    directory: Path,
    *,
    seconds: int = 240,
    hog: str = "batch",
    namespace: str = "shop",
    beside: tuple[PodView, ...] = (),
) -> Incident:
    """One sample a second from `WALL` on. `hog` is the name of the pod that grows by 7 GiB in two minutes."""
    run = Run(directory, CONFIG)
    samples: list[RecordedSample] = []
    evicting: Plan | None = None
    gone_at = seconds
    for second in range(seconds):
        snapshot = _node(second, hog, namespace, beside, gone=second >= gone_at)
        plan = run.decide(snapshot)
        kept = plan.id if plan.victims or plan.refusals else ""
        samples.append(RecordedSample(snapshot, plan.signals, plan.conditions, plan_id=kept, exact=bool(kept)))
        for victim in plan.victims:
            evicting, gone_at = plan, second + 3
            at = NOW + second + 0.017
            outcome = Outcome(plan.id, victim.pod.uid, OutcomeKind.ACCEPTED, "", at, http_status=201)
            assert run.recorder.outcome(outcome, wall_time=WALL + second + 0.017) == ""
            run.state = outcomes.apply_outcome(run.state, outcome, now=at, config=CONFIG)
    assert evicting is not None
    return Incident(directory, tuple(samples), evicting)


def _node(second: int, hog: str, namespace: str, beside: tuple[PodView, ...], *, gone: bool) -> NodeSnapshot:
    grown = 0 if gone else min(second, GROWS_S) * 7 * GI // GROWS_S
    pods = [nodes.view("web", GI + 10 * MI, request=GI), nodes.view("db", 2 * GI, request=3 * GI), *beside]
    if not gone:
        pods.append(nodes.view(hog, grown + GI // 2, request=512 * MI, namespace=namespace))
    node = nodes.snapshot(*pods, at=NOW + second, available={Signal.MEMORY: 7 * GI - grown})
    return node._replace(allocatable_by_kernel=node.observations[Signal.ALLOCATABLE_MEMORY])
