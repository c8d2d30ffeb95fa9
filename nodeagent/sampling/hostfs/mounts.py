"""Mount tables: the lines of a mountinfo file (proc(5))."""

import os
from typing import NamedTuple


class Mount(NamedTuple):
    """One line of a mountinfo file."""

    device: int
    root: str
    point: str
    fstype: str
    source: str
    super_options: str


def parse_mounts(data: bytes) -> list[Mount]:
    """The mounts of a mountinfo file (proc(5)), in mount order. Malformed lines are left out."""
    mounts = []
    for line in data.decode("utf-8", "surrogateescape").split("\n"):
        left, found, right = line.partition(" - ")
        fields, tail = left.split(" "), right.split(" ")
        if not found or len(fields) < 6 or len(tail) < 2:
            continue
        major, _, minor = fields[2].partition(":")
        if not (major.isascii() and major.isdigit() and minor.isascii() and minor.isdigit()):
            continue
        if len(major) > 4 or len(minor) > 7:  # 12 and 20 bits
            continue
        mounts.append(
            Mount(
                device=os.makedev(int(major), int(minor)),
                root=_unescape(fields[3]),
                point=_unescape(fields[4]),
                fstype=tail[0],
                source=_unescape(tail[1]),
                super_options=tail[2] if len(tail) > 2 else "",
            )
        )
    return mounts


def covering_mount(mounts: list[Mount], path: str) -> Mount | None:
    """The mount that contains `path`: the longest mount point above it, the last of several mounts at one point. None
    if the table has none."""
    best: Mount | None = None
    for mount in mounts:
        point = mount.point
        covers = point == "/" or path == point or path.startswith(point + "/")
        if covers and (best is None or len(point) >= len(best.point)):
            best = mount
    return best


def _unescape(field: str) -> str:
    r"""Spaces, tabs, newlines and backslashes are `\040`, `\011`, `\012` and `\134` in mountinfo."""
    if "\\" not in field:
        return field
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, char)
    return field
