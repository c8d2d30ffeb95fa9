"""An image for containerd, made on the machine itself."""

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


def remove_container(machine: Machine, pod: VmPod) -> None:
    """Remove the pod's only container with its writable layer, once containerd knows that its process has ended."""
    ctr = "ctr -n k8s.io"
    machine.run(
        f"timeout 200 sh -c 'until {ctr} tasks delete --force {pod.container_id}; "
        f"{ctr} containers delete {pod.container_id}; do sleep 0.5; done'",
        timeout_s=240,
    )
