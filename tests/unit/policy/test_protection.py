"""Which pods are protected, and which configuration key changes that."""

from typing import Any

import pytest

from nodeagent.config.schema import NamespaceProtection, NamespaceRule, ProtectionConfig
from nodeagent.model import DisruptionBudget, Owner, Pod, PodSource, PodUsage, Tier
from nodeagent.policy import protection
from tests.support.nodes import NOW, WALL, pod, usage

NOTHING = ProtectionConfig(
    daemon_sets=False,
    namespaces=(),
    bare_pods=False,
    node_bound=False,
    minimum_age_s=0.0,
    disruption_budgets=False,
    unknown_pods=False,
    system_partition=False,
)


def rule_context(rules: ProtectionConfig, tier: Tier = Tier.SOFT) -> protection.RuleContext:
    return protection.RuleContext(rules, tier, "memory", NOW, WALL)


def codes(
    of: Pod,
    rules: ProtectionConfig = ProtectionConfig(),  # noqa: B008 - immutable
    *,
    tier: Tier = Tier.SOFT,
    used: PodUsage | None = None,
) -> list[str]:
    uses = used if used is not None else usage(of, 100)
    context = rule_context(rules, tier)
    momentary = protection.momentary_refusals(of, uses, uses.memory_working_set, context)
    return [refusal.code for refusal in (*protection.object_refusals(of, rules), *momentary)]


def test_an_ordinary_pod_has_no_protection() -> None:
    assert codes(pod("web")) == []


@pytest.mark.parametrize(
    ("rule", "soft", "hard"),
    [
        (NamespaceRule(NamespaceProtection.ALL), ["namespace"], ["namespace"]),
        (NamespaceRule(NamespaceProtection.SOFT), ["namespace-soft-tier"], []),
        (NamespaceRule(), [], []),
    ],
)
def test_a_namespace_is_protected_in_the_tiers_of_its_rule(
    rule: NamespaceRule, soft: list[str], hard: list[str]
) -> None:
    rules = NOTHING._replace(namespace_rules={"shop": rule})
    assert codes(pod("a", namespace="shop"), rules) == soft
    assert codes(pod("a", namespace="shop"), rules, tier=Tier.HARD) == hard
    assert codes(pod("a", namespace="other"), rules) == []


def test_the_rule_of_a_namespace_replaces_single_protections() -> None:
    bare = pod("a", namespace="batch", owner=None, source=PodSource.API)
    strict = NOTHING._replace(bare_pods=True)
    assert codes(bare, strict) == ["bare-pod"]
    assert codes(bare, strict._replace(namespace_rules={"batch": NamespaceRule(bare_pods=False)})) == []
    assert codes(bare, NOTHING._replace(namespace_rules={"batch": NamespaceRule(bare_pods=True)})) == ["bare-pod"]
    young = usage(bare, 100)._replace(started_at=NOW - 30)
    older = NOTHING._replace(minimum_age_s=20.0)
    assert codes(bare, older, used=young) == []
    assert codes(bare, older._replace(namespace_rules={"batch": NamespaceRule(minimum_age_s=60.0)}), used=young) == [
        "too-young"
    ]


COMPILED_IN: list[tuple[str, dict[str, Any]]] = [
    ("static-pod", {"static": "file"}),
    ("static-pod", {"static": "cgroup"}),
    ("mirror-pod", {"mirror_of": "40752f5e63399d9c92ea85f4b6e74059"}),
    ("system-node-critical", {"priority_class": "system-node-critical", "priority": None}),
    ("critical-priority", {"priority": 2_000_000_000}),
    ("unnamed-pod", {"namespace": ""}),
    ("finished", {"phase": "Succeeded"}),
    ("terminating", {"deletion_wall": WALL + 5}),
]


@pytest.mark.parametrize(("code", "of"), COMPILED_IN)
@pytest.mark.parametrize("tier", list(Tier))
def test_no_configuration_takes_a_compiled_in_protection_away(code: str, of: dict[str, Any], tier: Tier) -> None:
    assert codes(pod("a", **of), NOTHING, tier=tier) == [code]


