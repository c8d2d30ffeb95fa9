"""A pod near its memory limit, decisions about it, and what becomes of a raise (`ownLimit.resize`)."""

from typing import Any

from nodeagent.config.own_limit import OwnLimitConfig, ResizeConfig
from nodeagent.config.schema import Config, Mode, TokenBucket
from nodeagent.model import (
    Container,
    NodeSnapshot,
    OwnLimit,
    Plan,
    PodView,
    QOSClass,
    RefusalCode,
    ResizeOutcome,
    ResizeResult,
    Resources,
)
from nodeagent.policy import engine, outcomes, state
from nodeagent.policy.resize_stages import ResizeStage
from nodeagent.policy.state import PolicyState
from tests.support.nodes import GI, MI, NOW, PLENTY, config, pod, snapshot, usage

ID = "c" * 64
LIMIT = 512 * MI
RESIZE = ResizeConfig(enabled=True, namespaces=("shop",), undo_after_s=600.0)
SETTINGS = config(
    own_limit=OwnLimitConfig(enabled=True, resize=RESIZE),
    rate_limits=PLENTY._replace(resize=TokenBucket(10, 12.0)),
    mode=Mode.ENFORCE,
)
BOTH = SETTINGS._replace(own_limit=SETTINGS.own_limit._replace(namespaces=("shop",)))


def web(
    used_mib: int = 505,
    *,
    at: float = NOW,
    spec: int = LIMIT,
    actual: int | None = LIMIT,
    request: int = 256 * MI,
    qos: QOSClass = QOSClass.BURSTABLE,
    container: dict[str, Any] | None = None,
    **more: Any,
) -> PodView:
    """A pod with one container that uses so much of the limit that the kernel enforces."""
    main = Container(
        "main",
        requests=Resources(memory=request),
        limits=Resources(memory=spec),
        actual_limits=None if actual is None else Resources(memory=actual),
        container_id=ID,
        running=True,
    )._replace(**(container or {}))
    of = pod("web", qos=qos, containers=(main,), resource_version="7", **more)
    limit = actual or spec
    own = OwnLimit(ID, limit, used_mib * MI, limit - used_mib * MI, at)
    return PodView(of, usage(of, used_mib * MI, own_limits=(own,), memory_limit=limit, at=at))


def node(*pods: PodView, at: float = NOW, allocatable: int | None = 8 * GI, **more: Any) -> NodeSnapshot:
    return snapshot(*pods, at=at, allocatable_memory=allocatable, **more)


def decide(
    on: NodeSnapshot, before: PolicyState | None = None, settings: Config = SETTINGS
) -> tuple[Plan, PolicyState]:
    return engine.decide(on, before or state.initial("test", now=NOW), now=on.taken_at, config=settings)


def codes(plan: Plan) -> list[RefusalCode]:
    return [refusal.code for refusal in plan.refusals]


def results(plan: Plan) -> list[ResizeResult]:
    return [report.result for report in plan.resize_reports]


def answered(
    before: PolicyState, plan: Plan, result: ResizeResult, *, at: float = NOW, status: int | None = None
) -> PolicyState:
    [order] = plan.resizes
    outcome = ResizeOutcome(
        plan.id, order.pod_uid, order.namespace, order.name, order.container, result, "said so", at, http_status=status
    )
    return outcomes.apply_resize(before, outcome, config=SETTINGS)


def stage(of: PolicyState) -> ResizeStage:
    [entry] = of.resizes.entries.values()
    return entry.stage


def raised(at: float = NOW + 2) -> PolicyState:
    """The state after a raise to 640Mi that the kubelet has carried out."""
    plan, after = decide(node(web()))
    after = answered(after, plan, ResizeResult.ACCEPTED)
    plan, after = decide(node(web(300, at=at, spec=640 * MI, actual=640 * MI), at=at), after)
    assert results(plan) == [ResizeResult.RESIZED]
    return after


def calm(before: PolicyState, used_mib: int, seconds: float, **more: Any) -> tuple[Plan, PolicyState]:
    """Decisions every minute for so long."""
    plan, at = None, NOW + 30
    while at <= NOW + 30 + seconds:
        view = web(used_mib, at=at, spec=640 * MI, actual=640 * MI, **more)
        plan, before = decide(node(view, at=at), before)
        at += 60
        if plan.resizes:
            break
    assert plan is not None
    return plan, before
