"""Scans the processes of the host in a thread of its own: zombies each minute, and other programs that kill each five.

Both read a file for each process, so they share the thread and, where they read the same, the kernel's cache.
"""

import threading
import time
from collections.abc import Callable
from typing import Final

from nodeagent.actuators.session import Session
from nodeagent.config.schema import Config
from nodeagent.loop import observe
from nodeagent.loop.kubelet_watch import KubeletWatch
from nodeagent.model import Note, ZombieCount
from nodeagent.runtime.periodic import Periodic
from nodeagent.sampling.hostfs import cgroups
from nodeagent.sampling.hostfs.host import Host
from nodeagent.sampling.node import other_oom_handlers, zombie_holders, zombies
from nodeagent.sampling.node.zombies import ZombieCounter, Zombies

OOM_HANDLERS_EVERY_S: Final = 300.0
"""How often other programs that kill on this node are searched: a walk of /proc, 1.2 ms of CPU."""
_POLL_S: Final = 0.1


class ProcessScan:
    """The newest results of both; any thread may read them."""

    def __init__(self, host: Host, config: Config, *, session: Callable[[], Session], kubelet: KubeletWatch) -> None:
        """`session`: the newest one, of which a reload makes another."""
        self._host = host
        self._config = config
        self._session = session
        self._kubelet = kubelet
        self._zombies = ZombieCounter(host)
        self._named: tuple[Zombies | None, ZombieCount | None] = (None, None)
        """The last count whose holders were named, and the result."""
        self._handlers_due_at = float("-inf")
        none: tuple[Note, ...] = ()
        self._handlers = none
        self._periodic: Periodic[None] | None = None

    def start(self) -> None:
        """Start the thread."""
        self._periodic = Periodic(self._step, first=None, every_s=zombies.EVERY_S, name="process-scan")

    def other_oom_handlers(self) -> tuple[Note, ...]:
        """Notes on other programs that kill on this node; empty until they were searched."""
        return self._handlers

    def zombies(self) -> ZombieCount | None:
        """The newest count; None while they are not counted."""
        counted, named = self._named
        return named if counted is not None and counted is self._zombies.latest else None

    def count_zombies_soon(self) -> None:
        """PIDs are short: count now, unless that was done within `zombies.SHORT_S`."""
        if self._periodic is not None and self._zombies.due_soon():
            self._periodic.call_soon()

    def close(self) -> None:
        """Begin no further scan. Does not wait for a running one."""
        if self._periodic is not None:
            self._periodic.close()

    def _step(self) -> None:
        self._zombies.step()
        counted = self._zombies.latest
        if counted is not None and counted is not self._named[0]:
            self._named = (counted, zombie_holders.name_holders(self._host, counted))
        now = time.monotonic()
        if now >= self._handlers_due_at:
            self._handlers_due_at = now + OOM_HANDLERS_EVERY_S - zombies.EVERY_S / 2
            self._handlers = self._find_oom_handlers()

    def _find_oom_handlers(self) -> tuple[Note, ...]:
        """Waits a short time for the API server to list the pods without hostPID, whose processes cannot see others."""
        session, config, host = self._session(), self._config, self._host
        pause, until = threading.Event(), time.monotonic() + observe.STARTUP_API_WAIT_S
        while (view := session.pods()).awaited and view.synced_at is None and time.monotonic() < until:
            pause.wait(_POLL_S)
        harmless = frozenset(pod.mirror_of or pod.uid for pod in view.pods if not pod.host_pid)
        found, _ = cgroups.find_kubepods(host, cgroups.detect_hierarchy(host), cgroup_root=config.sampling.cgroup_root)
        seen = self._kubelet.latest.kubelet
        thresholds, unread = (seen.thresholds, seen.unread) if seen is not None else (None, "")
        return other_oom_handlers.find_handlers(
            host, kubepods=found.path if found else "", kubelet=thresholds, kubelet_unread=unread, isolated=harmless
        )
