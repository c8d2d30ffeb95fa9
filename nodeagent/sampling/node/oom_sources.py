"""Where OOM kills are read: the node's counter, the cgroups' counters and the kernel log."""

from collections.abc import Mapping
from typing import NamedTuple

from nodeagent.model import OomTotals
from nodeagent.sampling.hostfs.host import Host
from nodeagent.sampling.node.kernel_log import KernelLog
from nodeagent.sampling.node.oom_counters import OomCgroups, OomKillCounter


class OomSources(NamedTuple):
    """The sources of one host."""

    counter: OomKillCounter
    cgroups: OomCgroups
    log: KernelLog

    def close(self) -> None:
        self.counter.close()
        self.log.close()


def open_sources(host: Host, totals: Mapping[str, OomTotals] | None = None) -> OomSources:
    """Open them. `totals`: the counters that an earlier process on this boot saw last."""
    return OomSources(OomKillCounter(host), OomCgroups(host, totals), KernelLog(host))
