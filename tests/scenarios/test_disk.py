"""Disks, end to end: a real file system that a real process in a pod fills, the real program, an API server over HTTP.

The pods' directories are on a loop-mounted ext4 or xfs; what is asserted are the requests that arrived, and what was
left of the file system meanwhile.
"""

import ctypes
import datetime as dt
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.loop.schedule import CALM_S
from tests.fake_kube import ApiServer, pod
from tests.support.disk_load import LITTERER, WRITER, Disk
from tests.support.livenode import MIB, Kubepods, Run, StartAgent, needs_cgroup_v1, until
from tests.support.mounts import ext4, xfs
from tests.support.scraped_agent import free_port

pytestmark = [pytest.mark.real_cgroup, needs_cgroup_v1]

FILLER, CHILL, OTHER = str(uuid.uuid4()), str(uuid.uuid4()), str(uuid.uuid4())


HIDER = """
import os, sys, time
directory, rate_mib = sys.argv[1], float(sys.argv[2])
file = open(f"{directory}/file", "wb", buffering=0)
os.unlink(f"{directory}/file")
print("up", flush=True)
sys.stdin.readline()
piece = b"x" * (1 << 20)
try:
    while True:
        file.write(piece)
        time.sleep(1 / rate_mib)
except OSError:
    sys.stdin.readline()
"""


# All of the free space at once, and then what is left.
ALLOCATOR = """
import os, sys
directory = sys.argv[1]
print("up", flush=True)
sys.stdin.readline()
file, size, piece = os.open(f"{directory}/file", os.O_RDWR | os.O_CREAT), 0, 64 << 20
while piece >= 4096:
    try:
        os.posix_fallocate(file, size, piece)
        size += piece
    except OSError:
        piece //= 2
sys.stdin.readline()
"""


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Disk]:
    """An ext4, or an xfs where the test asks for it."""
    on_xfs = getattr(request, "param", "ext4") == "xfs"
    with xfs(tmp_path) if on_xfs else ext4(tmp_path, size_mb=512, inodes=20_000) as place:
        made = Disk(place)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture
def api(kubepods: Kubepods) -> Iterator[ApiServer]:
    pods = [
        pod("filler", uid=FILLER, owner=("ReplicaSet", "filler"), qos="Burstable", requests={"memory": "50Mi"}),
        pod("chill", uid=CHILL, owner=("ReplicaSet", "chill"), qos="Burstable", requests={"memory": "50Mi"}),
        pod("other", uid=OTHER, owner=("ReplicaSet", "other"), qos="Burstable", requests={"memory": "50Mi"}),
    ]
    with ApiServer(node="lab-node", pods=pods, linger_s=None) as server:
        yield server


@pytest.fixture
def run(kubepods: Kubepods, disk: Disk, start_agent: StartAgent) -> StartAgent:
    def start(*arguments: str, **changes: object) -> Run:
        sampling = {"interval": "200ms", "cgroupRoot": f"/{kubepods.root}", **disk.sampling}
        settings = {"evictionSoft": {}, "evictionSoftGracePeriod": {}, "sampling": sampling, **changes}
        agent = start_agent(*arguments, **settings)
        until(lambda: agent.logged("signal changed"), "the first decision")
        return agent

    return start


def _condition_is(api: ApiServer, kind: str, status: str) -> bool:
    found = api.condition(kind)
    return found is not None and found["status"] == status


def _counted(address: str) -> dict[str, float]:
    """Syncs, and how many of them read the pods and decided."""
    pages: list[str] = []

    def served() -> bool:
        try:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
                pages.append(answer.read().decode())
        except urllib.error.HTTPError as refused:
            assert refused.code == 429  # noqa: PT017 - only so many in a second
        return bool(pages)

    until(served, "the metrics")
    lines = dict(line.rpartition(" ")[::2] for line in pages[0].splitlines() if line.startswith("nodeagent_s"))
    syncs, decided = lines["nodeagent_syncs_total"], lines['nodeagent_stage_duration_seconds_count{stage="decide"}']
    return {"syncs": float(syncs), "full samples": float(decided)}


