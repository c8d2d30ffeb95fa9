"""An API server double: real HTTP on loopback, held to recordings of a real kube-apiserver 1.36.2.

    with ApiServer(node="node-1", pods=[pod("hog", uid="...")]) as api:
        api.kubeconfig(tmp_path / "kubeconfig")     # a file for --kubeconfig
        ...run the agent...
        assert api.sent("POST", "/eviction")        # every request is kept in api.requests

What it does: pods, nodes, PodDisruptionBudgets, leases and events; list with field selectors, paging and versions;
watch with chunks, bookmarks and 410; evictions with budgets, preconditions, grace and dry run; DELETE; strategic merge
of node and pod status; taints under a resourceVersion; 401, 403, 409, 415, 422, 429 of both kinds, 500. An evicted pod
gets its deletionTimestamp and goes away after its grace (`linger_s` overrides it; None: only by `delete_pod`).

Knobs: `on_eviction(pod, body)` is called for each accepted eviction or delete, `at_request(request, done)` before and
after each request is carried out; `set_pdb`; `throttle(seconds)`;
`forbid("patch", "nodes/status")`; `tokens` (token -> user); `compact()` and `end_watches()`; `kubelet(every_s)` puts
False over a foreign pressure condition as a live kubelet does; `delay_s` for every answer; `go_down()`, `come_back()`.
"""

import base64
import copy
import json
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from urllib.request import urlopen

from tests.support import managed_fields

Json = dict[str, Any]

AGENT = "system:serviceaccount:kube-system:nodeagent"
NODE_USER = "system:node:"
NODE_RULES = {
    ("patch", "", "nodes"),
    ("patch", "", "nodes/status"),
    ("create", "", "pods/eviction"),
    ("patch", "", "pods/status"),
    ("delete", "", "pods"),
    ("create", "", "events"),
    ("patch", "", "events"),
}
"""What a node's credentials may do without a look at the object. No events.k8s.io, no budgets, no Leases of others."""
NOBODY = "system:serviceaccount:default:nobody-sa"
STRATEGIC = "application/strategic-merge-patch+json"
KUBELET_FALSE = {
    "MemoryPressure": ("KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
    "DiskPressure": ("KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
    "PIDPressure": ("KubeletHasSufficientPID", "kubelet has sufficient PID available"),
}


class Request(NamedTuple):
    """One request as it arrived."""

    method: str
    path: str
    """Without the query."""
    query: dict[str, str]
    headers: dict[str, str]
    """Names in lower case."""
    body: Any
    """Decoded JSON, or the bytes where it is none."""
    at: float
    """time.monotonic()."""
    connection: int
    """Same number, same TCP connection."""


class Answer(NamedTuple):
    status: int
    body: Any
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()


class RefusedError(Exception):
    """A Status with an error."""

    def __init__(self, code: int, reason: str, message: str, *, details: Json | None = None, retry: int = 0) -> None:
        super().__init__(message)
        status: Json = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message}
        if reason:
            status["reason"] = reason
        if details is not None:
            status["details"] = details
        status["code"] = code
        self.answer = Answer(code, status, headers=(("Retry-After", str(retry)),) if retry else ())


def pod(name: str, *, namespace: str = "default", node: str = "lab-node", uid: str = "", **fields: Any) -> Json:
    """A running pod. Fields: labels, annotations, owner (kind, name), priority, qos, requests, limits, phase, grace,
    spec (merged in), status (merged in)."""
    requests, limits = fields.get("requests", {}), fields.get("limits", {})
    metadata: Json = {
        "name": name,
        "namespace": namespace,
        "uid": uid or str(uuid.uuid4()),
        "creationTimestamp": fields.get("created", "2026-11-20T23:13:40Z"),
        "labels": fields.get("labels", {}),
        "annotations": fields.get("annotations", {}),
    }
    if owner := fields.get("owner"):
        metadata["ownerReferences"] = [
            {"apiVersion": "apps/v1", "kind": owner[0], "name": owner[1], "uid": f"uid-{owner[1]}", "controller": True}
        ]
    return {
        "metadata": metadata,
        "spec": {
            "containers": [{"name": "c", "image": "x", "resources": {"requests": requests, "limits": limits}}],
            "nodeName": node,
            "priority": fields.get("priority", 0),
            "terminationGracePeriodSeconds": fields.get("grace", 30),
            **fields.get("spec", {}),
        },
        "status": {
            "phase": fields.get("phase", "Running"),
            "qosClass": fields.get("qos", "BestEffort" if not requests else "Burstable"),
            "startTime": "2026-11-20T23:13:49Z",
            "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-11-20T23:13:53Z"}],
            "containerStatuses": [
                {
                    "name": "c",
                    "state": {"running": {"startedAt": "2026-11-20T23:13:53Z"}},
                    "restartCount": 0,
                    "containerID": f"containerd://{uuid.uuid4().hex}",
                }
            ],
            **fields.get("status", {}),
        },
    }


def node_object(name: str, *, address: str = "10.0.2.15") -> Json:
    """A Node as a kubelet without pressure keeps it."""
    then = "2026-11-20T23:12:04Z"
    conditions = [
        {
            "type": kind,
            "status": "False",
            "lastHeartbeatTime": then,
            "lastTransitionTime": then,
            "reason": reason,
            "message": message,
        }
        for kind, (reason, message) in KUBELET_FALSE.items()
    ]
    addresses = [{"type": "InternalIP", "address": address}, {"type": "Hostname", "address": name}]
    return {
        "kind": "Node",
        "apiVersion": "v1",
        "metadata": {"name": name, "uid": str(uuid.uuid4()), "labels": {"kubernetes.io/hostname": name}},
        "spec": {},
        "status": {"conditions": conditions, "addresses": addresses},
    }


