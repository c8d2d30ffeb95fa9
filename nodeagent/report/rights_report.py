"""The report of `check --rights` as sections of text and as one JSON object (`rights_report.schema.json`)."""

from typing import Any, Final

from nodeagent.kube import rights
from nodeagent.kube.access_reviews import GrantedRule
from nodeagent.kube.rights import Need
from nodeagent.kube.rights_review import RequestMode, ReviewedRight, RightsReview, RightsState, Verdict
from nodeagent.report import wording
from nodeagent.report.cells import BAD, DIM, GOOD, WARN, Cell, Column, Section

API_VERSION: Final = "nodeagent.io/v1alpha1"
KIND: Final = "RightsReport"

_STYLES: Final = {
    Verdict.YES: GOOD,
    Verdict.NO: BAD,
    Verdict.UNKNOWN: WARN,
    Verdict.NOT_ASKED: DIM,
}
_STATE_STYLES: Final = {
    RightsState.OK: GOOD,
    RightsState.WARNING: WARN,
    RightsState.CRITICAL: BAD,
    RightsState.UNKNOWN: WARN,
}
_MODES: Final = {
    RequestMode.IMPERSONATION: "requests about pods are sent as the node (constrained impersonation)",
    RequestMode.ACCOUNT: "every request is sent as this user, whose rights reach pods of other nodes",
    RequestMode.NODE_CREDENTIALS: "every request is sent with the node's own credentials",
}
_escape = wording.escape_terminal


def report_sections(review: RightsReview) -> tuple[Section, ...]:
    """All sections with content, in reading order."""
    every = (_head(review), _table(review), _missing(review), _beyond(review), _notes(review))
    return tuple(section for section in every if section.rows or section.lines)


def summary(review: RightsReview) -> str:
    """The first line, as of a monitoring plugin."""
    start = f"{review.state.upper()} {_escape(review.node)}: "
    parts = [_escape(review.cannot_act)] if review.cannot_act else []
    if review.missing:
        parts.append("missing: " + ", ".join(each.right.name for each in review.missing))
    if review.beyond:
        parts.append(f"more than needed: {len(review.beyond)}")
    if fallbacks := sum(bool(each.fallback) for each in review.rights):
        parts.append(f"sent as the ServiceAccount, not as the node: {fallbacks}")
    if review.unknown:
        parts.append(f"unknown: {len(review.unknown)}")
    if not parts:
        return f"{start}the credentials have the {len(review.rights)} rights that the configuration uses, and no others"
    return start + "; ".join(parts)


def to_json(review: RightsReview) -> dict[str, Any]:
    """The report as lists, dictionaries, strings, booleans and None."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "node": review.node,
        "user": review.user or None,
        "state": review.state.value,
        "requestMode": review.mode.value,
        "rights": [_right(each) for each in review.rights],
        "beyondNeed": [_rule(rule) for rule in review.beyond],
        "beyondNeedLimit": review.beyond_limit or None,
        "cannotAct": review.cannot_act or None,
        "notes": list(review.notes),
    }


def _right(each: ReviewedRight) -> dict[str, Any]:
    right = each.right
    return {
        "verb": right.verb,
        "group": right.group,
        "resource": right.resource,
        "scope": right.scope.value,
        "neededFor": right.purpose,
        "need": right.need.value,
        "has": each.verdict.value,
        "through": each.through if each.verdict in (Verdict.YES, Verdict.NOT_ASKED) else None,
        "missing": each.through if each.verdict is Verdict.NO else None,
        "unknownBecause": each.through if each.verdict is Verdict.UNKNOWN else None,
        "fallback": each.fallback or None,
        "without": right.without,
    }


def _rule(rule: GrantedRule) -> dict[str, Any]:
    return {"verb": rule.verb, "group": rule.group, "resource": rule.resource, "names": list(rule.names)}


def _head(review: RightsReview) -> Section:
    who = f"{_escape(review.user) or 'an unknown user'}: {_MODES[review.mode]}"
    return Section("", lines=(Cell(summary(review), _STATE_STYLES[review.state]), Cell(who)))


def _table(review: RightsReview) -> Section:
    columns = (Column("RIGHT"), Column("NEEDED FOR"), Column("HAS IT"), Column("THROUGH"))
    rows = tuple(
        (
            Cell(each.right.name),
            Cell(each.right.purpose, DIM),
            Cell(each.verdict.value, _STYLES[each.verdict]),
            Cell(_escape(f"{each.through}; as the ServiceAccount, {each.fallback}" if each.fallback else each.through)),
        )
        for each in review.rights
    )
    return Section("RIGHTS THAT THE CONFIGURATION USES", columns, rows)


def _missing(review: RightsReview) -> Section:
    lines = tuple(
        Cell(
            f"{each.right.name}: {_escape(each.right.without)}",
            BAD if each.right.need is Need.REQUIRED else WARN,
        )
        for each in review.missing
    )
    return Section("MISSING, AND WHAT FAILS WITHOUT IT", lines=lines)


def _beyond(review: RightsReview) -> Section:
    rows = tuple(
        Cell(f"{_escape(rule.verb)} {_escape(_resource(rule))}: more than needed", WARN) for rule in review.beyond
    )
    limit = (Cell(f"limit of this list: {_escape(review.beyond_limit)}", DIM),) if review.beyond_limit else ()
    return Section("RIGHTS BEYOND NEED", lines=(rows or (Cell("none found"),)) + limit)


def _resource(rule: GrantedRule) -> str:
    names = f" ({', '.join(rule.names)})" if rule.names else ""
    return f"{rights.resource_name(rule.group, rule.resource)}{names}"


def _notes(review: RightsReview) -> Section:
    return Section("NOTES", lines=tuple(Cell(_escape(note)) for note in review.notes))
