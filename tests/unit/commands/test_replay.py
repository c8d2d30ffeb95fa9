"""`nodeagent replay` repeats decisions: equal with the same configuration, otherwise it reports the differences."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.commands import cli, replay
from nodeagent.config.schema import Config, Mode, ProtectionConfig, RankingConfig, RankingKey, StartupConfig
from nodeagent.model import Amount, Outcome, OutcomeKind, QOSClass, Signal, Threshold
from nodeagent.policy import outcomes
from nodeagent.report import text
from tests.support.nodes import GI, NOW, config, hard, snapshot, soft, view
from tests.support.recorded import Run

CONFIG = config(hard(value=2 * GI), soft(value=4 * GI, grace_s=30.0))
PODS = (
    view("best-effort", GI + 1, qos=QOSClass.BEST_EFFORT),
    view("huge", 3 * GI),
    view("system", 5 * GI, namespace="kube-system"),
)
HARD = snapshot(*PODS, available={Signal.MEMORY: GI})


def replayed(place: Path, with_config: Config) -> replay.Replayed:
    (row,) = replay.replay(place, with_config)
    assert row.trouble == ""
    return row


def shown(row: replay.Replayed) -> str:
    return text.render(replay.sections((row,), config_source="new.yaml"))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 6)), min_size=1, max_size=12), st.integers(1, 3))
def test_with_the_recorded_configuration_nothing_differs(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int]], fresh: int
) -> None:
    place = tmp_path_factory.mktemp("records")
    with_config = CONFIG._replace(startup=StartupConfig(fresh_samples=fresh))
    made, at, recorded = Run(place, with_config), NOW, 0
    for seconds, gigabytes in steps:
        at += seconds
        plan = made.decide(snapshot(*PODS, at=at, available={Signal.MEMORY: gigabytes * GI}))
        recorded += bool(plan.victims or plan.refusals)
    if recorded:
        rows = replay.replay(place, with_config)
        assert len(rows) == recorded
        assert not [row for row in rows if row.trouble or row.differs or row.assumed]


def test_a_recorded_dry_run_equals_the_replay_in_enforce_mode(tmp_path: Path) -> None:
    made = Run(tmp_path, CONFIG)
    [victim] = made.decide(HARD).victims
    named = Outcome("abc-1", victim.pod.uid, OutcomeKind.DRY_RUN, "", NOW)
    made.state = outcomes.apply_outcome(made.state, named, now=NOW, config=CONFIG)
    assert made.decide(snapshot(*PODS, at=NOW + 1, available={Signal.MEMORY: GI})).victims == ()
    rows = replay.replay(tmp_path, CONFIG._replace(mode=Mode.ENFORCE))
    assert [row.differs for row in rows] == [False, False]


def test_a_threshold_that_was_raised_above_the_kubelets_is_raised_in_the_replay_too(tmp_path: Path) -> None:
    kubelet = (Threshold(Signal.MEMORY, Amount(2 * GI, None, "2Gi")),)
    below = config(hard(value=GI))
    made = Run(tmp_path, below, kubelet=kubelet)
    seen = snapshot(*PODS, available={Signal.MEMORY: 2 * GI + 1})
    assert [victim.pod.name for victim in made.decide(seen).victims] == ["best-effort"]
    assert not replayed(tmp_path, below).differs
    row = replayed(tmp_path, below._replace(above_kubelet=False))
    assert row.differs
    assert row.plan is not None
    assert row.plan.victims == ()


def test_with_the_kubelets_order_the_decision_is_the_kubelets(tmp_path: Path) -> None:
    made = Run(tmp_path, CONFIG)
    assert [victim.pod.name for victim in made.decide(HARD).victims] == ["best-effort"]
    kubelet = CONFIG._replace(ranking=RankingConfig(kubelet=True), protection=ProtectionConfig(namespaces=()))
    row = replayed(tmp_path, kubelet)
    assert row.plan is not None
    [victim] = row.plan.victims
    assert victim.pod.name == "system"
    assert victim.message.startswith("The node was low on resource: memory. Threshold quantity: ")
    assert victim.annotations["starved_resource"] == "memory"
    assert [key.name for key in row.plan.ranking[0].keys] == ["exceedsRequest", "priority", "usageOverRequest"]


def test_another_order_selects_another_victim_and_both_are_listed_with_the_reason(tmp_path: Path) -> None:
    made = Run(tmp_path, CONFIG._replace(ranking=RankingConfig((RankingKey.USAGE,))))
    assert [victim.pod.name for victim in made.decide(HARD).victims] == ["huge"]
    row = replayed(tmp_path, CONFIG)
    assert row.differs
    assert row.plan is not None
    assert [victim.pod.name for victim in row.plan.victims] == ["best-effort"]
    page = shown(row)
    assert "+ shop/best-effort: rank 1, hard: BestEffort" in page
    assert "- shop/huge: rank 3: other pods free enough" in page
    assert page.startswith("1 decisions with new.yaml: 0 the same, 1 different")


def test_without_a_protection_the_pod_is_evicted(tmp_path: Path) -> None:
    Run(tmp_path, CONFIG).decide(HARD)
    bare = CONFIG._replace(
        protection=CONFIG.protection._replace(namespaces=("shop",)), ranking=RankingConfig((RankingKey.USAGE,))
    )
    row = replayed(tmp_path, bare)
    assert "+ kube-system/system: rank 1, hard" in shown(row)
    assert "- shop/best-effort: rank 3: namespace shop is protected" in shown(row)


def test_with_a_lower_threshold_no_pod_is_evicted(tmp_path: Path) -> None:
    Run(tmp_path, CONFIG).decide(HARD)
    row = replayed(tmp_path, config(hard(value=GI // 2)))
    assert row.differs
    assert "- shop/best-effort: nothing is due" in shown(row)


def test_the_grace_period_of_a_threshold_that_was_not_in_force_counts_as_over_and_is_marked(tmp_path: Path) -> None:
    Run(tmp_path, config(hard(value=2 * GI), hard(Signal.PID, value=20_000))).decide(
        snapshot(*PODS, available={Signal.MEMORY: 3 * GI})
    )
    row = replayed(tmp_path, config(soft(value=4 * GI, grace_s=600.0)))
    assert row.assumed == ("memory.available 4294967296",)
    assert row.plan is not None
    assert [victim.tier for victim in row.plan.victims] == ["soft"]
    assert "counts as over" in shown(row)


def test_a_recorded_grace_period_continues_in_the_replay(tmp_path: Path) -> None:
    made = Run(tmp_path, config(soft(value=4 * GI, grace_s=30.0), hard(Signal.PID, value=20_000)))
    made.decide(snapshot(*PODS, available={Signal.MEMORY: 3 * GI}))
    row = replayed(tmp_path, config(soft(value=4 * GI, grace_s=30.0)))
    assert row.assumed == ()
    assert row.plan is not None
    assert row.plan.victims == ()


def test_a_longer_startup_does_not_delay_an_agent_that_had_started(tmp_path: Path) -> None:
    Run(tmp_path, CONFIG).decide(HARD)
    made = Run(tmp_path, CONFIG, instance="later")
    made.decide(snapshot(*PODS, available={Signal.MEMORY: 8 * GI}))
    made.decide(snapshot(*PODS, at=NOW + 1, available={Signal.MEMORY: GI}))
    rows = replay.replay(tmp_path, CONFIG._replace(startup=StartupConfig(fresh_samples=50)))
    assert not rows[-1].differs


def test_a_decision_that_cannot_be_repeated_is_reported_and_the_others_are_replayed(tmp_path: Path) -> None:
    made = Run(tmp_path, CONFIG)
    made.decide(HARD, with_inputs=False)
    made.decide(snapshot(*PODS, at=NOW + 100, available={Signal.MEMORY: GI}))
    rows = replay.replay(tmp_path, CONFIG)
    assert [bool(row.trouble) for row in rows] == [True, False]
    page = text.render(replay.sections(rows, config_source="new.yaml"))
    assert "1 not repeatable" in page
    assert "recorded without inputs" in page


def test_the_command_shows_differences_for_people_and_for_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Run(tmp_path, CONFIG).decide(HARD)
    file = tmp_path / "new.yaml"
    file.write_text(
        "apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\nevictionHard: {memory.available: 512Mi}\n"
    )
    assert cli.main(["replay", str(tmp_path), "--config", str(file)]) == 0
    assert "- shop/best-effort: nothing is due" in capsys.readouterr().out
    assert cli.main(["replay", str(tmp_path / "decisions.jsonl"), "--config", str(file), "-o", "json"]) == 0
    (decision,) = json.loads(capsys.readouterr().out)["decisions"]
    assert decision["differs"] is True
    assert decision["differences"] == [
        {"change": "not-evicted", "pod": "shop/best-effort", "reason": "nothing is due"},
    ]


def test_the_command_fails_without_records_or_with_a_wrong_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\n")
    bad.write_text("nonsense: true\n")
    assert cli.main(["replay", str(tmp_path), "--config", str(good)]) == 3
    assert "no recording in this directory" in capsys.readouterr().err
    assert cli.main(["replay", str(tmp_path), "--config", str(bad)]) == 78
