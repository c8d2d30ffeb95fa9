"""An image for containerd, made on the machine itself."""

from collections.abc import Iterable
from typing import Final

from tests.vm.machine import Machine
from tests.vm.pods import VmPod

IMAGE: Final = "docker.io/library/busybox:test"


MAKE_IMAGE: Final = f"""\
set -e
mkdir -p /var/tmp/image/root/bin && cd /var/tmp/image
cp /bin/busybox root/bin/ && for name in sh dd sleep; do ln -sf busybox root/bin/$name; done
tar -C root -cf layer.tar .
echo '{{"architecture":"amd64","os":"linux","config":{{}},"rootfs":{{"type":"layers","diff_ids":["sha256:'$(
sha256sum layer.tar | cut -d' ' -f1)'"]}}}}' >config.json
echo '[{{"Config":"config.json","RepoTags":["{IMAGE}"],"Layers":["layer.tar"]}}]' >manifest.json
tar -cf image.tar manifest.json config.json layer.tar
ctr -n k8s.io images import image.tar
"""


def remove_containers(machine: Machine, pods: Iterable[VmPod]) -> None:
    """Remove the pods' only containers, once containerd knows that their processes have ended, and free their layers.

    A removed layer stays on the disk until containerd collects garbage; the end of a lease waits for that.
    """
    ctr = "ctr -n k8s.io"
    for pod in pods:
        machine.run(
            f"timeout 200 sh -c 'until {ctr} tasks delete --force {pod.container_id}; "
            f"{ctr} containers delete {pod.container_id}; do sleep 0.5; done'",
            timeout_s=240,
        )
    machine.run(f"{ctr} leases create --id removed && {ctr} leases delete --sync removed", timeout_s=240)
