"""Eviction slots: the few nodes of a zone that may evict softly at once, so that one bad release cannot empty a fleet.

Theory of operation. There are K Leases `nodeagent-evictions-ZONE-0` to `K-1`; the holder of one may evict. `want` means
that the soft tier would act now, or that a pod which it has evicted is not gone yet. The worker then acquires a slot,
renews it while it is wanted, and releases it `SLOT_KEEP_S` after the last `want`. Every write carries the
resourceVersion that the decision was based on: if two agents write the same Lease, the server refuses one (409).

    the Lease does not exist           create it with this node as holder
    no holder, or this node            acquire it
    another holder, unchanged for      take it over
      its leaseDurationSeconds
    another holder otherwise           try the next slot; if there is none, list again later

Wall clocks are never compared. A holder's time runs on the local clock from the moment at which this agent read the
last renewal; this agent's own time runs from the moment at which its renewal was *sent*, before any other agent can
have read it. So this agent gives up its slot before another one may take it, however far apart the clocks are.

Promises:

1. `want` and `held` never wait. Only the soft tier needs a slot, never the hard tier.
2. An agent that cannot reach the API server has no slot.
3. The holder is the node's name: a restarted agent finds its own slot again, and never has two.
4. If another holder has several Leases, of any zones, only the one written last counts: no agent can keep every zone
   from evicting.
"""

import random
import re
import threading
import time
import zlib
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from nodeagent.kube import objects, timestamps
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.backoff import RetryBackoff
from nodeagent.kube.list_stream import Listing
from nodeagent.kube.transport import Transport
from nodeagent.model import OutcomeKind
from nodeagent.runtime import clock, workers

LEASE_PREFIX: Final = "nodeagent-evictions"
SLOT_KEEP_S: Final = 20.0
"""A slot is released this long after the last `want`: longer than the time between two decisions, short compared with
the minutes that other nodes may wait."""
RENEW_SHARE: Final = 1 / 3
"""Of the duration, between two renewals: one may fail."""
POLL_FIRST_S: Final = 5.0
POLL_LAST_S: Final = 30.0
"""Wait between two lists of a full zone, first and last, with jitter: 5,000 waiting nodes then send 170 to 220 small
lists a second. The first list waits for a random part of the first."""

_lease_decoder = objects.Decoder(objects.LeaseObject)


class _LeaseVersion(NamedTuple):
    """The last known version of a Lease."""

    version: str
    read_at: float
    """When it was first read."""


class _Slot(NamedTuple):
    """The slot of this node."""

    lease: objects.LeaseObject
    sent_at: float
    """When the request that acquired or renewed it was sent."""


