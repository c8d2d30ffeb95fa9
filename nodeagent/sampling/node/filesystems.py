"""The file systems nodefs, imagefs and containerfs: where they are, and what is free on them.

nodefs contains the kubelet's directory. imagefs contains the image store of the container runtime, which is found by
the runtime's own configuration on the host. The devices of their mounts, never their paths, show if they are one file
system or two. Writable layers (containerfs) are stored with the images, unless CRI-O's `imagestore` separates them: the
split layout. Without a container runtime imagefs is unknown, with the reason.
"""

import errno
import os
from typing import Final, NamedTuple

from nodeagent.config.schema import SamplingConfig
from nodeagent.model import DiskLayout, Observation, Signal
from nodeagent.sampling.hostfs import processes
from nodeagent.sampling.hostfs.host import FileSystem, Host, Statvfs, Unreadable

_CONTAINERD_CONFIG: Final = "/etc/containerd/config.toml"
_CONTAINERD_ROOT: Final = "/var/lib/containerd"
_CRIO_CONFIG: Final = "/etc/crio/crio.conf"
_CRIO_DROPINS: Final = "/etc/crio/crio.conf.d"
_STORAGE_CONFIG: Final = "/etc/containers/storage.conf"
_STORAGE_ROOT: Final = "/var/lib/containers/storage"
_DOCKER_ROOT: Final = "/var/lib/docker"
# Distributions with a containerd of their own start it in their own service.
_CONTAINERD_UNITS: Final = (
    "containerd.service",
    "k3s.service",
    "k3s-agent.service",
    "rke2-server.service",
    "rke2-agent.service",
)
_SOCKETS: Final = {"cri-o": ("/run/crio/crio.sock",), "containerd": ("/run/containerd/containerd.sock",)}


class ImageStore(NamedTuple):
    """Where a container runtime keeps images and writable layers."""

    runtime: str
    images: str
    containers: str
    """Writable layers; the same as `images` except for CRI-O with an imagestore."""


class Layout(NamedTuple):
    """The directory of each file system."""

    kind: DiskLayout
    nodefs: str
    store: ImageStore | None
    reason: str = ""
    """Why `kind` is UNKNOWN."""
    note: str = ""
    """A remark on the choice, for a reader of the report."""
    kubelet: str = ""
    """The kubelet's directory, whether it exists or not; empty: the configured one."""


def detect_layout(host: Host, config: SamplingConfig, statvfs: Statvfs) -> Layout:
    """The layout of now. Never raises."""
    kubelet = kubelet_directory(host, config)
    nodefs, remark = _nearest_directory(kubelet, statvfs)
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
    """`sampling.kubeletDir`; if that is the default, --root-dir of the running kubelet."""
    if config.kubelet_dir != SamplingConfig().kubelet_dir:
        return config.kubelet_dir
    arguments = processes.kubelet_command_line(host)
    return _path_flag(arguments, ("--root-dir",)) or config.kubelet_dir


def _path_flag(words: tuple[str, ...], flags: tuple[str, ...]) -> str | None:
    """The absolute path of the last of these flags (`--root-dir=/x`, `--root-dir /x`), or None."""
    found = None
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in flags:
            found = value if equals else words[index + 1] if index + 1 < len(words) else None
    return (found.rstrip("/") or "/") if found and found.startswith("/") else None


def _nearest_directory(kubelet: str, statvfs: Statvfs) -> tuple[str, str]:
    """(the directory whose file system is nodefs, a remark). Without the kubelet's directory it is the nearest parent,
    where a kubelet would make the directory."""
    path = kubelet
    while path != "/" and not _exists(path, statvfs):
        path = os.path.dirname(path)
    remark = "" if path == kubelet else f"{kubelet} does not exist: nodefs is the file system of its parent {path}"
    return path, remark


def _exists(path: str, statvfs: Statvfs) -> bool:
    """True if a directory exists. statvfs alone has a timeout; a dead mount exists, but does not answer."""
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
        paths = f"{_CONTAINERD_ROOT}, {_STORAGE_ROOT}, {_DOCKER_ROOT}"
        return None, f"no container runtime on this machine (no {paths}); set sampling.imageDir if there is one"
    if len(stores) == 1:
        return stores[0], ""
    running = [s for s in stores if any(host.exists(socket) for socket in _SOCKETS.get(s.runtime, ()))]
    best = (running or stores)[0]
    reason = "its socket exists" if running else "the first of them"
    names = ", ".join(f"{store.runtime} ({store.images})" for store in stores)
    return best, f"several container runtimes: {names}; using {best.runtime}, {reason}"


