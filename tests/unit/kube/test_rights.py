"""The table of rights: what a configuration uses, the rules that grant it, and the meaning of a 403."""

import json

import pytest

from nodeagent.config.schema import (
    ClusterConfig,
    ConditionsConfig,
    Config,
    EscalationConfig,
    FleetConfig,
    Mode,
    OnBlocked,
    ProtectionConfig,
    StandardConditions,
)
from nodeagent.kube import rights
from nodeagent.kube.rights import Need, RequestIdentity, Rule
from tests.support.paths import RECORDINGS

ENFORCE = Config(mode=Mode.ENFORCE, node_name="n1", cluster=ClusterConfig())


def names(config: Config) -> set[str]:
    return {right.name for right in rights.used_by(config)}


def test_a_dry_run_needs_no_right_that_writes() -> None:
    verbs = {right.verb for right in rights.used_by(Config(node_name="n1")) if not right.granted_to_all}
    assert verbs == {"get", "list", "watch"}


def test_each_feature_that_is_off_needs_no_right() -> None:
    off = ENFORCE._replace(
        conditions=ConditionsConfig(standard=StandardConditions.OFF, own=False, taint=False),
        protection=ProtectionConfig(disruption_budgets=False, node_bound=False),
    )
    assert names(ENFORCE) - names(off) == {
        "patch nodes",
        "patch nodes/status",
        "list poddisruptionbudgets.policy",
        "watch poddisruptionbudgets.policy",
        "get persistentvolumeclaims",
        "get persistentvolumes",
    }


def test_overriding_budgets_and_eviction_slots_need_further_rights() -> None:
    more = ENFORCE._replace(
        escalation=EscalationConfig(on_blocked=OnBlocked.DELETE), fleet=FleetConfig(max_concurrent_evictions=1)
    )
    assert names(more) - names(ENFORCE) == {
        "patch pods/status",
        "delete pods",
        "list leases.coordination.k8s.io",
        "create leases.coordination.k8s.io",
        "update leases.coordination.k8s.io",
    }


def test_all_nodes_are_listed_only_to_find_the_own_one() -> None:
    def listed(config: Config) -> list[rights.Scope]:
        return [right.scope for right in rights.used_by(config) if right.name == "list nodes"]

    assert listed(ENFORCE) == [rights.Scope.OWN_NODE]
    assert listed(ENFORCE._replace(node_name="")) == [rights.Scope.OWN_NODE, rights.Scope.ALL]


def test_no_right_is_in_the_table_twice() -> None:
    entries = [(right.rule, right.scope) for right in rights.RIGHTS]
    assert len(entries) == len(set(entries))


def test_without_a_required_right_evictions_or_conditions_fail() -> None:
    required = {right.name for right in rights.RIGHTS if right.need is Need.REQUIRED}
    assert {"list pods", "watch pods", "create pods/eviction", "patch nodes/status"} < required
    assert not {"patch nodes", "create events.events.k8s.io", "get persistentvolumes"} & required


def test_an_impersonating_account_has_no_direct_right_on_pods_evictions_claims_or_to_read_nodes() -> None:
    rules = rights.impersonation_rules(rights.used_by(ENFORCE))
    assert {rule for rule in rules if not rule.verb.startswith("impersonate")} == {
        Rule("patch", "", "nodes"),
        Rule("patch", "", "nodes/status"),
        Rule("create", "events.k8s.io", "events"),
        Rule("patch", "events.k8s.io", "events"),
        Rule("list", "policy", "poddisruptionbudgets"),
        Rule("watch", "policy", "poddisruptionbudgets"),
    }
    assert Rule("impersonate:associated-node", "authentication.k8s.io", "nodes") in rules
    assert Rule("impersonate-on:associated-node:create", "", "pods/eviction") in rules
    direct = rights.direct_rules(rights.used_by(ENFORCE))
    as_node = {right.rule for right in rights.used_by(ENFORCE) if right.identity is RequestIdentity.NODE}
    assert as_node <= direct | {Rule("create", "authorization.k8s.io", "selfsubjectaccessreviews")}


def test_what_every_identity_may_do_needs_no_rule() -> None:
    assert not {rule for rule in rights.direct_rules(rights.RIGHTS) if rule.group == "authorization.k8s.io"}


@pytest.mark.parametrize(
    ("recorded", "rule", "without"),
    [
        ("eviction-403", Rule("create", "", "pods/eviction"), "no pod is evicted"),
        ("forbidden-403-get-node", Rule("get", "", "nodes"), "the agent does not start"),
        ("node-status-patch-403", Rule("patch", "", "nodes/status"), "no pressure condition"),
        ("event-v1-create-403", Rule("create", "events.k8s.io", "events"), "no Events"),
    ],
)
def test_a_recorded_refusal_names_its_missing_rule_and_what_fails_without_it(
    recorded: str, rule: Rule, without: str
) -> None:
    answer = json.loads((RECORDINGS / f"{recorded}.json").read_text())["response"]
    denied = rights.denied(json.loads(answer["body"])["message"])
    assert denied is not None
    assert denied.rule == rule
    assert denied.user == "system:serviceaccount:default:nobody-sa"
    assert denied.right is not None
    assert denied.right.without.startswith(without)


def test_a_refused_impersonation_names_the_rule_of_the_service_account() -> None:
    text = (
        'pods is forbidden: User "system:serviceaccount:nodeagent:nodeagent" cannot '
        'impersonate-on:associated-node:list resource "pods" in API group "" at the cluster scope'
    )
    assert rights.missing_rule(text) == (
        'missing rule for system:serviceaccount:nodeagent:nodeagent: apiGroups: [""], resources: [pods], verbs: '
        '["impersonate-on:associated-node:list"]; without it: no pod is evicted: the agent does not know the pods of '
        "the node"
    )


def test_a_missing_right_to_impersonate_is_found_by_its_group() -> None:
    denied = rights.denied(
        'nodes.authentication.k8s.io "*" is forbidden: User "system:serviceaccount:a:b" cannot '
        'impersonate:associated-node resource "nodes" in API group "authentication.k8s.io" at the cluster scope'
    )
    assert denied is not None
    assert denied.right is rights.IMPERSONATION


def test_a_refusal_for_an_unknown_request_still_names_the_rule() -> None:
    text = 'secrets is forbidden: User "u" cannot list resource "secrets" in API group "" at the cluster scope'
    assert rights.missing_rule(text) == ('missing rule for u: apiGroups: [""], resources: [secrets], verbs: [list]')


def test_a_refusal_by_admission_names_no_rule() -> None:
    text = 'nodes "n2" is forbidden: node "n1" is not allowed to modify node "n2"'
    assert rights.denied(text) is None
    assert rights.missing_rule(text) == ""
