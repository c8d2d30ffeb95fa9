"""Real processes in real v1 cgroups, laid out as a kubelet does."""

import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from nodeagent.model import NodeSnapshot, Pod, PodSource, PodUsage, QOSClass, Signal
from nodeagent.sampling.hostfs.host import Host
from nodeagent.sampling.hostfs.processes import processes_below
from nodeagent.sampling.sampler import Sampler
from tests.support.kubelet_cgroups import MEMORY, PIDS, KubeletCgroups
from tests.support.livenode import remove_cgroup

MI = 1 << 20

pytestmark = pytest.mark.real_cgroup

HOG = "import mmap,sys; m = mmap.mmap(-1, {size}); m.write(b'x' * {size}); print('ready', flush=True); sys.stdin.read()"
READER = """
import os, sys
fd = os.open({path!r}, os.O_RDONLY)
for _ in range(1):
    while os.read(fd, 1 << 20): pass
print('ready', flush=True); sys.stdin.read()
"""
FORKS = """
import os, sys
children = []
for _ in range({number}):
    pid = os.fork()
    if not pid:
        sys.stdin.read(); os._exit(0)
    children.append(pid)
print('ready', flush=True); sys.stdin.read()
"""
THREADS = """
import sys, threading
stop = threading.Event()
for _ in range({number}):
    threading.Thread(target=stop.wait, daemon=True).start()
print('ready', flush=True); sys.stdin.read()
"""


@pytest.fixture
def sampler(kubelet: KubeletCgroups) -> Iterator[Sampler]:
    with Sampler(Host("/"), kubelet.config(), node_name="n") as made:
        yield made


def _usages(snapshot: NodeSnapshot) -> dict[str, PodUsage]:
    return {view.pod.name or view.pod.uid: view.usage for view in snapshot.pods if view.usage is not None}


def test_written_memory_is_in_the_working_set(kubelet: KubeletCgroups, sampler: Sampler) -> None:
    kubelet.container(kubelet.pod("hog"), HOG.format(size=64 * MI), name="c")
    usage = _usages(sampler.sample())["hog"]
    # 64 MiB of its own; an interpreter beside it takes less than 16 MiB.
    for amount in (usage.memory_working_set, usage.memory_unreclaimable):
        assert amount is not None
        assert 64 * MI <= amount <= 80 * MI


def test_a_containers_memory_is_read_on_request(kubelet: KubeletCgroups, sampler: Sampler) -> None:
    uid = kubelet.pod("b")
    kubelet.container(uid, HOG.format(size=32 * MI), name="large")
    kubelet.container(uid, HOG.format(size=MI), name="small")
    usage = _usages(sampler.sample())["b"]
    assert {c.memory_working_set for c in usage.containers} == {None}
    sets = {c.name: c.memory_working_set or 0 for c in sampler.with_container_memory(usage).containers}
    assert 32 * MI <= sets["large"] <= 48 * MI
    assert MI <= sets["small"] <= 17 * MI


def test_page_cache_read_once_is_usage_but_neither_working_set_nor_unreclaimable(
    kubelet: KubeletCgroups, sampler: Sampler, tmp_path: Path
) -> None:
    big = tmp_path / "big"
    with big.open("wb") as file:
        file.write(os.urandom(MI) * 64)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    kubelet.container(kubelet.pod("reader"), READER.format(path=str(big)), name="c")
    kubelet.container(kubelet.pod("hog"), HOG.format(size=32 * MI), name="c")
    usages = _usages(sampler.sample())
    reader, hog = usages["reader"], usages["hog"]
    assert reader.memory_usage is not None
    if reader.memory_usage < 48 * MI:
        pytest.skip("the file system of the temporary directory does not charge page cache to the reader")
    assert hog.memory_usage is not None
    assert reader.memory_usage > hog.memory_usage
    assert reader.memory_working_set is not None
    assert hog.memory_working_set is not None
    assert reader.memory_working_set < 24 * MI < hog.memory_working_set
    assert reader.memory_unreclaimable is not None
    assert reader.memory_unreclaimable < 24 * MI


