"""What the accounts of successive walks say of a file system's growth."""

from nodeagent.model import Signal
from nodeagent.sampling.disk.pod_disk import DiskAmount
from nodeagent.sampling.disk.pod_paths import Part, PodPart
from nodeagent.sampling.disk.traces import Traces
from nodeagent.sampling.disk.walk_worker import FileSystemUsage, SignalFileSystem

NODEFS = SignalFileSystem("/var/lib/kubelet", (Signal.NODEFS, Signal.NODEFS_INODES))
INODES = SignalFileSystem("/var/lib/kubelet", (Signal.NODEFS_INODES,))


def account(
    at: float, used: int, pods: dict[str, int], *, left: str | None = None, of: SignalFileSystem = NODEFS
) -> FileSystemUsage:
    """`left`: the pods of which files are left; None when that is not known."""
    held = {PodPart(uid, Part.VOLUMES): DiskAmount(size, size // 10) for uid, size in pods.items()}
    parts = frozenset([PodPart(uid, Part.VOLUMES) for uid in left]) if left is not None else None
    return FileSystemUsage(of, at, DiskAmount(used, used // 10), held, parts)


def traced(*accounts: FileSystemUsage) -> tuple[int, int]:
    """(what has come that is in no pod, what has come in pods)"""
    traces = Traces()
    for each in accounts:
        traces.add([each])
    [trace] = traces.latest(deleted_known=True)
    pods = trace.last.attributed_bytes - trace.first.attributed_bytes
    return trace.last.used_bytes - trace.first.used_bytes - pods, pods


def test_growth_is_told_apart_by_whether_a_pod_holds_it() -> None:
    assert traced(account(0, 5000, {"a": 100}), account(20, 5500, {"a": 200})) == (400, 100)


def test_the_files_of_a_pod_that_has_gone_are_not_in_no_pod() -> None:
    both = account(0, 5000, {"a": 100, "b": 900}, left="ab")
    assert traced(both, account(20, 5000, {"a": 100}, left="ab")) == (0, 0)
    assert traced(both, account(20, 5000, {"a": 100})) == (0, 0), "whether they are left is not known"


def test_what_a_pod_held_whose_files_are_removed_hides_nothing_that_is_in_no_pod() -> None:
    both, host = account(0, 5000, {"a": 100, "b": 900}, left="ab"), account(40, 4800, {"a": 100}, left="a")
    removed = account(20, 4100, {"a": 100}, left="a")
    assert traced(both, removed) == (0, -900)
    assert traced(both, removed, host) == (700, -900)
    assert traced(both, account(10, 5000, {"a": 100}, left="ab"), removed, host) == (700, -900)


def test_what_is_older_than_ten_minutes_is_part_of_the_node() -> None:
    assert traced(account(0, 5000, {"a": 100}), account(300, 9000, {"a": 100}), account(880, 9100, {"a": 100})) == (
        100,
        0,
    )


def test_a_pod_that_went_long_ago_is_forgotten_without_a_trace() -> None:
    accounts = [account(0, 5000, {"a": 100, "b": 900})]
    accounts += [account(60 * n, 4100, {"a": 100}) for n in range(1, 30)]
    assert traced(*accounts) == (0, 0)


def test_points_are_few_and_the_last_one_is_the_newest() -> None:
    traces = Traces()
    for tenth in range(5000):
        traces.add([account(tenth / 10, 5000 + tenth, {"a": 100})])
    [trace] = traces.latest(deleted_known=True)
    assert (trace.first.at, trace.last.at) == (0.0, 499.9)
    assert 30.0 <= trace.last.at - trace.recent.at <= 50.0


def test_a_walk_for_inodes_alone_says_nothing_of_bytes() -> None:
    traces = Traces()
    traces.add([account(0, 5000, {"a": 900})])
    traces.add([account(20, 5000, {"a": 0}, of=INODES)])
    assert [trace.signals for trace in traces.latest(deleted_known=True)] == [NODEFS.signals, INODES.signals]
