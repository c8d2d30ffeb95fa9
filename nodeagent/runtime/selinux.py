"""Detects that SELinux keeps a container from the host's directories: that looks like a node without pods' files."""

import os
from collections.abc import Iterable
from typing import Final

from nodeagent.model import Note, NoteKind

CONFINED: Final = frozenset({"container_t", "svirt_lxc_net_t"})
"""Types of containers without `seLinuxOptions`: container-selinux, and its name before 2017."""
UNCONFINED: Final = "spc_t"
"""The type for containers that manage the host (container-selinux)."""


def confinement(directories: Iterable[str], *, attribute: str = "/proc/self/attr/current") -> tuple[Note, ...]:
    """A note if this process has the type of an ordinary container and may not open one of these directories, which
    belong to root."""
    own = _own_type(attribute)
    denied = next((each for each in directories if _is_denied(each)), None) if own in CONFINED else None
    if denied is None:
        return ()
    message = (
        f"SELinux runs the agent as {own}, which may not read {denied}: set `seLinuxOptions: {{type: {UNCONFINED}}}` "
        "(examples/daemonset-selinux.yaml)"
    )
    return (Note(NoteKind.SELF_PROTECTION, message),)


def _own_type(attribute: str) -> str:
    """The type in `user:role:type:level`; empty without SELinux."""
    try:
        with open(attribute, encoding="ascii", errors="replace") as file:
            fields = file.read(4096).strip("\n\0").split(":")
    except OSError:
        return ""
    return fields[2] if len(fields) > 2 else ""


def _is_denied(directory: str) -> bool:
    try:
        os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    except PermissionError:
        return True
    except OSError:
        return False
    return False
