"""Which of the rights that a configuration uses the credentials have, through what, and what they have beyond.

The rights are those of `rights.RIGHTS`; the API server answers by access reviews, one request for each right and
identity, each with its own deadline and all within `TOTAL_S`. What was not answered in time is unknown.

Three kinds of credentials differ:

* a ServiceAccount or another user that acts as itself: one review for each right;
* a ServiceAccount whose requests impersonate its node: a request needs `impersonate-on` of the account, and the right
  itself of the node. The second is asked as the node, which needs `impersonate-on` for the review; without it the node
  is taken to have what the Node authorizer gives every node;
* a node's own credentials: the Node authorizer lists no rules, so that nothing is found beyond need.
"""

import enum
import re
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

from nodeagent.config.schema import ClusterIdentity, Config, Mode
from nodeagent.kube import access_reviews, identity_probe, impersonation, rights, user_review
from nodeagent.kube.access_reviews import GrantedRule
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.rights import Need, RequestIdentity, Right, Scope
from nodeagent.model import OutcomeKind

if TYPE_CHECKING:
    from nodeagent.kube.transport import Transport
    from nodeagent.kube.user_review import User

REQUEST_S: Final = 3.0
"""Longest wait for one answer."""
TOTAL_S: Final = 15.0
"""Longest time for all: about 40 requests of a few milliseconds each."""
_BINDING: Final = re.compile(r'RBAC: allowed by \S+ "[^"]*" of (\S+) "([^"]*)"')
"""plugin/pkg/auth/authorizer/rbac/rbac.go."""
_CHECK: Final = tuple(right for right in rights.RIGHTS if right.need is Need.CHECK)
_HARMLESS: Final = frozenset(
    (
        *(GrantedRule("create", group, resource) for group, resource in rights.EVERYBODY),
        *(GrantedRule(verb, "certificates.k8s.io", "clustertrustbundles") for verb in ("get", "list", "watch")),
    )
)
"""What the API server gives every ServiceAccount: reviews of itself, and, with the feature ClusterTrustBundle, public
certificates (ClusterRole system:cluster-trust-bundle-discovery)."""


class RequestMode(enum.StrEnum):
    """How requests about pods are sent with these credentials."""

    IMPERSONATION = "impersonation"
    """As the own node."""
    ACCOUNT = "account"
    """As the identity of the credentials."""
    NODE_CREDENTIALS = "nodeCredentials"
    """With the node's own credentials."""


