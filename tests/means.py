"""What an agent in this process works with, for tests and benchmarks of its loop."""

from typing import Any

from nodeagent.config.watch import ConfigFile
from nodeagent.host.holds import Holds
from nodeagent.host.hooks import Hooks
from nodeagent.host.notify import Silent
from nodeagent.parts import Means
from nodeagent.sampling.alarms import Alarms
from nodeagent.sampling.forks import NoForks
from nodeagent.sampling.host import Host


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