def test_processes_and_threads_are_counted_separately(kubelet: KubeletCgroups, sampler: Sampler) -> None:
    forks, threads = kubelet.pod("forks"), kubelet.pod("threads")
    kubelet.container(forks, FORKS.format(number=9), name="a")
    kubelet.container(forks, FORKS.format(number=4), name="b", inner="init.scope")
    kubelet.container(threads, THREADS.format(number=7), name="c")
    usages = _usages(sampler.sample())
    assert (usages["forks"].process_count, usages["forks"].thread_count) == (15, 15)
    assert {c.name: c.process_count for c in usages["forks"].containers} == {"a": 10, "b": 5}
    assert (usages["threads"].process_count, usages["threads"].thread_count) == (1, 8)


def test_the_pods_cgroup_and_its_limit_are_a_signal(kubelet: KubeletCgroups, sampler: Sampler) -> None:
    (MEMORY / kubelet.root.lstrip("/") / "kubepods/memory.limit_in_bytes").write_text(str(256 * MI))
    kubelet.container(kubelet.pod("hog"), HOG.format(size=64 * MI), name="c")
    observation = sampler.sample().observations[Signal.ALLOCATABLE_MEMORY]
    assert observation.capacity == 256 * MI
    assert observation.available is not None
    assert (256 - 80) * MI <= observation.available <= (256 - 64) * MI


def test_a_request_is_estimated_from_the_score_of_a_real_process(kubelet: KubeletCgroups, sampler: Sampler) -> None:
    uid = kubelet.pod("b")
    kubelet.container(uid, HOG.format(size=MI), name="c", score=990)
    snapshot = sampler.sample()
    capacity = snapshot.mem_available.capacity
    assert capacity is not None
    assert _usages(snapshot)["b"].memory_request_estimate == 10 * capacity // 1000


def test_a_pods_start_is_on_the_clock_of_the_samples(kubelet: KubeletCgroups, sampler: Sampler) -> None:
    before = Host("/").boottime()
    kubelet.container(kubelet.pod("b"), HOG.format(size=MI), name="c")
    snapshot = sampler.sample()
    started = _usages(snapshot)["b"].started_at
    assert started is not None
    # Process start times have a resolution of 10 ms.
    assert before - 0.02 <= started <= snapshot.taken_at


def test_a_kept_descriptor_follows_the_cgroup(kubelet: KubeletCgroups, sampler: Sampler) -> None:
    uid = kubelet.pod("b")
    kubelet.container(uid, HOG.format(size=8 * MI), name="c")
    first = _usages(sampler.sample())["b"].memory_usage
    kubelet.container(uid, HOG.format(size=64 * MI), name="d")
    second = _usages(sampler.sample(fresh=False))["b"]
    assert first is not None
    assert second.memory_usage is not None
    assert second.memory_usage - first >= 64 * MI
    assert len(second.containers) == 2


def test_a_removed_cgroup_leaves_the_sample_and_its_descriptors_are_closed(
    kubelet: KubeletCgroups, sampler: Sampler
) -> None:
    stays, goes = kubelet.pod("stays"), kubelet.pod("goes")
    kubelet.container(stays, HOG.format(size=MI), name="c")
    assert set(_usages(sampler.sample())) == {"stays", "goes"}
    kept = len(sampler._files)
    for top in (MEMORY, PIDS):
        remove_cgroup(top / kubelet.path(goes).lstrip("/"))
    assert set(_usages(sampler.sample(fresh=False))) == {"stays"}
    assert len(sampler._files) == kept - 1


