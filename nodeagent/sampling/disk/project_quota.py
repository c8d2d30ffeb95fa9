"""Reads the usage of a tree from its project quota: exact to the byte, in microseconds, for any number of files.

A quota is used only if its project covers the whole tree and nothing else. Three conditions ensure that:

1. The root of the tree has a project (not 0) and PROJINHERIT. The kernel then gives the project to every new entry, and
   refuses to move or link an entry of another project into the tree. The kubelet sets both on an emptyDir while it is
   empty; CRI-O (containers/storage) sets both on a layer's directory before it creates `diff` in it.
2. The directory above has another project, and no other tree of the node's pods has the same one. So the project does
   not cover a larger tree. For a layer the root may be the directory above, which also contains `work` and a link.
3. No process of the pod can change the project of a file. In the host's user namespace the owner of a file can change
   it, in every other namespace no process can (`fileattr_set_prepare` in the kernel). So every process of the pod must
   be in a user namespace of its own, which the kubelet also requires for its quotas since Kubernetes 1.31.

Every other tree is walked: no quota on the mount, a pod in the host's user namespace, a kernel before 5.14 (without
`quotactl_fd`; `quotactl` needs the file of the block device, which a container does not have), or no CAP_SYS_ADMIN
(which the kernel requires for project quotas).
"""

import ctypes
import errno
import fcntl
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from nodeagent.sampling.disk import pod_paths
from nodeagent.sampling.disk.pod_paths import Kind, PodPath
from nodeagent.sampling.hostfs import parse
from nodeagent.sampling.hostfs.host import Host, Unreadable
from nodeagent.sampling.hostfs.mounts import Mount

# FS_IOC_FSGETXATTR: _IOR('X', 31, struct fsxattr) as most architectures encode it; on others the request fails, and
# the tree is walked. struct fsxattr: flags, extent size, extents, project, CoW extent size, padding.
_FSGETXATTR: Final = 2 << 30 | 28 << 16 | ord("X") << 8 | 31
_FSXATTR: Final = struct.Struct("=IIIII8x")
_PROJINHERIT: Final = 0x200
# The same number on every architecture since Linux 5.14, except alpha.
_QUOTACTL_FD: Final = 443
_GET_PROJECT: Final = 0x800007 << 8 | 2
"""QCMD(Q_GETQUOTA, PRJQUOTA); ext4 and xfs both support it."""
# struct if_dqblk: limits of bytes, bytes, limits of inodes, inodes, two times, flags of valid fields.
_DQBLK: Final = struct.Struct("=16xQ16xQ16xI4x")
_VALID: Final = 2 | 8
"""QIF_SPACE, QIF_INODES."""
_ENFORCED: Final = frozenset({"prjquota", "pquota", "pqnoenforce"})
_WHOLE_RANGE: Final = (0, 0, 0xFFFFFFFF)
"""The only line of uid_map in the host's user namespace."""
_MAX_PIDS: Final = 512
"""Processes read for one pod, 10 us each: a pod with more is walked."""


class Quota(NamedTuple):
    """The usage of one project."""

    bytes: int
    """Includes delayed allocations and deleted files that are still open."""
    inodes: int
    read_at: float
    """CLOCK_BOOTTIME."""


def quota_devices(mounts: Iterable[Mount]) -> frozenset[int]:
    """st_dev of every file system mounted with project quotas."""
    return frozenset(mount.device for mount in mounts if _ENFORCED & set(mount.super_options.split(",")))


def read_quotas(
    host: Host, paths: Iterable[PodPath], *, devices: frozenset[int], confined: Callable[[str], bool]
) -> dict[PodPath, Quota]:
    """The paths that need no walk, with their quotas. Never raises.

    `confined(uid)` is True if all processes of the pod are in a user namespace of their own. It is called only for a
    pod that has a path with a project.
    """
    if not devices:
        return {}
    found: dict[PodPath, tuple[tuple[int, int], Quota]] = {}
    for path in paths:
        if path.kind not in (Kind.VOLUME, Kind.LAYER):
            continue
        try:
            project = _project_of(host, path, devices)
            if project is not None and confined(path.uid):
                found[path] = project
        except (OSError, Unreadable):
            continue  # the walk reports the error
    shared = Counter(project for project, _ in found.values())
    return {path: quota for path, (project, quota) in found.items() if shared[project] == 1}


def _project_of(host: Host, path: PodPath, devices: frozenset[int]) -> tuple[tuple[int, int], Quota] | None:
    """((device, project), quota) of a tree that its project covers; None for every other tree. Raises OSError and
    Unreadable."""
    fd = pod_paths.open_path(host, path)
    try:
        device = os.fstat(fd).st_dev
        project = _inherited_project(fd) if device in devices else 0
        if not project or not _begins_here(fd, device, project, levels=2 if path.kind is Kind.LAYER else 1):
            return None
        read_at = host.boottime()
        size, inodes = _usage(fd, project)
    finally:
        os.close(fd)
    return (device, project), Quota(size, inodes, read_at)


def _inherited_project(fd: int) -> int:
    """The project that a directory gives to new entries; 0 if none."""
    flags, _, _, project, _ = _FSXATTR.unpack(fcntl.ioctl(fd, _FSGETXATTR, bytes(_FSXATTR.size)))
    return project if flags & _PROJINHERIT else 0


def _begins_here(fd: int, device: int, project: int, *, levels: int) -> bool:
    """True if one of the next `levels` directories above a tree has another project. These directories belong to the
    kubelet and the container runtime, which do not move them."""
    above = os.dup(fd)
    try:
        for _ in range(levels):
            up = os.open("..", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=above)
            os.close(above)
            above = up
            if os.fstat(above).st_dev != device or _inherited_project(above) != project:
                return True
    finally:
        os.close(above)
    return False


def _usage(fd: int, project: int) -> tuple[int, int]:
    """(bytes, inodes) of a project on the file system of this descriptor. Raises OSError."""
    block = ctypes.create_string_buffer(_DQBLK.size)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_QUOTACTL_FD, fd, _GET_PROJECT, project, block):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    size, inodes, valid = _DQBLK.unpack(block.raw)
    if valid & _VALID != _VALID:
        raise OSError(0, "the quota has no usage")
    return size, inodes


def all_confined(host: Host, pids: list[int]) -> bool:
    """True if all these processes are in a user namespace other than the host's, according to their uid_map. False for
    no process and for more than `_MAX_PIDS`. A process that has ended is ignored: the pod's first one lives as long as
    the pod."""
    if len(pids) > _MAX_PIDS:
        return False
    states = [_confined(host, pid) for pid in pids]
    return True in states and False not in states


def _confined(host: Host, pid: int) -> bool | None:
    """None if the process has ended."""
    try:
        lines = host.read(f"/proc/{pid}/uid_map").split(b"\n")
    except Unreadable as error:
        return None if error.errno in (errno.ENOENT, errno.ESRCH) else False
    maps = [tuple(map(parse.parse_count, line.split())) for line in lines if line.strip()]
    return bool(maps) and all(len(each) == 3 and None not in each for each in maps) and _WHOLE_RANGE not in maps
