"""Decisions of the real policy, recorded by the real recorder, for what reads them."""

from pathlib import Path

from nodeagent.config import above_kubelet
from nodeagent.config.schema import Config
from nodeagent.model import NodeSnapshot, Plan, Threshold
from nodeagent.policy import effective_thresholds, engine, ranking
from nodeagent.policy.state import PolicyState, initial
from nodeagent.records.flight_recorder import DecisionInputs, FlightRecorder
from tests.support.nodes import NOW, WALL


class Run:
    """An agent's decisions one after another; those that did or refused something are recorded."""

    def __init__(
        self, directory: Path, config: Config, *, instance: str = "abc", kubelet: tuple[Threshold, ...] = ()
    ) -> None:
        """`kubelet`: the kubelet's own thresholds, above which those of the configuration are kept."""
        self.config = above_kubelet.keep_above(config, kubelet)
        self.kubelet = kubelet
        self.recorder = FlightRecorder(directory)
        self.state: PolicyState = initial(instance, now=NOW - 60)

    def decide(self, seen: NodeSnapshot, *, with_inputs: bool = True) -> Plan:
        before = self.state
        plan, self.state = engine.decide(seen, before, now=seen.taken_at, config=self.config)
        inputs = DecisionInputs(
            seen,
            before,
            seen.taken_at,
            effective_thresholds.effective(self.config, seen.layout),
            self.config.startup.fresh_samples,
            self.kubelet,
        )
        wall_time = WALL + seen.taken_at - NOW
        if plan.victims or plan.refusals:
            explained = ranking.with_key_texts(plan)
            assert self.recorder.decision(explained, wall_time=wall_time, inputs=inputs if with_inputs else None) == ""
        for report in plan.relief_reports:
            assert self.recorder.relief(report, wall_time=wall_time) == ""
        return plan
