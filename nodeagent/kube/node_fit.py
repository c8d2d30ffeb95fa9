"""Whether another node takes a possible victim: nodes and their pods are read rarely, and only while it is wanted.

Promises:

1. All requests are sent by one thread that starts with the first wanted pod. No decision waits for it.
2. A reading that fails changes nothing of what is known but its trouble, and is repeated after a wait that grows.
   Unknown is never room: a node or a pod that cannot be read makes no node fit.
3. Memory does not grow with the cluster: of the nodes that pass by their own objects a random sample of `MAX_NODES` is
   kept for each pod, and the pods of at most `MAX_LOADS` nodes are listed in one reading.
4. Requests are the ServiceAccount's own: a node may list neither other nodes nor their pods.

Theory of operation. A reading first asks the nodes that took a pod in the last one, which are two lists of a few
objects. Only if they no longer do, all nodes are listed, from the API server's watch cache, as a stream of which one
object is in memory at a time. Then the pods of sampled nodes are listed, node by node, until one takes the pod. So "no
node" may be wrong where most nodes are full and there are more than `MAX_NODES`; the next reading samples other nodes.
"""

import heapq
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from nodeagent.kube import objects, scheduling
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.backoff import RetryBackoff
from nodeagent.kube.joined_pods import JoinedPods
from nodeagent.kube.list_stream import Listing
from nodeagent.kube.scheduling import NodeLoad, NodeOffer, PodNeeds
from nodeagent.kube.transport import Transport
from nodeagent.model import NodeFit, NodeFitLookup, Pod
from nodeagent.runtime import clock, workers

REFRESH_S: Final = 120.0
"""How often it is read while it is wanted. A decision uses a reading for `policy.node_fit.FRESH_S`."""
MIN_INTERVAL_S: Final = 10.0
"""Least time between two readings, also if other pods are wanted."""
KEEP_S: Final = 60.0
"""How long a pod counts as wanted."""
KEEP_FIT_S: Final = 300.0
MAX_FITS: Final = 128
"""How long, and of how many pods, results are kept: the decision goes on to the next pod while those before it are
known to fit nowhere."""
MAX_PODS: Final = 8
"""Pods of one reading."""
MAX_NODES: Final = 24
"""Nodes whose pods may be read for one pod. Where one node in five has room, 24 find it with 99.5%."""
MAX_LOADS: Final = 48
"""Nodes whose pods are read in one reading: at 110 pods of 8 KiB each, 40 MiB at most."""
MAX_LAST: Final = 4
"""Nodes that are asked first, because they took a pod in the last reading."""
MAX_CONSTRAINTS: Final = 500
"""Selectors, expressions, values and tolerations of one pod. Its author can write 50,000, which would be compared with
every node; real pods have less than a hundred."""
MAX_WAIT_S: Final = 60.0
"""Longest wait after failures."""
NODES_PER_BREATH: Final = 50
BREATH_S: Final = 0.002
"""After so many nodes the thread sleeps so long, so that the loop, which shares the interpreter, is not delayed."""

_PODS: Final = "/api/v1/pods"
_NODES: Final = "/api/v1/nodes"
_NO_RIGHT: Final = "the ServiceAccount needs the rights of examples/node-fit.yaml"


def read_fits(
    transport: Transport,
    own_node: str,
    pod_uids: Collection[str],
    *,
    last_nodes: Iterable[str] = (),
    rng: random.Random | None = None,
    pause: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = clock.boottime,
) -> dict[str, NodeFit]:
    """Read once, for pods of the own node: by UID, whether another node takes it. Raises `ApiError`."""
    reading = _Reading(transport, own_node, rng or random.Random(), pause)  # noqa: S311 - a sample, guards nothing
    return reading.fits(pod_uids, last_nodes, began=clock())


class _Sampled(NamedTuple):
    """A node of a sample."""

    order: float
    """The sample has the largest: minus a random number."""
    number: int
    """So that two of them never compare their offers."""
    offer: NodeOffer