def _idle(kubepods: Kubepods, disk: Disk, uid: str, *, files: int = 1, mib: int = 0) -> None:
    """A pod that holds something and does nothing."""
    place = disk.volume(uid)
    for index in range(files):
        (place / f"f{index}").write_bytes(b"x" * (mib * MIB // files))
    kubepods.start(uid, qos="burstable")


def _start(kubepods: Kubepods, disk: Disk, uid: str, program: str, per_s: float) -> "subprocess.Popen[str]":
    """A pod whose process fills its volume as soon as a line is written to it."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(disk.volume(uid)), str(per_s)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    kubepods.adopt(uid, process, qos="burstable")
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def _go(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def _release(kubepods: Kubepods, disk: Disk, api: ApiServer, agent: Run) -> None:
    """The filler and its files go, as when a kubelet has ended the pod; the pressure ends, and then the agent."""
    kubepods.kill(FILLER)
    disk.remove(FILLER)
    api.delete_pod("default", "filler")
    assert api.wait_for(lambda: _condition_is(api, "NodeAgentDiskPressure", "False"), 60), agent.events()
    assert agent.stop() == 0


DISK_HARD: dict[str, Any] = {
    # The soft ones publish the condition and never act here.
    "evictionSoft": {"nodefs.available": "60%", "nodefs.inodesFree": "60%"},
    "evictionSoftGracePeriod": {"nodefs.available": "10m", "nodefs.inodesFree": "10m"},
    "evictionHard": {"nodefs.available": "40%", "nodefs.inodesFree": "40%"},
    "escalation": {"hardKill": "cgroup"},
}


@pytest.mark.parametrize(
    ("program", "per_s", "resource"), [(WRITER, 25.0, "ephemeral-storage"), (LITTERER, 1200.0, "inodes")]
)
def test_the_condition_is_true_before_the_filler_is_evicted_and_nothing_reaches_zero(
    kubepods: Kubepods,
    disk: Disk,
    api: ApiServer,
    run: StartAgent,
    program: str,
    per_s: float,
    resource: str,
) -> None:
    _idle(kubepods, disk, CHILL, files=20, mib=20)
    filler = _start(kubepods, disk, FILLER, program, per_s)
    up_at_eviction: list[bool] = []

    def kubelet(entry: dict[str, Any], _body: dict[str, Any]) -> None:
        assert entry["metadata"]["name"] == "filler"
        up_at_eviction.append(
            _condition_is(api, "DiskPressure", "True") and _condition_is(api, "NodeAgentDiskPressure", "True")
        )

    api.on_eviction = kubelet
    agent = run(**DISK_HARD)
    _go(filler)
    assert api.wait_for(lambda: up_at_eviction, 60), agent.events()
    assert up_at_eviction == [True]
    until(lambda: not kubepods.running(FILLER), "the filler has ended")
    lowest = disk.lowest_bytes, disk.lowest_inodes
    [reported] = agent.wait_for_log("evicting")
    assert resource in reported["message"]
    assert reported["predicted_relief"] > 0

    _release(kubepods, disk, api, agent)
    assert len(api.sent("POST", "/eviction")) == 1, "chill stays"
    numbers = os.statvfs(disk.place)
    assert lowest[0] > 0.05 * numbers.f_blocks * numbers.f_frsize
    assert lowest[1] > 0.05 * numbers.f_files


def test_a_dry_run_names_the_filler_and_evicts_nothing(
    kubepods: Kubepods, disk: Disk, api: ApiServer, run: StartAgent
) -> None:
    _idle(kubepods, disk, CHILL, files=20, mib=20)
    filler = _start(kubepods, disk, FILLER, WRITER, 100.0)
    agent = run("--dry-run", **{**DISK_HARD, "evictionHard": {"nodefs.available": "50%"}})
    _go(filler)
    until(lambda: agent.logged("would evict"), "what it would do", timeout_s=60)
    assert agent.logged("would evict")[0]["pod"] == "default/filler"
    assert kubepods.running(FILLER)
    assert agent.stop() == 0
    assert not api.sent("POST", "/eviction")


def test_a_reclaim_action_frees_the_disk_and_no_pod_is_evicted(
    kubepods: Kubepods, disk: Disk, api: ApiServer, run: StartAgent
) -> None:
    _idle(kubepods, disk, CHILL, files=20, mib=40)
    cache = disk.place / "images/cache"
    cache.mkdir()
    for index in range(64):  # 256 of some 430 MiB, by no process of a pod
        (cache / f"f{index}").write_bytes(b"x" * 4 * MIB)
    rubbish = "import os, shutil, sys; shutil.rmtree(sys.argv[1]); print(*[os.environ[n] for n in sys.argv[2:]])"
    names = [f"NODEAGENT_{name}" for name in ("RESOURCE", "SIGNAL")]
    command = [sys.executable, "-c", rubbish, str(cache), *names]
    agent = run(
        evictionSoft={"nodefs.available": "50%"},
        evictionSoftGracePeriod={"nodefs.available": "500ms"},
        reclaim={
            "actions": [{"name": "empty-cache", "command": command, "timeout": "1m"}],
            "waitForKubelet": "3s",
        },
    )
    until(lambda: agent.logged("reclaim done"), "the end of the action", timeout_s=60)
    assert agent.logged("reclaim done")[0]["message"] == "ephemeral-storage nodefs.available"

    def gains() -> list[str]:
        return [note["message"] for note in agent.logged("note") if "empty-cache" in note["message"]]

    until(lambda: bool(gains()), "its gain", timeout_s=60)
    [gain] = gains()
    assert "empty-cache (done)" in gain
    assert "freed 256Mi" in gain
    assert list(dict.fromkeys(line["code"] for line in agent.logged("not evicting"))) == [
        "waits-for-kubelet",
        "waits-for-reclaim",
    ]
    assert api.wait_for(lambda: _condition_is(api, "NodeAgentDiskPressure", "False"), 60), agent.events()
    assert agent.stop() == 0
    assert not api.sent("POST", "/eviction")


def test_a_reclaim_action_that_does_not_help_is_ended_and_the_filler_is_evicted(
    kubepods: Kubepods, disk: Disk, api: ApiServer, run: StartAgent
) -> None:
    filler = _start(kubepods, disk, FILLER, WRITER, 25.0)
    api.on_eviction = lambda entry, _body: None
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    agent = run(**DISK_HARD, reclaim={"actions": [{"name": "useless", "command": sleep, "timeout": "500ms"}]})
    _go(filler)
    assert api.wait_for(lambda: api.sent("POST", "/eviction"), 60), agent.events()
    assert agent.wait_for_log("evicting")
    assert [line["event"] for line in agent.events() if line["event"] in ("reclaim timed-out", "evicting")] == [
        "reclaim timed-out",
        "evicting",
    ]
    until(lambda: not kubepods.running(FILLER), "the filler has ended")
    assert disk.lowest_bytes > 50 * MIB
    assert agent.stop() == 0


def test_a_dry_run_starts_no_reclaim_action(
    kubepods: Kubepods, disk: Disk, api: ApiServer, run: StartAgent, tmp_path: Path
) -> None:
    filler = _start(kubepods, disk, FILLER, WRITER, 100.0)
    touch = [sys.executable, "-c", "import sys; open(sys.argv[1], 'w')", str(tmp_path / "ran")]
    agent = run("--dry-run", **DISK_HARD, reclaim={"actions": [{"name": "touch", "command": touch}]})
    _go(filler)
    until(lambda: agent.logged("would evict") and agent.logged("would reclaim"), "what it would do", timeout_s=60)
    assert agent.logged("would reclaim")[0]["action"] == "touch"
    assert agent.stop() == 0
    assert not (tmp_path / "ran").exists()
    assert not api.sent("POST", "/eviction")


def test_a_disk_full_of_files_of_no_pod_evicts_no_pod_and_names_where_they_are(
    kubepods: Kubepods, disk: Disk, api: ApiServer, run: StartAgent
) -> None:
    _idle(kubepods, disk, CHILL, files=2, mib=2)
    (disk.place / "images/blobs").mkdir()
    for index in range(75):  # 300 of some 430 MiB
        (disk.place / f"images/blobs/f{index}").write_bytes(b"x" * 4 * MIB)
    agent = run(**DISK_HARD)
    until(lambda: agent.logged("not evicting"), "a refusal", timeout_s=60)

    def named() -> bool:
        return any("are in no pod" in str(note["message"]) for note in agent.logged("note"))

    until(named, "largest other holders", timeout_s=60)
    note = next(note["message"] for note in agent.logged("note") if "are in no pod" in note["message"])
    assert f"{disk.place}/images 300Mi, 77 inodes" in note
    why = {"no-candidates", "futile"}
    until(lambda: why & {line["code"] for line in agent.logged("not evicting")}, "why no pod is evicted")
    assert agent.stop() == 0
    assert not api.sent("POST", "/eviction")


def test_a_pod_over_its_own_limit_is_evicted_while_the_disk_has_space(
    kubepods: Kubepods, disk: Disk, api: ApiServer, run: StartAgent
) -> None:
    def limited(entry: dict[str, Any]) -> None:
        entry["spec"]["volumes"] = [{"name": "data", "emptyDir": {"sizeLimit": "10Mi"}}]

    for name in ("filler", "chill"):
        api.modify_pod("default", name, limited)
    _idle(kubepods, disk, FILLER, files=2, mib=20)
    _idle(kubepods, disk, CHILL, files=2, mib=8)
    agent = run(**DISK_HARD, localStorageLimits=True)
    assert api.wait_for(lambda: api.sent("POST", "/eviction"), 60), agent.events()
    [request] = api.sent("POST", "/eviction")
    assert request.path.endswith("/filler/eviction")
    assert 'Usage of EmptyDir volume "data" exceeds the limit "10Mi"' in agent.wait_for_log("evicting")[0]["message"]
    assert agent.stop() == 0


def test_a_calm_agent_does_not_tarry_with_a_pod_that_has_come_to_exceed_its_limit(
    kubepods: Kubepods, disk: Disk, api: ApiServer, run: StartAgent
) -> None:
    def limited(entry: dict[str, Any]) -> None:
        entry["spec"]["volumes"] = [{"name": "data", "emptyDir": {"sizeLimit": "10Mi"}}]

    api.modify_pod("default", "filler", limited)
    _idle(kubepods, disk, FILLER, files=2, mib=4)
    agent = run(**DISK_HARD, localStorageLimits=True)
    threading.Event().wait(CALM_S + 2.0)
    (disk.volume(FILLER) / "more").write_bytes(b"x" * 20 * MIB)
    assert api.wait_for(lambda: api.sent("POST", "/eviction"), 60), agent.events()
    [counting, *_] = [line for line in agent.logged("not evicting") if line["code"] == "waits-for-recount"]
    [evicting] = agent.wait_for_log("evicting")
    passed = dt.datetime.fromisoformat(evicting["timestamp"]) - dt.datetime.fromisoformat(counting["timestamp"])
    assert passed.total_seconds() < CALM_S / 2, "the new measurement is decided upon at the next sample"
    assert agent.stop() == 0


INNOCENTS_MIB = (60, 30)


def _innocents(kubepods: Kubepods, disk: Disk) -> None:
    """Two pods, each of which holds enough to be a candidate."""
    for uid, mib in zip((CHILL, OTHER), INNOCENTS_MIB, strict=True):
        _idle(kubepods, disk, uid, files=4, mib=mib)


def test_a_pod_that_fills_the_disk_with_a_deleted_file_is_evicted_and_no_smaller_one_instead(
    kubepods: Kubepods, disk: Disk, api: ApiServer, run: StartAgent
) -> None:
    _innocents(kubepods, disk)
    filler = _start(kubepods, disk, FILLER, HIDER, 25.0)
    api.on_eviction = lambda _entry, _body: None
    agent = run(**DISK_HARD)
    _go(filler)
    assert api.wait_for(lambda: api.sent("POST", "/eviction"), 60), agent.events()
    until(lambda: not kubepods.running(FILLER), "the filler has ended")
    [reported] = agent.wait_for_log("evicting")
    assert reported["pod"] == "default/filler"
    assert reported["predicted_relief"] > 50 * MIB
    _release(kubepods, disk, api, agent)
    assert [request.path.split("/")[-2] for request in api.sent("POST", "/eviction")] == ["filler"]


@pytest.mark.parametrize("disk", ["xfs"], indirect=True)
def test_a_pod_that_fills_an_xfs_does_not_cost_the_pod_with_many_files(
    kubepods: Kubepods, disk: Disk, api: ApiServer, run: StartAgent
) -> None:
    """An xfs makes inodes out of free space: with the last bytes, few of them are left."""
    _idle(kubepods, disk, CHILL, files=12_000)
    _idle(kubepods, disk, OTHER, files=20)
    filler = _start(kubepods, disk, FILLER, ALLOCATOR, 0)
    api.on_eviction = lambda _entry, _body: None
    agent = run(**DISK_HARD)
    _go(filler)
    assert api.wait_for(lambda: api.sent("POST", "/eviction"), 60), agent.events()
    until(lambda: not kubepods.running(FILLER), "the filler has ended")
    numbers = os.statvfs(disk.place)
    assert numbers.f_ffree < 0.4 * numbers.f_files, "below the threshold of inodes"
    until(lambda: any(line["code"] == "bytes-first" for line in agent.logged("not evicting")), "why no pod is evicted")
    _release(kubepods, disk, api, agent)
    assert [request.path.split("/")[-2] for request in api.sent("POST", "/eviction")] == ["filler"]


def _fill_with_images(disk: Disk, *, left: float) -> None:
    numbers = os.statvfs(disk.place)
    with (disk.place / "images/layer").open("wb") as image:
        os.posix_fallocate(image.fileno(), 0, (numbers.f_bavail - int(left * numbers.f_blocks)) * numbers.f_frsize)


@pytest.mark.parametrize(
    ("threshold", "left"), [({"imagefs.available": "17%"}, 0.155), ({"nodefs.available": "12%"}, 0.115)]
)
def test_with_a_built_in_threshold_a_disk_that_stays_full_keeps_its_pods_until_one_fills_it(
    kubepods: Kubepods, disk: Disk, api: ApiServer, run: StartAgent, threshold: dict[str, str], left: float
) -> None:
    """A kubelet keeps unused images until 15% are left, and evicts for nodefs at 10%."""
    _idle(kubepods, disk, CHILL, files=20, mib=20)
    (disk.volume(FILLER) / "data").write_bytes(b"x" * 40 * MIB)
    filler = _start(kubepods, disk, FILLER, WRITER, 2.0)
    _fill_with_images(disk, left=left)
    address = f"127.0.0.1:{free_port()}"
    at_eviction: list[tuple[str, float]] = []
    api.on_eviction = lambda entry, _body: at_eviction.append((entry["metadata"]["name"], disk.left))
    agent = run(evictionHard=threshold, metrics={"address": address})
    until(lambda: any("left to the kubelet" in line["message"] for line in agent.logged("note")), "why none is evicted")
    assert api.wait_for(lambda: _condition_is(api, "NodeAgentDiskPressure", "False"), 60), agent.events()
    before = _counted(address)
    until(lambda: _counted(address)["syncs"] >= before["syncs"] + 20, "twenty syncs")
    assert _counted(address)["full samples"] <= before["full samples"] + 5, (
        "a disk that stays full makes no node restless"
    )
    assert not api.sent("POST", "/eviction")
    _go(filler)
    assert api.wait_for(lambda: at_eviction, 60), agent.events()
    ((name, rest),) = at_eviction
    assert name == "filler"
    assert rest > 0.10, "before the kubelet"
    _release(kubepods, disk, api, agent)


def test_a_pod_may_fill_what_unused_images_would_free(
    kubepods: Kubepods, disk: Disk, api: ApiServer, run: StartAgent
) -> None:
    """Until a kubelet has had its chance to remove them."""
    node = api.node()
    node["status"]["images"] = [{"names": ["registry.example/old:1"], "sizeBytes": 60 * MIB}]
    api.put_node(node)
    _idle(kubepods, disk, CHILL, files=20, mib=20)
    (disk.volume(FILLER) / "data").write_bytes(b"x" * 40 * MIB)
    filler = _start(kubepods, disk, FILLER, WRITER, 2.0)
    _fill_with_images(disk, left=0.165)
    at_eviction: list[tuple[str, float]] = []
    api.on_eviction = lambda entry, _body: at_eviction.append((entry["metadata"]["name"], disk.left))
    agent = run(evictionHard={"imagefs.available": "17%"})
    assert api.wait_for(lambda: _condition_is(api, "NodeAgentDiskPressure", "False"), 60), agent.events()
    _go(filler)
    assert api.wait_for(lambda: at_eviction, 60), agent.events()
    ((name, rest),) = at_eviction
    assert name == "filler"
    assert 0.10 < rest < 0.14
    _release(kubepods, disk, api, agent)


def _without_ptrace(start: Callable[[], Run]) -> Run:
    """What this starts may not see the open files of processes that have more rights: neither may what a DaemonSet
    starts. The bounding set belongs to the thread that starts it."""
    started: list[Run] = []

    def begin() -> None:
        drop_from_bounding_set, sys_ptrace = 24, 19
        assert ctypes.CDLL(None).prctl(drop_from_bounding_set, sys_ptrace, 0, 0, 0) == 0
        started.append(start())

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    return started[0]


def test_no_pod_is_evicted_for_a_disk_that_fills_with_unreadable_files(
    kubepods: Kubepods, disk: Disk, api: ApiServer, run: StartAgent
) -> None:
    _innocents(kubepods, disk)
    filler = _start(kubepods, disk, FILLER, HIDER, 12.0)
    agent = _without_ptrace(lambda: run(**DISK_HARD))
    _go(filler)
    until(lambda: any(line["code"] == "unattributed" for line in agent.logged("not evicting")), "why no pod is evicted")
    until(lambda: disk.lowest_bytes < 100 * MIB, "the disk is half of the way to full")
    assert agent.stop() == 0
    assert not api.sent("POST", "/eviction")
    notes = [note["message"] for note in agent.logged("note")]
    assert any("deleted files" in note and "unknown" in note for note in notes)


def test_no_pod_is_evicted_for_usage_older_than_the_agent(
    kubepods: Kubepods, disk: Disk, api: ApiServer, run: StartAgent
) -> None:
    _innocents(kubepods, disk)
    filler = _start(kubepods, disk, FILLER, HIDER, 6.0)
    _go(filler)
    until(lambda: disk.lowest_bytes < 150 * MIB, "the disk is short")
    agent = _without_ptrace(lambda: run(**DISK_HARD))
    until(lambda: any(line["code"] == "unattributed" for line in agent.logged("not evicting")), "why no pod is evicted")
    until(lambda: disk.lowest_bytes < 90 * MIB, "the disk fills on")
    assert agent.stop() == 0
    assert not api.sent("POST", "/eviction")


def test_the_usage_of_an_evicted_pod_hides_no_growth_outside_of_pods(
    kubepods: Kubepods, disk: Disk, api: ApiServer, run: StartAgent
) -> None:
    _innocents(kubepods, disk)
    _idle(kubepods, disk, FILLER, files=4, mib=220)
    api.on_eviction = lambda _entry, _body: None
    agent = run(**DISK_HARD)
    assert api.wait_for(lambda: api.sent("POST", "/eviction"), 60), agent.events()
    kubepods.kill(FILLER)
    disk.remove(FILLER)
    api.delete_pod("default", "filler")
    journal = disk.place / "journal"
    journal.mkdir()
    for index in range(105):  # 210 MiB, slow enough for several counts
        (journal / str(index)).write_bytes(b"x" * 2 * MIB)
        threading.Event().wait(0.15)
    until(lambda: any(line["code"] == "unattributed" for line in agent.logged("not evicting")), "why no pod is evicted")
    assert agent.stop() == 0
    assert [request.path.split("/")[-2] for request in api.sent("POST", "/eviction")] == ["filler"]
