"""Who else may change a file that the agent obeys: by the file itself, its directories, or the links on the way to it.

Theory of operation. The path is followed as the kernel follows it. Whoever owns a directory, or may write it, decides
what stands there under the next name; the sticky bit leaves others' entries alone. Root and the agent's own user may do
anything anyway. A directory or file on a read-only mount cannot be changed by whoever sees that mount: a ConfigMap
volume has mode 0777, and so may its files, but a container has it read-only. (What else mounts it is not seen here.)
"""

import errno
import os
import stat
from typing import Final, NamedTuple

_MOST_LINKS: Final = 40
"""As the kernel (path_resolution(7))."""
_EVERYBODY: Final = 0o002
_GROUP: Final = 0o020
_ROOT: Final = 0


class WriteAccess(NamedTuple):
    """Others may change what a path leads to."""

    path: str
    """The file or directory that lets them."""
    reason: str
    """`belongs to UID 1000`."""
    mend: str
    """A command that ends it."""


def find(path: str) -> WriteAccess | None:
    """The first on the way that lets others than root and our own user change what this path leads to. None: nobody
    else may. Raises OSError when the path leads nowhere."""
    # Not abspath: `..` behind a link is not what it drops.
    place, rest = "/", _parts(path if path.startswith("/") else os.path.join(os.getcwd(), path))
    links = 0
    while rest:
        name = rest.pop(0)
        if name == "..":
            place = os.path.dirname(place)
            continue
        entry = os.path.join(place, name)
        status = os.lstat(entry)
        if (found := _of_directory(place, entry, status)) is not None:
            return found
        if not stat.S_ISLNK(status.st_mode):
            place = entry
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        target = os.readlink(entry)
        rest = _parts(target) + rest
        place = "/" if target.startswith("/") else place
    return _of(place, os.lstat(place))


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _of_directory(place: str, entry: str, of_entry: os.stat_result) -> WriteAccess | None:
    """Whether others may put something else in place of this entry of the directory."""
    status = os.lstat(place)
    if not (status.st_mode & stat.S_ISVTX and _trusted(status.st_uid)):
        return _of(place, status)
    return None if _trusted(of_entry.st_uid) else _of(entry, of_entry, mount=place)


def _of(path: str, status: os.stat_result, *, mount: str = "") -> WriteAccess | None:
    """`mount` is asked whether it is read-only in place of what may be a link to another one."""
    if _trusted(status.st_uid) and not status.st_mode & (_EVERYBODY | _GROUP):
        return None
    if os.statvfs(mount or path).f_flag & os.ST_RDONLY:
        return None
    if not _trusted(status.st_uid):
        return WriteAccess(path, f"belongs to UID {status.st_uid}", f"chown -h {os.geteuid()} {path}")
    mode = stat.S_IMODE(status.st_mode)
    if mode & _EVERYBODY:
        return WriteAccess(path, f"can be written by everybody (mode {mode:04o})", f"chmod go-w {path}")
    if status.st_gid != _ROOT or _has_acl(path):
        return WriteAccess(path, f"can be written by group {status.st_gid} (mode {mode:04o})", f"chmod g-w {path}")
    return None


def _has_acl(path: str) -> bool:
    """With an access control list the group's bits are those of everybody who is named in it (acl(5))."""
    try:
        return bool(os.getxattr(path, "system.posix_acl_access"))
    except OSError:
        return False


def _trusted(uid: int) -> bool:
    return uid in (_ROOT, os.geteuid())
