"""The runtime of an agent in this process, for tests and benchmarks of its loop."""

from typing import Any

from nodeagent.actuators.brakes import ActiveBrakes
from nodeagent.actuators.oom_scores import OomScores
from nodeagent.actuators.reclaim_runner import ReclaimRunner
from nodeagent.config.config_file import ConfigFile
from nodeagent.loop.components import Runtime
from nodeagent.loop.kubelet_watch import KubeletWatch
from nodeagent.loop.node_profiles import NodeProfiles
from nodeagent.runtime.sd_notify import NullNotifier
from nodeagent.sampling.events.fork_meter import NoForks
from nodeagent.sampling.events.wakeup_sources import WakeupSources
from nodeagent.sampling.hostfs.host import Host
from nodeagent.sampling.node import oom_sources


def bare_runtime(host: Host, *, file: ConfigFile, brakes: ActiveBrakes, log: Any) -> Runtime:
    """The runtime of an agent that stores and records nothing."""
    return Runtime(
        file=file,
        wakeup_sources=WakeupSources(host),
        brakes=brakes,
        oom_scores=OomScores(host),
        reclaim_runner=ReclaimRunner(boottime=host.boottime),
        hook_runner=ReclaimRunner(boottime=host.boottime, kind="hook"),
        forks=NoForks(),
        other_oom_handlers=tuple,
        zombies=lambda: None,
        count_zombies_soon=lambda: None,
        kubelet=KubeletWatch(host, configz=str),
        profiles=NodeProfiles("n", None),
        store=None,
        recorder=None,
        oom_sources=oom_sources.open_sources(host),
        startup_notes=(),
        log=log,
        lines_dropped=lambda: 0,
        notifier=NullNotifier(),
        boottime=host.boottime,
    )
