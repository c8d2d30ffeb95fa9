"""The simulated clock and API server of `benchmarks.fleet`, and the requests that a calm node makes.

Modelled: the loop of `kube.list_watch` and the heartbeat of `actuators.conditions`, with their own periods and
back-offs. Latency and other clients are not modelled.
"""

import contextlib
import heapq
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from benchmarks.fleet_traffic import VERBS
from nodeagent.actuators import conditions
from nodeagent.config.schema import ConditionsConfig, DampingConfig, StandardConditions
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.api_responses import Response
from nodeagent.kube.backoff import RetryBackoff
from nodeagent.kube.list_watch import WATCH_S
from nodeagent.model import OutcomeKind

EVER = float("inf")
HEARTBEAT_S = ConditionsConfig().heartbeat_s
ATTEMPT = "no connection"
"""The kind of a request that reaches no server."""


class Outage(NamedTuple):
    """No request reaches the API server, and each watch breaks at its begin."""

    begin: float
    end: float
    expired: bool = False
    """The server has lost the history of its objects: each watch gets 410 and lists again."""


class Scenario(NamedTuple):
    name: str
    slots: int = 0
    standard: StandardConditions = StandardConditions.REASSERT
    capacity: int = 1_000_000
    """Requests per second that the server accepts."""
    jitter: float = DampingConfig().jitter
    pressure: bool = True
    """All nodes cross the soft threshold within the first second."""
    outage: Outage | None = None
    rolling_update: bool = False
    horizon_s: float = 420.0


class _LeaseList(NamedTuple):
    """The body of a list of Leases."""

    body: bytes

    def chunks(self) -> Iterator[bytes]:
        yield self.body


class World:
    """The simulated clock, and the API server."""

    def __init__(self, scenario: Scenario) -> None:
        self.now = 0.0
        self.scenario = scenario
        self.seconds: dict[str, Counter[int]] = {}
        """Requests by kind and second."""
        self.total: Counter[int] = Counter()
        """Requests that reached the server, by second."""
        self.refused = 0
        self.leases: dict[str, dict[str, Any]] = {}
        self._version = itertools.count(1)
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()

    def at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (when, next(self._number), act))

    def run(self) -> None:
        while self._agenda and self._agenda[0][0] <= self.scenario.horizon_s:
            self.now, _, act = heapq.heappop(self._agenda)
            act()

    @property
    def reachable(self) -> bool:
        outage = self.scenario.outage
        return outage is None or not outage.begin <= self.now < outage.end

    def send(self, kind: str) -> None:
        """One request. Raises ApiError without a connection, and (429) above the server's capacity."""
        second = int(self.now)
        if not self.reachable:
            self.seconds.setdefault(ATTEMPT, Counter())[second] += 1
            raise ApiError(OutcomeKind.UNREACHABLE, "connection refused")
        self.total[second] += 1
        self.seconds.setdefault(kind, Counter())[second] += 1
        if self.total[second] > self.scenario.capacity:
            self.refused += 1
            raise ApiError(OutcomeKind.TOO_MANY_REQUESTS, "too many requests", status=429, retry_after_s=1.0)

    # --- the part of a transport that `EvictionSlots` uses

    request_timeout_s = 10.0

    @contextlib.contextmanager
    def stream(self, path: str, *, idle_s: float, total_s: float, user: str | None = None) -> Iterator["_LeaseList"]:
        del path, idle_s, total_s, user
        self.send("list leases")
        listed = {"kind": "LeaseList", "metadata": {"resourceVersion": "1"}, "items": list(self.leases.values())}
        yield _LeaseList(json.dumps(listed).encode())

    def request(self, method: str, path: str, *, body: bytes | None = None, timeout_s: float | None = None) -> Response:
        del path, timeout_s
        self.send(f"{VERBS[method]} leases")
        lease = json.loads(body or b"{}")
        name = lease["metadata"]["name"]
        known = self.leases.get(name)
        version = lease["metadata"].get("resourceVersion")
        if (known is None) != (method == "POST") or (known and known["metadata"]["resourceVersion"] != version):
            raise ApiError(OutcomeKind.CONFLICT, "conflict", status=409)
        lease["metadata"]["resourceVersion"] = str(next(self._version))
        self.leases[name] = lease
        return Response(200, {}, json.dumps(lease).encode())


class Watch:
    """One watch that has been open for a random part of its time. It ends, breaks, and is opened again."""

    def __init__(self, world: World, resource: str, rng: random.Random) -> None:
        self._world = world
        self._resource = resource
        self._rng = rng
        self._backoff = RetryBackoff(rng=rng)
        self._opening = 0
        self._expired = self._lists = False
        self.broken_since: float | None = None
        """None while it is open."""
        self.restored_at: float | None = None
        """When it was open again after an outage."""
        self._stays_open(rng.random())

    def close(self) -> None:
        """The agent has stopped."""
        self._opening += 1

    def reopen(self) -> None:
        """The agent has started again, and its first requests have opened the watch."""
        self._stays_open()

    def _stays_open(self, rest: float = 1.0) -> None:
        if self.broken_since is not None:
            self.broken_since, self.restored_at = None, self._world.now
        self._opening += 1
        opening, outage = self._opening, self._world.scenario.outage
        ends_at = self._world.now + rest * WATCH_S * self._rng.uniform(1.0, 1.5)
        if outage and self._world.now < outage.begin < ends_at:
            self._world.at(outage.begin, lambda: self._break(opening))
        else:
            self._world.at(ends_at, lambda: self._open(opening))

    def _break(self, opening: int) -> None:
        if opening == self._opening:
            self.broken_since = self._world.now
            outage = self._world.scenario.outage
            self._expired = outage is not None and outage.expired
            self._backoff.succeeded()
            self._world.at(self._world.now + self._backoff.failed(), lambda: self._open(opening))

    def _open(self, opening: int) -> None:
        if opening != self._opening:
            return  # the agent has stopped meanwhile
        try:
            if self._lists:
                self._world.send(f"list {self._resource}")
                self._lists = False
            self._world.send(f"watch {self._resource}")
            if self._expired:
                self._expired, self._lists = False, True
                raise ApiError(OutcomeKind.SERVER_ERROR, "expired", status=410)
        except ApiError as error:
            if self.broken_since is None:
                self.broken_since = self._world.now
            wait_s = self._backoff.failed(error.retry_after_s)
            self._world.at(self._world.now + wait_s, lambda: self._open(opening))
            return
        self._stays_open()


class Heartbeat:
    """The patch that renews the node's own conditions."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world = world
        self._rng = rng
        self._backoff = RetryBackoff(rng=rng)
        world.at(rng.random() * HEARTBEAT_S, self._beat)

    def _beat(self) -> None:
        wait_s = HEARTBEAT_S * self._rng.uniform(0.9, 1.0)
        try:
            self._world.send("patch nodes/status (heartbeat)")
        except ApiError as error:
            wait_s = conditions.wait_after(error, self._backoff)
        else:
            self._backoff.succeeded()
        self._world.at(self._world.now + wait_s, self._beat)