def _containerd(host: Host, statvfs: Statvfs) -> ImageStore | None:
    lines = (processes.service_command_line(host, unit, ("containerd",)) for unit in _CONTAINERD_UNITS)
    arguments = next(filter(None, lines), ())
    config = _path_flag(arguments, ("--config", "-config", "-c")) or _CONTAINERD_CONFIG
    root = _path_flag(arguments, ("--root", "-root")) or _configured(host, config, "", "root") or _CONTAINERD_ROOT
    if not _exists(root, statvfs):
        return None
    snapshots = f"{root}/io.containerd.snapshotter.v1.overlayfs"
    store = snapshots if _exists(snapshots, statvfs) else root
    return ImageStore("containerd", store, store)


def _crio(host: Host, statvfs: Statvfs) -> ImageStore | None:
    """CRI-O's own settings override those of containers/storage, later drop-ins override earlier ones."""
    root, images = None, None
    for path, section, root_key in (
        (_STORAGE_CONFIG, "storage", "graphroot"),
        (_CRIO_CONFIG, "crio", "root"),
        *((path, "crio", "root") for path in _dropins(host)),
    ):
        root = _configured(host, path, section, root_key) or root
        images = _configured(host, path, section, "imagestore") or images
    root = root or _STORAGE_ROOT
    if not _exists(root, statvfs):
        return None
    return ImageStore("cri-o", images or root, root)


def _docker(statvfs: Statvfs) -> ImageStore | None:
    return ImageStore("docker", _DOCKER_ROOT, _DOCKER_ROOT) if _exists(_DOCKER_ROOT, statvfs) else None


def _dropins(host: Host) -> list[str]:
    try:
        names = host.listdir(_CRIO_DROPINS)
    except Unreadable:
        return []
    return [f"{_CRIO_DROPINS}/{name}" for name in sorted(names)]


def _configured(host: Host, path: str, section: str, key: str) -> str | None:
    """An absolute path in a runtime's TOML file; None without such a file or key."""
    try:
        value = toml_string(host.text(path), section, key)
    except Unreadable:
        return None
    return value.rstrip("/") or "/" if value and value.startswith("/") else None


def toml_string(text: str, section: str, key: str) -> str | None:
    """The last value of `key = "string"` in `[section]` (empty: before the first section) of a TOML file, or None. The
    rest of TOML is not parsed: importing tomllib takes 12 ms, and a path needs no more."""
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
    """The three file systems, each with the reason if it is unknown."""

    nodefs: FileSystem | Unreadable
    imagefs: FileSystem | Unreadable
    containerfs: FileSystem | Unreadable
    layout: Layout
    read_at: float


def read_filesystems(layout: Layout, statvfs: Statvfs, *, now: float) -> Readings:
    """Reads each file system once. Never raises."""
    nodefs = _try(statvfs, layout.nodefs)
    store = layout.store
    if store is None:
        unknown = Unreadable("imagefs", 0, layout.reason)
        return Readings(nodefs, unknown, unknown, layout, now)
    imagefs = _try(statvfs, store.images)
    containerfs = imagefs if store.containers == store.images else _try(statvfs, store.containers)
    return Readings(nodefs, imagefs, containerfs, layout, now)


def _try(statvfs: Statvfs, path: str) -> FileSystem | Unreadable:
    try:
        return statvfs(path)
    except Unreadable as error:
        return error


def observe_bytes(signal: Signal, reading: FileSystem | Unreadable, path: str, now: float) -> Observation:
    """Free bytes for an ordinary user."""
    source = f"statvfs {path}"
    if isinstance(reading, Unreadable):
        return Observation(signal, None, None, now, source, str(reading))
    if not reading.capacity:
        return Observation(signal, None, None, now, source, "the file system reports no size", reading.device)
    return Observation(signal, reading.available, reading.capacity, now, source, device=reading.device)


def observe_inodes(signal: Signal, reading: FileSystem | Unreadable, path: str, now: float) -> Observation:
    """Free inodes; unknown if the file system has no fixed number of them (btrfs reports 0)."""
    source = f"statvfs {path}"
    if isinstance(reading, Unreadable):
        return Observation(signal, None, None, now, source, str(reading))
    if not reading.inodes:
        return Observation(signal, None, None, now, source, "the file system has no fixed inodes", reading.device)
    return Observation(signal, reading.inodes_free, reading.inodes, now, source, device=reading.device)
