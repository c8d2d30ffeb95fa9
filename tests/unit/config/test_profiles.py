"""Profiles: what applies on which node, that it was validated before, and the origins of its values."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.config import defaults, load, profiles, show
from nodeagent.config.load import LoadedConfig
from nodeagent.config.problems import ConfigError, Origin
from nodeagent.config.schema import Mode
from nodeagent.model import Signal
from tests.support import config_files

POOLS = """
    mode: enforce
    evictionSoft: {memory.available: 3Gi}
    evictionSoftGracePeriod: {memory.available: 1m}
    protection: {namespaces: [kube-system, base]}
    profiles:
      - name: gpu
        nodeSelector: {pool: gpu}
        mode: dry-run
        evictionHard: {memory.available: 2Gi}
        protection: {namespaces: [gpu-system]}
      - name: spot
        nodeSelector: {example.com/spot: "true"}
        rateLimits: {node: {burst: 9}, namespaces: {shop: {burst: 1, perHour: 1}}}
        relief: {maxVictims: 2}
      - name: gpu-spot
        nodeSelector: {pool: gpu, example.com/spot: "true"}
        relief: {maxVictims: 7}
        ranking:
"""
GPU, SPOT = {"pool": "gpu"}, {"example.com/spot": "true"}


def on(labels: Mapping[str, str] | None, body: str = POOLS) -> LoadedConfig:
    return load.for_node(config_files.read(body), labels)


def test_a_node_gets_the_file_with_the_profiles_that_match_its_labels() -> None:
    assert [on(each).active for each in ({}, GPU, SPOT, GPU | SPOT, GPU | {"zone": "a"})] == [
        (),
        ("gpu",),
        ("spot",),
        ("gpu", "spot", "gpu-spot"),
        ("gpu",),
    ]
    assert on({"pool": "cpu"}).config == config_files.read(POOLS).config
    assert on({}).config.mode is Mode.ENFORCE
    assert on(GPU).config.mode is Mode.DRY_RUN


def test_a_profile_changes_what_it_names_and_nothing_else() -> None:
    base, gpu, spot = on({}), on(GPU), on(SPOT)
    assert gpu.eviction.eviction_hard == {
        **defaults.EVICTION_HARD,
        Signal.MEMORY: gpu.eviction.eviction_hard[Signal.MEMORY],
    }, "a signal is added to the built-in ones"
    assert gpu.eviction.eviction_hard[Signal.MEMORY].text == "2Gi"
    assert gpu.eviction.eviction_soft == base.eviction.eviction_soft
    assert gpu.config.protection == base.config.protection._replace(namespaces=("gpu-system",)), "a list is replaced"
    node = spot.config.rate_limits.node
    assert (node.burst, node.per_hour) == (9, base.config.rate_limits.node.per_hour)


def test_of_two_profiles_the_later_one_wins() -> None:
    assert [on(each).config.relief.max_victims for each in ({}, SPOT, SPOT | GPU)] == [5, 2, 7]


def test_unknown_labels_enforce_nothing() -> None:
    unknown = on(None)
    assert (unknown.active, unknown.config.mode) == (None, Mode.DRY_RUN)
    assert unknown.config._replace(mode=Mode.ENFORCE) == on({}).config
    assert "# labels of the node not known" in show.show(unknown)
    careless = on(None, "profiles: [{name: a, nodeSelector: {a: b}, mode: enforce}]")
    assert careless.config.mode is Mode.DRY_RUN
    without = config_files.read("mode: enforce")
    assert load.for_node(without, None) is without


def test_labels_are_applied_to_the_file_and_not_to_what_they_made_before() -> None:
    assert load.for_node(on(GPU), SPOT) == on(SPOT)
    assert load.for_node(on(None), {}) == on({})


def test_whether_some_node_may_enforce_is_known_from_the_file_alone() -> None:
    profile = "profiles: [{name: a, nodeSelector: {a: b}, mode: %s}]"
    assert load.may_enforce(config_files.read(profile % "enforce"))
    assert not load.may_enforce(config_files.read(profile % "dry-run"))
    assert load.may_enforce(on(None)), "a dry run only while the labels are unknown"


def test_each_value_names_its_profile_and_reads_back() -> None:
    loaded = on(GPU | SPOT)
    assert loaded.origin("mode") == Origin("node.yaml", 11, 11, "gpu")
    text = show.show(loaded)
    assert "# profiles: gpu, spot, gpu-spot\n" in text
    assert "# profile gpu, node.yaml:12" in text
    assert "# profile gpu-spot, node.yaml:20" in text
    assert load.loads(text).config == loaded.config._replace(profiles=())


WRONG: list[tuple[str, str, str]] = [
    ("{nodeSelector: {a: b}}", "profiles[0].name", "is missing"),
    ("{name: a}", "profiles[0].nodeSelector", "is missing"),
    ("{name: a, nodeSelector: }", "profiles[0].nodeSelector", "is nothing"),
    ("{name: a, nodeSelector: {}}", "profiles[0].nodeSelector", "is empty"),
    ("{name: a, nodeSelector: {a: true}}", "profiles[0].nodeSelector.a", "must be text in quotes"),
    ("{name: a, nodeSelector: {-a: b}}", "profiles[0].nodeSelector.-a", "the key of a label"),
    ("{name: a, nodeSelector: {a: b c}}", "profiles[0].nodeSelector.a", "the value of a label"),
    ("{name: a b, nodeSelector: {a: b}}", "profiles[0].name", "must be a name"),
    ("{name: a, nodeSelector: {a: b}, cluster: {}}", "profiles[0].cluster", "must be the same on all nodes"),
    ("{name: a, nodeSelector: {a: b}, profiles: []}", "profiles[0].profiles", "must be the same on all nodes"),
    ("{name: a, nodeSelector: {a: b}, rateLimit: {}}", "profiles[0].rateLimit", "unknown key"),
    ("{name: a, nodeSelector: {a: b}, mode: on}", "profiles[0].mode", "must be one of"),
    ("{name: a, nodeSelector: {a: b}, evictionHard: {memory: 1}}", "profiles[0].evictionHard.memory", "unknown signal"),
    ("{name: a, nodeSelector: {a: b}, evictionHard: 5}", "profiles[0].evictionHard", "must be a map"),
    (
        "{name: a, nodeSelector: {a: b}, damping: {jitter: 0, jitter: 1}}",
        "profiles[0].damping.jitter",
        "is set already",
    ),
    (
        "{name: a, nodeSelector: {a: b}, damping: {suppressAbove: 300}}",
        "profiles[0].damping.releaseBelow",
        "750 is not below suppressAbove (300)",
    ),
    (
        "{name: a, nodeSelector: {a: b}}, {name: a, nodeSelector: {a: c}}",
        "profiles[1].name",
        "a is already the name of another profile",
    ),
    (
        "{name: a, nodeSelector: {a: b}, damping: {suppressAbove: 800}}, "
        "{name: b, nodeSelector: {c: b}, damping: {releaseBelow: 900}}",
        "profiles[1].damping.releaseBelow",
        "(on a node with the profiles a, b)",
    ),
]


@pytest.mark.parametrize(("body", "key", "why"), WRONG)
def test_a_wrong_profile_is_an_error_with_its_place(body: str, key: str, why: str) -> None:
    [problem] = config_files.problems(f"profiles: [{body}]")
    assert problem.key == key
    assert why in problem.message + problem.fix
    assert problem.origin.line == 3


def test_profiles_that_no_node_has_together_need_not_fit_together() -> None:
    body = (
        "profiles: [{name: a, nodeSelector: {pool: a}, damping: {suppressAbove: 800}}, "
        "{name: b, nodeSelector: {pool: b}, damping: {releaseBelow: 900}}]"
    )
    assert on({"pool": "b"}, body).config.damping.release_below == 900


def test_an_error_of_the_file_is_reported_once_and_beside_those_of_its_profiles() -> None:
    found = config_files.problems(
        "damping: {jitter: 7}\nprofiles: [{name: a, nodeSelector: {a: b}, relief: {maxVictims: 0}}]"
    )
    assert [problem.key for problem in found] == ["damping.jitter", "profiles[0].relief.maxVictims"]


def test_a_warning_of_a_profile_names_it_once() -> None:
    loaded = config_files.read(POOLS.replace("3Gi", "1Gi"))
    [warning] = loaded.warnings
    assert (warning.key, warning.origin.line) == ("profiles[0]", 9)
    assert "evictionSoft.memory.available: 1Gi is not above the hard threshold, 2Gi" in warning.message
    assert warning.message.endswith("(with profile gpu)")
    assert load.for_node(loaded, SPOT).warnings == ()


def test_a_mode_from_the_environment_replaces_that_of_every_profile_with_a_warning() -> None:
    override = load.Override("mode", "dry-run", Origin("$NODEAGENT_MODE"))
    loaded = load.loads(config_files.file(POOLS), name="node.yaml", overrides=(override,))
    [warning] = loaded.warnings
    assert (warning.key, str(warning.origin)) == ("profiles[0].mode", "node.yaml:11:11")
    assert warning.message == "has no effect: $NODEAGENT_MODE sets the mode of every node"
    assert load.for_node(loaded, SPOT).config.mode is Mode.DRY_RUN
    assert not load.may_enforce(loaded)


def test_the_number_of_profiles_and_of_their_sets_is_limited() -> None:
    many = ", ".join(f"{{name: p{i}, nodeSelector: {{pool: p{i}}}}}" for i in range(profiles.MAX_PROFILES))
    assert len(config_files.read(f"profiles: [{many}]").config.profiles) == profiles.MAX_PROFILES
    [problem] = config_files.problems(f"profiles: [{many}, {{name: q, nodeSelector: {{pool: q}}}}]")
    assert "at most 32" in problem.message
    free = ", ".join(f"{{name: p{i}, nodeSelector: {{label-{i}: x}}}}" for i in range(9))
    [problem] = config_files.problems(f"profiles: [{free}]")
    assert problem.message == "more than 32 sets of profiles can match one node together"


def test_a_file_that_takes_too_long_with_its_profiles_is_refused() -> None:
    labels = ", ".join(f"label-{i}" for i in range(8000))
    some = ", ".join(f"{{name: p{i}, nodeSelector: {{pool: p{i}}}}}" for i in range(20))
    [problem] = config_files.problems(
        f"protection: {{trustedNamespaces: ['*'], labels: [{labels}]}}\nprofiles: [{some}]"
    )
    assert problem.message.startswith("too many for a file of this size: each of 20 sets")


def test_an_unused_profile_is_validated() -> None:
    with pytest.raises(ConfigError):
        config_files.read(POOLS.replace("burst: 9", "burst: 0"))


SELECTORS = st.lists(st.dictionaries(st.sampled_from("abc"), st.sampled_from("xy"), min_size=1), max_size=4)


@given(selectors=SELECTORS, labels=st.dictionaries(st.sampled_from("abcd"), st.sampled_from("xyz")))
def test_every_set_that_matches_a_node_was_validated(selectors: list[dict[str, str]], labels: dict[str, str]) -> None:
    body = ", ".join(
        f"{{name: p{i}, nodeSelector: {{{', '.join(f'{k}: {v!r}' for k, v in each.items())}}}}}"
        for i, each in enumerate(selectors)
    )
    file = config_files.read(f"profiles: [{body}]").profiles
    matched = profiles.matching(file.sources, labels) if file is not None else ()
    assert len(matched) < 2 or matched in profiles.combinations(file.sources if file is not None else ())
