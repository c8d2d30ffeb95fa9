"""Project quotas of real file systems are read instead of walking, where they are exact, and only there."""

import json
import re
import uuid
from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.support.paths import REPOSITORY
from tests.vm.machine import Machine

pytestmark = [pytest.mark.vm, pytest.mark.timeout(600)]

MIB: Final = 1 << 20
TOP: Final = "/var/tmp/quota"
MAKE: Final = {
    "ext4": "mke2fs -q -t ext4 -O quota,project -E quotatype=prjquota {image}",
    "xfs": "mkfs.xfs -q {image}",
}
WORK: Final = {
    "own": f"unshare --user --map-root-user sh -c 'touch {TOP}/own; exec sleep 100000'",
    # With more capabilities than the agent, and with a deleted file that is held open.
    "host": f"sh -c 'exec 3>{TOP}/gone; rm {TOP}/gone; head -c {2 * MIB} /dev/zero >&3; touch {TOP}/host; "
    "exec sleep 100000'",
}
MEASURE: Final = r"""
import json, sys, time
from nodeagent.model import ContainerUsage, PodUsage, QOSClass
from nodeagent.sampling.disk.attribution import PodDiskMeter
from nodeagent.sampling.hostfs.host import open_host

top, cgroups = sys.argv[1], json.loads(sys.argv[2])
ID = {name: str(number) * 64 for number, name in enumerate(cgroups, start=1)}


def pods():
    return [PodUsage(name, QOSClass.BURSTABLE, cgroup, 1.0, containers=(ContainerUsage(ID[name], "c", None, None),))
            for name, cgroup in cgroups.items()]


def measure():
    kubelet, logs = f"{top}/kubelet", f"{top}/logs"
    meter = PodDiskMeter(open_host("/"), kubelet_dir=kubelet, pod_logs_dir=logs, cgroups="/sys/fs/cgroup")
    found = meter.measure(pods(), until=time.monotonic() + 60)
    meter.close()
    return found, meter.progress.entries


def volumes(found, pod):
    return [found[pod].disk.volumes_bytes, found[pod].disk.volumes_inodes]


if __name__ == "__main__":
    found, entries = measure()
    deleted = found["host"].deleted
    json.dump([volumes(found, "own"), entries, [deleted.bytes, deleted.complete]], sys.stdout)
"""
SCENE: Final = r"""
import fcntl, json, os, shutil, struct, subprocess, sys
from quota_measure import ID, measure, top, volumes

with_rights = json.loads(sys.argv[3])
FSXATTR, GET, SET, INHERIT = struct.Struct("=IIIII8x"), 0x801C581F, 0x401C5820, 0x200


def give(path, project, inherit=True):
    "As a kubelet and CRI-O do."
    fd = os.open(path, os.O_RDONLY)
    flags, size, _, _, cow = FSXATTR.unpack(fcntl.ioctl(fd, GET, bytes(FSXATTR.size)))
    flags = flags | INHERIT if inherit else flags
    fcntl.ioctl(fd, SET, FSXATTR.pack(flags, size, 0, project, cow))
    os.close(fd)


def volume(pod, name="data"):
    place = f"{top}/kubelet/pods/{pod}/volumes/kubernetes.io~empty-dir/{name}"
    os.makedirs(place, exist_ok=True)
    return place


def fill(place, files, size):
    os.makedirs(f"{place}/below", exist_ok=True)
    for index in range(files):
        with open(f"{place}/below/{index}", "wb") as file:
            file.write(b"x" * size)


def du(*places):
    output = [subprocess.run(["du", "-s", *how, *places], capture_output=True, text=True, check=True).stdout
            for how in (["--block-size=1"], ["--inodes"])]
    return [sum(int(line.split()[0]) for line in text.splitlines()) for text in output]


output = {}
os.makedirs(f"{top}/logs")
# A pod whose processes are in a user namespace: its volume, and its layer as CRI-O marks it, are whole under a project.
give(volume("own"), 7)
fill(volume("own"), 300, 9000)
os.makedirs(f"{top}/layers/one")
give(f"{top}/layers/one", 8)
upper, work, lower, merged = (f"{top}/layers/one/{name}" for name in ("diff", "work", "lower", "merged"))
for each in (upper, work, lower, merged):
    os.makedirs(each)
rootfs = f"/run/containerd/io.containerd.runtime.v2.task/k8s.io/{ID['own']}/rootfs"
os.makedirs(rootfs, exist_ok=True)
subprocess.run(["mount", "-t", "overlay", "overlay", "-o", f"lowerdir={lower},upperdir={upper},workdir={work}", rootfs],
               check=True)
fill(rootfs, 20, 5000)
os.sync()
found, entries = measure()
output["own"] = [volumes(found, "own"), du(volume("own")), entries]
output["rights"] = {
    name: json.loads(subprocess.run(
        ["systemd-run", "--quiet", "--wait", "--pipe", *(f"--property={line}" for line in lines),
         sys.executable, "/run/vm/quota_measure.py", top, sys.argv[2]], stdout=subprocess.PIPE, check=True).stdout)
    for name, lines in with_rights.items()
}
output["layer"] = [[found["own"].disk.rootfs_bytes, found["own"].disk.rootfs_inodes], du(f"{top}/layers/one")]
with open(f"{volume('own')}/later", "wb") as file:
    file.write(b"x" * 5_000_000)
os.sync()
found, entries = measure()
output["grown"] = [volumes(found, "own"), du(volume("own")), entries]

# A pod in the host's user namespace can give its files any project.
give(volume("host"), 9)
fill(volume("host"), 50, 9000)
with open(f"{volume('host')}/hidden", "wb") as file:
    file.write(b"x" * 3_000_000)
give(f"{volume('host')}/hidden", 7, inherit=False)
os.sync()
found, entries = measure()
output["host"] = [volumes(found, "host"), du(volume("host")), entries]
os.unlink(f"{volume('host')}/hidden")
shutil.rmtree(f"{top}/kubelet/pods/host")

# Two volumes in one project: neither number is that of one volume.
shutil.rmtree(volume("own"))
for name in ("one", "two"):
    give(volume("own", name), 11)
    fill(volume("own", name), 30, 9000)
os.sync()
found, entries = measure()
output["shared"] = [sorted(v.used_inodes for v in found["own"].volumes), entries]
for name in ("one", "two"):
    shutil.rmtree(volume("own", name))

# A project that was given to something larger.
above = os.path.dirname(volume("own"))
give(above, 12)
fill(volume("own"), 30, 9000)
with open(f"{above}/beside", "wb") as file:
    file.write(b"x" * 1_000_000)
os.sync()
found, entries = measure()
output["larger"] = [volumes(found, "own"), du(volume("own")), entries]
subprocess.run(["umount", rootfs], check=True)
json.dump(output, sys.stdout)
"""


