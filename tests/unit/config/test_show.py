"""The effective configuration is shown with its origins, and what is shown is read back as the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.config import above_kubelet, amount, kubelet, load, show
from nodeagent.config.load import LoadedConfig
from nodeagent.config.problems import ConfigError
from nodeagent.config.schema import Config
from nodeagent.model import Note, NoteKind, Signal, Threshold
from tests.support.config_files import BAD, GOOD, file, read
from tests.support.paths import REPOSITORY


@pytest.mark.parametrize("body", [*GOOD, "damping: {jitter: 1.0e-05}", "nodeName: 'true'", 'stateDir: "/a \\" #b"'])
def test_what_is_shown_is_read_back_as_the_same_configuration(body: str) -> None:
    loaded = read(body)
    again = load.loads(show.show(loaded))
    assert again.config == loaded.config._replace(profiles=()), "profiles are in the values"
    assert again.eviction == loaded.eviction


def test_overrides_are_shown_with_the_flag_or_variable_they_came_from() -> None:
    loaded = load.defaults(overrides=load.overrides_from({"NODE_NAME": "worker-1"}, mode="dry-run"))
    lines = [line.split() for line in show.show(loaded).splitlines()]
    assert ["mode:", '"dry-run"', "#", "--dry-run"] in lines
    assert ["nodeName:", '"worker-1"', "#", "$NODE_NAME"] in lines


def test_each_value_is_shown_with_its_line_or_as_built_in() -> None:
    lines = show.show(read("evictionHard:\n  memory.available: 1Gi\ndamping: {jitter: 0.5}")).splitlines()
    assert ["memory.available:", '"1Gi"', "#", "node.yaml:4"] in [line.split() for line in lines]
    assert ["jitter:", "0.5", "#", "node.yaml:5"] in [line.split() for line in lines]
    assert ["penalty:", "1000", "#", "built-in"] in [line.split() for line in lines]


def test_every_value_but_the_header_has_an_origin() -> None:
    for line in show.show(load.load(str(REPOSITORY / "examples" / "nodeagent.yaml"))).splitlines()[2:]:
        assert line.endswith(":") or "  # " in line


def test_warnings_stand_first_as_comments() -> None:
    loaded = read("evictionHard: {}")
    assert show.show(loaded).startswith("# warning: node.yaml:3:15: evictionHard: there is no threshold")
    assert show.explain_warnings(loaded).startswith("warning: node.yaml:3:15:")
    assert show.explain_warnings(load.defaults()) == ""


def test_problems_are_explained_one_a_line_and_counted() -> None:
    with pytest.raises(ConfigError) as caught:
        load.loads(file("mode: maybe\nstateDir: run"), name="node.yaml")
    assert show.explain_problems(caught.value) == (
        'node.yaml:3:7: mode: "maybe": must be one of dry-run, enforce\n'
        'node.yaml:4:11: stateDir: "run": must be an absolute path\n'
        "2 errors\n"
    )


@pytest.mark.parametrize("wrong", BAD, ids=lambda wrong: wrong.body[:40])
def test_an_explanation_is_printable(wrong: object) -> None:
    with pytest.raises(ConfigError) as caught:
        read(getattr(wrong, "body"))  # noqa: B009
    assert all(line.isprintable() for line in show.explain_problems(caught.value).splitlines())


def test_the_default_configuration_is_that_of_the_schema_with_thresholds() -> None:
    loaded = load.defaults()
    assert loaded.config == Config(thresholds=loaded.config.thresholds)


def kept_above(text: str, body: str = "") -> LoadedConfig:
    """The configuration on a node whose kubelet has this one."""
    loaded = read(body)
    theirs = kubelet.read_settings(text).thresholds
    return loaded._replace(config=above_kubelet.keep_above(loaded.config, theirs))


SHORT_GRACE = "evictionSoft: {nodefs.available: 15%}\nevictionSoftGracePeriod: {nodefs.available: 1m30s}"
KUBELET = (
    "evictionHard: {memory.available: 500Mi, nodefs.available: 20%, pid.available: 1%}\n"
    "evictionSoft: {memory.available: 1Gi}\nevictionSoftGracePeriod: {memory.available: 1m}\n"
)


def test_a_threshold_is_shown_with_the_kubelets_above_which_it_is_kept() -> None:
    lines = show.show(kept_above(KUBELET)).splitlines()
    memory = [line for line in lines if line.startswith("  memory.available:") and "%" in line]
    assert [line.partition("  # ")[2] for line in memory] == [
        "built-in; at least the kubelet's 500Mi + 250Mi",
        "built-in; at least the kubelet's 500Mi + 500Mi; at least the kubelet's 1Gi + 512Mi",
    ]
    assert any("nodefs.available" in line and "at least the kubelet's 20% + 2%" in line for line in lines)
    assert not any("pid.available" in line and "kubelet" in line for line in lines), "1% + 2% is below 5%"


def test_a_grace_period_that_is_shortened_is_shown_with_what_it_is() -> None:
    lines = [line for line in show.show(kept_above(SHORT_GRACE)).splitlines() if "to end before the kubelet's" in line]
    assert [line.split("  # ") for line in lines] == [
        [f"{'  nodefs.available: 2m':<56}", "built-in; 1m20s, to end before the kubelet's"]
    ]


def test_what_is_shown_about_a_kubelet_does_not_change_what_is_read_back() -> None:
    for body in ("", "evictionHard: {memory.available: 50Mi}", "aboveKubelet: false"):
        loaded = kept_above(KUBELET, body)
        again = load.loads(show.show(loaded, notes=(Note(NoteKind.KUBELET, "not known\n- b"),)))
        assert again.eviction == loaded.eviction
        assert above_kubelet.keep_above(again.config, ()) == above_kubelet.keep_above(loaded.config, ())


def test_a_kubelet_that_is_not_known_is_a_comment() -> None:
    shown = show.show(load.defaults(), notes=(Note(NoteKind.KUBELET, "configuration not known, defaults assumed: x"),))
    assert shown.startswith("# kubelet: configuration not known, defaults assumed: x\napiVersion:")


@given(
    kubelets=st.sampled_from(["100Mi", "500Mi", "3Gi", "0%", "1%", "10%", "30%"]),
    ours=st.sampled_from(["50Mi", "150Mi", "1Gi", "2%", "12%", "2%, at least 200Mi, at most 1Gi"]),
    signal=st.sampled_from([Signal.MEMORY, Signal.NODEFS, Signal.PID]),
    capacity=st.integers(2**28, 2**44),
)
def test_a_threshold_that_is_raised_is_never_shown_without_the_reason(
    kubelets: str, ours: str, signal: Signal, capacity: int
) -> None:
    theirs = (Threshold(signal, amount.parse_amount(kubelets)),)
    config = Config(thresholds=(Threshold(signal, amount.parse_threshold(ours)),))
    (threshold,) = above_kubelet.keep_above(config, theirs).thresholds
    if above_kubelet.leading_level(threshold, capacity=capacity) is not None:
        assert above_kubelet.exceeding_levels(threshold)
