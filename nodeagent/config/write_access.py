"""Find whether other users can change a file: the file itself, a directory on its path, or a symbolic link.

Theory of operation. The path is followed as the kernel follows it. The owner of a directory and every user with write
access decide which file has the next name in the path; the sticky bit protects the entries of other users. Root and the
agent's own user are always trusted. A read-only mount cannot be changed through this mount: a ConfigMap volume has mode
0777, but a container mounts it read-only. (Other mounts of the same file system are not examined.)
"""

import errno
import os
import stat
from typing import Final, NamedTuple

_MOST_LINKS: Final = 40
"""As the kernel (path_resolution(7))."""
_OTHERS: Final = 0o002
_GROUP: Final = 0o020
_ROOT: Final = 0


class WriteAccess(NamedTuple):
    """Write access of other users to the file at the end of a path."""

    path: str
    """The file or directory that grants it."""
    reason: str
    """`belongs to UID 1000`."""
    fix: str
    """A command that removes it."""


def find_write_access(path: str) -> WriteAccess | None:
    """The first component of the path that users other than root and the agent's own can change. None: there is none.
    Raises OSError if the path does not exist."""
    # Not abspath: it would drop a link together with the `..` behind it.
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
    """The access by which other users can replace this entry of the directory."""
    status = os.lstat(place)
    if not (status.st_mode & stat.S_ISVTX and _trusted(status.st_uid)):
        return _of(place, status)
    return None if _trusted(of_entry.st_uid) else _of(entry, of_entry, mount=place)


def _of(path: str, status: os.stat_result, *, mount: str = "") -> WriteAccess | None:
    """`mount` is the path for the read-only test, if `path` may be a link to another mount."""
    if _trusted(status.st_uid) and not status.st_mode & (_OTHERS | _GROUP):
        return None
    if os.statvfs(mount or path).f_flag & os.ST_RDONLY:
        return None
    if not _trusted(status.st_uid):
        return WriteAccess(path, f"belongs to UID {status.st_uid}", f"chown -h {os.geteuid()} {path}")
    mode = stat.S_IMODE(status.st_mode)
    if mode & _OTHERS:
        return WriteAccess(path, f"is writable for all users (mode {mode:04o})", f"chmod go-w {path}")
    if status.st_gid != _ROOT or _has_acl(path):
        return WriteAccess(path, f"is writable for group {status.st_gid} (mode {mode:04o})", f"chmod g-w {path}")
    return None


def _has_acl(path: str) -> bool:
    """With an access control list, the group's bits are the mask of all its entries (acl(5))."""
    try:
        return bool(os.getxattr(path, "system.posix_acl_access"))
    except OSError:
        return False


def _trusted(uid: int) -> bool:
    return uid in (_ROOT, os.geteuid())
