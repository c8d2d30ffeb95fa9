"""Which file systems nodefs, imagefs and containerfs are, and what is free on them.

nodefs holds the kubelet's directory. imagefs holds the runtime's image store, which is found through the runtime's own
configuration on the host. They are one or two file systems by the device of their mounts, never by path. Writable
layers (containerfs) lie with the images, unless CRI-O is told to keep images elsewhere (`imagestore`): the split
layout. Where no runtime is found imagefs is unknown, and says so.
"""

import errno
import os
from typing import Final, NamedTuple

from nodeagent.config.schema import SamplingConfig
from nodeagent.model import DiskLayout, Observation, Signal
from nodeagent.sampling.hostfs.host import FileSystem, Host, Statvfs, Unreadable

_CONTAINERD_CONFIG: Final = "/etc/containerd/config.toml"
_CONTAINERD_ROOT: Final = "/var/lib/containerd"
_CRIO_CONFIG: Final = "/etc/crio/crio.conf"
_CRIO_DROPINS: Final = "/etc/crio/crio.conf.d"
_STORAGE_CONFIG: Final = "/etc/containers/storage.conf"
_STORAGE_ROOT: Final = "/var/lib/containers/storage"
_DOCKER_ROOT: Final = "/var/lib/docker"
_SERVICES: Final = tuple(
    f"/sys/fs/cgroup{hierarchy}/system.slice/{{}}/cgroup.procs" for hierarchy in ("", "/systemd", "/unified", "/memory")
)
# Distributions that bring a containerd of their own start it in their own service.
_CONTAINERD_UNITS: Final = (
    "containerd.service",
    "k3s.service",
    "k3s-agent.service",
    "rke2-server.service",
    "rke2-agent.service",
)
_SOCKETS: Final = {"cri-o": ("/run/crio/crio.sock",), "containerd": ("/run/containerd/containerd.sock",)}


class ImageStore(NamedTuple):
    """Where a runtime keeps images and writable layers."""

    runtime: str
    images: str
    containers: str
    """Writable layers; the same as `images` but for CRI-O with an imagestore."""


class Layout(NamedTuple):
    """Which directories stand for which file system."""

    kind: DiskLayout
    nodefs: str
    store: ImageStore | None
    reason: str = ""
    """Why the kind is UNKNOWN."""
    note: str = ""
    """What else a reader should know of the choice."""
    kubelet: str = ""
    """The kubelet's directory, whether it exists or not; empty: the configured one."""


def detect_layout(host: Host, config: SamplingConfig, statvfs: Statvfs) -> Layout:
    """The layout now. Never raises."""
    kubelet = kubelet_directory(host, config)
    nodefs, remark = _nearest(kubelet, statvfs)
    store, note = find_store(host, config, statvfs)
    if store is None:
        return Layout(DiskLayout.UNKNOWN, nodefs, None, note, remark, kubelet)
    note = "; ".join(filter(None, (remark, note)))
    try:
        node = statvfs(nodefs).device
        image, container = statvfs(store.images).device, statvfs(store.containers).device
    except Unreadable as error:
        return Layout(DiskLayout.UNKNOWN, nodefs, store, str(error), note, kubelet)
    if image != container:
        kind = DiskLayout.SPLIT
    else:
        kind = DiskLayout.SINGLE if image == node else DiskLayout.DEDICATED_IMAGEFS
    return Layout(kind, nodefs, store, "", note, kubelet)


def kubelet_directory(host: Host, config: SamplingConfig) -> str:
    """The configured one; where that is the default, what the running kubelet was told by --root-dir."""
    if config.kubelet_dir != SamplingConfig().kubelet_dir:
        return config.kubelet_dir
    words = service_command_line(host, "kubelet.service", ("kubelet", "hyperkube"))
    return _path_flag(words, ("--root-dir",)) or config.kubelet_dir


