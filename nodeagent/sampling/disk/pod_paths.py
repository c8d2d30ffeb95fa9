"""Finds the files of each pod on disk: writable layers, container logs, local volumes, the kubelet's files for the pod.

The paths are those of the pod's ephemeral total in KUBELET-CONTRACT (section 1): disk-backed emptyDir, configMap and
gitRepo volumes; never secrets and projected volumes (tmpfs), hostPath or PersistentVolumes. A volume on a tmpfs counts
as memory.

A writable layer is the upper directory of an overlay mount in the host's mount table, which only root can change. The
mount point contains the container id with containerd. With CRI-O it contains the layer id, and a list of CRI-O maps
containers to layers. The mount table of a container's process is not used, because a privileged tenant can change it. A
container without such a mount (another snapshotter) has an unknown layer.
"""

import contextlib
import enum
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from nodeagent.model import PodUsage
from nodeagent.sampling.hostfs.host import Host, Unreadable
from nodeagent.sampling.hostfs.mounts import Mount

LOCAL_VOLUMES: Final = ("kubernetes.io~empty-dir", "kubernetes.io~configmap", "kubernetes.io~git-repo")
_MEMORY: Final = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
_CONTAINERD: Final = re.compile(r"/io\.containerd\.runtime\.v[12]\.(?:task|linux)/k8s\.io/([^/]+)/rootfs$")
_CRIO: Final = re.compile(r"^(.*)/overlay/([^/]+)/merged$")
_OPEN: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NONBLOCK


class Kind(enum.Enum):
    """What a path contains."""

    LAYER = "layer"
    """`name` is the container id."""
    LOGS = "logs"
    """Plain files directly in a container's log directory; `name` is the container name."""
    POD_LOGS = "pod logs"
    """Plain files directly in the pod's log directory."""
    HOSTS = "etc-hosts"
    VOLUME = "volume"
    MEMORY_VOLUME = "memory volume"


class Part(enum.Enum):
    """Files of a pod that are removed together."""

    VOLUMES = "volumes"
    CONTAINERS = "containers"
    """Layers and logs."""
    DELETED = "deleted files"
    """They exist until the processes end that hold them open."""


class PodPart(NamedTuple):
    """A part of one pod."""

    uid: str
    part: Part


class PodPath(NamedTuple):
    """One path that counts for a pod."""

    uid: str
    kind: Kind
    name: str
    base: str
    """A directory of the administrator: links on the way to it are followed, inside the host's root."""
    below: tuple[str, ...]
    """The names below it, in which no link is followed."""


class PodPaths(NamedTuple):
    """The paths of the pods."""

    paths: tuple[PodPath, ...]
    unknown: Mapping[str, tuple[str, ...]]
    """UID -> the paths of this pod that were not found, each with its reason."""
    layers: Mapping[str, Mount]
    """Container id -> its overlay mount, of all containers of the host."""
    mounts: Sequence[Mount]
    """The host's mount table; empty if it cannot be read."""


def find_pod_paths(host: Host, pods: Sequence[PodUsage], *, kubelet_dir: str, pod_logs_dir: str) -> PodPaths:
    """The paths of these pods. Never raises: a path that cannot be listed is unknown."""
    paths: list[PodPath] = []
    unknown: dict[str, list[str]] = {pod.cgroup_uid: [] for pod in pods}
    try:
        mounts, trouble = host.mounts(), ""
    except Unreadable as error:
        mounts, trouble = [], str(error)
    layers = find_layers(host, mounts)
    points = {mount.point: mount for mount in mounts}
    logs = _log_directories(host, pod_logs_dir, unknown)
    kubelet = _resolved(host, kubelet_dir)
    for pod in pods:
        uid = pod.cgroup_uid
        missing = unknown[uid]
        for container in pod.containers:
            layer = layers.get(container.container_id)
            if layer is None:
                reason = trouble or "no overlay mount of containerd or CRI-O: unsupported snapshotter"
                missing.append(f"layer of container {container.name or container.container_id[:12]}: {reason}")
            else:
                base, name = os.path.split(upper_directory(layer))
                paths.append(PodPath(uid, Kind.LAYER, container.container_id, base, (name,)))
        if uid in logs:
            paths += _log_paths(host, uid, pod_logs_dir, logs[uid], missing)
        paths += _kubelet_paths(host, uid, kubelet, points, missing)
    return PodPaths(tuple(paths), {uid: tuple(reasons) for uid, reasons in unknown.items() if reasons}, layers, mounts)


def parts_left(host: Host, *, kubelet_dir: str, pod_logs_dir: str) -> frozenset[PodPart]:
    """The parts that still have files on disk, also of pods that have ended. Raises Unreadable.

    The kubelet removes a pod's volumes before its cgroup. It removes the logs together with the containers, which may
    be minutes later, so logs stand for layers as well: only the container runtime's snapshots are more precise.
    """
    kubelet = _resolved(host, kubelet_dir)
    logs = {name.rpartition("_")[2] for name in host.listdir(pod_logs_dir) if name.count("_") == 2}
    left = {PodPart(uid, Part.CONTAINERS) for uid in logs}
    for uid in host.listdir(f"{kubelet}/pods"):
        for plugin in LOCAL_VOLUMES:
            with contextlib.suppress(Unreadable):
                if host.subdirectories(f"{kubelet}/pods/{uid}/volumes/{plugin}"):
                    left.add(PodPart(uid, Part.VOLUMES))
    return frozenset(left)