class EvictionSlots:
    """The worker."""

    def __init__(
        self,
        transport: Transport,
        *,
        holder: str,
        zone: Callable[[], str | None],
        slots: int,
        namespace: str,
        duration_s: float,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = clock.boottime,
        keep_s: float = SLOT_KEEP_S,
        poll_s: tuple[float, float] = (POLL_FIRST_S, POLL_LAST_S),
    ) -> None:
        """`holder`: the node's name. `zone` returns its zone, "" for none, None while it is unknown."""
        self._transport = transport
        self._holder = holder
        self._zone = zone
        self._slot_count = slots
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._namespace = namespace
        self._duration_s = float(max(1, round(duration_s)))
        self._wake = wake
        self._clock = clock
        self._keep_s = keep_s
        self._polling = RetryBackoff(first_s=poll_s[0], last_s=poll_s[1])
        self._spread_s = poll_s[0]
        self._rng = random.Random()  # noqa: S311 - spreads load, guards nothing
        self._failing = RetryBackoff()
        self._changed = threading.Condition()
        self._wanted_at = float("-inf")
        self._not_before = float("-inf")
        self._stopping = False
        self._slot: _Slot | None = None
        self._versions: dict[str, _LeaseVersion] = {}
        self._last_written: dict[str, tuple[int, str]] = {}
        """By holder: version and name of its Lease that was written last."""
        self.reason = "not requested yet"
        """Why this node has no slot."""
        self._thread = workers.make_thread(self._run, name="eviction-slots")

    def start(self) -> None:
        """Start; nothing is sent before the first `want`."""
        workers.start(self._thread)

    def want(self) -> None:
        """The soft tier would evict now, or has evicted a pod that is not gone yet. Call this as long as that is so."""
        with self._changed:
            now = self._clock()
            if self._slot is None and not self._wanted():
                # Nodes whose grace periods end in the same second do not list in the same second.
                self._not_before = max(self._not_before, now + self._rng.uniform(0.0, self._spread_s))
            self._wanted_at = now
            self._changed.notify()

    def held(self) -> bool:
        """True if this node has a slot now."""
        slot = self._slot
        return slot is not None and self._clock() < slot.sent_at + self._duration_s

    def stop(self, *, clear: bool = True, timeout_s: float = 2.0) -> None:
        """Stop; `clear` releases the slot. Raises `ApiError` if the server refuses that."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        workers.join(self._thread, timeout_s)
        if clear and self.held():
            self._release(timeout_s=timeout_s)

    # --- the worker -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._stopping and (wait_s := self.wait_s()) > 0:
                    self._changed.wait(None if wait_s == float("inf") else wait_s)
                if self._stopping:
                    return
            self.step()

    def step(self) -> None:
        """Do what is due now. For the worker, and for a simulation with its own clock."""
        before = self.held()
        try:
            self._act(self._wanted())
            self._failing.succeeded()
        except (ApiError, objects.UnreadableError) as error:
            self.reason = str(error)
            retry_s = error.retry_after_s if isinstance(error, ApiError) else None
            self._not_before = self._clock() + self._failing.failed(retry_s)
        if self.held() != before:
            self._wake()

    def _wanted(self) -> bool:
        return self._clock() - self._wanted_at < self._keep_s

    def wait_s(self) -> float:
        """Seconds until the next step; 0: now; infinite: at the next `want`."""
        now, slot = self._clock(), self._slot
        pause_s = max(0.0, self._not_before - now)
        if slot is None:
            return pause_s if self._wanted() else float("inf")
        if not self._wanted():
            return pause_s
        until_unwanted_s = self._wanted_at + self._keep_s - now
        return max(pause_s, min(slot.sent_at + self._duration_s * RENEW_SHARE - now, until_unwanted_s))

    def _act(self, wanted: bool) -> None:
        if self._slot is not None and not self.held():
            self._slot, self.reason = None, "the slot was not renewed in time"
        if self._slot is None:
            if wanted:
                self._acquire()
        elif wanted:
            self._renew()
        else:
            self._release(timeout_s=None)

    def _acquire(self) -> None:
        """List all slots once, and acquire a free one."""
        names = self._names()
        if names is None:
            self.reason = "the node's zone is not known yet"
            self._not_before = self._clock() + self._failing.failed()
            return
        known = self._list(frozenset(names))
        # First the slot that this node has already, from before a restart or a lost answer: no node needs two.
        own = {name for name, lease in known.items() if lease.spec.holder_identity == self._holder}
        for name in sorted(names, key=lambda name: name not in own):
            lease = known.get(name)
            if lease is None:
                if self._create(name):
                    return
            elif self._free(lease) and self._write(lease, holder=self._holder):
                return
        holders = sorted({lease.spec.holder_identity or "none" for lease in known.values()})
        self.reason = f"all {self._slot_count} slots of the zone are taken, by {', '.join(holders[:5])}"
        self._not_before = self._clock() + self._polling.failed()

    def _names(self) -> list[str] | None:
        """All slots, in an order that starts with another one on each node."""
        zone = self._zone()
        if zone is None:
            return None
        names = [f"{LEASE_PREFIX}-{_dns_part(zone) or 'nozone'}-{n}" for n in range(self._slot_count)]
        first = zlib.crc32(self._holder.encode()) % len(names)
        return names[first:] + names[:first]

    def _list(self, names: frozenset[str]) -> dict[str, objects.LeaseObject]:
        """The existing Leases among these; stores when each version was first read."""
        leases: dict[str, objects.LeaseObject] = {}
        last_written: dict[str, tuple[int, str]] = {}
        for item in Listing(self._transport, self._path, {}):
            lease = _lease_decoder.decode(item)
            name, version = lease.metadata.name, lease.metadata.resource_version
            if name in names:
                leases[name] = lease
            holder = lease.spec.holder_identity
            if holder and name.startswith(f"{LEASE_PREFIX}-") and version.isdecimal():
                last_written[holder] = max(last_written.get(holder, (0, "")), (int(version), name))
        self._last_written = last_written
        now = self._clock()
        for name, lease in leases.items():
            known = self._versions.get(name)
            if known is None or known.version != lease.metadata.resource_version:
                self._versions[name] = _LeaseVersion(lease.metadata.resource_version, now)
        return leases

    def _free(self, lease: objects.LeaseObject) -> bool:
        holder = lease.spec.holder_identity
        if not holder or holder == self._holder:
            return True
        _, last = self._last_written.get(holder, (0, lease.metadata.name))
        if last != lease.metadata.name:
            return True
        known = self._versions[lease.metadata.name]
        lasts_s = lease.spec.lease_duration_seconds or self._duration_s
        return self._clock() - known.read_at >= lasts_s

    def _create(self, name: str) -> bool:
        lease = objects.LeaseObject(objects.Meta(name=name, namespace=self._namespace))
        return self._write(lease, holder=self._holder, new=True)

    def _renew(self) -> None:
        assert self._slot is not None
        if not self._write(self._slot.lease, holder=self._holder):
            self._slot, self.reason = None, "another node has taken the slot"

    def _release(self, *, timeout_s: float | None) -> None:
        slot, self._slot = self._slot, None
        self.reason = "not wanted any more"
        if slot is not None:
            self._write(slot.lease, holder="", timeout_s=timeout_s)

    def _write(
        self, lease: objects.LeaseObject, *, holder: str, new: bool = False, timeout_s: float | None = None
    ) -> bool:
        """Write this holder, empty for none, into a Lease as it was read. False: another agent was faster, or the Lease
        is gone."""
        sent_at = self._clock()
        stamp = timestamps.rfc3339_micro(time.time())
        changes = lease.spec.holder_identity != holder
        metadata = {"name": lease.metadata.name, "namespace": self._namespace}
        if not new:
            metadata["resourceVersion"] = lease.metadata.resource_version
        spec = {
            "holderIdentity": holder,
            "leaseDurationSeconds": int(self._duration_s),
            "acquireTime": stamp if changes else lease.spec.acquire_time or stamp,
            "renewTime": stamp,
            "leaseTransitions": (lease.spec.lease_transitions or 0) + (changes and not new and bool(holder)),
        }
        body = msgspec.json.encode(
            {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
        )
        path = self._path if new else f"{self._path}/{lease.metadata.name}"
        try:
            answer = self._transport.request("POST" if new else "PUT", path, body=body, timeout_s=timeout_s)
        except ApiError as error:
            if error.kind in (OutcomeKind.CONFLICT, OutcomeKind.NOT_FOUND):
                return False
            raise
        if holder:
            self._slot = _Slot(_lease_decoder.decode(answer.body), sent_at)
            self._polling.succeeded()
            self.reason = ""
        return True


def _dns_part(zone: str) -> str:
    """The value of a label as part of an object's name."""
    return re.sub(r"[^a-z0-9.-]+", "-", zone.lower()).strip("-.")
