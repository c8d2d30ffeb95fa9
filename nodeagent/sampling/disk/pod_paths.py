"""Where on disk a pod's own files are: writable layers, container logs, local volumes, the kubelet's files for it.

What counts is what KUBELET-CONTRACT (section 1, pod ephemeral total) counts: disk-backed emptyDir, configMap and
gitRepo volumes; never secrets and projected volumes (tmpfs), hostPath or PersistentVolumes. A volume on a tmpfs is
memory.

Writable layers are the upper directories of overlay mounts in the host's mount table, which only root can write:
containerd names the container in the mount point, CRI-O the layer, which its own list gives a container. The mount
table of a container's process would tell it as well, but a privileged tenant could write there what he likes. A
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
    """What a place is."""

    LAYER = "layer"
    """`name` is the container's id."""
    LOGS = "logs"
    """Plain files directly in a container's log directory; `name` is the container's."""
    POD_LOGS = "pod logs"
    """Plain files directly in the pod's log directory."""
    HOSTS = "etc-hosts"
    VOLUME = "volume"
    MEMORY_VOLUME = "memory volume"


class Part(enum.Enum):
    """What of a pod is removed together."""

    VOLUMES = "volumes"
    CONTAINERS = "containers"
    """Layers and logs."""
    DELETED = "deleted files"
    """They end with the processes that hold them open."""


class PodPart(NamedTuple):
    """A part of one pod."""

    uid: str
    part: Part


class PodPath(NamedTuple):
    """One thing to be counted for a pod."""

    uid: str
    kind: Kind
    name: str
    base: str
    """A directory on the host that is the administrator's: links on the way are followed, inside the host's root."""
    below: tuple[str, ...]
    """The way down from there, on which no link is followed."""


class PodPaths(NamedTuple):
    """Where the pods' files are."""

    places: tuple[PodPath, ...]
    unknown: Mapping[str, tuple[str, ...]]
    """UID -> what of this pod could not be found, and why."""
    layers: Mapping[str, Mount]
    """Container id -> its overlay mount."""
    mounts: Sequence[Mount]
    """The host's mount table; empty when it cannot be read."""


def find_places(host: Host, pods: Sequence[PodUsage], *, kubelet_dir: str, pod_logs_dir: str) -> PodPaths:
    """The places of these pods. Never raises: what cannot be listed is unknown."""
    places: list[PodPath] = []
    unknown: dict[str, list[str]] = {pod.cgroup_uid: [] for pod in pods}
    try:
        mounts, trouble = host.mounts(), ""
    except Unreadable as error:
        mounts, trouble = [], str(error)
    wanted = {c.container_id for pod in pods for c in pod.containers}
    layers = find_layers(host, mounts, wanted)
    points = {mount.point: mount for mount in mounts}
    logs = _log_directories(host, pod_logs_dir, unknown)
    kubelet = _resolved(host, kubelet_dir)
    for pod in pods:
        uid = pod.cgroup_uid
        missing = unknown[uid]
        for container in pod.containers:
            layer = layers.get(container.container_id)
            if layer is None:
                reason = trouble or "no overlay mount of containerd or CRI-O: its snapshotter is another one"
                missing.append(f"layer of container {container.name or container.container_id[:12]}: {reason}")
            else:
                base, name = os.path.split(upper_directory(layer))
                places.append(PodPath(uid, Kind.LAYER, container.container_id, base, (name,)))
        if uid in logs:
            places += _log_places(host, uid, pod_logs_dir, logs[uid], missing)
        places += _kubelet_places(host, uid, kubelet, points, missing)
    return PodPaths(tuple(places), {uid: tuple(reasons) for uid, reasons in unknown.items() if reasons}, layers, mounts)


def parts_left(host: Host, *, kubelet_dir: str, pod_logs_dir: str) -> frozenset[PodPart]:
    """The parts of which files are left on disk, of pods that have ended too. Raises Unreadable.

    The kubelet removes a pod's volumes before its cgroup, and its logs about when it removes its containers, which may
    be minutes later. Nothing but its containers' snapshots tells more precisely of layers.
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


def open_place(host: Host, place: PodPath, *, parent: bool = False) -> int:
    """A descriptor of the directory (or of the one that holds it), which the caller closes. Raises OSError, and
    Unreadable when the base's links loop."""
    fd = os.open(host.real(host.resolve(place.base)), _OPEN)
    for name in place.below[:-1] if parent else place.below:
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


def find_layers(host: Host, mounts: Iterable[Mount], wanted: set[str]) -> dict[str, Mount]:
    """Container id -> overlay mount, for those of the wanted containers that have one."""
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
    return {container: layers[container] for container in wanted & layers.keys()}


def upper_directory(mount: Mount) -> str:
    """The host's path of an overlay's writable layer. containers/storage may mount with paths relative to its own
    directory: then the layer is `diff` beside `merged`."""
    for option in _options(mount.super_options):
        if option.startswith("upperdir=/"):
            return option.removeprefix("upperdir=")
    return f"{os.path.dirname(mount.point)}/diff"


def _options(text: str) -> list[str]:
    r"""Mount options; a comma in a path is written `\,` or, in mountinfo, `\054`."""
    return [part.replace("\\,", ",").replace("\\054", ",") for part in re.split(r"(?<!\\),", text)]


def _crio_containers(host: Host, root: str) -> dict[str, str]:
    """Container id -> layer id, by the list that containers/storage keeps."""
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
    """UID -> name of the pod's log directory."""
    try:
        names = host.listdir(pod_logs_dir)
    except Unreadable as error:
        for reasons in unknown.values():
            reasons.append(f"logs: {error}")
        return {}
    return {name.rpartition("_")[2]: name for name in names if name.count("_") == 2}


def _log_places(host: Host, uid: str, pod_logs_dir: str, directory: str, missing: list[str]) -> list[PodPath]:
    places = [PodPath(uid, Kind.POD_LOGS, "", pod_logs_dir, (directory,))]
    try:
        containers = host.subdirectories(f"{pod_logs_dir}/{directory}")
    except Unreadable as error:
        missing.append(f"logs: {error}")
        return places
    return places + [PodPath(uid, Kind.LOGS, name, pod_logs_dir, (directory, name)) for name, _ in sorted(containers)]


def _kubelet_places(
    host: Host, uid: str, kubelet: str, points: Mapping[str, Mount], missing: list[str]
) -> list[PodPath]:
    pod = f"{kubelet}/pods/{uid}"
    places = [PodPath(uid, Kind.HOSTS, "", kubelet, ("pods", uid, "etc-hosts"))]
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
                missing.append(f"volume {name}: a mount of {mount.fstype}, which is not the pod's own")
                continue
            kind = Kind.VOLUME if mount is None else Kind.MEMORY_VOLUME
            places.append(PodPath(uid, kind, name, kubelet, ("pods", uid, "volumes", plugin, name)))
    return places
