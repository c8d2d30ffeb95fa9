"""The history of a node in a Prometheus, as the samples of a recording.

Promises:

1. The same samples, in the same form, as from a recorder: every reader of recordings works on them.
2. What the series do not contain is unknown, never assumed, except where `ASSUMED` says so.
3. A metric without any series is named, so that a missing exporter is not a calm node.

Theory of operation. node_exporter has the node, cAdvisor (the kubelet's /metrics/cadvisor) the cgroups. Both are found
by the node's name: by a `node` label, by `instance`, or through `node_uname_info`. The time is read in parts of
`prometheus_client.MAX_POINTS` steps, all metrics of one part before the next, so that memory stays bounded.

A Prometheus shows a series for up to five minutes after its last sample (its lookback), so a stopped exporter looks as
if nothing changed.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

from nodeagent.analysis import prometheus_client
from nodeagent.analysis.prometheus_client import PrometheusClient, PrometheusError, Series
from nodeagent.model import (
    DiskLayout,
    NodeSnapshot,
    Observation,
    Owner,
    Pod,
    PodSource,
    PodUsage,
    PodView,
    QOSClass,
    RecordedSample,
    Signal,
)

KUBELET_DIRS: Final = ("/var/lib/kubelet", "/var/lib", "/var", "/")
"""Mount points that may hold the kubelet's root directory, the nearest first."""
IMAGE_DIRS: Final = ("/var/lib/containerd", "/var/lib/containers/storage", "/var/lib/containers", "/var/lib/docker")
"""Mount points of their own that hold images. Without one, images are on nodefs."""

ASSUMED: Final = (
    "From a Prometheus: each pod counts as one of a ReplicaSet with priority 0 and without a request, because "
    "node_exporter and cAdvisor know neither. Ranking by priority or request, protected owners and PDBs do not show.",
    "From a Prometheus: what a pod frees is its RSS. Shared memory, kernel memory and disk usage of pods are unknown.",
    "From a Prometheus: PSI averages are unknown (the series are totals): a threshold with requireStall is never due.",
    "From a Prometheus: OOM kills have no cause there, so that only an exhausted signal counts as an exhaustion.",
)
"""What such a history cannot tell, and what stands in its place."""

_NODE: Final = {
    "total": "node_memory_MemTotal_bytes",
    "available": "node_memory_MemAvailable_bytes",
    "fs_avail": "node_filesystem_avail_bytes",
    "fs_size": "node_filesystem_size_bytes",
    "fs_free": "node_filesystem_files_free",
    "fs_files": "node_filesystem_files",
    "threads": "node_processes_threads",
    "max_pids": "node_processes_max_processes",
    "boot": "node_boot_time_seconds",
}
"""Metrics of node_exporter. `node_processes_*` needs its collector `processes`."""
_CGROUPS: Final = {
    "working_set": ("container_memory_working_set_bytes", 'id=~"/|/kubepods(\\\\.slice)?"'),
    "limit": ("container_spec_memory_limit_bytes", 'id=~"/kubepods(\\\\.slice)?"'),
    "pod_working_set": ("container_memory_working_set_bytes", 'pod!="",container=""'),
    "pod_rss": ("container_memory_rss", 'pod!="",container=""'),
    "pod_started": ("container_start_time_seconds", 'pod!="",container=""'),
}
"""Metrics of cAdvisor, with what selects their cgroups."""
_MEANING: Final = {
    "available": "memory.available by the kernel",
    "working_set": "memory.available by working set (of the root cgroup)",
    "limit": "allocatableMemory.available (limit of kubepods)",
    "fs_avail": "nodefs.available",
    "fs_free": "nodefs.inodesFree",
    "threads": "pid.available",
    "max_pids": "pid.available",
    "pod_working_set": "the pods",
    "pod_rss": "what pods free (half of the working set instead)",
    "pod_started": "the age of pods",
    "boot": "restarts of the machine",
}
"""What is unknown without a metric."""
_POD_ID: Final = re.compile(
    r"pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32})"
)
_HASHED_NAME: Final = re.compile(r"(-[a-z0-9]{8,10})?-[a-z0-9]{5}$|-[0-9]+$")