def test_a_priority_below_two_billion_is_evictable() -> None:
    assert codes(pod("a", priority=1_999_999_999)) == []


AUTHORS_TEXT: list[dict[str, Any]] = [
    {"annotations": {"kubernetes.io/config.source": "file"}},
    {"annotations": {"kubernetes.io/config.mirror": "hash", "kubernetes.io/config.hash": "hash"}},
    {"priority_class": "system-node-critical", "priority": 0},
    {"owner": Owner("DaemonSet", "log", "ds", "example.com/v1")},
    {"labels": {"tier": "gold"}},
    {"annotations": {"nodeagent.io/keep": "yes"}},
    {"annotations": {"nodeagent.io/evict": "never"}},
]


@pytest.mark.parametrize("of", AUTHORS_TEXT)
@pytest.mark.parametrize("tier", list(Tier))
def test_text_of_a_pods_author_protects_it_only_in_trusted_namespaces(of: dict[str, Any], tier: Tier) -> None:
    rules = ProtectionConfig(
        labels=("tier=gold",), annotations=("nodeagent.io/keep",), trusted_namespaces=("platform",), bare_pods=False
    )
    assert codes(pod("a", **of), rules, tier=tier) == []


@pytest.mark.parametrize("trusted", ["shop", "*"])
@pytest.mark.parametrize("code", ["label", "annotation", "evict-never"])
def test_trusted_namespaces_are_listed_by_name_or_all(code: str, trusted: str) -> None:
    _, of, switch = next(row for row in SWITCHED if row[0] == code)
    rules = NOTHING._replace(**switch | {"trusted_namespaces": (trusted,)})
    assert codes(pod("a", **of | {"namespace": "shop"}), rules) == [code]


SWITCHED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("unknown-pod", {"source": PodSource.HOST}, {"unknown_pods": True}),
    ("daemon-set", {"owner": Owner("DaemonSet", "log", "ds")}, {"daemon_sets": True}),
    ("namespace", {"namespace": "kube-system"}, {"namespaces": ("kube-system",)}),
    ("bare-pod", {"owner": None}, {"bare_pods": True}),
    ("node-bound", {"node_bound": "local volume data"}, {"node_bound": True}),
    ("claims-unknown", {"claims_unknown": "whether its claim data is local is not known"}, {"node_bound": True}),
    ("label", {"labels": {"tier": "gold"}}, {"labels": ("tier=gold",), "trusted_namespaces": ("shop",)}),
    ("label", {"labels": {"tier": "lead"}}, {"labels": ("tier",), "trusted_namespaces": ("shop",)}),
    (
        "annotation",
        {"annotations": {"nodeagent.io/keep": "yes"}},
        {"annotations": ("nodeagent.io/keep=yes",), "trusted_namespaces": ("shop",)},
    ),
    ("too-young", {"age_s": 30.0}, {"minimum_age_s": 60.0}),
    ("too-young", {"age_s": -30.0}, {"minimum_age_s": 60.0}),
    ("disruption-budget", {"disruption_budgets": (DisruptionBudget("b", 0),)}, {"disruption_budgets": True}),
    (
        "evict-never",
        {"annotations": {"nodeagent.io/evict": "never"}, "namespace": "trusted"},
        {"trusted_namespaces": ("trusted",)},
    ),
]


@pytest.mark.parametrize(("code", "of", "switch"), SWITCHED)
def test_a_configurable_protection_applies_only_if_it_is_switched_on(
    code: str, of: dict[str, Any], switch: dict[str, Any]
) -> None:
    assert codes(pod("a", **of), NOTHING._replace(**switch)) == [code]
    assert codes(pod("a", **of), NOTHING) == []


def test_a_label_with_another_value_does_not_protect() -> None:
    assert (
        codes(pod("a", labels={"tier": "lead"}), NOTHING._replace(labels=("tier=gold",), trusted_namespaces=("*",)))
        == []
    )


@pytest.mark.parametrize("code", ["disruption-budget", "evict-never"])
def test_pdbs_and_preferences_do_not_protect_in_the_hard_tier(code: str) -> None:
    of, switch = next((of, switch) for each, of, switch in SWITCHED if each == code)
    assert codes(pod("a", **of), NOTHING._replace(**switch), tier=Tier.HARD) == []


