"""An API server double: real HTTP on loopback, held to recordings of a real kube-apiserver 1.36.2.

    with ApiServer(node="node-1", pods=[pod("hog", uid="...")]) as api:
        api.kubeconfig(tmp_path / "kubeconfig")     # a file for --kubeconfig
        ...run the agent...
        assert api.sent("POST", "/eviction")        # every request is kept in api.requests

What it serves: pods, nodes, PodDisruptionBudgets, leases and events; list with field selectors, paging and versions;
watch with chunks, bookmarks and 410; evictions with PDBs, preconditions, grace and dry run; DELETE; strategic merge
of node and pod status; taints under a resourceVersion; 401, 403, 409, 415, 422, 429 of both kinds, 500. An evicted pod
gets its deletionTimestamp and goes away after its grace (`linger_s` overrides it; None: only by `delete_pod`).

Knobs: `on_eviction(pod, body)` is called for each accepted eviction or delete, `on_resize(pod)` for each resize (what
came of it is in `resize`, which is not recorded), `at_request(request, done)` before and after each request is carried
out; `instead(request)` replaces an answer, `on_answer` its bytes, `on_watch` the lines of a watch; `set_pdb`;
`throttle(seconds)`;
`forbid("patch", "nodes/status")`; `grant(account, rules)`; `tokens` (token -> user); `minor` (version of the server),
`constrained_impersonation`; `compact()` and `end_watches()`; `kubelet(every_s)` puts
False over a foreign pressure condition as a live kubelet does; `delay_s` for every answer; `go_down()`, `come_back()`.
"""

from tests.fake_kube.auth import NOBODY
from tests.fake_kube.authorizer import AGENT
from tests.fake_kube.http import CutError
from tests.fake_kube.messages import Answer, Json, RefusedError, Request
from tests.fake_kube.objects import KUBELET_FALSE, node_object, pod
from tests.fake_kube.server import ApiServer

__all__ = [
    "AGENT",
    "KUBELET_FALSE",
    "NOBODY",
    "Answer",
    "ApiServer",
    "CutError",
    "Json",
    "RefusedError",
    "Request",
    "node_object",
    "pod",
]
