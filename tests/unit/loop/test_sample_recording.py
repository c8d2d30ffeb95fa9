"""A recording names the configuration that was in force at each of its samples."""

from pathlib import Path

from nodeagent.config import load
from nodeagent.config.load import LoadedConfig
from nodeagent.loop import sample_recording
from nodeagent.loop.sample_recording import HeaderFacts
from nodeagent.model import Plan
from nodeagent.records.recording import open_recording
from nodeagent.records.sample_recorder import SampleRecorder
from tests.support import nodes, recorded_samples
from tests.support.livenode import until

FACTS = HeaderFacts("n", "abcd1234", "boot")


def loaded(state: Path, more: str = "") -> LoadedConfig:
    head = "apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\n"
    return load.loads(f"{head}stateDir: {state}\n{more}")


def opened(config: LoadedConfig) -> SampleRecorder:
    found = sample_recording.open_recorder(FACTS, config, kubelet=lambda: None)
    assert found is not None
    return found


def record(found: SampleRecorder, number: int, config: LoadedConfig) -> None:
    sample = recorded_samples.sample(number)
    plan = Plan(f"abcd1234-{number}", sample.at, sample.at, sample.signals, ())
    sample_recording.record_decision(found, plan, sample.snapshot, config, exact=True)


def parts(state: Path) -> list[tuple[str, list[float]]]:
    """The configuration and the samples of each segment."""
    return [
        (header.configuration, [round(sample.wall_time - nodes.WALL) for sample in samples])
        for header, samples in open_recording(state).parts()
    ]


def test_samples_after_a_reload_have_a_header_with_the_new_configuration(tmp_path: Path) -> None:
    first, second = loaded(tmp_path), loaded(tmp_path, "mode: enforce\n")
    found = opened(first)
    found.start()
    for number, config in enumerate([first, first, loaded(tmp_path), second, second, first]):
        record(found, number, config)
    found.stop(within_s=60)
    before, after, again = parts(tmp_path)
    assert [each[1] for each in (before, after, again)] == [[0, 1, 2], [3, 4], [5]], (
        "an equal configuration is no new one"
    )
    assert ["mode: enforce" in each[0] for each in (before, after, again)] == [False, True, False]
    assert [header.began_wall - nodes.WALL for header in open_recording(tmp_path).headers] == [0, 3, 5]


def test_the_first_header_has_what_is_known_at_the_first_sample(tmp_path: Path) -> None:
    found = opened(loaded(tmp_path))
    found.start()
    record(found, 0, loaded(tmp_path, "mode: enforce\n"))
    found.stop(within_s=60)
    (header,) = open_recording(tmp_path).headers
    assert "mode: enforce" in header.configuration


def test_samples_that_waited_for_a_disk_keep_the_configuration_of_their_time(tmp_path: Path) -> None:
    first, second = loaded(tmp_path), loaded(tmp_path, "mode: enforce\n")
    blocked = tmp_path / "samples"
    blocked.write_text("not a directory yet")
    now = 1000.0
    header = recorded_samples.HEADER
    found = SampleRecorder(
        blocked,
        max_bytes=8 << 20,
        header=lambda each: header._replace(
            began_wall=each.since_wall, configuration=each.loaded.config.mode if each.loaded else ""
        ),
        monotonic=lambda: now,
    )
    found.start()
    for number, config in enumerate([first, first, second, first]):
        record(found, number, config)
    until(lambda: found.counts().samples == 4, "the samples in memory")
    assert "File exists" in found.notes()[0].message
    blocked.unlink()
    now += 31
    found.stop(within_s=60)
    assert parts(tmp_path) == [("dry-run", [0, 1]), ("enforce", [2]), ("dry-run", [3])]
    assert found.counts().dropped == 0
