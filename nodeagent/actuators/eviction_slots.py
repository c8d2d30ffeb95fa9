"""A seat among the few nodes of a zone that may evict softly at once, so that one bad release cannot empty a fleet.

Theory of operation. There are K Leases `nodeagent-evictions-ZONE-0` to `K-1`; who holds one may evict. `want` says that
the soft tier would act now; a worker then takes a seat, renews it while it is wanted, and gives it back `KEEP_S` after
it was wanted last. Every write carries the resourceVersion that it was decided by: of two agents that reach for one
seat the server refuses one (409).

    no such Lease                     create it, held by us
    held by nobody, or by us before   take it
    held by another, unchanged for    take it over
      its leaseDurationSeconds
    held by another otherwise         try the next; when there is none, look again later

Wall clocks are never compared. A holder's time runs on our clock from the moment at which *we* saw its last renewal;
our own time runs from the moment at which our renewal was *sent*, which is before anybody can have seen it. So we stop
believing in our seat before anybody else may take it, however far apart the clocks are.

Promises:

1. `want` and `held` never wait. Only the soft tier asks; the hard tier never does.
2. Whoever cannot reach the API server has no seat.
3. A seat is kept under the node's name: a restarted agent finds its own again, and never has two.
4. Another holder of several Leases, of whatever zones, has the one that was written last and no other: no agent can
   keep every zone from evicting.
"""

import random
import re
import threading
import time
import zlib
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from nodeagent.kube import objects
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.backoff import RetryBackoff
from nodeagent.kube.list_stream import Listing
from nodeagent.kube.timestamps import boottime, micro_stamp
from nodeagent.kube.transport import Transport
from nodeagent.model import OutcomeKind
from nodeagent.runtime import workers

PREFIX: Final = "nodeagent-evictions"
KEEP_S: Final = 20.0
"""A seat is given back this long after it was last wanted: longer than a decision takes to look again, short against
the minutes for which others may be waiting."""
RENEW_SHARE: Final = 1 / 3
"""Of the duration, between two renewals: one may get lost."""
LOOK_FIRST_S: Final = 5.0
LOOK_LAST_S: Final = 30.0
"""How often a full zone is looked at, with jitter: 5,000 waiting nodes then make 170 to 220 small lists a second. The
very first look waits for a random part of the first."""

_lease_decoder = objects.Decoder(objects.LeaseObject)


class _Seen(NamedTuple):
    """A Lease as it was when we first saw it so."""

    version: str
    at: float


class _Slot(NamedTuple):
    """What we hold."""

    lease: objects.LeaseObject
    sent_at: float
    """When the request that took or renewed it was sent."""


