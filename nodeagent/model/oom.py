"""OOM kills: what the kernel counted, and which pod, container or service of the host each kill belongs to."""

import enum
from typing import NamedTuple


class OomLevel(enum.StrEnum):
    """What a cgroup is."""

    CONTAINER = "container"
    POD = "pod"
    KUBEPODS = "kubepods"
    """kubepods or a cgroup of a QoS class: its limit is the node's allocatable memory."""
    HOST = "host"
    """Outside kubepods: a service, a slice, a session, or the root of the hierarchy."""


class OomPlace(NamedTuple):
    """A cgroup by its path, and what it is."""

    path: str
    """Below the hierarchy's root. `/`: the root itself."""
    level: OomLevel
    cgroup_uid: str = ""
    """The pod's UID in the cgroup's name; empty outside pods."""
    container_id: str = ""


class OomEvents(NamedTuple):
    """`oom`, `oom_kill` and `oom_group_kill` of memory.events, or the differences between two readings of them."""

    ooms: int = 0
    """How often the limit was reached and an allocation was about to fail."""
    kills: int = 0
    """Processes that were killed."""
    group_kills: int = 0
    """How often the whole cgroup was killed (memory.oom.group)."""

    def minus(self, other: "OomEvents") -> "OomEvents":
        return OomEvents(self.ooms - other.ooms, self.kills - other.kills, self.group_kills - other.group_kills)

    def plus(self, other: "OomEvents") -> "OomEvents":
        return OomEvents(self.ooms + other.ooms, self.kills + other.kills, self.group_kills + other.group_kills)


class OomCount(NamedTuple):
    """The new events of one cgroup since the last reading."""

    place: OomPlace
    own: OomEvents
    """In the cgroup itself. Of a container: also in the cgroups that it made."""
    gone: OomEvents = OomEvents()
    """In child cgroups that no longer exist."""
    present: frozenset[str] = frozenset()
    """Container ids or pod UIDs of the child cgroups that exist."""
    causes_known: bool = True
    """False: the kernel does not count `oom` here (cgroup v1), so no limit can be found from it."""


class OomTotals(NamedTuple):
    """The last counters of one cgroup."""

    inode: int
    """0: not known."""
    all: OomEvents
    """With its descendants."""
    own: OomEvents | None
    """Without them; None: the kernel does not count it (before Linux 5.2)."""


class LoggedKill(NamedTuple):
    """One killed process in the kernel log."""

    sequence: int
    at: float
    """Seconds on the clock of the kernel log, which stands still while the machine is suspended."""
    pid: int
    name: str
    rss: int | None
    """Bytes that it had in memory."""
    place: OomPlace | None
    """Its cgroup; None: not logged."""
    limit: OomPlace | None
    """The cgroup whose limit was reached; None: the memory of the node, or not logged."""
    numa: bool = False
    """The memory of the NUMA nodes that it may use was exhausted, not that of the whole node."""


class OomCause(enum.StrEnum):
    """Why the kernel killed. The value is a metric label."""

    CONTAINER_LIMIT = "container-limit"
    """The container reached its own memory limit."""
    POD_LIMIT = "pod-limit"
    """The pod reached its own memory limit."""
    ALLOCATABLE = "allocatable"
    """All pods together reached the node's allocatable memory, the limit of kubepods."""
    HOST_LIMIT = "host-limit"
    """A cgroup outside kubepods reached its own limit."""
    NUMA = "numa"
    """The NUMA nodes that the process may use had no memory left."""
    NODE = "node"
    """The node had no memory left."""
    UNKNOWN = "unknown"
    """The kernel counts no cause (cgroup v1) and its log cannot be read or lacks it."""

    @property
    def own_limit(self) -> bool:
        """True if the limit belongs to the pod, the container or the service alone."""
        return self in (OomCause.CONTAINER_LIMIT, OomCause.POD_LIMIT, OomCause.HOST_LIMIT)

    @property
    def race(self) -> bool:
        """True if an eviction in time would have prevented it."""
        return self in (OomCause.ALLOCATABLE, OomCause.NODE)


class OomProcess(NamedTuple):
    """A killed process, from the kernel log."""

    pid: int
    name: str
    rss: int | None
    logged_at: float
    """As `LoggedKill.at`."""


class OomKill(NamedTuple):
    """Processes of one pod, container or host cgroup that the kernel killed for one cause."""

    number: int
    """How many processes."""
    cause: OomCause
    place: OomPlace | None
    """None: unattributed."""
    pod: str = ""
    """`namespace/name`, or the UID where the name is not known; empty outside pods."""
    container: str = ""
    """Name of the container, or its id; empty if it is not known, or outside pods."""
    group: bool = False
    """memory.oom.group: every process of the cgroup was killed."""
    limit: str = ""
    """Path of the cgroup whose limit was reached."""
    processes: tuple[OomProcess, ...] = ()
    """Those that the kernel log names."""

    @property
    def victim(self) -> str:
        """`pod`, `host` or `unattributed`: a metric label."""
        if self.place is None:
            return "unattributed"
        return "host" if self.place.level is OomLevel.HOST else "pod"


class MemorySample(NamedTuple):
    """One node sample for the record of an OOM kill. PSI in percent, of the last full sample."""

    at: float
    working_set_available: int | None
    """`memory.available` as the kubelet computes it."""
    mem_available: int | None
    """The kernel's MemAvailable."""
    some_avg10: float | None
    full_avg10: float | None

    @property
    def lowest(self) -> int | None:
        """The lower of the two known figures."""
        return min(
            [each for each in (self.working_set_available, self.mem_available) if each is not None], default=None
        )


class RaceLoss(enum.StrEnum):
    """Why a shortage of the node ended in OOM kills instead of an eviction. The value is a metric label."""

    NOT_RUNNING = "not-running"
    """The agent was not running, or had made no decision yet."""
    NO_THRESHOLD = "no-threshold"
    """No hard memory threshold is configured."""
    NOT_MET = "not-met"
    """No threshold was met at the last decision: memory fell too fast, or the threshold is too low."""
    DRY_RUN = "dry-run"
    """A threshold was met, and the agent only decides."""
    IN_FLIGHT = "in-flight"
    """An eviction was in flight and came too late."""
    REFUSED = "refused"
    """A threshold was met, and no pod was evicted: the refusals have the reasons."""


class LostRace(NamedTuple):
    """A shortage of the node that ended in OOM kills instead of an eviction."""

    loss: RaceLoss
    threshold: str
    """The nearest hard threshold as configured; empty if there is none."""
    deficit: int | None
    """Bytes by which the last sample before the kill was below that threshold; negative: above it. None: unknown."""
    before_s: float | None
    """How long before the kill that sample was taken."""
    met: bool
    """A threshold of the signal was met at the last decision."""
    in_flight: tuple[str, ...] = ()
    """Pods whose eviction was in flight."""
    victims: tuple[str, ...] = ()
    """The pods that the policy would have evicted."""
    refusals: tuple[str, ...] = ()
    """`code: message` of what kept the last decision, or this one, from evicting."""


class OomReport(NamedTuple):
    """The kills that one reading found, as they are logged, recorded and sent."""

    id: str
    """As in `nodeagent explain`."""
    at: float
    """When they were found."""
    killed_at: float | None
    """When the first one happened by the kernel log, on CLOCK_BOOTTIME; None: not logged."""
    kills: tuple[OomKill, ...]
    samples: tuple[MemorySample, ...] = ()
    race: LostRace | None = None
    """None: no race, each kill has a limit of its own as its cause."""
    while_down: bool = False
    """They happened while the agent was not running."""
