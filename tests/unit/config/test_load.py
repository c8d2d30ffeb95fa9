"""A file becomes a configuration, or every reason why not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nodeagent.config import defaults, load
from nodeagent.config.problems import ConfigError, Origin
from nodeagent.config.schema import Config, Mode, RankingKey
from nodeagent.config.yaml_nodes import MAX_CONFIG_BYTES
from nodeagent.model import Amount, MemoryModel, Signal, StallRequirement, StallScope, Threshold
from tests.support.config_files import BAD, GOOD, HEADER, Wrong, file, problems, read
from tests.support.paths import REPOSITORY

MIB = 2**20


def levels(loaded: load.LoadedConfig, *, hard: bool) -> dict[str, str]:
    return {str(t.signal): t.value.text for t in loaded.config.thresholds if t.hard is hard}


# --- every error ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", GOOD)
def test_what_the_documentation_allows_is_accepted(body: str) -> None:
    assert isinstance(read(body).config, Config)


@pytest.mark.parametrize("wrong", BAD, ids=lambda wrong: wrong.body[:60])
def test_what_is_wrong_is_refused_with_key_line_column_and_reason(wrong: Wrong) -> None:
    found = problems(wrong.body)
    assert [problem.key for problem in found] == [wrong.key]
    assert wrong.why in str(found[0])
    assert found[0].origin.source == "node.yaml"
    assert found[0].origin.line in (3, 4)
    assert found[0].origin.column is not None


def test_every_error_is_reported_at_once_in_the_order_of_the_file() -> None:
    found = problems(
        """\
        mode: maybe
        evictionhard: {}
        evictionSoft:
          memory.available: 1_0
          nodefs.available: 120%
        evictionSoftGracePeriod: {nodefs.available: 1d}
        damping:
            jitter: 7
        """
    )
    assert [(problem.origin.line, problem.origin.column, problem.key) for problem in found] == [
        (3, 7, "mode"),
        (4, 1, "evictionhard"),
        (6, 21, "evictionSoft.memory.available"),
        (7, 21, "evictionSoft.nodefs.available"),
        (8, 45, "evictionSoftGracePeriod.nodefs.available"),
        (10, 13, "damping.jitter"),
    ]


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("evictionHrd: {}", "evictionHard"),
        ("eviction_hard: {}", "evictionHard"),
        ("EvictionHard: {}", "evictionHard"),
        ("damping: {half_life: 1s}", "halfLife"),
        ("evictionHard: {memory.avail: 1Gi}", "memory.available"),
        ("evictionHard: {nodefs.inodesfree: 1%}", "nodefs.inodesFree"),
    ],
)
def test_an_unknown_word_comes_with_the_one_that_was_probably_meant(wrong: str, meant: str) -> None:
    assert f"did you mean `{meant}`?" in problems(wrong)[0].fix


@pytest.mark.parametrize(
    ("wrong", "place"),
    [
        ("evictionHard:\nmemory.available: 1Gi", "signals belong below evictionHard"),
        ("relief:\nmaxVictims: 3", "it belongs below `relief`"),
        ("protection: {mode: enforce}", "it belongs at the left margin"),
        ("rateLimits: {burst: 3}", "it belongs below `rateLimits.node`, `rateLimits.namespace`, `rateLimits.owner`"),
        ("signals: {memory.available: {atLeast: 3}}", "it belongs below `signals.*.requireStall`"),
        ("evictionHard:\n  memory.available<1Gi", "a line each: `memory.available: 200Mi`"),
        ("evictionSoftGracePeriod:\n  memory.available=30s", "a line each: `memory.available: 30s`"),
    ],
)
def test_the_error_for_a_wrong_indentation_names_the_section_of_the_key(wrong: str, place: str) -> None:
    [problem] = problems(wrong)
    assert place in problem.fix


def test_a_soft_threshold_with_an_invalid_grace_is_not_also_reported_without_one() -> None:
    found = problems("evictionSoft: {pid.available: 5%}\nevictionSoftGracePeriod: {pid.available: 1d}")
    assert [problem.key for problem in found] == ["evictionSoftGracePeriod.pid.available"]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "the file is empty"),
        (b"# only a comment\n", "the file is empty"),
        (b"---\n...\n", "the file is empty"),
        (b"[]", "not a map"),
        (b"just words", "not a map"),
        (HEADER.encode() + b"mode: \xff\xfe", "3:7: not UTF-8 text"),
        (HEADER.encode() + b"damping:\n\tjitter: 1\n", "4:1: a tab"),
        (HEADER.encode() + b"damping: {jitter: 1\n", "not YAML"),
        (HEADER.encode() + b"mode: dry-run\n---\nmode: enforce\n", "4:1: more than one document"),
        (HEADER.encode() + b"mode: *nowhere", "*nowhere refers to nothing"),
        (HEADER.encode() + b"damping: &x {a: *x}", "*x refers to nothing"),
        (HEADER.encode() + b"# a\nmode: \x07", "4:7: not YAML: the character U+0007"),
        (b"\0\0", "1:1: not YAML: the character U+0000; remove it; is it the right file?"),
        (b"\x7fELF\x02\xb8", "1:6: not UTF-8 text; save the file as UTF-8; is it the right file?"),
        (b"[" * 100_000, "nested deeper than 16"),
        (b"a: " * 50_000, "not YAML"),
        (b"#" * (MAX_CONFIG_BYTES + 1), "larger than 256 KiB"),
        (b"apiVersion: nodeagent.io/v1alpha1\n", "kind: is missing"),
        (b"kind: NodeAgentConfiguration\n", "apiVersion: is missing"),
        (b"apiVersion: nodeagent.io/v2\nkind: NodeAgentConfiguration\n", "1:13: apiVersion"),
        (b"apiVersion: v1\nkind: ConfigMap\n", "2:7: kind"),
    ],
)
def test_a_file_that_is_no_configuration_gets_a_clear_error(data: bytes, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load.loads(data)
    assert why in str(caught.value)


def test_what_is_reported_fits_a_line_whatever_the_file_holds() -> None:
    for text in (
        file('"a\\nb\\e[31m": 1'),
        file('mode: "x\\ny"'),
        "kind: KubeletConfiguration",
        "[]",
        file("stateDir: " + "x" * 999),
    ):
        with pytest.raises(ConfigError) as caught:
            load.loads(text)
        for problem in caught.value.problems:
            assert str(problem).isprintable()
            assert len(str(problem)) < 600


def test_a_kubelets_file_gets_one_error_that_explains_how_to_paste_it() -> None:
    text = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nmaxPods: 60\nevictionHard: {}\n"
    with pytest.raises(ConfigError) as caught:
        load.loads(text)
    (problem,) = caught.value.problems
    assert problem.origin.line == 2
    assert "copy its eviction... keys" in problem.fix


def test_a_file_that_cannot_be_read_is_an_error_with_the_reason(tmp_path: Path) -> None:
    for path, why in (
        (tmp_path / "none.yaml", "No such file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "a\0b", "null byte"),
    ):
        with pytest.raises(ConfigError, match=why):
            load.load(str(path))


def test_an_endless_file_is_refused_without_reading_it_all(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match="larger than 256 KiB"):
        load.load(str(path))
    with pytest.raises(ConfigError, match="it is a character device, not a regular file; write the configuration to"):
        load.load("/dev/zero")


def test_a_byte_order_mark_is_no_error() -> None:
    assert load.loads(b"\xef\xbb\xbf" + HEADER.encode()).config == load.defaults().config


def test_an_alias_is_read_as_what_it_stands_for_at_its_own_place() -> None:
    body = "rateLimits: {node: &b {burst: 7, perHour: 9}, signal: *b}"
    assert read(body).config.rate_limits.signal == read(body).config.rate_limits.node == (7, 9.0)


# --- thresholds -------------------------------------------------------------------------------------------------------


def test_a_file_without_thresholds_leaves_the_built_in_ones() -> None:
    assert read("mode: enforce").config == load.defaults().config._replace(mode=Mode.ENFORCE)


def test_setting_hard_thresholds_drops_the_built_in_ones_of_both_maps() -> None:
    loaded = read("evictionHard: {memory.available: 500Mi}")
    amount = Amount(500 * MIB, None, "500Mi")
    assert loaded.config.thresholds == (Threshold(Signal.MEMORY, amount, memory_model=MemoryModel.LOWER),)


def test_setting_soft_thresholds_drops_the_built_in_soft_ones_and_keeps_the_hard_ones_as_a_kubelet_does() -> None:
    loaded = read("evictionSoft: {memory.available: 1Gi}\nevictionSoftGracePeriod: {memory.available: 1m}")
    assert levels(loaded, hard=True) == levels(load.defaults(), hard=True)
    assert levels(loaded, hard=False) == {"memory.available": "1Gi"}


def test_no_hard_threshold_beside_soft_ones_is_a_warning() -> None:
    soft = "evictionSoft: {memory.available: 1Gi}\nevictionSoftGracePeriod: {memory.available: 1m}"
    assert "no hard threshold" in str(read("evictionHard: {}\n" + soft).warnings[0])


def test_an_empty_map_drops_them_too_with_a_warning() -> None:
    loaded = read("evictionHard: {}")
    assert loaded.config.thresholds == ()
    assert "no pod is ever evicted" in str(loaded.warnings[0])


def test_a_map_with_nothing_behind_it_is_as_if_it_were_not_there() -> None:
    assert read("evictionHard:\nevictionSoft: null").config == load.defaults().config


def test_merging_adds_our_hard_thresholds_for_signals_that_the_file_does_not_name() -> None:
    loaded = read("evictionHard: {memory.available: 500Mi, pid.available: 0%}\nmergeDefaultEvictionSettings: true")
    assert levels(loaded, hard=True) == {
        "memory.available": "500Mi",
        "nodefs.available": "12%",
        "nodefs.inodesFree": "7%",
        "imagefs.available": "17%",
        "imagefs.inodesFree": "7%",
    }
    assert levels(loaded, hard=False) == {}
    assert loaded.origin("evictionHard.memory.available") == Origin("node.yaml", 3, 34)
    assert str(loaded.origin("evictionHard.nodefs.available")) == "built-in"


def test_only_zero_and_hundred_percent_written_so_are_dropped() -> None:
    loaded = read(
        "evictionHard: {memory.available: 0%, nodefs.available: 100%, imagefs.available: 100.0%, pid.available: 00%}"
    )
    assert levels(loaded, hard=True) == {"imagefs.available": "100.0%", "pid.available": "00%"}


def test_a_dropped_soft_threshold_needs_no_grace() -> None:
    loaded = read("evictionHard: {memory.available: 1Gi}\nevictionSoft: {memory.available: 0%}")
    assert levels(loaded, hard=False) == {}


def test_a_soft_threshold_without_grace_time_is_a_hard_one() -> None:
    soft = "evictionSoft: {memory.available: 1Gi}\nevictionSoftGracePeriod: {memory.available: 0s}"
    loaded = read("evictionHard: {}\n" + soft)
    assert levels(loaded, hard=True) == {"memory.available": "1Gi"}


def test_minimum_reclaim_belongs_to_every_threshold_of_its_signal() -> None:
    loaded = read("evictionMinimumReclaim: {memory.available: 5%}")
    reclaims = {t.min_reclaim for t in loaded.config.thresholds if t.signal is Signal.MEMORY}
    assert reclaims == {Amount(None, 5.0, "5%")}
    assert {t.min_reclaim for t in loaded.config.thresholds if t.signal is not Signal.MEMORY} == {None}


def test_containerfs_thresholds_are_ignored_with_a_warning() -> None:
    loaded = read("evictionHard: {containerfs.available: 20%, nodefs.available: 10%}")
    assert levels(loaded, hard=True) == {"nodefs.available": "10%"}
    assert "containerfs follows nodefs or imagefs" in str(loaded.warnings[0])


def test_the_file_can_lengthen_the_grace_of_a_built_in_soft_threshold() -> None:
    loaded = read("evictionSoftGracePeriod: {memory.available: 5m}")
    graces = {t.signal: t.grace_period_s for t in loaded.config.thresholds if not t.hard}
    assert graces[Signal.MEMORY] == 300.0
    assert graces[Signal.PID] == defaults.EVICTION_SOFT_GRACE_PERIOD[Signal.PID]


def test_a_refinement_reaches_the_tier_it_names_and_replaces_the_general_one() -> None:
    loaded = read(
        """\
        signals:
          memory.available:
            memoryModel: memavailable
            requireStall: {atLeast: 5}
            exhaustionWithin: 30s
            hard: {requireStall: {atLeast: 20, scope: kubepods, resource: io, kind: full, window: avg60}}
        """
    )
    hard, soft = (t for t in loaded.config.thresholds if t.signal is Signal.MEMORY)
    assert hard.require_stall == StallRequirement(StallScope.KUBEPODS, "io", "full", "avg60", 20.0)
    assert soft.require_stall == StallRequirement(StallScope.NODE, "memory", "some", "avg10", 5.0)
    assert (hard.exhaustion_within_s, soft.exhaustion_within_s) == (None, 30.0)
    assert hard.memory_model is soft.memory_model is MemoryModel.MEM_AVAILABLE


@pytest.mark.parametrize(
    ("body", "key", "why"),
    [
        (
            "evictionHard: {pid.available: 9%}\nevictionSoft: {pid.available: 5%}\n"
            "evictionSoftGracePeriod: {pid.available: 1m}",
            "evictionSoft.pid.available",
            "not above the hard threshold",
        ),
        (
            "signals: {allocatableMemory.available: {requireStall: {atLeast: 1}}}",
            "signals.allocatableMemory.available",
            "follow",
        ),
        (
            "evictionHard: {pid.available: 9%}\nsignals: {memory.available: {requireStall: {atLeast: 1}}}",
            "signals.memory.available",
            "refines nothing",
        ),
        (
            "evictionHard: {pid.available: 9%}\nsignals: {pid.available: {exhaustionWithin: 1m}}",
            "signals.pid.available.exhaustionWithin",
            "no soft threshold",
        ),
    ],
)
def test_what_works_but_is_probably_not_meant_is_a_warning_with_its_place(body: str, key: str, why: str) -> None:
    (warning,) = read(body).warnings
    assert warning.key == key
    assert why in warning.message
    assert warning.origin.line is not None


# --- values -----------------------------------------------------------------------------------------------------------


def test_a_transition_period_of_zero_is_the_kubelets_five_minutes() -> None:
    assert read("evictionPressureTransitionPeriod: 0s").config.eviction_pressure_transition_period_s == 300.0


def test_what_a_section_leaves_out_stays_as_built_in() -> None:
    loaded = read("rateLimits: {node: {burst: 9}}\nranking: {order: [age]}")
    assert loaded.config.rate_limits == Config().rate_limits._replace(node=Config().rate_limits.node._replace(burst=9))
    assert loaded.config.ranking.order == (RankingKey.AGE,)
    assert not loaded.config.ranking.kubelet


def test_the_word_kubelet_gives_the_kubelets_order() -> None:
    assert read("ranking: {order: kubelet}").config.ranking.kubelet


def test_allocatable_memory_has_a_threshold_unless_enforcement_leaves_pods_out() -> None:
    assert read("").config.enforce_node_allocatable
    assert not read("enforceNodeAllocatable: [kube-reserved]").config.enforce_node_allocatable


def test_every_value_of_a_file_has_its_place_as_origin() -> None:
    loaded = read("damping:\n  jitter: 0.5\nrateLimits: {node: {burst: 9}}")
    assert str(loaded.origin("damping.jitter")) == "node.yaml:4:11"
    assert str(loaded.origin("rateLimits.node.burst")) == "node.yaml:5:28"
    assert str(loaded.origin("rateLimits.node.perHour")) == "built-in"


def test_a_flag_replaces_the_environment_which_replaces_the_file() -> None:
    environ = {"NODE_NAME": "from-env", "KUBECONFIG": "/env", "NODEAGENT_MODE": ""}
    overrides = load.overrides_from(environ, node_name="from-flag")
    loaded = load.loads(file("nodeName: from-file\nmode: enforce"), overrides=overrides)
    assert loaded.config.node_name == "from-flag"
    assert loaded.config.cluster.kubeconfig == "/env"
    assert loaded.config.mode is Mode.ENFORCE
    assert str(loaded.origin("nodeName")) == "--node-name"
    assert str(loaded.origin("cluster.kubeconfig")) == "$KUBECONFIG"


def test_a_wrong_override_is_an_error_beside_those_of_the_file() -> None:
    overrides = load.overrides_from({"NODEAGENT_MODE": "maybe"}, node_name="No Such", kubeconfig="")
    with pytest.raises(ConfigError) as caught:
        load.loads(file("stateDir: run"), overrides=overrides)
    assert [problem.key for problem in caught.value.problems] == ["mode", "nodeName", "cluster.kubeconfig", "stateDir"]
    with pytest.raises(ConfigError):
        load.defaults(overrides=overrides)


def test_the_example_is_accepted_without_a_warning() -> None:
    loaded = load.load(str(REPOSITORY / "examples" / "nodeagent.yaml"))
    assert loaded.warnings == ()
    assert len(loaded.config.thresholds) == 10


def test_without_a_file_no_yaml_is_imported() -> None:
    code = "import sys; from nodeagent.config import load; load.load(None); print('yaml' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout == "False\n"


# --- any text ---------------------------------------------------------------------------------------------------------

_WORDS = st.sampled_from(
    [
        *("apiVersion: nodeagent.io/v1alpha1\n", "kind: NodeAgentConfiguration\n", "evictionHard", "evictionSoft"),
        *(
            "signals",
            "memory.available",
            "rateLimits",
            "node",
            "ranking",
            "order",
            "kubelet",
            "1Gi",
            "10%",
            "5m",
            "damping",
        ),
        *(
            ": ",
            "\n",
            "\n  ",
            "- ",
            "{",
            "}",
            "[",
            "]",
            ", ",
            "&a ",
            "*a",
            "'",
            '"',
            "#",
            "|",
            ">",
            "!!int ",
            "? ",
            "<<",
        ),
        *(
            "null",
            "true",
            "1_0",
            ".nan",
            "0x1",
            "-",
            "\t",
            "---\n",
            "~",
            "2001-01-01",
            "%",
            "@",
            "\\",
            "\x00",
            "\ufeff",
        ),
    ]
)


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.text(max_size=60) | st.lists(_WORDS, max_size=25).map("".join), st.booleans())
def test_any_text_is_either_a_configuration_or_a_configuration_error(text: str, header: bool) -> None:
    try:
        loaded = load.loads(HEADER + text if header else text)
    except ConfigError as error:
        assert error.problems  # noqa: PT017 - both outcomes are right, and each is checked
    else:
        assert isinstance(loaded.config, Config)


_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["5m", "10%", "1Gi"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_value_under_any_known_key_is_read_or_refused(data: st.DataObject) -> None:
    import json

    from nodeagent.config import keys

    key = data.draw(st.sampled_from(keys.top_level()))
    inner = (
        [part.name for part in keys.config_keys(key.type)] if keys.is_section(key.type) else [str(s) for s in Signal]
    )
    body = {key.name: data.draw(_values | st.dictionaries(st.sampled_from(inner), _values, max_size=4))}
    try:
        loaded = load.loads(HEADER + f"? {json.dumps(key.name)}\n: {json.dumps(body[key.name])}\n")
    except ConfigError as error:
        assert all(problem.message for problem in error.problems)  # noqa: PT017 - both outcomes are right
    else:
        assert isinstance(loaded.config, Config)


def test_reclaim_actions_are_a_list_of_maps_with_defaults_of_their_own() -> None:
    body = "reclaim: {actions: [{name: a, kind: images}, {name: b, command: [x, -v, -v], timeout: 5s}]}"
    actions = read(body).config
    first, second = actions.reclaim.actions
    assert (first.kind, first.command, first.timeout_s) == ("images", (), 30.0)
    assert (second.kind, second.command, second.timeout_s) == ("command", ("x", "-v", "-v"), 5.0)
    assert Signal.NODEFS in first.signals


@pytest.mark.parametrize(
    ("text", "path", "part"),
    [
        ("[{name: a}]", "reclaim.actions[0].command", "missing"),
        ("[{kind: images}]", "reclaim.actions[0].name", "missing"),
        ("[{name: a, kind: images}, {name: a, kind: journal}]", "reclaim.actions[1].name", "another action"),
        ("[{name: a, kind: containerLogs, command: [x]}]", "reclaim.actions[0].command", "no command"),
        ("[{name: a, kind: images, signals: []}]", "reclaim.actions[0].signals", "empty"),
        ("[{name: a, kind: images, signals: [disk]}]", "reclaim.actions[0].signals[0]", "must be one of"),
        ("[images]", "reclaim.actions[0]", "must be a map"),
    ],
)
def test_mistakes_in_reclaim_actions_are_reported_with_their_place(text: str, path: str, part: str) -> None:
    found = problems(f"reclaim: {{actions: {text}}}")
    assert [(problem.key, part in f"{problem.message}; {problem.fix}") for problem in found] == [(path, True)]