class EvictionSlots:
    """The worker."""

    def __init__(
        self,
        transport: Transport,
        *,
        holder: str,
        zone: Callable[[], str | None],
        seats: int,
        namespace: str,
        duration_s: float,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = boottime,
        keep_s: float = KEEP_S,
        look_s: tuple[float, float] = (LOOK_FIRST_S, LOOK_LAST_S),
    ) -> None:
        """`holder` is the node's name. `zone` gives its zone, "" when it has none, None while that is not known."""
        self._transport = transport
        self._holder = holder
        self._zone = zone
        self._seats = seats
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._namespace = namespace
        self._duration_s = float(max(1, round(duration_s)))
        self._wake = wake
        self._clock = clock
        self._keep_s = keep_s
        self._looking = RetryBackoff(first_s=look_s[0], last_s=look_s[1])
        self._spread_s = look_s[0]
        self._rng = random.Random()  # noqa: S311 - spreads load, guards nothing
        self._failing = RetryBackoff()
        self._changed = threading.Condition()
        self._wanted_at = float("-inf")
        self._not_before = float("-inf")
        self._stopping = False
        self._seat: _Slot | None = None
        self._seen: dict[str, _Seen] = {}
        self._last_of: dict[str, tuple[int, str]] = {}
        """Each holder's Lease that was written last: its version and name."""
        self.reason = "it has not been asked for yet"
        """Why no seat is held."""
        self._thread = workers.make_thread(self._run, name="eviction-slots")

    def start(self) -> None:
        """Begin; nothing is sent before the first `want`."""
        workers.start(self._thread)

    def want(self) -> None:
        """The soft tier would evict now. Say it as long as that is so."""
        with self._changed:
            now = self._clock()
            if self._seat is None and not self._wanted():
                # A fleet whose grace periods end in the same second does not look in the same second.
                self._not_before = max(self._not_before, now + self._rng.uniform(0.0, self._spread_s))
            self._wanted_at = now
            self._changed.notify()

    def held(self) -> bool:
        """Whether we may evict now."""
        seat = self._seat
        return seat is not None and self._clock() < seat.sent_at + self._duration_s

    def stop(self, *, clear: bool = True, timeout_s: float = 2.0) -> None:
        """Stop; `clear` gives the seat back. Raises `ApiError` when the server refuses that."""
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
        """Do what is due now. For the worker, and for a simulation that has a clock of its own instead of one."""
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
        """Until there is something to do; 0: now; infinite: until `want`."""
        now, seat = self._clock(), self._seat
        pause_s = max(0.0, self._not_before - now)
        if seat is None:
            return pause_s if self._wanted() else float("inf")
        if not self._wanted():
            return pause_s
        until_unwanted_s = self._wanted_at + self._keep_s - now
        return max(pause_s, min(seat.sent_at + self._duration_s * RENEW_SHARE - now, until_unwanted_s))

    def _act(self, wanted: bool) -> None:
        if self._seat is not None and not self.held():
            self._seat, self.reason = None, "the seat was not renewed in time"
        if self._seat is None:
            if wanted:
                self._take()
        elif wanted:
            self._renew()
        else:
            self._release(timeout_s=None)

    def _take(self) -> None:
        """Look at all seats once; take one that is free."""
        names = self._names()
        if names is None:
            self.reason = "the node's zone is not known yet"
            self._not_before = self._clock() + self._failing.failed()
            return
        known = self._look(frozenset(names))
        # Ours first, from before a restart or an answer that got lost: nobody needs two seats.
        ours = {name for name, lease in known.items() if lease.spec.holder_identity == self._holder}
        for name in sorted(names, key=lambda name: name not in ours):
            lease = known.get(name)
            if lease is None:
                if self._create(name):
                    return
            elif self._free(lease) and self._write(lease, holder=self._holder):
                return
        holders = sorted({lease.spec.holder_identity or "nobody" for lease in known.values()})
        self.reason = f"all {self._seats} seats of the zone are taken, by {', '.join(holders[:5])}"
        self._not_before = self._clock() + self._looking.failed()

    def _names(self) -> list[str] | None:
        """All seats, in an order that begins with another one on each node."""
        zone = self._zone()
        if zone is None:
            return None
        names = [f"{PREFIX}-{_dns(zone) or 'nozone'}-{n}" for n in range(self._seats)]
        first = zlib.crc32(self._holder.encode()) % len(names)
        return names[first:] + names[:first]

    def _look(self, names: frozenset[str]) -> dict[str, objects.LeaseObject]:
        """The Leases that there are, and when they were first seen so."""
        found: dict[str, objects.LeaseObject] = {}
        last_of: dict[str, tuple[int, str]] = {}
        for item in Listing(self._transport, self._path, {}):
            lease = _lease_decoder.decode(item)
            name, version = lease.metadata.name, lease.metadata.resource_version
            if name in names:
                found[name] = lease
            holder = lease.spec.holder_identity
            if holder and name.startswith(f"{PREFIX}-") and version.isdecimal():
                last_of[holder] = max(last_of.get(holder, (0, "")), (int(version), name))
        self._last_of = last_of
        now = self._clock()
        for name, lease in found.items():
            seen = self._seen.get(name)
            if seen is None or seen.version != lease.metadata.resource_version:
                self._seen[name] = _Seen(lease.metadata.resource_version, now)
        return found

    def _free(self, lease: objects.LeaseObject) -> bool:
        holder = lease.spec.holder_identity
        if not holder or holder == self._holder:
            return True
        _, last = self._last_of.get(holder, (0, lease.metadata.name))
        if last != lease.metadata.name:
            return True
        seen = self._seen[lease.metadata.name]
        lasts_s = lease.spec.lease_duration_seconds or self._duration_s
        return self._clock() - seen.at >= lasts_s

    def _create(self, name: str) -> bool:
        lease = objects.LeaseObject(objects.Meta(name=name, namespace=self._namespace))
        return self._write(lease, holder=self._holder, new=True)

    def _renew(self) -> None:
        assert self._seat is not None
        if not self._write(self._seat.lease, holder=self._holder):
            self._seat, self.reason = None, "somebody else has taken the seat"

    def _release(self, *, timeout_s: float | None) -> None:
        seat, self._seat = self._seat, None
        self.reason = "it is not wanted any more"
        if seat is not None:
            self._write(seat.lease, holder="", timeout_s=timeout_s)

    def _write(
        self, lease: objects.LeaseObject, *, holder: str, new: bool = False, timeout_s: float | None = None
    ) -> bool:
        """Write us, or nobody, into a Lease as it was seen. False: somebody else was faster, or it is gone."""
        sent_at = self._clock()
        stamp = micro_stamp(time.time())
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
            self._seat = _Slot(_lease_decoder.decode(answer.body), sent_at)
            self._looking.succeeded()
            self.reason = ""
        return True


def _dns(zone: str) -> str:
    """A label's value as a part of an object's name."""
    return re.sub(r"[^a-z0-9.-]+", "-", zone.lower()).strip("-.")
