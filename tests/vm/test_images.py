"""Unused images of a real containerd are removed, from within the unit's sandbox, before any pod is evicted.

By `ctr`, which Debian has; `crictl` is in none of its releases. The image lies in a namespace of its own, as those of a
builder do: in `k8s.io` the CRI plugin gives each image a second name, which keeps what it holds.
"""

import time
from collections.abc import Iterator
from typing import Final

import pytest

from tests.vm.disks import free
from tests.vm.machine import Machine
from tests.vm.pods import start_pod
from tests.vm.ramps import MIB, Node

pytestmark = [pytest.mark.vm, pytest.mark.timeout(600)]

STORE: Final = "/var/lib/containerd"
UNUSED: Final = "docker.io/library/unused:test"
UNUSED_MIB: Final = 32
"""Held twice: as it was pulled, and unpacked."""
MAKE_UNUSED: Final = f"""\
set -e
mkdir -p /var/tmp/unused/root && cd /var/tmp/unused
dd if=/dev/urandom of=root/big bs=1048576 count={UNUSED_MIB} status=none
tar -C root -cf layer.tar .
echo '{{"architecture":"amd64","os":"linux","config":{{}},"rootfs":{{"type":"layers","diff_ids":["sha256:'$(
sha256sum layer.tar | cut -d' ' -f1)'"]}}}}' >config.json
echo '[{{"Config":"config.json","RepoTags":["{UNUSED}"],"Layers":["layer.tar"]}}]' >manifest.json
tar -cf image.tar manifest.json config.json layer.tar
ctr -n build images import image.tar
rm -r /var/tmp/unused
sync
"""


@pytest.fixture
def full_store(machine: Machine) -> Iterator[Machine]:
    """containerd with an image that no container uses."""
    machine.run("systemctl start containerd", timeout_s=240)
    machine.run(MAKE_UNUSED, timeout_s=240)
    yield machine
    machine.run(f"ctr -n build images rm --sync {UNUSED}; systemctl stop containerd", check=False, timeout_s=240)


def test_unused_images_are_removed_before_a_pod_is_evicted(full_store: Machine, node: Node) -> None:
    left = free(full_store, "avail", STORE)
    remove = ["ctr", "-n", "build", "images", "rm", "--sync", UNUSED]
    with node.cast() as cast:
        cast.add(start_pod(full_store, "chill"))
        node.start_agent(
            evictionHard={},
            evictionSoft={"imagefs.available": f"{left // MIB + UNUSED_MIB // 2}Mi"},
            evictionSoftGracePeriod={"imagefs.available": "1s"},
            signals={},
            reclaim={
                "actions": [{"name": "images", "kind": "images", "command": remove, "timeout": "1m"}],
                "waitForKubelet": "1s",
            },
        )
        deadline = time.monotonic() + 180
        while "and freed" not in (log := node.log()):
            assert time.monotonic() < deadline, log
        assert "images (done)" in node.log()
        assert free(full_store, "avail", STORE) > left + UNUSED_MIB * MIB, node.log()
        assert cast.victims == []
        assert cast.alive() == {"chill"}