def open_path(host: Host, path: PodPath, *, parent: bool = False) -> int:
    """A descriptor of the path (with `parent`: of its parent directory), which the caller closes. Raises OSError, and
    Unreadable if the links of the base loop."""
    fd = os.open(host.real(host.resolve(path.base)), _OPEN)
    for name in path.below[:-1] if parent else path.below:
        try:
            below = os.open(name, _OPEN | os.O_NOFOLLOW, dir_fd=fd)
        finally:
            os.close(fd)
        fd = below
    return fd


def _resolved(host: Host, path: str) -> str:
    try:
        return host.resolve(path)
    except Unreadable:
        return path


# --- writable layers -------------------------------------------------------------------------------------------------


def find_layers(host: Host, mounts: Iterable[Mount]) -> dict[str, Mount]:
    """Container id -> overlay mount, for each container that has one."""
    layers: dict[str, Mount] = {}
    by_root: dict[str, dict[str, Mount]] = {}
    for mount in mounts:
        if mount.fstype != "overlay":
            continue
        if (match := _CONTAINERD.search(mount.point)) is not None:
            layers[match[1]] = mount
        elif (match := _CRIO.match(mount.point)) is not None:
            by_root.setdefault(match[1], {})[match[2]] = mount
    for root, mounted in by_root.items():
        for container, layer in _crio_containers(host, root).items():
            if layer in mounted:
                layers[container] = mounted[layer]
    return layers


def upper_directory(mount: Mount) -> str:
    """The host path of an overlay's writable layer. containers/storage may mount with paths relative to its own
    directory: then the layer is `diff` beside `merged`."""
    for option in _options(mount.super_options):
        if option.startswith("upperdir=/"):
            return option.removeprefix("upperdir=")
    return f"{os.path.dirname(mount.point)}/diff"


def _options(text: str) -> list[str]:
    r"""Mount options; a comma in a path is written `\,` or, in mountinfo, `\054`."""
    return [part.replace("\\,", ",").replace("\\054", ",") for part in re.split(r"(?<!\\),", text)]


def _crio_containers(host: Host, root: str) -> dict[str, str]:
    """Container id -> layer id, from the list of containers/storage."""
    import json

    try:
        rows = json.loads(host.read(f"{root}/overlay-containers/containers.json"))
    except (Unreadable, ValueError):
        return {}
    found = {}
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, dict) and isinstance(row.get("id"), str) and isinstance(row.get("layer"), str):
            found[row["id"]] = row["layer"]
    return found


# --- logs and the kubelet's directory --------------------------------------------------------------------------------


def _log_directories(host: Host, pod_logs_dir: str, unknown: Mapping[str, list[str]]) -> dict[str, str]:
    """UID -> name of the pod's log directory. A failure is added to `unknown` of every pod."""
    try:
        names = host.listdir(pod_logs_dir)
    except Unreadable as error:
        for reasons in unknown.values():
            reasons.append(f"logs: {error}")
        return {}
    return {name.rpartition("_")[2]: name for name in names if name.count("_") == 2}


def _log_paths(host: Host, uid: str, pod_logs_dir: str, directory: str, missing: list[str]) -> list[PodPath]:
    paths = [PodPath(uid, Kind.POD_LOGS, "", pod_logs_dir, (directory,))]
    try:
        containers = host.subdirectories(f"{pod_logs_dir}/{directory}")
    except Unreadable as error:
        missing.append(f"logs: {error}")
        return paths
    return paths + [PodPath(uid, Kind.LOGS, name, pod_logs_dir, (directory, name)) for name, _ in sorted(containers)]


def _kubelet_paths(
    host: Host, uid: str, kubelet: str, points: Mapping[str, Mount], missing: list[str]
) -> list[PodPath]:
    pod = f"{kubelet}/pods/{uid}"
    paths = [PodPath(uid, Kind.HOSTS, "", kubelet, ("pods", uid, "etc-hosts"))]
    for plugin in LOCAL_VOLUMES:
        if not host.exists(f"{pod}/volumes/{plugin}"):
            continue
        try:
            names = host.subdirectories(f"{pod}/volumes/{plugin}")
        except Unreadable as error:
            missing.append(f"volumes: {error}")
            continue
        for name, _ in sorted(names):
            mount = points.get(f"{pod}/volumes/{plugin}/{name}")
            if mount is not None and mount.fstype not in _MEMORY:
                missing.append(f"volume {name}: mount of {mount.fstype}, not the pod's own")
                continue
            kind = Kind.VOLUME if mount is None else Kind.MEMORY_VOLUME
            paths.append(PodPath(uid, kind, name, kubelet, ("pods", uid, "volumes", plugin, name)))
    return paths