class Verdict(enum.StrEnum):
    """Whether the credentials have a right."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"
    """The API server did not answer."""
    NOT_ASKED = "not asked"
    """No review can ask it; the Node authorizer allows it for the pods of the node."""


class RightsState(enum.StrEnum):
    """The result of a review, in the words of monitoring plugins."""

    OK = "ok"
    WARNING = "warning"
    CRITICAL = "critical"
    UNKNOWN = "unknown"


class ReviewedRight(NamedTuple):
    """One right with the answer."""

    right: Right
    verdict: Verdict
    through: str = ""
    """What grants it, or which rule is missing."""
    fallback: str = ""
    """Why the ServiceAccount sends it and not the node."""


class RightsReview(NamedTuple):
    """All rights of one configuration and one set of credentials."""

    node: str
    user: str
    """Empty if the API server does not report it."""
    mode: RequestMode
    rights: tuple[ReviewedRight, ...]
    beyond: tuple[GrantedRule, ...] = ()
    """Rules that this configuration does not use."""
    beyond_limit: str = ""
    """What `beyond` may lack."""
    notes: tuple[str, ...] = ()
    cannot_act: str = ""
    """Why the agent evicts nothing with these credentials, whatever its rights; empty if it does."""

    @property
    def missing(self) -> tuple[ReviewedRight, ...]:
        return tuple(each for each in self.rights if each.verdict is Verdict.NO)

    @property
    def unknown(self) -> tuple[ReviewedRight, ...]:
        return tuple(each for each in self.rights if each.verdict is Verdict.UNKNOWN)

    @property
    def state(self) -> RightsState:
        """Critical outranks warning, warning outranks unknown, unknown outranks ok."""
        if self.cannot_act or any(each.right.need is Need.REQUIRED for each in self.missing):
            return RightsState.CRITICAL
        lacks_feature = any(each.right.need is Need.FEATURE for each in self.missing)
        if self.beyond or lacks_feature or any(each.fallback for each in self.rights):
            return RightsState.WARNING
        return RightsState.UNKNOWN if self.unknown else RightsState.OK


def review(
    transport: "Transport",
    config: Config,
    *,
    host_name: str,
    on_progress: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> RightsReview:
    """Ask the API server. `host_name` is the node's name if neither the configuration nor the credentials have one.
    `on_progress` is called with a text before each request.

    Raises `ApiError` if the API server does not answer at all.
    """
    return _Reviewer(transport, config, on_progress, clock=clock).review(host_name)


class _Reviewer:
    """One review: the deadline and what does not change during it."""

    def __init__(
        self,
        transport: "Transport",
        config: Config,
        on_progress: Callable[[str], None],
        *,
        clock: Callable[[], float],
    ) -> None:
        self._transport = transport
        self._config = config
        self._on_progress = on_progress
        self._clock = clock
        self._deadline = clock() + TOTAL_S
        self._node = self._node_user = ""
        self._as_node = False
        self._may_impersonate = False
        self._may_ask_as_node = True
        self._notes: list[str] = []
        self._cannot_act = ""
        self._fallback = ""

    def review(self, host_name: str) -> RightsReview:
        user = user_review.fetch_user(self._transport)
        owner = user.node or _node_of(user.name)
        self._node = self._config.node_name or owner or host_name
        self._node_user = f"{impersonation.NODE_USER}{owner or self._node}"
        if owner and owner != self._node:
            self._cannot_act = f"the node is {self._node}, but the credentials belong to {owner}"
        used = self._used(owner)
        if self._config.mode is Mode.DRY_RUN:
            self._notes.append("mode is dry-run: rights that only `enforce` uses count as beyond need")
        mode = self._mode(user)
        if mode is RequestMode.IMPERSONATION:
            reviewed = self._review_impersonated(used)
        else:
            self._as_node = mode is RequestMode.NODE_CREDENTIALS
            reviewed = [self._review_direct(r) for r in (_with_node_credentials(used) if self._as_node else used)]
            reviewed = [self._with_fallback(each) for each in reviewed]
        beyond, limit = self._beyond(user, mode, used, reviewed)
        notes = tuple(self._notes)
        return RightsReview(self._node, user.name, mode, tuple(reviewed), beyond, limit, notes, self._cannot_act)

    def _used(self, owner: str) -> tuple[Right, ...]:
        """Without the look-up by address if the credentials are of one node, and without the review's own right."""
        return tuple(
            right
            for right in rights.used_by(self._config)
            if right.need is not Need.CHECK and not (owner and right.purpose == rights.FIND_NODE)
        )

    def _mode(self, user: "User") -> RequestMode:
        """As `identity_probe.choose` decides at the start of the agent."""
        if user.name.startswith(impersonation.NODE_USER):
            return RequestMode.NODE_CREDENTIALS
        wanted = self._config.cluster.identity
        if wanted is ClusterIdentity.SERVICE_ACCOUNT:
            return RequestMode.ACCOUNT
        trouble = unlimited = ""
        if user.node:
            result = identity_probe.probe(self._transport, user.node, evicts=self._config.mode is Mode.ENFORCE)
            trouble, unlimited = result.trouble, result.unlimited
        else:
            trouble = "the token names no node" if user.name else "the API server does not name the credentials' user"
        if wanted is ClusterIdentity.NODE and (trouble or unlimited):
            self._cannot_act = f"cluster.identity is node, but {trouble or unlimited}"
        elif unlimited:
            self._notes.append(f"the node's identity is no limit: {unlimited}")
        if not trouble:
            return RequestMode.IMPERSONATION
        if wanted is ClusterIdentity.NODE:
            return (
                RequestMode.IMPERSONATION if user.node and trouble != impersonation.NO_FEATURE else RequestMode.ACCOUNT
            )
        if trouble != impersonation.NO_FEATURE and user.node:
            if not identity_probe.with_direct_rights(self._transport, user.node, trouble)[0]:
                # Neither identity has the rights: the table shows what is missing for the better one.
                self._cannot_act = trouble
                return RequestMode.IMPERSONATION
            self._fallback = trouble
        self._notes.append(f"requests are sent as the ServiceAccount: {trouble}")
        return RequestMode.ACCOUNT

    # --- rights -----------------------------------------------------------------------------------------------------

    def _review_impersonated(self, used: Iterable[Right]) -> list[ReviewedRight]:
        own = self._ask(rights.IMPERSONATION, "")
        self._may_impersonate = own.verdict is Verdict.YES
        return [
            own,
            *(
                self._review_as_node(right) if right.identity is RequestIdentity.NODE else self._review_direct(right)
                for right in used
            ),
        ]

    def _review_as_node(self, right: Right) -> ReviewedRight:
        on = self._ask(right.impersonated, "")
        if on.verdict is Verdict.YES and self._may_impersonate:
            return self._review_nodes_own(right, on.through)
        refused = on if on.verdict is not Verdict.YES else ReviewedRight(right, Verdict.NO, rights.IMPERSONATION.name)
        if self._config.cluster.identity is ClusterIdentity.AUTO and refused.verdict is Verdict.NO:
            # The agent repeats such a request as the ServiceAccount.
            direct = self._ask(right, "")
            if direct.verdict is Verdict.YES:
                return direct._replace(fallback=f"missing rule: {refused.through}")
        return ReviewedRight(right, refused.verdict, refused.through)

    def _review_nodes_own(self, right: Right, through: str) -> ReviewedRight:
        as_node = f"as {self._node_user}"
        if right.scope is Scope.MOUNTED:
            return ReviewedRight(right, Verdict.NOT_ASKED, f"{as_node}, {through}: those of its own pods")
        if self._may_ask_as_node:
            asked = self._ask(right, self._node_user)
            if self._may_ask_as_node:
                through = f"{as_node}, {through}" if asked.verdict is Verdict.YES else f"{as_node}: {asked.through}"
                return asked._replace(through=through)
        return ReviewedRight(right, Verdict.YES, f"{as_node}, {through}")

    def _review_direct(self, right: Right) -> ReviewedRight:
        asked = self._ask(right, "")
        if right.scope is Scope.MOUNTED and asked.verdict is Verdict.NO and "No Object name" in asked.through:
            return asked._replace(
                verdict=Verdict.NOT_ASKED, through="the Node authorizer: those of the node's own pods"
            )
        return asked

    def _with_fallback(self, reviewed: ReviewedRight) -> ReviewedRight:
        as_node = reviewed.right.identity is RequestIdentity.NODE
        return reviewed._replace(fallback=self._fallback) if as_node else reviewed

    def _ask(self, right: Right, user: str) -> ReviewedRight:
        left_s = self._deadline - self._clock()
        if left_s <= 0:
            return ReviewedRight(right, Verdict.UNKNOWN, "not asked in time")
        self._on_progress(f"asking the API server: {right.name}")
        try:
            status = access_reviews.may(
                self._transport,
                right,
                node=self._node,
                lease_namespace=self._config.fleet.lease_namespace,
                user=user,
                timeout_s=min(REQUEST_S, left_s),
            )
        except ApiError as error:
            if user and error.kind is OutcomeKind.FORBIDDEN and impersonation.refusal_of(error.message):
                self._may_ask_as_node = False
                self._notes.append(
                    f"what {user} itself may do was not asked: {rights.missing_rule(error.message) or error.message}"
                )
            return ReviewedRight(right, Verdict.UNKNOWN, error.message)
        if status.allowed:
            return ReviewedRight(right, Verdict.YES, _granting(status.reason, as_node=self._as_node or bool(user)))
        rule = rights.rule_text(right.rule)
        return ReviewedRight(right, Verdict.NO, f"{rule} ({status.reason})" if status.reason else rule)

    # --- beyond need ------------------------------------------------------------------------------------------------

    def _beyond(
        self, user: "User", mode: RequestMode, used: tuple[Right, ...], reviewed: Iterable[ReviewedRight]
    ) -> tuple[tuple[GrantedRule, ...], str]:
        if mode is RequestMode.NODE_CREDENTIALS:
            return (), "the credentials are the node's: they have the rights of a kubelet, which are not listed"
        namespaces = dict.fromkeys((_namespace_of(user.name) or "default", self._config.fleet.lease_namespace))
        # Without effect until the API server has constrained impersonation: not too many before an upgrade.
        wants_node = self._config.cluster.identity is not ClusterIdentity.SERVICE_ACCOUNT
        needed = rights.impersonation_rules((*used, *_CHECK)) if wants_node else frozenset()
        if mode is RequestMode.ACCOUNT:
            needed |= rights.direct_rules(used)
        else:
            needed |= {each.right.rule for each in reviewed if each.fallback}
        if self._config.above_kubelet:
            needed |= {rights.CONFIGZ.rule}
        found: set[GrantedRule] = set()
        limits = [f"rules of RoleBindings in other namespaces than {' and '.join(namespaces)} are not listed"]
        for namespace in namespaces:
            left_s = self._deadline - self._clock()
            try:
                if left_s <= 0:
                    return (), "not asked in time"
                rules, incomplete = access_reviews.rules_in(
                    self._transport, namespace, timeout_s=min(REQUEST_S, left_s)
                )
            except ApiError as error:
                return (), f"not known: {error.message}"
            found.update(rules)
            if incomplete and incomplete not in limits:
                limits.append(incomplete)
        beyond = {rule for rule in found if (rule.verb, rule.group, rule.resource) not in needed} - _HARMLESS
        return tuple(sorted(beyond, key=lambda rule: (rule.group, rule.resource, rule.verb))), "; ".join(limits)


def _with_node_credentials(used: Iterable[Right]) -> list[Right]:
    """A node may set no taint, so that the agent does not try, and writes Events of the core group."""
    kept = [right for right in used if right.rule not in (rights.TAINT.rule, *rights.direct_rules(rights.EVENTS))]
    events = any(right in rights.EVENTS for right in used)
    return [*kept, *(rights.NODE_EVENTS if events else ())]


def _granting(reason: str, *, as_node: bool) -> str:
    """`ClusterRole nodeagent`, or the authorizer."""
    if match := _BINDING.match(reason):
        return f"{match[1]} {match[2]}"
    return reason or ("the Node authorizer" if as_node else "an authorizer that gives no reason")


def _node_of(user: str) -> str:
    return user.removeprefix(impersonation.NODE_USER) if user.startswith(impersonation.NODE_USER) else ""


def _namespace_of(user: str) -> str:
    return user.split(":")[2] if user.startswith(impersonation.ACCOUNT_USER) else ""