class ApiServer:
    """The double. A context manager; everything is safe to call from any thread."""

    def __init__(
        self,
        *,
        node: str | Json = "lab-node",
        pods: Iterable[Json] = (),
        token: str = "agent-token",
        user: str = AGENT,
        first_version: int = 500,
        linger_s: float | None = -1.0,
        bookmark_s: float = 60.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.tokens: dict[str, str] = {token: user, "nobody-token": NOBODY}
        self.token = token
        self._token_nodes: dict[str, str] = {}
        """Nodes of the pods that tokens are bound to."""
        self.requests: list[Request] = []
        self.rights: Callable[[str, str, str, str], bool] | None = None
        """Asked for (verb, API group, resource/subresource, namespace) of each request of the agent's; None: allow."""
        self.pod_ports: dict[str, str] = {}
        """What answers for a port of a pod: `pod:port` to a URL."""
        self.admit: Callable[[Json, Json | None, Json | None], list[str]] | None = None
        """Asked for what admission policies have against a write: an AdmissionReview's request, the old object (None:
        it is created) and the new one (None: it is deleted)."""
        self.kubelet_configuration: Json = {}
        """What each node's kubelet says under /configz: its settings, as far as a test needs them."""
        self.on_eviction: Callable[[Json, Json], None] | None = None
        self.instead: Callable[[Request], Answer | None] | None = None
        """Asked first for each answer: what a proxy or a moment's trouble says in the server's place; None: nothing."""
        self.at_request: Callable[[Request, bool], None] | None = None
        """Called with each request, before it is carried out (False) and before it is answered (True)."""
        self.delay_s = 0.0
        self.linger_s = linger_s
        self.bookmark_s = bookmark_s
        self.store: dict[str, dict[tuple[str, str], Json]] = {kind: {} for kind in _KINDS}
        self.version = first_version
        self._oldest = first_version
        self._history: list[tuple[int, str, str, Json]] = []
        self._changed = threading.Condition(threading.RLock())
        self._watches = 0
        self._closing = False
        self._throttled: tuple[int, str] | None = None
        self._forbidden: set[tuple[str, str]] = set()
        self._connections: dict[Any, int] = {}
        self._timers: list[threading.Timer] = []
        self._kubelets: list[threading.Event] = []
        self.node_name = node if isinstance(node, str) else node["metadata"]["name"]
        self._put("nodes", node_object(node) if isinstance(node, str) else node, "ADDED")
        for entry in pods:
            self.add_pod(entry)
        double = self

        class Handler(_Handler):
            api = double

        self._tls = tls
        self._handler = Handler
        self._serve(0)

    def __enter__(self) -> "ApiServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- for tests --------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"http{'s' if self._tls is not None else ''}://127.0.0.1:{self._http.server_address[1]}"

    def close(self) -> None:
        """Stop serving and cut every connection."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for stop in self._kubelets:
            stop.set()
        for timer in self._timers:
            timer.cancel()
        self._hang_up()

    def go_down(self) -> None:
        """Refuse and cut every connection, until `come_back`; the objects stay."""
        self.end_watches()
        self._hang_up()

    def come_back(self) -> None:
        """Serve again, at the same address."""
        self._serve(self._http.server_address[1])

    def _serve(self, port: int) -> None:
        self._http = _Server(("127.0.0.1", port), self._handler)
        if self._tls is not None:
            # The handshake is left to the connection's own thread.
            self._http.socket = self._tls.wrap_socket(
                self._http.socket, server_side=True, do_handshake_on_connect=False
            )
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def _hang_up(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._http.cut()
        self._thread.join()

    def kubeconfig(self, path: Path, *, token: str | None = None) -> Path:
        """Write a kubeconfig for this server; returns its path."""
        user = {"token": self.token if token is None else token}
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "double",
                    "clusters": [{"name": "double", "cluster": {"server": self.url}}],
                    "users": [{"name": "double", "user": user}],
                    "contexts": [{"name": "double", "context": {"cluster": "double", "user": "double"}}],
                }
            )
        )
        return path

    def sent(self, method: str, ending: str = "") -> list[Request]:
        """The requests with this method whose path ends so, in order."""
        with self._changed:
            return [r for r in self.requests if r.method == method and r.path.endswith(ending)]

    def watched(self, path: str, *, since: int = 0) -> bool:
        """Whether this was watched in a request after so many: whoever watches has the list."""
        with self._changed:
            return any(r.path == path and "watch" in r.query for r in self.requests[since:])

    def wait_for(self, condition: Callable[[], Any], timeout_s: float = 30.0) -> bool:
        """Wait until the condition holds; looked at whenever a request came or an object changed."""
        with self._changed:
            return bool(self._changed.wait_for(condition, timeout_s))

    def add_pod(self, entry: Json) -> Json:
        return self._put("pods", entry, "ADDED")

    def add_pod_untold(self, entry: Json) -> Json:
        """The pod is there and in every list, but no watch tells of it: as through a connection that is dead."""
        with self._changed:
            stored = self.add_pod(entry)
            self._history.pop()
            return stored

    def modify_pod(self, namespace: str, name: str, change: Callable[[Json], None]) -> Json:
        """Change a copy of the pod and store it."""
        with self._changed:
            entry = copy.deepcopy(self.store["pods"][namespace, name])
            change(entry)
            return self._put("pods", entry, "MODIFIED")

    def delete_pod(self, namespace: str, name: str) -> None:
        """The pod's object goes away, as after its last container has stopped."""
        with self._changed:
            entry = self.store["pods"].pop((namespace, name), None)
            if entry is not None:
                self._note("pods", {**entry, "metadata": {**entry["metadata"]}}, "DELETED")

    def get_pod(self, namespace: str, name: str) -> Json | None:
        with self._changed:
            return copy.deepcopy(self.store["pods"].get((namespace, name)))

    def node(self, name: str = "") -> Json:
        with self._changed:
            return copy.deepcopy(self.store["nodes"]["", name or self.node_name])

    def condition(self, kind: str) -> Json | None:
        """A condition of the node by its type."""
        return next((c for c in self.node()["status"]["conditions"] if c["type"] == kind), None)

    def put_node(self, entry: Json) -> Json:
        """Replace the node, as somebody else."""
        return self._put("nodes", entry, "MODIFIED")

    def add_node(self, entry: Json) -> Json:
        return self._put("nodes", entry, "ADDED")

    def set_pdb(
        self, name: str, match_labels: dict[str, str], *, allowed: int, namespace: str = "default", **status: Any
    ) -> Json:
        """Create or replace a budget. `observed=False`: the controller has not seen the latest version yet."""
        healthy = status.get("healthy", 2)
        observed = status.get("observed", True)
        known = self.store["poddisruptionbudgets"].get((namespace, name))
        uid = known["metadata"]["uid"] if known else str(uuid.uuid4())
        entry = {
            "kind": "PodDisruptionBudget",
            "apiVersion": "policy/v1",
            "metadata": {"name": name, "namespace": namespace, "uid": uid, "generation": 1},
            "spec": {"minAvailable": status.get("needed", healthy), "selector": {"matchLabels": match_labels}},
            "status": {
                "observedGeneration": 1 if observed else 0,
                "disruptionsAllowed": allowed,
                "currentHealthy": healthy,
                "desiredHealthy": status.get("needed", healthy),
                "expectedPods": healthy,
            },
        }
        return self._put("poddisruptionbudgets", entry, "MODIFIED")

    def set_volume(self, claim: str, spec: Json, *, namespace: str = "default", bound: bool = True) -> None:
        """Create or replace a PersistentVolume `pv-CLAIM` with this spec, and the claim that is bound to it."""
        volume = f"pv-{claim}"
        told = {"volumeName": volume} if bound else {}
        self._put("persistentvolumes", {"metadata": {"name": volume}, "spec": spec}, "MODIFIED")
        self._put(
            "persistentvolumeclaims", {"metadata": {"name": claim, "namespace": namespace}, "spec": told}, "MODIFIED"
        )

    def throttle(self, seconds: int, *, path: str = "") -> None:
        """Priority and fairness: refuse requests whose path contains this; 0 ends it."""
        self._throttled = (seconds, path) if seconds else None

    def forbid(self, verb: str, resource: str) -> None:
        """Take a right away: `forbid("create", "pods/eviction")`."""
        self._forbidden.add((verb, resource))

    def allow(self, verb: str, resource: str) -> None:
        self._forbidden.discard((verb, resource))

    def compact(self) -> None:
        """Forget the past: going on from any version before now is 410."""
        with self._changed:
            self.version += 1
            self._oldest = self.version
            self._history.clear()

    def end_watches(self) -> None:
        """End every open watch, as a server that restarts does."""
        with self._changed:
            self._watches += 1
            self._changed.notify_all()

    def write_condition(self, kind: str, status: str, reason: str, message: str = "") -> None:
        """Write a condition as somebody else."""
        with self._changed:
            now = _stamp()
            self._patch_node(
                self.node_name,
                {
                    "status": {
                        "conditions": [
                            {
                                "type": kind,
                                "status": status,
                                "reason": reason,
                                "message": message,
                                "lastHeartbeatTime": now,
                                "lastTransitionTime": now,
                            }
                        ]
                    }
                },
                "status",
            )

    def kubelet(self, every_s: float) -> threading.Event:
        """A kubelet without pressure: puts False over any pressure condition that is not, every so many seconds.

        Set the event to stop it.
        """
        stop = threading.Event()
        self._kubelets.append(stop)

        def loop() -> None:
            while not stop.wait(every_s):
                for kind, (reason, message) in KUBELET_FALSE.items():
                    seen = self.condition(kind)
                    if seen is None or seen["status"] != "False":
                        self.write_condition(kind, "False", reason, message)

        threading.Thread(target=loop, daemon=True).start()
        return stop

    # --- objects ----------------------------------------------------------------------------------------------------

    def _put(self, kind: str, entry: Json, event: str) -> Json:
        with self._changed:
            entry = copy.deepcopy(entry)
            metadata = entry["metadata"]
            metadata.setdefault("uid", str(uuid.uuid4()))
            metadata.setdefault("creationTimestamp", _stamp())
            self.store[kind][metadata.get("namespace", ""), metadata["name"]] = entry
            self._note(kind, entry, event)
            return entry

    def _note(self, kind: str, entry: Json, event: str) -> None:
        self.version += 1
        entry["metadata"]["resourceVersion"] = str(self.version)
        self._history.append((self.version, kind, event, copy.deepcopy(entry)))
        self._changed.notify_all()

    # --- requests ---------------------------------------------------------------------------------------------------

    def answer(self, request: Request) -> Answer | Iterator[bytes | None]:
        """The answer to a request; an iterator of lines for a watch (None: nothing to send yet)."""
        try:
            return self._route(request)
        except RefusedError as failure:
            return failure.answer

    def note(self, request: Request) -> None:
        with self._changed:
            self.requests.append(request)
            self._changed.notify_all()

    def _route(self, request: Request) -> Answer | Iterator[bytes | None]:
        if self._throttled and self._throttled[1] in request.path:
            text = b"Too many requests, please try again later.\n"
            return Answer(429, text, "text/plain; charset=utf-8", (("Retry-After", str(self._throttled[0])),))
        user = self._authenticate(request)
        if request.path in ("/healthz", "/livez", "/readyz"):
            return Answer(200, b"ok", "text/plain; charset=utf-8")
        if request.path == "/version":
            return Answer(200, json.dumps(_VERSION, indent=2).encode())
        target = _target(request.path)
        self._authorize(request, user, target)
        if target.resource in ("selfsubjectreviews", "subjectaccessreviews", "tokenreviews"):
            return self._review(request, user, target)
        with self._changed:
            if request.method == "GET":
                if request.query.get("watch") in ("1", "true"):
                    return self._watch(request, target)
                return self._get(request, target) if target.name else self._list(request, target)
            if target.subresource == "eviction":
                return self._evict(request, target)
            if target.subresource == "binding":
                return self._bind(request, target)
            if target.subresource == "token":
                return self._token_request(request, target)
            if request.method == "POST":
                return self._create(request, target)
            if request.method == "PATCH":
                return self._patch(request, target)
            if request.method == "PUT":
                return self._replace(request, target)
            if request.method == "DELETE":
                return self._delete(request, target)
        raise RefusedError(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")

    def _authenticate(self, request: Request) -> str:
        authorization = request.headers.get("authorization", "")
        if not authorization:
            return "system:anonymous"
        user = self.tokens.get(authorization.partition(" ")[2])
        if user is None:
            raise RefusedError(401, "Unauthorized", "Unauthorized")
        return user

    def _authorize(self, request: Request, user: str, target: "_Target") -> None:
        verb = {"POST": "create", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}.get(request.method)
        if verb is None:
            watching = request.query.get("watch") in ("1", "true")
            verb = "get" if target.name else ("watch" if watching else "list")
        resource = target.resource + (f"/{target.subresource}" if target.subresource else "")
        nobody = user == "system:anonymous" or (user.startswith("system:serviceaccount:") and user != AGENT)
        nobody = nobody and not self._granted(user, verb, target.group, resource, target.namespace)
        allowed = not nobody and (verb, resource) not in self._forbidden
        if allowed and user.startswith(NODE_USER):
            allowed = self._node_may(user.removeprefix(NODE_USER), verb, resource, request, target)
        if allowed and self.rights is not None and resource != "selfsubjectreviews":
            allowed = self.rights(verb, target.group, resource, target.namespace)
        if allowed or resource == "selfsubjectreviews":
            return
        where = f'in the namespace "{target.namespace}"' if target.namespace else "at the cluster scope"
        subject = f'{target.group_resource} "{target.name}"' if target.name else target.group_resource
        details: Json = {"name": target.name} if target.name else {}
        if target.group:
            details["group"] = target.group
        details["kind"] = target.resource
        raise RefusedError(
            403,
            "Forbidden",
            f'{subject} is forbidden: User "{user}" cannot {verb} resource "{resource}" '
            f'in API group "{target.group}" {where}',
            details=details,
        )

    def _node_may(self, node: str, verb: str, resource: str, request: Request, target: "_Target") -> bool:
        """The Node authorizer (plugin/pkg/auth/authorizer/node/node_authorizer.go) and the rules that it falls back to
        (plugin/pkg/auth/authorizer/rbac/bootstrappolicy/policy.go, NodeRules), as far as an agent asks."""
        if resource in ("persistentvolumeclaims", "persistentvolumes"):
            return verb == "get" and self._mounted_on(node, target)
        if resource in ("nodes", "pods") and verb in ("list", "watch"):
            field = "metadata.name" if resource == "nodes" else "spec.nodeName"
            return request.query.get("fieldSelector") == f"{field}={node}"
        if resource == "nodes" and verb == "get":
            return target.name == node
        return (verb, target.group, resource) in NODE_RULES

    def _mounted_on(self, node: str, target: "_Target") -> bool:
        """The Node authorizer's graph: pod of the node, its claims, their volumes."""
        claims = {
            (namespace, volume["persistentVolumeClaim"]["claimName"])
            for (namespace, _), pod in self.store["pods"].items()
            if pod["spec"].get("nodeName") == node
            for volume in pod["spec"].get("volumes", ())
            if "persistentVolumeClaim" in volume
        }
        if target.resource == "persistentvolumeclaims":
            return (target.namespace, target.name) in claims
        bound = (self.store["persistentvolumeclaims"].get(claim, {}) for claim in claims)
        return any(claim.get("spec", {}).get("volumeName") == target.name for claim in bound)

    def _granted(self, user: str, verb: str, group: str, resource: str, namespace: str) -> bool:
        """Whether a ClusterRoleBinding, or a RoleBinding of the namespace, gives this right to a service account."""
        bindings = [("clusterroles", "", each) for each in self.store["clusterrolebindings"].values()]
        bindings += [
            ("roles", namespace, each) for (where, _), each in self.store["rolebindings"].items() if where == namespace
        ]
        for kind, where, binding in bindings:
            subjects = (f"system:serviceaccount:{s['namespace']}:{s['name']}" for s in binding["subjects"])
            if user in subjects:
                rules = self.store[kind][where, binding["roleRef"]["name"]]["rules"]
                if any(group in r["apiGroups"] and resource in r["resources"] and verb in r["verbs"] for r in rules):
                    return True
        return False

    def _admit(self, request: Request, target: "_Target", old: Json | None, new: Json | None) -> None:
        user = self._authenticate(request)
        if user.startswith(NODE_USER) and target.resource == "nodes" and old is not None and new is not None:
            self._restrict_node(user.removeprefix(NODE_USER), target, old, new)
        if self.admit is None:
            return
        asked: Json = {
            "operation": "CREATE" if old is None else "UPDATE" if new is not None else "DELETE",
            "resource": {"group": target.group, "version": target.version, "resource": target.resource},
            "namespace": target.namespace,
            "userInfo": self._user_info(user, request),
            **({"subResource": target.subresource} if target.subresource else {}),
        }
        if messages := self.admit(asked, old, new):
            subject = f'{target.group_resource} "{target.name}" is forbidden'
            raise RefusedError(403, "Forbidden", f"{subject}: {messages[0]}", details=target.details())

    def _restrict_node(self, node: str, target: "_Target", old: Json, new: Json) -> None:
        """NodeRestriction (plugin/pkg/admission/noderestriction/admission.go, admitNode)."""
        why = ""
        if target.name != node:
            why = f'node "{node}" is not allowed to modify node "{target.name}"'
        elif old["spec"].get("taints") != new["spec"].get("taints"):
            why = f'node "{node}" is not allowed to modify taints'
        if why:
            subject = f'{target.group_resource} "{target.name}" is forbidden'
            raise RefusedError(403, "Forbidden", f"{subject}: {why}", details=target.details())

    # --- reads ------------------------------------------------------------------------------------------------------

    def _get(self, request: Request, target: "_Target") -> Answer:
        if target.subresource == "proxy" and target.resource == "pods":
            with urlopen(self.pod_ports[target.name] + request.path.partition("/proxy")[2], timeout=10) as page:
                return Answer(200, page.read(), page.headers["Content-Type"])
        if target.subresource == "proxy" and request.path.endswith("/configz"):
            return Answer(200, {"kubeletconfig": self.kubelet_configuration})
        if target.subresource == "proxy":
            return Answer(200, {"node": {"nodeName": target.name}, "pods": []})
        return Answer(200, self._object(target))

    def _object(self, target: "_Target") -> Json:
        entry = self.store.get(target.resource, {}).get((target.namespace, target.name))
        if entry is None:
            raise RefusedError(
                404, "NotFound", f'{target.group_resource} "{target.name}" not found', details=target.details()
            )
        return {"kind": target.kind, "apiVersion": target.api_version, **entry}

    def _list(self, request: Request, target: "_Target") -> Answer:
        wanted = _selector(request, target)
        asked = request.query.get("resourceVersion", "")
        if (
            request.query.get("resourceVersionMatch") == "NotOlderThan"
            and asked.isdigit()
            and int(asked) > self.version
        ):
            message = f"Too large resource version: {asked}, current: {self.version}"
            causes = [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]
            details = {"causes": causes, "retryAfterSeconds": 1}
            raise RefusedError(504, "Timeout", f"Timeout: {message}", details=details, retry=1)
        if request.query.get("resourceVersionMatch") == "Exact" and int(asked) < self._oldest:
            raise RefusedError(410, "Expired", "The resourceVersion for the provided list is too old.")
        entries = [
            (f"/{namespace}/{name}" if not target.namespace else f"/{name}", entry)
            for (namespace, name), entry in sorted(self.store[target.resource].items())
            if target.namespace in ("", namespace) and wanted(entry)
        ]
        version, start = self.version, ""
        if token := request.query.get("continue"):
            version, start = self._continued(token)
            entries = [(key, entry) for key, entry in entries if key > start]
        metadata: Json = {"resourceVersion": str(version)}
        limit = int(request.query.get("limit", 0))
        if limit and len(entries) > limit and asked != "0":
            last = json.dumps({"v": "meta.k8s.io/v1", "rv": version, "start": entries[limit - 1][0] + "\0"})
            metadata["continue"] = base64.urlsafe_b64encode(last.encode()).decode().rstrip("=")
            if not request.query.get("fieldSelector"):
                metadata["remainingItemCount"] = len(entries) - limit
            entries = entries[:limit]
        if "as=PartialObjectMetadataList" in request.headers.get("accept", ""):
            items = [
                {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": entry["metadata"]}
                for _, entry in entries
            ]
            kind, api = "PartialObjectMetadataList", "meta.k8s.io/v1"
        else:
            items = [{k: v for k, v in entry.items() if k not in ("kind", "apiVersion")} for _, entry in entries]
            kind, api = f"{target.kind}List", target.api_version
        return Answer(200, {"kind": kind, "apiVersion": api, "metadata": metadata, "items": items})

    def _continued(self, token: str) -> tuple[int, str]:
        try:
            decoded = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
            version, start = int(decoded["rv"]), str(decoded["start"]).rstrip("\0")
        except (ValueError, KeyError, TypeError):
            raise RefusedError(
                400,
                "BadRequest",
                "invalid continue token: continue key is not valid: "
                "invalid character '\\u0081' looking for beginning of value",
            ) from None
        if version < self._oldest:
            again = json.dumps({"v": "meta.k8s.io/v1", "rv": -1, "start": start + "\0"})
            failure = RefusedError(
                410,
                "Expired",
                "The provided continue parameter is too old to display a consistent list result. You can start a new "
                "list without the continue parameter, or use the continue token in this response to retrieve the "
                "remainder of the results. Continuing with the provided token results in an inconsistent list - "
                "objects that were created, modified, or deleted between the time the first chunk was returned and now "
                "may show up in the list.",
            )
            failure.answer.body["metadata"] = {
                "continue": base64.urlsafe_b64encode(again.encode()).decode().rstrip("=")
            }
            raise failure
        return version, "/" + start.lstrip("/")

    def _watch(self, request: Request, target: "_Target") -> Iterator[bytes | None]:
        wanted = _selector(request, target)
        asked = request.query.get("resourceVersion", "")
        if asked and not asked.isdigit():
            raise RefusedError(
                500,
                "",
                f'resourceVersion: Invalid value: "{asked}": strconv.ParseUint: parsing "{asked}": invalid syntax',
            )
        initial = request.query.get("sendInitialEvents") == "true"
        return self._events(
            target,
            wanted,
            after=self.version if initial or asked in ("", "0") else int(asked),
            initial=initial or asked in ("", "0"),
            end_of_initial=initial,
            bookmarks=request.query.get("allowWatchBookmarks") in ("1", "true"),
            until=time.monotonic() + float(request.query.get("timeoutSeconds", 1800)),
            generation=self._watches,
        )

    def _events(
        self,
        target: "_Target",
        wanted: Callable[[Json], bool],
        *,
        after: int,
        initial: bool,
        end_of_initial: bool,
        bookmarks: bool,
        until: float,
        generation: int,
    ) -> Iterator[bytes | None]:
        def event(kind: str, entry: Json) -> bytes:
            body = {"kind": target.kind, "apiVersion": target.api_version, **entry}
            return json.dumps({"type": kind, "object": body}, separators=(",", ":")).encode() + b"\n"

        def bookmark(annotations: Json | None = None) -> bytes:
            metadata: Json = {"resourceVersion": str(after)}
            if annotations:
                metadata["annotations"] = annotations
            empty = {"metadata": metadata, "spec": {"containers": None}, "status": {}}
            return event("BOOKMARK", empty if target.kind == "Pod" else {"metadata": metadata})

        yield None
        if after < self._oldest:
            status = RefusedError(410, "Expired", f"too old resource version: {after} ({self._oldest})").answer.body
            yield json.dumps({"type": "ERROR", "object": status}, separators=(",", ":")).encode() + b"\n"
            return
        with self._changed:
            present = list(self.store[target.resource].values()) if initial else []
        for entry in present:
            if wanted(entry) and target.namespace in ("", entry["metadata"].get("namespace", "")):
                yield event("ADDED", entry)
        if end_of_initial and bookmarks:
            yield bookmark({"k8s.io/initial-events-end": "true"})
        next_bookmark = time.monotonic() + self.bookmark_s
        while True:
            with self._changed:
                if not (self._closing or self._watches != generation or self.version > after):
                    self._changed.wait(max(0.0, min(until, next_bookmark) - time.monotonic()))
                ended = self._closing or self._watches != generation
                if after < self._oldest - 1 and not self._history:
                    ended = True
                news = [h for h in self._history if h[0] > after]
            for version, kind, what, entry in news:
                after = version
                here = target.namespace in ("", entry["metadata"].get("namespace", ""))
                if kind == target.resource and here and wanted(entry):
                    yield event(what, entry)
            now = time.monotonic()
            if bookmarks and now >= next_bookmark:
                next_bookmark = now + self.bookmark_s
                yield bookmark()
            if ended:
                return
            if now >= until:
                return

    # --- writes -----------------------------------------------------------------------------------------------------

    def _evict(self, request: Request, target: "_Target") -> Answer:
        body = request.body
        if not isinstance(body, dict):
            text = body.decode("utf-8", "replace") if isinstance(body, bytes) else ""
            raise RefusedError(
                400,
                "BadRequest",
                "the object provided is unrecognized (must be of type Eviction): couldn't get version/kind; json parse "
                f"error: invalid character 'n' looking for beginning of object key string ({text})",
            )
        if body["metadata"]["name"] != target.name:
            raise RefusedError(400, "BadRequest", "name in URL does not match name in Eviction object")
        self._admit(request, target, None, body)
        entry = self._object(target._replace(subresource=""))
        options = body.get("deleteOptions") or {}
        dry = options.get("dryRun") == ["All"] or request.query.get("dryRun") == "All"
        terminating = "deletionTimestamp" in entry["metadata"]
        if not terminating and entry["status"].get("phase") not in ("Pending", "Succeeded", "Failed"):
            self._spend_budget(entry, dry=dry)
        _check_preconditions(entry, options)
        if not dry:
            self._terminate(entry, options, eviction=True)
            if self.on_eviction:
                self.on_eviction(copy.deepcopy(entry), body)
        return Answer(201, {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201})

    def _bind(self, request: Request, target: "_Target") -> Answer:
        """What a scheduler does (BindingREST, pkg/registry/core/pod/storage/storage.go). managedFields tell nothing."""
        entry = self._object(target._replace(subresource=""))
        message = ""
        if "deletionTimestamp" in entry["metadata"]:
            message = f"pod {target.name} is being deleted, cannot be assigned to a host"
        elif node := entry["spec"].get("nodeName"):
            message = f'pod {target.name} is already assigned to node "{node}"'
        if message:
            subject = f'Operation cannot be fulfilled on pods/binding "{target.name}"'
            raise RefusedError(409, "Conflict", f"{subject}: {message}", details=target.details())

        def place(pod: Json) -> None:
            pod["spec"]["nodeName"] = request.body["target"]["name"]
            scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": _stamp()}
            pod["status"]["conditions"] = [{**scheduled, "lastProbeTime": None}]

        self.modify_pod(target.namespace, target.name, place)
        return Answer(201, {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201})

    def _spend_budget(self, entry: Json, *, dry: bool) -> None:
        labels = entry["metadata"].get("labels") or {}
        budgets = [
            budget
            for (namespace, _), budget in self.store["poddisruptionbudgets"].items()
            if namespace == entry["metadata"]["namespace"]
            and budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
        ]
        if len(budgets) > 1:
            raise RefusedError(
                500,
                "",
                "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support.",
            )
        for budget in budgets:
            name, status = budget["metadata"]["name"], budget["status"]
            if not _is_ready(entry) and _unready_may_go(budget):
                continue
            message = "Cannot evict pod as it would violate the pod's disruption budget."
            if status["observedGeneration"] < budget["metadata"].get("generation", 1):
                text = f"The disruption budget {name} is still being processed by the server."
                details = {"causes": [{"reason": "DisruptionBudget", "message": text}], "retryAfterSeconds": 10}
                raise RefusedError(429, "TooManyRequests", message, details=details, retry=10)
            if status["disruptionsAllowed"] <= 0:
                needed, healthy = status["desiredHealthy"], status["currentHealthy"]
                text = f"The disruption budget {name} needs {needed} healthy pods and has {healthy} currently"
                details = {"causes": [{"reason": "DisruptionBudget", "message": text}]}
                raise RefusedError(429, "TooManyRequests", message, details=details)
            if not dry:
                status["disruptionsAllowed"] -= 1
                self._note("poddisruptionbudgets", budget, "MODIFIED")

    def _terminate(self, entry: Json, options: Json, *, eviction: bool) -> Json:
        stored = self.store["pods"][entry["metadata"]["namespace"], entry["metadata"]["name"]]
        metadata = stored["metadata"]
        own = stored["spec"].get("terminationGracePeriodSeconds", 30)
        grace = int(options.get("gracePeriodSeconds", own))
        grace = 1 if grace < 0 else grace
        if "deletionTimestamp" in metadata:
            grace = min(grace, metadata["deletionGracePeriodSeconds"])
        metadata["deletionTimestamp"] = _stamp(time.time() + grace)
        metadata["deletionGracePeriodSeconds"] = grace
        metadata["generation"] = metadata.get("generation", 1) + 1
        if eviction:
            message = "Eviction API: evicting"
            conditions = [c for c in stored["status"].get("conditions", ()) if c["type"] != "DisruptionTarget"]
            target = {
                "type": "DisruptionTarget",
                "status": "True",
                "lastProbeTime": None,
                "lastTransitionTime": _stamp(),
                "reason": "EvictionByEvictionAPI",
                "message": message,
            }
            stored["status"]["conditions"] = [*conditions, target]
        self._note("pods", stored, "MODIFIED")
        namespace, name = metadata["namespace"], metadata["name"]
        if grace == 0:
            self.delete_pod(namespace, name)
        elif self.linger_s is not None:
            timer = threading.Timer(grace if self.linger_s < 0 else self.linger_s, self.delete_pod, (namespace, name))
            timer.daemon = True
            self._timers.append(timer)
            timer.start()
        return stored

    def _delete(self, request: Request, target: "_Target") -> Answer:
        entry = self._object(target)
        options = request.body if isinstance(request.body, dict) else {}
        if "gracePeriodSeconds" not in options and not request.body and "gracePeriodSeconds" in request.query:
            options = {**options, "gracePeriodSeconds": int(request.query["gracePeriodSeconds"])}
        _check_preconditions(entry, options)
        if target.resource != "pods":
            self._note(target.resource, self.store[target.resource].pop((target.namespace, target.name)), "DELETED")
            return Answer(200, entry)
        self._admit(request, target, entry, None)
        if "All" in (*options.get("dryRun", ()), request.query.get("dryRun")):
            return Answer(200, entry)
        stored = self._terminate(entry, options, eviction=False)
        if self.on_eviction:
            self.on_eviction(copy.deepcopy(stored), options)
        return Answer(200, {"kind": target.kind, "apiVersion": target.api_version, **stored})

    def _create(self, request: Request, target: "_Target") -> Answer:
        entry = copy.deepcopy(request.body)
        metadata = entry.setdefault("metadata", {})
        if not metadata.get("name"):
            metadata["name"] = metadata.get("generateName", "") + uuid.uuid4().hex[:5]
        if target.namespace:
            metadata["namespace"] = target.namespace
        _set_managers(entry, {}, request, target)
        self._admit(request, target, None, entry)
        if target.resource == "events":
            self._complete_event(entry, target)
        elif target.resource == "pods":
            entry["status"] = {"phase": "Pending", "qosClass": "BestEffort"}
        elif target.resource == "poddisruptionbudgets":
            self._complete_budget(entry, target)
        elif target.resource == "namespaces":
            account = {"metadata": {"name": "default", "namespace": metadata["name"]}}
            self._put("serviceaccounts", account, "ADDED")
        if (target.namespace, metadata["name"]) in self.store.setdefault(target.resource, {}):
            message = f'{target.group_resource} "{metadata["name"]}" already exists'
            raise RefusedError(409, "AlreadyExists", message, details=target._replace(name=metadata["name"]).details())
        stored = entry if request.query.get("dryRun") == "All" else self._put(target.resource, entry, "ADDED")
        return Answer(201, {"kind": target.kind, "apiVersion": target.api_version, **stored})

    def _complete_budget(self, entry: Json, target: "_Target") -> None:
        """What the disruption controller makes of a new budget."""
        labels = entry["spec"]["selector"]["matchLabels"].items()
        pods = [
            pod
            for (namespace, _), pod in self.store["pods"].items()
            if namespace == target.namespace and labels <= (pod["metadata"].get("labels") or {}).items()
        ]
        healthy = sum(map(_is_ready, pods))
        needed = entry["spec"]["minAvailable"]
        entry["metadata"]["generation"] = 1
        entry["status"] = {
            "observedGeneration": 1,
            "disruptionsAllowed": max(0, healthy - needed),
            "currentHealthy": healthy,
            "desiredHealthy": needed,
            "expectedPods": len(pods),
        }

    def _complete_event(self, entry: Json, target: "_Target") -> None:
        _check_event(entry, target)
        if target.group:
            entry.update(deprecatedSource={}, deprecatedFirstTimestamp=None, deprecatedLastTimestamp=None)
        elif not entry.get("eventTime"):
            entry.update(eventTime=None, reportingComponent="", reportingInstance="")

    def _patch(self, request: Request, target: "_Target") -> Answer:
        entry = copy.deepcopy(self._object(target._replace(subresource="")))
        content_type = request.headers.get("content-type", "").partition(";")[0]
        if content_type not in (STRATEGIC, "application/merge-patch+json", "application/json-patch+json"):
            raise RefusedError(415, "UnsupportedMediaType", "415: Unsupported Media Type", details={})
        patch = request.body
        _check_version(entry, patch, target)
        if target.resource == "nodes":
            _check_node_patch(target.name, patch)
            new = copy.deepcopy(entry)
            _change_node(new, patch, target.subresource)
            self._admit(request, target, entry, new)
            if request.query.get("dryRun") == "All":
                return Answer(200, new)
            stored = self._patch_node(target.name, patch, target.subresource, request)
        elif target.resource == "pods":
            self._check_pod_patch(entry, patch)
            stored = self.store["pods"][target.namespace, target.name]
            if target.subresource == "status":
                new = copy.deepcopy(entry)
                _merge(
                    new["metadata"],
                    {k: v for k, v in patch.get("metadata", {}).items() if k in ("labels", "annotations")},
                )
                _merge_status(new, patch.get("status", {}))
                self._admit(request, target, entry, new)
            if target.subresource == "status" and request.query.get("dryRun") != "All":
                _merge_status(stored, patch.get("status", {}), new={"lastProbeTime": None})
                _set_managers(stored, entry, request, target)
                self._note("pods", stored, "MODIFIED")
        else:
            stored = self.store[target.resource][target.namespace, target.name]
            changes = {k: v for k, v in patch.items() if k != "metadata"}
            new = copy.deepcopy(entry)
            _merge(new, changes)
            if target.resource == "events":
                _check_event(new, target)
            self._admit(request, target, entry, new)
            _merge(stored, changes)
            _set_managers(stored, entry, request, target)
            self._note(target.resource, stored, "MODIFIED")
        return Answer(200, {"kind": target.kind, "apiVersion": target.api_version, **stored})

    def _check_pod_patch(self, entry: Json, patch: Json) -> None:
        uid = patch.get("metadata", {}).get("uid", entry["metadata"]["uid"])
        if uid != entry["metadata"]["uid"]:
            name = entry["metadata"]["name"]
            text = f'Invalid value: "{uid}": field is immutable'
            cause = {"reason": "FieldValueInvalid", "message": text, "field": "metadata.uid"}
            raise RefusedError(
                422,
                "Invalid",
                f'Pod "{name}" is invalid: metadata.uid: {text}',
                details={"name": name, "kind": "Pod", "causes": [cause, cause]},
            )

    def _patch_node(self, name: str, patch: Json, subresource: str, request: Request | None = None) -> Json:
        """Without a request: by the kubelet or the control plane."""
        stored = self.store["nodes"]["", name]
        before = copy.deepcopy(stored)
        _change_node(stored, patch, subresource)
        _set_managers(stored, before, request, _Target("", "v1", "", "nodes", name, subresource))
        before.pop("metadata")
        if before != {k: v for k, v in stored.items() if k != "metadata"}:
            self._note("nodes", stored, "MODIFIED")
        return stored

    def _replace(self, request: Request, target: "_Target") -> Answer:
        entry = self._object(target._replace(subresource=""))
        _check_version(entry, request.body, target)
        new = copy.deepcopy({**entry, **request.body})
        self._admit(request, target, entry, new)
        _set_managers(new, entry, request, target)
        stored = self._put(target.resource, new, "MODIFIED")
        return Answer(200, stored)

    # --- who is who -------------------------------------------------------------------------------------------------

    def _review(self, request: Request, user: str, target: "_Target") -> Answer:
        body: Json = {"kind": target.kind, "apiVersion": target.api_version, "metadata": {}}
        spec = {k: v for k, v in (request.body.get("spec") or {}).items() if v is not None}
        _set_managers({**body, "spec": spec}, {}, request, target)
        if target.resource == "selfsubjectreviews":
            body["metadata"] = {"creationTimestamp": _stamp()}
            body["status"] = {"userInfo": self._user_info(user, request)}
        elif target.resource == "tokenreviews":
            known = self.tokens.get(spec["token"])
            body["spec"] = spec
            body["status"] = {"user": {}, "error": "invalid bearer token"}
            if known:
                audiences = ["https://kubernetes.default.svc"]
                body["status"] = {"authenticated": True, "user": self._user_info(known), "audiences": audiences}
        else:
            attributes = spec["resourceAttributes"]
            resource = "/".join(filter(None, (attributes["resource"], attributes.get("subresource"))))
            allowed = spec["user"] not in (NOBODY, "system:anonymous")
            allowed = allowed and (attributes["verb"], resource) not in self._forbidden
            body["spec"] = spec
            body["status"] = {"allowed": allowed}
            if allowed:
                body["status"]["reason"] = (
                    'RBAC: allowed by ClusterRoleBinding "nodeagent" of ClusterRole "nodeagent" '
                    'to ServiceAccount "nodeagent/kube-system"'
                )
        return Answer(201, body)

    def _user_info(self, user: str, request: Request | None = None) -> Json:
        if not user.startswith("system:serviceaccount:"):
            groups = ["system:nodes"] if user.startswith("system:node:") else []
            return {"username": user, "groups": [*groups, "system:authenticated"]}
        namespace = user.split(":")[2]
        extra = {"authentication.kubernetes.io/credential-id": [f"JTI={uuid.uuid4()}"]}
        token = request.headers.get("authorization", "").partition(" ")[2] if request is not None else ""
        if token in self._token_nodes:
            extra["authentication.kubernetes.io/node-name"] = [self._token_nodes[token]]
        return {
            "username": user,
            "uid": str(uuid.uuid4()),
            "groups": ["system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated"],
            "extra": extra,
        }

    def token_of(self, namespace: str, account: str, *, node: str = "") -> str:
        """A token of a service account, as a pod on this node has it."""
        token = uuid.uuid4().hex
        self.tokens[token] = f"system:serviceaccount:{namespace}:{account}"
        if node:
            self._token_nodes[token] = node
        return token

    def _token_request(self, request: Request, target: "_Target") -> Answer:
        bound = request.body["spec"].get("boundObjectRef")
        pod = self.store["pods"][target.namespace, bound["name"]] if bound else {"spec": {"nodeName": ""}}
        token = self.token_of(target.namespace, target.name, node=pod["spec"]["nodeName"])
        seconds = request.body["spec"]["expirationSeconds"]
        metadata = {"name": target.name, "namespace": target.namespace, "uid": str(uuid.uuid4())}
        _set_managers({**request.body, "metadata": metadata}, {}, request, target)
        spec = {"audiences": ["https://kubernetes.default.svc"], "expirationSeconds": seconds, "boundObjectRef": None}
        return Answer(
            201,
            {
                "kind": "TokenRequest",
                "apiVersion": "authentication.k8s.io/v1",
                "metadata": {**metadata, "creationTimestamp": _stamp()},
                "spec": spec,
                "status": {"token": token, "expirationTimestamp": _stamp(time.time() + seconds)},
            },
        )


# --- paths, selectors, merges ----------------------------------------------------------------------------------------

_VERSION = {
    "major": "1",
    "minor": "36",
    "emulationMajor": "1",
    "emulationMinor": "36",
    "minCompatibilityMajor": "1",
    "minCompatibilityMinor": "35",
    "gitVersion": "v1.36.2",
    "gitCommit": "8e16b12fda5b1dccc41a6de48b3e356cc7d5048b",
    "gitTreeState": "",
    "buildDate": "1970-01-01T00:00:00Z",
    "goVersion": "go1.26.3",
    "compiler": "gc",
    "platform": "linux/amd64",
}

_KINDS = {
    "pods": "Pod",
    "nodes": "Node",
    "events": "Event",
    "leases": "Lease",
    "poddisruptionbudgets": "PodDisruptionBudget",
    "selfsubjectreviews": "SelfSubjectReview",
    "subjectaccessreviews": "SubjectAccessReview",
    "tokenreviews": "TokenReview",
    "serviceaccounts": "ServiceAccount",
    "namespaces": "Namespace",
    "persistentvolumeclaims": "PersistentVolumeClaim",
    "persistentvolumes": "PersistentVolume",
    "configmaps": "ConfigMap",
    "daemonsets": "DaemonSet",
    "secrets": "Secret",
    "clusterroles": "ClusterRole",
    "clusterrolebindings": "ClusterRoleBinding",
    "roles": "Role",
    "rolebindings": "RoleBinding",
    "validatingadmissionpolicies": "ValidatingAdmissionPolicy",
    "validatingadmissionpolicybindings": "ValidatingAdmissionPolicyBinding",
}


class _Target(NamedTuple):
    """What a path names."""

    group: str
    version: str
    namespace: str
    resource: str
    name: str
    subresource: str

    @property
    def kind(self) -> str:
        return _KINDS[self.resource]

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def group_resource(self) -> str:
        return f"{self.resource}.{self.group}" if self.group else self.resource

    def details(self) -> Json:
        return {"name": self.name, **({"group": self.group} if self.group else {}), "kind": self.resource}


def _target(path: str) -> _Target:
    parts = [unquote(part) for part in path.strip("/").split("/")]
    if parts[0] == "api":
        group, version, rest = "", parts[1], parts[2:]
    elif parts[0] == "apis" and len(parts) > 3:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        rest = []
    namespace = ""
    if len(rest) > 2 and rest[0] == "namespaces":
        namespace, rest = rest[1], rest[2:]
    if not rest or rest[0] not in _KINDS:
        raise RefusedError(404, "NotFound", "the server could not find the requested resource", details={})
    return _Target(group, version, namespace, rest[0], *[*rest[1:3], "", ""][:2])


def _selector(request: Request, target: _Target) -> Callable[[Json], bool]:
    text = request.query.get("fieldSelector", "")
    known = {
        "metadata.name": lambda entry: entry["metadata"]["name"],
        "spec.nodeName": lambda entry: entry.get("spec", {}).get("nodeName"),
    }
    wanted = [term.partition("=")[::2] for term in text.split(",") if term]
    for field, _ in wanted:
        if field not in known or (field == "spec.nodeName" and target.resource != "pods"):
            raise RefusedError(400, "BadRequest", f"field label not supported: {field}")
    return lambda entry: all(known[field](entry) == value for field, value in wanted)


def _is_ready(pod: Json) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ()))


def _unready_may_go(budget: Json) -> bool:
    """Whether a pod that is not ready is evicted without a look at the allowance, and without spending any of it
    (pkg/registry/core/pod/storage/eviction.go): the rest is healthy enough, or nobody minds."""
    if budget["spec"].get("unhealthyPodEvictionPolicy") == "AlwaysAllow":
        return True
    status = budget["status"]
    return bool(status["currentHealthy"] >= status["desiredHealthy"] > 0)


def _check_preconditions(entry: Json, options: Json) -> None:
    name, metadata = entry["metadata"]["name"], entry["metadata"]
    wanted = options.get("preconditions") or {}
    text = ""
    if wanted.get("uid", metadata["uid"]) != metadata["uid"]:
        text = (
            f"the UID in the precondition ({wanted['uid']}) does not match the UID in record ({metadata['uid']}). "
            "The object might have been deleted and then recreated"
        )
    elif wanted.get("resourceVersion", metadata["resourceVersion"]) != metadata["resourceVersion"]:
        text = (
            f"the ResourceVersion in the precondition ({wanted['resourceVersion']}) does not match the ResourceVersion "
            f"in record ({metadata['resourceVersion']}). The object might have been modified"
        )
    if text:
        message = f'Operation cannot be fulfilled on Pod "{name}": {text}'
        raise RefusedError(409, "Conflict", message, details={"name": name, "kind": "Pod"})


def _check_version(entry: Json, patch: Any, target: _Target) -> None:
    asked = patch.get("metadata", {}).get("resourceVersion") if isinstance(patch, dict) else None
    if asked and asked != entry["metadata"]["resourceVersion"]:
        raise RefusedError(
            409,
            "Conflict",
            f'Operation cannot be fulfilled on {target.group_resource} "{target.name}": the object has been modified; '
            "please apply your changes to the latest version and try again",
            details=target.details(),
        )


def _check_node_patch(name: str, patch: Json) -> None:
    conditions = patch.get("status", {}).get("conditions", [])
    if not isinstance(conditions, list):
        text = f'Invalid value: "map[status:map[conditions:{conditions}]]": cannot restore slice from string'
        cause = {"reason": "FieldValueInvalid", "message": text, "field": "patch"}
        raise RefusedError(422, "Invalid", f' "" is invalid: patch: {text}', details={"causes": [cause]})
    for condition in conditions:
        if "type" not in condition:
            shown = " ".join(f"{key}:{value}" for key, value in condition.items())
            raise RefusedError(500, "", f"map: map[{shown}] does not contain declared merge key: type")
    for resource, amount in patch.get("status", {}).get("capacity", {}).items():
        if str(amount).startswith("-"):
            field = f"status.capacity.{resource}"
            text = f'Invalid value: "{amount}": must be greater than or equal to 0'
            cause = {"reason": "FieldValueInvalid", "message": text, "field": field}
            raise RefusedError(
                422,
                "Invalid",
                f'Node "{name}" is invalid: {field}: {text}',
                details={"name": name, "kind": "Node", "causes": [cause]},
            )


def _check_event(entry: Json, target: _Target) -> None:
    """pkg/apis/core/validation/events.go: what an Event of the new kind must have, in either group."""
    modern = bool(entry.get("eventTime"))
    controller = "reportingController" if target.group else "reportingComponent"
    problems = []
    if target.group and not modern:
        problems.append(("eventTime", "Required value"))
    for field in (controller, "reportingInstance", "action", "reason") if modern else ():
        if not entry.get(field):
            problems.append((field, "Required value"))
        elif len(entry[field]) > 128 and field != controller:
            problems.append((field, 'Invalid value: "": can have at most 128 characters'))
    if modern and len(entry.get("note" if target.group else "message", "").encode()) > 1024:
        problems.append(("message", 'Invalid value: "": can have at most 1024 characters'))
    if target.group and entry.get("series") and entry["series"]["count"] < 2:
        problems.append(("series.count", 'Invalid value: "": should be at least 2'))
    about = entry.get("regarding" if target.group else "involvedObject", {}).get("namespace") or "default"
    if about != target.namespace:
        problems.append(("involvedObject.namespace", f'Invalid value: "{about}": does not match event.namespace'))
    if not problems:
        return
    name = entry["metadata"]["name"]
    reasons = {True: "FieldValueRequired", False: "FieldValueInvalid"}
    causes = [{"reason": reasons[t.startswith("Required")], "message": t, "field": f} for f, t in problems]
    text = "; ".join(f"{field}: {message}" for field, message in problems)
    raise RefusedError(
        422,
        "Invalid",
        f'Event "{name}" is invalid: {text}',
        details={"name": name, "kind": "Event", "causes": causes},
    )


def _set_managers(new: Json, old: Json, request: Request | None, target: _Target) -> None:
    """Note who has changed what (managedFields): whom the request names, or its client's name."""
    manager = "kube-controller-manager" if target.subresource == "" else "kubelet"
    if request is not None:
        client = request.headers.get("user-agent", "").partition("/")[0][:128]
        manager = request.query.get("fieldManager") or client or "unknown"
    parts: tuple[str, ...] = ()
    if target.resource in ("pods", "nodes", "poddisruptionbudgets"):
        # A status has a way of its own; what comes the other way is dropped.
        parts = ("metadata", "status" if target.subresource == "status" else "spec")
    # A subresource may be of another version than what it belongs to.
    version = target.api_version if target.subresource != "token" else new["apiVersion"]
    managers = managed_fields.changed(
        old, new, manager=manager, api_version=version, subresource=target.subresource, parts=parts
    )
    if managers:
        new["metadata"]["managedFields"] = managers


def _change_node(node: Json, patch: Json, subresource: str) -> None:
    for field, added in patch.get("metadata", {}).items():
        if field in ("labels", "annotations"):
            node["metadata"].setdefault(field, {}).update(added)
    if subresource == "status":
        _merge_status(node, patch.get("status", {}))
        return
    node["spec"].update({key: value for key, value in patch.get("spec", {}).items() if key != "taints"})
    taints = patch.get("spec", {}).get("taints")
    # An atomic list: it is replaced as a whole. A directive inside it is not understood and nothing happens.
    if taints is not None and not any("$patch" in taint for taint in taints):
        node["spec"]["taints"] = copy.deepcopy(taints)
        if not taints:
            del node["spec"]["taints"]


def _merge_status(stored: Json, status: Json, *, new: Json | None = None) -> None:
    """Strategic merge of a status: conditions by type (a new one starts as `new`), everything else replaced."""
    new = new or {}
    for key, value in status.items():
        if key != "conditions":
            stored["status"][key] = value
            if value is None:
                del stored["status"][key]
            continue
        conditions = stored["status"].setdefault("conditions", [])
        for change in value:
            old = next((c for c in conditions if c["type"] == change["type"]), None)
            if change.get("$patch") == "delete":
                if old is not None:
                    conditions.remove(old)
            elif old is not None:
                old.update(change)
            else:
                conditions.insert(0, {**new, **change})


def _merge(stored: Json, patch: Json) -> None:
    for key, value in patch.items():
        if isinstance(value, dict) and isinstance(stored.get(key), dict):
            _merge(stored[key], value)
        elif value is None:
            stored.pop(key, None)
        else:
            stored[key] = value


def _stamp(at: float | None = None) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() if at is None else at))