def test_a_pods_cgroup_made_again_is_read_through_new_descriptors(kubelet: KubeletCgroups, sampler: Sampler) -> None:
    place = f"{kubelet.root}/kubepods"
    limit = MEMORY / place.lstrip("/") / "memory.limit_in_bytes"
    limit.write_text(str(256 * MI))
    assert sampler.sample_node().observations[Signal.ALLOCATABLE_MEMORY].capacity == 256 * MI
    for gone in ("/burstable", "/besteffort", ""):
        for top in (MEMORY, PIDS):
            remove_cgroup(top / f"{place}{gone}".lstrip("/"))
    kubelet.mkdir(place)
    limit.write_text(str(128 * MI))
    assert sampler.sample_node().observations[Signal.ALLOCATABLE_MEMORY].capacity == 128 * MI


def test_a_cgroup_made_again_under_its_old_name_is_read_again(kubelet: KubeletCgroups, sampler: Sampler) -> None:
    uid = kubelet.pod("b")
    path = kubelet.container(uid, HOG.format(size=64 * MI), name="c")
    large = _usages(sampler.sample())["b"].memory_usage
    kubelet.stop()
    for gone in (path, kubelet.path(uid)):
        for top in (MEMORY, PIDS):
            remove_cgroup(top / gone.lstrip("/"))
    kubelet.mkdir(kubelet.path(uid))
    again = _usages(sampler.sample(fresh=False))["b"]
    assert large is not None
    assert again.memory_usage is not None
    assert again.memory_usage < large // 8
    assert (again.process_count, again.containers) == (0, ())


class _Listed(Host):
    """The live host; counts how often a directory is listed."""

    def __init__(self) -> None:
        super().__init__("/")
        self.times = 0

    def subdirectories(self, path: str) -> list[tuple[str, int]]:
        self.times += 1
        return super().subdirectories(path)


def _gone(path: str) -> None:
    for top in (MEMORY, PIDS):
        remove_cgroup(top / path.lstrip("/"))


def test_the_tree_is_not_listed_again_while_the_pods_are_the_same(kubelet: KubeletCgroups) -> None:
    moves = kubelet.pod("moves")
    for number in range(4):
        kubelet.pod(f"still-{number}", QOSClass.BEST_EFFORT if number % 2 else QOSClass.GUARANTEED)
    host, now = _Listed(), 100.0
    with Sampler(host, kubelet.config(), node_name="n", boottime=lambda: now) as sampler:
        first = sampler.sample()
        listed, now = host.times, 100.01
        assert sampler.sample(fresh=False).pods is first.pods
        kubelet.container(moves, HOG.format(size=8 * MI), name="c")
        now = 100.02
        usages = _usages(sampler.sample(fresh=False))
        assert {name: usage.read_at for name, usage in usages.items() if usage.read_at != 100.0} == {"moves": 100.02}
        assert (usages["moves"].memory_working_set or 0) >= 8 * MI
        assert host.times == listed
        kubelet.pod("new")
        assert set(_usages(sampler.sample(fresh=False))) == {*usages, "new"}
        assert host.times > listed
        now = 121.0
        assert {usage.read_at for usage in _usages(sampler.sample(fresh=False)).values()} == {121.0}


class _RecordingHost(Host):
    """The live host; records which files of processes are read."""

    def __init__(self) -> None:
        super().__init__("/")
        self.files: list[str] = []

    def read(self, path: str, **options: Any) -> bytes:
        if path.startswith("/proc/") and path.split("/")[2].isdigit() and path.split("/")[2] != "1":
            self.files.append(path)
        return super().read(path, **options)