def service_command_line(host: Host, unit: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Arguments of the program with one of these names that runs in a systemd service; empty when none is seen. Asking
    the service's cgroup takes a few reads, where looking through all of /proc takes 10 us a process."""
    for procs in _SERVICES:
        try:
            pids = host.text(procs.format(unit)).split()
        except Unreadable:
            continue
        for pid in pids:
            try:
                words = host.text(f"/proc/{pid}/cmdline").rstrip("\0").split("\0")
            except Unreadable:
                continue  # it has ended
            if words[0].rpartition("/")[2] in names:
                return tuple(words[1:])
    return ()


def _path_flag(words: tuple[str, ...], flags: tuple[str, ...]) -> str | None:
    """The absolute path that the last of these flags gives (`--root-dir=/x`, `--root-dir /x`), or None."""
    found = None
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in flags:
            found = value if equals else words[index + 1] if index + 1 < len(words) else None
    return (found.rstrip("/") or "/") if found and found.startswith("/") else None


def _nearest(place: str, statvfs: Statvfs) -> tuple[str, str]:
    """(the directory whose file system is nodefs, a remark). Without a kubelet's directory it is the nearest one above:
    where a kubelet would make it."""
    wanted = place
    while place != "/" and not _is_there(place, statvfs):
        place = os.path.dirname(place)
    remark = "" if place == wanted else f"no {wanted} here: nodefs is where it would be, {place}"
    return place, remark


def _is_there(path: str, statvfs: Statvfs) -> bool:
    """Whether a directory exists, asked by the one call that has a deadline: a dead mount is there, it only does not
    answer."""
    try:
        statvfs(path)
    except Unreadable as error:
        return error.errno not in (errno.ENOENT, errno.ENOTDIR)
    return True


def find_store(host: Host, config: SamplingConfig, statvfs: Statvfs) -> tuple[ImageStore | None, str]:
    """(the image store, a remark on the choice) or (None, why there is none)."""
    if config.image_dir:
        return ImageStore("configured", config.image_dir, config.image_dir), ""
    stores = [
        store for store in (_containerd(host, statvfs), _crio(host, statvfs), _docker(statvfs)) if store is not None
    ]
    if not stores:
        looked = f"{_CONTAINERD_ROOT}, {_STORAGE_ROOT}, {_DOCKER_ROOT}"
        return None, f"no container runtime on this machine (no {looked}); set sampling.imageDir if there is one"
    if len(stores) == 1:
        return stores[0], ""
    running = [s for s in stores if any(host.exists(socket) for socket in _SOCKETS.get(s.runtime, ()))]
    best = (running or stores)[0]
    why = "its socket is there" if running else "first of them"
    names = ", ".join(f"{store.runtime} ({store.images})" for store in stores)
    return best, f"several container runtimes: {names}; taking {best.runtime}, {why}"


def _containerd(host: Host, statvfs: Statvfs) -> ImageStore | None:
    words = next(filter(None, (service_command_line(host, unit, ("containerd",)) for unit in _CONTAINERD_UNITS)), ())
    config = _path_flag(words, ("--config", "-config", "-c")) or _CONTAINERD_CONFIG
    root = _path_flag(words, ("--root", "-root")) or _configured(host, config, "", "root") or _CONTAINERD_ROOT
    if not _is_there(root, statvfs):
        return None
    snapshots = f"{root}/io.containerd.snapshotter.v1.overlayfs"
    place = snapshots if _is_there(snapshots, statvfs) else root
    return ImageStore("containerd", place, place)


def _crio(host: Host, statvfs: Statvfs) -> ImageStore | None:
    """CRI-O's own settings win over the ones of containers/storage; later drop-ins over earlier ones."""
    root, images = None, None
    for path, section, root_key in (
        (_STORAGE_CONFIG, "storage", "graphroot"),
        (_CRIO_CONFIG, "crio", "root"),
        *((path, "crio", "root") for path in _dropins(host)),
    ):
        root = _configured(host, path, section, root_key) or root
        images = _configured(host, path, section, "imagestore") or images
    root = root or _STORAGE_ROOT
    if not _is_there(root, statvfs):
        return None
    return ImageStore("cri-o", images or root, root)


def _docker(statvfs: Statvfs) -> ImageStore | None:
    return ImageStore("docker", _DOCKER_ROOT, _DOCKER_ROOT) if _is_there(_DOCKER_ROOT, statvfs) else None


def _dropins(host: Host) -> list[str]:
    try:
        names = host.listdir(_CRIO_DROPINS)
    except Unreadable:
        return []
    return [f"{_CRIO_DROPINS}/{name}" for name in sorted(names)]


def _configured(host: Host, path: str, section: str, key: str) -> str | None:
    """An absolute path in a runtime's TOML file; None when there is no such file or key."""
    try:
        value = toml_string(host.text(path), section, key)
    except Unreadable:
        return None
    return value.rstrip("/") or "/" if value and value.startswith("/") else None


def toml_string(text: str, section: str, key: str) -> str | None:
    """The value of `key = "string"` in `[section]` (empty: before the first section) of a TOML file; the last one wins.
    Only this much of TOML, because importing tomllib takes 12 ms and a path needs no more."""
    current, found = "", None
    for raw in text.split("\n"):
        line = raw.strip()
        if line.startswith("["):
            current = line.partition("]")[0].strip("[ \t")
            continue
        name, equals, rest = line.partition("=")
        value = rest.strip()
        if not equals or current != section or name.strip().strip("\"'") != key or value[:1] not in ('"', "'"):
            continue
        body, closed, _ = value[1:].partition(value[0])
        if closed and "\0" not in body:
            found = body
    return found


# --- the six observations --------------------------------------------------------------------------------------------


class Readings(NamedTuple):
    """What the three file systems said."""

    nodefs: FileSystem | Unreadable
    imagefs: FileSystem | Unreadable
    containerfs: FileSystem | Unreadable
    layout: Layout
    read_at: float


def read(layout: Layout, statvfs: Statvfs, *, now: float) -> Readings:
    """One look at each file system. Never raises."""
    nodefs = _try(statvfs, layout.nodefs)
    store = layout.store
    if store is None:
        nowhere = Unreadable("imagefs", 0, layout.reason)
        return Readings(nodefs, nowhere, nowhere, layout, now)
    imagefs = _try(statvfs, store.images)
    containerfs = imagefs if store.containers == store.images else _try(statvfs, store.containers)
    return Readings(nodefs, imagefs, containerfs, layout, now)


def _try(statvfs: Statvfs, path: str) -> FileSystem | Unreadable:
    try:
        return statvfs(path)
    except Unreadable as error:
        return error


def observe_bytes(signal: Signal, found: FileSystem | Unreadable, path: str, now: float) -> Observation:
    """Free bytes for an ordinary user."""
    source = f"statvfs {path}"
    if isinstance(found, Unreadable):
        return Observation(signal, None, None, now, source, str(found))
    if not found.capacity:
        return Observation(signal, None, None, now, source, "the file system says it has no size", found.device)
    return Observation(signal, found.available, found.capacity, now, source, device=found.device)


def observe_inodes(signal: Signal, found: FileSystem | Unreadable, path: str, now: float) -> Observation:
    """Free inodes; unknown where the file system has no fixed number of them (btrfs says 0)."""
    source = f"statvfs {path}"
    if isinstance(found, Unreadable):
        return Observation(signal, None, None, now, source, str(found))
    if not found.inodes:
        return Observation(signal, None, None, now, source, "the file system has no fixed inodes", found.device)
    return Observation(signal, found.inodes_free, found.inodes, now, source, device=found.device)
