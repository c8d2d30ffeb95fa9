"""Random faults between the policy, an API server and a kubelet: the ceiling and the first limit of a pod hold."""

import random
from typing import Any

import pytest

from nodeagent.model import ResizeOutcome, ResizeResult
from nodeagent.policy import outcomes, state
from tests.support.nodes import GI, MI, NOW
from tests.support.resizes import LIMIT, RESIZE, SETTINGS, decide, node, web

CEILING = 2 * LIMIT
FAST = SETTINGS._replace(own_limit=SETTINGS.own_limit._replace(resize=RESIZE._replace(undo_after_s=60.0)))


class World:
    """A pod whose limit the API server, the kubelet and the agent know apart from each other."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.first = LIMIT
        self.spec = LIMIT
        self.actual = LIMIT
        self.seen = LIMIT
        """The spec in the watch of the agent."""
        self.version = 1
        self.changes = True
        """Other clients change the limit."""
        self.seen_version = 1
        self.pending = ""

    def answer(self, order: Any) -> tuple[ResizeResult, int | None] | None:
        """What the API server answers; None: the process dies before an answer."""
        kind = self.random.random()
        if kind < 0.1:
            return ResizeResult.NOT_SENT, 429
        if kind < 0.2:
            return ResizeResult.UNCERTAIN, 500
        if kind < 0.25:
            return None
        if order.resource_version != str(self.version):
            return ResizeResult.REFUSED, 409
        if kind < 0.3:
            return ResizeResult.REFUSED, 403
        self.spec, self.version = order.to.limit, self.version + 1
        self.pending = ""
        return (ResizeResult.UNCERTAIN, None) if kind < 0.5 else (ResizeResult.ACCEPTED, None)

    def pass_time(self) -> None:
        """The kubelet and the watch make progress, or not; other clients change the limit now and then."""
        draw = self.random.random
        if draw() < (0.01 if self.changes else 0.0):
            self.spec = self.actual = self.first = self.random.choice([LIMIT, GI, 700 * MI])
            self.version += 1
        if self.spec != self.actual and not self.pending:
            kind = draw()
            if kind < 0.5:
                self.actual = self.spec
            elif kind < 0.6 and self.spec > self.actual:
                self.pending = self.random.choice(["Deferred", "Infeasible"])
        if self.spec == self.actual:
            self.pending = ""
        if draw() < 0.7:
            self.seen, self.seen_version = self.spec, self.version


@pytest.mark.parametrize("seed", range(25))
def test_the_ceiling_and_the_first_limit_hold_under_faults(seed: int) -> None:
    """In the end the pod is calm, and nobody's limit but its first one is in the spec."""
    world = World(seed)
    after = state.initial("test", now=NOW)
    at = NOW
    for step in range(600):
        at += world.random.choice([0.5, 1.0, 5.0, 30.0]) if step < 450 else 30.0
        if world.random.random() < 0.02:
            after = state.restored(after, instance=f"test{step}")
        full = world.random.random() < 0.4 or step % 100 > 60
        busy = full and step < 450
        used = (world.actual // MI - 3) if busy else 200
        view = web(used, at=at, spec=world.seen, actual=world.actual, resize_pending=world.pending)
        view = view._replace(pod=view.pod._replace(resource_version=str(world.seen_version)))
        plan, saved = decide(node(view, at=at, allocatable=16 * GI), after, FAST)
        after = saved
        for order in plan.resizes:
            if order.lowers:
                assert used * MI <= order.to.limit
            answer = world.answer(order)
            if answer is None:
                after = state.restored(saved, instance=f"dead{step}")
                continue
            outcome = ResizeOutcome(
                plan.id,
                order.pod_uid,
                order.namespace,
                order.name,
                order.container,
                answer[0],
                "",
                at,
                http_status=answer[1],
            )
            after = outcomes.apply_resize(after, outcome, config=FAST)
        assert world.spec <= max(2 * world.first, CEILING), step
        world.changes = step < 450
        world.pass_time()
    assert world.spec == world.first, after.resizes.entries
