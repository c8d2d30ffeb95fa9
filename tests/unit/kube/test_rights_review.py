"""`check --rights` asks the API server for each right of the configuration: missing ones, those through impersonation,
those beyond need."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent.config.schema import ClusterConfig, ClusterIdentity, Config, FleetConfig, Mode, ProtectionConfig
from nodeagent.kube import rights, rights_review
from nodeagent.kube.access_reviews import GrantedRule
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.credentials import find_credentials
from nodeagent.kube.rights import Rule
from nodeagent.kube.rights_review import RequestMode, RightsReview, RightsState, Verdict
from nodeagent.kube.transport import connect
from tests.fake_kube import ApiServer, node_object

ENFORCE = Config(mode=Mode.ENFORCE, node_name="n1")
USED = rights.used_by(ENFORCE)
DIRECT = rights.direct_rules(USED)
IMPERSONATING = rights.impersonation_rules(USED)
ACCOUNT = ENFORCE._replace(cluster=ClusterConfig(identity=ClusterIdentity.SERVICE_ACCOUNT))
ONLY_NODE = ENFORCE._replace(cluster=ClusterConfig(identity=ClusterIdentity.NODE))


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer(node=node_object("n1")) as server:
        yield server


def review(
    api: ApiServer, tmp_path: Path, rules: frozenset[Rule], *, config: Config = ENFORCE, pod_of: str = "n1"
) -> RightsReview:
    """By a token of the account `agent` that is granted these rules, of a pod on the node `pod_of`."""
    api.grant("agent", rules)
    return review_with(api, tmp_path, api.token_of("kube-system", "agent", node=pod_of), config)


def review_with(api: ApiServer, tmp_path: Path, token: str, config: Config = ENFORCE) -> RightsReview:
    transport = connect(find_credentials(str(api.kubeconfig(tmp_path / "kubeconfig", token=token))))
    try:
        return rights_review.review(transport, config, host_name="this-host")
    finally:
        transport.close()


def missing(found: RightsReview) -> set[str]:
    return {each.right.name for each in found.missing}


def test_an_account_that_acts_as_its_node_has_every_right_and_none_beyond(api: ApiServer, tmp_path: Path) -> None:
    found = review(api, tmp_path, IMPERSONATING)
    assert (found.state, found.mode, found.missing, found.beyond, found.notes) == (
        RightsState.OK,
        RequestMode.IMPERSONATION,
        (),
        (),
        (),
    )
    by_name = {each.right.name: each for each in found.rights}
    assert by_name["list pods"].through == "as system:node:n1, ClusterRole kube-system-agent"
    assert by_name["patch nodes"].through == "ClusterRole kube-system-agent"
    assert by_name["get persistentvolumes"].verdict is Verdict.NOT_ASKED
    assert len(found.rights) == len(USED)  # impersonation instead of the review's own right
    assert {request.method for request in api.requests} == {"POST", "GET"}
    assert not [request for request in api.requests if "/pods/" in request.path]


def test_an_account_with_direct_rights_is_complete_on_an_older_server(tmp_path: Path) -> None:
    with ApiServer(node=node_object("n1"), minor=35) as old:
        found = review(old, tmp_path, DIRECT)
        both = review(old, tmp_path, DIRECT | IMPERSONATING)
    assert (found.state, found.mode, found.missing, found.beyond) == (RightsState.OK, RequestMode.ACCOUNT, (), ())
    assert both.beyond == (), "the rights for the time after an upgrade"
    assert found.notes == (
        "requests are sent as the ServiceAccount: the API server has no constrained impersonation (Kubernetes 1.36)",
    )


def test_direct_rights_on_pods_are_beyond_need_where_the_account_can_act_as_its_node(
    api: ApiServer, tmp_path: Path
) -> None:
    found = review(api, tmp_path, IMPERSONATING | DIRECT)
    assert found.state is RightsState.WARNING
    beyond = {(rule.verb, rule.resource) for rule in found.beyond}
    assert {("list", "pods"), ("watch", "pods"), ("create", "pods/eviction")} <= beyond
    assert ("patch", "nodes") not in beyond


def test_a_right_that_no_key_uses_is_beyond_need(api: ApiServer, tmp_path: Path) -> None:
    found = review(api, tmp_path, IMPERSONATING | {Rule("get", "", "secrets")})
    assert (found.state, found.beyond) == (RightsState.WARNING, (GrantedRule("get", "", "secrets"),))
    assert "other namespaces than kube-system and nodeagent" in found.beyond_limit
    off = ENFORCE._replace(protection=ProtectionConfig(disruption_budgets=False))
    assert {rule.resource for rule in review(api, tmp_path, IMPERSONATING, config=off).beyond} == {
        "poddisruptionbudgets"
    }


def test_what_the_server_gives_every_account_is_not_beyond_need(api: ApiServer, tmp_path: Path) -> None:
    """ClusterRole system:cluster-trust-bundle-discovery, with the feature ClusterTrustBundle."""
    bundles = {Rule(verb, "certificates.k8s.io", "clustertrustbundles") for verb in ("get", "list", "watch")}
    found = review(api, tmp_path, IMPERSONATING | bundles)
    assert (found.state, found.beyond) == (RightsState.OK, ())


def test_the_right_to_configz_is_needed_only_with_above_kubelet(api: ApiServer, tmp_path: Path) -> None:
    proxy = IMPERSONATING | {rights.CONFIGZ.rule}
    assert review(api, tmp_path, proxy).beyond == ()
    off = review(api, tmp_path, proxy, config=ENFORCE._replace(above_kubelet=False))
    assert off.beyond == (GrantedRule("get", "", "nodes/proxy"),)


def test_in_a_dry_run_the_rights_that_write_are_beyond_need(api: ApiServer, tmp_path: Path) -> None:
    found = review(api, tmp_path, IMPERSONATING, config=Config(node_name="n1"))
    assert found.state is RightsState.WARNING
    beyond = {(rule.verb.rpartition(":")[2], rule.resource) for rule in found.beyond}
    assert {("create", "pods/eviction"), ("patch", "nodes/status"), ("create", "events")} <= beyond
    assert not {("list", "pods"), ("list", "poddisruptionbudgets")} & beyond
    assert found.notes == ("mode is dry-run: rights that only `enforce` uses count as beyond need",)


def test_a_missing_required_right_is_critical_and_names_its_rule(api: ApiServer, tmp_path: Path) -> None:
    lost = Rule("impersonate-on:associated-node:create", "", "pods/eviction")
    found = review(api, tmp_path, IMPERSONATING - {lost})
    assert (found.state, missing(found)) == (RightsState.CRITICAL, {"create pods/eviction"})
    assert found.cannot_act.startswith("missing rule: ")
    [evictions] = found.missing
    assert evictions.through == (
        'apiGroups: [""], resources: [pods/eviction], verbs: ["impersonate-on:associated-node:create"]'
    )


def test_a_missing_right_of_one_feature_is_a_warning(api: ApiServer, tmp_path: Path) -> None:
    found = review(api, tmp_path, IMPERSONATING - {Rule("patch", "", "nodes")})
    assert (found.state, missing(found)) == (RightsState.WARNING, {"patch nodes"})


def test_eviction_slots_are_required_where_they_are_configured(api: ApiServer, tmp_path: Path) -> None:
    fleet = ENFORCE._replace(fleet=FleetConfig(max_concurrent_evictions=1, lease_namespace="leases"))
    found = review(api, tmp_path, IMPERSONATING, config=fleet)
    assert found.state is RightsState.CRITICAL
    assert {name.partition(" ")[2] for name in missing(found)} == {"leases.coordination.k8s.io"}
    asked = [r.body["spec"]["resourceAttributes"] for r in api.sent("POST", "/selfsubjectaccessreviews")]
    assert {each["namespace"] for each in asked if each["resource"] == "leases"} == {"leases"}


def test_without_the_right_to_impersonate_the_account_is_used_where_it_may(api: ApiServer, tmp_path: Path) -> None:
    """As the agent does with `auto`; with `node` it does nothing."""
    partial = IMPERSONATING - {Rule("impersonate-on:associated-node:watch", "", "pods")} | {Rule("watch", "", "pods")}
    found = review(api, tmp_path, partial)
    [watch] = [each for each in found.rights if each.right.name == "watch pods"]
    assert (found.state, found.mode) == (RightsState.WARNING, RequestMode.IMPERSONATION)
    assert (watch.verdict, watch.through) == (Verdict.YES, "ClusterRole kube-system-agent")
    assert 'verbs: ["impersonate-on:associated-node:watch"]' in watch.fallback
    strict = review(api, tmp_path, partial, config=ONLY_NODE)
    assert (strict.state, missing(strict)) == (RightsState.CRITICAL, {"watch pods"})


def test_with_direct_rights_alone_every_request_is_the_accounts_and_that_is_a_warning(
    api: ApiServer, tmp_path: Path
) -> None:
    found = review(api, tmp_path, DIRECT)
    assert (found.state, found.mode, found.missing, found.beyond) == (
        RightsState.WARNING,
        RequestMode.ACCOUNT,
        (),
        (),
    )
    [note] = found.notes
    assert note.startswith("requests are sent as the ServiceAccount: missing rule for ")
    fallbacks = {each.right.name for each in found.rights if each.fallback}
    assert {"list pods", "create pods/eviction", "get persistentvolumes"} <= fallbacks
    assert not {"patch nodes", "create events.events.k8s.io"} & fallbacks
    assert review(api, tmp_path, DIRECT, config=ACCOUNT).state is RightsState.OK


def test_as_the_agent_falls_back_as_a_whole_the_account_needs_all_of_its_rights(api: ApiServer, tmp_path: Path) -> None:
    """It may list pods, and not evict as its node: then every request is its own, and it may not read its Node."""
    lost = Rule("impersonate-on:associated-node:create", "", "pods/eviction")
    found = review(api, tmp_path, IMPERSONATING - {lost} | {Rule("list", "", "pods")})
    assert (found.state, found.mode) == (RightsState.CRITICAL, RequestMode.ACCOUNT)
    assert {"create pods/eviction", "get nodes", "watch pods"} <= missing(found)
    assert "list pods" not in missing(found)


def test_what_the_node_may_do_is_assumed_if_the_review_itself_is_not_allowed(api: ApiServer, tmp_path: Path) -> None:
    without = IMPERSONATING - {
        Rule("impersonate-on:associated-node:create", "authorization.k8s.io", "selfsubjectaccessreviews")
    }
    found = review(api, tmp_path, without)
    assert (found.state, found.missing) == (RightsState.OK, ())
    [note] = found.notes
    assert note.startswith("what system:node:n1 itself may do was not asked: missing rule for ")
    assert len([r for r in api.sent("POST", "/selfsubjectaccessreviews") if "impersonate-user" in r.headers]) == 1


def test_a_right_that_the_node_itself_lacks_is_missing(api: ApiServer, tmp_path: Path) -> None:
    api.forbid("patch", "nodes/status")
    found = review(api, tmp_path, IMPERSONATING)
    assert (found.state, missing(found)) == (RightsState.CRITICAL, {"patch nodes/status"})


def test_node_credentials_need_no_taint_and_lack_pdbs(api: ApiServer, tmp_path: Path) -> None:
    api.tokens["kubelet"] = "system:node:n1"
    found = review_with(api, tmp_path, "kubelet", ENFORCE._replace(node_name=""))
    assert (found.node, found.mode, found.state) == ("n1", RequestMode.NODE_CREDENTIALS, RightsState.WARNING)
    assert missing(found) == {"list poddisruptionbudgets.policy", "watch poddisruptionbudgets.policy"}
    names = {each.right.name for each in found.rights}
    assert "create events" in names
    assert not {"patch nodes", "create events.events.k8s.io"} & names
    assert {each.through for each in found.rights if each.verdict is Verdict.YES} == {"the Node authorizer"}
    assert found.beyond == ()
    assert "rights of a kubelet" in found.beyond_limit
    assert [each.verdict for each in found.rights if "persistentvolume" in each.right.name] == [Verdict.NOT_ASKED] * 2
    assert not [each for each in found.rights if each.right.purpose == rights.FIND_NODE]


def test_an_administrator_has_more_than_needed(api: ApiServer, tmp_path: Path) -> None:
    found = review_with(api, tmp_path, api.token, ENFORCE._replace(node_name=""))
    assert (found.node, found.mode, found.state) == ("this-host", RequestMode.ACCOUNT, RightsState.WARNING)
    assert found.beyond == (GrantedRule("*", "*", "*"),)
    assert rights.FIND_NODE in {each.right.purpose for each in found.rights}


@pytest.mark.parametrize(
    ("config", "pod_of", "minor", "note"),
    [
        (ONLY_NODE, "", 36, "the token names no node"),
        (ONLY_NODE, "n1", 35, "the API server has no constrained impersonation"),
        (ENFORCE, "n2", 36, "the node is n1, but the credentials belong to n2"),
    ],
)
def test_credentials_with_which_the_agent_evicts_nothing_are_critical(
    tmp_path: Path, config: Config, pod_of: str, minor: int, note: str
) -> None:
    with ApiServer(node=node_object("n1"), minor=minor) as api:
        api.add_node(node_object("n2"))
        found = review(api, tmp_path, IMPERSONATING | DIRECT, config=config, pod_of=pod_of)
    assert note in found.cannot_act
    assert found.state is RightsState.CRITICAL


def test_a_right_without_an_answer_is_unknown_and_the_rest_is_still_asked(api: ApiServer, tmp_path: Path) -> None:
    api.grant("agent", IMPERSONATING)
    broken = rights_review_of_a_server_that_fails_for(api, tmp_path, "poddisruptionbudgets")
    assert broken.state is RightsState.UNKNOWN
    assert {each.right.name for each in broken.unknown} == {
        "list poddisruptionbudgets.policy",
        "watch poddisruptionbudgets.policy",
    }


def rights_review_of_a_server_that_fails_for(api: ApiServer, tmp_path: Path, resource: str) -> RightsReview:
    from tests.fake_kube import Answer, Request

    def fail(request: Request) -> Answer | None:
        spec = request.body.get("spec", {}) if isinstance(request.body, dict) else {}
        attributes = spec.get("resourceAttributes", {})
        return Answer(503, b"down", "text/plain") if attributes.get("resource") == resource else None

    api.instead = fail
    return review_with(api, tmp_path, api.token_of("kube-system", "agent", node="n1"))


def test_all_requests_end_within_the_time_and_the_rest_is_unknown(api: ApiServer, tmp_path: Path) -> None:
    api.grant("agent", IMPERSONATING)
    token = api.token_of("kube-system", "agent", node="n1")
    transport = connect(find_credentials(str(api.kubeconfig(tmp_path / "kubeconfig", token=token))))
    times = iter([0.0, *[1.0] * 5])
    found = rights_review.review(
        transport, ENFORCE, host_name="n1", clock=lambda: next(times, rights_review.TOTAL_S + 1)
    )
    transport.close()
    assert found.state is RightsState.UNKNOWN
    assert {each.through for each in found.unknown} == {"not asked in time"}
    assert found.beyond_limit == "not asked in time"


def test_each_question_is_announced_before_it_is_asked(api: ApiServer, tmp_path: Path) -> None:
    api.grant("agent", IMPERSONATING)
    token = api.token_of("kube-system", "agent", node="n1")
    transport = connect(find_credentials(str(api.kubeconfig(tmp_path / "kubeconfig", token=token))))
    shown: list[tuple[str, int]] = []

    def show(text: str) -> None:
        shown.append((text, len(api.sent("POST", "/selfsubjectaccessreviews"))))

    rights_review.review(transport, ENFORCE, host_name="n1", on_progress=show)
    transport.close()
    assert "asking the API server: impersonate-on:associated-node:list pods" in [text for text, _ in shown]
    first = shown[0][1]
    assert [asked - first for _, asked in shown] == list(range(len(shown)))


def test_a_server_that_does_not_answer_at_all_is_an_error(api: ApiServer, tmp_path: Path) -> None:
    api.go_down()
    with pytest.raises(ApiError):
        review(api, tmp_path, IMPERSONATING)