def test_the_first_process_of_a_container_is_read_again_only_while_it_is_young(kubelet: KubeletCgroups) -> None:
    host, now = _RecordingHost(), 100.0
    uid = kubelet.pod("web")
    kubelet.container(uid, HOG.format(size=1), name="POD")
    [link] = kubelet.logs.glob("containers/x_default_POD-*")
    link.unlink()  # the sandbox has none
    kubelet.container(uid, HOG.format(size=1), name="c")
    listed = Pod(uid, uid, "default", "web", PodSource.API, QOSClass.BURSTABLE)
    sandbox, container = ["oom_score_adj", "stat"], ["oom_score_adj"]
    with Sampler(host, kubelet.config(), node_name="n", boottime=lambda: now) as sampler:

        def files(at: float, pods: list[Pod] | None) -> list[str]:
            nonlocal now
            now = at
            host.files.clear()
            sampler.sample(pods, fresh=False)
            return sorted(path.rsplit("/", 1)[1] for path in host.files)

        assert files(100.0, [listed]) == sandbox, "the API server has the request"
        assert files(100.1, [listed]) == []
        assert files(126.0, [listed]) == sandbox
        assert files(152.0, [listed]) == []
        assert files(1000.0, [listed]) == []
        assert files(1026.0, None) == container, "its score gives the request"
        assert files(1052.0, None) == container
        assert files(1078.0, None) == files(2000.0, None) == []


@pytest.mark.parametrize("old", list(QOSClass))
@pytest.mark.parametrize("new", list(QOSClass))
def test_a_pod_that_replaces_another_is_in_the_next_sample(
    kubelet: KubeletCgroups, sampler: Sampler, old: QOSClass, new: QOSClass
) -> None:
    kubelet.pod("stays")
    goes = kubelet.pod("goes", old)
    for fresh in (True, False, False):
        assert set(_usages(sampler.sample(fresh=fresh))) == {"stays", "goes"}
    _gone(kubelet.path(goes, old))
    came = kubelet.pod("came", new)
    assert set(_usages(sampler.sample(fresh=False))) == {"stays", "came"}
    _gone(kubelet.path(came, new))
    kubelet.mkdir(kubelet.path(goes, old))  # the same name and another cgroup
    assert set(_usages(sampler.sample(fresh=False))) == {"stays", "goes"}


def test_a_pod_that_replaces_another_cgroup_is_in_the_next_sample(kubelet: KubeletCgroups, sampler: Sampler) -> None:
    kubelet.pod("stays")
    kubelet.mkdir(f"{kubelet.root}/kubepods/burstable/stranger")
    for _ in range(2):
        assert set(_usages(sampler.sample(fresh=False))) == {"stays"}
    _gone(f"{kubelet.root}/kubepods/burstable/stranger")
    kubelet.pod("came")
    assert set(_usages(sampler.sample(fresh=False))) == {"stays", "came"}


def test_a_pod_of_the_system_partition_is_in_the_next_sample_and_leaves_it(
    kubelet: KubeletCgroups, sampler: Sampler
) -> None:
    uid = str(uuid.uuid4())
    assert not sampler.sample(fresh=False).pods
    for path in ("/system", "/system/burstable", "/system/besteffort"):
        kubelet.mkdir(f"{kubelet.root}/kubepods{path}")
    assert not sampler.sample(fresh=False).pods
    kubelet.mkdir(f"{kubelet.root}/kubepods/system/besteffort/pod{uid}")
    [view] = sampler.sample(fresh=False).pods
    assert view.usage is not None
    assert (view.usage.cgroup_uid, view.usage.qos_class, view.usage.system_partition) == (
        uid,
        QOSClass.BEST_EFFORT,
        True,
    )
    for top in (MEMORY, PIDS):
        remove_cgroup(top / f"{kubelet.root}/kubepods/system/besteffort/pod{uid}".lstrip("/"))
    assert not sampler.sample(fresh=False).pods


def test_pods_are_found_in_a_qos_cgroup_that_was_made_again(kubelet: KubeletCgroups, sampler: Sampler) -> None:
    kubelet.pod("stays")
    for _ in range(2):
        assert set(_usages(sampler.sample(fresh=False))) == {"stays"}
    _gone(f"{kubelet.root}/kubepods/besteffort")
    assert set(_usages(sampler.sample(fresh=False))) == {"stays"}
    kubelet.mkdir(f"{kubelet.root}/kubepods/besteffort")
    kubelet.pod("came", QOSClass.BEST_EFFORT)
    assert set(_usages(sampler.sample(fresh=False))) == {"stays", "came"}