# --- HTTP ------------------------------------------------------------------------------------------------------------


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, *args: Any) -> None:
        self._open: set[Any] = set()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is not news."""

    def cut(self) -> None:
        import socket

        for request in tuple(self._open):
            try:
                request.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    api: ApiServer
    _numbers = iter(range(1, 1 << 30))

    def setup(self) -> None:
        super().setup()
        self.number = next(self._numbers)

    def handle_any(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        raw = self.rfile.read(length) if length else b""
        try:
            body = json.loads(raw) if raw else None
        except ValueError:
            body = raw
        split = urlsplit(self.path)
        request = Request(
            self.command,
            split.path,
            {key: values[-1] for key, values in parse_qs(split.query).items()},
            {key.lower(): value for key, value in self.headers.items()},
            body,
            time.monotonic(),
            self.number,
        )
        if self.api.delay_s:
            threading.Event().wait(self.api.delay_s)
        if self.api.at_request:
            self.api.at_request(request, False)
        said = self.api.instead(request) if self.api.instead else None
        answer = said if said is not None else self.api.answer(request)
        self.api.note(request)
        if self.api.at_request:
            self.api.at_request(request, True)
        if isinstance(answer, Answer):
            self._send(answer)
        else:
            self._stream(answer)

    do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = handle_any  # noqa: N815 - http.server's names

    def _send(self, answer: Answer) -> None:
        newline = b"\n" if isinstance(answer.body, dict) else b""
        body = (
            answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body, separators=(",", ":")).encode()
        )
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        for name, value in answer.headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body + newline)))
        self.end_headers()
        self.wfile.write(body + newline)

    def _stream(self, lines: Iterator[bytes | None]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for line in lines:
            if line is not None:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(line), line))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        """Requests are kept in `ApiServer.requests`."""