class Wanted(NamedTuple):
    """What to read."""

    node: str
    start: float
    """Epoch seconds."""
    step_s: float
    steps: int
    """From `start` on."""


class PrometheusHistory:
    """The samples of one node. `missing` and `remarks` are filled while they are read."""

    def __init__(
        self, client: PrometheusClient, wanted: Wanted, *, part_steps: int = prometheus_client.MAX_POINTS
    ) -> None:
        """`part_steps`: steps of one request. Raises PrometheusError if the server has no series of the node."""
        self._part_steps = part_steps
        self._client = client
        self._wanted = wanted
        self._seen: set[str] = set()
        self._pods: dict[str, Pod] = {}
        self._booted: float | None = None
        self._node = self._node_selector()
        self._cgroup = self._cgroup_selector()

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the history cannot tell. Complete after `samples` has ended."""
        missing = [
            f"{metric} has no series: {_MEANING[key]} is unknown"
            for key, metric in [*_NODE.items(), *[(key, metric) for key, (metric, _) in _CGROUPS.items()]]
            if key in _MEANING and key not in self._seen
        ]
        return (*dict.fromkeys(missing), *ASSUMED)

    def samples(self, *, progress: Callable[[int, int], None] | None = None) -> Iterator[RecordedSample]:
        """Oldest first. `progress` gets the steps so far and all of them. Raises PrometheusError."""
        wanted, done, found = self._wanted, 0, False
        while done < wanted.steps:
            count = min(self._part_steps, wanted.steps - done)
            start = wanted.start + done * wanted.step_s
            for sample in self._part(start, count):
                found = True
                yield sample
            done += count
            if progress is not None:
                progress(done, wanted.steps)
        if not found:
            raise PrometheusError(f"{_NODE['total']} of {wanted.node} has no value in this time")

    # --- which series

    def _node_selector(self) -> str:
        name = prometheus_client.quoted(self._wanted.node)
        by_instance = prometheus_client.quoted(f"{re.escape(self._wanted.node)}(:[0-9]+)?")
        for labels in self._find(f"node_uname_info{{nodename={name}}}"):
            if instance := labels.get("instance"):
                return f"instance={prometheus_client.quoted(instance)}"
        for selector in (f"node={name}", f"instance=~{by_instance}", f"kubernetes_node={name}"):
            if self._find(f"{_NODE['total']}{{{selector}}}"):
                return selector
        known = sorted({each.get("instance", "?") for each in self._find(_NODE["total"])})
        listed = f"; it has {', '.join(known[:5])}" if known else f"; it has no {_NODE['total']} at all"
        raise PrometheusError(f"no series of node_exporter for the node {self._wanted.node}{listed}")

    def _cgroup_selector(self) -> str:
        name = prometheus_client.quoted(self._wanted.node)
        by_instance = prometheus_client.quoted(f"{re.escape(self._wanted.node)}(:[0-9]+)?")
        metric, _ = _CGROUPS["working_set"]
        for selector in (f"node={name}", f"instance=~{by_instance}", f"kubernetes_io_hostname={name}", self._node):
            if self._find(f'{metric}{{{selector},id="/"}}') or self._find(f'{metric}{{{selector},pod!=""}}'):
                return selector
        return f"node={name}"  # no cAdvisor: `remarks` names its metrics

    def _find(self, selector: str) -> list[Mapping[str, str]]:
        wanted = self._wanted
        return self._client.series(selector, start=wanted.start, end=wanted.start + wanted.step_s * wanted.steps)

    # --- values

    def _query(self, key: str, start: float, count: int) -> list[Series]:
        if key in _NODE:
            query = f"{_NODE[key]}{{{self._node}}}"
        else:
            metric, which = _CGROUPS[key]
            query = f"{metric}{{{self._cgroup},{which}}}"
        series = self._client.query_range(query, start=start, step_s=self._wanted.step_s, count=count)
        if any(each.points for each in series):
            self._seen.add(key)
        return sorted(series, key=lambda each: sorted(each.labels.items()))

    def _part(self, start: float, count: int) -> Iterator[RecordedSample]:
        node = {key: self._query(key, start, count) for key in _NODE}
        cgroups = {key: self._query(key, start, count) for key in _CGROUPS}
        disks = _Disks(node)
        pods = _PodSeries(cgroups, self._pods)
        if self._booted is None:
            self._booted = next((each for n in range(count) if (each := _value(node["boot"], n)) is not None), None)
        for number in range(count):
            total = _value(node["total"], number)
            if total is None:
                continue
            wall = start + number * self._wanted.step_s
            # The machine was not restarted by a step without its boot time.
            found = _value(node["boot"], number)
            if found is not None and found < wall:
                self._booted = found
            at = wall - self._booted if self._booted is not None and self._booted < wall else wall
            observations = _memory(cgroups, number, total=int(total), at=at)
            observations |= disks.observations(number, at=at)
            observations[Signal.PID] = _pids(node, number, at=at)
            available = _value(node["available"], number)
            snapshot = NodeSnapshot(
                node=self._wanted.node,
                taken_at=at,
                wall_time=wall,
                observations={signal: observations.get(signal) or _unknown(signal, at) for signal in Signal},
                mem_available=_observed(Signal.MEMORY, available, total, at, _NODE["available"]),
                layout=disks.layout,
                pods=pods.views(number, at=at, wall=wall),
                pods_synced_at=at,
            )
            yield RecordedSample(snapshot)


def _value(series: list[Series], number: int) -> float | None:
    """The first series that has a value there: replicas of a Prometheus have each series twice."""
    for each in series:
        value = each.points.get(number)
        if value is not None:
            return value
    return None


def _observed(signal: Signal, available: float | None, capacity: float | None, at: float, source: str) -> Observation:
    if available is None or capacity is None:
        return _unknown(signal, at)
    return Observation(signal, int(available), int(capacity), at, source)


def _unknown(signal: Signal, at: float) -> Observation:
    return Observation(signal, None, None, at, "", reason="not in the Prometheus")


def _memory(cgroups: Mapping[str, list[Series]], number: int, *, total: int, at: float) -> dict[Signal, Observation]:
    """Both memory signals, by working set."""
    source = _CGROUPS["working_set"][0]
    root = [each for each in cgroups["working_set"] if each.labels.get("id") == "/"]
    pods = [each for each in cgroups["working_set"] if each.labels.get("id") != "/"]
    used, used_by_pods, limit = _value(root, number), _value(pods, number), _value(cgroups["limit"], number)
    found = {}
    if used is not None:
        found[Signal.MEMORY] = Observation(Signal.MEMORY, max(0, total - int(used)), total, at, source)
    if used_by_pods is not None and limit is not None and 0 < limit <= total:
        amount = max(0, int(limit - used_by_pods))
        found[Signal.ALLOCATABLE_MEMORY] = Observation(Signal.ALLOCATABLE_MEMORY, amount, int(limit), at, source)
    return found


def _pids(node: Mapping[str, list[Series]], number: int, *, at: float) -> Observation:
    threads, most = _value(node["threads"], number), _value(node["max_pids"], number)
    return _observed(
        Signal.PID, None if threads is None or most is None else most - threads, most, at, _NODE["threads"]
    )


class _Disks:
    """The file systems behind the disk signals, by the mount points of node_exporter."""

    def __init__(self, node: Mapping[str, list[Series]]) -> None:
        self._node = node
        mounted = {each.labels.get("mountpoint", ""): each.labels.get("device", "") for each in node["fs_size"]}
        self._nodefs = next((path for path in KUBELET_DIRS if path in mounted), "")
        own = next((path for path in IMAGE_DIRS if path in mounted), "")
        separate = own and mounted[own] != mounted.get(self._nodefs)
        self._imagefs = own if separate else self._nodefs
        self.layout = DiskLayout.UNKNOWN
        if self._nodefs:
            self.layout = DiskLayout.DEDICATED_IMAGEFS if separate else DiskLayout.SINGLE

    def observations(self, number: int, *, at: float) -> dict[Signal, Observation]:
        places = {
            (Signal.NODEFS, Signal.NODEFS_INODES): self._nodefs,
            (Signal.IMAGEFS, Signal.IMAGEFS_INODES): self._imagefs,
            (Signal.CONTAINERFS, Signal.CONTAINERFS_INODES): self._imagefs,
        }
        found = {}
        for (space, inodes), path in places.items():
            values = {key: self._at(key, path, number) for key in ("fs_avail", "fs_size", "fs_free", "fs_files")}
            found[space] = _observed(space, values["fs_avail"], values["fs_size"], at, _NODE["fs_avail"])
            found[inodes] = _observed(inodes, values["fs_free"], values["fs_files"], at, _NODE["fs_free"])
        return found

    def _at(self, key: str, path: str, number: int) -> float | None:
        return _value([each for each in self._node[key] if path and each.labels.get("mountpoint") == path], number)


class _PodSeries:
    """The pods of one part of the time."""

    def __init__(self, cgroups: Mapping[str, list[Series]], known: dict[str, Pod]) -> None:
        self._known = known
        self._rss = _by_cgroup(cgroups["pod_rss"])
        self._started = _by_cgroup(cgroups["pod_started"])
        self._working_sets = list(_by_cgroup(cgroups["pod_working_set"]).values())

    def views(self, number: int, *, at: float, wall: float) -> tuple[PodView, ...]:
        found = []
        for series in self._working_sets:
            used = series.points.get(number)
            if used is None:
                continue
            cgroup = series.labels["id"]
            pod = self._known.get(cgroup)
            if pod is None:
                started = self._started.get(cgroup)
                pod = _pod(series.labels, started=None if started is None else started.points.get(number), wall=wall)
                self._known[cgroup] = pod
            rss = self._rss.get(cgroup)
            freed = None if rss is None else rss.points.get(number)
            usage = PodUsage(
                pod.cgroup_uid,
                pod.qos_class,
                cgroup,
                at,
                memory_working_set=int(used),
                memory_unreclaimable=None if freed is None else int(freed),
            )
            found.append(PodView(pod, usage))
        return tuple(found)


def _by_cgroup(series: list[Series]) -> dict[str, Series]:
    """The series of pod cgroups. Two replicas have the same cgroup: the first one counts."""
    found: dict[str, Series] = {}
    for each in series:
        cgroup = each.labels.get("id", "")
        if _POD_ID.search(cgroup):
            found.setdefault(cgroup, each)
    return found


def _pod(labels: Mapping[str, str], *, started: float | None, wall: float) -> Pod:
    """A pod as cAdvisor knows it; `ASSUMED` has the rest."""
    cgroup, name, namespace = labels["id"], labels.get("pod", ""), labels.get("namespace", "")
    match = _POD_ID.search(cgroup)
    assert match is not None
    uid = match[1].replace("_", "-")
    qos = QOSClass.GUARANTEED
    if "besteffort" in cgroup:
        qos = QOSClass.BEST_EFFORT
    elif "burstable" in cgroup:
        qos = QOSClass.BURSTABLE
    owner = _HASHED_NAME.sub("", name) or name
    began = started if started is not None and 0 < started <= wall else wall
    return Pod(
        uid,
        uid,
        namespace or None,
        name or None,
        PodSource.API,
        qos,
        priority=0,
        phase="Running",
        created_wall=began,
        started_wall=began,
        owner=Owner("ReplicaSet", owner, f"{namespace}/{owner}"),
        ready=True,
    )