class _Reading:
    """One reading."""

    def __init__(self, transport: Transport, own_node: str, rng: random.Random, pause: Callable[[], None]) -> None:
        self._transport = transport
        self._own_node = own_node
        self._rng = rng
        self._pause = pause
        self._loads: dict[str, NodeLoad | None] = {}
        """By node; None: not readable."""
        self._label_keys: frozenset[str] | None = None

    def fits(self, pod_uids: Collection[str], last_nodes: Iterable[str], *, began: float) -> dict[str, NodeFit]:
        needs, found = self._needs(pod_uids)
        for uid in [uid for uid, each in needs.items() if scheduling.constraints(each) > MAX_CONSTRAINTS]:
            found[uid] = NodeFit(began, reason=f"it has more than {MAX_CONSTRAINTS} constraints on its node")
            del needs[uid]
        self._label_keys = scheduling.label_keys(needs.values())
        open_needs = dict(needs)
        for node in list(last_nodes)[:MAX_LAST]:
            if open_needs:
                offers, lacks = self._offers(open_needs, f"metadata.name={node}")
                self._settle(open_needs, offers, lacks, found, began)
        if open_needs:
            offers, lacks = self._offers(open_needs, "")
            self._settle(open_needs, offers, lacks, found, began)
        return found

    def _needs(self, pod_uids: Collection[str]) -> tuple[dict[str, PodNeeds], dict[str, NodeFit]]:
        """What the wanted pods need, and what is known already of those that cannot be read."""
        needs: dict[str, PodNeeds] = {}
        for item in self._list(_PODS, f"spec.nodeName={self._own_node}"):
            try:
                pod = scheduling.decode_pod(item)
                if pod.metadata.uid in pod_uids:
                    needs[pod.metadata.uid] = scheduling.needs_of(pod)
            except ValueError:
                continue  # it is missing in the result, with a reason
        missing = NodeFit(trouble="the API server does not list this pod, or its object cannot be read")
        # In the order of the decision: the first pods use the limits first.
        return {uid: needs[uid] for uid in pod_uids if uid in needs}, {
            uid: missing for uid in pod_uids if uid not in needs
        }

    def _offers(
        self, needs: Mapping[str, PodNeeds], field_selector: str
    ) -> tuple[dict[str, list[NodeOffer]], dict[str, Counter[str]]]:
        """By pod: a random sample of the nodes that may take it, in random order, and how many nodes do not, by
        reason. Under the empty reason: how many may."""
        samples: dict[str, list[_Sampled]] = {uid: [] for uid in needs}
        lacks: dict[str, Counter[str]] = {uid: Counter() for uid in needs}
        for number, item in enumerate(self._list(_NODES, field_selector)):
            if number % NODES_PER_BREATH == NODES_PER_BREATH - 1:
                self._pause()
            try:
                node = scheduling.decode_node(item)
            except objects.UnreadableError:
                for counts in lacks.values():
                    counts[scheduling.UNREADABLE] += 1
                continue
            if node.metadata.name == self._own_node:
                continue
            # One draw for all pods: their samples are the same nodes where the same nodes may take them.
            place = self._rng.random()
            for uid, each in needs.items():
                offer = scheduling.offer(node, each)
                if isinstance(offer, str):
                    lacks[uid][offer] += 1
                else:
                    lacks[uid][""] += 1
                    _keep_first(samples[uid], _Sampled(-place, number, offer))
        return {uid: [each.offer for each in sorted(sample, reverse=True)] for uid, sample in samples.items()}, lacks

    def _settle(
        self,
        needs: dict[str, PodNeeds],
        offers: Mapping[str, list[NodeOffer]],
        lacks: Mapping[str, Counter[str]],
        found: dict[str, NodeFit],
        began: float,
    ) -> None:
        """Find a node for each pod. A pod with one leaves `needs`."""
        for uid, each in list(needs.items()):
            found[uid] = self._first_fit(each, offers[uid], lacks[uid], began)
            if found[uid].node:
                del needs[uid]

    def _first_fit(self, needs: PodNeeds, offers: list[NodeOffer], lacks: Counter[str], began: float) -> NodeFit:
        asked = 0
        # Nodes that were read for another pod cost nothing.
        for offer in sorted(offers, key=lambda offer: offer.name not in self._loads):
            if offer.name not in self._loads and len(self._loads) >= MAX_LOADS:
                continue
            asked += 1
            load = self._load(offer.name)
            refusal = scheduling.UNREADABLE if load is None else scheduling.refusal(offer, load, needs)
            if not refusal:
                return NodeFit(began, offer.name)
            lacks[refusal] += 1
        may = lacks.pop("", 0)
        if may and not asked:
            return NodeFit(trouble="the pods of no node that may take it were read: other pods came first")
        return NodeFit(began, reason=_reason(lacks, unread=may - asked))

    def _load(self, node: str) -> NodeLoad | None:
        if node not in self._loads:
            self._pause()
            selector = f"spec.nodeName={node},status.phase!=Succeeded,status.phase!=Failed"
            try:
                pods = map(scheduling.decode_pod, self._list(_PODS, selector))
                self._loads[node] = scheduling.load_of(pods, label_keys=self._label_keys)
            except ValueError:
                self._loads[node] = None
        return self._loads[node]

    def _list(self, path: str, field_selector: str) -> Iterator[bytes]:
        query = {"resourceVersion": "0", **({"fieldSelector": field_selector} if field_selector else {})}
        return iter(Listing(self._transport, path, query, as_service_account=True))


def _keep_first(sample: list[_Sampled], node: _Sampled) -> None:
    """Keep the `MAX_NODES` nodes with the largest order: each subset of all nodes is as likely as any other."""
    if len(sample) < MAX_NODES:
        heapq.heappush(sample, node)
    else:
        heapq.heappushpop(sample, node)


def _reason(counts: Counter[str], *, unread: int) -> str:
    """Why no node takes a pod: the number of nodes by reason."""
    parts = [f"{count} {reason}" for reason, count in counts.most_common()]
    if unread > 0:
        parts.append(f"{unread} not read")
    total = sum(counts.values()) + max(0, unread)
    return f"none of {total} other nodes takes it ({', '.join(parts)})" if parts else "there is no other node"


