"""Runs in the machine by the agent's Python: images, pods and an orphan of a real containerd, through its CRI.

`setup FILES` makes all of them and prints a JSON object: the directory of the orphan, and the files that are left in
it. `remove` removes unused images as the agent does, and prints what it removed and which images are left.
"""

import contextlib
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from nodeagent.actuators import unused_images
from nodeagent.cri import protobuf
from nodeagent.cri.grpc_client import GrpcClient, GrpcError
from nodeagent.cri.runtime import RuntimeClient

SOCKET = "/run/containerd/containerd.sock"
SNAPSHOTS = Path("/var/lib/containerd/io.containerd.snapshotter.v1.overlayfs/snapshots")
RUNTIME = "/runtime.v1.RuntimeService"
NODE_NETWORK = 2
ATTEMPTS = 3
CALL_S = 300.0
"""For a machine that is emulated on a busy host."""


def make_layer(spec: str) -> bytes:
    """A tar file: `busybox`, `NAME=MIB` for one file, or `NAME*COUNT` for so many empty ones."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        if spec == "busybox":
            tar.add("/bin/busybox", "bin/busybox")
            for name in ("sh", "sleep", "dd"):
                link = tarfile.TarInfo(f"bin/{name}")
                link.type, link.linkname = tarfile.SYMTYPE, "busybox"
                tar.addfile(link)
        elif "*" in spec:
            name, count = spec.split("*")
            for index in range(int(count)):
                tar.addfile(tarfile.TarInfo(f"{name}/{index}"))
        else:
            name, mebibytes = spec.split("=")
            info = tarfile.TarInfo(name)
            info.size = int(mebibytes) << 20
            tar.addfile(info, io.BytesIO(hashlib.sha256(name.encode()).digest() * (info.size // 32)))
    return buffer.getvalue()


def import_image(name: str, *specs: str) -> None:
    layers = [make_layer(spec) for spec in specs]
    digests = [f"sha256:{hashlib.sha256(data).hexdigest()}" for data in layers]
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": ["/bin/sleep", "100000"]},
        "rootfs": {"type": "layers", "diff_ids": digests},
    }
    files = {f"{index}.tar": data for index, data in enumerate(layers)}
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": list(files)}]
    files |= {"config.json": json.dumps(config).encode(), "manifest.json": json.dumps(manifest).encode()}
    with tarfile.open("/run/image.tar", "w") as tar:
        for path, data in files.items():
            info = tarfile.TarInfo(path)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    subprocess.run(["ctr", "-n", "k8s.io", "images", "import", "/run/image.tar"], check=True, stdout=sys.stderr)
    os.unlink("/run/image.tar")


def start_pod(name: str, image_name: str, command: str) -> str:
    """A pod with one container. Returns the container's id."""
    encode, text = protobuf.encode, protobuf.text
    options = encode(8, encode(2, encode(1, encode(1, NODE_NETWORK))))
    metadata = encode(1, name) + encode(2, f"uid-{name}") + encode(3, "shop")
    config = encode(1, metadata) + encode(3, f"/var/log/pods/shop_{name}_uid-{name}") + options
    with GrpcClient(SOCKET) as grpc:
        sandbox = text(grpc.call(f"{RUNTIME}/RunPodSandbox", encode(1, config), timeout_s=CALL_S), 1)
        words = b"".join(encode(3, word) for word in ("/bin/sh", "-c", command))
        container = encode(1, encode(1, "main")) + encode(2, encode(1, image_name)) + words + encode(11, "main.log")
        request = encode(1, sandbox) + encode(2, container) + encode(3, config)
        made = text(grpc.call(f"{RUNTIME}/CreateContainer", request, timeout_s=CALL_S), 1)
        grpc.call(f"{RUNTIME}/StartContainer", encode(1, made), timeout_s=CALL_S)
    return made


def wait_for_end(container_id: str) -> None:
    """Until the CRI reports that the container has ended."""
    wait_until(lambda facts: any(each.id == container_id and not each.live for each in facts.containers))


