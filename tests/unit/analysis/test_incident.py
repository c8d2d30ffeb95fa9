"""The incident of the package: recorded facts, and decisions that the policy makes now."""

from typing import Final

import pytest

from nodeagent.analysis import incident
from nodeagent.analysis.incident import Incident
from nodeagent.model import ConditionStatus, Signal
from nodeagent.report.demo_story import Story
from tests.support.paths import REPOSITORY

MIB: Final = 1 << 20


@pytest.fixture(scope="module")
def recorded() -> Incident:
    return incident.read()


@pytest.fixture(scope="module")
def story(recorded: Incident) -> Story:
    return recorded.story


def test_the_recording_is_small() -> None:
    directory = REPOSITORY / "nodeagent" / "analysis" / incident.DIRECTORY
    files = {path.name: path.stat().st_size for path in directory.iterdir()}
    assert set(files) == {"incident.json", "samples.rec"}
    assert sum(files.values()) < 300 << 10


def test_the_policy_evicts_at_the_sample_at_which_the_recorded_agent_did(recorded: Incident) -> None:
    first = next(sample for sample in recorded.samples if sample.plan_id)
    decided = incident.decide(recorded.samples, began=0.0)
    evicting = [each for each in decided if each.plan.victims]
    assert [each.sample for each in evicting] == [first]
    assert [victim.pod.key for victim in evicting[0].plan.victims] == [recorded.story.pod]


def test_the_policy_judges_each_sample_as_the_recorded_agent_did(recorded: Incident) -> None:
    for each in incident.decide(recorded.samples, began=0.0):
        then = {verdict.signal: verdict.state for verdict in each.sample.signals}
        assert {verdict.signal: verdict.state for verdict in each.plan.signals} == then


def test_without_the_growing_pod_another_one_is_first(recorded: Incident) -> None:
    without = [
        sample._replace(
            snapshot=sample.snapshot._replace(
                pods=tuple(view for view in sample.snapshot.pods if view.pod.key != recorded.story.pod)
            )
        )
        for sample in recorded.samples
    ]
    victims = [victim.pod.key for each in incident.decide(without, began=0.0) for victim in each.plan.victims]
    assert recorded.story.pod not in victims


def test_the_kubelet_saw_no_sample_below_its_threshold_and_the_kernel_killed(story: Story) -> None:
    assert story.alone.actor == "the kernel's OOM killer"
    assert story.alone.ended == f"{story.pod}, SIGKILL"
    samples = [moment.text for moment in story.alone.moments if moment.who == incident.KUBELET]
    assert len(samples) >= 3
    assert all("not below 100Mi" in text for text in samples)


def test_nodeagent_acts_before_the_memory_is_used_up(story: Story) -> None:
    assert story.beside.delay_s is not None
    assert story.alone.delay_s is not None
    assert 0 <= story.beside.delay_s < 2 < story.alone.delay_s
    assert story.alone.lowest < 20 * MIB < story.kubelet < story.beside.lowest
    assert story.beside.stall_s <= story.alone.stall_s


def test_the_condition_is_published_before_the_eviction(recorded: Incident) -> None:
    decided = incident.decide(recorded.samples, began=0.0)
    pressed = [
        each.at
        for each in decided
        if any(condition.status is ConditionStatus.TRUE for condition in each.plan.conditions)
    ]
    evicted = next(each.at for each in decided if each.plan.victims)
    assert pressed[0] <= evicted
    moments = [moment.text for moment in recorded.story.beside.moments]
    assert any("MemoryPressure True" in text for text in moments)
    assert any(text.startswith("relief ") for text in moments)


def test_the_deciding_key_names_both_pods(story: Story) -> None:
    assert story.deciding.startswith(f"usageOverRequest: {story.pod} uses ")
    assert story.ranking[1].pod in story.deciding
    assert [each.pod for each in story.ranking if each.victim] == [story.pod]


def test_the_thresholds_are_the_built_in_ones(recorded: Incident) -> None:
    assert (recorded.story.hard, recorded.story.soft, recorded.story.kubelet) == (200 * MIB, 300 * MIB, 100 * MIB)
    capacity = recorded.samples[0].snapshot.observations[Signal.MEMORY].capacity
    assert recorded.story.capacity == capacity


def test_the_moments_are_within_the_shown_time_and_in_order(story: Story) -> None:
    for lane in story.lanes:
        times = [moment.at for moment in lane.moments]
        assert times == sorted(times)
        assert story.began <= times[0] <= times[-1] <= story.ended