class NodeFitReader:
    """What is known of the wanted pods, read in a thread."""

    def __init__(
        self,
        transport: Transport,
        own_node: str,
        *,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = clock.boottime,
        backoff: RetryBackoff | None = None,
    ) -> None:
        """`wake` is called after each reading."""
        self._transport = transport
        self._own_node = own_node
        self._wake = wake
        self._clock = clock
        self._backoff = backoff or RetryBackoff(first_s=1.0, last_s=MAX_WAIT_S)
        self._condition = threading.Condition()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._wanted: dict[str, tuple[NodeFitLookup, float]] = {}
        """By pod UID: the look-up and when it was last wanted."""
        self._fits: dict[str, NodeFit] = {}
        self._not_before = float("-inf")
        """No reading begins earlier, after another one or a failure."""
        self._last_nodes: tuple[str, ...] = ()
        self._changes = 0
        self._joined = JoinedPods()
        self.reason = ""
        """Why reading fails now; empty if it does not."""

    def want(self, lookups: Iterable[NodeFitLookup]) -> None:
        """Read these soon, the first ones if there are too many. Returns at once."""
        now = self._clock()
        with self._condition:
            for lookup in tuple(lookups)[:MAX_PODS]:
                self._wanted[lookup.pod_uid] = lookup, now
            self._drop_unwanted(now)
            self._condition.notify_all()
            starts = bool(self._wanted) and self._thread is None
        if starts:
            self._thread = workers.make_thread(self._run, name="node-fit")
            workers.start(self._thread)

    def with_node_fit(self, pods: tuple[Pod, ...]) -> tuple[Pod, ...]:
        """The pods with what is known. The same pods give the same tuple until that changes."""
        return self._joined.joined(pods, self._changes, self._join)

    def _join(self, pods: tuple[Pod, ...]) -> tuple[Pod, ...]:
        with self._condition:
            known = dict(self._fits)
        if not known:
            return pods
        return tuple([pod._replace(node_fit=known[pod.uid]) if pod.uid in known else pod for pod in pods])

    def stop(self) -> None:
        """End the thread, if there is one, after its present request."""
        self._stopping.set()
        with self._condition:
            self._condition.notify_all()

    def _drop_unwanted(self, now: float) -> None:
        """Drop pods that are wanted no more; of too many the oldest."""
        newest = sorted(self._wanted, key=lambda uid: self._wanted[uid][1], reverse=True)
        for place, uid in enumerate(newest):
            if place >= MAX_PODS or now - self._wanted[uid][1] > KEEP_S:
                del self._wanted[uid]

    def _store(self, found: Mapping[str, NodeFit]) -> None:
        """Keep what was found, and of earlier readings what may still count."""
        oldest = self._clock() - KEEP_FIT_S
        kept = {
            uid: fit
            for uid, fit in self._fits.items()
            if uid not in found and (uid in self._wanted or (fit.read_at or oldest) > oldest)
        }
        self._fits = dict([*kept.items(), *found.items()][-MAX_FITS:])
        self._changes += 1

    def _run(self) -> None:
        while not self._stopping.is_set():
            uids = self._next()
            if uids:
                self._read(uids)

    def _next(self) -> tuple[str, ...]:
        """The pods to read now; empty after a wait, to be called again."""
        with self._condition:
            now = self._clock()
            self._drop_unwanted(now)
            if not self._wanted:
                self._condition.wait_for(lambda: self._stopping.is_set() or self._wanted)
                return ()
            wait_s = max(self._not_before, min(map(self._due, self._wanted))) - now
            if wait_s > 0:
                self._condition.wait(wait_s)
                return ()
            return tuple(uid for uid in self._wanted if self._due(uid) <= now)

    def _due(self, uid: str) -> float:
        fit, lookup = self._fits.get(uid), self._wanted[uid][0]
        if fit is None or fit.read_at is None or fit.trouble or fit.read_at < lookup.not_before:
            return lookup.not_before
        return fit.read_at + REFRESH_S

    def _read(self, uids: tuple[str, ...]) -> None:
        began = self._clock()
        try:
            found = read_fits(
                self._transport,
                self._own_node,
                uids,
                last_nodes=self._last_nodes,
                pause=lambda: time.sleep(BREATH_S),
                clock=self._clock,
            )
        except ApiError as error:
            self.reason = f"{error}; {_NO_RIGHT}" if error.status == 403 else str(error)
            trouble, wait_s = self.reason, self._backoff.failed(error.retry_after_s)
            found = {uid: self._fits.get(uid, NodeFit())._replace(trouble=trouble) for uid in uids}
        else:
            self._backoff.succeeded()
            self.reason, wait_s = "", MIN_INTERVAL_S
        nodes = [fit.node for fit in found.values() if fit.node]
        self._last_nodes = tuple(dict.fromkeys((*nodes, *self._last_nodes)))[:MAX_LAST]
        with self._condition:
            self._not_before = max(began, self._clock()) + wait_s
            self._store(found)
        self._wake()
