"""The names of pods and containers, as the log directories on the host give them."""

import os
from typing import Final, NamedTuple

from nodeagent.sampling.hostfs import cgroups
from nodeagent.sampling.hostfs.host import Host, Unreadable

# How often the directories are listed again while a name is missing. Listing those of 110 pods takes some 0.1 ms.
_RETRY_S: Final = 10.0


class PodName(NamedTuple):
    """A pod's namespace and name, from its log directory."""

    namespace: str
    name: str


def parse_log_directory(name: str) -> tuple[str, PodName] | None:
    """(UID, name) of `<namespace>_<name>_<uid>`; None for any other directory. None of the three parts can contain an
    underscore; the name may contain dots."""
    parts = name.split("_")
    if len(parts) != 3 or not all(parts):
        return None
    return parts[2], PodName(parts[0], parts[1])


def parse_log_link(name: str) -> tuple[str, str] | None:
    """(container id, container name) of `<pod>_<namespace>_<container>-<id>.log` in /var/log/containers; None for any
    other name."""
    if not name.endswith(".log") or name.count("_") != 2:
        return None
    container, dash, identity = name.removesuffix(".log").rpartition("_")[2].rpartition("-")
    return (identity, container) if dash and container and cgroups.container_id(identity) else None


class PodNames:
    """The names on one host, listed again only if there are other pods or a name is missing."""

    def __init__(self, host: Host, *, pod_logs_dir: str) -> None:
        self._host = host
        self._pods_dir = pod_logs_dir
        self._links_dir = f"{os.path.dirname(pod_logs_dir.rstrip('/'))}/containers"
        self.pods: dict[str, PodName] = {}
        """By the UID in the cgroup's name."""
        self.containers: dict[str, str] = {}
        """By container id."""
        self.reason = ""
        """Why there are no names of pods; empty if there are."""
        self.container_unnamed = False
        """Set by the caller: some container of the last sample has no name."""
        self._pod_unnamed = False
        self._listed_for: frozenset[str] | None = None
        self._listed_at = 0.0

    def refresh(self, uids: frozenset[str], *, now: float) -> None:
        """List the directories again if these are other pods than before, or `_RETRY_S` after a listing that lacked a
        name."""
        unchanged = uids is self._listed_for or uids == self._listed_for
        incomplete = self._pod_unnamed or self.container_unnamed
        if unchanged and (not incomplete or now - self._listed_at < _RETRY_S):
            return
        self._listed_for, self._listed_at, self.container_unnamed = uids, now, False
        try:
            self.pods = dict(filter(None, map(parse_log_directory, self._host.listdir(self._pods_dir))))
            self.reason = ""
        except Unreadable as error:
            self.pods, self.reason = {}, str(error)
        self._pod_unnamed = not uids <= self.pods.keys()
        try:
            self.containers = dict(filter(None, map(parse_log_link, self._host.listdir(self._links_dir))))
        except Unreadable:
            self.containers = {}  # the kubelet may not make these links; a container then has its id alone
