"""A jump of the wall clock changes no decision: every interval is measured on CLOCK_BOOTTIME."""

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.model import NodeSnapshot, Outcome, OutcomeKind, Signal
from nodeagent.policy import engine, outcomes, state
from tests.support import nodes
from tests.support.nodes import GI, MI, NOW, WALL

DAY_S = 86_400.0
SETTINGS = nodes.config(nodes.soft(grace_s=5.0, value=2 * GI), nodes.hard(value=GI))


def _node(second: int, available: int, *, jump_s: float) -> NodeSnapshot:
    leaving = nodes.view("leaving", 300 * MI, deletion_wall=WALL + 20.0, deletion_grace_s=30.0)
    pods = [
        nodes.view("big", 4 * GI, usage_more={"started_at": NOW - 3600}),
        nodes.view("small", GI, usage_more={"started_at": NOW - 3600}),
        leaving._replace(usage=leaving.usage._replace(started_at=NOW - 3600) if leaving.usage else None),
    ]
    node = nodes.snapshot(*pods, at=NOW + second, available={Signal.MEMORY: available})
    return node._replace(wall_time=node.wall_time + jump_s)


def _decisions(levels: list[int], jumps: list[float]) -> list[object]:
    """The decision of each second; every eviction is accepted at once."""
    remembered = state.initial("t", now=NOW)
    plans: list[object] = []
    for second, (level, jump_s) in enumerate(zip(levels, jumps, strict=True)):
        node = _node(second, level, jump_s=jump_s)
        plan, remembered = engine.decide(node, remembered, now=node.taken_at, config=SETTINGS)
        for victim in plan.victims:
            outcome = Outcome(plan.id, victim.pod.uid, OutcomeKind.ACCEPTED, "", node.taken_at)
            remembered = outcomes.apply_outcome(remembered, outcome, now=node.taken_at, config=SETTINGS)
        plans.append(
            (
                [(victim.pod.name, victim.tier) for victim in plan.victims],
                [(condition.type, condition.status, condition.since) for condition in plan.conditions],
                [(verdict.signal, verdict.state) for verdict in plan.signals],
                plan.deficit,
            )
        )
    return plans


@given(
    st.lists(
        st.tuples(
            st.integers(0, 4).map(lambda gib: gib * GI - (100 * MI if gib else 0)),
            st.sampled_from([0.0, -DAY_S, DAY_S, -365 * DAY_S, 365 * DAY_S, 3600.0]),
        ),
        min_size=1,
        max_size=25,
    )
)
def test_no_jump_of_the_wall_clock_changes_a_decision(steps: list[tuple[int, float]]) -> None:
    levels = [max(0, level) for level, _ in steps]
    jumps = [0.0, *(jump for _, jump in steps[1:])]  # a clock that was wrong all along did not jump
    assert _decisions(levels, jumps) == _decisions(levels, [0.0] * len(levels))