def wait_until(done: Callable[..., bool]) -> None:
    """Until the CRI answers with facts of which this holds."""
    deadline = time.monotonic() + CALL_S
    while time.monotonic() < deadline:
        with contextlib.suppress(GrpcError), GrpcClient(SOCKET) as grpc:
            if done(RuntimeClient(grpc).read_facts()):
                return
        time.sleep(0.2)
    sys.exit("the CRI does not show it")


def remove_image(image_name: str) -> None:
    """By the CRI: it gives an image a second name, which `ctr images rm` leaves."""
    with contextlib.suppress(GrpcError), GrpcClient(SOCKET) as grpc:  # it is killed meanwhile
        client = RuntimeClient(grpc)
        for found in client.read_facts().images:
            if image_name in found.names:
                client.remove_image(found, timeout_s=CALL_S)


def changed_at(directory: Path) -> int | None:
    """When an entry of it was last removed; None once it is gone."""
    try:
        return directory.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def make_orphan(image_name: str, files: int) -> tuple[str, int]:
    """Kills containerd as soon as the first file of the image's layer is removed. Returns the directory of the snapshot
    and the files that are left; 0 if containerd was faster."""
    import_image(image_name, f"litter*{files}")
    wait_until(lambda facts: any(image_name in image.names for image in facts.images))
    [snapshot] = [path for path in SNAPSHOTS.iterdir() if (path / "fs/litter").exists()]
    directory = snapshot / "fs/litter"
    pid = int(subprocess.check_output(["systemctl", "show", "-P", "MainPID", "containerd"]))
    before = changed_at(directory)
    remover = threading.Thread(target=remove_image, args=(image_name,), daemon=True)
    remover.start()
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))  # this thread alone
    while changed_at(directory) == before and remover.is_alive():
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    remover.join()
    subprocess.run(["systemctl", "restart", "containerd"], check=True)
    left = sum(len(names) for _, _, names in os.walk(snapshot))
    return snapshot.name, left if left < files else 0


def sandbox_image() -> str:
    """The image that this containerd runs in each pod."""
    configuration = subprocess.run(["containerd", "config", "default"], check=True, capture_output=True, text=True)
    found = re.search(r'sandbox_image = "([^"]+)"', configuration.stdout)
    assert found, configuration.stdout
    return found[1]


def setup(files: str) -> None:
    images = {
        sandbox_image(): ["busybox"],
        "docker.io/library/used:1": ["busybox", "shared=8"],
        "docker.io/library/unused:1": ["busybox", "shared=8", "own=12"],
    }
    for name, layers in images.items():
        import_image(name, *layers)
    wait_until(lambda facts: images.keys() <= {name for image in facts.images for name in image.names})
    start_pod("web", "docker.io/library/used:1", "dd if=/dev/zero of=/w bs=1048576 count=8; sleep 100000")
    wait_for_end(start_pod("done", "docker.io/library/used:1", "dd if=/dev/zero of=/w bs=1048576 count=4"))
    for attempt in range(ATTEMPTS):
        orphan, left = make_orphan(f"docker.io/library/litter:{attempt}", int(files))
        if left:
            break
    wait_until(lambda facts: not any("/litter:" in name for image in facts.images for name in image.names))
    os.sync()
    print(json.dumps({"orphan": orphan, "left": left}))


def remove() -> None:
    removed = unused_images.remove_unused_images(SOCKET, until=time.monotonic() + CALL_S, starting_s=1.0)
    with GrpcClient(SOCKET) as grpc:
        left = [name for image in RuntimeClient(grpc).read_facts().images for name in image.names]
    os.sync()
    print(json.dumps({"images": removed.images, "bytes": removed.bytes, "left": removed.left, "names": left}))


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]] = {"setup": setup, "remove": remove}
    commands[sys.argv[1]](*sys.argv[2:])
