"""A kubelet's effective eviction settings, and where it would act before us."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.config import kubelet, load
from nodeagent.config.problems import ConfigError
from nodeagent.model import MEMORY_SIGNALS, MemoryModel, Signal, Threshold
from tests.support.paths import DATA, REPOSITORY

GIB = 2**30
CONFIGS = DATA / "config"
DEFAULTS = {
    "memory.available": "100Mi",
    "nodefs.available": "10%",
    "nodefs.inodesFree": "5%",
    "imagefs.available": "15%",
    "imagefs.inodesFree": "5%",
    "allocatableMemory.available": "100Mi",
}


def levels(settings: kubelet.KubeletSettings) -> dict[str, str]:
    return {str(threshold.signal): threshold.value.text for threshold in settings.thresholds}


def ours(body: str) -> tuple[Threshold, ...]:
    header = "apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\n"
    return load.loads(header + body).config.thresholds


# --- its settings -----------------------------------------------------------------------------------------------------


def test_a_kubelet_without_file_and_flags_has_its_defaults() -> None:
    settings = kubelet.read_settings()
    assert levels(settings) == DEFAULTS
    assert (settings.transition_period_s, settings.max_pod_grace_period_s) == (300.0, 0.0)
    assert settings.problems == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("evictionSoft: {memory.available: 1Gi}\nevictionSoftGracePeriod: {memory.available: 1m}", DEFAULTS | {}),
        ("evictionHard: null", DEFAULTS),
        ("evictionHard: {}", {}),
        ("evictionHard: {pid.available: 5%}", {"pid.available": "5%"}),
        ("evictionHard: {nodefs.available: 100%}", {}),
        (
            "evictionHard: {nodefs.available: 0%, pid.available: 5%}\nmergeDefaultEvictionSettings: true",
            {name: text for name, text in DEFAULTS.items() if name != "nodefs.available"} | {"pid.available": "5%"},
        ),
        (
            "evictionHard: {memory.available: 1Gi}\nenforceNodeAllocatable: [none]",
            {"memory.available": "1Gi"},
        ),
        ("evictionHard: {containerfs.available: 10%}", {}),
    ],
)
def test_the_kubelets_rules_give_its_effective_hard_thresholds(text: str, expected: dict[str, str]) -> None:
    hard = [threshold for threshold in kubelet.read_settings(text).thresholds if threshold.hard]
    assert {str(threshold.signal): threshold.value.text for threshold in hard} == expected


def test_keys_of_the_file_that_are_not_about_eviction_are_passed_over() -> None:
    settings = kubelet.read_settings(
        "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\ncgroupDriver: systemd\n"
        "cgroupRoot: /kubelet\nmaxPods: 60\nauthentication: {anonymous: {enabled: false}}\n"
        "evictionPressureTransitionPeriod: 30s\nevictionMaxPodGracePeriod: 45\n"
    )
    assert (settings.cgroup_driver, settings.cgroup_root) == ("systemd", "/kubelet")
    assert (settings.transition_period_s, settings.max_pod_grace_period_s) == (30.0, 45.0)
    assert levels(settings) == DEFAULTS


def test_what_a_running_kubelet_answers_is_read_like_its_file() -> None:
    zeros = dict.fromkeys(("memory.available", "nodefs.available", "pid.available"), "0%")
    answer = {"kubeletconfig": {"cgroupDriver": "systemd", "evictionHard": zeros, "enforceNodeAllocatable": ["pods"]}}
    settings = kubelet.read_settings(json.dumps(answer))
    assert (settings.thresholds, settings.cgroup_driver) == ((), "systemd")


def test_the_number_of_problems_is_bounded() -> None:
    settings = kubelet.read_settings("", flags=["--eviction-hard", ",".join(f"a{n}" for n in range(1000))])
    assert len(settings.problems) == kubelet.MAX_PROBLEMS + 1
    assert settings.problems[-1] == "and 980 more problems"


def test_a_flag_replaces_the_map_of_the_file_as_a_whole() -> None:
    flags = [
        "/usr/bin/kubelet",
        "--config=/etc/kubelet.yaml",
        "--eviction-hard",
        "memory.available<1Gi, pid.available<5%",
    ]
    settings = kubelet.read_settings("evictionHard: {nodefs.available: 20%}\nevictionMaxPodGracePeriod: 9", flags=flags)
    assert levels(settings) == {"memory.available": "1Gi", "pid.available": "5%", "allocatableMemory.available": "1Gi"}
    assert settings.max_pod_grace_period_s == 9.0
    assert kubelet.flag_value(flags, "config") == "/etc/kubelet.yaml"
    assert kubelet.flag_value(flags, "root-dir") is None


def test_a_repeated_flag_adds_to_the_map_of_the_first() -> None:
    """As two entries in `kubelet-arg` of RKE2 (LangleSeparatedMapStringString.Set in k8s.io/component-base)."""
    flags = ["--eviction-hard=memory.available<1Gi", "--eviction-hard=nodefs.available<10%,memory.available<2Gi"]
    settings = kubelet.read_settings("evictionHard: {pid.available: 20%}", flags=flags)
    assert levels(settings) == {
        "memory.available": "2Gi",
        "nodefs.available": "10%",
        "allocatableMemory.available": "2Gi",
    }
    flags = ["--eviction-soft=memory.available<2Gi,pid.available<5%"]
    flags += [f"--eviction-soft-grace-period={name}.available=1m" for name in ("memory", "pid")]
    assert [each.grace_period_s for each in kubelet.read_settings(flags=flags).thresholds if not each.hard] == [
        60.0
    ] * 2


def test_every_eviction_flag_is_read() -> None:
    settings = kubelet.read_settings(
        flags=[
            "--eviction-hard=",
            "--eviction-soft=memory.available<2Gi",
            "--eviction-soft-grace-period=memory.available=1m30s",
            "--eviction-minimum-reclaim=memory.available=1Gi",
            "--eviction-pressure-transition-period=1m",
            "--eviction-max-pod-grace-period=60",
            "--cgroup-root=/kubelet",
            "--cgroup-driver=systemd",
            "--root-dir=/data/kubelet",
            "--enforce-node-allocatable=pods,kube-reserved",
        ]
    )
    (soft,) = settings.thresholds
    assert (soft.value.quantity, soft.grace_period_s) == (2 * GIB, 90.0)
    assert soft.min_reclaim is not None
    assert soft.min_reclaim.quantity == GIB
    assert settings[1:6] == (60.0, 60.0, "/kubelet", "systemd", "/data/kubelet")


@pytest.mark.parametrize(
    ("text", "flags", "why"),
    [
        ("evictionHard: [a]", [], "evictionHard is not a map"),
        ("evictionHard: {memory.available: 100}", [], "is not text"),
        ("evictionHard: {memory.available: 1_0}", [], "is not text"),
        ("evictionHard: {memory: 1Gi}", [], "evictionHard.memory"),
        ("evictionSoftGracePeriod: {memory.available: '30'}", [], "evictionSoftGracePeriod.memory.available"),
        ("evictionSoftGracePeriod: {memory.available: -1s}", [], "negative"),
        ("evictionSoft: {memory.available: 1Gi}", [], "evictionSoft.memory.available: has no grace period"),
        ("evictionPressureTransitionPeriod: 5", [], "evictionPressureTransitionPeriod"),
        ("", ["--eviction-hard=memory.available=1Gi"], "has no '<'"),
        ("a: [", [], "not YAML"),
        ("just words", [], ""),
    ],
)
def test_what_cannot_be_read_is_a_problem_and_never_an_exception(text: str, flags: list[str], why: str) -> None:
    settings = kubelet.read_settings(text, flags=flags)
    assert why in " ".join(settings.problems)


@given(st.text(max_size=80), st.lists(st.text(max_size=20), max_size=4))
def test_any_text_and_any_flags_give_settings(text: str, flags: list[str]) -> None:
    assert isinstance(kubelet.read_settings(text, flags=flags), kubelet.KubeletSettings)


# --- earlier thresholds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kubelets", "agents", "sooner"),
    [
        ("{memory.available: 500Mi}", "{memory.available: 600Mi}", []),
        ("{memory.available: 500Mi}", "{memory.available: 500Mi}", ["memory.available", "allocatableMemory.available"]),
        ("{memory.available: 500Mi}", "{memory.available: 400Mi}", ["memory.available", "allocatableMemory.available"]),
        ("{pid.available: 5%}", "{memory.available: 1Gi}", ["pid.available"]),
        ("{nodefs.available: 10%}", "{nodefs.available: 12%}", []),
        ("{nodefs.available: 9%}", "{nodefs.available: 10Gi}", []),
        ("{nodefs.available: 11%}", "{nodefs.available: 10Gi}", ["nodefs.available"]),
        ("{imagefs.available: 10%}", "{imagefs.available: 1Gi}", []),
        ("{pid.available: 0.0%}", "{memory.available: 1Gi}", []),
    ],
)
def test_the_kubelet_is_first_where_its_level_is_not_below_ours(kubelets: str, agents: str, sooner: list[str]) -> None:
    capacities = {Signal.NODEFS: 100 * GIB - 1, Signal.MEMORY: 8 * GIB, Signal.PID: 32768}
    found = kubelet.find_earlier_thresholds(
        ours(f"evictionHard: {agents}"),
        kubelet.read_settings(f"evictionHard: {kubelets}").thresholds,
        capacities=capacities,
    )
    assert [str(entry.signal) for entry in found] == sooner


def test_a_soft_threshold_of_ours_is_not_in_time_for_a_hard_one_of_the_kubelet() -> None:
    theirs = kubelet.read_settings("evictionHard: {pid.available: 8%}").thresholds
    (found,) = kubelet.find_earlier_thresholds(
        load.defaults().config.thresholds, theirs, capacities={Signal.PID: 32768}
    )
    assert found.message == (
        "the kubelet evicts at pid.available < 8%; nodeagent earlier, but perhaps not in time, at 10% for 30s"
    )


def test_a_soft_threshold_of_the_kubelet_is_compared_with_its_grace() -> None:
    text = "evictionHard: {}\nevictionSoft: {memory.available: %s}\nevictionSoftGracePeriod: {memory.available: %s}"
    agents = load.defaults().config.thresholds
    for level, grace, first in (
        ("250Mi", "30s", False),
        ("250Mi", "10s", True),
        ("150Mi", "10s", False),
        ("1Gi", "2m", True),
    ):
        theirs = kubelet.read_settings(text % (level, grace)).thresholds
        found = kubelet.find_earlier_thresholds(agents, theirs, capacities={Signal.MEMORY: 8 * GIB})
        assert bool(found) is first, (level, grace)


def test_another_memory_model_is_named_as_a_different_value() -> None:
    agents = ours("evictionHard: {memory.available: 300Mi}\nsignals: {memory.available: {memoryModel: memavailable}}")
    theirs = kubelet.read_settings("evictionHard: {memory.available: 500Mi}\nenforceNodeAllocatable: []").thresholds
    (found,) = kubelet.find_earlier_thresholds(agents, theirs, capacities={Signal.MEMORY: 8 * GIB})
    assert found.message.endswith("of MemAvailable, which is a different value")


def test_without_allocatable_enforcement_of_ours_the_kubelets_is_first() -> None:
    found = kubelet.find_earlier_thresholds(
        ours("evictionHard: {memory.available: 1Gi}"),
        kubelet.read_settings().thresholds,
        capacities={},
        enforce_node_allocatable=False,
    )
    assert Signal.ALLOCATABLE_MEMORY in {entry.signal for entry in found}


# --- a recorded kubelet, and a pasted stanza --------------------------------------------------------------------------


def test_a_recorded_kubelet_has_the_same_settings_in_its_file_and_in_its_answer() -> None:
    file, answer = (
        kubelet.read_settings((CONFIGS / name).read_text("utf-8")) for name in ("kubelet.yaml", "kubelet-configz.json")
    )
    assert file == answer
    assert file == kubelet.KubeletSettings((), transition_period_s=30.0, cgroup_driver="systemd")


_signals = st.sampled_from([str(signal) for signal in Signal])
_levels = st.sampled_from(
    ["0%", "100%", "100.0%", "00%", "5%", "12.5%", "100Mi", "1.5Gi", "1e9", "250m", "0", "-1", "x", "101%"]
)
_graces = st.sampled_from(["0s", "0", "30s", "1m30s", "1.5h", "", "30", "-1s", "1d"])


@given(
    hard=st.dictionaries(_signals, _levels, max_size=3),
    soft=st.dictionaries(_signals, _levels, max_size=3),
    grace=st.dictionaries(_signals, _graces, max_size=4),
    reclaim=st.dictionaries(_signals, _levels, max_size=2),
)
def test_a_pasted_stanza_means_to_us_what_it_means_to_the_kubelet(
    hard: dict[str, str], soft: dict[str, str], grace: dict[str, str], reclaim: dict[str, str]
) -> None:
    maps = {
        "evictionHard": hard,
        "evictionSoft": soft,
        "evictionSoftGracePeriod": grace,
        "evictionMinimumReclaim": reclaim,
        "enforceNodeAllocatable": [],
    }
    stanza = "".join(f"{key}: {json.dumps(value)}\n" for key, value in maps.items())
    settings = kubelet.read_settings(stanza)
    if settings.problems:
        with pytest.raises(ConfigError):
            ours(stanza)
    else:
        lower = [
            each._replace(memory_model=MemoryModel.LOWER) if each.signal in MEMORY_SIGNALS else each
            for each in settings.thresholds
        ]
        assert ours(stanza) == tuple(lower)
        assert ours(stanza + "ranking: {order: kubelet}") == settings.thresholds


def test_the_compatible_example_has_a_kubelets_own_thresholds() -> None:
    ours = load.load(str(REPOSITORY / "examples" / "kubelet-compatible.yaml")).config
    theirs = kubelet.read_settings("")
    levels = {(each.signal, each.value.text, each.grace_period_s) for each in ours.thresholds}
    assert levels == {
        (each.signal, each.value.text, each.grace_period_s)
        for each in theirs.thresholds
        if each.signal is not Signal.ALLOCATABLE_MEMORY
    }
    assert ours.eviction_pressure_transition_period_s == theirs.transition_period_s
    assert ours.eviction_max_pod_grace_period_s == theirs.max_pod_grace_period_s
    assert ours.ranking.kubelet


def test_a_drop_in_replaces_single_entries_and_a_flag_the_whole_map() -> None:
    base = "evictionHard: {memory.available: 100Mi, nodefs.available: 10%}\nenforceNodeAllocatable: [none]"
    drop_ins = [
        ("10.conf", "evictionHard: {memory.available: 300Mi}\nevictionMaxPodGracePeriod: 7"),
        ("20.conf", "evictionHard: {memory.available: 500Mi}\nevictionSoft: null"),
    ]
    settings = kubelet.read_settings(base, drop_ins=drop_ins)
    assert levels(settings) == {"memory.available": "500Mi", "nodefs.available": "10%"}
    assert settings.max_pod_grace_period_s == 7.0
    flags = ["--eviction-hard=pid.available<5%"]
    assert levels(kubelet.read_settings(base, drop_ins=drop_ins, flags=flags)) == {"pid.available": "5%"}


def test_a_main_file_has_the_defaults_before_the_drop_ins_and_drop_ins_alone_have_none() -> None:
    drop_in = ("10.conf", "evictionHard: {nodefs.available: 20%}")
    assert levels(kubelet.read_settings("maxPods: 60", drop_ins=[drop_in])) == DEFAULTS | {"nodefs.available": "20%"}
    assert levels(kubelet.read_settings("", drop_ins=[drop_in])) == {"nodefs.available": "20%"}
    assert levels(kubelet.read_settings("", drop_ins=[("10.conf", "maxPods: 60")])) == DEFAULTS


def test_a_drop_in_that_is_no_yaml_makes_the_settings_unknown() -> None:
    settings = kubelet.read_settings("maxPods: 60", drop_ins=[("/etc/kubelet.conf.d/10.conf", "a: [")])
    assert "/etc/kubelet.conf.d/10.conf" in settings.unread