class _Removing(Host):
    """The live host, on which something happens right before a certain file is read."""

    def __init__(self, before: str, action: Callable[[], None]) -> None:
        super().__init__("/")
        self._before, self._action = before, action
        self.happened = False

    def read(self, path: str, **options: Any) -> bytes:
        if path.endswith(self._before) and not self.happened:
            self.happened = True
            self._action()
        return super().read(path, **options)


def test_a_cgroup_removed_while_it_is_read_is_not_in_the_sample(kubelet: KubeletCgroups) -> None:
    stays, goes = kubelet.pod("stays"), kubelet.pod("goes")

    def remove() -> None:
        for top in (MEMORY, PIDS):
            remove_cgroup(top / kubelet.path(goes).lstrip("/"))

    host = _Removing(f"pod{goes}/memory.stat", remove)
    with Sampler(host, kubelet.config(), node_name="n") as sampler:
        snapshot = sampler.sample()
    assert host.happened
    assert set(_usages(snapshot)) == {"stays"}
    assert stays != goes


def test_a_container_removed_while_its_pod_is_read_is_left_out(kubelet: KubeletCgroups) -> None:
    uid = kubelet.pod("b")
    kubelet.container(uid, HOG.format(size=MI), name="stays")
    empty = f"{kubelet.path(uid)}/{'ab' * 32}"
    kubelet.mkdir(empty)

    def remove() -> None:
        for top in (MEMORY, PIDS):
            remove_cgroup(top / empty.lstrip("/"))

    host = _Removing(f"{'ab' * 32}/cgroup.procs", remove)
    with Sampler(host, kubelet.config(), node_name="n") as sampler:
        usage = _usages(sampler.sample())["b"]
    assert host.happened
    assert [container.name for container in usage.containers] == ["stays"]


DEEP: Final = 1100
"""More than Python recurses."""


@pytest.fixture
def nested(kubelet: KubeletCgroups) -> Iterator[Callable[[str], Path]]:
    """Makes a chain of cgroups below a container, in both hierarchies; the last of them in that of the PIDs."""
    made: list[Path] = []

    def make(container: str) -> Path:
        for top in (MEMORY, PIDS):
            place = top / container.lstrip("/")
            for _ in range(DEEP):
                place = place / "n"
                place.mkdir()
                made.append(place)
        return made[-1]

    yield make
    kubelet.stop()
    for place in reversed(made):
        remove_cgroup(place)


def test_nested_cgroups_of_a_container_neither_hide_processes_nor_delay_the_sample(
    kubelet: KubeletCgroups, nested: Callable[[str], Path]
) -> None:
    uid = kubelet.pod("nests")
    deepest = nested(kubelet.container(uid, FORKS.format(number=3), name="c"))
    [container] = (PIDS / kubelet.path(uid).lstrip("/")).glob("*/cgroup.procs")
    for pid in container.read_text().split()[1:]:
        for top in (MEMORY, PIDS):
            (top / deepest.relative_to(PIDS) / "cgroup.procs").write_text(pid)
    kubelet.container(kubelet.pod("other"), HOG.format(size=MI), name="c")
    with Sampler(Host(), kubelet.config(), node_name="n") as sampler:
        began = time.monotonic()
        snapshot = sampler.sample()
        took_s = time.monotonic() - began
    usages = _usages(snapshot)
    assert usages["nests"].process_count == 4
    assert usages["other"].process_count == 1
    notes = [note.message for note in snapshot.notes if note.subject == f"pod {uid}"]
    assert notes == ["more than 256 cgroups below its containers: each thread counts as a process"]
    assert took_s < 2.0
    found = processes_below(Host(), f"{PIDS}{kubelet.path(uid)}")
    assert (len(found.pids), found.complete) == (4, True), "all of them are read"
