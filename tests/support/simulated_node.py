"""A simulated node: a hog grows beside other pods, and the policy acts on what the agent reads of it."""

from collections.abc import Callable
from typing import Any, NamedTuple

from nodeagent.config.schema import (
    Config,
    RateLimits,
)
from nodeagent.model import (
    CgroupUsage,
    NodeSnapshot,
    Outcome,
    OutcomeKind,
    Owner,
    Plan,
    Pod,
    PodSource,
    PodView,
    QOSClass,
    Signal,
    Threshold,
    Tier,
)
from nodeagent.policy import engine, outcomes
from nodeagent.policy.state import PolicyState, initial
from tests.support import nodes
from tests.support.nodes import CAPACITY, GI, MI, NOW, WALL, config, hard, snapshot, soft

SERVICES = 9 * GI
STEP_S = 0.25
NEVER = float("inf")


class HogView(NamedTuple):
    """What the agent reads of the hog of a simulated node, `for_s` seconds after the start."""

    view: Callable[[PodView, float], PodView | None] = lambda view, for_s: view
    answer: Callable[[float, int], OutcomeKind] = lambda for_s, times: OutcomeKind.ACCEPTED
    """To the n-th request for it."""
    dies: bool = True
    """True if an accepted eviction ends it."""


class SimulatedNode:
    """A node on which a hog grows among other pods, with a policy that acts on it."""

    def __init__(
        self,
        settings: Config,
        hog_view: HogView,
        *,
        rate: float = 30.0 * MI,
        hog: int = int(4.1 * GI),
        sibling: int = 0,
        burst_s: float = 0.0,
        others: int = 6,
        each: int = 300 * MI,
        unaccounted: int = 0,
    ) -> None:
        self.settings, self.hog_view, self.rate, self.burst_s = settings, hog_view, rate, burst_s
        self.sizes: dict[str, float] = {f"other-{n}": each for n in range(others)}
        self.unaccounted = unaccounted
        self.view_of_all: Callable[[PodView, float], PodView] = lambda view, for_s: view
        self.sizes["hog"] = hog
        if sibling:
            self.sizes["sibling"] = sibling
        self.began, self.at = NOW, NOW
        self.leaves: dict[str, float] = {}
        self.evicted: list[str] = []
        self.request_counts: dict[str, int] = {}
        self.plans: list[Plan] = []
        self.state = initial("simulated", now=NOW)

    @property
    def for_s(self) -> float:
        return self.at - self.began

    def hog_size(self, size: float) -> int:
        if not self.burst_s:
            return int(size + self.rate * self.for_s)
        return int(size + self.rate * self.burst_s * (self.for_s // self.burst_s))

    def size_of(self, name: str) -> int:
        return self.hog_size(self.sizes[name]) if name in ("hog", "sibling") else int(self.sizes[name])

    def snapshot(self) -> NodeSnapshot:
        used = SERVICES + self.unaccounted + sum(self.size_of(name) for name in self.sizes)
        available = max(0, CAPACITY[Signal.MEMORY] - used)
        views = []
        for name in self.sizes:
            owner = Owner("ReplicaSet", "hog", "rs-hog") if name in ("hog", "sibling") else None
            more: dict[str, Any] = {"owner": owner} if owner else {}
            if name in self.leaves:
                more |= {"deletion_wall": WALL + self.leaves[name] - NOW, "deletion_grace_s": 1.0}
            view: PodView | None = nodes.view(name, self.size_of(name), namespace="hog" if owner else "other", **more)
            assert view is not None
            if name == "hog":
                view = self.hog_view.view(view, self.for_s)
            if view is not None:
                views.append(self.view_of_all(view, self.for_s))
        services = (CgroupUsage("/system.slice/database.service", SERVICES, 9),)
        return snapshot(*views, at=self.at, available={Signal.MEMORY: available}, cgroups=services)

    def step(self) -> None:
        for name, until in list(self.leaves.items()):
            if self.at >= until and (name != "hog" or self.hog_view.dies):
                del self.sizes[name], self.leaves[name]
        plan, self.state = engine.decide(self.snapshot(), self.state, now=self.at, config=self.settings)
        self.plans.append(plan)
        for victim in plan.victims:
            name = str(victim.pod.name)
            self.request_counts[name] = self.request_counts.get(name, 0) + 1
            kind = OutcomeKind.ACCEPTED
            if name == "hog":
                kind = self.hog_view.answer(self.for_s, self.request_counts[name])
            if kind is OutcomeKind.ACCEPTED:
                self.evicted.append(name)
                self.leaves.setdefault(name, self.at + 1.0)
            outcome = Outcome(plan.id, victim.pod.uid, kind, "simulated", self.at + 0.01)
            self.state = outcomes.apply_outcome(self.state, outcome, now=self.at + 0.01, config=self.settings)
        self.at += STEP_S

    def run(self, seconds: float) -> "SimulatedNode":
        until = self.at + seconds
        while self.at < until:
            self.step()
        return self

    @property
    def others(self) -> list[str]:
        return [name for name in self.evicted if name.startswith("other")]

    @property
    def reasons(self) -> set[str]:
        return {refusal.code for plan in self.plans for refusal in plan.refusals}


def acting(tier: Tier = Tier.HARD, **more: Any) -> Config:
    threshold: Threshold = hard() if tier is Tier.HARD else soft(grace_s=1.0)
    more.setdefault("rate_limits", RateLimits())
    return config(threshold, **more)


def unreadable(view: PodView, until_s: float, for_s: float) -> PodView:
    assert view.usage is not None
    if for_s >= until_s:
        return view
    return view._replace(usage=view.usage._replace(memory_working_set=None, memory_unreclaimable=None))


def by_the_host(view: PodView, *, age_s: float) -> PodView:
    """The pod as only the host knows it."""
    assert view.usage is not None
    pod = Pod(view.pod.uid, view.pod.uid, "hog", "hog", PodSource.HOST, QOSClass.BURSTABLE)
    return PodView(pod, view.usage._replace(started_at=view.usage.read_at - age_s))


def claimed(view: PodView, *, asked_at: float = NOW) -> PodView:
    return view._replace(pod=view.pod._replace(claims_unknown="403 Forbidden", claims_asked_at=asked_at))


def pressed(*pods: PodView, available: int = 200 * MI, **more: Any) -> NodeSnapshot:
    return snapshot(*pods, available={Signal.MEMORY: available}, **more)


def no_usage(name: str, **more: Any) -> PodView:
    return unreadable(nodes.view(name, MI, **more), NEVER, 0)


def decide_steady(
    node: NodeSnapshot, settings: Config, before: PolicyState | None = None
) -> tuple[list[str], list[str], PolicyState]:
    """Victims, codes and the state after the last of six equal samples."""
    state = before or initial("t", now=node.taken_at)
    for back in (2.25, 2.0, 1.5, 1.0, 0.5):
        at = node.taken_at - back
        observations = {signal: each._replace(read_at=at) for signal, each in node.observations.items()}
        earlier = node._replace(taken_at=at, observations=observations, pods=(), pods_synced_at=at)
        _, state = engine.decide(earlier, state, now=at, config=settings)
    plan, state = engine.decide(node, state, now=node.taken_at, config=settings)
    return [str(each.pod.name) for each in plan.victims], [each.code for each in plan.refusals], state
