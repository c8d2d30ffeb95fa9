"""An image file system of its own that a container fills through its writable layer, at the speed at which a kubelet's
imagefs was seen to reach zero before anything happened (150 MiB/s)."""

import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fake_kube import ApiServer, pod
from tests.support.disk_load import LITTERER, WRITER, Disk
from tests.support.livenode import MIB, Kubepods, StartAgent, container_id, needs_cgroup_v1, until
from tests.support.mounts import ext4, mounted

pytestmark = [pytest.mark.real_cgroup, needs_cgroup_v1]

FILLER, CHILL = str(uuid.uuid4()), str(uuid.uuid4())
KUBELET_S = 1.5
"""From an accepted eviction to the end of the pod's processes. A real kubelet takes 1 to 3 s (performance.md R6)."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """The image file system; the kubelet's directory and the logs are elsewhere."""
    (tmp_path / "imagefs").mkdir()
    with ext4(tmp_path / "imagefs", size_mb=2400, inodes=40_000) as place:
        made = Disk(place)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture
def layers(tmp_path: Path, disk: Disk) -> Iterator[dict[str, Path]]:
    """The root file system of each pod's container, mounted where containerd does."""
    made: dict[str, Path] = {}
    with mounted(tmp_path / "shm", "-t", "tmpfs", "tmpfs") as shm:
        (shm / "empty").mkdir()
        mounts = []
        for number, uid in enumerate((FILLER, CHILL)):
            upper, work = (disk.place / f"images/snapshots/{number}/{name}" for name in ("fs", "work"))
            upper.mkdir(parents=True)
            work.mkdir()
            at = tmp_path / "io.containerd.runtime.v2.task/k8s.io" / container_id(uid) / "rootfs"
            options = f"lowerdir={shm}/empty,upperdir={upper},workdir={work}"
            mounts.append(mounted(at, "-t", "overlay", "-o", options, "overlay"))
            made[uid] = at
        with mounts[0], mounts[1]:
            yield made


@pytest.fixture
def api(kubepods: Kubepods) -> Iterator[ApiServer]:
    pods = [
        pod(name, uid=uid, owner=("ReplicaSet", name), qos="Burstable", requests={"memory": "50Mi"})
        for name, uid in (("filler", FILLER), ("chill", CHILL))
    ]
    with ApiServer(node="lab-node", pods=pods, linger_s=None) as server:
        yield server


BYTES = {"hard": {"imagefs.available": "1500Mi"}, "soft": {"imagefs.available": "1900Mi"}}
INODES = {"hard": {"imagefs.inodesFree": "20k"}, "soft": {"imagefs.inodesFree": "30k"}}


@pytest.mark.parametrize("hard_kill", ["cgroup", "none"])
@pytest.mark.parametrize(
    ("program", "per_s", "thresholds"), [(WRITER, 150.0, BYTES), (LITTERER, 2000.0, INODES)], ids=["bytes", "inodes"]
)
def test_the_pod_that_fills_the_image_file_system_is_evicted_before_it_is_full(
    tmp_path: Path,
    kubepods: Kubepods,
    disk: Disk,
    layers: dict[str, Path],
    api: ApiServer,
    start_agent: StartAgent,
    program: str,
    per_s: float,
    thresholds: dict[str, dict[str, str]],
    hard_kill: str,
) -> None:
    (layers[CHILL] / "held").write_bytes(b"x" * 40 * MIB)
    kubepods.start(CHILL, qos="burstable")
    filler = subprocess.Popen(
        [sys.executable, "-c", program, str(layers[FILLER]), str(per_s)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    kubepods.adopt(FILLER, filler, qos="burstable")
    assert filler.stdout is not None
    assert filler.stdin is not None
    assert filler.stdout.readline() == "up\n"
    up_at_eviction: list[bool] = []

    def kubelet(entry: dict[str, Any], _body: dict[str, Any]) -> None:
        assert entry["metadata"]["name"] == "filler"
        own = api.condition("NodeAgentDiskPressure")
        up_at_eviction.append(own is not None and own["status"] == "True")
        threading.Timer(KUBELET_S, filler.kill).start()

    api.on_eviction = kubelet
    (tmp_path / "node/kubelet/pods").mkdir(parents=True)
    (tmp_path / "node/logs").mkdir()
    agent = start_agent(
        evictionHard=thresholds["hard"],
        evictionSoft=thresholds["soft"],  # publishes the condition and never acts here
        evictionSoftGracePeriod=dict.fromkeys(thresholds["soft"], "10m"),
        escalation={"hardKill": hard_kill},
        sampling={
            "interval": "1s",
            "cgroupRoot": f"/{kubepods.root}",
            "kubeletDir": f"{tmp_path}/node/kubelet",
            "imageDir": f"{disk.place}/images",
            "podLogsDir": f"{tmp_path}/node/logs",
        },
    )
    until(lambda: agent.logged("signal changed"), "the first decision")
    filler.stdin.write("go\n")
    filler.stdin.flush()
    assert api.wait_for(lambda: up_at_eviction, 60), agent.events()
    until(lambda: not kubepods.running(FILLER), "the filler has ended")
    assert up_at_eviction == [True]
    numbers = os.statvfs(disk.place)
    lowest = disk.lowest_bytes / (numbers.f_blocks * numbers.f_frsize), disk.lowest_inodes / numbers.f_files
    assert min(lowest) > 0.02, f"it was as good as full: {lowest}"
    [reported] = agent.wait_for_log("evicting")
    assert reported["predicted_relief"] > 0
    assert len(api.sent("POST", "/eviction")) == 1, "chill stays"
    assert kubepods.running(CHILL)
    assert agent.stop() == 0