def rights() -> dict[str, list[str]]:
    """Lines of the unit that restrict the agent, and the same with those that docs/disk.md adds."""
    unit = (REPOSITORY / "systemd/nodeagent.service").read_text(encoding="utf-8").splitlines()
    held = [line for line in unit if re.match("CapabilityBoundingSet|SystemCall|NoNewPrivileges", line)]
    page = (REPOSITORY / "docs/disk.md").read_text(encoding="utf-8")
    [added] = re.findall(r"```ini\n\[Service\]\n(.*?)```", page, flags=re.DOTALL)
    more = held + [line for line in added.splitlines() if not line.startswith("#")]
    return {"unit": _as_properties(held), "page": _as_properties(more)}


def _as_properties(lines: list[str]) -> list[str]:
    """In a unit one set of capabilities adds to another; of those that systemd-run is given the last one counts."""
    sets = [line.partition("=")[2] for line in lines if line.startswith("CapabilityBoundingSet=")]
    others = [line for line in lines if not line.startswith("CapabilityBoundingSet=")]
    return [f"CapabilityBoundingSet={' '.join(sets)}", *others]


@pytest.fixture(scope="module", params=MAKE)
def output(machine: Machine, request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """What the agent's own code measured in the machine, on a file system with project quotas."""
    kind = request.param
    image = f"{TOP}.img"
    slices = {name: f"quota-{uuid.uuid4().hex}.slice" for name in ("own", "host")}
    machine.run(f"truncate -s 400M {image} && {MAKE[kind].format(image=image)}", timeout_s=240)
    machine.run(f"mkdir -p {TOP} && mount -o loop,prjquota {image} {TOP}")
    try:
        for name, unit in slices.items():
            machine.run(f"systemd-run --quiet --slice={unit} {WORK[name]}")
        machine.write("/run/vm/quota_measure.py", MEASURE)
        machine.write("/run/vm/quota_scene.py", SCENE)
        machine.run(f"timeout 150 sh -c 'until test -e {TOP}/own -a -e {TOP}/host; do sleep 0.1; done'")
        cgroups = {name: f"/quota.slice/{unit}" for name, unit in slices.items()}
        ran = machine.run(
            ["/opt/nodeagent/bin/python", "/run/vm/quota_scene.py", TOP, json.dumps(cgroups), json.dumps(rights())],
            timeout_s=200,
        )
        holder = machine.run(f"cat /sys/fs/cgroup{cgroups['host']}/*/cgroup.procs").stdout.strip()
        held = machine.run(f"stat -L --format=%b /proc/{holder}/fd/3")
        yield {**json.loads(ran.stdout), "gone": int(held.stdout) * 512}
    finally:
        stop = "; ".join(f"systemctl stop {unit}" for unit in slices.values())
        machine.run(f"{stop}; umount -l {TOP}; rm -rf {image} {TOP}", check=False)


def test_a_volume_that_is_whole_under_a_project_is_not_walked(output: dict[str, Any]) -> None:
    by_quota, by_du, entries = output["own"]
    assert by_quota == by_du
    assert entries == 0
    by_quota, by_du, entries = output["grown"]
    assert by_quota == by_du
    assert by_quota[0] - output["own"][0][0] >= 5_000_000
    assert entries == 0


def test_the_agent_as_installed_walks_and_with_the_rights_on_the_page_it_sees_more(output: dict[str, Any]) -> None:
    numbers, by_du, _ = output["own"]
    assert numbers == by_du
    walked, entries, deleted = output["rights"]["unit"]
    assert (walked, entries > 300) == (by_du, True)
    assert deleted == [0, False], "it may not read them"
    read, entries, (deleted_bytes, complete) = output["rights"]["page"]
    assert (read, entries, complete) == (by_du, 0, True)
    assert deleted_bytes == output["gone"] >= 2 * MIB, "the kernel's number; xfs reserves more than was written"


def test_a_layer_counts_with_the_directory_that_carries_its_project(output: dict[str, Any]) -> None:
    by_quota, by_du = output["layer"]
    assert by_quota == by_du


def test_a_pod_that_can_change_the_project_of_its_files_is_walked(output: dict[str, Any]) -> None:
    by_walk, by_du, entries = output["host"]
    assert by_walk == by_du
    assert by_walk[0] > 3_000_000
    assert entries > 50


def test_a_project_of_several_trees_is_the_number_of_none(output: dict[str, Any]) -> None:
    assert output["shared"][0] == [32, 32]
    assert output["shared"][1] > 60


def test_a_project_of_something_larger_is_not_the_number_of_a_volume(output: dict[str, Any]) -> None:
    by_walk, by_du, entries = output["larger"]
    assert by_walk == by_du
    assert by_walk[0] < 1_000_000
    assert entries > 30
