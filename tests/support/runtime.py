"""What an agent in this process works with, for tests and benchmarks of its loop."""

from typing import Any

from nodeagent.actuators.brakes import Holds
from nodeagent.actuators.reclaim_runner import Hooks
from nodeagent.config.config_file import ConfigFile
from nodeagent.loop.components import Means
from nodeagent.runtime.sd_notify import Silent
from nodeagent.sampling.events.fork_meter import NoForks
from nodeagent.sampling.events.wakeup_sources import Alarms
from nodeagent.sampling.hostfs.host import Host


def bare_means(host: Host, *, file: ConfigFile, alarms: Alarms, holds: Holds, log: Any) -> Means:
    """The means of an agent that keeps no state, records nothing and knows of no neighbours."""
    return Means(
        file=file,
        alarms=alarms,
        holds=holds,
        hooks=Hooks(boottime=host.boottime),
        forks=NoForks(),
        neighbours=tuple,
        store=None,
        recorder=None,
        found=(),
        log=log,
        lines_dropped=lambda: 0,
        notifier=Silent(),
        boottime=host.boottime,
    )
