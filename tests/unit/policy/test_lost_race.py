"""A shortage of the node that ended in OOM kills: by how much, why, and which pod would have been evicted."""

from typing import Any

import pytest

from nodeagent.config.schema import Mode
from nodeagent.model import (
    LostRace,
    MemoryModel,
    MemorySample,
    NodeSnapshot,
    OomCause,
    OomKill,
    Outcome,
    OutcomeKind,
    RaceLoss,
    Signal,
)
from nodeagent.policy import engine, lost_race, oom_messages, outcomes
from nodeagent.policy.candidates import RankingCache
from nodeagent.policy.state import initial
from tests.support import nodes

MI, GI = nodes.MI, nodes.GI
NOW = nodes.NOW
NODE_KILL = OomKill(1, OomCause.NODE, None)


def samples(*available: int) -> tuple[MemorySample, ...]:
    """One each 0.1 s, the last one right now; the kubelet's figure is 500Mi above the kernel's."""
    first = NOW - 0.1 * (len(available) - 1)
    return tuple(MemorySample(first + 0.1 * n, each + 500 * MI, each, 1.0, 0.5) for n, each in enumerate(available))


def assess(
    snapshot: NodeSnapshot | None = None,
    *,
    kills: tuple[OomKill, ...] = (NODE_KILL,),
    model: MemoryModel = MemoryModel.LOWER,
    mode: Mode = Mode.ENFORCE,
    taken: tuple[MemorySample, ...] | None = None,
    before: float = NOW,
    **more: Any,
) -> LostRace | None:
    thresholds = more.pop("thresholds", (nodes.hard(value=GI, memory_model=model),))
    config = nodes.config(*thresholds, mode=mode, **more)
    snapshot = snapshot or nodes.snapshot(nodes.view("large", 4 * GI), nodes.view("small", 100 * MI))
    cache = RankingCache()
    plan, state = engine.decide(snapshot, initial("i", now=NOW), now=NOW, config=config, cache=cache)
    taken = samples(2 * GI, 900 * MI) if taken is None else taken
    return lost_race.assess(
        kills, taken, before=before, plan=plan, snapshot=snapshot, state=state, config=config, cache=cache
    )


def test_a_kill_by_an_own_limit_is_no_race() -> None:
    for cause in OomCause:
        race = assess(kills=(OomKill(1, cause, None),))
        assert (race is not None) == (cause in (OomCause.NODE, OomCause.ALLOCATABLE))
        assert not (cause.own_limit and cause.race)


def test_the_deficit_is_that_of_the_last_sample_before_the_kill() -> None:
    race = assess(before=NOW + 0.3)
    assert race is not None
    assert (race.loss, race.deficit, race.threshold) == (RaceLoss.NOT_MET, 124 * MI, str(GI))
    assert race.before_s == pytest.approx(0.3)
    earlier = assess(before=NOW - 0.05)
    assert earlier is not None
    assert earlier.deficit == -GI, "above the threshold"
    assert earlier.before_s == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("model", "deficit"),
    [
        (MemoryModel.LOWER, 124 * MI),
        (MemoryModel.MEM_AVAILABLE, 124 * MI),
        (MemoryModel.WORKING_SET, -376 * MI),
    ],
)
def test_the_deficit_is_in_the_measure_of_the_threshold(model: MemoryModel, deficit: int) -> None:
    race = assess(model=model)
    assert race is not None
    assert race.deficit == deficit


def test_the_victim_is_the_one_that_the_policy_would_have_chosen() -> None:
    race = assess()
    assert race is not None
    assert race.victims == ("shop/large",)
    assert race.refusals == ()


def test_without_a_candidate_the_race_has_the_reasons() -> None:
    race = assess(nodes.snapshot(nodes.view("large", 4 * GI, owner=None)))
    assert race is not None
    assert race.victims == ()
    assert race.refusals
    assert race.refusals[0].startswith("no-candidates: ")


def test_a_dry_run_and_an_eviction_in_flight_are_told_apart() -> None:
    low = nodes.snapshot(nodes.view("large", 4 * GI), available={Signal.MEMORY: 100 * MI})
    dry, sent = assess(low, mode=Mode.DRY_RUN), assess(low)
    assert dry is not None
    assert sent is not None
    assert dry.loss is RaceLoss.DRY_RUN
    assert (sent.loss, sent.in_flight, sent.met) == (RaceLoss.IN_FLIGHT, ("shop/large",), True)


def test_the_victims_of_a_dry_run_are_those_that_it_has_selected() -> None:
    """It counts them as released, so another decision would select none."""
    low = nodes.snapshot(nodes.view("large", 4 * GI), available={Signal.MEMORY: 100 * MI})
    config = nodes.config(nodes.hard(value=GI, memory_model=MemoryModel.LOWER), mode=Mode.DRY_RUN)
    plan, state = engine.decide(low, initial("i", now=NOW), now=NOW, config=config)
    [victim] = plan.victims
    done = Outcome(plan.id, victim.pod.uid, OutcomeKind.DRY_RUN, "", NOW)
    state = outcomes.apply_outcome(state, done, now=NOW, config=config)
    race = lost_race.assess(
        (NODE_KILL,),
        samples(100 * MI),
        before=NOW,
        plan=plan,
        snapshot=low,
        state=state,
        config=config,
        cache=RankingCache(),
    )
    assert race is not None
    assert (race.loss, race.victims, race.in_flight) == (RaceLoss.DRY_RUN, ("shop/large",), ())


def test_a_threshold_that_was_met_without_an_eviction_is_refused() -> None:
    low = nodes.snapshot(nodes.view("large", 4 * GI, owner=None), available={Signal.MEMORY: 100 * MI})
    race = assess(low)
    assert race is not None
    assert race.loss is RaceLoss.REFUSED
    assert race.refusals


def test_without_a_hard_threshold_nothing_could_have_been_in_time() -> None:
    race = assess(thresholds=(nodes.soft(value=GI, grace_s=30.0),))
    assert race is not None
    assert (race.loss, race.deficit) == (RaceLoss.NO_THRESHOLD, None)


def test_allocatable_memory_is_judged_by_its_own_signal() -> None:
    threshold = nodes.hard(Signal.ALLOCATABLE_MEMORY, GI)
    snapshot = nodes.snapshot(nodes.view("large", 4 * GI), available={Signal.ALLOCATABLE_MEMORY: 300 * MI})
    race = assess(snapshot, kills=(OomKill(1, OomCause.ALLOCATABLE, None),), thresholds=(threshold,))
    assert race is not None
    assert race.deficit == 724 * MI


def test_without_a_sample_before_the_kill_the_deficit_is_unknown() -> None:
    race = assess(taken=())
    assert race is not None
    assert (race.deficit, race.before_s) == (None, None)


def test_the_text_has_the_numbers() -> None:
    race = assess(before=NOW + 0.3)
    assert race is not None
    text = oom_messages.race_text(race)
    assert text == (
        f"124Mi below the threshold of {GI} 300ms before the kill; no threshold was met at the last decision; "
        "the victim would have been shop/large"
    )


def test_each_cause_and_each_loss_has_its_words() -> None:
    for cause in OomCause:
        assert oom_messages.kill_text(OomKill(1, cause, None)).startswith("OOM kill of 1 process: ")
    for loss in RaceLoss:
        assert oom_messages.race_text(LostRace(loss, "", None, None, met=False))
