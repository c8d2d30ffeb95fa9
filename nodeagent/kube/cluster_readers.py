"""What the agent reads of the cluster for one node: its pods with all that a decision needs of them, and the own Node.

Promises:

1. No call waits for the API server: each reader has its own thread.
2. The watches of the pods and of the Node begin with `start`; PodDisruptionBudgets, claims, owners and other nodes are
   read only once they are wanted.
3. Only readers that the configuration uses exist, and those of the pods and the Node.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from nodeagent.config.schema import Config, Mode
from nodeagent.kube import pod_decoder
from nodeagent.kube.joined_pods import JoinedPods
from nodeagent.kube.node_fit import NodeFitReader
from nodeagent.kube.node_images import UnusedImages
from nodeagent.kube.node_watch import NodeWatch
from nodeagent.kube.owner_lookup import OwnerReader
from nodeagent.kube.pdb_watch import PdbWatch
from nodeagent.kube.pod_watch import PodsView, PodWatch
from nodeagent.kube.transport import Transport
from nodeagent.kube.volume_lookup import VolumeLookup
from nodeagent.model import NodeFitLookup, OwnerLookup, Pod
from nodeagent.runtime import clock

WANT_PDBS_S: Final = 10.0
"""How often the namespaces of the pods are passed on while a threshold is near and the pods stay the same."""
PDB_SPREAD_S: Final = 10.0
"""Longest wait before the first list of PodDisruptionBudgets: 5,000 nodes with five namespaces each send 5,000 requests
a second instead of 50,000 (benchmarks/fleet.py)."""
VOLUME_SPREAD_S: Final = 3.0
"""Longest wait before the first claim is looked up while no pressure is near."""


class WatchCounts(NamedTuple):
    """Counters of one list and watch since the start."""

    name: str
    """`pods` or `node`: a fixed word, never a name from the cluster."""
    failures: int
    relists: int


class ClusterReaders:
    """The readers. One thread wants; any thread reads."""

    def __init__(
        self,
        transport: Transport,
        config: Config,
        node: NodeWatch,
        *,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = clock.boottime,
    ) -> None:
        """`node`: the watch of the own Node, not started yet. `wake` is called after each change."""
        protection, name = config.protection, node.node_name
        self._transport = transport
        self._clock = clock
        self.node = node
        if config.profiles:
            node.listen(wake)
        self._mirrors_of = node if config.mode is Mode.ENFORCE else None
        self._mirrors = JoinedPods()
        self._unused_images = UnusedImages()
        self.pdbs = None
        if protection.disruption_budgets:
            self.pdbs = PdbWatch(transport, wake=wake, clock=clock, spread_s=_pdb_spread_s(config))
        self._pdbs_wanted_at = float("-inf")
        self._pdbs_wanted_for: tuple[Pod, ...] = ()
        self.owners = OwnerReader(transport, wake=wake, clock=clock) if protection.replacement_wait_s else None
        self.node_fit = NodeFitReader(transport, name, wake=wake, clock=clock) if protection.node_fit else None
        self.volumes = None
        if protection.node_bound:
            self.volumes = VolumeLookup(transport, name, clock=clock, spread_s=VOLUME_SPREAD_S)
        self.pods = PodWatch(transport, name, wake=wake, keep_annotations=protection.annotations, clock=clock)

    def view(self) -> PodsView:
        """The pods with their volumes, with what is known of owners and other nodes, and with their
        PodDisruptionBudgets once those were wanted."""
        unreachable_since = self._transport.reach.unreachable_since
        view = self.pods.view()
        listed = view.pods
        pods = self._own_mirrors(listed)
        pods = self.volumes.with_claims(pods) if self.volumes else pods
        pods = self.owners.with_replicas(pods) if self.owners else pods
        pods = self.node_fit.with_node_fit(pods) if self.node_fit else pods
        pods = self.pdbs.with_pdbs(pods) if self.pdbs else pods
        node = self.node.view()
        images = node.images if node is not None and view.synced_at is not None else None
        return view._replace(
            pods=pods,
            unreachable_since=unreachable_since,
            allocatable_memory=node.allocatable_memory if node is not None else None,
            unused_images=None if images is None else self._unused_images.sum(images, listed),
        )

    def _own_mirrors(self, pods: tuple[Pod, ...]) -> tuple[Pod, ...]:
        """The pods, with mirror pods of another Node object as ordinary ones. The Node's UID is known only once the
        Node was read; until then, and in a dry run, the owner reference counts by the Node's name."""
        node = self._mirrors_of.view() if self._mirrors_of is not None else None
        if node is None or not node.uid:
            return pods
        uid = node.uid
        return self._mirrors.joined(pods, uid, lambda pods: pod_decoder.with_mirrors_of(pods, uid))

    def want(self, *, owners: tuple[OwnerLookup, ...], node_fits: tuple[NodeFitLookup, ...]) -> None:
        """Read these soon. Returns at once."""
        if self.owners is not None and owners:
            self.owners.want(owners)
        if self.node_fit is not None and node_fits:
            self.node_fit.want(node_fits)

    def want_pdbs(self) -> None:
        """Want those of all pods' namespaces: every `WANT_PDBS_S`, and for each new view of the pods."""
        if self.pdbs is None:
            return
        now, pods = self._clock(), self.pods.view().pods
        if pods is not self._pdbs_wanted_for or now - self._pdbs_wanted_at >= WANT_PDBS_S:
            self._pdbs_wanted_for, self._pdbs_wanted_at = pods, now
            self.pdbs.want({pod.namespace for pod in pods if pod.namespace})

    def hurry(self) -> None:
        """Pressure is near: look up volumes and list PodDisruptionBudgets now."""
        if self.volumes is not None:
            self.volumes.hurry()
        self.want_pdbs()

    def counts(self) -> tuple[WatchCounts, ...]:
        """Counters of the watches; from any thread."""
        watches = (("pods", self.pods), ("node", self.node))
        return tuple(WatchCounts(name, each.failures, each.relists) for name, each in watches)

    def stop(self) -> None:
        """End all threads."""
        for reader in (self.volumes, self.owners, self.node_fit, self.pdbs, self.pods, self.node):
            if reader is not None:
                reader.stop()


def _pdb_spread_s(config: Config) -> float:
    """Only the soft tier reads PodDisruptionBudgets, so half of the shortest grace period is early enough to list them.
    Nodes that cross a threshold in the same second do not list in the same second."""
    graces = [threshold.grace_period_s for threshold in config.thresholds if not threshold.hard]
    return min(PDB_SPREAD_S, 0.5 * min(graces, default=0.0))
