"""The report of `check --rights`: its first line, its table, what is missing and beyond need, and its JSON."""

import json
import re

from nodeagent.kube import rights
from nodeagent.kube.access_reviews import GrantedRule
from nodeagent.kube.rights import Need, Right
from nodeagent.kube.rights_review import RequestMode, ReviewedRight, RightsReview, Verdict
from nodeagent.report import rights_report, text
from tests.support import schemas

LIST, EVICT, TAINT = rights.RIGHTS[0], rights.RIGHTS[2], rights.TAINT
OK = RightsReview(
    "n1",
    "system:serviceaccount:nodeagent:nodeagent",
    RequestMode.IMPERSONATION,
    (
        ReviewedRight(LIST, Verdict.YES, "as system:node:n1, ClusterRole nodeagent"),
        ReviewedRight(TAINT, Verdict.YES, "ClusterRole nodeagent"),
    ),
    beyond_limit="RoleBindings elsewhere are not listed",
)
BAD = OK._replace(
    rights=(
        ReviewedRight(LIST, Verdict.YES, "ClusterRole nodeagent", fallback="missing: the rule"),
        ReviewedRight(EVICT, Verdict.NO, rights.rule_text(EVICT.rule)),
        ReviewedRight(TAINT, Verdict.UNKNOWN, "no answer within the deadline"),
    ),
    beyond=(GrantedRule("get", "", "secrets"), GrantedRule("update", "apps", "daemonsets", ("a", "b"))),
    notes=("requests are sent as the ServiceAccount",),
)


def lines(review: RightsReview) -> list[str]:
    return text.render(rights_report.report_sections(review)).splitlines()


def test_the_first_line_states_the_result_as_of_a_monitoring_plugin() -> None:
    assert lines(OK)[0] == "OK n1: the credentials have the 2 rights that the configuration uses, and no others"
    assert lines(BAD)[0] == (
        "CRITICAL n1: missing: create pods/eviction; more than needed: 2; "
        "sent as the ServiceAccount, not as the node: 1; unknown: 1"
    )
    fallback = OK._replace(rights=BAD.rights[:1])
    assert lines(fallback)[0] == "WARNING n1: sent as the ServiceAccount, not as the node: 1"
    cannot = OK._replace(cannot_act="the node is n1, but the credentials belong to n2")
    assert lines(cannot)[0] == "CRITICAL n1: the node is n1, but the credentials belong to n2"


def test_the_table_has_each_right_with_what_grants_it() -> None:
    rows = {re.split(r"  +", line)[0]: re.split(r"  +", line)[1:] for line in lines(BAD) if "  " in line}
    assert rows["RIGHT"] == ["NEEDED FOR", "HAS IT", "THROUGH"]
    granted = "ClusterRole nodeagent; as the ServiceAccount, missing: the rule"
    assert rows["list pods"] == ["the pods of this node", "yes", granted]
    rule = 'apiGroups: [""], resources: [pods/eviction], verbs: [create]'
    assert rows["create pods/eviction"] == ["evictions", "no", rule]
    assert rows["patch nodes"] == ["taints (conditions.taint)", "unknown", "no answer within the deadline"]


def test_a_missing_right_has_a_line_with_what_fails() -> None:
    table = lines(BAD)
    at = table.index("MISSING, AND WHAT FAILS WITHOUT IT")
    assert table[at + 1] == "create pods/eviction: no pod is evicted"
    assert "MISSING, AND WHAT FAILS WITHOUT IT" not in lines(OK)


def test_rights_beyond_need_are_listed_with_the_limit_of_the_list() -> None:
    table = lines(BAD)
    at = table.index("RIGHTS BEYOND NEED")
    assert table[at + 1 : at + 4] == [
        "get secrets: more than needed",
        "update daemonsets.apps (a, b): more than needed",
        "limit of this list: RoleBindings elsewhere are not listed",
    ]
    assert "none found" in lines(OK)


def test_names_from_outside_cannot_forge_a_line() -> None:
    forged = BAD._replace(
        user="a\nOK n1: fine", beyond=(GrantedRule("get\x1b[2J", "", "x", ("b\nc",)),), notes=("\x1b]0;x\x07",)
    )
    assert not [line for line in lines(forged) if line.startswith("OK ") or "\x1b" in line]


def test_the_json_matches_the_strict_schema() -> None:
    checker = schemas.strict(schemas.RIGHTS_SCHEMA_FILE)
    for review in (OK, BAD):
        document = json.loads(json.dumps(rights_report.to_json(review)))
        assert list(checker.iter_errors(document)) == []
    assert document["state"] == "critical"
    assert [each["has"] for each in document["rights"]] == ["yes", "no", "unknown"]
    assert [each["missing"] for each in document["rights"]] == [None, rights.rule_text(EVICT.rule), None]
    assert document["rights"][2]["unknownBecause"] == "no answer within the deadline"
    assert document["beyondNeed"][1] == {
        "verb": "update",
        "group": "apps",
        "resource": "daemonsets",
        "names": ["a", "b"],
    }


def test_the_schema_notices_a_field_that_it_does_not_name_and_an_unknown_state() -> None:
    checker = schemas.strict(schemas.RIGHTS_SCHEMA_FILE)
    document = rights_report.to_json(OK) | {"state": "fine", "extra": 1}
    assert len(list(checker.iter_errors(document))) == 2


def test_every_need_and_verdict_is_a_word_of_the_schema() -> None:
    checker = schemas.strict(schemas.RIGHTS_SCHEMA_FILE)
    every = tuple(ReviewedRight(Right(*LIST)._replace(need=need), verdict, "x") for need in Need for verdict in Verdict)
    for mode in RequestMode:
        assert not list(checker.iter_errors(rights_report.to_json(OK._replace(rights=every, mode=mode))))
