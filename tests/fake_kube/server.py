"""The API server double itself: its state, its knobs for tests, and the way of a request through it."""

import json
import ssl
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.fake_kube import (
    auth,
    authorizer,
    eviction,
    eviction_requests,
    http,
    impersonation,
    messages,
    objects,
    resize,
    watch,
    writes,
)
from tests.fake_kube.messages import Answer, Json, RefusedError, Request
from tests.fake_kube.store import Store


class ApiServer:
    """The double. A context manager; everything is safe to call from any thread."""

    def __init__(
        self,
        *,
        node: str | Json = "lab-node",
        pods: Iterable[Json] = (),
        token: str = "agent-token",
        user: str = authorizer.AGENT,
        minor: int = 36,
        first_version: int = 500,
        linger_s: float | None = -1.0,
        bookmark_s: float = 60.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.tokens: dict[str, str] = {token: user, "nobody-token": auth.NOBODY}
        self.token = token
        self.minor = minor
        """The server's version: 1.36.2 was recorded, and 1.35 differs in what is stated where it is used."""
        self.constrained_impersonation = minor >= 36
        """The feature gate ConstrainedImpersonation: alpha in 1.35, on by default from 1.36 on."""
        self.token_nodes: dict[str, str] = {}
        """Nodes of the pods that tokens are bound to."""
        self.requests: list[Request] = []
        self.rights: Callable[[str, str, str, str], bool] | None = None
        """Asked for (verb, API group, resource/subresource, namespace) of each request of the agent's; None: allow."""
        self.pod_ports: dict[str, str] = {}
        """What answers for a port of a pod: `pod:port` to a URL."""
        self.admit: Callable[[Json, Json | None, Json | None], list[str]] | None = None
        """Asked for what admission policies have against a write: an AdmissionReview's request, the old object (None:
        it is created) and the new one (None: it is deleted)."""
        self.eviction_requests = ""
        """The field with the requester of an EvictionRequest: `requester` (Kubernetes 1.37) or `requesterName` (the
        KEP). Empty: the server does not serve them, which is its default."""
        self.kubelet_configuration: Json = {}
        """What each node's kubelet answers under /configz: its settings, as far as a test needs them."""
        self.on_resize: Callable[[Json], None] | None = None
        """Called with each pod whose spec was resized: what its kubelet does is the test's (`fake_kube.resize`)."""
        self.on_eviction: Callable[[Json, Json], None] | None = None
        self.instead: Callable[[Request], Answer | None] | None = None
        """Asked first for each answer: the answer of a proxy or of a passing fault; None: the server's own. It may
        wait, or raise `http.CutError`."""
        self.at_request: Callable[[Request, bool], None] | None = None
        """Called with each request, before it is carried out (False) and before it is answered (True)."""
        self.on_answer: Callable[[Request, bytes, bytes], Iterator[bytes]] | None = None
        """The bytes that are sent for an answer with this head and this body; may wait, and raise `http.CutError`."""
        self.on_watch: Callable[[Request, Iterator[bytes | None]], Iterator[bytes | None]] | None = None
        """The lines that are sent for the lines of a watch; may wait, and raise `http.CutError`."""
        self.delay_s = 0.0
        self.linger_s = linger_s
        self.bookmark_s = bookmark_s
        self.store = Store(first_version=first_version)
        self.throttled: tuple[int, str] | None = None
        self.forbidden: set[tuple[str, str]] = set()
        self.timers: list[threading.Timer] = []
        self._kubelets: list[threading.Event] = []
        self.node_name = node if isinstance(node, str) else node["metadata"]["name"]
        self.store.put("nodes", objects.node_object(node) if isinstance(node, str) else node, "ADDED")
        for entry in pods:
            self.add_pod(entry)
        double = self

        class Handler(http.Handler):
            api = double

        self._tls = tls
        self._handler = Handler
        self._serve(0)

    def __enter__(self) -> "ApiServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        return f"http{'s' if self._tls is not None else ''}://127.0.0.1:{self._http.server_address[1]}"

    def close(self) -> None:
        """Stop serving and cut every connection."""
        self.store.close()
        for stop in self._kubelets:
            stop.set()
        for timer in self.timers:
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
        self._http = http.Server(("127.0.0.1", port), self._handler)
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
        """The requests with this method whose path has this ending, in order."""
        with self.store.changed:
            return [r for r in self.requests if r.method == method and r.path.endswith(ending)]

    def watched(self, path: str, *, since: int = 0) -> bool:
        """Whether this was watched in a request after so many: whoever watches has the list."""
        with self.store.changed:
            return any(r.path == path and "watch" in r.query for r in self.requests[since:])

    def wait_for(self, condition: Callable[[], Any], timeout_s: float = 30.0) -> bool:
        """Wait until the condition holds; evaluated whenever a request came or an object changed."""
        with self.store.changed:
            return bool(self.store.changed.wait_for(condition, timeout_s))

    def add_pod(self, entry: Json) -> Json:
        return self.store.put("pods", entry, "ADDED")

    def add_pod_untold(self, entry: Json) -> Json:
        """The pod exists and is in every list, but no watch sends it: as through a connection that is dead."""
        with self.store.changed:
            stored = self.add_pod(entry)
            self.store.history.pop()
            return stored

    def modify_pod(self, namespace: str, name: str, change: Callable[[Json], None]) -> Json:
        """Change a copy of the pod and store it."""
        with self.store.changed:
            entry = messages.copy_of(self.store.objects["pods"][namespace, name])
            change(entry)
            return self.store.put("pods", entry, "MODIFIED")

    def delete_pod(self, namespace: str, name: str) -> None:
        """The pod's object goes away, as after its last container has stopped."""
        with self.store.changed:
            entry = self.store.objects["pods"].pop((namespace, name), None)
            if entry is not None:
                self.store.record("pods", {**entry, "metadata": {**entry["metadata"]}}, "DELETED")

    def get_pod(self, namespace: str, name: str) -> Json | None:
        with self.store.changed:
            return messages.copy_of(self.store.objects["pods"].get((namespace, name)))

    def node(self, name: str = "") -> Json:
        with self.store.changed:
            return messages.copy_of(self.store.objects["nodes"]["", name or self.node_name])

    def condition(self, kind: str) -> Json | None:
        """A condition of the node by its type."""
        return next((c for c in self.node()["status"]["conditions"] if c["type"] == kind), None)

    def put_node(self, entry: Json) -> Json:
        """Replace the node, as another client."""
        return self.store.put("nodes", entry, "MODIFIED")

    def patch_node(self, patch: Json) -> Json:
        """Patch the node's object, as another client does; `write_condition` patches its status."""
        with self.store.changed:
            return writes.patch_node(self, self.node_name, patch, "")

    def add_node(self, entry: Json) -> Json:
        return self.store.put("nodes", entry, "ADDED")

    def set_pdb(
        self, name: str, match_labels: dict[str, str], *, allowed: int, namespace: str = "default", **status: Any
    ) -> Json:
        """Create or replace a PDB. `observed=False`: the controller has not seen the latest version yet."""
        healthy = status.get("healthy", 2)
        observed = status.get("observed", True)
        known = self.store.objects["poddisruptionbudgets"].get((namespace, name))
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
        return self.store.put("poddisruptionbudgets", entry, "MODIFIED")

    def set_volume(self, claim: str, spec: Json, *, namespace: str = "default", bound: bool = True) -> None:
        """Create or replace a PersistentVolume `pv-CLAIM` with this spec, and the claim that is bound to it."""
        volume = f"pv-{claim}"
        claimed = {"volumeName": volume} if bound else {}
        self.store.put("persistentvolumes", {"metadata": {"name": volume}, "spec": spec}, "MODIFIED")
        self.store.put(
            "persistentvolumeclaims", {"metadata": {"name": claim, "namespace": namespace}, "spec": claimed}, "MODIFIED"
        )

    def throttle(self, seconds: int, *, path: str = "") -> None:
        """Priority and fairness: refuse requests with this in their path; 0 ends it."""
        self.throttled = (seconds, path) if seconds else None

    def forbid(self, verb: str, resource: str) -> None:
        """Take a right away: `forbid("create", "pods/eviction")`."""
        self.forbidden.add((verb, resource))

    def allow(self, verb: str, resource: str) -> None:
        self.forbidden.discard((verb, resource))

    def grant(self, account: str, rules: Iterable[tuple[str, str, str]], *, namespace: str = "kube-system") -> None:
        """Give a service account these rights by a ClusterRole and its binding of the account's name: (verb, API group,
        resource). Replaces what was granted before."""
        name = f"{namespace}-{account}"
        role = {
            "metadata": {"name": name},
            "rules": [{"verbs": [v], "apiGroups": [g], "resources": [r]} for v, g, r in sorted(rules)],
        }
        binding = {
            "metadata": {"name": name},
            "roleRef": {"kind": "ClusterRole", "name": name},
            "subjects": [{"kind": "ServiceAccount", "namespace": namespace, "name": account}],
        }
        self.store.put("clusterroles", role, "MODIFIED")
        self.store.put("clusterrolebindings", binding, "MODIFIED")

    def compact(self) -> None:
        """See `Store.compact`."""
        self.store.compact()

    def end_watches(self) -> None:
        """See `Store.end_watches`."""
        self.store.end_watches()

    def write_condition(self, kind: str, status: str, reason: str, message: str = "") -> None:
        """Write a condition as another client."""
        with self.store.changed:
            now = messages.rfc3339()
            writes.patch_node(
                self,
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
                for kind, (reason, message) in objects.KUBELET_FALSE.items():
                    seen = self.condition(kind)
                    if seen is None or seen["status"] != "False":
                        self.write_condition(kind, "False", reason, message)

        threading.Thread(target=loop, daemon=True).start()
        return stop

    def answer(self, request: Request) -> Answer | Iterator[bytes | None]:
        """The answer to a request; an iterator of lines for a watch (None: nothing to send yet)."""
        try:
            return self._route(request)
        except RefusedError as failure:
            return failure.answer

    def note(self, request: Request) -> None:
        with self.store.changed:
            self.requests.append(request)
            self.store.changed.notify_all()

    def token_of(self, namespace: str, account: str, *, node: str = "") -> str:
        """A token of a service account, as a pod on this node has it."""
        token = uuid.uuid4().hex
        self.tokens[token] = f"system:serviceaccount:{namespace}:{account}"
        if node:
            self.token_nodes[token] = node
        return token

    def _route(self, request: Request) -> Answer | Iterator[bytes | None]:
        if self.throttled and self.throttled[1] in request.path:
            text = b"Too many requests, please try again later.\n"
            return Answer(429, text, "text/plain; charset=utf-8", (("Retry-After", str(self.throttled[0])),))
        user = auth.authenticate(self, request)
        if request.path in ("/healthz", "/livez", "/readyz"):
            return Answer(200, b"ok", "text/plain; charset=utf-8")
        if request.path == "/version":
            return Answer(200, json.dumps(messages.version(self.minor), indent=2).encode())
        if request.path.startswith(eviction_requests.ROOT) and not self.eviction_requests:
            return eviction_requests.not_served()
        if request.path == eviction_requests.ROOT:
            return eviction_requests.discovery()
        target = messages.parse_target(request.path)
        asked = authorizer.attributes_of(request, target)
        user = impersonation.impersonate(self, request, user, asked)
        authorizer.authorize(self, user, asked)
        if target.resource in messages.REVIEWS:
            return auth.review(self, request, user, target)
        with self.store.changed:
            if request.method == "GET":
                if request.query.get("watch") in ("1", "true"):
                    return watch.watch(self, request, target)
                return watch.get(self, request, target) if target.name else watch.list_objects(self, request, target)
            if target.subresource == "eviction":
                return eviction.evict(self, request, target)
            if target.resource == "pods" and target.subresource == "resize":
                return resize.patch(self, request, target)
            if target.subresource == "binding":
                return writes.bind(self, request, target)
            if target.subresource == "token":
                return auth.request_token(self, request, target)
            if request.method == "POST":
                return writes.create(self, request, target)
            if request.method == "PATCH" and target.resource == eviction_requests.RESOURCE:
                return eviction_requests.patch(self, request, target)
            if request.method == "PATCH":
                return writes.patch(self, request, target)
            if request.method == "PUT":
                return writes.replace(self, request, target)
            if request.method == "DELETE":
                return eviction.delete(self, request, target)
        raise RefusedError(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")
