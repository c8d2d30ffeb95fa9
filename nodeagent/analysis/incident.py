"""The recorded incident that ships with the package, as the story that `nodeagent demo` plays.

Promises:

1. What the kubelet and the kernel did is as recorded: their samples, the memory of the node and the OOM kill.
2. What nodeagent does is decided now, by `policy.engine` with the built-in defaults, on the samples that it
   took in the second run. A changed policy changes the story.

Theory of operation. `benchmarks/record_demo` lets the same pod grow twice in a virtual machine, without and with the
agent, and writes two files. `incident.json` has what was seen from outside in both runs, in seconds since the pod began
to grow. `samples.rec` has the samples of the agent; `began` of its run is the CLOCK_BOOTTIME of second 0.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Final, NamedTuple

from nodeagent.config import load
from nodeagent.config.schema import Config, Mode
from nodeagent.model import (
    ConditionStatus,
    ConditionType,
    Outcome,
    OutcomeKind,
    Plan,
    RankedPod,
    RecordedSample,
    Signal,
    SignalVerdict,
    Tier,
)
from nodeagent.policy import engine, outcomes, ranking
from nodeagent.policy import state as policy_state
from nodeagent.records import recording
from nodeagent.report import demo_story
from nodeagent.report.cells import BAD, DIM, GOOD, WARN
from nodeagent.report.demo_story import Lane, Moment, Point, Standing, Story

DIRECTORY: Final = "recorded_incident"
INSTANCE: Final = "demo"
AFTER_S: Final = 4.0
"""Shown after the last act."""
KUBELET, KERNEL, AGENT, API = "kubelet", "kernel", "nodeagent", "API server"


class Decided(NamedTuple):
    """A sample and the decision on it."""

    at: float
    """Seconds since the pod began to grow."""
    sample: RecordedSample
    plan: Plan


def config() -> Config:
    """The built-in defaults, as the recorded agent had them."""
    return load.defaults().config._replace(mode=Mode.ENFORCE)


class Incident(NamedTuple):
    """The story and the samples behind it."""

    story: Story
    samples: tuple[RecordedSample, ...]


def read() -> Incident:
    """The incident of the package."""
    with resources.as_file(resources.files("nodeagent.analysis") / DIRECTORY) as directory:
        return read_from(directory)


def read_from(directory: Path) -> Incident:
    """The incident in this directory."""
    seen = json.loads((directory / "incident.json").read_text("utf-8"))
    samples = tuple(recording.open_recording(directory / "samples.rec").samples())
    return Incident(make_story(seen, decide(samples, began=seen["beside"]["began"])), samples)


def decide(samples: Iterable[RecordedSample], *, began: float) -> list[Decided]:
    """The decision on each sample. Every eviction counts as accepted by the API server, as it was."""
    rules, state, found = config(), None, []
    for sample in samples:
        state = state or policy_state.initial(INSTANCE, now=sample.at)
        plan, state = engine.decide(sample.snapshot, state, now=sample.at, config=rules)
        accepted = [
            Outcome(plan.id, victim.pod.uid, OutcomeKind.ACCEPTED, "as recorded", at=sample.at)
            for victim in plan.victims
        ]
        state = outcomes.apply_outcome(state, accepted, now=sample.at, config=rules)
        found.append(Decided(sample.at - began, sample, ranking.with_key_texts(plan)))
    return found


def make_story(seen: Mapping[str, Any], decisions: list[Decided]) -> Story:
    """The incident, from what was seen and what is decided."""
    acting = next(each for each in decisions if each.plan.victims)
    ranked = acting.plan.ranking
    victim = next(each for each in ranked if each.view.pod.uid == acting.plan.victims[0].pod.uid)
    hard, soft = (_value(acting.plan, tier) for tier in (Tier.HARD, Tier.SOFT))
    key, text, following = _deciding(ranked, victim)
    machine = seen["machine"]
    emulated = ", emulated" if machine["emulated"] else ""
    alone, beside = seen["alone"], seen["beside"]
    kubelet = seen["kubelet"]["threshold"]
    return Story(
        pod=seen["pod"],
        request=victim.request or 0,
        growth=seen["bytesPerSecond"],
        capacity=acting.sample.snapshot.observations[Signal.MEMORY].capacity or machine["memory"],
        machine=f"{machine['kernel']}, {machine['cpus']} CPUs{emulated}",
        recorded=seen["recordedAt"],
        hard=hard,
        soft=soft,
        kubelet=kubelet,
        every_s=seen["kubelet"]["everySeconds"],
        began=alone["trace"][0][0],
        ended=_end(alone, beside),
        alone=_alone(alone, hard=hard, kubelet=kubelet),
        beside=_beside(beside, decisions, acting, text, hard=hard),
        ranking=tuple(_standing(each, victim) for each in ranked),
        deciding=f"{key}: {victim.view.pod.key} {text}, {following}" if key else "",
    )


def _end(alone: Mapping[str, Any], beside: Mapping[str, Any]) -> float:
    """Some seconds after the last act."""
    acts = [each["at"] for run in (alone, beside) for each in (*run["oomKills"], *run.get("accepted", ()))]
    return float(min(max(acts) + AFTER_S, max(alone["until"], beside["until"])))


def _value(plan: Plan, tier: Tier) -> int:
    """The value of the memory threshold of this tier, in bytes."""
    verdict = _memory(plan)
    return max(each.value or 0 for each in verdict.thresholds if each.threshold.hard is (tier is Tier.HARD))


def _memory(plan: Plan) -> SignalVerdict:
    return next(verdict for verdict in plan.signals if verdict.signal is Signal.MEMORY)


def _curve(run: Mapping[str, Any]) -> tuple[Point, ...]:
    return tuple(Point(at, available) for at, available, _ in run["trace"])


def _below(curve: Iterable[Point], value: int) -> float | None:
    return next((point.at for point in curve if point.at >= 0 and point.available < value), None)


def _stall_s(run: Mapping[str, Any]) -> float:
    """From the beginning to the end."""
    stalls = [stall_s for at, _, stall_s in run["trace"] if at >= 0]
    return float(stalls[-1] - stalls[0]) if stalls else 0.0


def _in_order(run: Mapping[str, Any], moments: Iterable[Moment]) -> tuple[Moment, ...]:
    """Those since the beginning of the curve."""
    began = run["trace"][0][0]
    return tuple(sorted((each for each in moments if each.at >= began), key=lambda moment: moment.at))


# --- the kubelet alone -----------------------------------------------------------------------------------------------


def _alone(run: Mapping[str, Any], *, hard: int, kubelet: int) -> Lane:
    curve = _curve(run)
    moments = list(_syncs(run["syncs"], kubelet=kubelet))
    lane = Lane(
        demo_story.ALONE,
        run["beganWall"],
        curve,
        (),
        crossed_at=_below(curve, hard),
        lowest=run["lowest"],
        stall_s=_stall_s(run),
        noticed=f"never: no sample below {demo_story.amount(kubelet)}",
    )
    kill = next(iter(run["oomKills"]), None)
    if evicting := next((sync for sync in run["syncs"] if sync["evicts"]), None):
        lane = lane._replace(
            acted_at=evicting["at"],
            actor="the kubelet",
            noticed=f"at {evicting['at']:.1f} s, by the eviction",
            ended="SIGKILL",
            reason="over its request",
            style=WARN,
        )
    elif kill is not None:
        if (low := _below(curve, kubelet)) is not None and low < kill["at"]:
            moments.append(Moment(low, KERNEL, f"MemAvailable falls below {demo_story.amount(kubelet)}", WARN))
        moments.append(Moment(kill["at"], KERNEL, f"OOM killer: SIGKILL to {kill['process']} of {kill['pod']}", BAD))
        lane = lane._replace(
            acted_at=kill["at"],
            actor="the kernel's OOM killer",
            ended=f"{kill['pod']}, SIGKILL",
            reason="it has the largest oom_score",
            style=BAD,
        )
    return lane._replace(moments=_in_order(run, moments))


def _syncs(syncs: Iterable[Mapping[str, Any]], *, kubelet: int) -> Iterator[Moment]:
    for sync in syncs:
        text = (
            f"samples {demo_story.amount(sync['available'])} (MemAvailable: {demo_story.amount(sync['memAvailable'])})"
        )
        if sync["evicts"]:
            yield Moment(sync["at"], KUBELET, f"{text}, below {demo_story.amount(kubelet)}: evicts", BAD)
        else:
            yield Moment(sync["at"], KUBELET, f"{text}, not below {demo_story.amount(kubelet)}", DIM)


# --- with nodeagent --------------------------------------------------------------------------------------------------


def _beside(run: Mapping[str, Any], decisions: list[Decided], acting: Decided, reason: str, *, hard: int) -> Lane:
    curve = _curve(run)
    victim = acting.plan.victims[0]
    grace = f"{victim.grace_period_s:g} s of grace"
    moments = [
        *_decided_moments(decisions, reason),
        *[
            Moment(accepted["at"], API, f"accepts the eviction; the kubelet sends SIGTERM, {grace}")
            for accepted in run["accepted"]
        ],
    ]
    if (back := run["backAt"]) is not None:
        moments.append(
            Moment(
                back,
                KERNEL,
                f"above {demo_story.amount(hard)} again; the lowest was {demo_story.amount(run['lowest'])}",
                GOOD,
            )
        )
    raised = next((each.at for each in decisions if _is_pressed(each.plan)), None)
    return Lane(
        demo_story.BESIDE,
        run["beganWall"],
        curve,
        _in_order(run, moments),
        outlook=tuple(_outlook(decisions, acting)),
        crossed_at=min(acting.at, _below(curve, hard) or acting.at),
        noticed="not" if raised is None else f"at {raised:.1f} s: {ConditionType.MEMORY_PRESSURE.value}",
        acted_at=run["accepted"][0]["at"],
        actor="nodeagent, Eviction API",
        ended=f"{victim.pod.key}, SIGTERM",
        reason=f"it {reason}",
        style=GOOD,
        lowest=run["lowest"],
        stall_s=_stall_s(run),
    )


def _is_pressed(plan: Plan) -> bool:
    return any(
        each.type is ConditionType.MEMORY_PRESSURE and each.status is ConditionStatus.TRUE for each in plan.conditions
    )


def _decided_moments(decisions: list[Decided], reason: str) -> Iterator[Moment]:
    pressed = False
    for each in decisions:
        available = demo_story.amount(_memory(each.plan).observation.available)
        if _is_pressed(each.plan) and not pressed:
            pressed = True
            text = f"{available} left: {ConditionType.MEMORY_PRESSURE.value} True, taint against new pods"
            yield Moment(each.at, AGENT, text, WARN)
        if each.plan.victims:
            victims = ", ".join(victim.pod.key for victim in each.plan.victims)
            yield Moment(each.at, AGENT, f"{available} left: evicts {victims}, it {reason}", BAD)
        for report in each.plan.relief_reports:
            text = f"relief {demo_story.amount(report.measured)}, predicted {demo_story.amount(report.predicted)}"
            yield Moment(each.at, AGENT, text, GOOD)


def _outlook(decisions: list[Decided], acting: Decided) -> Iterator[Moment]:
    """The first pod of the order, until it is evicted."""
    for each in decisions:
        if each.at < acting.at:
            first = next(iter(each.plan.ranking), None)
            if first is not None:
                yield Moment(each.at, AGENT, f"first in order: {first.view.pod.key}, {_last_key(first)}", DIM)
    yield Moment(acting.at, AGENT, f"evicts {acting.plan.victims[0].pod.key}", BAD)
    after = next((each.at for each in decisions if each.at > acting.at), acting.at)
    yield Moment(after, AGENT, "")


def _last_key(ranked: RankedPod) -> str:
    return ranked.keys[-1].text if ranked.keys else ""


# --- the order -------------------------------------------------------------------------------------------------------


def _standing(ranked: RankedPod, victim: RankedPod) -> Standing:
    pod = ranked.view.pod
    keys = "; ".join(key.text for key in ranked.keys)
    refused = "; ".join(refusal.message for refusal in ranked.refusals)
    return Standing(
        ranked.rank,
        pod.key,
        pod.qos_class.value,
        ranked.usage,
        ranked.request,
        f"protected: {refused}" if refused else keys,
        victim=ranked is victim,
    )


def _deciding(ranked: Iterable[RankedPod], victim: RankedPod) -> tuple[str, str, str]:
    """The first key in which the victim and the next candidate differ: its name and both texts; all empty without
    another candidate."""
    following = next((each for each in ranked if each.rank > victim.rank and not each.refusals), None)
    if following is not None:
        for own, other in zip(victim.keys, following.keys, strict=True):
            if own.value != other.value:
                return own.name, own.text, f"{following.view.pod.key} {other.text}"
    return "", victim.keys[-1].text if victim.keys else "", ""
