"""The name of the host below a root, as the kubelet uses it."""

import os
from typing import Final

from nodeagent.sampling.hostfs.host import Host, Unreadable

_FILES: Final = ("/proc/sys/kernel/hostname", "/etc/hostname")


def host_name(host: Host) -> str:
    """The host's name in lower case, or `unknown`."""
    if host.root == "/":
        return os.uname().nodename.lower()
    if host.recorded:
        return _recorded_name(host)
    for path in _FILES:
        try:
            name = host.read(path).decode("ascii", "replace").strip().lower()
        except Unreadable:
            continue
        if name:
            return name
    return "unknown"


def _recorded_name(host: Host) -> str:
    import json

    try:
        return str(json.loads(host.read("/listing/capture.json"))["uname"][1]).lower()
    except (Unreadable, ValueError, KeyError, IndexError, TypeError):
        return "unknown"
