"""Small changes of a sample are left out; nothing that a threshold is compared with is."""

from nodeagent.model import NodeMemory, Signal, SignalState, SignalVerdict, ThresholdVerdict, Trend
from nodeagent.model.recording import RecordedSample
from nodeagent.records.sample_reduction import SampleReducer
from tests.support import nodes, recorded_samples


def grown(sample: RecordedSample, by: int, *, at: float = 10.0) -> RecordedSample:
    """The sample later, with the memory of every pod and of the node changed."""
    views = []
    for view in sample.snapshot.pods:
        assert view.usage is not None
        memory = (view.usage.memory_working_set or 0) + by
        usage = view.usage._replace(read_at=view.usage.read_at + at, memory_working_set=memory, memory_usage=memory)
        views.append(view._replace(usage=usage))
    node = sample.snapshot.memory
    assert node is not None
    snapshot = sample.snapshot._replace(
        taken_at=sample.snapshot.taken_at + at, pods=tuple(views), memory=node._replace(cached=node.cached + by)
    )
    return sample._replace(snapshot=snapshot)


def test_pods_and_amounts_that_moved_less_than_a_mebibyte_stay_as_they_were() -> None:
    reducer, first = SampleReducer(), recorded_samples.sample()
    stored = reducer.reduced(first)
    later = reducer.reduced(grown(first, 1000))
    assert later.snapshot.pods == stored.snapshot.pods
    assert later.snapshot.memory == stored.snapshot.memory


def test_small_changes_add_up_until_they_are_stored() -> None:
    reducer, sample = SampleReducer(), recorded_samples.sample()
    reducer.reduced(sample)
    for _ in range(10):
        sample = grown(sample, 1 << 18)
        stored = reducer.reduced(sample)
        for view, real in zip(stored.snapshot.pods, sample.snapshot.pods, strict=True):
            assert view.usage is not None
            assert real.usage is not None
            assert abs((view.usage.memory_working_set or 0) - (real.usage.memory_working_set or 0)) < 2 << 20


def test_a_pod_that_moved_by_a_64th_of_itself_is_stored() -> None:
    reducer, first = SampleReducer(), recorded_samples.sample()
    reducer.reduced(first)
    later = reducer.reduced(grown(first, 4 << 20))
    assert [view.usage and view.usage.memory_working_set for view in later.snapshot.pods] == [
        view.usage and view.usage.memory_working_set for view in grown(first, 4 << 20).snapshot.pods
    ]


def test_signals_and_states_are_always_those_of_the_sample() -> None:
    reducer = SampleReducer()
    for index in range(3):
        sample = recorded_samples.sample(index)
        stored = reducer.reduced(sample)
        assert {each.signal: each.available for each in stored.snapshot.observations.values()} == {
            each.signal: each.available for each in sample.snapshot.observations.values()
        }
        assert [each.state for each in stored.signals] == [each.state for each in sample.signals]


def test_numbers_in_texts_and_trends_are_left_out() -> None:
    verdict = SignalVerdict(
        nodes.snapshot().observations[Signal.MEMORY],
        SignalState.SOFT,
        (ThresholdVerdict(nodes.soft(), 1, True, 1.0, False, "grace: 12.5s of 30s"),),
        Trend(1.0, None, None, 0.5),
    )
    stored = SampleReducer().reduced(recorded_samples.sample()._replace(signals=(verdict,)))
    assert stored.signals[0].trend is None
    assert stored.signals[0].thresholds[0].not_due_reason == "grace: ...s of ...s"


def test_an_exact_sample_is_unchanged_and_the_next_one_is_compared_with_it() -> None:
    reducer, first = SampleReducer(), recorded_samples.sample()
    reducer.reduced(first)
    exact = grown(first, 1000)._replace(exact=True)
    assert reducer.exact(exact) is exact
    assert reducer.reduced(grown(exact, 10)).snapshot.pods == exact.snapshot.pods


def test_a_pod_that_comes_and_goes_is_stored_as_it_is() -> None:
    reducer = SampleReducer()
    for pods in (3, 2, 4, 0, 1):
        sample = recorded_samples.sample(pods=max(pods, 1))
        sample = sample._replace(snapshot=sample.snapshot._replace(pods=sample.snapshot.pods[:pods]))
        assert reducer.reduced(sample).snapshot.pods == sample.snapshot.pods


def test_a_node_without_memory_figures_is_stored() -> None:
    reducer, sample = SampleReducer(), recorded_samples.sample()
    bare = sample._replace(snapshot=sample.snapshot._replace(memory=None, allocatable_by_kernel=None))
    assert reducer.reduced(bare).snapshot.memory is None
    assert isinstance(reducer.reduced(sample).snapshot.memory, NodeMemory)
