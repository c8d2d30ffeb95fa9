"""The growth of a file system over successive walks."""

from nodeagent.model import Signal
from nodeagent.sampling.disk.pod_disk import DiskAmount
from nodeagent.sampling.disk.pod_paths import Part, PodPart
from nodeagent.sampling.disk.traces import Traces
from nodeagent.sampling.disk.walk_worker import FileSystemUsage, SignalFileSystem

NODEFS = SignalFileSystem("/var/lib/kubelet", (Signal.NODEFS, Signal.NODEFS_INODES))
INODES = SignalFileSystem("/var/lib/kubelet", (Signal.NODEFS_INODES,))


def usage(
    at: float, used: int, pods: dict[str, int], *, left: str | None = None, file_system: SignalFileSystem = NODEFS
) -> FileSystemUsage:
    """`left`: the pods that still have files; None if unknown."""
    amounts = {PodPart(uid, Part.VOLUMES): DiskAmount(size, size // 10) for uid, size in pods.items()}
    parts = frozenset([PodPart(uid, Part.VOLUMES) for uid in left]) if left is not None else None
    return FileSystemUsage(file_system, at, DiskAmount(used, used // 10), amounts, parts)


def traced(*usages: FileSystemUsage) -> tuple[int, int]:
    """(growth outside of pods, growth in pods)"""
    traces = Traces()
    for each in usages:
        traces.add([each])
    [trace] = traces.latest(deleted_known=True)
    pods = trace.last.attributed_bytes - trace.first.attributed_bytes
    return trace.last.used_bytes - trace.first.used_bytes - pods, pods


def test_growth_in_pods_and_outside_of_pods_is_distinct() -> None:
    assert traced(usage(0, 5000, {"a": 100}), usage(20, 5500, {"a": 200})) == (400, 100)


def test_the_files_of_an_ended_pod_are_not_unattributed() -> None:
    both = usage(0, 5000, {"a": 100, "b": 900}, left="ab")
    assert traced(both, usage(20, 5000, {"a": 100}, left="ab")) == (0, 0)
    assert traced(both, usage(20, 5000, {"a": 100})) == (0, 0), "it is unknown whether files are left"


def test_removed_files_of_an_ended_pod_do_not_hide_unattributed_files() -> None:
    both, host = usage(0, 5000, {"a": 100, "b": 900}, left="ab"), usage(40, 4800, {"a": 100}, left="a")
    removed = usage(20, 4100, {"a": 100}, left="a")
    assert traced(both, removed) == (0, -900)
    assert traced(both, removed, host) == (700, -900)
    assert traced(both, usage(10, 5000, {"a": 100}, left="ab"), removed, host) == (700, -900)


def test_growth_older_than_ten_minutes_does_not_count() -> None:
    assert traced(usage(0, 5000, {"a": 100}), usage(300, 9000, {"a": 100}), usage(880, 9100, {"a": 100})) == (
        100,
        0,
    )


def test_a_pod_that_ended_long_ago_is_dropped() -> None:
    usages = [usage(0, 5000, {"a": 100, "b": 900})]
    usages += [usage(60 * n, 4100, {"a": 100}) for n in range(1, 30)]
    assert traced(*usages) == (0, 0)


def test_points_are_few_and_the_last_one_is_the_newest() -> None:
    traces = Traces()
    for tenth in range(5000):
        traces.add([usage(tenth / 10, 5000 + tenth, {"a": 100})])
    [trace] = traces.latest(deleted_known=True)
    assert (trace.first.at, trace.last.at) == (0.0, 499.9)
    assert 30.0 <= trace.last.at - trace.recent.at <= 50.0


def test_a_walk_for_inodes_alone_has_no_bytes() -> None:
    traces = Traces()
    traces.add([usage(0, 5000, {"a": 900})])
    traces.add([usage(20, 5000, {"a": 0}, file_system=INODES)])
    assert [trace.signals for trace in traces.latest(deleted_known=True)] == [NODEFS.signals, INODES.signals]
