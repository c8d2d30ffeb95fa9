"""Authentication, reviews and tokens."""

import time
import uuid
from typing import TYPE_CHECKING

from tests.fake_kube import authorizer, impersonation, messages, writes
from tests.fake_kube.authorizer import Attributes
from tests.fake_kube.messages import Answer, Json, RefusedError, Request, Target

if TYPE_CHECKING:
    from tests.fake_kube.server import ApiServer

NOBODY = "system:serviceaccount:default:nobody-sa"


def authenticate(api: "ApiServer", request: Request) -> str:
    """The user of the credentials."""
    authorization = request.headers.get("authorization", "")
    if not authorization:
        return "system:anonymous"
    user = api.tokens.get(authorization.partition(" ")[2])
    if user is None:
        raise RefusedError(401, "Unauthorized", "Unauthorized")
    return user


def acting_user(api: "ApiServer", request: Request) -> str:
    """The user that an authorized request acts as: the impersonated one, or that of the credentials."""
    return impersonation.wanted_user(request) or authenticate(api, request)


def review(api: "ApiServer", request: Request, user: str, target: Target) -> Answer:
    body: Json = {"kind": target.kind, "apiVersion": target.api_version, "metadata": {}}
    spec = {k: v for k, v in (request.body.get("spec") or {}).items() if v is not None}
    writes.set_managers({**body, "spec": spec}, {}, request, target)
    if target.resource == "selfsubjectreviews":
        body["metadata"] = {"creationTimestamp": messages.rfc3339()}
        body["status"] = {"userInfo": user_info(api, user, request)}
    elif target.resource == "tokenreviews":
        known = api.tokens.get(spec["token"])
        body["spec"] = spec
        body["status"] = {"user": {}, "error": "invalid bearer token"}
        if known:
            audiences = ["https://kubernetes.default.svc"]
            body["status"] = {"authenticated": True, "user": user_info(api, known), "audiences": audiences}
    elif target.resource == "selfsubjectrulesreviews":
        # No recording: pkg/registry/authorization/selfsubjectrulesreview/rest.go.
        body["spec"] = {}
        body["status"] = rules_review(api, user, spec.get("namespace", ""))
    else:
        # Of a SelfSubjectAccessReview there is no recording; it is taken to have the form of the recorded one.
        about = user if target.resource == "selfsubjectaccessreviews" else spec["user"]
        decision = authorizer.decide(api, about, asked_by(api, spec["resourceAttributes"]))
        body["spec"] = spec
        body["status"] = {"allowed": decision.allowed, **({"reason": decision.reason} if decision.reason else {})}
    return Answer(201, body)


def asked_by(api: "ApiServer", attributes: Json) -> Attributes:
    """The attributes of a review. Field selectors count from 1.32 on (AuthorizeWithSelectors)."""
    requirements = attributes.get("fieldSelector", {}).get("requirements", ()) if api.minor >= 32 else ()
    return Attributes(
        attributes["verb"],
        attributes.get("group", ""),
        "/".join(filter(None, (attributes["resource"], attributes.get("subresource")))),
        attributes.get("namespace", ""),
        attributes.get("name", ""),
        frozenset((each["key"], each["values"][0]) for each in requirements if each["operator"] == "In"),
    )


def rules_review(api: "ApiServer", user: str, namespace: str) -> Json:
    """The rules that apply in a namespace, as far as authorizers list theirs: the Node authorizer does not."""
    if not namespace:
        raise RefusedError(400, "BadRequest", "no namespace on request")
    rules = [rule for _, rule in authorizer.rules_of(api, user, namespace)]
    if user == authorizer.AGENT:
        rules = [{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}]
    for group, resource in sorted(authorizer.SELF_REVIEWS):
        rules.append({"verbs": ["create"], "apiGroups": [group], "resources": [resource]})
    discovery = [
        "/api",
        "/api/*",
        "/apis",
        "/apis/*",
        "/healthz",
        "/livez",
        "/openapi",
        "/openapi/*",
        "/readyz",
        "/version",
    ]
    status: Json = {
        "resourceRules": rules,
        "nonResourceRules": [{"verbs": ["get"], "nonResourceURLs": discovery}],
        "incomplete": False,
    }
    if user.startswith(authorizer.NODE_USER):
        status |= {"incomplete": True, "evaluationError": "node authorizer does not support user rule resolution"}
    return status


def user_info(api: "ApiServer", user: str, request: Request | None = None) -> Json:
    if not user.startswith("system:serviceaccount:"):
        if not user.startswith(authorizer.NODE_USER):
            return {"username": user, "groups": ["system:authenticated"]}
        info: Json = {"username": user, "groups": ["system:nodes", "system:authenticated"]}
        if api.minor >= 32 and not (request is not None and impersonation.wanted_user(request)):
            # Of its certificate (k8s.io/apiserver, pkg/authentication/request/x509/x509.go). Impersonated, it has none.
            info["extra"] = {"authentication.kubernetes.io/credential-id": [f"X509SHA256={'0' * 64}"]}
        return info
    namespace = user.split(":")[2]
    extra = {"authentication.kubernetes.io/credential-id": [f"JTI={uuid.uuid4()}"]}
    token = request.headers.get("authorization", "").partition(" ")[2] if request is not None else ""
    if token in api.token_nodes:
        extra["authentication.kubernetes.io/node-name"] = [api.token_nodes[token]]
    return {
        "username": user,
        "uid": str(uuid.uuid4()),
        "groups": ["system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated"],
        "extra": extra,
    }


def request_token(api: "ApiServer", request: Request, target: Target) -> Answer:
    bound = request.body["spec"].get("boundObjectRef")
    pod = api.store.objects["pods"][target.namespace, bound["name"]] if bound else {"spec": {"nodeName": ""}}
    token = api.token_of(target.namespace, target.name, node=pod["spec"]["nodeName"])
    seconds = request.body["spec"]["expirationSeconds"]
    metadata = {"name": target.name, "namespace": target.namespace, "uid": str(uuid.uuid4())}
    writes.set_managers({**request.body, "metadata": metadata}, {}, request, target)
    spec = {"audiences": ["https://kubernetes.default.svc"], "expirationSeconds": seconds, "boundObjectRef": None}
    return Answer(
        201,
        {
            "kind": "TokenRequest",
            "apiVersion": "authentication.k8s.io/v1",
            "metadata": {**metadata, "creationTimestamp": messages.rfc3339()},
            "spec": spec,
            "status": {"token": token, "expirationTimestamp": messages.rfc3339(time.time() + seconds)},
        },
    )
