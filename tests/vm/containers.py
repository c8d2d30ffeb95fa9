"""An image for containerd, made on the machine itself."""

from typing import Final

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
