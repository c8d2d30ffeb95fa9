"""What a project quota says that a tree holds: to the byte, in microseconds, however many files there are.

A number is taken only where it is that of the tree, all of it and nothing else. That is known from this:

1. The tree's own directory has a project (not 0) and PROJINHERIT. The kernel then gives the project to all that is made
   below, and refuses to move or link in what has another one. A kubelet marks an emptyDir so while it is still empty,
   CRI-O (containers/storage) a layer's directory before its `diff` is made in it.
2. The directory above has another project, and no second tree of the node's pods has this one: so the project was not
   given to something larger. Of a layer it may be the directory that holds it, its `work` and a link included.
3. Nobody in the pod can give its files another project, or its own to another's files. In the host's user namespace a
   file's owner may, from any other one nobody may (`fileattr_set_prepare` of the kernel). So every process of the pod
   must be seen to be in one, which is also what a kubelet demands for its quotas since Kubernetes 1.31.

Everything else is walked: no quota on the mount, a pod in the host's user namespace, a kernel before 5.14
(`quotactl_fd`; `quotactl` wants the block device's file, which a container does not have), no CAP_SYS_ADMIN (which the
kernel wants for the quota of a project).
"""

import ctypes
import errno
import fcntl
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from nodeagent.sampling.disk.pod_paths import Kind, PodPath, open_place
from nodeagent.sampling.hostfs.host import Host, Unreadable
from nodeagent.sampling.hostfs.mounts import Mount

# FS_IOC_FSGETXATTR: _IOR('X', 31, struct fsxattr) as most architectures encode it; elsewhere it is no known request,
# and everything is walked. struct fsxattr: flags, extent size, extents, project, CoW extent size, padding.
_FSGETXATTR: Final = 2 << 30 | 28 << 16 | ord("X") << 8 | 31
_FSXATTR: Final = struct.Struct("=IIIII8x")
_PROJINHERIT: Final = 0x200
# One number on every architecture since Linux 5.14 (but alpha).
_QUOTACTL_FD: Final = 443
_GET_PROJECT: Final = 0x800007 << 8 | 2
"""QCMD(Q_GETQUOTA, PRJQUOTA); ext4 and xfs both answer it."""
# struct if_dqblk: limits of bytes, bytes, limits of inodes, inodes, two times, which of them are valid.
_DQBLK: Final = struct.Struct("=16xQ16xQ16xI4x")
_VALID: Final = 2 | 8
"""QIF_SPACE, QIF_INODES."""
_ENFORCED: Final = frozenset({"prjquota", "pquota", "pqnoenforce"})
_WHOLE_RANGE: Final = (0, 0, 0xFFFFFFFF)
"""The only line of uid_map in the host's user namespace."""
# Processes of a pod that are looked at, 10 us each: a pod with more is walked.
_PIDS: Final = 512


class Quota(NamedTuple):
    """What one project holds."""

    bytes: int
    """Delayed allocations and deleted files that are held open included."""
    inodes: int
    read_at: float
    """CLOCK_BOOTTIME."""


def quota_devices(mounts: Iterable[Mount]) -> frozenset[int]:
    """st_dev of the file systems that are mounted with project quotas."""
    return frozenset(mount.device for mount in mounts if _ENFORCED & set(mount.super_options.split(",")))


def read_quotas(
    host: Host, places: Iterable[PodPath], *, devices: frozenset[int], confined: Callable[[str], bool]
) -> dict[PodPath, Quota]:
    """The places that need no walk, because a quota tells what is in them. Never raises.

    `confined(uid)`: whether all of this pod's processes are in a user namespace of their own; asked only of pods that
    have a place with a project.
    """
    if not devices:
        return {}
    found: dict[PodPath, tuple[tuple[int, int], Quota]] = {}
    for place in places:
        if place.kind not in (Kind.VOLUME, Kind.LAYER):
            continue
        try:
            project = _project_of(host, place, devices)
            if project is not None and confined(place.uid):
                found[place] = project
        except (OSError, Unreadable):
            continue  # a walk will say what the matter is
    shared = Counter(project for project, _ in found.values())
    return {place: quota for place, (project, quota) in found.items() if shared[project] == 1}


def _project_of(host: Host, place: PodPath, devices: frozenset[int]) -> tuple[tuple[int, int], Quota] | None:
    """((device, project), its quota) of a tree that is whole under a project of its own; else None. Raises OSError,
    Unreadable."""
    fd = open_place(host, place)
    try:
        device = os.fstat(fd).st_dev
        project = _inherited_project(fd) if device in devices else 0
        if not project or not _begins_here(fd, device, project, levels=2 if place.kind is Kind.LAYER else 1):
            return None
        read_at = host.boottime()
        size, inodes = _usage(fd, project)
    finally:
        os.close(fd)
    return (device, project), Quota(size, inodes, read_at)


def _inherited_project(fd: int) -> int:
    """The project that a directory gives to what is made in it; 0 when it gives none."""
    flags, _, _, project, _ = _FSXATTR.unpack(fcntl.ioctl(fd, _FSGETXATTR, bytes(_FSXATTR.size)))
    return project if flags & _PROJINHERIT else 0


def _begins_here(fd: int, device: int, project: int, *, levels: int) -> bool:
    """Whether one of so many directories above a tree is not in its project any more. They are the kubelet's and the
    runtime's own, so that nobody moves them."""
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
    answer = ctypes.create_string_buffer(_DQBLK.size)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_QUOTACTL_FD, fd, _GET_PROJECT, project, answer):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    size, inodes, valid = _DQBLK.unpack(answer.raw)
    if valid & _VALID != _VALID:
        raise OSError(0, "the quota does not count")
    return size, inodes


def all_confined(host: Host, pids: list[int]) -> bool:
    """Whether all these processes are in a user namespace other than the host's, as their uid_map tells; false of none
    and of too many. One that has ended says nothing: the pod's first process lives as long as the pod."""
    if len(pids) > _PIDS:
        return False
    answers = [_confined(host, pid) for pid in pids]
    return True in answers and False not in answers


def _confined(host: Host, pid: int) -> bool | None:
    """None: it has ended."""
    try:
        lines = host.read(f"/proc/{pid}/uid_map").split(b"\n")
    except Unreadable as error:
        return None if error.errno in (errno.ENOENT, errno.ESRCH) else False
    maps = [tuple(int(word) for word in line.split()) for line in lines if line.strip()]
    return bool(maps) and _WHOLE_RANGE not in maps
