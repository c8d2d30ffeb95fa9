"""Every worker works again after any error and any response."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nodeagent.actuators.cluster_session import ClusterSession
from nodeagent.actuators.conditions import NodeConditions
from nodeagent.actuators.event_writer import EventReason, EventWriter, KubernetesEvent
from nodeagent.actuators.eviction_slots import EvictionSlots
from nodeagent.actuators.evictions import EvictionSender
from nodeagent.actuators.taints import NodeTaints
from nodeagent.config.schema import Config
from nodeagent.kube.backoff import RetryBackoff
from nodeagent.kube.credentials import Credentials, find_credentials
from nodeagent.kube.node_identity import Identity
from nodeagent.kube.node_watch import NodeWatch
from nodeagent.kube.pdb_watch import PdbWatch
from nodeagent.kube.pod_decoder import decode_pod
from nodeagent.kube.pod_watch import PodWatch
from nodeagent.kube.transport import Transport
from nodeagent.kube.volume_lookup import VolumeLookup
from nodeagent.model import ConditionStatus, ConditionType, ConditionVerdict, OutcomeKind
from nodeagent.runtime import workers
from nodeagent.runtime.clock import boottime
from nodeagent.runtime.periodic import Periodic
from nodeagent.sampling.disk.attribution import PodDiskMeter
from nodeagent.sampling.disk.walk_worker import DiskWorker, WalkRequest
from nodeagent.sampling.hostfs.host import FileSystem, Host, Unreadable
from nodeagent.sampling.hostfs.statvfs_timeout import StatvfsWithTimeout
from tests.fake_kube import Answer, ApiServer, pod
from tests.fake_kube import Request as HttpRequest
from tests.support.disk_trees import node as disk_node
from tests.support.disk_trees import pod as disk_pod
from tests.support.livenode import until
from tests.support.victims import victim

ERRORS = (
    ValueError("no such thing"),
    KeyError("metadata"),
    RecursionError("maximum recursion depth exceeded"),
    MemoryError(),
    OverflowError("int too large to convert to float"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    OSError(24, "Too many open files"),
)


class FaultyTransport(Transport):
    """Raises what it was given, once for each of the next requests."""

    def __init__(self, credentials: Credentials) -> None:
        self.faults: list[Exception] = []
        super().__init__(credentials, request_timeout_s=5.0)

    def request(self, *arguments: Any, **options: Any) -> Any:
        if self.faults:
            raise self.faults.pop()
        return super().request(*arguments, **options)

    def stream(self, *arguments: Any, **options: Any) -> Any:
        if self.faults:
            raise self.faults.pop()
        return super().stream(*arguments, **options)


class HostileServer(ApiServer):
    """Answers each path with something else, the first times that it is asked for."""

    body: bytes = b""
    times = 0

    def answer(self, request: HttpRequest) -> Any:
        asked = (request.method, request.path, request.query.get("watch", ""))
        self.asked[asked] = self.asked.get(asked, 0) + 1
        if self.asked[asked] <= self.times:
            return Answer(200 if request.method != "POST" else 201, self.body)
        return super().answer(request)

    def __init__(self, **options: Any) -> None:
        self.asked: dict[tuple[str, str, str], int] = {}
        super().__init__(**options)


class Running(NamedTuple):
    """A worker at work."""

    works: Callable[[], object]
    """Whether it has done what it is for."""
    stop: Callable[[], None]


Start = Callable[[FaultyTransport, ApiServer], Running]


def _identity(transport: FaultyTransport, _: ApiServer) -> Running:
    backoff = RetryBackoff(first_s=0.05, last_s=0.1)
    guess = Identity("lab-node", "test")
    session = ClusterSession(transport, Config(), guess, wake=lambda: None, backoff=backoff)
    session.start()
    return Running(lambda: session.identity() and session.pods().synced_at, lambda: void(session.stop(clear=False)))


def void(_: object) -> None:
    """For a callable that has an answer."""


def _pods(transport: FaultyTransport, _: ApiServer) -> Running:
    watch = PodWatch(transport, "lab-node", backoff=RetryBackoff(first_s=0.05, last_s=0.1))
    watch.start()
    return Running(lambda: {each.name for each in watch.view().pods} == {"one"}, watch.stop)


def _node(transport: FaultyTransport, _: ApiServer) -> Running:
    watch = NodeWatch(transport, "lab-node", backoff=RetryBackoff(first_s=0.05, last_s=0.1))
    watch.start()
    return Running(lambda: watch.view() is not None and not watch.reason, watch.stop)


def _pdbs(transport: FaultyTransport, api: ApiServer) -> Running:
    api.set_pdb("keep", {"app": "a"}, allowed=1)
    watch = PdbWatch(transport)
    watch.want(["default"])
    labelled = decode_pod(json.dumps(pod("one", labels={"app": "a"})).encode())
    return Running(
        lambda: [each.name for each in watch.with_pdbs((labelled,))[0].disruption_budgets] == ["keep"], watch.stop
    )


def _volumes(transport: FaultyTransport, api: ApiServer) -> Running:
    api.set_volume("data", {"hostPath": {"path": "/data"}})
    volumes = [{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}]
    mounting = decode_pod(json.dumps(pod("one", spec={"volumes": volumes})).encode())
    # A failed claim look-up is repeated after a minute, on this clock at once.
    lookup = VolumeLookup(transport, "lab-node", backoff=RetryBackoff(first_s=0.05, last_s=0.1), clock=_hurried())
    return Running(lambda: lookup.with_claims((mounting,))[0].node_bound, lookup.stop)


def _hurried() -> Callable[[], float]:
    begun = boottime()
    return lambda: begun + (boottime() - begun) * 600


def _conditions(transport: FaultyTransport, api: ApiServer) -> Running:
    faults, transport.faults = transport.faults, []
    node = NodeWatch(transport, "lab-node", backoff=RetryBackoff(first_s=0.05, last_s=0.1))
    conditions = NodeConditions(transport, node)
    node.start()
    until(node.view, "the node")
    transport.faults = faults
    conditions.start()
    verdict = ConditionVerdict(ConditionType.MEMORY_PRESSURE, ConditionStatus.TRUE, "NodeAgentLow", "m", boottime())
    conditions.publish([verdict])

    def stop() -> None:
        conditions.stop(clear=False)
        node.stop()

    return Running(lambda: (api.condition("MemoryPressure") or {}).get("status") == "True", stop)


def _taints(transport: FaultyTransport, _: ApiServer) -> Running:
    faults, transport.faults = transport.faults, []
    node = NodeWatch(transport, "lab-node", backoff=RetryBackoff(first_s=0.05, last_s=0.1))
    taints = NodeTaints(transport, node)
    node.start()
    until(node.view, "the node")
    transport.faults = faults
    taints.start()
    taints.want([ConditionType.MEMORY_PRESSURE])

    def stop() -> None:
        taints.stop(clear=False)
        node.stop()

    return Running(taints.present, stop)


def _events(transport: FaultyTransport, api: ApiServer) -> Running:
    writer = EventWriter(transport, "lab-node")
    writer.start()

    def works() -> bool:
        # An Event that could not be written is lost: the next one is to be written.
        writer.emit(
            KubernetesEvent("Node", "", "lab-node", "u", EventReason.EVICTION_THRESHOLD_MET, f"note {boottime()}")
        )
        return bool(api.store.objects["events"])

    return Running(works, writer.stop)


def _leases(transport: FaultyTransport, _: ApiServer) -> Running:
    leases = EvictionSlots(
        transport,
        holder="lab-node",
        zone=lambda: "z",
        slots=1,
        namespace="nodeagent",
        duration_s=15.0,
        poll_s=(0.05, 0.1),
    )
    leases.start()
    leases.want()
    return Running(leases.held, lambda: leases.stop(clear=False))


def _evict(transport: FaultyTransport, api: ApiServer) -> Running:
    evictor = EvictionSender(transport, threads=1)
    taken: list[OutcomeKind] = []

    def works() -> bool:
        if not evictor.in_flight:
            evictor.submit("plan-1", victim(api, "one"))
        taken.extend(each.kind for each in evictor.take())
        return OutcomeKind.ACCEPTED in taken

    return Running(works, evictor.stop)


API_WORKERS: tuple[tuple[str, Start], ...] = (
    ("identity", _identity),
    ("pods", _pods),
    ("node", _node),
    ("pdbs", _pdbs),
    ("volumes", _volumes),
    ("conditions", _conditions),
    ("taints", _taints),
    ("events", _events),
    ("leases", _leases),
    ("evict", _evict),
)


@pytest.fixture
def api() -> Iterator[HostileServer]:
    server = HostileServer(node="lab-node", pods=[pod("one")], linger_s=None)
    with server:
        yield server


@pytest.fixture
def transport(api: ApiServer, tmp_path: Path) -> Iterator[FaultyTransport]:
    made = FaultyTransport(find_credentials(str(api.kubeconfig(tmp_path / "kubeconfig"))))
    yield made
    made.close()


@pytest.mark.parametrize("error", ERRORS[:4], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(("name", "start"), API_WORKERS, ids=[name for name, _ in API_WORKERS])
def test_a_worker_of_the_api_works_again_after_any_error(
    name: str, start: Start, error: Exception, api: HostileServer, transport: FaultyTransport
) -> None:
    transport.faults = [error]
    running = start(transport, api)
    try:
        until(running.works, f"{name} at work", 20.0)
    finally:
        running.stop()
    assert transport.faults == []


DEEP = b'{"metadata":{"name":"x","x":' + b"[" * 100_000 + b"]" * 100_000 + b'},"items":[],"status":{}}'
DIGITS = (
    b'{"metadata":{"name":"x","uid":"u","generation":%s,"deletionGracePeriodSeconds":%s},"spec":{"priority":%s},'
    b'"status":{"observedGeneration":%s},"items":[{"metadata":{"uid":"u","generation":%s},"spec":'
    b'{"terminationGracePeriodSeconds":%s,"leaseDurationSeconds":%s}}]}' % ((b"9" * 400,) * 7)
)
BODIES = {
    "nested deeply": DEEP,
    "400 digits": DIGITS,
    "an endless number": b'{"metadata":{"resourceVersion":"1"},"items":[{"spec":{"priority":1e999}}]}',
    "not UTF-8": b'{"metadata":{"name":"\xff\xfe","resourceVersion":"1"},"items":[{"metadata":{"uid":"\xff"}}]}',
    "NUL": b"\0" * 100,
    "nothing": b"",
    "null": b"null",
    "cut off": b'{"metadata":{"resourceVersion":"1"},"items":[{"metadata":{"uid":"u"',
    "braces": b'{"metadata":{"resourceVersion":"1"},"items":[' + b'{"a":' * 50_000,
    "NaN": b'{"metadata":{"resourceVersion":"1","generation":NaN},"items":[NaN]}',
    "twice": b'{"metadata":{"uid":"a"},"metadata":null,"items":[],"items":{}}',
    "a page without end": b'{"metadata":{"resourceVersion":"1","continue":"again"},"items":[]}',
}


EVERYWHERE = ("nested deeply", "400 digits", "cut off")
"""The rest is tried on the one that decodes most."""


@pytest.mark.parametrize(
    ("name", "start", "body"),
    # What counts as an eviction is another test's subject. A volume with 400 digits is a network volume.
    [(name, start, body) for name, start in API_WORKERS if name not in ("evict", "volumes") for body in EVERYWHERE]
    + [("volumes", _volumes, "nested deeply"), ("volumes", _volumes, "cut off")]
    + [("pods", _pods, body) for body in BODIES if body not in EVERYWHERE],
)
def test_a_worker_of_the_api_works_again_after_any_response(
    name: str, start: Start, body: str, api: HostileServer, transport: FaultyTransport
) -> None:
    api.body, api.times = BODIES[body], 1
    running = start(transport, api)
    try:
        until(running.works, f"{name} at work", 20.0)
    finally:
        running.stop()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_file_system_whose_read_raises_is_unknown_and_is_read_again(error: Exception) -> None:
    faults = [error]

    def read(path: str) -> FileSystem:
        if faults:
            raise faults.pop()
        return Host("/").statvfs(path)

    patient = StatvfsWithTimeout(read, deadline_s=20.0)
    with pytest.raises(Unreadable, match=type(error).__name__):
        patient("/")
    assert patient("/").capacity > 0
    patient.close()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_periodic_step_that_raises_is_repeated(error: Exception) -> None:
    faults = [error]

    def count() -> int:
        if faults:
            raise faults.pop()
        return 1

    periodic = Periodic(count, first=0, every_s=0.01, name="counting")
    until(lambda: periodic.latest == 1, "the next step", 20.0)
    periodic.close()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_disks_are_measured_after_a_walk_that_raised_an_unexpected_error(error: Exception, tmp_path: Path) -> None:
    disk_node(tmp_path)
    faults, ended = [error], threading.Event()

    def wake() -> None:
        if faults:
            raise faults.pop()
        ended.set()

    working = DiskWorker(
        lambda: PodDiskMeter(Host(str(tmp_path)), kubelet_dir="/var/lib/kubelet", pod_logs_dir="/var/log/pods"),
        wake=wake,
    )
    working.request(WalkRequest((disk_pod("u1"),), timeout_s=30.0))
    until(lambda: not faults, "the failure", 20.0)

    def asked() -> bool:
        working.request(WalkRequest((disk_pod("u1"),), timeout_s=30.0))
        return ended.wait(0.05)

    until(asked, "the next measurement", 20.0)
    working.close()


def test_a_worker_that_fails_for_five_minutes_is_failed_and_one_without_a_pid_is_not() -> None:
    done = threading.Event()

    def work() -> None:
        if not done.is_set():
            raise ValueError("always")

    before = workers.failure_counts().get("hopeless", 0)
    thread = workers.make_thread(work, name="hopeless-1")
    assert workers.start(thread)
    until(lambda: workers.failure_counts().get("hopeless", 0) >= before + 2, "the second try", 20.0)
    assert "thread hopeless-1 fails and runs again: ValueError: always" in str(workers.stuck_notes())
    assert not [each for each in workers.failing_workers() if "hopeless" in each]
    done.set()
    thread.join(30)
    assert not thread.is_alive()