def test_a_pdb_that_allows_a_disruption_does_not_protect() -> None:
    assert codes(pod("a", disruption_budgets=(DisruptionBudget("b", 1),))) == []


def test_a_pdb_that_lets_pods_go_that_are_not_ready_protects_the_ready_ones_alone() -> None:
    lets_go = (DisruptionBudget("b", 0, unready_allowed=True),)
    assert codes(pod("a", disruption_budgets=lets_go, ready=True)) == ["disruption-budget"]
    assert codes(pod("a", disruption_budgets=lets_go, ready=False)) == []
    both = (*lets_go, DisruptionBudget("c", 0))
    assert codes(pod("a", disruption_budgets=both, ready=False)) == ["disruption-budget"]


@pytest.mark.parametrize("preference", ["never", "prefer", "avoid"])
def test_a_preference_outside_the_trusted_namespaces_is_ignored(preference: str) -> None:
    of = pod("a", annotations={"nodeagent.io/evict": preference})
    assert codes(of) == []
    assert protection.eviction_preference(of, ProtectionConfig(), tier=Tier.SOFT) == 0.0


@pytest.mark.parametrize(("preference", "value"), [("prefer", -1.0), ("avoid", 1.0), ("nonsense", 0.0)])
def test_a_trusted_preference_moves_a_pod_except_in_the_hard_tier(preference: str, value: float) -> None:
    of, rules = pod("a", annotations={"nodeagent.io/evict": preference}), ProtectionConfig(trusted_namespaces=("shop",))
    assert protection.eviction_preference(of, rules, tier=Tier.SOFT) == value
    assert protection.eviction_preference(of, rules, tier=Tier.HARD) == 0.0


def test_the_age_of_the_cgroup_counts_before_the_timestamps_of_the_api() -> None:
    of = pod("a", age_s=3600.0)
    assert codes(of, used=usage(of, 1, started_at=NOW - 10)) == ["too-young"]


def test_a_young_pod_is_not_protected_in_the_hard_tier_because_it_is_often_the_cause() -> None:
    assert codes(pod("a", age_s=1.0), tier=Tier.SOFT) == ["too-young"]
    assert codes(pod("a", age_s=1.0), tier=Tier.HARD) == []


@pytest.mark.parametrize("started", [None, float("nan")])
def test_a_pod_of_unknown_age_is_too_young(started: float | None) -> None:
    assert codes(pod("a", started_wall=started, created_wall=None)) == ["too-young"]


def test_unknown_usage_protects() -> None:
    of = pod("a")
    assert codes(of, used=usage(of, None)) == ["usage-unknown"]
    assert [each.code for each in protection.momentary_refusals(of, None, None, rule_context(NOTHING))] == [
        "not-running"
    ]


def test_a_pod_has_all_its_refusals() -> None:
    of = pod("a", namespace="kube-system", owner=Owner("DaemonSet", "log", "ds"), age_s=1.0)
    assert codes(of) == ["daemon-set", "namespace", "too-young"]


def test_every_rule_has_its_own_code() -> None:
    rows = [row.code for row in protection.OBJECT_RULES] + [row.code for row in protection.MOMENTARY_RULES]
    assert len(set(rows)) == len(rows)


def test_every_switch_is_a_key_of_the_configuration() -> None:
    fields = {name.removesuffix("_s").replace("_", "") for name in ProtectionConfig._fields}
    for row in (*protection.OBJECT_RULES, *protection.MOMENTARY_RULES):
        if row.code.config_key:
            assert row.code.config_key.removeprefix("protection.").lower() in fields


@pytest.mark.parametrize("tier", list(Tier))
def test_a_pod_of_the_system_partition_is_protected_in_both_tiers_unless_switched_off(tier: Tier) -> None:
    of = pod("dns")
    used = usage(of, 100)._replace(system_partition=True)
    assert codes(of, ProtectionConfig(), tier=tier, used=used) == ["system-partition"]
    assert codes(of, ProtectionConfig(system_partition=False), tier=tier, used=used) == []
